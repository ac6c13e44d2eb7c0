/*
 * The engine's state: every struct behind struct kvk_cache. What may be done with it, and by whom,
 * is in daemon/cache_internal.h, which engine files include.
 *
 * Who owns what: the cache owns everything here. A block belongs to one group (block.arena is the
 * group's number in cache.groups). Holders of blocks are sequences, leases, transfers, reads and
 * quarantines; each hold and pin is given back by the one that took it, exactly once.
 *
 * Locking: every field here needs cache.lock, unless it says otherwise.
 */
#ifndef KVK_DAEMON_CACHE_STATE_H
#define KVK_DAEMON_CACHE_STATE_H

#include <stdatomic.h>

#include "base/lock.h"
#include "base/slots.h"
#include "base/table.h"
#include "daemon/advice.h"
#include "daemon/attention.h"
#include "daemon/cache.h"
#include "daemon/disk_tier.h"
#include "daemon/events.h"
#include "daemon/hint.h"
#include "daemon/journal.h"
#include "daemon/lookup.h"
#include "daemon/metadata.h"
#include "daemon/mrc.h"
#include "daemon/mover.h"
#include "daemon/quota.h"
#include "daemon/remote_store.h"
#include "daemon/report.h"
#include "daemon/restore.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/tier_form.h"
#include "daemon/upkeep.h"
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
    uint32_t empty_rounds;       /* of tidying that found no slot used, since one was taken */
    uint64_t used_bytes;         /* = arena.used_count x arena.slot_bytes */
    uint64_t stray_bytes;        /* as last looked at */
    uint64_t stray_told_bytes;   /* the most that was logged */
    uint32_t lent_count; /* mappings of device memory that processes have: its slabs stay theirs,
                            since no handle can be called back */
    bool lent_for_good;  /* the daemon ended before such a process: the memory is not given back */
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
    uint64_t block_bytes; /* all shards, in the space's own format: in both tiers of memory, and
                             what sequences are counted in */
    struct kvk_tier_form forms[KVK_TIER_COUNT]; /* how a block lies in each tier, and what it takes
                                                   there; those of memory are the own format */
    uint64_t record_bytes; /* what a block takes beside its bytes: metadata.h */
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
    bool is_public;           /* not opened by anybody: the slots of one public prefix. public.h */
    uint32_t public_slots[KVK_GROUP_COUNT_MAX]; /* of a public one: exactly so many */
    uint64_t public_since; /* prefixes published up to here are not for it: cache.public_clock when
                              it was invalidated last */
    struct kvk_remote_member *remote; /* remote_store.h; NULL: it shares nothing. Ours */
    bool remote_joins;                /* `remote` is being made: an invalidation waits for it */
    bool recorded;                    /* in the catalogue: see persist.h */
    uint64_t idle_ms;   /* after so long unused its blocks go; 0: as the tenant's quota says */
    bool partial_reuse; /* a hit may end within a block: partial.c */
    /* counters */
    uint64_t queries, query_tokens, hit_tokens;
    uint64_t cost_ns, saved_ns; /* what its look-ups and moves took; what hits saved (estimate) */
    struct kvk_space *next;     /* all spaces */
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
    bool doomed;        /* its instance ended meanwhile, or Close did: that call ends it */
    uint32_t *tokens;   /* [length], ours */
    uint64_t token_capacity;
    struct kvk_content_span *spans; /* [span_count], ours */
    uint32_t span_count;
    uint32_t span_capacity;
    uint8_t *salt;
    size_t salt_size;
    struct kvk_hint *hints; /* [hint_count] for what it seals, ours */
    uint32_t hint_count;
    uint64_t fixed_bytes;    /* of memory: what never grows */
    uint64_t extra_bytes;    /* kept for content bytes of blocks that it has not sealed yet */
    uint64_t metadata_bytes; /* as its tenant is charged: kvk_sequence_metadata() */
    uint64_t length;
    uint64_t committed;
    uint64_t cached;
    uint64_t sealed;                           /* the least of rank_sealed */
    uint64_t rank_sealed[KVK_SHARD_COUNT_MAX]; /* [space.rank_count] */
    uint64_t whole_blocks;   /* blocks below are sealed (and, unless detached, indexed) */
    uint64_t ranks_apart_ns; /* since when rank_sealed differ; 0: they do not */
    uint64_t asked_blocks;   /* whole blocks of the prompt that a look-up could have found */
    uint64_t shared_tokens;  /* unsealed blocks below may be shared with a fork */
    uint32_t writers;        /* kvk_sequence_write() calls that copy now: in all, and by rank */
    uint16_t rank_writers[KVK_SHARD_COUNT_MAX];
    uint32_t fork_index;    /* 0: opened; else which child of its Fork, from 1 */
    bool cut_wanted;        /* a rank ended while it was busy: that call cuts it back */
    bool marked;            /* within one call: this id was named before */
    uint64_t growth_tokens; /* room still kept for it */
    uint64_t growth_bytes;  /* as counted in cache.tiers[home].growth_bytes */
    struct kvk_sequence_group groups[KVK_GROUP_COUNT_MAX];
    struct kvk_disk_estimate disk; /* what of its prefix was on disk alone when it was opened */
    uint64_t public_tokens;        /* of cached, those in public blocks (group 0) */
    uint32_t partial_tokens;       /* of cached, those that were copied from a part of a block */
    struct kvk_last_change last;
    struct kvk_request_id request_id;
    uint64_t opened_ns;
    struct kvk_sequence *next, *previous; /* of the instance */
};

