/*
 * Leases: pinned prefixes, for a time.
 *
 * A lease's memory is made before the lock is taken, for as many blocks as the prompt could have;
 * under the lock it only takes references. It ends by release, by its time, or with its instance.
 */
#include "daemon/lease.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/lease_heap.h"
#include "daemon/sequence_internal.h"

#define EXPIRE_COUNT 64               /* leases that one round ends */
#define EXPIRE_BLOCKS UINT64_C(16384) /* or the blocks of them */

uint64_t kvk_lease_clock(const struct kvk_cache *cache)
{
    uint64_t now = kvk_clock_now(cache->clock);
    return now - kvk_cache_stood_still(cache, now);
}

/* ---- Their life ---- */

/* The lease, and behind it the arrays of all groups in one piece. */
static struct kvk_lease *lease_create(uint32_t group_count, uint64_t block_count)
{
    size_t entries = (size_t)group_count * block_count;
    struct kvk_lease *lease = malloc(sizeof(*lease) + entries * (sizeof(uint32_t) + 1));
    if (lease == NULL) {
        return NULL;
    }
    *lease = (struct kvk_lease){
        .metadata_bytes = sizeof(*lease) + entries * (sizeof(uint32_t) + 1),
    };
    uint32_t *blocks = (uint32_t *)(void *)(lease + 1);
    uint8_t *pins = (uint8_t *)(blocks + entries);
    for (uint32_t g = 0; g < group_count; g++) {
        lease->groups[g].blocks = blocks + g * block_count;
        lease->groups[g].pins = pins + g * block_count;
    }
    return lease;
}
_Static_assert(sizeof(struct kvk_lease) % sizeof(uint32_t) == 0, "block ids follow it aligned");

static void lease_link(struct kvk_cache *cache, struct kvk_lease *lease,
                       struct kvk_instance *instance, struct kvk_space *space)
{
    lease->instance = instance;
    lease->space = space;
    lease->next = instance->leases;
    if (lease->next != NULL) {
        lease->next->previous = lease;
    }
    instance->leases = lease;
    instance->lease_count++;
    kvk_tenant_state_of(cache, space->tenant)->leases++;
    kvk_metadata_add(cache, space->tenant, KVK_METADATA_LEASES, 1, lease->metadata_bytes);
    space->reference_count++;
    kvk_lease_heap_add(&cache->lease_heap, lease);
}

uint64_t kvk_lease_blocks(const struct kvk_lease *lease)
{
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        blocks += lease->groups[g].block_count;
    }
    return blocks;
}

static uint64_t release_blocks_drops(struct kvk_cache *cache, struct kvk_lease *lease,
                                     uint32_t *work)
{
    uint64_t released = 0;
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        struct kvk_lease_group *table = &lease->groups[g];
        while (table->block_count > 0) {
            uint32_t at = --table->block_count;
            if (table->blocks[at] == KVK_BLOCK_NONE) {
                continue;
            }
            if (table->pins[at] != 0) {
                kvk_block_unpin(cache, table->blocks[at], (enum kvk_tier)(table->pins[at] - 1));
            }
            kvk_block_release(cache, table->blocks[at], true);
            released++;
            (void)kvk_slice_drops(cache, work);
        }
    }
    return released;
}

/* `work` goes on from lease to lease. */
static uint64_t lease_end_drops(struct kvk_cache *cache, struct kvk_lease *lease, uint32_t *work)
{
    struct kvk_instance *instance = lease->instance;
    lease->ending = true;
    kvk_lease_heap_remove(&cache->lease_heap, lease);
    uint64_t released = release_blocks_drops(cache, lease, work);
    void *removed = kvk_table_remove(&cache->lease_table, lease->id);
    KVK_ASSERT(removed == lease);
    if (lease->next != NULL) {
        lease->next->previous = lease->previous;
    }
    if (lease->previous != NULL) {
        lease->previous->next = lease->next;
    } else {
        KVK_ASSERT(instance->leases == lease);
        instance->leases = lease->next;
    }
    KVK_ASSERT(instance->lease_count > 0);
    instance->lease_count--;
    kvk_tenant_state_of(cache, lease->space->tenant)->leases--;
    kvk_metadata_sub(cache, lease->space->tenant, KVK_METADATA_LEASES, 1, lease->metadata_bytes);
    KVK_ASSERT(lease->space->reference_count > 0);
    lease->space->reference_count--;
    free(lease);
    (void)pthread_cond_broadcast(&cache->changed);
    return released;
}

