/*
 * The remote store's life, its spaces, and what others are told of it.
 */
#include "daemon/remote_store.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "daemon/fleet_view.h"
#include "daemon/remote_internal.h"
#include "base/pages.h"

#define PASSWORD_SIZE 1024
#define LARGE_BLOCKS 64 /* a block has at most so many batches' bytes */
#define RAISE_MS 2000   /* that an invalidation waits for the store at most */
#define RAISE_TICK_NS (20 * KVK_NS_PER_MS)

/* ---- Opening ---- */

static enum kvk_status fail_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the remote store");
}

static enum kvk_status password_read(const char *path, char password[PASSWORD_SIZE],
                                     struct kvk_error *error)
{
    password[0] = '\0';
    if (path[0] == '\0') {
        return KVK_OK;
    }
    FILE *file = fopen(path, "re");
    bool read = file != NULL && fgets(password, PASSWORD_SIZE, file) != NULL;
    int code = errno;
    if (file != NULL) {
        (void)fclose(file);
    }
    password[strcspn(password, "\r\n")] = '\0';
    if (file == NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "remote.password_file",
                        "remote.password_file: %s: %s", path, strerror(code));
    }
    if (!read || password[0] == '\0') {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "remote.password_file",
                        "remote.password_file: %s is empty", path);
    }
    return KVK_OK;
}

static enum kvk_status client_open(struct kvk_remote_store *store, struct kvk_error *error)
{
    const struct kvk_remote_config *config = &store->cache->config->remote;
    char password[PASSWORD_SIZE];
    enum kvk_status status = password_read(config->password_file, password, error);
    if (status != KVK_OK) {
        return status;
    }
    const struct kvk_remote_options options = {
        .seeds = config->seeds,
        .user = config->user,
        .password = password,
        .key_prefix = config->key_prefix,
        .tls = config->tls,
        .tls_ca_file = config->tls_ca_file,
        .tls_name = config->tls_name,
        .tls_certificate = config->tls_certificate,
        .tls_key = config->tls_key,
        .thread_count = config->threads,
        .connection_count = config->connections,
        .pipeline_depth = config->pipeline,
        .node_timeout_ms = config->node_timeout_ms,
        .ttl_ms = config->ttl_ms,
    };
    status = kvk_remote_open(&options, &store->client, error);
    kvk_secret_wipe(password, sizeof(password));
    return status;
}

/* On the fleet's thread. */
static void invalidated_elsewhere(void *context, void *user)
{
    struct kvk_cache *cache = context;
    const struct kvk_remote_member *member = user;
    kvk_log(KVK_LOG_INFO, "space_invalidated_elsewhere", "space=%llu",
            (unsigned long long)member->space_id);
    kvk_invalidated_elsewhere(cache, member->space_id);
}

static enum kvk_status fleet_open(struct kvk_remote_store *store, struct kvk_error *error)
{
    const struct kvk_fleet_options options = {
        .key = store->key,
        .remote = store->client,
        .values = store->cache->catalogue,
        .generation_ms = store->cache->config->remote.generation_ms,
        .member_count_max = store->cache->config->spaces + 1, /* one that is being opened */
        .invalidated = invalidated_elsewhere,
        .context = store->cache,
    };
    return kvk_fleet_open(&options, &store->fleet, error);
}

static enum kvk_status tables_create(struct kvk_remote_store *store, struct kvk_error *error)
{
    const struct kvk_config *config = store->cache->config;
    store->flags = kvk_pages_create_sparse(config->blocks);
    store->links = kvk_pages_create_sparse((size_t)config->blocks * sizeof(*store->links));
    store->budgets = calloc(KVK_TENANT_COUNT_MAX, sizeof(*store->budgets));
    store->queue_capacity = config->remote.send_queue;
    store->queue = calloc(store->queue_capacity, sizeof(*store->queue));
    if (store->flags == NULL || store->links == NULL || store->budgets == NULL ||
        store->queue == NULL) {
        return fail_memory(error);
    }
    return kvk_remote_asks_create(store, error);
}

