/*
 * Spaces and tenants that are switched: off, or in shadow mode, where look-ups are counted and find
 * nothing and what is sealed stays with its sequence.
 */
#include "base/assert.h"
#include "daemon/cache_internal.h"
#include "daemon/persist.h"

enum kvk_status kvk_space_set_mode(struct kvk_cache *cache, uint64_t space_id,
                                   enum kvk_tenant_mode mode, struct kvk_error *error)
{
    enum kvk_status status;
    kvk_lock(&cache->lock);
    kvk_persist_begin_drops(cache);
    struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    if (space == NULL) {
        status = kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    } else {
        status = kvk_persist_mode_drops(cache, space, (uint8_t)mode, error);
        space->mode = status == KVK_OK ? (uint8_t)mode : space->mode;
    }
    kvk_persist_end(cache);
    kvk_unlock(&cache->lock);
    return status;
}

enum kvk_status kvk_space_check(const struct kvk_space *space, struct kvk_error *error)
{
    if (space->mode == KVK_TENANT_OFF) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_SWITCHED_OFF, "space_id",
                        "the space is switched off");
    }
    return kvk_tenant_check(space->tenant, error);
}

bool kvk_space_shares(const struct kvk_space *space)
{
    return space->mode == KVK_TENANT_ON && kvk_tenant_mode(space->tenant) == KVK_TENANT_ON;
}
