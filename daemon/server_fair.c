#include "daemon/server_fair.h"

#include <stdlib.h>

#include "base/assert.h"

/* What an owner may owe at most, in quanta: one call that took a second must not keep it out for
 * thousands of rounds of others' short ones. */
#define DEBT_QUANTA_MAX 64

struct kvk_fair_owner {
    struct kvk_fair_item *first, *last;
    struct kvk_fair_owner *next; /* in its list */
    int64_t left_ns;             /* of its allowance; negative: owed */
    uint32_t running;
    uint32_t idle_count; /* of the struct kvk_fair, when left_ns was begun */
    bool listed;         /* has a place in the round, with something waiting or without */
    bool fresh;          /* in which of the two lists */
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

void kvk_fair_add(struct kvk_fair *fair, struct kvk_fair_item *item, uint32_t number)
{
    KVK_ASSERT(number < fair->owner_count);
    struct kvk_fair_owner *owner = &fair->owners[number];
    bool had_none = owner->first == NULL;
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
    fair->waiting_count++;
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
    fair->waiting_count--;
    return item;
}

/* Ends: each turn of the loop takes an owner out, moves one from the fresh to the others, or fills
 * one up, of which each needs a few more than DEBT_QUANTA_MAX at most. */
struct kvk_fair_item *kvk_fair_take(struct kvk_fair *fair)
{
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

bool kvk_fair_end(struct kvk_fair *fair, uint32_t number, uint64_t took_ns)
{
    KVK_ASSERT(number < fair->owner_count);
    struct kvk_fair_owner *owner = &fair->owners[number];
    const int64_t owed_max = (int64_t)(DEBT_QUANTA_MAX * fair->quantum_ns);
    KVK_ASSERT(owner->running > 0);
    owner->running--;
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
