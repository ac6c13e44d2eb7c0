/*
 * A compact host tier below a device tier that is not: what nobody holds goes down rounded once,
 * is attended there as it is, and comes up the same each time; who holds a block keeps the sealed
 * bytes, whatever is wanted of the room.
 */
#include "tests/engine_forms.h"

#include "daemon/persist.h"
#include "daemon/public.h"
#include "daemon/scrub.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST
#define DISK KVK_TIER_DISK
#define OWN_BLOCKS 4 /* of a prompt */

static void host_start(struct forms_stage *forms, enum kvk_format own, enum kvk_format host,
                       uint32_t device_blocks, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = plain_geometry(own);
    const enum kvk_format none = KVK_FORMAT_NONE;
    forms_start(forms, &geometry, &host, &none, 1, device_blocks, host_blocks);
    forms->on.stage.house.config.disk_admit_uses = 1000;
    forms->on.stage.house.config.device_free_percent = 0;
}

static struct kvk_lookup_reply look(struct forms_stage *forms, const uint32_t *tokens,
                                    uint64_t count)
{
    struct stage *stage = &forms->on.stage;
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = stage->space,
                                               .prompt = {.tokens = tokens, .token_count = count}};
    STAGE_OK(stage, kvk_lookup(stage->house.cache, &stage->house.caller, &request, &reply,
                               &stage->house.error));
    return reply;
}

/* Others come, until nothing of the prompt is on the device. */
static void push_down(struct forms_stage *forms, const uint32_t *tokens, uint32_t first)
{
    uint32_t other[BLOCK_TOKENS];
    for (uint32_t i = 0; i < 64; i++) {
        struct kvk_lookup_reply reply = look(forms, tokens, PROMPT);
        if (reply.device_tokens == 0) {
            cr_assert_eq(reply.host_tokens, PROMPT);
            return;
        }
        house_tokens(other, BLOCK_TOKENS, first + 16 * i);
        prompt_cache(forms, other, BLOCK_TOKENS, 99);
        stage_check(&forms->on.stage);
    }
    cr_assert(false, "it stays on the device");
}

Test(host_form, down_and_up_rounds_once)
{
    static const enum kvk_format owns[] = {KVK_FORMAT_BF16, KVK_FORMAT_FP16, KVK_FORMAT_FP32};
    static const enum kvk_format hosts[] = {KVK_FORMAT_FP8_E4M3, KVK_FORMAT_INT8_CHANNEL,
                                            KVK_FORMAT_INT8_32};
    for (uint32_t i = 0; i < 9; i++) {
        struct forms_stage forms;
        uint32_t tokens[PROMPT];
        host_start(&forms, owns[i / 3], hosts[i % 3], 6, 32);
        struct stage *stage = &forms.on.stage;
        house_tokens(tokens, PROMPT, 1000);
        uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
        cr_assert(prompt_is(&forms, id, 0, 4, 7, false));
        stage_close(stage, id);
        uint64_t narrowed = 0;
        for (uint32_t trip = 1; trip <= 3; trip++) {
            push_down(&forms, tokens, 5000 * trip);
            struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
            cr_assert_eq(reply.cached_tokens, PROMPT);
            cr_assert_eq(look(&forms, tokens, PROMPT).device_tokens, PROMPT);
            cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true), "trip %u of %u", trip,
                      i);
            cr_assert_not(prompt_is(&forms, reply.sequence_id, 0, 4, 7, false));
            stage_close(stage, reply.sequence_id);
            stage_check(stage);
            cr_assert_eq(stage_stats(stage).host_widened_blocks, 4 * trip);
            narrowed = stage_stats(stage).host_narrowed_blocks - narrowed;
        }
        cr_assert_eq(stage_stats(stage).checksum_failures, 0);
        cr_assert_eq(metric(stage, "kvkeep_host_widened_blocks_total"), 12);
        cr_assert_geq(metric(stage, "kvkeep_host_narrowed_blocks_total"), 4);
        forms_stop(&forms);
    }
}

