/*
 * A batch of attention to test with: pages of exactly their size, so that a sanitizer sees every
 * byte read past them, and NaN in every slot that no query sees.
 */
#ifndef KVK_TESTS_UNIT_GPU_CASE_H
#define KVK_TESTS_UNIT_GPU_CASE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/random.h"
#include "gpu/attend.h"
#include "gpu/device.h"

/* So many random shapes; fewer under AddressSanitizer, where each takes ten times as long. */
#ifdef __SANITIZE_ADDRESS__
#define GPU_CASE_SEEDS(count) (((count) + 4) / 5)
#else
#define GPU_CASE_SEEDS(count) (count)
#endif

#define GPU_CASE_ITEMS_MAX 20

struct gpu_case {
    struct kvk_attend attend;
    struct kvk_attend_item items[GPU_CASE_ITEMS_MAX];
    uint8_t **pages[GPU_CASE_ITEMS_MAX]; /* what items[].pages points to */
    float *expected[GPU_CASE_ITEMS_MAX]; /* the reference's output and LSE */
    float *expected_lse[GPU_CASE_ITEMS_MAX];
    uint32_t borrowed[GPU_CASE_ITEMS_MAX]; /* pages at its begin that are another item's */
    float slopes[KVK_HEAD_COUNT_MAX];      /* for attend.alibi_slopes and sink_logits, if wanted */
    float sinks[KVK_HEAD_COUNT_MAX];
};

static inline void *gpu_case_alloc(size_t size_bytes)
{
    void *memory = malloc(size_bytes);

    KVK_ASSERT(memory != NULL);
    return memory;
}

/* A value of either sign between 2^-4 and 2, as exact bits of its format; now and then 0. */
static inline void gpu_case_value(struct kvk_random *random, enum kvk_format format, uint8_t *bytes)
{
    uint32_t sign = (uint32_t)kvk_random_below(random, 2);
    uint32_t down = (uint32_t)kvk_random_below(random, 5);
    uint32_t fraction = (uint32_t)kvk_random_next(random);
    uint32_t wide = sign << 31 | (127 - down) << 23 | (fraction & 0x7fffff);
    uint16_t half = (uint16_t)(sign << 15 | (15 - down) << 10 | (fraction & 0x3ff));
    uint16_t brain = (uint16_t)(wide >> 16);

    if (kvk_random_below(random, 50) == 0) {
        wide = half = brain = 0;
    }
    switch (format) {
    case KVK_FORMAT_FP32:
        memcpy(bytes, &wide, sizeof(wide));
        return;
    case KVK_FORMAT_FP16:
        memcpy(bytes, &half, sizeof(half));
        return;
    case KVK_FORMAT_BF16:
        memcpy(bytes, &brain, sizeof(brain));
        return;
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP8_E4M3:
    case KVK_FORMAT_INT8_CHANNEL:
    case KVK_FORMAT_INT8_32:
        break;
    }
    KVK_UNREACHABLE();
}

static inline void gpu_case_values(struct kvk_random *random, enum kvk_format format,
                                   uint8_t *bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        gpu_case_value(random, format, bytes + i * kvk_format_bytes(format));
    }
}

/* The mask rule, written a second time. */
static inline bool gpu_case_sees(const struct kvk_attend *attend, uint64_t position, uint64_t token)
{
    bool past = token <= position || !attend->causal;
    bool near = attend->window == 0 || (int64_t)token > (int64_t)position - attend->window;

    return past && (near || token < attend->sinks);
}

static inline bool gpu_case_seen(const struct gpu_case *test, uint32_t item, uint64_t token)
{
    const struct kvk_attend_item *it = &test->items[item];

    for (uint32_t query = 0; query < it->query_count; query++) {
        if (gpu_case_sees(&test->attend, it->position + query, token)) {
            return true;
        }
    }
    return false;
}

static inline uint64_t gpu_case_k_bytes(const struct kvk_attend *attend)
{
    return kvk_attend_part(attend, false).size_bytes;
}

static inline uint64_t gpu_case_v_bytes(const struct kvk_attend *attend)
{
    return attend->latent ? 0 : kvk_attend_part(attend, true).size_bytes;
}

/* Bytes of a page: it ends where the layer's V (or latent K) ends. */
static inline uint64_t gpu_case_page_bytes(const struct kvk_attend *attend)
{
    return attend->latent ? attend->k_offset + gpu_case_k_bytes(attend)
                          : attend->v_offset + gpu_case_v_bytes(attend);
}

