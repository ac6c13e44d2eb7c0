#include "daemon/http.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/canary.h"
#include "daemon/http_metrics.h"
#include "daemon/http_page.h"
#include "daemon/rpc_json.h"

#define BODY_BYTES_MAX 65536
#define CONNECTIONS_MAX 64
#define CONNECTIONS_PER_ADDRESS_MAX 32
#define TIMEOUT_S 15
#define ADDRESS_SIZE 256

struct kvk_http {
    struct MHD_Daemon *server;
    struct kvk_rpc *rpc;
    struct kvk_cache *cache;
    enum kvk_http_open open;
    uint16_t port;
};

/* ---- Addresses ---- */

/* "HOST:PORT" or "[HOST]:PORT" cut in two. */
static bool address_split(const char *address, char host[ADDRESS_SIZE], char port[8])
{
    const char *colon = strrchr(address, ':');
    if (colon == NULL || strlen(address) >= ADDRESS_SIZE || strlen(colon + 1) >= 8 ||
        colon[1] == '\0') {
        return false;
    }
    size_t length = (size_t)(colon - address);
    if (length >= 2 && address[0] == '[' && address[length - 1] == ']') {
        address++;
        length -= 2;
    }
    memcpy(host, address, length);
    host[length] = '\0';
    (void)snprintf(port, 8, "%s", colon + 1);
    return strspn(port, "0123456789") == strlen(port);
}

static struct addrinfo *address_resolve(const char *address, struct kvk_error *error)
{
    char host[ADDRESS_SIZE];
    char port[8];
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    int result = EAI_NONAME;
    if (address_split(address, host, port)) {
        result = getaddrinfo(host[0] == '\0' ? NULL : host, port, &hints, &found);
    }
    if (result != 0) {
        (void)kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "http.address",
                       "http.address: \"%.100s\" is no HOST:PORT that is known here: %s", address,
                       gai_strerror(result));
        return NULL;
    }
    return found;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
        return ntohl(four->sin_addr.s_addr) >> 24 == 127;
    }
    if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
        return IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
    }
    return false;
}

enum kvk_status kvk_http_check(const char *address, enum kvk_http_open open,
                               struct kvk_error *error)
{
    struct addrinfo *found = address_resolve(address, error);
    if (found == NULL) {
        return KVK_INVALID;
    }
    bool loopback = is_loopback(found->ai_addr);
    freeaddrinfo(found);
    if (open == KVK_HTTP_OPEN_ALL && !loopback) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "http.open",
                        "http.open: all is for loopback addresses only, and \"%.100s\" is none",
                        address);
    }
    return KVK_OK;
}

/* ---- Answers ---- */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned code, const char *type,
                              const void *body, size_t size, enum MHD_ResponseMemoryMode memory)
{
    /* The library takes no const; with PERSISTENT and MUST_COPY it only reads. */
    struct MHD_Response *response =
        MHD_create_response_from_buffer(size, (void *)(uintptr_t)body, memory);
    if (response == NULL) {
        if (memory == MHD_RESPMEM_MUST_FREE) {
            free((void *)(uintptr_t)body);
        }
        return MHD_NO;
    }
    static const char *const headers[][2] = {
        {"X-Content-Type-Options", "nosniff"},
        {"X-Frame-Options", "DENY"},
        {"Referrer-Policy", "no-referrer"},
        {"Cache-Control", "no-store"},
        {"Content-Security-Policy",
         "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
         "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    };
    (void)MHD_add_response_header(response, "Content-Type", type);
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        (void)MHD_add_response_header(response, headers[i][0], headers[i][1]);
    }
    if (code == MHD_HTTP_UNAUTHORIZED) {
        (void)MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    }
    enum MHD_Result result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result answer_text(struct MHD_Connection *connection, unsigned code,
                                   const char *text)
{
    return answer(connection, code, "text/plain; charset=utf-8", text, strlen(text),
                  MHD_RESPMEM_MUST_COPY);
}

static unsigned http_code(enum kvk_status status)
{
    switch (status) {
    case KVK_OK:
        return MHD_HTTP_OK;
    case KVK_INVALID:
    case KVK_OUT_OF_RANGE:
        return MHD_HTTP_BAD_REQUEST;
    case KVK_UNAUTHENTICATED:
        return MHD_HTTP_UNAUTHORIZED;
    case KVK_PERMISSION:
        return MHD_HTTP_FORBIDDEN;
    case KVK_NOT_FOUND:
        return MHD_HTTP_NOT_FOUND;
    case KVK_EXHAUSTED:
        return MHD_HTTP_TOO_MANY_REQUESTS;
    case KVK_UNAVAILABLE:
        return MHD_HTTP_SERVICE_UNAVAILABLE;
    case KVK_WOULD_BLOCK:
    case KVK_EXISTS:
    case KVK_PRECONDITION:
    case KVK_ABORTED:
    case KVK_CANCELLED:
    case KVK_DEADLINE:
    case KVK_DATA_LOSS:
    case KVK_INTERNAL:
    case KVK_UNSUPPORTED:
        return MHD_HTTP_INTERNAL_SERVER_ERROR;
    }
    return MHD_HTTP_INTERNAL_SERVER_ERROR;
}

static enum MHD_Result answer_error(struct MHD_Connection *connection,
                                    const struct kvk_error *error)
{
    return answer_text(connection, http_code(error->status), error->text);
}

/* ---- Who asks ---- */

static enum kvk_status identify(struct kvk_http *http, struct MHD_Connection *connection,
                                const struct kvk_credential **credential, struct kvk_error *error)
{
    static const char scheme[] = "Bearer ";
    const char *header =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    if (header == NULL) {
        return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                        "an admin's token is wanted: authorization: Bearer TOKEN");
    }
    if (strncasecmp(header, scheme, sizeof(scheme) - 1) != 0) {
        return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                        "the authorization header is not \"Bearer TOKEN\"");
    }
    const char *token = header + sizeof(scheme) - 1;
    return kvk_rpc_json_identify(http->rpc, (const uint8_t *)token, strlen(token),
                                 info == NULL ? NULL : info->client_addr, credential, error);
}

