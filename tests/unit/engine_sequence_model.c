/*
 * Random calls on a few sequences in tiny pools, beside a plain model that knows for each sequence
 * its tokens and how far they are committed and sealed. Every answer is compared, every readable
 * byte is verified, every law is checked after every call; a refused call must change nothing.
 */
#include "tests/engine_stage.h"

#define SEQUENCES 6
#define LENGTH_MAX 40
#define STEPS 1500

struct model {
    uint64_t id; /* 0: none */
    uint32_t tokens[LENGTH_MAX];
    uint64_t length, committed, sealed;
    bool out;
};

struct play {
    struct stage stage;
    struct kvk_random random;
    struct model models[SEQUENCES];
    uint64_t refused, hits, forks, swaps, truncated, window_refused;
};

static struct play all;

/* K and V of a token depend on all before it: so equal prefixes have equal bytes. */
static uint32_t tag_at(const struct model *model, uint64_t position)
{
    uint64_t tag = 1;
    for (uint64_t i = 0; i <= position; i++) {
        tag = (tag ^ model->tokens[i]) * UINT64_C(0x9e3779b97f4a7c15);
        tag ^= tag >> 31;
    }
    return (uint32_t)tag;
}

static void random_tokens(struct play *play, uint32_t *tokens, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        /* Seldom a surprise, so that prompts share beginnings of any length. */
        tokens[i] = kvk_random_below(&play->random, 12) == 0 ? 2 : 1;
    }
}

static struct model *pick(struct play *play, bool there)
{
    for (int tries = 0; tries < 20; tries++) {
        struct model *model = &play->models[kvk_random_below(&play->random, SEQUENCES)];
        if ((model->id != 0) == there) {
            return model;
        }
    }
    return NULL;
}

static void expect_reply(const struct model *model, const struct kvk_sequence_reply *reply)
{
    cr_assert_eq(reply->length, model->length);
    cr_assert_eq(reply->committed_tokens, model->committed);
    cr_assert_eq(reply->sealed_tokens, model->sealed);
    cr_assert_eq(reply->state, model->out ? KVK_SEQUENCE_SWAPPED_OUT : KVK_SEQUENCE_RUNNING);
}

/* A refusal for want of room, or the one that is expected. */
static bool is_refused(struct play *play, const struct model *model, enum kvk_status status)
{
    if (status == KVK_OK) {
        return false;
    }
    cr_assert_eq(status, KVK_EXHAUSTED, "%s: %s", kvk_status_name(status),
                 play->stage.house.error.text);
    play->refused++;
    if (model->id != 0) {
        struct kvk_sequence_reply reply = stage_get(&play->stage, model->id);
        expect_reply(model, &reply);
    }
    return true;
}

/* First token that a query after `position` tokens sees, sinks apart. */
static uint64_t window_first(const struct play *play, uint64_t position)
{
    return kvk_geometry_window_start(&play->stage.geometry, position);
}

static void verify(struct play *play, const struct model *model)
{
    uint64_t settled = model->sealed < model->committed ? model->sealed : model->committed;
    uint64_t first = window_first(play, settled);
    for (uint64_t token = 0; token < model->sealed; token++) {
        if (token >= first || token < play->stage.geometry.sinks) {
            stage_verify(&play->stage, model->id, token, token + 1, tag_at(model, token));
        }
    }
}

/* ---- Steps ---- */

static void step_open(struct play *play)
{
    struct model *model = pick(play, false);
    if (model == NULL) {
        return;
    }
    struct model opened = {.length = kvk_random_below(&play->random, LENGTH_MAX / 2)};
    random_tokens(play, opened.tokens, opened.length);
    const struct kvk_open_request request = {
        .prompt = {.tokens = opened.tokens, .token_count = opened.length},
        .leave_last = kvk_random_chance(&play->random, 0.5),
        .leave_on_host = kvk_random_chance(&play->random, 0.3),
        .growth_tokens = kvk_random_below(&play->random, 6),
        .no_lookup = kvk_random_chance(&play->random, 0.2),
        .tier = kvk_random_chance(&play->random, 0.2) ? KVK_TIER_HOST : -1,
    };
    struct kvk_sequence_reply reply;
    enum kvk_status status = stage_try_open(&play->stage, &request, &reply);
    if (is_refused(play, &opened, status)) {
        return;
    }
    *model = opened;
    model->id = reply.sequence_id;
    model->committed = model->length;
    model->sealed = reply.cached_tokens;
    play->hits += reply.cached_tokens > 0;
    cr_assert_leq(reply.cached_tokens, model->length);
    cr_assert(!request.no_lookup || reply.cached_tokens == 0);
    expect_reply(model, &reply);
}

