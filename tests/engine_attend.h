/*
 * K and V that are numbers, and the daemon's attention over them against a plain loop: for tests of
 * what a query sees.
 */
#ifndef KVK_TESTS_ENGINE_ATTEND_H
#define KVK_TESTS_ENGINE_ATTEND_H

#include <math.h>

#include "daemon/attention.h"
#include "tests/engine_stage.h"

/* Attention of one query head over K and V of the sequence, by the daemon. */
static inline void attend_window(struct stage *stage, uint64_t id, uint64_t position, float *output)
{
    const float query[8] = {1, 0.5F, 0, 0, 0, 0, 0, 0};
    float queries[2][8];
    float results[2][8];
    float lse[2];
    memcpy(queries[0], query, sizeof(query));
    memcpy(queries[1], query, sizeof(query));
    struct kvk_attention_item item = {
        .sequence_id = id,
        .position = position,
        .query_count = 1,
        .queries = (const uint8_t *)queries,
        .queries_size = sizeof(queries),
        .output = results[0],
        .lse = lse,
    };
    struct kvk_attention_request request = {
        .session_id = stage->session,
        .query_heads = 2,
        .format = KVK_FORMAT_FP32,
        .scale = 1.0F,
        .causal = true,
        .group_window = true,
        .items = &item,
        .item_count = 1,
    };
    STAGE_OK(stage, kvk_attention_run(stage->house.cache, &stage->house.caller, &request,
                                      &stage->house.error));
    memcpy(output, results[0], 8 * sizeof(float));
}

/* K and V of token t in layer 0, head 0: small numbers that differ. */
static inline float key_at(uint64_t token, uint32_t i)
{
    return i == 0 ? (float)(token % 5) * 0.25F : i == 1 ? (float)(token % 3) * 0.5F : 0;
}

static inline float value_at(uint64_t token, uint32_t i)
{
    return (float)token + (float)i * 0.125F;
}

static inline void write_values(struct stage *stage, uint64_t id, uint64_t first, uint64_t end)
{
    for (uint64_t token = first; token < end; token++) {
        for (uint32_t part = 0; part < 2; part++) {
            for (uint32_t head = 0; head < 2; head++) {
                float values[8];
                for (uint32_t i = 0; i < 8; i++) {
                    values[i] = part == 0 ? key_at(token, i) : value_at(token, i);
                }
                uint64_t begin = part == 0 ? kvk_geometry_k_offset(&stage->geometry, 0, 0)
                                           : kvk_geometry_v_offset(&stage->geometry, 0, 0);
                const struct kvk_write_piece piece = {
                    .block = token / 4,
                    .offset = begin + head * 128 + token % 4 * 32,
                    .data = (const uint8_t *)values,
                    .size_bytes = sizeof(values),
                };
                STAGE_OK(stage,
                         kvk_sequence_write(stage->house.cache, &stage->house.caller,
                                            stage->session, id, &piece, &stage->house.error));
            }
        }
    }
}

static inline void expect_attends(struct stage *stage, uint64_t id, uint64_t position,
                                  uint64_t first)
{
    double sum = 0;
    double expected[8] = {0};
    float output[8];
    for (uint64_t token = first; token <= position; token++) {
        double weight = exp((double)key_at(token, 0) + 0.5 * (double)key_at(token, 1));
        sum += weight;
        for (uint32_t i = 0; i < 8; i++) {
            expected[i] += weight * (double)value_at(token, i);
        }
    }
    attend_window(stage, id, position, output);
    for (uint32_t i = 0; i < 8; i++) {
        cr_expect_float_eq((double)output[i], expected[i] / sum, 1e-4, "position %lu",
                           (unsigned long)position);
    }
}

#endif
