#include "daemon/doctor.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/doctor_internal.h"

/* Shares from which on there is something to say. */
#define FULL_PERCENT 90      /* of a tier used: it is full */
#define EVICTABLE_PERCENT 5  /* less than this can go */
#define LEASED_PERCENT 25    /* bound by leases alone */
#define GROWTH_PERCENT 10    /* kept, and never used */
#define SCATTERED_PERCENT 10 /* free in slabs */
#define METADATA_PERCENT 10  /* of what the tiers hold */
#define GAP_MIN 0.15         /* hit rate under its ceiling */
#define JOURNAL_SHORT_NS (600 * KVK_NS_PER_SECOND)
#define REFUSALS_MANY 10

const char *kvk_severity_name(enum kvk_severity severity)
{
    switch (severity) {
    case KVK_SEVERITY_NOTE:
        break;
    case KVK_SEVERITY_WARNING:
        return "warning";
    case KVK_SEVERITY_FAULT:
        return "fault";
    }
    return "note";
}

/* ---- Words ---- */

static unsigned long long seconds(uint64_t ns)
{
    return ns / KVK_NS_PER_SECOND;
}

static unsigned percent(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : (unsigned)((double)part / (double)whole * 100 + 0.5);
}

static const char *tier_name(int tier)
{
    return tier == KVK_TIER_DEVICE ? "device" : tier == KVK_TIER_HOST ? "host" : "disk";
}

/* A finding more; full is full. The texts follow by the functions below. */
static struct kvk_finding *find(struct kvk_doctor_report *report, const char *code,
                                enum kvk_severity severity, const char *title)
{
    static struct kvk_finding nowhere;
    struct kvk_finding *finding =
        report->count < KVK_FINDINGS_MAX ? &report->findings[report->count++] : &nowhere;
    *finding = (struct kvk_finding){.code = code, .severity = severity};
    (void)snprintf(finding->title, sizeof(finding->title), "%s", title);
    return finding;
}

KVK_PRINTF(2, 3)
static void evidence(struct kvk_finding *finding, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(finding->evidence, sizeof(finding->evidence), format, arguments);
    va_end(arguments);
}

KVK_PRINTF(2, 3)
static void action(struct kvk_finding *finding, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(finding->action, sizeof(finding->action), format, arguments);
    va_end(arguments);
}

/* ---- Faults ---- */

static void check_wrong_reuse(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_wrong_reuse *wrong = &facts->wrong;
    if (facts->stats.wrong_reuse == 0) {
        return;
    }
    struct kvk_finding *finding = find(report, "wrong_reuse", KVK_SEVERITY_FAULT,
                                       "Blocks computed again differ from their cached twins");
    evidence(finding,
             "%llu of %llu compared; the last %llu s ago in space %llu (model %.64s), group %u, "
             "block %u of its chain: %s of shard %u, layer %u is off by %.3g of its size, where "
             "%.3g is rounding.",
             (unsigned long long)facts->stats.wrong_reuse,
             (unsigned long long)facts->stats.twins_compared,
             seconds(facts->now_ns - wrong->time_ns), (unsigned long long)wrong->space_id,
             facts->wrong_model, wrong->group, wrong->position, wrong->is_value ? "V" : "K",
             wrong->shard, wrong->layer, wrong->distance, wrong->tolerance);
    action(finding,
           "Two different computations have one identity. Invalidate the space, then say more in "
           "its identity; not said so far: %s.",
           facts->wrong_unsaid[0] != '\0' ? facts->wrong_unsaid : "nothing but extra pairs");
}

