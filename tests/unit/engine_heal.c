/* Blocks that are damaged in memory, with a copy on disk: served from it, held or not. */
#include "daemon/report.h"
#include "daemon/scrub.h"
#include "tests/engine_disk_stage.h"

#define BLOCKS 4
#define TOKENS (BLOCKS * 4)

struct heal_stage {
    struct disk_stage on;
    uint32_t tokens[TOKENS];
    uint64_t sequence; /* that holds the chain; 0: closed */
};

static void heal_start(struct heal_stage *heal, uint32_t device_blocks, uint32_t host_blocks)
{
    memset(heal, 0, sizeof(*heal));
    disk_stage_init(&heal->on);
    disk_stage_start(&heal->on, device_blocks, host_blocks, 64);
    house_tokens(heal->tokens, TOKENS, 100);
    heal->sequence = stage_sealed(&heal->on.stage, heal->tokens, TOKENS, 7);
    disk_rounds(&heal->on);
    cr_assert_eq(disk_blocks(&heal->on), BLOCKS);
}

static void heal_stop(struct heal_stage *heal)
{
    if (heal->sequence != 0) {
        stage_close(&heal->on.stage, heal->sequence);
    }
    disk_stage_stop(&heal->on);
}

/* Behind the daemon's back, as one could who has the memory mapped. */
static void flip(struct heal_stage *heal, uint32_t index)
{
    struct kvk_cache *cache = heal->on.stage.house.cache;
    uint32_t id = stage_block(&heal->on.stage, heal->sequence, index);
    kvk_lock(&cache->lock);
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    kvk_block_address(cache, block, kvk_block_tier(block), 0)[100] ^= 0x10;
    kvk_unlock(&cache->lock);
}

static uint32_t slot_on_disk(struct heal_stage *heal, uint32_t index)
{
    struct kvk_cache *cache = heal->on.stage.house.cache;
    uint32_t id = stage_block(&heal->on.stage, heal->sequence, index);
    kvk_lock(&cache->lock);
    uint32_t slot = kvk_index_block(cache->index, id)->slot[KVK_TIER_DISK];
    kvk_unlock(&cache->lock);
    cr_assert_neq(slot, KVK_SLOT_NONE);
    return slot;
}

static void flip_on_disk(struct heal_stage *heal, uint32_t index)
{
    char path[160];
    uint8_t byte = 0;
    (void)snprintf(path, sizeof(path), "%s/blocks-%016llx-0", heal->on.faulty.folder,
                   (unsigned long long)heal->on.stage.space);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0, "%s", path);
    off_t offset = (off_t)slot_on_disk(heal, index) * DISK_SLOT_BYTES + 77;
    cr_assert_eq(pread(fd, &byte, 1, offset), 1);
    byte ^= 1;
    cr_assert_eq(pwrite(fd, &byte, 1, offset), 1);
    (void)close(fd);
}

static void scrub(struct heal_stage *heal)
{
    while (kvk_scrub_step_unlocked(heal->on.stage.house.cache)) {
    }
    stage_check(&heal->on.stage);
}

static void stat_find(void *context, const char *name, double value)
{
    if (strcmp(name, "kvkeep_healed_blocks_total") == 0) {
        *(double *)context = value;
    }
}

static double healed(struct heal_stage *heal)
{
    double value = -1;
    kvk_report_stats(heal->on.stage.house.cache, stat_find, &value);
    return value;
}

Test(heal, a_held_block_is_made_whole_where_it_is)
{
    struct heal_stage heal;
    heal_start(&heal, 0, 16);
    struct stage *stage = &heal.on.stage;
    uint32_t slot = kvk_index_block(stage->house.cache->index, stage_block(stage, heal.sequence, 2))
                        ->slot[KVK_TIER_HOST];
    flip(&heal, 2);
    scrub(&heal);
    cr_assert_eq(healed(&heal), 1);
    cr_assert_eq(stage_stats(stage).checksum_failures, 1);
    cr_assert_eq(kvk_index_block(stage->house.cache->index, stage_block(stage, heal.sequence, 2))
                     ->slot[KVK_TIER_HOST],
                 slot, "the number in the holder's table");
    stage_verify(stage, heal.sequence, 0, TOKENS, 7);
    cr_assert_eq(stage_hit(stage, heal.tokens, TOKENS, false), TOKENS);
    cr_assert_eq(disk_tokens(&heal.on, heal.tokens, TOKENS), 0, "in memory");
    scrub(&heal);
    cr_assert_eq(stage_stats(stage).checksum_failures, 1, "it is what was sealed");
    heal_stop(&heal);
}