/* A page from elsewhere that made a browser believe that this is its own server would name that. */
static bool host_is_here(struct MHD_Connection *connection)
{
    const char *host =
        MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    return host == NULL || strncmp(host, "127.", 4) == 0 || strncmp(host, "[::1]", 5) == 0 ||
           strncmp(host, "localhost", 9) == 0;
}

/* A credential, or NULL where none is needed. */
static enum kvk_status admit(struct kvk_http *http, struct MHD_Connection *connection,
                             enum kvk_http_open needed, const struct kvk_credential **credential,
                             struct kvk_error *error)
{
    *credential = NULL;
    if (http->open == KVK_HTTP_OPEN_ALL && !host_is_here(connection)) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "host",
                        "the Host header names another server");
    }
    if (http->open >= needed) {
        return KVK_OK;
    }
    enum kvk_status status = identify(http, connection, credential, error);
    KVK_ASSERT(status != KVK_OK || *credential != NULL);
    if (status == KVK_OK && !(*credential)->admin) {
        status = kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "",
                          "the credential has no admin rights");
    }
    return status;
}

/* ---- Routes ---- */

static enum MHD_Result get_metrics(struct kvk_http *http, struct MHD_Connection *connection)
{
    char *text = kvk_http_metrics(http->rpc);
    if (text == NULL) {
        return answer_text(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "no memory");
    }
    return answer(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text,
                  strlen(text), MHD_RESPMEM_MUST_FREE);
}

static enum MHD_Result get_ready(struct kvk_http *http, struct MHD_Connection *connection)
{
    struct kvk_error error;
    if (kvk_canary_run(http->cache, &error) == KVK_OK) {
        return answer_text(connection, MHD_HTTP_OK, "ready\n");
    }
    kvk_log(KVK_LOG_WARNING, "not_ready", "reason=\"%s\"", error.text);
    return answer_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, error.text);
}

static enum MHD_Result get(struct kvk_http *http, struct MHD_Connection *connection,
                           const char *url)
{
    const struct kvk_credential *credential;
    struct kvk_error error;
    const struct kvk_page_file *file = kvk_page_find(url);
    if (file != NULL) {
        return answer(connection, MHD_HTTP_OK, file->type, file->data, file->size_bytes,
                      MHD_RESPMEM_PERSISTENT);
    }
    if (strcmp(url, "/health/live") == 0) {
        return answer_text(connection, MHD_HTTP_OK, "alive\n");
    }
    bool metrics = strcmp(url, "/metrics") == 0;
    if (!metrics && strcmp(url, "/health/ready") != 0) {
        return answer_text(connection, MHD_HTTP_NOT_FOUND, "there is nothing here\n");
    }
    if (admit(http, connection, KVK_HTTP_OPEN_METRICS, &credential, &error) != KVK_OK) {
        return answer_error(connection, &error);
    }
    return metrics ? get_metrics(http, connection) : get_ready(http, connection);
}

/* What a connection has sent so far. */
struct body {
    char *text;
    size_t size_bytes;
    bool too_large;
};

