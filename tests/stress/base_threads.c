/*
 * Locks, metrics, log lines and copies from many threads at once: sums come out right, lines stay
 * whole, and ThreadSanitizer has nothing to say.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/random.h"

#define THREAD_COUNT 4
#define ROUND_COUNT 5000
#define BLOCK_BYTES 20000

struct shared {
    struct kvk_lock lock;
    pthread_cond_t turned;
    unsigned turn; /* whose turn it is; guarded by the lock */
    uint64_t turns;
    struct kvk_metrics *metrics;
    struct kvk_clock_manual clock;
    uint8_t block[BLOCK_BYTES];
    uint64_t checksum;
};

struct worker {
    struct shared *shared;
    unsigned number;
    pthread_t thread;
};

/* Strictly one after the other: every wake-up must reach the right thread. */
static void take_turn(struct shared *shared, unsigned number)
{
    kvk_lock(&shared->lock);
    while (shared->turn != number) {
        KVK_ASSERT(kvk_condition_wait(&shared->turned, &shared->lock, UINT64_MAX));
        KVK_ASSERT(kvk_lock_held(&shared->lock));
    }
    shared->turn = (number + 1) % THREAD_COUNT;
    shared->turns++;
    (void)pthread_cond_broadcast(&shared->turned);
    kvk_unlock(&shared->lock);
    KVK_ASSERT(kvk_locks_held() == 0);
}

static void count(struct shared *shared, unsigned round)
{
    char labels[KVK_METRIC_LABELS_SIZE] = "";
    char text[16];
    (void)snprintf(text, sizeof(text), "%u", round % 8);
    KVK_ASSERT(kvk_metrics_label(labels, "series", text));
    struct kvk_counter *counter = NULL;
    struct kvk_histogram *histogram = NULL;
    enum kvk_status status =
        kvk_metrics_counter(shared->metrics, "x_total", "X.", labels, &counter);
    KVK_ASSERT(status == KVK_OK);
    kvk_counter_add(counter, 1);
    status =
        kvk_metrics_histogram(shared->metrics, "x_seconds", "X.", "", 1.0, 1, 1024, &histogram);
    KVK_ASSERT(status == KVK_OK);
    kvk_histogram_record(histogram, round);
    if (round % 512 == 0) {
        char *page = NULL;
        size_t size = 0;
        status = kvk_metrics_render(shared->metrics, &page, &size);
        KVK_ASSERT(status == KVK_OK);
        free(page);
    }
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct shared *shared = worker->shared;
    static _Thread_local uint8_t copy[BLOCK_BYTES];
    for (unsigned round = 0; round < ROUND_COUNT; round++) {
        if (round % 16 == 0) {
            take_turn(shared, worker->number);
        }
        count(shared, round);
        if (round % 64 == 0) {
            uint64_t checksum = 0;
            kvk_copy_checksum(copy, shared->block, BLOCK_BYTES, &checksum);
            KVK_ASSERT(checksum == shared->checksum);
            KVK_ASSERT(memcmp(copy, shared->block, BLOCK_BYTES) == 0);
            kvk_log(KVK_LOG_INFO, "round", "thread=%u round=%u", worker->number, round);
        }
        (void)kvk_clock_now(&shared->clock.clock);
    }
    return NULL;
}

/* Every line that the threads wrote is whole. */
static void check_lines(FILE *file)
{
    char line[2 * KVK_LOG_LINE_SIZE];
    unsigned line_count = 0;
    rewind(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        const char *pairs = strstr(line, " thread=");
        unsigned thread = 0;
        unsigned round = 0;
        KVK_ASSERT(strncmp(line, "round level=info time=", 22) == 0);
        KVK_ASSERT(pairs != NULL);
        KVK_ASSERT(sscanf(pairs, " thread=%u round=%u\n", &thread, &round) == 2);
        KVK_ASSERT(strchr(line, '\n') != NULL);
        line_count++;
    }
    KVK_ASSERT(line_count == THREAD_COUNT * ((ROUND_COUNT + 63) / 64));
}

static void check_sums(struct shared *shared)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < 8; i++) {
        char labels[KVK_METRIC_LABELS_SIZE];
        (void)snprintf(labels, sizeof(labels), "series=\"%u\"", i);
        struct kvk_counter *counter = NULL;
        enum kvk_status status =
            kvk_metrics_counter(shared->metrics, "x_total", "X.", labels, &counter);
        KVK_ASSERT(status == KVK_OK);
        sum += kvk_counter_value(counter);
    }
    struct kvk_histogram *histogram = NULL;
    enum kvk_status status =
        kvk_metrics_histogram(shared->metrics, "x_seconds", "X.", "", 1.0, 1, 1024, &histogram);
    KVK_ASSERT(status == KVK_OK);
    KVK_ASSERT(sum == (uint64_t)THREAD_COUNT * ROUND_COUNT);
    KVK_ASSERT(kvk_histogram_count(histogram) == sum);
    KVK_ASSERT(shared->turns == (uint64_t)THREAD_COUNT * ((ROUND_COUNT + 15) / 16));
}

int main(void)
{
    static struct shared shared;
    struct worker workers[THREAD_COUNT];
    struct kvk_random random;
    FILE *file = tmpfile();
    KVK_ASSERT(file != NULL);
    kvk_log_set_descriptor(fileno(file));
    kvk_random_init(&random, 1);
    kvk_random_fill(&random, shared.block, BLOCK_BYTES);
    shared.checksum = kvk_checksum(shared.block, BLOCK_BYTES);
    kvk_lock_init(&shared.lock);
    kvk_condition_init(&shared.turned);
    kvk_clock_manual_init(&shared.clock, 0);
    enum kvk_status status = kvk_metrics_create(16, &shared.metrics);
    KVK_ASSERT(status == KVK_OK);

    for (unsigned i = 0; i < THREAD_COUNT; i++) {
        workers[i] = (struct worker){.shared = &shared, .number = i};
        KVK_ASSERT(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (uint64_t ns = 1; ns < 100000; ns++) {
        kvk_clock_manual_set(&shared.clock, ns);
    }
    for (unsigned i = 0; i < THREAD_COUNT; i++) {
        KVK_ASSERT(pthread_join(workers[i].thread, NULL) == 0);
    }
    check_sums(&shared);
    check_lines(file);
    kvk_metrics_destroy(shared.metrics);
    (void)pthread_cond_destroy(&shared.turned);
    kvk_lock_finish(&shared.lock);
    (void)fclose(file);
    (void)puts("base_threads: all sums and lines are right");
    return 0;
}
