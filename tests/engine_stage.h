/*
 * A stage for tests of sequences and leases: an engine with tiny pools counted in blocks, one
 * space, one session, and bytes that say which sequence, token and layer they are of.
 */
#ifndef KVK_TESTS_ENGINE_STAGE_H
#define KVK_TESTS_ENGINE_STAGE_H

#include "tests/engine_house.h"

#include "base/copy.h"
#include "daemon/sequence_internal.h"

#define STAGE_TOKENS_MAX 4096

struct stage {
    struct house house;
    struct kvk_geometry geometry;
    uint64_t block_bytes;
    uint64_t session;
    uint64_t space;
    struct kvk_tables tables; /* of the last answer */
};

/* On this device, which is the cache's from then on; NULL: a CPU's. */
static inline void stage_start_on(struct stage *stage, const struct kvk_geometry *geometry,
                                  uint32_t device_blocks, uint32_t host_blocks,
                                  struct kvk_device *device)
{
    stage->geometry = *geometry;
    stage->block_bytes = kvk_geometry_block_bytes(geometry);
    stage->tables = (struct kvk_tables){.part_count = 0};
    const struct house_options options = {
        .device_bytes = device_blocks * stage->block_bytes,
        .host_bytes = host_blocks * stage->block_bytes,
        .manual_clock = true,
        .device = device,
    };
    house_start(&stage->house, &options);
    stage->space = house_space_of(&stage->house, &stage->house.caller, "m", geometry, 1);
    stage->session = house_session(&stage->house);
}

static inline void stage_start_with(struct stage *stage, const struct kvk_geometry *geometry,
                                    uint32_t device_blocks, uint32_t host_blocks)
{
    stage_start_on(stage, geometry, device_blocks, host_blocks, NULL);
}

static inline void stage_start(struct stage *stage, uint32_t device_blocks, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = house_geometry();
    house_init(&stage->house);
    stage_start_with(stage, &geometry, device_blocks, host_blocks);
}

static inline void stage_check(struct stage *stage)
{
    kvk_cache_check(stage->house.cache);
}

static inline void stage_stop(struct stage *stage)
{
    stage_check(stage);
    kvk_session_end(stage->house.cache, stage->session);
    kvk_tables_finish(&stage->tables);
    house_stop(&stage->house);
}

static inline void stage_pass_ms(struct stage *stage, uint64_t ms)
{
    uint64_t now = kvk_clock_now(&stage->house.manual.clock);
    kvk_clock_manual_set(&stage->house.manual, now + ms * KVK_NS_PER_MS);
}

/* ---- Counting, in blocks ---- */

static inline uint64_t stage_used(struct stage *stage, enum kvk_tier tier)
{
    kvk_lock(&stage->house.cache->lock);
    uint64_t bytes = stage->house.cache->tiers[tier].used_bytes;
    kvk_unlock(&stage->house.cache->lock);
    return bytes / stage->block_bytes;
}

static inline uint64_t stage_bound(struct stage *stage, enum kvk_tier tier)
{
    return house_bound(&stage->house, tier) / stage->block_bytes;
}

static inline struct kvk_cache_stats stage_stats(struct stage *stage)
{
    kvk_lock(&stage->house.cache->lock);
    struct kvk_cache_stats stats = stage->house.cache->stats;
    kvk_unlock(&stage->house.cache->lock);
    return stats;
}

/* The block's id at a place of a table: to see who shares. */
static inline uint32_t stage_block(struct stage *stage, uint64_t sequence_id, uint32_t index)
{
    kvk_lock(&stage->house.cache->lock);
    struct kvk_sequence *sequence = kvk_table_get(&stage->house.cache->sequence_table, sequence_id);
    cr_assert_not_null(sequence);
    cr_assert_lt(index, sequence->groups[0].block_count);
    uint32_t block = sequence->groups[0].blocks[index];
    kvk_unlock(&stage->house.cache->lock);
    return block;
}

/* ---- Calls ---- */