static void check_held(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char text[KVK_BYTES_TEXT_SIZE];
    if (facts->sequences + facts->leases + facts->transfers + facts->passing > 0) {
        return;
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_report *tier = &facts->tiers[i];
        uint64_t bytes = tier->active_bytes + tier->leased_bytes + tier->copying_bytes;
        if (bytes == 0) {
            continue;
        }
        struct kvk_finding *finding =
            find(report, "held_without_sequences", KVK_SEVERITY_FAULT,
                 "Blocks are held though no sequence, lease or transfer is there");
        evidence(finding, "%s of the %s tier cannot leave; %llu blocks are SEALED, %llu SHARED.",
                 kvk_bytes_text(bytes, text), tier_name(i),
                 (unsigned long long)facts->state_blocks[KVK_BLOCK_SEALED],
                 (unsigned long long)facts->state_blocks[KVK_BLOCK_SHARED]);
        action(finding, "This is a fault of kvkeep's: please report it, with the log. A restart "
                        "of the daemon gives the room back.");
    }
}

static void check_checksums(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    uint64_t scrubbed = 0;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        scrubbed += facts->scrub.damaged[i];
    }
    if (facts->stats.checksum_failures + scrubbed + facts->stats.disk_damaged_blocks == 0) {
        return;
    }
    struct kvk_finding *finding = find(report, "checksum_failures", KVK_SEVERITY_FAULT,
                                       "Bytes did not match their checksums");
    evidence(finding,
             "%llu copies when they were moved or read, %llu found by the scrub, %llu on disk; "
             "all were given up, none was served.",
             (unsigned long long)facts->stats.checksum_failures, (unsigned long long)scrubbed,
             (unsigned long long)facts->stats.disk_damaged_blocks);
    action(finding, "Look for a worker that writes to sealed blocks of its own tenant (the log has "
                    "space and group), then at the memory (edac) or the disk (smartctl).");
}

static void check_copies(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->stats.copy_failures == 0) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "copy_failures", KVK_SEVERITY_WARNING, "Copies between tiers failed");
    unsigned long long moved = facts->stats.demoted_blocks + facts->stats.promoted_blocks +
                               facts->stats.swapped_out_blocks + facts->stats.swapped_in_blocks;
    evidence(finding, "%llu since the start, of %llu blocks that were moved.",
             (unsigned long long)facts->stats.copy_failures, moved);
    action(finding, "The log says which device refused. What was to be copied stayed where it "
                    "was, or counts as a miss.");
}

/* ---- Room ---- */

static void check_evictable(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char active[KVK_BYTES_TEXT_SIZE];
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_report *tier = &facts->tiers[i];
        if (tier->limit_bytes == 0 ||
            percent(tier->used_bytes + tier->growth_bytes, tier->limit_bytes) < FULL_PERCENT ||
            percent(tier->evictable_bytes, tier->limit_bytes) >= EVICTABLE_PERCENT) {
            continue;
        }
        struct kvk_finding *finding =
            find(report, "evictable_tiny", KVK_SEVERITY_WARNING,
                 "Hardly anything can be evicted: new sequences will be refused");
        evidence(finding,
                 "The %s tier is used to %u %%, and %u %% of it could go; %llu sequences bind %s, "
                 "leases %u %%, %u %% are kept for growth.",
                 tier_name(i), percent(tier->used_bytes, tier->limit_bytes),
                 percent(tier->evictable_bytes, tier->limit_bytes),
                 (unsigned long long)facts->sequences, kvk_bytes_text(tier->active_bytes, active),
                 percent(tier->leased_bytes, tier->limit_bytes),
                 percent(tier->growth_bytes, tier->limit_bytes));
        action(finding,
               "Let fewer sequences run at a time, swap some out (a refusal names which), "
               "or enlarge [tiers] %s_bytes.",
               tier_name(i));
    }
}

static void check_refusals(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->recent_refusals < REFUSALS_MANY) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "refusals", KVK_SEVERITY_WARNING, "Many requests were refused lately");
    evidence(finding, "%s%llu in the last %llu s; %llu of them for %s.",
             facts->refusals_more ? "More than " : "", (unsigned long long)facts->recent_refusals,
             seconds(KVK_DOCTOR_REFUSAL_RECENT_NS), (unsigned long long)facts->refusal_cause_count,
             kvk_cause_name(facts->refusal_cause));
    action(finding, "kvkeepctl why lists them, with what stood in the way of each.");
}

