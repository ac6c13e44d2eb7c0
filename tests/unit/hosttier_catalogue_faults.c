/*
 * The catalogue on a disk that fails: the system calls that LMDB makes are taken over here, and
 * fail when a test says so. And a catalogue that is full.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#include "tests/catalogue_house.h"

/* ---- The disk: liblmdb finds these before the C library's ---- */

static _Atomic int write_error; /* errno of every write; 0: works */
static _Atomic int sync_error;
static _Atomic uint64_t syncs;
static _Atomic uint64_t syncs_left = UINT64_MAX; /* then they fail, too */

ssize_t pwrite(int fd, const void *buffer, size_t size, off_t offset);
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset);
ssize_t writev(int fd, const struct iovec *parts, int count);
int fdatasync(int fd);
int fsync(int fd);

ssize_t pwrite(int fd, const void *buffer, size_t size, off_t offset)
{
    if (atomic_load(&write_error) != 0) {
        errno = atomic_load(&write_error);
        return -1;
    }
    return syscall(SYS_pwrite64, fd, buffer, size, offset);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    if (atomic_load(&write_error) != 0) {
        errno = atomic_load(&write_error);
        return -1;
    }
    return syscall(SYS_pwritev, fd, parts, count, offset, 0);
}

int fdatasync(int fd)
{
    atomic_fetch_add(&syncs, 1);
    if (atomic_load(&syncs_left) == 0) {
        errno = EIO;
        return -1;
    }
    atomic_fetch_sub(&syncs_left, 1);
    if (atomic_load(&sync_error) != 0) {
        errno = atomic_load(&sync_error);
        return -1;
    }
    return (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    return fdatasync(fd);
}

static void wait_ms(long ms)
{
    const struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

Test(faults, every_commit_is_synced)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (uint32_t i = 0; i < 10; i++) {
        uint64_t before = atomic_load(&syncs);
        shelf_put_block(&shelf, 1, 0, i, 1, NULL);
        cr_assert_eq(atomic_load(&syncs), before, "queueing does no I/O");
        shelf_flush(&shelf);
        cr_assert_gt(atomic_load(&syncs), before);
    }
    const struct kvk_space_generation next = {1, 100};
    uint64_t before = atomic_load(&syncs);
    cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, &next, 1, &shelf.error), KVK_OK);
    cr_assert_gt(atomic_load(&syncs), before);
    shelf_finish(&shelf);
}

/* While nothing can be written: what is taken, what is refused, what is read. */
static void check_failing(struct shelf *shelf, uint64_t *ticket)
{
    struct block_example example;
    example_block(&example, 1, 0, 2, 1);
    cr_assert_eq(kvk_catalogue_block_put(shelf->catalogue, &example.record, NULL), KVK_EXHAUSTED);
    cr_assert_eq(kvk_catalogue_block_remove(shelf->catalogue, 1, 0, 5, ticket), KVK_OK,
                 "a removal is taken as long as there is room");
    const struct kvk_space_generation next = {1, 100};
    cr_assert_neq(kvk_catalogue_set_generations(shelf->catalogue, &next, 1, &shelf->error), KVK_OK);
    struct kvk_tenant_record tenant = example_tenant("t");
    cr_assert_neq(kvk_catalogue_put_tenant(shelf->catalogue, &tenant, &shelf->error), KVK_OK);
    cr_assert_eq(shelf_count_blocks(shelf, 1, 1), 1, "what was durable is read all the while");
}

static void fail_and_recover(_Atomic int *fault, int error)
{
    struct shelf shelf;
    uint64_t ticket;
    uint64_t safe;
    shelf_init(&shelf);
    kvk_log_set_descriptor(-1);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    shelf_put_block(&shelf, 1, 0, 0, 1, &safe);
    shelf_flush(&shelf);

    atomic_store(fault, error);
    shelf_put_block(&shelf, 1, 0, 1, 1, &ticket);
    cr_assert_eq(kvk_catalogue_block_remove(shelf.catalogue, 1, 0, 0, &ticket), KVK_OK);
    cr_assert_neq(kvk_catalogue_flush(shelf.catalogue, &shelf.error), KVK_OK);
    cr_assert_not_null(strstr(shelf.error.text, strerror(error)), "%s", shelf.error.text);
    cr_assert_eq(kvk_catalogue_committed(shelf.catalogue), safe);
    struct kvk_catalogue_stats stats = shelf_stats(&shelf);
    cr_assert(stats.failing);
    cr_assert_geq(stats.commit_failures, 1);
    cr_assert_eq(stats.queued, 2, "nothing is lost");
    check_failing(&shelf, &ticket);

    atomic_store(fault, 0);
    shelf_flush(&shelf);
    cr_assert_eq(kvk_catalogue_committed(shelf.catalogue), ticket);
    cr_assert_not(shelf_stats(&shelf).failing);
    shelf_put_block(&shelf, 1, 0, 2, 1, NULL);
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 2);
    cr_assert_eq(shelf_stats(&shelf).damaged_records, 0);
    shelf_finish(&shelf);
}