static void step_append(struct play *play, struct model *model)
{
    uint32_t tokens[8];
    uint64_t count = kvk_random_between(&play->random, 1, 8);
    bool draft = model->committed < model->length || kvk_random_chance(&play->random, 0.3);
    struct kvk_sequence_reply reply;
    if (model->length + count > LENGTH_MAX) {
        return;
    }
    random_tokens(play, tokens, count);
    enum kvk_status status =
        stage_try_append(&play->stage, model->id, model->length, tokens, count, draft, &reply);
    if (model->out) {
        cr_assert_eq(status, KVK_PRECONDITION);
        cr_assert_eq(play->stage.house.error.cause, KVK_CAUSE_SWAPPED_OUT);
        return;
    }
    if (is_refused(play, model, status)) {
        return;
    }
    uint64_t before = model->length;
    memcpy(model->tokens + before, tokens, count * sizeof(tokens[0]));
    model->length += count;
    model->committed = draft ? model->committed : model->length;
    expect_reply(model, &reply);
    if (kvk_random_chance(&play->random, 0.2)) { /* said again, answered again */
        STAGE_OK(&play->stage,
                 stage_try_append(&play->stage, model->id, before, tokens, count, draft, &reply));
        expect_reply(model, &reply);
    }
}

static void step_seal(struct play *play, struct model *model)
{
    if (model->out || model->sealed == model->length) {
        return;
    }
    uint64_t length = kvk_random_between(&play->random, model->sealed, model->length);
    for (uint64_t token = model->sealed; token < length; token++) {
        STAGE_OK(&play->stage, stage_try_write(&play->stage, model->id, 0, 0, token, token + 1,
                                               tag_at(model, token)));
    }
    STAGE_OK(&play->stage, house_try_seal(&play->stage.house, play->stage.session, model->id,
                                          model->length, length));
    model->sealed = length;
}

static void step_commit(struct play *play, struct model *model)
{
    uint64_t accept = kvk_random_below(&play->random, model->length - model->committed + 1);
    struct kvk_sequence_reply reply;
    uint64_t before = model->length;
    enum kvk_status status = stage_try_commit(&play->stage, model->id, before, accept, &reply);
    if (model->out) {
        /* Refused, or the last change said again. */
        cr_assert(status == KVK_PRECONDITION || (status == KVK_OK && accept == 0));
        return;
    }
    STAGE_OK(&play->stage, status);
    model->length = model->committed + accept;
    model->committed = model->length;
    model->sealed = model->sealed < model->length ? model->sealed : model->length;
    expect_reply(model, &reply);
    STAGE_OK(&play->stage, stage_try_commit(&play->stage, model->id, before, accept, &reply));
    expect_reply(model, &reply);
}

static void step_truncate(struct play *play, struct model *model)
{
    uint64_t length = kvk_random_below(&play->random, model->length + 1);
    struct kvk_sequence_reply reply;
    if (kvk_random_chance(&play->random, 0.6)) { /* mostly a little */
        length = model->length - kvk_random_below(&play->random, model->length < 3 ? 1 : 3);
    }
    enum kvk_status status =
        stage_try_truncate(&play->stage, model->id, model->length, length, &reply);
    if (status == KVK_PRECONDITION && play->stage.geometry.window > 0) {
        cr_assert_eq(play->stage.house.error.cause, KVK_CAUSE_WINDOW_GONE);
        play->window_refused++;
        return;
    }
    STAGE_OK(&play->stage, status);
    play->truncated++;
    model->length = length;
    model->committed = model->committed < length ? model->committed : length;
    model->sealed = model->sealed < length ? model->sealed : length;
    expect_reply(model, &reply);
}

