/* The disk store against plain memory: every path, any alignment, any size. */
#include "hosttier/disk.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/stat.h>

#include "base/copy.h"
#include "base/lock.h"
#include "base/random.h"
#include "tests/disk_house.h"

#define FILE_COUNT 3
#define BATCH_MAX 24
#define ROUND_COUNT 150

struct path {
    bool uring;
    bool direct;
    uint32_t depth;
};

/* ---- The model: each file as plain memory ---- */

struct model {
    struct kvk_disk_file *file;
    uint64_t slot_bytes;
    uint32_t slot_count;
    uint8_t *bytes;
    bool *there; /* [slot_count] */
};

struct world {
    char folder[DISK_HOUSE_PATH_SIZE];
    struct kvk_disk *disk;
    struct model models[FILE_COUNT];
    struct kvk_random random;
};

static void files_open(struct world *world)
{
    static const struct {
        uint64_t slot_bytes;
        uint32_t slot_count;
    } shapes[FILE_COUNT] = {{4096, 100}, {5 * 4096, 40}, {(3U << 20) + 8192, 9}};
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        struct model *model = &world->models[i];
        struct kvk_error error;
        model->slot_bytes = shapes[i].slot_bytes;
        model->slot_count = shapes[i].slot_count;
        cr_assert_eq(kvk_disk_file_open(world->disk, 7, i, model->slot_bytes, model->slot_count,
                                        &model->file, &error),
                     KVK_OK, "%s", error.text);
    }
}

static void files_close(struct world *world)
{
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        kvk_disk_file_close(world->models[i].file);
        world->models[i].file = NULL;
    }
}

static void world_open(struct world *world, const struct path *path)
{
    struct kvk_disk_options options = {.folder = world->folder,
                                       .uring = path->uring,
                                       .direct = path->direct,
                                       .depth = path->depth};
    struct kvk_error error;
    cr_assert_eq(kvk_disk_open(&options, &world->disk, &error), KVK_OK, "%s", error.text);
    files_open(world);
}

static void world_init(struct world *world, const struct path *path, uint64_t seed)
{
    memset(world, 0, sizeof(*world));
    kvk_random_init(&world->random, seed);
    disk_house_make(world->folder);
    world_open(world, path);
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        struct model *model = &world->models[i];
        model->bytes = calloc(model->slot_count, model->slot_bytes);
        model->there = calloc(model->slot_count, sizeof(*model->there));
    }
}

static void world_finish(struct world *world)
{
    files_close(world);
    kvk_disk_close(world->disk);
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        free(world->models[i].bytes);
        free(world->models[i].there);
    }
    disk_house_clear(world->folder);
}

/* ---- Random batches ---- */

struct batch {
    struct kvk_disk_piece pieces[BATCH_MAX];
    struct model *models[BATCH_MAX];
    uint64_t checksums[BATCH_MAX];
    uint8_t *memory[BATCH_MAX]; /* ours; the piece's lies somewhere in it */
    uint32_t count;
};

/* Whole blocks for the most part, and anything else too; no two of one batch in one slot. */
static void batch_make(struct world *world, struct batch *batch)
{
    struct kvk_random *random = &world->random;
    memset(batch, 0, sizeof(*batch));
    uint32_t wanted = (uint32_t)kvk_random_between(random, 1, BATCH_MAX);
    for (uint32_t i = 0; i < wanted; i++) {
        struct model *model = &world->models[kvk_random_below(random, FILE_COUNT)];
        uint32_t slot = (uint32_t)kvk_random_below(random, model->slot_count);
        bool taken = false;
        for (uint32_t j = 0; j < batch->count; j++) {
            taken = taken || (batch->models[j] == model && batch->pieces[j].slot == slot);
        }
        if (taken) {
            continue;
        }
        uint64_t offset = 0;
        uint64_t size = model->slot_bytes;
        if (kvk_random_chance(random, 0.6)) {
            offset = kvk_random_below(random, model->slot_bytes / 4096) * 4096;
            size = kvk_random_between(random, 1, model->slot_bytes - offset);
        }
        /* Page aligned, block aligned, or anyhow. */
        static const uint64_t steps[] = {4096, 512, 64, 1};
        uint64_t step = steps[kvk_random_below(random, 4)];
        uint64_t shift = kvk_random_below(random, 4096 / step) * step;
        void *memory = NULL;
        cr_assert_eq(posix_memalign(&memory, 4096, size + 4096 + 64), 0);
        memset(memory, 0xEE, size + 4096 + 64);
        batch->models[batch->count] = model;
        batch->memory[batch->count] = memory;
        batch->pieces[batch->count] = (struct kvk_disk_piece){
            .file = model->file,
            .slot = slot,
            .offset = offset,
            .memory = (uint8_t *)memory + shift,
            .size_bytes = size,
            .checksum = kvk_random_chance(random, 0.8) ? &batch->checksums[batch->count] : NULL,
            .status = KVK_CANCELLED,
        };
        batch->count++;
    }
}

