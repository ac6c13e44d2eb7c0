/*
 * The remote store's answers and questions in odd pieces: a server of the test's own that answers a
 * byte at a time, several answers at once, too little or too much, cuts the connection within a
 * value, says yes before it has read what is stored, or stands still until the deadline is over. No
 * block is a hit with a wrong byte, nothing is written beside a block's memory, nor into it once
 * its batch is done, and what was stored is what the memory held while the batch was under way.
 *
 *     test_stress_remote_pieces [--seconds N]
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/random.h"
#include "hosttier/remote.h"
#include "tests/patience.h"

#define SMALL_BYTES 3000U
#define LARGE_BYTES 1500000U
#define VALUE_MAX (LARGE_BYTES + KVK_REMOTE_HEADER_SIZE)
#define BLOCKS 8U
#define PIECES 5U
#define GUARD_BYTES 64U
#define PEERS_MAX 512U

#define CHECK(condition) KVK_ASSERT(condition)

/* How the server behaves. */
enum manner {
    WHOLE = 0, /* as one that is well; several answers in one packet */
    BYTES,     /* one byte at a time */
    RANDOM,    /* cut anywhere */
    SHORT,     /* a byte less of the value than there is */
    LONG,      /* a byte more */
    TINY,      /* three bytes of it */
    HEADER,    /* nothing behind its header */
    FLIPPED,   /* one bit is another one */
    EMPTY,     /* nothing lies there */
    NIL,       /* in other words */
    WORDS,     /* a status that is none of a value's */
    CUT,       /* it ends within the value */
    HUGE_SIZE, /* says that more comes than was asked for */
    BAD_END,   /* what ends the value is wrong */
    BAD_LINE,  /* the value's size is no number */
    EARLY,     /* says yes to stores before they were read */
    STILL,     /* stops within a value, coming or going, until it is told to go on */
    MANNERS,
};

static struct {
    int listener;
    unsigned port;
    _Atomic int manner;
    _Atomic bool stop;
    _Atomic uint32_t still; /* peers that stopped within a value */
    struct kvk_lock lock;   /* over these */
    struct {
        char name[64];
        uint8_t *value;
        size_t size;
    } kept[4 * BLOCKS];
    uint32_t kept_count;
    pthread_t peers[PEERS_MAX];
    _Atomic uint32_t peer_count;
} server;

/* ---- The server ---- */

struct peer {
    int fd;
    struct kvk_random random;
    uint8_t input[4096];
    size_t input_at, input_size;
    uint8_t *output; /* [2 * VALUE_MAX * BLOCKS] */
    size_t output_size;
    uint32_t early; /* stores to come that were answered already */
};

static bool send_all(struct peer *peer, const uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(peer->fd, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0) {
            return false;
        }
        bytes += sent;
        size -= (size_t)sent;
    }
    return true;
}

static void stand_still(void)
{
    (void)atomic_fetch_add(&server.still, 1);
    while (atomic_load(&server.manner) == STILL && !atomic_load(&server.stop)) {
        (void)usleep(1000);
    }
}

/* What it has to say, as its manner is. */
static bool peer_flush(struct peer *peer)
{
    const uint8_t *bytes = peer->output;
    size_t size = peer->output_size;
    int manner = atomic_load(&server.manner);
    peer->output_size = 0;
    while (size > 0) {
        size_t step = size;
        if (manner == BYTES) {
            /* Not all of a large one, or it would take all day. */
            step = size > 15000 ? size - 15000 + kvk_random_below(&peer->random, 9) : 1;
        } else if (manner == RANDOM) {
            step = (size_t)kvk_random_between(&peer->random, 1, size < 90000 ? size : 90000);
        } else if (manner == STILL && size > 10) {
            step = (size_t)kvk_random_between(&peer->random, 1, size - 1);
        } else if (manner == CUT && size > 100) {
            step = (size_t)kvk_random_between(&peer->random, 1, size - 1);
            return send_all(peer, bytes, step) && false;
        }
        if (!send_all(peer, bytes, step)) {
            return false;
        }
        bytes += step;
        size -= step;
        if (manner == STILL && size > 0) {
            stand_still();
        }
        if (manner == RANDOM && kvk_random_chance(&peer->random, 0.3)) {
            (void)usleep(200);
        }
    }
    return true;
}

