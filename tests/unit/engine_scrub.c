/* The scrub: what rots in memory or on disk is found before anybody asks for it. */
#include "daemon/scrub.h"

#include <criterion/criterion.h>
#include <stdatomic.h>

#include "daemon/disk_tier.h"
#include "tests/disk_house.h"
#include "tests/engine_house.h"

#define TOKENS 32          /* 8 blocks */
#define WAIT_MS_MAX 120000 /* for what comes at once where nobody else wants the processor */

static struct kvk_scrub_counts counts_of(struct house *house)
{
    struct kvk_scrub_counts counts;
    kvk_lock(&house->cache->lock);
    kvk_scrub_counts(house->cache, &counts);
    kvk_unlock(&house->cache->lock);
    return counts;
}

static void pass_run(struct house *house)
{
    while (kvk_scrub_step_unlocked(house->cache)) {
    }
}

/* Seal a chain; the sequence that holds it. */
static uint64_t chain_seal(struct house *house, uint64_t session, uint64_t space, uint32_t first)
{
    uint32_t tokens[TOKENS];
    house_tokens(tokens, TOKENS, first);
    struct kvk_sequence_reply reply = house_open(house, session, space, tokens, TOKENS);
    house_seal(house, session, reply.sequence_id, TOKENS);
    return reply.sequence_id;
}

static uint64_t chain_cached(struct house *house, uint64_t space, uint32_t first)
{
    uint32_t tokens[TOKENS];
    house_tokens(tokens, TOKENS, first);
    return house_cached(house, space, tokens, TOKENS);
}

/* As a worker could that has the memory mapped: behind the daemon's back. The block at `position`
 * of any chain, with a copy in the tier. */
static uint32_t block_flip(struct house *house, enum kvk_tier tier, uint32_t position)
{
    struct kvk_cache *cache = house->cache;
    uint32_t found = KVK_BLOCK_NONE;
    kvk_lock(&cache->lock);
    for (uint32_t id = 0; id < kvk_index_block_id_end(cache->index); id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (kvk_block_is_whole(block) && (block->tier_mask & 1U << tier) != 0 &&
            block->position == position) {
            found = id;
            kvk_block_address(cache, block, tier, 0)[100] ^= 0x10;
            break;
        }
    }
    kvk_unlock(&cache->lock);
    cr_assert_neq(found, KVK_BLOCK_NONE);
    return found;
}

static void stat_find(void *context, const char *name, double value)
{
    double *damaged = context;
    if (strncmp(name, "kvkeep_scrub_", strlen("kvkeep_scrub_")) != 0) {
        return;
    }
    damaged[0] += strstr(name, "damaged_total{tier=\"host\"}") != NULL ? value : 0;
    damaged[1] += strstr(name, "passes_total") != NULL ? value : 0;
    damaged[2] += strstr(name, "blocks_total{tier=\"host\"}") != NULL ? value : 0;
    damaged[3] += strstr(name, "bytes_total{tier=\"host\"}") != NULL ? value : 0;
    damaged[4] += strstr(name, "last_pass_age_seconds") != NULL ? value : 0;
}

static void house_open_with(struct house *house, uint64_t device_blocks, uint64_t host_blocks,
                            bool threads)
{
    const struct kvk_geometry geometry = house_geometry();
    uint64_t bytes = kvk_geometry_block_bytes(&geometry);
    const struct house_options options = {.device_bytes = device_blocks * bytes,
                                          .host_bytes = host_blocks * bytes,
                                          .threads = threads,
                                          .manual_clock = !threads};
    house_start(house, &options);
}

