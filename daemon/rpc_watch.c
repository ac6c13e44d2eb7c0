/*
 * WatchBlocks: a stream that begins with a snapshot, or where an earlier one ended, and then tells
 * every change.
 *
 * Messages are made in the stream's own callbacks, a few under way at a time, so that a slow reader
 * holds up nobody and costs no memory: what it has not read stays in the engine's log, and where
 * the log goes over it, it gets a snapshot. One thread wakes streams that have something to tell.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/table.h"
#include "daemon/cache_state.h"
#include "daemon/events.h"
#include "daemon/rpc_private.h"

#define MESSAGES_MAX 4 /* under way */

struct kvk_rpc_watch {
    const struct kvk_rpc_bound *bound;
    struct kvk_call *call;
    uint64_t tenant_id;     /* 0: all */
    _Atomic uint64_t after; /* number of the last event that was told */
    bool resumed;           /* say so first */
    bool snapshot;          /* under way: walk is valid */
    bool snapshot_begun;    /* and it was said */
    bool ended;             /* the call was ended; callbacks alone */
    struct kvk_events_walk walk;
    struct kvk_table spaces; /* id of those that were named */
    struct kvk_rpc_watch *next;
    struct kvk_rpc_watch **link; /* what points here; NULL: not in the list; watches->lock */

    /* The message at hand. */
    struct kvk_event_batch batch;
    Kvkeep__V1__BlockEvent events[KVK_EVENT_BATCH_EVENTS];
    Kvkeep__V1__BlockEvent *event_pointers[KVK_EVENT_BATCH_EVENTS];
    struct {
        struct kvk_event_space names;
        Kvkeep__V1__WatchedSpace message;
        uint64_t windows[KVK_GROUP_COUNT_MAX];
    } new_spaces[KVK_EVENT_BATCH_EVENTS];
    Kvkeep__V1__WatchedSpace *space_pointers[KVK_EVENT_BATCH_EVENTS];
    uint32_t new_space_count;
};

static struct kvk_rpc_watches *watches_of(const struct kvk_rpc_watch *watch)
{
    return &watch->bound->rpc->watches;
}

/* ---- Messages ---- */

_Static_assert((int)KVK_EVENT_STORED == (int)KVKEEP__V1__BLOCK_EVENT__KIND__KIND_STORED &&
                   (int)KVK_EVENT_CLEARED == (int)KVKEEP__V1__BLOCK_EVENT__KIND__KIND_CLEARED,
               "numbers agree");
_Static_assert((int)KVK_TIER_DISK + 1 == (int)KVKEEP__V1__TIER__TIER_DISK, "so do tiers");

static void fill_event(const struct kvk_event *event, Kvkeep__V1__BlockEvent *message)
{
    kvkeep__v1__block_event__init(message);
    message->kind = (Kvkeep__V1__BlockEvent__Kind)event->kind;
    message->space_id = event->space_id;
    if (event->kind == KVK_EVENT_CLEARED) {
        return;
    }
    message->group = event->group;
    message->tier = (Kvkeep__V1__Tier)(event->tier + 1);
    message->key = kvk_rpc_bytes(&event->key, sizeof(event->key));
    if (event->kind == KVK_EVENT_STORED) {
        message->parent_key = kvk_rpc_bytes(&event->parent, sizeof(event->parent));
        message->position = event->position;
        message->tokens =
            kvk_rpc_bytes(event->tokens, event->token_count * sizeof(event->tokens[0]));
        message->salted = event->salted;
        message->content = event->content;
    }
}

