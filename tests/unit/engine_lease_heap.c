/* The heap of leases against a plain search for the earliest, over random adds and removes. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "base/random.h"
#include "daemon/lease_heap.h"

#define LEASE_COUNT 200

static struct kvk_lease leases[LEASE_COUNT];
static bool is_in[LEASE_COUNT];

static uint64_t earliest(void)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < LEASE_COUNT; i++) {
        if (is_in[i] && leases[i].expires_ns < least) {
            least = leases[i].expires_ns;
        }
    }
    return least;
}

Test(lease_heap, names_the_earliest_after_any_adds_and_removes)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct kvk_random random;
        struct kvk_lease *heap = NULL;
        kvk_random_init(&random, seed);
        memset(leases, 0, sizeof(leases));
        memset(is_in, 0, sizeof(is_in));
        for (int step = 0; step < 5000; step++) {
            uint64_t i = kvk_random_below(&random, LEASE_COUNT);
            if (is_in[i]) {
                kvk_lease_heap_remove(&heap, &leases[i]);
            } else {
                leases[i].expires_ns = kvk_random_below(&random, 50); /* many alike */
                kvk_lease_heap_add(&heap, &leases[i]);
            }
            is_in[i] = !is_in[i];
            cr_assert_eq(heap == NULL ? UINT64_MAX : heap->expires_ns, earliest());
        }
        while (heap != NULL) {
            struct kvk_lease *first = heap;
            cr_assert_eq(first->expires_ns, earliest());
            is_in[first - leases] = false;
            kvk_lease_heap_remove(&heap, first);
        }
        cr_assert_eq(earliest(), UINT64_MAX, "the heap has lost a lease");
    }
}
