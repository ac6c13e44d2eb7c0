/*
 * Which blocks the queries of an attention see, and where they lie.
 *
 * Done twice, so that nothing is allocated with the lock held: first how many, then which. What is
 * sealed only grows meanwhile, or the call is told that it was cut away. Each block is held and
 * pinned from here to the end of the call; items that share a prefix, as forks do, pin it once.
 */
#include "daemon/attention_internal.h"

#include <stdio.h>

#include "base/assert.h"
#include "gpu/attend_visible.h"

/* Blocks that are held or let go with the lock held in one go. */
#define SLICE_PAGES 1024

/* ---- What an item attends ---- */

/* A sequence or lease, as far as attention goes. Valid as long as the lock is held. */
struct source {
    struct kvk_space *space;
    const uint32_t *blocks; /* [block_count], of the request's group; NULL before one is chosen */
    uint32_t block_count;
    uint64_t sealed;
};

static enum kvk_status find_source(struct kvk_attention_plan *plan, uint32_t index,
                                   struct source *source, struct kvk_error *error)
{
    const struct kvk_attention_request *request = plan->request;
    const struct kvk_attention_item *item = &request->items[index];
    struct kvk_session *session = NULL;
    struct kvk_sequence *sequence = NULL;
    struct kvk_lease *lease = NULL;
    uint32_t group = request->group;

    if (item->lease_id != 0) {
        enum kvk_status status = kvk_lease_find(plan->cache, plan->caller, request->session_id,
                                                item->lease_id, &session, &lease, error);
        if (status != KVK_OK) {
            return status;
        }
        bool known = group < lease->space->group_count;
        *source = (struct source){.space = lease->space,
                                  .blocks = known ? lease->groups[group].blocks : NULL,
                                  .block_count = known ? lease->groups[group].block_count : 0,
                                  .sealed = lease->tokens};
        return KVK_OK;
    }
    enum kvk_status status = kvk_sequence_find(plan->cache, plan->caller, request->session_id,
                                               item->sequence_id, &session, &sequence, error);
    if (status != KVK_OK) {
        return status;
    }
    bool known = group < sequence->space->group_count;
    *source = (struct source){.space = sequence->space,
                              .blocks = known ? sequence->groups[group].blocks : NULL,
                              .block_count = known ? sequence->groups[group].block_count : 0,
                              .sealed = sequence->sealed};
    return KVK_OK;
}

enum kvk_status kvk_attention_space(struct kvk_attention_plan *plan, uint32_t item,
                                    struct kvk_space **space, struct kvk_error *error)
{
    struct source source;

    enum kvk_status status = find_source(plan, item, &source, error);
    if (status == KVK_OK) {
        *space = source.space;
    }
    return status;
}

static enum kvk_status find_item(struct kvk_attention_plan *plan, uint32_t index,
                                 struct source *source, struct kvk_error *error)
{
    enum kvk_status status = find_source(plan, index, source, error);
    if (status == KVK_OK && source->space->id != plan->space_id) {
        char field[KVK_ERROR_FIELD_SIZE];
        (void)snprintf(field, sizeof(field), "items[%u]", index);
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: all items must be of one space", field);
    }
    return status;
}

/* ---- What it sees ---- */

static struct kvk_attend_visible visible_of(const struct kvk_attention_plan *plan,
                                            const struct kvk_attention_item *item,
                                            uint64_t token_count)
{
    const struct kvk_attend_item whole = {.token_count = token_count};
    return kvk_attend_visible(&plan->attend, &whole, item->position, item->query_count);
}

/* Tokens of the range in the page. */
static uint64_t overlap(struct kvk_token_range range, uint64_t page, uint32_t block_tokens)
{
    uint64_t begin = page * block_tokens;
    uint64_t end = begin + block_tokens;

    begin = range.begin > begin ? range.begin : begin;
    end = range.end < end ? range.end : end;
    return end > begin ? end - begin : 0;
}

static void span_init(const struct kvk_attention_plan *plan, const struct kvk_attention_item *item,
                      uint64_t sealed, struct kvk_attention_span *span)
{
    uint32_t block_tokens = plan->geometry.block_tokens;

    *span = (struct kvk_attention_span){.token_count = sealed};
    if (item->token_limit != 0 && item->token_limit < sealed) {
        span->token_count = item->token_limit;
    }
    struct kvk_attend_visible visible = visible_of(plan, item, span->token_count);
    bool sinks = visible.sinks.begin < visible.sinks.end;
    uint64_t begin = sinks ? visible.sinks.begin : visible.rest.begin;
    uint64_t end = visible.rest.begin < visible.rest.end ? visible.rest.end : visible.sinks.end;
    if (begin >= end) {
        return; /* nothing is seen */
    }
    span->first_page = begin / block_tokens;
    span->page_count = (uint32_t)((end + block_tokens - 1) / block_tokens - span->first_page);
    /* Tokens behind the last page are seen by no query: a device need not hear of them. */
    uint64_t pages_end = (span->first_page + span->page_count) * block_tokens;
    if (span->token_count > pages_end) {
        span->token_count = pages_end;
    }
}

static void slice_drops(struct kvk_cache *cache, uint32_t *work)
{
    (*work)++;
    if (*work >= SLICE_PAGES) {
        *work = 0;
        kvk_pause_drops(cache);
    }
}

static enum kvk_status measure_drops(struct kvk_attention_plan *plan, struct kvk_error *error)
{
    const struct kvk_attention_request *request = plan->request;
    struct kvk_space *space = NULL;
    uint32_t work = 0;

