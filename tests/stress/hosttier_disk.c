/*
 * Many callers of all classes on one disk, by the ring and by threads: every byte comes back right,
 * no class starves, and ThreadSanitizer has nothing to say.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/random.h"
#include "hosttier/disk.h"
#include "tests/disk_house.h"

#define CALLER_COUNT 6
#define SLOTS_EACH 8
#define SLOT_BYTES (3U * 512 * 1024 / 4)
#define ROUND_COUNT 40
#define FLOOD_COUNT 12

struct caller {
    struct kvk_disk *disk;
    struct kvk_disk_file *file;
    uint32_t number;
    pthread_t thread;
};

/* Each caller has slots of its own, and compares all it reads with what it wrote. */
static void *caller_main(void *context)
{
    struct caller *caller = context;
    struct kvk_disk_piece pieces[SLOTS_EACH];
    uint64_t checksums[SLOTS_EACH];
    struct kvk_random random;
    struct kvk_error error;
    uint8_t *wrote = malloc(SLOTS_EACH * SLOT_BYTES + 64);
    uint8_t *read = malloc(SLOTS_EACH * SLOT_BYTES + 64);
    KVK_ASSERT(wrote != NULL && read != NULL);
    kvk_random_init(&random, caller->number);
    uint32_t shift = caller->number % 3;

    for (uint32_t round = 0; round < ROUND_COUNT; round++) {
        bool changed = round == 0 || kvk_random_chance(&random, 0.5);
        enum kvk_disk_class class = (enum kvk_disk_class)(caller->number % 3);
        for (uint32_t pass = changed ? 0 : 1; pass < 2; pass++) {
            if (pass == 0) {
                kvk_random_fill(&random, wrote, SLOTS_EACH * SLOT_BYTES + 64);
            }
            for (uint32_t i = 0; i < SLOTS_EACH; i++) {
                pieces[i] = (struct kvk_disk_piece){
                    .file = caller->file,
                    .slot = caller->number * SLOTS_EACH + i,
                    .memory = (pass == 0 ? wrote : read) + (size_t)i * SLOT_BYTES + shift,
                    .size_bytes = SLOT_BYTES - i * 100,
                    .checksum = &checksums[i],
                };
            }
            enum kvk_status status =
                pass == 0 ? kvk_disk_write(caller->disk, class, pieces, SLOTS_EACH, &error)
                          : kvk_disk_read(caller->disk, class, pieces, SLOTS_EACH, &error);
            KVK_ASSERT(status == KVK_OK);
        }
        for (uint32_t i = 0; i < SLOTS_EACH; i++) {
            const uint8_t *right = wrote + (size_t)i * SLOT_BYTES + shift;
            uint64_t size = pieces[i].size_bytes;
            KVK_ASSERT(memcmp(read + (size_t)i * SLOT_BYTES + shift, right, size) == 0);
            KVK_ASSERT(checksums[i] == kvk_checksum(right, size));
        }
        if (round % 16 == 15) {
            KVK_ASSERT(kvk_disk_sync(caller->file, &error) == KVK_OK);
        }
        struct kvk_disk_health health;
        kvk_disk_health(caller->disk, &health);
        KVK_ASSERT(health.state == KVK_DISK_GOOD);
    }
    free(wrote);
    free(read);
    return NULL;
}

static void callers_run(const struct kvk_disk_options *options)
{
    struct caller callers[CALLER_COUNT];
    struct kvk_disk *disk = NULL;
    struct kvk_disk_file *file = NULL;
    struct kvk_error error;
    uint64_t slot_bytes = kvk_disk_shard_stride(SLOT_BYTES);
    KVK_ASSERT(kvk_disk_open(options, &disk, &error) == KVK_OK);
    KVK_ASSERT(kvk_disk_file_open(disk, 1, 0, slot_bytes, CALLER_COUNT * SLOTS_EACH, &file,
                                  &error) == KVK_OK);
    for (uint32_t i = 0; i < CALLER_COUNT; i++) {
        callers[i] = (struct caller){.disk = disk, .file = file, .number = i};
        KVK_ASSERT(pthread_create(&callers[i].thread, NULL, caller_main, &callers[i]) == 0);
    }
    for (uint32_t i = 0; i < CALLER_COUNT; i++) {
        KVK_ASSERT(pthread_join(callers[i].thread, NULL) == 0);
    }
    (void)printf("%s: %d callers, %d rounds\n", kvk_disk_path_name(disk), CALLER_COUNT,
                 ROUND_COUNT);
    kvk_disk_file_close(file);
    kvk_disk_close(disk);
}

