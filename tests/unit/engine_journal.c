/* The journal of what went, and the answer to "why did this prompt miss?" */
#include "daemon/journal.h"

#include "daemon/report_miss.h"
#include "daemon/space.h"
#include "tests/engine_trio.h"

#define BLOCK_BYTES 1024 /* of house_geometry() */

/* ---- The ring, against a plain list ---- */

static struct kvk_gone gone_of(uint32_t name, uint64_t time)
{
    /* Few lists, so that they are long; a key per name. */
    return (struct kvk_gone){
        .key = {.low = name, .high = (uint64_t)(name % 7) << 61 | name},
        .time_ns = time,
        .space_id = 1 + name % 3,
        .group = (uint8_t)(name % 2),
        .left = (uint8_t)(time % 5 == 0 ? 2 : 0),
        .reason = (uint8_t)(1 + name % (KVK_GONE_REASON_COUNT - 1)),
    };
}

static void against_plain_list(uint32_t capacity, uint32_t names, uint32_t steps)
{
    struct kvk_journal journal;
    struct kvk_random random;
    struct kvk_gone *all = calloc(steps, sizeof(all[0]));
    uint64_t counts[KVK_GONE_REASON_COUNT] = {0};
    cr_assert_eq(kvk_journal_init(&journal, capacity), KVK_OK);
    kvk_random_init(&random, capacity);
    for (uint32_t step = 0; step < steps; step++) {
        all[step] = gone_of((uint32_t)kvk_random_below(&random, names), step + 1);
        counts[all[step].reason]++;
        kvk_journal_add(&journal, &all[step]);
        struct kvk_gone asked = gone_of((uint32_t)kvk_random_below(&random, names), 1);
        bool any_tier = kvk_random_below(&random, 2) == 0;
        const struct kvk_gone *expected = NULL;
        uint32_t oldest = step + 1 > capacity ? step + 1 - capacity : 0;
        for (uint32_t i = step + 1; i > oldest && expected == NULL; i--) {
            bool same = kvk_key_equal(all[i - 1].key, asked.key);
            expected = same && (any_tier || all[i - 1].left == 0) ? &all[i - 1] : NULL;
        }
        const struct kvk_gone *found =
            kvk_journal_find(&journal, asked.key, asked.space_id, asked.group, any_tier);
        cr_assert_eq(found != NULL, expected != NULL, "step %u", step);
        if (found != NULL) {
            cr_assert_eq(found->time_ns, expected->time_ns);
        }
        cr_assert_null(
            kvk_journal_find(&journal, asked.key, asked.space_id + 9, asked.group, true));
        if (capacity > 0) {
            cr_assert_eq(kvk_journal_oldest(&journal)->time_ns, oldest + 1);
            cr_assert_eq(kvk_journal_has_overwritten(&journal), step + 1 > capacity);
        }
    }
    cr_expect_eq(memcmp(counts, journal.counts, sizeof(counts)), 0);
    kvk_journal_finish(&journal);
    free(all);
}

Test(journal, the_newest_events_are_known_by_key_and_no_others)
{
    against_plain_list(1, 5, 200);
    against_plain_list(16, 20, 2000);
    against_plain_list(100, 60, 5000);
    against_plain_list(64, 500, 5000);
}

Test(journal, of_no_size_it_only_counts)
{
    struct kvk_journal journal;
    cr_assert_eq(kvk_journal_init(&journal, 0), KVK_OK);
    struct kvk_gone gone = gone_of(1, 1);
    kvk_journal_add(&journal, &gone);
    cr_expect_null(kvk_journal_find(&journal, gone.key, gone.space_id, gone.group, true));
    cr_expect_null(kvk_journal_oldest(&journal));
    cr_expect_eq(journal.counts[gone.reason], 1);
    cr_expect_eq(kvk_journal_bytes(&journal), 0);
    kvk_journal_finish(&journal);
}

/* ---- Why a miss ---- */

struct asking {
    struct trio trio;
    struct house *house;
    uint64_t space;
    uint64_t session;
    uint32_t tokens[64];
};

