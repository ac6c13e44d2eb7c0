/*
 * The nodes of a cluster as a lane sees them: which there are, which slots they have, whether they
 * are in reach. A node that fails some times in a row has its breaker open: what would go there
 * ends at once, and only a greeting now and then finds out whether it is back.
 */
#include "hosttier/remote_internal.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define ASKED_NS (10 * KVK_NS_PER_SECOND) /* so long a target of ASK keeps its connection */
#define MAP_PAUSE_NS (50 * KVK_NS_PER_MS) /* between two looks at the slots, at least */
#define MAP_TROUBLE_NS (200 * KVK_NS_PER_MS)
#define SEEN_NS (20 * KVK_NS_PER_MS)

/* ---- Which there are ---- */

/* A number needs no resolver. */
static void address_of_number(struct kvk_remote_node *node)
{
    struct sockaddr_in *four = (struct sockaddr_in *)&node->socket_address;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)&node->socket_address;
    memset(&node->socket_address, 0, sizeof(node->socket_address));
    node->socket_address_size = 0;
    if (inet_pton(AF_INET, node->address.host, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(node->address.port);
        node->socket_address_size = sizeof(*four);
    } else if (inet_pton(AF_INET6, node->address.host, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(node->address.port);
        node->socket_address_size = sizeof(*six);
    }
}

static bool node_idle_queue(const struct kvk_remote_node *node)
{
    return node->queue.count == 0 && node->urgent.count == 0;
}

static bool node_idle(const struct kvk_remote_node *node)
{
    for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
        if (node->connections[i].state != KVK_REMOTE_CLOSED) {
            return false;
        }
    }
    return node_idle_queue(node);
}

static bool node_resolving(struct kvk_remote_node *node)
{
    struct kvk_lock *lock = &node->lane->remote->resolver.lock;
    kvk_lock(lock);
    bool resolving = node->resolving;
    kvk_unlock(lock);
    return resolving;
}

/* Room for another node: a new one, or one that nobody needs any more. */
static struct kvk_remote_node *node_room(struct kvk_remote_lane *lane)
{
    if (lane->node_count < KVK_REMOTE_NODES_MAX) {
        struct kvk_remote_node *node = calloc(1, sizeof(*node));
        if (node != NULL) {
            lane->nodes[lane->node_count++] = node;
        }
        return node;
    }
    for (uint32_t i = 0; i < lane->node_count; i++) {
        struct kvk_remote_node *node = lane->nodes[i];
        if (!node->seed && !node->in_map && node_idle(node) && !node_resolving(node)) {
            for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
                kvk_remote_output_free(&node->connections[k]);
            }
            memset(node, 0, sizeof(*node));
            return node;
        }
    }
    return NULL;
}

struct kvk_remote_node *kvk_remote_node_find(struct kvk_remote_lane *lane,
                                             const struct kvk_remote_address *address)
{
    for (uint32_t i = 0; i < lane->node_count; i++) {
        struct kvk_remote_node *node = lane->nodes[i];
        if (node->address.port == address->port && strcmp(node->address.host, address->host) == 0) {
            return node;
        }
    }
    struct kvk_remote_node *node = node_room(lane);
    if (node != NULL) {
        node->lane = lane;
        node->address = *address;
        address_of_number(node);
        for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
            node->connections[i].node = node;
            node->connections[i].fd = -1;
        }
    }
    return node;
}

static uint16_t node_index(const struct kvk_remote_node *node)
{
    for (uint32_t i = 0; i < node->lane->node_count; i++) {
        if (node->lane->nodes[i] == node) {
            return (uint16_t)i;
        }
    }
    KVK_UNREACHABLE();
}

/* ---- The breaker ---- */

void kvk_remote_node_empty(struct kvk_remote_node *node, bool repeat)
{
    struct kvk_remote_list lists[2] = {kvk_remote_list_take(&node->urgent),
                                       kvk_remote_list_take(&node->queue)};
    for (int i = 0; i < 2; i++) {
        struct kvk_remote_request *request = NULL;
        while ((request = kvk_remote_list_pop(&lists[i])) != NULL) {
            if (repeat) {
                kvk_remote_request_repeat(node->lane, request, 0);
            } else {
                kvk_remote_request_done(node->lane, request, KVK_REMOTE_UNAVAILABLE);
            }
        }
    }
}