    enum kvk_status status = kvk_attention_space(plan, 0, &space, error);
    if (status == KVK_OK) {
        plan->space_id = space->id;
        status = kvk_attention_choose_group(plan, space, error);
    }
    for (uint32_t i = 0; status == KVK_OK && i < request->item_count; i++) {
        struct source source = {.space = NULL};
        status = find_item(plan, i, &source, error);
        if (status != KVK_OK) {
            break;
        }
        span_init(plan, &request->items[i], source.sealed, &plan->spans[i]);
        plan->spans[i].offset = plan->page_count;
        plan->page_count += plan->spans[i].page_count;
        if (plan->page_count > KVK_ATTENTION_PAGES_MAX) {
            status = kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "items",
                                    plan->page_count, KVK_ATTENTION_PAGES_MAX,
                                    "the items see more than %llu blocks: make it several calls",
                                    (unsigned long long)KVK_ATTENTION_PAGES_MAX);
        }
        slice_drops(plan->cache, &work);
    }
    return status;
}

enum kvk_status kvk_attention_measure_unlocked(struct kvk_attention_plan *plan,
                                               struct kvk_error *error)
{
    kvk_lock(&plan->cache->lock);
    enum kvk_status status = measure_drops(plan, error);
    kvk_unlock(&plan->cache->lock);
    return status;
}

/* ---- Taking the pages ---- */

static enum kvk_status refuse_gone(struct kvk_error *error, uint32_t index, uint64_t page)
{
    char field[KVK_ERROR_FIELD_SIZE];

    (void)snprintf(field, sizeof(field), "items[%u].position", index);
    return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_WINDOW_GONE, field, page, 0,
                          "%s: a query sees block %llu, which the window has let go of", field,
                          (unsigned long long)page);
}

/* The same page of the item before, where it is the same block: it is pinned already. */
static const struct kvk_attention_page *page_before(const struct kvk_attention_plan *plan,
                                                    uint32_t index, uint64_t page)
{
    if (index == 0) {
        return NULL;
    }
    const struct kvk_attention_span *span = &plan->spans[index - 1];
    if (page < span->first_page || page - span->first_page >= span->page_count) {
        return NULL;
    }
    return &plan->pages[span->offset + (page - span->first_page)];
}

static enum kvk_status page_take(struct kvk_attention_plan *plan, uint32_t index, uint64_t page,
                                 uint32_t id, struct kvk_error *error)
{
    const struct kvk_attention_span *span = &plan->spans[index];
    uint64_t place = span->offset + (page - span->first_page);
    KVK_ASSERT(plan->pages != NULL && place < plan->page_count);
    struct kvk_attention_page *taken = &plan->pages[place];

    if (id == KVK_BLOCK_NONE) {
        return refuse_gone(error, index, page);
    }
    const struct kvk_block *block = kvk_index_block(plan->cache->index, id);
    const struct kvk_attention_page *before = page_before(plan, index, page);
    if (before != NULL && before->block == id) {
        *taken = (struct kvk_attention_page){.block = id, .tier = before->tier};
    } else {
        enum kvk_tier tier = kvk_block_tier(block);
        kvk_block_borrow(plan->cache, id, tier);
        *taken = (struct kvk_attention_page){.block = id, .tier = (uint8_t)tier, .borrowed = true};
    }
    plan->addresses[taken->tier][place] =
        kvk_block_address(plan->cache, block, (enum kvk_tier)taken->tier, plan->shard);
    return KVK_OK;
}

static enum kvk_status item_take_drops(struct kvk_attention_plan *plan, uint32_t index,
                                       uint32_t *work, struct kvk_error *error)
{
    struct kvk_attention_span *span = &plan->spans[index];
    uint32_t block_tokens = plan->geometry.block_tokens;
    struct kvk_attend_visible visible =
        visible_of(plan, &plan->request->items[index], span->token_count);
    enum kvk_status status = KVK_OK;
    struct source source = {.space = NULL};

    for (uint32_t i = 0; status == KVK_OK && i < span->page_count; i++) {
        uint64_t page = span->first_page + i;
        uint64_t tokens =
            overlap(visible.sinks, page, block_tokens) + overlap(visible.rest, page, block_tokens);
        /* Anew where the lock may have been dropped. */
        if (i == 0 || *work == 0) {
            status = find_item(plan, index, &source, error);
            if (status != KVK_OK) {
                break;
            }
            if (source.sealed < span->token_count) {
                return kvk_fail(error, KVK_ABORTED, KVK_CAUSE_NONE, "items",
                                "a sequence was cut while the call ran");
            }
        }
        if (tokens > 0) {
            KVK_ASSERT(source.blocks != NULL && page < source.block_count);
            status = page_take(plan, index, page, source.blocks[page], error);
        }
        if (status == KVK_OK && tokens > 0) {
            span->tokens[plan->pages[span->offset + i].tier] += tokens;
        }
        slice_drops(plan->cache, work);
    }
    return status;
}

enum kvk_status kvk_attention_take_unlocked(struct kvk_attention_plan *plan,
                                            struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    uint32_t work = 0;

    kvk_lock(&plan->cache->lock);
    for (uint32_t i = 0; status == KVK_OK && i < plan->request->item_count; i++) {
        status = item_take_drops(plan, i, &work, error);
    }
    kvk_unlock(&plan->cache->lock);
    if (status != KVK_OK) {
        kvk_attention_return_unlocked(plan);
    }
    return status;
}

void kvk_attention_return_unlocked(struct kvk_attention_plan *plan)
{
    uint32_t work = 0;

    kvk_lock(&plan->cache->lock);
    for (uint64_t i = 0; i < plan->page_count; i++) {
        struct kvk_attention_page *page = &plan->pages[i];
        if (page->borrowed) {
            page->borrowed = false;
            kvk_block_return(plan->cache, page->block, (enum kvk_tier)page->tier);
            slice_drops(plan->cache, &work);
        }
    }
    kvk_unlock(&plan->cache->lock);
}