/* A scale that makes stored values about as large as plain ones are. */
static inline void gpu_case_scale(struct kvk_random *random, enum kvk_format format, float largest,
                                  uint8_t *at)
{
    uint8_t wide[4];
    float scale = (float)(0.25 + kvk_random_unit(random)) * 2 / largest;
    uint16_t half = (uint16_t)((15 - 7) << 10 | kvk_random_below(random, 1 << 10)); /* 2^-7 on */

    memcpy(wide, &scale, sizeof(wide));
    if (format == KVK_FORMAT_FP16) {
        memcpy(at, &half, sizeof(half));
    } else if (format == KVK_FORMAT_BF16) {
        memcpy(at, wide + 2, 2);
    } else {
        memcpy(at, wide, sizeof(wide));
    }
}

/* One token of a compact part: its values and every scale that counts for them. */
static inline void gpu_case_fill_compact(struct kvk_random *random, const struct kvk_part *part,
                                         uint8_t *bytes, uint32_t head, uint32_t slot)
{
    uint8_t *row = bytes + ((uint64_t)head * part->tokens + slot) * part->row_bytes;
    uint8_t *scales = bytes + part->scales_offset + head * part->scale_stride;

    for (uint64_t i = 0; i < part->row_bytes; i++) {
        row[i] = (uint8_t)kvk_random_next(random);
        if (part->format == KVK_FORMAT_FP8_E4M3) {
            row[i] = (row[i] & 0x7f) > 0x70 ? 0x38 : row[i]; /* none is NaN */
        }
    }
    switch (part->format) {
    case KVK_FORMAT_FP8_E4M3:
        gpu_case_scale(random, KVK_FORMAT_FP32, 256, scales);
        return;
    case KVK_FORMAT_INT8_CHANNEL:
        if (part->is_value) {
            gpu_case_scale(random, KVK_FORMAT_BF16, 127, scales + (size_t)2 * slot);
            return;
        }
        for (uint32_t i = 0; i < part->head_size; i++) {
            gpu_case_scale(random, KVK_FORMAT_BF16, 127, scales + (size_t)2 * i);
        }
        return;
    case KVK_FORMAT_INT8_32:
        for (uint64_t i = 0; i < part->row_bytes; i += KVK_INT8_32_BYTES) {
            gpu_case_scale(random, KVK_FORMAT_FP16, 127, row + i);
        }
        return;
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        break;
    }
    KVK_UNREACHABLE();
}

/* Write random K and V into one slot, all heads. */
static inline void gpu_case_fill_slot(const struct kvk_attend *attend, struct kvk_random *random,
                                      uint8_t *page, uint32_t slot)
{
    for (int is_value = 0; is_value < (attend->latent ? 1 : 2); is_value++) {
        const struct kvk_part part = kvk_attend_part(attend, is_value != 0);
        uint8_t *bytes = page + (is_value != 0 ? attend->v_offset : attend->k_offset);
        for (uint32_t head = 0; head < attend->kv_heads; head++) {
            uint8_t *row = bytes + ((uint64_t)head * part.tokens + slot) * part.row_bytes;
            if (kvk_format_is_compact(part.format)) {
                gpu_case_fill_compact(random, &part, bytes, head, slot);
            } else {
                gpu_case_values(random, part.format, row, part.head_size);
            }
        }
    }
}

/*
 * Buffers for item `item`, whose counts and positions are set. Pages that no query sees are
 * absent; of the others a share `absent` is, too.
 */
static inline void gpu_case_fill_item(struct gpu_case *test, uint32_t item,
                                      struct kvk_random *random, double absent)
{
    const struct kvk_attend *attend = &test->attend;
    struct kvk_attend_item *it = &test->items[item];
    uint64_t rows = (uint64_t)it->query_count * attend->query_heads;
    uint8_t *queries =
        gpu_case_alloc(rows * attend->head_size_k * kvk_format_bytes(attend->format_q));

