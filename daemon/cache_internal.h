/*
 * The engine's insides, for daemon/'s engine files alone (not for rpc or main).
 *
 * Who owns what: the cache owns everything here. A block belongs to one group (block.arena is the
 * group's number in cache.groups). Holders of blocks are sequences, leases, transfers, reads and
 * quarantines; each hold and pin is given back by the one that took it, exactly once.
 *
 * Locking: every field and function here needs cache.lock, unless it says otherwise. Functions
 * named *_unlocked are called without it and take it themselves; those named *_drops give it up
 * in between and take it again: what was read before may have changed.
 *
 * Order of locks: cache.lock, then nothing. The mover, the devices and the log are leaves that are
 * never called with it (the log apart).
 *
 * How a block is changed: change its holds, pins or copies by the functions of block_store.c; each
 * ends in kvk_block_settle(), which brings counters and eviction queues in line. Nothing else
 * touches queues or counters.
 */
#ifndef KVK_DAEMON_CACHE_INTERNAL_H
#define KVK_DAEMON_CACHE_INTERNAL_H

#include <stdatomic.h>

#include "base/lock.h"
#include "base/slots.h"
#include "base/table.h"
#include "daemon/advice.h"
#include "daemon/attention.h"
#include "daemon/cache.h"
#include "daemon/disk_tier.h"
#include "daemon/hint.h"
#include "daemon/journal.h"
#include "daemon/lookup.h"
#include "daemon/mrc.h"
#include "daemon/mover.h"
#include "daemon/quota.h"
#include "daemon/report.h"
#include "daemon/restore.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "index/evict.h"

/* ---- Groups: the memory and the blocks of one layer group of one space ---- */

/* A place in a tier's files whose slab is gone, but whose memory is not punched out yet. */
#define KVK_PLACE_LEAVING UINT32_MAX

/* One tier's slots of a group. A block is in at most one of the queues:
 *     queue  may leave; in the device tier by demotion where there is a host tier, else for good
 *     clean  has a copy in the next tier below too, so leaving forgets nothing: device tier with a
 *            host copy, or the last memory tier with a copy on disk
 *     held   device tier with a host tier: held by somebody, but unpinned, so it may be demoted
 * A block with copies in memory and on disk is in a queue of memory. The disk's slots have no
 * regions and no generations, and are larger by what alignment takes: see arena.slot_bytes. */
struct kvk_group_tier {
    bool present; /* the tier has bytes; else nothing below is set */
    struct kvk_arena arena;
    struct kvk_evict_queue queue;
    struct kvk_evict_queue clean;
    struct kvk_evict_queue held;
    struct kvk_region regions[KVK_SHARD_COUNT_MAX]; /* [shard_count]; slot s at s x shard_bytes */
    struct kvk_region generations;                  /* u32 per slot; workers map it read-only */
    uint64_t *checksums;         /* [slot][shard]; 0: not taken yet. Zero pages until used; ours */
    uint32_t *owners;            /* [slot] block + 1; 0: free, or loose. Ours */
    uint32_t *places;            /* [arena.slab_capacity] of each place for a slab, how many slots
                                    have memory: a slab comes only where it has, so that nobody
                                    waits for memory with the lock held. Ours */
    uint32_t loose_count;        /* slots taken for copies that have not landed yet */
    uint32_t own_evictions_left; /* before it is asked again which group gives room */
    bool own_evictions_due;      /* it was asked on behalf of a tenant within its guarantee */
    uint32_t leave_count;        /* slabs that left: whoever backs a place sees what came between */
    uint32_t backing_count;      /* places that are being backed without the lock, now */
    uint64_t used_bytes;         /* = arena.used_count x arena.slot_bytes */
    uint64_t stray_bytes;        /* as last looked at */
    uint64_t stray_told_bytes;   /* the most that was logged */
    bool adopted; /* its files are of before, and what is in them has not come back yet: see warm.c
                   */
};

struct kvk_group {
    struct kvk_space *space;
    uint32_t number; /* in cache.groups; block.arena */
    uint32_t index;  /* in its space */
    struct kvk_geometry geometry;
    uint32_t shard_count;
    uint64_t shard_bytes[KVK_SHARD_COUNT_MAX];
    uint64_t block_bytes; /* all shards */
    bool windowed;
    struct kvk_group_tier tiers[KVK_TIER_COUNT];
    struct kvk_disk_group *disk; /* what disk_*.c keep beside tiers[KVK_TIER_DISK]; NULL: no disk
                                    tier. Ours */
    struct kvk_sidecar *sidecar; /* sidecar.h; NULL: its memory does not outlive the daemon. Ours */
    uint64_t state_counts[KVK_BLOCK_STATE_COUNT]; /* FREE is not counted */
    uint64_t tier_blocks[KVK_TIER_COUNT];         /* whole copies */
};

/* ---- Spaces ---- */

struct kvk_space {
    uint64_t id;
    const struct kvk_tenant *tenant;
    uint8_t *identity; /* canonical bytes, and behind them the generation, 8 bytes; ours */
    size_t identity_size;
    uint64_t generation; /* part of every root's identity: one more invalidates the whole */
    uint32_t block_tokens;
    uint32_t rank_count;
    uint32_t group_count;
    struct kvk_group *groups[KVK_GROUP_COUNT_MAX]; /* ours */
    double flops_per_token;
    double flops_per_token_position;
    double flops_per_second;
    uint32_t lookup_min_tokens;
    uint32_t reference_count; /* sequences, leases, mappings: a space in use is not reclaimed */
    bool constant_hash;       /* test hook, at its opening */
    uint8_t mode;             /* enum kvk_tenant_mode; the tenant's goes beside it: space_mode.c */
    bool recorded;            /* in the catalogue: see persist.h */
    uint64_t idle_ms; /* after so long unused its blocks go; 0: as the tenant's quota says */
    /* counters */
    uint64_t queries, query_tokens, hit_tokens;
    uint64_t cost_ns, saved_ns; /* what its look-ups and moves took; what hits saved (estimate) */
    struct kvk_space *next;        /* all spaces */
    struct kvk_space *tenant_next; /* those of its tenant */
};

/* ---- Sequences ---- */

struct kvk_sequence_group {
    uint32_t root;        /* KVK_ROOT_NONE until needed; one reference, ours */
    uint32_t *blocks;     /* [capacity]; KVK_BLOCK_NONE: let go by the window. Ours */
    uint8_t *pins;        /* [capacity]: tier + 1 of our copy pin of it, 0: none. Ours */
    uint32_t block_count; /* ceil(length / block_tokens) */
    uint32_t block_capacity;
    uint32_t window_block;    /* first block past the sinks that is still held */
    uint32_t keep_block;      /* first block past the sinks that a query after what is settled sees:
                                 [window_block, keep_block) are held only for attention of the
                                 tokens that were settled last */
    struct kvk_cursor cursor; /* how far its chain is indexed; the block there is anchored */
    bool detached;            /* what it hangs from was invalidated: nothing more is indexed,
                                 and the cursor (at the root again) anchors nothing. May be set
                                 whenever the lock was dropped, also while busy */
};

