/* Bytes in and out: only where they are granted, only as they were sealed. */
#include "tests/engine_stage.h"

static enum kvk_status write_at(struct stage *stage, uint64_t id, uint64_t block, uint64_t offset,
                                uint64_t size, const uint8_t *data)
{
    const struct kvk_write_piece piece = {
        .block = block, .offset = offset, .data = data, .size_bytes = size};
    return kvk_sequence_write(stage->house.cache, &stage->house.caller, stage->session, id, &piece,
                              &stage->house.error);
}

/* Whose scale is the byte? What tokens share is the first one's. */
static bool is_scale(const struct kvk_geometry *geometry, bool is_value, uint64_t begin,
                     uint64_t offset, uint64_t *token)
{
    const struct kvk_part part = kvk_geometry_part(geometry, 0, is_value);
    uint64_t first = begin + part.scales_offset;
    if (part.scales_offset == 0 || offset < first ||
        offset >= first + part.heads * part.scale_stride) {
        return false;
    }
    *token = 0;
    if (part.format == KVK_FORMAT_INT8_CHANNEL && is_value) {
        *token = (offset - first) % part.scale_stride / 2;
    }
    return true;
}

/* Does byte `offset` of a shard belong to token `token` of its block? The plain way. */
static uint64_t token_of(const struct kvk_geometry *geometry, uint64_t offset)
{
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        uint64_t k = kvk_geometry_k_offset(geometry, 0, layer);
        uint64_t v = kvk_geometry_v_offset(geometry, 0, layer);
        uint64_t value_k = kvk_format_row_bytes(geometry->format_k, geometry->head_size_k);
        uint64_t value_v = kvk_format_row_bytes(geometry->format_v, geometry->head_size_v);
        uint64_t per_token = geometry->layout == KVK_LAYOUT_TOKENS_FIRST ? geometry->kv_heads : 1;
        uint64_t heads = geometry->layout == KVK_LAYOUT_TOKENS_FIRST ? 1 : geometry->kv_heads;
        for (int part = 0; part < (geometry->latent ? 1 : 2); part++) {
            uint64_t begin = part == 0 ? k : v;
            uint64_t token_bytes = (part == 0 ? value_k : value_v) * per_token;
            for (uint64_t head = 0; head < heads; head++) {
                for (uint64_t token = 0; token < geometry->block_tokens; token++) {
                    uint64_t at = begin + (head * geometry->block_tokens + token) * token_bytes;
                    if (offset >= at && offset < at + token_bytes) {
                        return token;
                    }
                }
            }
            uint64_t scale_token = 0;
            if (is_scale(geometry, part != 0, begin, offset, &scale_token)) {
                return scale_token;
            }
        }
    }
    cr_assert(kvk_format_is_compact(geometry->format_k), "a byte of no token");
    return UINT64_MAX; /* padding */
}

static void try_layout(struct kvk_geometry geometry, uint64_t seed)
{
    struct stage stage;
    struct kvk_random random;
    uint32_t tokens[8];
    static uint8_t data[65536];
    uint64_t refused = 0;
    kvk_random_init(&random, seed);
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 8, 1);
    uint64_t size = stage.block_bytes;
    cr_assert_leq(size, sizeof(data));
    for (uint64_t sealed = 0; sealed < geometry.block_tokens; sealed++) {
        uint64_t id = stage_open(&stage, tokens, geometry.block_tokens).sequence_id;
        STAGE_OK(&stage,
                 house_try_seal(&stage.house, stage.session, id, geometry.block_tokens, sealed));
        for (int i = 0; i < 300; i++) {
            uint64_t first = kvk_random_below(&random, size);
            uint64_t count = kvk_random_between(&random, 1, size - first);
            if (kvk_random_chance(&random, 0.7) && count > 40) {
                count = kvk_random_between(&random, 1, 40);
            }
            bool touches = false;
            for (uint64_t at = first; at < first + count && !touches; at++) {
                touches = token_of(&geometry, at) < sealed;
            }
            enum kvk_status status = write_at(&stage, id, 0, first, count, data);
            cr_assert_eq(status, touches ? KVK_PRECONDITION : KVK_OK,
                         "sealed %lu, bytes %lu to %lu", (unsigned long)sealed,
                         (unsigned long)first, (unsigned long)(first + count));
            refused += touches;
        }
        stage_close(&stage, id);
    }
    cr_expect_gt(refused, 100);
    stage_stop(&stage);
}

Test(bytes, sealed_tokens_are_not_written_in_any_layout)
{
    struct kvk_geometry geometry = house_geometry();
    try_layout(geometry, 1);
    geometry.head_size_v = 6;
    geometry.format_v = KVK_FORMAT_BF16;
    geometry.layers = 3;
    try_layout(geometry, 2);
    geometry.layout = KVK_LAYOUT_TOKENS_FIRST;
    try_layout(geometry, 3);
    geometry = house_geometry();
    geometry.latent = true;
    geometry.format_v = KVK_FORMAT_NONE;
    try_layout(geometry, 4);
    geometry = house_geometry();
    geometry.block_tokens = 5;
    try_layout(geometry, 5);
}

Test(bytes, scales_are_sealed_with_their_tokens)
{
    for (int format = KVK_FORMAT_FP8_E4M3; format <= KVK_FORMAT_MAX; format++) {
        struct kvk_geometry geometry = house_geometry();
        geometry.format_k = geometry.format_v = (enum kvk_format)format;
        geometry.head_size_k = geometry.head_size_v = 32;
        try_layout(geometry, 6);
        geometry.block_tokens = 5;
        geometry.layout = KVK_LAYOUT_TOKENS_FIRST;
        try_layout(geometry, 7);
    }
}