/* ---- Public prefixes: public.h ---- */

struct kvk_publication {
    uint64_t id;
    struct kvk_space *space; /* public: its slots have the blocks; referenced. Its tenant is the
                                publisher, who pays for them */
    uint64_t source_id;      /* the publisher's space from which they were copied */
    uint64_t clock;          /* cache.public_clock when it was published */
    uint64_t published_s;    /* since 1970 */
    uint32_t *tokens;        /* [block_count x block_tokens], ours */
    uint32_t block_count;
    struct kvk_content_span *spans; /* [span_count], ours */
    uint32_t span_count;
    uint32_t *blocks[KVK_GROUP_COUNT_MAX]; /* [block_count], KVK_BLOCK_NONE where a window has left
                                              none; held, and pinned in the host tier. Ours */
    uint64_t hits, hit_tokens;
    bool stored; /* it has a file, and outlives the daemon: public_store.h */
    struct kvk_publication *next;
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
    uint64_t metadata_bytes; /* as its tenant is charged */
    bool marked;             /* within one call: this id was named before */
    bool ending;             /* a call gives its blocks back, and then it: nobody else finds it */
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
    uint64_t metadata_bytes;              /* as its tenant is charged */
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
    uint64_t metadata_bytes; /* as its tenant is charged, with its mappings */
    uint32_t *quarantine;    /* [quarantine_count] blocks, unsealed, whose one holder this is */
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
    struct kvk_metadata metadata;                  /* what else it makes the daemon keep */
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
    uint64_t partial_hits, partial_hit_tokens; /* of them, in a part of a block */
    uint64_t partial_given_up; /* parts that were found, but could not be copied, or had no room */
    uint64_t hashed_bytes;
    uint64_t pins, opens, seals, appends, forks, closes;
    uint64_t sealed_blocks, duplicate_blocks, wrong_reuse;
    uint64_t twins_equal, twins_compared, twins_left_out; /* of duplicate_blocks */
    uint64_t opaque_differences;                          /* of twins_compared */
    uint64_t evictions[KVK_TIER_COUNT];                   /* copies dropped to make room */
    uint64_t block_uses[KVK_TIER_COUNT]; /* blocks of hits, by the best tier with a copy then: what
                                            was brought for a use counts where it came to */
    uint64_t forgotten_blocks;           /* last copies dropped */
    uint64_t demoted_blocks, promoted_blocks;
    uint64_t swapped_out_blocks, swapped_in_blocks, swapped_out_bytes, swapped_in_bytes;
    uint64_t copy_failures, checksum_failures;
    uint64_t host_narrowed_blocks, host_widened_blocks; /* where the host tier is compact */
    uint64_t
        host_unfit_blocks;  /* forgotten, or left: a value that is not finite has no such form */
    uint64_t healed_blocks; /* damaged in memory while held, and whole again from disk */
    uint64_t refusals;
    uint64_t leases_expired;
    uint64_t instances_ended, sessions_ended;
    uint64_t quarantined_blocks;
    uint64_t attended_tokens;
    uint64_t attended_in_place, attended_brought_in; /* calls that had a choice */
    uint64_t slabs_moved;
    uint64_t shifted_blocks; /* to another slot of their tier, so that a slab could go */
    uint64_t invalidated_blocks;
    uint64_t published, withdrawn;           /* prefixes */
    uint64_t public_restored;                /* at the start, from their files */
    uint64_t public_store_failures;          /* files that could not be written or removed */
    uint64_t public_hits, public_hit_tokens; /* look-ups and openings that found public blocks */
    uint64_t disk_written_blocks, disk_written_bytes;
    uint64_t disk_late_blocks;     /* left memory before their turn to be written */
    uint64_t disk_skipped_blocks;  /* not queued: too many were */
    uint64_t disk_write_failures;  /* blocks */
    uint64_t disk_straight_blocks; /* of the written ones: from where they lay, without a copy */
    uint64_t disk_narrowed_blocks, disk_widened_blocks; /* in a compact format, down and up */
    uint64_t disk_unfit_blocks; /* not written: a value that is not finite has no compact form */
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
    uint64_t unkept_blocks;                          /* that found no place in their sidecar */
    uint64_t torn_records;                           /* of sidecars, at the start */
    uint64_t restored_blocks;                        /* at the start, from kept memory and disk */
    uint64_t lookup_ns, saved_ns; /* what look-ups cost against what hits saved (estimate) */
};

