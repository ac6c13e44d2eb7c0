/*
 * A compact format on disk: what goes down is converted, what comes up is widened, and memory has
 * the sealed bytes all the time. Compared with the conversion in plain C, apart from any tier.
 */
#include "tests/engine_disk_stage.h"

#include <math.h>

#include "base/bytes.h"
#include "base/random.h"
#include "daemon/attention.h"
#include "daemon/persist.h"
#include "daemon/report.h"
#include "daemon/scrub.h"
#include "gpu/convert.h"
#include "gpu/values.h"

#define HOST KVK_TIER_HOST
#define DISK KVK_TIER_DISK
#define BLOCK_TOKENS 4
#define PROMPT 16
#define GROUPS_MAX 3

struct forms_stage {
    struct disk_stage on;
    struct kvk_space_request request;
};

static struct kvk_geometry plain_geometry(enum kvk_format own)
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
static void forms_start(struct forms_stage *forms, const struct kvk_geometry *groups,
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

static void one_start(struct forms_stage *forms, enum kvk_format own, enum kvk_format disk,
                      uint32_t device_blocks, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = plain_geometry(own);
    forms_start(forms, &geometry, &disk, 1, device_blocks, host_blocks);
}

/* ---- Values ---- */

static void value_store(enum kvk_format format, uint8_t *at, float value)
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
static void shard_make(const struct kvk_geometry *geometry, uint32_t shard, uint32_t tag,
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
static void shard_round(const struct kvk_geometry *geometry, enum kvk_format format, uint32_t shard,
                        uint8_t *bytes)
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

static enum kvk_status block_write(struct forms_stage *forms, uint64_t sequence, uint32_t group,
                                   uint32_t shard, uint64_t block, const uint8_t *bytes,
                                   uint64_t tokens)
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
static void prompt_write(struct forms_stage *forms, uint64_t sequence, uint64_t first_block,
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

static uint64_t prompt_sealed(struct forms_stage *forms, const uint32_t *tokens, uint64_t count,
                              uint32_t tag, int bad_block)
{
    struct kvk_sequence_reply reply = stage_open(&forms->on.stage, tokens, count);
    prompt_write(forms, reply.sequence_id, reply.cached_tokens / BLOCK_TOKENS, count, tag,
                 bad_block);
    return reply.sequence_id;
}

static void prompt_cache(struct forms_stage *forms, const uint32_t *tokens, uint64_t count,
                         uint32_t tag)
{
    stage_close(&forms->on.stage, prompt_sealed(forms, tokens, count, tag, -1));
}

/* Are the blocks what was written: to the bit, or as they come back from disk? */
static bool prompt_is(struct forms_stage *forms, uint64_t sequence, uint64_t first_block,
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
                if (rounded && forms->request.disk_formats[g] != KVK_FORMAT_NONE) {
                    shard_round(geometry, forms->request.disk_formats[g], s, bytes);
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
static void push_out(struct forms_stage *forms, const uint32_t *tokens, uint64_t count,
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

static void forms_stop(struct forms_stage *forms)
{
    disk_stage_stop(&forms->on);
}

/* ---- There and back ---- */

Test(tier_form, there_and_back_rounds_once)
{
    static const enum kvk_format owns[] = {KVK_FORMAT_BF16, KVK_FORMAT_FP16, KVK_FORMAT_FP32};
    static const enum kvk_format disks[] = {KVK_FORMAT_FP8_E4M3, KVK_FORMAT_INT8_CHANNEL,
                                            KVK_FORMAT_INT8_32};
    for (uint32_t i = 0; i < 9; i++) {
        struct forms_stage forms;
        uint32_t tokens[PROMPT];
        one_start(&forms, owns[i / 3], disks[i % 3], 0, 8);
        struct stage *stage = &forms.on.stage;
        house_tokens(tokens, PROMPT, 1000);
        uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
        disk_rounds(&forms.on);
        cr_assert_eq(stage_stats(stage).disk_narrowed_blocks, 4);
        cr_assert(prompt_is(&forms, id, 0, 4, 7, false), "who holds it has what was sealed");
        stage_close(stage, id);
        for (uint32_t trip = 1; trip <= 3; trip++) {
            push_out(&forms, tokens, PROMPT, 5000 * trip);
            struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
            cr_assert_eq(reply.cached_tokens, PROMPT);
            cr_assert_eq(reply.disk.restored_tokens, PROMPT);
            cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true), "trip %u of %u", trip,
                      i);
            cr_assert_not(prompt_is(&forms, reply.sequence_id, 0, 4, 7, false));
            stage_close(stage, reply.sequence_id);
            disk_rounds(&forms.on);
            cr_assert_eq(stage_stats(stage).disk_widened_blocks, 4 * trip);
            cr_assert_eq(stage_stats(stage).disk_narrowed_blocks, 4, "it is there still");
            cr_assert_eq(stage_stats(stage).checksum_failures, 0);
        }
        forms_stop(&forms);
    }
}

/* Bytes on disk are those of the format, and count as such everywhere. */
Test(tier_form, the_disk_counts_its_own_bytes)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 0, 8);
    struct stage *stage = &forms.on.stage;
    struct kvk_cache *cache = stage->house.cache;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    disk_rounds(&forms.on);
    const struct kvk_group *group = cache->spaces->groups[0];
    uint64_t own = 3 * 4 * BLOCK_TOKENS * (64 + 32) * 2;
    uint64_t compact = 3 * 4 * BLOCK_TOKENS * (64 + 32) / 32 * 34;
    cr_assert_eq(group->forms[HOST].block_bytes, own);
    cr_assert_eq(group->block_bytes, own);
    cr_assert_eq(group->forms[DISK].block_bytes, compact);
    uint64_t slot = 2 * kvk_disk_shard_stride(compact / 2);
    cr_assert_eq(group->tiers[DISK].arena.slot_bytes, slot);
    cr_assert_eq(cache->tiers[DISK].used_bytes, 4 * slot);
    cr_assert_eq(stage_stats(stage).disk_written_bytes, 4 * slot);
    push_out(&forms, tokens, PROMPT, 5000);
    stage_close(stage, stage_open(stage, tokens, PROMPT).sequence_id);
    cr_assert_eq(stage_stats(stage).disk_restored_bytes, 4 * compact);

    struct kvk_space_reply reply;
    STAGE_OK(stage, kvk_space_open(cache, &stage->house.caller, &forms.request, &reply,
                                   &stage->house.error));
    cr_assert_eq(reply.groups[0].block_bytes, own);
    cr_assert_eq(reply.groups[0].disk_format, KVK_FORMAT_INT8_32);
    cr_assert_eq(reply.groups[0].disk_block_bytes, compact);
    forms_stop(&forms);
}

/* Groups of one space may differ: blocks of both are written and read in one batch. */
Test(tier_form, groups_with_and_without)
{
    struct kvk_geometry groups[GROUPS_MAX] = {plain_geometry(KVK_FORMAT_BF16),
                                              plain_geometry(KVK_FORMAT_FP16),
                                              plain_geometry(KVK_FORMAT_FP32)};
    static const enum kvk_format disks[GROUPS_MAX] = {KVK_FORMAT_INT8_CHANNEL, KVK_FORMAT_NONE,
                                                      KVK_FORMAT_FP8_E4M3};
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    forms_start(&forms, groups, disks, GROUPS_MAX, 0, 8);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    disk_rounds(&forms.on);
    cr_assert_eq(stage_stats(stage).disk_written_blocks, 12);
    cr_assert_eq(stage_stats(stage).disk_narrowed_blocks, 8);
    push_out(&forms, tokens, PROMPT, 5000);
    struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
    cr_assert_eq(reply.cached_tokens, PROMPT);
    cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true));
    cr_assert_eq(stage_stats(stage).disk_widened_blocks, 8);
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

/* ---- Attention over what came back ---- */

#define QUERY_HEADS 6

static void attend(struct forms_stage *forms, uint64_t sequence, float size,
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
    cr_assert_eq(item.host_tokens, PROMPT);
}

/* Within the bounds of docs/formats.md, which hold for attention over the compact bytes: widening
 * them adds the rounding of the own format alone. Queries that see all alike, and peaky ones. */
Test(tier_form, attention_stays_within_its_bounds)
{
    static const struct {
        enum kvk_format format;
        double flat, peaky;
    } bounds[] = {{KVK_FORMAT_FP8_E4M3, 0.05, 0.2},
                  {KVK_FORMAT_INT8_CHANNEL, 0.015, 0.03},
                  {KVK_FORMAT_INT8_32, 0.015, 0.03}};
    for (int i = 0; i < 3; i++) {
        struct forms_stage forms;
        uint32_t tokens[PROMPT];
        float before[2][QUERY_HEADS * 32];
        float after[QUERY_HEADS * 32];
        one_start(&forms, KVK_FORMAT_BF16, bounds[i].format, 0, 8);
        struct stage *stage = &forms.on.stage;
        house_tokens(tokens, PROMPT, 1000);
        uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
        attend(&forms, id, 0.01F, before[0]);
        attend(&forms, id, 2.0F, before[1]);
        stage_close(stage, id);
        disk_rounds(&forms.on);
        push_out(&forms, tokens, PROMPT, 5000);
        struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
        cr_assert_eq(reply.disk.restored_tokens, PROMPT);
        for (int peaky = 0; peaky < 2; peaky++) {
            double distance = 0;
            double size = 0;
            attend(&forms, reply.sequence_id, peaky == 0 ? 0.01F : 2.0F, after);
            for (int k = 0; k < QUERY_HEADS * 32; k++) {
                double difference = (double)after[k] - before[peaky][k];
                distance += difference * difference;
                size += (double)before[peaky][k] * before[peaky][k];
            }
            distance = sqrt(distance / size);
            cr_assert_lt(distance, peaky == 0 ? bounds[i].flat : bounds[i].peaky, "%d: %g", i,
                         distance);
            cr_assert_gt(distance, 0, "it did round");
        }
        stage_close(stage, reply.sequence_id);
        forms_stop(&forms);
    }
}

/* ---- What memory promises ---- */

/* A sequence that is swapped out, written to disk meanwhile, and swapped in: all of it to the bit,
 * its tail too. */
Test(tier_form, a_swapped_sequence_comes_back_to_the_bit)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_CHANNEL, 8, 8);
    struct stage *stage = &forms.on.stage;
    struct kvk_swap_reply swap;
    house_tokens(tokens, PROMPT, 1000);
    uint64_t id = prompt_sealed(&forms, tokens, 14, 7, -1);
    STAGE_OK(stage, stage_try_swap_out(stage, id, &swap));
    disk_rounds(&forms.on);
    cr_assert_eq(stage_stats(stage).disk_narrowed_blocks, 3, "the tail is nowhere but in memory");
    STAGE_OK(stage, stage_try_swap_in(stage, id, &swap));
    cr_assert(prompt_is(&forms, id, 0, 3, 7, false));
    struct kvk_read_handle handle;
    const struct kvk_read_request request = {
        .session_id = stage->session, .sequence_id = id, .block = 3};
    const uint8_t *data;
    uint64_t size;
    uint8_t expected[16384];
    STAGE_OK(stage, kvk_read_begin(stage->house.cache, &stage->house.caller, &request, &data, &size,
                                   &handle, &stage->house.error));
    shard_make(&stage->geometry, 0, 7, 3, expected);
    cr_assert_eq(memcmp(data, expected, (size_t)2 * 64 * 2), 0, "two tokens of the first head");
    kvk_read_end(stage->house.cache, &handle);
    stage_close(stage, id);
    forms_stop(&forms);
}

