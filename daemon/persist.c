#include "daemon/persist.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/space_internal.h"
#include "hosttier/catalogue.h"

#define REMOVALS_AT_ONCE 16384           /* that the catalogue's queue surely has room for */
#define RETRY_FACTOR 20                  /* of the time that the last try took */
#define RETRY_NS (1 * KVK_NS_PER_SECOND) /* between tries to record a space after a failure */

/* ---- Shapes ---- */

/* Version 2 is version 1 with formats for the tiers below the device in some group (of the disk,
 * and of the host x 256); without one it is written as version 1, so that a daemon from before
 * reads what it can hold. */
#define SHAPE_VERSION 1
#define SHAPE_VERSION_FORMATS 2
#define SHAPE_HEAD_SIZE 40
#define SHAPE_GROUP_SIZE 64
_Static_assert(SHAPE_HEAD_SIZE + KVK_GROUP_COUNT_MAX * SHAPE_GROUP_SIZE <= KVK_SHAPE_SIZE_MAX,
               "a shape fits");

static void store_double(uint8_t *at, double value)
{
    uint64_t bits;
    _Static_assert(sizeof(bits) == sizeof(value), "a double has 8 bytes");
    memcpy(&bits, &value, sizeof(bits));
    kvk_store_le64(at, bits);
}