static void asking_start(struct asking *asking, uint64_t host_blocks)
{
    trio_start(&asking->trio, &(struct house_options){.host_bytes = host_blocks * BLOCK_BYTES,
                                                      .manual_clock = true});
    asking->house = &asking->trio.house;
    asking->space = house_space(asking->house, "model");
    asking->session = house_session(asking->house);
}

static void pass_seconds(struct asking *asking, uint64_t seconds)
{
    struct kvk_clock_manual *manual = &asking->house->manual;
    kvk_clock_manual_set(manual, kvk_clock_now(&manual->clock) + seconds * KVK_NS_PER_SECOND);
}

/* A prompt that begins with `first`: opened, sealed and closed. */
static void keep(struct asking *asking, uint32_t first, uint64_t count)
{
    uint32_t tokens[64];
    house_tokens(tokens, count, first);
    uint64_t id =
        house_open(asking->house, asking->session, asking->space, tokens, count).sequence_id;
    house_seal(asking->house, asking->session, id, count);
    house_close(asking->house, asking->session, id);
}

static struct kvk_miss_report ask_as(struct asking *asking, const struct kvk_caller *caller,
                                     uint32_t first, uint64_t count, const char *salt)
{
    struct kvk_miss_report report;
    uint32_t tokens[64];
    house_tokens(tokens, count, first);
    const struct kvk_prompt prompt = {.tokens = tokens,
                                      .token_count = count,
                                      .salt = (const uint8_t *)salt,
                                      .salt_size = salt == NULL ? 0 : strlen(salt)};
    cr_assert_eq(kvk_report_miss(asking->house->cache, caller, asking->space, &prompt, false,
                                 &report, &asking->house->error),
                 KVK_OK, "%s", asking->house->error.text);
    return report;
}

static struct kvk_miss_report ask(struct asking *asking, uint32_t first, uint64_t count)
{
    return ask_as(asking, &asking->trio.a, first, count, NULL);
}

static void expect_says(const struct kvk_miss_report *report, const char *words)
{
    cr_expect(strstr(report->sentence, words) != NULL, "\"%s\" lacks \"%s\"", report->sentence,
              words);
}

Test(journal, a_hit_misses_nothing)
{
    struct asking asking;
    asking_start(&asking, 16);
    keep(&asking, 1, 12);
    struct kvk_miss_report report = ask(&asking, 1, 14);
    cr_expect_eq(report.miss, KVK_MISS_NONE);
    cr_expect_eq(report.cached_tokens, 12);
    cr_expect_eq(report.prompt_blocks, 3);
    expect_says(&report, "Nothing is missing");
    house_stop(asking.house);
}

Test(journal, never_sealed_and_too_short)
{
    struct asking asking;
    asking_start(&asking, 16);
    keep(&asking, 1, 8);
    struct kvk_miss_report report = ask(&asking, 1, 16);
    cr_expect_eq(report.miss, KVK_MISS_NEVER);
    cr_expect_eq(report.cached_tokens, 8);
    cr_expect_eq(report.missing_block, 2);
    cr_expect_eq(report.missing_looked, 2);
    expect_says(&report, "nobody sealed it");
    expect_says(&report, "tokens 8 to 11");
    report = ask(&asking, 500, 8);
    cr_expect_eq(report.miss, KVK_MISS_NEVER);
    cr_expect_eq(report.missing_block, 0);
    report = ask(&asking, 1, 3);
    cr_expect_eq(report.miss, KVK_MISS_SHORT);
    report = ask(&asking, 1, 0);
    cr_expect_eq(report.miss, KVK_MISS_SHORT);
    house_stop(asking.house);
}

Test(journal, below_the_minimum_that_is_looked_up)
{
    struct asking asking;
    asking_start(&asking, 16);
    const struct kvk_geometry geometry = house_geometry();
    struct kvk_space_request request = {
        .block_tokens = 4, .group_count = 1, .lookup_min_tokens = 9};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("with a minimum");
    request.groups[0] = geometry;
    cr_assert_eq(
        kvk_space_open(asking.house->cache, &asking.trio.a, &request, &reply, &asking.house->error),
        KVK_OK);
    asking.space = reply.space_id;
    struct kvk_miss_report report = ask(&asking, 1, 8);
    cr_expect_eq(report.miss, KVK_MISS_BELOW_MINIMUM);
    cr_expect_eq(report.minimum_tokens, 9);
    report = ask(&asking, 1, 9);
    cr_expect_eq(report.miss, KVK_MISS_NEVER);
    report = ask(&asking, 1, 3);
    cr_expect_eq(report.miss, KVK_MISS_SHORT);
    house_stop(asking.house);
}

