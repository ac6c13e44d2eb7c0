/*
 * What the log of events says is what can be found: a mirror that applies nothing but events is
 * compared with the index itself after every step of a random life in tiny pools; readers that fell
 * behind, snapshots while blocks come and go, tenants apart, spaces that were invalidated.
 */
#include "tests/engine_stage.h"

#include "daemon/events.h"

#define MIRROR_MAX 4096
#define STEPS 1200
#define SEQUENCES 5

/* ---- A mirror ---- */

struct place {
    struct kvk_key key;
    uint64_t space_id;
    uint8_t tier;
    uint8_t group;
    uint32_t position;
    uint32_t tokens[4];
};

struct mirror {
    struct place places[MIRROR_MAX];
    uint32_t count;
    uint64_t after;
    struct kvk_event_batch batch;
};

static struct place *mirror_find(struct mirror *mirror, struct kvk_key key, uint8_t tier)
{
    for (uint32_t i = 0; i < mirror->count; i++) {
        if (kvk_key_equal(mirror->places[i].key, key) && mirror->places[i].tier == tier) {
            return &mirror->places[i];
        }
    }
    return NULL;
}

static bool mirror_knows(struct mirror *mirror, struct kvk_key key)
{
    for (uint8_t tier = 0; tier < KVK_TIER_COUNT; tier++) {
        if (mirror_find(mirror, key, tier) != NULL) {
            return true;
        }
    }
    return false;
}

static void mirror_apply(struct mirror *mirror, const struct kvk_event *event)
{
    struct place *found = mirror_find(mirror, event->key, event->tier);
    switch ((enum kvk_event_kind)event->kind) {
    case KVK_EVENT_STORED:
        cr_assert_eq(event->token_count, 4);
        if (found == NULL) {
            cr_assert_lt(mirror->count, MIRROR_MAX);
            found = &mirror->places[mirror->count++];
        }
        *found = (struct place){.key = event->key,
                                .space_id = event->space_id,
                                .tier = event->tier,
                                .group = event->group,
                                .position = event->position};
        memcpy(found->tokens, event->tokens, sizeof(found->tokens));
        break;
    case KVK_EVENT_REMOVED:
        if (found != NULL) {
            *found = mirror->places[--mirror->count];
        }
        break;
    case KVK_EVENT_CLEARED:
        for (uint32_t i = 0; i < mirror->count;) {
            if (mirror->places[i].space_id == event->space_id) {
                mirror->places[i] = mirror->places[--mirror->count];
            } else {
                i++;
            }
        }
        break;
    }
}

/* All events so far. False: some were overwritten. */
static bool mirror_catch_up(struct mirror *mirror, struct kvk_cache *cache, uint64_t tenant_id)
{
    while (mirror->after != kvk_events_newest(cache)) {
        if (!kvk_events_read_unlocked(cache, tenant_id, &mirror->after, &mirror->batch)) {
            return false;
        }
        for (uint32_t i = 0; i < mirror->batch.count; i++) {
            mirror_apply(mirror, &mirror->batch.events[i]);
        }
    }
    return true;
}

/* The index itself, block by block: exactly what the mirror has. */
static void mirror_compare(struct mirror *mirror, struct kvk_cache *cache, uint64_t tenant_id)
{
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    for (uint32_t id = 0; id < kvk_index_block_id_end(cache->index); id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->run == UINT32_MAX ||
            !kvk_root_is_current(cache, kvk_index_root_of(cache->index, id)) ||
            (tenant_id != 0 && kvk_group_of(cache, block)->space->tenant->id != tenant_id)) {
            continue;
        }
        for (uint8_t tier = 0; tier < KVK_TIER_COUNT; tier++) {
            if ((block->tier_mask >> tier & 1U) == 0) {
                continue;
            }
            const struct place *place = mirror_find(mirror, block->key, tier);
            cr_assert_not_null(place, "block %u is in tier %u, which no event said", id, tier);
            cr_assert_eq(place->position, block->position);
            cr_assert_eq(memcmp(place->tokens, kvk_index_tokens(cache->index, id), 16), 0);
            count++;
        }
    }
    kvk_unlock(&cache->lock);
    cr_assert_eq(count, mirror->count, "the mirror has %u, the index %u", mirror->count, count);
}

/* ---- A random life ---- */

struct play {
    struct stage stage;
    struct kvk_random random;
    uint64_t ids[SEQUENCES]; /* 0: none */
};

static struct play all;
static struct mirror mirror;
static struct mirror late; /* one that takes snapshots */

