/*
 * The remote store from outside: options, submissions, health, and the thread that resolves names.
 */
#include "hosttier/remote.h"

#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "hosttier/remote_internal.h"

#define DEFAULT_PREFIX "kvkeep:"
#define PREFIX_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:._-"

/* ---- Options ---- */

static void set_usual(uint64_t *value, uint64_t usual)
{
    *value = *value == 0 ? usual : *value;
}

struct number_rule {
    const char *field;
    uint32_t *value;
    uint32_t usual, limit;
};

static enum kvk_status numbers_check(struct kvk_remote_options *options, struct kvk_error *error)
{
    const struct number_rule rules[] = {
        {"thread_count", &options->thread_count, 1, KVK_REMOTE_THREADS_MAX},
        {"connection_count", &options->connection_count, 2, KVK_REMOTE_CONNECTIONS_MAX},
        {"pipeline_depth", &options->pipeline_depth, 32, 1024},
        {"batch_count_max", &options->batch_count_max, 1024, 65536},
        {"request_count_max", &options->request_count_max, 4096, 1U << 20},
        {"breaker_failures", &options->breaker_failures, 2, 1000},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        *rules[i].value = *rules[i].value == 0 ? rules[i].usual : *rules[i].value;
        if (*rules[i].value > rules[i].limit) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, rules[i].field,
                                  *rules[i].value, rules[i].limit, "%s must be at most %u",
                                  rules[i].field, rules[i].limit);
        }
    }
    if (options->request_count_max < 8) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "request_count_max",
                              options->request_count_max, 8,
                              "request_count_max must be at least 8");
    }
    set_usual(&options->bytes_max, UINT64_C(1) << 30);
    set_usual(&options->node_timeout_ms, 1000);
    set_usual(&options->breaker_retry_ms, 100);
    set_usual(&options->breaker_retry_max_ms, 2000);
    set_usual(&options->refresh_ms, 5000);
    return KVK_OK;
}

static enum kvk_status seeds_read(struct kvk_remote *remote, struct kvk_error *error)
{
    const char *at = remote->options.seeds;
    while (*at != '\0') {
        size_t size = strcspn(at, ",");
        if (remote->seed_count == KVK_REMOTE_SEEDS_MAX) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "seeds",
                                  KVK_REMOTE_SEEDS_MAX + 1, KVK_REMOTE_SEEDS_MAX,
                                  "seeds must be at most %u", KVK_REMOTE_SEEDS_MAX);
        }
        if (!kvk_remote_address_read(at, size, "", &remote->seeds[remote->seed_count])) {
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "seeds",
                            "seeds must be host:port, separated by commas; number %u is not",
                            remote->seed_count + 1);
        }
        remote->seed_count++;
        at += size + (at[size] == ',');
    }
    if (remote->seed_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "seeds",
                        "seeds must name at least one node of the store");
    }
    return KVK_OK;
}

static enum kvk_status texts_copy(struct kvk_remote *remote, struct kvk_error *error)
{
    struct kvk_remote_options *options = &remote->options;
    const char **texts[] = {&options->seeds,           &options->user,        &options->password,
                            &options->key_prefix,      &options->tls_ca_file, &options->tls_name,
                            &options->tls_certificate, &options->tls_key};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        remote->texts[i] = strdup(*texts[i] != NULL ? *texts[i] : "");
        if (remote->texts[i] == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
        }
        *texts[i] = remote->texts[i];
    }
    if (options->key_prefix[0] == '\0') {
        options->key_prefix = DEFAULT_PREFIX;
    }
    size_t size = strlen(options->key_prefix);
    if (size > KVK_REMOTE_PREFIX_MAX || strspn(options->key_prefix, PREFIX_CHARACTERS) != size) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "key_prefix", size,
                              KVK_REMOTE_PREFIX_MAX,
                              "key_prefix must be 1 to %u of the characters a-z A-Z 0-9 : . _ -",
                              (unsigned)KVK_REMOTE_PREFIX_MAX);
    }
    return KVK_OK;
}

