/*
 * Memory for processes: slots of their tenant's spaces, scratch for operands, the tokens that
 * fetch the descriptors, and the side connection that they go over.
 */
#include "daemon/session_internal.h"
#include "daemon/sidecar.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/random.h"

/* ---- Lists ---- */

static void mapping_link(struct kvk_cache *cache, struct kvk_session *session,
                         struct kvk_mapping *mapping)
{
    mapping->next = session->mappings;
    session->mappings = mapping;
    kvk_metadata_session(cache, session);
    if (mapping->group != NULL) {
        mapping->group->space->reference_count++;
    }
}

/* Device memory that a process has opened, or may open from now on. */
static bool is_lent(const struct kvk_mapping *mapping)
{
    return mapping->group != NULL && mapping->taken &&
           mapping->group->tiers[mapping->tier].regions[mapping->shard].slabs != NULL;
}

static void lend_end(const struct kvk_session *session, struct kvk_mapping *mapping)
{
    if (is_lent(mapping)) {
        struct kvk_group_tier *at = &mapping->group->tiers[mapping->tier];
        KVK_ASSERT(at->lent_count > 0);
        at->lent_count--;
        at->lent_for_good = at->lent_for_good || !session->process_gone;
    }
}

/* Move a mapping from its session to `list`, or leave it to its last user. */
static void mapping_detach(struct kvk_session *session, struct kvk_mapping **at,
                           struct kvk_mapping **list)
{
    struct kvk_mapping *mapping = *at;

    *at = mapping->next;
    lend_end(session, mapping);
    if (mapping->group != NULL && mapping->taken && mapping->writable) {
        kvk_sidecar_process_remove(mapping->group, session);
    }
    if (mapping->group != NULL) {
        KVK_ASSERT(mapping->group->space->reference_count > 0);
        mapping->group->space->reference_count--;
        mapping->group = NULL;
    }
    kvk_secret_wipe(mapping->token, sizeof(mapping->token));
    if (mapping->users > 0) {
        mapping->orphaned = true;
        mapping->next = NULL;
        return;
    }
    mapping->next = *list;
    *list = mapping;
}

struct kvk_mapping *kvk_session_mappings_detach(struct kvk_session *session, bool all)
{
    struct kvk_mapping *list = NULL;
    struct kvk_mapping **at = &session->mappings;

    while (*at != NULL) {
        if (!all && (*at)->kind == KVK_MAP_SLOTS && (*at)->taken) {
            at = &(*at)->next;
        } else {
            mapping_detach(session, at, &list);
        }
    }
    return list;
}

struct kvk_mapping *kvk_session_mappings_expire(struct kvk_session *session, uint64_t now_ns)
{
    struct kvk_mapping *list = NULL;
    struct kvk_mapping **at = &session->mappings;

    while (*at != NULL) {
        if (!(*at)->taken && (*at)->users == 0 && now_ns >= (*at)->token_until_ns) {
            mapping_detach(session, at, &list);
        } else {
            at = &(*at)->next;
        }
    }
    return list;
}

void kvk_mappings_destroy_unlocked(struct kvk_cache *cache, struct kvk_mapping *mappings)
{
    while (mappings != NULL) {
        struct kvk_mapping *next = mappings->next;
        if (mappings->kind == KVK_MAP_SCRATCH) {
            cache->memory->ops->free(cache->memory, &mappings->scratch);
        }
        free(mappings);
        mappings = next;
    }
}

/* ---- Asking for a mapping ---- */

static enum kvk_status refuse_field(struct kvk_error *error, const char *field, uint64_t value,
                                    uint64_t limit, const char *reason)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s: %llu: %s",
                          field, (unsigned long long)value, reason);
}

/* The session, if one more mapping can be fetched over its side socket. */
static enum kvk_status find_mapper(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   uint64_t session_id, struct kvk_session **session,
                                   struct kvk_error *error)
{
    enum kvk_status status = kvk_session_find(cache, caller, session_id, session, error);
    if (status != KVK_OK) {
        return status;
    }
    if (!(*session)->side_bound) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NOT_MAPPED, "session_id",
                        "memory is mapped by descriptors, and the session has no side socket");
    }
    uint32_t count = 0;
    for (const struct kvk_mapping *mapping = (*session)->mappings; mapping != NULL;
         mapping = mapping->next) {
        count++;
    }
    if (count >= KVK_SESSION_MAPPINGS_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "session_id", count,
                              KVK_SESSION_MAPPINGS_MAX, "a session has at most %d mappings",
                              KVK_SESSION_MAPPINGS_MAX);
    }
    return KVK_OK;
}

