/* Each finding of the doctor's: provoked once, and absent where there is nothing to find. */
#include "daemon/doctor.h"

#include "daemon/doctor_internal.h"
#include "daemon/lease.h"
#include "tests/engine_trio.h"

#define BLOCK UINT64_C(1024) /* of house_geometry() */

struct ward {
    struct trio trio;
    struct house *house;
    uint64_t session, space;
    struct kvk_doctor_report report;
};

static void ward_start_with(struct ward *ward, uint64_t device_blocks, uint64_t host_blocks)
{
    memset(ward, 0, sizeof(*ward));
    trio_start(&ward->trio, &(struct house_options){.device_bytes = device_blocks * BLOCK,
                                                    .host_bytes = host_blocks * BLOCK,
                                                    .manual_clock = true});
    ward->house = &ward->trio.house;
    ward->space = house_space(ward->house, "model");
    struct kvk_hello hello = house_hello();
    hello.name = house_view("engine-3");
    ward->session = house_begin(ward->house, &hello).session_id;
}

static void ward_start(struct ward *ward)
{
    ward_start_with(ward, 0, 16);
}

static void pass_seconds(struct ward *ward, uint64_t seconds)
{
    struct kvk_clock_manual *manual = &ward->house->manual;
    kvk_clock_manual_set(manual, kvk_clock_now(&manual->clock) + seconds * KVK_NS_PER_SECOND);
}

static const struct kvk_finding *finding_in(const struct kvk_doctor_report *report,
                                            const char *code)
{
    for (uint32_t i = 0; i < report->count; i++) {
        if (strcmp(report->findings[i].code, code) == 0) {
            return &report->findings[i];
        }
    }
    return NULL;
}

static const struct kvk_finding *ask(struct ward *ward, const char *code)
{
    cr_assert_eq(
        kvk_doctor(ward->house->cache, &ward->trio.admin, &ward->report, &ward->house->error),
        KVK_OK, "%s", ward->house->error.text);
    for (uint32_t i = 0; i < ward->report.count; i++) {
        const struct kvk_finding *finding = &ward->report.findings[i];
        cr_expect(finding->title[0] != '\0' && finding->evidence[0] != '\0' &&
                      finding->action[0] != '\0',
                  "%s says nothing", finding->code);
        cr_expect_lt(strlen(finding->evidence), sizeof(finding->evidence) - 1, "%s is cut",
                     finding->code);
        cr_expect_lt(strlen(finding->action), sizeof(finding->action) - 1, "%s is cut",
                     finding->code);
        cr_expect(i == 0 || finding->severity <= ward->report.findings[i - 1].severity);
    }
    return finding_in(&ward->report, code);
}

