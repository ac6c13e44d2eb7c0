/* Blocks that are written to disk from where they lie: they stay there meanwhile, as they are; few
 * enough that a disk that hangs keeps nobody out; and what does not suit is copied first. */
#include <criterion/criterion.h>

#include "daemon/quota.h"
#include "daemon/report.h"
#include "daemon/upkeep.h"
#include "tests/engine_disk_stage.h"

#define HOST_BLOCKS 64
#define STRAIGHT_MAX (HOST_BLOCKS / 16) /* of them may be written so at a time */
#define TOKENS 16U                      /* of a prompt: 4 blocks */

struct straight {
    struct disk_stage on;
    uint32_t tokens[TOKENS];
    uint32_t during; /* times that the hook found blocks kept */
    void (*meanwhile)(struct straight *straight);
};

/* While the disk has not taken the batch yet; once. */
static void hook(void *context)
{
    struct straight *straight = context;
    struct kvk_cache *cache = straight->on.stage.house.cache;
    kvk_lock(&cache->lock);
    uint32_t kept = cache->upkeep.count;
    kvk_unlock(&cache->lock);
    if (kept > 0 && straight->during++ == 0 && straight->meanwhile != NULL) {
        straight->meanwhile(straight);
    }
}

/* A block of 4 KiB suits every disk. */
static void start_with(struct straight *straight, uint32_t layers,
                       void (*meanwhile)(struct straight *straight))
{
    struct kvk_geometry geometry = house_geometry();
    geometry.layers = layers;
    *straight = (struct straight){.meanwhile = meanwhile};
    disk_stage_init(&straight->on);
    disk_stage_start_with(&straight->on, &geometry, 0, HOST_BLOCKS, 256, false);
    kvk_disk_test_hook(straight->on.stage.house.cache, hook, straight);
    house_tokens(straight->tokens, TOKENS, 1000);
}

static void start(struct straight *straight, void (*meanwhile)(struct straight *straight))
{
    start_with(straight, 8, meanwhile);
}

static uint64_t in_memory(struct straight *straight)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {
        .space_id = straight->on.stage.space,
        .prompt = {.tokens = straight->tokens, .token_count = TOKENS}};
    STAGE_OK(&straight->on.stage,
             kvk_lookup(straight->on.stage.house.cache, &straight->on.stage.house.caller, &request,
                        &reply, &straight->on.stage.house.error));
    return reply.host_tokens;
}

/* Everything that may leave memory does. */
static void crowd(struct straight *straight)
{
    for (uint32_t i = 0; i < 2 * HOST_BLOCKS; i++) {
        uint32_t other[4];
        house_tokens(other, 4, 100000 + 16 * i);
        stage_cache(&straight->on.stage, other, 4, 99);
    }
    stage_check(&straight->on.stage);
}

/* How much of the prompt comes back from disk, with the bytes that were sealed. */
static uint64_t restored(struct straight *straight)
{
    disk_push_out(&straight->on, straight->tokens, TOKENS, 500000);
    struct kvk_sequence_reply reply = stage_open(&straight->on.stage, straight->tokens, TOKENS);
    stage_verify(&straight->on.stage, reply.sequence_id, 0, reply.cached_tokens, 7);
    stage_close(&straight->on.stage, reply.sequence_id);
    return reply.cached_tokens;
}

static void figure_visit(void *context, const char *name, double value)
{
    double *figure = context;
    if (strcmp(name, "kvkeep_disk_straight_blocks_total") == 0) {
        *figure = value;
    }
}

Test(disk_straight, there_and_back_byte_for_byte)
{
    struct straight straight;
    double figure = -1;
    start(&straight, NULL);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_geq(straight.during, 1, "they were kept");
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 4);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 4);
    kvk_report_stats(straight.on.stage.house.cache, figure_visit, &figure);
    cr_assert_eq(figure, 4);
    cr_assert_eq(straight.on.stage.house.cache->upkeep.count, 0, "and let go");
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