/* What is damaged in memory while it is held is not filled up with something that is only alike. */
Test(tier_form, a_compact_copy_heals_nothing)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 0, 8);
    struct stage *stage = &forms.on.stage;
    struct kvk_cache *cache = stage->house.cache;
    house_tokens(tokens, PROMPT, 1000);
    uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
    disk_rounds(&forms.on);
    uint32_t block = stage_block(stage, id, 2);
    kvk_lock(&cache->lock);
    kvk_block_address(cache, kvk_index_block(cache->index, block), HOST, 0)[5] ^= 1;
    kvk_unlock(&cache->lock);
    while (kvk_scrub_step_unlocked(cache)) {
    }
    cr_assert_eq(stage_stats(stage).checksum_failures, 1);
    cr_assert_eq(stage_stats(stage).healed_blocks, 0);
    stage_close(stage, id);
    struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
    cr_assert_eq(reply.cached_tokens, PROMPT, "once nobody holds it, it comes back from disk");
    cr_assert(prompt_is(&forms, reply.sequence_id, 2, 1, 7, true));
    cr_assert(prompt_is(&forms, reply.sequence_id, 0, 2, 7, false));
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

/* The same tokens computed again beside what came back: no wrong reuse, however coarse the format
 * on disk is. Of other values it is one. */