/* The tier holds as many as fit in the format, and counts them so. */
Test(host_form, the_tier_counts_its_own_bytes)
{
    struct forms_stage forms;
    uint32_t tokens[BLOCK_TOKENS];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 2, 17);
    struct stage *stage = &forms.on.stage;
    const struct kvk_cache *cache = stage->house.cache;
    for (uint32_t i = 0; i < 80; i++) {
        house_tokens(tokens, BLOCK_TOKENS, 1000 + 16 * i);
        prompt_cache(&forms, tokens, BLOCK_TOKENS, i);
        stage_check(stage);
    }
    const struct kvk_group *group = cache->spaces->groups[0];
    uint64_t own = group->block_bytes;
    cr_assert_eq(group->forms[DEVICE].block_bytes, own);
    cr_assert_eq(group->forms[HOST].block_bytes, own / 64 * 34);
    cr_assert_eq(group->forms[DISK].block_bytes, own / 64 * 34, "and so has the disk");
    cr_assert_eq(group->tiers[HOST].arena.slot_bytes, own / 64 * 34);
    cr_assert_eq(group->tier_blocks[HOST], 17 * 64 / 34, "32 in the room of 17");
    cr_assert_eq(cache->tiers[HOST].used_bytes, 32 * own / 64 * 34);
    cr_assert_geq(group->tier_blocks[DEVICE], 1);
    forms_stop(&forms);
}

/* ---- Who holds a block ---- */

/* A lease without a copy pin: others want the room, and its bytes stay those that were sealed. */
Test(host_form, what_is_held_is_not_rounded)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    uint32_t other[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_FP8_E4M3, 6, 32);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    struct kvk_pin_reply lease = stage_pin(stage, tokens, PROMPT, 100000);
    for (uint32_t i = 0; i < 20; i++) {
        house_tokens(other, BLOCK_TOKENS, 5000 + 16 * i);
        prompt_cache(&forms, other, BLOCK_TOKENS, 99);
        stage_check(stage);
    }
    cr_assert_eq(look(&forms, tokens, PROMPT).device_tokens, PROMPT);
    cr_assert_eq(house_bound(&stage->house, DEVICE), 4 * stage->block_bytes, "it cannot leave");
    struct kvk_open_request large = {.prompt = {.tokens = other, .token_count = PROMPT},
                                     .tier = -1};
    struct kvk_sequence_reply reply;
    house_tokens(other, PROMPT, 9000);
    cr_assert_eq(stage_try_open(stage, &large, &reply), KVK_EXHAUSTED, "no more than two fit");
    struct kvk_sequence_reply mine = stage_open(stage, tokens, PROMPT);
    cr_assert(prompt_is(&forms, mine.sequence_id, 0, 4, 7, false));
    stage_close(stage, mine.sequence_id);
    const uint64_t leases[1] = {lease.lease_id};
    uint64_t blocks;
    STAGE_OK(stage, stage_try_release(stage, leases, 1, &blocks));
    push_down(&forms, tokens, 20000);
    forms_stop(&forms);
}

/* A lease on what lies below: another sequence brings it up and closes, others want the room; it
 * reads the same bytes all the time. */
Test(host_form, a_lease_below_reads_the_same_all_the_time)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_CHANNEL, 6, 32);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    push_down(&forms, tokens, 5000);
    struct kvk_pin_reply lease = stage_pin(stage, tokens, PROMPT, 100000);
    cr_assert_eq(lease.cached_tokens, PROMPT);
    uint8_t *expected = malloc(1 << 20);
    for (uint32_t round = 0; round < 4; round++) {
        for (uint32_t b = 0; b < OWN_BLOCKS; b++) {
            const struct kvk_read_request request = {.session_id = stage->session,
                                                     .lease_id = lease.lease_id,
                                                     .rank = b % 2,
                                                     .block = b};
            const uint8_t *data;
            uint64_t size;
            struct kvk_read_handle handle;
            STAGE_OK(stage, kvk_read_begin(stage->house.cache, &stage->house.caller, &request,
                                           &data, &size, &handle, &stage->house.error));
            shard_make(&stage->geometry, b % 2, 7, b, expected);
            shard_round(&stage->geometry, KVK_FORMAT_INT8_CHANNEL, b % 2, expected);
            cr_assert_eq(size, kvk_geometry_shard_bytes(&stage->geometry, b % 2));
            cr_assert_eq(memcmp(data, expected, size), 0, "round %u block %u", round, b);
            kvk_read_end(stage->house.cache, &handle);
        }
        struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
        cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true));
        stage_close(stage, reply.sequence_id);
        uint32_t other[BLOCK_TOKENS];
        for (uint32_t i = 0; i < 8; i++) {
            house_tokens(other, BLOCK_TOKENS, 30000 + 1000 * round + 16 * i);
            prompt_cache(&forms, other, BLOCK_TOKENS, 99);
            stage_check(stage);
        }
    }
    free(expected);
    forms_stop(&forms);
}

/* ---- Where it lies ---- */

