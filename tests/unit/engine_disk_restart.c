/* What is on disk when the daemon ends, and what of it the next one finds. */
#include "tests/engine_disk_stage.h"
#include "tests/folder.h"

#define HOST KVK_TIER_HOST
#define DISK KVK_TIER_DISK

/* An engine in a folder of its own that is started again and again. */
struct again {
    char folder[64];
    struct stage stage;
    uint32_t host_blocks;
    uint64_t disk_bytes;
    const char *model;
};

static void again_start(struct again *again)
{
    struct stage *stage = &again->stage;
    const struct kvk_geometry geometry = house_geometry();
    house_init(&stage->house);
    struct kvk_config *config = &stage->house.config;
    (void)snprintf(config->durable_folder, sizeof(config->durable_folder), "%s", again->folder);
    config->catalogue_bytes = UINT64_C(64) << 20;
    config->keeper = KVK_CONFIG_KEEPER_NO;
    config->disk_bytes = again->disk_bytes;
    config->disk_admit_uses = 1;
    config->disk_read_ahead = 0;
    config->disk_depth = 8;
    stage->geometry = geometry;
    stage->block_bytes = kvk_geometry_block_bytes(&geometry);
    stage->tables = (struct kvk_tables){.part_count = 0};
    const struct house_options options = {.host_bytes = again->host_blocks * stage->block_bytes,
                                          .manual_clock = true};
    house_start(&stage->house, &options);
    stage->space = house_space_of(&stage->house, &stage->house.caller, again->model, &geometry, 1);
    stage->session = house_session(&stage->house);
    stage_check(stage);
}

static void again_init(struct again *again, uint32_t host_blocks, uint32_t disk_blocks)
{
    *again = (struct again){
        .host_blocks = host_blocks, .disk_bytes = disk_blocks * DISK_SLOT_BYTES, .model = "m"};
    (void)snprintf(again->folder, sizeof(again->folder), "/tmp/kvkeep-again-XXXXXX");
    cr_assert_not_null(mkdtemp(again->folder));
    again_start(again);
}

static void again_rounds(struct again *again)
{
    struct kvk_cache *cache = again->stage.house.cache;
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

static void again_restart(struct again *again)
{
    stage_stop(&again->stage);
    again_start(again);
}

static void again_finish(struct again *again)
{
    stage_stop(&again->stage);
    folder_remove(again->folder);
}

static uint64_t again_disk_blocks(struct again *again)
{
    return stage_used(&again->stage, DISK) * again->stage.block_bytes / DISK_SLOT_BYTES;
}

/* Bytes that the file system has given to files of blocks. */
static uint64_t folder_sum;

static int add_size(const char *path, const struct stat *stat, int kind, struct FTW *walk)
{
    (void)kind;
    (void)walk;
    folder_sum += strstr(path, "/blocks/blocks-") != NULL ? (uint64_t)stat->st_blocks * 512 : 0;
    return 0;
}

static uint64_t folder_bytes(const struct again *again)
{
    folder_sum = 0;
    (void)nftw(again->folder, add_size, 16, FTW_PHYS);
    return folder_sum;
}

Test(disk_restart, g1_a_hundred_blocks_twenty_times)
{
    struct again again;
    uint32_t tokens[20];
    again_init(&again, 40, 120);
    for (uint32_t round = 0; round < 20; round++) {
        for (uint32_t i = 0; i < 20; i++) { /* 20 prompts of 5 blocks */
            house_tokens(tokens, 20, 1000 + 100 * i);
            struct kvk_sequence_reply reply = stage_open(&again.stage, tokens, 20);
            cr_assert_eq(reply.cached_tokens, round == 0 ? 0 : 20, "round %u prompt %u", round, i);
            if (round == 0) {
                stage_fill(&again.stage, reply.sequence_id, i);
            }
            stage_verify(&again.stage, reply.sequence_id, 0, 20, i);
            stage_close(&again.stage, reply.sequence_id);
            again_rounds(&again);
        }
        cr_assert_eq(again_disk_blocks(&again), 100);
        cr_assert_leq(folder_bytes(&again), 110 * DISK_SLOT_BYTES);
        again_restart(&again);
        cr_assert_eq(again_disk_blocks(&again), 100);
        cr_assert_eq(stage_stats(&again.stage).disk_returned_blocks, 100);
        cr_assert_eq(again.stage.house.cache->tiers[DISK].pool.limit_bytes, 120 * DISK_SLOT_BYTES,
                     "capacity as configured");
    }
    again_finish(&again);
}

Test(disk_restart, what_was_invalidated_stays_so)
{
    struct again again;
    uint32_t tokens[16];
    again_init(&again, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&again.stage, tokens, 16, 7);
    again_rounds(&again);
    struct kvk_invalidate_request request = {.space_id = again.stage.space};
    struct kvk_invalidate_reply reply;
    STAGE_OK(&again.stage, kvk_invalidate(again.stage.house.cache, &again.stage.house.caller,
                                          &request, &reply, &again.stage.house.error));
    cr_assert_eq(reply.blocks[DISK], 4);
    again_restart(&again);
    cr_assert_eq(stage_hit(&again.stage, tokens, 16, false), 0);
    cr_assert_eq(again_disk_blocks(&again), 0);
    cr_assert_eq(folder_bytes(&again), 0);
    again_finish(&again);
}

Test(disk_restart, a_missing_or_shrunken_file_is_a_miss)
{
    for (int kind = 0; kind < 2; kind++) {
        struct again again;
        uint32_t tokens[16];
        char path[160];
        again_init(&again, 8, 64);
        house_tokens(tokens, 16, 1000);
        stage_cache(&again.stage, tokens, 16, 7);
        again_rounds(&again);
        (void)snprintf(path, sizeof(path), "%s/blocks/blocks-%016llx-0", again.folder,
                       (unsigned long long)again.stage.space);
        stage_stop(&again.stage);
        cr_assert_eq(kind == 0 ? unlink(path) : truncate(path, DISK_SLOT_BYTES), 0);
        again_start(&again);
        struct kvk_sequence_reply reply = stage_open(&again.stage, tokens, 16);
        cr_assert_leq(reply.cached_tokens, kind == 0 ? 0 : 4);
        stage_verify(&again.stage, reply.sequence_id, 0, reply.cached_tokens, 7);
        cr_assert_geq(stage_stats(&again.stage).disk_read_failures +
                          stage_stats(&again.stage).disk_damaged_blocks,
                      1);
        stage_fill(&again.stage, reply.sequence_id, 7);
        stage_close(&again.stage, reply.sequence_id);
        again_rounds(&again);
        again_restart(&again);
        reply = stage_open(&again.stage, tokens, 16);
        cr_assert_eq(reply.cached_tokens, 16, "whole again, and durable");
        stage_verify(&again.stage, reply.sequence_id, 0, 16, 7);
        again_finish(&again);
    }
}

Test(disk_restart, a_smaller_disk_than_before)
{
    struct again again;
    uint32_t tokens[4];
    again_init(&again, 8, 64);
    for (uint32_t i = 0; i < 64; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&again.stage, tokens, 4, i);
        again_rounds(&again);
    }
    cr_assert_geq(again_disk_blocks(&again), 60);
    again.disk_bytes = 16 * DISK_SLOT_BYTES;
    again_restart(&again);
    cr_assert_leq(again_disk_blocks(&again), 16);
    cr_assert_geq(stage_stats(&again.stage).disk_refused_blocks, 40);
    cr_assert_leq(folder_bytes(&again), 16 * DISK_SLOT_BYTES);
    again.disk_bytes = 64 * DISK_SLOT_BYTES;
    again_restart(&again);
    cr_assert_leq(again_disk_blocks(&again), 16);
    house_tokens(tokens, 4, 90000);
    stage_cache(&again.stage, tokens, 4, 1);
    again_rounds(&again);
    stage_check(&again.stage);
    again_finish(&again);
}