/* The last change, so that an exact repeat is known and answered again. */
struct kvk_last_change {
    uint8_t kind; /* 0: none; else one number per call, sequence files' own */
    uint64_t expected_length;
    uint64_t argument;
};

struct kvk_sequence {
    uint64_t id;
    struct kvk_instance *instance;
    struct kvk_space *space;
    enum kvk_sequence_state state;
    enum kvk_tier home; /* where new blocks go */
    bool busy;          /* a call works on it without the lock */
    bool doomed;        /* its instance ended meanwhile: that call ends it */
    uint32_t *tokens;   /* [length], ours */
    uint64_t token_capacity;
    struct kvk_content_span *spans; /* [span_count], ours */
    uint32_t span_count;
    uint8_t *salt;
    size_t salt_size;
    struct kvk_hint *hints; /* [hint_count] for what it seals, ours */
    uint32_t hint_count;
    uint64_t length;
    uint64_t committed;
    uint64_t cached;
    uint64_t sealed;                           /* the least of rank_sealed */
    uint64_t rank_sealed[KVK_SHARD_COUNT_MAX]; /* [space.rank_count] */
    uint64_t whole_blocks;  /* blocks below are sealed (and, unless detached, indexed) */
    uint64_t ranks_apart_ns; /* since when rank_sealed differ; 0: they do not */
    uint64_t asked_blocks;  /* whole blocks of the prompt that a look-up could have found */
    uint64_t shared_tokens; /* unsealed blocks below may be shared with a fork */
    uint32_t writers;       /* kvk_sequence_write() calls that copy now: in all, and by rank */
    uint16_t rank_writers[KVK_SHARD_COUNT_MAX];
    uint32_t fork_index;    /* 0: opened; else which child of its Fork, from 1 */
    bool cut_wanted;        /* a rank ended while it was busy: that call cuts it back */
    bool marked;            /* within one call: this id was named before */
    uint64_t growth_tokens; /* room still kept for it */
    uint64_t growth_bytes;  /* as counted in cache.tiers[home].growth_bytes */
    struct kvk_sequence_group groups[KVK_GROUP_COUNT_MAX];
    struct kvk_disk_estimate disk; /* what of its prefix was on disk alone when it was opened */
    struct kvk_last_change last;
    struct kvk_request_id request_id;
    uint64_t opened_ns;
    struct kvk_sequence *next, *previous; /* of the instance */
};

/* ---- Leases and transfers ---- */

struct kvk_lease_group {
    uint32_t *blocks; /* [block_count]; KVK_BLOCK_NONE outside the window. Ours */
    uint8_t *pins;    /* [block_count]: tier + 1 of our copy pin, 0: none. Ours */
    uint32_t block_count;
};

struct kvk_lease {
    uint64_t id;
    struct kvk_instance *instance;
    struct kvk_space *space;
    uint64_t tokens;
    uint64_t expires_ns; /* on the lease clock: see cache.stood_still_ns */
    uint64_t begun_ns;
    bool copy_pin;
    struct kvk_lease_group groups[KVK_GROUP_COUNT_MAX];
    uint32_t open_transfers;
    bool marked; /* within one call: this id was named before */
    struct kvk_request_id request_id;
    struct kvk_lease *next, *previous; /* of the instance */
    /* In cache.lease_heap, a pairing heap by expires_ns: first child, next sibling, and previous
     * sibling or parent. */
    struct kvk_lease *heap_child, *heap_next, *heap_previous;
};

/* A lease that is over, remembered for a while: who comes late is told so. */
struct kvk_ended_lease {
    uint64_t id;
    uint64_t instance_id;
};
#define KVK_ENDED_LEASE_COUNT 256

struct kvk_transfer {
    uint64_t id;
    struct kvk_session *session; /* whose process copies */
    uint64_t sequence_id, lease_id;
    bool write;
    struct kvk_pinned {
        uint32_t block;
        uint8_t tier;
    } * pins; /* [pin_count], held and pinned; ours */
    uint32_t pin_count;
    struct kvk_transfer *next, *previous; /* of the session */
};

/* ---- Instances and sessions: session.c ---- */

struct kvk_instance {
    uint64_t id;
    uint8_t token[KVK_TOKEN_SIZE];
    const struct kvk_tenant *tenant;
    char name[KVK_NAME_SIZE];
    uint64_t begun_ns;
    bool ending;
    bool ended; /* all was given back, but what busy calls still have: they or maintenance end it */
    struct kvk_session *sessions; /* connected or not yet gone */
    struct kvk_session *opener;
    struct kvk_sequence *sequences;
    struct kvk_lease *leases;
    uint32_t sequence_count;
    uint32_t lease_count;
    struct kvk_instance *next, *previous;
};

/* A mapping that a process was given. */
struct kvk_mapping {
    uint64_t id;
    enum kvk_map_kind kind;
    bool writable;
    bool taken;              /* the descriptors went out */
    struct kvk_group *group; /* slots; the space is referenced */
    enum kvk_tier tier;
    uint32_t shard;
    struct kvk_region scratch; /* scratch; ours, made by the host device */
    uint32_t users;            /* of scratch addresses, now */
    bool orphaned;             /* scratch: its session is gone, the last user frees it */
    uint8_t token[KVK_TOKEN_SIZE];
    uint64_t token_until_ns;
    struct kvk_mapping *next;
};

struct kvk_session {
    uint64_t id;
    struct kvk_instance *instance; /* NULL once the instance has ended and only the process is
                                      waited for */
    uint64_t instance_id;          /* also when the instance is over */
    const struct kvk_tenant *tenant;
    uint32_t rank;
    bool connected; /* the stream is there */
    bool local;
    bool side_bound;   /* a side socket is bound now */
    bool process_gone; /* known to be gone */
    int32_t pid;
    uint32_t uid;
    int pidfd;              /* ours; -1 */
    uint64_t process_start; /* of the process: with pid, its name for ever; 0: not known */
    uint8_t side_token[KVK_TOKEN_SIZE];
    uint64_t side_token_until_ns;
    struct kvk_mapping *mappings;
    struct kvk_transfer *transfers;
    uint32_t *quarantine; /* [quarantine_count] blocks, unsealed, whose one holder this is */
    uint32_t quarantine_count, quarantine_capacity;
    void (*on_notice)(void *context, enum kvk_notice_kind kind, uint64_t value);
    void *context;
    uint32_t notices_running; /* being told without the lock, now */
    bool ending;              /* kvk_session_end() works on it */
    bool leaving;             /* one thread gives its things back and frees it */
    struct kvk_session *next; /* of the instance, or of cache.waiting_sessions */
};

