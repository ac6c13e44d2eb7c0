/*
 * systemd's descriptor store as a keeper: what is put travels to the service manager in a
 * notification, and comes back to the next start of the service as LISTEN_FDS.
 *
 * The manager does not answer. After every message a barrier is sent: a pipe whose other end the
 * manager closes when it has read all that came before.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/notify.h"
#include "hosttier/keeper_internal.h"

#define FIRST_DESCRIPTOR 3
#define NAME_PREFIX "kvk" /* of our files: other descriptors of the service are left alone */
#define BARRIER_MS 5000

/* A number of the environment; 0: none. */
static uint64_t environment_number(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    if (text == NULL || text[0] < '0' || text[0] > '9') {
        return 0;
    }
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0' ? value : 0;
}

bool kvk_keeper_systemd_offered(void)
{
    return environment_number("FDSTORE") > 0 && kvk_notify_open();
}

/* ---- Names ---- */

static uint32_t name_find(const struct kvk_keeper *keeper, const char *name)
{
    uint32_t at = 0;
    while (at < keeper->count && strcmp(keeper->names[at], name) != 0) {
        at++;
    }
    return at;
}

static enum kvk_status name_add(struct kvk_keeper *keeper, const char *name,
                                struct kvk_error *error)
{
    if (keeper->count == keeper->name_capacity) {
        uint32_t capacity = keeper->name_capacity == 0 ? 64 : keeper->name_capacity * 2;
        void *grown = realloc(keeper->names, (size_t)capacity * KVK_KEEPER_NAME_SIZE);
        if (grown == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a name");
        }
        keeper->names = grown;
        keeper->name_capacity = capacity;
    }
    (void)snprintf(keeper->names[keeper->count], KVK_KEEPER_NAME_SIZE, "%s", name);
    keeper->count++;
    return KVK_OK;
}

static void name_remove(struct kvk_keeper *keeper, uint32_t at)
{
    keeper->count--;
    memmove(keeper->names[at], keeper->names[keeper->count], KVK_KEEPER_NAME_SIZE);
}

/* ---- Messages ---- */

static enum kvk_status barrier(struct kvk_error *error)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no pipe: %s", strerror(errno));
    }
    enum kvk_status status = kvk_notify_send("BARRIER=1", &ends[1], 1, error);
    (void)close(ends[1]);
    struct pollfd wait = {.fd = ends[0], .events = POLLIN};
    if (status == KVK_OK) {
        int woken;
        do {
            woken = poll(&wait, 1, BARRIER_MS);
        } while (woken < 0 && errno == EINTR);
        if (woken != 1) {
            status =
                kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                         "the service manager has not read its messages for %d ms", BARRIER_MS);
        }
    }
    (void)close(ends[0]);
    return status;
}

static enum kvk_status tell_remove(const char *name, struct kvk_error *error)
{
    char message[KVK_KEEPER_NAME_SIZE + 32];
    (void)snprintf(message, sizeof(message), "FDSTOREREMOVE=1\nFDNAME=%s", name);
    return kvk_notify_send(message, NULL, 0, error);
}

/* ---- The kind ---- */

/* The next of "a:b:c" into `name`; false where there is none left. Too long a name comes out as
 * "", which is none of ours. */
static bool names_next(const char **rest, char name[KVK_KEEPER_NAME_SIZE])
{
    if (*rest == NULL) {
        return false;
    }
    size_t size = strcspn(*rest, ":");
    memset(name, 0, KVK_KEEPER_NAME_SIZE);
    if (size < KVK_KEEPER_NAME_SIZE) {
        memcpy(name, *rest, size);
    }
    *rest = (*rest)[size] == ':' ? *rest + size + 1 : NULL;
    return true;
}

