/*
 * Bytes of blocks for the calls that stream them.
 *
 * Bytes move without the lock. A write holds and pins its block, and is counted in the sequence, so
 * that nothing it writes to is sealed, moved or granted again meanwhile; a read holds and pins.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/heal.h"
#include "daemon/sequence_internal.h"

/* ---- Which bytes are whose ---- */

/* K or V of one layer in a shard: rows of `block_tokens` tokens each. */
struct part {
    uint64_t first; /* byte in the shard */
    uint64_t end;
    uint64_t token_bytes; /* of one token in one row */
};

/* Do bytes [first, end) of the shard touch one of the first `sealed` tokens in this part? */
static bool touches_part(const struct part *part, uint32_t block_tokens, uint64_t sealed,
                         uint64_t first, uint64_t end)
{
    first = first < part->first ? part->first : first;
    end = end > part->end ? part->end : end;
    if (first >= end) {
        return false;
    }
    uint64_t row_bytes = part->token_bytes * block_tokens;
    uint64_t in_row = (first - part->first) % row_bytes;
    bool crosses = end - first > row_bytes - in_row; /* into the next row, which begins sealed */
    return in_row < sealed * part->token_bytes || crosses;
}

/* Of rows: of one head, or of all where tokens come first. */
static struct part rows_of(const struct kvk_geometry *geometry, const struct kvk_part *part,
                           uint64_t begin)
{
    uint64_t size = part->row_bytes * part->tokens * part->heads;
    uint64_t token_bytes = part->row_bytes;
    if (geometry->layout == KVK_LAYOUT_TOKENS_FIRST) {
        token_bytes *= part->heads;
    }
    return (struct part){begin, begin + size, token_bytes};
}

/* Scales of tokens are granted with them; those that a head's or a channel's tokens share, with the
 * first of them: they are sealed when one of them is. */
static struct part scales_of(const struct kvk_part *part, uint64_t begin)
{
    uint64_t token_bytes = part->scale_stride;
    if (part->format == KVK_FORMAT_INT8_CHANNEL && part->is_value) {
        token_bytes = sizeof(uint16_t);
    }
    uint64_t first = begin + part->scales_offset;
    return (struct part){first, first + part->scale_stride * part->heads, token_bytes};
}

/* Does K or V of a layer, from byte `begin` of the shard on? */
static bool touches_sealed_part(const struct kvk_geometry *geometry, const struct kvk_part *part,
                                uint64_t begin, uint64_t sealed, uint64_t first, uint64_t end)
{
    const struct part rows = rows_of(geometry, part, begin);
    if (touches_part(&rows, geometry->block_tokens, sealed, first, end)) {
        return true;
    }
    if (part->scales_offset == 0) {
        return false;
    }
    const struct part scales = scales_of(part, begin);
    bool is_shared = scales.token_bytes == part->scale_stride;
    return touches_part(&scales, is_shared ? 1 : geometry->block_tokens, is_shared ? 1 : sealed,
                        first, end);
}

/* Do bytes [first, end) of the shard touch one of the first `sealed` tokens of the block? */
static bool touches_sealed(const struct kvk_group *group, uint32_t shard, uint64_t sealed,
                           uint64_t first, uint64_t end)
{
    const struct kvk_geometry *geometry = &group->geometry;
    if (sealed == 0) {
        return false;
    }
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        return sealed == geometry->block_tokens; /* it belongs to the block's end */
    }
    const struct kvk_part k = kvk_geometry_part(geometry, shard, false);
    const struct kvk_part v = kvk_geometry_part(geometry, shard, true);
    uint32_t layers = kvk_geometry_shard_layers(geometry, shard);
    for (uint32_t layer = 0; layer < layers; layer++) {
        if (touches_sealed_part(geometry, &k, kvk_geometry_k_offset(geometry, shard, layer), sealed,
                                first, end) ||
            (!geometry->latent &&
             touches_sealed_part(geometry, &v, kvk_geometry_v_offset(geometry, shard, layer),
                                 sealed, first, end))) {
            return true;
        }
    }
    return false;
}

/* ---- Writing ---- */

static enum kvk_status check_place(const struct kvk_space *space, uint32_t group, uint32_t rank,
                                   struct kvk_error *error)
{
    if (group >= space->group_count) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "group", group,
                              space->group_count, "the space has %u groups", space->group_count);
    }
    if (rank >= space->rank_count) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "rank", rank, space->rank_count,
                              "the space has %u ranks", space->rank_count);
    }
    return KVK_OK;
}