/* Slabs of the tier are on their way out: their handles are not given to anybody any more. */
static bool is_leaving(const struct kvk_cache *cache, const struct kvk_group *group,
                       enum kvk_tier tier)
{
    const struct kvk_punch *punch = cache->punches;
    while (punch != NULL && (punch->group != group || punch->tier != tier)) {
        punch = punch->next;
    }
    return punch != NULL;
}

/* Can a process have this memory, as it wants it? */
static enum kvk_status check_reach(const struct kvk_cache *cache,
                                   const struct kvk_map_request *request,
                                   const struct kvk_group *group, uint32_t shard,
                                   enum kvk_tier tier, struct kvk_error *error)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    if (kvk_tier_descriptor(at, shard) < 0) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "tier",
                        "memory of this device cannot be mapped");
    }
    if (at->regions[shard].slabs == NULL) {
        return KVK_OK;
    }
    if (request->read_only) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "read_only",
                        "read_only: memory of a GPU can be mapped for writing only");
    }
    if (is_leaving(cache, group, tier)) {
        (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "tier",
                       "slabs of the space are on their way out; try again");
        kvk_error_retry(error, 20);
        return KVK_UNAVAILABLE;
    }
    return KVK_OK;
}

/* The slots that are asked for: of a space of the session's own tenant, or of a public one. */
static enum kvk_status find_slots(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  const struct kvk_session *session,
                                  const struct kvk_map_request *request, struct kvk_group **group,
                                  uint32_t *shard, enum kvk_tier *tier, struct kvk_error *error)
{
    struct kvk_space *space = NULL;

    const struct kvk_space *known = kvk_table_get(&cache->space_table, request->space_id);
    bool is_public = known != NULL && known->is_public;
    enum kvk_status status =
        is_public ? kvk_public_map_find(cache, session, request->space_id, &space, error)
                  : kvk_space_find(cache, caller, request->space_id, &space, error);
    if (status != KVK_OK) {
        return status;
    }
    if (is_public && !request->read_only) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "read_only",
                        "read_only: public memory is mapped read-only");
    }
    if (!is_public && space->tenant != session->tenant) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "space_id",
                        "the space is not of the session's tenant");
    }
    if (request->group >= space->group_count) {
        return refuse_field(error, "group", request->group, space->group_count - 1,
                            "the space has no such group");
    }
    if (request->rank >= space->rank_count) {
        return refuse_field(error, "rank", request->rank, space->rank_count - 1,
                            "the space has no such rank");
    }
    struct kvk_group *found = space->groups[request->group];
    if (request->tier >= (int)KVK_MEMORY_TIER_COUNT) {
        return refuse_field(error, "tier", (uint64_t)request->tier, KVK_MEMORY_TIER_COUNT - 1,
                            "must be device or host");
    }
    if (request->tier >= 0) {
        *tier = (enum kvk_tier)request->tier;
    } else {
        *tier = is_public ? KVK_TIER_HOST : kvk_tier_first(cache);
    }
    if (!found->tiers[*tier].present) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NOT_MAPPED, "tier",
                        "the daemon has no such tier");
    }
    if (found->forms[*tier].compact) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "tier",
                        "the host tier holds this group in %s (host_format): ReadBlocks and Attend "
                        "read it, it is not mapped",
                        kvk_format_name(found->forms[*tier].geometry.format_k));
    }
    *shard = kvk_geometry_rank_shard(&found->geometry, request->rank);
    status = check_reach(cache, request, found, *shard, *tier, error);
    if (status != KVK_OK) {
        return status;
    }
    /* Without it nobody would know when slots are safe to give to others. */
    if (session->pidfd < 0) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NOT_MAPPED, "session_id",
                        "the session's process cannot be watched from here (another pid "
                        "namespace?), so it is given no slots");
    }
    *group = found;
    return KVK_OK;
}

static void mapping_arm(struct kvk_cache *cache, struct kvk_mapping *mapping,
                        struct kvk_map_reply *reply)
{
    mapping->id = kvk_cache_new_id(cache);
    kvk_random_secret(mapping->token, sizeof(mapping->token));
    mapping->token_until_ns = kvk_clock_now(cache->clock) + KVK_TOKEN_MS * KVK_NS_PER_MS;
    memcpy(reply->map_token, mapping->token, sizeof(reply->map_token));
    reply->map_id = mapping->id;
}

