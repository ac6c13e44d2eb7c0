#include "daemon/durable.h"

#include <stdio.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/persist.h"
#include "daemon/public_store.h"
#include "daemon/kept.h"
#include "daemon/warm.h"
#include "hosttier/catalogue.h"
#include "hosttier/disk.h"
#include "hosttier/keeper.h"

static enum kvk_status catalogue_open(const struct kvk_config *config, struct kvk_durable *durable,
                                      struct kvk_error *error)
{
    const struct kvk_catalogue_options options = {
        .folder = config->durable_folder,
        .map_bytes = config->catalogue_bytes,
        .threads = true,
    };
    return kvk_catalogue_open(&options, &durable->catalogue, error);
}

static enum kvk_status disk_open(const struct kvk_config *config, struct kvk_durable *durable,
                                 struct kvk_error *error)
{
    char folder[KVK_FOLDER_SIZE + sizeof("/blocks")];
    if (config->disk_bytes == 0) {
        return KVK_OK;
    }
    (void)snprintf(folder, sizeof(folder), "%s/blocks", config->durable_folder);
    const struct kvk_disk_options options = {
        .folder = folder,
        .depth = config->disk_depth,
        .direct = config->disk_direct,
        .uring = config->disk_uring,
    };
    enum kvk_status status = kvk_disk_open(&options, &durable->disk, error);
    if (status == KVK_OK) {
        kvk_log(KVK_LOG_INFO, "disk_open", "path=%s", kvk_disk_path_name(durable->disk));
    }
    return status;
}

/* -1: the path of the socket is too long. */
static int keeper_path(const struct kvk_config *config, char path[KVK_PATH_SIZE])
{
    int size = config->keeper_socket[0] != '\0'
                   ? snprintf(path, KVK_PATH_SIZE, "%s", config->keeper_socket)
                   : snprintf(path, KVK_PATH_SIZE, "%s.keeper", config->unix_path);
    return size < 0 || size >= KVK_PATH_SIZE ? -1 : 0;
}

static enum kvk_status keeper_open(const struct kvk_config *config, struct kvk_durable *durable,
                                   struct kvk_error *error)
{
    static const enum kvk_keeper_kind kinds[] = {
        [KVK_CONFIG_KEEPER_AUTO] = KVK_KEEPER_AUTO,
        [KVK_CONFIG_KEEPER_NO] = KVK_KEEPER_AUTO,
        [KVK_CONFIG_KEEPER_PROCESS] = KVK_KEEPER_PROCESS,
        [KVK_CONFIG_KEEPER_SYSTEMD] = KVK_KEEPER_SYSTEMD,
    };
    char path[KVK_PATH_SIZE];
    if (config->keeper == KVK_CONFIG_KEEPER_NO) {
        return KVK_OK;
    }
    if (keeper_path(config, path) != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "durable.keeper_socket",
                        "durable.keeper_socket: the path is too long");
    }
    const struct kvk_keeper_options options = {
        .kind = kinds[config->keeper], .socket_path = path, .hold_ms = config->keeper_hold_ms};
    enum kvk_status status = kvk_keeper_connect(&options, &durable->keeper, error);
    if (status == KVK_OK) {
        kvk_log(KVK_LOG_INFO, "keeper", "kind=%s files=%u", kvk_keeper_kind_name(durable->keeper),
                kvk_keeper_count(durable->keeper));
    } else if (status == KVK_UNAVAILABLE && config->keeper == KVK_CONFIG_KEEPER_AUTO) {
        kvk_log(KVK_LOG_WARNING, "keeper_not_there",
                "text=\"memory will not outlive the daemon: %s\"", error->text);
        status = KVK_OK;
    }
    return status;
}

enum kvk_status kvk_durable_forget(const struct kvk_config *config, struct kvk_error *error)
{
    struct kvk_durable durable = {.keeper = NULL};
    if (config->durable_folder[0] == '\0') {
        return KVK_OK;
    }
    enum kvk_status status = keeper_open(config, &durable, error);
    if (status == KVK_OK && durable.keeper != NULL) {
        status = kvk_keeper_forget(durable.keeper, error);
        kvk_keeper_disconnect(durable.keeper);
    }
    return status;
}

enum kvk_status kvk_durable_open(const struct kvk_config *config, struct kvk_durable *durable,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    *durable = (struct kvk_durable){.catalogue = NULL};
    if (config->durable_folder[0] == '\0') {
        return KVK_OK;
    }
    enum kvk_status status = catalogue_open(config, durable, error);
    if (status == KVK_OK) {
        status = disk_open(config, durable, error);
    }
    if (status == KVK_OK) {
        status = keeper_open(config, durable, error);
    }
    if (status != KVK_OK) {
        kvk_durable_close(durable);
        return status;
    }
    return KVK_OK;
}

enum kvk_status kvk_durable_start(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    enum kvk_status status = kvk_kept_load(cache, error);
    if (status == KVK_OK && cache->catalogue != NULL) {
        status = kvk_persist_restore_spaces(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_warm_start(cache, error);
    }
    if (status == KVK_OK && cache->catalogue != NULL) {
        kvk_public_restore(cache);
    }
    if (status == KVK_OK && cache->catalogue != NULL) {
        kvk_catalogue_trust(cache->catalogue);
    }
    return status;
}

void kvk_durable_stop(struct kvk_cache *cache)
{
    struct kvk_error error;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache == NULL || (cache->catalogue == NULL && cache->keeper == NULL)) {
        return;
    }
    kvk_cache_quiesce(cache);
    kvk_warm_leave(cache);
    if (cache->catalogue != NULL && kvk_catalogue_flush(cache->catalogue, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "catalogue_not_flushed", "text=\"%s\"", error.text);
    }
}

void kvk_durable_close(struct kvk_durable *durable)
{
    kvk_keeper_disconnect(durable->keeper);
    kvk_disk_close(durable->disk);
    kvk_catalogue_close(durable->catalogue);
    *durable = (struct kvk_durable){.catalogue = NULL};
}
