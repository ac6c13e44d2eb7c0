/* A disk that fails in every way: each time a status in words, counted, and never other bytes. */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>

#include "base/copy.h"
#include "base/random.h"
#include "hosttier/disk.h"
#include "tests/disk_house.h"

#define SLOT_BYTES (256U * 1024)
#define SLOT_COUNT 64U
#define PROBE_MS 10U

struct house {
    char folder[DISK_HOUSE_PATH_SIZE];
    struct disk_faults faults;
    struct kvk_disk_io io;
    struct kvk_disk *disk;
    struct kvk_disk_file *file;
    uint8_t *memory; /* [SLOT_COUNT][SLOT_BYTES]: what is right */
    uint8_t *read;
};

static void house_init(struct house *house, bool direct)
{
    struct kvk_error error;
    struct kvk_random random;
    memset(house, 0, sizeof(*house));
    disk_house_make(house->folder);
    house->io = disk_fault_io(&house->faults);
    struct kvk_disk_options options = {.folder = house->folder,
                                       .direct = direct,
                                       .uring = true,
                                       .io = &house->io,
                                       .probe_ms = PROBE_MS};
    cr_assert_eq(kvk_disk_open(&options, &house->disk, &error), KVK_OK, "%s", error.text);
    cr_assert_eq(
        kvk_disk_file_open(house->disk, 1, 0, SLOT_BYTES, SLOT_COUNT, &house->file, &error),
        KVK_OK);
    house->memory = aligned_alloc(4096, SLOT_COUNT * SLOT_BYTES);
    house->read = aligned_alloc(4096, SLOT_COUNT * SLOT_BYTES);
    kvk_random_init(&random, 3);
    kvk_random_fill(&random, house->memory, SLOT_COUNT * SLOT_BYTES);
}

static void house_finish(struct house *house)
{
    kvk_disk_file_close(house->file);
    kvk_disk_close(house->disk);
    disk_house_clear(house->folder);
    free(house->memory);
    free(house->read);
}

/* Write or read slots [first, first + count), whole. */
static enum kvk_status slots_move(struct house *house, bool write, enum kvk_disk_class class,
                                  uint32_t first, uint32_t count, struct kvk_disk_piece *pieces,
                                  struct kvk_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t at = (size_t)(first + i) * SLOT_BYTES;
        pieces[i] = (struct kvk_disk_piece){.file = house->file,
                                            .slot = first + i,
                                            .memory = (write ? house->memory : house->read) + at,
                                            .size_bytes = SLOT_BYTES};
    }
    return write ? kvk_disk_write(house->disk, class, pieces, count, error)
                 : kvk_disk_read(house->disk, class, pieces, count, error);
}

static enum kvk_status slot_write(struct house *house, uint32_t slot, struct kvk_error *error)
{
    struct kvk_disk_piece piece;
    enum kvk_status status = slots_move(house, true, KVK_DISK_BEHIND, slot, 1, &piece, error);
    cr_assert_eq(piece.status, status);
    return status;
}

static enum kvk_status slot_read(struct house *house, uint32_t slot, struct kvk_error *error)
{
    struct kvk_disk_piece piece;
    memset(house->read + (size_t)slot * SLOT_BYTES, 0, SLOT_BYTES);
    enum kvk_status status = slots_move(house, false, KVK_DISK_RESTORE, slot, 1, &piece, error);
    cr_assert_eq(piece.status, status);
    return status;
}

static bool slot_is_right(const struct house *house, uint32_t slot)
{
    size_t at = (size_t)slot * SLOT_BYTES;
    return memcmp(house->read + at, house->memory + at, SLOT_BYTES) == 0;
}

static struct kvk_disk_health health_of(const struct house *house)
{
    struct kvk_disk_health health;
    kvk_disk_health(house->disk, &health);
    return health;
}

