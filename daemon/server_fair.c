#include "daemon/server_fair.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"

/* What an owner may owe at most, in quanta: one call that took a second must not keep it out for
 * thousands of rounds of others' short ones. */
#define DEBT_QUANTA_MAX 64

/* So long after its last call an owner counts as one that comes. */
#define COMES_NS (100 * KVK_NS_PER_MS)
/* Who was held back for less than it had to be makes that much of it up at once. */
#define BURST_NS (KVK_NS_PER_MS / 5)
#define PACE_NS_MAX                                                                                \
    (10 * KVK_NS_PER_MS) /* nobody is held back for longer, however long its call                  \
                          */

struct kvk_fair_owner {
    struct kvk_fair_item *first, *last;
    struct kvk_fair_owner *next; /* in its list */
    int64_t left_ns;             /* of its allowance; negative: owed */
    uint64_t ready_ns;           /* before it, it is held back while others come */
    uint32_t running;
    uint32_t idle_count; /* of the struct kvk_fair, when left_ns was begun */
    uint32_t waiting;    /* items */
    bool listed;         /* is in one of the lists, with something waiting or without */
    bool fresh;          /* in that of the fresh */
    bool paced;          /* in that of the paced */
};

static void list_add(struct kvk_fair_list *list, struct kvk_fair_owner *owner)
{
    owner->next = NULL;
    if (list->last == NULL) {
        list->first = owner;
    } else {
        list->last->next = owner;
    }
    list->last = owner;
}

static void list_take_first(struct kvk_fair_list *list)
{
    struct kvk_fair_owner *owner = list->first;
    list->first = owner->next;
    if (list->first == NULL) {
        list->last = NULL;
    }
    owner->next = NULL;
}

enum kvk_status kvk_fair_init(struct kvk_fair *fair, uint32_t owner_count, uint32_t running_max,
                              uint64_t quantum_ns, struct kvk_error *error)
{
    KVK_ASSERT(owner_count > 0 && running_max > 0);
    KVK_ASSERT(quantum_ns > 0 && quantum_ns <= UINT32_MAX);
    *fair = (struct kvk_fair){
        .owner_count = owner_count, .running_max = running_max, .quantum_ns = quantum_ns};
    kvk_fair_pace(fair, 100, UINT32_MAX);
    fair->owners = calloc(owner_count, sizeof(*fair->owners));
    return fair->owners != NULL
               ? KVK_OK
               : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the queues");
}

void kvk_fair_finish(struct kvk_fair *fair)
{
    KVK_ASSERT(fair->waiting_count == 0);
    free(fair->owners);
    fair->owners = NULL;
}

void kvk_fair_pace(struct kvk_fair *fair, uint32_t share_percent, uint32_t nobody)
{
    KVK_ASSERT(share_percent >= 1 && share_percent <= 100);
    fair->share_percent = share_percent;
    fair->nobody = nobody;
    fair->came[0] = (struct kvk_fair_came){.owner = UINT32_MAX};
    fair->came[1] = fair->came[0];
}

/* ---- Paces ---- */

static void note_coming(struct kvk_fair *fair, uint32_t number, uint64_t now_ns)
{
    if (number == fair->nobody) {
        return;
    }
    if (number != fair->came[0].owner) {
        fair->came[1] = fair->came[0];
    }
    fair->came[0] = (struct kvk_fair_came){.ns = now_ns, .owner = number};
}

/* Until when others count as coming; 0: they never came. */
static uint64_t others_until_ns(const struct kvk_fair *fair, uint32_t number)
{
    const struct kvk_fair_came *other = &fair->came[fair->came[0].owner == number ? 1 : 0];
    return other->owner == UINT32_MAX ? 0 : other->ns + COMES_NS;
}

bool kvk_fair_others_come(const struct kvk_fair *fair, uint32_t number, uint64_t now_ns)
{
    return others_until_ns(fair, number) > now_ns;
}