void kvk_lease_end_drops(struct kvk_cache *cache, struct kvk_lease *lease)
{
    uint32_t work = 0;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    (void)lease_end_drops(cache, lease, &work);
}

/* Its time is over: remembered for a while, so that who comes late is told why. */
static uint64_t lease_expire_drops(struct kvk_cache *cache, struct kvk_lease *lease, uint32_t *work)
{
    cache->ended_leases[cache->ended_lease_count % KVK_ENDED_LEASE_COUNT] =
        (struct kvk_ended_lease){.id = lease->id, .instance_id = lease->instance->id};
    cache->ended_lease_count++;
    cache->stats.leases_expired++;
    return lease_end_drops(cache, lease, work);
}

void kvk_leases_expire_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t now = kvk_lease_clock(cache);
    uint64_t blocks = 0;
    uint32_t work = 0;
    for (uint32_t i = 0; i < EXPIRE_COUNT && blocks < EXPIRE_BLOCKS; i++) {
        struct kvk_lease *lease = cache->lease_heap;
        if (lease == NULL || lease->expires_ns > now) {
            return;
        }
        if (lease->ending) { /* by another call: out of the way until it gets there */
            kvk_lease_heap_remove(&cache->lease_heap, lease);
            lease->expires_ns = UINT64_MAX;
            kvk_lease_heap_add(&cache->lease_heap, lease);
            continue;
        }
        blocks += lease_expire_drops(cache, lease, &work);
    }
}

/* ---- Finding ---- */

static enum kvk_status refuse_expired(struct kvk_error *error)
{
    return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_LEASE_EXPIRED, "lease_id",
                    "the lease's time is over");
}

static bool has_expired(const struct kvk_cache *cache, uint64_t lease_id, uint64_t instance_id)
{
    for (uint32_t i = 0; i < KVK_ENDED_LEASE_COUNT; i++) {
        if (cache->ended_leases[i].id == lease_id &&
            cache->ended_leases[i].instance_id == instance_id) {
            return true;
        }
    }
    return false;
}

enum kvk_status kvk_lease_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                               uint64_t session_id, uint64_t lease_id, struct kvk_session **session,
                               struct kvk_lease **lease, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    enum kvk_status status = kvk_session_find(cache, caller, session_id, session, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_lease *found = kvk_table_get(&cache->lease_table, lease_id);
    if (found == NULL && lease_id != 0 && has_expired(cache, lease_id, (*session)->instance->id)) {
        return refuse_expired(error);
    }
    /* Another tenant's answers as if there were none. */
    if (found == NULL || found->ending || found->instance->tenant != (*session)->tenant) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "lease_id", "no such lease");
    }
    if (found->instance != (*session)->instance) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "lease_id",
                        "another instance owns the lease");
    }
    if (found->expires_ns <= kvk_lease_clock(cache)) {
        if (!found->marked && kvk_lease_blocks(found) < cache->slice_blocks) {
            uint32_t work = 0; /* so few that there is no pause */
            (void)lease_expire_drops(cache, found, &work);
        } else {
            (void)pthread_cond_signal(&cache->wake); /* maintenance ends it */
        }
        return refuse_expired(error);
    }
    *lease = found;
    return KVK_OK;
}

/* ---- Pin ---- */

struct pinning {
    struct kvk_cache *cache;
    const struct kvk_caller *caller;
    const struct kvk_pin_request *request;
    struct kvk_error *error;
    struct kvk_session *session;
    struct kvk_space *space;
    struct kvk_lease *repeated; /* the answer to this request id, alive */
    uint64_t limit_tokens;      /* that may be found */
    uint64_t limit_blocks;      /* per group */
    uint32_t group_count;
};

static enum kvk_status check_ttl(const struct kvk_cache *cache, uint64_t ttl_ms,
                                 struct kvk_error *error)
{
    if (ttl_ms >= 1 && ttl_ms <= cache->config->lease_ms) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "ttl_ms", ttl_ms,
                          cache->config->lease_ms, "ttl_ms must be 1 to %llu",
                          (unsigned long long)cache->config->lease_ms);
}

static struct kvk_lease *find_repeated(struct kvk_cache *cache, const struct kvk_instance *instance,
                                       const struct kvk_request_id *request_id)
{
    if (request_id->size == 0) {
        return NULL;
    }
    uint64_t now = kvk_lease_clock(cache);
    for (struct kvk_lease *lease = instance->leases; lease != NULL; lease = lease->next) {
        if (lease->expires_ns > now && !lease->ending &&
            kvk_request_id_equal(&lease->request_id, request_id)) {
            return lease;
        }
    }
    return NULL;
}