Test(host_form, it_is_attended_as_it_is)
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
        float below[2][QUERY_HEADS * 32];
        float above[2][QUERY_HEADS * 32];
        host_start(&forms, KVK_FORMAT_BF16, bounds[i].format, 6, 32);
        struct stage *stage = &forms.on.stage;
        house_tokens(tokens, PROMPT, 1000);
        uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
        cr_assert_eq(attend(&forms, id, 0.01F, before[0]), 0);
        (void)attend(&forms, id, 2.0F, before[1]);
        stage_close(stage, id);
        push_down(&forms, tokens, 5000);
        const struct kvk_open_request stays = {
            .prompt = {.tokens = tokens, .token_count = PROMPT}, .tier = -1, .leave_on_host = true};
        struct kvk_sequence_reply reply;
        STAGE_OK(stage, stage_try_open(stage, &stays, &reply));
        cr_assert_eq(attend(&forms, reply.sequence_id, 0.01F, below[0]), PROMPT, "on the host");
        cr_assert_eq(attend(&forms, reply.sequence_id, 2.0F, below[1]), PROMPT);
        cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true), "ReadBlocks widens");
        stage_close(stage, reply.sequence_id);
        cr_assert_eq(stage_stats(stage).host_widened_blocks, 0);
        reply = stage_open(stage, tokens, PROMPT);
        cr_assert_eq(attend(&forms, reply.sequence_id, 0.01F, above[0]), 0, "on the device");
        (void)attend(&forms, reply.sequence_id, 2.0F, above[1]);
        stage_close(stage, reply.sequence_id);
        for (int peaky = 0; peaky < 2; peaky++) {
            double far[2] = {0, 0};
            double size = 0;
            for (int k = 0; k < QUERY_HEADS * 32; k++) {
                double was = before[peaky][k];
                far[0] += (below[peaky][k] - was) * (below[peaky][k] - was);
                far[1] += ((double)below[peaky][k] - above[peaky][k]) *
                          ((double)below[peaky][k] - above[peaky][k]);
                size += was * was;
            }
            double bound = peaky == 0 ? bounds[i].flat : bounds[i].peaky;
            cr_assert_lt(sqrt(far[0] / size), bound, "%d: %g", i, sqrt(far[0] / size));
            cr_assert_gt(far[0], 0, "it did round");
            cr_assert_lt(sqrt(far[1] / size), bound, "as what is widened, but for its rounding");
        }
        forms_stop(&forms);
    }
}

/* Where a device apart is quicker, it gets the blocks for the call in the format that they have. */
Test(host_form, or_brought_to_the_device_as_it_is)
{
    for (enum kvk_format format = KVK_FORMAT_FP8_E4M3; format <= KVK_FORMAT_INT8_32; format++) {
        struct forms_stage forms;
        uint32_t tokens[PROMPT];
        float below[QUERY_HEADS * 32];
        float brought[QUERY_HEADS * 32];
        host_start(&forms, KVK_FORMAT_BF16, format, 6, 32);
        struct stage *stage = &forms.on.stage;
        struct kvk_cache *cache = stage->house.cache;
        house_tokens(tokens, PROMPT, 1000);
        prompt_cache(&forms, tokens, PROMPT, 7);
        push_down(&forms, tokens, 5000);
        const struct kvk_open_request stays = {
            .prompt = {.tokens = tokens, .token_count = PROMPT}, .tier = -1, .leave_on_host = true};
        struct kvk_sequence_reply reply;
        STAGE_OK(stage, stage_try_open(stage, &stays, &reply));
        cr_assert_eq(attend(&forms, reply.sequence_id, 1.0F, below), PROMPT);
        /* The mover learns its rate from large jobs. */
        uint64_t size = UINT64_C(16) << 20;
        uint8_t *memory = calloc(2, size);
        const struct kvk_copy copy = {
            .target = memory, .source = memory + size, .size_bytes = size};
        STAGE_OK(stage, kvk_mover_copy(cache->mover, cache->tiers[HOST].device, &copy, 1,
                                       &stage->house.error));
        free(memory);
        stage->house.config.device_kind = KVK_DEVICE_CUDA;
        cache->attention.host_rate = 1000;
        cache->attention.device_rate = UINT64_C(1000000000000);
        cr_assert_eq(attend(&forms, reply.sequence_id, 1.0F, brought), PROMPT);
        cr_assert_eq(stage_stats(stage).attended_brought_in, 1);
        stage->house.config.device_kind = KVK_DEVICE_CPU;
        for (int k = 0; k < QUERY_HEADS * 32; k++) {
            cr_assert_float_eq(brought[k], below[k], 1e-5F);
        }
        stage_close(stage, reply.sequence_id);
        forms_stop(&forms);
    }
}

