#include "daemon/mover.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/priority.h"

/* What one thread copies before it looks for work again: large enough that the handing out costs
 * nothing, small enough that threads share a job evenly. */
#define UNIT_BYTES (UINT64_C(1) << 20)

/* A job smaller than this says little about the rate of large ones. */
#define RATE_BYTES_MIN (UINT64_C(256) << 10)

#define RETRY_MS 20

/* A caller's job, on its stack. Fields that change are guarded by its lane's lock. */
struct job {
    struct job *next; /* in the queue while it has copies that nobody claimed */
    struct kvk_device *device;
    const struct kvk_copy *copies;
    uint32_t copy_count;
    uint32_t claimed_count; /* copies */
    uint32_t unit_count;    /* units being copied now */
    uint32_t delay_us;      /* before each copy: a test hook */
    enum kvk_status status; /* of the first unit that failed */
    struct kvk_error error;
    pthread_cond_t done;
};

/* A queue and its threads. Each has a lock of its own, so that nobody whose copies are waited for
 * waits for a thread that stands back. */
struct lane {
    struct kvk_lock lock;  /* of all but the last field */
    pthread_cond_t work;   /* a job came, or the end */
    struct job *first_job; /* oldest first */
    bool stopping;
    bool stands_back;
};

struct kvk_mover {
    struct kvk_lock lock;
    struct lane front;  /* of those that somebody waits for, by all threads but one */
    struct lane behind; /* of the others, by the last thread */
    uint32_t job_count; /* waiting or running */
    uint32_t queue_max;
    bool fail_next;
    uint32_t delay_us;
    void (*hook)(void *context);
    void *hook_context;
    uint64_t told_ns; /* when a failure was last logged, */
    uint32_t untold;  /* and how many were not since */
    _Atomic uint64_t copied_bytes;
    _Atomic uint64_t rate; /* bytes per second */
    uint32_t thread_count; /* of the front */
    uint32_t started_count;
    pthread_t threads[]; /* [thread_count + 1], where there are any */
};

/* ---- Units ---- */

/* How many copies from `first` on make one unit: at least one. */
static uint32_t unit_copies(const struct job *job, uint32_t first)
{
    uint64_t bytes = job->copies[first].size_bytes;
    uint32_t count = 1;
    while (first + count < job->copy_count &&
           bytes + job->copies[first + count].size_bytes <= UNIT_BYTES) {
        bytes += job->copies[first + count].size_bytes;
        count++;
    }
    return count;
}

static void sleep_us(uint64_t microseconds)
{
    struct timespec time = {
        .tv_sec = (time_t)(microseconds / 1000000),
        .tv_nsec = (long)(microseconds % 1000000 * 1000),
    };
    while (nanosleep(&time, &time) != 0) {
    }
}

static enum kvk_status unit_copy(const struct job *job, uint32_t first, uint32_t count,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (job->delay_us > 0) {
        sleep_us((uint64_t)job->delay_us * count);
    }
    return job->device->ops->copy(job->device, job->copies + first, count, error);
}

/* ---- Threads ---- */

static void job_remove(struct lane *lane, struct job *job)
{
    struct job **link = &lane->first_job;
    while (*link != job) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = job->next;
}

/* Claim and copy one unit of a queued job; the lock is held at entry and at return. Once its last
 * unit is done the job may be gone, since its caller returns. */
static void job_run_unit(struct lane *lane, struct job *job)
{
    KVK_ASSERT(kvk_lock_held(&lane->lock));
    KVK_ASSERT(job->claimed_count < job->copy_count);
    uint32_t first = job->claimed_count;
    uint32_t count = unit_copies(job, first);
    job->claimed_count += count;
    job->unit_count++;
    if (job->claimed_count == job->copy_count) {
        job_remove(lane, job);
    }
    kvk_unlock(&lane->lock);

    struct kvk_error error = {0};
    enum kvk_status status = unit_copy(job, first, count, &error);

    kvk_lock(&lane->lock);
    if (status != KVK_OK && job->status == KVK_OK) {
        job->status = status;
        job->error = error;
        if (job->claimed_count < job->copy_count) {
            job->claimed_count = job->copy_count; /* the rest is not worth copying */
            job_remove(lane, job);
        }
    }
    job->unit_count--;
    if (job->unit_count == 0 && job->claimed_count == job->copy_count) {
        pthread_cond_signal(&job->done);
    }
}

static void *thread_main(void *argument)
{
    struct lane *lane = argument;
    if (lane->stands_back) {
        kvk_priority_stands_back();
    } else {
        kvk_priority_works();
    }
    kvk_lock(&lane->lock);
    while (!lane->stopping) {
        if (lane->first_job != NULL) {
            job_run_unit(lane, lane->first_job);
        } else {
            (void)kvk_condition_wait(&lane->work, &lane->lock, UINT64_MAX);
        }
    }
    kvk_unlock(&lane->lock);
    return NULL;
}