static double load_double(const uint8_t *at)
{
    uint64_t bits = kvk_load_le64(at);
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* 14 numbers of 4 bytes, the last the formats below the device, and one of 8. */
static void group_encode(const struct kvk_geometry *geometry, uint32_t formats, uint8_t *at)
{
    const uint32_t numbers[14] = {
        geometry->layers,
        geometry->kv_heads,
        geometry->head_size_k,
        geometry->head_size_v,
        (uint32_t)geometry->format_k,
        (uint32_t)geometry->format_v,
        (uint32_t)geometry->layout,
        (uint32_t)geometry->attention,
        geometry->tensor_shards,
        geometry->pipeline_shards,
        geometry->latent ? 1 : 0,
        geometry->window,
        geometry->sinks,
        formats,
    };
    for (int i = 0; i < 14; i++) {
        kvk_store_le32(at + 4 * (size_t)i, numbers[i]);
    }
    kvk_store_le64(at + 56, geometry->opaque_bytes);
}

/* Ranges are checked by whoever opens the space, as those of any request. */
static bool group_decode(const uint8_t *at, uint32_t block_tokens, struct kvk_geometry *geometry,
                         enum kvk_format *host_format, enum kvk_format *disk_format)
{
    uint32_t numbers[14];
    for (int i = 0; i < 14; i++) {
        numbers[i] = kvk_load_le32(at + 4 * (size_t)i);
    }
    uint32_t disk = numbers[13] & 0xff;
    uint32_t host = numbers[13] >> 8;
    if (numbers[10] > 1 || disk > KVK_FORMAT_MAX || host > KVK_FORMAT_MAX) {
        return false;
    }
    *disk_format = (enum kvk_format)disk;
    *host_format = (enum kvk_format)host;
    *geometry = (struct kvk_geometry){
        .layers = numbers[0],
        .kv_heads = numbers[1],
        .head_size_k = numbers[2],
        .head_size_v = numbers[3],
        .block_tokens = block_tokens,
        .format_k = (enum kvk_format)numbers[4],
        .format_v = (enum kvk_format)numbers[5],
        .layout = (enum kvk_layout)numbers[6],
        .attention = (enum kvk_attention)numbers[7],
        .tensor_shards = numbers[8],
        .pipeline_shards = numbers[9],
        .latent = numbers[10] != 0,
        .window = numbers[11],
        .sinks = numbers[12],
        .opaque_bytes = kvk_load_le64(at + 56),
    };
    return true;
}

size_t kvk_shape_encode(const struct kvk_space *space, uint8_t bytes[KVK_SHAPE_SIZE_MAX])
{
    KVK_ASSERT(space->group_count > 0 && space->group_count <= KVK_GROUP_COUNT_MAX);
    uint16_t version = SHAPE_VERSION;
    kvk_store_le16(bytes + 2, (uint16_t)space->group_count);
    kvk_store_le32(bytes + 4, space->block_tokens);
    kvk_store_le32(bytes + 8, space->lookup_min_tokens);
    kvk_store_le32(bytes + 12, 0);
    store_double(bytes + 16, space->flops_per_token);
    store_double(bytes + 24, space->flops_per_token_position);
    store_double(bytes + 32, space->flops_per_second);
    for (uint32_t i = 0; i < space->group_count; i++) {
        const struct kvk_group *group = space->groups[i];
        uint32_t formats = (uint32_t)kvk_tier_form_format(&group->forms[KVK_TIER_DISK]) |
                           (uint32_t)kvk_tier_form_format(&group->forms[KVK_TIER_HOST]) << 8;
        version = formats != 0 ? SHAPE_VERSION_FORMATS : version;
        group_encode(&group->geometry, formats,
                     bytes + SHAPE_HEAD_SIZE + (size_t)i * SHAPE_GROUP_SIZE);
    }
    kvk_store_le16(bytes, version);
    return SHAPE_HEAD_SIZE + (size_t)space->group_count * SHAPE_GROUP_SIZE;
}

bool kvk_shape_decode(const uint8_t *bytes, size_t size, struct kvk_space_request *request)
{
    uint16_t version = size < SHAPE_HEAD_SIZE ? 0 : kvk_load_le16(bytes);
    if ((version != SHAPE_VERSION && version != SHAPE_VERSION_FORMATS) ||
        kvk_load_le32(bytes + 12) != 0) {
        return false;
    }
    *request = (struct kvk_space_request){
        .group_count = kvk_load_le16(bytes + 2),
        .block_tokens = kvk_load_le32(bytes + 4),
        .lookup_min_tokens = kvk_load_le32(bytes + 8),
        .flops_per_token = load_double(bytes + 16),
        .flops_per_token_position = load_double(bytes + 24),
        .flops_per_second = load_double(bytes + 32),
    };
    if (request->group_count == 0 || request->group_count > KVK_GROUP_COUNT_MAX ||
        size != SHAPE_HEAD_SIZE + (size_t)request->group_count * SHAPE_GROUP_SIZE) {
        return false;
    }
    bool any_format = false;
    for (uint32_t i = 0; i < request->group_count; i++) {
        if (!group_decode(bytes + SHAPE_HEAD_SIZE + (size_t)i * SHAPE_GROUP_SIZE,
                          request->block_tokens, &request->groups[i], &request->host_formats[i],
                          &request->disk_formats[i])) {
            return false;
        }
        any_format = any_format || request->disk_formats[i] != KVK_FORMAT_NONE ||
                     request->host_formats[i] != KVK_FORMAT_NONE;
    }
    return any_format == (version == SHAPE_VERSION_FORMATS); /* one way to write a shape */
}

/* ---- Identities ---- */

/* One part of bytes that nobody has checked. */
static bool part_read(const uint8_t *identity, size_t size, size_t *offset, uint32_t *tag,
                      struct kvk_view *part)
{
    const size_t prefix = sizeof(uint8_t) + sizeof(uint32_t);
    if (size - *offset < prefix) {
        return false;
    }
    *tag = identity[*offset];
    part->size = kvk_load_le32(identity + *offset + 1);
    part->data = identity + *offset + prefix;
    if (part->size > size - *offset - prefix) {
        return false;
    }
    *offset += prefix + part->size;
    return true;
}

/* Taken apart and put together again they must be the same bytes: then they are what encoding a
 * checked identity gives, and nothing else. */
bool kvk_identity_is_canonical(const uint8_t *identity, size_t size)
{
    struct kvk_identity parts = {.extra_count = 0};
    size_t offset = 0;
    uint32_t tag;
    struct kvk_view part;
    for (uint32_t i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        if (!part_read(identity, size, &offset, &tag, &parts.parts[i]) || tag != i + 1) {
            return false;
        }
    }
    while (offset < size) {
        if (parts.extra_count == KVK_IDENTITY_EXTRA_MAX ||
            !part_read(identity, size, &offset, &tag, &part) || tag != KVK_IDENTITY_EXTRA_NAME) {
            return false;
        }
        parts.extra[parts.extra_count].name = part;
        if (!part_read(identity, size, &offset, &tag, &part) || tag != KVK_IDENTITY_EXTRA_VALUE) {
            return false;
        }
        parts.extra[parts.extra_count++].value = part;
    }
    uint8_t *again;
    size_t again_size;
    if (kvk_identity_encode(&parts, 0, &again, &again_size, NULL) != KVK_OK) {
        return false;
    }
    bool same = again_size == size && memcmp(again, identity, size) == 0;
    free(again);
    return same;
}

/* ---- Recording ---- */

void kvk_persist_begin_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    while (cache->persist_busy) {
        (void)kvk_condition_wait(&cache->changed, &cache->lock, UINT64_MAX);
    }
    cache->persist_busy = true;
}