/* ---- Names of hosts: a lookup may take seconds, so no lane makes one ---- */

void kvk_remote_resolve(struct kvk_remote *remote, struct kvk_remote_node *node)
{
    struct kvk_remote_resolver *resolver = &remote->resolver;
    kvk_lock(&resolver->lock);
    if (resolver->count < KVK_REMOTE_SEEDS_MAX && !resolver->stopping) {
        resolver->queue[resolver->count++] = node;
        node->resolving = true;
        (void)pthread_cond_signal(&resolver->work);
    }
    kvk_unlock(&resolver->lock);
}

/* Of the addresses of a name, whose turn it is: a server may listen to one family alone. */
static const struct addrinfo *address_of_turn(const struct addrinfo *found, uint32_t turn)
{
    uint32_t count = 0;
    for (const struct addrinfo *at = found; at != NULL; at = at->ai_next) {
        count++;
    }
    for (turn = count > 0 ? turn % count : 0; turn > 0; turn--) {
        found = found->ai_next;
    }
    return found;
}

static void resolve(struct kvk_remote_resolver *resolver, struct kvk_remote_node *node)
{
    char port[8];
    (void)snprintf(port, sizeof(port), "%u", node->address.port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    bool known = getaddrinfo(node->address.host, port, &hints, &found) == 0;
    const struct addrinfo *chosen = known ? address_of_turn(found, node->address_turn) : NULL;
    known = chosen != NULL && chosen->ai_addrlen <= sizeof(node->socket_address);
    kvk_lock(&resolver->lock);
    if (known) {
        memcpy(&node->socket_address, chosen->ai_addr, chosen->ai_addrlen);
    }
    node->resolving = false;
    node->resolve_failed = !known;
    node->socket_address_size = known ? chosen->ai_addrlen : 0;
    kvk_unlock(&resolver->lock);
    if (found != NULL) {
        freeaddrinfo(found);
    }
    kvk_remote_lane_wake(node->lane);
}

static void *resolver_main(void *context)
{
    struct kvk_remote *remote = context;
    struct kvk_remote_resolver *resolver = &remote->resolver;
    kvk_lock(&resolver->lock);
    while (!resolver->stopping) {
        if (resolver->count == 0) {
            (void)kvk_condition_wait(&resolver->work, &resolver->lock, UINT64_MAX);
            continue;
        }
        struct kvk_remote_node *node = resolver->queue[--resolver->count];
        kvk_unlock(&resolver->lock);
        resolve(resolver, node);
        kvk_lock(&resolver->lock);
    }
    kvk_unlock(&resolver->lock);
    return NULL;
}

static enum kvk_status resolver_start(struct kvk_remote *remote, struct kvk_error *error)
{
    kvk_lock_init(&remote->resolver.lock);
    kvk_condition_init(&remote->resolver.work);
    int failed = pthread_create(&remote->resolver.thread, NULL, resolver_main, remote);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                        "a thread of the remote store could not be started: %s", strerror(failed));
    }
    remote->resolver.started = true;
    return KVK_OK;
}

static void resolver_stop(struct kvk_remote *remote)
{
    struct kvk_remote_resolver *resolver = &remote->resolver;
    if (!resolver->started) {
        return;
    }
    kvk_lock(&resolver->lock);
    resolver->stopping = true;
    (void)pthread_cond_signal(&resolver->work);
    kvk_unlock(&resolver->lock);
    (void)pthread_join(resolver->thread, NULL);
}

/* ---- Life ---- */