/* Until when it is held back, as far as is known now. */
static uint64_t held_until_ns(const struct kvk_fair *fair, const struct kvk_fair_owner *owner)
{
    uint64_t others_ns = others_until_ns(fair, (uint32_t)(owner - fair->owners));
    return owner->ready_ns < others_ns ? owner->ready_ns : others_ns;
}

static void hold_back(struct kvk_fair *fair, struct kvk_fair_owner *owner)
{
    uint64_t until_ns = held_until_ns(fair, owner);
    if (fair->paced.first == NULL || until_ns < fair->paced_until_ns) {
        fair->paced_until_ns = until_ns;
    }
    owner->fresh = false;
    owner->paced = true;
    fair->paced_count += owner->waiting;
    list_add(&fair->paced, owner);
}

/* Those whose time has come have their place in the round again. */
static void let_go(struct kvk_fair *fair, uint64_t now_ns)
{
    if (fair->paced.first == NULL || now_ns < fair->paced_until_ns) {
        return;
    }
    struct kvk_fair_owner *owner = fair->paced.first;
    fair->paced = (struct kvk_fair_list){NULL, NULL};
    while (owner != NULL) {
        struct kvk_fair_owner *next = owner->next;
        fair->paced_count -= owner->waiting;
        owner->paced = false;
        if (held_until_ns(fair, owner) > now_ns) {
            hold_back(fair, owner);
        } else {
            list_add(&fair->backlog, owner);
        }
        owner = next;
    }
}

/* It was busy for so long until now, and is to be held back for so long for that. */
static void ready_later(struct kvk_fair_owner *owner, uint64_t busy_ns, uint64_t later_ns,
                        uint64_t now_ns)
{
    uint64_t from_ns = now_ns > busy_ns + BURST_NS ? now_ns - busy_ns - BURST_NS : 0;
    if (owner->ready_ns > from_ns) {
        from_ns = owner->ready_ns;
    }
    owner->ready_ns = from_ns + busy_ns + (later_ns < PACE_NS_MAX ? later_ns : PACE_NS_MAX);
    if (owner->ready_ns > now_ns + PACE_NS_MAX) {
        owner->ready_ns = now_ns + PACE_NS_MAX;
    }
}

static void pace(const struct kvk_fair *fair, struct kvk_fair_owner *owner, uint64_t took_ns,
                 uint64_t now_ns)
{
    if (fair->share_percent == 100) {
        return;
    }
    took_ns = took_ns < PACE_NS_MAX ? took_ns : PACE_NS_MAX; /* no overflow */
    ready_later(owner, took_ns, took_ns * (100 - fair->share_percent) / fair->share_percent,
                now_ns);
}

void kvk_fair_hold(struct kvk_fair *fair, uint32_t number, uint64_t hold_ns, uint64_t now_ns)
{
    KVK_ASSERT(number < fair->owner_count);
    if (fair->share_percent < 100) {
        ready_later(&fair->owners[number], 0, hold_ns, now_ns);
    }
}

uint64_t kvk_fair_ready_ns(const struct kvk_fair *fair)
{
    if (fair->waiting_count == 0) {
        return UINT64_MAX;
    }
    return fair->waiting_count == fair->paced_count ? fair->paced_until_ns : 0;
}

/* ---- Turns ---- */

void kvk_fair_add(struct kvk_fair *fair, struct kvk_fair_item *item, uint32_t number,
                  uint64_t now_ns)
{
    KVK_ASSERT(number < fair->owner_count);
    struct kvk_fair_owner *owner = &fair->owners[number];
    bool had_none = owner->first == NULL;
    note_coming(fair, number, now_ns);
    if (had_none && owner->idle_count != fair->idle_count) {
        owner->idle_count = fair->idle_count;
        owner->left_ns = 0; /* nobody waited meanwhile, so nobody is owed anything */
    }
    item->owner = number;
    item->next = NULL;
    if (had_none) {
        owner->first = item;
    } else {
        owner->last->next = item;
    }
    owner->last = item;
    owner->waiting++;
    fair->waiting_count++;
    fair->paced_count += owner->paced ? 1 : 0;
    if (!had_none || owner->listed || owner->running >= fair->running_max) {
        return; /* it has its place, or gets it when one of its own has ended */
    }
    owner->listed = true;
    owner->fresh = owner->left_ns >= 0;
    if (owner->fresh) {
        owner->left_ns = (int64_t)fair->quantum_ns;
    }
    list_add(owner->fresh ? &fair->fresh : &fair->backlog, owner);
}

