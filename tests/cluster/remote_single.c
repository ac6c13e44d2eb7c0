/*
 * The remote store as one server: with a user of the ACL that may do no more than is needed, over
 * TLS, with wrong passwords and certificates; and servers that answer nonsense. What is wrong is
 * said in words, and nobody waits.
 *
 * Skipped where redis-server is not installed.
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "tests/cluster/remote_client.h"

#define BLOCK_BYTES (300U << 10)
#define BLOCKS 40U
#define WAIT_MS PATIENCE_MS

static struct {
    struct remote_server server;
    char options[256];
    struct kvk_remote_space space;
} house;

void house_end(void)
{
    remote_server_stop(&house.server);
}

/* A server with TLS on the next port, and users. */
static void house_open(void)
{
    uint8_t secret[KVK_REMOTE_SECRET_SIZE] = {3};
    struct kvk_remote_space_options options = {
        .secret = secret,
        .space = secret,
        .shape = secret,
        .block_bytes = BLOCK_BYTES,
    };
    CHECK(kvk_remote_space_init(&house.space, &options, NULL) == KVK_OK);
    remote_server_init(&house.server);
    CHECK(remote_command(
              "cd %s && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
              "-nodes -days 2 -subj /CN=store -addext subjectAltName=DNS:store,IP:127.0.0.1 "
              "-keyout key.pem -out cert.pem 2>/dev/null && "
              "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
              "-days 2 -subj /CN=other -keyout other-key.pem -out other.pem 2>/dev/null",
              house.server.folder) == 0);
    char text[256];
    (void)snprintf(text, sizeof(text), "%s/users.acl", house.server.folder);
    FILE *file = fopen(text, "w");
    CHECK(file != NULL);
    CHECK(fputs("user default off\n"
                "user kvkeep on >open-sesame ~kvkeep:* +getrange +set +append +unlink "
                "+ping +cluster|slots\n"
                "user reader on >read-only ~kvkeep:* +getrange +cluster|slots\n",
                file) >= 0);
    CHECK(fclose(file) == 0);
    (void)snprintf(house.options, sizeof(house.options),
                   "--tls-port %u --tls-cert-file cert.pem --tls-key-file key.pem "
                   "--tls-ca-cert-file cert.pem --tls-auth-clients no --aclfile %s/users.acl",
                   house.server.port + 1, house.server.folder);
    house.server.more = house.options;
    remote_server_run(&house.server);
}

static struct kvk_remote *store_open(const char *user, const char *password, const char *ca,
                                     const char *name)
{
    char seeds[64];
    char path[128];
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", house.server.port + (ca != NULL ? 1 : 0));
    (void)snprintf(path, sizeof(path), "%s/%s", house.server.folder, ca != NULL ? ca : "");
    struct kvk_remote_options options = {
        .seeds = seeds,
        .user = user,
        .password = password,
        .tls = ca != NULL,
        .tls_ca_file = path,
        .tls_name = name,
        .ttl_ms = 60000,
    };
    struct kvk_remote *remote = NULL;
    struct kvk_error error;
    enum kvk_status status = kvk_remote_open(&options, &remote, &error);
    if (status != KVK_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
    }
    CHECK(status == KVK_OK);
    return remote;
}

static void use(struct kvk_remote *remote)
{
    struct client client;
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    CHECK(!client_health(remote).cluster && client_health(remote).node_count == 1);
    client_init(&client, remote, &house.space, BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, BLOCKS, false, 5000) == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 0, BLOCKS, true, 5000) == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, true, 5000) == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_DROP, 0, BLOCKS, false, 5000) == BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, true, 5000) == 0);
    client_finish(&client);
    struct kvk_remote_health health = client_health(remote);
    CHECK(health.counters.bytes[KVK_REMOTE_FETCH] == (uint64_t)BLOCKS * BLOCK_BYTES);
    CHECK(health.counters.bytes[KVK_REMOTE_STORE] == (uint64_t)BLOCKS * BLOCK_BYTES);
    CHECK(health.counters.blocks[KVK_REMOTE_FETCH][KVK_REMOTE_HIT] == BLOCKS);
    CHECK(health.fetch_rate > 0 && health.store_rate > 0 && health.round_trip_ns > 0);
    CHECK(health.batches_now == 0 && health.bytes_now == 0 && health.counters.batches == 5);
}

/* Entries of a journal stand one behind the other, its tail is what was added last, and what is no
 * string there is said to be none of ours. */