/* Until the prober has been at work so many times. */
static void probes_wait(const struct house *house, uint64_t count)
{
    for (uint32_t i = 0; i < PATIENCE_MS; i++) {
        if (health_of(house).probes >= count) {
            return;
        }
        (void)usleep(1000);
    }
    cr_assert_fail("the prober does nothing");
}

static void good_wait(const struct house *house)
{
    for (uint32_t i = 0; i < PATIENCE_MS; i++) {
        if (health_of(house).state == KVK_DISK_GOOD) {
            return;
        }
        (void)usleep(1000);
    }
    cr_assert_fail("it does not come back");
}

/* ---- What the system does now and then ---- */

ParameterizedTestParameters(disk_faults, short_and_interrupted)
{
    static bool direct[] = {false, true};
    return cr_make_param_array(bool, direct, 2);
}

ParameterizedTest(const bool *direct, disk_faults, short_and_interrupted)
{
    struct house house;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    house_init(&house, *direct);
    atomic_store(&house.faults.short_step, *direct ? 4608 : 5000); /* not whole pages */
    atomic_store(&house.faults.interrupts, 40);
    cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, SLOT_COUNT, pieces, &error), KVK_OK,
                 "%s", error.text);
    cr_assert_geq(atomic_load(&house.faults.writes), SLOT_COUNT * SLOT_BYTES / 5000);
    atomic_store(&house.faults.interrupts, 40);
    cr_assert_eq(slots_move(&house, false, KVK_DISK_RESTORE, 0, SLOT_COUNT, pieces, &error), KVK_OK,
                 "%s", error.text);
    cr_assert_eq(memcmp(house.read, house.memory, SLOT_COUNT * SLOT_BYTES), 0);
    atomic_store(&house.faults.short_step, 0);
    memset(house.read, 0, SLOT_COUNT * SLOT_BYTES);
    cr_assert_eq(slots_move(&house, false, KVK_DISK_RESTORE, 0, SLOT_COUNT, pieces, &error), KVK_OK,
                 "%s", error.text);
    cr_assert_eq(memcmp(house.read, house.memory, SLOT_COUNT * SLOT_BYTES), 0);
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
    cr_assert(!*direct || atomic_load(&house.faults.unaligned) == 0, "goes on at whole pages");
    house_finish(&house);
}

Test(disk_faults, endless_interrupts_end)
{
    struct house house;
    struct kvk_error error;
    house_init(&house, false);
    atomic_store(&house.faults.interrupts, 1U << 30);
    cr_assert_eq(slot_write(&house, 0, &error), KVK_INTERNAL);
    cr_assert_lt(atomic_load(&house.faults.writes), 1000);
    house_finish(&house);
}

/* ---- Errors ---- */

Test(disk_faults, write_errors_turn_it_off_and_a_probe_on_again)
{
    struct house house;
    struct kvk_error error;
    house_init(&house, true);
    cr_assert_eq(slot_write(&house, 0, &error), KVK_OK);

    atomic_store(&house.faults.write_error, EIO);
    cr_assert_eq(slot_write(&house, 1, &error), KVK_INTERNAL);
    cr_assert_not_null(strstr(error.text, "slot 1"), "%s", error.text);
    cr_assert_eq(health_of(&house).state, KVK_DISK_FAILING);
    cr_assert_eq(health_of(&house).write_errors, 1);
    cr_assert_not_null(strstr(health_of(&house).reason, "writing slot 1"));
    atomic_store(&house.faults.write_error, 0);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_OK);
    cr_assert_eq(health_of(&house).state, KVK_DISK_FAILING, "a read says nothing of writes");
    cr_assert_eq(slot_write(&house, 1, &error), KVK_OK);
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);

    atomic_store(&house.faults.write_error, EIO);
    for (uint32_t i = 0; i < 8; i++) {
        cr_assert_eq(slot_write(&house, 1, &error), KVK_INTERNAL);
    }
    cr_assert_eq(health_of(&house).state, KVK_DISK_OFF);
    cr_assert_eq(health_of(&house).turned_off, 1);
    uint64_t reads = atomic_load(&house.faults.reads);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_UNAVAILABLE);
    cr_assert_eq(error.retry_after_ms, PROBE_MS);
    cr_assert_eq(atomic_load(&house.faults.reads), reads, "OFF: nothing is tried");
    cr_assert_eq(slot_write(&house, 0, &error), KVK_UNAVAILABLE);
    cr_assert_eq(kvk_disk_file_allocate(house.file, 0, 1, &error), KVK_UNAVAILABLE);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_UNAVAILABLE);
    probes_wait(&house, 3);
    cr_assert_eq(health_of(&house).state, KVK_DISK_OFF, "probes fail as long as writes do");

    atomic_store(&house.faults.write_error, 0);
    good_wait(&house);
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_OK);
    cr_assert(slot_is_right(&house, 0));
    atomic_store(&house.faults.write_error, EIO);
    cr_assert_eq(slot_write(&house, 1, &error), KVK_INTERNAL);
    cr_assert_eq(health_of(&house).state, KVK_DISK_FAILING, "what was before is forgotten");
    house_finish(&house);
}

