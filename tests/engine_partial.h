/*
 * Hits that end within a block: a stage whose space allows them.
 */
#ifndef KVK_TESTS_ENGINE_PARTIAL_H
#define KVK_TESTS_ENGINE_PARTIAL_H

#include "tests/engine_attend.h"
#include "tests/engine_stage.h"

/* The stage's space (its identity is "m") is opened again. */
static inline enum kvk_status partial_switch(struct stage *stage, const struct kvk_geometry *groups,
                                             uint32_t group_count, const char *model,
                                             enum kvk_partial_reuse reuse,
                                             struct kvk_space_reply *reply)
{
    struct kvk_space_request request = {
        .block_tokens = groups[0].block_tokens, .group_count = group_count, .partial_reuse = reuse};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    memcpy(request.groups, groups, group_count * sizeof(*groups));
    return kvk_space_open(stage->house.cache, &stage->house.caller, &request, reply,
                          &stage->house.error);
}

static inline void partial_on(struct stage *stage)
{
    struct kvk_space_reply reply;
    STAGE_OK(stage, partial_switch(stage, &stage->geometry, 1, "m", KVK_PARTIAL_REUSE_ON, &reply));
    cr_assert(reply.partial_reuse);
    cr_assert_not(reply.created);
}

static inline void partial_start(struct stage *stage, uint32_t device_blocks, uint32_t host_blocks)
{
    stage_start(stage, device_blocks, host_blocks);
    partial_on(stage);
}

static inline struct kvk_sequence_reply partial_open(struct stage *stage, const uint32_t *tokens,
                                                     uint64_t count, bool leave_last)
{
    const struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = count}, .leave_last = leave_last, .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(stage, stage_try_open(stage, &request, &reply));
    return reply;
}

#endif