void kvk_persist_end(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(cache->persist_busy);
    cache->persist_busy = false;
    pthread_cond_broadcast(&cache->changed);
}

/* Without the lock. The space's identity and shape never change; generation and mode are the
 * caller's. */
static enum kvk_status space_put(struct kvk_cache *cache, const struct kvk_space *space,
                                 uint64_t generation, uint8_t mode, struct kvk_error *error)
{
    uint8_t shape[KVK_SHAPE_SIZE_MAX];
    const struct kvk_space_record record = {
        .id = space->id,
        .tenant_id = space->tenant->id,
        .generation = generation,
        .mode = mode,
        .identity = space->identity,
        .identity_size = space->identity_size,
        .shape = shape,
        .shape_size = kvk_shape_encode(space, shape),
    };
    KVK_ASSERT(kvk_locks_held() == 0);
    return kvk_catalogue_put_space(cache->catalogue, &record, error);
}

static void tell_failure(const char *event, uint64_t id, const struct kvk_error *error)
{
    char text[KVK_ERROR_TEXT_SIZE + 16];
    kvk_log(KVK_LOG_WARNING, event, "space=%llu text=%s", (unsigned long long)id,
            kvk_log_text(text, sizeof(text), error->text));
}

bool kvk_persist_record_unlocked(struct kvk_cache *cache, const struct kvk_space *space)
{
    struct kvk_error error;
    if (cache->catalogue == NULL || space->constant_hash) {
        return false;
    }
    if (space_put(cache, space, space->generation, space->mode, &error) == KVK_OK) {
        return true;
    }
    tell_failure("space_not_recorded", space->id, &error);
    kvk_lock(&cache->lock);
    cache->stats.space_record_failures++;
    kvk_unlock(&cache->lock);
    return false;
}

void kvk_persist_forget_unlocked(struct kvk_cache *cache, uint64_t space_id)
{
    struct kvk_error error;
    if (cache->catalogue == NULL) {
        return;
    }
    enum kvk_status status = kvk_catalogue_remove_space(cache->catalogue, space_id, &error);
    if (status == KVK_OK || status == KVK_NOT_FOUND) {
        return;
    }
    tell_failure("space_not_removed", space_id, &error); /* it comes back empty, and goes again */
    kvk_lock(&cache->lock);
    cache->stats.space_record_failures++;
    kvk_unlock(&cache->lock);
}

static struct kvk_space *unrecorded_space(const struct kvk_cache *cache)
{
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        if (!space->recorded && !space->is_public && !space->constant_hash &&
            !kvk_tenant_is_leaving(space->tenant)) {
            return space;
        }
    }
    return NULL;
}

