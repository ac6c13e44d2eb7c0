/*
 * kvkeepctl plan: any bytes as a model's config.json. What is taken can be counted with or is
 * refused by the planner's own check; what is not says why.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "client/ctl/plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void count_with(struct kvk_capacity *capacity)
{
    struct kvk_error error = {.text = ""};
    KVK_ASSERT(capacity->group_count >= 1 && capacity->group_count <= KVK_CAPACITY_GROUP_MAX);
    bool named = kvk_capacity_format_named("fp16", &capacity->format);
    KVK_ASSERT(named);
    capacity->tensor_ranks = 1;
    capacity->pipeline_ranks = 1;
    capacity->block_tokens = 16;
    capacity->encoder_tokens = 1500;
    if (kvk_capacity_check(capacity, &error) != KVK_OK) {
        KVK_ASSERT(error.text[0] != '\0');
        return;
    }
    uint64_t token_bytes = kvk_capacity_token_bytes(capacity);
    uint64_t rank_bytes = kvk_capacity_token_rank_bytes(capacity);
    KVK_ASSERT(rank_bytes == token_bytes);
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        KVK_ASSERT(capacity->groups[i].layers > 0);
        KVK_ASSERT(kvk_capacity_layer_bytes(capacity, i) > 0);
        KVK_ASSERT(capacity->groups[i].cross ||
                   kvk_capacity_kept_tokens(capacity, i, 100000) <= 100000);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        KVK_ASSERT(fd >= 0);
        (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    int cut = ftruncate(fd, 0);
    ssize_t written = pwrite(fd, data, size, 0);
    KVK_ASSERT(cut == 0 && written == (ssize_t)size);
    const struct plan_given all[] = {
        {.layers = 0}, {.layers = 3}, {.kv_heads = 2}, {.head_size = 64}};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        struct kvk_capacity capacity = {.group_count = 0};
        struct plan_notes notes = {.count = 0};
        char model[64] = "";
        char why[PLAN_NOTE_SIZE] = "";
        if (plan_config_read(path, &all[i], &capacity, model, &notes, why)) {
            KVK_ASSERT(model[0] != '\0' && memchr(model, '\0', sizeof(model)) != NULL);
            count_with(&capacity);
        } else {
            KVK_ASSERT(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
        }
        KVK_ASSERT(notes.count <= PLAN_NOTES_MAX);
    }
    return 0;
}
