/*
 * A remote store that answers whatever it likes: the client's one thread runs here, on a clock that
 * stands still while it works, over sockets whose other ends are this file's. What is fetched is a
 * hit only with the right bytes; every batch ends once; a batch that is done has its memory for
 * itself.
 *
 * An input says, answer by answer, what becomes of the right one: see answer_make().
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "hosttier/remote_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PORT 7000U
#define NODES 3U
#define PEERS 48U
#define BLOCKS 4U
#define PIECES 3U
#define SMALL_BYTES 256U
#define LARGE_BYTES 30000U
#define INPUT_MAX (1U << 19)
#define OUTPUT_MAX (1U << 20)
#define TURNS_MAX 1500U
#define DEADLINE_MS 150U
#define TOUCHED 0xa5

enum { SPACE_SMALL = 0, SPACE_LARGE, SPACE_JOURNAL, SPACES };

/* ---- What there is ---- */

/* The other end of a connection. */
struct peer {
    int client; /* the client's descriptor, -1: nobody's */
    int fd;
    bool closing;
    size_t pace; /* bytes at a time; 0: as they fit */
    size_t input_size, output_size, output_done;
    uint8_t *input;  /* [INPUT_MAX] */
    uint8_t *output; /* [OUTPUT_MAX] */
};

/* Something the client asks for, and its memory. */
struct job {
    struct kvk_remote_batch batch;
    struct kvk_remote_block blocks[BLOCKS];
    struct kvk_remote_piece pieces[BLOCKS][PIECES];
    uint8_t *memory[BLOCKS];
    bool submitted, done;
};

struct value {
    char name[KVK_REMOTE_NAME_SIZE];
    uint8_t *bytes;
    size_t size;
};

static const struct {
    enum kvk_remote_operation operation;
    int space;
    bool chain;
} plans[] = {
    {KVK_REMOTE_EXISTS, SPACE_SMALL, true},  {KVK_REMOTE_FETCH, SPACE_LARGE, true},
    {KVK_REMOTE_FETCH, SPACE_SMALL, false},  {KVK_REMOTE_STORE, SPACE_LARGE, false},
    {KVK_REMOTE_TAIL, SPACE_JOURNAL, false}, {KVK_REMOTE_APPEND, SPACE_JOURNAL, false},
    {KVK_REMOTE_STORE, SPACE_SMALL, false},  {KVK_REMOTE_DROP, SPACE_SMALL, false},
};
#define JOBS (sizeof(plans) / sizeof(plans[0]))

static struct {
    bool running; /* the client; all sockets and threads are this file's meanwhile */
    bool keeping; /* what is stored is kept: before the first input */
    uint64_t now_ns;
    uint32_t turn;
    const uint8_t *script;
    size_t script_size;
    struct kvk_remote *remote;
    struct kvk_remote_space spaces[SPACES];
    uint8_t right[SPACES][BLOCKS][LARGE_BYTES]; /* what is stored */
    struct job jobs[JOBS];
    struct peer peers[PEERS];
    struct value kept[2 * BLOCKS];
    uint32_t kept_count;
    void *(*thread)(void *); /* the lane's, which runs here */
} house;

/* ---- The server ---- */

static uint8_t script_byte(void)
{
    if (house.script_size == 0) {
        return 0;
    }
    house.script_size--;
    return *house.script++;
}

static void say(struct peer *peer, const void *bytes, size_t size)
{
    if (size > OUTPUT_MAX - peer->output_size) {
        peer->closing = true;
        return;
    }
    memcpy(peer->output + peer->output_size, bytes, size);
    peer->output_size += size;
}

static void KVK_PRINTF(2, 3) say_text(struct peer *peer, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    KVK_ASSERT(size > 0 && (size_t)size < sizeof(text));
    say(peer, text, (size_t)size);
}

static struct value *value_of(const char *name)
{
    for (uint32_t i = 0; i < house.kept_count; i++) {
        if (strcmp(house.kept[i].name, name) == 0) {
            return &house.kept[i];
        }
    }
    return NULL;
}

/* Words of a command, where they lie. */
struct words {
    const uint8_t *bytes[6];
    size_t sizes[6];
    char name[KVK_REMOTE_NAME_SIZE]; /* the second */
    uint32_t count;
};

