/*
 * A lane: the thread that takes batches, cuts them into requests, sends those where they belong,
 * and sees each to its end, whatever the cluster does meanwhile.
 *
 * Batches are cut lazily: a request is made when the pool has one and its node's queue is short,
 * so that one large batch or one slow node holds up nobody else's. Small questions go before
 * bytes, in the pool and in the queues.
 */
#include "hosttier/remote_internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"

#define EVENTS_MAX 64
#define TICK_NS (5 * KVK_NS_PER_MS)
#define SLEEP_MS 5                 /* while something is under way */
#define SLEEP_IDLE_MS 50           /* so often connections are looked at then */
#define RATE_BYTES_MIN (64U << 10) /* of a batch that tells a rate */

/* ---- Lists ---- */

void kvk_remote_list_push(struct kvk_remote_list *list, struct kvk_remote_request *request)
{
    request->next = NULL;
    if (list->last != NULL) {
        list->last->next = request;
    } else {
        list->first = request;
    }
    list->last = request;
    list->count++;
}

struct kvk_remote_request *kvk_remote_list_pop(struct kvk_remote_list *list)
{
    struct kvk_remote_request *request = list->first;
    if (request != NULL) {
        list->first = request->next;
        list->last = list->first != NULL ? list->last : NULL;
        list->count--;
    }
    return request;
}

/* Orphans leave a queue at once, for they would keep the pool's requests. */
static void list_purge(struct kvk_remote_lane *lane, struct kvk_remote_list *list)
{
    struct kvk_remote_list old = kvk_remote_list_take(list);
    struct kvk_remote_request *request = NULL;
    while ((request = kvk_remote_list_pop(&old)) != NULL) {
        if (request->batch == NULL) {
            kvk_remote_request_give(lane, request);
        } else {
            kvk_remote_list_push(list, request);
        }
    }
}

void kvk_remote_request_give(struct kvk_remote_lane *lane, struct kvk_remote_request *request)
{
    request->batch = NULL;
    kvk_remote_list_push(&lane->idle, request);
}

/* ---- The end of a batch ---- */

static void average(_Atomic uint64_t *value, uint64_t sample)
{
    uint64_t old = atomic_load_explicit(value, memory_order_relaxed);
    uint64_t now = old == 0 ? sample : old - old / 8 + sample / 8;
    atomic_store_explicit(value, now, memory_order_relaxed);
}

static void batch_count(struct kvk_remote_lane *lane, const struct kvk_remote_batch *batch,
                        const uint64_t results[KVK_REMOTE_RESULT_COUNT])
{
    struct kvk_remote *remote = lane->remote;
    enum kvk_remote_operation operation = batch->operation;
    for (int result = 0; result < KVK_REMOTE_RESULT_COUNT; result++) {
        if (results[result] > 0) {
            KVK_REMOTE_COUNT(remote, blocks[operation][result], results[result]);
        }
    }
    KVK_REMOTE_COUNT(remote, batches, 1);
    if (operation == KVK_REMOTE_FETCH || operation == KVK_REMOTE_STORE) {
        uint64_t bytes = batch->hit_count * batch->space->block_bytes;
        KVK_REMOTE_COUNT(remote, bytes[operation], bytes);
        if (bytes >= RATE_BYTES_MIN && batch->elapsed_ns > 0) {
            double rate = (double)bytes * 1e9 / (double)batch->elapsed_ns;
            average(&remote->rate[operation], (uint64_t)rate);
        }
    }
}