static void journal(struct kvk_remote *remote)
{
    struct client entry;
    struct client tail;
    struct kvk_remote_space small = house.space;
    struct kvk_remote_space wide = house.space;
    small.block_bytes = small.part_bytes = 16;
    wide.block_bytes = wide.part_bytes = 40;
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    client_init(&entry, remote, &small, 1);
    client_init(&tail, remote, &wide, 1);
    CHECK(client_run(&tail, KVK_REMOTE_TAIL, 900, 1, false, 5000) == 0);
    CHECK(tail.blocks[0].result == KVK_REMOTE_ABSENT);
    for (uint8_t i = 1; i <= 4; i++) {
        memset(entry.memory, i, 16);
        CHECK(client_run(&entry, KVK_REMOTE_APPEND, 900, 1, false, 5000) == 1);
        CHECK(entry.blocks[0].length == (uint64_t)16 * i);
        memset(tail.memory, 0xee, 40);
        CHECK(client_run(&tail, KVK_REMOTE_TAIL, 900, 1, false, 5000) == 1);
        CHECK(tail.blocks[0].length == (i < 3 ? (uint64_t)16 * i : 40));
        for (int k = 1; k <= 40; k++) { /* from the end */
            int age = (k - 1) / 16;
            CHECK(tail.memory[40 - k] == (age < i ? i - age : 0));
        }
    }
    CHECK(client_run(&entry, KVK_REMOTE_DROP, 900, 1, false, 5000) == 1);
    CHECK(client_run(&tail, KVK_REMOTE_TAIL, 900, 1, false, 5000) == 0);
    client_finish(&entry);
    client_finish(&tail);
}

/* A value may have a time of its own. */
static void time_of_its_own(struct kvk_remote *remote)
{
    struct client client;
    client_init(&client, remote, &house.space, 1);
    CHECK(client_submit(&client, KVK_REMOTE_STORE, 901, 1, 1, false, 5000));
    client_wait(&client);
    client.batch.ttl_ms = 300;
    client.batch.deadline_ns = now_ns() + 5 * KVK_NS_PER_SECOND;
    client.done = false;
    CHECK(kvk_remote_submit(remote, &client.batch, NULL) == KVK_OK);
    client_wait(&client);
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 901, 1, false, 5000) == 1);
    (void)usleep(400000);
    CHECK(client_run(&client, KVK_REMOTE_EXISTS, 901, 1, false, 5000) == 0);
    client_finish(&client);
}

static void lets_nobody_in(struct kvk_remote *remote, const char *word)
{
    uint64_t until = now_ns() + WAIT_MS * KVK_NS_PER_MS;
    while (strstr(client_health(remote).reason, word) == NULL) {
        CHECK(now_ns() < until);
        (void)usleep(2000);
    }
    CHECK(client_health(remote).state == KVK_REMOTE_AWAY);
    CHECK(client_health(remote).counters.connect_failures > 0);
    CHECK(strstr(client_health(remote).reason, "sesame") == NULL);
    kvk_remote_close(remote);
}

/* ---- Servers that are none ---- */

struct nonsense {
    const char *text;
    size_t size;
    unsigned port;
    int listener;
    _Atomic bool stop;
};

static void *nonsense_main(void *context)
{
    struct nonsense *nonsense = context;
    while (!nonsense->stop) {
        int fd = accept(nonsense->listener, NULL, NULL);
        if (fd < 0) {
            break;
        }
        char asked[4096];
        if (recv(fd, asked, sizeof(asked), 0) > 0) {
            (void)!send(fd, nonsense->text, nonsense->size, MSG_NOSIGNAL);
            (void)recv(fd, asked, sizeof(asked), 0); /* till it is closed, or says more */
        }
        (void)close(fd);
    }
    return NULL;
}