    gpu_case_values(random, attend->format_q, queries, rows * attend->head_size_k);
    it->queries = queries;
    it->output = gpu_case_alloc(rows * attend->head_size_v * sizeof(float));
    it->lse = gpu_case_alloc(rows * sizeof(float));
    test->expected[item] = gpu_case_alloc(rows * attend->head_size_v * sizeof(float));
    test->expected_lse[item] = gpu_case_alloc(rows * sizeof(float));
    test->pages[item] = calloc(it->page_count + 1U, sizeof(uint8_t *));
    KVK_ASSERT(test->pages[item] != NULL);
    it->pages = (const void *const *)test->pages[item];
    for (uint32_t i = 0; i < it->page_count; i++) {
        uint8_t *page = NULL;
        bool skip = kvk_random_chance(random, absent);
        for (uint32_t slot = 0; slot < attend->block_tokens && !skip; slot++) {
            uint64_t token = it->first_token + (uint64_t)i * attend->block_tokens + slot;
            if (token >= it->token_count || !gpu_case_seen(test, item, token)) {
                continue;
            }
            if (page == NULL) {
                page = gpu_case_alloc(gpu_case_page_bytes(attend));
                memset(page, 0xff, gpu_case_page_bytes(attend)); /* NaN in every format */
            }
            gpu_case_fill_slot(attend, random, page, slot);
        }
        test->pages[item][i] = page;
    }
}

/* Let item `to` begin with the first `count` pages of item `from`, all slots of them filled. */
static inline void gpu_case_share(struct gpu_case *test, uint32_t from, uint32_t to, uint32_t count,
                                  struct kvk_random *random)
{
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *page = test->pages[from][i];
        if (page == NULL) {
            page = gpu_case_alloc(gpu_case_page_bytes(&test->attend));
            test->pages[from][i] = page;
        }
        for (uint32_t slot = 0; slot < test->attend.block_tokens; slot++) {
            gpu_case_fill_slot(&test->attend, random, page, slot);
        }
        free(test->pages[to][i]);
        test->pages[to][i] = page;
    }
    test->borrowed[to] = count;
}

/* Run the reference and keep what it says. */
static inline void gpu_case_expect(struct gpu_case *test)
{
    kvk_attend_reference(&test->attend);
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        const struct kvk_attend_item *item = &test->items[i];
        uint64_t rows = (uint64_t)item->query_count * test->attend.query_heads;
        memcpy(test->expected[i], item->output, rows * test->attend.head_size_v * sizeof(float));
        memcpy(test->expected_lse[i], item->lse, rows * sizeof(float));
    }
}

static inline void gpu_case_free(struct gpu_case *test)
{
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        for (uint32_t page = test->borrowed[i]; page < test->items[i].page_count; page++) {
            free(test->pages[i][page]);
        }
        free(test->pages[i]);
        free((void *)(uintptr_t)test->items[i].queries);
        free(test->items[i].output);
        free(test->items[i].lse);
        free(test->expected[i]);
        free(test->expected_lse[i]);
    }
}

/* Scribble over the results, so that what is not written shows. */
static inline void gpu_case_spoil(struct gpu_case *test)
{
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        uint64_t rows = (uint64_t)test->items[i].query_count * test->attend.query_heads;
        memset(test->items[i].output, 0xff, rows * test->attend.head_size_v * sizeof(float));
        memset(test->items[i].lse, 0xff, rows * sizeof(float));
    }
}

/* Relative L2 distance of all outputs to what is expected; NaN where one is NaN. */
static inline double gpu_case_output_error(const struct gpu_case *test)
{
    double distance = 0;
    double norm = 0;

    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        uint64_t count = (uint64_t)test->items[i].query_count * test->attend.query_heads *
                         test->attend.head_size_v;
        for (uint64_t j = 0; j < count; j++) {
            double wanted = (double)test->expected[i][j];
            double found = (double)test->items[i].output[j];
            distance += (found - wanted) * (found - wanted);
            norm += wanted * wanted;
        }
    }
    if (distance == 0) {
        return 0;
    }
    return sqrt(distance) / sqrt(norm);
}

/* The largest distance of an LSE to what is expected, relative where that is above 1; infinite
 * where one of the two is -inf alone; NaN where one is NaN. */
static inline double gpu_case_lse_error(const struct gpu_case *test)
{
    double worst = 0;

    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        uint64_t rows = (uint64_t)test->items[i].query_count * test->attend.query_heads;
        for (uint64_t j = 0; j < rows; j++) {
            double wanted = (double)test->expected_lse[i][j];
            double found = (double)test->items[i].lse[j];
            if (wanted == -INFINITY && found == -INFINITY) {
                continue;
            }
            double error = fabs(found - wanted) / fmax(1, fabs(wanted));
            if (isnan(error)) {
                return NAN;
            }
            worst = fmax(worst, error);
        }
    }
    return worst;
}

#endif
