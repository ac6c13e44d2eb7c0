/*
 * A stage for tests of formats by tier: spaces whose blocks have finite values that say whose they
 * are, read back and compared with what the conversion in plain C makes of them, apart from any
 * tier.
 */
#ifndef KVK_TESTS_ENGINE_FORMS_H
#define KVK_TESTS_ENGINE_FORMS_H

#include "tests/engine_disk_stage.h"

#include <math.h>

#include "base/random.h"
#include "daemon/attention.h"
#include "daemon/report.h"
#include "gpu/convert.h"

#define BLOCK_TOKENS 4
#define PROMPT 16
#define GROUPS_MAX 3

struct forms_stage {
    struct disk_stage on;
    struct kvk_space_request request;
};

static inline struct kvk_geometry plain_geometry(enum kvk_format own)
{
    return (struct kvk_geometry){
        .layers = 3,
        .kv_heads = 4,
        .head_size_k = 64,
        .head_size_v = 32,
        .block_tokens = BLOCK_TOKENS,
        .format_k = own,
        .format_v = own,
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 2,
        .pipeline_shards = 1,
    };
}

/* `blocks` of host memory and 64 of disk, in whatever the groups are. */
static inline void forms_start(struct forms_stage *forms, const struct kvk_geometry *groups,
                               const enum kvk_format *host_formats,
                               const enum kvk_format *disk_formats, uint32_t group_count,
                               uint32_t device_blocks, uint32_t host_blocks)
{
    struct stage *stage = &forms->on.stage;
    disk_stage_init(&forms->on);
    forms->request =
        (struct kvk_space_request){.block_tokens = BLOCK_TOKENS, .group_count = group_count};
    forms->request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){(const uint8_t *)"m", 1};
    stage->geometry = groups[0];
    stage->block_bytes = 0;
    stage->tables = (struct kvk_tables){.part_count = 0};
    for (uint32_t g = 0; g < group_count; g++) {
        forms->request.groups[g] = groups[g];
        forms->request.host_formats[g] = host_formats[g];
        forms->request.disk_formats[g] = disk_formats[g];
        stage->block_bytes += kvk_geometry_block_bytes(&groups[g]);
    }
    const struct house_options options = {
        .device_bytes = device_blocks * stage->block_bytes,
        .host_bytes = host_blocks * stage->block_bytes,
        .disk = forms->on.faulty.disk,
        .disk_bytes = UINT64_C(8) << 20,
        .manual_clock = true,
    };
    house_start(&stage->house, &options);
    struct kvk_space_reply reply;
    STAGE_OK(stage, kvk_space_open(stage->house.cache, &stage->house.caller, &forms->request,
                                   &reply, &stage->house.error));
    stage->space = reply.space_id;
    stage->session = house_session(&stage->house);
}

static inline void one_start(struct forms_stage *forms, enum kvk_format own, enum kvk_format disk,
                             uint32_t device_blocks, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = plain_geometry(own);
    const enum kvk_format none = KVK_FORMAT_NONE;
    forms_start(forms, &geometry, &none, &disk, 1, device_blocks, host_blocks);
}

/* ---- Values ---- */

static inline void value_store(enum kvk_format format, uint8_t *at, float value)
{
    if (format == KVK_FORMAT_FP32) {
        memcpy(at, &value, sizeof(value));
    } else if (format == KVK_FORMAT_BF16) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(at, &half, sizeof(half));
    } else {
        /* Cut off, and nothing below the normal ones. */
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        uint32_t exponent = bits >> 23 & 0xff;
        uint16_t half = (uint16_t)(bits >> 16 & 0x8000);
        if (isnan(value)) {
            half = 0x7e00;
        } else if (exponent > 112) {
            half = (uint16_t)(half | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
        }
        memcpy(at, &half, sizeof(half));
    }
}

/* What a shard of a block of a prompt is filled with: heads of very different size. */
static inline void shard_make(const struct kvk_geometry *geometry, uint32_t shard, uint32_t tag,
                              uint64_t block, uint8_t *bytes)
{
    struct kvk_random random;
    kvk_random_init(&random, tag * UINT64_C(1000003) + block * 64 + shard);
    size_t size = kvk_format_bytes(geometry->format_k);
    uint64_t count = kvk_geometry_shard_bytes(geometry, shard) / size;
    for (uint64_t i = 0; i < count; i++) {
        float unit = (float)kvk_random_below(&random, 20001) / 10000.0F - 1.0F;
        value_store(geometry->format_k, bytes + i * size,
                    unit * ldexpf(1.0F, (int)(i / 37 % 9) - 4));
    }
}