Test(scrub, finds_what_rots_in_host_memory)
{
    struct house house;
    house_init(&house);
    house_open_with(&house, 0, 64, false);
    uint64_t space = house_space(&house, "m");
    uint64_t session = house_session(&house);
    house_close(&house, session, chain_seal(&house, session, space, 1));
    house_close(&house, session, chain_seal(&house, session, space, 1000));
    uint64_t block_bytes = house.config.host_bytes / 64;

    pass_run(&house);
    struct kvk_scrub_counts counts = counts_of(&house);
    cr_assert_eq(counts.passes, 1);
    cr_assert_eq(counts.blocks[KVK_TIER_HOST], 16);
    cr_assert_eq(counts.bytes[KVK_TIER_HOST], 16 * block_bytes);
    cr_assert_eq(counts.damaged[KVK_TIER_HOST], 0);
    cr_assert_eq(chain_cached(&house, space, 1), TOKENS);

    (void)block_flip(&house, KVK_TIER_HOST, 7);
    kvk_clock_manual_set(&house.manual, kvk_clock_now(&house.manual.clock) + KVK_NS_PER_SECOND);
    pass_run(&house);
    counts = counts_of(&house);
    cr_assert_eq(counts.passes, 2);
    cr_assert_eq(counts.damaged[KVK_TIER_HOST], 1);
    cr_assert_eq(counts.blocks[KVK_TIER_HOST], 32);
    cr_assert_eq(house.cache->stats.checksum_failures, 1);
    cr_assert_eq(chain_cached(&house, space, 1) + chain_cached(&house, space, 1000), 2 * TOKENS - 4,
                 "the damaged one is found by nobody");
    kvk_cache_check(house.cache);

    kvk_clock_manual_set(&house.manual, kvk_clock_now(&house.manual.clock) + KVK_NS_PER_SECOND);
    double stats[5] = {0};
    kvk_report_stats(house.cache, stat_find, stats);
    cr_assert_eq(stats[0], 1);
    cr_assert_eq(stats[1], 2);
    cr_assert_eq(stats[2], 32);
    cr_assert_eq(stats[3], 32.0 * (double)block_bytes);
    cr_assert_eq(stats[4], 1, "a second since the last pass began");
    pass_run(&house);
    cr_assert_eq(counts_of(&house).damaged[KVK_TIER_HOST], 1, "once is enough");
    kvk_session_end(house.cache, session);
    house_stop(&house);
}

/* Its holder goes on with what he has; nobody else is given it. */
Test(scrub, a_held_block_is_found_by_nobody_else)
{
    struct house house;
    house_init(&house);
    house_open_with(&house, 64, 64, false);
    uint64_t space = house_space(&house, "m");
    uint64_t session = house_session(&house);
    uint64_t sequence = chain_seal(&house, session, space, 1);
    (void)block_flip(&house, KVK_TIER_DEVICE, 3);
    pass_run(&house);
    cr_assert_eq(counts_of(&house).damaged[KVK_TIER_DEVICE], 1);
    cr_assert_eq(counts_of(&house).blocks[KVK_TIER_DEVICE], 8);
    cr_assert_eq(chain_cached(&house, space, 1), 12);
    kvk_cache_check(house.cache);
    house_close(&house, session, sequence);
    cr_assert_eq(chain_cached(&house, space, 1), 12);
    kvk_session_end(house.cache, session);
    house_stop(&house);
}

/* A pass changes nothing: neither what goes first, nor what is held. */
Test(scrub, leaves_the_order_of_eviction)
{
    struct house house;
    house_init(&house);
    house_open_with(&house, 0, 16, false);
    uint64_t space = house_space(&house, "m");
    uint64_t session = house_session(&house);
    house_close(&house, session, chain_seal(&house, session, space, 1));
    house_close(&house, session, chain_seal(&house, session, space, 1000));
    pass_run(&house);
    uint64_t bound = house_bound(&house, KVK_TIER_HOST);
    cr_assert_eq(bound, 0);
    house_close(&house, session, chain_seal(&house, session, space, 2000));
    cr_assert_eq(chain_cached(&house, space, 1), 0, "the oldest went");
    cr_assert_eq(chain_cached(&house, space, 1000), TOKENS);
    kvk_session_end(house.cache, session);
    house_stop(&house);
}

Test(scrub, an_empty_cache_has_passes_too)
{
    struct house house;
    house_init(&house);
    house_open_with(&house, 0, 16, false);
    cr_assert_not(kvk_scrub_step_unlocked(house.cache));
    cr_assert_eq(counts_of(&house).passes, 1);
    house_stop(&house);
}

