/* The disk as a tier: what is written, what comes back, and what a failing disk does to it. */
#include "tests/engine_disk_stage.h"

#define HOST KVK_TIER_HOST
#define DISK KVK_TIER_DISK

/* ---- There and back ---- */

Test(disk, there_and_back_byte_for_byte)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 4);
    cr_assert_eq(disk_tokens(&on, tokens, 16), 0, "in memory too");
    on.stage.house.config.disk_admit_uses = 1000; /* what pushes it out is not to follow it */
    disk_push_out(&on, tokens, 16, 5000);
    cr_assert_eq(disk_tokens(&on, tokens, 16), 16);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 16);
    cr_assert_eq(reply.cached_tokens, 16);
    cr_assert_eq(reply.disk.disk_tokens, 16);
    cr_assert_eq(reply.disk.restored_tokens, 16);
    cr_assert_gt(reply.disk.restore_ns, 0);
    stage_verify(&on.stage, reply.sequence_id, 0, 16, 7);
    struct kvk_cache_stats stats = stage_stats(&on.stage);
    cr_assert_eq(stats.disk_written_blocks, 4);
    cr_assert_eq(stats.disk_written_bytes, 4 * DISK_SLOT_BYTES);
    cr_assert_eq(stats.disk_restored_blocks, 4);
    cr_assert_eq(stats.disk_restored_bytes, 4 * on.stage.block_bytes);
    cr_assert_eq(stats.disk_restores, 1);
    stage_close(&on.stage, reply.sequence_id);
    disk_stage_stop(&on);
}

Test(disk, a_lease_brings_it_back_too)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    struct kvk_pin_reply reply = stage_pin(&on.stage, tokens, 16, 1000);
    cr_assert_eq(reply.cached_tokens, 16);
    cr_assert_eq(reply.disk.restored_tokens, 16);
    STAGE_OK(&on.stage, stage_try_read(&on.stage, 0, reply.lease_id, 0, 16, 7));
    stage_check(&on.stage);
    disk_stage_stop(&on);
}

Test(disk, to_the_device_by_way_of_the_host)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 6, 6, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    cr_assert_eq(disk_tokens(&on, tokens, 16), 16);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 16);
    cr_assert_eq(reply.cached_tokens, 16);
    stage_verify(&on.stage, reply.sequence_id, 0, 16, 7);
    uint32_t first = stage_block(&on.stage, reply.sequence_id, 0);
    kvk_lock(&on.stage.house.cache->lock);
    cr_assert_eq(kvk_index_block(on.stage.house.cache->index, first)->tier_mask,
                 1U << KVK_TIER_DEVICE | 1U << DISK);
    kvk_unlock(&on.stage.house.cache->lock);
    disk_stage_stop(&on);
}

Test(disk, without_a_host_tier)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 8, 0, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    cr_assert_eq(disk_tokens(&on, tokens, 16), 16);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 16);
    cr_assert_eq(reply.cached_tokens, 16);
    stage_verify(&on.stage, reply.sequence_id, 0, 16, 7);
    disk_stage_stop(&on);
}

Test(disk, a_look_up_thread_never_waits_for_it)
{
    struct disk_stage on;
    uint32_t tokens[8];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 4, 64);
    house_tokens(tokens, 8, 1000);
    stage_cache(&on.stage, tokens, 8, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 8, 5000);
    long reads = atomic_load(&on.faulty.reads);
    on.stage.house.caller.may_block = false;
    struct kvk_sequence_reply reply;
    struct kvk_pin_reply pinned;
    cr_assert_eq(
        stage_try_open(&on.stage,
                       &(struct kvk_open_request){.session_id = on.stage.session,
                                                  .space_id = on.stage.space,
                                                  .prompt = {.tokens = tokens, .token_count = 8},
                                                  .tier = -1},
                       &reply),
        KVK_WOULD_BLOCK);
    cr_assert_eq(stage_try_pin(&on.stage, tokens, 8, 1000, false, &pinned), KVK_WOULD_BLOCK);
    cr_assert_eq(disk_tokens(&on, tokens, 8), 8, "a look-up answers");
    cr_assert_eq(atomic_load(&on.faulty.reads), reads);
    on.stage.house.caller.may_block = true;
    disk_stage_stop(&on);
}

/* ---- What is written ---- */