static void check_leases(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_example *oldest = &facts->oldest_lease;
    if (facts->old_leases > 0) {
        struct kvk_finding *finding =
            find(report, "leases_old", KVK_SEVERITY_WARNING, "Leases are held for long");
        evidence(finding,
                 "%u of %llu leases are older than %llu s; the oldest is %llu (tenant %.64s, "
                 "instance \"%.64s\"), %llu tokens, for %llu s.",
                 facts->old_leases, (unsigned long long)facts->leases,
                 seconds(KVK_DOCTOR_LEASE_OLD_NS), (unsigned long long)oldest->id, oldest->tenant,
                 oldest->instance, (unsigned long long)facts->oldest_lease_tokens,
                 seconds(oldest->age_ns));
        action(finding, "Somebody renews them or asked for a long time. See kvkeepctl leases; "
                        "[limits] lease_ms bounds what may be asked for.");
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_report *tier = &facts->tiers[i];
        if (tier->limit_bytes == 0 ||
            percent(tier->leased_bytes, tier->limit_bytes) < LEASED_PERCENT) {
            continue;
        }
        struct kvk_finding *finding = find(report, "leases_large", KVK_SEVERITY_WARNING,
                                           "Leases alone bind a large part of a tier");
        evidence(finding, "%u %% of the %s tier, by %llu leases.",
                 percent(tier->leased_bytes, tier->limit_bytes), tier_name(i),
                 (unsigned long long)facts->leases);
        action(finding, "Release what was read, and ask for shorter times: kvkeepctl leases shows "
                        "them by age and owner.");
    }
}

static void check_growth(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char text[KVK_BYTES_TEXT_SIZE];
    uint64_t limit = facts->tiers[KVK_TIER_DEVICE].limit_bytes > 0
                         ? facts->tiers[KVK_TIER_DEVICE].limit_bytes
                         : facts->tiers[KVK_TIER_HOST].limit_bytes;
    if (percent(facts->unused_growth_bytes, limit) < GROWTH_PERCENT) {
        return;
    }
    const struct kvk_example *oldest = &facts->oldest_growth;
    struct kvk_finding *finding = find(report, "growth_unused", KVK_SEVERITY_WARNING,
                                       "Room is kept for growth that does not come");
    evidence(finding,
             "%u sequences keep %s (%u %%) and have not grown for over %llu s; the oldest is %llu "
             "(tenant %.64s, instance \"%.64s\"), for %llu s.",
             facts->unused_growths, kvk_bytes_text(facts->unused_growth_bytes, text),
             percent(facts->unused_growth_bytes, limit), seconds(KVK_DOCTOR_GROWTH_OLD_NS),
             (unsigned long long)oldest->id, oldest->tenant, oldest->instance,
             seconds(oldest->age_ns));
    action(finding, "Ask for fewer growth_tokens in OpenSequence, or close what does not run.");
}

static void check_scattered(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char text[KVK_BYTES_TEXT_SIZE];
    char largest[KVK_BYTES_TEXT_SIZE];
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_report *tier = &facts->tiers[i];
        /* One geometry alone scatters nothing: its free slots are for whoever comes. */
        if (tier->limit_bytes == 0 || facts->scattered_groups < 2 ||
            percent(tier->scattered_bytes, tier->limit_bytes) < SCATTERED_PERCENT ||
            percent(tier->slab_bytes, tier->limit_bytes) < FULL_PERCENT) {
            continue;
        }
        struct kvk_finding *finding =
            find(report, "fragmented", KVK_SEVERITY_NOTE,
                 "Room is free in slabs that other geometries cannot use as they are");
        evidence(finding,
                 "%s (%u %%) of the %s tier, in %u groups; most in the %s tier's space %llu: %s "
                 "free in %u slabs.",
                 kvk_bytes_text(tier->scattered_bytes, text),
                 percent(tier->scattered_bytes, tier->limit_bytes), tier_name(i),
                 facts->scattered_groups, tier_name(facts->scattered_tier),
                 (unsigned long long)facts->scattered_space,
                 kvk_bytes_text(facts->scattered_bytes, largest), facts->scattered_slabs);
        action(finding, "Slabs are handed over, and compacted, as others need them; each time that "
                        "costs copies. Spaces that are not used any more can be invalidated.");
    }
}