static void crowd_and_look(struct straight *straight)
{
    crowd(straight);
    cr_assert_eq(in_memory(straight), TOKENS, "what is being written is not given to others");
}

Test(disk_straight, what_is_being_written_stays_where_it_is)
{
    struct straight straight;
    start(&straight, crowd_and_look);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_geq(straight.during, 1);
    cr_assert_geq(stage_stats(&straight.on.stage).disk_straight_blocks, 4);
    crowd(&straight);
    cr_assert_eq(in_memory(&straight), 0, "afterwards it goes like any other");
    cr_assert_eq(restored(&straight), TOKENS, "and what was written is what was sealed");
    disk_stage_stop(&straight.on);
}

/* A write that does not end: all of the tier but the few can be had, and then it is refused. */
static void fill(struct straight *straight)
{
    uint64_t sequences[HOST_BLOCKS];
    uint32_t count = 0;
    struct kvk_sequence_reply reply;
    for (uint32_t i = 0; i < HOST_BLOCKS; i++) {
        uint32_t other[4];
        house_tokens(other, 4, 300000 + 16 * i);
        const struct kvk_open_request request = {.prompt = {.tokens = other, .token_count = 4},
                                                 .tier = -1};
        enum kvk_status status = stage_try_open(&straight->on.stage, &request, &reply);
        if (status != KVK_OK) {
            cr_assert_eq(status, KVK_EXHAUSTED);
            break;
        }
        sequences[count++] = reply.sequence_id;
    }
    cr_assert_eq(count, HOST_BLOCKS - STRAIGHT_MAX);
    stage_check(&straight->on.stage);
    for (uint32_t i = 0; i < count; i++) {
        stage_close(&straight->on.stage, sequences[i]);
    }
}

Test(disk_straight, a_write_that_never_ends_does_not_hold_a_full_tier)
{
    struct straight straight;
    start(&straight, fill);
    for (uint32_t i = 0; i < HOST_BLOCKS / 4; i++) {
        uint32_t tokens[TOKENS];
        house_tokens(tokens, TOKENS, 1000 * (i + 1));
        stage_cache(&straight.on.stage, tokens, TOKENS, 7);
    }
    disk_rounds(&straight.on);
    cr_assert_geq(straight.during, 1);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, STRAIGHT_MAX);
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

Test(disk_straight, beyond_its_share_a_batch_is_copied)
{
    struct straight straight;
    start(&straight, NULL);
    for (uint32_t i = 0; i < 10; i++) {
        uint32_t tokens[TOKENS];
        house_tokens(tokens, TOKENS, 1000 * (i + 1));
        stage_cache(&straight.on.stage, tokens, TOKENS, 7);
    }
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 40);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, STRAIGHT_MAX);
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

Test(disk_straight, a_tenant_with_a_limit_has_its_share_of_that)
{
    struct straight straight;
    start(&straight, NULL);
    struct kvk_cache *cache = straight.on.stage.house.cache;
    kvk_lock(&cache->lock);
    const struct kvk_space *space = kvk_table_get(&cache->space_table, straight.on.stage.space);
    kvk_tenant_state_of(cache, space->tenant)->quota.limit_bytes[KVK_TIER_HOST] =
        HOST_BLOCKS / 2 * straight.on.stage.block_bytes;
    kvk_unlock(&cache->lock);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 4);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, STRAIGHT_MAX / 2);
    disk_stage_stop(&straight.on);
}

static void invalidate(struct straight *straight)
{
    const struct kvk_invalidate_request request = {.space_id = straight->on.stage.space};
    struct kvk_invalidate_reply reply;
    STAGE_OK(&straight->on.stage,
             kvk_invalidate(straight->on.stage.house.cache, &straight->on.stage.house.caller,
                            &request, &reply, &straight->on.stage.house.error));
    cr_assert_eq(in_memory(straight), 0);
    crowd(straight);
}

