/*
 * The remote store on a real Redis Cluster, three masters and three replicas on loopback, while
 * a thread goes on storing and fetching: everything that a cluster does to its clients, and what
 * others do to it. Never a wrong byte, never a blocked caller, and hits come back by themselves.
 *
 * Skipped where redis-server is not installed.
 */
#include <signal.h>
#include <sys/stat.h>

#include "base/copy.h"
#include "hosttier/remote_internal.h"
#include "hosttier/remote_value_internal.h"
#include "tests/cluster/remote_client.h"

#define BLOCK_BYTES (32U << 10)
#define BLOCKS 240U
#define BATCH 60U
#define LARGE_BYTES (5U << 20) /* three parts */
#define DEADLINE_MS 1000
#define HEAL_MS 15000

static struct {
    const char *helper;
    char folder[64];
    unsigned port;
    bool started;
    uint64_t begun_ns;
    struct kvk_remote *remote;
    struct kvk_remote_space space, secret_space, large_space;
    struct kvk_remote_crypt *crypt;
} house;

void house_end(void)
{
    char command[512];
    if (house.started) {
        (void)snprintf(command, sizeof(command), "'%s' stop %s", house.helper, house.folder);
        (void)!system(command);
    }
}

static void said(const char *what)
{
    (void)printf("%6.1f s: %s\n", (double)(now_ns() - house.begun_ns) / 1e9, what);
    (void)fflush(stdout);
}

static void space_open(struct kvk_remote_space *space, uint8_t secret, uint64_t bytes,
                       uint64_t generation, bool encrypt)
{
    uint8_t key[KVK_REMOTE_SECRET_SIZE] = {secret};
    uint8_t digest[KVK_REMOTE_KEY_SIZE] = {(uint8_t)(bytes >> 16)};
    struct kvk_remote_space_options options = {
        .secret = key,
        .space = digest,
        .shape = digest,
        .format = 1,
        .generation = generation,
        .block_bytes = bytes,
        .encrypt = encrypt,
    };
    CHECK(kvk_remote_space_init(space, &options, NULL) == KVK_OK);
}

/* ---- The thread that goes on meanwhile ---- */

static struct {
    pthread_t thread;
    _Atomic bool stop;
    struct client client;
    _Atomic uint64_t rounds, hits, asked;
} load;

static void *load_main(void *context)
{
    (void)context;
    struct kvk_random random;
    kvk_random_init(&random, 7);
    while (!load.stop) {
        uint64_t first = 10000 + kvk_random_below(&random, 200);
        bool store = kvk_random_chance(&random, 0.3);
        uint32_t hits = client_run(&load.client, store ? KVK_REMOTE_STORE : KVK_REMOTE_FETCH, first,
                                   20, false, 300);
        load.rounds++;
        load.hits += hits;
        load.asked += 20;
        (void)usleep(2000);
    }
    return NULL;
}

/* ---- What it is for ---- */

static void plain_use(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, DEADLINE_MS) == 0);
    CHECK(client.results[KVK_REMOTE_ABSENT] == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, BLOCKS, false, 5000) == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 5000) == BLOCKS);

    /* A whole chain's existence: one request a block, all at once. */
    uint64_t before = client_health(house.remote).counters.requests;
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 0, BLOCKS, true, DEADLINE_MS) == BLOCKS);
    CHECK(client.batch.run_count == BLOCKS);
    uint64_t requests = client_health(house.remote).counters.requests - before;
    CHECK(requests >= BLOCKS);

    CHECK(client_run(&client, KVK_REMOTE_DROP, 100, 1, false, DEADLINE_MS) == 1);
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 0, BLOCKS, true, DEADLINE_MS) > 0);
    CHECK(client.batch.run_count == 100 && client.blocks[100].result == KVK_REMOTE_ABSENT);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, true, 5000) >= 100);
    CHECK(client.batch.run_count == 100);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 100, 1, false, DEADLINE_MS) == 1);
    client_finish(&client);

    struct client other;
    client_init(&other, house.remote, &house.secret_space, 40);
    CHECK(client_run(&other, KVK_REMOTE_STORE, 0, 40, false, 5000) == 40);
    CHECK(client_run(&other, KVK_REMOTE_FETCH, 0, 40, true, 5000) == 40);
    client_finish(&other);

    struct client large;
    client_init(&large, house.remote, &house.large_space, 6);
    CHECK(house.large_space.part_count == 3);
    CHECK(client_run(&large, KVK_REMOTE_STORE, 0, 6, false, 5000) == 6);
    CHECK(client_run(&large, KVK_REMOTE_FETCH, 0, 6, true, 5000) == 6);
    CHECK(client_run(&large, KVK_REMOTE_DROP, 0, 6, true, 5000) == 6);
    client_finish(&large);
}