static enum kvk_status map_slots(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 const struct kvk_map_request *request, struct kvk_map_reply *reply,
                                 struct kvk_error *error)
{
    struct kvk_session *session = NULL;
    struct kvk_group *group = NULL;
    uint32_t shard = 0;
    enum kvk_tier tier = KVK_TIER_DEVICE;

    struct kvk_mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a mapping");
    }
    kvk_lock(&cache->lock);
    enum kvk_status status = find_mapper(cache, caller, request->session_id, &session, error);
    if (status == KVK_OK) {
        status = find_slots(cache, caller, session, request, &group, &shard, &tier, error);
    }
    if (status == KVK_OK) {
        KVK_ASSERT(session != NULL);
        status = kvk_metadata_admit(cache, session->tenant, KVK_METADATA_SESSIONS, 0,
                                    sizeof(*mapping), error);
    }
    if (status == KVK_OK) {
        KVK_ASSERT(group != NULL);
        struct kvk_group_tier *at = &group->tiers[tier];
        mapping->kind = KVK_MAP_SLOTS;
        mapping->writable = !request->read_only;
        mapping->group = group;
        mapping->tier = tier;
        mapping->shard = shard;
        mapping->scratch.fd = -1;
        mapping_link(cache, session, mapping);
        mapping_arm(cache, mapping, reply);
        reply->tier = (int)tier;
        reply->size_bytes = at->regions[shard].size_bytes;
        reply->slot_stride = group->shard_bytes[shard];
        reply->slot_count = kvk_arena_slot_capacity(&at->arena);
        reply->by_slabs = at->regions[shard].slabs != NULL;
    }
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        free(mapping);
    }
    return status;
}

/* May the session have so much scratch beside what it has? */
static enum kvk_status scratch_check(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     const struct kvk_map_request *request,
                                     struct kvk_session **session, struct kvk_error *error)
{
    uint64_t limit = cache->config->scratch_bytes;

    enum kvk_status status = find_mapper(cache, caller, request->session_id, session, error);
    if (status != KVK_OK) {
        return status;
    }
    if (request->size_bytes == 0 || request->size_bytes > limit) {
        return kvk_fail_limit(
            error, KVK_INVALID, KVK_CAUSE_FIELD, "size_bytes", request->size_bytes, limit,
            "size_bytes must be 1 to %llu (limits.scratch_bytes)", (unsigned long long)limit);
    }
    uint64_t used = 0;
    for (const struct kvk_mapping *mapping = (*session)->mappings; mapping != NULL;
         mapping = mapping->next) {
        used += mapping->kind == KVK_MAP_SCRATCH ? mapping->scratch.size_bytes : 0;
    }
    if (used >= limit || request->size_bytes > limit - used) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "size_bytes",
                              used + request->size_bytes, limit,
                              "the session would have more scratch memory than %llu bytes "
                              "(limits.scratch_bytes)",
                              (unsigned long long)limit);
    }
    return kvk_metadata_admit(cache, (*session)->tenant, KVK_METADATA_SESSIONS, 0,
                              sizeof(struct kvk_mapping) + request->size_bytes, error);
}

/* Memory of its own for the mapping, all of it there, so that no use of it can fault. */
static enum kvk_status scratch_alloc(struct kvk_device *memory, uint64_t size_bytes,
                                     struct kvk_region *region, struct kvk_error *error)
{
    enum kvk_status status =
        memory->ops->alloc(memory, size_bytes, 0, "kvkeep-scratch", region, error);
    if (status != KVK_OK) {
        return status;
    }
    status = memory->ops->back(memory, region, 0, size_bytes, error);
    if (status != KVK_OK) {
        memory->ops->free(memory, region);
    }
    return status;
}

static enum kvk_status map_scratch(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   const struct kvk_map_request *request,
                                   struct kvk_map_reply *reply, struct kvk_error *error)
{
    struct kvk_session *session = NULL;