static void batch_free(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        free(batch->memory[i]);
    }
}

static void pieces_fill(struct world *world, struct batch *batch)
{
    struct kvk_error error;
    for (uint32_t i = 0; i < batch->count; i++) {
        /* A part of a slot only where the whole has room. */
        const struct model *model = batch->models[i];
        uint32_t slot = batch->pieces[i].slot;
        if (!model->there[slot]) {
            cr_assert_eq(kvk_disk_file_allocate(model->file, slot, 1, &error), KVK_OK);
        }
        kvk_random_fill(&world->random, batch->pieces[i].memory, batch->pieces[i].size_bytes);
    }
}

static enum kvk_disk_class class_choose(struct world *world)
{
    return (enum kvk_disk_class)kvk_random_below(&world->random, 3);
}

static void batch_write(struct world *world, struct batch *batch)
{
    struct kvk_error error;
    pieces_fill(world, batch);
    cr_assert_eq(
        kvk_disk_write(world->disk, class_choose(world), batch->pieces, batch->count, &error),
        KVK_OK, "%s", error.text);
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct kvk_disk_piece *piece = &batch->pieces[i];
        struct model *model = batch->models[i];
        uint64_t padded = (piece->size_bytes + 4095) / 4096 * 4096;
        uint8_t *target = model->bytes + piece->slot * model->slot_bytes + piece->offset;
        memset(target, 0, padded);
        memcpy(target, piece->memory, piece->size_bytes);
        model->there[piece->slot] = true;
        cr_assert_eq(piece->status, KVK_OK);
        cr_assert(piece->checksum == NULL ||
                  *piece->checksum == kvk_checksum(piece->memory, piece->size_bytes));
    }
}

static void piece_compare(const struct kvk_disk_piece *piece, const struct model *model)
{
    const uint8_t *right = model->bytes + piece->slot * model->slot_bytes + piece->offset;
    const uint8_t *memory = piece->memory;
    cr_assert_eq(memcmp(memory, right, piece->size_bytes), 0);
    cr_assert_eq(memory[piece->size_bytes], 0xEE, "a byte past the end was touched");
    cr_assert(piece->checksum == NULL ||
              *piece->checksum == kvk_checksum(right, piece->size_bytes));
}

static void batch_read(struct world *world, struct batch *batch)
{
    struct kvk_error error = {0};
    bool all = true;
    for (uint32_t i = 0; i < batch->count; i++) {
        all = all && batch->models[i]->there[batch->pieces[i].slot];
    }
    enum kvk_status status =
        kvk_disk_read(world->disk, class_choose(world), batch->pieces, batch->count, &error);
    cr_assert_eq(status, all ? KVK_OK : KVK_INTERNAL, "%s", error.text);
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct kvk_disk_piece *piece = &batch->pieces[i];
        bool there = batch->models[i]->there[piece->slot];
        cr_assert_eq(piece->status, there ? KVK_OK : KVK_INTERNAL);
        if (there) {
            piece_compare(piece, batch->models[i]);
        }
    }
}

static void room_change(struct world *world)
{
    struct kvk_error error;
    struct model *model = &world->models[kvk_random_below(&world->random, FILE_COUNT)];
    uint32_t first = (uint32_t)kvk_random_below(&world->random, model->slot_count);
    uint32_t count =
        (uint32_t)kvk_random_between(&world->random, 1, (model->slot_count - first + 3) / 4);
    bool there = kvk_random_chance(&world->random, 0.5);
    enum kvk_status status = there ? kvk_disk_file_allocate(model->file, first, count, &error)
                                   : kvk_disk_file_punch(model->file, first, count, &error);
    cr_assert_eq(status, KVK_OK, "%s", error.text);
    for (uint32_t i = first; i < first + count; i++) {
        if (!there) {
            memset(model->bytes + i * model->slot_bytes, 0, model->slot_bytes);
        }
        model->there[i] = there;
    }
}

/* Every byte of every slot that is there, read in one go. */
static void world_compare(struct world *world)
{
    for (uint32_t i = 0; i < FILE_COUNT; i++) {
        const struct model *model = &world->models[i];
        uint8_t *memory = malloc(model->slot_count * model->slot_bytes);
        struct kvk_disk_piece pieces[100];
        struct kvk_error error;
        uint32_t count = 0;
        for (uint32_t slot = 0; slot < model->slot_count; slot++) {
            if (model->there[slot]) {
                pieces[count] = (struct kvk_disk_piece){.file = model->file,
                                                        .slot = slot,
                                                        .memory = memory + slot * model->slot_bytes,
                                                        .size_bytes = model->slot_bytes};
                count++;
            }
        }
        cr_assert_eq(kvk_disk_read(world->disk, KVK_DISK_RESTORE, pieces, count, &error), KVK_OK,
                     "%s", error.text);
        for (uint32_t slot = 0; slot < model->slot_count; slot++) {
            uint64_t at = slot * model->slot_bytes;
            cr_assert(!model->there[slot] ||
                      memcmp(memory + at, model->bytes + at, model->slot_bytes) == 0);
        }
        free(memory);
    }
}

