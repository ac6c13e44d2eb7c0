/*
 * The HTTP listener against any bytes: requests as they come over the wire, and, more of them a
 * second, texts that say they are JSON given straight to each method. Every request has an answer
 * or an end; an answer in JSON is JSON; a refusal says why.
 *
 * An input's first byte: even, the rest goes over a connection; odd, it chooses the method, and
 * the rest is the request.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/http.h"
#include "daemon/rpc_json.h"
#include "tests/engine_bare.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define ANSWER_S 60 /* far sooner where nothing hangs */

static struct {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_rpc *rpc;
    struct kvk_http *http;
} house;

static const char *const methods[] = {
    "GetServerInfo", "GetOccupancy", "GetUsage",   "ListSpaces",    "ListSequences",
    "ListLeases",    "ListTenants",  "Why",        "ListInstances", "GetStats",
    "Doctor",        "GetMissRatio", "Invalidate", "OpenSpace",     "",
    "Session",
};

/* In place of the real one, at link time: there is no server behind these handlers. */
void __wrap_kvk_server_stats(struct kvk_server *server, struct kvk_server_stats *stats);

void __wrap_kvk_server_stats(struct kvk_server *server, struct kvk_server_stats *stats)
{
    (void)server;
    memset(stats, 0, sizeof(*stats));
}

/* Something to be listed: a space, a session, a sequence. */
static void furnish(void)
{
    struct kvk_error error;
    struct kvk_sequence_reply sequence;
    struct kvk_tables tables = {.part_count = 0};
    static const uint32_t tokens[6] = {1, 2, 3, 4, 5, 6};
    const struct kvk_caller caller = bare_user(house.tenants);
    const struct kvk_geometry geometry = bare_geometry(1, 1, 8, 4);
    uint64_t space_id = bare_space(house.cache, &caller, "m\xc3\xa9\"", &geometry).space_id;
    uint64_t session_id = bare_session(house.cache, &caller);
    const struct kvk_open_request open = {.session_id = session_id,
                                          .space_id = space_id,
                                          .prompt = {.tokens = tokens, .token_count = 6},
                                          .tier = -1};
    enum kvk_status status =
        kvk_sequence_open(house.cache, &caller, &open, &sequence, &tables, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_tables_finish(&tables);
}

static void house_end(void)
{
    kvk_http_destroy(house.http);
    kvk_rpc_detach(house.rpc);
    kvk_rpc_destroy(house.rpc);
    kvk_cache_destroy(house.cache);
    kvk_tenants_destroy(house.tenants);
    kvk_config_finish(&house.config);
}

static void house_begin(void)
{
    struct kvk_error error;
    kvk_log_set_level(KVK_LOG_ERROR);
    kvk_config_init(&house.config);
    house.config.device_bytes = 1 << 16;
    house.config.host_bytes = 1 << 16;
    house.config.blocks = 256;
    house.config.huge_pages = false;
    enum kvk_status status = kvk_tenants_create(&house.config, &house.tenants, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_cache_options cache = {.config = &house.config,
                                            .tenants = house.tenants,
                                            .device = bare_device(),
                                            .host_device = bare_device()};
    status = kvk_cache_create(&cache, &house.cache, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_device_info info = {.name = "cpu"};
    const struct kvk_rpc_options rpc = {.config = &house.config,
                                        .tenants = house.tenants,
                                        .clock = kvk_clock_monotonic(),
                                        .side_path = "/side"};
    status = kvk_rpc_create(&rpc, &house.rpc, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_rpc_attach(house.rpc, house.cache, NULL, &info);
    const struct kvk_http_options http = {.address = "127.0.0.1:0",
                                          .open = KVK_HTTP_OPEN_ALL,
                                          .rpc = house.rpc,
                                          .cache = house.cache};
    status = kvk_http_create(&http, &house.http, &error);
    KVK_ASSERT(status == KVK_OK);
    furnish();
    (void)atexit(house_end);
}

static void over_the_wire(const uint8_t *data, size_t size)
{
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons(kvk_http_port(house.http)),
                                        .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    /* No state is left for the ports behind: there are far more connections than ports. */
    const struct linger at_once = {.l_onoff = 1};
    const struct timeval wait = {.tv_sec = ANSWER_S};
    char answer[4096];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    KVK_ASSERT(fd >= 0);
    int result = setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) |
                 setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    KVK_ASSERT(result == 0);
    result = connect(fd, (const struct sockaddr *)&address, sizeof(address));
    KVK_ASSERT(result == 0);
    (void)!send(fd, data, size, MSG_NOSIGNAL);
    (void)shutdown(fd, SHUT_WR);
    ssize_t got;
    while ((got = recv(fd, answer, sizeof(answer), 0)) > 0) {
    }
    KVK_ASSERT(got == 0 || errno != EAGAIN);
    (void)close(fd);
}

static void straight(const char *method, const uint8_t *data, size_t size)
{
    static const struct kvk_credential anybody = {.name = "http", .admin = true};
    struct kvk_error error = {.text = ""};
    char *text = NULL;
    enum kvk_status status =
        kvk_rpc_json_call(house.rpc, method, (const char *)data, size, &anybody, &text, &error);
    KVK_ASSERT((status == KVK_OK) == (text != NULL));
    if (status != KVK_OK) {
        KVK_ASSERT(error.text[0] != '\0');
        KVK_ASSERT(memchr(error.text, '\0', sizeof(error.text)) != NULL);
        return;
    }
    json_error_t wrong;
    json_t *value = json_loads(text, JSON_REJECT_DUPLICATES, &wrong);
    KVK_ASSERT(json_is_object(value));
    json_decref(value);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (house.cache == NULL) {
        house_begin();
    }
    if (size > 0 && data[0] % 2 == 1) {
        straight(methods[(data[0] >> 1) % (sizeof(methods) / sizeof(methods[0]))], data + 1,
                 size - 1);
    } else if (size > 0) {
        over_the_wire(data + 1, size - 1);
    }
    return 0;
}
