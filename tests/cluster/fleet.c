/*
 * The generation of a space in the fleet, on a real Redis server: nodes agree, an invalidation on
 * one reaches all, also those that were away; a record that is lost, put back, or scribbled over is
 * never the return of what was invalidated; and a store that is away gives no number.
 *
 * Skipped (77) where redis-server is not installed.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "daemon/fleet_internal.h"
#include "hosttier/catalogue.h"
#include "tests/cluster/remote_client.h"

#define AGE_MS 200
#define WAIT_MS (PATIENCE_MS / 4)
#define NODES 4

static struct {
    struct remote_server server;
    struct kvk_fleet_identity identity;
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
    struct kvk_geometry geometry = {.layers = 1, .block_tokens = 16};
    const struct kvk_geometry *geometries[] = {&geometry};
    const struct kvk_fleet_identity_options options = {
        .key = fleet_key,
        .tenant = "acme",
        .identity = (const uint8_t *)"model",
        .identity_size = 5,
        .geometries = geometries,
        .group_count = 1,
    };
    CHECK(kvk_fleet_identity_init(&house.identity, &options, NULL) == KVK_OK);
}

static int redis(const char *words)
{
    return remote_command("redis-cli -p %u %s >/dev/null", house.server.port, words);
}

/* The name of the only record there is. */
static void record_name(char name[256])
{
    remote_ask(&house.server, name, "keys '*'");
    CHECK(name[0] != '\0');
}

/* ---- A node ---- */

struct node {
    struct kvk_remote *remote;
    struct kvk_catalogue *catalogue;
    struct kvk_fleet *fleet;
    struct kvk_fleet_member *_Atomic member;
    _Atomic uint32_t invalidations;
};

static void on_invalidated(void *context, void *user)
{
    struct node *node = context;
    uint64_t number = 0;
    CHECK(user == &house && kvk_locks_held() == 0);
    struct kvk_fleet_member *member = node->member; /* NULL: it is just joining */
    CHECK(member == NULL || !kvk_fleet_generation(member, &number));
    atomic_fetch_add(&node->invalidations, 1);
}

static void node_open(struct node *node, const uint8_t *key, const char *folder)
{
    char seeds[64];
    char path[128];
    struct kvk_error error = {0};
    memset(node, 0, sizeof(*node));
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", house.server.port);
    const struct kvk_remote_options options = {
        .seeds = seeds, .node_timeout_ms = 200, .ttl_ms = 50};
    CHECK(kvk_remote_open(&options, &node->remote, &error) == KVK_OK);
    if (folder != NULL) {
        (void)snprintf(path, sizeof(path), "%s/%s", house.server.folder, folder);
        const struct kvk_catalogue_options catalogue = {.folder = path, .threads = true};
        CHECK(kvk_catalogue_open(&catalogue, &node->catalogue, &error) == KVK_OK);
        kvk_catalogue_trust(node->catalogue);
    }
    const struct kvk_fleet_options fleet = {
        .key = key,
        .remote = node->remote,
        .values = node->catalogue,
        .generation_ms = AGE_MS,
        .member_count_max = 1,
        .invalidated = on_invalidated,
        .context = node,
    };
    CHECK(kvk_fleet_open(&fleet, &node->fleet, &error) == KVK_OK);
    struct kvk_fleet_member *member = NULL;
    CHECK(kvk_fleet_join(node->fleet, &house.identity, &house, &member, &error) == KVK_OK);
    node->member = member;
}

static void node_close(struct node *node)
{
    kvk_fleet_leave(node->member);
    kvk_fleet_close(node->fleet);
    kvk_remote_close(node->remote);
    kvk_catalogue_close(node->catalogue);
}

static struct kvk_fleet_counters counters_of(const struct node *node)
{
    struct kvk_fleet_counters counters;
    kvk_fleet_counters(node->fleet, &counters);
    return counters;
}

/* The number that it gives, as soon as it gives one that is not `old`. */
static uint64_t number_await(const struct node *node, uint64_t old)
{
    uint64_t until = now_ns() + WAIT_MS * KVK_NS_PER_MS;
    uint64_t number = 0;
    while (!kvk_fleet_generation(node->member, &number) || number == old) {
        CHECK(now_ns() < until);
        (void)usleep(500);
    }
    return number;
}