static void nonsense_is_survived(const char *text, size_t size)
{
    struct nonsense nonsense = {.text = text, .size = size};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof(address);
    pthread_t thread;
    char seeds[64];
    nonsense.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(nonsense.listener, (struct sockaddr *)&address, sizeof(address)) == 0);
    CHECK(listen(nonsense.listener, 8) == 0);
    CHECK(getsockname(nonsense.listener, (struct sockaddr *)&address, &length) == 0);
    CHECK(pthread_create(&thread, NULL, nonsense_main, &nonsense) == 0);
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", ntohs(address.sin_port));
    struct kvk_remote_options options = {
        .seeds = seeds, .node_timeout_ms = 100, .breaker_retry_ms = 10};
    struct kvk_remote *remote = NULL;
    struct client client;
    CHECK(kvk_remote_open(&options, &remote, NULL) == KVK_OK);
    client_init(&client, remote, &house.space, 1);
    uint64_t least = now_ns() + 300 * KVK_NS_PER_MS;
    uint64_t until = now_ns() + PATIENCE_MS * KVK_NS_PER_MS;
    uint64_t failures = 0;
    while (now_ns() < least || (failures == 0 && now_ns() < until)) {
        CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, 1, false, 50) == 0);
        (void)usleep(5000);
        struct kvk_remote_counters counters = client_health(remote).counters;
        failures = counters.connect_failures + counters.lost_connections;
    }
    CHECK(failures > 0);
    kvk_remote_close(remote);
    nonsense.stop = true;
    (void)shutdown(nonsense.listener, SHUT_RDWR);
    CHECK(pthread_join(thread, NULL) == 0);
    (void)close(nonsense.listener);
    client_finish(&client);
}

static void all_nonsense(void)
{
#define TEXT(text) nonsense_is_survived(text, sizeof(text) - 1)
    TEXT("HTTP/1.1 400 Bad Request\r\n\r\n");
    TEXT("+PONG\r\n+PONG\r\n+PONG\r\n"); /* answers to nothing */
    TEXT("+PONG\r\n*2000000000\r\n");    /* an array of all memory */
    TEXT("+PONG\r\n*-7\r\n$-9\r\n");
    TEXT("+PONG\r\n$999999999999\r\nxx\r\n"); /* a value of all memory */
    TEXT("+PONG\r\n*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\na\r\n:1\r\n"); /* slots past the end */
    TEXT("+PONG\r\n*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n*0\r\n:99\r\n");     /* a host that is none */
    TEXT("+PONG\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n"); /* deep */
    TEXT("-ERR no\r\n");
    TEXT("+PONG\r\n-ERR This instance has cluster support disabled\r\n$-1\r\n");
    TEXT("\0\0\0\0");
    TEXT("");
#undef TEXT
}

/* Batches that nobody answers end when the store is closed, with their callback. */
static void closed_under_way(void)
{
    struct kvk_remote *remote = store_open("kvkeep", "open-sesame", NULL, NULL);
    struct client client;
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    client_init(&client, remote, &house.space, BLOCKS);
    CHECK(kill(house.server.pid, SIGSTOP) == 0);
    CHECK(client_submit(&client, KVK_REMOTE_FETCH, 0, BLOCKS, 1, false, 60000));
    (void)usleep(50000);
    kvk_remote_close(remote);
    CHECK(client.done && client.blocks[0].result == KVK_REMOTE_CANCELLED);
    CHECK(kill(house.server.pid, SIGCONT) == 0);
    client_finish(&client);
}

/* A deadline ends a batch whatever the server does; what it answers later touches nobody. */
static void deadline_passed(void)
{
    struct kvk_remote *remote = store_open("kvkeep", "open-sesame", NULL, NULL);
    struct client client;
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    client_init(&client, remote, &house.space, BLOCKS);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, BLOCKS, false, 5000) == BLOCKS);
    CHECK(kill(house.server.pid, SIGSTOP) == 0);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 100) == 0);
    CHECK(client.results[KVK_REMOTE_DEADLINE] == BLOCKS);
    memset(client.memory, 0x77, BLOCKS * (size_t)BLOCK_BYTES);
    CHECK(kill(house.server.pid, SIGCONT) == 0);
    uint64_t until = now_ns() + WAIT_MS * KVK_NS_PER_MS;
    struct kvk_remote_counters counters = client_health(remote).counters;
    while (counters.late_answers == 0 && counters.lost_connections == 0) {
        CHECK(now_ns() < until);
        (void)usleep(2000);
        counters = client_health(remote).counters;
    }
    for (size_t i = 0; i < BLOCKS * (size_t)BLOCK_BYTES; i++) {
        CHECK(client.memory[i] == 0x77);
    }
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, BLOCKS, false, 5000) == BLOCKS);
    client_finish(&client);
    kvk_remote_close(remote);
}