/* The same as it comes back from a compact format, by the conversion in plain C. */
static inline void shard_round(const struct kvk_geometry *geometry, enum kvk_format format,
                               uint32_t shard, uint8_t *bytes)
{
    struct kvk_geometry narrow = *geometry;
    struct kvk_error error;
    const struct kvk_convert_kernel *plain = kvk_convert_find("plain");
    narrow.format_k = narrow.format_v = format;
    uint8_t *stored = malloc(kvk_geometry_shard_bytes(&narrow, shard));
    cr_assert_not_null(stored);
    cr_assert_eq(kvk_convert_shard_narrow(plain, geometry, &narrow, shard, bytes, stored, &error),
                 KVK_OK, "%s", error.text);
    kvk_convert_shard_widen(plain, &narrow, geometry, shard, stored, bytes);
    free(stored);
}

static inline enum kvk_status block_write(struct forms_stage *forms, uint64_t sequence,
                                          uint32_t group, uint32_t shard, uint64_t block,
                                          const uint8_t *bytes, uint64_t tokens)
{
    struct stage *stage = &forms->on.stage;
    const struct kvk_geometry *geometry = &forms->request.groups[group];
    uint64_t size = kvk_geometry_shard_bytes(geometry, shard);
    if (tokens == BLOCK_TOKENS) {
        const struct kvk_write_piece piece = {.group = group,
                                              .rank = shard,
                                              .block = block,
                                              .data = bytes,
                                              .size_bytes = size,
                                              .checksum = kvk_checksum(bytes, size)};
        return kvk_sequence_write(stage->house.cache, &stage->house.caller, stage->session,
                                  sequence, &piece, &stage->house.error);
    }
    struct stage_row rows[256];
    uint32_t count = stage_rows(geometry, shard, rows);
    for (uint32_t r = 0; r < count; r++) {
        const struct kvk_write_piece piece = {
            .group = group,
            .rank = shard,
            .block = block,
            .offset = rows[r].offset,
            .data = bytes + rows[r].offset,
            .size_bytes = tokens * rows[r].token_bytes,
            .checksum = kvk_checksum(bytes + rows[r].offset, tokens * rows[r].token_bytes)};
        enum kvk_status status =
            kvk_sequence_write(stage->house.cache, &stage->house.caller, stage->session, sequence,
                               &piece, &stage->house.error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* Write the prompt's tokens from `first_block` on, and seal. `bad_block`: has a NaN; -1: none. */
static inline void prompt_write(struct forms_stage *forms, uint64_t sequence, uint64_t first_block,
                                uint64_t tokens, uint32_t tag, int bad_block)
{
    struct stage *stage = &forms->on.stage;
    uint8_t *bytes = malloc(1 << 20);
    for (uint64_t b = first_block; b * BLOCK_TOKENS < tokens; b++) {
        uint64_t left = tokens - b * BLOCK_TOKENS;
        for (uint32_t g = 0; g < forms->request.group_count; g++) {
            const struct kvk_geometry *geometry = &forms->request.groups[g];
            for (uint32_t s = 0; s < kvk_geometry_shard_count(geometry); s++) {
                shard_make(geometry, s, tag + g, b, bytes);
                if ((int)b == bad_block && s == 1) {
                    value_store(geometry->format_k, bytes, NAN);
                }
                STAGE_OK(stage, block_write(forms, sequence, g, s, b, bytes,
                                            left < BLOCK_TOKENS ? left : BLOCK_TOKENS));
            }
        }
    }
    free(bytes);
    house_seal(&stage->house, stage->session, sequence, tokens);
}

static inline uint64_t prompt_sealed(struct forms_stage *forms, const uint32_t *tokens,
                                     uint64_t count, uint32_t tag, int bad_block)
{
    struct kvk_sequence_reply reply = stage_open(&forms->on.stage, tokens, count);
    prompt_write(forms, reply.sequence_id, reply.cached_tokens / BLOCK_TOKENS, count, tag,
                 bad_block);
    return reply.sequence_id;
}

static inline void prompt_cache(struct forms_stage *forms, const uint32_t *tokens, uint64_t count,
                                uint32_t tag)
{
    stage_close(&forms->on.stage, prompt_sealed(forms, tokens, count, tag, -1));
}

/* Are the blocks what was written: to the bit, or as they come back from disk? */
static inline bool prompt_is(struct forms_stage *forms, uint64_t sequence, uint64_t first_block,
                             uint64_t block_count, uint32_t tag, bool rounded)
{
    struct stage *stage = &forms->on.stage;
    uint8_t *bytes = malloc(1 << 20);
    bool same = true;
    for (uint64_t b = first_block; b < first_block + block_count; b++) {
        for (uint32_t g = 0; g < forms->request.group_count; g++) {
            const struct kvk_geometry *geometry = &forms->request.groups[g];
            for (uint32_t s = 0; s < kvk_geometry_shard_count(geometry); s++) {
                const struct kvk_read_request request = {.session_id = stage->session,
                                                         .sequence_id = sequence,
                                                         .group = g,
                                                         .rank = s,
                                                         .block = b};
                const uint8_t *data;
                uint64_t size;
                struct kvk_read_handle handle;
                STAGE_OK(stage, kvk_read_begin(stage->house.cache, &stage->house.caller, &request,
                                               &data, &size, &handle, &stage->house.error));
                shard_make(geometry, s, tag + g, b, bytes);
                enum kvk_format format = forms->request.disk_formats[g] != KVK_FORMAT_NONE
                                             ? forms->request.disk_formats[g]
                                             : forms->request.host_formats[g];
                if (rounded && format != KVK_FORMAT_NONE) {
                    shard_round(geometry, format, s, bytes);
                }
                cr_assert_eq(size, kvk_geometry_shard_bytes(geometry, s));
                same = same && memcmp(data, bytes, size) == 0;
                kvk_read_end(stage->house.cache, &handle);
            }
        }
    }
    free(bytes);
    return same;
}

/* Other prompts, until nothing of this one is in memory. */
static inline void push_out(struct forms_stage *forms, const uint32_t *tokens, uint64_t count,
                            uint32_t first)
{
    struct stage *stage = &forms->on.stage;
    uint32_t uses = stage->house.config.disk_admit_uses;
    uint32_t other[BLOCK_TOKENS];
    stage->house.config.disk_admit_uses = 1000; /* what pushes it out is not to follow it */
    for (uint32_t i = 0; i < 200; i++) {
        if (disk_tokens(&forms->on, tokens, count) == count) {
            stage->house.config.disk_admit_uses = uses;
            return;
        }
        house_tokens(other, BLOCK_TOKENS, first + 16 * i);
        prompt_cache(forms, other, BLOCK_TOKENS, 99);
    }
    cr_assert(false, "it stays in memory");
}

static inline void forms_stop(struct forms_stage *forms)
{
    disk_stage_stop(&forms->on);
}

/* ---- Attention over a prompt: how many tokens of it were attended on the host ---- */

#define QUERY_HEADS 6

static inline uint64_t attend(struct forms_stage *forms, uint64_t sequence, float size,
                              float output[QUERY_HEADS * 32])
{
    struct stage *stage = &forms->on.stage;
    struct kvk_random random;
    float queries[QUERY_HEADS * 64];
    float lse[QUERY_HEADS];
    kvk_random_init(&random, 5);
    for (int i = 0; i < QUERY_HEADS * 64; i++) {
        queries[i] = size * (float)(kvk_random_unit(&random) * 2 - 1);
    }
    struct kvk_attention_item item = {.sequence_id = sequence,
                                      .position = PROMPT,
                                      .query_count = 1,
                                      .queries = (const uint8_t *)queries,
                                      .queries_size = sizeof(queries),
                                      .output = output,
                                      .lse = lse};
    struct kvk_attention_request request = {.session_id = stage->session,
                                            .layer = 1,
                                            .rank = 1,
                                            .query_heads = QUERY_HEADS,
                                            .format = KVK_FORMAT_FP32,
                                            .scale = 0.125F,
                                            .causal = true,
                                            .items = &item,
                                            .item_count = 1};
    struct kvk_caller caller = stage->house.caller;
    caller.may_block = true;
    STAGE_OK(stage, kvk_attention_run(stage->house.cache, &caller, &request, &stage->house.error));
    return item.host_tokens;
}

/* ---- Figures ---- */

static double metric_value;
static const char *metric_name;

static inline void metric_find(void *context, const char *name, double value)
{
    (void)context;
    metric_value = strcmp(name, metric_name) == 0 ? value : metric_value;
}

static inline double metric(struct stage *stage, const char *name)
{
    metric_name = name;
    metric_value = -1;
    kvk_report_stats(stage->house.cache, metric_find, NULL);
    return metric_value;
}

#endif