static void check_quarantine(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->waiting_blocks == 0) {
        return;
    }
    struct kvk_finding *finding = find(report, "quarantine", KVK_SEVERITY_WARNING,
                                       "Room waits for processes whose sessions have ended");
    evidence(finding,
             "%llu blocks wait for %u processes that may still write there, such as pid "
             "%d.",
             (unsigned long long)facts->waiting_blocks, facts->waiting_sessions,
             facts->waiting_pid);
    action(finding, "End these processes: what they have mapped is given to nobody while they "
                    "live. kvkeepctl instances shows them.");
}

static void check_strays(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char text[KVK_BYTES_TEXT_SIZE];
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (facts->tiers[i].stray_bytes == 0) {
            continue;
        }
        struct kvk_finding *finding = find(report, "strays", KVK_SEVERITY_WARNING,
                                           "A worker wrote outside the slots it was given");
        evidence(finding, "%s of the %s tier's files are backed where no slab is.",
                 kvk_bytes_text(facts->tiers[i].stray_bytes, text), tier_name(i));
        action(finding, "The log (stray_memory) names the space. It harms its own tenant alone and "
                        "is punched out again, but the worker is wrong.");
    }
}

/* What the tiers have not taken yet is not there any more: others have it. */
static void check_memory(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char wanted[KVK_BYTES_TEXT_SIZE];
    char available[KVK_BYTES_TEXT_SIZE];
    char there[KVK_BYTES_TEXT_SIZE];
    uint64_t growth = 0;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_report *tier = &facts->tiers[i];
        bool is_gpu = i == KVK_TIER_DEVICE && facts->device.can_fail;
        growth += !is_gpu && tier->limit_bytes > tier->slab_bytes
                      ? tier->limit_bytes - tier->slab_bytes
                      : 0;
    }
    if (!facts->memory_known || growth <= facts->memory.available_bytes) {
        return;
    }
    struct kvk_finding *finding = find(report, "memory_short", KVK_SEVERITY_WARNING,
                                       "The tiers may grow by more memory than is left");
    evidence(finding, "They have not taken %s of their limits yet; %s of %s %s are available.",
             kvk_bytes_text(growth, wanted),
             kvk_bytes_text(facts->memory.available_bytes, available),
             facts->memory.is_group ? "the control group's" : "the machine's",
             kvk_bytes_text(facts->memory.limit_bytes, there));
    action(finding, "Make [tiers] smaller or give the machine's other programs less, before the "
                    "system ends one of them, or this one.");
}

/* ---- Ranks and worth ---- */

static void check_ranks(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_example *oldest = &facts->oldest_apart;
    if (facts->apart == 0) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "rank_behind", KVK_SEVERITY_WARNING, "One rank is behind the others");
    evidence(finding,
             "%u sequences for over %llu s; the longest is %llu (tenant %.64s, instance "
             "\"%.64s\"): rank %u has sealed %llu tokens, the foremost %llu, for %llu s.",
             facts->apart, seconds(KVK_DOCTOR_APART_OLD_NS), (unsigned long long)oldest->id,
             oldest->tenant, oldest->instance, facts->slow_rank,
             (unsigned long long)facts->slow_tokens, (unsigned long long)facts->fast_tokens,
             seconds(oldest->age_ns));
    action(finding, "Until all ranks have sealed a block nobody can hit it. See whether that "
                    "rank's process lives and seals: kvkeepctl instances.");
}