Test(journal, evicted_for_its_own_tenant)
{
    struct asking asking;
    asking_start(&asking, 8);
    keep(&asking, 1, 16);
    pass_seconds(&asking, 10);
    (void)ask(&asking, 1, 16);
    keep(&asking, 1000, 20); /* five blocks: one of the first prompt's goes */
    pass_seconds(&asking, 5);
    struct kvk_miss_report report = ask(&asking, 1, 24);
    cr_assert_eq(report.miss, KVK_MISS_GONE);
    cr_expect_eq(report.cached_tokens, 12, "children go before parents");
    cr_expect_eq(report.missing_block, 3);
    cr_expect_eq(report.missing_looked, 3);
    cr_expect_eq(report.missing_gone, 1, "the two blocks past it were never there");
    cr_expect_eq(report.gone.reason, KVK_GONE_EVICTED);
    cr_expect_eq(report.gone.tier, KVK_TIER_HOST);
    cr_expect_eq(report.gone.left, 0);
    cr_expect_eq(report.gone.position, 3);
    cr_expect_eq(report.gone.use_count, 1);
    cr_expect_eq(report.gone.idle_ms, 10000);
    cr_expect_eq(report.gone_age_ms, 5000);
    cr_expect_eq(report.gone.for_space_id, asking.space);
    cr_expect_not(report.gone_for_other);
    cr_expect_str_eq(report.gone_for->name, "a");
    expect_says(&report, "evicted to make room");
    expect_says(&report, "its own tenant");
    house_stop(asking.house);
}

/* A neighbour's name is for admins; its space's id for nobody else either. */
Test(journal, evicted_for_a_neighbour)
{
    struct asking asking;
    asking_start(&asking, 8);
    keep(&asking, 1, 32);
    asking.house->caller = asking.trio.b;
    uint64_t space_a = asking.space;
    asking.space = house_space(asking.house, "of b");
    asking.session = house_session(asking.house);
    keep(&asking, 1000, 16);
    asking.space = space_a;
    struct kvk_miss_report report = ask(&asking, 1, 32);
    cr_assert_eq(report.miss, KVK_MISS_GONE);
    cr_expect_eq(report.gone.reason, KVK_GONE_EVICTED);
    cr_expect(report.gone_for_other);
    cr_expect_null(report.gone_for);
    cr_expect_eq(report.gone.for_space_id, 0);
    cr_expect_eq(report.gone.for_tenant_id, 0);
    cr_expect_geq(report.missing_gone, 4);
    expect_says(&report, "another tenant");
    report = ask_as(&asking, &asking.trio.admin, 1, 32, NULL);
    cr_assert_not_null(report.gone_for);
    cr_expect_str_eq(report.gone_for->name, "b");
    expect_says(&report, "tenant b");
    /* Not another's space at all. */
    const struct kvk_prompt prompt = {.token_count = 0};
    cr_expect_eq(kvk_report_miss(asking.house->cache, &asking.trio.b, space_a, &prompt, false,
                                 &report, &asking.house->error),
                 KVK_NOT_FOUND);
    house_stop(asking.house);
}

Test(journal, under_another_salt)
{
    struct asking asking;
    asking_start(&asking, 16);
    keep(&asking, 1, 8);
    struct kvk_miss_report report = ask_as(&asking, &asking.trio.a, 1, 8, "user-7");
    cr_expect_eq(report.miss, KVK_MISS_OTHER_SALT);
    cr_expect_eq(report.cached_tokens, 0);
    expect_says(&report, "another salt");
    report = ask_as(&asking, &asking.trio.a, 2, 8, "user-7");
    cr_expect_eq(report.miss, KVK_MISS_NEVER, "other tokens");
    house_stop(asking.house);
}