/* ---- The cache ---- */

struct kvk_tier_state {
    struct kvk_device *device; /* NULL: no such tier */
    struct kvk_pool pool;
    uint64_t used_bytes;       /* slots taken */
    uint64_t bound_bytes;      /* of them: cannot leave the tier now (unsealed, pinned, copying, or
                                  held with no next tier) */
    uint64_t leased_bytes;     /* of bound: held by leases alone */
    uint64_t copying_bytes;    /* of bound: a transfer is under way */
    uint64_t quarantine_bytes; /* of bound */
    uint64_t growth_bytes;     /* kept for running sequences, not yet taken. Written by the
                                  sequences: kvk_room_reserve() only checks it */
    uint64_t stray_bytes;      /* faulted in by workers outside slabs; part of pool.charge_bytes */
    uint64_t punch_bytes;      /* of slabs that left and are not punched; also part of it */
    struct kvk_release_rate release_rate;
    uint64_t *tenant_bytes;    /* [KVK_TENANT_COUNT_MAX] of used_bytes; ours */
    uint64_t guaranteed_bytes; /* the sum of all tenants' guarantees */
    uint64_t guarded_bytes;    /* of every tenant what is bound or kept for growth, or its guarantee
                                  where that is more: what nobody else can have. The sum */
};

/* Tiers that quotas are kept for: those that have a pool. */
#define KVK_QUOTA_TIERS                                                                            \
    ((int)(sizeof(((struct kvk_cache *)0)->tiers) / sizeof(struct kvk_tier_state)))

/* What the engine knows of a tenant beside tenant.h: quota.c, usage.c. */
struct kvk_tenant_state {
    const struct kvk_tenant *_Atomic tenant; /* NULL: nobody has this place. Read without the lock
                                                where it is asked who that is */
    _Atomic uint32_t quota_version;          /* kvk_tenant_quota_version() that was taken over */
    struct kvk_tenant_quota quota;
    uint64_t bound_bytes[KVK_TIER_COUNT];  /* its part of tiers[].bound_bytes */
    uint64_t growth_bytes[KVK_TIER_COUNT]; /* and of growth_bytes */
    uint32_t sequences;                    /* open */
    uint32_t leases;
    struct kvk_evict_share hint_share;             /* what hints may keep of its blocks */
    struct kvk_space *spaces;                      /* its own, by space.tenant_next */
    uint32_t group_count;                          /* of them */
    struct kvk_group *limit_group[KVK_TIER_COUNT]; /* whose victims go for its own limit; NULL: all
                                                      of its groups are to be asked */
    uint32_t limit_evictions_left[KVK_TIER_COUNT]; /* before they are asked again */
    bool forgetting;                               /* no session begins any more */
    /* The rate, read and written without the lock: when the bucket is full again, on the clock. */
    _Atomic uint64_t rate_full_ns;
    _Atomic uint64_t rate_interval_ns; /* between requests; 0: no limit */
    _Atomic uint64_t rate_burst_ns;    /* intervals that may be taken at once */
    _Atomic uint64_t rate_requests;
    _Atomic uint64_t rate_refusals;
    struct kvk_tenant_usage usage;
    uint64_t usage_ns[KVK_TIER_COUNT];   /* when byte_seconds was brought up to date */
    uint64_t usage_rest[KVK_TIER_COUNT]; /* byte x ns of it, less than a byte-second */
    struct kvk_tenant_usage usage_saved; /* as it lies in the catalogue */
    uint64_t usage_saved_ns;             /* when it was last looked at for that */
};

/* kvk_block.flags. The low bits are what kvk_block_settle() has counted the block as. */
#define KVK_BLOCK_QUARANTINED 0x80U

#define KVK_REFUSAL_COUNT 256 /* journal */

/* A slab that left its arena and waits for its memory to be punched out; the pool is still charged
 * until then. */
struct kvk_punch {
    struct kvk_group *group;
    enum kvk_tier tier;
    uint32_t slab;
    uint64_t size_bytes; /* charged */
    bool under_way;      /* without the lock, now */
    struct kvk_punch *next;
};

/* A block that was computed again and differs from its cached twin beyond the tolerance. */
struct kvk_wrong_reuse {
    uint64_t time_ns;
    uint64_t space_id;
    struct kvk_key key;
    uint32_t group;
    uint32_t position; /* blocks before it in its chain */
    uint32_t shard;    /* the first that differs, */
    uint32_t layer;    /* and the layer, within the group, over all pipeline ranks */
    bool is_value;     /* V; else K */
    bool opaque;       /* bytes of which nothing is known */
    double distance;   /* relative L2 */
    double tolerance;  /* of the format */
};
#define KVK_WRONG_REUSE_COUNT 32 /* ring */

struct kvk_cache_stats {
    uint64_t lookups, lookup_tokens, hit_tokens, retries;
    uint64_t hashed_bytes;
    uint64_t pins, opens, seals, appends, forks, closes;
    uint64_t sealed_blocks, duplicate_blocks, wrong_reuse;
    uint64_t twins_equal, twins_compared, twins_left_out; /* of duplicate_blocks */
    uint64_t opaque_differences;                          /* of twins_compared */
    uint64_t evictions[KVK_TIER_COUNT];                   /* copies dropped to make room */
    uint64_t forgotten_blocks;                            /* last copies dropped */
    uint64_t demoted_blocks, promoted_blocks;
    uint64_t swapped_out_blocks, swapped_in_blocks, swapped_out_bytes, swapped_in_bytes;
    uint64_t copy_failures, checksum_failures;
    uint64_t refusals;
    uint64_t leases_expired;
    uint64_t instances_ended, sessions_ended;
    uint64_t quarantined_blocks;
    uint64_t attended_tokens;
    uint64_t slabs_moved;
    uint64_t shifted_blocks; /* to another slot of their tier, so that a slab could go */
    uint64_t invalidated_blocks;
    uint64_t disk_written_blocks, disk_written_bytes;
    uint64_t disk_late_blocks;    /* left memory before their turn to be written */
    uint64_t disk_skipped_blocks; /* not queued: too many were */
    uint64_t disk_write_failures; /* blocks */
    uint64_t disk_extent_failures;
    uint64_t disk_restored_blocks, disk_restored_bytes;
    uint64_t disk_restores;     /* prefixes that were brought back because that was quicker */
    uint64_t disk_recomputes;   /* and those left, since computing was estimated to be */
    uint64_t disk_ahead_blocks; /* read before anybody asked; counted as restored too */
    uint64_t disk_read_failures, disk_damaged_blocks;
    uint64_t disk_returned_blocks; /* put back from the catalogue when the daemon began, */
    uint64_t disk_refused_blocks;  /* and records that were not */
    uint64_t spaces_restored, space_records_refused; /* at the start */
    uint64_t space_record_failures;                  /* to write or remove one */
    uint64_t unkept_blocks;       /* times that a block found no place in its sidecar */
    uint64_t torn_records;        /* of sidecars, at the start */
    uint64_t restored_blocks; /* at the start, from kept memory and disk */
    uint64_t lookup_ns, saved_ns; /* what look-ups cost against what hits saved (estimate) */
};