void kvk_remote_node_failed(struct kvk_remote_node *node, const char *reason)
{
    struct kvk_remote_lane *lane = node->lane;
    const struct kvk_remote_options *options = &lane->remote->options;

    kvk_remote_say(lane->remote, "%s:%u: %s", node->address.host, node->address.port, reason);
    node->failures++;
    lane->map_wanted = true;
    if (node->open) {
        node->pause_ms = node->pause_ms * 2 < options->breaker_retry_max_ms
                             ? node->pause_ms * 2
                             : options->breaker_retry_max_ms;
    } else if (node->failures >= options->breaker_failures) {
        node->open = true;
        node->pause_ms = options->breaker_retry_ms;
        KVK_REMOTE_COUNT(lane->remote, breaker_openings, 1);
    }
    if (node->open) {
        node->retry_ns = lane->now_ns + node->pause_ms * KVK_NS_PER_MS;
        for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
            kvk_remote_connection_close(&node->connections[i], false, "");
        }
        node->address_turn++;
        address_of_number(node); /* a name may mean another machine by now, or have more than one */
        kvk_remote_node_empty(node, false);
    }
}

void kvk_remote_node_well(struct kvk_remote_node *node)
{
    node->failures = 0;
    node->open = false;
}

bool kvk_remote_node_ready(const struct kvk_remote_node *node)
{
    for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
        if (node->connections[i].state == KVK_REMOTE_READY) {
            return !node->open;
        }
    }
    return false;
}

/* ---- Sending ---- */

void kvk_remote_node_push(struct kvk_remote_node *node, struct kvk_remote_request *request)
{
    enum kvk_remote_operation operation = request->batch->operation;
    bool urgent = kvk_remote_is_small(operation);
    kvk_remote_list_push(urgent ? &node->urgent : &node->queue, request);
}

/* The least busy connection that takes a request, or NULL. */
static struct kvk_remote_connection *connection_pick(struct kvk_remote_node *node)
{
    struct kvk_remote_connection *best = NULL;
    for (uint32_t i = 0; i < node->lane->remote->options.connection_count; i++) {
        struct kvk_remote_connection *connection = &node->connections[i];
        if (kvk_remote_connection_takes(connection) &&
            (best == NULL || connection->sent.count < best->sent.count)) {
            best = connection;
        }
    }
    return best;
}

void kvk_remote_node_pump(struct kvk_remote_node *node)
{
    while (node->urgent.count + node->queue.count > 0) {
        struct kvk_remote_connection *connection = connection_pick(node);
        if (connection == NULL) {
            break;
        }
        struct kvk_remote_request *request =
            kvk_remote_list_pop(node->urgent.count > 0 ? &node->urgent : &node->queue);
        if (request->batch == NULL) {
            kvk_remote_request_give(node->lane, request);
        } else if (!kvk_remote_connection_send(connection, request)) {
            kvk_remote_request_done(node->lane, request, KVK_REMOTE_UNAVAILABLE);
        } else if (kvk_remote_output_waits(connection, KVK_REMOTE_OUTPUT_ENOUGH)) {
            kvk_remote_connection_flush(connection);
        }
    }
    for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
        struct kvk_remote_connection *connection = &node->connections[i];
        if (kvk_remote_output_waits(connection, 1)) {
            kvk_remote_connection_flush(connection);
        }
    }
}

/* ---- The map of slots ---- */

static bool range_read(const struct kvk_remote_reply *range, const char *self, uint32_t *first,
                       uint32_t *last, struct kvk_remote_address *address)
{
    if (range->type != REDIS_REPLY_ARRAY || range->element_count < 3 ||
        range->elements[0]->type != REDIS_REPLY_INTEGER ||
        range->elements[1]->type != REDIS_REPLY_INTEGER) {
        return false;
    }
    long long from = range->elements[0]->integer;
    long long to = range->elements[1]->integer;
    const struct kvk_remote_reply *master = range->elements[2];
    if (from < 0 || to < from || to >= (long long)KVK_REMOTE_SLOT_COUNT ||
        master->type != REDIS_REPLY_ARRAY || master->element_count < 2 ||
        master->elements[1]->type != REDIS_REPLY_INTEGER) {
        return false;
    }
    const struct kvk_remote_reply *host = master->elements[0];
    const char *name = host->type == REDIS_REPLY_STRING ? host->text : "";
    char text[KVK_REMOTE_HOST_SIZE + 16];
    int size = snprintf(text, sizeof(text), "%s:%lld", name, master->elements[1]->integer);
    *first = (uint32_t)from;
    *last = (uint32_t)to;
    return size > 0 && (size_t)size < sizeof(text) &&
           kvk_remote_address_read(text, (size_t)size, self, address);
}

