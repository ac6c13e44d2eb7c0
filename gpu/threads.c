#include "gpu/threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/lock.h"

/* A caller's job, on its stack. Fields that change are guarded by the pool's lock. */
struct job {
    struct job *next; /* in the pool's list while it has parts that nobody claimed */
    kvk_threads_part *run;
    void *context;
    uint32_t part_count;
    uint32_t claimed_count;
    uint32_t done_count;
    pthread_cond_t done;
};

struct worker {
    struct kvk_threads *threads;
    pthread_t thread;
    uint32_t index;
};

struct kvk_threads {
    struct kvk_lock lock;
    pthread_cond_t work;   /* a job came, or the end */
    struct job *first_job; /* oldest first */
    bool stopping;
    uint32_t count; /* the caller and the workers; fixed */
    uint32_t started_count;
    char name[16]; /* what the kernel shows; 15 characters */
    struct worker workers[];
};

static void job_append(struct kvk_threads *threads, struct job *job)
{
    struct job **link = &threads->first_job;

    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = job;
}

static void job_remove(struct kvk_threads *threads, struct job *job)
{
    struct job **link = &threads->first_job;

    while (*link != job) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = job->next;
}

/* Claim one part of a listed job and run it; the lock is held at entry and at return. After the
 * last part is counted the job may be gone, since its caller returns. */
static void job_run_part(struct kvk_threads *threads, struct job *job, uint32_t thread)
{
    KVK_ASSERT(kvk_lock_held(&threads->lock));
    KVK_ASSERT(job->claimed_count < job->part_count);
    uint32_t part = job->claimed_count++;
    if (job->claimed_count == job->part_count) {
        job_remove(threads, job);
    }
    kvk_unlock(&threads->lock);

    job->run(job->context, part, thread);

    kvk_lock(&threads->lock);
    job->done_count++;
    if (job->done_count == job->part_count) {
        pthread_cond_signal(&job->done);
    }
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    struct kvk_threads *threads = worker->threads;

    kvk_lock(&threads->lock);
    while (!threads->stopping) {
        if (threads->first_job != NULL) {
            job_run_part(threads, threads->first_job, worker->index);
        } else {
            (void)kvk_condition_wait(&threads->work, &threads->lock, UINT64_MAX);
        }
    }
    kvk_unlock(&threads->lock);
    return NULL;
}

/* Signals belong to the daemon's own threads. */
static enum kvk_status worker_start(struct kvk_threads *threads, struct worker *worker)
{
    sigset_t all;
    sigset_t before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) {
        return KVK_EXHAUSTED;
    }
    (void)pthread_setname_np(worker->thread, threads->name);
    return KVK_OK;
}

enum kvk_status kvk_threads_create(uint32_t thread_count, const char *name,
                                   struct kvk_threads **result, struct kvk_error *error)
{
    KVK_ASSERT(thread_count >= 1);
    KVK_ASSERT(thread_count <= KVK_THREAD_COUNT_MAX);
    size_t size_bytes = sizeof(struct kvk_threads) + (thread_count - 1) * sizeof(struct worker);
    struct kvk_threads *threads = calloc(1, size_bytes);
    if (threads == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for %u threads",
                        thread_count);
    }
    kvk_lock_init(&threads->lock);
    kvk_condition_init(&threads->work);
    threads->count = thread_count;
    (void)snprintf(threads->name, sizeof(threads->name), "%s", name);

    for (uint32_t i = 0; i + 1 < thread_count; i++) {
        threads->workers[i].threads = threads;
        threads->workers[i].index = i + 1;
        if (worker_start(threads, &threads->workers[i]) != KVK_OK) {
            kvk_threads_destroy(threads);
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                            "the system allows no more than %u of %u threads", i, thread_count);
        }
        threads->started_count++;
    }
    *result = threads;
    return KVK_OK;
}

void kvk_threads_destroy(struct kvk_threads *threads)
{
    if (threads == NULL) {
        return;
    }
    kvk_lock(&threads->lock);
    KVK_ASSERT(threads->first_job == NULL);
    threads->stopping = true;
    pthread_cond_broadcast(&threads->work);
    kvk_unlock(&threads->lock);
    for (uint32_t i = 0; i < threads->started_count; i++) {
        pthread_join(threads->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&threads->work);
    kvk_lock_finish(&threads->lock);
    free(threads);
}

uint32_t kvk_threads_count(const struct kvk_threads *threads)
{
    return threads->count;
}

void kvk_threads_run(struct kvk_threads *threads, uint32_t part_count, kvk_threads_part *run,
                     void *context)
{
    struct job job = {.run = run, .context = context, .part_count = part_count};

    if (part_count == 1 || threads->count == 1) {
        for (uint32_t part = 0; part < part_count; part++) {
            run(context, part, 0);
        }
        return;
    }
    if (part_count == 0) {
        return;
    }
    kvk_condition_init(&job.done);

    kvk_lock(&threads->lock);
    job_append(threads, &job);
    pthread_cond_broadcast(&threads->work);
    while (job.claimed_count < job.part_count) {
        job_run_part(threads, &job, 0);
    }
    while (job.done_count < job.part_count) {
        (void)kvk_condition_wait(&job.done, &threads->lock, UINT64_MAX);
    }
    kvk_unlock(&threads->lock);
    pthread_cond_destroy(&job.done);
}