#define STAGE_OK(stage, call)                                                                      \
    cr_assert_eq((call), KVK_OK, "%s: %s", #call, (stage)->house.error.text)

/* Tokens a to b, both in, as the cases write it; in a buffer of the caller. */
static inline uint64_t stage_range(uint32_t *tokens, uint32_t a, uint32_t b)
{
    house_tokens(tokens, b - a + 1, a);
    return b - a + 1;
}

static inline enum kvk_status stage_try_open(struct stage *stage,
                                             const struct kvk_open_request *given,
                                             struct kvk_sequence_reply *reply)
{
    struct kvk_open_request request = *given;
    request.session_id = request.session_id == 0 ? stage->session : request.session_id;
    request.space_id = request.space_id == 0 ? stage->space : request.space_id;
    return kvk_sequence_open(stage->house.cache, &stage->house.caller, &request, reply,
                             &stage->tables, &stage->house.error);
}

static inline struct kvk_sequence_reply stage_open(struct stage *stage, const uint32_t *tokens,
                                                   uint64_t count)
{
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = count},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(stage, stage_try_open(stage, &request, &reply));
    return reply;
}

static inline enum kvk_status stage_try_append(struct stage *stage, uint64_t sequence_id,
                                               uint64_t expected, const uint32_t *tokens,
                                               uint64_t count, bool draft,
                                               struct kvk_sequence_reply *reply)
{
    const struct kvk_append_request request = {.session_id = stage->session,
                                               .sequence_id = sequence_id,
                                               .expected_length = expected,
                                               .tokens = tokens,
                                               .token_count = count,
                                               .draft = draft};
    return kvk_sequence_append(stage->house.cache, &stage->house.caller, &request, reply,
                               &stage->tables, &stage->house.error);
}

static inline struct kvk_sequence_reply stage_append(struct stage *stage, uint64_t sequence_id,
                                                     uint64_t expected, const uint32_t *tokens,
                                                     uint64_t count, bool draft)
{
    struct kvk_sequence_reply reply;
    STAGE_OK(stage, stage_try_append(stage, sequence_id, expected, tokens, count, draft, &reply));
    return reply;
}

static inline struct kvk_sequence_reply stage_get(struct stage *stage, uint64_t sequence_id)
{
    struct kvk_sequence_reply reply;
    STAGE_OK(stage, kvk_sequence_get(stage->house.cache, &stage->house.caller, stage->session,
                                     sequence_id, &reply, &stage->tables, &stage->house.error));
    return reply;
}

static inline void stage_seal(struct stage *stage, uint64_t sequence_id)
{
    uint64_t length = stage_get(stage, sequence_id).length;
    house_seal(&stage->house, stage->session, sequence_id, length);
}

static inline enum kvk_status stage_try_truncate(struct stage *stage, uint64_t sequence_id,
                                                 uint64_t expected, uint64_t length,
                                                 struct kvk_sequence_reply *reply)
{
    return kvk_sequence_truncate(stage->house.cache, &stage->house.caller, stage->session,
                                 sequence_id, expected, length, reply, &stage->tables,
                                 &stage->house.error);
}

static inline enum kvk_status stage_try_commit(struct stage *stage, uint64_t sequence_id,
                                               uint64_t expected, uint64_t accept,
                                               struct kvk_sequence_reply *reply)
{
    return kvk_sequence_commit(stage->house.cache, &stage->house.caller, stage->session,
                               sequence_id, expected, accept, reply, &stage->tables,
                               &stage->house.error);
}

static inline enum kvk_status stage_try_fork(struct stage *stage, uint64_t sequence_id,
                                             uint64_t expected, uint32_t count,
                                             const char *request_id, uint64_t *children)
{
    struct kvk_request_id id = {.size = (uint32_t)strlen(request_id)};
    memcpy(id.bytes, request_id, id.size);
    return kvk_sequence_fork(stage->house.cache, &stage->house.caller, stage->session, sequence_id,
                             expected, count, &id, children, &stage->house.error);
}

static inline enum kvk_status stage_try_swap_out(struct stage *stage, uint64_t sequence_id,
                                                 struct kvk_swap_reply *reply)
{
    return kvk_sequence_swap_out(stage->house.cache, &stage->house.caller, stage->session,
                                 sequence_id, reply, &stage->tables, &stage->house.error);
}

static inline enum kvk_status stage_try_swap_in(struct stage *stage, uint64_t sequence_id,
                                                struct kvk_swap_reply *reply)
{
    return kvk_sequence_swap_in(stage->house.cache, &stage->house.caller, stage->session,
                                sequence_id, reply, &stage->tables, &stage->house.error);
}

static inline void stage_close(struct stage *stage, uint64_t sequence_id)
{
    house_close(&stage->house, stage->session, sequence_id);
}