Test(disk, one_hit_blocks_stay_off_it)
{
    struct disk_stage on;
    uint32_t once[4];
    uint32_t twice[4];
    disk_stage_init(&on);
    on.stage.house.config.disk_admit_uses = 2;
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(once, 4, 1000);
    house_tokens(twice, 4, 2000);
    stage_cache(&on.stage, once, 4, 1);
    stage_cache(&on.stage, twice, 4, 2);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 0);
    stage_close(&on.stage, stage_open(&on.stage, twice, 4).sequence_id);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 1);
    disk_push_out(&on, once, 4, 5000);
    cr_assert_eq(stage_hit(&on.stage, once, 4, false), 0);
    disk_stage_stop(&on);
}

Test(disk, what_leaves_memory_before_its_turn_is_not_on_it)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 4, 64);
    for (uint32_t i = 0; i < 20; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
    }
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 4);
    cr_assert_eq(stage_stats(&on.stage).disk_late_blocks, 16);
    disk_stage_stop(&on);
}

/* Every counter of the disk tier goes out under its name. */
static void find_stat(void *context, const char *name, double value)
{
    struct {
        const char *name;
        double value;
        bool found;
    } *wanted = context;
    if (strcmp(name, wanted->name) == 0) {
        wanted->value = value;
        wanted->found = true;
    }
}

Test(disk, its_figures_go_out)
{
    struct disk_stage on;
    uint32_t tokens[16];
    struct {
        const char *name;
        double value;
        bool found;
    } wanted;
    static const struct {
        const char *name;
        double least;
    } names[] = {{"kvkeep_disk_written_blocks_total", 4},
                 {"kvkeep_disk_written_bytes_total", 4 * DISK_SLOT_BYTES},
                 {"kvkeep_disk_restored_blocks_total", 4},
                 {"kvkeep_disk_restored_bytes_total", 4 * 1024},
                 {"kvkeep_disk_restores_total", 1},
                 {"kvkeep_disk_state{state=\"good\"}", 1},
                 {"kvkeep_disk_read_bytes_total", 4 * 1024},
                 {"kvkeep_disk_wrote_bytes_total", 4 * 1024},
                 {"kvkeep_tier_used_bytes{tier=\"disk\"}", 4 * DISK_SLOT_BYTES},
                 {"kvkeep_tier_limit_bytes{tier=\"disk\"}", 64 * DISK_SLOT_BYTES}};
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    stage_close(&on.stage, stage_open(&on.stage, tokens, 16).sequence_id);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        wanted.name = names[i].name;
        wanted.found = false;
        kvk_report_stats(on.stage.house.cache, find_stat, &wanted);
        cr_assert(wanted.found, "%s", names[i].name);
        cr_assert_geq(wanted.value, names[i].least, "%s", names[i].name);
    }
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *rows;
    uint32_t count;
    STAGE_OK(&on.stage, kvk_report_occupancy(on.stage.house.cache, &on.stage.house.caller,
                                             (struct kvk_view){.size = 0}, tiers, &rows, &count,
                                             &on.stage.house.error));
    cr_assert_eq(tiers[DISK].used_bytes + tiers[DISK].free_bytes, tiers[DISK].limit_bytes);
    cr_assert_geq(rows[0].tier_blocks[DISK], 4);
    free(rows);
    disk_stage_stop(&on);
}

/* A block that waits to be written, and lost its bytes while its place in the chain was kept. */
Test(disk, a_hollow_block_is_late)
{
    struct disk_stage on;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[32];
    geometry.window = 4;
    disk_stage_init(&on);
    disk_stage_start_with(&on, &geometry, 0, 4, 64, false);
    house_tokens(tokens, 32, 1000);
    uint64_t id = stage_open(&on.stage, tokens, 4).sequence_id;
    stage_fill(&on.stage, id, 7);
    for (uint32_t i = 1; i < 8; i++) {
        STAGE_OK(&on.stage, stage_try_append(&on.stage, id, 4 * i, tokens + 4 * i, 4, false,
                                             &(struct kvk_sequence_reply){0}));
        stage_fill(&on.stage, id, 7);
    }
    disk_rounds(&on);
    cr_assert_gt(disk_blocks(&on), 0);
    stage_close(&on.stage, id);
    disk_stage_stop(&on);
}