static void check_gap(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    double gap = facts->gap_ceiling - facts->gap_hits;
    if (gap < GAP_MIN || gap < 3 * facts->gap_error) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "under_ceiling", KVK_SEVERITY_NOTE,
             "The hit rate is far under what an endless cache would reach");
    evidence(finding,
             "Tenant %.64s: %.1f %% of %.0f blocks were hits; an endless cache would have %.1f %% "
             "(+-%.1f), an LRU of twice the memory %.1f %%.",
             facts->gap_tenant, 100 * facts->gap_hits, facts->gap_references,
             100 * facts->gap_ceiling, 100 * facts->gap_error, 100 * facts->gap_twice);
    action(finding,
           "kvkeepctl mrc --tenant %.64s draws what more memory would bring; where twice "
           "brings little, its prompts come back too late for any size near.",
           facts->gap_tenant);
}

static void check_worth(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->dear_spaces > 0) {
        struct kvk_finding *finding =
            find(report, "costs_more", KVK_SEVERITY_WARNING, "Hits cost more than they save");
        evidence(finding,
                 "%u spaces; the worst is %llu: its %llu look-ups and their moves took %.3f s, and "
                 "its hits saved %.3f s of computing.",
                 facts->dear_spaces, (unsigned long long)facts->dear_space,
                 (unsigned long long)facts->dear_queries, (double)facts->dear_cost_ns / 1e9,
                 (double)facts->dear_saved_ns / 1e9);
        action(finding, "Raise its lookup_min_tokens, so that short prefixes are not looked up, or "
                        "leave its blocks on the host.");
    }
    if (facts->unpriced_spaces > 0) {
        struct kvk_finding *finding =
            find(report, "unpriced", KVK_SEVERITY_NOTE, "It is not known whether hits pay");
        evidence(finding, "%u spaces with hits have no flops_per_second in their prefill_cost.",
                 facts->unpriced_spaces);
        action(finding, "Say prefill_cost in OpenSpace: eviction, the disk tier and this check "
                        "weigh by it.");
    }
}

/* ---- The daemon itself ---- */

static void check_journal(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->journal_reach_ns == 0 || facts->journal_reach_ns > JOURNAL_SHORT_NS) {
        return;
    }
    struct kvk_finding *finding = find(report, "journal_short", KVK_SEVERITY_NOTE,
                                       "The journal of evictions reaches back a short time only");
    evidence(finding, "Its %llu entries are of the last %llu s; %llu were overwritten.",
             (unsigned long long)facts->journal_capacity, seconds(facts->journal_reach_ns),
             (unsigned long long)(facts->journal_entries - facts->journal_capacity));
    action(finding, "Enlarge [limits] journal_entries if kvkeepctl why is to explain older misses "
                    "(76 bytes each).");
}

static void check_metadata(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char own[KVK_BYTES_TEXT_SIZE];
    char held[KVK_BYTES_TEXT_SIZE];
    uint64_t tiers = 0;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        tiers += facts->tiers[i].used_bytes;
    }
    uint64_t growing = facts->index.bytes + facts->index.token_bytes;
    /* Tables take some megabytes however little there is. */
    if (growing < UINT64_C(64) << 20 || percent(growing, tiers) < METADATA_PERCENT) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "metadata_large", KVK_SEVERITY_NOTE,
             "The daemon's own tables are large against what they describe");
    evidence(finding, "%s for %llu blocks (%s of K and V); %llu of them are hollow.",
             kvk_bytes_text(growing, own), (unsigned long long)facts->index.blocks,
             kvk_bytes_text(tiers, held), (unsigned long long)facts->index.hollow_blocks);
    action(finding, "Larger block_tokens make fewer blocks; [limits] blocks bounds them.");
}