static enum kvk_status check_write(const struct kvk_cache *cache,
                                   const struct kvk_sequence *sequence,
                                   const struct kvk_write_piece *piece, struct kvk_error *error)
{
    const struct kvk_space *space = sequence->space;
    enum kvk_status status = kvk_sequence_check_running(sequence, error);
    if (status == KVK_OK) {
        status = check_place(space, piece->group, piece->rank, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    const struct kvk_sequence_group *table = &sequence->groups[piece->group];
    if (piece->block >= table->block_count) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "block", piece->block,
                              table->block_count, "the sequence has %u blocks", table->block_count);
    }
    const struct kvk_group *group = space->groups[piece->group];
    uint32_t shard = kvk_geometry_rank_shard(&group->geometry, piece->rank);
    uint64_t size = group->shard_bytes[shard];
    if (piece->offset > size || piece->size_bytes > size - piece->offset) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "offset", piece->offset,
                              size, "offset and data reach past the shard's %llu bytes",
                              (unsigned long long)size);
    }
    uint64_t first_token = piece->block * space->block_tokens;
    uint64_t sealed = sequence->rank_sealed[piece->rank];
    uint64_t sealed_here = sealed > first_token ? sealed - first_token : 0;
    uint32_t id = table->blocks[piece->block];
    if (id == KVK_BLOCK_NONE || sealed_here >= space->block_tokens || sealed >= sequence->length ||
        kvk_block_is_whole(kvk_index_block(cache->index, id)) ||
        touches_sealed(group, shard, sealed_here, piece->offset,
                       piece->offset + piece->size_bytes)) {
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "offset", piece->offset,
                              sealed, "the bytes are not of granted tokens: %llu are sealed",
                              (unsigned long long)sealed);
    }
    return KVK_OK;
}

/* The sequence may be gone by the end of the copy; then there is nothing to count down. */
static void writer_end(struct kvk_cache *cache, uint64_t sequence_id, uint32_t rank)
{
    struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
    if (sequence != NULL) {
        KVK_ASSERT(sequence->writers > 0 && sequence->rank_writers[rank] > 0);
        sequence->writers--;
        sequence->rank_writers[rank]--;
    }
}

static enum kvk_status write_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                   const struct kvk_write_piece *piece, struct kvk_error *error)
{
    uint64_t sequence_id = sequence->id;
    uint32_t id = sequence->groups[piece->group].blocks[piece->block];
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    enum kvk_tier tier = kvk_block_tier(block);
    uint32_t shard =
        kvk_geometry_rank_shard(&sequence->space->groups[piece->group]->geometry, piece->rank);
    struct kvk_device *device = cache->tiers[tier].device;
    const struct kvk_copy copy = {
        .target = kvk_block_address(cache, block, tier, shard) + piece->offset,
        .source = piece->data,
        .size_bytes = piece->size_bytes,
    };
    if (sequence->rank_writers[piece->rank] == UINT16_MAX) {
        kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_QUEUE_FULL, "", "too many writes at a time");
        kvk_error_retry(error, 1);
        return KVK_EXHAUSTED;
    }
    sequence->writers++;
    sequence->rank_writers[piece->rank]++;
    kvk_block_borrow(cache, id, tier);
    kvk_unlock(&cache->lock);
    enum kvk_status status = device->ops->copy(device, &copy, 1, error);
    kvk_lock(&cache->lock);
    kvk_block_return(cache, id, tier);
    writer_end(cache, sequence_id, piece->rank);
    return status;
}