static bool word_is(const struct words *words, uint32_t index, const char *text)
{
    return words->count > index && words->sizes[index] == strlen(text) &&
           memcmp(words->bytes[index], text, strlen(text)) == 0;
}

static void keep(const struct words *words)
{
    KVK_ASSERT(house.kept_count < 2 * BLOCKS);
    struct value *value = &house.kept[house.kept_count++];
    (void)snprintf(value->name, sizeof(value->name), "%s", words->name);
    value->size = words->sizes[2];
    value->bytes = malloc(value->size);
    KVK_ASSERT(value->bytes != NULL);
    memcpy(value->bytes, words->bytes[2], value->size);
}

static void say_range(struct peer *peer, const struct words *words)
{
    const struct value *value = value_of(words->name);
    unsigned long last = strtoul((const char *)words->bytes[3], NULL, 10);
    if (words->bytes[2][0] == '-') { /* the end of a journal */
        say_text(peer, "$8\r\nabcdefgh\r\n");
        return;
    }
    size_t size = value == NULL ? 0 : last + 1 < value->size ? last + 1 : value->size;
    say_text(peer, "$%zu\r\n", size);
    if (size > 0) {
        say(peer, value->bytes, size);
    }
    say_text(peer, "\r\n");
}

static void say_right(struct peer *peer, const struct words *words)
{
    if (word_is(words, 0, "PING")) {
        say_text(peer, "+PONG\r\n");
    } else if (word_is(words, 0, "CLUSTER")) {
        say_text(peer, "*%u\r\n", NODES);
        for (uint32_t i = 0; i < NODES; i++) {
            uint32_t first = i * KVK_REMOTE_SLOT_COUNT / NODES;
            uint32_t end = (i + 1) * KVK_REMOTE_SLOT_COUNT / NODES;
            say_text(peer, "*3\r\n:%u\r\n:%u\r\n*3\r\n$9\r\n127.0.0.1\r\n:%u\r\n$2\r\nid\r\n",
                     first, end - 1, PORT + i);
        }
    } else if (word_is(words, 0, "GETRANGE")) {
        say_range(peer, words);
    } else if (word_is(words, 0, "UNLINK") || word_is(words, 0, "APPEND")) {
        say_text(peer, ":1\r\n");
    } else {
        say_text(peer, "+OK\r\n");
    }
}

/* What is said to a command: the right answer, or what the next bytes of the input make of it. */
static void answer_make(struct peer *peer, const struct words *words)
{
    size_t start = peer->output_size;
    uint8_t how = script_byte();
    if (how % 8 != 3 && how % 8 != 7) {
        say_right(peer, words);
    }
    size_t size = peer->output_size - start;
    switch (how % 8) {
    case 2: /* changed here and there */
        for (uint32_t i = 0; i <= how / 64U && size > 0; i++) {
            uint32_t at = script_byte() | (uint32_t)script_byte() << 8;
            peer->output[start + at % size] = script_byte();
        }
        break;
    case 3: { /* other bytes */
        uint8_t count = script_byte();
        for (uint32_t i = 0; i < count; i++) {
            uint8_t byte = script_byte();
            say(peer, &byte, 1);
        }
        break;
    }
    case 4: { /* cut, and what follows comes behind it; or it is the last */
        size_t cut = (script_byte() | (size_t)script_byte() << 8) % (size + 1);
        peer->output_size = start + cut;
        peer->closing = how >= 128;
        break;
    }
    case 5: /* and once more */
        say_right(peer, words);
        break;
    case 6: /* slowly from now on */
        peer->pace = (size_t)script_byte() * how / 8;
        break;
    case 7: /* elsewhere */
        say_text(peer, "-%s %u 127.0.0.1:%u\r\n", how >= 128 ? "ASK" : "MOVED",
                 kvk_remote_slot(words->name, strlen(words->name)), PORT + how / 8 % (NODES + 1));
        break;
    default:
        break;
    }
}

/* A line's number; false: it is not whole yet. */
static bool number_take(const struct peer *peer, size_t *at, char kind, size_t *number)
{
    const uint8_t *start = peer->input + *at;
    const uint8_t *end = memchr(start, '\n', peer->input_size - *at);
    if (end == NULL) {
        return false;
    }
    KVK_ASSERT((char)*start == kind); /* the client speaks the protocol */
    *number = strtoul((const char *)start + 1, NULL, 10);
    *at = (size_t)(end + 1 - peer->input);
    return true;
}

