/*
 * Eviction: what each use says about a block, and queues of candidates with the next victim on top.
 *
 * A queue has a heap per class of blocks, ordered by last use. LRU uses the first one alone.
 * RP-cost compares the tops of all four: within a class older means worth less, so the least of a
 * class is its top, and four look-ups find the least of all.
 *
 * Why the square root of the cost: the learned density says how likely a block is to come back;
 * the full ratio of costs would let a few deep blocks, dear but seldom used, push out the shallow
 * ones that every request begins with. The root measured best over the traces.
 */
#include "index/evict.h"

#include <math.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "index/ghosts.h"
#include "index/internal.h"
#include "index/learn.h"

#define REFRESH_NS (10 * KVK_NS_PER_SECOND)

/* kvk_block.order: the request's stamp, and below it the place in the chain. */
#define PLACE_BITS 24
#define PLACE_MAX ((UINT32_C(1) << PLACE_BITS) - 1)

#define PAGE_BLOCKS 256 /* of a heap's page: 1 KiB */

#define COST_LISTS_PER_DOUBLING 2.0
#define COST_LISTS_POWER 0.65

struct kvk_evict {
    struct kvk_index *index; /* borrowed */
    enum kvk_evict_policy policy;
    uint32_t block_count;
    bool cost_lists;
    uint64_t refresh_ns;                      /* when the densities are due again */
    double list_weight[KVK_EVICT_COST_COUNT]; /* what a block's cost counts, by its cost class */
    struct kvk_learn learn;
    struct kvk_ghosts ghosts;
};

enum kvk_status kvk_evict_create(struct kvk_index *index, const struct kvk_evict_options *options,
                                 struct kvk_evict **evict)
{
    struct kvk_evict *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return KVK_EXHAUSTED;
    }
    created->index = index;
    created->policy = options->policy;
    created->block_count = options->block_count;
    created->cost_lists = options->policy == KVK_EVICT_RP_COST && options->cost_lists;
    for (int i = 0; i < KVK_EVICT_COST_COUNT; i++) {
        created->list_weight[i] = pow(2, COST_LISTS_POWER * i / COST_LISTS_PER_DOUBLING);
    }
    bool learns = options->policy == KVK_EVICT_RP_COST;
    enum kvk_status status = kvk_ghosts_init(&created->ghosts, learns ? options->ghost_count : 0);
    if (status != KVK_OK) {
        free(created);
        return status;
    }
    kvk_learn_init(&created->learn);
    *evict = created;
    return KVK_OK;
}

void kvk_evict_destroy(struct kvk_evict *evict)
{
    if (evict == NULL) {
        return;
    }
    kvk_ghosts_finish(&evict->ghosts);
    free(evict);
}

enum kvk_status kvk_evict_resize(struct kvk_evict *evict, uint32_t ghost_count,
                                 uint32_t block_count)
{
    evict->block_count = block_count;
    bool learns = evict->policy == KVK_EVICT_RP_COST;
    return learns ? kvk_ghosts_resize(&evict->ghosts, ghost_count) : KVK_OK;
}

uint64_t kvk_evict_bytes(const struct kvk_evict *evict)
{
    return sizeof(*evict) + kvk_ghosts_bytes(&evict->ghosts);
}

/* ---- Heaps ---- */

static uint32_t *heap_entry(const struct kvk_evict_heap *heap, uint32_t place)
{
    return &heap->pages[place / PAGE_BLOCKS][place % PAGE_BLOCKS];
}

static struct kvk_block *heap_block(const struct kvk_evict_queue *queue,
                                    const struct kvk_evict_heap *heap, uint32_t place)
{
    return kvk_block_at(queue->evict->index, *heap_entry(heap, place));
}

static void heap_set(const struct kvk_evict_queue *queue, const struct kvk_evict_heap *heap,
                     uint32_t place, uint32_t block)
{
    *heap_entry(heap, place) = block;
    kvk_block_at(queue->evict->index, block)->queue_index = place;
}