Test(journal, being_written_and_aborted)
{
    struct asking asking;
    asking_start(&asking, 16);
    uint32_t tokens[16];
    house_tokens(tokens, 12, 1);
    keep(&asking, 1, 4);
    uint64_t id = house_open(asking.house, asking.session, asking.space, tokens, 12).sequence_id;
    struct kvk_miss_report report = ask(&asking, 1, 12);
    cr_expect_eq(report.miss, KVK_MISS_WRITING);
    cr_expect_eq(report.writing_sequence_id, id);
    cr_expect_eq(report.missing_block, 1);
    house_close(asking.house, asking.session, id);
    report = ask(&asking, 1, 12);
    cr_assert_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    cr_expect_eq(report.gone.reason, KVK_GONE_ABORTED);
    cr_expect_eq(report.missing_gone, 1);
    expect_says(&report, "before it was sealed");
    /* A refused one never had it. */
    uint32_t others[64];
    struct kvk_sequence_reply reply;
    house_tokens(others, 60, 5000);
    uint64_t held = house_open(asking.house, asking.session, asking.space, others, 56).sequence_id;
    house_tokens(others, 16, 9000);
    cr_assert_eq(house_try_open(asking.house, asking.session, asking.space, others, 16, &reply),
                 KVK_EXHAUSTED);
    report = ask(&asking, 9000, 16);
    cr_expect_eq(report.miss, KVK_MISS_NEVER, "%s", report.sentence);
    house_close(asking.house, asking.session, held);
    house_stop(asking.house);
}

static void invalidate(struct asking *asking, bool whole, uint32_t first, uint64_t count)
{
    uint32_t tokens[64];
    struct kvk_invalidate_reply reply;
    house_tokens(tokens, count, first);
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = count};
    const struct kvk_invalidate_request request = {.space_id = asking->space,
                                                   .prefix = whole ? NULL : &prefix};
    cr_assert_eq(kvk_invalidate(asking->house->cache, &asking->trio.a, &request, &reply,
                                &asking->house->error),
                 KVK_OK);
}

Test(journal, invalidated_prefix_and_invalidated_space)
{
    struct asking asking;
    asking_start(&asking, 16);
    keep(&asking, 1, 16);
    invalidate(&asking, false, 1, 8);
    struct kvk_miss_report report = ask(&asking, 1, 16);
    cr_assert_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    cr_expect_eq(report.gone.reason, KVK_GONE_INVALIDATED);
    cr_expect_eq(report.cached_tokens, 4);
    cr_expect_eq(report.missing_gone, 3);
    cr_expect_not(report.gone_before);
    keep(&asking, 100, 16);
    invalidate(&asking, true, 0, 0);
    report = ask(&asking, 100, 16);
    cr_assert_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    cr_expect_eq(report.gone.reason, KVK_GONE_INVALIDATED);
    cr_expect(report.gone_before);
    expect_says(&report, "was invalidated");
    report = ask(&asking, 101, 16);
    cr_expect_eq(report.miss, KVK_MISS_NEVER);
    house_stop(asking.house);
}

Test(journal, damaged)
{
    struct asking asking;
    asking_start(&asking, 16);
    keep(&asking, 1, 8);
    kvk_lock(&asking.house->cache->lock);
    uint32_t end = kvk_index_block_id_end(asking.house->cache->index);
    for (uint32_t id = 0; id < end; id++) {
        const struct kvk_block *block = kvk_index_block(asking.house->cache->index, id);
        if (block->run != UINT32_MAX && block->position == 1) {
            kvk_block_discredit(asking.house->cache, id, KVK_TIER_HOST);
            break;
        }
    }
    kvk_unlock(&asking.house->cache->lock);
    struct kvk_miss_report report = ask(&asking, 1, 8);
    cr_assert_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    cr_expect_eq(report.gone.reason, KVK_GONE_DAMAGED);
    cr_expect_eq(report.missing_block, 1);
    house_stop(asking.house);
}