enum kvk_status kvk_remote_store_create(struct kvk_cache *cache, struct kvk_error *error)
{
    const struct kvk_config *config = cache->config;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (config->remote.seeds[0] == '\0' || !cache->threads) {
        return KVK_OK;
    }
    struct kvk_remote_store *store = calloc(1, sizeof(*store));
    if (store == NULL) {
        return fail_memory(error);
    }
    store->cache = cache;
    store->tried_candidate = KVK_BLOCK_NONE;
    kvk_lock_init(&store->close_lock);
    kvk_condition_init(&store->ask_wake);
    kvk_condition_init(&store->send_wake);
    cache->remote = store; /* from here on destroying undoes what was done */
    enum kvk_status status =
        kvk_fleet_key_read(config->remote.key_file, "remote.key_file", store->key, error);
    if (status == KVK_OK) {
        status = tables_create(store, error);
    }
    if (status == KVK_OK) {
        status = client_open(store, error);
    }
    return status == KVK_OK ? fleet_open(store, error) : status;
}

enum kvk_status kvk_remote_store_start(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_remote_store *store = cache->remote;
    sigset_t all;
    sigset_t before;
    int failed = 0;
    if (store == NULL) {
        return KVK_OK;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (store->asker_count < KVK_REMOTE_ASKERS && failed == 0) {
        failed =
            pthread_create(&store->askers[store->asker_count], NULL, kvk_remote_asker_main, store);
        store->asker_count += failed == 0 ? 1 : 0;
    }
    if (failed == 0) {
        failed = pthread_create(&store->sender, NULL, kvk_remote_sender_main, store);
        store->sender_running = failed == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0 ? kvk_fleet_view_start(cache, error)
                       : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                                  "no thread for the remote store");
}

/* ---- Closing ---- */

/* No space is followed any more. Waits for invalidations of others that are under way. */
static void members_leave(struct kvk_cache *cache)
{
    for (;;) {
        struct kvk_fleet_member *fleet = NULL;
        kvk_lock(&cache->lock);
        for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
            if (space->remote != NULL && space->remote->fleet != NULL) {
                fleet = space->remote->fleet;
                space->remote->fleet = NULL;
                break;
            }
        }
        kvk_unlock(&cache->lock);
        if (fleet == NULL) {
            return;
        }
        kvk_fleet_leave(fleet);
    }
}

void kvk_remote_store_stop(struct kvk_cache *cache)
{
    struct kvk_remote_store *store = cache->remote;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (store == NULL) {
        return;
    }
    kvk_lock(&cache->lock);
    store->stopping = true;
    pthread_cond_broadcast(&store->ask_wake);
    pthread_cond_broadcast(&store->send_wake);
    kvk_unlock(&cache->lock);
    kvk_fleet_view_stop(cache);
    members_leave(cache);
    kvk_lock(&cache->lock);
    struct kvk_fleet *fleet = store->fleet;
    store->fleet = NULL;
    kvk_unlock(&cache->lock);
    kvk_fleet_close(fleet);
    kvk_lock(&store->close_lock);
    store->closing = true;
    kvk_unlock(&store->close_lock);
    kvk_remote_close(store->client); /* whoever waits for a batch has it now */
    while (store->asker_count > 0) {
        pthread_join(store->askers[--store->asker_count], NULL);
    }
    if (store->sender_running) {
        pthread_join(store->sender, NULL);
        store->sender_running = false;
    }
    store->client = NULL;
}

void kvk_remote_store_destroy(struct kvk_cache *cache)
{
    struct kvk_remote_store *store = cache->remote;
    if (store == NULL) {
        return;
    }
    KVK_ASSERT(store->asker_count == 0 && !store->sender_running && store->client == NULL);
    kvk_remote_asks_destroy(store);
    kvk_pages_destroy_sparse(store->flags, cache->config->blocks);
    kvk_pages_destroy_sparse(store->links, (size_t)cache->config->blocks * sizeof(*store->links));
    free(store->queue);
    free(store->budgets);
    free(store->buffer);
    kvk_secret_wipe(store->key, sizeof(store->key));
    pthread_cond_destroy(&store->ask_wake);
    pthread_cond_destroy(&store->send_wake);
    kvk_lock_finish(&store->close_lock);
    free(store);
    cache->remote = NULL;
}