static enum kvk_status systemd_take(struct kvk_keeper *keeper,
                                    void (*visit)(void *context, const char *name, int fd),
                                    void *context, struct kvk_error *error)
{
    if (!keeper->inherited) {
        return KVK_OK;
    }
    keeper->inherited = false;
    const char *rest = getenv("LISTEN_FDNAMES");
    uint64_t count = environment_number("LISTEN_FDS");
    for (uint64_t i = 0; i < count && i < KVK_KEEPER_FILES_MAX; i++) {
        char name[KVK_KEEPER_NAME_SIZE];
        int fd = FIRST_DESCRIPTOR + (int)i;
        if (!names_next(&rest, name)) {
            break;
        }
        if (strncmp(name, NAME_PREFIX, strlen(NAME_PREFIX)) != 0 || !kvk_keeper_name_ok(name) ||
            fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
            continue;
        }
        /* The store takes several of one name: the first is the one that counts. */
        if (name_find(keeper, name) < keeper->count) {
            (void)close(fd);
            continue;
        }
        enum kvk_status status = name_add(keeper, name, error);
        if (status != KVK_OK) {
            (void)close(fd);
            return status;
        }
        visit(context, name, fd);
    }
    return KVK_OK;
}

static enum kvk_status systemd_put(struct kvk_keeper *keeper, const char *name, int fd,
                                   struct kvk_error *error)
{
    char message[KVK_KEEPER_NAME_SIZE + 32];
    if (name_find(keeper, name) < keeper->count) {
        return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "name",
                        "the keeper has a file of that name: %s", name);
    }
    if (keeper->count_max > 0 && keeper->count >= keeper->count_max) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "FileDescriptorStoreMax",
                              keeper->count, keeper->count_max,
                              "the service's FileDescriptorStoreMax of %u is reached",
                              keeper->count_max);
    }
    enum kvk_status status = name_add(keeper, name, error);
    if (status != KVK_OK) {
        return status;
    }
    (void)snprintf(message, sizeof(message), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
    status = kvk_notify_send(message, &fd, 1, error);
    if (status == KVK_OK) {
        status = barrier(error);
    }
    if (status != KVK_OK) {
        name_remove(keeper, keeper->count - 1);
    }
    return status;
}

static enum kvk_status systemd_drop(struct kvk_keeper *keeper, const char *name,
                                    struct kvk_error *error)
{
    uint32_t at = name_find(keeper, name);
    if (at == keeper->count) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "name", "the keeper has no file %s",
                        name);
    }
    enum kvk_status status = tell_remove(name, error);
    if (status == KVK_OK) {
        name_remove(keeper, at);
    }
    return status;
}

static enum kvk_status systemd_forget(struct kvk_keeper *keeper, struct kvk_error *error)
{
    while (keeper->count > 0) {
        enum kvk_status status = tell_remove(keeper->names[keeper->count - 1], error);
        if (status != KVK_OK) {
            return status;
        }
        keeper->count--;
    }
    return barrier(error);
}

static void systemd_disconnect(struct kvk_keeper *keeper)
{
    (void)keeper; /* the manager keeps what it has */
}

static const struct kvk_keeper_ops systemd_ops = {
    .name = "systemd",
    .take = systemd_take,
    .put = systemd_put,
    .drop = systemd_drop,
    .forget = systemd_forget,
    .disconnect = systemd_disconnect,
};

enum kvk_status kvk_keeper_systemd_connect(struct kvk_keeper *keeper, struct kvk_error *error)
{
    keeper->ops = &systemd_ops;
    if (!kvk_notify_open()) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "keeper",
                        "keeper = systemd, but no service manager is there (no NOTIFY_SOCKET)");
    }
    uint64_t store = environment_number("FDSTORE");
    keeper->count_max = store > KVK_KEEPER_FILES_MAX ? KVK_KEEPER_FILES_MAX : (uint32_t)store;
    /* The descriptors are meant for this very process, not for a child that inherited the words. */
    keeper->inherited = environment_number("LISTEN_PID") == (uint64_t)getpid();
    return KVK_OK;
}
