/* The life of a block: every state with every event, against a table written here a second time. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>

#include "index/block.h"

#define NOT_INDEXED UINT32_MAX

static struct kvk_block block_make(enum kvk_block_state state)
{
    struct kvk_block block;
    memset(&block, 0, sizeof(block));
    block.state = (uint8_t)state;
    block.parent = KVK_BLOCK_NONE;
    block.run = state == KVK_BLOCK_HOLLOW || state == KVK_BLOCK_EVICTABLE ? 0 : NOT_INDEXED;
    switch (state) {
    case KVK_BLOCK_FREE:
    case KVK_BLOCK_EVICTABLE:
    case KVK_BLOCK_HOLLOW:
        break;
    case KVK_BLOCK_RESERVED:
    case KVK_BLOCK_ACTIVE:
    case KVK_BLOCK_SEALED:
        block.hold_count = 1;
        break;
    case KVK_BLOCK_SHARED:
        block.hold_count = 2;
        break;
    }
    return block;
}

/* What a block of the plainest kind does, in words: "" is refused. */
static const struct {
    enum kvk_block_state from;
    enum kvk_block_event event;
    enum kvk_block_state to;
    uint32_t holds;
} allowed[] = {
    {KVK_BLOCK_FREE, KVK_BLOCK_RESERVE, KVK_BLOCK_RESERVED, 1},
    {KVK_BLOCK_RESERVED, KVK_BLOCK_WRITE, KVK_BLOCK_ACTIVE, 1},
    {KVK_BLOCK_RESERVED, KVK_BLOCK_HOLD, KVK_BLOCK_RESERVED, 2},
    {KVK_BLOCK_RESERVED, KVK_BLOCK_ABORT, KVK_BLOCK_FREE, 0},
    {KVK_BLOCK_ACTIVE, KVK_BLOCK_WRITE, KVK_BLOCK_ACTIVE, 1},
    {KVK_BLOCK_ACTIVE, KVK_BLOCK_SEAL, KVK_BLOCK_SEALED, 1},
    {KVK_BLOCK_ACTIVE, KVK_BLOCK_HOLD, KVK_BLOCK_ACTIVE, 2},
    {KVK_BLOCK_ACTIVE, KVK_BLOCK_ABORT, KVK_BLOCK_FREE, 0},
    {KVK_BLOCK_ACTIVE, KVK_BLOCK_TRANSFER_BEGIN, KVK_BLOCK_ACTIVE, 1},
    {KVK_BLOCK_SEALED, KVK_BLOCK_HOLD, KVK_BLOCK_SHARED, 2},
    {KVK_BLOCK_SEALED, KVK_BLOCK_DISCARD, KVK_BLOCK_FREE, 0},
    {KVK_BLOCK_SEALED, KVK_BLOCK_TRANSFER_BEGIN, KVK_BLOCK_SEALED, 1},
    {KVK_BLOCK_SHARED, KVK_BLOCK_HOLD, KVK_BLOCK_SHARED, 3},
    {KVK_BLOCK_SHARED, KVK_BLOCK_RELEASE, KVK_BLOCK_SEALED, 1},
    {KVK_BLOCK_SHARED, KVK_BLOCK_TRANSFER_BEGIN, KVK_BLOCK_SHARED, 2},
    {KVK_BLOCK_EVICTABLE, KVK_BLOCK_HOLD, KVK_BLOCK_SEALED, 1},
    {KVK_BLOCK_EVICTABLE, KVK_BLOCK_EVICT, KVK_BLOCK_FREE, 0},
    {KVK_BLOCK_EVICTABLE, KVK_BLOCK_TRANSFER_BEGIN, KVK_BLOCK_EVICTABLE, 0},
    {KVK_BLOCK_HOLLOW, KVK_BLOCK_FILL, KVK_BLOCK_SEALED, 1},
    {KVK_BLOCK_HOLLOW, KVK_BLOCK_PRUNE, KVK_BLOCK_FREE, 0},
};
#define ALLOWED_COUNT (sizeof(allowed) / sizeof(allowed[0]))

Test(index_block, whole_machine)
{
    for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
        for (int event = 0; event < KVK_BLOCK_EVENT_COUNT; event++) {
            struct kvk_block block = block_make((enum kvk_block_state)state);
            size_t row = 0;
            while (row < ALLOWED_COUNT &&
                   ((int)allowed[row].from != state || (int)allowed[row].event != event)) {
                row++;
            }
            bool expected = row < ALLOWED_COUNT;
            cr_assert_eq(kvk_block_allows(&block, (enum kvk_block_event)event), expected,
                         "state %s event %d", kvk_block_state_name((enum kvk_block_state)state),
                         event);
            if (expected) {
                kvk_block_step(&block, (enum kvk_block_event)event);
                cr_assert_eq(block.state, allowed[row].to, "row %zu", row);
                cr_assert_eq(block.hold_count, allowed[row].holds, "row %zu", row);
            }
        }
    }
}