static bool peer_read(struct peer *peer, uint8_t *bytes, size_t size)
{
    while (size > 0) {
        if (peer->input_at == peer->input_size) {
            if (!peer_flush(peer)) {
                return false;
            }
            ssize_t got = recv(peer->fd, peer->input, sizeof(peer->input), 0);
            if (got <= 0) {
                return false;
            }
            peer->input_at = 0;
            peer->input_size = (size_t)got;
        }
        size_t here = peer->input_size - peer->input_at;
        here = here < size ? here : size;
        memcpy(bytes, peer->input + peer->input_at, here);
        peer->input_at += here;
        bytes += here;
        size -= here;
    }
    return true;
}

static bool peer_line(struct peer *peer, char kind, size_t *number)
{
    char line[32];
    for (size_t i = 0; i < sizeof(line) - 1; i++) {
        if (!peer_read(peer, (uint8_t *)&line[i], 1)) {
            return false;
        }
        if (line[i] == '\n') {
            line[i] = '\0';
            CHECK(line[0] == kind);
            *number = strtoul(line + 1, NULL, 10);
            return true;
        }
    }
    KVK_UNREACHABLE();
}

static void say(struct peer *peer, const void *bytes, size_t size)
{
    memcpy(peer->output + peer->output_size, bytes, size);
    peer->output_size += size;
}

static void say_text(struct peer *peer, const char *text)
{
    say(peer, text, strlen(text));
}

/* GETRANGE, as it should be or is not. */
static void say_value(struct peer *peer, const char *name)
{
    static const uint8_t more[2] = {0};
    int manner = atomic_load(&server.manner);
    char line[32];
    kvk_lock(&server.lock);
    uint32_t i = 0;
    while (i < server.kept_count && strcmp(server.kept[i].name, name) != 0) {
        i++;
    }
    size_t size = i < server.kept_count ? server.kept[i].size : 0;
    size_t said = size;
    if (manner == NIL || manner == WORDS || manner == BAD_LINE) {
        say_text(peer, manner == NIL ? "$-1\r\n" : manner == WORDS ? "+NO\r\n" : "$12x4\r\n");
        kvk_unlock(&server.lock);
        return;
    }
    if (size > 0 && manner == SHORT) {
        said = size - 1;
    } else if (size > 0 && manner == LONG) {
        said = size + 1;
    } else if (size > 0 && (manner == TINY || manner == EMPTY || manner == HEADER)) {
        said = manner == TINY ? 3 : manner == HEADER ? KVK_REMOTE_HEADER_SIZE : 0;
    }
    (void)snprintf(line, sizeof(line), "$%zu\r\n", manner == HUGE_SIZE ? 5000000 : said);
    say_text(peer, line);
    uint8_t *at = peer->output + peer->output_size;
    if (size > 0) {
        say(peer, server.kept[i].value, said < size ? said : size);
    }
    if (said > size) {
        say(peer, more, said - size);
    } else if (manner == FLIPPED && said > 0) {
        at[kvk_random_below(&peer->random, said)] ^=
            (uint8_t)(1U << kvk_random_below(&peer->random, 8));
    }
    kvk_unlock(&server.lock);
    say_text(peer, manner == BAD_END ? "\rx" : "\r\n");
}

static void keep(const char *name, uint8_t *value, size_t size)
{
    kvk_lock(&server.lock);
    uint32_t i = 0;
    while (i < server.kept_count && strcmp(server.kept[i].name, name) != 0) {
        i++;
    }
    if (i == server.kept_count) {
        CHECK(i < sizeof(server.kept) / sizeof(server.kept[0]));
        (void)snprintf(server.kept[i].name, sizeof(server.kept[i].name), "%s", name);
        server.kept_count++;
    } else {
        free(server.kept[i].value);
    }
    server.kept[i].value = value;
    server.kept[i].size = size;
    kvk_unlock(&server.lock);
}

/* The last word of a SET, some of it late. */
static bool value_hear(struct peer *peer, const char *name, size_t size)
{
    uint8_t *value = malloc(size);
    int manner = atomic_load(&server.manner);
    CHECK(value != NULL && size <= VALUE_MAX);
    size_t first = (size_t)kvk_random_below(&peer->random, size);
    if (manner == EARLY && peer->early == 0) {
        /* To the next ones too, of which the client may have written nothing yet. */
        peer->early = (uint32_t)kvk_random_between(&peer->random, 1, 3);
        for (uint32_t i = 0; i < peer->early; i++) {
            say_text(peer, "+OK\r\n");
        }
        if (!peer_flush(peer)) {
            free(value);
            return false;
        }
        (void)usleep(20000);
    }
    bool whole = peer_read(peer, value, first);
    if (manner == STILL) {
        stand_still();
    }
    if (!whole || !peer_read(peer, value + first, size - first)) {
        free(value);
        return false;
    }
    keep(name, value, size);
    if (peer->early > 0) {
        peer->early--;
    } else {
        say_text(peer, "+OK\r\n");
    }
    return true;
}