static enum kvk_status pin_find(struct pinning *pinning)
{
    struct kvk_cache *cache = pinning->cache;
    const struct kvk_pin_request *request = pinning->request;
    enum kvk_status status = kvk_session_find(cache, pinning->caller, request->session_id,
                                              &pinning->session, pinning->error);
    if (status != KVK_OK) {
        return status;
    }
    status =
        kvk_space_find(cache, pinning->caller, request->space_id, &pinning->space, pinning->error);
    if (status != KVK_OK) {
        return status;
    }
    if (pinning->space->tenant != pinning->session->tenant) {
        return kvk_fail(pinning->error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "space_id",
                        "the space is of another tenant than the session");
    }
    pinning->repeated = find_repeated(cache, pinning->session->instance, &request->request_id);
    pinning->limit_tokens = kvk_prefix_limit(pinning->space, &request->prompt, request->leave_last);
    pinning->limit_blocks = pinning->limit_tokens / pinning->space->block_tokens;
    pinning->group_count = pinning->space->group_count;
    if (pinning->repeated != NULL &&
        pinning->repeated->groups[0].block_count > pinning->limit_blocks) {
        pinning->limit_blocks = pinning->repeated->groups[0].block_count;
    }
    return KVK_OK;
}

/* Hold what a query behind the prefix sees. */
static void lease_take(struct kvk_cache *cache, struct kvk_lease *lease, uint32_t blocks)
{
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        struct kvk_lease_group *table = &lease->groups[g];
        table->block_count = blocks;
        for (uint32_t i = 0; i < blocks; i++) {
            uint32_t block = cache->path[g][i];
            table->blocks[i] = KVK_BLOCK_NONE;
            table->pins[i] = 0;
            if (!kvk_group_sees(lease->space->groups[g], blocks, i)) {
                continue;
            }
            table->blocks[i] = block;
            kvk_block_hold(cache, block, true);
            if (lease->copy_pin) {
                enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, block));
                kvk_block_pin(cache, block, tier);
                table->pins[i] = (uint8_t)(tier + 1);
            }
        }
    }
}

static enum kvk_status check_found(const struct pinning *pinning, uint64_t tokens)
{
    const struct kvk_cache *cache = pinning->cache;
    if (tokens < pinning->request->min_tokens) {
        return kvk_fail_limit(pinning->error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "min_tokens", tokens,
                              pinning->request->min_tokens, "only %llu tokens are cached",
                              (unsigned long long)tokens);
    }
    if (tokens > 0 && cache->lease_table.count >= cache->config->leases) {
        kvk_fail_limit(pinning->error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "leases",
                       cache->lease_table.count, cache->config->leases,
                       "limit of leases reached: %u", cache->config->leases);
        kvk_error_retry(pinning->error, 100);
        return KVK_EXHAUSTED;
    }
    const struct kvk_tenant_state *tenant = kvk_tenant_state_of(cache, pinning->space->tenant);
    return tokens > 0 ? kvk_quota_check_count(tenant, false, 1, pinning->error) : KVK_OK;
}

/* What a lease says of itself, when it is made and when it is asked for again. */
static void pin_answer(const struct kvk_cache *cache, const struct kvk_lease *lease,
                       struct kvk_pin_reply *reply, struct kvk_tables *tables)
{
    *reply = (struct kvk_pin_reply){
        .lease_id = lease->id,
        .cached_tokens = lease->tokens,
        .ttl_ms = (lease->expires_ns - kvk_lease_clock(cache)) / KVK_NS_PER_MS,
    };
    for (uint32_t g = 0; g < lease->space->group_count && tables != NULL; g++) {
        kvk_tables_add(cache, tables, g, 0, lease->groups[g].blocks, lease->groups[g].block_count);
    }
}

/* Bring back what is on disk alone, where that is worth it. Afterwards session and space have to be
 * found again. */
