/*
 * Spaces and tenants that are switched: off, or in shadow mode, where look-ups are counted and find
 * nothing and what is sealed stays with its sequence.
 */
#include "base/assert.h"
#include "daemon/cache_internal.h"

enum kvk_status kvk_space_set_mode(struct kvk_cache *cache, uint64_t space_id,
                                   enum kvk_tenant_mode mode, struct kvk_error *error)
{
    kvk_lock(&cache->lock);
    struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    if (space != NULL) {
        space->mode = (uint8_t)mode;
    }
    kvk_unlock(&cache->lock);
    if (space == NULL) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    }
    return KVK_OK;
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