/* One command; false: it is over. */
static bool peer_command(struct peer *peer)
{
    char words[4][64] = {{0}};
    size_t count = 0;
    size_t size = 0;
    uint8_t end[2];
    if (!peer_line(peer, '*', &count)) {
        return false;
    }
    CHECK(count > 0 && count <= 5);
    for (size_t i = 0; i < count; i++) {
        if (!peer_line(peer, '$', &size)) {
            return false;
        }
        bool ok = true;
        if (strcmp(words[0], "SET") == 0 && i == 2) {
            ok = value_hear(peer, words[1], size);
        } else {
            CHECK(size < sizeof(words[0]) && i < 4);
            ok = peer_read(peer, (uint8_t *)words[i], size);
        }
        if (!ok || !peer_read(peer, end, 2)) {
            return false;
        }
        CHECK(end[0] == '\r' && end[1] == '\n');
    }
    if (strcmp(words[0], "PING") == 0) {
        say_text(peer, "+PONG\r\n");
    } else if (strcmp(words[0], "CLUSTER") == 0) {
        say_text(peer, "-ERR This instance has cluster support disabled\r\n");
    } else if (strcmp(words[0], "GETRANGE") == 0) {
        say_value(peer, words[1]);
    } else {
        CHECK(strcmp(words[0], "SET") == 0);
    }
    return true;
}

static void *peer_main(void *context)
{
    struct peer *peer = context;
    while (!atomic_load(&server.stop) && peer_command(peer)) {
    }
    (void)close(peer->fd);
    free(peer->output);
    free(peer);
    return NULL;
}

static void *server_main(void *context)
{
    (void)context;
    for (;;) {
        int fd = accept(server.listener, NULL, NULL);
        if (fd < 0 || atomic_load(&server.stop)) {
            if (fd >= 0) {
                (void)close(fd);
            }
            return NULL;
        }
        int one = 1;
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        struct peer *peer = calloc(1, sizeof(*peer));
        CHECK(peer != NULL && atomic_load(&server.peer_count) < PEERS_MAX);
        peer->fd = fd;
        peer->output = malloc(2 * (size_t)VALUE_MAX * BLOCKS);
        CHECK(peer->output != NULL);
        kvk_random_init(&peer->random, server.peer_count);
        CHECK(pthread_create(&server.peers[server.peer_count++], NULL, peer_main, peer) == 0);
    }
}

/* ---- The client ---- */

static struct {
    struct kvk_remote *remote;
    struct kvk_random random;
    struct kvk_lock lock;
    pthread_cond_t changed;
    bool done;
    struct kvk_remote_batch batch;
    struct kvk_remote_block blocks[BLOCKS];
    struct kvk_remote_piece pieces[BLOCKS][PIECES];
    uint8_t *memory; /* [BLOCKS] of a guard, a block, a guard */
    uint64_t hits, misses, late;
} client;

static uint8_t *memory_of(uint32_t block, const struct kvk_remote_space *space)
{
    return client.memory + block * (2 * GUARD_BYTES + (size_t)space->block_bytes) + GUARD_BYTES;
}

static uint8_t byte_of(const struct kvk_remote_space *space, uint32_t block, size_t at)
{
    return (uint8_t)(at * 7 + (at >> 8) + block * 31 + space->format);
}

static void fill(const struct kvk_remote_space *space, bool right)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint8_t *memory = memory_of(i, space);
        memset(memory - GUARD_BYTES, 0xa5, 2 * GUARD_BYTES + space->block_bytes);
        for (size_t at = 0; right && at < space->block_bytes; at++) {
            memory[at] = byte_of(space, i, at);
        }
    }
}

static bool block_right(const struct kvk_remote_space *space, uint32_t block)
{
    const uint8_t *memory = memory_of(block, space);
    for (size_t at = 0; at < space->block_bytes; at++) {
        if (memory[at] != byte_of(space, block, at)) {
            return false;
        }
    }
    return true;
}

static void guards_check(const struct kvk_remote_space *space)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const uint8_t *memory = memory_of(i, space);
        for (size_t at = 0; at < GUARD_BYTES; at++) {
            CHECK(memory[-(ptrdiff_t)at - 1] == 0xa5);
            CHECK(memory[space->block_bytes + at] == 0xa5);
        }
    }
}