static enum kvk_status pin_restore_drops(struct pinning *pinning, struct kvk_disk_kept *kept,
                                         struct kvk_disk_estimate *estimate)
{
    struct kvk_cache *cache = pinning->cache;
    struct kvk_space *space = pinning->space;
    const struct kvk_prompt *prompt = &pinning->request->prompt;
    struct kvk_prefix prefix;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    uint32_t group_count = space->group_count;
    if (cache->disk_tier == NULL) {
        return KVK_OK;
    }
    kvk_space_roots_find(cache, space, prompt->salt, prompt->salt_size, roots);
    for (uint32_t g = 0; g < group_count; g++) {
        if (roots[g] == KVK_ROOT_NONE) {
            return KVK_OK; /* nothing is known of the salt */
        }
    }
    for (uint32_t g = 0; g < group_count; g++) {
        kvk_index_root_hold(cache->index, roots[g]);
    }
    space->reference_count++;
    enum kvk_status status =
        kvk_disk_prefix_find_drops(cache, space, roots, prompt, pinning->limit_tokens,
                                   pinning->caller, &prefix, estimate, kept, pinning->error);
    space->reference_count--;
    for (uint32_t g = 0; g < group_count; g++) {
        kvk_index_root_release(cache->index, roots[g]);
    }
    return status;
}

/* With the lock: find, and fill `lease`. `*used`: the lease is the cache's now. */
static enum kvk_status pin_take(struct pinning *pinning, struct kvk_lease *lease,
                                struct kvk_pin_reply *reply, struct kvk_tables *tables, bool *used)
{
    struct kvk_cache *cache = pinning->cache;
    struct kvk_space *space = pinning->space;
    const struct kvk_pin_request *request = pinning->request;
    struct kvk_prefix prefix;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    /* Before it is looked up: making the room may cost idle blocks. Refused only if there is a hit.
     */
    enum kvk_status admitted = kvk_metadata_admit(cache, space->tenant, KVK_METADATA_LEASES, 1,
                                                  lease->metadata_bytes, pinning->error);
    kvk_space_roots_find(cache, space, request->prompt.salt, request->prompt.salt_size, roots);
    kvk_disk_prefix_find_memory(cache, space, roots, &request->prompt, pinning->limit_tokens,
                                &prefix);
    uint64_t tokens = prefix.blocks * space->block_tokens;
    enum kvk_status status = check_found(pinning, tokens);
    if (status != KVK_OK) {
        return status;
    }
    if (tokens == 0) {
        cache->stats.pins++;
        kvk_prefix_count(cache, space, request->prompt.token_count, tokens, false);
        return KVK_OK; /* nothing to hold, nothing to release */
    }
    struct kvk_quota_mark mark;
    kvk_quota_mark(cache, space->tenant, &mark);
    if (admitted != KVK_OK) {
        return admitted;
    }
    lease->id = kvk_cache_new_id(cache);
    status = kvk_table_put(&cache->lease_table, lease->id, lease);
    KVK_ASSERT(status == KVK_OK);
    lease->tokens = tokens;
    lease->copy_pin = request->copy_pin;
    lease->request_id = request->request_id;
    lease->begun_ns = kvk_lease_clock(cache);
    lease->expires_ns = lease->begun_ns + request->ttl_ms * KVK_NS_PER_MS;
    lease_link(cache, lease, pinning->session->instance, space);
    lease_take(cache, lease, (uint32_t)prefix.blocks);
    *used = true;
    status = kvk_quota_check_holds(cache, space->tenant, &mark, pinning->error);
    if (status != KVK_OK) {
        uint32_t work = 0;
        space->reference_count++; /* stays: the refusal is noted with it */
        (void)lease_end_drops(cache, lease, &work);
        space->reference_count--;
        return status;
    }
    cache->stats.pins++;
    kvk_prefix_count(cache, space, request->prompt.token_count, tokens, false);
    kvk_prefix_use(cache, space, &prefix);
    if (prefix.publication != NULL) {
        kvk_public_hit(cache, prefix.publication->id, prefix.public_blocks * space->block_tokens);
    }
    pin_answer(cache, lease, reply, tables);
    return KVK_OK;
}

enum kvk_status kvk_lease_pin(struct kvk_cache *cache, const struct kvk_caller *caller,
                              const struct kvk_pin_request *request, struct kvk_pin_reply *reply,
                              struct kvk_tables *tables, struct kvk_error *error)
{
    struct pinning pinning = {.cache = cache, .caller = caller, .request = request, .error = error};
    *reply = (struct kvk_pin_reply){0};
    enum kvk_status status = check_ttl(cache, request->ttl_ms, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    status = pin_find(&pinning);
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        return status;
    }
    uint64_t blocks = pinning.limit_blocks;
    uint32_t group_count = pinning.group_count;
    struct kvk_lease *lease = lease_create(group_count, blocks);
    if (lease == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory for a lease");
    }
    if (tables != NULL) {
        status = kvk_tables_reserve_unlocked(tables, blocks * group_count, error);
    }
    if (status != KVK_OK) {
        free(lease);
        return status;
    }