static void play_start(struct play *play, uint64_t log_bytes, uint64_t seed)
{
    const struct kvk_geometry geometry = house_geometry();
    house_init(&play->stage.house);
    play->stage.house.config.events_log_bytes = log_bytes;
    stage_start_with(&play->stage, &geometry, 16, 12);
    kvk_random_init(&play->random, seed);
    memset(play->ids, 0, sizeof(play->ids));
    memset(&mirror, 0, sizeof(mirror));
    memset(&late, 0, sizeof(late));
}

static void step_open(struct play *play, uint64_t *id)
{
    static const char *const salts[] = {"", "", "one", "two"};
    const char *salt = salts[kvk_random_below(&play->random, 4)];
    uint32_t tokens[32];
    uint64_t count = 1 + kvk_random_below(&play->random, 31);
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = kvk_random_below(&play->random, 10) == 0 ? 2 : 1;
    }
    const struct kvk_open_request request = {.prompt = {.tokens = tokens,
                                                        .token_count = count,
                                                        .salt = (const uint8_t *)salt,
                                                        .salt_size = strlen(salt)},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    if (stage_try_open(&play->stage, &request, &reply) == KVK_OK) {
        *id = reply.sequence_id;
        stage_seal(&play->stage, reply.sequence_id);
    }
}

static void invalidate(struct play *play, const char *salt)
{
    struct kvk_invalidate_request request = {.space_id = play->stage.space};
    struct kvk_invalidate_reply reply;
    if (salt != NULL) {
        request.by_salt = true;
        request.salt = house_view(salt);
    }
    STAGE_OK(&play->stage, kvk_invalidate(play->stage.house.cache, &play->stage.house.caller,
                                          &request, &reply, &play->stage.house.error));
}

static void play_step(struct play *play)
{
    uint64_t *id = &play->ids[kvk_random_below(&play->random, SEQUENCES)];
    uint64_t what = kvk_random_below(&play->random, 100);
    struct kvk_swap_reply swap;
    if (*id == 0) {
        step_open(play, id);
    } else if (what < 50) {
        stage_close(&play->stage, *id);
        *id = 0;
    } else if (what < 70) {
        (void)stage_try_swap_out(&play->stage, *id, &swap);
    } else if (what < 90) {
        (void)stage_try_swap_in(&play->stage, *id, &swap);
    } else if (what < 93) {
        invalidate(play, NULL);
    } else if (what < 96) {
        invalidate(play, "one");
    } else {
        stage_pass_ms(&play->stage, 1000);
        kvk_cache_maintain(play->stage.house.cache);
    }
}

static void play_stop(struct play *play)
{
    stage_stop(&play->stage);
}

/* ---- Tests ---- */

Test(events, say_what_can_be_found)
{
    uint64_t moved = 0;
    play_start(&all, 1 << 20, 1);
    struct kvk_cache *cache = all.stage.house.cache;
    for (int i = 0; i < STEPS; i++) {
        play_step(&all);
        cr_assert(mirror_catch_up(&mirror, cache, 0));
        mirror_compare(&mirror, cache, 0);
    }
    kvk_lock(&cache->lock);
    moved = cache->stats.demoted_blocks + cache->stats.swapped_out_blocks;
    cr_assert_gt(cache->stats.evictions[KVK_TIER_DEVICE] + cache->stats.forgotten_blocks, 50);
    cr_assert_gt(cache->stats.invalidated_blocks, 20);
    kvk_unlock(&cache->lock);
    cr_assert_gt(moved, 20, "nothing moved between tiers: the test shows little");
    cr_assert_gt(kvk_events_newest(cache), 500);
    play_stop(&all);
}

/* Whoever fell behind is told so, takes a snapshot in the midst of changes, and is right again. */
Test(events, snapshots_while_things_change)
{
    uint32_t snapshots = 0;
    play_start(&all, 8192, 2);
    struct kvk_cache *cache = all.stage.house.cache;
    for (int i = 0; i < STEPS; i++) {
        play_step(&all);
        if (kvk_random_below(&all.random, 40) != 0 || mirror_catch_up(&late, cache, 0)) {
            continue;
        }
        struct kvk_events_walk walk;
        cr_assert_eq(kvk_events_walk_begin_unlocked(cache, 0, &walk), KVK_OK);
        late.count = 0;
        while (kvk_events_walk_next_unlocked(cache, &walk, &late.batch)) {
            for (uint32_t e = 0; e < late.batch.count; e++) {
                const struct kvk_event *event = &late.batch.events[e];
                cr_assert_eq(event->kind, KVK_EVENT_STORED);
                cr_assert_eq(event->number, 0);
                mirror_apply(&late, event);
            }
            play_step(&all); /* between two slices */
        }
        late.after = walk.after;
        kvk_events_walk_finish(&walk);
        if (mirror_catch_up(&late, cache, 0)) {
            mirror_compare(&late, cache, 0);
            snapshots++;
        }
    }
    cr_assert_gt(snapshots, 5, "the log never overflowed");
    play_stop(&all);
}