static void batch_done(void *context, struct kvk_remote_batch *batch)
{
    (void)context;
    (void)batch;
    kvk_lock(&client.lock);
    client.done = true;
    (void)pthread_cond_signal(&client.changed);
    kvk_unlock(&client.lock);
}

/* How many were hits; -1: it was refused. */
static int64_t submit_and_wait(const struct kvk_remote_space *space,
                               enum kvk_remote_operation operation, uint64_t deadline_ms)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        struct kvk_remote_block *block = &client.blocks[i];
        uint64_t left = space->block_bytes;
        uint8_t *memory = memory_of(i, space);
        memset(block, 0, sizeof(*block));
        kvk_store_le32(block->id.key, i + 1);
        for (uint32_t k = 0; k < PIECES; k++) {
            uint64_t size = k + 1 < PIECES ? kvk_random_below(&client.random, left + 1) : left;
            client.pieces[i][k] = (struct kvk_remote_piece){memory, size};
            memory += size;
            left -= size;
        }
        block->pieces = client.pieces[i];
        block->piece_count = PIECES;
    }
    client.done = false;
    client.batch = (struct kvk_remote_batch){
        .operation = operation,
        .space = space,
        .blocks = client.blocks,
        .block_count = BLOCKS,
        .deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + deadline_ms * KVK_NS_PER_MS,
        .done = batch_done,
    };
    if (kvk_remote_submit(client.remote, &client.batch, NULL) != KVK_OK) {
        return -1;
    }
    kvk_lock(&client.lock);
    while (!client.done) {
        (void)kvk_condition_wait(&client.changed, &client.lock, UINT64_MAX);
    }
    kvk_unlock(&client.lock);
    guards_check(space);
    return client.batch.hit_count;
}

static void fetch_check(const struct kvk_remote_space *space, int manner)
{
    fill(space, false);
    int64_t hits =
        submit_and_wait(space, KVK_REMOTE_FETCH, manner == STILL ? 60 : promised_ms(20000));
    bool well = manner <= RANDOM || manner == EARLY;
    CHECK(hits < 0 || !well || hits == BLOCKS);
    for (uint32_t i = 0; hits >= 0 && i < BLOCKS; i++) {
        enum kvk_remote_result result = client.blocks[i].result;
        CHECK(result != KVK_REMOTE_HIT || block_right(space, i));
        client.hits += result == KVK_REMOTE_HIT;
        client.misses += result != KVK_REMOTE_HIT;
        CHECK((manner != SHORT && manner != LONG && manner != HEADER) ||
              result == KVK_REMOTE_TRUNCATED);
        CHECK(manner != TINY || result == KVK_REMOTE_NOT_OURS);
        CHECK(manner != EMPTY || result == KVK_REMOTE_ABSENT);
        CHECK((manner != NIL && manner != WORDS) || result == KVK_REMOTE_REFUSED);
        CHECK(
            (manner != FLIPPED && manner != HUGE_SIZE && manner != BAD_END && manner != BAD_LINE) ||
            result != KVK_REMOTE_HIT);
    }
    if (manner == STILL && hits >= 0) {
        /* Its batch is done: what comes now goes nowhere. */
        fill(space, false);
        atomic_store(&server.manner, WHOLE);
        (void)usleep(50000);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            const uint8_t *memory = memory_of(i, space);
            for (size_t at = 0; at < space->block_bytes; at++) {
                CHECK(memory[at] == 0xa5);
            }
        }
        client.late++;
    }
}

static void store_all(const struct kvk_remote_space *space, int manner)
{
    atomic_store(&server.manner, manner);
    fill(space, true);
    int64_t hits =
        submit_and_wait(space, KVK_REMOTE_STORE, manner == STILL ? 60 : promised_ms(20000));
    /* Who answers early may answer a question in between with what was meant for a store. */
    CHECK(hits < 0 || manner == STILL || manner == EARLY || hits == BLOCKS);
    fill(space, false); /* the memory is the caller's again, whatever is still being sent */
    if (manner == STILL) {
        (void)usleep(10000);
        atomic_store(&server.manner, WHOLE);
        (void)usleep(50000);
    }
}

static void settle(void)
{
    struct kvk_remote_health health = {0};
    atomic_store(&server.manner, WHOLE);
    (void)usleep(80000); /* what a lane sees of its nodes is as old as that */
    uint64_t until = kvk_clock_now(kvk_clock_monotonic()) + promised_ms(20000) * KVK_NS_PER_MS;
    do {
        (void)usleep(2000);
        kvk_remote_health(client.remote, &health);
        CHECK(kvk_clock_now(kvk_clock_monotonic()) < until);
    } while (health.state != KVK_REMOTE_GOOD);
}