Test(disk, the_queue_is_bounded)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    on.stage.house.config.blocks = 8;
    disk_stage_start(&on, 0, 64, 64);
    on.stage.house.cache->disk_tier->behind.capacity = 4;
    for (uint32_t i = 0; i < 8; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
    }
    cr_assert_eq(stage_stats(&on.stage).disk_skipped_blocks, 4);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 4);
    disk_stage_stop(&on);
}

/* A block that was sealed a second time meets itself on disk: it is in memory again, and shared. */
Test(disk, what_is_computed_again_joins_what_is_on_disk)
{
    struct disk_stage on;
    uint32_t tokens[8];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 4, 64);
    house_tokens(tokens, 8, 1000);
    stage_cache(&on.stage, tokens, 8, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 8, 5000);
    struct kvk_open_request request = {.session_id = on.stage.session,
                                       .space_id = on.stage.space,
                                       .prompt = {.tokens = tokens, .token_count = 8},
                                       .tier = -1,
                                       .no_lookup = true};
    struct kvk_sequence_reply reply;
    STAGE_OK(&on.stage, stage_try_open(&on.stage, &request, &reply));
    cr_assert_eq(reply.cached_tokens, 0);
    stage_fill(&on.stage, reply.sequence_id, 7);
    stage_check(&on.stage);
    cr_assert_eq(disk_tokens(&on, tokens, 8), 0, "in memory again");
    stage_verify(&on.stage, reply.sequence_id, 0, 8, 7);
    stage_close(&on.stage, reply.sequence_id);
    cr_assert_eq(stage_hit(&on.stage, tokens, 8, false), 8);
    cr_assert_eq(stage_used(&on.stage, HOST), 4);
    disk_stage_stop(&on);
}

/* ---- Restore or compute ---- */

static uint64_t costly_space(struct disk_stage *on, const char *model, double flops_per_token)
{
    struct kvk_space_request request = {.block_tokens = 4,
                                        .group_count = 1,
                                        .flops_per_token = flops_per_token,
                                        .flops_per_second = 1e12};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    request.groups[0] = house_geometry();
    STAGE_OK(&on->stage, kvk_space_open(on->stage.house.cache, &on->stage.house.caller, &request,
                                        &reply, &on->stage.house.error));
    return reply.space_id;
}

static struct kvk_sequence_reply after_disk(struct disk_stage *on, uint64_t space)
{
    uint32_t tokens[8];
    on->stage.space = space;
    house_tokens(tokens, 8, 1000);
    stage_cache(&on->stage, tokens, 8, 7);
    disk_rounds(on);
    disk_push_out(on, tokens, 8, 5000);
    struct kvk_lookup_reply found;
    const struct kvk_lookup_request request = {.space_id = space,
                                               .prompt = {.tokens = tokens, .token_count = 8}};
    STAGE_OK(&on->stage, kvk_lookup(on->stage.house.cache, &on->stage.house.caller, &request,
                                    &found, &on->stage.house.error));
    struct kvk_sequence_reply reply = stage_open(&on->stage, tokens, 8);
    cr_assert_eq(found.disk_tokens, 8);
    cr_assert_eq(found.restore_recompute_ns, reply.disk.recompute_ns);
    cr_assert_gt(found.restore_ns, 0);
    return reply;
}

Test(disk, the_quicker_of_two_ways)
{
    struct disk_stage on;
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 4, 64);
    /* 8 tokens x 1e9 flops at 1e12 a second: 8 ms, far more than reading 8 KiB. */
    struct kvk_sequence_reply dear = after_disk(&on, costly_space(&on, "dear", 1e9));
    cr_assert_eq(dear.cached_tokens, 8);
    cr_assert_eq(dear.disk.recompute_ns, 8000000);
    cr_assert_lt(dear.disk.restore_ns, dear.disk.recompute_ns);
    cr_assert_eq(dear.disk.recompute_tokens, 0);
    stage_close(&on.stage, dear.sequence_id);
    /* 8 ns: no disk is as quick. */
    struct kvk_sequence_reply cheap = after_disk(&on, costly_space(&on, "cheap", 1e3));
    cr_assert_eq(cheap.cached_tokens, 0);
    cr_assert_eq(cheap.disk.recompute_ns, 8);
    cr_assert_gt(cheap.disk.restore_ns, cheap.disk.recompute_ns);
    cr_assert_eq(cheap.disk.recompute_tokens, 8);
    cr_assert_eq(cheap.disk.restored_tokens, 0);
    struct kvk_cache_stats stats = stage_stats(&on.stage);
    cr_assert_eq(stats.disk_restores, 1);
    cr_assert_eq(stats.disk_recomputes, 1);
    disk_stage_stop(&on);
}