Test(bytes, opaque_blocks_belong_to_their_end)
{
    struct stage stage;
    uint32_t tokens[8];
    static const uint8_t data[64];
    const struct kvk_geometry geometry = {.layers = 2,
                                          .block_tokens = 4,
                                          .layout = KVK_LAYOUT_OPAQUE,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = 1,
                                          .pipeline_shards = 1,
                                          .opaque_bytes = 64};
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 8, 1);
    uint64_t id = stage_open(&stage, tokens, 4).sequence_id;
    STAGE_OK(&stage, write_at(&stage, id, 0, 0, 64, data));
    STAGE_OK(&stage, house_try_seal(&stage.house, stage.session, id, 4, 3));
    STAGE_OK(&stage, write_at(&stage, id, 0, 0, 64, data));
    house_seal(&stage.house, stage.session, id, 4);
    cr_expect_eq(write_at(&stage, id, 0, 0, 64, data), KVK_PRECONDITION);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(bytes, pieces_are_checked)
{
    struct stage stage;
    uint32_t tokens[6];
    static const uint8_t data[2048];
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 6, 1);
    uint64_t id = stage_open(&stage, tokens, 6).sequence_id;
    uint64_t size = stage.block_bytes;
    cr_expect_eq(write_at(&stage, id, 0, 0, 0, data), KVK_INVALID);
    cr_expect_eq(write_at(&stage, id, 2, 0, 8, data), KVK_OUT_OF_RANGE);
    cr_expect_eq(write_at(&stage, id, 0, size, 1, data), KVK_OUT_OF_RANGE);
    cr_expect_eq(write_at(&stage, id, 0, 1, size, data), KVK_OUT_OF_RANGE);
    cr_expect_eq(write_at(&stage, id, 0, UINT64_MAX, 2, data), KVK_OUT_OF_RANGE);
    STAGE_OK(&stage, write_at(&stage, id, 0, 0, size, data));
    struct kvk_write_piece piece = {
        .data = data, .size_bytes = 8, .checksum = kvk_checksum(data, 8) + 1};
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_DATA_LOSS);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_CHECKSUM);
    piece.checksum = 0;
    piece.group = 1;
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_INVALID);
    piece.group = 0;
    piece.rank = 1;
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_INVALID);
    stage.house.caller.may_block = false;
    cr_expect_eq(write_at(&stage, id, 0, 0, 8, data), KVK_WOULD_BLOCK);
    stage.house.caller.may_block = true;
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* A worker that scribbles over its sealed blocks is found out when they are read or move. */
Test(bytes, what_was_scribbled_over_is_not_served)
{
    struct stage stage;
    uint32_t tokens[8];
    struct kvk_swap_reply swap;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 8, 1);
    uint64_t id = stage_sealed(&stage, tokens, 8, 1);
    kvk_lock(&stage.house.cache->lock);
    const struct kvk_block *block = kvk_index_block(
        stage.house.cache->index,
        ((struct kvk_sequence *)kvk_table_get(&stage.house.cache->sequence_table, id))
            ->groups[0]
            .blocks[1]);
    kvk_block_address(stage.house.cache, block, KVK_TIER_DEVICE, 0)[100] ^= 1;
    kvk_unlock(&stage.house.cache->lock);
    stage_verify(&stage, id, 0, 4, 1);
    cr_expect_eq(stage_try_read(&stage, id, 0, 4, 8, 1), KVK_DATA_LOSS);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_CHECKSUM);
    cr_expect_eq(stage_stats(&stage).checksum_failures, 1);
    cr_expect_eq(stage_try_swap_out(&stage, id, &swap), KVK_DATA_LOSS);
    cr_expect_eq(stage_get(&stage, id).state, KVK_SEQUENCE_RUNNING);
    stage_check(&stage);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(bytes, only_what_is_sealed_is_read)
{
    struct stage stage;
    uint32_t tokens[10];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 10, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    stage_append(&stage, id, 6, tokens + 6, 4, false);
    stage_verify(&stage, id, 0, 6, 1);
    cr_expect_eq(stage_try_read(&stage, id, 0, 8, 9, 1), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_GRANT_UNWRITTEN);
    cr_expect_eq(stage_try_read(&stage, id, 0, 12, 13, 1), KVK_OUT_OF_RANGE);
    cr_expect_eq(stage_try_read(&stage, id, 5, 0, 1, 1), KVK_INVALID, "one of the two");
    cr_expect_eq(stage_try_read(&stage, 0, 0, 0, 1, 1), KVK_INVALID);
    cr_expect_eq(stage_try_read(&stage, id + 99, 0, 0, 1, 1), KVK_NOT_FOUND);
    /* A read outlives its sequence. */
    const struct kvk_read_request request = {.session_id = stage.session, .sequence_id = id};
    const uint8_t *bytes;
    uint64_t size;
    struct kvk_read_handle handle;
    STAGE_OK(&stage, kvk_read_begin(stage.house.cache, &stage.house.caller, &request, &bytes, &size,
                                    &handle, &stage.house.error));
    cr_expect_eq(size, stage.block_bytes);
    stage_close(&stage, id);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 1);
    kvk_read_end(stage.house.cache, &handle);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}
