/*
 * Transfers: copies that a worker makes itself between its memory and mapped slots.
 *
 * A ticket holds and pins what it names, apart from the lease or sequence that it was taken for: it
 * outlives both, until it is ended or its process is gone.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

/* What is to be copied, of a sequence or a lease alike. */
struct transferring {
    struct kvk_cache *cache;
    const struct kvk_transfer_request *request;
    struct kvk_session *session;
    struct kvk_space *space;
    struct kvk_lease *lease; /* NULL: of a sequence */
    const uint32_t *blocks[KVK_GROUP_COUNT_MAX];
    uint64_t block_count;   /* of the prefix that may be named */
    uint64_t first_allowed; /* first block that may be named */
};

static enum kvk_status find_lease(struct transferring *to, const struct kvk_caller *caller,
                                  struct kvk_error *error)
{
    enum kvk_status status = kvk_lease_find(to->cache, caller, to->request->session_id,
                                            to->request->lease_id, &to->session, &to->lease, error);
    if (status != KVK_OK) {
        return status;
    }
    if (to->request->write) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "write",
                        "a lease is a right to read");
    }
    to->space = to->lease->space;
    to->block_count = to->lease->groups[0].block_count;
    for (uint32_t g = 0; g < to->space->group_count; g++) {
        to->blocks[g] = to->lease->groups[g].blocks;
    }
    return KVK_OK;
}

static enum kvk_status find_sequence(struct transferring *to, const struct kvk_caller *caller,
                                     struct kvk_error *error)
{
    struct kvk_sequence *sequence;
    enum kvk_status status =
        kvk_sequence_find(to->cache, caller, to->request->session_id, to->request->sequence_id,
                          &to->session, &sequence, error);
    if (status != KVK_OK) {
        return status;
    }
    to->space = sequence->space;
    to->lease = NULL;
    for (uint32_t g = 0; g < to->space->group_count; g++) {
        to->blocks[g] = sequence->groups[g].blocks;
    }
    if (!to->request->write) {
        to->block_count = kvk_blocks_for(to->space, sequence->sealed);
        return KVK_OK;
    }
    status = kvk_sequence_check_running(sequence, error);
    if (status != KVK_OK) {
        return status;
    }
    if (to->session->rank >= to->space->rank_count ||
        sequence->rank_sealed[to->session->rank] >= sequence->length) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "write",
                        "nothing is granted to this rank");
    }
    to->block_count = sequence->groups[0].block_count;
    to->first_allowed = sequence->rank_sealed[to->session->rank] / to->space->block_tokens;
    return KVK_OK;
}

static enum kvk_status transfer_find(struct transferring *to, const struct kvk_caller *caller,
                                     struct kvk_error *error)
{
    const struct kvk_transfer_request *request = to->request;
    if (request->block_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "block_count", "must be at least 1");
    }
    enum kvk_status status =
        request->lease_id != 0 ? find_lease(to, caller, error) : find_sequence(to, caller, error);
    if (status != KVK_OK) {
        return status;
    }
    if (request->first_block < to->first_allowed) {
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "first_block",
                              request->first_block, to->first_allowed,
                              "blocks below %llu are sealed",
                              (unsigned long long)to->first_allowed);
    }
    if (request->first_block > to->block_count ||
        request->block_count > to->block_count - request->first_block) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "block_count",
                              request->first_block + request->block_count, to->block_count,
                              "only %llu blocks may be copied",
                              (unsigned long long)to->block_count);
    }
    for (uint32_t g = 0; g < to->space->group_count; g++) {
        for (uint64_t i = 0;
             kvk_group_is_compact_below(to->space->groups[g]) && i < request->block_count; i++) {
            uint64_t index = request->first_block + i;
            uint32_t id = to->blocks[g][index];
            if (id != KVK_BLOCK_NONE &&
                kvk_block_tier(kvk_index_block(to->cache->index, id)) == KVK_TIER_HOST) {
                return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "first_block",
                                      index, 0,
                                      "block %llu lies in the host tier, in a compact format "
                                      "(host_format): ReadBlocks reads it",
                                      (unsigned long long)index);
            }
        }
    }
    return KVK_OK;
}

/* Under the lock, nothing can fail any more. */
static void transfer_take(const struct transferring *to, struct kvk_transfer *transfer,
                          struct kvk_tables *tables)
{
    struct kvk_cache *cache = to->cache;
    const struct kvk_transfer_request *request = to->request;
    uint32_t count = (uint32_t)request->block_count;
    for (uint32_t g = 0; g < to->space->group_count; g++) {
        const uint32_t *blocks = to->blocks[g] + request->first_block;
        for (uint32_t i = 0; i < count; i++) {
            if (blocks[i] == KVK_BLOCK_NONE) {
                continue;
            }
            enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, blocks[i]));
            kvk_block_hold(cache, blocks[i], false);
            kvk_block_pin(cache, blocks[i], tier);
            transfer->pins[transfer->pin_count++] =
                (struct kvk_pinned){.block = blocks[i], .tier = (uint8_t)tier};
        }
        if (tables != NULL) {
            kvk_tables_add(cache, tables, g, request->first_block, blocks, count);
        }
    }
    transfer->session = to->session;
    transfer->sequence_id = request->sequence_id;
    transfer->lease_id = request->lease_id;
    transfer->write = request->write;
    transfer->next = to->session->transfers;
    if (transfer->next != NULL) {
        transfer->next->previous = transfer;
    }
    to->session->transfers = transfer;
    kvk_metadata_add(to->cache, to->session->tenant, KVK_METADATA_TRANSFERS, 1,
                     transfer->metadata_bytes);
    if (to->lease != NULL) {
        to->lease->open_transfers++;
    }
}

