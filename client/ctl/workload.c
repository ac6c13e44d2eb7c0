#include "client/ctl/workload.h"

#include <math.h>
#include <string.h>

#define SYSTEM_PROMPTS 24
#define VOCABULARY 128000

void workload_init(struct workload *workload, uint64_t seed)
{
    memset(workload, 0, sizeof *workload);
    kvk_random_init(&workload->random, seed);
}

static uint32_t between(struct kvk_random *random, uint32_t low, uint32_t high)
{
    return (uint32_t)kvk_random_between(random, low, high);
}

static void append(struct workload_conversation *conversation, struct kvk_random *random,
                   uint32_t count)
{
    for (uint32_t i = 0; i < count && conversation->token_count < WORKLOAD_TOKENS_MAX; i++) {
        conversation->tokens[conversation->token_count++] =
            (uint32_t)kvk_random_below(random, VOCABULARY);
    }
}

/* A prompt that many share: the same tokens in every process. */
static void append_shared(struct workload_conversation *conversation, uint64_t which, uint32_t low,
                          uint32_t high)
{
    struct kvk_random shared;
    kvk_random_init(&shared, UINT64_C(0x5155) + which);
    append(conversation, &shared, between(&shared, low, high));
}

static void begin(struct workload *workload, struct workload_conversation *conversation)
{
    struct kvk_random *random = &workload->random;
    double which = kvk_random_unit(random);
    conversation->token_count = 0;
    if (which < 0.55) {
        /* Popularity falls off steeply: the square of a uniform number. */
        double popular = kvk_random_unit(random);
        conversation->kind = WORKLOAD_CHAT;
        conversation->turns_left = 1 + (uint32_t)(-log(1 - kvk_random_unit(random)) * 4);
        append_shared(conversation, (uint64_t)(popular * popular * SYSTEM_PROMPTS), 60, 700);
    } else if (which < 0.85) {
        conversation->kind = WORKLOAD_AGENT;
        conversation->turns_left = between(random, 4, 20);
        append_shared(conversation, 1000 + kvk_random_below(random, 3), 900, 1400);
    } else {
        conversation->kind = WORKLOAD_ONCE;
        conversation->turns_left = 1;
    }
}

struct workload_conversation *workload_next(struct workload *workload, uint32_t *output_count)
{
    struct kvk_random *random = &workload->random;
    struct workload_conversation *conversation =
        &workload->conversations[kvk_random_below(random, WORKLOAD_CONVERSATIONS)];
    if (conversation->token_count == 0 || conversation->turns_left == 0 ||
        conversation->token_count > WORKLOAD_TOKENS_MAX - 700) {
        begin(workload, conversation);
    }
    conversation->turns_left--;
    switch (conversation->kind) {
    case WORKLOAD_CHAT:
        append(conversation, random, between(random, 10, 240));
        *output_count = between(random, 8, 120);
        break;
    case WORKLOAD_AGENT:
        append(conversation, random, between(random, 20, 160));
        *output_count = between(random, 4, 40);
        break;
    case WORKLOAD_ONCE:
        append(conversation, random, between(random, 100, 500));
        *output_count = between(random, 8, 60);
        break;
    }
    return conversation;
}

void workload_answer(struct workload *workload, struct workload_conversation *conversation,
                     uint32_t count)
{
    append(conversation, &workload->random, count);
}

void workload_drop(struct workload_conversation *conversation)
{
    conversation->token_count = 0;
    conversation->turns_left = 0;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t workload_fold(uint64_t prefix, uint32_t token)
{
    return mix(prefix * UINT64_C(0x9e3779b97f4a7c15) + token + 1);
}

uint64_t workload_word(uint64_t prefix, uint32_t place)
{
    return mix(prefix + (uint64_t)(place + 1) * UINT64_C(0xd6e8feb86659fd93));
}