/* ---- Spaces ---- */

static enum kvk_status groups_init(const struct kvk_cache *cache, const struct kvk_space *space,
                                   struct kvk_remote_member *member, struct kvk_error *error)
{
    const struct kvk_remote_config *config = &cache->config->remote;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        const struct kvk_geometry *geometry = &kvk_remote_form(group)->geometry;
        uint8_t shape[KVK_REMOTE_KEY_SIZE];
        uint64_t limit = config->batch_bytes * LARGE_BLOCKS;
        if (kvk_remote_stored_bytes(group) > limit) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_LIMIT, "remote.batch_bytes",
                                  kvk_remote_stored_bytes(group), limit,
                                  "a block of %llu bytes is more than %d times remote.batch_bytes",
                                  (unsigned long long)group->block_bytes, LARGE_BLOCKS);
        }
        enum kvk_status status = kvk_fleet_shape(geometry, shape, error);
        if (status != KVK_OK) {
            return status;
        }
        const struct kvk_remote_space_options options = {
            .secret = member->identity.secret,
            .space = member->identity.digest,
            .shape = shape,
            .group = g,
            .format = (uint32_t)geometry->format_k | (uint32_t)geometry->format_v << 8,
            .block_bytes = kvk_remote_stored_bytes(group),
            .encrypt = config->encrypt,
        };
        status = kvk_remote_space_init(&member->groups[g], &options, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

static void member_destroy(struct kvk_remote_member *member)
{
    if (member == NULL) {
        return;
    }
    if (member->fleet != NULL) {
        kvk_fleet_leave(member->fleet);
    }
    kvk_fleet_chain_destroy(member->chain);
    kvk_fleet_identity_finish(&member->identity);
    for (int g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        kvk_remote_space_finish(&member->groups[g]);
    }
    free(member);
}

static enum kvk_status member_create(struct kvk_cache *cache, const struct kvk_space *space,
                                     struct kvk_remote_member **result, struct kvk_error *error)
{
    struct kvk_remote_member *member = calloc(1, sizeof(*member));
    if (member == NULL) {
        return fail_memory(error);
    }
    const struct kvk_geometry *geometries[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < space->group_count; g++) {
        geometries[g] = &space->groups[g]->geometry;
    }
    const struct kvk_fleet_identity_options options = {
        .key = cache->remote->key,
        .tenant = space->tenant->name,
        .identity = space->identity,
        .identity_size = space->identity_size,
        .geometries = geometries,
        .group_count = space->group_count,
        .constant_hash = cache->constant_hash,
    };
    member->space_id = space->id;
    enum kvk_status status = kvk_fleet_identity_init(&member->identity, &options, error);
    if (status == KVK_OK) {
        status = groups_init(cache, space, member, error);
    }
    if (status == KVK_OK) {
        status = kvk_fleet_chain_create(&member->identity, &member->chain, error);
    }
    if (status == KVK_OK) {
        status =
            kvk_fleet_join(cache->remote->fleet, &member->identity, member, &member->fleet, error);
    }
    if (status != KVK_OK) {
        member_destroy(member);
        return status;
    }
    *result = member;
    return KVK_OK;
}

void kvk_remote_space_join_drops(struct kvk_cache *cache, struct kvk_space *space)
{
    struct kvk_error error;
    struct kvk_remote_member *member = NULL;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->remote == NULL || cache->remote->stopping) {
        return;
    }
    space->reference_count++;
    space->remote_joins = true;
    kvk_unlock(&cache->lock);
    if (member_create(cache, space, &member, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "space_not_shared", "space=%llu text=\"%s\"",
                (unsigned long long)space->id, error.text);
    }
    kvk_lock(&cache->lock);
    space->reference_count--;
    space->remote_joins = false;
    space->remote = member;
    pthread_cond_broadcast(&cache->changed);
}

