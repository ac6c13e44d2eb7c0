/*
 * The bulk threads: handlers and callbacks that may block or work long. A call waits in the queue
 * at most once, so the limit of live calls bounds it; owners take turns there.
 */
#include "daemon/server_private.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/priority.h"

#define BULK_QUANTUM_NS KVK_NS_PER_MS

static struct kvk_call *call_of_turn(struct kvk_fair_item *item)
{
    return (struct kvk_call *)(void *)((char *)item - offsetof(struct kvk_call, turn));
}

static void *bulk_run(void *argument)
{
    struct kvk_bulk *bulk = argument;
    kvk_priority_works();
    kvk_lock(&bulk->lock);
    for (;;) {
        struct kvk_fair_item *item =
            kvk_fair_take(&bulk->fair, kvk_clock_now(kvk_clock_monotonic()));
        if (item == NULL && bulk->stop) {
            break;
        }
        if (item == NULL) {
            (void)kvk_condition_wait(&bulk->work, &bulk->lock, UINT64_MAX);
            continue;
        }
        kvk_unlock(&bulk->lock);
        uint32_t owner = item->owner;
        uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
        kvk_call_run_bulk(call_of_turn(item)); /* which may be gone now, and wait here again */
        uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
        kvk_lock(&bulk->lock);
        /* Others of the owner may be taken now: by this thread or, where it takes one of another
         * owner, by one that sleeps. */
        if (kvk_fair_end(&bulk->fair, owner, now_ns - begun_ns, now_ns)) {
            (void)pthread_cond_signal(&bulk->work);
        }
    }
    kvk_unlock(&bulk->lock);
    return NULL;
}

enum kvk_status kvk_bulk_init(struct kvk_bulk *bulk, const struct kvk_server_options *options,
                              struct kvk_error *error)
{
    uint32_t threads_max = options->owner_threads_max < options->bulk_threads
                               ? options->owner_threads_max
                               : options->bulk_threads;
    kvk_lock_init(&bulk->lock);
    kvk_condition_init(&bulk->work);
    return kvk_fair_init(&bulk->fair, options->owner_count + 1, threads_max, BULK_QUANTUM_NS,
                         error);
}

void kvk_bulk_finish(struct kvk_bulk *bulk)
{
    kvk_fair_finish(&bulk->fair);
    kvk_lock_finish(&bulk->lock);
    (void)pthread_cond_destroy(&bulk->work);
}

enum kvk_status kvk_bulk_start(struct kvk_bulk *bulk, uint32_t thread_count,
                               struct kvk_error *error)
{
    KVK_ASSERT(thread_count <= KVK_SERVER_BULK_THREADS_MAX);
    while (bulk->thread_count < thread_count) {
        enum kvk_status status = kvk_server_thread(&bulk->threads[bulk->thread_count], "kvk-bulk",
                                                   bulk_run, bulk, error);
        if (status != KVK_OK) {
            kvk_bulk_stop(bulk);
            return status;
        }
        bulk->thread_count++;
    }
    return KVK_OK;
}

void kvk_bulk_push(struct kvk_bulk *bulk, struct kvk_call *call)
{
    kvk_lock(&bulk->lock);
    KVK_ASSERT(!bulk->stop);
    kvk_fair_add(&bulk->fair, &call->turn, call->owner, kvk_clock_now(kvk_clock_monotonic()));
    (void)pthread_cond_signal(&bulk->work);
    kvk_unlock(&bulk->lock);
}

void kvk_bulk_stop(struct kvk_bulk *bulk)
{
    kvk_lock(&bulk->lock);
    bulk->stop = true;
    (void)pthread_cond_broadcast(&bulk->work);
    kvk_unlock(&bulk->lock);
    for (uint32_t i = 0; i < bulk->thread_count; i++) {
        (void)pthread_join(bulk->threads[i], NULL);
    }
    bulk->thread_count = 0;
    KVK_ASSERT(bulk->fair.waiting_count == 0);
}