static inline uint64_t stage_hit(struct stage *stage, const uint32_t *tokens, uint64_t count,
                                 bool leave_last)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {
        .space_id = stage->space,
        .prompt = {.tokens = tokens, .token_count = count},
        .leave_last = leave_last,
    };
    STAGE_OK(stage, kvk_lookup(stage->house.cache, &stage->house.caller, &request, &reply,
                               &stage->house.error));
    return reply.cached_tokens;
}

/* ---- Bytes ---- */

/* What stands at a byte of one token, layer, K or V, and head. */
static inline uint8_t stage_byte(uint32_t tag, uint64_t token, uint64_t place, uint64_t byte)
{
    uint64_t mixed = tag * UINT64_C(0x9e3779b97f4a7c15) + token * UINT64_C(0xd6e8feb86659fd93) +
                     place * UINT64_C(0xa0761d6478bd642f) + byte * UINT64_C(0xe7037ed1a0b428db);
    mixed ^= mixed >> 29;
    mixed *= UINT64_C(0xbf58476d1ce4e5b9);
    return (uint8_t)(mixed >> 40);
}

/* One run of a token's bytes in a shard, heads first. */
struct stage_row {
    uint64_t offset; /* of token 0 of the block */
    uint64_t token_bytes;
    uint64_t place; /* a number for (layer, K or V, head) over all shards */
};

static inline uint32_t stage_rows(const struct kvk_geometry *geometry, uint32_t shard,
                                  struct stage_row *rows)
{
    uint32_t count = 0;
    uint32_t heads = kvk_geometry_shard_heads(geometry, shard);
    for (uint32_t layer = 0; layer < kvk_geometry_shard_layers(geometry, shard); layer++) {
        for (uint32_t part = 0; part < (geometry->latent ? 1U : 2U); part++) {
            uint64_t bytes = part == 0
                                 ? geometry->head_size_k * kvk_format_bytes(geometry->format_k)
                                 : geometry->head_size_v * kvk_format_bytes(geometry->format_v);
            uint64_t begin = part == 0 ? kvk_geometry_k_offset(geometry, shard, layer)
                                       : kvk_geometry_v_offset(geometry, shard, layer);
            for (uint32_t head = 0; head < heads; head++) {
                rows[count++] = (struct stage_row){
                    .offset = begin + head * bytes * geometry->block_tokens,
                    .token_bytes = bytes,
                    .place = (shard * UINT64_C(64) + layer) * 64 + part * 32 + head,
                };
            }
        }
    }
    return count;
}

/* Write tokens [first, end) of a sequence, one shard, row by row. */
static inline enum kvk_status stage_try_write(struct stage *stage, uint64_t sequence_id,
                                              uint32_t group, uint32_t rank, uint64_t first,
                                              uint64_t end, uint32_t tag)
{
    const struct kvk_geometry *geometry = &stage->geometry;
    struct stage_row rows[256];
    uint8_t data[8192];
    uint32_t row_count = stage_rows(geometry, kvk_geometry_rank_shard(geometry, rank), rows);
    uint32_t block_tokens = geometry->block_tokens;
    while (first < end) {
        uint64_t block = first / block_tokens;
        uint64_t last = (block + 1) * block_tokens < end ? (block + 1) * block_tokens : end;
        for (uint32_t r = 0; r < row_count; r++) {
            uint64_t size = (last - first) * rows[r].token_bytes;
            for (uint64_t i = 0; i < size; i++) {
                data[i] = stage_byte(tag, first + i / rows[r].token_bytes, rows[r].place,
                                     i % rows[r].token_bytes);
            }
            const struct kvk_write_piece piece = {
                .group = group,
                .rank = rank,
                .block = block,
                .offset = rows[r].offset + (first - block * block_tokens) * rows[r].token_bytes,
                .data = data,
                .size_bytes = size,
                .checksum = kvk_checksum(data, size),
            };
            enum kvk_status status =
                kvk_sequence_write(stage->house.cache, &stage->house.caller, stage->session,
                                   sequence_id, &piece, &stage->house.error);
            if (status != KVK_OK) {
                return status;
            }
        }
        first = last;
    }
    return KVK_OK;
}

