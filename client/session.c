#include "client/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"

#define TOKEN_SIZE 16
#define SIDE_TIMEOUT_S 10
#define CLOSE_TIMEOUT_S 5

/* ---- the side socket ---- */

static enum kvk_status side_fail(struct kvk_error *error, const char *what)
{
    return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "side_socket", "%s: %s", what,
                    strerror(errno));
}

/* Send a token, take one byte and up to two descriptors (-1 where none came). */
static enum kvk_status side_ask(int fd, const uint8_t token[TOKEN_SIZE], int fds[2],
                                struct kvk_error *error)
{
    fds[0] = fds[1] = -1;
    if (send(fd, token, TOKEN_SIZE, MSG_NOSIGNAL) != TOKEN_SIZE) {
        return side_fail(error, "cannot send on the side socket");
    }
    uint8_t answer = 1;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = &answer, .iov_len = 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t got;
    do {
        got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        return side_fail(error, "the side socket gave no answer");
    }
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header != NULL;
         header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
            size_t size = header->cmsg_len - CMSG_LEN(0);
            memcpy(fds, CMSG_DATA(header), size < 2 * sizeof(int) ? size : 2 * sizeof(int));
        }
    }
    if (answer != 0) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "side_socket",
                        "the daemon refused the token on the side socket");
    }
    return KVK_OK;
}

static enum kvk_status side_connect(struct kvkeep_session *session, ProtobufCBinaryData path,
                                    ProtobufCBinaryData token, struct kvk_error *error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path.len >= sizeof address.sun_path || token.len != TOKEN_SIZE) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "side_socket_path",
                        "the daemon named no usable side socket");
    }
    memcpy(address.sun_path, path.data, path.len);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return side_fail(error, "cannot make the side socket");
    }
    struct timeval patience = {.tv_sec = SIDE_TIMEOUT_S};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    enum kvk_status status = KVK_OK;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        status = side_fail(error, "cannot connect the side socket");
    } else {
        int fds[2];
        status = side_ask(fd, token.data, fds, error);
    }
    if (status != KVK_OK) {
        close(fd);
        return status;
    }
    session->side_fd = fd;
    return KVK_OK;
}

/* ---- the stream ---- */

static void *listen_to_stream(void *argument)
{
    struct kvkeep_session *session = argument;
    for (;;) {
        Kvkeep__V1__SessionEvent *event = (Kvkeep__V1__SessionEvent *)kvkeep_stream_receive(
            session->stream, &kvkeep__v1__session_event__descriptor);
        if (event == NULL) {
            break;
        }
        if (event->notice != NULL && session->on_notice != NULL) {
            session->on_notice(session->context, (enum kvkeep_notice)event->notice->kind,
                               event->notice->value);
        }
        kvkeep__v1__session_event__free_unpacked(event, NULL);
    }
    if (!atomic_load(&session->closing) && session->on_notice != NULL) {
        session->on_notice(session->context, KVKEEP_NOTICE_LOST, 0);
    }
    return NULL;
}

static enum kvk_status say_hello(struct kvkeep_session *session,
                                 const struct kvkeep_session_options *options,
                                 Kvkeep__V1__SessionEvent **welcome, struct kvk_error *error)
{
    Kvkeep__V1__SessionHello hello = KVKEEP__V1__SESSION_HELLO__INIT;
    hello.tenant = kvkeep_text(options->tenant);
    hello.name = kvkeep_text(options->name);
    hello.rank = options->rank;
    if (options->instance_token != NULL) {
        hello.instance_token.data = (uint8_t *)(uintptr_t)options->instance_token;
        hello.instance_token.len = TOKEN_SIZE;
    }
    Kvkeep__V1__SessionRequest request = KVKEEP__V1__SESSION_REQUEST__INIT;
    request.hello = &hello;
    *welcome = NULL;
    if (kvkeep_stream_send(session->stream, &request.base)) {
        *welcome = (Kvkeep__V1__SessionEvent *)kvkeep_stream_receive(
            session->stream, &kvkeep__v1__session_event__descriptor);
    }
    if (*welcome != NULL && (*welcome)->welcome != NULL &&
        (*welcome)->welcome->instance_token.len == TOKEN_SIZE) {
        return KVK_OK;
    }
    if (*welcome != NULL) {
        kvkeep__v1__session_event__free_unpacked(*welcome, NULL);
        kvkeep_stream_cancel(session->stream);
    }
    enum kvk_status status = kvkeep_stream_finish(session->stream, error);
    session->stream = NULL;
    return status == KVK_OK ? kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                                       "the daemon did not welcome the session")
                            : status;
}