void kvk_remote_space_destroy_unlocked(struct kvk_cache *cache, struct kvk_space *space)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    (void)cache;
    member_destroy(space->remote);
    space->remote = NULL;
}

struct kvk_remote_member *kvk_remote_member_of(const struct kvk_cache *cache,
                                               const struct kvk_space *space)
{
    KVK_ASSERT(kvk_lock_held((struct kvk_lock *)(uintptr_t)&cache->lock));
    bool shares = cache->remote != NULL && !cache->remote->stopping && space->remote != NULL &&
                  space->remote->fleet != NULL && kvk_space_shares(space);
    return shares ? space->remote : NULL;
}

void kvk_remote_block_gone(struct kvk_cache *cache, uint32_t block)
{
    if (cache->remote != NULL) {
        cache->remote->flags[block] = 0;
    }
}

/* ---- Batches ---- */

struct waiter {
    struct kvk_lock lock;
    pthread_cond_t done;
    uint32_t left;
};

static void batch_done(void *context, struct kvk_remote_batch *batch)
{
    struct waiter *waiter = context;
    (void)batch;
    kvk_lock(&waiter->lock);
    if (--waiter->left == 0) {
        pthread_cond_signal(&waiter->done);
    }
    kvk_unlock(&waiter->lock);
}

static bool submit(struct kvk_remote_store *store, struct kvk_remote_batch *batch)
{
    struct kvk_error error;
    kvk_lock(&store->close_lock);
    bool taken = !store->closing && kvk_remote_submit(store->client, batch, &error) == KVK_OK;
    kvk_unlock(&store->close_lock);
    return taken;
}

void kvk_remote_run(struct kvk_remote_store *store, struct kvk_remote_batch *batches,
                    uint32_t count, uint64_t timeout_ms)
{
    struct waiter waiter = {.left = count};
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock_init(&waiter.lock);
    kvk_condition_init(&waiter.done);
    uint64_t deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + timeout_ms * KVK_NS_PER_MS;
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_remote_batch *batch = &batches[i];
        batch->done = batch_done;
        batch->context = &waiter;
        batch->deadline_ns = deadline_ns;
        if (!submit(store, batch)) {
            for (uint32_t b = 0; b < batch->block_count; b++) {
                batch->blocks[b].result = KVK_REMOTE_UNAVAILABLE;
            }
            batch->run_count = 0;
            batch->hit_count = 0;
            batch_done(&waiter, batch);
        }
    }
    kvk_lock(&waiter.lock);
    while (waiter.left > 0) {
        (void)kvk_condition_wait(&waiter.done, &waiter.lock, UINT64_MAX);
    }
    kvk_unlock(&waiter.lock);
    pthread_cond_destroy(&waiter.done);
    kvk_lock_finish(&waiter.lock);
}

static void client_health(struct kvk_remote_store *store, struct kvk_remote_health *health)
{
    *health = (struct kvk_remote_health){.state = KVK_REMOTE_AWAY};
    kvk_lock(&store->close_lock);
    if (!store->closing) {
        kvk_remote_health(store->client, health);
    }
    kvk_unlock(&store->close_lock);
}

uint64_t kvk_remote_fetch_ns(struct kvk_remote_store *store, uint64_t bytes)
{
    struct kvk_remote_health health;
    client_health(store, &health);
    uint64_t rate = health.fetch_rate != 0 ? health.fetch_rate : KVK_REMOTE_RATE_UNKNOWN;
    uint64_t trip_ns = health.round_trip_ns != 0 ? health.round_trip_ns : KVK_REMOTE_TRIP_UNKNOWN;
    return trip_ns + (uint64_t)((double)bytes / (double)rate * (double)KVK_NS_PER_SECOND);
}

/* ---- Invalidation ---- */

static void raise_ended(struct kvk_remote_store *store)
{
    KVK_ASSERT(store->raising);
    store->raising = false;
    pthread_cond_broadcast(&store->cache->changed);
}

