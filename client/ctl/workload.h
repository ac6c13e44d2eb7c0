/*
 * The built-in workload: requests whose statistics resemble real ones, and K/V bytes that follow
 * from the tokens, so that every byte read back can be verified.
 *
 * Three kinds of traffic: chats that share a few system prompts (few of them popular) and come
 * back turn by turn; agents with a long common prompt and many short steps; prompts that never
 * come back. All of it follows from a seed.
 */
#ifndef KVK_CLIENT_CTL_WORKLOAD_H
#define KVK_CLIENT_CTL_WORKLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/random.h"

#define WORKLOAD_CONVERSATIONS 12
#define WORKLOAD_TOKENS_MAX 4096 /* of one conversation */

enum workload_kind {
    WORKLOAD_CHAT,
    WORKLOAD_AGENT,
    WORKLOAD_ONCE,
};

struct workload_conversation {
    enum workload_kind kind;
    uint32_t tokens[WORKLOAD_TOKENS_MAX];
    uint32_t token_count; /* 0: free */
    uint32_t turns_left;
};

struct workload {
    struct kvk_random random;
    struct workload_conversation conversations[WORKLOAD_CONVERSATIONS];
};

void workload_init(struct workload *workload, uint64_t seed);

/* The conversation whose turn it is, with the new part of its prompt appended; `output_count` is
 * how many tokens the model will answer. */
struct workload_conversation *workload_next(struct workload *workload, uint32_t *output_count);

/* Give the conversation the next tokens of the model's answer. */
void workload_answer(struct workload *workload, struct workload_conversation *conversation,
                     uint32_t count);
void workload_drop(struct workload_conversation *conversation);

/* What a prefix is known by: fold one more token in. Starts at 0. */
uint64_t workload_fold(uint64_t prefix, uint32_t token);

/* The 8 bytes of a token's K or V: `prefix` ends with the token, `place` counts within its row. */
uint64_t workload_word(uint64_t prefix, uint32_t place);

#endif