enum kvk_status kvk_remote_open(const struct kvk_remote_options *options,
                                struct kvk_remote **remote, struct kvk_error *error)
{
    struct kvk_remote *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
    }
    made->options = *options;
    kvk_lock_init(&made->reason_lock);
    for (uint32_t i = 0; i < KVK_REMOTE_THREADS_MAX; i++) {
        made->lanes[i].epoll_fd = -1;
        made->lanes[i].wake_fd = -1;
    }
    enum kvk_status status = texts_copy(made, error);
    if (status == KVK_OK) {
        status = numbers_check(&made->options, error);
    }
    if (status == KVK_OK) {
        status = seeds_read(made, error);
    }
    if (status == KVK_OK && options->tls) {
        status = kvk_remote_tls_create(&made->options, &made->tls, error);
    }
    if (status == KVK_OK) {
        status = resolver_start(made, error);
    }
    for (uint32_t i = 0; status == KVK_OK && i < made->options.thread_count; i++) {
        made->lanes[i].remote = made;
        made->lanes[i].index = i;
        status = kvk_remote_lane_start(&made->lanes[i], error);
    }
    if (status != KVK_OK) {
        kvk_remote_close(made);
        return status;
    }
    *remote = made;
    return KVK_OK;
}

static void lane_free(struct kvk_remote_lane *lane)
{
    for (uint32_t i = 0; i < lane->node_count; i++) {
        for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
            kvk_remote_output_free(&lane->nodes[i]->connections[k]);
        }
        free(lane->nodes[i]);
    }
    free(lane->requests);
    free(lane->input);
    kvk_remote_crypt_destroy(lane->crypt);
    if (lane->epoll_fd >= 0) {
        (void)close(lane->epoll_fd);
    }
    if (lane->wake_fd >= 0) {
        (void)close(lane->wake_fd);
    }
    if (lane->remote != NULL) {
        kvk_lock_finish(&lane->lock);
    }
}

void kvk_remote_close(struct kvk_remote *remote)
{
    if (remote == NULL) {
        return;
    }
    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t i = 0; i < KVK_REMOTE_THREADS_MAX; i++) {
        kvk_remote_lane_stop(&remote->lanes[i]);
    }
    resolver_stop(remote);
    for (uint32_t i = 0; i < KVK_REMOTE_THREADS_MAX; i++) {
        lane_free(&remote->lanes[i]);
    }
    SSL_CTX_free(remote->tls);
    for (size_t i = 0; i < sizeof(remote->texts) / sizeof(remote->texts[0]); i++) {
        if (remote->texts[i] != NULL) {
            kvk_secret_wipe(remote->texts[i], strlen(remote->texts[i]));
        }
        free(remote->texts[i]);
    }
    kvk_lock_finish(&remote->reason_lock);
    free(remote);
}

/* ---- Batches ---- */

static void batch_begin(struct kvk_remote_batch *batch, uint64_t bytes)
{
    batch->next = NULL;
    batch->previous = NULL;
    batch->begun_ns = kvk_clock_now(kvk_clock_monotonic());
    batch->bytes = bytes;
    batch->next_block = 0;
    batch->next_part = 0;
    batch->gap = UINT32_MAX;
    batch->request_left = (uint64_t)batch->block_count * batch->space->part_count;
    batch->want_made = false;
    for (uint32_t i = 0; i < batch->block_count; i++) {
        batch->blocks[i].result = KVK_REMOTE_PENDING;
        batch->blocks[i].part_left = batch->space->part_count;
    }
}

static enum kvk_remote_state lane_state(struct kvk_remote *remote, uint32_t lane)
{
    return (enum kvk_remote_state)atomic_load(&remote->seen[lane].state);
}

enum kvk_status kvk_remote_submit(struct kvk_remote *remote, struct kvk_remote_batch *batch,
                                  struct kvk_error *error)
{
    KVK_ASSERT(batch->block_count > 0 && batch->block_count <= KVK_REMOTE_BLOCKS_MAX);
    KVK_ASSERT((unsigned)batch->operation < KVK_REMOTE_OPERATION_COUNT && batch->done != NULL);
    KVK_ASSERT(batch->operation < KVK_REMOTE_APPEND || batch->space->part_count == 1);
    const struct kvk_remote_options *options = &remote->options;
    uint32_t turn = atomic_fetch_add_explicit(&remote->next_lane, 1, memory_order_relaxed);
    uint32_t index = turn % options->thread_count;
    struct kvk_remote_lane *lane = &remote->lanes[index];

