/*
 * The CUDA device's copies and attention on the simulator, against a plain reference. Copies land
 * late there, and what they will write is poisoned until then.
 */
#include <stdlib.h>

#include "tests/cuda_sim/device_house.h"
#include "tests/unit/gpu_case.h"

#define PIECE UINT64_C(5000) /* odd: no two pieces begin alike */
#define PIECES UINT64_C(64)

/* Memory of one kind, and what must be in it. */
struct place {
    struct kvk_region region; /* none: `plain` */
    uint8_t *plain;
    uint8_t expected[PIECE * PIECES];
};

enum { LOCKED, PLAIN, GPU_0, GPU_1, PLACE_COUNT };

static struct place places[PLACE_COUNT];

static void place_read(const struct place *place, uint8_t *bytes)
{
    for (uint64_t i = 0; i < PIECES; i++) {
        uint8_t *at = bytes + i * PIECE;
        if (place->plain != NULL) {
            memcpy(at, place->plain + i * PIECE, PIECE);
        } else if (place->region.fd >= 0) {
            memcpy(at, kvk_region_at(&place->region, i * PIECE), PIECE);
        } else {
            kvk_sim_peek(at, kvk_region_at(&place->region, i * PIECE), PIECE);
        }
    }
}

static void place_fill(struct place *place, struct kvk_random *random)
{
    for (uint64_t i = 0; i < PIECE * PIECES; i++) {
        place->expected[i] = (uint8_t)kvk_random_next(random);
    }
    for (uint64_t i = 0; i < PIECES; i++) {
        const uint8_t *from = place->expected + i * PIECE;
        if (place->plain != NULL) {
            memcpy(place->plain + i * PIECE, from, PIECE);
        } else if (place->region.fd >= 0) {
            memcpy(kvk_region_at(&place->region, i * PIECE), from, PIECE);
        } else {
            kvk_sim_poke(kvk_region_at(&place->region, i * PIECE), from, PIECE);
        }
    }
}

static void setup(void)
{
    struct kvk_error error;
    struct kvk_random random;
    device_house_open(2, 100, 64 * MIB);
    kvk_random_init(&random, 3);
    places[LOCKED].region = region_make(host, PIECE, PIECES, PIECES);
    places[PLAIN].plain = malloc(PIECE * PIECES);
    for (uint32_t gpu = 0; gpu < 2; gpu++) {
        struct kvk_region *region = &places[GPU_0 + gpu].region;
        cr_assert_eq(
            device->ops->alloc_at(device, gpu, PIECE * PIECES, PIECE, "gpu", region, &error),
            KVK_OK);
        /* In two slabs, so that runs end where one does; the first one lies lower. */
        cr_assert_eq(device->ops->back(device, region, 40 * PIECE, 24 * PIECE, &error), KVK_OK);
        cr_assert_eq(device->ops->back(device, region, 0, PIECES * PIECE, &error), KVK_OK);
    }
    for (int i = 0; i < PLACE_COUNT; i++) {
        place_fill(&places[i], &random);
    }
}

static void teardown(void)
{
    host->ops->free(host, &places[LOCKED].region);
    free(places[PLAIN].plain);
    device->ops->free(device, &places[GPU_0].region);
    device->ops->free(device, &places[GPU_1].region);
    device_house_close();
}

TestSuite(cuda_copy, .init = setup, .fini = teardown);

static uint8_t *address(const struct place *place, uint64_t offset)
{
    if (place->plain != NULL) {
        return place->plain + offset;
    }
    return kvk_region_at(&place->region, offset / PIECE * PIECE) + offset % PIECE;
}

static void everything_is_right(uint64_t round)
{
    static uint8_t bytes[PIECE * PIECES];
    for (int i = 0; i < PLACE_COUNT; i++) {
        place_read(&places[i], bytes);
        cr_assert(memcmp(bytes, places[i].expected, sizeof(bytes)) == 0, "round %llu, place %d",
                  (unsigned long long)round, i);
    }
}

struct batch {
    struct kvk_copy copies[PIECES];
    uint64_t sums[PIECES];
    uint64_t wanted[PIECES];
    uint32_t count;
};

