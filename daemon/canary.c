#include "daemon/canary.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/random.h"
#include "daemon/cache_internal.h"
#include "hosttier/disk.h"

#define CANARY_BYTES UINT64_C(65536)
/* No space has this id; its file is not one of theirs. */
#define CANARY_SPACE UINT64_C(0)

static enum kvk_status differs(const char *tier, struct kvk_error *error)
{
    return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, tier,
                    "the canary came back from the %s tier with other bytes", tier);
}

/* There and back over a device's memory. */
static enum kvk_status memory_try(struct kvk_cache *cache, enum kvk_tier tier, uint8_t *bytes,
                                  uint64_t sum, struct kvk_error *error)
{
    static const char *const names[KVK_MEMORY_TIER_COUNT] = {"device", "host"};
    struct kvk_device *device = cache->tiers[tier].device;
    struct kvk_region region;
    uint64_t there = 0;
    uint64_t back = 0;
    enum kvk_status status =
        device->ops->alloc(device, CANARY_BYTES, 0, "kvkeep-canary", &region, error);
    if (status != KVK_OK) {
        return status;
    }
    status = device->ops->back(device, &region, 0, CANARY_BYTES, error);
    if (status == KVK_OK) {
        const struct kvk_copy out = {.target = region.address,
                                     .source = bytes,
                                     .size_bytes = CANARY_BYTES,
                                     .checksum = &there};
        status = kvk_mover_copy(cache->mover, device, &out, 1, error);
    }
    if (status == KVK_OK) {
        memset(bytes, 0, CANARY_BYTES);
        const struct kvk_copy in = {.target = bytes,
                                    .source = region.address,
                                    .size_bytes = CANARY_BYTES,
                                    .checksum = &back};
        status = kvk_mover_copy(cache->mover, device, &in, 1, error);
    }
    device->ops->free(device, &region);
    if (status == KVK_OK && (there != sum || back != sum)) {
        status = differs(names[tier], error);
    }
    return status;
}

static enum kvk_status disk_try(struct kvk_disk *disk, uint8_t *bytes, uint64_t sum,
                                struct kvk_error *error)
{
    struct kvk_disk_file *file;
    uint64_t back = 0;
    enum kvk_status status =
        kvk_disk_file_open(disk, CANARY_SPACE, 0, CANARY_BYTES, 1, &file, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_disk_piece piece = {.file = file, .memory = bytes, .size_bytes = CANARY_BYTES};
    status = kvk_disk_write(disk, KVK_DISK_AHEAD, &piece, 1, error);
    if (status == KVK_OK) {
        memset(bytes, 0, CANARY_BYTES);
        piece.checksum = &back;
        status = kvk_disk_read(disk, KVK_DISK_AHEAD, &piece, 1, error);
    }
    kvk_disk_file_close(file);
    struct kvk_error ignored;
    enum kvk_status removed = kvk_disk_file_remove(disk, CANARY_SPACE, 0, &ignored);
    if (status == KVK_OK && removed != KVK_OK) {
        *error = ignored;
        status = removed;
    }
    return status == KVK_OK && back != sum ? differs("disk", error) : status;
}

enum kvk_status kvk_canary_run(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    uint8_t *bytes = malloc(CANARY_BYTES);
    if (bytes == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a canary");
    }
    kvk_random_secret(bytes, CANARY_BYTES);
    uint64_t sum = kvk_checksum(bytes, CANARY_BYTES);
    enum kvk_status status = KVK_OK;
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT && status == KVK_OK; tier++) {
        if (cache->tiers[tier].device != NULL) {
            status = memory_try(cache, (enum kvk_tier)tier, bytes, sum, error);
        }
    }
    if (status == KVK_OK && cache->disk != NULL) {
        status = disk_try(cache->disk, bytes, sum, error);
    }
    free(bytes);
    return status;
}