/* ---- Damage: G2 ---- */

static void file_name(const struct disk_stage *on, char *path, size_t size)
{
    (void)snprintf(path, size, "%s/blocks-%016llx-0", on->faulty.folder,
                   (unsigned long long)on->stage.space);
}

static uint32_t disk_slot(struct disk_stage *on, const uint32_t *tokens, uint32_t index)
{
    struct kvk_cache *cache = on->stage.house.cache;
    uint32_t slot = KVK_SLOT_NONE;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    struct kvk_prefix prefix;
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 16};
    kvk_lock(&cache->lock);
    struct kvk_space *space = kvk_table_get(&cache->space_table, on->stage.space);
    kvk_space_roots_find(cache, space, NULL, 0, roots);
    kvk_prefix_find(cache, space, roots, &prompt, 16, &prefix);
    if (index < prefix.known[0]) {
        slot = kvk_index_block(cache->index, cache->path[0][index])->slot[DISK];
    }
    kvk_unlock(&cache->lock);
    cr_assert_neq(slot, KVK_SLOT_NONE);
    return slot;
}

static void damaged_from(struct disk_stage *on, const uint32_t *tokens, uint64_t hit)
{
    uint64_t used = stage_used(&on->stage, HOST);
    struct kvk_sequence_reply reply = stage_open(&on->stage, tokens, 16);
    cr_assert_leq(reply.cached_tokens, hit);
    stage_verify(&on->stage, reply.sequence_id, 0, reply.cached_tokens, 7);
    stage_fill(&on->stage, reply.sequence_id, 7);
    stage_close(&on->stage, reply.sequence_id);
    stage_check(&on->stage);
    cr_assert_leq(stage_used(&on->stage, HOST), used + 4);
    reply = stage_open(&on->stage, tokens, 16);
    cr_assert_eq(reply.cached_tokens, 16, "the next request is exact");
    stage_verify(&on->stage, reply.sequence_id, 0, 16, 7);
    stage_close(&on->stage, reply.sequence_id);
}

Test(disk, g2_damage_is_a_miss)
{
    for (int kind = 0; kind < 3; kind++) {
        struct disk_stage on;
        struct kvk_geometry geometry = house_geometry();
        uint32_t tokens[16];
        char path[160];
        uint8_t slots[2][DISK_SLOT_BYTES];
        geometry.layers = 4;
        geometry.kv_heads = 1;
        disk_stage_init(&on);
        disk_stage_start_with(&on, &geometry, 0, 8, 64, false);
        house_tokens(tokens, 16, 1000);
        stage_cache(&on.stage, tokens, 16, 7);
        disk_rounds(&on);
        disk_push_out(&on, tokens, 16, 5000);
        file_name(&on, path, sizeof(path));
        int fd = open(path, O_RDWR);
        cr_assert_geq(fd, 0);
        off_t at[2] = {(off_t)disk_slot(&on, tokens, 2) * DISK_SLOT_BYTES,
                       (off_t)disk_slot(&on, tokens, 3) * DISK_SLOT_BYTES};
        for (int i = 0; i < 2; i++) {
            cr_assert_eq(pread(fd, slots[i], DISK_SLOT_BYTES, at[i]), (ssize_t)DISK_SLOT_BYTES);
        }
        if (kind == 0) {
            slots[0][77] ^= 1;
            cr_assert_eq(pwrite(fd, slots[0], DISK_SLOT_BYTES, at[0]), (ssize_t)DISK_SLOT_BYTES);
        } else if (kind == 1) {
            cr_assert_eq(ftruncate(fd, at[0] < at[1] ? at[0] : at[1]), 0);
        } else {
            cr_assert_eq(pwrite(fd, slots[1], DISK_SLOT_BYTES, at[0]), (ssize_t)DISK_SLOT_BYTES);
            cr_assert_eq(pwrite(fd, slots[0], DISK_SLOT_BYTES, at[1]), (ssize_t)DISK_SLOT_BYTES);
        }
        (void)close(fd);
        damaged_from(&on, tokens, 8);
        struct kvk_cache_stats stats = stage_stats(&on.stage);
        cr_assert_geq(stats.disk_damaged_blocks + stats.disk_read_failures, 1, "kind %d", kind);
        disk_rounds(&on);
        disk_stage_stop(&on);
    }
}

