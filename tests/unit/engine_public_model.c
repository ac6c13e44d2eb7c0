/*
 * Public prefixes at random, against a reference that knows tokens and nothing else: what is found
 * is what was published or is the tenant's own, and has the right bytes.
 */
#include "tests/engine_public.h"

#define MODEL_PROMPTS 8
#define MODEL_BLOCKS 6
#define MODEL_OPEN 12
#define MODEL_PUBLIC 8

struct model_public {
    uint64_t id;
    uint32_t prompt;
    uint32_t blocks;
};

struct model {
    struct party party;
    uint32_t tokens[MODEL_PROMPTS][MODEL_BLOCKS * 4];
    struct model_public published[MODEL_PUBLIC];
    uint32_t published_count;
    struct model_open {
        uint64_t id;
        uint32_t tenant;
        uint32_t prompt;
        uint32_t blocks;
    } open[MODEL_OPEN];
    uint32_t open_count;
};

/* Prompts that share beginnings: prompt p differs from its neighbours from block p % 3 on. */
static void model_tokens(struct model *model)
{
    for (uint32_t p = 0; p < MODEL_PROMPTS; p++) {
        for (uint32_t t = 0; t < MODEL_BLOCKS * 4; t++) {
            uint32_t family = t / 4 < 1 ? p / 4 : t / 4 < 3 ? p / 2 : p;
            model->tokens[p][t] = 1000 * family + t;
        }
    }
}

/* Whole blocks that two prompts have in common. */
static uint32_t model_common(const struct model *model, uint32_t a, uint32_t b)
{
    uint32_t blocks = 0;
    while (blocks < MODEL_BLOCKS &&
           memcmp(&model->tokens[a][blocks * 4], &model->tokens[b][blocks * 4], 16) == 0) {
        blocks++;
    }
    return blocks;
}

static uint32_t model_public_blocks(const struct model *model, uint32_t prompt)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < model->published_count; i++) {
        uint32_t common = model_common(model, model->published[i].prompt, prompt);
        common = common < model->published[i].blocks ? common : model->published[i].blocks;
        most = common > most ? common : most;
    }
    return most;
}

/* The bytes of a block say its tokens alone, so that every tenant computes the same. */
static uint8_t model_byte(const struct model *model, uint32_t prompt, uint32_t block)
{
    return (uint8_t)(model->tokens[prompt][block * 4] / 1000 * 31 + block * 7 + 1);
}

static void model_open(struct model *model, uint32_t tenant, uint32_t prompt, uint32_t blocks,
                       bool use_public)
{
    struct party *party = &model->party;
    struct kvk_sequence_reply reply =
        open_with(party, tenant, model->tokens[prompt], blocks * 4, use_public, NULL);
    uint32_t known = model_public_blocks(model, prompt);
    known = known < blocks ? known : blocks;
    if (use_public) {
        cr_assert_geq(reply.cached_tokens, known * 4);
    }
    cr_assert_leq(reply.public_tokens, use_public ? known * 4 : 0);
    for (uint32_t i = 0; i < blocks; i++) {
        uint8_t *bytes = block_bytes(party, reply.sequence_id, i);
        if (i < reply.cached_tokens / 4) {
            cr_assert_eq(bytes[0], model_byte(model, prompt, i));
            cr_assert_eq(bytes[BLOCK - 1], model_byte(model, prompt, i));
        } else {
            memset(bytes, model_byte(model, prompt, i), BLOCK);
        }
    }
    house_seal(&party->house, party->sessions[tenant], reply.sequence_id, blocks * 4);
    model->open[model->open_count++] = (struct model_open){
        .id = reply.sequence_id, .tenant = tenant, .prompt = prompt, .blocks = blocks};
}

static void model_close(struct model *model, uint32_t which)
{
    close_one(&model->party, model->open[which].tenant, model->open[which].id);
    model->open[which] = model->open[--model->open_count];
}

static void model_publish(struct model *model, uint32_t prompt, uint32_t blocks)
{
    struct kvk_publish_reply reply;
    struct party *party = &model->party;
    uint64_t own = look(party, PUBLISHER, model->tokens[prompt], blocks * 4, false);
    enum kvk_status status =
        try_publish(party, PUBLISHER, model->tokens[prompt], blocks * 4, &reply);
    if (own < blocks * 4) {
        cr_assert(status == KVK_NOT_FOUND || !reply.created);
        return;
    }
    cr_assert(status == KVK_OK || status == KVK_EXHAUSTED, "%s", party->house.error.text);
    if (status == KVK_OK && reply.created) {
        model->published[model->published_count++] =
            (struct model_public){.id = reply.public_id, .prompt = prompt, .blocks = blocks};
    }
}

static void model_withdraw(struct model *model, uint32_t which)
{
    struct kvk_withdraw_reply reply;
    cr_assert_eq(withdraw(&model->party, PUBLISHER, model->published[which].id, &reply), KVK_OK);
    model->published[which] = model->published[--model->published_count];
}

static void model_step(struct model *model, struct kvk_random *source)
{
    uint64_t random = kvk_random_next(source);
    uint32_t prompt = (uint32_t)(random >> 8) % MODEL_PROMPTS;
    uint32_t blocks = 1 + (uint32_t)(random >> 16) % MODEL_BLOCKS;
    uint32_t tenant = (uint32_t)(random >> 24) % 3;
    bool use_public = (random >> 32) % 4 != 0;
    switch (random % 8) {
    case 0:
        if (model->published_count < MODEL_PUBLIC) {
            model_publish(model, prompt, blocks);
        }
        break;
    case 1:
        if (model->published_count > 0) {
            model_withdraw(model, (uint32_t)(random >> 40) % model->published_count);
        }
        break;
    case 2:
    case 3:
        if (model->open_count < MODEL_OPEN) {
            model_open(model, tenant, prompt, blocks, use_public);
        }
        break;
    case 4:
    case 5:
        if (model->open_count > 0) {
            model_close(model, (uint32_t)(random >> 40) % model->open_count);
        }
        break;
    case 6:
        kvk_cache_maintain(model->party.house.cache);
        break;
    default: {
        uint64_t own = look(&model->party, tenant, model->tokens[prompt], blocks * 4, false);
        uint64_t all = look(&model->party, tenant, model->tokens[prompt], blocks * 4, true);
        uint32_t known = model_public_blocks(model, prompt);
        cr_assert_geq(all, own);
        cr_assert_geq(all, (known < blocks ? known : blocks) * 4);
        if (known == 0) {
            cr_assert_eq(all, own, "nothing of it is public");
        }
    }
    }
    kvk_cache_check(model->party.house.cache);
}

Test(engine_public_model, random_steps_against_a_reference, .timeout = 60)
{
    for (uint64_t round = 0; round < 6; round++) {
        struct model model = {.published_count = 0};
        struct kvk_random random;
        kvk_random_init(&random, 77 + round);
        model_tokens(&model);
        /* Tight in some rounds, so that blocks go while others hold them; with a device in some. */
        start(&model.party, round % 3 == 2 ? 90 : 0, round % 2 == 0 ? 400 : 140);
        for (uint32_t i = 0; i < 600; i++) {
            model_step(&model, &random);
        }
        while (model.open_count > 0) {
            model_close(&model, 0);
        }
        while (model.published_count > 0) {
            model_withdraw(&model, 0);
        }
        cr_assert_eq(public_spaces(&model.party), 0);
        party_stop(&model.party);
    }
}