/* Both give one number, and the same. */
static uint64_t agreed(const struct node *a, const struct node *b)
{
    uint64_t until = now_ns() + WAIT_MS * KVK_NS_PER_MS;
    for (;;) {
        uint64_t one = number_await(a, 0);
        uint64_t other = number_await(b, 0);
        if (one == other) {
            return one;
        }
        CHECK(now_ns() < until);
    }
}

static enum kvk_status invalidate(struct node *node, uint64_t wait_ms)
{
    uint64_t number = 0;
    struct kvk_error error;
    CHECK(kvk_fleet_raise_begin(node->member, &error) == KVK_OK);
    CHECK(!kvk_fleet_generation(node->member, &number));
    return kvk_fleet_raise_end(node->member, now_ns() + wait_ms * KVK_NS_PER_MS, &error);
}

/* ---- Tests ---- */

static void one_number(struct node *a, struct node *b)
{
    uint64_t number = agreed(a, b);
    CHECK(counters_of(a).begun + counters_of(b).begun >= 1);
    struct kvk_fleet_member *more = NULL;
    struct kvk_error error;
    CHECK(kvk_fleet_join(a->fleet, &house.identity, NULL, &more, &error) == KVK_EXHAUSTED);
    (void)usleep(3 * AGE_MS * 1000);
    CHECK(agreed(a, b) == number && counters_of(a).reads >= 4);
}

static void raised_for_all(struct node *a, struct node *b)
{
    uint64_t number = agreed(a, b);
    uint32_t before = b->invalidations;
    uint64_t learned = counters_of(b).learned;
    CHECK(invalidate(a, WAIT_MS) == KVK_OK);
    uint64_t told_ns = now_ns();
    uint64_t next = number_await(b, number);
    CHECK(next > number && b->invalidations == before + 1);
    CHECK(now_ns() - told_ns < AGE_MS * KVK_NS_PER_MS * 3); /* of a loaded machine */
    CHECK(number_await(a, number) == next && counters_of(a).raises == 1);
    CHECK(counters_of(b).learned == learned + 1);
}

/* Who was away, and remembers, learns it; who does not remember has nothing of before. */
static void away(struct node *a)
{
    struct node b;
    node_open(&b, fleet_key, "b");
    uint64_t number = agreed(a, &b);
    uint32_t before = b.invalidations;
    node_close(&b);
    node_open(&b, fleet_key, "b");
    CHECK(agreed(a, &b) == number && b.invalidations == 0);
    node_close(&b);
    CHECK(invalidate(a, WAIT_MS) == KVK_OK);
    node_open(&b, fleet_key, "b");
    CHECK(agreed(a, &b) > number && b.invalidations == 1 && before == 0);
    node_close(&b);
    node_open(&b, fleet_key, NULL);
    CHECK(agreed(a, &b) > number && b.invalidations == 0);
    node_close(&b);
}

static void lost_and_put_back(struct node *a, struct node *b)
{
    char name[256];
    char words[512];
    record_name(name);
    uint64_t number = agreed(a, b);
    uint64_t restored = counters_of(a).restored + counters_of(b).restored;
    uint32_t told = a->invalidations + b->invalidations;
    CHECK(redis("flushall") == 0);
    (void)usleep(3 * AGE_MS * 1000);
    CHECK(agreed(a, b) == number);
    CHECK(counters_of(a).restored + counters_of(b).restored > restored);
    CHECK(a->invalidations + b->invalidations == told);

    /* An old copy of the record, as a replica that fell behind would have it. */
    (void)snprintf(words, sizeof(words), "copy %s kept", name);
    CHECK(redis(words) == 0);
    CHECK(invalidate(a, WAIT_MS) == KVK_OK);
    uint64_t raised = number_await(a, number);
    CHECK(number_await(b, number) == raised);
    (void)snprintf(words, sizeof(words), "copy kept %s replace", name);
    CHECK(redis(words) == 0);
    (void)usleep(3 * AGE_MS * 1000);
    struct node fresh;
    node_open(&fresh, fleet_key, NULL);
    CHECK(agreed(a, &fresh) == raised);
    node_close(&fresh);
    CHECK(redis("del kept") == 0);
}