static void move_behind(struct kvk_fair *fair, struct kvk_fair_list *list)
{
    struct kvk_fair_owner *owner = list->first;
    list_take_first(list);
    owner->fresh = false;
    list_add(&fair->backlog, owner);
}

static struct kvk_fair_item *owner_pop(struct kvk_fair *fair, struct kvk_fair_owner *owner)
{
    struct kvk_fair_item *item = owner->first;
    owner->first = item->next;
    if (owner->first == NULL) {
        owner->last = NULL;
    }
    item->next = NULL;
    owner->running++;
    owner->waiting--;
    fair->waiting_count--;
    return item;
}

/* Ends: each turn of the loop takes an owner out, moves one from the fresh to the others, or fills
 * one up, of which each needs a few more than DEBT_QUANTA_MAX at most. */
struct kvk_fair_item *kvk_fair_take(struct kvk_fair *fair, uint64_t now_ns)
{
    let_go(fair, now_ns);
    for (;;) {
        struct kvk_fair_list *list = fair->fresh.first != NULL ? &fair->fresh : &fair->backlog;
        struct kvk_fair_owner *owner = list->first;
        if (owner == NULL) {
            fair->idle_count += fair->waiting_count == 0 ? 1 : 0;
            return NULL;
        }
        if (owner->running >= fair->running_max) {
            list_take_first(list);
            owner->listed = false; /* kvk_fair_end() brings it back */
        } else if (owner->first != NULL && held_until_ns(fair, owner) > now_ns) {
            list_take_first(list);
            hold_back(fair, owner);
        } else if (owner->first == NULL && owner->fresh && fair->backlog.first != NULL) {
            move_behind(fair, list); /* it must wait a round before it is fresh again */
        } else if (owner->first == NULL) {
            list_take_first(list);
            owner->listed = false;
            owner->left_ns = owner->left_ns < 0 ? owner->left_ns : 0;
        } else if (owner->left_ns <= 0) {
            owner->left_ns += (int64_t)fair->quantum_ns;
            move_behind(fair, list);
        } else {
            return owner_pop(fair, owner);
        }
    }
}

bool kvk_fair_is_fresh(const struct kvk_fair *fair)
{
    const struct kvk_fair_owner *owner = fair->fresh.first;
    while (owner != NULL &&
           (owner->first == NULL || owner->left_ns <= 0 || owner->running >= fair->running_max)) {
        owner = owner->next;
    }
    return owner != NULL;
}

bool kvk_fair_end(struct kvk_fair *fair, uint32_t number, uint64_t took_ns, uint64_t now_ns)
{
    KVK_ASSERT(number < fair->owner_count);
    struct kvk_fair_owner *owner = &fair->owners[number];
    const int64_t owed_max = (int64_t)(DEBT_QUANTA_MAX * fair->quantum_ns);
    KVK_ASSERT(owner->running > 0);
    owner->running--;
    pace(fair, owner, took_ns, now_ns);
    owner->left_ns -= took_ns < (uint64_t)owed_max ? (int64_t)took_ns : owed_max;
    if (owner->left_ns < -owed_max) {
        owner->left_ns = -owed_max;
    }
    if (owner->listed || owner->first == NULL) {
        return false;
    }
    owner->listed = true;
    owner->fresh = false;
    list_add(&fair->backlog, owner);
    return true;
}