static void batch_done(struct kvk_remote_lane *lane, struct kvk_remote_batch *batch)
{
    uint64_t results[KVK_REMOTE_RESULT_COUNT] = {0};
    batch->run_count = 0;
    batch->hit_count = 0;
    for (uint32_t i = 0; i < batch->block_count; i++) {
        enum kvk_remote_result result = batch->blocks[i].result;
        KVK_ASSERT(result > KVK_REMOTE_PENDING && result < KVK_REMOTE_RESULT_COUNT);
        results[result]++;
        batch->hit_count += result == KVK_REMOTE_HIT;
        batch->run_count += result == KVK_REMOTE_HIT && batch->run_count == i;
    }
    batch->elapsed_ns = kvk_clock_now(kvk_clock_monotonic()) - batch->begun_ns;
    batch_count(lane, batch, results);

    *(batch->previous != NULL ? &batch->previous->next : &lane->active_first) = batch->next;
    *(batch->next != NULL ? &batch->next->previous : &lane->active_last) = batch->previous;
    batch->next = NULL;
    batch->previous = NULL;
    (void)atomic_fetch_sub(&lane->remote->bytes_now, batch->bytes);
    (void)atomic_fetch_sub(&lane->remote->batches_now, 1);
    KVK_ASSERT(kvk_locks_held() == 0);
    batch->done(batch->context, batch);
}

/* One part of a block came to its end. */
static void part_done(struct kvk_remote_lane *lane, struct kvk_remote_batch *batch, uint32_t index,
                      enum kvk_remote_result result)
{
    struct kvk_remote_block *block = &batch->blocks[index];
    KVK_ASSERT(block->part_left > 0 && batch->request_left > 0);
    if (result != KVK_REMOTE_HIT && block->result == KVK_REMOTE_PENDING) {
        block->result = result;
    }
    if (result != KVK_REMOTE_HIT && index < batch->gap) {
        batch->gap = index;
    }
    if (--block->part_left == 0 && block->result == KVK_REMOTE_PENDING) {
        block->result = KVK_REMOTE_HIT;
    }
    if (--batch->request_left == 0) {
        batch_done(lane, batch);
    }
}

/* What an ended batch lent to connections that are still sending it. */
static void payloads_keep(struct kvk_remote_lane *lane)
{
    for (uint32_t i = 0; i < lane->node_count; i++) {
        for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
            kvk_remote_connection_keep(&lane->nodes[i]->connections[k], NULL);
        }
    }
}

/* A batch ends before its requests: they are orphans, and nothing of it is touched any more. */
static void batch_end(struct kvk_remote_lane *lane, struct kvk_remote_batch *batch,
                      enum kvk_remote_result result)
{
    for (uint32_t i = 0; i < lane->remote->options.request_count_max; i++) {
        if (lane->requests[i].batch == batch) {
            lane->requests[i].batch = NULL;
        }
    }
    for (uint32_t i = 0; i < lane->node_count; i++) {
        list_purge(lane, &lane->nodes[i]->urgent);
        list_purge(lane, &lane->nodes[i]->queue);
    }
    list_purge(lane, &lane->repeats);
    payloads_keep(lane);
    for (uint32_t i = 0; i < batch->block_count; i++) {
        struct kvk_remote_block *block = &batch->blocks[i];
        if (block->part_left > 0 && block->result == KVK_REMOTE_PENDING) {
            block->result = result;
        }
        block->part_left = 0;
    }
    batch->request_left = 0;
    batch_done(lane, batch);
}

void kvk_remote_request_done(struct kvk_remote_lane *lane, struct kvk_remote_request *request,
                             enum kvk_remote_result result)
{
    struct kvk_remote_batch *batch = request->batch;
    uint32_t block = request->block;
    kvk_remote_request_give(lane, request);
    if (batch != NULL) {
        part_done(lane, batch, block, result);
    }
}

/* ---- Routes ---- */

/* The node of a slot, if it may be asked. */
static struct kvk_remote_node *node_of_slot(struct kvk_remote_lane *lane, uint16_t slot)
{
    uint16_t index = lane->slot_node[slot];
    if (index == KVK_REMOTE_NODE_NONE || lane->nodes[index]->open) {
        lane->map_wanted = lane->map_wanted || lane->map_known;
        return NULL;
    }
    return lane->nodes[index];
}