Test(disk_faults, read_errors_turn_it_off)
{
    struct house house;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    house_init(&house, false);
    cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, SLOT_COUNT, pieces, &error), KVK_OK);
    atomic_store(&house.faults.read_error, EIO);
    cr_assert_eq(slots_move(&house, false, KVK_DISK_RESTORE, 0, SLOT_COUNT, pieces, &error),
                 KVK_INTERNAL);
    cr_assert_not_null(strstr(error.text, "Input/output error"), "%s", error.text);
    for (uint32_t i = 0; i < SLOT_COUNT; i++) {
        cr_assert(pieces[i].status == KVK_INTERNAL || pieces[i].status == KVK_UNAVAILABLE);
    }
    cr_assert_eq(health_of(&house).state, KVK_DISK_OFF);
    cr_assert_geq(health_of(&house).read_errors, 8);
    atomic_store(&house.faults.read_error, 0);
    good_wait(&house);
    cr_assert_eq(slots_move(&house, false, KVK_DISK_RESTORE, 0, SLOT_COUNT, pieces, &error),
                 KVK_OK);
    house_finish(&house);
}

Test(disk_faults, syncs_fail_in_words)
{
    struct house house;
    struct kvk_error error;
    house_init(&house, true);
    cr_assert_eq(slot_write(&house, 0, &error), KVK_OK);
    uint64_t before = atomic_load(&house.faults.syncs);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_OK);
    cr_assert_eq(atomic_load(&house.faults.syncs), before + 1);
    atomic_store(&house.faults.sync_error, EIO);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_INTERNAL);
    cr_assert_not_null(strstr(error.text, "syncing"), "%s", error.text);
    cr_assert_eq(health_of(&house).sync_errors, 1);
    cr_assert_eq(health_of(&house).state, KVK_DISK_FAILING);
    atomic_store(&house.faults.sync_error, 0);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_OK);
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
    house_finish(&house);
}

Test(disk_faults, no_space_is_full_not_off)
{
    struct house house;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    house_init(&house, true);
    atomic_store(&house.faults.write_limit, 10 * SLOT_BYTES);
    cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, SLOT_COUNT, pieces, &error),
                 KVK_EXHAUSTED);
    for (uint32_t i = 0; i < SLOT_COUNT; i++) {
        cr_assert_eq(pieces[i].status, i < 10 ? KVK_OK : KVK_EXHAUSTED);
    }
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
    cr_assert(health_of(&house).full);
    cr_assert_eq(health_of(&house).full_errors, SLOT_COUNT - 10);
    atomic_store(&house.faults.write_limit, 0);
    cr_assert_eq(kvk_disk_file_allocate(house.file, 0, SLOT_COUNT, &error), KVK_OK);
    cr_assert_not(health_of(&house).full);

    atomic_store(&house.faults.allocate_error, ENOSPC);
    cr_assert_eq(kvk_disk_file_allocate(house.file, 0, 4, &error), KVK_EXHAUSTED);
    cr_assert_eq(error.value, 4 * SLOT_BYTES);
    cr_assert(health_of(&house).full);
    cr_assert_eq(atomic_load(&house.faults.punches), 1, "what was got of it goes back");
    house_finish(&house);
}

