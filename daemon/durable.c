#include "daemon/durable.h"

#include <stdio.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/persist.h"
#include "hosttier/catalogue.h"

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

enum kvk_status kvk_durable_open(const struct kvk_config *config, struct kvk_durable *durable,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    *durable = (struct kvk_durable){.catalogue = NULL};
    if (config->durable_folder[0] == '\0') {
        return KVK_OK;
    }
    enum kvk_status status = catalogue_open(config, durable, error);
    if (status != KVK_OK) {
        kvk_durable_close(durable);
        return status;
    }
    return KVK_OK;
}

enum kvk_status kvk_durable_start(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->catalogue == NULL) {
        return KVK_OK;
    }
    return kvk_persist_restore_spaces(cache, error);
}

void kvk_durable_stop(struct kvk_cache *cache)
{
    struct kvk_error error;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache == NULL || cache->catalogue == NULL) {
        return;
    }
    if (kvk_catalogue_flush(cache->catalogue, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "catalogue_not_flushed", "text=\"%s\"", error.text);
    }
}

void kvk_durable_close(struct kvk_durable *durable)
{
    kvk_catalogue_close(durable->catalogue);
    *durable = (struct kvk_durable){.catalogue = NULL};
}