/* How many spaces' were ended without the store having it. */
static uint32_t raises_end_unlocked(struct kvk_space *const *spaces, uint32_t count,
                                    uint64_t deadline_ns)
{
    uint32_t pending = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_error error;
        struct kvk_remote_member *member = spaces[i]->remote;
        if (member != NULL && member->fleet != NULL &&
            kvk_fleet_raise_end(member->fleet, deadline_ns, &error) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "invalidation_not_in_store", "space=%llu text=\"%s\"",
                    (unsigned long long)spaces[i]->id, error.text);
            pending++;
        }
    }
    return pending;
}

/* One that is found already, but not followed yet, would be invalidated here alone. */
static bool any_joins(struct kvk_space *const *spaces, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (spaces[i]->remote_joins) {
            return true;
        }
    }
    return false;
}

enum kvk_status kvk_remote_raise_begin_drops(struct kvk_cache *cache,
                                             struct kvk_space *const *spaces, uint32_t count,
                                             struct kvk_error *error)
{
    struct kvk_remote_store *store = cache->remote;
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (store == NULL) {
        return KVK_OK;
    }
    while (store->raising || any_joins(spaces, count)) {
        (void)kvk_condition_wait(&cache->changed, &cache->lock,
                                 kvk_clock_now(kvk_clock_monotonic()) + RAISE_TICK_NS);
    }
    store->raising = true;
    kvk_unlock(&cache->lock);
    uint32_t begun = 0;
    for (; begun < count && status == KVK_OK; begun++) {
        struct kvk_remote_member *member = spaces[begun]->remote;
        if (member != NULL && member->fleet != NULL) {
            status = kvk_fleet_raise_begin(member->fleet, error);
        }
    }
    if (status != KVK_OK) {
        (void)raises_end_unlocked(spaces, begun - 1, 0);
    }
    kvk_lock(&cache->lock);
    if (status != KVK_OK) {
        raise_ended(store);
    }
    return status;
}

uint32_t kvk_remote_raise_end_unlocked(struct kvk_cache *cache, struct kvk_space *const *spaces,
                                       uint32_t count, uint64_t deadline_ns)
{
    struct kvk_remote_store *store = cache->remote;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (store == NULL) {
        return 0;
    }
    uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + RAISE_MS * KVK_NS_PER_MS;
    until_ns = deadline_ns < until_ns ? deadline_ns : until_ns;
    uint32_t pending = raises_end_unlocked(spaces, count, until_ns);
    uint64_t known_ns =
        kvk_clock_now(kvk_clock_monotonic()) + cache->config->remote.generation_ms * KVK_NS_PER_MS;
    known_ns = known_ns < deadline_ns ? known_ns : deadline_ns;
    bool shares = false;
    kvk_lock(&cache->lock);
    raise_ended(store);
    for (uint32_t i = 0; i < count; i++) {
        shares = shares || spaces[i]->remote != NULL;
    }
    /* No node uses the number of before for longer than that; one that reaches the store has heard
     * of the new one. */
    while (shares && pending < count &&
           kvk_condition_wait(&cache->changed, &cache->lock, known_ns)) {
    }
    kvk_unlock(&cache->lock);
    return pending;
}

/* ---- Figures ---- */

void kvk_remote_report(struct kvk_cache *cache, struct kvk_remote_report *report)
{
    struct kvk_remote_store *store = cache->remote;
    *report = (struct kvk_remote_report){.present = store != NULL};
    if (store == NULL) {
        return;
    }
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    client_health(store, &report->health);
    if (store->fleet != NULL) {
        kvk_fleet_counters(store->fleet, &report->fleet);
    }
    report->stats = store->stats;
    report->asks_waiting = store->asks_waiting;
    report->send_waiting = store->queue_count;
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        uint64_t number;
        if (space->remote != NULL && space->remote->fleet != NULL) {
            report->spaces++;
            report->spaces_out += kvk_fleet_generation(space->remote->fleet, &number) ? 0 : 1;
        }
    }
}