/* A swap that finds it brings back what was sealed. */
Test(heal, swapped_out_and_damaged_comes_back_from_disk)
{
    struct heal_stage heal;
    heal_start(&heal, 16, 16);
    struct stage *stage = &heal.on.stage;
    struct kvk_swap_reply swapped;
    cr_assert_eq(stage_try_swap_out(stage, heal.sequence, &swapped), KVK_OK);
    flip(&heal, 1);
    cr_assert_eq(stage_try_swap_in(stage, heal.sequence, &swapped), KVK_OK, "%s",
                 stage->house.error.text);
    cr_assert_eq(healed(&heal), 1);
    stage_check(stage);
    stage_verify(stage, heal.sequence, 0, TOKENS, 7);
    heal_stop(&heal);
}

/* Whoever reads it is given what was sealed, and need not know. */
Test(heal, a_read_that_finds_it_is_answered)
{
    struct heal_stage heal;
    heal_start(&heal, 0, 16);
    flip(&heal, 3);
    stage_verify(&heal.on.stage, heal.sequence, 0, TOKENS, 7);
    cr_assert_eq(healed(&heal), 1);
    stage_check(&heal.on.stage);
    heal_stop(&heal);
}

/* What nobody holds has no need of it: the damaged bytes go, and the copy on disk serves. */
Test(heal, what_nobody_holds_is_served_from_disk)
{
    struct heal_stage heal;
    heal_start(&heal, 0, 16);
    struct stage *stage = &heal.on.stage;
    flip(&heal, 2);
    stage_close(stage, heal.sequence);
    scrub(&heal);
    struct kvk_sequence_reply reply = stage_open(stage, heal.tokens, TOKENS);
    cr_assert_eq(reply.cached_tokens, TOKENS);
    heal.sequence = reply.sequence_id;
    stage_verify(stage, heal.sequence, 0, TOKENS, 7);
    heal_stop(&heal);
}

/* A copy on disk that is damaged as well, or cannot be read, heals nothing: a miss, never a hit. */
Test(heal, damaged_in_both_places_is_a_miss)
{
    struct heal_stage heal;
    heal_start(&heal, 0, 16);
    struct stage *stage = &heal.on.stage;
    flip_on_disk(&heal, 2);
    flip(&heal, 2);
    scrub(&heal);
    cr_assert_eq(healed(&heal), 0);
    cr_assert_eq(stage_hit(stage, heal.tokens, TOKENS, false), 2 * 4);
    cr_assert_eq(stage_stats(stage).disk_damaged_blocks, 1);
    heal_stop(&heal);
}

/* A checksum that does not match is found before a byte of it is copied. */
Test(heal, damaged_on_disk_too_changes_nothing_in_memory)
{
    struct heal_stage heal;
    uint8_t before[128];
    heal_start(&heal, 0, 16);
    struct stage *stage = &heal.on.stage;
    struct kvk_cache *cache = stage->house.cache;
    uint32_t id = stage_block(stage, heal.sequence, 2);
    const uint8_t *memory =
        kvk_block_address(cache, kvk_index_block(cache->index, id), KVK_TIER_HOST, 0);
    flip_on_disk(&heal, 2);
    flip(&heal, 2);
    memcpy(before, memory, sizeof(before));
    cr_assert_eq(stage_try_read(stage, heal.sequence, 0, 0, TOKENS, 7), KVK_DATA_LOSS);
    cr_assert_eq(healed(&heal), 0);
    cr_assert_eq(stage_stats(stage).disk_damaged_blocks, 1);
    cr_assert_eq(stage_stats(stage).disk_read_failures, 0);
    cr_assert_arr_eq(memory, before, sizeof(before));
    stage_check(stage);
    heal_stop(&heal);
}

Test(heal, a_disk_that_does_not_read_heals_later)
{
    struct heal_stage heal;
    heal_start(&heal, 0, 16);
    struct stage *stage = &heal.on.stage;
    flip(&heal, 1);
    atomic_store(&heal.on.faulty.fail_reads, 1);
    cr_assert_eq(stage_try_read(stage, heal.sequence, 0, 0, TOKENS, 7), KVK_DATA_LOSS);
    cr_assert_eq(healed(&heal), 0);
    stage_check(stage);
    /* Another opens the same: the disk answers now, and both have it. */
    struct kvk_sequence_reply reply = stage_open(stage, heal.tokens, TOKENS);
    cr_assert_eq(reply.cached_tokens, TOKENS);
    cr_assert_eq(healed(&heal), 1);
    stage_verify(stage, heal.sequence, 0, TOKENS, 7);
    stage_verify(stage, reply.sequence_id, 0, TOKENS, 7);
    stage_close(stage, reply.sequence_id);
    heal_stop(&heal);
}