/* ---- A disk that fails ---- */

Test(disk, a_read_that_fails_is_a_miss)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    atomic_store(&on.faulty.fail_reads, 4);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 16);
    cr_assert_lt(reply.cached_tokens, 16);
    stage_verify(&on.stage, reply.sequence_id, 0, reply.cached_tokens, 7);
    cr_assert_geq(stage_stats(&on.stage).disk_read_failures, 1);
    stage_close(&on.stage, reply.sequence_id);
    cr_expect_geq(on.stage.house.cache->journal.counts[KVK_GONE_DAMAGED], 1);
    stage_check(&on.stage);
    disk_stage_stop(&on);
}

Test(disk, writes_that_fail_leave_nothing_behind)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    atomic_store(&on.faulty.fail_syncs, 1);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 0, "not synced: not there");
    cr_assert_eq(stage_stats(&on.stage).disk_write_failures, 4);
    house_tokens(tokens, 16, 2000);
    stage_cache(&on.stage, tokens, 16, 8);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 0, "not at once again");
    stage_pass_ms(&on.stage, 1500);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 4);
    disk_stage_stop(&on);
}

Test(disk, a_torn_write_is_found_out)
{
    struct disk_stage on;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[16];
    geometry.layers = 16; /* 8 KiB: half of it is lost */
    disk_stage_init(&on);
    disk_stage_start_with(&on, &geometry, 0, 8, 64, false);
    house_tokens(tokens, 16, 1000);
    atomic_store(&on.faulty.torn_writes, 4);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 16);
    cr_assert_eq(reply.cached_tokens, 0);
    cr_assert_geq(stage_stats(&on.stage).disk_damaged_blocks, 1);
    disk_stage_stop(&on);
}

Test(disk, a_dead_disk_stops_nothing_else)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    atomic_store(&on.faulty.fail_writes, 1000000);
    atomic_store(&on.faulty.fail_reads, 1000000);
    for (uint32_t i = 0; i < 100; i++) {
        house_tokens(tokens, 16, 1000 + 64 * i);
        stage_cache(&on.stage, tokens, 16, i);
        stage_pass_ms(&on.stage, 2000);
        disk_rounds(&on);
        cr_assert_eq(stage_hit(&on.stage, tokens, 16, false), 16);
    }
    cr_assert_eq(disk_blocks(&on), 0);
    struct kvk_disk_report report;
    kvk_disk_report(on.stage.house.cache, &report);
    cr_assert_str_eq(report.state, "off");
    cr_assert_neq(report.reason[0], '\0');
    atomic_store(&on.faulty.fail_writes, 0);
    atomic_store(&on.faulty.fail_reads, 0);
    for (int i = 0; i < PATIENCE_MS / 20 && strcmp(report.state, "good") != 0; i++) {
        house_sleep_ms(20); /* the disk's own prober */
        kvk_disk_report(on.stage.house.cache, &report);
    }
    cr_assert_str_eq(report.state, "good");
    house_tokens(tokens, 16, 90000);
    stage_cache(&on.stage, tokens, 16, 3);
    stage_pass_ms(&on.stage, 2000);
    disk_rounds(&on);
    cr_assert_geq(disk_blocks(&on), 4);
    disk_stage_stop(&on);
}

/* ---- Room: G3 ---- */

static uint64_t folder_bytes(const struct disk_stage *on)
{
    char path[160];
    struct stat about;
    file_name(on, path, sizeof(path));
    return stat(path, &about) == 0 ? (uint64_t)about.st_blocks * 512 : 0;
}