static void expect_words(const struct kvk_finding *finding, enum kvk_severity severity,
                         const char *const words[])
{
    cr_assert_not_null(finding);
    cr_expect_eq(finding->severity, severity);
    for (size_t i = 0; words[i] != NULL; i++) {
        cr_expect(strstr(finding->evidence, words[i]) != NULL ||
                      strstr(finding->action, words[i]) != NULL,
                  "\"%s %s\" lacks \"%s\"", finding->evidence, finding->action, words[i]);
    }
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static uint64_t open_sealed(struct ward *ward, uint32_t first, uint64_t count)
{
    uint32_t tokens[256];
    house_tokens(tokens, count, first);
    uint64_t id = house_open(ward->house, ward->session, ward->space, tokens, count).sequence_id;
    house_seal(ward->house, ward->session, id, count);
    return id;
}

static uint64_t pin(struct ward *ward, uint32_t first, uint64_t count, uint64_t ttl_ms)
{
    uint32_t tokens[256];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply reply;
    house_tokens(tokens, count, first);
    const struct kvk_pin_request request = {.session_id = ward->session,
                                            .space_id = ward->space,
                                            .prompt = {.tokens = tokens, .token_count = count},
                                            .ttl_ms = ttl_ms};
    cr_assert_eq(kvk_lease_pin(ward->house->cache, &ward->house->caller, &request, &reply, &tables,
                               &ward->house->error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    return reply.lease_id;
}

/* ---- Nothing to say ---- */

Test(doctor, of_a_healthy_daemon_there_is_nothing_to_say)
{
    struct ward ward;
    ward_start(&ward);
    cr_expect_null(ask(&ward, "any"));
    cr_expect_eq(ward.report.count, 0, "%s", ward.report.findings[0].code);
    cr_expect_geq(ward.report.check_count, 20);
    uint64_t id = open_sealed(&ward, 1, 16);
    cr_expect_null(ask(&ward, "any"));
    cr_expect_eq(ward.report.count, 0, "%s", ward.report.findings[0].code);
    house_close(ward.house, ward.session, id);
    cr_expect_null(ask(&ward, "any"));
    cr_expect_eq(ward.report.count, 0, "%s", ward.report.findings[0].code);
    /* For admins alone. */
    cr_expect_eq(kvk_doctor(ward.house->cache, &ward.trio.a, &ward.report, &ward.house->error),
                 KVK_PERMISSION);
    house_stop(ward.house);
}

/* ---- Faults ---- */

Test(doctor, held_without_sequences)
{
    struct ward ward;
    ward_start(&ward);
    house_close(ward.house, ward.session, open_sealed(&ward, 1, 8));
    cr_expect_null(ask(&ward, "held_without_sequences"));
    kvk_lock(&ward.house->cache->lock);
    kvk_block_hold(ward.house->cache, 0, false); /* somebody forgot it */
    kvk_unlock(&ward.house->cache->lock);
    expect_words(ask(&ward, "held_without_sequences"), KVK_SEVERITY_FAULT,
                 WORDS("1.0 KiB of the host tier", "1 blocks are SEALED", "restart"));
    kvk_lock(&ward.house->cache->lock);
    kvk_block_release(ward.house->cache, 0, false);
    kvk_unlock(&ward.house->cache->lock);
    cr_expect_null(ask(&ward, "held_without_sequences"));
    house_stop(ward.house);
}

Test(doctor, wrong_reuse_and_opaque_differences)
{
    struct ward ward;
    ward_start(&ward);
    cr_expect_null(ask(&ward, "wrong_reuse"));
    struct kvk_cache *cache = ward.house->cache;
    kvk_lock(&cache->lock);
    cache->wrong_reuses[0] = (struct kvk_wrong_reuse){.space_id = ward.space,
                                                      .group = 0,
                                                      .position = 17,
                                                      .shard = 3,
                                                      .layer = 5,
                                                      .is_value = true,
                                                      .distance = 1.25,
                                                      .tolerance = 0.02,
                                                      .time_ns = kvk_clock_now(cache->clock)};
    cache->stats.wrong_reuse = 1;
    cache->stats.twins_compared = 9;
    cache->stats.opaque_differences = 2;
    kvk_unlock(&cache->lock);
    pass_seconds(&ward, 12);
    expect_words(ask(&ward, "wrong_reuse"), KVK_SEVERITY_FAULT,
                 WORDS("1 of 9", "12 s ago", "model model", "block 17", "V of shard 3, layer 5",
                       "1.25", "0.02", "revision", "position_encoding", "adapter_version"));
    expect_words(ask(&ward, "opaque_differences"), KVK_SEVERITY_NOTE, WORDS("2 of 9"));
    cr_expect_str_eq(ward.report.findings[0].code, "wrong_reuse", "the gravest first");
    house_stop(ward.house);
}

Test(doctor, checksums_and_copies)
{
    struct ward ward;
    ward_start(&ward);
    cr_expect_null(ask(&ward, "checksum_failures"));
    cr_expect_null(ask(&ward, "copy_failures"));
    ward.house->cache->stats.checksum_failures = 4;
    ward.house->cache->stats.copy_failures = 3;
    expect_words(ask(&ward, "checksum_failures"), KVK_SEVERITY_FAULT, WORDS("4 copies"));
    expect_words(ask(&ward, "copy_failures"), KVK_SEVERITY_WARNING, WORDS("3 since the start"));
    house_stop(ward.house);
}

/* ---- Room ---- */

Test(doctor, hardly_anything_is_evictable_and_requests_are_refused)
{
    struct ward ward;
    struct kvk_sequence_reply reply;
    uint32_t tokens[64];
    ward_start(&ward);
    house_tokens(tokens, 64, 5000);
    uint64_t held = open_sealed(&ward, 1, 60);
    expect_words(
        ask(&ward, "evictable_tiny"), KVK_SEVERITY_WARNING,
        WORDS("host tier is used to 94 %", "0 % of it could go", "1 sequences", "host_bytes"));
    for (int i = 0; i < 9; i++) {
        cr_assert_eq(house_try_open(ward.house, ward.session, ward.space, tokens, 16, &reply),
                     KVK_EXHAUSTED);
    }
    cr_expect_null(ask(&ward, "refusals"));
    cr_assert_eq(house_try_open(ward.house, ward.session, ward.space, tokens, 16, &reply),
                 KVK_EXHAUSTED);
    expect_words(ask(&ward, "refusals"), KVK_SEVERITY_WARNING,
                 WORDS("10 in the last 300 s", "10 of them for pool_active"));
    house_close(ward.house, ward.session, held);
    cr_expect_null(ask(&ward, "evictable_tiny"), "full, but of what may go");
    pass_seconds(&ward, 301);
    cr_expect_null(ask(&ward, "refusals"));
    house_stop(ward.house);
}

Test(doctor, leases)
{
    struct ward ward;
    ward_start(&ward);
    house_close(ward.house, ward.session, open_sealed(&ward, 1, 12));
    house_close(ward.house, ward.session, open_sealed(&ward, 1000, 8));
    uint64_t lease = pin(&ward, 1, 12, 600 * 1000);
    cr_expect_null(ask(&ward, "leases_old"));
    cr_expect_null(ask(&ward, "leases_large"), "3 of 16 blocks");
    pass_seconds(&ward, 200);
    (void)pin(&ward, 1000, 8, 400 * 1000);
    pass_seconds(&ward, 101);
    char id[32];
    (void)snprintf(id, sizeof(id), "%llu", (unsigned long long)lease);
    expect_words(ask(&ward, "leases_old"), KVK_SEVERITY_WARNING,
                 WORDS("1 of 2 leases", id, "tenant a", "engine-3", "12 tokens", "301 s"));
    expect_words(ask(&ward, "leases_large"), KVK_SEVERITY_WARNING,
                 WORDS("31 % of the host tier", "2 leases"));
    pass_seconds(&ward, 400);
    kvk_cache_maintain(ward.house->cache);
    cr_expect_null(ask(&ward, "leases_old"));
    cr_expect_null(ask(&ward, "leases_large"));
    house_stop(ward.house);
}

Test(doctor, a_limit_below_one_block)
{
    struct ward ward;
    struct kvk_tenant_quota quota = {.limit_bytes = {[KVK_TIER_HOST] = BLOCK / 2}};
    ward_start(&ward);
    const struct kvk_tenant *tenant = ward.house->caller.credential->tenants[0];
    cr_expect_null(ask(&ward, "quota_below_block"));
    cr_assert_eq(kvk_quota_set(ward.house->cache, tenant, &quota, &ward.house->error), KVK_OK);
    char id[32];
    (void)snprintf(id, sizeof(id), "space %llu", (unsigned long long)ward.space);
    expect_words(ask(&ward, "quota_below_block"), KVK_SEVERITY_WARNING,
                 WORDS("1 tenants", "tenant a", "512 B", "host tier", id, "1.0 KiB"));
    quota.limit_bytes[KVK_TIER_HOST] = BLOCK;
    cr_assert_eq(kvk_quota_set(ward.house->cache, tenant, &quota, &ward.house->error), KVK_OK);
    cr_expect_null(ask(&ward, "quota_below_block"));
    house_stop(ward.house);
}

Test(doctor, growth_that_does_not_come)
{
    struct ward ward;
    uint32_t tokens[16];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    ward_start(&ward);
    house_tokens(tokens, 16, 1);
    const struct kvk_open_request request = {.session_id = ward.session,
                                             .space_id = ward.space,
                                             .prompt = {.tokens = tokens, .token_count = 4},
                                             .growth_tokens = 16,
                                             .tier = -1};
    cr_assert_eq(kvk_sequence_open(ward.house->cache, &ward.house->caller, &request, &reply,
                                   &tables, &ward.house->error),
                 KVK_OK);
    house_seal(ward.house, ward.session, reply.sequence_id, 4);
    pass_seconds(&ward, 59);
    cr_expect_null(ask(&ward, "growth_unused"));
    pass_seconds(&ward, 2);
    expect_words(
        ask(&ward, "growth_unused"), KVK_SEVERITY_WARNING,
        WORDS("1 sequences keep 4.0 KiB (25 %)", "tenant a", "engine-3", "61 s", "growth_tokens"));
    const struct kvk_append_request append = {.session_id = ward.session,
                                              .sequence_id = reply.sequence_id,
                                              .expected_length = 4,
                                              .tokens = tokens + 4,
                                              .token_count = 1};
    cr_assert_eq(kvk_sequence_append(ward.house->cache, &ward.house->caller, &append, &reply,
                                     &tables, &ward.house->error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    cr_expect_null(ask(&ward, "growth_unused"), "it grows");
    house_stop(ward.house);
}

Test(doctor, fragmentation)
{
    struct ward ward;
    ward_start_with(&ward, 0, 256); /* slabs of 4 KiB */
    struct kvk_geometry wide = house_geometry();
    wide.layers = 6;
    uint64_t narrow_space = ward.space;
    for (uint32_t i = 0; i < 50; i++) {
        house_close(ward.house, ward.session, open_sealed(&ward, 1000 * (i + 1), 8));
    }
    cr_expect_null(ask(&ward, "fragmented"), "one geometry scatters nothing");
    ward.space = house_space_of(ward.house, &ward.trio.a, "wide", &wide, 1);
    for (uint32_t i = 0; i < 60; i++) {
        house_close(ward.house, ward.session, open_sealed(&ward, 1000 * (i + 1), 4));
    }
    struct kvk_facts facts = {.scattered_tier = KVK_TIER_HOST,
                              .scattered_space = narrow_space,
                              .scattered_bytes = 20 * BLOCK,
                              .scattered_slabs = 9,
                              .scattered_groups = 2};
    facts.tiers[KVK_TIER_HOST] = (struct kvk_tier_report){.limit_bytes = 256 * BLOCK,
                                                          .slab_bytes = 250 * BLOCK,
                                                          .used_bytes = 220 * BLOCK,
                                                          .evictable_bytes = 100 * BLOCK,
                                                          .scattered_bytes = 30 * BLOCK};
    kvk_facts_judge(&facts, &ward.report);
    expect_words(finding_in(&ward.report, "fragmented"), KVK_SEVERITY_NOTE,
                 WORDS("30.0 KiB (12 %) of the host tier", "2 groups", "20.0 KiB free in 9 slabs"));
    facts.tiers[KVK_TIER_HOST].scattered_bytes = 20 * BLOCK;
    kvk_facts_judge(&facts, &ward.report);
    cr_expect_null(finding_in(&ward.report, "fragmented"));
    /* And the figures are the engine's. */
    cr_assert_eq(kvk_facts_gather(ward.house->cache, &ward.trio.admin, &facts, &ward.house->error),
                 KVK_OK);
    uint64_t scattered = 0;
    for (uint32_t i = 0; i < ward.house->cache->group_end; i++) {
        const struct kvk_group *group = ward.house->cache->groups[i];
        const struct kvk_group_tier *at = &group->tiers[KVK_TIER_HOST];
        scattered += (uint64_t)at->arena.slot_count * group->block_bytes - at->used_bytes;
    }
    cr_expect_eq(facts.tiers[KVK_TIER_HOST].scattered_bytes, scattered);
    cr_expect_leq(facts.scattered_bytes, scattered);
    house_stop(ward.house);
}

Test(doctor, quarantine_strays_and_draining)
{
    struct ward ward;
    ward_start(&ward);
    struct kvk_facts facts = {.waiting_blocks = 0};
    kvk_facts_judge(&facts, &ward.report);
    cr_expect_eq(ward.report.count, 0);
    facts.waiting_blocks = 12;
    facts.waiting_sessions = 2;
    facts.waiting_pid = 4711;
    facts.tiers[KVK_TIER_HOST].stray_bytes = 8192;
    kvk_facts_judge(&facts, &ward.report);
    expect_words(finding_in(&ward.report, "quarantine"), KVK_SEVERITY_WARNING,
                 WORDS("12 blocks", "2 processes", "pid 4711"));
    expect_words(finding_in(&ward.report, "strays"), KVK_SEVERITY_WARNING, WORDS("8.0 KiB"));
    cr_expect_null(ask(&ward, "draining"));
    ward.house->cache->draining = true;
    expect_words(ask(&ward, "draining"), KVK_SEVERITY_NOTE, WORDS("1 sessions"));
    house_stop(ward.house);
}

/* ---- Ranks ---- */

Test(doctor, one_rank_behind)
{
    struct ward ward;
    uint32_t tokens[16];
    ward_start(&ward);
    struct kvk_geometry geometry = house_geometry();
    geometry.tensor_shards = 2;
    uint64_t space = house_space_of(ward.house, &ward.trio.a, "two ranks", &geometry, 1);
    house_tokens(tokens, 16, 1);
    uint64_t id = house_open(ward.house, ward.session, space, tokens, 12).sequence_id;
    struct kvk_seal_reply reply;
    struct kvk_seal_request request = {
        .session_id = ward.session, .sequence_id = id, .expected_length = 12, .length = 8};
    cr_assert_eq(
        kvk_sequence_seal(ward.house->cache, &ward.trio.a, &request, &reply, &ward.house->error),
        KVK_OK);
    pass_seconds(&ward, 9);
    cr_expect_null(ask(&ward, "rank_behind"));
    pass_seconds(&ward, 2);
    expect_words(
        ask(&ward, "rank_behind"), KVK_SEVERITY_WARNING,
        WORDS("1 sequences", "rank 1 has sealed 0 tokens", "the foremost 8", "11 s", "engine-3"));
    request.all_ranks = true;
    request.length = 12;
    cr_assert_eq(
        kvk_sequence_seal(ward.house->cache, &ward.trio.a, &request, &reply, &ward.house->error),
        KVK_OK);
    cr_expect_null(ask(&ward, "rank_behind"));
    house_stop(ward.house);
}

/* ---- Worth ---- */

Test(doctor, under_the_ceiling)
{
    struct ward ward;
    ward_start(&ward); /* 16 blocks; prompts of 8 go round in 200 */
    for (uint32_t round = 0; round < 5; round++) {
        for (uint32_t i = 0; i < 100; i++) {
            house_close(ward.house, ward.session, open_sealed(&ward, 1000 * (i + 1), 32));
        }
    }
    expect_words(ask(&ward, "under_ceiling"), KVK_SEVERITY_NOTE,
                 WORDS("Tenant a", "0.0 % of 4000 blocks", "kvkeepctl mrc --tenant a"));
    house_stop(ward.house);
    /* Where what is asked for again is there, there is no gap. */
    ward_start(&ward);
    for (uint32_t i = 0; i < 400; i++) {
        house_close(ward.house, ward.session, open_sealed(&ward, 1, 32));
    }
    cr_expect_null(ask(&ward, "under_ceiling"));
    house_stop(ward.house);
}

Test(doctor, hits_that_do_not_pay)
{
    struct ward ward;
    ward_start(&ward);
    struct kvk_space *space = kvk_table_get(&ward.house->cache->space_table, ward.space);
    for (uint32_t i = 0; i < 100; i++) {
        house_close(ward.house, ward.session, open_sealed(&ward, 1, 8));
    }
    expect_words(ask(&ward, "unpriced"), KVK_SEVERITY_NOTE, WORDS("1 spaces"));
    cr_expect_null(ask(&ward, "costs_more"));
    space->flops_per_token = 1e6;
    space->flops_per_second = 1e9;
    house_close(ward.house, ward.session, open_sealed(&ward, 1, 8));
    cr_expect_null(ask(&ward, "unpriced"));
    cr_expect_null(ask(&ward, "costs_more"), "8 ms are saved");
    cr_expect_eq(space->saved_ns, 8 * KVK_NS_PER_MS);
    space->cost_ns = 9 * KVK_NS_PER_MS;
    expect_words(ask(&ward, "costs_more"), KVK_SEVERITY_WARNING,
                 WORDS("1 spaces", "101 look-ups", "0.009 s", "0.008 s", "lookup_min_tokens"));
    house_stop(ward.house);
}

/* ---- The daemon itself ---- */

Test(doctor, a_short_journal)
{
    struct ward ward;
    memset(&ward, 0, sizeof(ward));
    house_init(&ward.trio.house);
    ward.house = &ward.trio.house;
    ward.house->config.journal_entries = 16;
    house_start(ward.house,
                &(struct house_options){.host_bytes = 16 * BLOCK, .manual_clock = true});
    ward.trio.admin = ward.house->caller;
    ward.space = house_space(ward.house, "model");
    ward.session = house_session(ward.house);
    for (uint32_t i = 0; i < 5; i++) {
        cr_expect_null(ask(&ward, "journal_short"));
        pass_seconds(&ward, 10);
        house_close(ward.house, ward.session, open_sealed(&ward, 1000 * (i + 1), 32));
    }
    expect_words(ask(&ward, "journal_short"), KVK_SEVERITY_NOTE,
                 WORDS("16 entries", "8 were overwritten", "journal_entries"));
    pass_seconds(&ward, 3600);
    cr_expect_null(ask(&ward, "journal_short"), "an hour is long");
    house_stop(ward.house);
}

Test(doctor, metadata_disk_catalogue_and_keeper)
{
    struct kvk_doctor_report report;
    struct kvk_facts *facts = calloc(1, sizeof(*facts));
    facts->index.bytes = UINT64_C(100) << 20;
    facts->index.blocks = 500000;
    facts->tiers[KVK_TIER_HOST].used_bytes = UINT64_C(2000) << 20;
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "metadata_large"));
    facts->index.token_bytes = UINT64_C(150) << 20;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "metadata_large"), KVK_SEVERITY_NOTE,
                 WORDS("250 MiB for 500000 blocks", "block_tokens"));

    facts->disk.state = KVK_DISK_FAILING;
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "disk_degraded"), "there is no disk");
    facts->has_disk = true;
    facts->disk.write_errors = 3;
    strcpy(facts->disk.reason, "write: Input/output error");
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "disk_degraded"), KVK_SEVERITY_WARNING,
                 WORDS("failing", "3 write errors", "Input/output error"));
    facts->disk.state = KVK_DISK_OFF;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "disk_off"), KVK_SEVERITY_FAULT, WORDS("3 write errors"));
    facts->disk = (struct kvk_disk_health){.full = true};
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "disk_degraded"), KVK_SEVERITY_WARNING, WORDS("no space"));
    facts->disk.full = false;
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "disk_degraded"));
    cr_expect_null(finding_in(&report, "disk_slow"));
    facts->disk = (struct kvk_disk_health){
        .slow = true, .stalls = 5, .read_rate = 4096, .reason = "reading 4096 bytes took 2500 ms"};
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "disk_slow"), KVK_SEVERITY_WARNING,
                 WORDS("5 batches", "2000 ms", "reading 4096 bytes took 2500 ms"));
    facts->disk.slow = false;

    facts->catalogue = (struct kvk_catalogue_stats){
        .failing = true, .commit_failures = 7, .queued = 9, .damaged_records = 2};
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "catalogue_failing"), "there is none");
    facts->has_catalogue = true;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "catalogue_failing"), KVK_SEVERITY_FAULT,
                 WORDS("7 commits failed", "9 operations wait"));
    expect_words(finding_in(&report, "catalogue_damaged"), KVK_SEVERITY_WARNING,
                 WORDS("2 were skipped"));

    facts->keeper_may_be_wanted = true;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "keeper_missing"), KVK_SEVERITY_NOTE, WORDS("can be had"));
    facts->keeper_wanted = true;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "keeper_missing"), KVK_SEVERITY_WARNING, WORDS("[durable]"));
    facts->has_keeper = true;
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "keeper_missing"));
    free(facts);
}