/* Blocks with a hint lie by the end of its time, all others by their order. */
static bool is_hint_heap(const struct kvk_evict_queue *queue, const struct kvk_evict_heap *heap)
{
    return heap >= &queue->heaps[KVK_EVICT_LIST_COUNT];
}

static uint64_t key_of(const struct kvk_block *block, bool hinted)
{
    return hinted ? block->hint_until : block->order;
}

static uint32_t list_of_block(const struct kvk_block *block)
{
    return block->hint == KVK_EVICT_HINT_NONE ? block->queue_class
                                              : KVK_EVICT_LIST_COUNT + block->hint - 1U;
}

/* Put `block`, of order `order`, where it belongs between the free `place` and the top. */
static void heap_rise(const struct kvk_evict_queue *queue, const struct kvk_evict_heap *heap,
                      uint32_t place, uint32_t block, uint64_t order)
{
    bool hinted = is_hint_heap(queue, heap);
    while (place > 0) {
        uint32_t above = (place - 1) / 2;
        if (key_of(heap_block(queue, heap, above), hinted) <= order) {
            break;
        }
        heap_set(queue, heap, place, *heap_entry(heap, above));
        place = above;
    }
    heap_set(queue, heap, place, block);
}

/* Put `block` where it belongs between the free `place` and the bottom. */
static void heap_sink(const struct kvk_evict_queue *queue, const struct kvk_evict_heap *heap,
                      uint32_t place, uint32_t block, uint64_t order)
{
    bool hinted = is_hint_heap(queue, heap);
    for (;;) {
        uint32_t below = 2 * place + 1;
        if (below >= heap->count) {
            break;
        }
        uint64_t below_order = key_of(heap_block(queue, heap, below), hinted);
        if (below + 1 < heap->count) {
            uint64_t other_order = key_of(heap_block(queue, heap, below + 1), hinted);
            if (other_order < below_order) {
                below++;
                below_order = other_order;
            }
        }
        if (below_order >= order) {
            break;
        }
        heap_set(queue, heap, place, *heap_entry(heap, below));
        place = below;
    }
    heap_set(queue, heap, place, block);
}

/* ---- Uses ---- */

static uint32_t use_class(const struct kvk_evict *evict, uint32_t use_count)
{
    if (evict->policy == KVK_EVICT_LRU || use_count <= 1) {
        return 0;
    }
    if (use_count <= 2) {
        return 1;
    }
    return use_count <= 4 ? 2 : 3;
}

/* Blocks of less than the first block's cost do not occur; the last class is open above. */
static uint32_t cost_class(const struct kvk_evict *evict, double cost)
{
    if (!evict->cost_lists || !(cost > 1)) {
        return 0;
    }
    double list = COST_LISTS_PER_DOUBLING * log2(cost);
    return list < KVK_EVICT_COST_COUNT - 1 ? (uint32_t)list : KVK_EVICT_COST_COUNT - 1;
}

static uint8_t list_of(uint32_t use, uint32_t cost)
{
    return (uint8_t)(use * KVK_EVICT_COST_COUNT + cost);
}

/* From one list in use to the next. */
static uint32_t list_step(const struct kvk_evict *evict)
{
    return evict->cost_lists ? 1 : KVK_EVICT_COST_COUNT;
}

static uint32_t step_from(const struct kvk_evict *evict, uint32_t list)
{
    return list < KVK_EVICT_LIST_COUNT ? list_step(evict) : 1;
}

/* Heaps in use. */
static uint32_t heap_count(const struct kvk_evict *evict)
{
    return KVK_EVICT_LIST_COUNT / list_step(evict) + KVK_EVICT_HEAP_COUNT - KVK_EVICT_LIST_COUNT;
}

static uint32_t list_use_class(uint32_t list)
{
    return list / KVK_EVICT_COST_COUNT;
}

static uint32_t list_cost_class(uint32_t list)
{
    return list % KVK_EVICT_COST_COUNT;
}

/* Lowest goes first: older requests before newer ones, and of one request's blocks the deeper
 * before the shallower. Under a window the oldest positions go first: nothing sees them again. */