static void scribbled(struct node *a, struct node *b)
{
    char name[256];
    char words[512];
    record_name(name);
    uint64_t number = agreed(a, b);
    uint64_t foreign = counters_of(a).foreign;
    static const char *const junk[] = {"append %s xyz",
                                       "append %s KVKGsomething-that-is-not-sealed-by-anybody",
                                       "set %s 12345678901234567890123456789012345678901234567890",
                                       "setrange %s 5000 x",
                                       "del %s",
                                       "set %s ''"};
    for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        (void)snprintf(words, sizeof(words), junk[i], name);
#pragma GCC diagnostic pop
        CHECK(redis(words) == 0);
        (void)usleep(3 * AGE_MS * 1000);
        CHECK(agreed(a, b) == number);
    }
    (void)snprintf(words, sizeof(words), "del %s", name);
    CHECK(redis(words) == 0);
    (void)snprintf(words, sizeof(words), "rpush %s 1 2 3", name);
    (void)redis(words); /* or it was put back first, and this is refused */
    (void)usleep(3 * AGE_MS * 1000);
    CHECK(agreed(a, b) == number && counters_of(a).foreign > foreign);
    /* A journal that is too long is begun anew. */
    (void)snprintf(words, sizeof(words), "setrange %s 300000 x", name);
    CHECK(redis(words) == 0);
    CHECK(invalidate(a, WAIT_MS) == KVK_OK);
    CHECK(agreed(a, b) > number);
    (void)snprintf(words, sizeof(words), "strlen %s | grep -qE '^[0-9]{1,4}$'", name);
    CHECK(remote_command("redis-cli -p %u %s", house.server.port, words) == 0);

    /* Another fleet of the same store has its own. */
    struct node other;
    uint8_t key[32];
    memcpy(key, fleet_key, sizeof(key));
    key[0]++;
    node_open(&other, key, NULL);
    CHECK(number_await(&other, 0) != number_await(a, 0));
    CHECK(counters_of(&other).begun == 1);
    node_close(&other);
    CHECK(redis("flushall") == 0); /* its record goes, ours comes back */
    (void)usleep(3 * AGE_MS * 1000);
}

/* Add an entry as a node makes it, or, with `right` false, as one without the key would. */
static void entry_add(uint64_t number, bool right)
{
    char name[256];
    char path[128];
    uint8_t secret[32];
    uint8_t key[32];
    uint8_t message[24];
    uint8_t hash[32];
    uint8_t entry[32] = "KVKG";
    static const char tag[] = "kvkeep fleet generation checks 1";
    kvk_fleet_record_secret(fleet_key, secret);
    kvk_fleet_hmac(secret, tag, sizeof(tag), key);
    memcpy(message, house.identity.digest, 16);
    kvk_store_le64(message + 16, number);
    kvk_fleet_hmac(key, message, sizeof(message), hash);
    entry[4] = 1;
    kvk_store_le64(entry + 8, number);
    memcpy(entry + 16, hash, 16);
    entry[20] ^= right ? 0 : 1;
    record_name(name);
    (void)snprintf(path, sizeof(path), "%s/entry", house.server.folder);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fwrite(entry, sizeof(entry), 1, file) == 1 && fclose(file) == 0);
    CHECK(remote_command("redis-cli -p %u -x append %s < %s >/dev/null", house.server.port, name,
                         path) == 0);
}

/* Neither an old entry that comes late counts, nor one that is not sealed, nor a clock that is
 * behind: an invalidation overtakes what the journal has. */