/* Name the space where this stream did not yet. One that is gone has no name any more. */
static void name_space(struct kvk_rpc_watch *watch, uint64_t space_id)
{
    if (kvk_table_get_index(&watch->spaces, space_id) != KVK_TABLE_NONE) {
        return;
    }
    struct kvk_event_space *names = &watch->new_spaces[watch->new_space_count].names;
    if (kvk_events_space_unlocked(watch->bound->rpc->cache, space_id, names) != KVK_OK) {
        return;
    }
    if (kvk_table_put_index(&watch->spaces, space_id, 1) != KVK_OK) {
        /* Spaces come and go: those that were named first are named again. */
        kvk_table_finish(&watch->spaces);
        if (kvk_table_init(&watch->spaces, watch->bound->rpc->config->spaces) == KVK_OK) {
            enum kvk_status status = kvk_table_put_index(&watch->spaces, space_id, 1);
            KVK_ASSERT(status == KVK_OK);
        }
    }
    uint64_t *windows = watch->new_spaces[watch->new_space_count].windows;
    Kvkeep__V1__WatchedSpace *message = &watch->new_spaces[watch->new_space_count].message;
    kvkeep__v1__watched_space__init(message);
    message->space_id = space_id;
    message->tenant = kvk_rpc_text(names->tenant);
    message->model = kvk_rpc_text(names->model);
    message->revision = kvk_rpc_text(names->revision);
    message->adapter_name = kvk_rpc_text(names->adapter);
    message->block_tokens = names->block_tokens;
    for (uint32_t g = 0; g < names->group_count; g++) {
        windows[g] = names->windows[g];
    }
    message->n_windows = names->group_count;
    message->windows = windows;
    watch->space_pointers[watch->new_space_count++] = message;
}

static enum kvk_status send_message(struct kvk_rpc_watch *watch,
                                    Kvkeep__V1__WatchBlocksResponse__Phase phase,
                                    const struct kvk_event_batch *batch)
{
    Kvkeep__V1__WatchBlocksResponse message = KVKEEP__V1__WATCH_BLOCKS_RESPONSE__INIT;
    const struct kvk_rpc *rpc = watch->bound->rpc;
    message.phase = phase;
    message.epoch = kvk_rpc_bytes(rpc->boot_id, sizeof(rpc->boot_id));
    bool in_snapshot = phase == KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_SNAPSHOT ||
                       phase == KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_SNAPSHOT_BEGIN;
    message.after = in_snapshot ? 0 : atomic_load(&watch->after);
    uint32_t count = batch == NULL ? 0 : batch->count;
    watch->new_space_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        fill_event(&batch->events[i], &watch->events[i]);
        watch->event_pointers[i] = &watch->events[i];
        name_space(watch, batch->events[i].space_id);
    }
    message.n_events = count;
    message.events = watch->event_pointers;
    message.n_spaces = watch->new_space_count;
    message.spaces = watch->space_pointers;
    uint8_t *buffer = kvk_call_reply_alloc(
        watch->call, kvkeep__v1__watch_blocks_response__get_packed_size(&message));
    (void)kvkeep__v1__watch_blocks_response__pack(&message, buffer);
    for (uint32_t i = 0; i < watch->new_space_count; i++) {
        free(watch->new_spaces[i].names.memory);
    }
    return kvk_call_send(watch->call);
}

/* ---- The end ---- */

/* `error` NULL: in order. In a callback of the stream only, and the last that it does. */
static void watch_end(struct kvk_rpc_watch *watch, const struct kvk_error *error)
{
    struct kvk_rpc_watches *watches = watches_of(watch);
    KVK_ASSERT(!watch->ended);
    watch->ended = true;
    kvk_lock(&watches->lock);
    if (watch->link != NULL) {
        *watch->link = watch->next;
        if (watch->next != NULL) {
            watch->next->link = watch->link;
        }
        watch->link = NULL;
    }
    kvk_unlock(&watches->lock);
    if (error == NULL) {
        kvk_call_finish(watch->call);
    } else {
        kvk_call_fail(watch->call, error);
    }
}

static void watch_destroy(struct kvk_rpc_watch *watch)
{
    struct kvk_rpc_watches *watches = watches_of(watch);
    kvk_lock(&watches->lock);
    watches->count--;
    kvk_unlock(&watches->lock);
    kvk_events_walk_finish(&watch->walk);
    kvk_table_finish(&watch->spaces);
    free(watch);
}