static void check_device(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_device_health *device = &facts->device;
    if (device->lost) {
        struct kvk_finding *finding =
            find(report, "gpu_lost", KVK_SEVERITY_FAULT, "The device tier's GPU has fallen away");
        evidence(finding,
                 "%.190s. What lay there is found by nobody; %llu sequences are open, new ones go "
                 "to the host tier.",
                 device->reason, (unsigned long long)facts->sequences);
        action(finding,
               "Look at the GPU (nvidia-smi -q, ECC errors; Xid lines in dmesg). Sequences that "
               "live there are refused until they are closed; restart the daemon to use it again.");
        return;
    }
    if (device->memory_failures > 0) {
        struct kvk_finding *finding =
            find(report, "gpu_memory", KVK_SEVERITY_WARNING, "The GPU had no memory left");
        evidence(finding, "%llu calls found none. The last failure: %.190s",
                 (unsigned long long)device->memory_failures, device->reason);
        action(finding, "Lower [tiers] device_bytes: attention's workspace, CUDA's own context and "
                        "whatever else runs on the GPU need room beside it.");
    }
    if (device->call_failures > 0) {
        struct kvk_finding *finding = find(report, "gpu_failures", KVK_SEVERITY_WARNING,
                                           "Calls on the GPU failed, and were survived");
        evidence(finding, "%llu calls. The last failure: %.190s",
                 (unsigned long long)device->call_failures, device->reason);
        action(finding, "The log has each (gpu, copy). Look at the GPU (nvidia-smi -q) before it "
                        "falls away.");
    }
}

static void check_disk_speed(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_disk_health *disk = &facts->disk;
    if (!facts->has_disk || !disk->slow || disk->state == KVK_DISK_OFF) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "disk_slow", KVK_SEVERITY_WARNING, "The disk tier's disk is slow");
    evidence(
        finding,
        "%llu batches took longer than %llu ms; reading %llu, writing %llu bytes a second. "
        "The last: %.160s",
        (unsigned long long)disk->stalls, (unsigned long long)(KVK_DISK_STALL_NS / KVK_NS_PER_MS),
        (unsigned long long)disk->read_rate, (unsigned long long)disk->write_rate, disk->reason);
    action(finding, "Look at the disk under [durable] folder (iostat, smartctl). Nothing in memory "
                    "waits for it; prefixes are read back only where that is still quicker.");
}

static void check_disk(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_disk_health *disk = &facts->disk;
    check_disk_speed(facts, report);
    if (!facts->has_disk || (disk->state == KVK_DISK_GOOD && !disk->read_only && !disk->full)) {
        return;
    }
    bool is_off = disk->state == KVK_DISK_OFF;
    struct kvk_finding *finding =
        find(report, is_off ? "disk_off" : "disk_degraded",
             is_off ? KVK_SEVERITY_FAULT : KVK_SEVERITY_WARNING,
             is_off ? "The disk tier is off" : "The disk tier is degraded");
    evidence(finding,
             "%s%s%s%llu read errors, %llu write errors, %llu times full, turned off %llu times. "
             "The last failure: %.160s",
             disk->state == KVK_DISK_FAILING ? "failing; " : "",
             disk->read_only ? "read-only; " : "", disk->full ? "no space; " : "",
             (unsigned long long)disk->read_errors, (unsigned long long)disk->write_errors,
             (unsigned long long)disk->full_errors, (unsigned long long)disk->turned_off,
             disk->reason[0] != '\0' ? disk->reason : "none");
    action(finding, "Look at the file system and the disk under [durable] folder. The other tiers "
                    "serve on; from off it is tried again by itself.");
}

static void check_catalogue(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_catalogue_stats *catalogue = &facts->catalogue;
    if (!facts->has_catalogue) {
        return;
    }
    if (catalogue->failing) {
        struct kvk_finding *finding = find(report, "catalogue_failing", KVK_SEVERITY_FAULT,
                                           "The catalogue cannot be written");
        evidence(finding, "%llu commits failed, %llu operations wait; %llu of %llu bytes are used.",
                 (unsigned long long)catalogue->commit_failures,
                 (unsigned long long)catalogue->queued, (unsigned long long)catalogue->used_bytes,
                 (unsigned long long)catalogue->limit_bytes);
        action(finding, "Look at the file system of [durable] folder; the log says why. Nothing "
                        "new outlives the daemon meanwhile.");
    }
    if (catalogue->damaged_records > 0) {
        struct kvk_finding *finding = find(report, "catalogue_damaged", KVK_SEVERITY_WARNING,
                                           "Records of the catalogue were damaged");
        evidence(finding, "%llu were skipped when they were read.",
                 (unsigned long long)catalogue->damaged_records);
        action(finding, "What they named is computed again. Look at the disk (smartctl).");
    }
}