static void map_all_to(struct kvk_remote_lane *lane, struct kvk_remote_node *node)
{
    uint16_t index = node_index(node);
    for (uint32_t i = 0; i < lane->node_count; i++) {
        lane->nodes[i]->in_map = i == index;
    }
    for (uint32_t slot = 0; slot < KVK_REMOTE_SLOT_COUNT; slot++) {
        lane->slot_node[slot] = index;
    }
    lane->map_known = true;
    lane->single = true;
}

/* An error instead of a map: one server, or one that does not tell; then MOVED tells. */
static void map_refused(struct kvk_remote_lane *lane, struct kvk_remote_node *from,
                        const char *text)
{
    bool passing = strncmp(text, "LOADING", 7) == 0 || strncmp(text, "MASTERDOWN", 10) == 0 ||
                   strncmp(text, "CLUSTERDOWN", 11) == 0;
    bool single = strstr(text, "cluster support disabled") != NULL;
    if (!single) {
        kvk_remote_say(lane->remote, "CLUSTER SLOTS of %s:%u: %s", from->address.host,
                       from->address.port, text);
    }
    if (!passing && (single || !lane->map_known)) {
        map_all_to(lane, from);
    }
}

void kvk_remote_map_learn(struct kvk_remote_lane *lane, struct kvk_remote_node *from,
                          const struct kvk_remote_reply *reply)
{
    KVK_REMOTE_COUNT(lane->remote, refreshes, 1);
    if (reply->type == REDIS_REPLY_ERROR) {
        map_refused(lane, from, reply->text);
        return;
    }
    uint16_t learned[KVK_REMOTE_SLOT_COUNT];
    uint32_t slot_count = 0;
    memset(learned, 0xff, sizeof(learned));
    bool in_map[KVK_REMOTE_NODES_MAX] = {false};
    for (size_t i = 0; i < reply->element_count; i++) {
        struct kvk_remote_address address;
        uint32_t first = 0;
        uint32_t last = 0;
        if (!range_read(reply->elements[i], from->address.host, &first, &last, &address)) {
            continue;
        }
        struct kvk_remote_node *node = kvk_remote_node_find(lane, &address);
        if (node == NULL) {
            continue;
        }
        uint16_t index = node_index(node);
        in_map[index] = true;
        node->in_map = true; /* or it could be reused for the next one */
        for (uint32_t slot = first; slot <= last; slot++) {
            learned[slot] = index;
            slot_count++;
        }
    }
    if (slot_count == 0) {
        return; /* a cluster that is being made: nothing to go by */
    }
    memcpy(lane->slot_node, learned, sizeof(learned));
    lane->map_known = true;
    lane->single = false;
    for (uint32_t i = 0; i < lane->node_count; i++) {
        struct kvk_remote_node *node = lane->nodes[i];
        node->in_map = in_map[i];
        if (!node->in_map && lane->now_ns - node->asked_ns > ASKED_NS) {
            kvk_remote_node_empty(node, true);
        }
    }
}

void kvk_remote_map_request(struct kvk_remote_lane *lane, uint64_t now)
{
    uint64_t since = now - lane->map_ns;
    uint64_t pause = lane->map_wanted ? MAP_PAUSE_NS
                     : lane->trouble  ? MAP_TROUBLE_NS
                                      : lane->remote->options.refresh_ms * KVK_NS_PER_MS;
    if (lane->map_asked || (lane->map_ns != 0 && since < pause)) {
        return;
    }
    for (uint32_t i = 0; i < lane->node_count; i++) {
        struct kvk_remote_node *node = lane->nodes[(lane->map_turn + i) % lane->node_count];
        for (uint32_t k = 0; k < KVK_REMOTE_CONNECTIONS_MAX; k++) {
            struct kvk_remote_connection *connection = &node->connections[k];
            if (connection->state == KVK_REMOTE_READY &&
                kvk_remote_connection_ask(connection, KVK_REMOTE_REQUEST_MAP)) {
                lane->map_turn = (lane->map_turn + i + 1) % lane->node_count;
                lane->map_asked = true;
                lane->map_wanted = false;
                lane->map_ns = now;
                return;
            }
        }
    }
}

/* ---- Now and then ---- */