/* With the disk below: what the host has goes there as it is, and comes back into it so. */
Test(host_form, the_disk_has_the_same)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_CHANNEL, 6, 4);
    struct stage *stage = &forms.on.stage;
    stage->house.config.disk_admit_uses = 1;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    push_down(&forms, tokens, 5000);
    disk_rounds(&forms.on);
    cr_assert_geq(stage_stats(stage).disk_written_blocks, 4);
    push_out(&forms, tokens, PROMPT, 40000);
    struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
    cr_assert_eq(reply.cached_tokens, PROMPT);
    cr_assert_eq(reply.disk.restored_tokens, PROMPT);
    cr_assert(prompt_is(&forms, reply.sequence_id, 0, 4, 7, true));
    cr_assert_eq(stage_stats(stage).disk_widened_blocks, 0, "to the host as it was");
    cr_assert_eq(stage_stats(stage).host_widened_blocks, 4, "and from there to the device");
    cr_assert_eq(stage_stats(stage).disk_damaged_blocks + stage_stats(stage).checksum_failures, 0);
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

/* ---- What goes wrong ---- */

Test(host_form, damage_below_is_a_miss)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 6, 32);
    struct stage *stage = &forms.on.stage;
    struct kvk_cache *cache = stage->house.cache;
    house_tokens(tokens, PROMPT, 1000);
    uint64_t id = prompt_sealed(&forms, tokens, PROMPT, 7, -1);
    uint32_t third = stage_block(stage, id, 2);
    stage_close(stage, id);
    push_down(&forms, tokens, 5000);
    kvk_lock(&cache->lock);
    kvk_block_address(cache, kvk_index_block(cache->index, third), HOST, 1)[77] ^= 4;
    kvk_unlock(&cache->lock);
    struct kvk_sequence_reply reply = stage_open(stage, tokens, PROMPT);
    cr_assert_leq(reply.cached_tokens, 8);
    cr_assert_eq(stage_stats(stage).checksum_failures, 1);
    cr_assert(prompt_is(&forms, reply.sequence_id, 0, reply.cached_tokens / 4, 7, true));
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

/* A block with a NaN has no such form: it goes where its room is wanted, and the device goes on. */
Test(host_form, what_is_not_finite_is_forgotten)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    uint32_t other[BLOCK_TOKENS];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_CHANNEL, 6, 32);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    stage_close(stage, prompt_sealed(&forms, tokens, PROMPT, 7, 1));
    for (uint32_t i = 0; i < 20; i++) {
        house_tokens(other, BLOCK_TOKENS, 5000 + 16 * i);
        prompt_cache(&forms, other, BLOCK_TOKENS, 99);
        stage_check(stage);
    }
    cr_assert_eq(look(&forms, tokens, PROMPT).cached_tokens, 4, "up to it");
    cr_assert_geq(metric(stage, "kvkeep_host_unfit_blocks_total"), 1);
    forms_stop(&forms);
}

/* ---- What such a space does not do ---- */

static void expect_refused(struct stage *stage, enum kvk_status status, enum kvk_status expected,
                           const char *field)
{
    cr_expect_eq(status, expected, "%s: %s", field, stage->house.error.text);
    cr_expect_str_eq(stage->house.error.field, field, "%s", stage->house.error.text);
}