/* A slot that its block left is nobody's until the removal of its record is committed. */
Test(disk_restart, a_slot_waits_for_its_record)
{
    struct again again;
    uint32_t tokens[16];
    again_init(&again, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&again.stage, tokens, 16, 7);
    again_rounds(&again);
    struct kvk_cache *cache = again.stage.house.cache;
    STAGE_OK(&again.stage, kvk_catalogue_flush(cache->catalogue, &again.stage.house.error));
    kvk_lock(&cache->lock);
    struct kvk_space *space = kvk_table_get(&cache->space_table, again.stage.space);
    struct kvk_group *group = space->groups[0];
    uint32_t id = group->tiers[DISK].owners[3] - 1; /* the chain's end */
    cr_assert_eq(kvk_index_block(cache->index, id)->position, 3);
    kvk_block_drop_copy(cache, id, DISK, true);
    cr_assert_eq(group->disk->leaving_count, 1);
    cr_assert(kvk_arena_is_used(&group->tiers[DISK].arena, 3));
    cr_assert_eq(kvk_slot_take(cache, group, DISK), KVK_SLOT_NONE, "not this one");
    kvk_cache_check_locked(cache);
    kvk_unlock(&cache->lock);
    STAGE_OK(&again.stage, kvk_catalogue_flush(cache->catalogue, &again.stage.house.error));
    again_rounds(&again);
    kvk_lock(&cache->lock);
    cr_assert_eq(group->disk->leaving_count, 0);
    cr_assert_not(kvk_arena_is_used(&group->tiers[DISK].arena, 3));
    kvk_unlock(&cache->lock);
    again_finish(&again);
}

/* The least used goes first, also after a restart. */
Test(disk_restart, worth_comes_back)
{
    struct again again;
    uint32_t tokens[4];
    again_init(&again, 4, 10);
    for (uint32_t i = 0; i < 8; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&again.stage, tokens, 4, i);
        again_rounds(&again);
    }
    again_restart(&again);
    for (uint32_t i = 0; i < 8; i++) { /* out of memory, and so in the disk's queue */
        house_tokens(tokens, 4, 5000 + 16 * i);
        stage_cache(&again.stage, tokens, 4, i);
        again_rounds(&again);
    }
    struct kvk_cache *cache = again.stage.house.cache;
    uint32_t found = 0;
    for (uint32_t i = 0; i < 8; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        found += stage_hit(&again.stage, tokens, 4, false) == 4 ? 1 : 0;
    }
    cr_assert_leq(found, 3, "older than what came later");
    kvk_cache_check(cache);
    again_finish(&again);
}

Test(disk_restart, files_of_nobody_are_swept)
{
    struct again again;
    char path[160];
    again_init(&again, 8, 64);
    (void)snprintf(path, sizeof(path), "%s/blocks/blocks-%016llx-0", again.folder,
                   (unsigned long long)again.stage.space ^ 0x5aULL);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(posix_fallocate(fd, 0, 1 << 20), 0);
    (void)close(fd);
    again_restart(&again);
    cr_assert_eq(access(path, F_OK), -1);
    again_finish(&again);
}