Test(disk, g3_the_limit_is_never_passed)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 50);
    for (uint32_t i = 0; i < 500; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
        disk_rounds(&on);
        cr_assert_leq(disk_blocks(&on), 50);
        cr_assert_leq(folder_bytes(&on), 51 * DISK_SLOT_BYTES);
    }
    cr_assert_geq(disk_blocks(&on), 40, "it is used, too");
    cr_assert_geq(stage_stats(&on.stage).evictions[DISK], 400);
    cr_assert_eq(stage_hit(&on.stage, tokens, 4, false), 4);
    house_tokens(tokens, 4, 1000 + 16 * 470); /* long out of memory */
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, 4);
    cr_assert_eq(reply.disk.restored_tokens, 4);
    stage_verify(&on.stage, reply.sequence_id, 0, 4, 470);
    disk_stage_stop(&on);
}

Test(disk, g3_a_full_file_system)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 50);
    for (uint32_t i = 0; i < 100; i++) {
        if (i == 20) {
            atomic_store(&on.faulty.fail_allocations, 1000000);
        }
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
        disk_rounds(&on);
        stage_pass_ms(&on.stage, 100);
    }
    cr_assert_geq(disk_blocks(&on), 10);
    cr_assert_leq(disk_blocks(&on), 22, "no more room was to be had");
    struct kvk_cache_stats stats = stage_stats(&on.stage);
    cr_assert_geq(stats.disk_extent_failures, 1);
    cr_assert_leq(stats.disk_extent_failures, 4, "not asked for each block");
    cr_assert_geq(stats.evictions[DISK], 50, "what is there makes the room");
    cr_assert_eq(stage_hit(&on.stage, tokens, 4, false), 4);
    atomic_store(&on.faulty.fail_allocations, 0);
    stage_pass_ms(&on.stage, 10000);
    for (uint32_t i = 100; i < 200; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
        disk_rounds(&on);
    }
    cr_assert_geq(disk_blocks(&on), 40);
    disk_stage_stop(&on);
}

/* A disk smaller than memory: what is in both places makes room on disk. */
Test(disk, a_small_disk_below_a_large_memory)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 100, 10);
    for (uint32_t i = 0; i < 60; i++) {
        house_tokens(tokens, 4, 1000 + 16 * i);
        stage_cache(&on.stage, tokens, 4, i);
        disk_rounds(&on);
        cr_assert_leq(disk_blocks(&on), 10);
    }
    cr_assert_geq(stage_stats(&on.stage).disk_written_blocks, 60);
    cr_assert_eq(stage_stats(&on.stage).forgotten_blocks, 0, "memory has them all");
    disk_stage_stop(&on);
}

Test(disk, a_chain_longer_than_the_disk_does_not_chase_its_tail)
{
    struct disk_stage on;
    uint32_t tokens[400];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 200, 50);
    house_tokens(tokens, 400, 1000);
    stage_cache(&on.stage, tokens, 400, 1);
    disk_rounds(&on);
    cr_assert_leq(disk_blocks(&on), 50);
    cr_assert_geq(disk_blocks(&on), 45);
    cr_assert_leq(stage_stats(&on.stage).disk_written_blocks, 50);
    cr_assert_eq(stage_stats(&on.stage).evictions[DISK], 0, "its own end is not worth less");
    disk_stage_stop(&on);
}

/* The next turn of a chat whose first turns fill the disk: they are what it hangs from. */
Test(disk, a_chain_that_grows_does_not_drive_itself_out)
{
    struct disk_stage on;
    uint32_t tokens[400];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 200, 50);
    house_tokens(tokens, 400, 1000);
    stage_cache(&on.stage, tokens, 200, 1);
    disk_rounds(&on);
    uint64_t before = disk_blocks(&on);
    cr_assert_geq(before, 48);
    for (uint32_t turn = 0; turn < 4; turn++) {
        stage_cache(&on.stage, tokens, 240 + 40 * turn, 1);
        disk_rounds(&on); /* comes to rest */
        cr_assert_geq(disk_blocks(&on), before);
    }
    cr_assert_leq(stage_stats(&on.stage).evictions[DISK], 4);
    cr_assert_leq(stage_stats(&on.stage).disk_written_blocks, 54);
    disk_stage_stop(&on);
}

/* ---- D4 ---- */