ParameterizedTestParameters(disk, model)
{
    static struct path paths[] = {{false, false, 0}, {false, true, 0}, {true, false, 0},
                                  {true, true, 0},   {true, true, 1},  {false, true, 1}};
    return cr_make_param_array(struct path, paths, sizeof(paths) / sizeof(paths[0]));
}

ParameterizedTest(const struct path *path, disk, model)
{
    struct world world;
    world_init(&world, path, 11 + path->depth);
    for (uint32_t round = 0; round < ROUND_COUNT; round++) {
        struct batch batch;
        batch_make(&world, &batch);
        if (kvk_random_chance(&world.random, 0.5)) {
            batch_write(&world, &batch);
        } else {
            batch_read(&world, &batch);
        }
        batch_free(&batch);
        if (round % 4 == 0) {
            room_change(&world);
        }
        if (round % 50 == 49) {
            struct kvk_error error;
            world_compare(&world);
            for (uint32_t i = 0; i < FILE_COUNT; i++) {
                cr_assert_eq(kvk_disk_sync(world.models[i].file, &error), KVK_OK, "%s", error.text);
            }
        }
    }
    struct kvk_disk_health health;
    kvk_disk_health(world.disk, &health);
    cr_assert_eq(health.read_errors + health.write_errors + health.sync_errors, 0);
    cr_assert(health.read_rate > 0 && health.write_rate > 0);
    cr_assert(health.read_bytes > 0 && health.written_bytes > 0);
    world_finish(&world);
}

/* What was written is there for the next one who opens, by whatever path. */
Test(disk, outlives_its_opening)
{
    struct world world;
    static const struct path paths[] = {{true, true, 0}, {false, false, 0}};
    world_init(&world, &paths[0], 5);
    struct batch batch;
    batch_make(&world, &batch);
    batch_write(&world, &batch);
    batch_free(&batch);
    uint32_t before = disk_house_descriptors();
    for (uint32_t round = 0; round < 20; round++) {
        files_close(&world);
        kvk_disk_close(world.disk);
        world_open(&world, &paths[round % 2]);
        world_compare(&world);
    }
    cr_assert_leq(disk_house_descriptors(), before + 2, "descriptors leak");
    world_finish(&world);
}

/* ---- Names, modes, sweeping ---- */

static uint32_t mode_of(const char *folder, const char *name)
{
    char path[2 * DISK_HOUSE_PATH_SIZE];
    struct stat about;
    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    cr_assert_eq(stat(path, &about), 0, "%s", path);
    return about.st_mode & 0777;
}

static bool known_even(void *context, uint64_t space_id, uint32_t group)
{
    (void)context;
    (void)group;
    return space_id % 2 == 0;
}

Test(disk, files_are_private_and_swept)
{
    char house[DISK_HOUSE_PATH_SIZE];
    char folder[DISK_HOUSE_PATH_SIZE + 16];
    char path[DISK_HOUSE_PATH_SIZE + 64];
    disk_house_make(house);
    (void)snprintf(folder, sizeof(folder), "%s/blocks", house);
    struct kvk_disk_options options = {.folder = folder, .direct = true};
    struct kvk_disk *disk = NULL;
    struct kvk_error error;
    mode_t old = umask(0);
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_OK, "%s", error.text);
    for (uint64_t space = 1; space <= 4; space++) {
        struct kvk_disk_file *file = NULL;
        cr_assert_eq(kvk_disk_file_open(disk, space, 1, 8192, 4, &file, &error), KVK_OK);
        cr_assert_eq(kvk_disk_file_allocate(file, 0, 4, &error), KVK_OK);
        cr_assert_geq(kvk_disk_file_bytes(file), 4 * 8192);
        kvk_disk_file_close(file);
    }
    (void)umask(old);
    cr_assert_eq(mode_of(house, "blocks"), 0700);
    cr_assert_eq(mode_of(folder, "blocks-0000000000000003-1"), 0600);

    /* What is not ours stays. */
    static const char *others[] = {"blocks-3-1", "blocks-0000000000000003-01", "notes",
                                   "blocks-0000000000000003-1.bak"};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", folder, others[i]);
        FILE *other = fopen(path, "w");
        cr_assert_not_null(other);
        (void)fclose(other);
    }
    uint32_t count = 0;
    uint64_t bytes = 0;
    cr_assert_eq(kvk_disk_sweep(disk, known_even, NULL, &count, &bytes, &error), KVK_OK);
    cr_assert_eq(count, 2);
    cr_assert_geq(bytes, 2 * 4 * 8192);
    (void)snprintf(path, sizeof(path), "%s/blocks-0000000000000003-1", folder);
    cr_assert_neq(access(path, F_OK), 0);
    (void)snprintf(path, sizeof(path), "%s/blocks-0000000000000002-1", folder);
    cr_assert_eq(access(path, F_OK), 0);
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", folder, others[i]);
        cr_assert_eq(access(path, F_OK), 0, "%s", others[i]);
    }
    cr_assert_eq(kvk_disk_file_remove(disk, 2, 1, &error), KVK_OK);
    cr_assert_eq(kvk_disk_file_remove(disk, 2, 1, &error), KVK_OK, "removing twice is fine");
    (void)snprintf(path, sizeof(path), "%s/blocks-0000000000000002-1", folder);
    cr_assert_neq(access(path, F_OK), 0);
    kvk_disk_close(disk);
    disk_house_clear(house);
}