Test(disk_straight, an_invalidation_meanwhile_holds)
{
    struct straight straight;
    start(&straight, invalidate);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_geq(straight.during, 1);
    cr_assert_eq(stage_hit(&straight.on.stage, straight.tokens, TOKENS, false), 0);
    crowd(&straight);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_hit(&straight.on.stage, straight.tokens, TOKENS, false), 0);
    disk_stage_stop(&straight.on);
}

Test(disk_straight, what_does_not_suit_is_copied)
{
    struct straight straight;
    start_with(&straight, 3, NULL); /* 1.5 KiB */
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_eq(straight.during, 0, "kept for the copy alone");
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 4);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 0);
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

/* Whose checksum nobody knows is copied, and known then. */
Test(disk_straight, without_a_checksum_it_is_copied)
{
    struct straight straight;
    start(&straight, NULL);
    struct kvk_cache *cache = straight.on.stage.house.cache;
    uint64_t sequence = stage_sealed(&straight.on.stage, straight.tokens, TOKENS, 7);
    uint32_t id = stage_block(&straight.on.stage, sequence, 3);
    kvk_lock(&cache->lock);
    uint64_t *known = kvk_block_checksums(cache, kvk_index_block(cache->index, id), KVK_TIER_HOST);
    uint64_t sealed = known[0];
    known[0] = 0;
    kvk_unlock(&cache->lock);
    disk_rounds(&straight.on);
    cr_assert_eq(known[0], sealed);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 4);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 3);
    stage_close(&straight.on.stage, sequence);
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

Test(disk_straight, damage_before_it_is_written_is_found_when_it_comes_back)
{
    struct straight straight;
    start(&straight, NULL);
    struct kvk_cache *cache = straight.on.stage.house.cache;
    uint64_t sequence = stage_sealed(&straight.on.stage, straight.tokens, TOKENS, 7);
    uint32_t id = stage_block(&straight.on.stage, sequence, 2);
    kvk_lock(&cache->lock);
    kvk_block_address(cache, kvk_index_block(cache->index, id), KVK_TIER_HOST, 0)[77] ^= 1;
    kvk_unlock(&cache->lock);
    stage_close(&straight.on.stage, sequence);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 4);
    cr_assert_eq(restored(&straight), 8, "a miss from the damaged block on");
    cr_assert_geq(stage_stats(&straight.on.stage).disk_damaged_blocks, 1);
    disk_stage_stop(&straight.on);
}

static void take_long(struct straight *straight)
{
    stage_pass_ms(&straight->on.stage, 300);
}

/* What is kept for long is in others' way: a slow disk gets copies, until it is tried again. */
Test(disk_straight, a_slow_disk_gets_copies)
{
    struct straight straight;
    uint32_t tokens[TOKENS];
    start(&straight, take_long);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 4);
    house_tokens(tokens, TOKENS, 2000);
    stage_cache(&straight.on.stage, tokens, TOKENS, 8);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 8);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 4);
    stage_pass_ms(&straight.on.stage, 11000);
    house_tokens(tokens, TOKENS, 3000);
    stage_cache(&straight.on.stage, tokens, TOKENS, 9);
    disk_rounds(&straight.on);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_straight_blocks, 8);
    cr_assert_eq(restored(&straight), TOKENS);
    disk_stage_stop(&straight.on);
}

/* A disk that takes nothing: what was kept for it is let go, and no copy is left. */
Test(disk_straight, a_write_that_fails_lets_go)
{
    struct straight straight;
    start(&straight, NULL);
    atomic_store(&straight.on.faulty.fail_writes, 1000);
    stage_cache(&straight.on.stage, straight.tokens, TOKENS, 7);
    disk_rounds(&straight.on);
    cr_assert_geq(straight.during, 1);
    cr_assert_eq(straight.on.stage.house.cache->upkeep.count, 0);
    cr_assert_eq(stage_stats(&straight.on.stage).disk_written_blocks, 0);
    cr_assert_eq(in_memory(&straight), TOKENS);
    crowd(&straight);
    cr_assert_eq(in_memory(&straight), 0);
    atomic_store(&straight.on.faulty.fail_writes, 0);
    disk_stage_stop(&straight.on);
}