/* Signals belong to the daemon's own threads. */
static bool thread_start(struct kvk_mover *mover, struct lane *lane)
{
    sigset_t all;
    sigset_t before;
    char name[16];

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t *thread = &mover->threads[mover->started_count];
    int result = pthread_create(thread, NULL, thread_main, lane);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) {
        return false;
    }
    (void)snprintf(name, sizeof(name), lane->stands_back ? "kvk-behind" : "kvk-move-%u",
                   mover->started_count % 1000);
    (void)pthread_setname_np(*thread, name);
    mover->started_count++;
    return true;
}

static void lane_init(struct lane *lane, bool stands_back)
{
    lane->stands_back = stands_back;
    kvk_lock_init(&lane->lock);
    kvk_condition_init(&lane->work);
}

static void lane_stop(struct lane *lane)
{
    kvk_lock(&lane->lock);
    KVK_ASSERT(lane->first_job == NULL);
    lane->stopping = true;
    pthread_cond_broadcast(&lane->work);
    kvk_unlock(&lane->lock);
}

static void lane_finish(struct lane *lane)
{
    pthread_cond_destroy(&lane->work);
    kvk_lock_finish(&lane->lock);
}

enum kvk_status kvk_mover_create(const struct kvk_mover_options *options, struct kvk_mover **result)
{
    KVK_ASSERT(options->queue_max > 0);
    struct kvk_mover *mover =
        calloc(1, sizeof(*mover) + (options->thread_count + 1U) * sizeof(mover->threads[0]));
    if (mover == NULL) {
        return KVK_EXHAUSTED;
    }
    kvk_lock_init(&mover->lock);
    lane_init(&mover->front, false);
    lane_init(&mover->behind, true);
    mover->queue_max = options->queue_max;
    mover->thread_count = options->thread_count;
    bool started = true;
    while (started && mover->started_count < mover->thread_count) {
        started = thread_start(mover, &mover->front);
    }
    if (!started || (mover->thread_count > 0 && !thread_start(mover, &mover->behind))) {
        kvk_mover_destroy(mover);
        return KVK_EXHAUSTED;
    }
    *result = mover;
    return KVK_OK;
}

void kvk_mover_destroy(struct kvk_mover *mover)
{
    if (mover == NULL) {
        return;
    }
    kvk_lock(&mover->lock);
    KVK_ASSERT(mover->job_count == 0);
    kvk_unlock(&mover->lock);
    lane_stop(&mover->front);
    lane_stop(&mover->behind);
    for (uint32_t i = 0; i < mover->started_count; i++) {
        pthread_join(mover->threads[i], NULL);
    }
    lane_finish(&mover->front);
    lane_finish(&mover->behind);
    kvk_lock_finish(&mover->lock);
    free(mover);
}

/* ---- Jobs ---- */

static uint64_t copies_bytes(const struct kvk_copy *copies, uint32_t copy_count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < copy_count; i++) {
        bytes += copies[i].size_bytes;
    }
    return bytes;
}

static void job_run_here(struct job *job)
{
    while (job->claimed_count < job->copy_count && job->status == KVK_OK) {
        uint32_t count = unit_copies(job, job->claimed_count);
        job->status = unit_copy(job, job->claimed_count, count, &job->error);
        job->claimed_count += count;
    }
}

static void job_run_by_threads(struct lane *lane, struct job *job)
{
    kvk_condition_init(&job->done);
    kvk_lock(&lane->lock);
    struct job **link = &lane->first_job;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = job;
    pthread_cond_broadcast(&lane->work);
    while (job->claimed_count < job->copy_count || job->unit_count > 0) {
        (void)kvk_condition_wait(&job->done, &lane->lock, UINT64_MAX);
    }
    kvk_unlock(&lane->lock);
    pthread_cond_destroy(&job->done);
}

/* A moving average, so that one disturbed job does not decide an estimate. */
static void rate_learn(struct kvk_mover *mover, uint64_t bytes, uint64_t duration_ns)
{
    if (bytes < RATE_BYTES_MIN || duration_ns == 0) {
        return;
    }
    uint64_t now = (uint64_t)((double)bytes * (double)KVK_NS_PER_SECOND / (double)duration_ns);
    uint64_t before = atomic_load_explicit(&mover->rate, memory_order_relaxed);
    uint64_t after = before == 0 ? now : before - before / 8 + now / 8;
    atomic_store_explicit(&mover->rate, after, memory_order_relaxed);
}