static void strangers_and_old_times(void)
{
    struct kvk_remote_space stranger;
    struct kvk_remote_space later;
    struct client client;
    space_open(&stranger, 99, BLOCK_BYTES, 1, false);
    client_init(&client, house.remote, &stranger, BATCH);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == 0);
    CHECK(client.results[KVK_REMOTE_ABSENT] == BATCH);
    client_finish(&client);

    space_open(&later, 1, BLOCK_BYTES, 2, false); /* after an invalidation */
    client_init(&client, house.remote, &later, BATCH);
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 0, BATCH, false, DEADLINE_MS) == 0);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == 0);
    CHECK(client.results[KVK_REMOTE_GENERATION] == 2 * BATCH);
    /* The new takes the old one's place; who was away and is still at the old finds it no more. */
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, 10, false, DEADLINE_MS) == 10);
    client_finish(&client);
    client_init(&client, house.remote, &house.space, BATCH);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, 10, false, DEADLINE_MS) == 0);
    CHECK(client.results[KVK_REMOTE_GENERATION] == 10);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, 10, false, DEADLINE_MS) == 10);
    client_finish(&client);
    kvk_remote_space_finish(&stranger);
    kvk_remote_space_finish(&later);
}

/* ---- A foreign writer ---- */

static void name_of(uint64_t number, char name[KVK_REMOTE_NAME_SIZE])
{
    struct kvk_remote_want want;
    struct kvk_remote_id id;
    char hex[2 * KVK_REMOTE_KEY_SIZE + 1];
    client_id(&id, number);
    kvk_remote_want_init(&want, house.crypt, &house.space, &id, 0);
    kvk_hex_write(want.hash, sizeof(want.hash), hex);
    (void)snprintf(name, KVK_REMOTE_NAME_SIZE, "kvkeep:%s", hex);
}

/* Write what the right value of `from` became under the name of `number`. Whoever changes what is
 * free in a header knows the form, and makes its checksum agree. */
static void scribble(uint64_t number, uint64_t from, size_t size, size_t flip)
{
    static uint8_t value[4U << 20];
    static uint8_t memory[BLOCK_BYTES];
    struct kvk_remote_want want;
    struct kvk_remote_id id;
    struct kvk_remote_piece piece = {memory, BLOCK_BYTES};
    char name[KVK_REMOTE_NAME_SIZE];
    char path[128];
    client_id(&id, from);
    client_fill(memory, BLOCK_BYTES, from);
    memset(value, 0, sizeof(value));
    kvk_remote_want_init(&want, house.crypt, &house.space, &id, 0);
    kvk_remote_value_seal(&want, house.crypt, &piece, 1, value, value + KVK_REMOTE_HEADER_SIZE);
    value[flip] ^= 1;
    if (flip >= KVK_REMOTE_AT_NONCE && flip < KVK_REMOTE_AT_CHECKSUM) {
        kvk_store_le64(value + KVK_REMOTE_AT_CHECKSUM, kvk_checksum(value, KVK_REMOTE_AT_CHECKSUM));
    }
    (void)snprintf(path, sizeof(path), "%s/value", house.folder);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fwrite(value, 1, size, file) == size && fclose(file) == 0);
    name_of(number, name);
    CHECK(remote_command("redis-cli -c -p %u -x SET %s <%s >/dev/null", house.port, name, path) ==
          0);
}