/* ---- Nobody starves ---- */

struct flood {
    struct kvk_disk *disk;
    struct kvk_disk_file *file;
    _Atomic bool stop;
    _Atomic uint64_t restores;
    pthread_t threads[FLOOD_COUNT];
};

static void *flood_main(void *context)
{
    struct flood *flood = context;
    struct kvk_error error;
    uint8_t *memory = aligned_alloc(4096, 4096);
    KVK_ASSERT(memory != NULL);
    while (!atomic_load(&flood->stop)) {
        struct kvk_disk_piece piece = {.file = flood->file, .memory = memory, .size_bytes = 512};
        KVK_ASSERT(kvk_disk_read(flood->disk, KVK_DISK_RESTORE, &piece, 1, &error) == KVK_OK);
        atomic_fetch_add(&flood->restores, 1);
    }
    free(memory);
    return NULL;
}

/* While restores never end, so many writes still get through. */
static void starvation_try(const char *folder)
{
    struct disk_faults faults;
    memset(&faults, 0, sizeof(faults));
    struct kvk_disk_io io = disk_fault_io(&faults);
    struct kvk_disk_options options = {.folder = folder, .io = &io, .thread_count = 2};
    struct flood flood = {.restores = 0};
    struct kvk_error error;
    KVK_ASSERT(kvk_disk_open(&options, &flood.disk, &error) == KVK_OK);
    KVK_ASSERT(kvk_disk_file_open(flood.disk, 2, 0, 4096, 64, &flood.file, &error) == KVK_OK);
    KVK_ASSERT(kvk_disk_file_allocate(flood.file, 0, 64, &error) == KVK_OK);
    atomic_store(&faults.delay_us, 200);
    for (uint32_t i = 0; i < FLOOD_COUNT; i++) {
        KVK_ASSERT(pthread_create(&flood.threads[i], NULL, flood_main, &flood) == 0);
    }
    uint8_t *memory = aligned_alloc(4096, 32 * 4096);
    KVK_ASSERT(memory != NULL);
    memset(memory, 1, 32 * 4096);
    struct kvk_disk_piece pieces[32];
    for (uint32_t i = 0; i < 32; i++) {
        pieces[i] = (struct kvk_disk_piece){.file = flood.file,
                                            .slot = 32 + i,
                                            .memory = memory + (size_t)i * 4096,
                                            .size_bytes = 4096};
    }
    while (atomic_load(&flood.restores) < 10) {
        (void)usleep(100);
    }
    uint64_t before = atomic_load(&flood.restores);
    KVK_ASSERT(kvk_disk_write(flood.disk, KVK_DISK_BEHIND, pieces, 32, &error) == KVK_OK);
    uint64_t passed = atomic_load(&flood.restores) - before;
    (void)printf("32 writes behind a flood: %llu restores meanwhile\n", (unsigned long long)passed);
    KVK_ASSERT(passed < UINT64_C(32) * 32);
    atomic_store(&flood.stop, true);
    for (uint32_t i = 0; i < FLOOD_COUNT; i++) {
        KVK_ASSERT(pthread_join(flood.threads[i], NULL) == 0);
    }
    free(memory);
    kvk_disk_file_close(flood.file);
    kvk_disk_close(flood.disk);
}

int main(void)
{
    char folder[DISK_HOUSE_PATH_SIZE];
    disk_house_make(folder);
    uint32_t before = disk_house_descriptors();
    for (uint32_t i = 0; i < 4; i++) {
        struct kvk_disk_options options = {
            .folder = folder, .uring = i % 2 == 0, .direct = i < 2, .depth = i == 0 ? 3 : 0};
        callers_run(&options);
    }
    starvation_try(folder);
    KVK_ASSERT(disk_house_descriptors() == before);
    disk_house_clear(folder);
    return 0;
}