/* A place in the queue, and what the test hooks want of this job. */
static enum kvk_status job_admit(struct kvk_mover *mover, struct job *job, bool *fail,
                                 struct kvk_error *error)
{
    kvk_lock(&mover->lock);
    if (mover->job_count == mover->queue_max) {
        kvk_unlock(&mover->lock);
        (void)kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_QUEUE_FULL, "", mover->queue_max,
                             mover->queue_max, "the queue of copies is full: %u are waiting",
                             mover->queue_max);
        kvk_error_retry(error, RETRY_MS);
        return KVK_EXHAUSTED;
    }
    mover->job_count++;
    job->delay_us = mover->delay_us;
    *fail = mover->fail_next;
    mover->fail_next = false;
    void (*hook)(void *context) = mover->hook;
    void *context = mover->hook_context;
    kvk_unlock(&mover->lock);
    if (hook != NULL) {
        hook(context);
    }
    return KVK_OK;
}

/* Copies that fail one after the other do not fill the log. */
static enum kvk_status tell_failure(struct kvk_mover *mover, enum kvk_status status,
                                    const struct kvk_error *error)
{
    char text[KVK_ERROR_TEXT_SIZE + 16];
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    kvk_lock(&mover->lock);
    uint32_t untold = mover->untold++;
    bool tell = mover->told_ns == 0 || now_ns - mover->told_ns >= KVK_NS_PER_SECOND;
    if (tell) {
        mover->told_ns = now_ns;
        mover->untold = 0;
    }
    kvk_unlock(&mover->lock);
    if (tell) {
        kvk_log(KVK_LOG_WARNING, "copy_failed", "reason=%s untold=%u text=%s",
                kvk_status_name(status), untold, kvk_log_text(text, sizeof(text), error->text));
    }
    return status;
}

static enum kvk_status copy_by(struct kvk_mover *mover, struct lane *lane,
                               struct kvk_device *device, const struct kvk_copy *copies,
                               uint32_t copy_count, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct job job = {.device = device, .copies = copies, .copy_count = copy_count};
    bool fail = false;

    enum kvk_status status = job_admit(mover, &job, &fail, &job.error);
    if (status != KVK_OK) {
        if (error != NULL) {
            *error = job.error;
        }
        return tell_failure(mover, status, &job.error);
    }
    uint64_t bytes = copies_bytes(copies, copy_count);
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    if (fail) {
        job.status = kvk_fail(&job.error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                              "the copy failed, as a test asked for");
    } else if (mover->thread_count == 0 || copy_count == 0 ||
               (bytes <= UNIT_BYTES && !lane->stands_back)) {
        job_run_here(&job); /* handing over a small job takes longer than the job */
    } else {
        job_run_by_threads(lane, &job);
    }
    kvk_lock(&mover->lock);
    mover->job_count--;
    kvk_unlock(&mover->lock);

    if (job.status != KVK_OK) {
        if (error != NULL) {
            *error = job.error;
        }
        return tell_failure(mover, job.status, &job.error);
    }
    atomic_fetch_add_explicit(&mover->copied_bytes, bytes, memory_order_relaxed);
    if (!lane->stands_back) {
        rate_learn(mover, bytes, kvk_clock_now(kvk_clock_monotonic()) - begun_ns);
    }
    return KVK_OK;
}

enum kvk_status kvk_mover_copy(struct kvk_mover *mover, struct kvk_device *device,
                               const struct kvk_copy *copies, uint32_t copy_count,
                               struct kvk_error *error)
{
    return copy_by(mover, &mover->front, device, copies, copy_count, error);
}

enum kvk_status kvk_mover_copy_behind(struct kvk_mover *mover, struct kvk_device *device,
                                      const struct kvk_copy *copies, uint32_t copy_count,
                                      struct kvk_error *error)
{
    return copy_by(mover, &mover->behind, device, copies, copy_count, error);
}

/* Read by those who hold the cache's lock, so without the mover's. */
uint64_t kvk_mover_bytes(struct kvk_mover *mover)
{
    return atomic_load_explicit(&mover->copied_bytes, memory_order_relaxed);
}

uint64_t kvk_mover_rate(struct kvk_mover *mover)
{
    return atomic_load_explicit(&mover->rate, memory_order_relaxed);
}

/* ---- Test hooks ---- */

void kvk_mover_test_hook(struct kvk_mover *mover, void (*hook)(void *context), void *context)
{
    kvk_lock(&mover->lock);
    mover->hook = hook;
    mover->hook_context = context;
    kvk_unlock(&mover->lock);
}

void kvk_mover_test_delay(struct kvk_mover *mover, uint32_t delay_us_per_piece)
{
    kvk_lock(&mover->lock);
    mover->delay_us = delay_us_per_piece;
    kvk_unlock(&mover->lock);
}

void kvk_mover_test_fail_next(struct kvk_mover *mover)
{
    kvk_lock(&mover->lock);
    mover->fail_next = true;
    kvk_unlock(&mover->lock);
}