static bool command_take(struct peer *peer)
{
    struct words words = {.count = 0};
    size_t at = 0;
    size_t count = 0;
    if (!number_take(peer, &at, '*', &count)) {
        return false;
    }
    KVK_ASSERT(count > 0 && count <= 6);
    while (words.count < count) {
        size_t size = 0;
        if (!number_take(peer, &at, '$', &size) || peer->input_size - at < size + 2) {
            return false;
        }
        KVK_ASSERT(memcmp(peer->input + at + size, "\r\n", 2) == 0);
        words.bytes[words.count] = peer->input + at;
        words.sizes[words.count++] = size;
        at += size + 2;
    }
    if (count > 1 && words.sizes[1] < sizeof(words.name)) {
        memcpy(words.name, words.bytes[1], words.sizes[1]);
    }
    if (house.keeping && word_is(&words, 0, "SET")) {
        keep(&words);
    }
    answer_make(peer, &words);
    peer->input_size -= at;
    memmove(peer->input, peer->input + at, peer->input_size);
    return true;
}

static void peer_end(struct peer *peer)
{
    if (peer->fd >= 0) {
        (void)close(peer->fd);
    }
    peer->fd = -1;
    peer->client = -1;
}

static void peer_step(struct peer *peer)
{
    ssize_t got =
        recv(peer->fd, peer->input + peer->input_size, INPUT_MAX - peer->input_size, MSG_DONTWAIT);
    if (got == 0) {
        peer_end(peer);
        return;
    }
    peer->input_size += got > 0 ? (size_t)got : 0;
    KVK_ASSERT(peer->input_size < INPUT_MAX);
    while (peer->input_size > 0 && !peer->closing && command_take(peer)) {
    }
    size_t left = peer->output_size - peer->output_done;
    size_t step = peer->pace > 0 && peer->pace < left ? peer->pace : left;
    ssize_t sent = step == 0 ? 0
                             : send(peer->fd, peer->output + peer->output_done, step,
                                    MSG_DONTWAIT | MSG_NOSIGNAL);
    peer->output_done += sent > 0 ? (size_t)sent : 0;
    if (peer->output_done == peer->output_size) {
        peer->output_done = 0;
        peer->output_size = 0;
        if (peer->closing) {
            peer_end(peer);
        }
    }
}

/* ---- The client's world ---- */

static uint64_t clock_now(struct kvk_clock *clock)
{
    (void)clock;
    return house.now_ns;
}

static void job_done(void *context, struct kvk_remote_batch *batch)
{
    struct job *job = context;
    int space = plans[job - house.jobs].space;
    KVK_ASSERT(!job->done);
    job->done = true;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        size_t size = (size_t)house.spaces[space].block_bytes;
        bool hit = batch->operation == KVK_REMOTE_FETCH && job->blocks[i].result == KVK_REMOTE_HIT;
        KVK_ASSERT(job->blocks[i].result != KVK_REMOTE_PENDING);
        KVK_ASSERT(!hit || memcmp(job->memory[i], house.right[space][i], size) == 0);
        memset(job->memory[i], TOUCHED, size); /* whatever comes now must not come here */
    }
}

static void job_submit(struct job *job)
{
    size_t index = (size_t)(job - house.jobs);
    const struct kvk_remote_space *space = &house.spaces[plans[index].space];
    for (uint32_t i = 0; i < BLOCKS; i++) {
        size_t size = (size_t)space->block_bytes;
        uint8_t *memory = job->memory[i];
        job->blocks[i] = (struct kvk_remote_block){.pieces = job->pieces[i]};
        kvk_store_le32(job->blocks[i].id.key, i + 1);
        if (plans[index].operation == KVK_REMOTE_STORE) {
            memcpy(memory, house.right[plans[index].space][i], size);
        } else {
            memset(memory, 0, size);
        }
        uint32_t count = plans[index].space == SPACE_JOURNAL ? 1 : PIECES;
        for (uint32_t k = 0; k < count; k++) {
            size_t here = k + 1 < count ? size / 5 * (k + 1) : size;
            job->pieces[i][k] = (struct kvk_remote_piece){memory, here};
            memory += here;
            size -= here;
        }
        job->blocks[i].piece_count = count;
    }
    job->done = false;
    job->batch = (struct kvk_remote_batch){
        .operation = plans[index].operation,
        .space = space,
        .blocks = job->blocks,
        .block_count = BLOCKS,
        .chain = plans[index].chain,
        .deadline_ns = house.now_ns + DEADLINE_MS * KVK_NS_PER_MS,
        .done = job_done,
        .context = job,
    };
    job->submitted = kvk_remote_submit(house.remote, &job->batch, NULL) == KVK_OK;
    job->done = !job->submitted;
}