struct kvk_cache {
    struct kvk_lock lock;
    pthread_cond_t changed; /* something was freed, or a transfer ended */
    const struct kvk_config *config;
    struct kvk_tenants *tenants;
    struct kvk_clock *clock;
    uint64_t policy_ns;      /* test hook: eviction's time; 0: the clock's */
    uint64_t stamp;          /* one more per request that uses blocks: orders uses */
    uint64_t stood_still_ns; /* time in which the daemon itself was stopped: lease clock =
                                clock - this */
    uint64_t maintained_ns;  /* last round */

    struct kvk_index *index;
    struct kvk_evict *evict;
    struct kvk_mover *mover;
    struct kvk_tier_state tiers[KVK_TIER_COUNT];
    struct kvk_disk_tier *disk_tier;        /* disk_tier.h; NULL: none. Ours */
    struct kvk_scrub *scrub;                /* scrub.h; ours */
    struct kvk_tenant_state *tenant_states; /* [KVK_TENANT_COUNT_MAX] by tenant.index, ours */
    bool trim_wanted;    /* a tenant may be above its limit: a quota was changed */
    uint32_t idle_next;  /* group whose idle blocks are looked for next */
    uint32_t usage_next; /* tenant whose counters are written to the catalogue next */

    struct kvk_device *devices[2];   /* ours, to be closed; NULL: none */
    struct kvk_device *memory;       /* borrowed from them: the CPU memory that processes map
                                        (generations, scratch) */
    struct kvk_catalogue *catalogue; /* borrowed, as the next two; NULL: none */
    struct kvk_disk *disk;
    struct kvk_keeper *keeper;
    struct kvk_kept *kept;      /* kept.h; NULL: there is no keeper. Ours */
    uint32_t *records;          /* [config.blocks] entry of the block's sidecar + 1; 0: none. Zero
                                   pages; NULL without a keeper. Ours */
    uint32_t record_next;       /* id whose use is written down next */
    uint32_t record_group_next; /* group whose sidecar is looked after next */
    bool leaving;               /* what is kept is no longer freed: the next daemon shall have it */
    struct kvk_restore_counts restored; /* at the start */
    uint32_t aside_sessions; /* of processes of before, that were promised room at the start */
    uint32_t aside_blocks;
    uint64_t aside_bytes[KVK_MEMORY_TIER_COUNT];
    bool threads;      /* as the options say */
    bool persist_busy; /* somebody changes what is recorded of spaces, without the lock, now */
    bool persist_wanted; /* a space may be without its record */
    uint64_t persist_retry_ns; /* not before: a space could not be recorded */

    struct kvk_space *spaces;
    struct kvk_table space_table; /* id -> struct kvk_space */
    uint32_t space_count;
    uint32_t capacity_blocks;  /* that the tiers can hold, as the policy was told */
    struct kvk_group **groups; /* [group_capacity], NULL: free number */
    uint32_t group_capacity;
    uint32_t group_end; /* numbers from here on were never given out */

    struct kvk_table sequence_table; /* id -> struct kvk_sequence */
    struct kvk_table lease_table;
    struct kvk_lease *lease_heap; /* the one that expires first, or NULL */
    struct kvk_ended_lease ended_leases[KVK_ENDED_LEASE_COUNT]; /* ring */
    uint64_t ended_lease_count;
    struct kvk_table transfer_table;
    struct kvk_table session_table;
    struct kvk_instance *instances;
    uint32_t instance_count;
    struct kvk_session *waiting_sessions; /* instance over; stream or process still there */
    size_t session_place;                 /* of session_table: which processes are looked at next */
    uint64_t
        next_id; /* of sequences, leases, transfers, instances, mappings: from a random start */

    struct kvk_punch *punches;
    uint32_t purge_next; /* sweep for blocks of invalidated roots */
    uint32_t purge_left; /* ids that the sweep has still to see */
    bool purge_wanted;
    uint32_t stray_next;      /* group whose strays are counted next */
    uint32_t tidy_next;       /* group that is tidied next */
    uint32_t give_next;       /* group that is asked for a slab next, where nobody offers one */
    uint64_t passing_holds;   /* of calls that work without the lock now: kvk_block_borrow() */
    uint32_t moves_under_way; /* blocks that are being copied between tiers, now */
    uint32_t lent_blocks;     /* idle blocks in memory that the scrub looks at, now: who could have
                                 had their room waits for the moment */
    struct kvk_refusal refusals[KVK_REFUSAL_COUNT]; /* ring */
    uint64_t refusal_count;
    struct kvk_wrong_reuse wrong_reuses[KVK_WRONG_REUSE_COUNT]; /* ring by stats.wrong_reuse */
    struct kvk_mrcs mrcs;       /* how often caches of other sizes would hit */
    struct kvk_journal journal; /* blocks that went */
    struct kvk_gone_cause {
        enum kvk_gone_reason reason;   /* KVK_GONE_NONE: what the block's state says */
        const struct kvk_space *space; /* who gets the room; NULL: nobody in particular */
    } gone_cause;                      /* why blocks go just now: see kvk_gone_begin() */
    bool constant_hash;                /* test hook */
    bool draining;
    struct kvk_cache_stats stats;

    /* Scratch for walks, sized for config.tokens at start: used only with the lock held, so that
     * look-ups allocate nothing. */
    uint32_t *path[KVK_GROUP_COUNT_MAX];
    uint8_t *path_tiers[KVK_GROUP_COUNT_MAX];
    uint64_t path_capacity;

    pthread_t maintenance;
    pthread_cond_t wake; /* the maintenance thread, before its time */
    bool maintenance_running;
    _Atomic bool stopping;
};

/* ================= space.c ================= */

