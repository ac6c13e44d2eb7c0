/* The life of a block: one table, one function that applies it. */
#include "index/block.h"

#include <stddef.h>

#include "base/assert.h"

/* Where an event leads. The plain ones are states; the others depend on the block. */
enum outcome {
    TO_FREE = KVK_BLOCK_FREE,
    TO_RESERVED = KVK_BLOCK_RESERVED,
    TO_ACTIVE = KVK_BLOCK_ACTIVE,
    TO_SEALED = KVK_BLOCK_SEALED,
    TO_HOLLOW = KVK_BLOCK_HOLLOW,
    STAY = KVK_BLOCK_STATE_COUNT, /* the state it is in */
    BY_HOLDS,                     /* EVICTABLE, SEALED or SHARED: none, one or several holders */
    BY_NEED,                      /* HOLLOW where its place in a chain is needed, else FREE */
    NO,                           /* our bug */
};

/* clang-format off */
static const uint8_t life[KVK_BLOCK_STATE_COUNT][KVK_BLOCK_EVENT_COUNT] = {
/*                      RESERVE      WRITE      SEAL      HOLD      RELEASE   ABORT    EVICT    DISCARD  FILL       PRUNE    BEGIN DONE  FAIL  KNOW */
[KVK_BLOCK_FREE]      = {TO_RESERVED, NO,        NO,       NO,       NO,       NO,      NO,      NO,      NO,        NO,      NO,   NO,   NO,   TO_HOLLOW},
[KVK_BLOCK_RESERVED]  = {NO,          TO_ACTIVE, NO,       STAY,     STAY,     TO_FREE, NO,      NO,      NO,        NO,      NO,   NO,   NO,   NO},
[KVK_BLOCK_ACTIVE]    = {NO,          STAY,      BY_HOLDS, STAY,     STAY,     TO_FREE, NO,      NO,      NO,        NO,      STAY, STAY, STAY, NO},
[KVK_BLOCK_SEALED]    = {NO,          NO,        NO,       BY_HOLDS, BY_HOLDS, NO,      NO,      TO_FREE, NO,        NO,      STAY, STAY, STAY, NO},
[KVK_BLOCK_SHARED]    = {NO,          NO,        NO,       BY_HOLDS, BY_HOLDS, NO,      NO,      NO,      NO,        NO,      STAY, STAY, STAY, NO},
[KVK_BLOCK_EVICTABLE] = {NO,          NO,        NO,       BY_HOLDS, NO,       NO,      BY_NEED, NO,      NO,        NO,      STAY, STAY, STAY, NO},
[KVK_BLOCK_HOLLOW]    = {NO,          NO,        NO,       NO,       NO,       NO,      NO,      NO,      TO_SEALED, TO_FREE, NO,   NO,   NO,   NO},
};
/* clang-format on */

static bool is_indexed(const struct kvk_block *block)
{
    return block->run != UINT32_MAX;
}

static bool is_needed(const struct kvk_block *block)
{
    return is_indexed(block) && (block->child_count > 0 || block->anchor_count > 0);
}

static bool is_at_rest(const struct kvk_block *block)
{
    bool pinned = false;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        pinned = pinned || block->pin_count[i] > 0;
    }
    return !pinned && block->transfer_count == 0;
}

/* What the event needs beyond the right state. */
static bool allows_now(const struct kvk_block *block, enum kvk_block_event event)
{
    switch (event) {
    case KVK_BLOCK_RESERVE:
    case KVK_BLOCK_WRITE:
    case KVK_BLOCK_SEAL:
    case KVK_BLOCK_FILL:
    case KVK_BLOCK_KNOW:
        return true;
    case KVK_BLOCK_HOLD:
        return block->hold_count < UINT32_MAX;
    case KVK_BLOCK_RELEASE:
        /* The last holder of what no index keeps aborts or discards it: it would be lost. */
        return block->hold_count > 1 || (block->state == KVK_BLOCK_SEALED && is_indexed(block));
    case KVK_BLOCK_ABORT:
        return block->hold_count == 1 && is_at_rest(block);
    case KVK_BLOCK_EVICT:
        return is_at_rest(block);
    case KVK_BLOCK_DISCARD:
        return !is_indexed(block) && is_at_rest(block);
    case KVK_BLOCK_PRUNE:
        return !is_needed(block);
    case KVK_BLOCK_TRANSFER_BEGIN:
        return block->transfer_count < UINT8_MAX;
    case KVK_BLOCK_TRANSFER_DONE:
    case KVK_BLOCK_TRANSFER_FAIL:
        return block->transfer_count > 0;
    }
    return false;
}

bool kvk_block_allows(const struct kvk_block *block, enum kvk_block_event event)
{
    KVK_ASSERT(block->state < KVK_BLOCK_STATE_COUNT);
    KVK_ASSERT((unsigned)event < KVK_BLOCK_EVENT_COUNT);
    return life[block->state][event] != NO && allows_now(block, event);
}

static void count_event(struct kvk_block *block, enum kvk_block_event event)
{
    switch (event) {
    case KVK_BLOCK_RESERVE:
    case KVK_BLOCK_HOLD:
    case KVK_BLOCK_FILL:
        block->hold_count++;
        break;
    case KVK_BLOCK_RELEASE:
    case KVK_BLOCK_ABORT:
    case KVK_BLOCK_DISCARD:
        block->hold_count--;
        break;
    case KVK_BLOCK_TRANSFER_BEGIN:
        block->transfer_count++;
        break;
    case KVK_BLOCK_TRANSFER_DONE:
    case KVK_BLOCK_TRANSFER_FAIL:
        block->transfer_count--;
        break;
    case KVK_BLOCK_WRITE:
    case KVK_BLOCK_SEAL:
    case KVK_BLOCK_EVICT:
    case KVK_BLOCK_PRUNE:
    case KVK_BLOCK_KNOW:
        break;
    }
}

static enum kvk_block_state state_by_holds(const struct kvk_block *block)
{
    if (block->hold_count == 0) {
        return KVK_BLOCK_EVICTABLE;
    }
    return block->hold_count == 1 ? KVK_BLOCK_SEALED : KVK_BLOCK_SHARED;
}

void kvk_block_step(struct kvk_block *block, enum kvk_block_event event)
{
    KVK_ASSERT(kvk_block_allows(block, event));
    enum outcome outcome = (enum outcome)life[block->state][event];
    count_event(block, event);
    switch (outcome) {
    case TO_FREE:
    case TO_RESERVED:
    case TO_ACTIVE:
    case TO_SEALED:
    case TO_HOLLOW:
        block->state = (uint8_t)outcome;
        break;
    case BY_HOLDS:
        block->state = (uint8_t)state_by_holds(block);
        break;
    case BY_NEED:
        block->state = is_needed(block) ? KVK_BLOCK_HOLLOW : KVK_BLOCK_FREE;
        break;
    case STAY:
        break;
    case NO:
        KVK_UNREACHABLE();
    }
}

const char *kvk_block_state_name(enum kvk_block_state state)
{
    switch (state) {
    case KVK_BLOCK_FREE:
        return "FREE";
    case KVK_BLOCK_RESERVED:
        return "RESERVED";
    case KVK_BLOCK_ACTIVE:
        return "ACTIVE";
    case KVK_BLOCK_SEALED:
        return "SEALED";
    case KVK_BLOCK_SHARED:
        return "SHARED";
    case KVK_BLOCK_EVICTABLE:
        return "EVICTABLE";
    case KVK_BLOCK_HOLLOW:
        return "HOLLOW";
    }
    return "UNKNOWN";
}