/* Tiers that have not taken what they may take, beside programs that have taken it. */
Test(doctor, memory_that_others_took)
{
    struct ward ward;
    ward_start(&ward);
    struct kvk_facts facts = {.scattered_tier = -1, .has_keeper = true};
    facts.tiers[KVK_TIER_DEVICE] =
        (struct kvk_tier_report){.limit_bytes = UINT64_C(3) << 30, .slab_bytes = UINT64_C(1) << 30};
    facts.tiers[KVK_TIER_HOST] =
        (struct kvk_tier_report){.limit_bytes = UINT64_C(8) << 30, .slab_bytes = UINT64_C(2) << 30};
    facts.memory = (struct kvk_machine_memory){.limit_bytes = UINT64_C(16) << 30,
                                               .available_bytes = UINT64_C(8) << 30};
    kvk_facts_judge(&facts, &ward.report); /* not known */
    cr_expect_null(finding_in(&ward.report, "memory_short"));
    facts.memory_known = true;
    kvk_facts_judge(&facts, &ward.report); /* just enough */
    cr_expect_null(finding_in(&ward.report, "memory_short"));
    facts.memory.available_bytes -= UINT64_C(1) << 30;
    kvk_facts_judge(&facts, &ward.report);
    expect_words(finding_in(&ward.report, "memory_short"), KVK_SEVERITY_WARNING,
                 WORDS("8.0 GiB", "7.0 GiB of the machine's 16.0 GiB"));
    facts.memory.is_group = true;
    kvk_facts_judge(&facts, &ward.report);
    expect_words(finding_in(&ward.report, "memory_short"), KVK_SEVERITY_WARNING,
                 WORDS("the control group's 16.0 GiB"));
    facts.device.can_fail = true; /* a GPU's memory is its own */
    kvk_facts_judge(&facts, &ward.report);
    cr_expect_null(finding_in(&ward.report, "memory_short"));
    house_stop(ward.house);
}