Test(tier_form, twins_are_compared_as_coarsely_as_the_disk)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_FP32, KVK_FORMAT_FP8_E4M3, 0, 16);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    disk_rounds(&forms.on);
    push_out(&forms, tokens, PROMPT, 5000);
    stage_close(stage, stage_open(stage, tokens, PROMPT).sequence_id);
    for (uint32_t tag = 7; tag <= 8; tag++) {
        const struct kvk_open_request again = {
            .prompt = {.tokens = tokens, .token_count = PROMPT}, .tier = -1, .no_lookup = true};
        struct kvk_sequence_reply reply;
        STAGE_OK(stage, stage_try_open(stage, &again, &reply));
        prompt_write(&forms, reply.sequence_id, 0, PROMPT, tag, -1);
        stage_close(stage, reply.sequence_id);
        cr_assert_gt(stage_stats(stage).twins_compared, 0);
        cr_assert_eq(stage_stats(stage).wrong_reuse > 0, tag == 8, "tag %u", tag);
    }
    forms_stop(&forms);
}

/* ---- What does not fit, and what is damaged ---- */

static double metric_value;
static const char *metric_name;

static void metric_find(void *context, const char *name, double value)
{
    (void)context;
    metric_value = strcmp(name, metric_name) == 0 ? value : metric_value;
}

