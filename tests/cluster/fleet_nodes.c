/*
 * Nodes of a fleet find each other through a real Redis server: all are listed with what they say,
 * three that begin at one place get three, a node that dies goes by itself, one that ends in order
 * goes at once, and what strangers write is no node.
 *
 * Skipped (77) where redis-server is not installed.
 */
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "daemon/fleet_nodes.h"
#include "hosttier/catalogue.h"
#include "tests/cluster/remote_client.h"

#define INTERVAL_MS 200
#define NODES 24
#define WAIT_NS (PATIENCE_MS * KVK_NS_PER_MS)

static struct {
    struct remote_server server;
} house;

static const uint8_t fleet_key[32] = "a key that the whole fleet has";

void house_end(void)
{
    remote_server_stop(&house.server);
}

static void house_open(void)
{
    client_end_well();
    remote_server_start(&house.server);
}

struct node {
    int index;
    struct kvk_remote *remote;
    struct kvk_catalogue *catalogue;
    struct kvk_fleet_directory *directory;
};

static void describe(void *context, struct kvk_fleet_node *node)
{
    const struct node *self = context;
    (void)snprintf(node->name, sizeof(node->name), "node %02d", self->index);
    (void)snprintf(node->address, sizeof(node->address), "10.0.0.%d:7070", self->index);
    (void)snprintf(node->events, sizeof(node->events), "tcp://10.0.0.%d:5557", self->index);
    (void)snprintf(node->version, sizeof(node->version), "1.2.3");
    node->started_s = 1000;
    for (uint64_t i = 0; i < KVK_FLEET_TIERS; i++) {
        node->used_bytes[i] = 10 + i;
        node->limit_bytes[i] = 20 + i;
        node->uses[i] = 30 + i;
    }
    node->fetched_blocks = 40;
    node->lookups = 41;
    node->lookup_tokens = 42;
    node->hit_tokens = 43;
    node->sent_bytes = UINT64_C(1) << 50;
    node->fetched_bytes = 45;
    node->spaces = 46;
    node->store_state = KVK_REMOTE_GOOD;
    node->draining = self->index % 2 == 1;
}

/* `id`: its first bytes say the place; NULL: chance does. */
static void node_open(struct node *node, int index, const uint8_t *key, const uint8_t *id)
{
    char seeds[64];
    char path[128];
    struct kvk_error error = {0};
    memset(node, 0, sizeof(*node));
    node->index = index;
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", house.server.port);
    const struct kvk_remote_options remote = {.seeds = seeds, .connection_count = 1};
    CHECK(kvk_remote_open(&remote, &node->remote, &error) == KVK_OK);
    if (id != NULL) {
        (void)snprintf(path, sizeof(path), "%s/%d", house.server.folder, index);
        const struct kvk_catalogue_options catalogue = {.folder = path, .threads = true};
        CHECK(kvk_catalogue_open(&catalogue, &node->catalogue, &error) == KVK_OK);
        kvk_catalogue_trust(node->catalogue);
        CHECK(kvk_catalogue_put_value(node->catalogue, "fleet node", id, 16, &error) == KVK_OK);
    }
    const struct kvk_fleet_directory_options options = {
        .key = key,
        .remote = node->remote,
        .values = node->catalogue,
        .interval_ms = INTERVAL_MS,
        .describe = describe,
        .context = node,
    };
    CHECK(kvk_fleet_directory_open(&options, &node->directory, &error) == KVK_OK);
}

static void node_close(struct node *node)
{
    kvk_fleet_directory_close(node->directory);
    kvk_remote_close(node->remote);
    kvk_catalogue_close(node->catalogue);
}

static uint32_t list(struct node *node, struct kvk_fleet_node **nodes)
{
    uint32_t count = 0;
    bool incomplete = true;
    struct kvk_error error;
    uint64_t until_ns = now_ns() + WAIT_NS;
    while (kvk_fleet_directory_list(node->directory, now_ns() + WAIT_NS, nodes, &count, &incomplete,
                                    &error) != KVK_OK) {
        CHECK(now_ns() < until_ns); /* it is connecting */
        (void)usleep(10000);
    }
    CHECK(!incomplete);
    return count;
}

/* Until so many are there. */
static void await_count(struct node *node, uint32_t wanted)
{
    uint64_t until_ns = now_ns() + WAIT_NS;
    for (;;) {
        struct kvk_fleet_node *nodes = NULL;
        uint32_t count = list(node, &nodes);
        free(nodes);
        if (count == wanted) {
            return;
        }
        CHECK(now_ns() < until_ns);
        (void)usleep(20000);
    }
}