static uint64_t order_of(const struct kvk_block *block, bool windowed, uint64_t stamp)
{
    KVK_ASSERT(stamp < UINT64_C(1) << (64 - PLACE_BITS));
    uint32_t depth = block->position < PLACE_MAX ? block->position : PLACE_MAX;
    return stamp << PLACE_BITS | (windowed ? depth : PLACE_MAX - depth);
}

static double seconds_since(uint64_t then_ns, uint64_t now_ns)
{
    return now_ns > then_ns ? (double)(now_ns - then_ns) / (double)KVK_NS_PER_SECOND : 0;
}

static void refresh_when_due(struct kvk_evict *evict, uint64_t now_ns)
{
    if (evict->policy == KVK_EVICT_RP_COST && now_ns >= evict->refresh_ns) {
        kvk_learn_refresh(&evict->learn, evict->block_count);
        evict->refresh_ns = now_ns + REFRESH_NS;
    }
}

static void block_use(struct kvk_evict *evict, struct kvk_block *block, bool windowed,
                      uint64_t stamp, uint64_t now_ns)
{
    uint64_t order = order_of(block, windowed, stamp);
    if (order > block->order) {
        block->order = order;
    }
    if (block->use_count < UINT16_MAX) {
        block->use_count++;
    }
    block->used_ns = now_ns;
    uint32_t use = use_class(evict, block->use_count);
    block->queue_class = list_of(use, list_cost_class(block->queue_class));
    kvk_learn_enter(&evict->learn, use);
}

void kvk_evict_admit(struct kvk_evict *evict, struct kvk_block *block, float cost, bool windowed,
                     uint64_t stamp, uint64_t now_ns)
{
    KVK_ASSERT(block->queue == NULL);
    refresh_when_due(evict, now_ns);
    uint64_t age_ns;
    uint32_t use_count = 0;
    if (kvk_ghosts_take(&evict->ghosts, block->key, now_ns, &age_ns, &use_count)) {
        kvk_learn_reuse(&evict->learn, use_class(evict, use_count), seconds_since(0, age_ns));
    }
    block->use_count = (uint16_t)use_count;
    block->order = 0;
    block->cost = cost;
    block->hint = KVK_EVICT_HINT_NONE;
    block->queue_class = list_of(0, cost_class(evict, (double)cost));
    block_use(evict, block, windowed, stamp, now_ns);
}

void kvk_evict_restore(struct kvk_evict *evict, struct kvk_block *block, float cost, bool windowed,
                       uint64_t stamp, uint64_t used_ns, uint32_t use_count)
{
    KVK_ASSERT(block->queue == NULL);
    uint32_t before = use_count > 0 ? use_count - 1 : 0;
    block->use_count = (uint16_t)(before < UINT16_MAX ? before : UINT16_MAX);
    block->order = 0;
    block->cost = cost;
    block->queue_class = list_of(0, cost_class(evict, (double)cost));
    block_use(evict, block, windowed, stamp, used_ns);
}

void kvk_evict_use(struct kvk_evict *evict, struct kvk_block *block, bool windowed, uint64_t stamp,
                   uint64_t now_ns)
{
    KVK_ASSERT(block->use_count > 0);
    if (block->order >> PLACE_BITS == stamp) {
        return;
    }
    refresh_when_due(evict, now_ns);
    struct kvk_evict_queue *queue = block->queue;
    uint32_t id = KVK_BLOCK_NONE;
    if (queue != NULL) {
        id = *heap_entry(&queue->heaps[list_of_block(block)], block->queue_index);
        kvk_evict_queue_remove(queue, id);
    }
    kvk_learn_reuse(&evict->learn, list_use_class(block->queue_class),
                    seconds_since(block->used_ns, now_ns));
    block_use(evict, block, windowed, stamp, now_ns);
    if (queue != NULL) {
        kvk_evict_queue_add(queue, id);
    }
}