static void order(struct node *a, struct node *b)
{
    struct kvk_error error;
    uint64_t old = agreed(a, b);
    CHECK(invalidate(b, WAIT_MS) == KVK_OK);
    uint64_t number = number_await(a, old);
    uint32_t told = a->invalidations + b->invalidations;
    CHECK(agreed(a, b) == number);
    entry_add(old, true);
    entry_add(number + ((uint64_t)1 << 40), false);
    (void)usleep(3 * AGE_MS * 1000);
    struct node fresh;
    node_open(&fresh, fleet_key, NULL);
    CHECK(agreed(a, b) == number && agreed(a, &fresh) == number);
    CHECK(a->invalidations + b->invalidations == told);
    node_close(&fresh);

    for (uint64_t round = 1; round <= 2; round++) {
        uint64_t ahead = number + (round << 40);
        uint8_t raised[8];
        size_t size = sizeof(raised);
        char name[64] = "fleet.";
        kvk_hex_write(house.identity.digest, 16, name + 6);
        CHECK(kvk_fleet_raise_begin(a->member, &error) == KVK_OK);
        entry_add(ahead, true);
        if (round == 2) { /* as if it had been told while the other came between */
            CHECK(kvk_catalogue_get_value(a->catalogue, name, raised, &size, &error) == KVK_OK);
            CHECK(kvk_load_le64(raised) < ahead);
            entry_add(kvk_load_le64(raised), true);
        }
        uint64_t until_ns = now_ns() + WAIT_MS * KVK_NS_PER_MS;
        CHECK(kvk_fleet_raise_end(a->member, until_ns, &error) == KVK_OK);
        CHECK(number_await(a, number) > ahead);
        (void)usleep(3 * AGE_MS * 1000);
        CHECK(agreed(a, b) > ahead);
    }
}

/* Nobody remembers, and the store has lost it: what was stored before stays lost. */
static void forgotten(void)
{
    struct node node;
    node_open(&node, fleet_key, NULL);
    uint64_t number = number_await(&node, 0);
    node_close(&node);
    CHECK(redis("flushall") == 0);
    node_open(&node, fleet_key, NULL);
    uint64_t next = number_await(&node, 0);
    CHECK(next != number);
    node_close(&node);
    CHECK(redis("flushall") == 0);
    node_open(&node, fleet_key, NULL);
    CHECK(number_await(&node, 0) > next);
    node_close(&node);
}

static void store_away(struct node *a, struct node *b)
{
    uint64_t number = agreed(a, b);
    uint64_t given = 0;
    CHECK(kill(house.server.pid, SIGSTOP) == 0);
    (void)usleep(AGE_MS * 1500);
    CHECK(!kvk_fleet_generation(a->member, &given) && !kvk_fleet_generation(b->member, &given));
    uint64_t begun_ns = now_ns();
    CHECK(invalidate(a, 300) == KVK_UNAVAILABLE);
    CHECK(now_ns() - begun_ns < 3 * KVK_NS_PER_SECOND);
    CHECK(counters_of(a).read_failures > 0);
    CHECK(kill(house.server.pid, SIGCONT) == 0);
    uint64_t next = number_await(b, number);
    CHECK(next > number && number_await(a, number) == next);
}

/* A raise that does not come through ends with the process: the next life brings it. */
static void raise_survives(struct node *a)
{
    struct node b;
    struct kvk_error error;
    node_open(&b, fleet_key, "b");
    uint64_t number = agreed(a, &b);
    CHECK(kvk_fleet_raise_begin(b.member, &error) == KVK_OK);
    node_close(&b); /* crashed between begin and end */
    CHECK(number_await(a, 0) == number);
    node_open(&b, fleet_key, "b");
    CHECK(number_await(a, number) > number);
    node_close(&b);
}

/* ---- Many at once ---- */

#define SEEN_MAX 4096
#define RAISES 12

struct raiser {
    struct node node;
    pthread_t raise_thread, watch_thread;
    struct {
        uint64_t number, first_ns, last_ns;
    } seen[SEEN_MAX];
    uint32_t seen_count;
    struct {
        uint64_t begin_ns, end_ns;
    } raises[RAISES];
    uint32_t raise_count;
    _Atomic bool stop;
};