/* ---- On disk ---- */

struct shelf {
    struct house house;
    char folder[DISK_HOUSE_PATH_SIZE];
    struct kvk_disk *disk;
    struct disk_faults faults;
    struct kvk_disk_io io;
    uint64_t session;
    uint64_t space;
};

/* A chain in host memory and on disk, with nothing that outlives the cache. */
static void shelf_start(struct shelf *shelf)
{
    struct house *house = &shelf->house;
    const struct kvk_geometry geometry = house_geometry();
    memset(shelf, 0, sizeof(*shelf));
    house_init(house);
    house->config.disk_admit_uses = 1;
    disk_house_make(shelf->folder);
    shelf->io = disk_fault_io(&shelf->faults);
    const struct kvk_disk_options disk_options = {.folder = shelf->folder, .io = &shelf->io};
    cr_assert_eq(kvk_disk_open(&disk_options, &shelf->disk, &house->error), KVK_OK, "%s",
                 house->error.text);
    const struct house_options options = {.host_bytes = 16 * kvk_geometry_block_bytes(&geometry),
                                          .manual_clock = true,
                                          .disk = shelf->disk,
                                          .disk_bytes = UINT64_C(64) * 4096};
    house_start(house, &options);
    shelf->space = house_space(house, "m");
    shelf->session = house_session(house);
    house_close(house, shelf->session, chain_seal(house, shelf->session, shelf->space, 1));
    kvk_lock(&house->cache->lock);
    while (kvk_disk_round_drops(house->cache)) {
    }
    cr_assert_eq(house->cache->spaces->groups[0]->tier_blocks[KVK_TIER_DISK], 8);
    kvk_unlock(&house->cache->lock);
}

static void shelf_stop(struct shelf *shelf)
{
    kvk_session_end(shelf->house.cache, shelf->session);
    house_stop(&shelf->house);
    kvk_disk_close(shelf->disk);
    disk_house_clear(shelf->folder);
}

/* The slot on disk of the block at a position of the chain. */
static uint32_t shelf_slot(struct shelf *shelf, uint32_t position)
{
    struct kvk_cache *cache = shelf->house.cache;
    uint32_t slot = KVK_SLOT_NONE;
    kvk_lock(&cache->lock);
    for (uint32_t id = 0; id < kvk_index_block_id_end(cache->index); id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (kvk_block_is_whole(block) && block->position == position &&
            block->slot[KVK_TIER_DISK] != KVK_SLOT_NONE) {
            slot = block->slot[KVK_TIER_DISK];
        }
    }
    kvk_unlock(&cache->lock);
    cr_assert_neq(slot, KVK_SLOT_NONE);
    return slot;
}

static void shelf_flip(struct shelf *shelf, uint32_t position)
{
    char path[DISK_HOUSE_PATH_SIZE + 64];
    uint8_t byte = 0;
    (void)snprintf(path, sizeof(path), "%s/blocks-%016llx-0", shelf->folder,
                   (unsigned long long)shelf->space);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0, "%s", path);
    off_t offset = (off_t)shelf_slot(shelf, position) * 4096 + 77;
    cr_assert_eq(pread(fd, &byte, 1, offset), 1);
    byte ^= 1;
    cr_assert_eq(pwrite(fd, &byte, 1, offset), 1);
    (void)close(fd);
}

Test(scrub, finds_what_rots_on_disk)
{
    struct shelf shelf;
    shelf_start(&shelf);
    pass_run(&shelf.house);
    struct kvk_scrub_counts counts = counts_of(&shelf.house);
    cr_assert_eq(counts.blocks[KVK_TIER_HOST], 8);
    cr_assert_eq(counts.blocks[KVK_TIER_DISK], 8);
    cr_assert_eq(counts.damaged[KVK_TIER_DISK], 0);

    shelf_flip(&shelf, 2);
    pass_run(&shelf.house);
    counts = counts_of(&shelf.house);
    cr_assert_eq(counts.blocks[KVK_TIER_DISK], 16);
    cr_assert_eq(counts.damaged[KVK_TIER_DISK], 1);
    cr_assert_eq(counts.damaged[KVK_TIER_HOST], 0);
    cr_assert_eq(shelf.house.cache->stats.disk_damaged_blocks, 1);
    cr_assert_eq(chain_cached(&shelf.house, shelf.space, 1), TOKENS, "memory has it still");
    kvk_cache_check(shelf.house.cache);
    pass_run(&shelf.house);
    cr_assert_eq(counts_of(&shelf.house).blocks[KVK_TIER_DISK], 23, "one copy less");
    shelf_stop(&shelf);
}