Test(host_form, what_is_refused_in_words)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 6, 32);
    struct stage *stage = &forms.on.stage;
    struct kvk_cache *cache = stage->house.cache;
    const struct kvk_caller *caller = &stage->house.caller;
    struct kvk_error *error = &stage->house.error;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    push_down(&forms, tokens, 5000);
    uint64_t used = house_bound(&stage->house, DEVICE);
    struct kvk_sequence_reply reply;
    struct kvk_open_request open = {.prompt = {.tokens = tokens, .token_count = PROMPT},
                                    .tier = HOST};
    expect_refused(stage, stage_try_open(stage, &open, &reply), KVK_UNSUPPORTED, "tier");
    open.tier = -1;
    open.leave_on_host = true;
    STAGE_OK(stage, stage_try_open(stage, &open, &reply));
    struct kvk_swap_reply swap;
    expect_refused(stage, stage_try_swap_out(stage, reply.sequence_id, &swap), KVK_UNSUPPORTED,
                   "host_format");
    uint64_t ticket;
    const struct kvk_transfer_request transfer = {.session_id = stage->session,
                                                  .sequence_id = reply.sequence_id,
                                                  .first_block = 1,
                                                  .block_count = 2};
    expect_refused(stage,
                   kvk_transfer_begin(cache, caller, &transfer, &ticket, &stage->tables, error),
                   KVK_PRECONDITION, "first_block");
    const struct kvk_publish_request publish = {
        .space_id = stage->space, .prompt = {.tokens = tokens, .token_count = PROMPT}};
    struct kvk_publish_reply published;
    expect_refused(stage, kvk_public_publish(cache, caller, &publish, &published, error),
                   KVK_UNSUPPORTED, "space_id");
    stage_close(stage, reply.sequence_id);
    cr_assert_eq(house_bound(&stage->house, DEVICE), used, "nothing stays of it");
    struct kvk_space_request again = forms.request;
    struct kvk_space_reply space;
    again.partial_reuse = KVK_PARTIAL_REUSE_ON;
    again.host_formats[0] = KVK_FORMAT_NONE;
    expect_refused(stage, kvk_space_open(cache, caller, &again, &space, error), KVK_INVALID,
                   "partial_reuse");
    again = forms.request;
    again.disk_formats[0] = KVK_FORMAT_FP8_E4M3;
    expect_refused(stage, kvk_space_open(cache, caller, &again, &space, error), KVK_INVALID,
                   "groups[0].host_format");
    again = forms.request;
    again.host_formats[0] = KVK_FORMAT_INT8_CHANNEL;
    expect_refused(stage, kvk_space_open(cache, caller, &again, &space, error), KVK_EXISTS,
                   "groups[0].host_format");
    forms_stop(&forms);
}

/* Where there is no room on the device for what it found, a call is refused whole: its caller reads
 * mapped slots of one format. */
Test(host_form, no_room_above_is_a_refusal)
{
    struct forms_stage forms;
    uint32_t tokens[PROMPT];
    uint32_t other[PROMPT];
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 6, 32);
    struct stage *stage = &forms.on.stage;
    house_tokens(tokens, PROMPT, 1000);
    prompt_cache(&forms, tokens, PROMPT, 7);
    push_down(&forms, tokens, 5000);
    house_tokens(other, PROMPT, 9000);
    uint64_t id = prompt_sealed(&forms, other, PROMPT, 8, -1);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = PROMPT},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    cr_assert_eq(stage_try_open(stage, &request, &reply), KVK_EXHAUSTED);
    stage_check(stage);
    stage_close(stage, id);
    reply = stage_open(stage, tokens, PROMPT);
    cr_assert_eq(reply.cached_tokens, PROMPT);
    stage_close(stage, reply.sequence_id);
    forms_stop(&forms);
}

Test(host_form, not_without_a_device_tier)
{
    struct forms_stage forms;
    one_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_NONE, 0, 8);
    struct stage *stage = &forms.on.stage;
    struct kvk_space_request other = forms.request;
    struct kvk_space_reply reply;
    other.identity.parts[KVK_IDENTITY_MODEL - 1] = (struct kvk_view){(const uint8_t *)"n", 1};
    other.host_formats[0] = KVK_FORMAT_INT8_32;
    expect_refused(stage,
                   kvk_space_open(stage->house.cache, &stage->house.caller, &other, &reply,
                                  &stage->house.error),
                   KVK_UNSUPPORTED, "groups[0].host_format");
    forms_stop(&forms);
}

/* ---- As it is recorded ---- */

Test(host_form, its_shape)
{
    struct forms_stage forms;
    uint8_t shape[KVK_SHAPE_SIZE_MAX];
    struct kvk_space_request read;
    host_start(&forms, KVK_FORMAT_BF16, KVK_FORMAT_INT8_32, 6, 8);
    size_t size = kvk_shape_encode(forms.on.stage.house.cache->spaces, shape);
    cr_assert(kvk_shape_decode(shape, size, &read));
    cr_assert_eq(read.host_formats[0], KVK_FORMAT_INT8_32);
    cr_assert_eq(read.disk_formats[0], KVK_FORMAT_INT8_32);
    shape[40 + 53] = 77;
    cr_assert_not(kvk_shape_decode(shape, size, &read));
    shape[40 + 53] = KVK_FORMAT_INT8_32;
    shape[40 + 55] = 1;
    cr_assert_not(kvk_shape_decode(shape, size, &read));
    forms_stop(&forms);
}