static enum kvk_status transfer_put(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                    struct kvk_transfer *transfer, struct kvk_error *error)
{
    KVK_ASSERT(transfer != NULL);
    enum kvk_status status = kvk_metadata_admit(cache, tenant, KVK_METADATA_TRANSFERS, 1,
                                                transfer->metadata_bytes, error);
    if (status != KVK_OK) {
        return status;
    }
    transfer->id = kvk_cache_new_id(cache);
    if (kvk_table_put(&cache->transfer_table, transfer->id, transfer) == KVK_OK) {
        return KVK_OK;
    }
    kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "transfers", cache->transfer_table.count,
                   cache->config->transfers, "limit of open transfers reached: %u",
                   cache->config->transfers);
    kvk_error_retry(error, 10);
    return KVK_EXHAUSTED;
}

static enum kvk_status check_request(const struct kvk_cache *cache,
                                     const struct kvk_transfer_request *request,
                                     struct kvk_error *error)
{
    if ((request->sequence_id != 0) == (request->lease_id != 0)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "sequence_id",
                        "name either a sequence or a lease");
    }
    if (request->block_count == 0 || request->block_count > cache->config->tokens) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "block_count",
                              request->block_count, cache->config->tokens,
                              "block_count must be 1 to %llu",
                              (unsigned long long)cache->config->tokens);
    }
    return KVK_OK;
}

enum kvk_status kvk_transfer_begin(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   const struct kvk_transfer_request *request, uint64_t *ticket,
                                   struct kvk_tables *tables, struct kvk_error *error)
{
    struct transferring to = {.cache = cache, .request = request};
    enum kvk_status status = check_request(cache, request, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    status = transfer_find(&to, caller, error); /* bounds what is allocated below */
    KVK_ASSERT(status != KVK_OK || to.space != NULL);
    uint64_t entries = status == KVK_OK ? request->block_count * to.space->group_count : 0;
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(entries > 0); /* transfer_find() refuses none */
    struct kvk_transfer *transfer = calloc(1, sizeof(*transfer));
    struct kvk_pinned *pins = malloc(entries * sizeof(*pins));
    if (transfer == NULL || pins == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory for a transfer");
    } else if (tables != NULL) {
        status = kvk_tables_reserve_unlocked(tables, entries, error);
    }

    kvk_lock(&cache->lock);
    if (status == KVK_OK) {
        status = transfer_find(&to, caller, error);
    }
    if (status == KVK_OK && request->block_count * to.space->group_count > entries) {
        KVK_UNREACHABLE(); /* a sequence or lease never changes its space */
    }
    if (status == KVK_OK) {
        KVK_ASSERT(transfer != NULL && pins != NULL);
        transfer->metadata_bytes = sizeof(*transfer) + entries * sizeof(*pins);
        status = transfer_put(cache, to.session->tenant, transfer, error);
    }
    if (status == KVK_OK) {
        transfer->pins = pins;
        transfer_take(&to, transfer, tables);
        *ticket = transfer->id;
    }
    kvk_unlock(&cache->lock);
    if (status != KVK_OK) {
        free(transfer);
        free(pins);
    }
    return status;
}

void kvk_transfer_finish(struct kvk_cache *cache, struct kvk_transfer *transfer)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint32_t i = transfer->pin_count; i > 0; i--) {
        const struct kvk_pinned *pin = &transfer->pins[i - 1];
        kvk_block_unpin(cache, pin->block, (enum kvk_tier)pin->tier);
        kvk_block_release(cache, pin->block, false);
    }
    struct kvk_lease *lease = kvk_table_get(&cache->lease_table, transfer->lease_id);
    if (transfer->lease_id != 0 && lease != NULL) {
        KVK_ASSERT(lease->open_transfers > 0);
        lease->open_transfers--;
    }
    if (transfer->next != NULL) {
        transfer->next->previous = transfer->previous;
    }
    if (transfer->previous != NULL) {
        transfer->previous->next = transfer->next;
    } else {
        KVK_ASSERT(transfer->session->transfers == transfer);
        transfer->session->transfers = transfer->next;
    }
    void *removed = kvk_table_remove(&cache->transfer_table, transfer->id);
    KVK_ASSERT(removed == transfer);
    kvk_metadata_sub(cache, transfer->session->tenant, KVK_METADATA_TRANSFERS, 1,
                     transfer->metadata_bytes);
    free(transfer->pins);
    free(transfer);
    (void)pthread_cond_broadcast(&cache->changed);
}

enum kvk_status kvk_transfer_end(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 uint64_t session_id, uint64_t ticket, struct kvk_error *error)
{
    struct kvk_session *session;
    kvk_lock(&cache->lock);
    enum kvk_status status = kvk_session_find(cache, caller, session_id, &session, error);
    if (status == KVK_OK) {
        struct kvk_transfer *transfer = kvk_table_get(&cache->transfer_table, ticket);
        if (transfer == NULL || transfer->session->tenant != session->tenant) {
            status = kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "ticket", "no such ticket");
        } else if (transfer->session != session) {
            status = kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "ticket",
                              "another session owns the ticket");
        } else {
            kvk_transfer_finish(cache, transfer);
        }
    }
    kvk_unlock(&cache->lock);
    return status;
}
