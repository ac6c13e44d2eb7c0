/*
 * The keeper as the daemon sees it: one of two kinds, one caller at a time.
 *
 * Every request waits for its answer. Instead of a lock that would be held meanwhile there is a
 * turn: whoever has it talks, the others wait for it to come free.
 */
#include "hosttier/keeper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "hosttier/keeper_internal.h"

static void turn_begin(struct kvk_keeper *keeper)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock(&keeper->lock);
    while (keeper->busy) {
        (void)kvk_condition_wait(&keeper->free, &keeper->lock, UINT64_MAX);
    }
    keeper->busy = true;
    kvk_unlock(&keeper->lock);
}

static void turn_end(struct kvk_keeper *keeper)
{
    kvk_lock(&keeper->lock);
    keeper->busy = false;
    (void)pthread_cond_signal(&keeper->free);
    kvk_unlock(&keeper->lock);
}

bool kvk_keeper_name_ok(const char name[KVK_KEEPER_NAME_SIZE])
{
    size_t size = strnlen(name, KVK_KEEPER_NAME_SIZE);
    if (size == 0 || size == KVK_KEEPER_NAME_SIZE) {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        char c = name[i];
        bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '-';
        if (!ok) {
            return false;
        }
    }
    for (size_t i = size; i < KVK_KEEPER_NAME_SIZE; i++) {
        if (name[i] != '\0') {
            return false;
        }
    }
    return true;
}

enum kvk_status kvk_keeper_connect(const struct kvk_keeper_options *options,
                                   struct kvk_keeper **keeper, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct kvk_keeper *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a keeper");
    }
    kvk_lock_init(&created->lock);
    kvk_condition_init(&created->free);
    created->socket = -1;
    bool systemd = options->kind == KVK_KEEPER_SYSTEMD ||
                   (options->kind == KVK_KEEPER_AUTO && kvk_keeper_systemd_offered());
    enum kvk_status status = systemd ? kvk_keeper_systemd_connect(created, error)
                                     : kvk_keeper_process_connect(options, created, error);
    if (status != KVK_OK) {
        kvk_keeper_disconnect(created);
        return status;
    }
    *keeper = created;
    return KVK_OK;
}

void kvk_keeper_disconnect(struct kvk_keeper *keeper)
{
    if (keeper == NULL) {
        return;
    }
    if (keeper->ops != NULL) {
        keeper->ops->disconnect(keeper);
    }
    (void)pthread_cond_destroy(&keeper->free);
    kvk_lock_finish(&keeper->lock);
    free(keeper->names);
    free(keeper);
}

enum kvk_status kvk_keeper_take(struct kvk_keeper *keeper,
                                void (*visit)(void *context, const char *name, int fd),
                                void *context, struct kvk_error *error)
{
    turn_begin(keeper);
    enum kvk_status status = keeper->ops->take(keeper, visit, context, error);
    turn_end(keeper);
    return status;
}

/* A name as it travels: padded with NULs. */
static enum kvk_status name_check(const char *name, char padded[KVK_KEEPER_NAME_SIZE],
                                  struct kvk_error *error)
{
    memset(padded, 0, KVK_KEEPER_NAME_SIZE);
    int size = snprintf(padded, KVK_KEEPER_NAME_SIZE, "%s", name);
    if (size < 0 || size >= KVK_KEEPER_NAME_SIZE) {
        padded[0] = '\0'; /* none of ours: too long */
    }
    if (!kvk_keeper_name_ok(padded)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "name",
                        "a kept file's name has 1 to %d letters, digits, '.' and '-'",
                        KVK_KEEPER_NAME_SIZE - 1);
    }
    return KVK_OK;
}

enum kvk_status kvk_keeper_put(struct kvk_keeper *keeper, const char *name, int fd,
                               struct kvk_error *error)
{
    char padded[KVK_KEEPER_NAME_SIZE];
    enum kvk_status status = name_check(name, padded, error);
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(fd >= 0);
    turn_begin(keeper);
    status = keeper->ops->put(keeper, padded, fd, error);
    turn_end(keeper);
    return status;
}

enum kvk_status kvk_keeper_drop(struct kvk_keeper *keeper, const char *name,
                                struct kvk_error *error)
{
    char padded[KVK_KEEPER_NAME_SIZE];
    enum kvk_status status = name_check(name, padded, error);
    if (status != KVK_OK) {
        return status;
    }
    turn_begin(keeper);
    status = keeper->ops->drop(keeper, padded, error);
    turn_end(keeper);
    return status;
}

enum kvk_status kvk_keeper_forget(struct kvk_keeper *keeper, struct kvk_error *error)
{
    turn_begin(keeper);
    enum kvk_status status = keeper->ops->forget(keeper, error);
    turn_end(keeper);
    return status;
}

const char *kvk_keeper_kind_name(const struct kvk_keeper *keeper)
{
    return keeper->ops->name;
}

uint32_t kvk_keeper_count(struct kvk_keeper *keeper)
{
    turn_begin(keeper);
    uint32_t count = keeper->count;
    turn_end(keeper);
    return count;
}