    kvk_lock(&cache->lock);
    enum kvk_status status = scratch_check(cache, caller, request, &session, error);
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        return status;
    }
    if (cache->memory == NULL) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "kind",
                        "there is no device whose memory can be mapped");
    }
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    struct kvk_mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a mapping");
    }
    status = scratch_alloc(cache->memory, request->size_bytes, &mapping->scratch, error);
    if (status != KVK_OK) {
        free(mapping);
        return status;
    }
    mapping->kind = KVK_MAP_SCRATCH;
    mapping->writable = !request->read_only;

    kvk_lock(&cache->lock);
    status = scratch_check(cache, caller, request, &session, error); /* again: time has passed */
    if (status == KVK_OK) {
        mapping_link(cache, session, mapping);
        mapping_arm(cache, mapping, reply);
        reply->size_bytes = mapping->scratch.size_bytes;
    }
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        kvk_mappings_destroy_unlocked(cache, mapping);
    }
    return status;
}

enum kvk_status kvk_session_map(struct kvk_cache *cache, const struct kvk_caller *caller,
                                const struct kvk_map_request *request, struct kvk_map_reply *reply,
                                struct kvk_error *error)
{
    *reply = (struct kvk_map_reply){.tier = -1};
    switch (request->kind) {
    case KVK_MAP_SLOTS:
        return map_slots(cache, caller, request, reply, error);
    case KVK_MAP_SCRATCH:
        return map_scratch(cache, caller, request, reply, error);
    }
    return refuse_field(error, "kind", (uint64_t)request->kind, 0, "must be slots or scratch");
}

/* ---- The side socket ---- */

/* The session that waits for this token. All are compared, so that time tells nothing. */
static struct kvk_session *find_side_token(struct kvk_cache *cache,
                                           const uint8_t token[KVK_TOKEN_SIZE])
{
    struct kvk_session *found = NULL;
    uint64_t now_ns = kvk_clock_now(cache->clock);
    size_t place = 0;
    const struct kvk_table_entry *entry;

    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        struct kvk_session *session = kvk_table_get(&cache->session_table, entry->key);
        bool equal = kvk_secret_equal(session->side_token, token, KVK_TOKEN_SIZE);
        if (equal && session->connected && now_ns < session->side_token_until_ns) {
            found = session;
        }
    }
    return found;
}

enum kvk_status kvk_side_bind(struct kvk_cache *cache, const uint8_t token[KVK_TOKEN_SIZE],
                              int32_t pid, uint32_t uid, uint64_t *session_id, int *pidfd)
{
    enum kvk_status status = KVK_OK;

    kvk_lock(&cache->lock);
    struct kvk_session *session = find_side_token(cache, token);
    if (session == NULL) {
        status = KVK_NOT_FOUND;
    } else if (session->uid != uid || (session->pid > 0 && session->pid != pid)) {
        status = KVK_PERMISSION; /* the token stays good for whose it is */
    } else {
        kvk_secret_wipe(session->side_token, sizeof(session->side_token));
        session->side_token_until_ns = 0;
        session->side_bound = true;
        *session_id = session->id;
        *pidfd = session->pidfd >= 0 ? fcntl(session->pidfd, F_DUPFD_CLOEXEC, 0) : -1;
    }
    kvk_unlock(&cache->lock);
    return status;
}

static struct kvk_mapping *find_map_token(struct kvk_session *session, uint64_t now_ns,
                                          const uint8_t token[KVK_TOKEN_SIZE])
{
    struct kvk_mapping *found = NULL;

    for (struct kvk_mapping *mapping = session->mappings; mapping != NULL;
         mapping = mapping->next) {
        bool equal = kvk_secret_equal(mapping->token, token, KVK_TOKEN_SIZE);
        if (equal && !mapping->taken && now_ns < mapping->token_until_ns) {
            found = mapping;
        }
    }
    return found;
}

/* Trade a descriptor for one that can only be read from. The file's mode keeps others than its
 * owner from opening it anew for writing. */
static enum kvk_status make_read_only(int *fd)
{
    char path[32];

    if (fchmod(*fd, S_IRUSR) != 0) {
        return KVK_INTERNAL;
    }
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", *fd);
    int read_only = open(path, O_RDONLY | O_CLOEXEC);
    if (read_only < 0) {
        return errno == EMFILE || errno == ENFILE ? KVK_EXHAUSTED : KVK_INTERNAL;
    }
    (void)close(*fd);
    *fd = read_only;
    return KVK_OK;
}

static void close_both(int fds[2])
{
    for (int i = 0; i < 2; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
        }
        fds[i] = -1;
    }
}

