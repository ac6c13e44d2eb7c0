/*
 * The side socket against any conversation: connections that come and go, tokens that are right,
 * cut, late or nobody's, and bytes in any pieces. Whatever they send, the thread goes on and
 * answers the next; descriptors come only for a token that was right; nothing is left behind.
 *
 * An input is a list of steps: the low three bits say what, the others on which connection.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/side_socket.h"
#include "tests/engine_bare.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CONNECTIONS 16
#define STEPS_MAX 128

enum {
    STEP_CONNECT,
    STEP_BIND,
    STEP_FETCH,
    STEP_SEND,
    STEP_CLOSE,
    STEP_READ,
    STEP_MAP,
    STEP_SHUTDOWN,
};

static struct {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_side_socket *side;
    struct kvk_caller caller;
    struct sockaddr_un address;
    int connections[CONNECTIONS]; /* -1: none */
    struct kvk_welcome welcome;
    struct kvk_map_reply map;
    uint64_t mapped;  /* tokens that were given out for this input's session */
    uint64_t fetched; /* answers that came with descriptors */
} house;

static void house_begin(void)
{
    struct kvk_error error;
    kvk_log_set_level(KVK_LOG_ERROR);
    kvk_config_init(&house.config);
    house.config.device_bytes = 0;
    house.config.host_bytes = 1 << 20;
    house.config.scratch_bytes = 1 << 20;
    enum kvk_status status = kvk_tenants_create(&house.config, &house.tenants, &error);
    KVK_ASSERT(status == KVK_OK);
    house.caller = bare_user(house.tenants);
    const struct kvk_cache_options cache = {
        .config = &house.config, .tenants = house.tenants, .host_device = bare_device()};
    status = kvk_cache_create(&cache, &house.cache, &error);
    KVK_ASSERT(status == KVK_OK);
    house.address.sun_family = AF_UNIX;
    (void)snprintf(house.address.sun_path, sizeof(house.address.sun_path), "/tmp/kvk-fuzz-side.%d",
                   (int)getpid());
    status = kvk_side_socket_create(house.cache, house.address.sun_path, 0600, 4 * CONNECTIONS,
                                    &house.side, &error);
    KVK_ASSERT(status == KVK_OK);
    for (int i = 0; i < CONNECTIONS; i++) {
        house.connections[i] = -1;
    }
}

static void house_end(void)
{
    kvk_side_socket_destroy(house.side);
    kvk_cache_destroy(house.cache);
    kvk_tenants_destroy(house.tenants);
    kvk_config_finish(&house.config);
}

static int connect_one(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    KVK_ASSERT(fd >= 0);
    int result = connect(fd, (const struct sockaddr *)&house.address, sizeof(house.address));
    KVK_ASSERT(result == 0);
    return fd;
}

/* Whatever is there. Descriptors are those of a token that was given out, each once. */
static void read_all(int fd)
{
    for (;;) {
        union {
            struct cmsghdr header;
            uint8_t bytes[CMSG_SPACE(4 * sizeof(int))];
        } control;
        uint8_t answer[16];
        struct iovec part = {.iov_base = answer, .iov_len = sizeof(answer)};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = control.bytes,
                                 .msg_controllen = sizeof(control)};
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got <= 0) {
            return;
        }
        for (ssize_t i = 0; i < got; i++) {
            KVK_ASSERT(answer[i] <= 1);
        }
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header == NULL) {
            continue;
        }
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int passed;
            memcpy(&passed, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
            (void)close(passed);
        }
        house.fetched++;
        KVK_ASSERT(house.fetched <= house.mapped);
    }
}

static void send_bytes(int fd, const void *bytes, size_t size)
{
    (void)!send(fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void map_one(void)
{
    const struct kvk_map_request request = {
        .session_id = house.welcome.session_id, .kind = KVK_MAP_SCRATCH, .size_bytes = 4096};
    if (kvk_session_map(house.cache, &house.caller, &request, &house.map, NULL) == KVK_OK) {
        house.mapped++;
    }
}

/* Answers how many bytes of the input it used beyond its own. */
static size_t step(uint8_t what, const uint8_t *data, size_t size)
{
    int *fd = &house.connections[(what >> 3) % CONNECTIONS];
    size_t used = 0;
    if ((what & 7) == STEP_CONNECT && *fd < 0) {
        *fd = connect_one();
    }
    if (*fd < 0) {
        return 0;
    }
    switch (what & 7) {
    case STEP_BIND:
        send_bytes(*fd, house.welcome.side_token, KVK_TOKEN_SIZE);
        break;
    case STEP_FETCH:
        send_bytes(*fd, house.map.map_token, KVK_TOKEN_SIZE);
        break;
    case STEP_SEND:
        if (size > 0) {
            used = 1 + (data[0] < size - 1 ? data[0] : size - 1);
            send_bytes(*fd, data + 1, used - 1);
        }
        break;
    case STEP_CLOSE:
        (void)close(*fd);
        *fd = -1;
        break;
    case STEP_READ:
        read_all(*fd);
        break;
    case STEP_MAP:
        map_one();
        break;
    case STEP_SHUTDOWN:
        (void)shutdown(*fd, SHUT_WR);
        break;
    default:
        break;
    }
    return used;
}

/* The thread has seen all that came before when it refuses this one. */
static void expect_answer(void)
{
    static const uint8_t nobody[KVK_TOKEN_SIZE] = {0xff};
    int fd = connect_one();
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    send_bytes(fd, nobody, sizeof(nobody));
    int ready;
    do { /* far sooner where nothing hangs; the fuzzer's own alarm comes between */
        ready = poll(&wait, 1, 60000);
    } while (ready < 0 && errno == EINTR);
    KVK_ASSERT(ready == 1);
    uint8_t answer = 0;
    ssize_t got = recv(fd, &answer, 1, 0);
    KVK_ASSERT((got == 1 && answer == 1) || got <= 0);
    (void)close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint32_t inputs;
    struct kvk_error error;
    if (inputs++ % 64 == 0) { /* what waits for this very process to end would pile up */
        if (inputs == 1) {
            (void)atexit(house_end);
        } else {
            house_end();
        }
        house_begin();
    }
    const struct kvk_hello hello = {
        .local = true, .pid = (int32_t)getpid(), .uid = (uint32_t)geteuid(), .pidfd = -1};
    enum kvk_status status =
        kvk_session_begin(house.cache, &house.caller, &hello, &house.welcome, &error);
    KVK_ASSERT(status == KVK_OK);
    house.mapped = 0;
    house.fetched = 0;
    map_one();
    for (int steps = 0; steps < STEPS_MAX && size > 0; steps++) {
        size_t used = 1 + step(data[0], data + 1, size - 1);
        data += used;
        size -= used;
    }
    expect_answer();
    for (int i = 0; i < CONNECTIONS; i++) {
        if (house.connections[i] >= 0) {
            read_all(house.connections[i]);
            (void)close(house.connections[i]);
            house.connections[i] = -1;
        }
    }
    kvk_session_end(house.cache, house.welcome.session_id);
    expect_answer();
    kvk_cache_check(house.cache);
    return 0;
}