static void foreign_writer(void)
{
    const size_t whole = BLOCK_BYTES + KVK_REMOTE_HEADER_SIZE;
    const enum kvk_remote_result right[] = {
        KVK_REMOTE_NOT_OURS,  KVK_REMOTE_TRUNCATED, KVK_REMOTE_DAMAGED,
        KVK_REMOTE_OTHER_KEY, KVK_REMOTE_TRUNCATED, KVK_REMOTE_DAMAGED,
        KVK_REMOTE_NOT_OURS,  KVK_REMOTE_VERSION,   KVK_REMOTE_FOREIGN,
    };
    const uint32_t count = sizeof(right) / sizeof(right[0]);
    struct client client;
    char name[KVK_REMOTE_NAME_SIZE];
    scribble(0, 0, whole, 0);             /* no magic */
    scribble(1, 1, whole / 2, whole - 1); /* half of it */
    scribble(2, 2, whole, whole - 1);     /* a bit of the payload */
    scribble(3, 9, whole, 130);           /* another block's value */
    scribble(4, 4, 4U << 20, whole);      /* far too long */
    scribble(5, 5, whole, 130);           /* a bit of the seal */
    name_of(6, name);
    CHECK(remote_command("redis-cli -c -p %u UNLINK %s >/dev/null", house.port, name) == 0);
    CHECK(remote_command("redis-cli -c -p %u LPUSH %s x >/dev/null", house.port, name) == 0);
    scribble(7, 7, whole, 4);                   /* of another version */
    scribble(8, 8, whole, KVK_REMOTE_AT_NONCE); /* sealed by somebody else */

    client_init(&client, house.remote, &house.space, BATCH);
    uint64_t lost = client_health(house.remote).counters.lost_connections;
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH - count);
    for (uint32_t i = 0; i < count; i++) {
        if (client.blocks[i].result != right[i]) {
            (void)fprintf(stderr, "block %u: %s\n", i,
                          kvk_remote_result_name(client.blocks[i].result));
        }
        CHECK(client.blocks[i].result == right[i]);
    }
    CHECK(client_health(house.remote).counters.lost_connections == lost);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, count, false, DEADLINE_MS) == count);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH);
    client_finish(&client);
}

/* ---- What a cluster does ---- */

/* A slot in the middle of its move: the key is at the target already, and the source says ASK. */
static void ask(void)
{
    struct client client;
    char name[KVK_REMOTE_NAME_SIZE];
    char ids[3][64] = {{0}};
    client_init(&client, house.remote, &house.space, BATCH);
    name_of(20, name);
    unsigned slot = kvk_remote_slot(name, strlen(name));
    unsigned from = slot <= 5460 ? 0 : slot <= 10922 ? 1 : 2;
    unsigned to = (from + 1) % 3;
    for (unsigned i = 0; i < 3; i++) {
        char text[128];
        (void)snprintf(text, sizeof(text), "redis-cli -p %u cluster myid", house.port + i);
        FILE *pipe = popen(text, "r");
        CHECK(pipe != NULL && fscanf(pipe, "%63s", ids[i]) == 1 && pclose(pipe) == 0);
    }
    CHECK(remote_command("redis-cli -p %u cluster setslot %u importing %s >/dev/null",
                         house.port + to, slot, ids[from]) == 0);
    CHECK(remote_command("redis-cli -p %u cluster setslot %u migrating %s >/dev/null",
                         house.port + from, slot, ids[to]) == 0);
    CHECK(remote_command("redis-cli -p %u migrate 127.0.0.1 %u %s 0 5000 >/dev/null",
                         house.port + from, house.port + to, name) == 0);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 20, 1, false, DEADLINE_MS) == 1);
    CHECK(client_health(house.remote).counters.asked > 0);
    for (unsigned i = 0; i < 3; i++) {
        unsigned node = (to + i) % 3; /* the target first */
        CHECK(remote_command("redis-cli -p %u cluster setslot %u node %s >/dev/null",
                             house.port + node, slot, ids[to]) == 0);
    }
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH);
    CHECK(client_health(house.remote).counters.moved > 0);
    client_finish(&client);
}

static void reshard_under_load(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BLOCKS);
    CHECK(remote_command("'%s' reshard %u %u %u 300", house.helper, house.port, house.port,
                         house.port + 1) == 0);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 5000) == BLOCKS);
    client_finish(&client);
}

/* Nearly all of them: replicas follow on their own time. */
static void hits_come_back(struct client *client)
{
    uint64_t until = now_ns() + HEAL_MS * KVK_NS_PER_MS;
    uint32_t hits = 0;
    while (hits < BLOCKS * 9 / 10) {
        CHECK(now_ns() < until);
        hits = client_run(client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 500);
        (void)usleep(50000);
    }
    CHECK(client_await(house.remote, KVK_REMOTE_GOOD, HEAL_MS));
}

/* A node that stands still answers nobody, but its socket takes all. */
static void standing_node(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BLOCKS);
    CHECK(remote_command("'%s' signal %s %u STOP", house.helper, house.folder, house.port + 1) ==
          0);
    uint32_t least = BLOCKS;
    uint32_t most = 0;
    for (int i = 0; i < 8; i++) {
        uint32_t hits = client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 400);
        least = hits < least ? hits : least;
        most = hits > most ? hits : most; /* the other nodes go on as ever */
        (void)usleep(20000);
    }
    struct kvk_remote_health health = client_health(house.remote);
    CHECK(most >= BLOCKS / 4 && least < BLOCKS);
    CHECK(health.counters.stalls > 0 && health.counters.breaker_openings > 0);
    CHECK(client.results[KVK_REMOTE_DEADLINE] + client.results[KVK_REMOTE_UNAVAILABLE] > 0);
    CHECK(remote_command("'%s' signal %s %u CONT", house.helper, house.folder, house.port + 1) ==
          0);
    hits_come_back(&client); /* from it, or from its replica, where it stood for long */
    client_finish(&client);
}

