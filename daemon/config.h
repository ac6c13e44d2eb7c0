/*
 * What kvkeepd can be told: one field per limit, with its unit, default and range, read from an
 * INI file by base/options. docs/configuration.md is printed from the same table.
 */
#ifndef KVK_DAEMON_CONFIG_H
#define KVK_DAEMON_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/socket_path.h"
#include "base/status.h"
#include "hosttier/catalogue.h"
#include "index/evict.h"

#define KVK_NAME_SIZE 256 /* bytes of a tenant's, credential's or instance's name, NUL included */
#define KVK_PATH_SIZE KVK_SOCKET_PATH_SIZE /* of a unix socket */
#define KVK_FILE_PATH_SIZE 1024
#define KVK_FOLDER_SIZE 4096       /* of a folder's path, NUL included */
#define KVK_TOKEN_TEXT_SIZE_MIN 16 /* bytes of a credential's token */
#define KVK_TENANT_COUNT_MAX 1024
#define KVK_CREDENTIAL_COUNT_MAX 1024

/* [tenant NAME] */
struct kvk_tenant_config {
    char name[KVK_NAME_SIZE]; /* NFC */
    struct kvk_tenant_quota quota;
    uint32_t over_quota; /* 0: evict, 1: refuse; goes into quota.over_quota */
    uint32_t mode;       /* enum kvk_tenant_mode */
    bool may_publish;
};

/* [credential NAME]: what a caller shows, and whom it may act for. */
struct kvk_credential_config {
    char name[KVK_NAME_SIZE];
    char token[KVK_NAME_SIZE]; /* bearer token, at least 16 bytes; "": none */
    uint32_t uids[16];         /* on the unix socket */
    uint32_t uid_count;
    uint32_t tenants[200];           /* indices into tenants */
    uint32_t tenant_count;           /* the first is meant where a request names none */
    char certificate[KVK_NAME_SIZE]; /* a name in a client's certificate; "": none */
    bool admin;
};

enum kvk_client_certificates {
    KVK_CLIENT_CERTIFICATES_NO = 0,
    KVK_CLIENT_CERTIFICATES_REQUEST = 1,
    KVK_CLIENT_CERTIFICATES_REQUIRE = 2,
};

/* [durable] keeper: who holds memory while no daemon runs. */
enum kvk_config_keeper {
    KVK_CONFIG_KEEPER_AUTO = 0, /* systemd where it offers to, else a process of ours */
    KVK_CONFIG_KEEPER_NO,
    KVK_CONFIG_KEEPER_PROCESS,
    KVK_CONFIG_KEEPER_SYSTEMD,
};

enum kvk_device_kind {
    KVK_DEVICE_CPU = 0,
    KVK_DEVICE_CUDA = 1,
};

#define KVK_CONFIG_GPU_COUNT_MAX 16

/* [remote]: the store that many daemons share */
struct kvk_remote_config {
    char seeds[4096]; /* "": there is none */
    char key_file[KVK_FILE_PATH_SIZE];
    char user[KVK_NAME_SIZE];
    char password_file[KVK_FILE_PATH_SIZE];
    bool tls;
    char tls_ca_file[KVK_FILE_PATH_SIZE];
    char tls_name[KVK_NAME_SIZE];
    char tls_certificate[KVK_FILE_PATH_SIZE];
    char tls_key[KVK_FILE_PATH_SIZE];
    char key_prefix[32];
    bool encrypt;
    uint64_t ttl_ms;
    uint32_t admit_uses;
    uint64_t tenant_bytes; /* written for one tenant in a period; 0: no limit */
    uint64_t tenant_period_ms;
    uint32_t fetch_tokens;
    uint32_t ask_queue;
    uint64_t ask_bytes;
    uint32_t send_queue;
    uint64_t batch_bytes;
    uint64_t ask_ms, fetch_ms, store_ms;
    uint64_t node_timeout_ms;
    uint64_t generation_ms;
    uint32_t threads, connections, pipeline;
    char node_name[64];     /* "": the host's */
    char node_address[128]; /* "": server.tcp_address */
};

struct kvk_config {
    /* [server] */
    char unix_path[KVK_PATH_SIZE];
    uint32_t unix_mode;
    char side_path[KVK_PATH_SIZE]; /* "": unix_path with ".side" behind it */
    char tcp_address[256];         /* "": none */
    bool tcp_insecure;
    bool tokens_in_clear;
    uint64_t message_bytes;
    uint32_t connections;
    uint32_t live_calls;
    uint32_t tenant_calls;         /* of live_calls, that one tenant may have */
    uint32_t tenant_bulk_threads;  /* of bulk_threads */
    uint32_t tenant_share_percent; /* of the look-up thread's time, while others come */
    uint32_t auth_failures;        /* bucket of one address or uid; 0: no limit */
    uint64_t auth_failure_ms;      /* until it has one more */
    uint32_t bulk_threads;
    uint32_t spin_us;
    uint64_t keepalive_ms;
    uint64_t keepalive_timeout_ms;
    uint64_t drain_ms;

    /* [tls]: PEM files */
    char tls_certificate[KVK_FILE_PATH_SIZE]; /* "": TCP without TLS */
    char tls_key[KVK_FILE_PATH_SIZE];
    char tls_client_ca[KVK_FILE_PATH_SIZE];
    enum kvk_client_certificates tls_client_certificates;