static void on_done(void *context)
{
    struct kvk_rpc_watch *watch = context;
    KVK_ASSERT(watch->ended);
    watch_destroy(watch);
}

static void on_cancel(struct kvk_call *call)
{
    struct kvk_error error;
    error.status = kvk_fail(&error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the client is gone");
    watch_end(kvk_call_context(call), &error);
}

/* ---- Telling ---- */

static enum kvk_status snapshot_begin(struct kvk_rpc_watch *watch, struct kvk_error *error)
{
    kvk_events_walk_finish(&watch->walk);
    watch->snapshot_begun = false;
    atomic_fetch_add(&watches_of(watch)->snapshots, 1);
    watch->snapshot = kvk_events_walk_begin_unlocked(watch->bound->rpc->cache, watch->tenant_id,
                                                     &watch->walk) == KVK_OK;
    return watch->snapshot
               ? KVK_OK
               : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a snapshot");
}

static enum kvk_status tell_snapshot(struct kvk_rpc_watch *watch)
{
    if (!watch->snapshot_begun) {
        watch->snapshot_begun = true;
        return send_message(watch, KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_SNAPSHOT_BEGIN,
                            NULL);
    }
    while (kvk_events_walk_next_unlocked(watch->bound->rpc->cache, &watch->walk, &watch->batch)) {
        if (watch->batch.count > 0) {
            return send_message(watch, KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_SNAPSHOT,
                                &watch->batch);
        }
    }
    watch->snapshot = false;
    atomic_store(&watch->after, watch->walk.after);
    kvk_events_walk_finish(&watch->walk);
    return send_message(watch, KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_SNAPSHOT_END, NULL);
}

/* The next message; *idle: there is nothing to tell. */
static enum kvk_status tell(struct kvk_rpc_watch *watch, bool *idle, struct kvk_error *error)
{
    struct kvk_cache *cache = watch->bound->rpc->cache;
    *idle = false;
    if (watch->resumed) {
        watch->resumed = false;
        return send_message(watch, KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_RESUMED, NULL);
    }
    if (watch->snapshot) {
        return tell_snapshot(watch);
    }
    uint64_t after = atomic_load(&watch->after);
    while (after != kvk_events_newest(cache)) {
        if (!kvk_events_read_unlocked(cache, watch->tenant_id, &after, &watch->batch)) {
            return snapshot_begin(watch, error);
        }
        atomic_store(&watch->after, after);
        if (watch->batch.count > 0) {
            return send_message(watch, KVKEEP__V1__WATCH_BLOCKS_RESPONSE__PHASE__PHASE_LIVE,
                                &watch->batch);
        }
    }
    *idle = true;
    return KVK_OK;
}

static void on_progress(struct kvk_call *call)
{
    struct kvk_rpc_watch *watch = kvk_call_context(call);
    struct kvk_rpc_run run;
    struct kvk_error error;
    if (watch->ended) {
        return;
    }
    if (atomic_load(&watches_of(watch)->end)) {
        watch_end(watch, NULL);
        return;
    }
    /* Each time: a token may have been revoked. */
    enum kvk_status status = kvk_rpc_run_begin(&run, watch->bound, call, true, &error);
    bool idle = false;
    while (status == KVK_OK && !idle && kvk_call_sends_pending(call) < MESSAGES_MAX) {
        status = tell(watch, &idle, &error);
        if (status == KVK_CANCELLED) {
            return; /* on_cancel ends the call */
        }
    }
    if (status != KVK_OK) {
        error.status = status;
        watch_end(watch, &error);
    }
}

static const struct kvk_stream_events watch_events = {
    .on_sent = on_progress,
    .on_wake = on_progress,
    .on_cancel = on_cancel,
    .on_done = on_done,
};

/* ---- The call ---- */

static enum kvk_status choose_tenant(const struct kvk_rpc_run *run,
                                     const Kvkeep__V1__WatchBlocksRequest *asked,
                                     uint64_t *tenant_id, struct kvk_error *error)
{
    const struct kvk_credential *credential = run->caller.credential;
    const struct kvk_tenant *tenant = NULL;
    if (asked->all_tenants && asked->tenant.len > 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tenant",
                        "tenant and all_tenants exclude each other");
    }
    if (asked->all_tenants) {
        *tenant_id = 0;
        return kvk_rpc_require_admin(run, error);
    }
    if (credential->admin && asked->tenant.len > 0) {
        tenant = kvk_tenants_find_name(run->rpc->tenants, asked->tenant.data, asked->tenant.len);
        if (tenant == NULL) {
            return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "tenant",
                            "there is no such tenant");
        }
        *tenant_id = tenant->id;
        return KVK_OK;
    }
    enum kvk_status status =
        kvk_credential_tenant(credential, asked->tenant.data, asked->tenant.len, &tenant, error);
    if (status == KVK_OK) {
        *tenant_id = tenant->id;
    }
    return status;
}

