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
    {KVK_BLOCK_FREE, KVK_BLOCK_KNOW, KVK_BLOCK_HOLLOW, 0},
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
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
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

/* ---- The whole walk: every state, event and condition that the table asks about ---- */

struct condition {
    uint32_t holds;
    uint32_t transfers;
    int pinned_tier; /* -1: none */
    bool indexed;
    bool has_child;
    bool has_anchor;
};

/* The rules again, in the words of docs/block-life.md instead of a table. KVK_BLOCK_STATE_COUNT:
 * refused. */
static int expected_state(enum kvk_block_state state, enum kvk_block_event event,
                          const struct condition *now)
{
    bool unsealed = state == KVK_BLOCK_RESERVED || state == KVK_BLOCK_ACTIVE;
    bool held = state == KVK_BLOCK_SEALED || state == KVK_BLOCK_SHARED;
    bool whole = held || state == KVK_BLOCK_EVICTABLE;
    bool still = now->transfers == 0 && now->pinned_tier < 0;
    bool needed = now->indexed && (now->has_child || now->has_anchor);
    int many = now->holds >= 2 ? KVK_BLOCK_SHARED : KVK_BLOCK_SEALED;
    const int no = KVK_BLOCK_STATE_COUNT;

    switch (event) {
    case KVK_BLOCK_RESERVE:
        return state == KVK_BLOCK_FREE ? KVK_BLOCK_RESERVED : no;
    case KVK_BLOCK_WRITE:
        return unsealed ? KVK_BLOCK_ACTIVE : no;
    case KVK_BLOCK_SEAL:
        if (state != KVK_BLOCK_ACTIVE) {
            return no;
        }
        return now->holds == 0 ? KVK_BLOCK_EVICTABLE : many;
    case KVK_BLOCK_HOLD:
        if (now->holds == UINT32_MAX || (!unsealed && !whole)) {
            return no;
        }
        return unsealed ? (int)state : now->holds == 0 ? KVK_BLOCK_SEALED : KVK_BLOCK_SHARED;
    case KVK_BLOCK_RELEASE:
        if (unsealed && now->holds > 1) {
            return state;
        }
        if (held && now->holds > 1) {
            return now->holds == 2 ? KVK_BLOCK_SEALED : KVK_BLOCK_SHARED;
        }
        return state == KVK_BLOCK_SEALED && now->indexed ? KVK_BLOCK_EVICTABLE : no;
    case KVK_BLOCK_ABORT:
        return unsealed && now->holds == 1 && still ? KVK_BLOCK_FREE : no;
    case KVK_BLOCK_EVICT:
        if (state != KVK_BLOCK_EVICTABLE || !still) {
            return no;
        }
        return needed ? KVK_BLOCK_HOLLOW : KVK_BLOCK_FREE;
    case KVK_BLOCK_DISCARD:
        return state == KVK_BLOCK_SEALED && !now->indexed && still ? KVK_BLOCK_FREE : no;
    case KVK_BLOCK_FILL:
        return state == KVK_BLOCK_HOLLOW ? KVK_BLOCK_SEALED : no;
    case KVK_BLOCK_PRUNE:
        return state == KVK_BLOCK_HOLLOW && !needed ? KVK_BLOCK_FREE : no;
    case KVK_BLOCK_TRANSFER_BEGIN:
        return (state == KVK_BLOCK_ACTIVE || whole) && now->transfers < UINT8_MAX ? (int)state : no;
    case KVK_BLOCK_TRANSFER_DONE:
    case KVK_BLOCK_TRANSFER_FAIL:
        return (state == KVK_BLOCK_ACTIVE || whole) && now->transfers > 0 ? (int)state : no;
    case KVK_BLOCK_KNOW:
        return state == KVK_BLOCK_FREE ? KVK_BLOCK_HOLLOW : no;
    }
    return no;
}

/* Holds that a state can have: one for SEALED, several for SHARED, none where nobody holds. */
static bool is_possible(enum kvk_block_state state, const struct condition *now)
{
    switch (state) {
    case KVK_BLOCK_FREE:
    case KVK_BLOCK_EVICTABLE:
    case KVK_BLOCK_HOLLOW:
        return now->holds == 0;
    case KVK_BLOCK_RESERVED:
    case KVK_BLOCK_ACTIVE:
        return now->holds >= 1;
    case KVK_BLOCK_SEALED:
        return now->holds == 1;
    case KVK_BLOCK_SHARED:
        return now->holds >= 2;
    }
    return false;
}

static void walk_one(enum kvk_block_state state, const struct condition *now)
{
    for (int event = 0; event < KVK_BLOCK_EVENT_COUNT; event++) {
        struct kvk_block block = block_make(state);
        block.hold_count = now->holds;
        block.transfer_count = (uint8_t)now->transfers;
        block.run = now->indexed ? 3 : NOT_INDEXED;
        block.child_count = now->has_child ? 1 : 0;
        block.anchor_count = now->has_anchor ? 1 : 0;
        if (now->pinned_tier >= 0) {
            block.pin_count[now->pinned_tier] = 1;
        }
        int expected = expected_state(state, (enum kvk_block_event)event, now);
        cr_assert_eq(kvk_block_allows(&block, (enum kvk_block_event)event),
                     expected != KVK_BLOCK_STATE_COUNT,
                     "state %s event %d holds %u transfers %u pin %d indexed %d child %d anchor %d",
                     kvk_block_state_name(state), event, now->holds, now->transfers,
                     now->pinned_tier, now->indexed, now->has_child, now->has_anchor);
        if (expected != KVK_BLOCK_STATE_COUNT) {
            kvk_block_step(&block, (enum kvk_block_event)event);
            cr_assert_eq(block.state, expected, "state %s event %d", kvk_block_state_name(state),
                         event);
        }
    }
}

Test(index_block, whole_walk)
{
    static const uint32_t holds[] = {0, 1, 2, 3, UINT32_MAX};
    static const uint32_t transfers[] = {0, 1, UINT8_MAX};
    uint32_t walked = 0;
    for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
        for (uint32_t i = 0; i < 5U * 3U * (KVK_TIER_COUNT + 1U) * 8U; i++) {
            const struct condition now = {
                .holds = holds[i % 5],
                .transfers = transfers[i / 5 % 3],
                .pinned_tier = (int)(i / 15 % (KVK_TIER_COUNT + 1U)) - 1,
                .indexed = (i / (15 * (KVK_TIER_COUNT + 1U)) & 1) != 0,
                .has_child = (i / (15 * (KVK_TIER_COUNT + 1U)) & 2) != 0,
                .has_anchor = (i / (15 * (KVK_TIER_COUNT + 1U)) & 4) != 0,
            };
            if (is_possible((enum kvk_block_state)state, &now)) {
                walk_one((enum kvk_block_state)state, &now);
                walked++;
            }
        }
    }
    /* holds that fit (3 x 1, 2 x 4, 1, 3) x transfers x pins x flags */
    cr_assert_eq(walked, (3U + 8U + 1U + 3U) * 3U * (KVK_TIER_COUNT + 1U) * 8U);
}

Test(index_block, states_have_names)
{
    for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
        cr_assert_str_neq(kvk_block_state_name((enum kvk_block_state)state), "UNKNOWN");
    }
}