static bool same_numbers(const struct kvk_fleet_node *a, const struct kvk_fleet_node *b)
{
    return strcmp(a->address, b->address) == 0 && strcmp(a->events, b->events) == 0 &&
           strcmp(a->version, b->version) == 0 && a->started_s == b->started_s &&
           memcmp(a->used_bytes, b->used_bytes, sizeof(a->used_bytes)) == 0 &&
           memcmp(a->limit_bytes, b->limit_bytes, sizeof(a->limit_bytes)) == 0 &&
           memcmp(a->uses, b->uses, sizeof(a->uses)) == 0 &&
           a->fetched_blocks == b->fetched_blocks && a->lookups == b->lookups &&
           a->lookup_tokens == b->lookup_tokens && a->hit_tokens == b->hit_tokens &&
           a->sent_bytes == b->sent_bytes && a->fetched_bytes == b->fetched_bytes &&
           a->spaces == b->spaces && a->store_state == b->store_state && a->draining == b->draining;
}

static void said_right(struct node *asked)
{
    struct kvk_fleet_node *nodes = NULL;
    uint32_t count = list(asked, &nodes);
    CHECK(count == NODES);
    for (uint32_t i = 0; i < count; i++) {
        struct node self = {.index = (int)i};
        struct kvk_fleet_node wanted = {0};
        describe(&self, &wanted);
        memcpy(wanted.id, nodes[i].id, sizeof(wanted.id));
        wanted.at_s = nodes[i].at_s;
        wanted.number = nodes[i].number;
        CHECK(strcmp(nodes[i].name, wanted.name) == 0);
        CHECK(same_numbers(&nodes[i], &wanted));
        CHECK(wanted.number > 0 && wanted.at_s + 60 > (uint64_t)time(NULL));
    }
    free(nodes);
}

static uint64_t moves_of(const struct node *node)
{
    struct kvk_fleet_directory_counters counters;
    kvk_fleet_directory_counters(node->directory, &counters);
    return counters.moves;
}

static pid_t node_process(int index)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct node node;
        node_open(&node, index, fleet_key, NULL);
        for (;;) {
            (void)pause();
        }
    }
    return child;
}

int main(void)
{
    static struct node nodes[NODES];
    struct node stranger;
    if (!remote_is_installed()) {
        return 77;
    }
    house_open();
    pid_t child = node_process(NODES); /* before there are threads here */
    for (int i = 0; i < NODES; i++) {
        /* The first three want one place, at the end of all: two go on, around the corner. */
        uint8_t id[16] = {0xff, 0xff, 0, 0, (uint8_t)i};
        node_open(&nodes[i], i, fleet_key, i < 3 ? id : NULL);
    }
    await_count(&nodes[0], NODES + 1);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
    await_count(&nodes[0], NODES);
    said_right(&nodes[5]);
    CHECK(moves_of(&nodes[0]) + moves_of(&nodes[1]) + moves_of(&nodes[2]) >= 3);

    /* Another fleet sees none of these, and its node is none here. */
    uint8_t key[32];
    memcpy(key, fleet_key, sizeof(key));
    key[5] ^= 1;
    node_open(&stranger, 77, key, NULL);
    await_count(&stranger, 1);
    CHECK(
        remote_command("redis-cli -p %u --scan | head -3 | while read name; do redis-cli -p %u set "
                       "$name junk >/dev/null; done",
                       house.server.port, house.server.port) == 0);
    await_count(&nodes[0], NODES);
    said_right(&nodes[7]);
    node_close(&stranger);

    node_close(&nodes[NODES - 1]);
    uint64_t closed_ns = now_ns();
    struct kvk_fleet_node *left = NULL;
    await_count(&nodes[0], NODES - 1);
    CHECK(now_ns() - closed_ns < promised_ms(INTERVAL_MS) * KVK_NS_PER_MS); /* not by its time */

    /* The same node in its next life is the same node. */
    node_close(&nodes[1]);
    uint8_t id[16] = {0xff, 0xff, 0, 0, 1};
    node_open(&nodes[1], 1, fleet_key, id);
    await_count(&nodes[0], NODES - 1);

    /* A store that is away says so, and all are back with it. */
    CHECK(kill(house.server.pid, SIGSTOP) == 0);
    uint32_t count = 0;
    bool incomplete = false;
    struct kvk_error error;
    uint64_t begun_ns = now_ns();
    CHECK(kvk_fleet_directory_list(nodes[0].directory, now_ns() + 300 * KVK_NS_PER_MS, &left,
                                   &count, &incomplete, &error) == KVK_UNAVAILABLE);
    CHECK(now_ns() - begun_ns < 5 * KVK_NS_PER_SECOND);
    (void)usleep(1500000);
    CHECK(kill(house.server.pid, SIGCONT) == 0);
    uint64_t until_ns = now_ns() + WAIT_NS;
    while (kvk_fleet_directory_list(nodes[0].directory, now_ns() + WAIT_NS, &left, &count,
                                    &incomplete, &error) != KVK_OK) {
        CHECK(now_ns() < until_ns);
        (void)usleep(50000);
    }
    free(left);
    await_count(&nodes[0], NODES - 1);
    struct kvk_fleet_directory_counters counters;
    kvk_fleet_directory_counters(nodes[0].directory, &counters);
    CHECK(counters.announcements > 3 && counters.announce_failures > 0);
    for (int i = 0; i < NODES - 1; i++) {
        node_close(&nodes[i]);
    }
    house_end();
    return 0;
}