Test(disk, d4_a_host_tier_full_of_leases)
{
    struct disk_stage on;
    uint32_t leased[8];
    uint32_t tokens[12];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 3, 64);
    house_tokens(tokens, 12, 1000);
    stage_cache(&on.stage, tokens, 12, 7);
    disk_rounds(&on);
    house_tokens(leased, 8, 2000);
    stage_cache(&on.stage, leased, 4, 1);
    stage_cache(&on.stage, leased + 4, 4, 1);
    disk_push_out(&on, tokens, 12, 50000);
    struct kvk_pin_reply first = stage_pin(&on.stage, leased, 4, 10000);
    struct kvk_pin_reply second = stage_pin(&on.stage, leased + 4, 4, 10000);
    cr_assert_eq(first.cached_tokens + second.cached_tokens, 8);
    uint32_t other[4];
    house_tokens(other, 4, 7000);
    uint64_t third = stage_sealed(&on.stage, other, 4, 1);
    on.stage.house.caller.deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + 500 * KVK_NS_PER_MS;
    struct kvk_pin_reply reply;
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    STAGE_OK(&on.stage, stage_try_pin(&on.stage, tokens, 12, 1000, false, &reply));
    cr_assert_lt(kvk_clock_now(kvk_clock_monotonic()) - begun_ns,
                 promised_ms(1000) * KVK_NS_PER_MS);
    cr_assert_eq(reply.cached_tokens, 0, "a miss, for there is no room");
    on.stage.house.caller.deadline_ns = UINT64_MAX;
    uint64_t released;
    const uint64_t ids[2] = {first.lease_id, second.lease_id};
    STAGE_OK(&on.stage, stage_try_release(&on.stage, ids, 2, &released));
    stage_close(&on.stage, third);
    struct kvk_sequence_reply opened = stage_open(&on.stage, tokens, 12);
    cr_assert_eq(opened.cached_tokens, 12, "all works once the leases go");
    stage_verify(&on.stage, opened.sequence_id, 0, 12, 7);
    disk_stage_stop(&on);
}

static bool is_cancelled(void *context)
{
    return *(const bool *)context;
}

Test(disk, a_restore_ends_with_its_caller)
{
    struct disk_stage on;
    uint32_t tokens[16];
    bool cancelled = true;
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    struct kvk_open_request request = {.session_id = on.stage.session,
                                       .space_id = on.stage.space,
                                       .prompt = {.tokens = tokens, .token_count = 16},
                                       .tier = -1};
    struct kvk_sequence_reply reply;
    uint64_t used = stage_used(&on.stage, HOST);
    on.stage.house.caller.cancelled = is_cancelled;
    on.stage.house.caller.cancelled_context = &cancelled;
    cr_assert_eq(stage_try_open(&on.stage, &request, &reply), KVK_CANCELLED);
    on.stage.house.caller.cancelled = NULL;
    on.stage.house.caller.deadline_ns = 1;
    cr_assert_eq(stage_try_open(&on.stage, &request, &reply), KVK_DEADLINE);
    on.stage.house.caller.deadline_ns = UINT64_MAX;
    stage_check(&on.stage);
    cr_assert_eq(stage_used(&on.stage, HOST), used);
    cr_assert_eq(stage_bound(&on.stage, HOST), 0);
    disk_stage_stop(&on);
}

/* ---- E4, as far as the disk goes ---- */

Test(disk, e4_invalidation_reaches_it)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    struct kvk_pin_reply pinned = stage_pin(&on.stage, tokens, 4, 1000); /* a reader */
    struct kvk_invalidate_request request = {.space_id = on.stage.space};
    struct kvk_invalidate_reply reply;
    STAGE_OK(&on.stage, kvk_invalidate(on.stage.house.cache, &on.stage.house.caller, &request,
                                       &reply, &on.stage.house.error));
    cr_assert_eq(reply.blocks[DISK], 4);
    cr_assert_eq(stage_hit(&on.stage, tokens, 16, false), 0);
    STAGE_OK(&on.stage, stage_try_read(&on.stage, 0, pinned.lease_id, 0, 4, 7));
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 0, "held or not, it is not kept on disk");
    disk_stage_stop(&on);
}

Test(disk, a_prefix_is_invalidated_there_too)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = 8};
    struct kvk_invalidate_request request = {.space_id = on.stage.space, .prefix = &prefix};
    struct kvk_invalidate_reply reply;
    STAGE_OK(&on.stage, kvk_invalidate(on.stage.house.cache, &on.stage.house.caller, &request,
                                       &reply, &on.stage.house.error));
    cr_assert_eq(reply.blocks[DISK], 3);
    cr_assert_eq(stage_hit(&on.stage, tokens, 16, false), 4);
    stage_check(&on.stage);
    disk_stage_stop(&on);
}

