/* Regions that are mapped by windows: addresses only for what is backed, and pieces in one run. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/random.h"
#include "gpu/device.h"

#define PAGE UINT64_C(4096)
#define MIB (UINT64_C(1) << 20)
#define TIB (UINT64_C(1) << 40)

static struct kvk_device *device_make(uint64_t window_bytes)
{
    const struct kvk_device_cpu_options options = {.window_bytes = window_bytes};
    struct kvk_device *device = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_device_cpu_open(&options, &device, &error), KVK_OK, "%s", error.text);
    return device;
}

static struct kvk_region region_make(struct kvk_device *device, uint64_t size_bytes,
                                     uint64_t piece_bytes)
{
    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(device->ops->alloc(device, size_bytes, piece_bytes, "test", &region, &error),
                 KVK_OK, "%s", error.text);
    return region;
}

static void back(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                 uint64_t size_bytes)
{
    struct kvk_error error;
    cr_assert_eq(device->ops->back(device, region, offset, size_bytes, &error), KVK_OK, "%s",
                 error.text);
}

static void punch(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                  uint64_t size_bytes)
{
    struct kvk_error error;
    cr_assert_eq(device->ops->punch(device, region, offset, size_bytes, &error), KVK_OK, "%s",
                 error.text);
}

static uint32_t mapped_windows(const struct kvk_region *region)
{
    uint32_t count = 0;
    for (uint64_t i = 0; i < region->windows->count; i++) {
        count += region->windows->addresses[i] != NULL ? 1 : 0;
    }
    return count;
}

Test(gpu_windows, a_hundred_tenants_of_two_tebibytes_fit)
{
    struct kvk_device *device = device_make(0);
    static struct kvk_region regions[256];
    for (int i = 0; i < 256; i++) {
        regions[i] = region_make(device, 5 * TIB / 2, 2 * MIB);
        cr_assert_null(regions[i].address);
        back(device, &regions[i], (uint64_t)i * 7 * 1024 * MIB, 2 * MIB);
        *kvk_region_at(&regions[i], (uint64_t)i * 7 * 1024 * MIB + 5) = (uint8_t)i;
        cr_assert_leq(mapped_windows(&regions[i]), 1);
    }
    for (int i = 0; i < 256; i++) {
        cr_assert_eq(*kvk_region_at(&regions[i], (uint64_t)i * 7 * 1024 * MIB + 5), (uint8_t)i);
        device->ops->free(device, &regions[i]);
    }
    device->ops->close(device);
}

Test(gpu_windows, a_piece_across_two_windows_is_one_run)
{
    struct kvk_device *device = device_make(4 * PAGE);
    const uint64_t piece = 3 * PAGE / 2; /* some begin in one window and end in the next */
    const uint32_t count = 64;
    struct kvk_region region = region_make(device, count * piece, piece);
    uint8_t *whole = mmap(NULL, region.size_bytes, PROT_READ, MAP_SHARED, region.fd, 0);
    cr_assert_neq(whole, MAP_FAILED);
    for (uint32_t i = 0; i < count; i++) {
        cr_assert_null(kvk_region_at(&region, i * piece), "nothing is backed yet");
    }
    back(device, &region, 0, count * piece);
    for (uint32_t i = 0; i < count; i++) {
        memset(kvk_region_at(&region, i * piece), (int)i + 1, piece);
    }
    for (uint64_t i = 0; i < count * piece; i++) {
        cr_assert_eq(whole[i], (uint8_t)(i / piece + 1), "byte %llu", (unsigned long long)i);
    }
    munmap(whole, region.size_bytes);
    device->ops->free(device, &region);
    device->ops->close(device);
}

/* Slabs come and go at random beside a plain copy of what must be there. */
Test(gpu_windows, random_slabs_against_plain_memory)
{
    struct kvk_device *device = device_make(8 * PAGE);
    struct kvk_random random;
    const uint64_t piece = 3 * 1024;
    const uint32_t slab_pieces = 8; /* six pages, so slabs lie across windows */
    const uint32_t slabs = 96;
    const uint64_t slab_bytes = slab_pieces * piece;
    struct kvk_region region = region_make(device, slabs * slab_bytes, piece);
    uint8_t *plain = calloc(slabs, slab_bytes);
    bool *backed = calloc(slabs, sizeof(*backed));
    kvk_random_init(&random, 11);
    for (int round = 0; round < 4000; round++) {
        uint32_t slab = (uint32_t)kvk_random_below(&random, slabs);
        uint8_t *expected = plain + slab * slab_bytes;
        if (!backed[slab]) {
            back(device, &region, slab * slab_bytes, slab_bytes);
            backed[slab] = true;
            for (uint32_t p = 0; p < slab_pieces; p++) {
                kvk_random_fill(&random, expected + p * piece, piece);
                memcpy(kvk_region_at(&region, slab * slab_bytes + p * piece), expected + p * piece,
                       piece);
            }
        } else if (kvk_random_chance(&random, 0.5)) {
            punch(device, &region, slab * slab_bytes, slab_bytes);
            backed[slab] = false;
        }
        slab = (uint32_t)kvk_random_below(&random, slabs);
        for (uint32_t p = 0; backed[slab] && p < slab_pieces; p++) {
            const uint8_t *found = kvk_region_at(&region, slab * slab_bytes + p * piece);
            cr_assert_not_null(found);
            cr_assert_eq(memcmp(found, plain + slab * slab_bytes + p * piece, piece), 0);
        }
    }
    for (uint32_t slab = 0; slab < slabs; slab++) {
        punch(device, &region, slab * slab_bytes, slab_bytes);
    }
    cr_assert_eq(device->ops->backed_bytes(device, &region), 0);
    cr_assert_eq(mapped_windows(&region), 0, "no addresses without memory");
    free(plain);
    free(backed);
    device->ops->free(device, &region);
    device->ops->close(device);
}

Test(gpu_windows, an_adopted_region_is_mapped_where_it_is_backed_again)
{
    struct kvk_device *device = device_make(4 * PAGE);
    struct kvk_region region = region_make(device, 64 * PAGE, PAGE);
    struct kvk_region again;
    struct kvk_error error;
    back(device, &region, 8 * PAGE, 2 * PAGE);
    memset(kvk_region_at(&region, 9 * PAGE), 0x5a, PAGE);
    int fd = dup(region.fd);
    device->ops->leave(device, &region);
    cr_assert_eq(device->ops->adopt(device, fd, 64 * PAGE, PAGE, &again, &error), KVK_OK, "%s",
                 error.text);
    cr_assert_null(kvk_region_at(&again, 9 * PAGE));
    back(device, &again, 8 * PAGE, 2 * PAGE);
    cr_assert_eq(kvk_region_at(&again, 9 * PAGE)[17], 0x5a, "what was there stays");
    device->ops->free(device, &again);
    device->ops->close(device);
}

Test(gpu_windows, what_is_used_whole_is_mapped_whole)
{
    struct kvk_device *device = device_make(4 * PAGE);
    struct kvk_region whole = region_make(device, 64 * PAGE, 0);
    struct kvk_region small = region_make(device, 4 * PAGE, PAGE);
    cr_assert_not_null(whole.address);
    cr_assert_not_null(small.address);
    cr_assert_eq(kvk_region_at(&whole, 5 * PAGE + 3), whole.address + 5 * PAGE + 3);
    device->ops->free(device, &whole);
    device->ops->free(device, &small);
    device->ops->close(device);
}