Test(faults, no_space_left)
{
    fail_and_recover(&write_error, ENOSPC);
}

Test(faults, writes_fail)
{
    fail_and_recover(&write_error, EIO);
}

Test(faults, syncs_fail)
{
    fail_and_recover(&sync_error, EIO);
}

struct block_seek {
    struct block_example example;
    bool same;
};

static bool seek_block(void *context, const struct kvk_disk_block_record *record)
{
    struct block_seek *seek = context;
    seek->same = seek->same || same_block(record, &seek->example.record);
    return !seek->same;
}

/* Is the slot's record the example of this seed? */
static bool block_is(struct shelf *shelf, uint32_t slot, uint64_t seed)
{
    static struct block_seek seek;
    seek.same = false;
    example_block(&seek.example, 1, 0, slot, seed);
    cr_assert_eq(kvk_catalogue_blocks(shelf->catalogue, 1, seek_block, &seek, &shelf->error),
                 KVK_OK);
    return seek.same;
}

/* A batch is committed in parts. What is said to be durable after some of them is, and no more. */
Test(faults, a_batch_that_fails_half_way)
{
    enum { COUNT = 64 };
    struct shelf shelf;
    bool half = false;
    shelf_init(&shelf);
    kvk_log_set_descriptor(-1);
    shelf.options.map_bytes = UINT64_C(1) << 20; /* so parts are small */
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (uint64_t left = 0; left < 12; left++) {
        uint64_t seeds[COUNT];
        uint64_t tickets[COUNT];
        uint64_t older[COUNT];
        for (uint32_t slot = 0; slot < COUNT; slot++) {
            older[slot] = left * 2 + 1;
            shelf_put_block(&shelf, 1, 0, slot, older[slot], NULL);
        }
        shelf_flush(&shelf);
        uint64_t before = kvk_catalogue_committed(shelf.catalogue);
        for (uint32_t i = 0; i < COUNT; i++) {
            seeds[i] = left * 2 + 2;
            shelf_put_block(&shelf, 1, 0, i, 999, &tickets[i]);
        }
        for (uint32_t i = 0; i < COUNT; i += 7) { /* again, so that tickets are not in order */
            shelf_put_block(&shelf, 1, 0, i, seeds[i], &tickets[i]);
        }
        for (uint32_t i = 0; i < COUNT; i++) {
            seeds[i] = i % 7 == 0 ? seeds[i] : 999;
        }
        atomic_store(&syncs_left, left);
        enum kvk_status status = kvk_catalogue_flush(shelf.catalogue, &shelf.error);
        atomic_store(&syncs_left, UINT64_MAX);
        uint64_t committed = kvk_catalogue_committed(shelf.catalogue);
        half = half || (status != KVK_OK && committed > before);
        /* Those that were acknowledged are there; of the rest either will do. */
        for (uint32_t i = 0; i < COUNT; i++) {
            cr_assert(tickets[i] > committed || block_is(&shelf, i, seeds[i]), "slot %u", i);
            cr_assert(block_is(&shelf, i, seeds[i]) || block_is(&shelf, i, older[i]));
        }
        shelf_flush(&shelf);
        for (uint32_t i = 0; i < COUNT; i++) {
            cr_assert(block_is(&shelf, i, seeds[i]));
        }
    }
    cr_assert(half, "some flush must have failed between two parts");
    shelf_finish(&shelf);
}

/* LMDB gives the whole environment up when its root page cannot be written. */
Test(faults, an_environment_that_was_given_up_is_opened_again)
{
    struct shelf shelf;
    shelf_init(&shelf);
    kvk_log_set_descriptor(-1);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (uint32_t i = 0; i < 20; i++) {
        shelf_put_block(&shelf, 1, 0, i, 1, NULL);
        if (i % 2 == 0) {
            atomic_store(i % 4 == 0 ? &write_error : &sync_error, EIO);
            cr_assert_neq(kvk_catalogue_flush(shelf.catalogue, &shelf.error), KVK_OK);
            atomic_store(&write_error, 0);
            atomic_store(&sync_error, 0);
        }
        shelf_flush(&shelf);
        cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), i + 1);
    }
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 20);
    shelf_finish(&shelf);
}