static void *watch_main(void *context)
{
    struct raiser *raiser = context;
    while (!raiser->stop) {
        uint64_t number = 0;
        uint64_t before = now_ns();
        if (kvk_fleet_generation(raiser->node.member, &number)) {
            uint32_t i = raiser->seen_count;
            if (i == 0 || raiser->seen[i - 1].number != number) {
                CHECK(i < SEEN_MAX && (i == 0 || number > raiser->seen[i - 1].number));
                raiser->seen[i].number = number;
                raiser->seen[i].first_ns = now_ns();
                raiser->seen_count++;
            } else {
                raiser->seen[i - 1].last_ns = before;
            }
        }
        (void)usleep(200);
    }
    return NULL;
}

static void *raise_main(void *context)
{
    struct raiser *raiser = context;
    for (uint32_t i = 0; i < RAISES; i++) {
        raiser->raises[i].begin_ns = now_ns();
        CHECK(invalidate(&raiser->node, WAIT_MS) == KVK_OK);
        raiser->raises[i].end_ns = now_ns();
        raiser->raise_count++;
        (void)usleep((useconds_t)(now_ns() % 90000));
    }
    return NULL;
}

/* No number that any node gave before an invalidation began is given by any after it ended, and
 * its age is over. */
static void raisers_check(const struct raiser *raisers)
{
    uint64_t worst_ns = 0;
    for (int i = 0; i < NODES; i++) {
        for (uint32_t r = 0; r < raisers[i].raise_count; r++) {
            uint64_t old = 0;
            for (int k = 0; k < NODES; k++) {
                for (uint32_t s = 0; s < raisers[k].seen_count; s++) {
                    if (raisers[k].seen[s].first_ns < raisers[i].raises[r].begin_ns &&
                        raisers[k].seen[s].number > old) {
                        old = raisers[k].seen[s].number;
                    }
                }
            }
            for (int k = 0; k < NODES; k++) {
                for (uint32_t s = 0; s < raisers[k].seen_count; s++) {
                    uint64_t end_ns = raisers[i].raises[r].end_ns;
                    if (raisers[k].seen[s].number <= old && raisers[k].seen[s].last_ns > end_ns) {
                        uint64_t late_ns = raisers[k].seen[s].last_ns - end_ns;
                        worst_ns = late_ns > worst_ns ? late_ns : worst_ns;
                    }
                }
            }
        }
    }
    (void)printf("an invalidated number was given for at most %.1f ms more, of %d\n",
                 (double)worst_ns / 1e6, AGE_MS);
    CHECK(worst_ns <= AGE_MS * KVK_NS_PER_MS);
}

static void all_at_once(void)
{
    static struct raiser raisers[NODES];
    for (int i = 0; i < NODES; i++) {
        node_open(&raisers[i].node, fleet_key, NULL);
    }
    for (int i = 0; i < NODES; i++) {
        CHECK(pthread_create(&raisers[i].watch_thread, NULL, watch_main, &raisers[i]) == 0);
        CHECK(pthread_create(&raisers[i].raise_thread, NULL, raise_main, &raisers[i]) == 0);
    }
    for (int i = 0; i < NODES; i++) {
        CHECK(pthread_join(raisers[i].raise_thread, NULL) == 0);
    }
    uint64_t number = 0;
    (void)usleep(3 * AGE_MS * 1000);
    for (int i = 1; i < NODES; i++) {
        number = agreed(&raisers[0].node, &raisers[i].node);
    }
    for (int i = 0; i < NODES; i++) {
        raisers[i].stop = true;
        CHECK(pthread_join(raisers[i].watch_thread, NULL) == 0);
        CHECK(number_await(&raisers[i].node, 0) == number);
    }
    raisers_check(raisers);
    for (int i = 0; i < NODES; i++) {
        node_close(&raisers[i].node);
    }
}

int main(void)
{
    if (!remote_is_installed()) {
        return 77;
    }
    house_open();
    struct node a;
    struct node b;
    node_open(&a, fleet_key, "a");
    node_open(&b, fleet_key, NULL);
    one_number(&a, &b);
    raised_for_all(&a, &b);
    away(&a);
    lost_and_put_back(&a, &b);
    scribbled(&a, &b);
    store_away(&a, &b);
    raise_survives(&a);
    order(&a, &b);
    node_close(&a);
    node_close(&b);
    all_at_once();
    forgotten();
    kvk_fleet_identity_finish(&house.identity);
    house_end();
    return 0;
}
