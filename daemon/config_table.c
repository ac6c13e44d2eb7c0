#include "daemon/config_table.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define AT(member) KVK_OPTION_AT(struct kvk_config, member)

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)
#define TIB (GIB * 1024)
#define SECOND UINT64_C(1000)
#define HOUR (SECOND * 3600)

static const struct kvk_option_field server_fields[] = {
    {.name = "unix_path",
     .kind = KVK_OPTION_TEXT,
     AT(unix_path),
     .fallback = "",
     .maximum = KVK_PATH_SIZE - 1 - KVK_SOCKET_SUFFIX_SIZE,
     .help = "The unix socket. Empty: kvkeep.sock in $XDG_RUNTIME_DIR, else in /run/kvkeep, else "
             "in /tmp: the first of these folders that may be written. A lock file and the side "
             "socket lie beside it."},
    {.name = "unix_mode",
     .kind = KVK_OPTION_MODE,
     AT(unix_mode),
     .fallback = "0600",
     .maximum = 0777,
     .help = "Permissions of both sockets: who may connect at all. Credentials say who may act."},
    {.name = "side_path",
     .kind = KVK_OPTION_TEXT,
     AT(side_path),
     .fallback = "",
     .help = "The side socket, which passes memory to workers. Empty: unix_path with .side behind "
             "it."},
    {.name = "tcp_address",
     .kind = KVK_OPTION_TEXT,
     AT(tcp_address),
     .fallback = "",
     .help = "HOST:PORT or [HOST]:PORT to serve on as well. Empty: the unix socket only. Needs "
             "credentials with tokens or certificates, or insecure = yes; and TLS, a loopback "
             "address, or tokens_in_clear = yes."},
    {.name = "tokens_in_clear",
     .kind = KVK_OPTION_BOOL,
     AT(tokens_in_clear),
     .fallback = "no",
     .help =
         "Take tokens over TCP without TLS at an address that is not loopback: whoever sees the "
         "packets can act for those tenants and reads their data. For networks that are "
         "encrypted below."},
    {.name = "insecure",
     .kind = KVK_OPTION_BOOL,
     AT(tcp_insecure),
     .fallback = "no",
     .help = "Serve TCP without credentials: whoever reaches the port acts for the tenant default. "
             "For closed networks and trials only."},
    {.name = "message_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(message_bytes),
     .fallback = "64 MiB",
     .minimum = 64 * KIB,
     .maximum = GIB,
     .help = "The largest message that is received."},
    {.name = "connections",
     .kind = KVK_OPTION_COUNT,
     AT(connections),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Connections at a time over all sockets, and as many side connections."},
    {.name = "live_calls",
     .kind = KVK_OPTION_COUNT,
     AT(live_calls),
     .fallback = "8192",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Calls under way at a time, streams of sessions included; more are refused at once."},
    {.name = "tenant_calls",
     .kind = KVK_OPTION_COUNT,
     AT(tenant_calls),
     .fallback = "2048",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Of them, those that one tenant may have under way or waiting at a time, streams of "
             "sessions apart. More are refused with a time to try again, so that one tenant's "
             "flood leaves room for the calls of others."},
    {.name = "auth_failures",
     .kind = KVK_OPTION_COUNT,
     AT(auth_failures),
     .fallback = "20",
     .maximum = 1000000,
     .help = "Failed attempts to say who one is that one address (of IPv6, one /64) or uid has in "
             "hand; after them it is refused with a time to try again. Certificates, uids and the "
             "tokens that kvkeep makes itself are let in all the same, since they are not guessed: "
             "nobody can lock out who holds one. 0: no limit."},
    {.name = "auth_failure_ms",
     .kind = KVK_OPTION_DURATION,
     AT(auth_failure_ms),
     .fallback = "1 s",
     .minimum = 1,
     .maximum = HOUR,
     .help = "How long until it has one attempt more."},
    {.name = "bulk_threads",
     .kind = KVK_OPTION_COUNT,
     AT(bulk_threads),
     .fallback = "4",
     .minimum = 1,
     .maximum = 64,
     .help = "Threads for calls that may wait: copies, attention, room to be made."},
    {.name = "tenant_bulk_threads",
     .kind = KVK_OPTION_COUNT,
     AT(tenant_bulk_threads),
     .fallback = "3",
     .minimum = 1,
     .maximum = 64,
     .help = "Of them, those that one tenant's calls may take at a time; what is left serves the "
             "others at once. As many as bulk_threads or more: all, for a daemon of one tenant."},
    {.name = "tenant_share_percent",
     .kind = KVK_OPTION_COUNT,
     AT(tenant_share_percent),
     .fallback = "50",
     .minimum = 1,
     .maximum = 100,
     .help = "Of the look-up thread's time, reading its messages included, that one tenant's calls "
             "take while those of others come in, too: so that these find it free. Who is alone "
             "has all of it. 100: nobody is held back."},
    {.name = "spin_us",
     .kind = KVK_OPTION_COUNT,
     AT(spin_us),
     .fallback = "0",
     .maximum = 1000000,
     .help = "Microseconds that the look-up thread polls for the next call before it sleeps. Costs "
             "a processor, saves its waking up."},
    {.name = "keepalive_ms",
     .kind = KVK_OPTION_DURATION,
     AT(keepalive_ms),
     .fallback = "20 s",
     .minimum = SECOND,
     .maximum = HOUR,
     .help = "How often a silent connection is asked whether it still lives."},
    {.name = "keepalive_timeout_ms",
     .kind = KVK_OPTION_DURATION,
     AT(keepalive_timeout_ms),
     .fallback = "5 s",
     .minimum = 100,
     .maximum = HOUR,
     .help = "How long it may take to answer; then it counts as lost."},
    {.name = "drain_ms",
     .kind = KVK_OPTION_DURATION,
     AT(drain_ms),
     .fallback = "5 s",
     .maximum = HOUR,
     .help = "After SIGTERM: time that calls under way get to end by themselves."},
};

static const char *const client_certificates[] = {"no", "request", "require", NULL};
_Static_assert(KVK_CLIENT_CERTIFICATES_NO == 0 && KVK_CLIENT_CERTIFICATES_REQUEST == 1 &&
                   KVK_CLIENT_CERTIFICATES_REQUIRE == 2,
               "the order of the words");

static const struct kvk_option_field tls_fields[] = {
    {.name = "certificate",
     .kind = KVK_OPTION_TEXT,
     AT(tls_certificate),
     .fallback = "",
     .help =
         "The daemon's certificate and those between it and a root, a PEM file. With it, TCP is "
         "TLS. Read again on SIGHUP: new connections get what then lies there."},
    {.name = "key",
     .kind = KVK_OPTION_TEXT,
     AT(tls_key),
     .fallback = "",
     .help = "Its private key, a PEM file without a pass phrase."},
    {.name = "client_ca",
     .kind = KVK_OPTION_TEXT,
     AT(tls_client_ca),
     .fallback = "",
     .help = "Roots that clients' certificates must come from, a PEM file. Whoever they certify as "
             "a name is the credential with that name as its certificate: use a private one."},
    {.name = "client_certificates",
     .kind = KVK_OPTION_CHOICE,
     AT(tls_client_certificates),
     .fallback = "no",
     .choices = client_certificates,
     .help =
         "no: clients show none. request: they may, in place of a token. require: no connection "
         "without one. One that is shown must be valid."},
};

static const char *const http_opens[] = {"none", "metrics", "all", NULL};

static const struct kvk_option_field http_fields[] = {
    {.name = "address",
     .kind = KVK_OPTION_TEXT,
     AT(http_address),
     .fallback = "",
     .help = "HOST:PORT or [HOST]:PORT, such as 127.0.0.1:9480. Empty: none. There is no TLS here: "
             "for other machines put a proxy before it."},
    {.name = "open",
     .kind = KVK_OPTION_CHOICE,
     AT(http_open),
     .fallback = "metrics",
     .choices = http_opens,
     .help = "Who is answered without an admin's token. none: nobody; metrics: /metrics and "
             "/health; all: everything, for loopback addresses only."},
};

static const char *const events_encodings[] = {"maps", "arrays", NULL};

static const struct kvk_option_field events_fields[] = {
    {.name = "log_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(events_log_bytes),
     .fallback = "0",
     .maximum = 64 * GIB,
     .help = "Memory for the newest events; who falls further behind starts again with a snapshot. "
             "0: there are no events. Prompts' tokens are in them."},
    {.name = "watchers",
     .kind = KVK_OPTION_COUNT,
     AT(events_watchers),
     .fallback = "16",
     .minimum = 1,
     .maximum = 1024,
     .help = "Streams of WatchBlocks at a time."},
    {.name = "publish",
     .kind = KVK_OPTION_TEXT,
     AT(events_publish),
     .fallback = "",
     .help = "A ZeroMQ endpoint where events are published as vLLM publishes its own: "
             "tcp://ADDRESS:PORT or ipc://PATH. Empty: none. ZeroMQ asks nobody for a credential: "
             "whoever can connect reads the tokens of all tenants."},
    {.name = "replay",
     .kind = KVK_OPTION_TEXT,
     AT(events_replay),
     .fallback = "",
     .help = "Another endpoint, where subscribers ask for what they missed. Empty: none."},
    {.name = "replay_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(events_replay_bytes),
     .fallback = "64 MiB",
     .minimum = 64 * KIB,
     .maximum = 64 * GIB,
     .help = "Published messages that are kept for it, all topics together."},
    {.name = "encoding",
     .kind = KVK_OPTION_CHOICE,
     AT(events_encoding),
     .fallback = "maps",
     .choices = events_encodings,
     .help = "How each event is packed. maps: by the names of its fields, as vLLM does now; "
             "arrays: by position, as older ones did."},
    {.name = "batch_ms",
     .kind = KVK_OPTION_DURATION,
     AT(events_batch_ms),
     .fallback = "20 ms",
     .minimum = 1,
     .maximum = 1000,
     .help = "Events wait so long at most, so that many go in one message."},
    {.name = "remote",
     .kind = KVK_OPTION_BOOL,
     AT(events_remote),
     .fallback = "no",
     .help = "Allow endpoints that other machines reach. For networks that are closed."},
};

static const struct kvk_option_field process_fields[] = {
    {.name = "user",
     .kind = KVK_OPTION_TEXT,
     AT(user),
     .fallback = "",
     .help = "Become this user where started as root, before any file or socket is made. Empty: "
             "stay who started it. Either way every capability is given up."},
    {.name = "group",
     .kind = KVK_OPTION_TEXT,
     AT(group),
     .fallback = "",
     .help = "The group with it. Empty: the user's own."},
    {.name = "core_dumps",
     .kind = KVK_OPTION_BOOL,
     AT(core_dumps),
     .fallback = "no",
     .help = "Let the kernel write a core when the daemon crashes, and let its user trace it. A "
             "core has no slot of a block in it, but prompts, and K/V of messages under way, may "
             "be."},
    {.name = "seccomp",
     .kind = KVK_OPTION_BOOL,
     AT(seccomp),
     .fallback = "yes",
     .help = "Refuse system calls that kvkeepd never makes (tracing, mounting, modules, keys, name "
             "spaces), where the kernel can."},
};

static const struct kvk_option_field tiers_fields[] = {
    {.name = "device_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(device_bytes),
     .fallback = "1 GiB",
     .maximum = 64 * TIB,
     .help = "Budget of the device tier. 0: none, sequences live in the host tier."},
    {.name = "host_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(host_bytes),
     .fallback = "4 GiB",
     .maximum = 64 * TIB,
     .help = "Budget of the host tier. 0: none, nothing can be swapped out. Not both 0."},
    {.name = "device_free_percent",
     .kind = KVK_OPTION_COUNT,
     AT(device_free_percent),
     .fallback = "5",
     .maximum = 50,
     .help = "Share of the device tier that is kept free, or clean with a copy on the host, ahead "
             "of need. 0: copy only when room is wanted."},
    {.name = "copy_threads",
     .kind = KVK_OPTION_COUNT,
     AT(copy_threads),
     .fallback = "2",
     .minimum = 1,
     .maximum = 64,
     .help = "Threads that move blocks between tiers."},
    {.name = "attend_threads",
     .kind = KVK_OPTION_COUNT,
     AT(attend_threads),
     .fallback = "0",
     .maximum = 256,
     .help = "Threads that attend on the CPU. 0: as many as processors."},
    {.name = "copy_queue",
     .kind = KVK_OPTION_COUNT,
     AT(copy_queue),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Copy jobs that may wait or run; more are refused."},
    {.name = "overcommit",
     .kind = KVK_OPTION_BOOL,
     AT(overcommit),
     .fallback = "no",
     .help = "Start though the tiers of the machine's memory are larger together than what it has, "
             "or the control group that kvkeepd runs in. Without it that is refused: the system "
             "would end some process when they fill."},
    {.name = "huge_pages",
     .kind = KVK_OPTION_BOOL,
     AT(huge_pages),
     .fallback = "yes",
     .help = "Ask the system for huge pages; where it has none, small ones do. Memory that a warm "
             "start attaches again stays as it was."},
    {.name = "interleave_memory",
     .kind = KVK_OPTION_BOOL,
     AT(interleave_memory),
     .fallback = "no",
     .help = "Spread the tiers' pages over all NUMA nodes that have memory. Without it a page lies "
             "on the node of the thread that backs it: run kvkeepd on the node of its workers."},
    {.name = "lock_memory",
     .kind = KVK_OPTION_BOOL,
     AT(lock_memory),
     .fallback = "no",
     .help = "Lock the tiers' memory, so that it is never paged out. RLIMIT_MEMLOCK must allow it; "
             "room that cannot be locked is refused."},
};

static const char *const policies[] = {"lru", "rp-cost", NULL};
_Static_assert(KVK_EVICT_LRU == 0 && KVK_EVICT_RP_COST == 1, "the order of the words");

/* "0,1": each once. */
static bool gpus_read(void *record, void *member, const char *text, char *reason,
                      size_t reason_size)
{
    struct kvk_config *config = record;
    uint32_t count = 0;
    (void)member;
    config->device_gpu_count = 0;
    if (strcmp(text, "first") == 0) {
        return true;
    }
    for (const char *at = text;;) {
        char *end;
        unsigned long number = *at >= '0' && *at <= '9' ? strtoul(at, &end, 10) : ULONG_MAX;
        if (number > 1023 || (*end != ',' && *end != '\0')) {
            (void)snprintf(reason, reason_size, "must be first, or numbers such as 0,1");
            return false;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (config->device_gpus[i] == number) {
                (void)snprintf(reason, reason_size, "names GPU %lu twice", number);
                return false;
            }
        }
        if (count == KVK_CONFIG_GPU_COUNT_MAX) {
            (void)snprintf(reason, reason_size, "must be at most %d GPUs",
                           KVK_CONFIG_GPU_COUNT_MAX);
            return false;
        }
        config->device_gpus[count++] = (uint32_t)number;
        if (*end == '\0') {
            config->device_gpu_count = count;
            return true;
        }
        at = end + 1;
    }
}

static const char *const device_kinds[] = {"cpu", "cuda", NULL};

static const struct kvk_option_field device_fields[] = {
    {.name = "kind",
     .kind = KVK_OPTION_CHOICE,
     AT(device_kind),
     .fallback = "cpu",
     .choices = device_kinds,
     .help = "Where the device tier lies. cpu: in the machine's memory. cuda: in the memory of "
             "GPUs, device_bytes of it over all of them; the host tier is page-locked for them."},
    {.name = "gpus",
     .kind = KVK_OPTION_CUSTOM,
     AT(device_gpus),
     .fallback = "first",
     .read = gpus_read,
     .range = "first, or numbers with commas between",
     .help = "The GPUs, as CUDA counts them. A block's shards are dealt out over them in this "
             "order, so that each tensor-parallel rank finds its own on its own GPU."},
    {.name = "required",
     .kind = KVK_OPTION_BOOL,
     AT(device_required),
     .fallback = "no",
     .help = "Do not start where the GPUs cannot be used. no: then the log says so, and the device "
             "tier lies in the machine's memory."},
};

static const struct kvk_option_field cache_fields[] = {
    {.name = "policy",
     .kind = KVK_OPTION_CHOICE,
     AT(policy),
     .fallback = "rp-cost",
     .choices = policies,
     .help = "Which block goes first. lru: the one unused for longest, leaves first. rp-cost: the "
             "one least worth its room by how blocks were seen to come back and what it costs to "
             "compute."},
    {.name = "cost_lists",
     .kind = KVK_OPTION_BOOL,
     AT(cost_lists),
     .fallback = "no",
     .help = "rp-cost orders blocks of like cost apart, so that it finds cheap victims behind dear "
             "ones: more computing saved on the traces measured (docs/eviction.md), dearer per "
             "victim."},
    {.name = "ghost_ratio",
     .kind = KVK_OPTION_COUNT,
     AT(ghost_ratio),
     .fallback = "4",
     .maximum = 64,
     .help = "Evicted keys that rp-cost remembers, per block of capacity."},
    {.name = "hint_percent",
     .kind = KVK_OPTION_COUNT,
     AT(hint_percent),
     .fallback = "25",
     .maximum = 100,
     .help = "The most that hints of priority may keep of a tenant's idle blocks, of what it may "
             "use in all tiers. 0: hints keep nothing."},
};

static const char *const keepers[] = {"auto", "no", "process", "systemd", NULL};
_Static_assert(KVK_CONFIG_KEEPER_AUTO == 0 && KVK_CONFIG_KEEPER_NO == 1 &&
                   KVK_CONFIG_KEEPER_PROCESS == 2 && KVK_CONFIG_KEEPER_SYSTEMD == 3,
               "the order of the words");

static const struct kvk_option_field durable_fields[] = {
    {.name = "folder",
     .kind = KVK_OPTION_TEXT,
     AT(durable_folder),
     .fallback = "",
     .help =
         "Folder of all that outlives the daemon: the catalogue of tenants, spaces and blocks. "
         "Made where missing, for the daemon's user alone; one daemon at a time. Empty: nothing "
         "is kept."},
    {.name = "catalogue_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(catalogue_bytes),
     .fallback = "64 GiB",
     .minimum = MIB,
     .maximum = 64 * TIB,
     .help = "The most that the catalogue's file may grow to. Address space is taken for it at the "
             "start, disk space as it grows; about 300 bytes per block on disk, and twice its "
             "tokens' 4 bytes."},
    {.name = "disk_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(disk_bytes),
     .fallback = "0",
     .maximum = 1024 * TIB,
     .help =
         "The most that blocks on disk take, alignment included; never passed. 0: no disk tier. "
         "A block's copy there survives restarts and power cuts."},
    {.name = "disk_direct",
     .kind = KVK_OPTION_BOOL,
     AT(disk_direct),
     .fallback = "yes",
     .help = "Read and write past the page cache (O_DIRECT), where the file system can."},
    {.name = "disk_uring",
     .kind = KVK_OPTION_BOOL,
     AT(disk_uring),
     .fallback = "yes",
     .help = "Use io_uring where the kernel has it; else a few threads."},
    {.name = "disk_depth",
     .kind = KVK_OPTION_COUNT,
     AT(disk_depth),
     .fallback = "64",
     .minimum = 1,
     .maximum = 1024,
     .help = "Reads or writes that the disk has to do at a time."},
    {.name = "disk_admit_uses",
     .kind = KVK_OPTION_COUNT,
     AT(disk_admit_uses),
     .fallback = "2",
     .minimum = 1,
     .maximum = 1000,
     .help =
         "A block is written to disk when it is used for the so-manieth time, its sealing being "
         "the first: most blocks are never asked for again, and wear the disk for nothing. 1: "
         "every block is written."},
    {.name = "disk_read_ahead",
     .kind = KVK_OPTION_COUNT,
     AT(disk_read_ahead),
     .fallback = "256",
     .maximum = 65536,
     .help = "Blocks that may wait to be read from disk before anybody asks for them, because a "
             "prompt that was looked up goes on there. They take only free room, or that of blocks "
             "that are on disk too. 0: nothing is read ahead."},
    {.name = "drain_flush_ms",
     .kind = KVK_OPTION_DURATION,
     AT(drain_flush_ms),
     .fallback = "10 s",
     .maximum = HOUR,
     .help =
         "How long kvkeepctl drain waits for blocks that are to be written to disk. It says how "
         "many were not. 0: not at all."},
    {.name = "keeper",
     .kind = KVK_OPTION_CHOICE,
     AT(keeper),
     .fallback = "auto",
     .choices = keepers,
     .help = "Who holds the memory of both tiers while no daemon runs, so that the next one starts "
             "warm: systemd's descriptor store (FileDescriptorStoreMax= of the service), a small "
             "process of kvkeepd's own, or nobody. auto: the store where there is one, else the "
             "process. Needs a folder."},
    {.name = "keeper_hold_ms",
     .kind = KVK_OPTION_DURATION,
     AT(keeper_hold_ms),
     .fallback = "10 min",
     .minimum = 100,
     .maximum = 24 * HOUR,
     .help = "How long the process holds on without a daemon; then the memory is free. kvkeepd "
             "--forget frees it at once."},
    {.name = "keeper_socket",
     .kind = KVK_OPTION_TEXT,
     AT(keeper_socket),
     .fallback = "",
     .help = "The process's unix socket. Empty: unix_path with .keeper behind it."},
    {.name = "scrub_bytes_per_second",
     .kind = KVK_OPTION_SIZE,
     AT(scrub_bytes_per_second),
     .fallback = "64 MiB",
     .maximum = TIB,
     .help = "How fast the checksums of blocks that nobody asks for are taken again, in memory and "
             "on disk. A copy that does not match is given up. 0: never."},
    {.name = "scrub_interval_ms",
     .kind = KVK_OPTION_DURATION,
     AT(scrub_interval_ms),
     .fallback = "10 min",
     .minimum = 1,
     .maximum = 24 * HOUR * 30,
     .help = "A pass over all copies begins at most so often."},
};

static const struct kvk_option_field limits_fields[] = {
    {.name = "spaces",
     .kind = KVK_OPTION_COUNT,
     AT(spaces),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Spaces of all tenants."},
    {.name = "blocks",
     .kind = KVK_OPTION_COUNT,
     AT(blocks),
     .fallback = "16777216",
     .minimum = 16,
     .maximum = 1 << 30,
     .help = "Blocks that may be known at a time, those without bytes too. Memory for them (about "
             "160 bytes each, and their tokens) is taken as they come."},
    {.name = "roots",
     .kind = KVK_OPTION_COUNT,
     AT(roots),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Chains' roots: one per space, layer group and salt in use."},
    {.name = "sequences",
     .kind = KVK_OPTION_COUNT,
     AT(sequences),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Open sequences."},
    {.name = "leases",
     .kind = KVK_OPTION_COUNT,
     AT(leases),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Leases that have not ended."},
    {.name = "instances",
     .kind = KVK_OPTION_COUNT,
     AT(instances),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Instances at a time."},
    {.name = "sessions",
     .kind = KVK_OPTION_COUNT,
     AT(sessions),
     .fallback = "4096",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Sessions (processes of instances) at a time, those included whose stream has ended "
             "but whose process may still write. At least as many as instances."},
    {.name = "transfers",
     .kind = KVK_OPTION_COUNT,
     AT(transfers),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Open transfer tickets."},
    {.name = "tokens",
     .kind = KVK_OPTION_COUNT,
     AT(tokens),
     .fallback = "4194304",
     .minimum = 1,
     .maximum = 1 << 28,
     .help = "Tokens of one request, and of one sequence."},
    {.name = "tenant_metadata_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(tenant_metadata_bytes),
     .fallback = "8 GiB",
     .minimum = MIB,
     .help =
         "What is kept for one tenant besides the bytes of its blocks: records of blocks with "
         "their tokens and content digests, salts, sequences, leases, transfers, sessions with "
         "scratch memory, spaces, public prefixes. Records of blocks take at most seven eighths "
         "of it. Past it the tenant's own idle blocks go, or the call is refused, as its "
         "over_quota says. A tenant's metadata_limit_bytes takes its place."},
    {.name = "tenant_percent",
     .kind = KVK_OPTION_COUNT,
     AT(tenant_percent),
     .fallback = "75",
     .minimum = 1,
     .maximum = 100,
     .help = "The most that one tenant has of blocks, roots, sequences, leases, transfers, "
             "instances, sessions and spaces, in percent of each, where there are several "
             "tenants."},
    {.name = "lease_ms",
     .kind = KVK_OPTION_DURATION,
     AT(lease_ms),
     .fallback = "10 min",
     .minimum = 1,
     .maximum = 24 * HOUR,
     .help = "The longest time that a lease may be asked for."},
    {.name = "salt_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(salt_bytes),
     .fallback = "256 B",
     .maximum = 4 * KIB,
     .help = "The longest salt."},
    {.name = "spans",
     .kind = KVK_OPTION_COUNT,
     AT(spans),
     .fallback = "4096",
     .maximum = 1 << 20,
     .help = "Content spans of one request."},
    {.name = "forks",
     .kind = KVK_OPTION_COUNT,
     AT(forks),
     .fallback = "256",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "New sequences of one Fork."},
    {.name = "public_prefixes",
     .kind = KVK_OPTION_COUNT,
     AT(public_prefixes),
     .fallback = "64",
     .maximum = 1024,
     .help = "Prefixes that may be public at a time, of all tenants together. Each look-up that "
             "asks for public ones is compared with all. 0: none."},
    {.name = "scratch_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(scratch_bytes),
     .fallback = "256 MiB",
     .minimum = 4 * KIB,
     .maximum = 64 * GIB,
     .help = "Memory for operands of Attend that one session may have mapped, all its mappings "
             "together. It does not count in a tier's budget."},
    {.name = "mrc_samples",
     .kind = KVK_OPTION_COUNT,
     AT(mrc_samples),
     .fallback = "8192",
     .maximum = 1 << 22,
     .help = "Blocks that are followed of each tenant for its miss-ratio curve (kvkeepctl mrc): "
             "about 90 bytes each. 0: there are no curves; else at least 64."},
    {.name = "mrc_tenants",
     .kind = KVK_OPTION_COUNT,
     AT(mrc_tenants),
     .fallback = "64",
     .maximum = KVK_TENANT_COUNT_MAX,
     .help = "Tenants that are followed: the first so many that open a space."},
    {.name = "journal_entries",
     .kind = KVK_OPTION_COUNT,
     AT(journal_entries),
     .fallback = "65536",
     .maximum = 1 << 26,
     .help = "Blocks that went, with when, why and for whom, that are remembered so that a miss "
             "can be explained (kvkeepctl why): 76 bytes each, taken at start. 0: none."},
    {.name = "attend_queries",
     .kind = KVK_OPTION_COUNT,
     AT(attend_queries),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Query tokens of one Attend, all its items together."},
};

static const struct kvk_option_section sections[] = {
    {.name = "server",
     .help = "Sockets, connections and calls.",
     .fields = server_fields,
     .field_count = COUNT(server_fields)},
    {.name = "tls",
     .help = "Certificates of the TCP address.",
     .fields = tls_fields,
     .field_count = COUNT(tls_fields)},
    {.name = "http",
     .help = "The page, metrics and health over HTTP.",
     .fields = http_fields,
     .field_count = COUNT(http_fields)},
    {.name = "events",
     .help = "What can be found, told to routers as it changes (docs/events.md).",
     .fields = events_fields,
     .field_count = COUNT(events_fields)},
    {.name = "process",
     .help = "What the process gives up before it serves.",
     .fields = process_fields,
     .field_count = COUNT(process_fields)},
    {.name = "tiers",
     .help = "Memory for blocks, and what works on it.",
     .fields = tiers_fields,
     .field_count = COUNT(tiers_fields)},
    {.name = "device",
     .help = "What the device tier is made of.",
     .fields = device_fields,
     .field_count = COUNT(device_fields)},
    {.name = "cache",
     .help = "What is kept.",
     .fields = cache_fields,
     .field_count = COUNT(cache_fields)},
    {.name = "durable",
     .help = "What outlives the daemon.",
     .fields = durable_fields,
     .field_count = COUNT(durable_fields)},
    {.name = "remote",
     .help = "The store that many daemons share (docs/remote.md).",
     .fields = kvk_config_remote_fields,
     .field_count = KVK_CONFIG_REMOTE_FIELD_COUNT},
    {.name = "limits",
     .help = "How many and how large. What is over a limit is refused with the limit's name.",
     .fields = limits_fields,
     .field_count = COUNT(limits_fields)},
    {.name = "tenant",
     .help =
         "A tenant: whom data belongs to, and what it may use. Without any, there is one tenant, "
         "default, for the daemon's own user on the unix socket. Names are kept in Unicode "
         "NFC. Tenants of the file are changed here alone; others can be created by kvkeepctl "
         "tenant where there is a durable.folder.",
     .fields = kvk_config_tenant_fields,
     .field_count = KVK_CONFIG_TENANT_FIELD_COUNT,
     .open = kvk_config_open_tenant,
     .count_max = KVK_TENANT_COUNT_MAX},
    {.name = "credential",
     .help =
         "What a caller shows, and whom it may act for. It needs a token, a certificate or uids.",
     .fields = kvk_config_credential_fields,
     .field_count = KVK_CONFIG_CREDENTIAL_FIELD_COUNT,
     .open = kvk_config_open_credential,
     .count_max = KVK_CREDENTIAL_COUNT_MAX},
};

const struct kvk_option_table kvk_config_table = {.sections = sections,
                                                  .section_count = COUNT(sections)};