/* What was overwritten is not said never to have been. */
Test(journal, it_says_how_far_it_reaches)
{
    struct asking asking;
    house_init(&asking.trio.house);
    asking.trio.house.config.journal_entries = 4;
    asking.house = &asking.trio.house;
    house_start(asking.house,
                &(struct house_options){.host_bytes = 8 * BLOCK_BYTES, .manual_clock = true});
    asking.trio.a = asking.house->caller;
    asking.space = house_space(asking.house, "model");
    asking.session = house_session(asking.house);
    keep(&asking, 1, 16);
    for (uint32_t i = 1; i < 5; i++) {
        pass_seconds(&asking, 2);
        keep(&asking, 1000 * i, 16);
    }
    struct kvk_miss_report report = ask(&asking, 1, 16);
    cr_expect_eq(report.miss, KVK_MISS_FORGOTTEN, "%s", report.sentence);
    cr_expect_geq(report.journal_reach_ms, 1);
    cr_expect_eq(report.missing_gone, 0);
    report = ask(&asking, 2000, 16);
    cr_expect_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    house_stop(asking.house);
}

/* A window's chain: what the whole would need is missing, not what no query sees any more. */
Test(journal, a_window_misses_what_it_sees)
{
    struct asking asking;
    asking_start(&asking, 8);
    struct kvk_geometry geometry = house_geometry();
    geometry.window = 8;
    asking.space = house_space_of(asking.house, &asking.trio.a, "windowed", &geometry, 1);
    keep(&asking, 1, 24); /* blocks 0 to 5; the oldest go first */
    keep(&asking, 1000, 16);
    struct kvk_miss_report report = ask(&asking, 1, 24);
    cr_expect_eq(report.miss, KVK_MISS_NONE, "%s", report.sentence);
    keep(&asking, 2000, 24);
    report = ask(&asking, 1, 24);
    cr_assert_eq(report.miss, KVK_MISS_GONE, "%s", report.sentence);
    cr_expect_geq(report.missing_block, 4, "blocks before the window are not needed");
    house_stop(asking.house);
}

/* ---- Counters ---- */

struct wanted {
    const char *name;
    double value;
};

static void take_stat(void *context, const char *name, double value)
{
    struct wanted *wanted = context;
    if (strcmp(name, wanted->name) == 0) {
        wanted->value = value;
    }
}

static double stat_of(struct asking *asking, const char *name)
{
    struct wanted wanted = {.name = name, .value = -1};
    kvk_report_stats(asking->house->cache, take_stat, &wanted);
    return wanted.value;
}

Test(journal, counters)
{
    struct asking asking;
    asking_start(&asking, 8);
    cr_expect_eq(stat_of(&asking, "kvkeep_blocks_gone_total{reason=\"evicted\"}"), 0);
    keep(&asking, 1, 32);
    keep(&asking, 1000, 12);
    cr_expect_eq(stat_of(&asking, "kvkeep_blocks_gone_total{reason=\"evicted\"}"), 3);
    invalidate(&asking, false, 1000, 4);
    cr_expect_eq(stat_of(&asking, "kvkeep_blocks_gone_total{reason=\"invalidated\"}"), 3);
    cr_expect_eq(stat_of(&asking, "kvkeep_blocks_gone_total{reason=\"damaged\"}"), 0);
    cr_expect_eq(stat_of(&asking, "kvkeep_journal_bytes"), 65536 * 76);
    cr_expect_gt(stat_of(&asking, "kvkeep_mrc_bytes"), 0);
    double metadata = stat_of(&asking, "kvkeep_metadata_bytes");
    cr_expect_gt(metadata, stat_of(&asking, "kvkeep_journal_bytes"));
    cr_expect_eq(stat_of(&asking, "kvkeep_workspace_bytes"), 0);
    const struct kvk_hello hello = house_hello();
    const struct kvk_welcome welcome = house_begin(asking.house, &hello);
    uint64_t bound = 0;
    int pidfd = -1;
    cr_assert_eq(kvk_side_bind(asking.house->cache, welcome.side_token, (int32_t)getpid(),
                               (uint32_t)geteuid(), &bound, &pidfd),
                 KVK_OK);
    if (pidfd >= 0) {
        (void)close(pidfd);
    }
    const struct kvk_map_request map = {
        .session_id = bound, .kind = KVK_MAP_SCRATCH, .size_bytes = 1 << 20};
    struct kvk_map_reply mapped;
    cr_assert_eq(
        kvk_session_map(asking.house->cache, &asking.trio.a, &map, &mapped, &asking.house->error),
        KVK_OK, "%s", asking.house->error.text);
    cr_expect_eq(stat_of(&asking, "kvkeep_workspace_bytes"), 1 << 20);
    house_stop(asking.house);
}
