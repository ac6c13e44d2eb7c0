/*
 * What attention loses over compact formats: K and V in bf16 are attended, converted, and attended
 * again, with flat queries, that see many tokens alike, and with peaky ones, that see one. K has
 * channels that are ten times as large as the others, as keys of real models do. The bounds are
 * those of docs/formats.md; the figures found are logged with --verbose.
 */
#include <criterion/criterion.h>
#include <criterion/logging.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/random.h"
#include "gpu/convert.h"
#include "gpu/device.h"
#include "gpu/values.h"

#define TOKENS 1024
#define KV_HEADS 2
#define GROUP 4
#define ROWS (KV_HEADS * GROUP)

static const char *const paths[] = {"plain", "avx2", "avx512", "avx512_bf16"};

struct bound {
    enum kvk_format format;
    double flat_output; /* relative L2 distance */
    double peaky_output;
    double flat_lse; /* absolute */
    double peaky_lse;
};

static const struct bound bounds[] = {
    {KVK_FORMAT_FP8_E4M3, 0.05, 0.2, 0.005, 0.8},
    {KVK_FORMAT_INT8_CHANNEL, 0.015, 0.03, 0.001, 0.15},
    {KVK_FORMAT_INT8_32, 0.015, 0.03, 0.002, 0.2},
};

struct scene {
    struct kvk_attend attend;
    struct kvk_attend_item item;
    const void *pages[TOKENS];
    float *queries; /* [ROWS][head_size] */
    float *output;
    float *lse;
};

static double normal(struct kvk_random *random)
{
    double u = kvk_random_unit(random) + 1e-12;

    return sqrt(-2 * log(u)) * cos(6.283185307179586 * kvk_random_unit(random));
}

static void *room(size_t size_bytes)
{
    void *memory = calloc(1, size_bytes);

    KVK_ASSERT(memory != NULL);
    return memory;
}

static void narrow_to(uint16_t *target, double value)
{
    float single = (float)value;
    uint32_t bits;

    memcpy(&bits, &single, sizeof(bits));
    *target = (uint16_t)(bits >> 16);
}

/* Pages of bf16. */
static void scene_init(struct scene *scene, uint32_t head_size, uint32_t block_tokens,
                       struct kvk_random *random)
{
    uint32_t page_count = (TOKENS + block_tokens - 1) / block_tokens;

    *scene = (struct scene){
        .attend = {.item_count = 1,
                   .query_heads = ROWS,
                   .kv_heads = KV_HEADS,
                   .head_size_k = head_size,
                   .head_size_v = head_size,
                   .block_tokens = block_tokens,
                   .format_q = KVK_FORMAT_FP32,
                   .format_k = KVK_FORMAT_BF16,
                   .format_v = KVK_FORMAT_BF16,
                   .scale = 1.0F / sqrtf((float)head_size),
                   .causal = true},
        .queries = room((size_t)ROWS * head_size * sizeof(float)),
        .output = room((size_t)ROWS * head_size * sizeof(float)),
        .lse = room(ROWS * sizeof(float)),
    };
    const struct kvk_part k = kvk_attend_part(&scene->attend, false);
    const struct kvk_part v = kvk_attend_part(&scene->attend, true);
    scene->attend.v_offset = k.size_bytes;
    for (uint32_t page = 0; page < page_count; page++) {
        uint16_t *values = room(k.size_bytes + v.size_bytes);
        for (uint64_t i = 0; i < (k.size_bytes + v.size_bytes) / 2; i++) {
            bool large = i < k.size_bytes / 2 && i % head_size % 32 == 5;
            narrow_to(&values[i], normal(random) * (large ? 10 : 1));
        }
        scene->pages[page] = values;
    }
    scene->item = (struct kvk_attend_item){.queries = scene->queries,
                                           .output = scene->output,
                                           .lse = scene->lse,
                                           .query_count = 1,
                                           .position = TOKENS - 1,
                                           .token_count = TOKENS,
                                           .pages = scene->pages,
                                           .page_count = page_count};
}

/* Flat: logits about 0.3 apart. Peaky: towards one key, whose logit stands about 12 out. */
static void scene_ask(struct scene *scene, bool peaky, struct kvk_random *random)
{
    const struct kvk_part k = kvk_attend_part(&scene->attend, false);
    uint32_t head_size = scene->attend.head_size_k;

    for (uint32_t row = 0; row < ROWS; row++) {
        uint32_t token = (uint32_t)kvk_random_below(random, TOKENS);
        const void *page = scene->pages[token / k.tokens];
        double length = 0;
        for (uint32_t i = 0; i < head_size; i++) {
            double key = kvk_part_value(&k, page, row / GROUP, token % k.tokens, i);
            length += key * key;
        }
        for (uint32_t i = 0; i < head_size; i++) {
            double key = kvk_part_value(&k, page, row / GROUP, token % k.tokens, i);
            double ask = peaky ? key * 12 * sqrt(head_size) / length : normal(random) * 0.15;
            scene->queries[(size_t)row * head_size + i] = (float)ask;
        }
    }
}