Test(disk_faults, read_only_reads_on)
{
    struct house house;
    struct kvk_error error;
    house_init(&house, true);
    cr_assert_eq(slot_write(&house, 3, &error), KVK_OK);
    atomic_store(&house.faults.write_error, EROFS);
    cr_assert_eq(slot_write(&house, 4, &error), KVK_INTERNAL);
    cr_assert(health_of(&house).read_only);
    for (uint32_t i = 0; i < 20; i++) {
        cr_assert_eq(slot_write(&house, 4, &error), KVK_UNAVAILABLE);
        cr_assert_eq(slot_read(&house, 3, &error), KVK_OK);
        cr_assert(slot_is_right(&house, 3));
    }
    cr_assert_eq(health_of(&house).state, KVK_DISK_FAILING);
    atomic_store(&house.faults.write_error, 0);
    good_wait(&house);
    cr_assert_not(health_of(&house).read_only);
    cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
    cr_assert_eq(slot_write(&house, 4, &error), KVK_OK);
    house_finish(&house);
}

Test(disk_faults, without_allocation_and_punching)
{
    struct house house;
    struct kvk_error error;
    house_init(&house, true);
    atomic_store(&house.faults.allocate_error, EOPNOTSUPP);
    atomic_store(&house.faults.punch_error, EOPNOTSUPP);
    atomic_store(&house.faults.short_step, 585 * 512);
    cr_assert_eq(kvk_disk_file_allocate(house.file, 8, 8, &error), KVK_OK, "%s", error.text);
    cr_assert_geq(kvk_disk_file_bytes(house.file), 8 * SLOT_BYTES, "zeros were written");
    cr_assert_eq(slot_read(&house, 15, &error), KVK_OK);
    memset(house.memory + 15 * SLOT_BYTES, 0, SLOT_BYTES);
    cr_assert(slot_is_right(&house, 15));
    cr_assert_eq(kvk_disk_file_punch(house.file, 8, 8, &error), KVK_OK);
    cr_assert_eq(health_of(&house).unpunched, 1);
    cr_assert_eq(slot_read(&house, 15, &error), KVK_INTERNAL, "it is nobody's room now");
    atomic_store(&house.faults.punch_error, EIO);
    cr_assert_eq(kvk_disk_file_punch(house.file, 8, 8, &error), KVK_INTERNAL);
    house_finish(&house);
}

/* ---- What happens behind our back ---- */

static void file_path(const struct house *house, char *path, size_t size)
{
    (void)snprintf(path, size, "%s/blocks-0000000000000001-0", house->folder);
}

Test(disk_faults, a_shrunken_file_is_an_error_not_zeros)
{
    struct house house;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    char path[DISK_HOUSE_PATH_SIZE + 64];
    house_init(&house, true);
    cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, 20, pieces, &error), KVK_OK);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_OK);
    file_path(&house, path, sizeof(path));
    cr_assert_eq(truncate(path, 10 * SLOT_BYTES + 100), 0);

    cr_assert_eq(slot_read(&house, 9, &error), KVK_OK);
    cr_assert(slot_is_right(&house, 9));
    cr_assert_eq(slot_read(&house, 10, &error), KVK_INTERNAL, "half of it is gone");
    cr_assert_eq(slot_read(&house, 15, &error), KVK_INTERNAL);
    cr_assert_not_null(strstr(error.text, "shorter"), "%s", error.text);
    cr_assert_geq(health_of(&house).short_reads, 2);

    /* A write past the end makes a hole: what was there is still gone. */
    cr_assert_eq(slot_write(&house, 19, &error), KVK_OK);
    cr_assert_eq(slot_read(&house, 19, &error), KVK_OK);
    cr_assert(slot_is_right(&house, 19));
    for (uint32_t slot = 10; slot < 19; slot++) {
        cr_assert_eq(slot_read(&house, slot, &error), KVK_INTERNAL, "slot %u", slot);
    }
    cr_assert_neq(health_of(&house).state, KVK_DISK_OFF, "the other files are well");
    cr_assert_eq(kvk_disk_file_allocate(house.file, 12, 1, &error), KVK_OK);
    cr_assert_eq(slot_read(&house, 12, &error), KVK_OK);

    /* Cut right before a sync: not durable, and said so. */
    cr_assert_eq(slot_write(&house, 19, &error), KVK_OK);
    cr_assert_eq(truncate(path, 0), 0);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_INTERNAL);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_INTERNAL);
    house_finish(&house);
}