/* The space, if the caller may act for its tenant; KVK_NOT_FOUND otherwise, alike for both. */
KVK_CHECKED enum kvk_status kvk_space_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           uint64_t space_id, struct kvk_space **space,
                                           struct kvk_error *error);
/* May anything be done for it? As kvk_tenant_check(), and the space's own mode. */
KVK_CHECKED enum kvk_status kvk_space_check(const struct kvk_space *space, struct kvk_error *error);
/* Neither it nor its tenant is in shadow mode: what is cached is found, and what is sealed is put
 * into the index. */
bool kvk_space_shares(const struct kvk_space *space);
struct kvk_group *kvk_group_of(const struct kvk_cache *cache, const struct kvk_block *block);

/* Open the root of each group for a salt, at the space's generation: references are the caller's.
 * All or none. root.user is (space id, generation) as kvk_root_is_current() reads it. */
KVK_CHECKED enum kvk_status kvk_space_roots(struct kvk_cache *cache, struct kvk_space *space,
                                            const uint8_t *salt, size_t salt_size,
                                            uint32_t roots[KVK_GROUP_COUNT_MAX],
                                            struct kvk_error *error);
/* The roots as they are known, KVK_ROOT_NONE where they are not; without references, so valid while
 * the lock is held. Allocates nothing: for look-ups. */
void kvk_space_roots_find(const struct kvk_cache *cache, const struct kvk_space *space,
                          const uint8_t *salt, size_t salt_size,
                          uint32_t roots[KVK_GROUP_COUNT_MAX]);
void kvk_space_roots_release(struct kvk_cache *cache, struct kvk_space *space,
                             const uint32_t roots[KVK_GROUP_COUNT_MAX]);
/* The key of a group's root, whether it is there or not; `back` generations ago. KVK_EXHAUSTED: no
 * memory (with `back` 0: never). */
KVK_CHECKED enum kvk_status kvk_space_root_key(const struct kvk_space *space, uint32_t group,
                                               const uint8_t *salt, size_t salt_size, uint64_t back,
                                               struct kvk_key *key);
const struct kvk_hasher *kvk_space_hasher(const struct kvk_space *space);
/* Not invalidated since it was opened. */
bool kvk_root_is_current(const struct kvk_cache *cache, uint32_t root);
/* Relative cost of block `position` of the space. */
float kvk_space_block_cost(const struct kvk_space *space, uint64_t position);
/* Estimates in ns for tokens [first, last); 0: not known. */
uint64_t kvk_space_recompute_ns(const struct kvk_space *space, uint64_t first, uint64_t last);
void kvk_space_destroy_all(struct kvk_cache *cache);

/* ================= block_store.c: holds, pins, copies, counters, queues ================= */

/* Bring counters and queues in line with the block (and its parent) after a change. */
void kvk_block_settle(struct kvk_cache *cache, uint32_t block);

/* One more holder / one less. `leased`: the holder is a lease. The last release of a sealed,
 * indexed, current block makes it EVICTABLE; of an unindexed or invalidated one frees it; of an
 * unsealed one aborts it. */