void kvk_remote_request_repeat(struct kvk_remote_lane *lane, struct kvk_remote_request *request,
                               uint64_t pause_ns)
{
    if (request->batch == NULL) {
        kvk_remote_request_give(lane, request);
        return;
    }
    if (++request->repeat_count > KVK_REMOTE_REPEATS_MAX) {
        kvk_remote_request_done(lane, request, KVK_REMOTE_UNAVAILABLE);
        return;
    }
    KVK_REMOTE_COUNT(lane->remote, repeated, 1);
    request->not_before_ns = lane->now_ns + pause_ns;
    kvk_remote_list_push(&lane->repeats, request);
}

static void repeats_route(struct kvk_remote_lane *lane)
{
    struct kvk_remote_list old = kvk_remote_list_take(&lane->repeats);
    struct kvk_remote_request *request = NULL;
    while ((request = kvk_remote_list_pop(&old)) != NULL) {
        struct kvk_remote_node *node = NULL;
        if (request->batch != NULL && request->not_before_ns > lane->now_ns) {
            kvk_remote_list_push(&lane->repeats, request);
        } else if (request->batch == NULL) {
            kvk_remote_request_give(lane, request);
        } else if ((node = node_of_slot(lane, request->slot)) != NULL) {
            kvk_remote_node_push(node, request);
        } else {
            kvk_remote_request_done(lane, request, KVK_REMOTE_UNAVAILABLE);
        }
    }
}

static void redirect(struct kvk_remote_lane *lane, struct kvk_remote_request *request, bool ask,
                     const struct kvk_remote_address *address)
{
    struct kvk_remote_node *node = kvk_remote_node_find(lane, address);
    if (ask) {
        KVK_REMOTE_COUNT(lane->remote, asked, 1);
    } else {
        KVK_REMOTE_COUNT(lane->remote, moved, 1);
        lane->map_wanted = true;
    }
    if (node != NULL && ask) {
        node->asked_ns = lane->now_ns;
    } else if (node != NULL) {
        node->in_map = true;
        for (uint32_t i = 0; i < lane->node_count; i++) {
            if (lane->nodes[i] == node) {
                lane->slot_node[request->slot] = (uint16_t)i;
            }
        }
    }
    if (node == NULL || node->open || ++request->redirect_count > KVK_REMOTE_REDIRECTS_MAX) {
        kvk_remote_request_done(lane, request, KVK_REMOTE_UNAVAILABLE);
        return;
    }
    KVK_REMOTE_COUNT(lane->remote, repeated, 1);
    request->asking = ask;
    kvk_remote_node_push(node, request);
}

/* ---- Answers ---- */

static bool begins(const char *text, const char *word)
{
    return strncmp(text, word, strlen(word)) == 0;
}

static void answered_error(struct kvk_remote_connection *connection,
                           struct kvk_remote_request *request, const char *text, size_t size)
{
    const struct kvk_remote_node *node = connection->node;
    struct kvk_remote_lane *lane = node->lane;
    struct kvk_remote_address address;
    bool ask = false;
    uint16_t slot = 0;

    if (kvk_remote_redirect_read(text, size, node->address.host, &ask, &slot, &address) &&
        slot == request->slot) {
        redirect(lane, request, ask, &address);
        return;
    }
    if (begins(text, "TRYAGAIN") || begins(text, "READONLY")) {
        KVK_REMOTE_COUNT(lane->remote, try_agains, 1);
        lane->map_wanted = true;
        kvk_remote_request_repeat(lane, request, KVK_REMOTE_REPEAT_PAUSE_NS);
        return;
    }
    enum kvk_remote_result result = KVK_REMOTE_REFUSED;
    if (begins(text, "CLUSTERDOWN") || begins(text, "MASTERDOWN") || begins(text, "LOADING")) {
        KVK_REMOTE_COUNT(lane->remote, cluster_downs, 1);
        lane->map_wanted = true;
        result = KVK_REMOTE_UNAVAILABLE;
    } else if (begins(text, "OOM")) {
        result = KVK_REMOTE_FULL;
    } else if (begins(text, "WRONGTYPE")) {
        result = KVK_REMOTE_NOT_OURS;
    }
    if (result != KVK_REMOTE_NOT_OURS) {
        kvk_remote_say(lane->remote, "%s:%u: %s", node->address.host, node->address.port, text);
    }
    kvk_remote_request_done(lane, request, result);
}

