/*
 * Warm starts on damaged records and bytes, with workers of before that live on, and after being
 * killed anywhere.
 */
#include "tests/engine_warm.h"

/* ---- Damage ---- */

/* The keeper's files, mapped as whoever can reach them would. */
struct kept_file {
    char name[KVK_KEEPER_NAME_SIZE];
    int fd;
};

struct kept_files {
    struct kept_file files[32];
    uint32_t count;
};

static void kept_visit(void *context, const char *name, int fd)
{
    struct kept_files *files = context;
    cr_assert_lt(files->count, 32);
    (void)snprintf(files->files[files->count].name, KVK_KEEPER_NAME_SIZE, "%s", name);
    files->files[files->count].fd = fd;
    files->count++;
}

static void kept_take(struct place *place, struct kept_files *files)
{
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place->socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    files->count = 0;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    cr_assert_eq(kvk_keeper_take(keeper, kept_visit, files, &error), KVK_OK);
    kvk_keeper_disconnect(keeper);
}

static void kept_close(struct kept_files *files)
{
    for (uint32_t i = 0; i < files->count; i++) {
        (void)close(files->files[i].fd);
    }
}

static int kept_find(const struct kept_files *files, const char *end)
{
    for (uint32_t i = 0; i < files->count; i++) {
        size_t size = strlen(files->files[i].name);
        if (size >= strlen(end) && strcmp(files->files[i].name + size - strlen(end), end) == 0) {
            return files->files[i].fd;
        }
    }
    cr_assert_fail("no such file");
    return -1;
}

static void byte_flip(int fd, off_t at)
{
    uint8_t byte = 0;
    cr_assert_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
}

Test(engine_warm_damage, a_flipped_bit_of_a_block_is_found_before_it_moves)
{
    struct place place;
    struct kept_files files;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    kept_take(&place, &files);
    byte_flip(kept_find(&files, "-0-0-0"), (off_t)place.shared->slots[5] * BLOCK_BYTES + 77);
    kept_close(&files);
    daemon_start(&place);
    struct kvk_cache *cache = place.house.cache;
    kvk_lock(&cache->lock);
    uint32_t id = place_group(&place)->tiers[KVK_TIER_DEVICE].owners[place.shared->slots[5]] - 1;
    kvk_block_hold(cache, id, false);
    cache->passing_holds++;
    cr_assert_eq(kvk_block_checksum_drops(cache, &id, 1, true, &place.house.error), KVK_DATA_LOSS);
    cache->passing_holds--;
    kvk_block_release(cache, id, false);
    kvk_unlock(&cache->lock);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 5 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm_damage, a_flipped_bit_of_a_record_costs_that_record_and_what_hangs_from_it)
{
    struct place place;
    struct kept_files files;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    daemon_start(&place);
    uint64_t offset = kvk_sidecar_entry_offset(place_group(&place), 3) + 60;
    daemon_stop(&place);
    kept_take(&place, &files);
    byte_flip(kept_find(&files, "-side"), (off_t)offset);
    kept_close(&files);
    daemon_start(&place);
    cr_assert_eq(place.house.cache->stats.torn_records, 1);
    cr_assert_eq(counts_of(&place).orphans, CHAIN_BLOCKS - 4);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 3 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* A word that names another block's record, which is whole: its bytes would be that block's. */
Test(engine_warm_damage, a_damaged_word_hands_no_block_the_bytes_of_another)
{
    struct place place;
    struct kept_files files;
    uint64_t word = 0;
    const uint64_t nothing = 0;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    daemon_start(&place);
    const struct kvk_sidecar *sidecar = place_group(&place)->sidecar;
    off_t words = (uint8_t *)sidecar->words[KVK_TIER_DEVICE] - sidecar->region.address;
    daemon_stop(&place);
    kept_take(&place, &files);
    int fd = kept_find(&files, "-side");
    off_t fifth = words + (off_t)(place.shared->slots[5] * sizeof(word));
    off_t sixth = words + (off_t)(place.shared->slots[6] * sizeof(word));
    uint64_t other = 0;
    cr_assert_eq(pread(fd, &word, sizeof(word), fifth), sizeof(word));
    cr_assert_eq(pread(fd, &other, sizeof(other), sixth), sizeof(other));
    other ^= (uint64_t)(kvk_word_entry(word) ^ kvk_word_entry(other)) << KVK_WORD_ENTRY_SHIFT;
    cr_assert_eq(kvk_word_entry(other), kvk_word_entry(word));
    cr_assert_eq(pwrite(fd, &nothing, sizeof(nothing), fifth), sizeof(nothing));
    cr_assert_eq(pwrite(fd, &other, sizeof(other), sixth), sizeof(other));
    kept_close(&files);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 5 * BLOCK_TOKENS);
    kvk_cache_check(place.house.cache);
    daemon_stop(&place);
    place_finish(&place);
}

/* Any bytes anywhere in header, processes, words and entries: no crash, and no byte of another's.
 */