void kvk_block_hold(struct kvk_cache *cache, uint32_t block, bool leased);
void kvk_block_release(struct kvk_cache *cache, uint32_t block, bool leased);
void kvk_block_pin(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
void kvk_block_unpin(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* A hold and a pin of a call that uses the copy without the lock and gives both back at its end
 * (a read, an attention, a copy). Counted in cache.passing_holds. */
void kvk_block_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
void kvk_block_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
/* The same without a pin: the block stays, its copies may move. */
void kvk_block_keep(struct kvk_cache *cache, uint32_t block);
void kvk_block_let_go(struct kvk_cache *cache, uint32_t block);

/* Blocks that are dropped until kvk_gone_end() go for this reason, to make room for `space` (NULL:
 * for nobody in particular); the journal says so. The lock is not dropped in between. Not nested.
 */
void kvk_gone_begin(struct kvk_cache *cache, enum kvk_gone_reason reason,
                    const struct kvk_space *space);
void kvk_gone_end(struct kvk_cache *cache);
/* Into the journal: a copy of the (indexed) block leaves `tier`, `left` are the tiers that still
 * have one. Called by block_store.c, before anything of the block changes. */
void kvk_gone_note(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint8_t left,
                   enum kvk_gone_reason otherwise);
/* A block of this key would have come, but its writer went. */
void kvk_gone_note_aborted(struct kvk_cache *cache, const struct kvk_sequence *sequence);

/* Take a held block without children and anchors out of the index: no look-up finds it any more,
 * and its last release frees it. */
void kvk_block_unindex(struct kvk_cache *cache, uint32_t block);

/* The block's bytes count as quarantine from now on, or no longer. */
void kvk_block_set_quarantined(struct kvk_cache *cache, uint32_t block, bool quarantined);

/* The tier of the copy to read: device before host. The block must have a slot in memory: what is
 * held has one (a copy on disk alone is held only by those who are restoring it). */
enum kvk_tier kvk_block_tier(const struct kvk_block *block);

/* Address of a shard of a slot that has memory. */
uint8_t *kvk_slot_address(const struct kvk_group *group, enum kvk_tier tier, uint32_t slot,
                          uint32_t shard);
/* Address of a shard of the block's copy or slot in a tier. */
uint8_t *kvk_block_address(const struct kvk_cache *cache, const struct kvk_block *block,
                           enum kvk_tier tier, uint32_t shard);
uint32_t kvk_block_generation(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier);
uint64_t *kvk_block_checksums(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier); /* [shard_count] */

/* Drop one copy; the last one forgets the block (HOLLOW, or FREE and gone). It must not be pinned
 * or copying there; the last copy must not be held. Counts an eviction where `evicted`. */
void kvk_block_drop_copy(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, bool evicted);

/* The bytes in this tier do not match their checksum: they count as no copy any more, are found by
 * nobody, and go when nobody pins them or holds the block for them. A last copy that nobody holds
 * goes at once, and the block may go with it. */
void kvk_block_discredit(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* Seal an unsealed block whose bytes are all there: it gets its copy bit. */
void kvk_block_seal(struct kvk_cache *cache, uint32_t block);

/* Give `winner` (hollow, indexed) the bytes of `block` (sealed, private, one holder); `block` is
 * freed, the caller's hold and pins are now on the winner. */
void kvk_block_fill(struct kvk_cache *cache, uint32_t winner, uint32_t block);

/* `ours` (sealed, private, one holder) is the same block as `winner`, which has its bytes on disk
 * alone: the winner gets our copy in memory, with its hold and pins; `ours` is gone. */
void kvk_block_adopt(struct kvk_cache *cache, uint32_t winner, uint32_t ours);

/* For restore.c: the loose slot is a whole copy of the block, with these checksums [shard_count].
 * Nothing is settled: the caller holds the block, and releases it when all is there. */
void kvk_block_put_back(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot,
                        const uint64_t *checksums);

/* A new block of the group with `slot`, RESERVED: one hold and one pin, the caller's.
 * KVK_BLOCK_NONE: config.blocks are known already. */
uint32_t kvk_block_create(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          uint32_t slot);
/* A copy has landed: the loose slot is the block's, its checksums are the caller's to store. */
void kvk_block_attach(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot);
/* An unsealed block's bytes were copied: the loose slot in `target` becomes its slot, its pins go
 * along, the old slot is free. */
void kvk_block_relocate(struct kvk_cache *cache, uint32_t block, enum kvk_tier target,
                        uint32_t slot);

/* A whole, unpinned block's bytes were copied within its tier: the loose slot becomes its slot,
 * with these checksums [shard_count]; the old slot is free. */
void kvk_block_reslot(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot,
                      const uint64_t *checksums);

/* Take a free slot of the arena's slabs for a copy under way, or KVK_SLOT_NONE; give it back. It is
 * loose meanwhile: used, bound, nobody's. */
uint32_t kvk_slot_take(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier);
void kvk_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                   uint32_t slot);

/* The same for a slot that was taken when the process began, by its number: its memory, or its part
 * of the file, is there. KVK_EXISTS, KVK_EXHAUSTED, KVK_INVALID as kvk_arena_take_at();
 * KVK_EXHAUSTED also where there is no memory for the queues. */
KVK_CHECKED enum kvk_status kvk_slot_take_at(struct kvk_cache *cache, struct kvk_group *group,
                                             enum kvk_tier tier, uint32_t slot);
/* The same whatever its tenant's limit is: for what must be kept out of use. */
KVK_CHECKED enum kvk_status kvk_slot_keep_at(struct kvk_cache *cache, struct kvk_group *group,
                                             enum kvk_tier tier, uint32_t slot);

/* A slot of the disk that left its block is free again: its record's removal is committed. */
void kvk_slot_retire(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot);

/* May the last copy in memory go without leaving a child with bytes there behind? */
static inline bool kvk_block_is_leaf(const struct kvk_group *group, const struct kvk_block *block)
{
    return group->windowed || block->memory_children == 0;
}

/* The next part of a table answer, its arrays carved from tables.memory. */
struct kvk_table_part *kvk_tables_part(struct kvk_tables *tables, uint32_t group,
                                       uint64_t first_block, uint32_t count);
/* Fill one part of a table answer from block ids: slots, tiers, generations. */
void kvk_table_fill(const struct kvk_cache *cache, const uint32_t *blocks, uint32_t count,
                    struct kvk_table_part *part);
/* Room in tables.memory for `entries` entries over all parts, and no part yet. Unlocked; grows,
 * never shrinks. */
KVK_CHECKED enum kvk_status kvk_tables_reserve_unlocked(struct kvk_tables *tables, uint64_t entries,
                                                        struct kvk_error *error);

/* ================= room.c: reserving slots, evicting, demoting ================= */

/* What a call wants reserved, over all groups, all or nothing. */
struct kvk_room_want {
    enum kvk_tier tier;
    uint32_t counts[KVK_GROUP_COUNT_MAX]; /* blocks per group */
    uint64_t growth_bytes;     /* to be kept beside them (OpenSequence): there must be room for it;
                                  the caller adds it to tiers[tier].growth_bytes */
    uint64_t own_growth_bytes; /* of tiers[tier].growth_bytes, what this call may use (Append); the
                                  caller takes it off again */
    uint64_t sequence_id;      /* for the journal */
};

/*
 * Reserve fresh blocks (state RESERVED, one hold and one pin in the tier each, the caller's), in
 * `blocks[group]` [counts[group]]. Evicts and hands slabs over as needed.
 * KVK_WOULD_BLOCK: room can be made, but only by copying or punching: nothing changed; call
 * kvk_room_make_drops() and try again. KVK_EXHAUSTED: it cannot; the error says why (cause, needed,
 * limit, retry hint) and the journal has it.
 */
KVK_CHECKED enum kvk_status kvk_room_reserve(struct kvk_cache *cache, struct kvk_space *space,
                                             const struct kvk_room_want *want,
                                             uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                             const struct kvk_caller *caller,
                                             struct kvk_error *error);

/* A slot in another tier for a copy of an existing block; no hold, no state change. Used up by
 * kvk_tier_copy_drops(), or given back. KVK_WOULD_BLOCK as kvk_room_reserve(). `caller` NULL: not
 * on anybody's behalf; growth that is kept is no hindrance and nothing is noted. */
KVK_CHECKED enum kvk_status kvk_room_slot(struct kvk_cache *cache, struct kvk_group *group,
                                          enum kvk_tier tier, const struct kvk_caller *caller,
                                          uint32_t *slot, struct kvk_error *error);
void kvk_room_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t slot);

/* Demote a bounded batch of victims, back or punch slabs, so that a reservation that would have
 * blocked gets further. Drops the lock. KVK_DEADLINE, KVK_CANCELLED, or KVK_EXHAUSTED where nothing
 * can be done any more. */
KVK_CHECKED enum kvk_status kvk_room_make_drops(struct kvk_cache *cache, struct kvk_space *space,
                                                const struct kvk_room_want *want,
                                                const struct kvk_caller *caller,
                                                struct kvk_error *error);

/* Reserve, making room as long as the caller may block and has time: the loop over both. The lock
 * is dropped only if the caller may block. */
KVK_CHECKED enum kvk_status kvk_room_reserve_drops(struct kvk_cache *cache, struct kvk_space *space,
                                                   const struct kvk_room_want *want,
                                                   uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                                   const struct kvk_caller *caller,
                                                   struct kvk_error *error);

/* Why would `needed_bytes` not fit in the tier now? Fills cause, value, limit, retry hint and text,
 * returns KVK_EXHAUSTED; also writes the journal. */
KVK_CHECKED enum kvk_status kvk_room_refuse(struct kvk_cache *cache, enum kvk_tier tier,
                                            uint64_t needed_bytes, struct kvk_space *space,
                                            uint64_t sequence_id, const struct kvk_caller *caller,
                                            struct kvk_error *error);
/* Any refusal worth remembering (RESOURCE_EXHAUSTED, PRECONDITION…). */
void kvk_refusal_note(struct kvk_cache *cache, const struct kvk_caller *caller,
                      const struct kvk_tenant *tenant, uint64_t sequence_id, uint64_t needed_bytes,
                      const struct kvk_error *error);
/* The refusal that was noted last has hint and advice by now. */
void kvk_refusal_amend(struct kvk_cache *cache, const struct kvk_error *error);

/* ================= quota.c ================= */

/* The tables of all tenants that are there; for kvk_cache_create(). */
KVK_CHECKED enum kvk_status kvk_tenant_states_create(struct kvk_cache *cache,
                                                     struct kvk_error *error);
struct kvk_tenant_state *kvk_tenant_state_of(const struct kvk_cache *cache,
                                             const struct kvk_tenant *tenant);
/* A space comes to its tenant's list, or leaves it. */
void kvk_quota_space_link(struct kvk_cache *cache, struct kvk_space *space);
void kvk_quota_space_unlink(struct kvk_cache *cache, struct kvk_space *space);

/* So many bytes more, or less, are bound (or kept for growth): in the tier's sum, in its tenant's
 * and in what is guarded. */
void kvk_quota_bound_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                            enum kvk_tier tier, uint64_t bytes, bool add);
void kvk_quota_growth_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                             enum kvk_tier tier, uint64_t before_bytes, uint64_t after_bytes);