/* Write all that is granted, in all shards of the first group, and seal it. */
static inline void stage_fill(struct stage *stage, uint64_t sequence_id, uint32_t tag)
{
    struct kvk_sequence_reply reply = stage_get(stage, sequence_id);
    for (uint32_t rank = 0; rank < kvk_geometry_rank_count(&stage->geometry); rank++) {
        STAGE_OK(stage, stage_try_write(stage, sequence_id, 0, rank, reply.grant_first,
                                        reply.length, tag));
    }
    house_seal(&stage->house, stage->session, sequence_id, reply.length);
}

/* Are tokens [first, end) of a sequence or lease as they were written? KVK_OK, the read's failure,
 * or KVK_DATA_LOSS with an empty error text where bytes differ. */
static inline enum kvk_status stage_try_read(struct stage *stage, uint64_t sequence_id,
                                             uint64_t lease_id, uint64_t first, uint64_t end,
                                             uint32_t tag)
{
    const struct kvk_geometry *geometry = &stage->geometry;
    struct stage_row rows[256];
    for (uint32_t rank = 0; rank < kvk_geometry_rank_count(geometry); rank++) {
        uint32_t row_count = stage_rows(geometry, kvk_geometry_rank_shard(geometry, rank), rows);
        for (uint64_t token = first; token < end; token++) {
            const struct kvk_read_request request = {.session_id = stage->session,
                                                     .sequence_id = sequence_id,
                                                     .lease_id = lease_id,
                                                     .rank = rank,
                                                     .block = token / geometry->block_tokens};
            const uint8_t *data;
            uint64_t size;
            struct kvk_read_handle handle;
            enum kvk_status status =
                kvk_read_begin(stage->house.cache, &stage->house.caller, &request, &data, &size,
                               &handle, &stage->house.error);
            if (status != KVK_OK) {
                return status;
            }
            bool equal = true;
            for (uint32_t r = 0; r < row_count; r++) {
                const uint8_t *bytes =
                    data + rows[r].offset + token % geometry->block_tokens * rows[r].token_bytes;
                for (uint64_t i = 0; i < rows[r].token_bytes; i++) {
                    equal = equal && bytes[i] == stage_byte(tag, token, rows[r].place, i);
                }
            }
            kvk_read_end(stage->house.cache, &handle);
            if (!equal) {
                stage->house.error.text[0] = '\0';
                return KVK_DATA_LOSS;
            }
        }
    }
    return KVK_OK;
}

static inline void stage_verify(struct stage *stage, uint64_t sequence_id, uint64_t first,
                                uint64_t end, uint32_t tag)
{
    STAGE_OK(stage, stage_try_read(stage, sequence_id, 0, first, end, tag));
}

/* Open, write, seal: a prompt that is cached as soon as it is closed. */
static inline uint64_t stage_sealed(struct stage *stage, const uint32_t *tokens, uint64_t count,
                                    uint32_t tag)
{
    uint64_t id = stage_open(stage, tokens, count).sequence_id;
    stage_fill(stage, id, tag);
    return id;
}

/* ... and closed. */
static inline void stage_cache(struct stage *stage, const uint32_t *tokens, uint64_t count,
                               uint32_t tag)
{
    stage_close(stage, stage_sealed(stage, tokens, count, tag));
}

/* ---- Leases ---- */

static inline enum kvk_status stage_try_pin(struct stage *stage, const uint32_t *tokens,
                                            uint64_t count, uint64_t ttl_ms, bool copy_pin,
                                            struct kvk_pin_reply *reply)
{
    const struct kvk_pin_request request = {
        .session_id = stage->session,
        .space_id = stage->space,
        .prompt = {.tokens = tokens, .token_count = count},
        .ttl_ms = ttl_ms,
        .copy_pin = copy_pin,
    };
    return kvk_lease_pin(stage->house.cache, &stage->house.caller, &request, reply, &stage->tables,
                         &stage->house.error);
}

static inline struct kvk_pin_reply stage_pin(struct stage *stage, const uint32_t *tokens,
                                             uint64_t count, uint64_t ttl_ms)
{
    struct kvk_pin_reply reply;
    STAGE_OK(stage, stage_try_pin(stage, tokens, count, ttl_ms, false, &reply));
    return reply;
}

static inline enum kvk_status stage_try_release(struct stage *stage, const uint64_t *lease_ids,
                                                uint32_t count, uint64_t *blocks)
{
    return kvk_lease_release(stage->house.cache, &stage->house.caller, stage->session, lease_ids,
                             count, blocks, &stage->house.error);
}

#endif