static uint32_t connections_wanted(const struct kvk_remote_node *node, uint64_t now)
{
    const struct kvk_remote_lane *lane = node->lane;
    if (node->open) {
        return now >= node->retry_ns ? 1 : 0;
    }
    if (node->in_map) {
        return lane->remote->options.connection_count;
    }
    bool asked = node->asked_ns != 0 && now - node->asked_ns < ASKED_NS;
    return asked || (node->seed && (!lane->map_known || lane->trouble)) ? 1 : 0;
}

/* Has its name been resolved? If not, that is begun. */
static bool node_resolved(struct kvk_remote_node *node)
{
    struct kvk_lock *lock = &node->lane->remote->resolver.lock;
    kvk_lock(lock);
    bool resolved = node->socket_address_size > 0;
    bool resolving = node->resolving;
    bool failed = node->resolve_failed;
    node->resolve_failed = false;
    kvk_unlock(lock);
    if (failed) {
        kvk_remote_node_failed(node, "its name is not known");
    } else if (!resolved && !resolving) {
        kvk_remote_resolve(node->lane->remote, node);
    }
    return resolved;
}

static void connection_tick(struct kvk_remote_connection *connection, uint64_t now)
{
    struct kvk_remote *remote = connection->node->lane->remote;
    uint64_t timeout_ns = remote->options.node_timeout_ms * KVK_NS_PER_MS;
    uint64_t since = connection->progress_ns;
    if (connection->doomed) {
        kvk_remote_connection_close(connection, true, "no memory for what is sent to it");
        return;
    }
    if (connection->state == KVK_REMOTE_READY) {
        if (connection->sent.count == 0) {
            return;
        }
        uint64_t sent_ns = connection->sent.first->sent_ns;
        since = sent_ns > since ? sent_ns : since;
    }
    if (connection->state != KVK_REMOTE_CLOSED && now - since > timeout_ns) {
        KVK_REMOTE_COUNT(remote, stalls, 1);
        connection->node->failures = remote->options.breaker_failures; /* one is enough */
        kvk_remote_connection_close(connection, true, "no answer in time");
    }
}

static void node_tick(struct kvk_remote_node *node, uint64_t now)
{
    uint32_t wanted = connections_wanted(node, now);
    for (uint32_t i = 0; i < KVK_REMOTE_CONNECTIONS_MAX; i++) {
        struct kvk_remote_connection *connection = &node->connections[i];
        connection_tick(connection, now);
        if (connection->state != KVK_REMOTE_CLOSED) {
            if (i >= wanted && !node->open && connection->sent.count == 0 &&
                node_idle_queue(node)) {
                kvk_remote_connection_close(connection, false, "");
            }
        } else if (i < wanted && now >= connection->retry_ns && node_resolved(node)) {
            kvk_remote_connection_open(connection);
        }
    }
}

/* What submitters and people see of this lane. */
static void lane_look(struct kvk_remote_lane *lane)
{
    struct kvk_remote *remote = lane->remote;
    uint32_t count = 0;
    uint32_t away = 0;
    uint32_t slots_away = 0;
    bool ready[KVK_REMOTE_NODES_MAX];
    for (uint32_t i = 0; i < lane->node_count; i++) {
        ready[i] = kvk_remote_node_ready(lane->nodes[i]);
        count += lane->nodes[i]->in_map;
        away += lane->nodes[i]->in_map && !ready[i];
    }
    for (uint32_t slot = 0; slot < KVK_REMOTE_SLOT_COUNT; slot++) {
        uint16_t index = lane->slot_node[slot];
        slots_away += index == KVK_REMOTE_NODE_NONE || !ready[index];
    }
    enum kvk_remote_state state = slots_away == KVK_REMOTE_SLOT_COUNT ? KVK_REMOTE_AWAY
                                  : slots_away > 0                    ? KVK_REMOTE_PARTLY
                                                                      : KVK_REMOTE_GOOD;
    lane->trouble = slots_away > 0;
    atomic_store(&remote->seen[lane->index].state, state);
    atomic_store(&remote->seen[lane->index].node_count, count);
    atomic_store(&remote->seen[lane->index].node_away_count, away);
    atomic_store(&remote->seen[lane->index].slot_away_count, slots_away);
    atomic_store(&remote->seen[lane->index].cluster, lane->map_known && !lane->single);
}

void kvk_remote_nodes_tick(struct kvk_remote_lane *lane, uint64_t now)
{
    for (uint32_t i = 0; i < lane->node_count; i++) {
        node_tick(lane->nodes[i], now);
    }
    kvk_remote_map_request(lane, now);
    if (now - lane->seen_ns >= SEEN_NS) {
        lane->seen_ns = now;
        lane_look(lane);
    }
}
