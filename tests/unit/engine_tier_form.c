/*
 * A compact format on disk: what goes down is converted, what comes up is widened, and memory has
 * the sealed bytes all the time.
 */
#include "tests/engine_forms.h"

#include "base/bytes.h"
#include "daemon/persist.h"
#include "daemon/scrub.h"
#include "tests/folder.h"

#define HOST KVK_TIER_HOST
#define DISK KVK_TIER_DISK

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
    forms_start(&forms, groups, (const enum kvk_format[GROUPS_MAX]){KVK_FORMAT_NONE}, disks,
                GROUPS_MAX, 0, 8);
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
        cr_assert_eq(attend(&forms, id, 0.01F, before[0]), PROMPT);
        (void)attend(&forms, id, 2.0F, before[1]);
        stage_close(stage, id);
        disk_rounds(&forms.on);
        push_out(&forms, tokens, PROMPT, 5000);
        struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
        cr_assert_eq(reply.disk.restored_tokens, PROMPT);
        for (int peaky = 0; peaky < 2; peaky++) {
            double distance = 0;
            double size = 0;
            (void)attend(&forms, reply.sequence_id, peaky == 0 ? 0.01F : 2.0F, after);
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
    forms_start(&forms, groups, (const enum kvk_format[2]){KVK_FORMAT_NONE}, disks, 2, 0, 8);
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
    folder_remove(folder);
}