/* Copies of the mapping's descriptors; the lock keeps the originals open. */
static enum kvk_status dup_descriptors(const struct kvk_mapping *mapping, int fds[2])
{
    if (mapping->kind == KVK_MAP_SCRATCH) {
        fds[0] = fcntl(mapping->scratch.fd, F_DUPFD_CLOEXEC, 0);
        return fds[0] >= 0 ? KVK_OK : KVK_EXHAUSTED;
    }
    KVK_ASSERT(mapping->group != NULL);
    const struct kvk_group_tier *tier = &mapping->group->tiers[mapping->tier];
    fds[0] = fcntl(kvk_tier_descriptor(tier, mapping->shard), F_DUPFD_CLOEXEC, 0);
    fds[1] = fcntl(tier->generations.fd, F_DUPFD_CLOEXEC, 0);
    return fds[0] >= 0 && fds[1] >= 0 ? KVK_OK : KVK_EXHAUSTED;
}

enum kvk_status kvk_side_take(struct kvk_cache *cache, uint64_t session_id,
                              const uint8_t token[KVK_TOKEN_SIZE], int fds[2])
{
    bool writable = false;
    enum kvk_status status = KVK_NOT_FOUND;

    fds[0] = -1;
    fds[1] = -1;
    kvk_lock(&cache->lock);
    struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
    if (session != NULL && session->connected && session->side_bound && session->instance != NULL &&
        !session->instance->ending) {
        struct kvk_mapping *mapping = find_map_token(session, kvk_clock_now(cache->clock), token);
        /* Written down before it goes out: who may write is known after a crash too. */
        bool noted =
            mapping != NULL && (mapping->group == NULL || !mapping->writable ||
                                kvk_sidecar_process_add(mapping->group, mapping->tier, session));
        bool leaves = mapping != NULL && mapping->group != NULL &&
                      mapping->group->tiers[mapping->tier].regions[mapping->shard].slabs != NULL &&
                      is_leaving(cache, mapping->group, mapping->tier);
        if (mapping != NULL) {
            status = leaves  ? KVK_UNAVAILABLE
                     : noted ? dup_descriptors(mapping, fds)
                             : KVK_EXHAUSTED;
        }
        if (status != KVK_OK && noted && mapping->group != NULL && mapping->writable) {
            kvk_sidecar_process_remove(mapping->group, session);
        }
        if (status == KVK_OK) {
            mapping->taken = true; /* from here on the process may have it, whatever fails */
            writable = mapping->writable && !is_lent(mapping); /* a table is only read */
            if (is_lent(mapping)) {
                mapping->group->tiers[mapping->tier].lent_count++;
            }
            kvk_secret_wipe(mapping->token, sizeof(mapping->token));
            mapping->token_until_ns = 0;
        }
    }
    kvk_unlock(&cache->lock);

    if (status == KVK_OK && !writable) {
        status = make_read_only(&fds[0]);
    }
    if (status == KVK_OK && fds[1] >= 0) {
        status = make_read_only(&fds[1]);
    }
    if (status != KVK_OK) {
        close_both(fds);
    }
    return status;
}

/* ---- Operands in scratch memory ---- */

uint8_t *kvk_scratch_address(struct kvk_cache *cache, uint64_t session_id, uint64_t map_id,
                             uint64_t offset, uint64_t size_bytes, uint64_t *handle)
{
    uint8_t *address = NULL;

    kvk_lock(&cache->lock);
    struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
    if (session != NULL && session->connected) {
        for (struct kvk_mapping *mapping = session->mappings; mapping != NULL;
             mapping = mapping->next) {
            if (mapping->id != map_id || mapping->kind != KVK_MAP_SCRATCH ||
                offset > mapping->scratch.size_bytes ||
                size_bytes > mapping->scratch.size_bytes - offset) {
                continue;
            }
            mapping->users++;
            *handle = (uint64_t)(uintptr_t)mapping;
            address = mapping->scratch.address + offset;
        }
    }
    kvk_unlock(&cache->lock);
    return address;
}

void kvk_scratch_release(struct kvk_cache *cache, uint64_t handle)
{
    struct kvk_mapping *mapping = (struct kvk_mapping *)(uintptr_t)handle;

    kvk_lock(&cache->lock);
    KVK_ASSERT(mapping->users > 0);
    mapping->users--;
    bool last = mapping->users == 0 && mapping->orphaned;
    kvk_unlock(&cache->lock);
    if (last) {
        kvk_mappings_destroy_unlocked(cache, mapping);
    }
}