void kvk_remote_request_answered(struct kvk_remote_connection *connection,
                                 struct kvk_remote_request *request,
                                 const struct kvk_remote_reply *reply)
{
    struct kvk_remote_lane *lane = connection->node->lane;
    if (request->batch == NULL) {
        KVK_REMOTE_COUNT(lane->remote, late_answers, 1);
        kvk_remote_request_give(lane, request);
        return;
    }
    if (reply->type == REDIS_REPLY_ERROR) {
        answered_error(connection, request, reply->text, reply->size);
        return;
    }
    enum kvk_remote_result result = KVK_REMOTE_REFUSED;
    switch (request->batch->operation) {
    case KVK_REMOTE_EXISTS:
    case KVK_REMOTE_TAIL:
        average(&lane->remote->round_trip_ns, lane->now_ns - request->sent_ns);
        result = request->decoded ? request->result : result;
        break;
    case KVK_REMOTE_FETCH:
        result = request->decoded ? request->result : result;
        break;
    case KVK_REMOTE_STORE:
        result = reply->type == REDIS_REPLY_STATUS ? KVK_REMOTE_HIT : result;
        break;
    case KVK_REMOTE_DROP:
        result = reply->type == REDIS_REPLY_INTEGER ? KVK_REMOTE_HIT : result;
        break;
    case KVK_REMOTE_APPEND:
        if (reply->type == REDIS_REPLY_INTEGER && reply->integer >= 0) {
            request->batch->blocks[request->block].length = (uint64_t)reply->integer;
            result = KVK_REMOTE_HIT;
        }
        break;
    case KVK_REMOTE_OPERATION_COUNT:
        KVK_UNREACHABLE();
    }
    kvk_remote_request_done(lane, request, result);
}

/* ---- Cutting batches ---- */

/* The name of a value: its size. */
static size_t name_write(const struct kvk_remote_lane *lane, const struct kvk_remote_want *want,
                         char name[KVK_REMOTE_NAME_SIZE])
{
    const char *prefix = lane->remote->options.key_prefix;
    size_t size = strlen(prefix);
    KVK_ASSERT(size <= KVK_REMOTE_PREFIX_MAX);
    memcpy(name, prefix, size + 1);
    kvk_hex_write(want->hash, KVK_REMOTE_KEY_SIZE, name + size);
    return size + 2 * (size_t)KVK_REMOTE_KEY_SIZE;
}

static void request_fill(struct kvk_remote_request *request, struct kvk_remote_batch *batch,
                         const char name[KVK_REMOTE_NAME_SIZE], size_t name_size, uint16_t slot)
{
    *request = (struct kvk_remote_request){
        .batch = batch,
        .want = batch->want,
        .name_size = (uint8_t)name_size,
        .block = batch->next_block,
        .slot = slot,
    };
    memcpy(request->name, name, sizeof(request->name));
}

/* May this batch have another request for this node now? */
static bool room_for(const struct kvk_remote_lane *lane, const struct kvk_remote_batch *batch,
                     const struct kvk_remote_node *node)
{
    const struct kvk_remote_options *options = &lane->remote->options;
    if (kvk_remote_is_small(batch->operation)) {
        return lane->idle.count > 0 && node->urgent.count < options->request_count_max / 4;
    }
    uint32_t queue_max = options->connection_count * options->pipeline_depth;
    return lane->idle.count > options->request_count_max / 4 && node->queue.count < queue_max;
}

static void batch_step(struct kvk_remote_batch *batch)
{
    batch->want_made = false;
    if (++batch->next_part == batch->space->part_count) {
        batch->next_part = 0;
        batch->next_block++;
    }
}