Test(engine_warm_damage, whatever_stands_in_a_sidecar_no_wrong_byte_is_served, .timeout = 120)
{
    struct place place;
    struct kvk_random random;
    place_init(&place);
    kvk_random_init(&random, 20251129);
    for (int round = 0; round < 60; round++) {
        struct kept_files files;
        daemon_die(&place, life_of_many_chains);
        kept_take(&place, &files);
        int fd = kept_find(&files, "-side");
        off_t at = 0;
        uint32_t flips = 0;
        while (flips < 40 && (at = lseek(fd, at, SEEK_DATA)) >= 0) {
            for (uint64_t i = 0; i < 2 + kvk_random_below(&random, 6); i++) {
                uint64_t bytes = kvk_random_next(&random);
                size_t size = 1 + kvk_random_below(&random, 8);
                off_t place_at = at + (off_t)kvk_random_below(&random, round % 2 ? 4096 : 512);
                cr_assert_eq(pwrite(fd, &bytes, size, place_at), (ssize_t)size);
                flips++;
            }
            at += 4096;
        }
        kept_close(&files);
        daemon_start(&place);
        for (uint32_t i = 0; i < 12; i++) {
            (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
        }
        kvk_cache_check(place.house.cache);
        daemon_stop(&place);
    }
    place_finish(&place);
}

Test(engine_warm_damage, files_that_are_no_regions_are_refused)
{
    struct place place;
    struct kvk_error error;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place.socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kept_files files = {.count = 0};
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK);
    cr_assert_eq(kvk_keeper_take(keeper, kept_visit, &files, &error), KVK_OK);
    for (uint32_t i = 0; i < files.count; i++) {
        const char *name = files.files[i].name;
        if (strstr(name, "-0-0-0") != NULL) {
            /* Unsealed: it could be cut under the daemon. */
            int loose = memfd_create("loose", MFD_CLOEXEC);
            cr_assert_eq(ftruncate(loose, 1 << 20), 0);
            cr_assert_eq(kvk_keeper_drop(keeper, name, &error), KVK_OK);
            cr_assert_eq(kvk_keeper_put(keeper, name, loose, &error), KVK_OK);
            (void)close(loose);
        }
    }
    kept_close(&files);
    kvk_keeper_disconnect(keeper);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_DEVICE], 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    daemon_stop(&place);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- Workers that live on ---- */

static pid_t worker_start(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    while (pid == 0) {
        (void)pause();
    }
    return pid;
}

static void worker_end(pid_t pid)
{
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
}

/* A session of a process that is not the daemon's, which is given the slots to write. The
 * descriptors stay here: what counts is that it could have them. */
static uint64_t worker_session(struct place *place, pid_t pid)
{
    struct kvk_hello hello = house_hello();
    hello.pid = pid;
    struct kvk_welcome welcome = house_begin(&place->house, &hello);
    uint64_t session_id;
    int pidfd;
    int fds[2];
    cr_assert_eq(kvk_side_bind(place->house.cache, welcome.side_token, pid, (uint32_t)geteuid(),
                               &session_id, &pidfd),
                 KVK_OK);
    (void)close(pidfd);
    const struct kvk_map_request request = {.session_id = session_id,
                                            .kind = KVK_MAP_SLOTS,
                                            .space_id = place->space_id,
                                            .tier = KVK_TIER_DEVICE};
    struct kvk_map_reply reply;
    cr_assert_eq(kvk_session_map(place->house.cache, &place->house.caller, &request, &reply,
                                 &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    cr_assert_eq(kvk_side_take(place->house.cache, session_id, reply.map_token, fds), KVK_OK);
    return session_id;
}

static pid_t old_workers[2];

static void life_with_workers(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    chain_put(place, 1000, CHAIN_TOKENS);
    for (int i = 0; i < 2 && old_workers[i] != 0; i++) {
        place->session_id = worker_session(place, old_workers[i]);
    }
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t id;
        place->shared->slots[i] =
            chain_block(place, reply.sequence_id, i, &id)->slot[KVK_TIER_DEVICE];
    }
}

static bool is_granted_away(struct place *place)
{
    const struct kvk_group_tier *at = &place_group(place)->tiers[KVK_TIER_DEVICE];
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t owner = at->owners[place->shared->slots[i]];
        if (owner == 0 || (kvk_index_block(place->house.cache->index, owner - 1)->flags &
                           KVK_BLOCK_QUARANTINED) == 0) {
            return false;
        }
    }
    return true;
}

Test(engine_warm_damage, what_an_old_worker_may_still_write_is_given_to_nobody)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    place.device_bytes = 24 * BLOCK_BYTES;
    old_workers[0] = worker_start();
    old_workers[1] = worker_start();
    daemon_die(&place, life_with_workers);
    daemon_start(&place);
    struct kvk_cache *cache = place.house.cache;
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), CHAIN_BLOCKS * BLOCK_BYTES);
    cr_assert(is_granted_away(&place));
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    /* The pool is full of it: 24 - 8 slots are there for all else. */
    for (uint32_t i = 0; i < 10; i++) {
        chain_put(&place, 10000 + 1000 * i, CHAIN_TOKENS);
        kvk_cache_maintain(cache);
        cr_assert(is_granted_away(&place));
    }
    kvk_cache_check(cache);
    /* Both must be gone: one of them is not enough. */
    worker_end(old_workers[0]);
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(cache);
    }
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), CHAIN_BLOCKS * BLOCK_BYTES);
    kvk_cache_check(cache);
    worker_end(old_workers[1]);
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(cache);
    }
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(cache->waiting_sessions, NULL);
    kvk_cache_check(cache);
    daemon_stop(&place);
    place_finish(&place);
}

