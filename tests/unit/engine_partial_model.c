/*
 * Partial reuse at random, against a reference that knows prompts and nothing else: a hit is as
 * long as it can be, never longer, and every byte of it follows from the tokens before it, the
 * content that they stand for and the salt.
 */
#include "tests/engine_partial.h"

#define PROMPTS 64
#define LENGTH 24
#define BLOCK_TOKENS 4
#define ROUNDS 100

struct prompt {
    uint32_t tokens[LENGTH];
    struct kvk_content_span spans[LENGTH];
    uint32_t span_count;
    uint64_t length;
    uint8_t salt; /* 0: none */
};

struct model {
    struct stage stage;
    struct kvk_random random;
    struct prompt sealed[PROMPTS];
    uint32_t sealed_count;
    uint64_t partial_hits;
};

static void prompt_pick(struct kvk_random *random, struct prompt *prompt)
{
    memset(prompt, 0, sizeof(*prompt));
    prompt->length = 1 + kvk_random_below(random, LENGTH);
    prompt->salt = (uint8_t)kvk_random_below(random, 2);
    for (uint64_t t = 0; t < prompt->length; t++) {
        prompt->tokens[t] = kvk_random_below(random, 8) == 0 ? 1 : 0;
    }
    uint64_t at = kvk_random_below(random, 2) == 0 ? kvk_random_below(random, LENGTH) : LENGTH;
    while (at < prompt->length) {
        struct kvk_content_span *span = &prompt->spans[prompt->span_count++];
        span->first = at;
        span->count = 1 + kvk_random_below(random, 6);
        span->count = span->count > prompt->length - at ? prompt->length - at : span->count;
        span->digest_size = 4;
        span->digest[0] = (uint8_t)(1 + kvk_random_below(random, 4) / 3);
        at += span->count + kvk_random_below(random, 8);
    }
}

static const struct kvk_content_span *span_of(const struct prompt *prompt, uint64_t token)
{
    for (uint32_t i = 0; i < prompt->span_count; i++) {
        const struct kvk_content_span *span = &prompt->spans[i];
        if (token >= span->first && token < span->first + span->count) {
            return span;
        }
    }
    return NULL;
}

/* What K and V of a token follow from: all of the prompt up to it. */
static uint32_t tag_of(const struct prompt *prompt, uint64_t token)
{
    uint32_t tag = 17 + prompt->salt;
    for (uint64_t t = 0; t <= token; t++) {
        const struct kvk_content_span *span = span_of(prompt, t);
        tag = tag * 31 + prompt->tokens[t];
        tag = tag * 31 + (span == NULL ? 0 : span->digest[0] * 100 + (uint32_t)(t - span->first));
    }
    return tag;
}

static bool token_is(const struct prompt *a, const struct prompt *b, uint64_t token)
{
    const struct kvk_content_span *x = span_of(a, token);
    const struct kvk_content_span *y = span_of(b, token);
    return a->tokens[token] == b->tokens[token] && (x == NULL) == (y == NULL) &&
           (x == NULL || (x->first == y->first && x->digest[0] == y->digest[0]));
}

/* Where in the block do the spans of both end? A whole block is the same only where they agree. */
static bool block_is(const struct prompt *a, const struct prompt *b, uint64_t first)
{
    for (uint64_t t = first; t < first + BLOCK_TOKENS; t++) {
        if (!token_is(a, b, t)) {
            return false;
        }
    }
    return true;
}

static uint64_t whole_blocks(const struct prompt *sealed, const struct prompt *asked,
                             uint64_t limit)
{
    uint64_t blocks = 0;
    uint64_t most = sealed->length < limit ? sealed->length : limit;
    while ((blocks + 1) * BLOCK_TOKENS <= most && sealed->salt == asked->salt &&
           block_is(sealed, asked, blocks * BLOCK_TOKENS)) {
        blocks++;
    }
    return blocks;
}

/* Of the sealed prompt's block behind `first`: how many of its tokens, spans whole, by trying all.
 */