/* A chain longer than one slice tells comes whole, parents before children. */
Test(events, a_long_chain_comes_in_order)
{
    enum { TOKENS = 4000 };
    static uint32_t tokens[TOKENS];
    const struct kvk_geometry geometry = house_geometry();
    house_init(&all.stage.house);
    all.stage.house.config.events_log_bytes = 8192;
    stage_start_with(&all.stage, &geometry, 1100, 0);
    struct kvk_cache *cache = all.stage.house.cache;
    memset(&late, 0, sizeof(late));
    for (uint32_t i = 0; i < TOKENS; i++) {
        tokens[i] = i * 7;
    }
    struct kvk_sequence_reply reply = stage_open(&all.stage, tokens, TOKENS);
    stage_seal(&all.stage, reply.sequence_id);
    cr_assert_not(mirror_catch_up(&late, cache, 0));

    struct kvk_events_walk walk;
    cr_assert_eq(kvk_events_walk_begin_unlocked(cache, 0, &walk), KVK_OK);
    late.count = 0;
    while (kvk_events_walk_next_unlocked(cache, &walk, &late.batch)) {
        for (uint32_t e = 0; e < late.batch.count; e++) {
            const struct kvk_event *event = &late.batch.events[e];
            cr_assert_eq(event->position, late.count);
            cr_assert(event->position == 0 || mirror_knows(&late, event->parent));
            cr_assert_eq(event->tokens[0], event->position * 28);
            mirror_apply(&late, event);
        }
    }
    kvk_events_walk_finish(&walk);
    cr_assert_eq(late.count, TOKENS / 4);
    mirror_compare(&late, cache, 0);
    stage_stop(&all.stage);
}

/* What is asked for after is what is said: nothing twice, nothing left out, nothing of the future.
 */
Test(events, numbers)
{
    const uint32_t tokens[4] = {1, 2, 3, 4};
    play_start(&all, 1 << 20, 3);
    struct kvk_cache *cache = all.stage.house.cache;
    struct kvk_sequence_reply reply = stage_open(&all.stage, tokens, 4);
    cr_assert_eq(kvk_events_newest(cache), 0, "nothing can be found before it is sealed");
    stage_seal(&all.stage, reply.sequence_id);
    cr_assert_eq(kvk_events_newest(cache), 1);
    cr_assert(mirror_catch_up(&mirror, cache, 0));
    const struct kvk_event *event = &mirror.batch.events[0];
    cr_assert_eq(event->number, 1);
    cr_assert_eq(event->kind, KVK_EVENT_STORED);
    cr_assert_eq(event->tier, KVK_TIER_DEVICE);
    cr_assert_not(event->salted);
    cr_assert_not(event->content);
    cr_assert_eq(memcmp(event->tokens, tokens, sizeof(tokens)), 0);

    uint64_t after = 2;
    cr_assert_not(kvk_events_read_unlocked(cache, 0, &after, &mirror.batch));
    after = UINT64_MAX;
    cr_assert_not(kvk_events_read_unlocked(cache, 0, &after, &mirror.batch));
    after = 1;
    cr_assert(kvk_events_read_unlocked(cache, 0, &after, &mirror.batch));
    cr_assert_eq(mirror.batch.count, 0);
    after = 0;
    cr_assert(kvk_events_read_unlocked(cache, 77, &after, &mirror.batch));
    cr_assert_eq(mirror.batch.count, 0, "another tenant's");
    cr_assert_eq(after, 1, "but passed over");

    struct kvk_event_space space;
    cr_assert_eq(kvk_events_space_unlocked(cache, all.stage.space, &space), KVK_OK);
    cr_assert_str_eq(space.tenant, "default");
    cr_assert_str_eq(space.model, "m");
    cr_assert_str_eq(space.adapter, "");
    cr_assert_eq(space.block_tokens, 4);
    free(space.memory);
    cr_assert_eq(kvk_events_space_unlocked(cache, 12345, &space), KVK_NOT_FOUND);
    stage_close(&all.stage, reply.sequence_id);
    play_stop(&all);
}

/* A log that is off costs nothing and says nothing. */
Test(events, are_off_by_default)
{
    play_start(&all, 0, 4);
    cr_assert_null(all.stage.house.cache->events);
    for (int i = 0; i < 50; i++) {
        play_step(&all);
    }
    cr_assert_eq(kvk_events_newest(all.stage.house.cache), 0);
    play_stop(&all);
}