    bool used = false;
    struct kvk_disk_kept kept = {.blocks = NULL};
    struct kvk_disk_estimate estimate = {0};
    kvk_lock(&cache->lock);
    status = pin_find(&pinning);
    if (status == KVK_OK && pinning.repeated == NULL) {
        status = pin_restore_drops(&pinning, &kept, &estimate);
        if (status == KVK_OK) {
            status = pin_find(&pinning);
        }
    }
    kvk_disk_kept_finish(cache, &kept); /* nothing comes between here and the lease's own holds */
    if (status == KVK_OK && pinning.repeated != NULL &&
        pinning.repeated->groups[0].block_count > blocks) {
        /* It came between, by another thread and longer than what we have room for. */
        status = kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "request_id",
                          "another call with this request_id has just ended");
    } else if (status == KVK_OK && pinning.repeated != NULL) {
        pin_answer(cache, pinning.repeated, reply, tables);
    } else if (status == KVK_OK) {
        status = pin_take(&pinning, lease, reply, tables, &used);
    }
    reply->disk = estimate;
    if (status == KVK_EXHAUSTED && error != NULL) {
        kvk_refusal_note(cache, caller, pinning.space->tenant, 0, 0, error);
    }
    kvk_unlock(&cache->lock);
    if (!used) {
        free(lease);
    }
    return status;
}

/* ---- Renew and Release ---- */

enum kvk_status kvk_lease_renew(struct kvk_cache *cache, const struct kvk_caller *caller,
                                uint64_t session_id, uint64_t lease_id, uint64_t ttl_ms,
                                struct kvk_error *error)
{
    struct kvk_session *session = NULL;
    struct kvk_lease *lease = NULL;
    enum kvk_status status = check_ttl(cache, ttl_ms, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    status = kvk_lease_find(cache, caller, session_id, lease_id, &session, &lease, error);
    if (status == KVK_OK) {
        KVK_ASSERT(lease != NULL);
        kvk_lease_heap_remove(&cache->lease_heap, lease);
        lease->expires_ns = kvk_lease_clock(cache) + ttl_ms * KVK_NS_PER_MS;
        kvk_lease_heap_add(&cache->lease_heap, lease);
    }
    kvk_unlock(&cache->lock);
    return status;
}

/* All of them, in one go: nobody finds any of them from here on. Or none. */
static enum kvk_status release_mark(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    uint64_t session_id, const uint64_t *lease_ids,
                                    uint32_t lease_count, struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    uint64_t blocks = 0;
    uint32_t marked = 0;
    for (; marked < lease_count; marked++) {
        struct kvk_session *session = NULL;
        struct kvk_lease *lease = NULL;
        status =
            kvk_lease_find(cache, caller, session_id, lease_ids[marked], &session, &lease, error);
        KVK_ASSERT(status != KVK_OK || lease != NULL);
        if (status == KVK_OK && lease->marked) {
            status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "lease_ids",
                              "lease_ids names a lease twice");
        }
        if (status != KVK_OK) {
            break;
        }
        lease->marked = true;
        blocks += kvk_lease_blocks(lease) + 1;
    }
    if (status == KVK_OK) {
        status = kvk_slice_admit(cache, caller, blocks);
    }
    for (uint32_t i = 0; i < marked; i++) {
        struct kvk_lease *lease = kvk_table_get(&cache->lease_table, lease_ids[i]);
        lease->marked = false;
        lease->ending = status == KVK_OK;
    }
    return status;
}

enum kvk_status kvk_lease_release(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  uint64_t session_id, const uint64_t *lease_ids,
                                  uint32_t lease_count, uint64_t *released_blocks,
                                  struct kvk_error *error)
{
    *released_blocks = 0;
    if (lease_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "lease_ids", "lease_ids is empty");
    }
    uint32_t work = 0;
    kvk_lock(&cache->lock);
    enum kvk_status status = release_mark(cache, caller, session_id, lease_ids, lease_count, error);
    for (uint32_t i = 0; i < lease_count && status == KVK_OK; i++) {
        /* Ended by us, so it is there. */
        struct kvk_lease *lease = kvk_table_get(&cache->lease_table, lease_ids[i]);
        *released_blocks += lease_end_drops(cache, lease, &work);
        (void)kvk_slice_drops(cache, &work);
    }
    kvk_unlock(&cache->lock);
    return status;
}