static void scene_narrow(const struct scene *from, enum kvk_format format, struct scene *to)
{
    const struct kvk_convert_kernel *kernel = kvk_convert_find(NULL);
    const struct kvk_part wide_k = kvk_attend_part(&from->attend, false);
    const struct kvk_part wide_v = kvk_attend_part(&from->attend, true);
    struct kvk_error error = {0};

    *to = *from;
    to->attend.format_k = to->attend.format_v = format;
    const struct kvk_part k = kvk_attend_part(&to->attend, false);
    const struct kvk_part v = kvk_attend_part(&to->attend, true);
    to->attend.v_offset = k.size_bytes;
    to->item.pages = to->pages;
    for (uint32_t page = 0; page < from->item.page_count; page++) {
        const uint8_t *source = from->pages[page];
        uint8_t *target = room(k.size_bytes + v.size_bytes);
        cr_assert_eq(kvk_convert_narrow(kernel, &wide_k, source, &k, target, &error), KVK_OK);
        cr_assert_eq(kvk_convert_narrow(kernel, &wide_v, source + wide_k.size_bytes, &v,
                                        target + k.size_bytes, &error),
                     KVK_OK);
        to->pages[page] = target;
    }
}

static void pages_free(const struct scene *scene)
{
    for (uint32_t page = 0; page < scene->item.page_count; page++) {
        free((void *)(uintptr_t)scene->pages[page]);
    }
}

static double distance(const float *a, const float *b, size_t count)
{
    double apart = 0;
    double size = 0;

    for (size_t i = 0; i < count; i++) {
        apart += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(apart / size);
}

/* By the reference (path NULL) or a device; what it is off from `output` and `lse`. */
static void scene_compare(struct scene *scene, const char *path, const float *output,
                          const float *lse, double *output_error, double *lse_error)
{
    size_t count = (size_t)ROWS * scene->attend.head_size_v;
    struct kvk_device *device = NULL;
    struct kvk_error error = {0};

    scene->attend.items = &scene->item;
    if (path == NULL) {
        kvk_attend_reference(&scene->attend);
    } else {
        const struct kvk_device_cpu_options options = {.attend_thread_count = 1, .path = path};
        if (kvk_device_cpu_open(&options, &device, &error) != KVK_OK) {
            *output_error = *lse_error = 0;
            return;
        }
        cr_assert_eq(device->ops->attend(device, &scene->attend, &error), KVK_OK, "%s", error.text);
        device->ops->close(device);
    }
    *output_error = distance(scene->output, output, count);
    *lse_error = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        double off = fabs((double)scene->lse[row] - (double)lse[row]);
        *lse_error = off > *lse_error || isnan(off) ? off : *lse_error;
    }
}

static void check_error(struct scene *scene, const struct bound *bound, bool peaky,
                        const float *output, const float *lse)
{
    double output_limit = peaky ? bound->peaky_output : bound->flat_output;
    double lse_limit = peaky ? bound->peaky_lse : bound->flat_lse;

    for (int p = -1; p < (int)(sizeof(paths) / sizeof(paths[0])); p++) {
        const char *path = p < 0 ? NULL : paths[p];
        double output_error;
        double lse_error;
        scene_compare(scene, path, output, lse, &output_error, &lse_error);
        cr_log_info("%s, %s, head %u, block %u, %s: output %.4f, lse %.4f",
                    kvk_format_name(bound->format), peaky ? "peaky" : "flat",
                    scene->attend.head_size_k, scene->attend.block_tokens,
                    path == NULL ? "reference" : path, output_error, lse_error);
        cr_assert(output_error <= output_limit && lse_error <= lse_limit,
                  "%s, %s, head %u, %s: output off by %g, lse by %g",
                  kvk_format_name(bound->format), peaky ? "peaky" : "flat",
                  scene->attend.head_size_k, path == NULL ? "reference" : path, output_error,
                  lse_error);
    }
}

Test(gpu_format_error, is_within_what_is_documented)
{
    static const uint32_t head_sizes[] = {64, 80, 96, 128, 256};
    static const uint32_t blocks[] = {16, 16, 7, 16, 32};

    for (int shape = 0; shape < 5; shape++) {
        struct kvk_random random;
        struct scene plain;
        kvk_random_init(&random, (uint64_t)shape + 1);
        scene_init(&plain, head_sizes[shape], blocks[shape], &random);
        size_t count = (size_t)ROWS * head_sizes[shape];
        float *output = room(count * sizeof(float));
        float lse[ROWS];
        for (int peaky = 0; peaky < 2; peaky++) {
            scene_ask(&plain, peaky != 0, &random);
            plain.attend.items = &plain.item;
            kvk_attend_reference(&plain.attend);
            memcpy(output, plain.output, count * sizeof(float));
            memcpy(lse, plain.lse, sizeof(lse));
            for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
                struct scene narrow;
                if (!kvk_format_fits(bounds[i].format, head_sizes[shape])) {
                    continue;
                }
                scene_narrow(&plain, bounds[i].format, &narrow);
                check_error(&narrow, &bounds[i], peaky != 0, output, lse);
                pages_free(&narrow);
            }
        }
        pages_free(&plain);
        free(plain.queries);
        free(plain.output);
        free(plain.lse);
        free(output);
    }
}