static void killed_master(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BLOCKS);
    (void)client_run(&client, KVK_REMOTE_STORE, 0, BLOCKS, false, 5000);
    (void)usleep(200000); /* replicas follow on their own time */
    CHECK(remote_command("'%s' signal %s %u KILL", house.helper, house.folder, house.port + 2) ==
          0);
    uint64_t begun = now_ns();
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 500) < BLOCKS);
    CHECK(client_health(house.remote).state != KVK_REMOTE_AWAY);
    hits_come_back(&client);
    (void)printf("          hits were back %.1f s after the master was killed\n",
                 (double)(now_ns() - begun) / 1e9);
    client_finish(&client);
}

static void full_store(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BATCH);
    CHECK(remote_command("'%s' all %s config set maxmemory-policy allkeys-lru", house.helper,
                         house.folder) == 0);
    CHECK(remote_command("'%s' all %s config set maxmemory 24mb", house.helper, house.folder) == 0);
    for (uint64_t first = 20000; first < 20000 + 40 * BATCH; first += BATCH) {
        CHECK(client_run(&client, KVK_REMOTE_STORE, first, BATCH, false, 5000) > BATCH * 9 / 10);
    }
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 20000 + 39 * BATCH, BATCH, false, 5000) >
          BATCH / 2);
    uint64_t absent = client.results[KVK_REMOTE_ABSENT];
    for (uint64_t first = 20000; first < 20000 + 10 * BATCH; first += BATCH) {
        (void)client_run(&client, KVK_REMOTE_FETCH, first, BATCH, false, 5000);
    }
    CHECK(client.results[KVK_REMOTE_ABSENT] > absent);

    /* Without eviction a store is refused, and says so. */
    CHECK(remote_command("'%s' all %s config set maxmemory-policy noeviction", house.helper,
                         house.folder) == 0);
    CHECK(remote_command("'%s' all %s config set maxmemory 4mb", house.helper, house.folder) == 0);
    (void)client_run(&client, KVK_REMOTE_STORE, 40000, BATCH, false, 5000);
    CHECK(client.results[KVK_REMOTE_FULL] > 0);
    CHECK(remote_command("'%s' all %s config set maxmemory 0", house.helper, house.folder) == 0);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 40000, BATCH, false, 5000) == BATCH);
    client_finish(&client);
}

static void all_gone(void)
{
    struct client client;
    client_init(&client, house.remote, &house.space, BATCH);
    CHECK(remote_command(
              "for i in 0 1 2 3 4 5; do '%s' signal %s $((%u + i)) KILL 2>/dev/null; done; true",
              house.helper, house.folder, house.port) == 0);
    (void)client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, 300);
    CHECK(client.batch.hit_count == 0);
    CHECK(client_await(house.remote, KVK_REMOTE_AWAY, HEAL_MS));
    /* Each thread finds out for itself; then nothing is taken at all. */
    uint64_t until = now_ns() + HEAL_MS * KVK_NS_PER_MS;
    for (int refused = 0; refused < 8; refused++) {
        CHECK(now_ns() < until);
        if (client_submit(&client, KVK_REMOTE_EXISTS, 0, 1, 1, false, 300)) {
            client_wait(&client);
            refused = 0;
        }
    }
    CHECK(client_health(house.remote).counters.refused > 0);
    CHECK(client_health(house.remote).reason[0] != '\0');
    client_finish(&client);
}

/* More than bytes_max at a time is refused at once, and changes nothing. */
static void bounds(void)
{
    const uint32_t count = (32U << 20) / BLOCK_BYTES + 1;
    struct client client;
    client_init(&client, house.remote, &house.space, count);
    CHECK(!client_submit(&client, KVK_REMOTE_FETCH, 0, count, 1, false, DEADLINE_MS));
    struct kvk_error error;
    CHECK(kvk_remote_submit(house.remote, &client.batch, &error) == KVK_EXHAUSTED);
    CHECK(strcmp(error.field, "bytes_max") == 0 && error.limit == 32U << 20);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH);
    client_finish(&client);
}

/* ---- All of it ---- */