Test(index_block, refused_event_aborts, .signal = SIGABRT)
{
    struct kvk_block block = block_make(KVK_BLOCK_FREE);
    kvk_block_step(&block, KVK_BLOCK_SEAL);
}

Test(index_block, last_release_needs_the_index)
{
    struct kvk_block block = block_make(KVK_BLOCK_SEALED);
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_RELEASE), "it would be lost: discard it");
    block.run = 3;
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_DISCARD), "the index still names it");
    kvk_block_step(&block, KVK_BLOCK_RELEASE);
    cr_assert_eq(block.state, KVK_BLOCK_EVICTABLE);
    cr_assert_eq(block.hold_count, 0);
}

Test(index_block, unsealed_is_aborted_by_its_last_holder_only)
{
    for (int state = KVK_BLOCK_RESERVED; state <= KVK_BLOCK_ACTIVE; state++) {
        struct kvk_block block = block_make((enum kvk_block_state)state);
        cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_RELEASE));
        kvk_block_step(&block, KVK_BLOCK_HOLD);
        cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_ABORT));
        kvk_block_step(&block, KVK_BLOCK_RELEASE);
        cr_assert_eq(block.state, state);
        kvk_block_step(&block, KVK_BLOCK_ABORT);
        cr_assert_eq(block.state, KVK_BLOCK_FREE);
    }
}

Test(index_block, shared_tail_is_sealed_shared)
{
    struct kvk_block block = block_make(KVK_BLOCK_ACTIVE);
    kvk_block_step(&block, KVK_BLOCK_HOLD);
    kvk_block_step(&block, KVK_BLOCK_SEAL);
    cr_assert_eq(block.state, KVK_BLOCK_SHARED);
}

Test(index_block, evicted_ancestor_becomes_hollow)
{
    struct kvk_block block = block_make(KVK_BLOCK_EVICTABLE);
    block.child_count = 1;
    kvk_block_step(&block, KVK_BLOCK_EVICT);
    cr_assert_eq(block.state, KVK_BLOCK_HOLLOW);
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_PRUNE));
    block.child_count = 0;
    block.anchor_count = 1;
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_PRUNE));
    block.anchor_count = 0;
    kvk_block_step(&block, KVK_BLOCK_PRUNE);
    cr_assert_eq(block.state, KVK_BLOCK_FREE);

    block = block_make(KVK_BLOCK_EVICTABLE);
    block.anchor_count = 1;
    kvk_block_step(&block, KVK_BLOCK_EVICT);
    cr_assert_eq(block.state, KVK_BLOCK_HOLLOW);

    /* What was taken out of the index needs no place in a chain. */
    block = block_make(KVK_BLOCK_EVICTABLE);
    block.child_count = 1;
    block.run = NOT_INDEXED;
    kvk_block_step(&block, KVK_BLOCK_EVICT);
    cr_assert_eq(block.state, KVK_BLOCK_FREE);
}

/* Room that is being copied, or that a reader was promised, is given to nobody. */
Test(index_block, nothing_is_freed_under_a_transfer_or_pin)
{
    static const struct {
        enum kvk_block_state state;
        enum kvk_block_event event;
    } ends[] = {
        {KVK_BLOCK_ACTIVE, KVK_BLOCK_ABORT},
        {KVK_BLOCK_SEALED, KVK_BLOCK_DISCARD},
        {KVK_BLOCK_EVICTABLE, KVK_BLOCK_EVICT},
    };
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        struct kvk_block block = block_make(ends[i].state);
        kvk_block_step(&block, KVK_BLOCK_TRANSFER_BEGIN);
        kvk_block_step(&block, KVK_BLOCK_TRANSFER_BEGIN);
        cr_assert_not(kvk_block_allows(&block, ends[i].event));
        kvk_block_step(&block, KVK_BLOCK_TRANSFER_DONE);
        cr_assert_not(kvk_block_allows(&block, ends[i].event));
        kvk_block_step(&block, KVK_BLOCK_TRANSFER_FAIL);
        cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_TRANSFER_DONE));
        for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
            block.pin_count[tier] = 1;
            cr_assert_not(kvk_block_allows(&block, ends[i].event));
            block.pin_count[tier] = 0;
        }
        kvk_block_step(&block, ends[i].event);
        cr_assert_eq(block.state, KVK_BLOCK_FREE);
    }
}

Test(index_block, counts_do_not_overflow)
{
    struct kvk_block block = block_make(KVK_BLOCK_SHARED);
    block.hold_count = UINT32_MAX;
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_HOLD));
    block.transfer_count = UINT8_MAX;
    cr_assert_not(kvk_block_allows(&block, KVK_BLOCK_TRANSFER_BEGIN));
    cr_assert(kvk_block_allows(&block, KVK_BLOCK_TRANSFER_FAIL));
}

Test(index_block, states_have_names)
{
    for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
        cr_assert_str_neq(kvk_block_state_name((enum kvk_block_state)state), "UNKNOWN");
    }
}