static void session_free(struct kvkeep_session *session)
{
    if (session->stream != NULL) {
        kvkeep_stream_cancel(session->stream);
        struct kvk_error ignored;
        (void)kvkeep_stream_finish(session->stream, &ignored);
    }
    if (session->side_fd >= 0) {
        close(session->side_fd);
    }
    kvkeep_connection_destroy(session->connection);
    pthread_mutex_destroy(&session->side_mutex);
    free(session);
}

enum kvk_status kvkeep_session_open(struct kvkeep_client *client,
                                    const struct kvkeep_session_options *options,
                                    struct kvkeep_session **session, struct kvk_error *error)
{
    struct kvkeep_session *new = calloc(1, sizeof *new);
    if (new == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a session");
    }
    new->client = client;
    new->side_fd = -1;
    new->on_notice = options->on_notice;
    new->context = options->context;
    pthread_mutex_init(&new->side_mutex, NULL);
    enum kvk_status status = kvkeep_client_connection(client, &new->connection, error);
    if (status == KVK_OK) {
        status =
            kvkeep_stream_open(new->connection, KVKEEP_METHOD("Session"), 0, &new->stream, error);
    }
    if (status != KVK_OK) {
        session_free(new);
        return status;
    }
    Kvkeep__V1__SessionEvent *event = NULL;
    status = say_hello(new, options, &event, error);
    if (status != KVK_OK) {
        session_free(new);
        return status;
    }
    KVK_ASSERT(event != NULL);
    const Kvkeep__V1__SessionWelcome *welcome = event->welcome;
    new->id = welcome->session_id;
    memcpy(new->token, welcome->instance_token.data, TOKEN_SIZE);
    if (!options->no_side_socket && welcome->side_socket_path.len > 0) {
        status = side_connect(new, welcome->side_socket_path, welcome->side_token, error);
    }
    kvkeep__v1__session_event__free_unpacked(event, NULL);
    if (status == KVK_OK && pthread_create(&new->listener, NULL, listen_to_stream, new) != 0) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "cannot start a thread");
    }
    if (status != KVK_OK) {
        session_free(new);
        return status;
    }
    *session = new;
    return KVK_OK;
}

void kvkeep_session_close(struct kvkeep_session *session)
{
    if (session == NULL) {
        return;
    }
    atomic_store(&session->closing, true);
    /* A half close is the polite end; the daemon then ends the stream, and the listener with it. */
    if (!kvkeep_stream_half_close(session->stream)) {
        kvkeep_stream_cancel(session->stream);
    }
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CLOSE_TIMEOUT_S;
    if (pthread_timedjoin_np(session->listener, NULL, &until) != 0) {
        kvkeep_stream_cancel(session->stream); /* the daemon does not answer */
        pthread_join(session->listener, NULL);
    }
    struct kvk_error ignored;
    (void)kvkeep_stream_finish(session->stream, &ignored);
    session->stream = NULL;
    session_free(session);
}

uint64_t kvkeep_session_id(const struct kvkeep_session *session)
{
    return session->id;
}

const uint8_t *kvkeep_session_token(const struct kvkeep_session *session)
{
    return session->token;
}

/* ---- mapped memory ---- */

