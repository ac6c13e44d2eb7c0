/* Hints of priority, as requests say them. */
#include <stdio.h>

#include "daemon/hint.h"
#include "daemon/rpc_private.h"

static enum kvk_status refuse(size_t index, const char *name, uint64_t value, uint64_t limit,
                              const char *reason, struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];
    (void)snprintf(field, sizeof(field), "hints[%zu].%s", index, name);
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s: %s %llu",
                          field, reason, (unsigned long long)limit);
}

static enum kvk_status check_hint(const Kvkeep__V1__PriorityHint *message, size_t index,
                                  uint64_t token_count, struct kvk_error *error)
{
    if (message->token_count == 0) {
        return refuse(index, "token_count", 0, 1, "must be at least", error);
    }
    if (message->first_token > token_count ||
        message->token_count > token_count - message->first_token) {
        return refuse(index, "token_count", message->token_count, token_count,
                      "the range must lie in the prompt's tokens:", error);
    }
    if (message->priority > KVK_HINT_PRIORITY_MAX) {
        return refuse(index, "priority", message->priority, KVK_HINT_PRIORITY_MAX,
                      "must be at most", error);
    }
    if (message->duration_ms == 0) {
        return refuse(index, "duration_ms", 0, 1, "must be at least", error);
    }
    if (message->duration_ms > KVK_HINT_MS_MAX) {
        return refuse(index, "duration_ms", message->duration_ms, KVK_HINT_MS_MAX,
                      "must be at most", error);
    }
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_hints(struct kvk_rpc_run *run, size_t count,
                                    Kvkeep__V1__PriorityHint *const *messages,
                                    struct kvk_prompt *prompt, struct kvk_error *error)
{
    if (count == 0) {
        return KVK_OK;
    }
    if (count > KVK_HINTS_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hints", count, KVK_HINTS_MAX,
                              "hints: must be at most %d", KVK_HINTS_MAX);
    }
    struct kvk_priority_hint *hints =
        kvk_rpc_arena_take_extra(&run->memory->arena, count * sizeof(*hints));
    if (hints == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the call");
    }
    for (size_t i = 0; i < count; i++) {
        enum kvk_status status = check_hint(messages[i], i, prompt->token_count, error);
        if (status != KVK_OK) {
            return status;
        }
        hints[i] = (struct kvk_priority_hint){
            .first_token = messages[i]->first_token,
            .token_count = messages[i]->token_count,
            .duration_ms = messages[i]->duration_ms,
            .priority = messages[i]->priority,
        };
    }
    prompt->hints = hints;
    prompt->hint_count = (uint32_t)count;
    return KVK_OK;
}