/* Cut while it is being read, by the ring too. */
Test(disk_faults, truncation_under_way)
{
    static const struct {
        bool uring, direct;
    } paths[] = {{true, true}, {true, false}, {false, true}, {false, false}};
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct house house;
        struct kvk_disk_piece pieces[SLOT_COUNT];
        struct kvk_error error;
        char path[DISK_HOUSE_PATH_SIZE + 64];
        house_init(&house, false);
        kvk_disk_file_close(house.file);
        kvk_disk_close(house.disk);
        struct kvk_disk_options options = {
            .folder = house.folder, .uring = paths[i].uring, .direct = paths[i].direct};
        cr_assert_eq(kvk_disk_open(&options, &house.disk, &error), KVK_OK);
        cr_assert_eq(
            kvk_disk_file_open(house.disk, 1, 0, SLOT_BYTES, SLOT_COUNT, &house.file, &error),
            KVK_OK);
        file_path(&house, path, sizeof(path));
        for (uint32_t round = 0; round < 10; round++) {
            cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, SLOT_COUNT, pieces, &error),
                         KVK_OK);
            if (round % 2 == 0) {
                cr_assert_eq(truncate(path, (off_t)round * 5 * SLOT_BYTES + round * 1000), 0);
            } else {
                cr_assert_eq(truncate(path, (off_t)round * 5 * SLOT_BYTES + 4096), 0);
            }
            memset(house.read, 0, SLOT_COUNT * SLOT_BYTES);
            cr_assert_eq(slots_move(&house, false, KVK_DISK_RESTORE, 0, SLOT_COUNT, pieces, &error),
                         KVK_INTERNAL);
            for (uint32_t slot = 0; slot < SLOT_COUNT; slot++) {
                cr_assert_eq(pieces[slot].status, slot < round * 5 ? KVK_OK : KVK_INTERNAL);
                cr_assert(pieces[slot].status != KVK_OK || slot_is_right(&house, slot));
            }
        }
        house_finish(&house);
    }
}

Test(disk_faults, a_deleted_file_is_not_durable)
{
    struct house house;
    struct kvk_error error;
    char path[DISK_HOUSE_PATH_SIZE + 64];
    house_init(&house, true);
    cr_assert_eq(slot_write(&house, 0, &error), KVK_OK);
    file_path(&house, path, sizeof(path));
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_OK, "its bytes are there as long as we are");
    cr_assert(slot_is_right(&house, 0));
    cr_assert_eq(slot_write(&house, 1, &error), KVK_OK);
    cr_assert_eq(kvk_disk_sync(house.file, &error), KVK_INTERNAL);
    kvk_disk_file_close(house.file);
    cr_assert_eq(kvk_disk_file_open(house.disk, 1, 0, SLOT_BYTES, SLOT_COUNT, &house.file, &error),
                 KVK_OK);
    cr_assert_eq(slot_read(&house, 0, &error), KVK_INTERNAL, "a new file has nothing");
    house_finish(&house);
}