Test(doctor, gpus)
{
    struct kvk_doctor_report report;
    struct kvk_facts *facts = calloc(1, sizeof(*facts));
    kvk_facts_judge(facts, &report);
    cr_expect_null(finding_in(&report, "gpu_memory"));
    cr_expect_null(finding_in(&report, "gpu_failures"));
    cr_expect_null(finding_in(&report, "gpu_lost"));
    facts->device = (struct kvk_device_health){.can_fail = true,
                                               .memory_failures = 3,
                                               .call_failures = 2,
                                               .reason = "GPU 1: copying: out of memory"};
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "gpu_memory"), KVK_SEVERITY_WARNING,
                 WORDS("3 calls", "GPU 1", "device_bytes"));
    expect_words(finding_in(&report, "gpu_failures"), KVK_SEVERITY_WARNING, WORDS("2 calls"));
    facts->device.lost = true;
    facts->sequences = 4;
    kvk_facts_judge(facts, &report);
    expect_words(finding_in(&report, "gpu_lost"), KVK_SEVERITY_FAULT,
                 WORDS("GPU 1", "4 sequences", "nvidia-smi", "restart"));
    cr_expect_null(finding_in(&report, "gpu_memory"));
    free(facts);
}

Test(doctor, severities_have_names)
{
    cr_expect_str_eq(kvk_severity_name(KVK_SEVERITY_NOTE), "note");
    cr_expect_str_eq(kvk_severity_name(KVK_SEVERITY_WARNING), "warning");
    cr_expect_str_eq(kvk_severity_name(KVK_SEVERITY_FAULT), "fault");
}