static double metric(struct stage *stage, const char *name)
{
    metric_name = name;
    metric_value = -1;
    kvk_report_stats(stage->house.cache, metric_find, NULL);
    return metric_value;
}

Test(tier_form, what_is_not_finite_does_not_go_down)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_CHANNEL, 0, 8);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, 2);
    disk_rounds(&forms.on);
    cr_assert_eq(stage->house.cache->spaces->groups[0]->tier_blocks[DISK], 2,
                 "neither it nor what hangs below it");
    cr_assert_geq(metric(stage, "kvkeep_disk_unfit_blocks_total"), 1);
    cr_assert_eq(metric(stage, "kvkeep_disk_narrowed_blocks_total"), 2);
    cr_assert(prompt_is(&forms, id, 0, 2, 7, false));
    stage_close(stage, id);
    forms_stop(&forms);
}

static void flip_on_disk(struct forms_stage *forms, uint32_t slot)
{
    char path[160];
    uint8_t byte = 0;
    struct stage *stage = &forms->on.stage;
    (void)snprintf(path, sizeof(path), "%s/blocks-%016llx-0", forms->on.faulty.folder,
                   (unsigned long long)stage->space);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0, "%s", path);
    off_t offset =
        (off_t)(slot * stage->house.cache->spaces->groups[0]->tiers[DISK].arena.slot_bytes + 1);
    cr_assert_eq(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x40;
    cr_assert_eq(pwrite(fd, &byte, 1, offset), 1);
    (void)close(fd);
}

/* The checksum is of what is stored: damage is found before anything is made of it. */
Test(tier_form, damage_on_disk_is_a_miss)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 0, 8);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
    disk_rounds(&forms.on);
    uint32_t slot =
        kvk_index_block(stage->house.cache->index, stage_block(stage, id, 2))->slot[DISK];
    stage_close(stage, id);
    push_out(&forms, tokens, PROMPT, 5000);
    flip_on_disk(&forms, slot);
    struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
    cr_assert_eq(reply.cached_tokens, 8);
    cr_assert_eq(stage_stats(stage).disk_damaged_blocks, 1);
    cr_assert(prompt_is(&forms, reply.sequence_id, 0, 2, 7, true));
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

/* ---- What may be asked for ---- */

static void assert_refused(const struct kvk_geometry *geometry, enum kvk_format format,
                           const char *words)
{
    struct kvk_error error = {.text = ""};
    cr_assert_eq(kvk_tier_form_check(geometry, format, "groups[1].disk_format", &error),
                 KVK_INVALID);
    cr_assert_str_eq(error.field, "groups[1].disk_format");
    cr_assert_not_null(strstr(error.text, words), "%s", error.text);
}