Test(faults, the_writer_tries_again_by_itself)
{
    struct shelf shelf;
    uint64_t ticket;
    shelf_init(&shelf);
    kvk_log_set_descriptor(-1);
    shelf.options.threads = true;
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    atomic_store(&sync_error, EIO);
    shelf_put_block(&shelf, 1, 0, 1, 1, &ticket);
    for (int i = 0; i < PATIENCE_MS / 10 && shelf_stats(&shelf).commit_failures < 2; i++) {
        wait_ms(10);
    }
    struct kvk_catalogue_stats stats = shelf_stats(&shelf);
    cr_assert_geq(stats.commit_failures, 2);
    cr_assert_lt(stats.commit_failures, 20, "with a pause between");
    cr_assert_neq(kvk_catalogue_flush(shelf.catalogue, &shelf.error), KVK_OK);
    atomic_store(&sync_error, 0);
    for (int i = 0; i < PATIENCE_MS / 10 && kvk_catalogue_committed(shelf.catalogue) < ticket;
         i++) {
        wait_ms(10);
    }
    cr_assert_eq(kvk_catalogue_committed(shelf.catalogue), ticket);
    cr_assert_not(shelf_stats(&shelf).failing);
    shelf_finish(&shelf);
}

/* A disk that never comes back must not keep the daemon from ending. */
Test(faults, closing_ends_also_on_a_dead_disk, .timeout = 20)
{
    struct shelf shelf;
    shelf_init(&shelf);
    kvk_log_set_descriptor(-1);
    for (int threads = 0; threads < 2; threads++) {
        shelf.options.threads = threads != 0;
        shelf_open(&shelf);
        shelf_put_space(&shelf, 1, 1);
        shelf_put_block(&shelf, 1, 0, 1, 1, NULL);
        atomic_store(&sync_error, EIO);
        shelf_close(&shelf);
        atomic_store(&sync_error, 0);
    }
    shelf_open(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 0);
    shelf_finish(&shelf);
}

/* ---- Full ---- */

static uint64_t file_bytes(const struct shelf *shelf)
{
    struct stat found;
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/catalogue/data.mdb", shelf->folder);
    cr_assert_eq(stat(path, &found), 0);
    return (uint64_t)found.st_size;
}

Test(faults, a_full_map_refuses_and_can_be_emptied)
{
    struct shelf shelf;
    uint32_t kept[3];
    shelf_init(&shelf);
    shelf.options.map_bytes = UINT64_C(4) << 20;
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (int round = 0; round < 3; round++) {
        enum kvk_status status = KVK_OK;
        uint32_t slot = 0;
        for (; status == KVK_OK; slot++) {
            struct block_example example;
            example_block(&example, 1, 0, slot, 1);
            status = kvk_catalogue_block_put(shelf.catalogue, &example.record, NULL);
            if (slot % 512 == 511) {
                shelf_flush(&shelf);
            }
        }
        kept[round] = slot - 1;
        cr_assert_eq(status, KVK_EXHAUSTED);
        shelf_flush(&shelf);
        cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), kept[round]);
        struct kvk_tenant_record tenant = example_tenant("t");
        cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &tenant, &shelf.error),
                     KVK_EXHAUSTED);
        cr_assert_str_eq(shelf.error.field, "durable.catalogue_bytes");
        const struct kvk_space_generation next = {1, 100 + (uint64_t)round};
        cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, &next, 1, &shelf.error), KVK_OK,
                     "an invalidation needs no room: %s", shelf.error.text);
        cr_assert_leq(shelf_stats(&shelf).used_bytes, shelf_stats(&shelf).limit_bytes + (64 << 10));
        cr_assert_leq(file_bytes(&shelf), shelf.options.map_bytes);
        for (uint32_t i = 0; i < kept[round]; i++) {
            cr_assert_eq(kvk_catalogue_block_remove(shelf.catalogue, 1, 0, i, NULL), KVK_OK);
        }
        shelf_flush(&shelf);
        cr_assert_eq(shelf_stats(&shelf).commit_failures, 0);
        cr_assert_eq(shelf_stats(&shelf).blocks, 0);
    }
    cr_assert_gt(kept[0], 5000);
    cr_assert_geq(kept[2] + kept[2] / 10, kept[0], "pages that were given up are used again");
    shelf_finish(&shelf);
}

/* An operator lowers the limit below what is there: it is read, and only grows no further. */
Test(faults, a_lower_limit_is_no_harm)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (uint32_t slot = 0; slot < 20000; slot++) {
        shelf_put_block(&shelf, 1, 0, slot, 1, NULL);
    }
    shelf_close(&shelf);
    shelf.options.map_bytes = UINT64_C(1) << 20;
    shelf_open(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 20000);
    struct block_example example;
    example_block(&example, 1, 0, 30000, 1);
    cr_assert_eq(kvk_catalogue_block_put(shelf.catalogue, &example.record, NULL), KVK_EXHAUSTED);
    cr_assert_eq(kvk_catalogue_block_remove(shelf.catalogue, 1, 0, 5, NULL), KVK_OK);
    shelf_flush(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 19999);
    shelf_finish(&shelf);
}

