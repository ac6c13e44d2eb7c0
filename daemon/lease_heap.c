#include "daemon/lease_heap.h"

#include "base/assert.h"

/* One of two heaps becomes the first child of the other. */
static struct kvk_lease *meld(struct kvk_lease *a, struct kvk_lease *b)
{
    if (a == NULL || b == NULL) {
        return a == NULL ? b : a;
    }
    if (b->expires_ns < a->expires_ns) {
        struct kvk_lease *swapped = a;
        a = b;
        b = swapped;
    }
    b->heap_previous = a;
    b->heap_next = a->heap_child;
    if (b->heap_next != NULL) {
        b->heap_next->heap_previous = b;
    }
    a->heap_child = b;
    return a;
}

/* Siblings become one heap: melded in pairs from the left, the pairs then from the right. */
static struct kvk_lease *meld_siblings(struct kvk_lease *first)
{
    struct kvk_lease *pairs = NULL; /* a list through heap_next, the last pair first */
    while (first != NULL) {
        struct kvk_lease *a = first;
        struct kvk_lease *b = a->heap_next;
        first = b == NULL ? NULL : b->heap_next;
        a->heap_next = NULL;
        a->heap_previous = NULL;
        if (b != NULL) {
            b->heap_next = NULL;
            b->heap_previous = NULL;
        }
        struct kvk_lease *pair = meld(a, b);
        pair->heap_next = pairs;
        pairs = pair;
    }
    struct kvk_lease *heap = NULL;
    while (pairs != NULL) {
        struct kvk_lease *pair = pairs;
        pairs = pair->heap_next;
        pair->heap_next = NULL;
        heap = meld(heap, pair);
    }
    return heap;
}

void kvk_lease_heap_add(struct kvk_lease **heap, struct kvk_lease *lease)
{
    lease->heap_child = NULL;
    lease->heap_next = NULL;
    lease->heap_previous = NULL;
    *heap = meld(*heap, lease);
}

void kvk_lease_heap_remove(struct kvk_lease **heap, struct kvk_lease *lease)
{
    struct kvk_lease *children = meld_siblings(lease->heap_child);
    lease->heap_child = NULL;
    if (*heap == lease) {
        KVK_ASSERT(lease->heap_previous == NULL);
        *heap = children;
        return;
    }
    struct kvk_lease *previous = lease->heap_previous;
    KVK_ASSERT(previous != NULL);
    if (previous->heap_child == lease) {
        previous->heap_child = lease->heap_next;
    } else {
        KVK_ASSERT(previous->heap_next == lease);
        previous->heap_next = lease->heap_next;
    }
    if (lease->heap_next != NULL) {
        lease->heap_next->heap_previous = previous;
    }
    lease->heap_next = NULL;
    lease->heap_previous = NULL;
    *heap = meld(*heap, children);
}