void kvk_persist_maintain_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t now_ns = kvk_clock_now(cache->clock);
    if (cache->catalogue == NULL || !cache->persist_wanted || cache->persist_busy ||
        now_ns < cache->persist_retry_ns) {
        return;
    }
    struct kvk_space *space = unrecorded_space(cache);
    if (space == NULL) {
        cache->persist_wanted = false;
        return;
    }
    struct kvk_error error;
    uint64_t generation = space->generation; /* nobody changes these while we are busy */
    uint8_t mode = space->mode;
    space->reference_count++;
    kvk_persist_begin_drops(cache);
    kvk_unlock(&cache->lock);
    enum kvk_status status = space_put(cache, space, generation, mode, &error);
    kvk_lock(&cache->lock);
    kvk_persist_end(cache);
    space->reference_count--;
    KVK_ASSERT(space->generation == generation);
    space->recorded = status == KVK_OK;
    if (status != KVK_OK) {
        cache->stats.space_record_failures++;
        uint64_t ended_ns = kvk_clock_now(cache->clock); /* a slow disk is asked the less often */
        cache->persist_retry_ns = ended_ns + RETRY_NS + RETRY_FACTOR * (ended_ns - now_ns);
    }
}

enum kvk_status kvk_persist_raise_drops(struct kvk_cache *cache, struct kvk_space *const *spaces,
                                        uint32_t count, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(cache->persist_busy);
    if (cache->catalogue == NULL || count == 0) {
        return KVK_OK;
    }
    struct kvk_space_generation *generations = calloc(count, sizeof(*generations));
    if (generations == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for generations");
    }
    for (uint32_t i = 0; i < count; i++) {
        generations[i].space_id = spaces[i]->id;
        generations[i].generation = spaces[i]->generation + 1;
    }
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_catalogue_set_generations(cache->catalogue, generations, count, error);
    kvk_lock(&cache->lock);
    free(generations);
    if (status != KVK_OK) {
        cache->stats.space_record_failures++;
    }
    return status;
}

enum kvk_status kvk_persist_mode_drops(struct kvk_cache *cache, struct kvk_space *space,
                                       uint8_t mode, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(cache->persist_busy);
    if (cache->catalogue == NULL || space->is_public || space->constant_hash ||
        kvk_tenant_is_leaving(space->tenant)) {
        return KVK_OK; /* nothing of it comes back */
    }
    uint64_t generation = space->generation;
    space->reference_count++;
    kvk_unlock(&cache->lock);
    enum kvk_status status = space_put(cache, space, generation, mode, error);
    kvk_lock(&cache->lock);
    space->reference_count--;
    if (status == KVK_OK) {
        space->recorded = true;
    } else {
        cache->stats.space_record_failures++;
    }
    return status;
}

/* What the catalogue's queue had no room for waits with the disk tier, and follows as the queue is
 * emptied. */
enum kvk_status kvk_persist_removals_drops(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->catalogue == NULL) {
        return KVK_OK;
    }
    uint64_t rounds = 2;
    if (cache->disk_tier != NULL) {
        rounds += cache->disk_tier->leaving_count / REMOVALS_AT_ONCE;
    }
    enum kvk_status status = KVK_OK;
    for (uint64_t i = 0; i < rounds && status == KVK_OK; i++) {
        if (cache->disk_tier != NULL) {
            kvk_disk_leaving_settle(cache);
        }
        kvk_unlock(&cache->lock);
        status = kvk_catalogue_flush(cache->catalogue, error);
        kvk_lock(&cache->lock);
        if (cache->disk_tier == NULL || cache->disk_tier->leaving_count == 0) {
            break;
        }
    }
    return status;
}

/* ---- Restoring ---- */

/* Spaces as they were read; opening them writes, so it comes after the reading. */
struct recorded {
    struct kvk_cache *cache;
    struct recorded_space {
        uint64_t id;
        uint64_t tenant_id;
        uint64_t generation;
        uint8_t mode;
        uint8_t *identity; /* canonical, room for the generation behind it; ours */
        size_t identity_size;
        uint8_t shape[KVK_SHAPE_SIZE_MAX];
        size_t shape_size;
    } * spaces; /* [count]; ours */
    uint32_t count, capacity;
    uint64_t refused;
    bool out_of_memory;
};

static bool recorded_grow(struct recorded *recorded)
{
    if (recorded->count < recorded->capacity) {
        return true;
    }
    uint32_t capacity = recorded->capacity == 0 ? 64 : recorded->capacity * 2;
    struct recorded_space *spaces = realloc(recorded->spaces, capacity * sizeof(*spaces));
    if (spaces == NULL) {
        return false;
    }
    recorded->spaces = spaces;
    recorded->capacity = capacity;
    return true;
}