/* A link in the place of a file is not followed: it might lead anywhere. */
Test(disk, links_are_refused)
{
    char folder[DISK_HOUSE_PATH_SIZE];
    char path[DISK_HOUSE_PATH_SIZE + 64];
    char other[DISK_HOUSE_PATH_SIZE + 64];
    disk_house_make(folder);
    struct kvk_disk_options options = {.folder = folder};
    struct kvk_disk *disk = NULL;
    struct kvk_disk_file *file = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_OK);
    (void)snprintf(path, sizeof(path), "%s/blocks-0000000000000001-0", folder);
    (void)snprintf(other, sizeof(other), "%s/elsewhere", folder);
    FILE *elsewhere = fopen(other, "w");
    cr_assert_not_null(elsewhere);
    (void)fclose(elsewhere);
    cr_assert_eq(symlink(other, path), 0);
    cr_assert_neq(kvk_disk_file_open(disk, 1, 0, 4096, 4, &file, &error), KVK_OK);
    cr_assert_null(file);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_assert_neq(kvk_disk_file_open(disk, 1, 0, 4096, 4, &file, &error), KVK_OK);
    kvk_disk_close(disk);
    disk_house_clear(folder);
}

Test(disk, punching_gives_room_back)
{
    char folder[DISK_HOUSE_PATH_SIZE];
    disk_house_make(folder);
    struct kvk_disk_options options = {.folder = folder, .direct = true};
    struct kvk_disk *disk = NULL;
    struct kvk_disk_file *file = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_OK);
    cr_assert_eq(kvk_disk_file_open(disk, 1, 0, 1 << 20, 1000, &file, &error), KVK_OK);
    uint64_t empty = kvk_disk_file_bytes(file);
    cr_assert_eq(kvk_disk_file_allocate(file, 990, 8, &error), KVK_OK);
    uint64_t full = kvk_disk_file_bytes(file);
    cr_assert_geq(full, empty + (8U << 20));
    cr_assert_leq(full, empty + (9U << 20), "the file is sparse");
    cr_assert_eq(kvk_disk_file_punch(file, 990, 8, &error), KVK_OK);
    cr_assert_leq(kvk_disk_file_bytes(file), empty + (1U << 20));
    kvk_disk_file_close(file);
    kvk_disk_close(disk);
    disk_house_clear(folder);
}

Test(disk, bad_options_are_refused_by_name)
{
    struct kvk_disk *disk = NULL;
    struct kvk_error error;
    struct kvk_disk_options options = {.folder = "/tmp", .depth = 100000};
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "depth");
    options = (struct kvk_disk_options){.folder = "/tmp", .thread_count = 100000};
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "thread_count");
    options = (struct kvk_disk_options){.folder = "/proc/kvkeep"};
    cr_assert_eq(kvk_disk_open(&options, &disk, &error), KVK_PRECONDITION);
    cr_assert_str_eq(error.field, "folder");
    cr_assert_null(disk);
    kvk_disk_close(NULL);
    kvk_disk_file_close(NULL);
}

Test(disk, is_not_called_with_a_lock, .signal = SIGABRT)
{
    struct kvk_lock lock;
    struct kvk_error error;
    struct kvk_disk *disk = NULL;
    struct kvk_disk_options options = {.folder = "/tmp"};
    kvk_lock_init(&lock);
    kvk_lock(&lock);
    cr_assert_neq(kvk_disk_open(&options, &disk, &error), KVK_OK);
}

Test(disk, stride_is_whole_pages)
{
    cr_assert_eq(kvk_disk_shard_stride(1), 4096);
    cr_assert_eq(kvk_disk_shard_stride(4096), 4096);
    cr_assert_eq(kvk_disk_shard_stride(4097), 8192);
}