    /* [http] */
    char http_address[256]; /* "": none */
    uint32_t http_open;     /* who is answered without a credential: see daemon/http.h */

    /* [events] */
    uint64_t events_log_bytes; /* 0: no events */
    uint32_t events_watchers;  /* gRPC streams at a time */
    char events_publish[256];  /* ZeroMQ endpoint, "": none */
    char events_replay[256];   /* another, "": none */
    uint64_t events_replay_bytes;
    uint32_t events_encoding; /* enum kvk_events_encoding */
    uint64_t events_batch_ms;
    bool events_remote;

    /* [process] */
    char user[64]; /* "": as started */
    char group[64];
    bool core_dumps;
    bool seccomp;

    /* [tiers] */
    uint64_t device_bytes;        /* 0: host-only */
    uint64_t host_bytes;          /* 0: device-only; not both 0 */
    uint32_t device_free_percent; /* watermark: demotion runs ahead to keep so much clean or free */
    uint32_t copy_threads;
    uint32_t attend_threads; /* 0: as many as processors */
    uint32_t copy_queue;     /* jobs that may wait */
    bool overcommit;         /* the tiers may be larger than the machine's memory */
    bool huge_pages;
    bool interleave_memory;
    bool lock_memory;

    /* [device] */
    uint32_t device_kind; /* enum kvk_device_kind */
    uint32_t device_gpus[KVK_CONFIG_GPU_COUNT_MAX];
    uint32_t device_gpu_count; /* 0: the first */
    bool device_required;

    /* [cache] */
    enum kvk_evict_policy policy;
    bool cost_lists;       /* of rp-cost */
    uint32_t ghost_ratio;  /* evicted keys remembered per block of capacity */
    uint32_t hint_percent; /* of what a tenant may use: the most that its hints keep */

    /* [durable] */
    char durable_folder[KVK_FOLDER_SIZE]; /* "": nothing outlives the daemon */
    uint64_t catalogue_bytes;
    uint64_t disk_bytes; /* 0: no disk tier */
    bool disk_direct;
    bool disk_uring;
    uint32_t disk_depth;      /* requests under way */
    uint32_t disk_admit_uses; /* so often used, a block is written; 1: every one */
    uint64_t drain_flush_ms;  /* that a drain waits for writing behind */
    uint32_t disk_read_ahead; /* blocks that may wait to be read before anybody asks; 0: none */
    uint64_t scrub_bytes_per_second; /* 0: nothing is scrubbed */
    uint64_t scrub_interval_ms;      /* from the beginning of one pass to that of the next */
    enum kvk_config_keeper keeper;
    uint64_t keeper_hold_ms;
    char keeper_socket[KVK_PATH_SIZE]; /* "": unix_path with ".keeper" behind it */

    struct kvk_remote_config remote;

    /* [limits] */
    uint32_t spaces;
    uint32_t blocks; /* known ones, hollow and private included */
    uint32_t roots;  /* salts x groups */
    uint32_t sequences;
    uint32_t leases;
    uint32_t instances;
    uint32_t sessions;
    uint32_t transfers;
    uint64_t tokens;   /* of one request or sequence */
    uint64_t lease_ms; /* longest */
    uint32_t salt_bytes;
    uint32_t spans;
    uint32_t forks;
    uint32_t public_prefixes;
    uint64_t tenant_metadata_bytes; /* kept for one tenant beside bytes of blocks */
    uint32_t tenant_percent; /* of the numbers of [limits] that one tenant may have, if not alone */
    uint64_t scratch_bytes;  /* of one mapping for operands */
    uint64_t attend_queries;
    uint32_t mrc_tenants;     /* that are followed for their miss-ratio curves */
    uint32_t mrc_samples;     /* blocks that are followed of each; 0: none */
    uint32_t journal_entries; /* of what was forgotten or left a tier; 0: none are kept */

    struct kvk_tenant_config *tenants; /* [tenant_count], ours */
    uint32_t tenant_count;
    struct kvk_credential_config *credentials; /* [credential_count], ours */
    uint32_t credential_count;

    bool test_hooks; /* from the command line alone */
};

/* Defaults: what kvkeepd runs on without a file; one tenant "default" for the daemon's own uid. */
void kvk_config_init(struct kvk_config *config);
void kvk_config_finish(struct kvk_config *config);
/* When credentials are known by their digests, nothing needs their tokens in clear. */
void kvk_config_forget_tokens(struct kvk_config *config);

/* Read a file over the defaults, and check the whole. The error names file, line, section and
 * field, and the limit; where only several fields together are wrong, it names no line. */
KVK_CHECKED enum kvk_status kvk_config_load(struct kvk_config *config, const char *path,
                                            struct kvk_error *error);

/* What single fields cannot show: both tiers 0, TCP without credentials and not insecure, … */
KVK_CHECKED enum kvk_status kvk_config_check(const struct kvk_config *config,
                                             struct kvk_error *error);

/* Print a commented file with all fields at their defaults. */
void kvk_config_print_default(void);

/* Print docs/configuration.md. */
void kvk_config_print_manual(FILE *file);

#endif