static enum kvk_status watch_check(struct kvk_rpc_run *run, struct kvk_rpc_watch *watch,
                                   struct kvk_error *error)
{
    const struct kvk_rpc *rpc = run->rpc;
    ProtobufCMessage *message;
    enum kvk_status status = kvk_wire_unpack(rpc->config, &run->memory->arena,
                                             &kvkeep__v1__watch_blocks_request__descriptor,
                                             kvk_call_message(run->call), &message, error);
    if (status != KVK_OK) {
        return status;
    }
    const Kvkeep__V1__WatchBlocksRequest *asked = (const Kvkeep__V1__WatchBlocksRequest *)message;
    if (asked->epoch.len != 0 && asked->epoch.len != KVK_BOOT_ID_SIZE) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "epoch", asked->epoch.len,
                              KVK_BOOT_ID_SIZE, "epoch must be empty or %u bytes",
                              KVK_BOOT_ID_SIZE);
    }
    status = choose_tenant(run, asked, &watch->tenant_id, error);
    if (status != KVK_OK) {
        return status;
    }
    bool same_life =
        asked->epoch.len != 0 && memcmp(asked->epoch.data, rpc->boot_id, sizeof(rpc->boot_id)) == 0;
    struct kvk_events_stats stats;
    kvk_events_stats_unlocked(rpc->cache, &stats);
    watch->resumed = same_life && asked->after <= stats.logged && asked->after + 1 >= stats.oldest;
    if (!watch->resumed) {
        return snapshot_begin(watch, error);
    }
    atomic_store(&watch->after, asked->after);
    return KVK_OK;
}

static enum kvk_status watch_make(struct kvk_rpc *rpc, const struct kvk_rpc_bound *bound,
                                  struct kvk_rpc_watch **result, struct kvk_error *error)
{
    if (rpc->cache->events == NULL) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_SWITCHED_OFF, "",
                        "events.log_bytes is 0: there are no events");
    }
    kvk_lock(&rpc->watches.lock);
    uint32_t limit = rpc->config->events_watchers;
    bool full = rpc->watches.count >= limit;
    rpc->watches.count += full ? 0 : 1;
    kvk_unlock(&rpc->watches.lock);
    if (full) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "events.watchers", limit,
                              limit, "%u streams of events are open", limit);
    }
    struct kvk_rpc_watch *watch = calloc(1, sizeof(*watch));
    if (watch != NULL && kvk_table_init(&watch->spaces, rpc->config->spaces) == KVK_OK) {
        watch->bound = bound;
        *result = watch;
        return KVK_OK;
    }
    free(watch);
    kvk_lock(&rpc->watches.lock);
    rpc->watches.count--;
    kvk_unlock(&rpc->watches.lock);
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the stream");
}