/* What only the disk has is looked at as well, and given up where it cannot be read. */
Test(scrub, copies_that_only_the_disk_has)
{
    struct shelf shelf;
    shelf_start(&shelf);
    house_close(&shelf.house, shelf.session,
                chain_seal(&shelf.house, shelf.session, shelf.space, 1000));
    house_close(&shelf.house, shelf.session,
                chain_seal(&shelf.house, shelf.session, shelf.space, 2000));
    pass_run(&shelf.house);
    cr_assert_eq(counts_of(&shelf.house).blocks[KVK_TIER_DISK], 8);
    shelf_flip(&shelf, 7);
    pass_run(&shelf.house);
    cr_assert_eq(counts_of(&shelf.house).damaged[KVK_TIER_DISK], 1);
    kvk_cache_check(shelf.house.cache);

    atomic_store(&shelf.faults.read_error, EIO);
    pass_run(&shelf.house);
    uint64_t unreadable = counts_of(&shelf.house).unreadable;
    cr_assert_eq(unreadable, 7, "%u", (unsigned)unreadable);
    kvk_cache_check(shelf.house.cache);
    shelf_stop(&shelf);
}

Test(scrub, a_disk_that_is_off_is_left_alone)
{
    struct shelf shelf;
    shelf_start(&shelf);
    struct kvk_error error;
    struct kvk_disk_file *file = NULL;
    cr_assert_eq(kvk_disk_file_open(shelf.disk, 99, 0, 4096, 4, &file, &error), KVK_OK);
    atomic_store(&shelf.faults.write_error, EIO);
    uint8_t byte = 0;
    struct kvk_disk_piece piece = {.file = file, .memory = &byte, .size_bytes = 1};
    for (uint32_t i = 0; i < 8; i++) {
        cr_assert_eq(kvk_disk_write(shelf.disk, KVK_DISK_BEHIND, &piece, 1, &error), KVK_INTERNAL);
    }
    kvk_disk_file_close(file);
    pass_run(&shelf.house);
    struct kvk_scrub_counts counts = counts_of(&shelf.house);
    cr_assert_eq(counts.passes, 1, "a pass ends all the same");
    cr_assert_eq(counts.blocks[KVK_TIER_HOST], 8);
    cr_assert_eq(counts.blocks[KVK_TIER_DISK], 0);
    cr_assert_eq(counts.unreadable, 0);
    cr_assert_eq(shelf.house.cache->spaces->groups[0]->tier_blocks[KVK_TIER_DISK], 8);
    shelf_stop(&shelf);
}

/* ---- The thread ---- */

static bool damaged_comes(struct house *house, uint64_t count)
{
    for (uint32_t i = 0; i < WAIT_MS_MAX; i++) {
        if (counts_of(house).damaged[KVK_TIER_HOST] >= count) {
            return true;
        }
        house_sleep_ms(1);
    }
    return false;
}

Test(scrub, the_thread_finds_it_by_itself)
{
    struct house house;
    house_init(&house);
    house.config.scrub_interval_ms = 1;
    house_open_with(&house, 0, 64, true);
    uint64_t space = house_space(&house, "m");
    uint64_t session = house_session(&house);
    house_close(&house, session, chain_seal(&house, session, space, 1));
    (void)block_flip(&house, KVK_TIER_HOST, 5);
    cr_assert(damaged_comes(&house, 1));
    cr_assert_eq(chain_cached(&house, space, 1), 20);
    kvk_session_end(house.cache, session);
    house_stop(&house);
}