/* As many requests as there is room for. */
static void batch_cut(struct kvk_remote_lane *lane, struct kvk_remote_batch *batch)
{
    /* A batch is done with its last part, and is not looked at after that. */
    uint64_t left = (uint64_t)(batch->block_count - batch->next_block) * batch->space->part_count -
                    batch->next_part;
    for (; left > 0; left--) {
        uint32_t block = batch->next_block;
        if (batch->chain && block > batch->gap) {
            batch_step(batch);
            part_done(lane, batch, block, KVK_REMOTE_SKIPPED);
            continue;
        }
        if (!batch->want_made) {
            kvk_remote_want_init(&batch->want, lane->crypt, batch->space, &batch->blocks[block].id,
                                 batch->next_part);
            batch->want_made = true;
        }
        char name[KVK_REMOTE_NAME_SIZE] = {0};
        size_t name_size = name_write(lane, &batch->want, name);
        uint16_t slot = kvk_remote_slot(name, name_size);
        struct kvk_remote_node *node = node_of_slot(lane, slot);
        if (node == NULL) {
            batch_step(batch);
            part_done(lane, batch, block, KVK_REMOTE_UNAVAILABLE);
            continue;
        }
        if (!room_for(lane, batch, node)) {
            return;
        }
        struct kvk_remote_request *request = kvk_remote_list_pop(&lane->idle);
        request_fill(request, batch, name, name_size, slot);
        kvk_remote_node_push(node, request);
        batch_step(batch);
    }
}

static void batches_take(struct kvk_remote_lane *lane)
{
    kvk_lock(&lane->lock);
    struct kvk_remote_batch *batch = lane->submitted_first;
    lane->submitted_first = NULL;
    lane->submitted_last = NULL;
    kvk_unlock(&lane->lock);
    while (batch != NULL) {
        struct kvk_remote_batch *next = batch->next;
        batch->next = NULL;
        batch->previous = lane->active_last;
        *(lane->active_last != NULL ? &lane->active_last->next : &lane->active_first) = batch;
        lane->active_last = batch;
        if (batch->deadline_ns < lane->deadline_ns) {
            lane->deadline_ns = batch->deadline_ns;
        }
        batch = next;
    }
}

static void batches_cut(struct kvk_remote_lane *lane)
{
    struct kvk_remote_batch *next = NULL;
    for (struct kvk_remote_batch *batch = lane->active_first; batch != NULL; batch = next) {
        next = batch->next;
        if (batch->next_block < batch->block_count) {
            batch_cut(lane, batch);
        }
    }
}

static void batches_expire(struct kvk_remote_lane *lane)
{
    if (lane->now_ns < lane->deadline_ns) {
        return;
    }
    lane->deadline_ns = UINT64_MAX;
    struct kvk_remote_batch *next = NULL;
    for (struct kvk_remote_batch *batch = lane->active_first; batch != NULL; batch = next) {
        next = batch->next;
        if (batch->deadline_ns <= lane->now_ns) {
            batch_end(lane, batch, KVK_REMOTE_DEADLINE);
        } else if (batch->deadline_ns < lane->deadline_ns) {
            lane->deadline_ns = batch->deadline_ns;
        }
    }
}

/* ---- The thread ---- */

static void events_take(struct kvk_remote_lane *lane, int timeout_ms)
{
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(lane->epoll_fd, events, EVENTS_MAX, timeout_ms);
    lane->now_ns = kvk_clock_now(kvk_clock_monotonic());
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == lane) {
            uint64_t wakes = 0;
            ssize_t got = read(lane->wake_fd, &wakes, sizeof(wakes));
            (void)got; /* somebody woke us, however often */
        } else {
            kvk_remote_connection_event(events[i].data.ptr, events[i].events);
        }
    }
}

/* What TLS has taken off the socket wakes nobody. True: there may be more. */
static bool unread_take(struct kvk_remote_lane *lane)
{
    bool more = false;
    for (uint32_t i = 0; i < lane->node_count; i++) {
        for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
            struct kvk_remote_connection *connection = &lane->nodes[i]->connections[k];
            if (connection->unread) {
                kvk_remote_connection_event(connection, 0);
                more = more || connection->unread;
            }
        }
    }
    return more;
}