Test(tier_form, only_what_can_be_converted)
{
    struct kvk_geometry geometry = plain_geometry(KVK_FORMAT_BF16);
    struct kvk_error error;
    for (int format = KVK_FORMAT_NONE; format <= KVK_FORMAT_MAX; format++) {
        if (format == KVK_FORMAT_NONE || kvk_format_is_compact((enum kvk_format)format)) {
            cr_assert_eq(kvk_tier_form_check(&geometry, (enum kvk_format)format, "f", &error),
                         KVK_OK);
        } else {
            assert_refused(&geometry, (enum kvk_format)format, "are compact");
        }
    }
    assert_refused(&geometry, (enum kvk_format)77, "are compact");
    geometry.layout = KVK_LAYOUT_TOKENS_FIRST;
    assert_refused(&geometry, KVK_FORMAT_INT8_32, "heads first");
    geometry = plain_geometry(KVK_FORMAT_INT8_CHANNEL);
    assert_refused(&geometry, KVK_FORMAT_INT8_32, "compact already");
    geometry = plain_geometry(KVK_FORMAT_BF16);
    geometry.head_size_v = 40;
    assert_refused(&geometry, KVK_FORMAT_INT8_32, "32");
    geometry = plain_geometry(KVK_FORMAT_BF16);
    geometry.latent = true;
    geometry.kv_heads = 1;
    geometry.format_v = KVK_FORMAT_NONE;
    assert_refused(&geometry, KVK_FORMAT_INT8_CHANNEL, "view of K");
    cr_assert_eq(kvk_tier_form_check(&geometry, KVK_FORMAT_INT8_32, "f", &error), KVK_OK);
}

Test(tier_form, a_space_keeps_the_format_that_it_has)
{
    struct forms_stage forms;
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 0, 8);
    struct stage *stage = &forms.on.stage;
    struct kvk_space_request other = forms.request;
    struct kvk_space_reply reply;
    other.disk_formats[0] = KVK_FORMAT_NONE;
    STAGE_OK(stage, kvk_space_open(stage->house.cache, &stage->house.caller, &other, &reply,
                                   &stage->house.error));
    cr_assert_eq(reply.space_id, stage->space);
    cr_assert_eq(reply.groups[0].disk_format, KVK_FORMAT_INT8_32, "told as it is");
    other.disk_formats[0] = KVK_FORMAT_FP8_E4M3;
    cr_assert_eq(kvk_space_open(stage->house.cache, &stage->house.caller, &other, &reply,
                                &stage->house.error),
                 KVK_EXISTS);
    cr_assert_str_eq(stage->house.error.field, "groups[0].disk_format");
    other.disk_formats[0] = KVK_FORMAT_BF16;
    cr_assert_eq(kvk_space_open(stage->house.cache, &stage->house.caller, &other, &reply,
                                &stage->house.error),
                 KVK_INVALID);
    cr_assert_str_eq(stage->house.error.field, "groups[0].disk_format");
    forms_stop(&forms);
}

/* ---- As it is recorded ---- */

Test(tier_form, shapes_with_and_without)
{
    struct forms_stage forms;
    uint8_t shape[KVK_SHAPE_SIZE_MAX];
    struct kvk_space_request read;
    const struct kvk_geometry groups[2] = {plain_geometry(KVK_FORMAT_BF16),
                                           plain_geometry(KVK_FORMAT_BF16)};
    static const enum kvk_format disks[2] = {KVK_FORMAT_NONE, KVK_FORMAT_FP8_E4M3};
    forms_start(&forms, groups, disks, 2, 0, 8);
    const struct kvk_space *space = forms.on.stage.house.cache->spaces;
    size_t size = kvk_shape_encode(space, shape);
    cr_assert_eq(kvk_load_le16(shape), 2);
    cr_assert(kvk_shape_decode(shape, size, &read));
    cr_assert_eq(read.disk_formats[0], KVK_FORMAT_NONE);
    cr_assert_eq(read.disk_formats[1], KVK_FORMAT_FP8_E4M3);
    const size_t at = 40 + 64 + 52; /* of the second group's format on disk */
    cr_assert_eq(kvk_load_le32(shape + at), KVK_FORMAT_FP8_E4M3);
    kvk_store_le16(shape, 1);
    cr_assert_not(kvk_shape_decode(shape, size, &read), "version 1 knows of none");
    kvk_store_le16(shape, 3);
    cr_assert_not(kvk_shape_decode(shape, size, &read));
    kvk_store_le16(shape, 2);
    kvk_store_le32(shape + at, 77);
    cr_assert_not(kvk_shape_decode(shape, size, &read), "not a format");
    kvk_store_le32(shape + at, KVK_FORMAT_NONE);
    cr_assert_not(kvk_shape_decode(shape, size, &read), "then it were version 1");
    kvk_store_le16(shape, 1);
    cr_assert(kvk_shape_decode(shape, size, &read), "as it was written before");
    cr_assert_eq(read.disk_formats[1], KVK_FORMAT_NONE);
    forms_stop(&forms);
}