static void batch_add(struct batch *batch, int from, uint64_t source, int to, uint64_t target,
                      uint64_t size, bool hashed)
{
    uint32_t i = batch->count++;
    batch->copies[i] = (struct kvk_copy){.source = address(&places[from], source),
                                         .target = address(&places[to], target),
                                         .size_bytes = size,
                                         .checksum = hashed ? &batch->sums[i] : NULL};
    batch->sums[i] = 1;
    batch->wanted[i] = hashed ? kvk_checksum(places[from].expected + source, size) : 1;
    memcpy(places[to].expected + target, places[from].expected + source, size);
}

static void batch_run(struct batch *batch)
{
    struct kvk_error error;
    enum kvk_status status = device->ops->copy(device, batch->copies, batch->count, &error);
    cr_assert_eq(status, KVK_OK, "%s", error.text);
    for (uint32_t i = 0; i < batch->count; i++) {
        cr_assert_eq(batch->sums[i], batch->wanted[i], "piece %u", i);
    }
    batch->count = 0;
}

/* Pieces of a batch never overlap: sources come from the lower half, targets lie in the upper. */
Test(cuda_copy, random_batches_match_the_reference)
{
    static struct batch batch;
    struct kvk_random random;
    kvk_random_init(&random, 11);
    for (uint64_t round = 0; round < 120; round++) {
        int from = (int)kvk_random_below(&random, PLACE_COUNT);
        int to = (int)kvk_random_below(&random, PLACE_COUNT);
        uint64_t size = kvk_random_chance(&random, 0.5) ? PIECE : kvk_random_below(&random, PIECE);
        uint64_t step = 1 + kvk_random_below(&random, 3);
        uint64_t first = kvk_random_below(&random, 8);
        bool hashed = kvk_random_chance(&random, 0.5);
        for (uint64_t i = 0; first + i * step < PIECES / 2; i++) {
            if (kvk_random_chance(&random, 0.1)) {
                from = (int)kvk_random_below(&random, PLACE_COUNT);
                size = kvk_random_below(&random, PIECE);
                hashed = !hashed;
            }
            batch_add(&batch, from, (first + i * step) * PIECE, to,
                      (PIECES / 2 + i) * PIECE + (PIECE - size) / 2, size, hashed);
        }
        batch_run(&batch);
        everything_is_right(round);
    }
}

/* A piece of many parts, at every bound of the buffers; both ways over memory that is not locked.
 */
Test(cuda_copy, long_pieces_go_in_parts)
{
    static struct batch batch;
    const uint64_t sizes[] = {8191, 8192, 8193, 16384, 30 * PIECE};
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        batch_add(&batch, PLAIN, 17, GPU_0, 3 * PIECE, sizes[i], true);
        batch_run(&batch);
        batch_add(&batch, GPU_0, 3 * PIECE, PLAIN, 32 * PIECE, sizes[i], true);
        batch_run(&batch);
        batch_add(&batch, GPU_0, 3 * PIECE, PLAIN, 32 * PIECE + 1, sizes[i], false);
        batch_run(&batch);
        everything_is_right(i);
    }
}

/* Slots in a row go in one call to the copy engine, and so do slots at equal distances. */
Test(cuda_copy, runs_of_pieces_are_one_call)
{
    static struct batch batch;
    for (uint64_t i = 0; i < 6; i++) {
        batch_add(&batch, LOCKED, 2 * i * PIECE, GPU_1, (32 + i) * PIECE, PIECE, true);
    }
    uint64_t singles = kvk_sim_call_count("cudaMemcpyAsync");
    uint64_t runs = kvk_sim_call_count("cudaMemcpy2DAsync");
    batch_run(&batch);
    everything_is_right(0);
    cr_assert_eq(kvk_sim_call_count("cudaMemcpyAsync"), singles);
    cr_assert_eq(kvk_sim_call_count("cudaMemcpy2DAsync"), runs + 1);
}

/* Two slots with nothing between them but the end of a slab. */
Test(cuda_copy, a_run_ends_where_its_slab_does)
{
    static struct batch batch;
    for (uint64_t i = 0; i < 2; i++) {
        batch_add(&batch, LOCKED, i * PIECE, GPU_0, (39 + i) * PIECE, PIECE, true);
    }
    batch_run(&batch);
    everything_is_right(0);
}

