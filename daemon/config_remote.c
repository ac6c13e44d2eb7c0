/*
 * The section [remote] of the configuration: the store that many daemons share.
 */
#include <string.h>

#include "base/assert.h"
#include "daemon/config_table.h"

#define AT(member) KVK_OPTION_AT(struct kvk_config, remote.member)

#define MIB (UINT64_C(1) << 20)
#define TIB (UINT64_C(1) << 40)
#define SECOND UINT64_C(1000)
#define HOUR (SECOND * 3600)

const struct kvk_option_field kvk_config_remote_fields[] = {
    {.name = "seeds",
     .kind = KVK_OPTION_TEXT,
     AT(seeds),
     .fallback = "",
     .help =
         "HOST:PORT or [HOST]:PORT of any nodes of a Redis or Valkey Cluster, or of one server, "
         "with commas between. Empty: nothing is shared with other daemons."},
    {.name = "key_file",
     .kind = KVK_OPTION_TEXT,
     AT(key_file),
     .fallback = "",
     .help = "File with the fleet's key, 64 hex digits, that all its daemons have, and nobody "
             "else: no others than owner and group may read it. What tenants of one name share in "
             "the store is named and sealed under keys made of it: without it nothing there can "
             "be found, read or forged. Needed with seeds."},
    {.name = "user",
     .kind = KVK_OPTION_TEXT,
     AT(user),
     .fallback = "",
     .help = "The store's ACL user. Empty: its default user."},
    {.name = "password_file",
     .kind = KVK_OPTION_TEXT,
     AT(password_file),
     .fallback = "",
     .help = "File with its password, up to the first line's end. Empty: none is sent."},
    {.name = "tls",
     .kind = KVK_OPTION_BOOL,
     AT(tls),
     .fallback = "no",
     .help = "Speak TLS to the store; its certificates are verified."},
    {.name = "tls_ca_file",
     .kind = KVK_OPTION_TEXT,
     AT(tls_ca_file),
     .fallback = "",
     .help = "PEM file of the authorities that its certificates may come from. Empty: the "
             "system's."},
    {.name = "tls_name",
     .kind = KVK_OPTION_TEXT,
     AT(tls_name),
     .fallback = "",
     .help = "The name that all its nodes' certificates carry. Empty: each node's address."},
    {.name = "tls_certificate",
     .kind = KVK_OPTION_TEXT,
     AT(tls_certificate),
     .fallback = "",
     .help = "PEM file of the daemon's own certificate, where the store asks for one."},
    {.name = "tls_key",
     .kind = KVK_OPTION_TEXT,
     AT(tls_key),
     .fallback = "",
     .help = "PEM file of its key."},
    {.name = "key_prefix",
     .kind = KVK_OPTION_TEXT,
     AT(key_prefix),
     .fallback = "kvkeep:",
     .minimum = 1,
     .maximum = 31,
     .help = "What names in the store begin with: letters, digits and :._-. The ACL user needs no "
             "more than names of this prefix. Alike in all daemons of the fleet."},
    {.name = "encrypt",
     .kind = KVK_OPTION_BOOL,
     AT(encrypt),
     .fallback = "yes",
     .help = "Encrypt values under the tenant's key. no: they are authenticated only, which is "
             "quicker (docs/remote.md). Alike in all daemons of the fleet: what is stored the "
             "other way is a miss."},
    {.name = "ttl_ms",
     .kind = KVK_OPTION_DURATION,
     AT(ttl_ms),
     .fallback = "24 h",
     .maximum = 24 * HOUR * 365,
     .help = "How long a value stays in the store at most. 0: until the store evicts it."},
    {.name = "admit_uses",
     .kind = KVK_OPTION_COUNT,
     AT(admit_uses),
     .fallback = "2",
     .minimum = 1,
     .maximum = 1000,
     .help = "A block is sent when it is used for the so-manieth time, its sealing being the "
             "first. 1: every one."},
    {.name = "tenant_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(tenant_bytes),
     .fallback = "0",
     .maximum = 1024 * TIB,
     .help = "The most that this daemon writes to the store for one tenant in a tenant_period_ms, "
             "so that one tenant's writing does not drive out the others' values: what the store "
             "holds is up to its own eviction, but what goes in is not. What is over it stays "
             "unsent, and is counted. 0: no limit."},
    {.name = "tenant_period_ms",
     .kind = KVK_OPTION_DURATION,
     AT(tenant_period_ms),
     .fallback = "1 h",
     .minimum = SECOND,
     .maximum = 24 * HOUR * 30,
     .help = "The period of tenant_bytes. It comes back evenly, a part of it with each part of the "
             "period."},
    {.name = "fetch_tokens",
     .kind = KVK_OPTION_COUNT,
     AT(fetch_tokens),
     .fallback = "64",
     .minimum = 1,
     .maximum = 1 << 28,
     .help = "The store is asked only where at least so many tokens of a prompt, in whole blocks, "
             "are not cached here."},
    {.name = "ask_queue",
     .kind = KVK_OPTION_COUNT,
     AT(ask_queue),
     .fallback = "256",
     .minimum = 1,
     .maximum = 65536,
     .help = "Prompts that may wait to be asked for; more are not asked for, and counted."},
    {.name = "ask_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(ask_bytes),
     .fallback = "16 MiB",
     .minimum = 64 * UINT64_C(1024),
     .maximum = 16 * UINT64_C(1024) * MIB,
     .help = "Memory for the tokens of those, taken at the start."},
    {.name = "send_queue",
     .kind = KVK_OPTION_COUNT,
     AT(send_queue),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Blocks that may wait to be sent; more are dropped, and counted."},
    {.name = "batch_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(batch_bytes),
     .fallback = "16 MiB",
     .minimum = MIB,
     .maximum = 1024 * MIB,
     .help = "Bytes that are fetched at a time, and memory for those that are being sent. A larger "
             "block goes alone; one larger than 64 times this is not shared."},
    {.name = "ask_ms",
     .kind = KVK_OPTION_DURATION,
     AT(ask_ms),
     .fallback = "200 ms",
     .minimum = 1,
     .maximum = HOUR,
     .help = "How long the store may take to say what it has of a prompt."},
    {.name = "fetch_ms",
     .kind = KVK_OPTION_DURATION,
     AT(fetch_ms),
     .fallback = "5 s",
     .minimum = 1,
     .maximum = HOUR,
     .help = "How long a batch of blocks may take to come."},
    {.name = "store_ms",
     .kind = KVK_OPTION_DURATION,
     AT(store_ms),
     .fallback = "10 s",
     .minimum = 1,
     .maximum = HOUR,
     .help = "How long a batch of blocks may take to be stored."},
    {.name = "node_timeout_ms",
     .kind = KVK_OPTION_DURATION,
     AT(node_timeout_ms),
     .fallback = "1 s",
     .minimum = 10,
     .maximum = HOUR,
     .help = "A node that says nothing for so long is left alone, and tried again ever more "
             "rarely, up to every 2 s."},
    {.name = "generation_ms",
     .kind = KVK_OPTION_DURATION,
     AT(generation_ms),
     .fallback = "1 s",
     .minimum = 100,
     .maximum = 60 * SECOND,
     .help = "How often the store is asked whether another daemon has invalidated a space. So old "
             "can be what a daemon finds in its own memory after an invalidation elsewhere; what "
             "comes from the store never is."},
    {.name = "threads",
     .kind = KVK_OPTION_COUNT,
     AT(threads),
     .fallback = "1",
     .minimum = 1,
     .maximum = 8,
     .help = "Threads that speak to the store, each with its own connections."},
    {.name = "connections",
     .kind = KVK_OPTION_COUNT,
     AT(connections),
     .fallback = "2",
     .minimum = 1,
     .maximum = 16,
     .help = "Connections of each thread to each master."},
    {.name = "pipeline",
     .kind = KVK_OPTION_COUNT,
     AT(pipeline),
     .fallback = "32",
     .minimum = 1,
     .maximum = 1024,
     .help = "Requests under way on a connection."},
    {.name = "node_name",
     .kind = KVK_OPTION_TEXT,
     AT(node_name),
     .fallback = "",
     .help = "What the other daemons and kvkeepctl fleet call this one. Empty: its host's name."},
    {.name = "node_address",
     .kind = KVK_OPTION_TEXT,
     AT(node_address),
     .fallback = "",
     .help = "Where workers and routers reach this daemon, as kvkeepctl fleet shows it to them. "
             "Empty: server.tcp_address."},
};

_Static_assert(sizeof(kvk_config_remote_fields) / sizeof(kvk_config_remote_fields[0]) ==
                   KVK_CONFIG_REMOTE_FIELD_COUNT,
               "the header says how many");

/* What single fields cannot show. */
enum kvk_status kvk_config_remote_check(const struct kvk_config *config, struct kvk_error *error)
{
    const struct kvk_remote_config *remote = &config->remote;
    const char *field = NULL;
    const char *text = NULL;
    if (remote->seeds[0] == '\0') {
        return KVK_OK;
    }
    if (remote->key_file[0] == '\0') {
        field = "remote.key_file";
        text = "is needed with remote.seeds: without a key anybody could read and forge values";
    } else if (remote->user[0] != '\0' && remote->password_file[0] == '\0') {
        field = "remote.password_file";
        text = "is needed with remote.user";
    } else if ((remote->tls_certificate[0] != '\0') != (remote->tls_key[0] != '\0')) {
        field = remote->tls_key[0] == '\0' ? "remote.tls_key" : "remote.tls_certificate";
        text = "a certificate and its key come together";
    } else if (!remote->tls && (remote->tls_ca_file[0] != '\0' || remote->tls_name[0] != '\0' ||
                                remote->tls_certificate[0] != '\0')) {
        field = "remote.tls";
        text = "certificates are named, but tls = no";
    }
    return field == NULL
               ? KVK_OK
               : kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %s", field, text);
}
