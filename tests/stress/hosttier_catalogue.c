/*
 * The catalogue from many threads at once: puts and removals of slots of their own, flushes, rare
 * writes and readers, beside the writer. At the end, and after opening again, it holds exactly what
 * each thread did last.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "hosttier/catalogue.h"
#include "tests/folder.h"

#define THREADS 4
#define SLOTS 64 /* of each thread */
#define OPERATIONS 20000
#define SPACE 1

struct worker {
    pthread_t thread;
    struct kvk_catalogue *catalogue;
    uint32_t number;
    uint64_t values[SLOTS]; /* what it put last; 0: removed */
};

static _Atomic uint64_t told;
static _Atomic uint64_t generation = 1;

static enum kvk_status put(struct kvk_catalogue *catalogue, uint32_t slot, uint64_t value)
{
    const uint32_t tokens[4] = {(uint32_t)value, slot, 3, 4};
    const struct kvk_disk_block_record record = {.space_id = SPACE,
                                                 .slot = slot,
                                                 .generation = value,
                                                 .tokens = tokens,
                                                 .token_count = 4,
                                                 .checksums = &value,
                                                 .shard_count = 1};
    return kvk_catalogue_block_put(catalogue, &record, NULL);
}

static bool look(void *context, const struct kvk_disk_block_record *record)
{
    uint64_t *count = context;
    KVK_ASSERT(record->checksums[0] == record->generation);
    KVK_ASSERT(record->tokens[1] == record->slot);
    ++*count;
    return true;
}

static void rare(struct worker *worker, struct kvk_random *random)
{
    struct kvk_error error;
    uint64_t count = 0;
    enum kvk_status status = KVK_OK;
    switch (kvk_random_below(random, 4)) {
    case 0:
        status = kvk_catalogue_flush(worker->catalogue, &error);
        break;
    case 1:
        status = kvk_catalogue_blocks(worker->catalogue, SPACE, look, &count, &error);
        KVK_ASSERT(count <= (uint64_t)THREADS * SLOTS);
        break;
    case 2: {
        const struct kvk_space_generation next = {SPACE, atomic_fetch_add(&generation, 1) + 1};
        status = kvk_catalogue_set_generations(worker->catalogue, &next, 1, &error);
        break;
    }
    default: {
        struct kvk_catalogue_stats stats;
        kvk_catalogue_stats(worker->catalogue, &stats);
        KVK_ASSERT(stats.damaged_records == 0 && !stats.failing);
        break;
    }
    }
    KVK_ASSERT(status == KVK_OK);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct kvk_random random;
    kvk_random_init(&random, worker->number);
    for (uint64_t i = 1; i <= OPERATIONS; i++) {
        uint32_t index = (uint32_t)kvk_random_below(&random, SLOTS);
        uint32_t slot = worker->number * SLOTS + index;
        bool removal = kvk_random_chance(&random, 0.3);
        enum kvk_status status =
            removal ? kvk_catalogue_block_remove(worker->catalogue, SPACE, 0, slot, NULL)
                    : put(worker->catalogue, slot, i);
        KVK_ASSERT(status == KVK_OK || status == KVK_EXHAUSTED);
        if (status == KVK_OK) {
            worker->values[index] = removal ? 0 : i;
        }
        if (kvk_random_chance(&random, status == KVK_OK ? 0.01 : 0.2)) {
            rare(worker, &random);
        }
    }
    return NULL;
}

static void count_commit(void *context)
{
    (void)context;
    atomic_fetch_add(&told, 1);
}

static bool compare(void *context, const struct kvk_disk_block_record *record)
{
    struct worker *workers = context;
    struct worker *worker = &workers[record->slot / SLOTS];
    uint64_t *value = &worker->values[record->slot % SLOTS];
    KVK_ASSERT(*value == record->generation);
    *value = 0; /* seen */
    return true;
}

static void generation_check(void *context, const struct kvk_space_record *record)
{
    (void)context;
    KVK_ASSERT(record->generation == atomic_load(&generation));
}

int main(void)
{
    static struct worker workers[THREADS];
    char folder[] = "/tmp/kvkeep-catalogue-threads-XXXXXX";
    struct kvk_error error;
    struct kvk_catalogue *catalogue = NULL;
    KVK_ASSERT(mkdtemp(folder) != NULL);
    kvk_log_set_level(KVK_LOG_WARNING);
    const struct kvk_catalogue_options options = {.folder = folder,
                                                  .map_bytes = UINT64_C(64) << 20,
                                                  .queue_max = 128,
                                                  .commit_ms_max = 1,
                                                  .threads = true};
    enum kvk_status status = kvk_catalogue_open(&options, &catalogue, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_space_record space = {.id = SPACE,
                                           .tenant_id = 1,
                                           .generation = 1,
                                           .identity = (const uint8_t *)"i",
                                           .identity_size = 1};
    status = kvk_catalogue_put_space(catalogue, &space, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_catalogue_listen(catalogue, count_commit, NULL);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i].catalogue = catalogue;
        workers[i].number = i;
        int failed = pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        KVK_ASSERT(failed == 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    kvk_catalogue_close(catalogue);
    status = kvk_catalogue_open(&options, &catalogue, &error);
    KVK_ASSERT(status == KVK_OK);
    status = kvk_catalogue_blocks(catalogue, SPACE, compare, workers, &error);
    KVK_ASSERT(status == KVK_OK);
    status = kvk_catalogue_spaces(catalogue, generation_check, NULL, &error);
    KVK_ASSERT(status == KVK_OK);
    for (uint32_t i = 0; i < THREADS; i++) {
        for (uint32_t k = 0; k < SLOTS; k++) {
            KVK_ASSERT(workers[i].values[k] == 0);
        }
    }
    KVK_ASSERT(atomic_load(&told) > 0);
    kvk_catalogue_close(catalogue);
    folder_remove(folder);
    (void)printf("well: %llu commits\n", (unsigned long long)atomic_load(&told));
    return 0;
}