static void check_keeper(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->has_keeper || !facts->keeper_may_be_wanted) {
        return;
    }
    struct kvk_finding *finding = find(
        report, "keeper_missing", facts->keeper_wanted ? KVK_SEVERITY_WARNING : KVK_SEVERITY_NOTE,
        "Nobody keeps the host tier's memory over a restart");
    evidence(finding, "[durable] keeper asks for one%s, and none is connected.",
             facts->keeper_wanted ? "" : " where it can be had");
    action(finding, "The log says why it could not be reached. Until then a restart begins with an "
                    "empty host tier.");
}

static void check_opaque(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (facts->stats.opaque_differences == 0) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "opaque_differences", KVK_SEVERITY_NOTE,
             "Opaque blocks that were computed again are not the same, bit for bit");
    evidence(finding, "%llu of %llu compared.", (unsigned long long)facts->stats.opaque_differences,
             (unsigned long long)facts->stats.twins_compared);
    action(finding, "Of opaque bytes nothing more is known: it may be rounding. If the engine's "
                    "kernels are exact, treat it as a wrong reuse.");
}

static void check_draining(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    if (!facts->draining) {
        return;
    }
    struct kvk_finding *finding =
        find(report, "draining", KVK_SEVERITY_NOTE, "The daemon is draining");
    evidence(finding, "%llu sequences and %llu sessions are still there.",
             (unsigned long long)facts->sequences, (unsigned long long)facts->sessions);
    action(finding, "It takes no new sequences, and ends when they have.");
}

/* ---- The remote store ---- */

static uint64_t remote_wrong(const struct kvk_remote_report *remote)
{
    static const enum kvk_remote_result wrong[] = {KVK_REMOTE_NOT_OURS, KVK_REMOTE_TRUNCATED,
                                                   KVK_REMOTE_DAMAGED, KVK_REMOTE_FOREIGN,
                                                   KVK_REMOTE_OTHER_KEY};
    uint64_t count = remote->stats.witness_failures + remote->fleet.foreign;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        count += remote->health.counters.blocks[KVK_REMOTE_EXISTS][wrong[i]] +
                 remote->health.counters.blocks[KVK_REMOTE_FETCH][wrong[i]];
    }
    return count;
}

static void check_remote_values(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_remote_counters *counters = &facts->remote.health.counters;
    uint64_t full = counters->blocks[KVK_REMOTE_STORE][KVK_REMOTE_FULL];
    uint64_t refused = counters->blocks[KVK_REMOTE_STORE][KVK_REMOTE_REFUSED] +
                       counters->blocks[KVK_REMOTE_FETCH][KVK_REMOTE_REFUSED] +
                       counters->blocks[KVK_REMOTE_EXISTS][KVK_REMOTE_REFUSED];
    uint64_t wrong = remote_wrong(&facts->remote);
    if (wrong > 0) {
        struct kvk_finding *finding = find(report, "remote_wrong_values", KVK_SEVERITY_WARNING,
                                           "The remote store held values that are not right");
        evidence(finding, "%llu values were not what their names promise; none was used.",
                 (unsigned long long)wrong);
        action(finding, "Somebody else writes under [remote] key_prefix, or with another key_file; "
                        "docs/remote.md lists the kinds, the metrics count each.");
    }
    if (full > 0 || refused > 0) {
        struct kvk_finding *finding = find(report, "remote_refuses", KVK_SEVERITY_WARNING,
                                           "The remote store refuses what is asked of it");
        evidence(finding,
                 "%llu values found no memory there, %llu requests were refused. The "
                 "last: %.160s",
                 (unsigned long long)full, (unsigned long long)refused,
                 facts->remote.health.reason);
        action(finding, "Give it maxmemory-policy allkeys-lru (or memory), and its ACL user the "
                        "rights of docs/remote.md.");
    }
}