enum kvk_status kvk_sequence_write(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   uint64_t session_id, uint64_t sequence_id,
                                   const struct kvk_write_piece *piece, struct kvk_error *error)
{
    if (piece->size_bytes == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "data", "data is empty");
    }
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    if (piece->checksum != 0 && kvk_checksum(piece->data, piece->size_bytes) != piece->checksum) {
        return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "checksum",
                        "data does not match its checksum; nothing was written");
    }
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    kvk_lock(&cache->lock);
    enum kvk_status status =
        kvk_sequence_find(cache, caller, session_id, sequence_id, &session, &sequence, error);
    if (status == KVK_OK) {
        status = check_write(cache, sequence, piece, error);
    }
    if (status == KVK_OK) {
        status = write_drops(cache, sequence, piece, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}

/* ---- Reading ---- */

/* What a request names, of a sequence or a lease alike. */
struct reading {
    struct kvk_space *space;
    const uint32_t *blocks; /* [block_count] of the group */
    uint32_t block_count;
    uint64_t readable_tokens;
};

static enum kvk_status read_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 const struct kvk_read_request *request, struct reading *reading,
                                 struct kvk_error *error)
{
    struct kvk_session *session;
    if ((request->sequence_id != 0) == (request->lease_id != 0)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "sequence_id",
                        "name either a sequence or a lease");
    }
    const struct kvk_lease_group *lease_groups = NULL;
    const struct kvk_sequence_group *sequence_groups = NULL;
    enum kvk_status status;
    if (request->lease_id != 0) {
        struct kvk_lease *lease;
        status = kvk_lease_find(cache, caller, request->session_id, request->lease_id, &session,
                                &lease, error);
        if (status != KVK_OK) {
            return status;
        }
        *reading = (struct reading){.space = lease->space, .readable_tokens = lease->tokens};
        lease_groups = lease->groups;
    } else {
        struct kvk_sequence *sequence;
        status = kvk_sequence_find(cache, caller, request->session_id, request->sequence_id,
                                   &session, &sequence, error);
        if (status != KVK_OK) {
            return status;
        }
        *reading = (struct reading){.space = sequence->space, .readable_tokens = sequence->sealed};
        sequence_groups = sequence->groups;
    }
    status = check_place(reading->space, request->group, request->rank, error);
    if (status == KVK_OK && lease_groups != NULL) {
        reading->blocks = lease_groups[request->group].blocks;
        reading->block_count = lease_groups[request->group].block_count;
    } else if (status == KVK_OK) {
        reading->blocks = sequence_groups[request->group].blocks;
        reading->block_count = sequence_groups[request->group].block_count;
    }
    return status;
}

static enum kvk_status check_read(const struct reading *reading,
                                  const struct kvk_read_request *request, struct kvk_error *error)
{
    if (request->block >= reading->block_count) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "block", request->block,
                              reading->block_count, "there are %u blocks", reading->block_count);
    }
    if (request->block * reading->space->block_tokens >= reading->readable_tokens) {
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_GRANT_UNWRITTEN, "block",
                              request->block, reading->readable_tokens,
                              "the block is not sealed yet");
    }
    if (reading->blocks[request->block] == KVK_BLOCK_NONE) {
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_WINDOW_GONE, "block",
                              request->block, 0, "the window has let go of the block");
    }
    return KVK_OK;
}

/* A read that is under way: what the lock's holder looked up for it. */
struct shard_read {
    const uint8_t *data;
    uint64_t size_bytes;
    uint64_t checksum;
    bool is_whole;
    bool fetched; /* from a device, and hashed on the way */
    uint64_t fetched_sum;
};

/* What lies in the host tier in a compact format, in the space's own, in memory of its own. */
static enum kvk_status widen_drops(struct kvk_cache *cache, const struct kvk_group *group,
                                   uint32_t shard, struct shard_read *read,
                                   struct kvk_read_handle *handle, struct kvk_error *error)
{
    uint64_t sum;
    struct kvk_space *space = group->space;
    KVK_ASSERT(handle->fetched == NULL); /* the host tier is memory of the processor's */
    handle->fetched = malloc(group->shard_bytes[shard]);
    if (handle->fetched == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the read");
    }
    space->reference_count++;
    kvk_unlock(&cache->lock);
    kvk_tier_form_widen(&group->forms[KVK_TIER_HOST], &group->geometry, shard, read->data,
                        handle->fetched, &sum);
    kvk_lock(&cache->lock);
    space->reference_count--;
    read->data = handle->fetched;
    read->size_bytes = group->shard_bytes[shard];
    return KVK_OK;
}

/* The bytes of a device that the processor cannot read, in memory of their own. */
static enum kvk_status fetch_drops(struct kvk_cache *cache, struct kvk_device *device,
                                   struct shard_read *read, struct kvk_read_handle *handle,
                                   struct kvk_error *error)
{
    kvk_unlock(&cache->lock);
    enum kvk_status status = KVK_OK;
    handle->fetched = malloc(read->size_bytes);
    if (handle->fetched == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the read");
    } else {
        const struct kvk_copy copy = {.target = handle->fetched,
                                      .source = read->data,
                                      .size_bytes = read->size_bytes,
                                      .checksum = &read->fetched_sum};
        status = device->ops->copy(device, &copy, 1, error);
    }
    if (status == KVK_OK) {
        read->data = handle->fetched;
        read->fetched = true;
    } else {
        free(handle->fetched);
        handle->fetched = NULL;
    }
    kvk_lock(&cache->lock);
    return status;
}