/* An engine in a folder of its own, started again and again. */
static void again_start(struct forms_stage *forms, const char *folder, enum kvk_format disk)
{
    struct stage *stage = &forms->on.stage;
    const struct kvk_geometry geometry = plain_geometry(KVK_FORMAT_BF16);
    house_init(&stage->house);
    struct kvk_config *config = &stage->house.config;
    (void)snprintf(config->durable_folder, sizeof(config->durable_folder), "%s", folder);
    config->catalogue_bytes = UINT64_C(64) << 20;
    config->keeper = KVK_CONFIG_KEEPER_NO;
    config->disk_bytes = UINT64_C(4) << 20;
    config->disk_admit_uses = 1;
    config->disk_depth = 8;
    stage->geometry = geometry;
    stage->block_bytes = kvk_geometry_block_bytes(&geometry);
    stage->tables = (struct kvk_tables){.part_count = 0};
    const struct house_options options = {.host_bytes = 8 * stage->block_bytes,
                                          .manual_clock = true};
    house_start(&stage->house, &options);
    forms->request = (struct kvk_space_request){
        .block_tokens = BLOCK_TOKENS,
        .group_count = 1,
        .groups = {geometry},
        .disk_formats = {disk},
    };
    forms->request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){(const uint8_t *)"m", 1};
    struct kvk_space_reply reply;
    STAGE_OK(stage, kvk_space_open(stage->house.cache, &stage->house.caller, &forms->request,
                                   &reply, &stage->house.error));
    stage->space = reply.space_id;
    stage->session = house_session(&stage->house);
    forms->request.disk_formats[0] = reply.groups[0].disk_format;
    stage_check(stage);
}

/* The next daemon finds blocks as they lie there, in the format that the space was opened with,
 * whether whoever opens it again says so or not. */
Test(tier_form, restarts_keep_the_format)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    char folder[64];
    (void)snprintf(folder, sizeof(folder), "/tmp/kvkeep-form-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    house_tokens(tokens, PROMPT, 1000);
    kvk_log_set_level(KVK_LOG_ERROR);
    again_start(&forms, folder, KVK_FORMAT_INT8_CHANNEL);
    prompt_cache(&forms, tokens, PROMPT, 7);
    disk_rounds(&forms.on);
    cr_assert_eq(stage_stats(&forms.on.stage).disk_narrowed_blocks, 4);
    stage_stop(&forms.on.stage);
    for (int start = 0; start < 3; start++) {
        again_start(&forms, folder, start == 1 ? KVK_FORMAT_INT8_CHANNEL : KVK_FORMAT_NONE);
        struct stage *stage = &forms.on.stage;
        cr_assert_eq(forms.request.disk_formats[0], KVK_FORMAT_INT8_CHANNEL);
        cr_assert_eq(stage_stats(stage).disk_returned_blocks, 4);
        struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
        cr_assert_eq(reply.cached_tokens, PROMPT);
        cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true));
        cr_assert_eq(stage_stats(stage).disk_damaged_blocks, 0);
        stage_close(stage, reply.sequence_id);
        disk_rounds(&forms.on);
        cr_assert_eq(stage_stats(stage).disk_narrowed_blocks, 0, "not again");
        stage_stop(stage);
    }
    (void)nftw(folder, faulty_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