void kvk_evict_forget(struct kvk_evict *evict, const struct kvk_block *block)
{
    if (block->use_count > 0) {
        kvk_ghosts_add(&evict->ghosts, block->key, block->used_ns, block->use_count);
    }
}

/* ---- Queues ---- */

void kvk_evict_queue_init(struct kvk_evict_queue *queue, struct kvk_evict *evict,
                          enum kvk_tier tier, bool weigh_cost, float weight)
{
    *queue = (struct kvk_evict_queue){
        .evict = evict,
        .tier = tier,
        .weigh_cost = weigh_cost,
        .weight = weight,
    };
}

void kvk_evict_queue_finish(struct kvk_evict_queue *queue)
{
    KVK_ASSERT(kvk_evict_queue_count(queue) == 0);
    KVK_ASSERT(queue->free_page_count == queue->page_count);
    for (uint32_t i = 0; i < queue->free_page_count; i++) {
        free(queue->free_pages[i]);
    }
    free(queue->free_pages);
    for (int k = 0; k < KVK_EVICT_HEAP_COUNT; k++) {
        free(queue->heaps[k].pages);
    }
    *queue = (struct kvk_evict_queue){0};
}

uint32_t kvk_evict_queue_count(const struct kvk_evict_queue *queue)
{
    uint32_t count = 0;
    for (int k = 0; k < KVK_EVICT_HEAP_COUNT; k++) {
        count += queue->heaps[k].count;
    }
    return count;
}

static bool directory_grow(uint32_t ***directory, uint32_t count)
{
    uint32_t **grown = realloc(*directory, count * sizeof(**directory));
    if (grown == NULL) {
        return false;
    }
    *directory = grown;
    return true;
}

/* Room for the addresses of `count` pages, wherever these will be. */
static bool directories_reserve(struct kvk_evict_queue *queue, uint32_t count)
{
    if (count <= queue->page_count_max) {
        return true;
    }
    if (!directory_grow(&queue->free_pages, count)) {
        return false;
    }
    for (uint32_t list = 0; list < KVK_EVICT_LIST_COUNT; list += list_step(queue->evict)) {
        if (!directory_grow(&queue->heaps[list].pages, count)) {
            return false;
        }
    }
    for (uint32_t list = KVK_EVICT_LIST_COUNT; list < KVK_EVICT_HEAP_COUNT; list++) {
        if (!directory_grow(&queue->heaps[list].pages, count)) {
            return false;
        }
    }
    queue->page_count_max = count;
    return true;
}

enum kvk_status kvk_evict_queue_reserve(struct kvk_evict_queue *queue, uint32_t count)
{
    /* Each heap in use may have a last page that is not full. */
    uint32_t list_count = heap_count(queue->evict);
    uint32_t page_count = count / PAGE_BLOCKS + 1 + list_count;
    if (!directories_reserve(queue, page_count)) {
        return KVK_EXHAUSTED;
    }
    while (queue->page_count < page_count) {
        uint32_t *page = malloc(PAGE_BLOCKS * sizeof(*page));
        if (page == NULL) {
            return KVK_EXHAUSTED;
        }
        queue->free_pages[queue->free_page_count++] = page;
        queue->page_count++;
    }
    return KVK_OK;
}

uint64_t kvk_evict_queue_bytes(const struct kvk_evict_queue *queue)
{
    uint64_t page_bytes = PAGE_BLOCKS * sizeof(uint32_t) + KVK_ALLOCATION_OVERHEAD;
    uint32_t list_count = heap_count(queue->evict);
    uint64_t directories = (1 + list_count) * sizeof(uint32_t *);
    return queue->page_count * page_bytes + queue->page_count_max * directories;
}

