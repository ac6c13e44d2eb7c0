/*
 * A stage with a disk below: host blocks, disk blocks, and the disk tier's rounds made by hand.
 */
#ifndef KVK_TESTS_ENGINE_DISK_STAGE_H
#define KVK_TESTS_ENGINE_DISK_STAGE_H

#include "tests/engine_stage.h"

#include "daemon/disk_tier_internal.h"
#include "tests/faulty_disk.h"

#define DISK_SLOT_BYTES 4096U /* what a block of 1 KiB takes */

struct disk_stage {
    struct stage stage;
    struct faulty_disk faulty;
};

static inline void disk_stage_init(struct disk_stage *on)
{
    kvk_log_set_level(KVK_LOG_ERROR);
    cr_assert(faulty_init(&on->faulty));
    struct kvk_error error;
    cr_assert_eq(faulty_open(&on->faulty, &error), KVK_OK, "%s", error.text);
    house_init(&on->stage.house);
    on->stage.house.config.disk_admit_uses = 1;
    on->stage.house.config.disk_read_ahead = 0;
}

static inline void disk_stage_start_with(struct disk_stage *on, const struct kvk_geometry *geometry,
                                         uint32_t device_blocks, uint32_t host_blocks,
                                         uint32_t disk_blocks, bool threads)
{
    struct stage *stage = &on->stage;
    stage->geometry = *geometry;
    stage->block_bytes = kvk_geometry_block_bytes(geometry);
    stage->tables = (struct kvk_tables){.part_count = 0};
    uint64_t slot_bytes = 0;
    for (uint32_t shard = 0; shard < kvk_geometry_shard_count(geometry); shard++) {
        slot_bytes += kvk_disk_shard_stride(kvk_geometry_shard_bytes(geometry, shard));
    }
    const struct house_options options = {
        .device_bytes = device_blocks * stage->block_bytes,
        .host_bytes = host_blocks * stage->block_bytes,
        .disk = on->faulty.disk,
        .disk_bytes = disk_blocks * slot_bytes,
        .manual_clock = !threads,
        .threads = threads,
    };
    house_start(&stage->house, &options);
    stage->space = house_space_of(&stage->house, &stage->house.caller, "m", geometry, 1);
    stage->session = house_session(&stage->house);
}

static inline void disk_stage_start(struct disk_stage *on, uint32_t device_blocks,
                                    uint32_t host_blocks, uint32_t disk_blocks)
{
    const struct kvk_geometry geometry = house_geometry();
    disk_stage_start_with(on, &geometry, device_blocks, host_blocks, disk_blocks, false);
}

static inline void disk_stage_stop(struct disk_stage *on)
{
    stage_stop(&on->stage);
    faulty_finish(&on->faulty);
}

/* Rounds until there is nothing more to do at once, and the laws after each. */
static inline void disk_rounds(struct disk_stage *on)
{
    struct kvk_cache *cache = on->stage.house.cache;
    for (int i = 0; i < 100; i++) {
        kvk_lock(&cache->lock);
        bool more = kvk_disk_round_drops(cache);
        kvk_cache_check_locked(cache);
        kvk_unlock(&cache->lock);
        if (!more) {
            return;
        }
    }
    cr_assert(false, "the disk tier never comes to rest");
}

static inline uint64_t disk_blocks(struct disk_stage *on)
{
    return stage_used(&on->stage, KVK_TIER_DISK) * on->stage.block_bytes / DISK_SLOT_BYTES;
}

/* Tokens of a prompt that a look-up finds on disk alone. */
static inline uint64_t disk_tokens(struct disk_stage *on, const uint32_t *tokens, uint64_t count)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = on->stage.space,
                                               .prompt = {.tokens = tokens, .token_count = count}};
    cr_assert_eq(kvk_lookup(on->stage.house.cache, &on->stage.house.caller, &request, &reply,
                            &on->stage.house.error),
                 KVK_OK);
    cr_assert_eq(reply.device_tokens + reply.host_tokens + reply.disk_tokens, reply.cached_tokens);
    return reply.disk_tokens;
}

/* Write other things until nothing of this prompt is in memory. */
static inline void disk_push_out(struct disk_stage *on, const uint32_t *tokens, uint64_t count,
                                 uint32_t first)
{
    uint32_t other[8];
    for (uint32_t i = 0; i < 1000; i++) {
        struct kvk_lookup_reply reply;
        const struct kvk_lookup_request request = {
            .space_id = on->stage.space, .prompt = {.tokens = tokens, .token_count = count}};
        cr_assert_eq(kvk_lookup(on->stage.house.cache, &on->stage.house.caller, &request, &reply,
                                &on->stage.house.error),
                     KVK_OK);
        if (reply.device_tokens + reply.host_tokens == 0) {
            return;
        }
        house_tokens(other, 4, first + 16 * i);
        stage_cache(&on->stage, other, 4, 99);
    }
    cr_assert(false, "it stays in memory");
}

#endif