static void check_remote(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    const struct kvk_remote_health *health = &facts->remote.health;
    if (!facts->remote.present) {
        return;
    }
    check_remote_values(facts, report);
    if (health->state == KVK_REMOTE_GOOD && facts->remote.spaces_out == 0) {
        return;
    }
    bool is_away = health->state == KVK_REMOTE_AWAY;
    struct kvk_finding *finding =
        find(report, is_away ? "remote_away" : "remote_degraded", KVK_SEVERITY_WARNING,
             is_away ? "The remote store is not in reach" : "The remote store is degraded");
    evidence(finding,
             "%u of %u masters are away, %u of 16384 slots; %llu of %llu spaces have no generation "
             "that counts. The last failure: %.160s",
             health->node_away_count, health->node_count, health->slot_away_count,
             (unsigned long long)facts->remote.spaces_out, (unsigned long long)facts->remote.spaces,
             health->reason[0] != '\0' ? health->reason : "none");
    action(finding, "Look at the nodes of [remote] seeds (redis-cli cluster nodes). Nothing here "
                    "waits for them; what is in memory and on disk serves on, and they are tried "
                    "again by themselves.");
}

static void check_quotas(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    char limit[KVK_BYTES_TEXT_SIZE];
    char block[KVK_BYTES_TEXT_SIZE];
    if (facts->short_limits == 0) {
        return;
    }
    struct kvk_finding *finding = find(report, "quota_below_block", KVK_SEVERITY_WARNING,
                                       "A tenant's limit is less than one block");
    evidence(finding,
             "%u tenants have one; tenant %.64s may have %s of the %s tier, and one block of its "
             "space %llu takes %s.",
             facts->short_limits, facts->short_tenant,
             kvk_bytes_text(facts->short_limit_bytes, limit), tier_name(facts->short_tier),
             (unsigned long long)facts->short_space,
             kvk_bytes_text(facts->short_block_bytes, block));
    action(finding, "Nothing of that space can lie in that tier: its sequences are refused there. "
                    "kvkeepctl tenant change raises the limit; kvkeepctl plan says what a sequence "
                    "takes.");
}

/* ---- All of them ---- */

static void (*const checks[])(const struct kvk_facts *facts, struct kvk_doctor_report *report) = {
    check_wrong_reuse, check_held,     check_checksums, check_copies,    check_evictable,
    check_refusals,    check_leases,   check_growth,    check_scattered, check_quarantine,
    check_strays,      check_ranks,    check_gap,       check_worth,     check_journal,
    check_metadata,    check_device,   check_disk,      check_catalogue, check_keeper,
    check_opaque,      check_draining, check_remote,    check_memory,    check_quotas,
};
#define CHECK_COUNT (sizeof(checks) / sizeof(checks[0]))

/* The gravest first; else as they were found. */
static void report_sort(struct kvk_doctor_report *report)
{
    struct kvk_finding kept;
    for (uint32_t i = 1; i < report->count; i++) {
        for (uint32_t k = i;
             k > 0 && report->findings[k].severity > report->findings[k - 1].severity; k--) {
            kept = report->findings[k];
            report->findings[k] = report->findings[k - 1];
            report->findings[k - 1] = kept;
        }
    }
}

void kvk_facts_judge(const struct kvk_facts *facts, struct kvk_doctor_report *report)
{
    report->count = 0;
    report->check_count = CHECK_COUNT;
    for (size_t i = 0; i < CHECK_COUNT; i++) {
        checks[i](facts, report);
    }
    report_sort(report);
}

enum kvk_status kvk_doctor(struct kvk_cache *cache, const struct kvk_caller *caller,
                           struct kvk_doctor_report *report, struct kvk_error *error)
{
    report->count = 0;
    report->check_count = 0;
    if (!caller->credential->admin) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "",
                        "the credential has no admin rights");
    }
    struct kvk_facts *facts = malloc(sizeof(*facts));
    if (facts == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    enum kvk_status status = kvk_facts_gather(cache, caller, facts, error);
    if (status == KVK_OK) {
        kvk_facts_judge(facts, report);
    }
    free(facts);
    return status;
}