Test(cuda_copy, crowds_of_small_pieces_are_one_launch)
{
    static struct batch batch;
    for (uint64_t i = 0; i < 30; i++) {
        batch_add(&batch, LOCKED, i * PIECE + i, GPU_0, (32 + i) * PIECE + 7, 1 + i * 131, false);
    }
    uint64_t launches = kvk_sim_call_count("cudaLaunchKernel");
    batch_run(&batch);
    everything_is_right(0);
    cr_assert_eq(kvk_sim_call_count("cudaLaunchKernel"), launches + 1);
}

/* ---- Attention ---- */

/* Move the case's pages to a GPU. */
static void pages_to_gpu(struct gpu_case *test, uint32_t gpu, struct kvk_region *region)
{
    uint64_t bytes = gpu_case_page_bytes(&test->attend);
    struct kvk_error error;
    uint64_t slot = 0;
    cr_assert_eq(device->ops->alloc_at(device, gpu, 256 * bytes, bytes, "pages", region, &error),
                 KVK_OK);
    cr_assert_eq(device->ops->back(device, region, 0, 256 * bytes, &error), KVK_OK);
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        for (uint32_t page = 0; page < test->items[i].page_count; page++) {
            if (test->pages[i][page] != NULL) {
                uint8_t *there = kvk_region_at(region, slot++ * bytes);
                copy_one(there, test->pages[i][page], bytes);
                free(test->pages[i][page]);
                test->pages[i][page] = there;
            }
        }
    }
    KVK_ASSERT(slot <= 256);
}

static void case_make(struct gpu_case *test, struct kvk_random *random, enum kvk_format format)
{
    memset(test, 0, sizeof(*test));
    test->attend = (struct kvk_attend){.items = test->items,
                                       .item_count = 3,
                                       .query_heads = 4,
                                       .kv_heads = 2,
                                       .head_size_k = 64,
                                       .head_size_v = 64,
                                       .block_tokens = 16,
                                       .format_q = format,
                                       .format_k = format,
                                       .format_v = format,
                                       .scale = 0.125F,
                                       .causal = true,
                                       .window = format == KVK_FORMAT_FP32 ? 70 : 0,
                                       .sinks = format == KVK_FORMAT_FP32 ? 3 : 0};
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
    for (uint32_t i = 0; i < 3; i++) {
        struct kvk_attend_item *item = &test->items[i];
        item->token_count = 1 + kvk_random_below(random, 300);
        item->query_count = i == 0 ? 1 : (uint32_t)(1 + kvk_random_below(random, 5));
        item->position = item->token_count - 1;
        item->page_count = (uint32_t)((item->token_count + 15) / 16);
        gpu_case_fill_item(test, i, random, i == 2 ? 0.3 : 0);
    }
    gpu_case_expect(test);
}

Test(cuda_copy, attention_matches_the_reference)
{
    static struct gpu_case test;
    static const enum kvk_format formats[] = {KVK_FORMAT_BF16, KVK_FORMAT_FP16, KVK_FORMAT_FP32};
    struct kvk_random random;
    kvk_random_init(&random, 23);
    for (uint32_t round = 0; round < 6; round++) {
        struct kvk_region region;
        struct kvk_error error;
        case_make(&test, &random, formats[round % 3]);
        pages_to_gpu(&test, round % 2, &region);
        gpu_case_spoil(&test);
        enum kvk_status status = device->ops->attend(device, &test.attend, &error);
        cr_assert_eq(status, KVK_OK, "%s", error.text);
        cr_assert(gpu_case_output_error(&test) < 1e-5, "%g", gpu_case_output_error(&test));
        cr_assert(gpu_case_lse_error(&test) < 1e-5);
        for (uint32_t i = 0; i < test.attend.item_count; i++) {
            memset(test.pages[i], 0, test.items[i].page_count * sizeof(uint8_t *));
        }
        gpu_case_free(&test);
        device->ops->free(device, &region);
    }
}

/* A page of the processor's memory is a mistake of ours that is told, not followed. */
Test(cuda_copy, attention_refuses_pages_that_no_gpu_has)
{
    static struct gpu_case test;
    struct kvk_random random;
    struct kvk_error error;
    kvk_random_init(&random, 29);
    case_make(&test, &random, KVK_FORMAT_BF16);
    cr_assert_eq(device->ops->attend(device, &test.attend, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "pages");
    gpu_case_free(&test);
}