/* Verified where a checksum was taken: an unsealed tail has none. */
static enum kvk_status verify_drops(struct kvk_cache *cache, const struct shard_read *read,
                                    struct kvk_error *error)
{
    if (!read->is_whole || read->checksum == 0) {
        return KVK_OK;
    }
    kvk_unlock(&cache->lock);
    uint64_t sum = read->fetched ? read->fetched_sum : kvk_checksum(read->data, read->size_bytes);
    bool matches = sum == read->checksum;
    kvk_lock(&cache->lock);
    if (matches) {
        return KVK_OK;
    }
    cache->stats.checksum_failures++;
    return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "block",
                    "the block does not match the checksum taken at its seal");
}

static enum kvk_status read_begin_drops(struct kvk_cache *cache, const struct reading *reading,
                                        const struct kvk_read_request *request,
                                        struct shard_read *read, struct kvk_read_handle *handle,
                                        struct kvk_error *error)
{
    KVK_ASSERT(reading->space != NULL);
    const struct kvk_group *group = reading->space->groups[request->group];
    uint32_t id = reading->blocks[request->block];
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    enum kvk_tier tier = kvk_block_tier(block);
    uint32_t shard = kvk_geometry_rank_shard(&group->geometry, request->rank);
    if (block->pin_count[tier] == UINT32_MAX) {
        kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "block", "too many read the block");
        kvk_error_retry(error, 1);
        return KVK_EXHAUSTED;
    }
    *read = (struct shard_read){
        .data = kvk_block_address(cache, block, tier, shard),
        .size_bytes = group->forms[tier].shard_bytes[shard],
        .checksum = kvk_block_checksums(cache, block, tier)[shard],
        .is_whole = kvk_block_is_whole(block),
    };
    *handle = (struct kvk_read_handle){.block_id = id, .tier = tier};
    kvk_block_borrow(cache, id, tier);
    enum kvk_status status = KVK_OK;
    if (group->tiers[tier].regions[shard].fd < 0) {
        status = fetch_drops(cache, cache->tiers[tier].device, read, handle, error);
        if (status != KVK_OK) {
            kvk_block_return(cache, id, tier);
            return status;
        }
    }
    status = verify_drops(cache, read, error);
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_ERROR, "checksum_mismatch", "block=%u tier=%d shard=%u", id, (int)tier,
                shard);
        kvk_block_discredit(cache, id, tier);
        if (kvk_block_heal_drops(cache, id)) {
            return KVK_OK; /* where it was: what is read is what was sealed */
        }
        kvk_block_return(cache, id, tier);
        free(handle->fetched);
        handle->fetched = NULL;
    }
    if (status == KVK_OK && group->forms[tier].compact) {
        status = widen_drops(cache, group, shard, read, handle, error);
        if (status != KVK_OK) {
            kvk_block_return(cache, id, tier);
        }
    }
    return status;
}

enum kvk_status kvk_read_begin(struct kvk_cache *cache, const struct kvk_caller *caller,
                               const struct kvk_read_request *request, const uint8_t **data,
                               uint64_t *size_bytes, struct kvk_read_handle *handle,
                               struct kvk_error *error)
{
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    struct reading reading = {0};
    struct shard_read read;
    kvk_lock(&cache->lock);
    enum kvk_status status = read_find(cache, caller, request, &reading, error);
    if (status == KVK_OK) {
        status = check_read(&reading, request, error);
    }
    if (status == KVK_OK) {
        status = read_begin_drops(cache, &reading, request, &read, handle, error);
    }
    kvk_unlock(&cache->lock);
    if (status == KVK_OK) {
        *data = read.data;
        *size_bytes = read.size_bytes;
    }
    return status;
}

void kvk_read_end(struct kvk_cache *cache, const struct kvk_read_handle *handle)
{
    kvk_lock(&cache->lock);
    kvk_block_return(cache, handle->block_id, handle->tier);
    kvk_unlock(&cache->lock);
    free(handle->fetched);
}