static uint64_t part_tokens(const struct prompt *sealed, const struct prompt *asked, uint64_t first,
                            uint64_t limit)
{
    if (first + BLOCK_TOKENS > sealed->length || sealed->salt != asked->salt) {
        return 0;
    }
    uint64_t most = limit - first < BLOCK_TOKENS ? limit - first : BLOCK_TOKENS - 1;
    for (uint64_t count = most; count > 0; count--) {
        bool all = true;
        for (uint64_t t = first; t < first + count && all; t++) {
            const struct kvk_content_span *x = span_of(sealed, t);
            const struct kvk_content_span *y = span_of(asked, t);
            all = token_is(sealed, asked, t) &&
                  (x == NULL || (x->count == y->count && x->first + x->count <= first + count));
        }
        if (all) {
            return count;
        }
    }
    return 0;
}

static uint64_t reference(const struct model *model, const struct prompt *asked, uint64_t limit,
                          uint64_t *part)
{
    uint64_t blocks = 0;
    *part = 0;
    for (uint32_t i = 0; i < model->sealed_count; i++) {
        uint64_t whole = whole_blocks(&model->sealed[i], asked, limit);
        blocks = whole > blocks ? whole : blocks;
    }
    uint64_t first = blocks * BLOCK_TOKENS;
    for (uint32_t i = 0; i < model->sealed_count; i++) {
        if (whole_blocks(&model->sealed[i], asked, limit) == blocks) {
            uint64_t tokens = part_tokens(&model->sealed[i], asked, first, limit);
            *part = tokens > *part ? tokens : *part;
        }
    }
    return first + *part;
}

/* What was found has the right bytes; the rest is written, and all of it sealed. */
static void sequence_finish(struct stage *stage, const struct prompt *asked,
                            const struct kvk_sequence_reply *reply)
{
    uint64_t id = reply->sequence_id;
    for (uint64_t t = 0; t < reply->cached_tokens; t++) {
        stage_verify(stage, id, t, t + 1, tag_of(asked, t));
    }
    for (uint64_t t = reply->cached_tokens; t < asked->length; t++) {
        STAGE_OK(stage, stage_try_write(stage, id, 0, 0, t, t + 1, tag_of(asked, t)));
    }
    stage_seal(stage, id);
    stage_check(stage);
    stage_close(stage, id);
}

/* A look-up says before what an opening finds. */
static void look(struct stage *stage, const struct kvk_open_request *request, uint64_t expected,
                 uint64_t part)
{
    const struct kvk_lookup_request lookup = {
        .space_id = stage->space, .prompt = request->prompt, .leave_last = request->leave_last};
    struct kvk_lookup_reply found;
    STAGE_OK(stage, kvk_lookup(stage->house.cache, &stage->house.caller, &lookup, &found,
                               &stage->house.error));
    cr_assert_eq(found.cached_tokens, expected);
    cr_assert_eq(found.partial_tokens, part);
}

static void round_run(struct model *model)
{
    struct prompt asked;
    struct stage *stage = &model->stage;
    prompt_pick(&model->random, &asked);
    const struct kvk_open_request request = {.prompt = {.tokens = asked.tokens,
                                                        .token_count = asked.length,
                                                        .spans = asked.spans,
                                                        .span_count = asked.span_count,
                                                        .salt = &asked.salt,
                                                        .salt_size = asked.salt > 0 ? 1 : 0},
                                             .leave_last = kvk_random_below(&model->random, 2) == 0,
                                             .tier = (int)kvk_random_below(&model->random, 2)};
    uint64_t part;
    uint64_t limit = request.leave_last ? asked.length - 1 : asked.length;
    uint64_t expected = reference(model, &asked, limit, &part);
    look(stage, &request, expected, part);
    struct kvk_sequence_reply reply;
    STAGE_OK(stage, stage_try_open(stage, &request, &reply));
    cr_assert_eq(reply.cached_tokens, expected, "%lu, not %lu", (unsigned long)reply.cached_tokens,
                 (unsigned long)expected);
    cr_assert_eq(reply.partial_tokens, part);
    model->partial_hits += part > 0 ? 1 : 0;
    sequence_finish(stage, &asked, &reply);
    model->sealed[model->sealed_count++] = asked;
}

Test(partial_model, as_long_as_it_can_be)
{
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        struct model model = {.sealed_count = 0};
        kvk_random_init(&model.random, seed);
        partial_start(&model.stage, 512, 512);
        while (model.sealed_count < PROMPTS) {
            round_run(&model);
        }
        cr_assert_gt(model.partial_hits, PROMPTS / 8);
        stage_stop(&model.stage);
    }
}
