/* The kernel that copies small pieces: every alignment and size, and not a byte too many. */
#include <criterion/criterion.h>

#include "tests/cuda_sim/attend_case.h"

#define PIECE_COUNT 24

struct ends {
    struct attend_case_memory source, target;
    struct attend_case_memory whole; /* what the target's memory must be at last */
    uint64_t size_bytes;
    uint64_t target_shift;
};

static uint64_t pick_size(struct kvk_random *random, uint32_t index)
{
    static const uint64_t sizes[] = {1, 15, 16, 17, 4095, 16384, 16385, 0, 40001};

    if (index < sizeof(sizes) / sizeof(sizes[0])) {
        return sizes[index];
    }
    return kvk_random_below(random, 9000);
}

static struct kvk_cuda_piece make(struct kvk_random *random, struct ends *ends, uint32_t index)
{
    uint64_t size = pick_size(random, index);
    uint64_t source_shift = kvk_random_below(random, 4) * kvk_random_below(random, 8);
    uint64_t target_shift = kvk_random_below(random, 4) * kvk_random_below(random, 8);

    ends->size_bytes = size;
    ends->target_shift = target_shift;
    ends->source = attend_case_memory_make(source_shift + size, 1);
    ends->target = attend_case_memory_make(target_shift + size, 1);
    ends->whole = attend_case_memory_make(target_shift + size, 1);
    for (uint64_t i = 0; i < size; i++) {
        ends->source.begin[source_shift + i] = (uint8_t)kvk_random_next(random);
    }
    memcpy(ends->whole.begin + target_shift, ends->source.begin + source_shift, size);
    return (struct kvk_cuda_piece){.source = ends->source.begin + source_shift,
                                   .target = ends->target.begin + target_shift,
                                   .size_bytes = size};
}

Test(cuda_copy, pieces_of_every_size_and_alignment)
{
    for (int order = KVK_SIM_FORWARD; order <= KVK_SIM_RANDOM; order++) {
        struct kvk_cuda_piece pieces[PIECE_COUNT];
        struct ends ends[PIECE_COUNT];
        struct kvk_random random;
        uint64_t size_bytes_max = 0;
        kvk_random_init(&random, (uint64_t)order + 1);
        for (uint32_t i = 0; i < PIECE_COUNT; i++) {
            pieces[i] = make(&random, &ends[i], i);
            size_bytes_max =
                pieces[i].size_bytes > size_bytes_max ? pieces[i].size_bytes : size_bytes_max;
        }
        struct attend_case_memory list = attend_case_memory_of(pieces, sizeof(pieces), 8);
        kvk_sim_order_set((enum kvk_sim_order)order, 1);
        cr_assert_eq(kvk_cuda_copy_launch((const struct kvk_cuda_piece *)(void *)list.begin,
                                          PIECE_COUNT, size_bytes_max, NULL),
                     0);
        for (uint32_t i = 0; i < PIECE_COUNT; i++) {
            cr_assert_eq(memcmp(ends[i].target.begin, ends[i].whole.begin,
                                ends[i].target_shift + ends[i].size_bytes),
                         0, "order %d piece %u", order, i);
            attend_case_memory_free(ends[i].source);
            attend_case_memory_free(ends[i].target);
            attend_case_memory_free(ends[i].whole);
        }
        attend_case_memory_free(list);
    }
}

Test(cuda_copy, nothing_and_too_much)
{
    uint64_t before = kvk_sim_kernel_count();

    cr_assert_eq(kvk_cuda_copy_launch(NULL, 0, 100, NULL), 0);
    cr_assert_eq(kvk_cuda_copy_launch(NULL, 3, 0, NULL), 0);
    cr_assert_eq(kvk_cuda_copy_launch(NULL, 1U << 31, 1U << 20, NULL), 1);
    cr_assert_eq(kvk_sim_kernel_count(), before);
}