Test(scrub, no_rate_no_thread)
{
    struct house house;
    house_init(&house);
    house.config.scrub_bytes_per_second = 0;
    house.config.scrub_interval_ms = 1;
    house_open_with(&house, 0, 64, true);
    house_sleep_ms(100);
    cr_assert_eq(counts_of(&house).passes, 0);
    house_stop(&house);
}

/* A rate of one block a second: it is kept, however late the thread comes to run, and ending does
 * not wait for it. */
Test(scrub, the_rate_is_kept)
{
    struct house house;
    house_init(&house);
    const struct kvk_geometry geometry = house_geometry();
    house.config.scrub_bytes_per_second = kvk_geometry_block_bytes(&geometry);
    house.config.scrub_interval_ms = 200;
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    house_open_with(&house, 0, 64, true);
    uint64_t space = house_space(&house, "m");
    uint64_t session = house_session(&house);
    house_close(&house, session, chain_seal(&house, session, space, 1));
    for (uint32_t i = 0; i < WAIT_MS_MAX && counts_of(&house).blocks[KVK_TIER_HOST] == 0; i++) {
        house_sleep_ms(1);
    }
    house_sleep_ms(300);
    uint64_t blocks = counts_of(&house).blocks[KVK_TIER_HOST];
    uint64_t took_ns = kvk_clock_now(kvk_clock_monotonic()) - begun_ns;
    cr_assert_geq(blocks, 1);
    cr_assert_leq(blocks, 1 + took_ns / KVK_NS_PER_SECOND, "%u", (unsigned)blocks);
    kvk_session_end(house.cache, session);
    house_stop(&house);
}

/* Somebody beside the sequence has the block, which is the only one. */
static bool is_looked_at(struct house *house)
{
    bool looked_at = false;
    kvk_lock(&house->cache->lock);
    for (uint32_t id = 0; id < kvk_index_block_id_end(house->cache->index); id++) {
        looked_at = looked_at || kvk_index_block(house->cache->index, id)->hold_count == 2;
    }
    kvk_unlock(&house->cache->lock);
    return looked_at;
}

/* A pool of one block, which is large and looked at again and again: who needs its room waits for
 * the moment, and is not refused; whether it was held when the look began, or not. */
Test(scrub, nobody_is_refused_for_it)
{
    struct house house;
    const struct kvk_geometry geometry = {.layers = 1,
                                          .kv_heads = 1,
                                          .block_tokens = 4,
                                          .layout = KVK_LAYOUT_OPAQUE,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = 1,
                                          .pipeline_shards = 1,
                                          .opaque_bytes = UINT64_C(4) << 20};
    const struct house_options options = {.host_bytes = geometry.opaque_bytes, .threads = true};
    house_init(&house);
    house.config.scrub_interval_ms = 1;
    house.config.scrub_bytes_per_second = UINT64_C(1) << 40;
    house_start(&house, &options);
    uint64_t space = house_space_of(&house, &house.caller, "m", &geometry, 1);
    uint64_t session = house_session(&house);
    for (uint32_t round = 0; round < 200; round++) {
        uint32_t tokens[4];
        house_tokens(tokens, 4, 1 + round * 4);
        struct kvk_sequence_reply reply = house_open(&house, session, space, tokens, 4);
        house_seal(&house, session, reply.sequence_id, 4);
        for (uint32_t i = 0; round % 8 == 0 && i < WAIT_MS_MAX * 10 && !is_looked_at(&house); i++) {
            (void)usleep(100);
        }
        house_close(&house, session, reply.sequence_id);
        house_sleep_ms((long)(round % 4)); /* until it is being looked at, or not */
    }
    for (uint32_t i = 0; i < WAIT_MS_MAX && counts_of(&house).passes == 0; i++) {
        house_sleep_ms(1);
    }
    cr_assert_gt(counts_of(&house).passes, 0);
    cr_assert_gt(counts_of(&house).blocks[KVK_TIER_HOST], 0);
    cr_assert_eq(counts_of(&house).damaged[KVK_TIER_HOST], 0);
    kvk_session_end(house.cache, session);
    house_stop(&house);
}