static void step_fork(struct play *play, struct model *model)
{
    struct model *child = pick(play, false);
    uint64_t id;
    if (child == NULL) {
        return;
    }
    enum kvk_status status = stage_try_fork(&play->stage, model->id, model->length, 1, "", &id);
    if (model->out || model->sealed < model->length) {
        cr_assert_eq(status, KVK_PRECONDITION);
        return;
    }
    STAGE_OK(&play->stage, status);
    *child = *model;
    child->id = id;
    play->forks++;
}

static void step_swap(struct play *play, struct model *model)
{
    struct kvk_swap_reply reply;
    enum kvk_status status = model->out ? stage_try_swap_in(&play->stage, model->id, &reply)
                                        : stage_try_swap_out(&play->stage, model->id, &reply);
    if (!model->out && model->sealed < model->length) {
        cr_assert_eq(status, KVK_PRECONDITION);
        cr_assert_eq(play->stage.house.error.cause, KVK_CAUSE_GRANT_UNWRITTEN);
        return;
    }
    if (is_refused(play, model, status)) {
        return;
    }
    model->out = !model->out;
    play->swaps++;
    expect_reply(model, &reply.sequence);
}

static void step(struct play *play)
{
    struct model *model = pick(play, true);
    if (model == NULL || kvk_random_chance(&play->random, 0.15)) {
        step_open(play);
        return;
    }
    switch (kvk_random_below(&play->random, 12)) {
    case 0:
    case 1:
    case 2:
        step_append(play, model);
        break;
    case 3:
    case 4:
    case 5:
    case 6:
        step_seal(play, model);
        break;
    case 7:
        step_commit(play, model);
        break;
    case 8:
        step_truncate(play, model);
        break;
    case 9:
        step_fork(play, model);
        break;
    case 10:
        step_swap(play, model);
        break;
    default:
        stage_close(&play->stage, model->id);
        model->id = 0;
        break;
    }
}

static void run(uint64_t seed, uint32_t window, uint32_t sinks, uint32_t device, uint32_t host)
{
    struct kvk_geometry geometry = house_geometry();
    geometry.window = window;
    geometry.sinks = sinks;
    memset(all.models, 0, sizeof(all.models));
    kvk_random_init(&all.random, seed);
    house_init(&all.stage.house);
    stage_start_with(&all.stage, &geometry, device, host);
    for (int i = 0; i < STEPS; i++) {
        step(&all);
        stage_check(&all.stage);
        for (int s = 0; s < SEQUENCES && i % 8 == 0; s++) {
            if (all.models[s].id != 0) {
                verify(&all, &all.models[s]);
            }
        }
    }
    for (int s = 0; s < SEQUENCES; s++) {
        if (all.models[s].id != 0) {
            verify(&all, &all.models[s]);
            stage_close(&all.stage, all.models[s].id);
        }
    }
    cr_expect_eq(stage_bound(&all.stage, KVK_TIER_DEVICE), 0);
    cr_expect_eq(stage_bound(&all.stage, KVK_TIER_HOST), 0);
    cr_expect_eq(stage_stats(&all.stage).wrong_reuse, 0);
    stage_stop(&all.stage);
}

/* All kinds of calls were among them. */
static void expect_variety(bool tight, bool windowed)
{
    cr_expect_gt(all.hits, 20);
    cr_expect_gt(all.forks, 20);
    cr_expect_gt(all.swaps, 20);
    cr_expect_gt(all.truncated, 20);
    cr_expect(!tight || all.refused > 20);
    cr_expect(!windowed || all.window_refused > 5);
}

Test(sequence_model, in_roomy_pools)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        run(seed, 0, 0, 100, 100);
    }
    expect_variety(false, false);
}

Test(sequence_model, in_tight_pools)
{
    for (uint64_t seed = 11; seed <= 18; seed++) {
        run(seed, 0, 0, 20, 12);
    }
    expect_variety(true, false);
}

Test(sequence_model, under_a_window)
{
    for (uint64_t seed = 21; seed <= 26; seed++) {
        run(seed, 9, 0, 20, 12);
    }
    expect_variety(true, true);
}

Test(sequence_model, under_a_window_with_sinks)
{
    for (uint64_t seed = 31; seed <= 36; seed++) {
        run(seed, 6, 5, 20, 12);
    }
    expect_variety(true, true);
}
