/*
 * Blocks of host memory brought to the device for one call: the call's layer of each, side by side
 * in a workspace that is the call's own until it ends. Blocks that several items see go once.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/attention_internal.h"
#include "daemon/attention_workspace.h"

/* The layer's K and V in a block's shard, as one run. */
static uint64_t layer_bytes(const struct kvk_attention_plan *plan)
{
    const struct kvk_geometry *geometry = &plan->host_geometry;
    uint32_t next = plan->shard_layer + 1;
    uint64_t end = next < kvk_geometry_shard_layers(geometry, plan->shard)
                       ? kvk_geometry_k_offset(geometry, plan->shard, next)
                       : kvk_geometry_shard_bytes(geometry, plan->shard);

    KVK_ASSERT(end > plan->host_attend.k_offset);
    return end - plan->host_attend.k_offset;
}

/* The place of the same page of the item before, where it is the same memory; else `place`. */
static uint64_t first_place(const struct kvk_attention_plan *plan, uint32_t index, uint64_t place)
{
    const void *const *pages = plan->addresses[KVK_TIER_HOST];
    const struct kvk_attention_span *span = &plan->spans[index];

    if (index > 0) {
        const struct kvk_attention_span *before = &plan->spans[index - 1];
        uint64_t page = span->first_page + (place - span->offset);
        if (page >= before->first_page && page - before->first_page < before->page_count) {
            uint64_t other = before->offset + (page - before->first_page);
            return pages[other] == pages[place] ? other : place;
        }
    }
    return place;
}

uint64_t kvk_attention_bring_bytes(const struct kvk_attention_plan *plan)
{
    uint64_t count = 0;

    for (uint32_t i = 0; i < plan->request->item_count; i++) {
        const struct kvk_attention_span *span = &plan->spans[i];
        for (uint64_t place = span->offset; place < span->offset + span->page_count; place++) {
            bool there = plan->addresses[KVK_TIER_HOST][place] != NULL;
            count += there && first_place(plan, i, place) == place ? 1 : 0;
        }
    }
    return count * layer_bytes(plan);
}

/* Room on the device, and what goes where. */
static enum kvk_status copies_make(const struct kvk_attention_plan *plan,
                                   struct kvk_attention_brought *brought, struct kvk_copy *copies,
                                   uint32_t *copy_count)
{
    uint64_t bytes = layer_bytes(plan);

    for (uint32_t i = 0; i < plan->request->item_count; i++) {
        const struct kvk_attention_span *span = &plan->spans[i];
        for (uint64_t place = span->offset; place < span->offset + span->page_count; place++) {
            const uint8_t *page = plan->addresses[KVK_TIER_HOST][place];
            uint64_t first = first_place(plan, i, place);
            if (page == NULL) {
                continue;
            }
            if (first != place) {
                brought->pages[place] = brought->pages[first];
                continue;
            }
            uint8_t *target = kvk_region_at(&brought->workspace->region, *copy_count * bytes);
            if (target == NULL) {
                return KVK_EXHAUSTED;
            }
            copies[(*copy_count)++] = (struct kvk_copy){
                .target = target, .source = page + plan->host_attend.k_offset, .size_bytes = bytes};
            brought->pages[place] = target;
        }
    }
    return KVK_OK;
}

enum kvk_status kvk_attention_bring(const struct kvk_attention_plan *plan,
                                    struct kvk_attention_brought *brought, struct kvk_error *error)
{
    struct kvk_device *device = plan->cache->tiers[KVK_TIER_DEVICE].device;
    uint64_t total = kvk_attention_bring_bytes(plan);
    uint32_t copy_count = 0;

    KVK_ASSERT(total > 0);
    *brought = (struct kvk_attention_brought){.device = device};
    struct kvk_copy *copies = calloc(total / layer_bytes(plan), sizeof(*copies));
    brought->pages = calloc(plan->page_count, sizeof(*brought->pages));
    enum kvk_status status = copies != NULL && brought->pages != NULL ? KVK_OK : KVK_EXHAUSTED;
    if (status == KVK_OK) {
        status = kvk_workspace_take_unlocked(plan->cache, total, &brought->workspace, error);
    }
    if (status == KVK_OK) {
        status = copies_make(plan, brought, copies, &copy_count);
    }
    if (status == KVK_OK) {
        status = kvk_mover_copy(plan->cache->mover, device, copies, copy_count, error);
    }
    free(copies);
    if (status != KVK_OK) {
        kvk_attention_bring_finish(plan->cache, brought);
    }
    return status;
}

void kvk_attention_bring_finish(struct kvk_cache *cache, struct kvk_attention_brought *brought)
{
    if (brought->workspace != NULL) {
        kvk_workspace_give_unlocked(cache, brought->workspace);
    }
    free((void *)brought->pages);
    *brought = (struct kvk_attention_brought){.device = NULL};
}