static int timeout_of(const struct kvk_remote_lane *lane, bool more)
{
    if (more) {
        return 0;
    }
    return lane->active_first != NULL || !lane->map_known || lane->trouble ? SLEEP_MS
                                                                           : SLEEP_IDLE_MS;
}

static void lane_end(struct kvk_remote_lane *lane)
{
    batches_take(lane);
    while (lane->active_first != NULL) {
        batch_end(lane, lane->active_first, KVK_REMOTE_CANCELLED);
    }
    for (uint32_t i = 0; i < lane->node_count; i++) {
        for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
            kvk_remote_connection_close(&lane->nodes[i]->connections[k], false, "");
        }
    }
}

static void *lane_main(void *context)
{
    struct kvk_remote_lane *lane = context;
    bool more = false;
    bool stopping = false;
    while (!stopping) {
        events_take(lane, timeout_of(lane, more));
        more = unread_take(lane);
        batches_take(lane);
        batches_expire(lane);
        repeats_route(lane);
        batches_cut(lane);
        for (uint32_t i = 0; i < lane->node_count; i++) {
            kvk_remote_node_pump(lane->nodes[i]);
        }
        if (lane->now_ns - lane->tick_ns >= TICK_NS) {
            lane->tick_ns = lane->now_ns;
            kvk_remote_nodes_tick(lane, lane->now_ns);
        }
        kvk_lock(&lane->lock);
        stopping = lane->stopping;
        kvk_unlock(&lane->lock);
    }
    lane_end(lane);
    return NULL;
}

void kvk_remote_lane_wake(struct kvk_remote_lane *lane)
{
    uint64_t one = 1;
    ssize_t written = write(lane->wake_fd, &one, sizeof(one));
    (void)written; /* full: it is awake */
}

static enum kvk_status lane_prepare(struct kvk_remote_lane *lane, struct kvk_error *error)
{
    struct kvk_remote *remote = lane->remote;
    uint32_t count = remote->options.request_count_max;
    kvk_lock_init(&lane->lock);
    lane->deadline_ns = UINT64_MAX;
    memset(lane->slot_node, 0xff, sizeof(lane->slot_node));
    lane->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    lane->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    lane->requests = calloc(count, sizeof(struct kvk_remote_request));
    lane->input = malloc(KVK_REMOTE_READ_SIZE);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = lane};
    if (lane->epoll_fd < 0 || lane->wake_fd < 0 || lane->requests == NULL || lane->input == NULL ||
        epoll_ctl(lane->epoll_fd, EPOLL_CTL_ADD, lane->wake_fd, &event) != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                        "no memory or descriptors for the remote store");
    }
    for (uint32_t i = 0; i < count; i++) {
        kvk_remote_list_push(&lane->idle, &lane->requests[i]);
    }
    for (uint32_t i = 0; i < remote->seed_count; i++) {
        struct kvk_remote_node *node = kvk_remote_node_find(lane, &remote->seeds[i]);
        if (node == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory for nodes");
        }
        node->seed = true;
    }
    return kvk_remote_crypt_create(&lane->crypt, error);
}

enum kvk_status kvk_remote_lane_start(struct kvk_remote_lane *lane, struct kvk_error *error)
{
    enum kvk_status status = lane_prepare(lane, error);
    if (status != KVK_OK) {
        return status;
    }
    /* Signals are the program's; a peer that is gone is an error of write here. */
    sigset_t all;
    sigset_t old;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&lane->thread, NULL, lane_main, lane);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                        "a thread of the remote store could not be started: %s", strerror(failed));
    }
    lane->started = true;
    return KVK_OK;
}

void kvk_remote_lane_stop(struct kvk_remote_lane *lane)
{
    if (!lane->started) {
        return;
    }
    kvk_lock(&lane->lock);
    lane->stopping = true;
    kvk_unlock(&lane->lock);
    kvk_remote_lane_wake(lane);
    (void)pthread_join(lane->thread, NULL);
    lane->started = false;
}
