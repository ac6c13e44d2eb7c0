/*
 * What the doctor's two files share: the facts, gathered in doctor_facts.c, judged in doctor.c.
 */
#ifndef KVK_DAEMON_DOCTOR_INTERNAL_H
#define KVK_DAEMON_DOCTOR_INTERNAL_H

#include "base/machine_memory.h"
#include "daemon/doctor.h"
#include "daemon/report_internal.h"
#include "daemon/scrub.h"
#include "hosttier/catalogue.h"
#include "hosttier/disk.h"

#define KVK_DOCTOR_LEASE_OLD_NS (300 * KVK_NS_PER_SECOND)
#define KVK_DOCTOR_GROWTH_OLD_NS (60 * KVK_NS_PER_SECOND)
#define KVK_DOCTOR_APART_OLD_NS (10 * KVK_NS_PER_SECOND)
#define KVK_DOCTOR_REFUSAL_RECENT_NS (300 * KVK_NS_PER_SECOND)

/* One sequence, lease or process, as an example of many. */
struct kvk_example {
    uint64_t id; /* 0: none */
    uint64_t age_ns;
    char instance[KVK_NAME_SIZE];
    char tenant[KVK_NAME_SIZE];
};

struct kvk_facts {
    uint64_t now_ns;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    uint64_t passing; /* holds and copies of calls that run now */
    uint64_t sequences, leases, transfers, instances, sessions;
    struct kvk_cache_stats stats;
    uint64_t state_blocks[KVK_BLOCK_STATE_COUNT];
    struct kvk_index_stats index;
    uint64_t metadata_bytes; /* of the daemon's own tables */
    bool memory_known;
    struct kvk_machine_memory memory; /* where memory_known */

    uint32_t old_leases; /* longer than KVK_DOCTOR_LEASE_OLD_NS */
    struct kvk_example oldest_lease;
    uint64_t oldest_lease_tokens;

    uint32_t unused_growths; /* sequences that never used any of it, for a while */
    uint64_t unused_growth_bytes;
    struct kvk_example oldest_growth;

    uint32_t apart; /* sequences whose ranks are apart for a while */
    struct kvk_example oldest_apart;
    uint32_t slow_rank;
    uint64_t slow_tokens, fast_tokens;

    /* The group with the most bytes that are free in its slabs. */
    int scattered_tier;
    uint64_t scattered_space, scattered_bytes, scattered_slab_bytes;
    uint32_t scattered_slabs, scattered_groups; /* its slabs; groups that have any */

    /* Tenants with a limit that is less than one block of a space of theirs; the first of them. */
    uint32_t short_limits;
    int short_tier;
    uint64_t short_space, short_limit_bytes, short_block_bytes;
    char short_tenant[KVK_NAME_SIZE];

    /* The space whose hits cost most above what they saved. */
    uint64_t dear_space, dear_queries, dear_cost_ns, dear_saved_ns;
    uint32_t dear_spaces;
    uint32_t unpriced_spaces; /* with hits, and no way to tell what they save */

    uint32_t waiting_sessions; /* ended, whose processes may still write */
    uint64_t waiting_blocks;
    int32_t waiting_pid;

    struct kvk_wrong_reuse wrong; /* the last one */
    char wrong_model[KVK_NAME_SIZE];
    char wrong_unsaid[192]; /* parts of that space's identity that are empty */

    uint64_t journal_entries, journal_capacity;
    uint64_t journal_reach_ns; /* 0: nothing was overwritten */

    uint64_t recent_refusals;
    enum kvk_cause refusal_cause; /* the most frequent of them */
    uint64_t refusal_cause_count;
    bool refusals_more; /* the journal reaches back less far */

    bool has_disk, has_catalogue, has_keeper, keeper_wanted, keeper_may_be_wanted;
    struct kvk_disk_health disk;
    struct kvk_device_health device;
    struct kvk_remote_report remote;
    struct kvk_catalogue_stats catalogue;
    struct kvk_scrub_counts scrub;

    /* The tenant that misses most of what an endless cache would hit. */
    char gap_tenant[KVK_NAME_SIZE];
    double gap_hits, gap_twice, gap_ceiling, gap_error, gap_references;

    bool draining;
};

/* Takes the lock in slices. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_facts_gather(struct kvk_cache *cache,
                                             const struct kvk_caller *caller,
                                             struct kvk_facts *facts, struct kvk_error *error);

/* Make all checks. */
void kvk_facts_judge(const struct kvk_facts *facts, struct kvk_doctor_report *report);

#endif