static void round_run(const struct kvk_remote_space *space)
{
    for (int manner = 0; manner < MANNERS; manner++) {
        store_all(space, WHOLE);
        atomic_store(&server.manner, manner);
        fetch_check(space, manner);
        if (manner >= CUT) {
            settle();
        }
    }
    const int stores[] = {RANDOM, EARLY, EARLY, EARLY, STILL};
    for (size_t i = 0; i < sizeof(stores) / sizeof(stores[0]); i++) {
        store_all(space, WHOLE);
        store_all(space, stores[i]);
        settle();
        fetch_check(space, WHOLE); /* all are right, those too that were sent late */
    }
}

static void server_start(pthread_t *thread)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    kvk_lock_init(&server.lock);
    server.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(server.listener >= 0);
    CHECK(bind(server.listener, (const struct sockaddr *)&address, size) == 0);
    int small = 16 << 10; /* so that much of what comes is not sent yet */
    CHECK(setsockopt(server.listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) == 0);
    CHECK(listen(server.listener, 64) == 0);
    CHECK(getsockname(server.listener, (struct sockaddr *)&address, &size) == 0);
    server.port = ntohs(address.sin_port);
    CHECK(pthread_create(thread, NULL, server_main, NULL) == 0);
}

static void server_stop(pthread_t thread)
{
    atomic_store(&server.stop, true);
    (void)shutdown(server.listener, SHUT_RDWR);
    CHECK(pthread_join(thread, NULL) == 0);
    for (uint32_t i = 0; i < server.peer_count; i++) {
        CHECK(pthread_join(server.peers[i], NULL) == 0);
    }
    for (uint32_t i = 0; i < server.kept_count; i++) {
        free(server.kept[i].value);
    }
    (void)close(server.listener);
    kvk_lock_finish(&server.lock);
}

int main(int count, char **arguments)
{
    static const uint8_t secret[KVK_REMOTE_SECRET_SIZE] = {1, 2, 3};
    struct kvk_remote_space spaces[4];
    struct kvk_error error;
    pthread_t thread;
    char seeds[32];
    double seconds =
        count > 2 && strcmp(arguments[1], "--seconds") == 0 ? strtod(arguments[2], NULL) : 0.0;
    for (uint32_t i = 0; i < 4; i++) {
        struct kvk_remote_space_options options = {
            .secret = secret,
            .space = secret,
            .shape = secret,
            .group = i,
            .format = i,
            .block_bytes = i % 2 == 0 ? SMALL_BYTES : LARGE_BYTES,
            .encrypt = i >= 2,
        };
        CHECK(kvk_remote_space_init(&spaces[i], &options, &error) == KVK_OK);
    }
    server_start(&thread);
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", server.port);
    struct kvk_remote_options options = {
        .seeds = seeds,
        .connection_count = 2,
        .pipeline_depth = BLOCKS / 2,
        .node_timeout_ms = promised_ms(2000),
        .breaker_retry_ms = 5,
        .breaker_retry_max_ms = 20,
    };
    CHECK(kvk_remote_open(&options, &client.remote, &error) == KVK_OK);
    client.memory = malloc(BLOCKS * (2 * GUARD_BYTES + (size_t)LARGE_BYTES));
    CHECK(client.memory != NULL);
    kvk_lock_init(&client.lock);
    kvk_condition_init(&client.changed);
    kvk_random_init(&client.random, 1);
    settle();
    uint64_t until = kvk_clock_now(kvk_clock_monotonic()) + (uint64_t)(seconds * 1e9);
    do {
        for (uint32_t i = 0; i < 4; i++) {
            round_run(&spaces[i]);
        }
    } while (kvk_clock_now(kvk_clock_monotonic()) < until && server.peer_count < PEERS_MAX / 2);
    CHECK(client.hits > 0 && client.misses > 0 && client.late > 0);
    CHECK(atomic_load(&server.still) > 0);
    (void)printf("%llu hits, all right; %llu misses; %llu batches ended within values\n",
                 (unsigned long long)client.hits, (unsigned long long)client.misses,
                 (unsigned long long)client.late);
    kvk_remote_close(client.remote);
    server_stop(thread);
    (void)pthread_cond_destroy(&client.changed);
    kvk_lock_finish(&client.lock);
    free(client.memory);
    return 0;
}