static bool jobs_are_done(void)
{
    for (size_t i = 0; i < JOBS; i++) {
        if (house.jobs[i].submitted && !house.jobs[i].done) {
            return false;
        }
    }
    return true;
}

/* Between two turns of the client: everybody else's. */
static void turn_take(void)
{
    struct kvk_remote_lane *lane = &house.remote->lanes[0];
    struct kvk_remote_health health;
    for (uint32_t i = 0; i < PEERS; i++) {
        if (house.peers[i].client >= 0 && house.peers[i].fd >= 0) {
            peer_step(&house.peers[i]);
        }
    }
    kvk_remote_health(house.remote, &health);
    bool begun = house.jobs[0].submitted || house.jobs[0].done;
    if (!begun && (health.state == KVK_REMOTE_GOOD || house.turn > TURNS_MAX / 8)) {
        for (size_t i = 0; i < JOBS; i++) {
            bool wanted = !house.keeping || plans[i].operation == KVK_REMOTE_STORE;
            if (wanted) {
                job_submit(&house.jobs[i]);
            } else {
                house.jobs[i].done = true;
            }
        }
        begun = true;
    }
    if ((begun && jobs_are_done()) || ++house.turn > TURNS_MAX) {
        kvk_lock(&lane->lock);
        lane->stopping = true;
        kvk_unlock(&lane->lock);
    }
}

/* ---- The system, as the client sees it ---- */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*routine)(void *), void *context);
int __real_pthread_join(pthread_t thread, void **result);
int __real_epoll_wait(int fd, struct epoll_event *events, int count, int timeout);
int __real_socket(int domain, int type, int protocol);
int __real_connect(int fd, const struct sockaddr *address, socklen_t size);
int __real_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*routine)(void *), void *context);
int __wrap_pthread_join(pthread_t thread, void **result);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int count, int timeout);
int __wrap_socket(int domain, int type, int protocol);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*routine)(void *), void *context)
{
    if (!house.running) {
        return __real_pthread_create(thread, attributes, routine, context);
    }
    house.thread = routine; /* the last one is the lane's; nobody resolves names */
    memset(thread, 0, sizeof(*thread));
    return 0;
}

int __wrap_pthread_join(pthread_t thread, void **result)
{
    return house.running ? 0 : __real_pthread_join(thread, result);
}

int __wrap_epoll_wait(int fd, struct epoll_event *events, int count, int timeout)
{
    if (!house.running) {
        return __real_epoll_wait(fd, events, count, timeout);
    }
    turn_take();
    int ready = __real_epoll_wait(fd, events, count, 0);
    house.now_ns += ready > 0 || timeout <= 0 ? 20000 : (uint64_t)timeout * KVK_NS_PER_MS;
    return ready;
}

int __wrap_socket(int domain, int type, int protocol)
{
    if (!house.running) {
        return __real_socket(domain, type, protocol);
    }
    for (uint32_t i = 0; i < PEERS; i++) {
        struct peer *peer = &house.peers[i];
        int pair[2];
        if (peer->client < 0 && socketpair(AF_UNIX, type, 0, pair) == 0) {
            peer->client = pair[0];
            peer->fd = pair[1];
            peer->closing = false;
            peer->pace = 0;
            peer->input_size = 0;
            peer->output_size = 0;
            peer->output_done = 0;
            return pair[0];
        }
    }
    errno = EMFILE;
    return -1;
}

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size)
{
    if (!house.running) {
        return __real_connect(fd, address, size);
    }
    struct sockaddr_in four;
    memcpy(&four, address, size < sizeof(four) ? size : sizeof(four));
    bool here = address->sa_family == AF_INET && ntohl(four.sin_addr.s_addr) == INADDR_LOOPBACK &&
                ntohs(four.sin_port) - PORT < NODES;
    for (uint32_t i = 0; i < PEERS && !here; i++) {
        if (house.peers[i].client == fd) {
            peer_end(&house.peers[i]);
        }
    }
    errno = ECONNREFUSED;
    return here ? 0 : -1;
}