static void record_keep(void *context, const struct kvk_space_record *record)
{
    struct recorded *recorded = context;
    if (record->shape_size > KVK_SHAPE_SIZE_MAX || recorded->out_of_memory) {
        recorded->refused++;
        return;
    }
    uint8_t *identity = calloc(1, record->identity_size + sizeof(uint64_t));
    if (identity == NULL || !recorded_grow(recorded)) {
        free(identity);
        recorded->out_of_memory = true;
        return;
    }
    memcpy(identity, record->identity, record->identity_size);
    struct recorded_space *space = &recorded->spaces[recorded->count++];
    *space = (struct recorded_space){
        .id = record->id,
        .tenant_id = record->tenant_id,
        .generation = record->generation,
        .mode = record->mode,
        .identity = identity,
        .identity_size = record->identity_size,
        .shape_size = record->shape_size,
    };
    memcpy(space->shape, record->shape, record->shape_size);
}

/* The tenant's spaces are not wanted any more, or can never be opened: their records go. A record
 * that only does not fit this configuration stays, for another. */
static enum kvk_status space_restore(struct kvk_cache *cache, struct recorded_space *record,
                                     struct kvk_error *error)
{
    struct kvk_space_request request;
    const struct kvk_tenant *tenant = kvk_tenants_find(cache->tenants, record->tenant_id);
    if (tenant == NULL || kvk_tenant_is_leaving(tenant)) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "tenant", "its tenant is gone");
    }
    if (record->generation == 0 || record->generation > UINT64_MAX / 2 ||
        !kvk_shape_decode(record->shape, record->shape_size, &request) ||
        !kvk_identity_is_canonical(record->identity, record->identity_size)) {
        return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_NONE, "", "it is not one of ours");
    }
    uint8_t *identity = record->identity;
    record->identity = NULL; /* the space's, or freed */
    enum kvk_status status =
        kvk_space_restore(cache, tenant, &request, identity, record->identity_size, record->id,
                          record->generation, error);
    if (status == KVK_OK) {
        kvk_lock(&cache->lock);
        struct kvk_space *space = kvk_table_get(&cache->space_table, record->id);
        KVK_ASSERT(space != NULL); /* nobody is served yet */
        space->mode = record->mode;
        kvk_unlock(&cache->lock);
    }
    return status;
}

static void space_refuse(struct kvk_cache *cache, const struct recorded_space *record,
                         enum kvk_status status, const struct kvk_error *error)
{
    tell_failure("space_not_restored", record->id, error);
    if (status == KVK_NOT_FOUND || status == KVK_EXISTS) {
        kvk_persist_forget_unlocked(cache, record->id);
    }
}

enum kvk_status kvk_persist_restore_spaces(struct kvk_cache *cache, struct kvk_error *error)
{
    struct recorded recorded = {.cache = cache};
    uint64_t restored = 0;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->catalogue == NULL) {
        return KVK_OK;
    }
    enum kvk_status status = kvk_catalogue_spaces(cache->catalogue, record_keep, &recorded, error);
    if (status == KVK_OK && recorded.out_of_memory) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the spaces");
    }
    for (uint32_t i = 0; i < recorded.count; i++) {
        struct recorded_space *record = &recorded.spaces[i];
        struct kvk_error reason;
        enum kvk_status opened =
            status == KVK_OK ? space_restore(cache, record, &reason) : KVK_UNAVAILABLE;
        if (opened == KVK_OK) {
            restored++;
        } else if (status == KVK_OK) {
            recorded.refused++;
            space_refuse(cache, record, opened, &reason);
        }
        free(record->identity);
    }
    free(recorded.spaces);
    kvk_lock(&cache->lock);
    cache->stats.spaces_restored += restored;
    cache->stats.space_records_refused += recorded.refused;
    kvk_unlock(&cache->lock);
    if (restored + recorded.refused > 0) {
        kvk_log(KVK_LOG_INFO, "spaces_restored", "count=%llu refused=%llu",
                (unsigned long long)restored, (unsigned long long)recorded.refused);
    }
    return status;
}