static enum kvk_status map_descriptors(const int fds[2], const Kvkeep__V1__MapMemoryResponse *told,
                                       bool read_only, struct kvkeep_map *map,
                                       struct kvk_error *error)
{
    int protection = read_only || told->by_slabs ? PROT_READ : PROT_READ | PROT_WRITE;
    struct stat table;
    uint64_t size_bytes = told->size_bytes;
    if (told->by_slabs) {
        size_bytes = fstat(fds[0], &table) == 0 ? (uint64_t)table.st_size : 0;
    }
    void *address = mmap(NULL, size_bytes, protection, MAP_SHARED, fds[0], 0);
    if (address == MAP_FAILED) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "", "cannot map slots: %s",
                        strerror(errno));
    }
    map->address = told->by_slabs ? NULL : address;
    map->slabs = told->by_slabs ? address : NULL;
    map->size_bytes = size_bytes;
    map->slot_stride = told->slot_stride;
    map->id = told->map_id;
    map->tier = (enum kvkeep_tier)told->tier;
    map->read_only = read_only;
    if (fds[1] < 0) {
        return KVK_OK;
    }
    struct stat file;
    void *generations = MAP_FAILED;
    if (fstat(fds[1], &file) == 0 && file.st_size > 0) {
        generations = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_SHARED, fds[1], 0);
    }
    if (generations == MAP_FAILED) {
        kvkeep_unmap(map);
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "", "cannot map generations: %s",
                        strerror(errno));
    }
    map->generations = generations;
    map->generations_size_bytes = (uint64_t)file.st_size;
    return KVK_OK;
}

static enum kvk_status map_memory(struct kvkeep_session *session,
                                  const Kvkeep__V1__MapMemoryRequest *request,
                                  struct kvkeep_map *map, struct kvk_error *error)
{
    memset(map, 0, sizeof *map);
    Kvkeep__V1__MapMemoryResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(session->client, KVKEEP_METHOD("MapMemory"), &request->base,
                           &kvkeep__v1__map_memory_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    int fds[2] = {-1, -1};
    if (response->map_token.len != TOKEN_SIZE || session->side_fd < 0) {
        status = kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NOT_MAPPED, "side_socket",
                          "the session has no side socket to map memory over");
    } else {
        pthread_mutex_lock(&session->side_mutex);
        status = side_ask(session->side_fd, response->map_token.data, fds, error);
        pthread_mutex_unlock(&session->side_mutex);
    }
    if (status == KVK_OK) {
        status = map_descriptors(fds, response, request->read_only, map, error);
    }
    for (int i = 0; i < 2; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    kvkeep__v1__map_memory_response__free_unpacked(response, NULL);
    return status;
}

enum kvk_status kvkeep_map_slots(struct kvkeep_session *session, const struct kvkeep_space *space,
                                 uint32_t group, uint32_t rank, enum kvkeep_tier tier,
                                 bool read_only, struct kvkeep_map *map, struct kvk_error *error)
{
    Kvkeep__V1__MapMemoryRequest request = KVKEEP__V1__MAP_MEMORY_REQUEST__INIT;
    request.session_id = session->id;
    request.kind = KVKEEP__V1__MAP_MEMORY_REQUEST__KIND__KIND_SLOTS;
    request.space_id = space->id;
    request.group = group;
    request.rank = rank;
    request.tier = (Kvkeep__V1__Tier)tier;
    request.read_only = read_only;
    return map_memory(session, &request, map, error);
}

enum kvk_status kvkeep_map_public(struct kvkeep_session *session, uint64_t public_space_id,
                                  uint32_t group, uint32_t rank, struct kvkeep_map *map,
                                  struct kvk_error *error)
{
    const struct kvkeep_space space = {.id = public_space_id};
    return kvkeep_map_slots(session, &space, group, rank, KVKEEP_TIER_HOST, true, map, error);
}

enum kvk_status kvkeep_map_scratch(struct kvkeep_session *session, uint64_t size_bytes,
                                   struct kvkeep_map *map, struct kvk_error *error)
{
    Kvkeep__V1__MapMemoryRequest request = KVKEEP__V1__MAP_MEMORY_REQUEST__INIT;
    request.session_id = session->id;
    request.kind = KVKEEP__V1__MAP_MEMORY_REQUEST__KIND__KIND_SCRATCH;
    request.size_bytes = size_bytes;
    return map_memory(session, &request, map, error);
}

void kvkeep_unmap(struct kvkeep_map *map)
{
    if (map->address != NULL) {
        munmap(map->address, map->size_bytes);
    }
    if (map->slabs != NULL) {
        munmap((void *)(uintptr_t)map->slabs, map->size_bytes);
    }
    if (map->generations != NULL) {
        munmap((void *)(uintptr_t)map->generations, map->generations_size_bytes);
    }
    memset(map, 0, sizeof *map);
}
