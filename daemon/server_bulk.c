/*
 * The bulk threads: handlers and callbacks that may block or work long. A call waits in the queue
 * at most once, so the limit of live calls bounds it.
 */
#include "daemon/server_private.h"

#include "base/assert.h"

static void *bulk_run(void *argument)
{
    struct kvk_bulk *bulk = argument;
    for (;;) {
        kvk_lock(&bulk->lock);
        while (bulk->first == NULL && !bulk->stop) {
            (void)kvk_condition_wait(&bulk->work, &bulk->lock, UINT64_MAX);
        }
        struct kvk_call *call = bulk->first;
        if (call != NULL) {
            bulk->first = call->next;
            if (bulk->first == NULL) {
                bulk->last = NULL;
            }
            call->next = NULL;
        }
        kvk_unlock(&bulk->lock);
        if (call == NULL) {
            return NULL;
        }
        kvk_call_run_bulk(call);
    }
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
    call->next = NULL;
    if (bulk->last == NULL) {
        bulk->first = call;
    } else {
        bulk->last->next = call;
    }
    bulk->last = call;
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
    KVK_ASSERT(bulk->first == NULL);
}