    if (lane_state(remote, index) == KVK_REMOTE_AWAY) {
        KVK_REMOTE_COUNT(remote, refused, 1);
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                        "no node of the remote store is in reach");
    }
    bool moves = batch->operation == KVK_REMOTE_FETCH || batch->operation == KVK_REMOTE_STORE;
    uint64_t bytes = moves ? batch->block_count * batch->space->block_bytes : 0;
    uint64_t count = atomic_fetch_add(&remote->batches_now, 1) + 1;
    uint64_t sum = atomic_fetch_add(&remote->bytes_now, bytes) + bytes;
    if (count > options->batch_count_max || sum > options->bytes_max) {
        (void)atomic_fetch_sub(&remote->batches_now, 1);
        (void)atomic_fetch_sub(&remote->bytes_now, bytes);
        KVK_REMOTE_COUNT(remote, refused, 1);
        bool full = count > options->batch_count_max;
        const char *field = full ? "batch_count_max" : "bytes_max";
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_QUEUE_FULL, field, full ? count : sum,
                              full ? options->batch_count_max : options->bytes_max,
                              "the remote store has enough to do (%s)", field);
    }
    batch_begin(batch, bytes);
    kvk_lock(&lane->lock);
    bool first = lane->submitted_first == NULL;
    *(first ? &lane->submitted_first : &lane->submitted_last->next) = batch;
    lane->submitted_last = batch;
    kvk_unlock(&lane->lock);
    if (first) {
        kvk_remote_lane_wake(lane);
    }
    return KVK_OK;
}

/* ---- Health ---- */

void kvk_remote_say(struct kvk_remote *remote, const char *format, ...)
{
    char text[sizeof(remote->reason)];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    kvk_lock(&remote->reason_lock);
    memcpy(remote->reason, text, sizeof(text));
    kvk_unlock(&remote->reason_lock);
}

void kvk_remote_health(struct kvk_remote *remote, struct kvk_remote_health *health)
{
    memset(health, 0, sizeof(*health));
    health->state = KVK_REMOTE_GOOD;
    for (uint32_t i = 0; i < remote->options.thread_count; i++) {
        enum kvk_remote_state state = lane_state(remote, i);
        uint32_t nodes = atomic_load(&remote->seen[i].node_count);
        uint32_t away = atomic_load(&remote->seen[i].node_away_count);
        uint32_t slots = atomic_load(&remote->seen[i].slot_away_count);
        health->state = state < health->state ? state : health->state;
        health->node_count = nodes > health->node_count ? nodes : health->node_count;
        health->node_away_count = away > health->node_away_count ? away : health->node_away_count;
        health->slot_away_count = slots > health->slot_away_count ? slots : health->slot_away_count;
        health->cluster = health->cluster || atomic_load(&remote->seen[i].cluster) != 0;
    }
    kvk_lock(&remote->reason_lock);
    memcpy(health->reason, remote->reason, sizeof(health->reason));
    kvk_unlock(&remote->reason_lock);
    health->batches_now = atomic_load(&remote->batches_now);
    health->bytes_now = atomic_load(&remote->bytes_now);
    health->fetch_rate = atomic_load(&remote->rate[KVK_REMOTE_FETCH]);
    health->store_rate = atomic_load(&remote->rate[KVK_REMOTE_STORE]);
    health->round_trip_ns = atomic_load(&remote->round_trip_ns);
    uint64_t counters[KVK_REMOTE_COUNTER_COUNT];
    for (size_t i = 0; i < KVK_REMOTE_COUNTER_COUNT; i++) {
        counters[i] = atomic_load_explicit(&remote->counters[i], memory_order_relaxed);
    }
    _Static_assert(sizeof(counters) == sizeof(health->counters), "all counters are numbers");
    memcpy(&health->counters, counters, sizeof(counters));
}