/* Still not after a second crash; and a daemon that stops waits for no old worker. */
static void life_of_nothing(struct place *place)
{
    cr_assert(is_granted_away(place));
}

Test(engine_warm_damage, an_old_worker_outlives_several_daemons)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    daemon_die(&place, life_of_nothing);
    daemon_start(&place);
    cr_assert(is_granted_away(&place));
    daemon_stop(&place);
    daemon_start(&place);
    cr_assert(is_granted_away(&place));
    daemon_stop(&place);
    worker_end(old_workers[0]);
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, CHAIN_BLOCKS * BLOCK_BYTES);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm_damage, where_a_worker_is_gone_its_slots_are_free_at_once)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    worker_end(old_workers[0]);
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* More is still being written than the configuration has blocks for: the group begins cold, with
 * files that no old worker has. */
Test(engine_warm_damage, what_cannot_be_set_aside_is_left_behind)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    place.blocks = 12;
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(counts_of(&place).records, 0);
    chain_put(&place, 5000, 4 * BLOCK_TOKENS);
    cr_assert_eq(chain_read(&place, 5000, 4 * BLOCK_TOKENS), 4 * BLOCK_TOKENS);
    daemon_stop(&place);
    worker_end(old_workers[0]);
    place_finish(&place);
}

Test(engine_warm_damage, processes_are_known_by_number_and_start)
{
    int pidfd = -1;
    pid_t pid = worker_start();
    uint64_t start = kvk_process_start(pid);
    cr_assert_gt(start, 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_ALIVE);
    (void)close(pidfd);
    cr_assert_eq(kvk_process_look(pid, start + 1, &pidfd), KVK_PROCESS_GONE); /* another's number */
    (void)kill(pid, SIGKILL);
    siginfo_t info;
    cr_assert_eq(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_GONE); /* not yet reaped */
    (void)waitpid(pid, NULL, 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_GONE);
}

/* ---- Killed anywhere ---- */

/* Random work until the parent kills it: chains of all lengths, under pressure in both tiers. */
static void life_at_random(struct place *place, uint64_t seed)
{
    struct kvk_random random;
    kvk_random_init(&random, seed);
    for (;;) {
        uint32_t first = 1000 * (uint32_t)(1 + kvk_random_below(&random, 24));
        uint64_t blocks = 1 + kvk_random_below(&random, CHAIN_BLOCKS);
        uint32_t tokens[CHAIN_TOKENS];
        house_tokens(tokens, CHAIN_TOKENS, first);
        if (kvk_random_chance(&random, 0.5)) {
            chain_put(place, first, blocks * BLOCK_TOKENS);
        } else if (kvk_random_chance(&random, 0.1)) {
            const struct kvk_invalidate_request request = {.space_id = place->space_id};
            struct kvk_invalidate_reply reply;
            cr_assert_eq(kvk_invalidate(place->house.cache, &place->house.caller, &request, &reply,
                                        &place->house.error),
                         KVK_OK);
        } else if (kvk_random_chance(&random, 0.3)) {
            kvk_cache_maintain(place->house.cache);
        } else {
            (void)chain_read(place, first, blocks * BLOCK_TOKENS);
        }
        place->shared->numbers[0]++;
    }
}

Test(engine_warm_damage, killed_at_any_instruction_it_comes_back_with_right_bytes, .timeout = 300)
{
    struct place place;
    struct kvk_random random;
    uint64_t blocks = 0;
    place_init(&place);
    place.device_bytes = 40 * BLOCK_BYTES;
    place.host_bytes = 60 * BLOCK_BYTES;
    kvk_random_init(&random, 7);
    for (int round = 0; round < 100; round++) {
        place.shared->numbers[0] = 0;
        pid_t pid = fork();
        if (pid == 0) {
            daemon_start(&place);
            for (uint32_t i = 0; i < 24; i++) {
                (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
            }
            life_at_random(&place, (uint64_t)round);
        }
        int result;
        while (__atomic_load_n(&place.shared->numbers[0], __ATOMIC_RELAXED) == 0 &&
               waitpid(pid, &result, WNOHANG) == 0) {
            house_sleep_ms(1);
        }
        const struct timespec pause = {.tv_nsec = (long)kvk_random_below(&random, 12000000)};
        (void)nanosleep(&pause, NULL);
        (void)kill(pid, SIGKILL);
        cr_assert_eq(waitpid(pid, &result, 0), pid);
        cr_assert(WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL, "round %d failed", round);
        if (round % 10 == 9) {
            daemon_start(&place);
            blocks += counts_of(&place).blocks;
            kvk_cache_check(place.house.cache);
            daemon_stop(&place);
        }
    }
    cr_assert_gt(blocks, 0);
    place_finish(&place);
}