void kvk_evict_queue_add(struct kvk_evict_queue *queue, uint32_t block)
{
    struct kvk_block *added = kvk_index_block(queue->evict->index, block);
    KVK_ASSERT(added->queue == NULL);
    KVK_ASSERT(added->use_count > 0);
    KVK_ASSERT(kvk_block_is_whole(added));
    struct kvk_evict_heap *heap = &queue->heaps[list_of_block(added)];
    if (heap->count % PAGE_BLOCKS == 0) {
        KVK_ASSERT(queue->free_page_count > 0);
        heap->pages[heap->count / PAGE_BLOCKS] = queue->free_pages[--queue->free_page_count];
    }
    added->queue = queue;
    heap->count++;
    heap_rise(queue, heap, heap->count - 1, block, key_of(added, is_hint_heap(queue, heap)));
    if (added->hint == KVK_EVICT_HINT_LAST && queue->share != NULL) {
        queue->share->kept_bytes +=
            kvk_evict_kept_bytes(added, queue->block_bytes, queue->windowed);
    }
}

void kvk_evict_queue_remove(struct kvk_evict_queue *queue, uint32_t block)
{
    struct kvk_block *removed = kvk_index_block(queue->evict->index, block);
    KVK_ASSERT(removed->queue == queue);
    struct kvk_evict_heap *heap = &queue->heaps[list_of_block(removed)];
    uint32_t place = removed->queue_index;
    KVK_ASSERT(place < heap->count);
    KVK_ASSERT(*heap_entry(heap, place) == block);
    removed->queue = NULL;
    removed->queue_index = UINT32_MAX;
    if (removed->hint == KVK_EVICT_HINT_LAST && queue->share != NULL) {
        uint64_t bytes = kvk_evict_kept_bytes(removed, queue->block_bytes, queue->windowed);
        KVK_ASSERT(queue->share->kept_bytes >= bytes);
        queue->share->kept_bytes -= bytes;
    }

    heap->count--;
    uint32_t last = *heap_entry(heap, heap->count);
    if (heap->count % PAGE_BLOCKS == 0) {
        queue->free_pages[queue->free_page_count++] = heap->pages[heap->count / PAGE_BLOCKS];
    }
    if (last == block) {
        return;
    }
    bool hinted = is_hint_heap(queue, heap);
    uint64_t order = key_of(kvk_block_at(queue->evict->index, last), hinted);
    if (place > 0 && key_of(heap_block(queue, heap, (place - 1) / 2), hinted) > order) {
        heap_rise(queue, heap, place, last, order);
    } else {
        heap_sink(queue, heap, place, last, order);
    }
}

/* ---- Hints ---- */

/* Beyond every score that is learned, and every order. */
#define HINT_SCORE 1e25
#define HINTS_ENDED_MAX 8 /* by one peek, of each kind */

static uint32_t hint_time(uint64_t ns)
{
    uint64_t time = (ns + KVK_EVICT_HINT_NS - 1) / KVK_EVICT_HINT_NS;
    return time < UINT32_MAX ? (uint32_t)time : UINT32_MAX;
}

static bool hint_is_over(const struct kvk_block *block, uint64_t now_ns)
{
    return block->hint_until <= now_ns / KVK_EVICT_HINT_NS;
}

/* Out of its queue, with its hint changed, and in again. */
static void hint_set(struct kvk_evict *evict, struct kvk_block *block,
                     enum kvk_evict_hint_kind kind, uint32_t until)
{
    struct kvk_evict_queue *queue = block->queue;
    uint32_t id = KVK_BLOCK_NONE;
    (void)evict;
    if (queue != NULL) {
        id = *heap_entry(&queue->heaps[list_of_block(block)], block->queue_index);
        kvk_evict_queue_remove(queue, id);
    }
    block->hint = (uint8_t)kind;
    block->hint_until = kind == KVK_EVICT_HINT_NONE ? 0 : until;
    if (queue != NULL) {
        kvk_evict_queue_add(queue, id);
    }
}

void kvk_evict_hint(struct kvk_evict *evict, struct kvk_block *block, enum kvk_evict_hint_kind kind,
                    uint64_t until_ns)
{
    KVK_ASSERT(block->use_count > 0);
    hint_set(evict, block, kind, hint_time(until_ns));
}