/* Would `bytes` more of slots pass the tenant's limit of the tier? */
bool kvk_quota_is_full(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       enum kvk_tier tier, uint64_t bytes);
/* Bytes of slots that it may still have; UINT64_MAX: no limit. */
uint64_t kvk_quota_left(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        enum kvk_tier tier);
/* Bytes that it has above its guarantee: what others may take. */
uint64_t kvk_quota_spare(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         enum kvk_tier tier);
/* With `bytes` more it would still be within its guarantee. */
bool kvk_quota_is_due(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_tier tier, uint64_t bytes);

enum kvk_quota_verdict {
    KVK_QUOTA_OK = 0,
    KVK_QUOTA_LIMIT,      /* over its own limit */
    KVK_QUOTA_GUARANTEED, /* what others are guaranteed would not be left for them */
};
/* May the tenant have `needed` bytes of slots and keep `growth` more, of which `own_growth` were
 * kept before? */
enum kvk_quota_verdict kvk_quota_admits(const struct kvk_cache *cache,
                                        const struct kvk_tenant *tenant, enum kvk_tier tier,
                                        uint64_t needed_bytes, uint64_t growth_bytes,
                                        uint64_t own_growth_bytes);
/* The refusal of a verdict, with its numbers and the time to try again. */
enum kvk_status kvk_quota_fail(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               enum kvk_tier tier, uint64_t needed_bytes,
                               enum kvk_quota_verdict verdict, struct kvk_error *error);

/* What was bound for the tenant, before blocks that nobody held are held for it. */
struct kvk_quota_mark {
    uint64_t bound_bytes[KVK_TIER_COUNT];
};
void kvk_quota_mark(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                    struct kvk_quota_mark *mark);
/* Have the holds taken since left less than others are guaranteed? KVK_EXHAUSTED: give them back.
 */
KVK_CHECKED enum kvk_status kvk_quota_check_holds(const struct kvk_cache *cache,
                                                  const struct kvk_tenant *tenant,
                                                  const struct kvk_quota_mark *mark,
                                                  struct kvk_error *error);

/* `more` sequences (leases) of the tenant: KVK_EXHAUSTED over its limit. */
KVK_CHECKED enum kvk_status kvk_quota_check_count(const struct kvk_tenant_state *state,
                                                  bool sequences, uint32_t more,
                                                  struct kvk_error *error);
/* Drop up to `count` copies on disk of a tenant above its limit there: disk_room.c. */
void kvk_disk_trim(struct kvk_cache *cache, struct kvk_tenant_state *state, uint32_t count);
/* A bounded part of what a lowered limit and idle times leave to do. Drops the lock. */
void kvk_quota_maintain_drops(struct kvk_cache *cache);
/* Drop what was idle for too long: a bounded round. idle.c. */
void kvk_idle_round(struct kvk_cache *cache);

/* ================= usage.c ================= */

/* The tenant's bytes in the tier are about to change. */
void kvk_usage_advance(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       enum kvk_tier tier);
/* state.usage as it is now. */
void kvk_usage_refresh(struct kvk_cache *cache, struct kvk_tenant_state *state);
/* The tenant's place in the tables is nobody's any more: it has nothing. */
void kvk_usage_end(struct kvk_cache *cache, struct kvk_tenant_state *state);
/* Nor has it counters in the catalogue. */
void kvk_usage_forget_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* Now and then: counters to the catalogue. Drops the lock. */
void kvk_usage_maintain_drops(struct kvk_cache *cache);

/* ================= transfer between tiers: tiering.c ================= */

/*
 * Copy blocks to `tier`, each with a slot there taken by kvk_room_slot(). Every block must be held
 * or be in the caller's transfer by TRANSFER_BEGIN (which this does). Drops the lock while bytes
 * move. Checksums of whole copies are verified on the way; an unsealed block's is stored. On
 * KVK_OK all have their copy in `tier` (an unsealed block has moved with its pins: its old slot is
 * free). The host tier is exclusive: what was copied to the device loses its host copy unless that
 * is pinned. On failure no block has changed, and all new slots are given back; KVK_DATA_LOSS: a
 * source did not match: that copy is discredited, and counted.
 */
struct kvk_move {
    uint32_t block;
    uint32_t slot; /* in the target tier */
};
KVK_CHECKED enum kvk_status kvk_tier_copy_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                                const struct kvk_move *moves, uint32_t move_count,
                                                struct kvk_error *error);

/* The two halves of it, for those who choose blocks one by one. Begin borrows the block and takes
 * it out of its queue; run ends every move that was begun, and where it went well drops the source
 * copy if that is wanted and nobody pins it. */
void kvk_tier_move_begin(struct kvk_cache *cache, enum kvk_tier tier, const struct kvk_move *move);
KVK_CHECKED enum kvk_status kvk_tier_moves_run_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                                     const struct kvk_move *moves,
                                                     uint32_t move_count, bool drop_source,
                                                     struct kvk_error *error);

/* Copy the first bytes of one block into another (copy-on-write of a tail): all shards, whole
 * slots. Both are held by the caller. Drops the lock. */
KVK_CHECKED enum kvk_status kvk_block_clone_drops(struct kvk_cache *cache, uint32_t target,
                                                  uint32_t source, struct kvk_error *error);

/* Take (or verify) the checksums of whole blocks where they lie. Drops the lock; blocks must be
 * held. verify false: store them (at seal). */
KVK_CHECKED enum kvk_status kvk_block_checksum_drops(struct kvk_cache *cache,
                                                     const uint32_t *blocks, uint32_t count,
                                                     bool verify, struct kvk_error *error);