static void house_open(void)
{
    char seeds[64];
    house.begun_ns = now_ns();
    house.helper = getenv("KVKEEP_CLUSTER");
    if (house.helper == NULL) {
        house.helper = "tests/cluster/cluster.sh";
    }
    house.port = 21000 + (unsigned)getpid() % 900 * 10;
    (void)snprintf(house.folder, sizeof(house.folder), "/tmp/kvkeep-cluster-%d", (int)getpid());
    house.started = true;
    int code = remote_command("'%s' start %s %u", house.helper, house.folder, house.port);
    if (code == 77) {
        exit(77);
    }
    CHECK(code == 0);
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:1,localhost:%u", house.port);
    struct kvk_remote_options options = {
        .seeds = seeds,
        .thread_count = 2,
        .node_timeout_ms = 400,
        .bytes_max = 32U << 20,
    };
    CHECK(kvk_remote_open(&options, &house.remote, NULL) == KVK_OK);
    CHECK(kvk_remote_crypt_create(&house.crypt, NULL) == KVK_OK);
    space_open(&house.space, 1, BLOCK_BYTES, 1, false);
    space_open(&house.secret_space, 2, BLOCK_BYTES, 1, true);
    space_open(&house.large_space, 3, LARGE_BYTES, 1, true);
    CHECK(client_await(house.remote, KVK_REMOTE_GOOD, HEAL_MS));
    CHECK(client_health(house.remote).node_count == 3 && client_health(house.remote).cluster);
}

/* Nodes that tell their names instead of addresses, as those behind TLS do, and nodes that tell
 * neither: those are where the question went. */
static void other_endpoints(void)
{
    static const char *const types[] = {"hostname", "unknown-endpoint", "ip"};
    char seeds[64];
    (void)snprintf(seeds, sizeof(seeds), "localhost:%u", house.port);
    CHECK(remote_command("'%s' all %s config set cluster-announce-hostname localhost >/dev/null",
                         house.helper, house.folder) == 0);
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct client client;
        struct kvk_remote *remote = NULL;
        struct kvk_remote_options options = {.seeds = seeds};
        CHECK(remote_command("'%s' all %s config set cluster-preferred-endpoint-type %s >/dev/null",
                             house.helper, house.folder, types[i]) == 0);
        CHECK(kvk_remote_open(&options, &remote, NULL) == KVK_OK);
        CHECK(client_await(remote, KVK_REMOTE_GOOD, HEAL_MS));
        CHECK(client_health(remote).node_count == 3 && client_health(remote).cluster);
        client_init(&client, remote, &house.space, BATCH);
        CHECK(client_run(&client, KVK_REMOTE_STORE, 0, BATCH, false, DEADLINE_MS) == BATCH);
        CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BATCH, false, DEADLINE_MS) == BATCH);
        client_finish(&client);
        kvk_remote_close(remote);
    }
}

static void close_under_way(void)
{
    /* Nobody waits for ever: what is under way at the end is CANCELLED, or was done before. */
    uint64_t begun = now_ns();
    kvk_remote_close(house.remote);
    CHECK(now_ns() - begun < 5 * KVK_NS_PER_SECOND);
}

int main(void)
{
    client_end_well();
    house_open();
    said("a cluster of three masters and three replicas");
    plain_use();
    said("stored, fetched, chains, parts, encrypted");
    strangers_and_old_times();
    foreign_writer();
    said("strangers, invalidated and scribbled values are misses");
    other_endpoints();
    said("nodes by name, and without");
    client_init(&load.client, house.remote, &house.space, BATCH);
    CHECK(pthread_create(&load.thread, NULL, load_main, NULL) == 0);
    ask();
    said("a slot on the move");
    bounds();
    reshard_under_load();
    said("a reshard under load");
    standing_node();
    said("a node that stood still");
    killed_master();
    said("a master killed");
    full_store();
    said("a full store");
    all_gone();
    said("all nodes gone");
    load.stop = true;
    CHECK(pthread_join(load.thread, NULL) == 0);
    (void)printf(
        "load: %llu rounds, %llu of %llu blocks HIT; worst submission %.2f ms, latest %.2f "
        "ms past a deadline\n",
        (unsigned long long)load.rounds, (unsigned long long)load.hits,
        (unsigned long long)load.asked, (double)load.client.submit_ns_worst / 1e6,
        (double)load.client.late_ns_worst / 1e6);
    CHECK(load.hits > load.asked / 4);
    client_finish(&load.client);
    close_under_way();
    kvk_remote_space_finish(&house.space);
    kvk_remote_space_finish(&house.secret_space);
    kvk_remote_space_finish(&house.large_space);
    kvk_remote_crypt_destroy(house.crypt);
    house_end();
    return 0;
}