static void list_add(struct kvk_rpc_watch *watch)
{
    struct kvk_rpc_watches *watches = watches_of(watch);
    kvk_lock(&watches->lock);
    watch->next = watches->first;
    watch->link = &watches->first;
    if (watch->next != NULL) {
        watch->next->link = &watch->next;
    }
    watches->first = watch;
    kvk_unlock(&watches->lock);
}

void kvk_rpc_watch_blocks(struct kvk_call *call, void *rpc_bound)
{
    struct kvk_rpc_run run;
    struct kvk_error error;
    struct kvk_rpc_watch *watch = NULL;
    enum kvk_status status = kvk_rpc_run_begin(&run, rpc_bound, call, true, &error);
    if (status == KVK_OK) {
        status = kvk_rpc_rate_take(&run, rpc_bound, NULL, &error);
    }
    if (status == KVK_OK) {
        status = watch_make(run.rpc, rpc_bound, &watch, &error);
    }
    if (status == KVK_OK && watch != NULL) {
        watch->call = call;
        status = watch_check(&run, watch, &error);
    }
    if (status != KVK_OK || watch == NULL) {
        if (watch != NULL) {
            watch_destroy(watch);
        }
        error.status = status;
        kvk_call_fail(call, &error);
        return;
    }
    kvk_call_stream(call, &watch_events, watch);
    list_add(watch);
    kvk_call_wake(call);
}

/* ---- The thread that wakes ---- */

static void wake_all(struct kvk_rpc_watches *watches, uint64_t newest)
{
    for (struct kvk_rpc_watch *at = watches->first; at != NULL; at = at->next) {
        if (newest == UINT64_MAX || atomic_load(&at->after) != newest) {
            kvk_call_wake(at->call);
        }
    }
}

static void *thread_main(void *argument)
{
    struct kvk_rpc *rpc = argument;
    struct kvk_rpc_watches *watches = &rpc->watches;
    const uint64_t pause_ns = rpc->config->events_batch_ms * KVK_NS_PER_MS;
    kvk_lock(&watches->lock);
    while (!watches->stop) {
        uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + pause_ns;
        while (!watches->stop && kvk_condition_wait(&watches->stop_now, &watches->lock, until_ns)) {
        }
        wake_all(watches, kvk_events_newest(rpc->cache));
    }
    kvk_unlock(&watches->lock);
    return NULL;
}

void kvk_rpc_watches_init(struct kvk_rpc_watches *watches)
{
    kvk_lock_init(&watches->lock);
    kvk_condition_init(&watches->stop_now);
}

void kvk_rpc_watches_start(struct kvk_rpc *rpc)
{
    if (rpc->cache->events != NULL) {
        rpc->watches.thread_runs =
            pthread_create(&rpc->watches.thread, NULL, thread_main, rpc) == 0;
        if (!rpc->watches.thread_runs) {
            kvk_log(KVK_LOG_ERROR, "no_thread", "text=\"streams of events tell nothing new\"");
        }
    }
}

void kvk_rpc_watches_drain(struct kvk_rpc_watches *watches)
{
    atomic_store(&watches->end, true);
    kvk_lock(&watches->lock);
    wake_all(watches, UINT64_MAX);
    kvk_unlock(&watches->lock);
}

void kvk_rpc_watches_join(struct kvk_rpc_watches *watches)
{
    kvk_lock(&watches->lock);
    watches->stop = true;
    pthread_cond_broadcast(&watches->stop_now);
    kvk_unlock(&watches->lock);
    if (watches->thread_runs) {
        (void)pthread_join(watches->thread, NULL);
        watches->thread_runs = false;
    }
}

void kvk_rpc_watches_finish(struct kvk_rpc_watches *watches)
{
    KVK_ASSERT(watches->first == NULL && watches->count == 0);
    pthread_cond_destroy(&watches->stop_now);
    kvk_lock_finish(&watches->lock);
}