/* ---- Memory above it ---- */

/* Caches `count` prompts of one block each, from token `first` on. */
static void cache_singles(struct disk_stage *on, uint32_t first, uint32_t count)
{
    uint32_t tokens[4];
    for (uint32_t i = 0; i < count; i++) {
        house_tokens(tokens, 4, first + 16 * i);
        stage_cache(&on->stage, tokens, 4, 7);
    }
}

/* How many of them are on disk alone, and how many known at all. */
static uint32_t singles_on_disk(struct disk_stage *on, uint32_t first, uint32_t count,
                                uint32_t *known)
{
    uint32_t tokens[4];
    uint32_t alone = 0;
    *known = 0;
    for (uint32_t i = 0; i < count; i++) {
        house_tokens(tokens, 4, first + 16 * i);
        alone += disk_tokens(on, tokens, 4) > 0 ? 1 : 0;
        *known += stage_hit(&on->stage, tokens, 4, false) > 0 ? 1 : 0;
    }
    return alone;
}

Test(disk, of_equal_worth_the_older_leaves_memory_whether_on_disk_or_not)
{
    struct disk_stage on;
    uint32_t known;
    disk_stage_init(&on);
    on.stage.house.config.policy = KVK_EVICT_RP_COST; /* knows worth apart from age */
    disk_stage_start(&on, 0, 8, 64);
    cache_singles(&on, 1000, 4);
    disk_rounds(&on);
    cr_assert_eq(disk_blocks(&on), 4);
    on.stage.house.config.disk_admit_uses = 1000;
    cache_singles(&on, 2000, 4);
    cache_singles(&on, 3000, 3); /* for which there is no room */
    cr_assert_eq(singles_on_disk(&on, 1000, 4, &known), 3, "the oldest went");
    cr_assert_eq(known, 4);
    cr_assert_eq(singles_on_disk(&on, 2000, 4, &known), 0);
    cr_assert_eq(known, 4, "not those that came after them");
    cache_singles(&on, 4000, 4);
    cr_assert_eq(singles_on_disk(&on, 1000, 4, &known), 4, "and the last of them,");
    (void)singles_on_disk(&on, 2000, 4, &known);
    cr_assert_eq(known, 1, "then the next in age, which are nowhere else");
    stage_check(&on.stage);
    disk_stage_stop(&on);
}

/* ---- Reading ahead ---- */

Test(disk, what_is_touched_is_read_ahead)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    on.stage.house.config.disk_read_ahead = 16;
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    disk_push_out(&on, tokens, 16, 5000);
    disk_rounds(&on); /* what pushed it out is on disk too: clean */
    uint64_t touched;
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 8};
    STAGE_OK(&on.stage, kvk_touch(on.stage.house.cache, &on.stage.house.caller, on.stage.space,
                                  &prompt, &touched, &on.stage.house.error));
    disk_rounds(&on);
    cr_assert_eq(disk_tokens(&on, tokens, 16), 0, "and what follows");
    cr_assert_eq(stage_stats(&on.stage).disk_ahead_blocks, 4);
    disk_stage_stop(&on);
}

Test(disk, reading_ahead_takes_nothing_from_anybody)
{
    struct disk_stage on;
    uint32_t tokens[16];
    disk_stage_init(&on);
    on.stage.house.config.disk_read_ahead = 16;
    disk_stage_start(&on, 0, 8, 64);
    house_tokens(tokens, 16, 1000);
    stage_cache(&on.stage, tokens, 16, 7);
    disk_rounds(&on);
    on.stage.house.config.disk_admit_uses = 1000;
    disk_push_out(&on, tokens, 16, 5000);
    uint64_t touched;
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 16};
    STAGE_OK(&on.stage, kvk_touch(on.stage.house.cache, &on.stage.house.caller, on.stage.space,
                                  &prompt, &touched, &on.stage.house.error));
    uint64_t forgotten = stage_stats(&on.stage).forgotten_blocks;
    disk_rounds(&on);
    cr_assert_eq(stage_stats(&on.stage).forgotten_blocks, forgotten);
    disk_stage_stop(&on);
}