/* A file system that is really full, where we may mount one. */
Test(disk_faults, a_small_file_system)
{
    struct house house;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    char mounted[DISK_HOUSE_PATH_SIZE];
    disk_house_make(mounted);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvkeep", mounted, "tmpfs", 0, "size=4m") != 0) {
        (void)rmdir(mounted);
        cr_skip_test("not root: no small file system to try");
    }
    for (uint32_t uring = 0; uring < 2; uring++) {
        house_init(&house, true);
        kvk_disk_file_close(house.file);
        kvk_disk_close(house.disk);
        struct kvk_disk_options options = {.folder = mounted, .direct = true, .uring = uring != 0};
        cr_assert_eq(kvk_disk_open(&options, &house.disk, &error), KVK_OK, "%s", error.text);
        cr_assert_eq(
            kvk_disk_file_open(house.disk, 1, 0, SLOT_BYTES, SLOT_COUNT, &house.file, &error),
            KVK_OK);
        cr_assert_eq(kvk_disk_file_allocate(house.file, 0, 8, &error), KVK_OK);
        cr_assert_eq(kvk_disk_file_allocate(house.file, 8, 32, &error), KVK_EXHAUSTED);
        cr_assert(health_of(&house).full);
        cr_assert_leq(kvk_disk_file_bytes(house.file), 8 * SLOT_BYTES, "nothing is left of it");
        cr_assert_eq(slots_move(&house, true, KVK_DISK_BEHIND, 0, 24, pieces, &error),
                     KVK_EXHAUSTED);
        for (uint32_t slot = 0; slot < 8; slot++) {
            cr_assert_eq(pieces[slot].status, KVK_OK, "what was allocated can be written");
            cr_assert_eq(slot_read(&house, slot, &error), KVK_OK);
            cr_assert(slot_is_right(&house, slot));
        }
        cr_assert_eq(health_of(&house).state, KVK_DISK_GOOD);
        cr_assert_eq(kvk_disk_file_punch(house.file, 0, SLOT_COUNT, &error), KVK_OK);
        cr_assert_eq(kvk_disk_file_allocate(house.file, 8, 8, &error), KVK_OK);
        cr_assert_not(health_of(&house).full);
        cr_assert_eq(kvk_disk_file_remove(house.disk, 1, 0, &error), KVK_OK);
        house_finish(&house);
    }
    cr_assert_eq(umount2(mounted, MNT_DETACH), 0);
    (void)rmdir(mounted);
}

/* ---- Classes ---- */

static void *behind_main(void *context)
{
    struct house *house = context;
    struct kvk_disk_piece pieces[SLOT_COUNT];
    struct kvk_error error;
    enum kvk_status status =
        slots_move(house, true, KVK_DISK_BEHIND, 0, SLOT_COUNT, pieces, &error);
    cr_assert_eq(status, KVK_OK);
    return NULL;
}

Test(disk_faults, a_restore_passes_the_queue_of_writes)
{
    struct house house;
    struct kvk_error error;
    pthread_t thread;
    house_init(&house, false);
    cr_assert_eq(kvk_disk_file_allocate(house.file, 0, SLOT_COUNT, &error), KVK_OK);
    atomic_store(&house.faults.delay_us, 5000);
    uint64_t before = atomic_load(&house.faults.writes);
    cr_assert_eq(pthread_create(&thread, NULL, behind_main, &house), 0);
    while (atomic_load(&house.faults.writes) < before + 4) {
        (void)usleep(100);
    }
    uint64_t begun = atomic_load(&house.faults.writes);
    cr_assert_eq(slot_read(&house, SLOT_COUNT - 1, &error), KVK_OK);
    uint64_t passed = atomic_load(&house.faults.writes) - begun;
    cr_assert_leq(passed, 6, "%u writes went before it", (unsigned)passed);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_leq(atomic_load(&house.faults.writing_most), 2, "half of the threads is free");
    house_finish(&house);
}