/* Memory of the device for what one attention brings there: attention_workspace.h. */
struct kvk_workspace {
    struct kvk_region
        region;          /* the device's, ours; whoever has taken it uses it without the lock */
    uint64_t size_bytes; /* counted; 0: it has no memory */
    bool taken;
    uint64_t used_ns; /* when it was given back */
};
#define KVK_WORKSPACE_COUNT 8

/* What attention was measured at, and what was chosen last for blocks of the host tier. */
struct kvk_attention_state {
    struct kvk_workspace workspaces[KVK_WORKSPACE_COUNT];
    _Atomic uint64_t host_rate; /* bytes per second; 0: not known. Without the lock, as the next */
    _Atomic uint64_t device_rate;
    _Atomic uint32_t host_calls; /* under way */
    struct kvk_attention_choice last;
};

/* The most that calls bring to the device, all together, beside the tier. */
#define KVK_ATTENTION_BRING_BYTES_MAX (UINT64_C(256) << 20)

/* In cache.records: there was no place for it, and it is counted. */
#define KVK_RECORD_UNKEPT UINT32_MAX

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
    struct kvk_attention_state attention;
    struct kvk_tier_state tiers[KVK_TIER_COUNT];
    struct kvk_disk_tier *disk_tier;        /* disk_tier.h; NULL: none. Ours */
    struct kvk_remote_store *remote;        /* remote_store.h; NULL: none. Ours */
    struct kvk_scrub *scrub;                /* scrub.h; ours */
    uint32_t tenant_count;                  /* that have a state now */
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
    uint32_t *records;          /* [config.blocks] entry of the block's sidecar + 1; 0: none, or
                                   KVK_RECORD_UNKEPT. Zero pages; NULL without a keeper. Ours */
    uint32_t record_next;       /* id whose use is written down next */
    uint32_t record_group_next; /* group whose sidecar is looked after next */
    bool leaving;               /* what is kept is no longer freed: the next daemon shall have it */
    struct kvk_restore_counts restored; /* at the start */
    uint32_t aside_sessions; /* of processes of before, that were promised room at the start */
    uint32_t aside_blocks;
    uint64_t aside_bytes[KVK_MEMORY_TIER_COUNT];
    bool threads;        /* as the options say */
    bool persist_busy;   /* somebody changes what is recorded of spaces, without the lock, now */
    bool persist_wanted; /* a space may be without its record */
    uint64_t persist_retry_ns; /* not before: a space could not be recorded */

    struct kvk_space *spaces;
    struct kvk_table space_table; /* id -> struct kvk_space */
    uint32_t space_count;
    uint32_t capacity_blocks;  /* that the tiers can hold, as the policy was told */
    struct kvk_group **groups; /* [group_capacity], NULL: free number */
    uint32_t group_capacity;
    uint32_t group_end; /* numbers from here on were never given out */

    struct kvk_publication *publications; /* the newest first */
    struct kvk_publication *unpublished;  /* withdrawn, with a file that has still to go */
    uint32_t publication_count;           /* those that are being made included */
    uint64_t public_clock;                /* one more with every publication */

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
    uint32_t lost_next; /* sweep for blocks on a lost device */
    bool lost_told;
    uint32_t stray_next;      /* group whose strays are counted next */
    uint32_t tidy_next;       /* group that is tidied next */
    uint32_t give_next;       /* group that is asked for a slab next, where nobody offers one */
    struct kvk_upkeep upkeep; /* what the daemon's own work keeps now */
    uint64_t passing_holds;   /* of calls that work without the lock now: kvk_block_borrow() */
    uint32_t moves_under_way; /* blocks that are being copied between tiers, now */
    struct kvk_refusal refusals[KVK_REFUSAL_COUNT]; /* ring */
    uint64_t refusal_count;
    struct kvk_wrong_reuse wrong_reuses[KVK_WRONG_REUSE_COUNT]; /* ring by stats.wrong_reuse */
    struct kvk_mrcs mrcs;       /* how often caches of other sizes would hit */
    struct kvk_journal journal; /* blocks that went */
    struct kvk_events *events;  /* events.h; NULL: none are logged. Ours */
    struct kvk_gone_cause {
        enum kvk_gone_reason reason;   /* KVK_GONE_NONE: what the block's state says */
        const struct kvk_space *space; /* who gets the room; NULL: nobody in particular */
    } gone_cause;                      /* why blocks go just now: see kvk_gone_begin() */
    bool constant_hash;                /* test hook */
    uint32_t slice_blocks;             /* see kvk_slice_drops(); less as a test hook */
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

#endif