/* ---- A file that was damaged outside of us: LMDB itself may die of it ---- */

static void file_path(const struct shelf *shelf, const char *name, char path[160])
{
    (void)snprintf(path, 160, "%s/catalogue/%s", shelf->folder, name);
}

static void wreck_make(struct shelf *shelf)
{
    shelf_init(shelf);
    kvk_log_set_descriptor(-1);
    shelf_open(shelf);
    shelf_put_space(shelf, 1, 1);
    for (uint32_t slot = 0; slot < 5000; slot++) {
        shelf_put_block(shelf, 1, 0, slot, 1, NULL);
    }
    shelf_close(shelf);
}

static bool ignore_block(void *context, const struct kvk_disk_block_record *record)
{
    (void)context;
    (void)record;
    return true;
}

/* Open and read all in a process of its own: the status, or -1 if it died. */
static int open_apart(struct shelf *shelf)
{
    pid_t child = fork();
    if (child == 0) {
        (void)signal(SIGSEGV, SIG_DFL); /* whatever a sanitizer or Criterion does with it */
        (void)signal(SIGBUS, SIG_DFL);
        (void)signal(SIGABRT, SIG_DFL);
        enum kvk_status status =
            kvk_catalogue_open(&shelf->options, &shelf->catalogue, &shelf->error);
        if (status == KVK_OK) {
            status = kvk_catalogue_blocks(shelf->catalogue, 1, ignore_block, NULL, &shelf->error);
        }
        _exit((int)status);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    return WIFEXITED(result) ? WEXITSTATUS(result) : -1;
}

Test(faults, a_file_that_was_cut_is_refused_in_words)
{
    struct shelf shelf;
    char path[160];
    wreck_make(&shelf);
    file_path(&shelf, "data.mdb", path);
    off_t size = (off_t)file_bytes(&shelf);
    for (off_t part = 9; part >= 1; part -= 2) {
        cr_assert_eq(truncate(path, size * part / 10), 0);
        cr_assert_eq(kvk_catalogue_open(&shelf.options, &shelf.catalogue, &shelf.error),
                     KVK_DATA_LOSS, "%d tenths", (int)part);
        cr_assert_not_null(strstr(shelf.error.text, "move it away"), "%s", shelf.error.text);
        shelf.catalogue = NULL;
    }
    shelf_finish(&shelf);
}

Test(faults, who_died_of_the_file_dies_only_once, .timeout = 120)
{
    struct shelf shelf;
    struct kvk_random random;
    char path[160];
    uint32_t died = 0;
    wreck_make(&shelf);
    file_path(&shelf, "data.mdb", path);
    uint64_t size = file_bytes(&shelf);
    uint8_t *whole = malloc(size);
    int fd = open(path, O_RDWR);
    cr_assert_eq(pread(fd, whole, size, 0), (ssize_t)size);
    kvk_random_init(&random, 3);
    for (int round = 0; round < 60; round++) {
        uint64_t pages = size / 4096;
        for (int i = 0; i < 3; i++) { /* in pages' heads, where the pointers are */
            uint64_t page = 2 + kvk_random_below(&random, pages - 2);
            uint8_t byte = (uint8_t)kvk_random_next(&random);
            off_t at = (off_t)(page * 4096 + 10 + kvk_random_below(&random, 20));
            cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
        }
        if (open_apart(&shelf) == -1) {
            died++;
            cr_assert_neq(open_apart(&shelf), -1, "round %d", round);
        }
        cr_assert_eq(pwrite(fd, whole, size, 0), (ssize_t)size);
        shelf_open(&shelf); /* mended: all is well again, and the mark goes */
        shelf_close(&shelf);
        char mark[160];
        file_path(&shelf, "opening", mark);
        cr_assert_neq(access(mark, F_OK), 0);
    }
    cr_assert_gt(died, 0, "none was bad enough to show anything");
    (void)close(fd);
    free(whole);
    shelf_finish(&shelf);
}

Test(faults, an_opening_that_was_cut_short_is_no_harm)
{
    struct shelf shelf;
    char mark[160];
    wreck_make(&shelf);
    file_path(&shelf, "opening", mark);
    for (int round = 0; round < 3; round++) {
        cr_assert_eq(open_apart(&shelf), KVK_OK, "ends without a word, as if it were killed");
        cr_assert_eq(access(mark, F_OK), 0);
    }
    shelf_open(&shelf);
    cr_assert_eq(access(mark, F_OK), 0);
    kvk_catalogue_trust(shelf.catalogue);
    cr_assert_neq(access(mark, F_OK), 0);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 5000);
    shelf_finish(&shelf);
}