/* The resolver of this program: a name has two addresses, and the server listens to the second. */
static struct sockaddr_in two[2];
static struct addrinfo found[2];

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **result)
{
    (void)service;
    (void)hints;
    if (strcmp(node, "two.addresses") != 0) {
        return EAI_NONAME;
    }
    for (int i = 0; i < 2; i++) {
        two[i] = remote_address(i == 0 ? 1 : house.server.port);
        found[i] = (struct addrinfo){
            .ai_family = AF_INET,
            .ai_socktype = SOCK_STREAM,
            .ai_addr = (struct sockaddr *)&two[i],
            .ai_addrlen = sizeof(two[i]),
            .ai_next = i == 0 ? &found[1] : NULL,
        };
    }
    *result = &found[0];
    return 0;
}

void freeaddrinfo(struct addrinfo *result)
{
    CHECK(result == &found[0]);
}

static void a_name_of_two_addresses(void)
{
    struct kvk_remote *remote = NULL;
    struct kvk_remote_options options = {
        .seeds = "no.name:1,two.addresses:2",
        .user = "kvkeep",
        .password = "open-sesame",
    };
    CHECK(kvk_remote_open(&options, &remote, NULL) == KVK_OK);
    use(remote);
    kvk_remote_close(remote);
}

static void wrong_options(void)
{
    const struct kvk_remote_options wrong[] = {
        {.seeds = ""},
        {.seeds = "host"},
        {.seeds = "a:1,,b:2"},
        {.seeds = "a:1", .key_prefix = "no spaces"},
        {.seeds = "a:1", .key_prefix = "{tag}"},
        {.seeds = "a:1", .key_prefix = "0123456789012345678901234567890123456789"},
        {.seeds = "a:1", .thread_count = KVK_REMOTE_THREADS_MAX + 1},
        {.seeds = "a:1", .connection_count = 17},
        {.seeds = "a:1", .request_count_max = 7},
        {.seeds = "a:1", .tls = true, .tls_ca_file = "/nowhere/at/all"},
    };
    const char *const fields[] = {"seeds",
                                  "seeds",
                                  "seeds",
                                  "key_prefix",
                                  "key_prefix",
                                  "key_prefix",
                                  "thread_count",
                                  "connection_count",
                                  "request_count_max",
                                  "tls_ca_file"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct kvk_remote *remote = NULL;
        struct kvk_error error;
        CHECK(kvk_remote_open(&wrong[i], &remote, &error) == KVK_INVALID);
        CHECK(strcmp(error.field, fields[i]) == 0);
    }
}

int main(void)
{
    if (!remote_is_installed()) {
        return 77;
    }
    client_end_well();
    house_open();
    wrong_options();
    struct kvk_remote *remote = store_open("kvkeep", "open-sesame", NULL, NULL);
    use(remote);
    journal(remote);
    time_of_its_own(remote);
    kvk_remote_close(remote);
    remote = store_open("kvkeep", "open-sesame", "cert.pem", NULL);
    use(remote);
    kvk_remote_close(remote);
    remote = store_open("kvkeep", "open-sesame", "cert.pem", "store");
    use(remote);
    kvk_remote_close(remote);

    a_name_of_two_addresses();

    lets_nobody_in(store_open("kvkeep", "wrong", NULL, NULL), "WRONGPASS");
    lets_nobody_in(store_open("", "", NULL, NULL), "NOAUTH");
    lets_nobody_in(store_open("kvkeep", "open-sesame", "other.pem", NULL), "certificate");
    lets_nobody_in(store_open("kvkeep", "open-sesame", "cert.pem", "elsewhere"), "mismatch");

    /* Who may not write is refused, each time in words, and may go on reading. */
    remote = store_open("reader", "read-only", NULL, NULL);
    CHECK(client_await(remote, KVK_REMOTE_GOOD, WAIT_MS));
    struct client client;
    client_init(&client, remote, &house.space, 1);
    CHECK(client_run(&client, KVK_REMOTE_STORE, 0, 1, false, 1000) == 0);
    CHECK(client.blocks[0].result == KVK_REMOTE_REFUSED);
    CHECK(strstr(client_health(remote).reason, "NOPERM") != NULL);
    CHECK(client_run(&client, KVK_REMOTE_FETCH, 0, 1, false, 1000) == 0);
    CHECK(client.blocks[0].result == KVK_REMOTE_ABSENT);
    client_finish(&client);
    kvk_remote_close(remote);

    closed_under_way();
    deadline_passed();
    all_nonsense();
    kvk_remote_space_finish(&house.space);
    house_end();
    return 0;
}