int __wrap_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                       struct addrinfo **found)
{
    return house.running ? EAI_NONAME : __real_getaddrinfo(node, service, hints, found);
}

/* ---- One input ---- */

static void client_run(void)
{
    struct kvk_remote_options options = {
        .seeds = "127.0.0.1:7000",
        .thread_count = 1,
        .connection_count = 2,
        .pipeline_depth = 4,
        .request_count_max = 64,
        .node_timeout_ms = 100,
        .breaker_failures = 2,
        .breaker_retry_ms = 10,
        .breaker_retry_max_ms = 20,
        .refresh_ms = 50,
    };
    house.turn = 0;
    for (size_t i = 0; i < JOBS; i++) {
        house.jobs[i].submitted = false;
        house.jobs[i].done = false;
    }
    house.running = true;
    KVK_ASSERT(kvk_remote_open(&options, &house.remote, NULL) == KVK_OK);
    (void)house.thread(&house.remote->lanes[0]);
    kvk_remote_close(house.remote);
    house.running = false;
    for (uint32_t i = 0; i < PEERS; i++) {
        peer_end(&house.peers[i]);
    }
    for (size_t i = 0; i < JOBS; i++) {
        const struct job *job = &house.jobs[i];
        KVK_ASSERT(!job->submitted || job->done);
        for (uint32_t k = 0; job->submitted && k < BLOCKS; k++) {
            size_t size = (size_t)house.spaces[plans[i].space].block_bytes;
            const uint8_t *memory = job->memory[k]; /* all as the first one */
            KVK_ASSERT(memory[0] == TOUCHED && memcmp(memory, memory + 1, size - 1) == 0);
        }
    }
}

/* With what a store would have, by the client's own doing. */
static void house_init(void)
{
    static const uint8_t digest[KVK_REMOTE_SECRET_SIZE] = {1};
    const uint64_t sizes[SPACES] = {SMALL_BYTES, LARGE_BYTES, 64};
    kvk_clock_monotonic()->now_ns = clock_now;
    house.now_ns = KVK_NS_PER_SECOND;
    for (int i = 0; i < SPACES; i++) {
        struct kvk_remote_space_options options = {
            .secret = digest,
            .space = digest,
            .shape = digest,
            .group = (uint32_t)i,
            .block_bytes = sizes[i],
        };
        KVK_ASSERT(kvk_remote_space_init(&house.spaces[i], &options, NULL) == KVK_OK);
    }
    for (size_t i = 0; i < sizeof(house.right); i++) {
        ((uint8_t *)house.right)[i] = (uint8_t)(i * 7 + (i >> 8) + (i >> 16) * 31);
    }
    for (size_t i = 0; i < JOBS; i++) {
        for (uint32_t k = 0; k < BLOCKS; k++) {
            house.jobs[i].memory[k] = malloc((size_t)sizes[plans[i].space]);
            KVK_ASSERT(house.jobs[i].memory[k] != NULL);
        }
    }
    for (uint32_t i = 0; i < PEERS; i++) {
        house.peers[i] = (struct peer){.client = -1, .fd = -1};
        house.peers[i].input = malloc(INPUT_MAX);
        house.peers[i].output = malloc(OUTPUT_MAX);
        KVK_ASSERT(house.peers[i].input != NULL && house.peers[i].output != NULL);
    }
    house.keeping = true;
    client_run();
    house.keeping = false;
    KVK_ASSERT(house.kept_count == 2 * BLOCKS);
    /* A store that is well: everything is a hit, or no input proves anything. */
    client_run();
    for (size_t i = 0; i < JOBS; i++) {
        KVK_ASSERT(house.jobs[i].batch.hit_count == BLOCKS);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (house.kept_count == 0) {
        house_init();
    }
    house.script = data;
    house.script_size = size;
    client_run();
    return 0;
}
