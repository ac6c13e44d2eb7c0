/*
 * The traps and edges of attention on the whole CUDA device, simulated: pages in device memory,
 * which the processor cannot read, streams that start late, and no work that is not ordered. Of
 * each a planted fault is seen.
 */
#include "tests/cuda_sim/device_house.h"
#include "tests/cuda_sim/trap_faults.h"

#define PAGES_MAX 512

/* Where the pages of one call lie on the device. */
struct moved {
    struct kvk_region region;
    const void *pages[PAGES_MAX];
};

/* Each page is copied once, however often the table names it in a row. */
static void pages_move(const struct kvk_attend *attend, struct moved *moved)
{
    const struct kvk_attend_item *item = &attend->items[0];
    uint64_t bytes = gpu_case_page_bytes(attend);
    uint64_t slot = 0;
    KVK_ASSERT(attend->item_count == 1 && item->page_count <= PAGES_MAX);
    moved->region = region_make(device, bytes, item->page_count + UINT64_C(1), item->page_count);
    for (uint32_t i = 0; i < item->page_count; i++) {
        if (item->pages[i] == NULL) {
            moved->pages[i] = NULL;
        } else if (i > 0 && item->pages[i] == item->pages[i - 1]) {
            moved->pages[i] = moved->pages[i - 1];
        } else {
            uint8_t *there = kvk_region_at(&moved->region, slot++ * bytes);
            copy_one(there, item->pages[i], bytes);
            moved->pages[i] = there;
        }
    }
}

static enum kvk_status moved_attend(void *context, const struct kvk_attend *attend,
                                    struct kvk_error *error)
{
    static struct moved moved;
    struct kvk_attend_item item = attend->items[0];
    struct kvk_attend asked = *attend;
    (void)context;
    if (item.page_count == 0) {
        return device->ops->attend(device, attend, error);
    }
    pages_move(attend, &moved);
    item.pages = moved.pages;
    asked.items = &item;
    enum kvk_status status = device->ops->attend(device, &asked, error);
    device->ops->free(device, &moved.region);
    return status;
}

static bool within(double error, double limit)
{
    return error <= limit;
}

static void run_all(const struct trap_named *named, size_t count)
{
    const struct trap_target target = {"simulated device", NULL,   moved_attend,
                                       kvk_attend_merge,   within, 1e-5};
    device_house_open(1, 20, 0);
    for (size_t i = 0; i < count; i++) {
        cr_expect(named[i].run(&target), "%s", named[i].name);
    }
    device_house_close();
}

Test(cuda_traps, the_device_falls_into_none, .timeout = 300)
{
    run_all(gpu_traps, GPU_TRAP_COUNT);
}

Test(cuda_traps, the_device_is_right_at_the_edges, .timeout = 300)
{
    run_all(gpu_edges, GPU_EDGE_COUNT);
}

Test(cuda_traps, every_planted_fault_is_seen_on_the_device, .timeout = 300)
{
    device_house_open(1, 0, 0);
    for (size_t i = 0; i < TRAP_PLANTED_COUNT; i++) {
        struct trap_faulty faulty = {.fault = trap_planted[i].fault, .attend = moved_attend};
        const struct trap_target target = {"simulated device", &faulty, trap_faulty_attend,
                                           kvk_attend_merge,   within,  1e-5};
        cr_expect_not(trap_planted[i].run(&target), "%s does not see fault %d",
                      trap_planted[i].name, trap_planted[i].fault);
    }
    device_house_close();
}