/* Hints whose time is over end, a few at a time: whoever has one is no victim by it any more. */
static void hints_end(struct kvk_evict_queue *queue, uint64_t now_ns)
{
    for (uint32_t list = KVK_EVICT_LIST_COUNT; list < KVK_EVICT_HEAP_COUNT; list++) {
        const struct kvk_evict_heap *heap = &queue->heaps[list];
        for (int i = 0; i < HINTS_ENDED_MAX && heap->count > 0; i++) {
            struct kvk_block *block = heap_block(queue, heap, 0);
            if (!hint_is_over(block, now_ns)) {
                break;
            }
            hint_set(queue->evict, block, KVK_EVICT_HINT_NONE, 0);
        }
    }
}

static bool keeps_too_much(const struct kvk_evict_queue *queue)
{
    return queue->share != NULL && queue->share->kept_bytes > queue->share->limit_bytes;
}

double kvk_evict_score(const struct kvk_evict_queue *queue, const struct kvk_block *block,
                       uint64_t now_ns)
{
    double score = kvk_evict_plain_score(queue, block, now_ns);
    if (block->hint == KVK_EVICT_HINT_NONE || hint_is_over(block, now_ns)) {
        return score;
    }
    if (block->hint == KVK_EVICT_HINT_FIRST) {
        return score - HINT_SCORE;
    }
    return keeps_too_much(queue) ? score : score + HINT_SCORE;
}

/* ---- Victims ---- */

double kvk_evict_plain_score(const struct kvk_evict_queue *queue, const struct kvk_block *block,
                             uint64_t now_ns)
{
    const struct kvk_evict *evict = queue->evict;
    if (evict->policy == KVK_EVICT_LRU) {
        return (double)block->order;
    }
    double age_s = seconds_since(block->used_ns, now_ns);
    double density = kvk_learn_density(&evict->learn, list_use_class(block->queue_class), age_s);
    double weight = (double)queue->weight;
    if (queue->weigh_cost) {
        weight *= evict->cost_lists ? evict->list_weight[list_cost_class(block->queue_class)]
                                    : sqrt((double)block->cost);
    }
    return density * weight;
}

uint32_t kvk_evict_queue_peek(struct kvk_evict_queue *queue, uint64_t now_ns, double *score)
{
    refresh_when_due(queue->evict, now_ns);
    hints_end(queue, now_ns);
    uint32_t victim = KVK_BLOCK_NONE;
    double least = 0;
    for (uint32_t list = 0; list < KVK_EVICT_HEAP_COUNT; list += step_from(queue->evict, list)) {
        const struct kvk_evict_heap *heap = &queue->heaps[list];
        if (heap->count == 0) {
            continue;
        }
        double worth = kvk_evict_score(queue, heap_block(queue, heap, 0), now_ns);
        if (victim == KVK_BLOCK_NONE || worth < least) {
            victim = *heap_entry(heap, 0);
            least = worth;
        }
    }
    if (score != NULL) {
        *score = least;
    }
    if (victim != KVK_BLOCK_NONE) {
        /* As a rule it is evicted next. Both places are far from all that was used of late. */
        struct kvk_key key = kvk_block_at(queue->evict->index, victim)->key;
        kvk_ghosts_expect(&queue->evict->ghosts, key);
        __builtin_prefetch(kvk_keymap_head(queue->evict->index, key), 1);
    }
    return victim;
}

uint32_t kvk_evict_queue_oldest(const struct kvk_evict_queue *queue, uint64_t *used_ns)
{
    uint32_t oldest = KVK_BLOCK_NONE;
    *used_ns = 0;
    for (uint32_t list = 0; list < KVK_EVICT_HEAP_COUNT; list += step_from(queue->evict, list)) {
        const struct kvk_evict_heap *heap = &queue->heaps[list];
        if (heap->count == 0) {
            continue;
        }
        /* Lists by order have their oldest on top; those by hint are looked at from their top. */
        uint64_t top_ns = heap_block(queue, heap, 0)->used_ns;
        if (oldest == KVK_BLOCK_NONE || top_ns < *used_ns) {
            oldest = *heap_entry(heap, 0);
            *used_ns = top_ns;
        }
    }
    return oldest;
}