/* Demotion ahead of need: keep config.device_free_percent of the device tier free or clean. One
 * bounded batch. Drops the lock. */
void kvk_tier_run_ahead_drops(struct kvk_cache *cache);
/* Punch slabs that left their arenas; give the budget back. Drops the lock. */
void kvk_tier_punch_drops(struct kvk_cache *cache);
/* What is punched out is not charged any more; frees the punch. */
void kvk_tier_punch_end(struct kvk_cache *cache, struct kvk_punch *punch);
uint64_t kvk_tier_load_ns(const struct kvk_cache *cache, uint64_t bytes); /* estimate */

/* ================= maintenance: cache.c, invalidate.c, room.c ================= */

/* Memory of the engine's own tables: index, tokens, policy, journal, curves. O(1), or nearly. */
uint64_t kvk_cache_metadata_bytes(const struct kvk_cache *cache);
/* Memory that workers have for operands of attention; it counts in no tier. Walks the sessions. */
uint64_t kvk_cache_workspace_bytes(const struct kvk_cache *cache);
/* Time in all in which the daemon itself stood still (stopped, or the machine slept), what is not
 * noted yet included: lease time is the clock's less this. */
uint64_t kvk_cache_stood_still(const struct kvk_cache *cache, uint64_t now_ns);
/* Free what invalidated roots left behind, over at most `count` block ids. */
void kvk_purge_slice(struct kvk_cache *cache, uint32_t count);
/* Give back slabs that stand empty, and memory where there is no budget for it; back places ahead
 * of need. Drops the lock. */
void kvk_room_tidy_drops(struct kvk_cache *cache);
/* Every law of the engine's own, with the lock held; kvk_cache_check() takes it. */
void kvk_cache_check_locked(struct kvk_cache *cache);

/* ================= lookup.c ================= */

/* The longest boundary in all groups at once, of a prompt under roots[] (KVK_ROOT_NONE: nothing).
 * Fills cache.path[g] (block ids from the start) and path_tiers[g]; `blocks` is the boundary.
 * `token_limit`: the boundary lies at or below it (leave_last). */
struct kvk_prefix {
    uint64_t blocks;
    uint64_t known[KVK_GROUP_COUNT_MAX]; /* path entries that are filled */
    uint64_t hashed_bytes;
};
void kvk_prefix_find(struct kvk_cache *cache, struct kvk_space *space,
                     const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                     uint64_t token_limit, struct kvk_prefix *prefix);
/* Some of path_tiers were changed: the boundary as it is now, at or below prefix->blocks. */
void kvk_prefix_shorten(const struct kvk_cache *cache, const struct kvk_space *space,
                        struct kvk_prefix *prefix);
/* Does a query after `blocks` blocks see block `index` of the group? */
bool kvk_group_sees(const struct kvk_group *group, uint64_t blocks, uint64_t index);
/* Tokens that a look-up may find: 0 below the space's lookup_min_tokens. */
uint64_t kvk_prefix_limit(const struct kvk_space *space, const struct kvk_prompt *prompt,
                          bool leave_last);
/* Count one query and what it hit; of a retry only that it was one. */
void kvk_prefix_count(struct kvk_cache *cache, struct kvk_space *space, uint64_t query_tokens,
                      uint64_t hit_tokens, bool retry);
/* Count a use of every block of the boundary that is seen, deepest first. */
void kvk_prefix_use(struct kvk_cache *cache, struct kvk_space *space,
                    const struct kvk_prefix *prefix);
uint64_t kvk_policy_now(const struct kvk_cache *cache);
/* A look-up, or moving what it found, took so long. */
void kvk_prefix_cost(struct kvk_cache *cache, struct kvk_space *space, uint64_t begun_ns);

/* ================= sequence files ================= */

/* The sequence, if it is the session's instance's; KVK_NOT_FOUND / KVK_PERMISSION / busy. */
KVK_CHECKED enum kvk_status kvk_sequence_find(struct kvk_cache *cache,
                                              const struct kvk_caller *caller, uint64_t session_id,
                                              uint64_t sequence_id, struct kvk_session **session,
                                              struct kvk_sequence **sequence,
                                              struct kvk_error *error);

/* End a sequence that its instance loses: what is unsealed goes to the quarantine of each session
 * whose live process may write there, else back at once. Busy ones are doomed instead. */
void kvk_sequence_abandon(struct kvk_cache *cache, struct kvk_sequence *sequence);
/* A rank ended: cut the sequence back to what is sealed by all; quarantine as above. */
void kvk_sequence_rank_ended(struct kvk_cache *cache, struct kvk_sequence *sequence,
                             struct kvk_session *session);

/* ================= lease.c ================= */

void kvk_lease_end(struct kvk_cache *cache, struct kvk_lease *lease); /* release all, free it */
void kvk_leases_expire(struct kvk_cache *cache);                      /* bounded */
KVK_CHECKED enum kvk_status kvk_lease_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           uint64_t session_id, uint64_t lease_id,
                                           struct kvk_session **session, struct kvk_lease **lease,
                                           struct kvk_error *error);
void kvk_transfer_finish(struct kvk_cache *cache, struct kvk_transfer *transfer);
uint64_t kvk_lease_clock(const struct kvk_cache *cache);

/* ================= session.c ================= */

/* The session, if it is the caller's tenant's and connected. KVK_NOT_FOUND (session ended). */
KVK_CHECKED enum kvk_status kvk_session_find(struct kvk_cache *cache,
                                             const struct kvk_caller *caller, uint64_t session_id,
                                             struct kvk_session **session, struct kvk_error *error);
/* May a live process of this instance write the group's slots in the tier? One that can, or NULL.
 */
struct kvk_session *kvk_instance_writer(struct kvk_instance *instance,
                                        const struct kvk_group *group, enum kvk_tier tier);
/* Take over the last hold and pin of an unsealed block until the session's process is gone. */
void kvk_session_quarantine(struct kvk_cache *cache, struct kvk_session *session, uint32_t block);
/* One bounded round: processes without a side socket, tokens that were not used, instances whose
 * last busy call has ended. Drops the lock. */
void kvk_sessions_maintain(struct kvk_cache *cache);
/* Tell the sessions of a tenant (NULL: of all). Without the lock. */
void kvk_sessions_notify_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                  enum kvk_notice_kind kind, uint64_t value);
/* The daemon ends: end every session and wait for no process. Without the lock. */
void kvk_sessions_end_all_unlocked(struct kvk_cache *cache);
uint64_t kvk_cache_new_id(struct kvk_cache *cache);

#endif