static enum MHD_Result post(struct kvk_http *http, struct MHD_Connection *connection,
                            const char *url, const struct body *body)
{
    static const char prefix[] = "/api/";
    /* Who is let in without a credential sees what an admin sees, and acts for nobody. */
    static const struct kvk_credential anybody = {.name = "http", .admin = true};
    const struct kvk_credential *credential;
    struct kvk_error error;
    char *text = NULL;
    if (strncmp(url, prefix, sizeof(prefix) - 1) != 0) {
        return answer_text(connection, MHD_HTTP_NOT_FOUND, "there is nothing here\n");
    }
    if (body->too_large) {
        return answer_text(connection, MHD_HTTP_CONTENT_TOO_LARGE,
                           "a request has 64 KiB at most\n");
    }
    enum kvk_status status = admit(http, connection, KVK_HTTP_OPEN_ALL, &credential, &error);
    if (status == KVK_OK) {
        status =
            kvk_rpc_json_call(http->rpc, url + sizeof(prefix) - 1, body->text, body->size_bytes,
                              credential == NULL ? &anybody : credential, &text, &error);
    }
    if (status != KVK_OK) {
        error.status = status;
        return answer_error(connection, &error);
    }
    return answer(connection, MHD_HTTP_OK, "application/json", text, strlen(text),
                  MHD_RESPMEM_MUST_FREE);
}

static void body_take(struct body *body, const char *data, size_t size)
{
    if (body->too_large || size > BODY_BYTES_MAX - body->size_bytes) {
        body->too_large = true;
        return;
    }
    char *text = realloc(body->text, body->size_bytes + size);
    if (text == NULL) {
        body->too_large = true;
        return;
    }
    memcpy(text + body->size_bytes, data, size);
    body->text = text;
    body->size_bytes += size;
}

/* Called for the head of a request, then with what its body brings, then at its end. */
static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *data_size, void **request)
{
    struct kvk_http *http = context;
    (void)version;
    if (*request == NULL) {
        *request = calloc(1, sizeof(struct body));
        return *request == NULL ? MHD_NO : MHD_YES;
    }
    struct body *body = *request;
    if (*data_size > 0) {
        body_take(body, data, *data_size);
        *data_size = 0;
        return MHD_YES;
    }
    if (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0) {
        return get(http, connection, url);
    }
    if (strcmp(method, "POST") == 0) {
        return post(http, connection, url, body);
    }
    return answer_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET or POST\n");
}

static void on_completed(void *context, struct MHD_Connection *connection, void **request,
                         enum MHD_RequestTerminationCode reason)
{
    (void)context;
    (void)connection;
    (void)reason;
    struct body *body = *request;
    if (body != NULL) {
        free(body->text);
        free(body);
        *request = NULL;
    }
}

/* ---- Life ---- */

static int listener_open(const char *address, uint16_t *port, struct kvk_error *error)
{
    struct addrinfo *found = address_resolve(address, error);
    if (found == NULL) {
        return -1;
    }
    int one = 1;
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool open = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
                bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 64) == 0;
    int cause = errno;
    freeaddrinfo(found);
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } bound;
    memset(&bound, 0, sizeof(bound));
    socklen_t size = sizeof(bound);
    if (!open || getsockname(fd, &bound.any, &size) != 0) {
        (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "http.address",
                       "http.address: listening on %.100s: %s", address, strerror(cause));
        if (fd >= 0) {
            (void)close(fd);
        }
        return -1;
    }
    *port = ntohs(bound.any.sa_family == AF_INET6 ? bound.six.sin6_port : bound.four.sin_port);
    return fd;
}

enum kvk_status kvk_http_create(const struct kvk_http_options *options, struct kvk_http **result,
                                struct kvk_error *error)
{
    *result = NULL;
    enum kvk_status status = kvk_http_check(options->address, options->open, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_http *http = calloc(1, sizeof(*http));
    if (http == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for HTTP");
    }
    *http = (struct kvk_http){.rpc = options->rpc, .cache = options->cache, .open = options->open};
    int fd = listener_open(options->address, &http->port, error);
    if (fd < 0) {
        free(http);
        return error->status;
    }
    http->server =
        MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, 0, NULL, NULL, on_request,
                         http, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED,
                         on_completed, NULL, MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MAX,
                         MHD_OPTION_PER_IP_CONNECTION_LIMIT, (unsigned)CONNECTIONS_PER_ADDRESS_MAX,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)TIMEOUT_S, MHD_OPTION_END);
    if (http->server == NULL) {
        (void)close(fd);
        free(http);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for HTTP");
    }
    *result = http;
    return KVK_OK;
}

void kvk_http_destroy(struct kvk_http *http)
{
    if (http != NULL) {
        MHD_stop_daemon(http->server); /* closes the listener, too */
        free(http);
    }
}

uint16_t kvk_http_port(const struct kvk_http *http)
{
    return http->port;
}
