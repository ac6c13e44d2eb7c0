#include "client/internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/copy.h"

#define MESSAGE_BYTES (1 << 20) /* bulk goes in pieces that let other streams in */

/* ---- writing ---- */

static bool write_part(struct kvkeep_stream *stream, const struct kvkeep_session *session,
                       const struct kvkeep_sequence *sequence, bool first,
                       const struct kvkeep_piece *piece, uint64_t done, uint64_t size_bytes)
{
    Kvkeep__V1__BlockPiece part = KVKEEP__V1__BLOCK_PIECE__INIT;
    part.group = piece->group;
    part.rank = piece->rank;
    part.block = piece->block;
    part.offset = piece->offset + done;
    part.data.data = (uint8_t *)(uintptr_t)piece->data + done;
    part.data.len = size_bytes;
    part.checksum = kvk_checksum(part.data.data, size_bytes);
    Kvkeep__V1__BlockPiece *parts[] = {&part};
    Kvkeep__V1__WriteBlocksRequest request = KVKEEP__V1__WRITE_BLOCKS_REQUEST__INIT;
    if (first) {
        request.session_id = session->id;
        request.sequence_id = sequence->id;
    }
    request.n_pieces = 1;
    request.pieces = parts;
    return kvkeep_stream_send(stream, &request.base);
}

enum kvk_status kvkeep_write(struct kvkeep_session *session, const struct kvkeep_sequence *sequence,
                             const struct kvkeep_piece *pieces, uint32_t piece_count,
                             struct kvk_error *error)
{
    struct kvkeep_connection *connection = NULL;
    struct kvkeep_stream *stream = NULL;
    enum kvk_status status = kvkeep_client_bulk(session->client, &connection, error);
    if (status == KVK_OK) {
        status = kvkeep_stream_open(connection, KVKEEP_METHOD("WriteBlocks"),
                                    session->client->timeout_ms, &stream, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    bool going = true;
    bool first = true;
    for (uint32_t i = 0; i < piece_count && going; i++) {
        for (uint64_t done = 0; done < pieces[i].size_bytes && going;) {
            uint64_t left = pieces[i].size_bytes - done;
            uint64_t size_bytes = left < MESSAGE_BYTES ? left : MESSAGE_BYTES;
            going = write_part(stream, session, sequence, first, &pieces[i], done, size_bytes);
            first = false;
            done += size_bytes;
        }
    }
    Kvkeep__V1__WriteBlocksResponse *response = NULL;
    if (going && kvkeep_stream_half_close(stream)) {
        response = (Kvkeep__V1__WriteBlocksResponse *)kvkeep_stream_receive(
            stream, &kvkeep__v1__write_blocks_response__descriptor);
    }
    status = kvkeep_stream_finish(stream, error);
    if (response != NULL) {
        kvkeep__v1__write_blocks_response__free_unpacked(response, NULL);
    } else if (status == KVK_OK) {
        status = kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                          "the daemon did not answer what was written");
    }
    return status;
}

/* ---- reading ---- */

/* Put one message where it belongs; *expected is the byte that must come next. */
static enum kvk_status read_take(const Kvkeep__V1__ReadBlocksResponse *message,
                                 uint64_t first_block, uint64_t shard_bytes, uint8_t *data,
                                 uint64_t size_bytes, uint64_t *expected, struct kvk_error *error)
{
    uint64_t at = (message->block - first_block) * shard_bytes + message->offset;
    if (message->block < first_block || at != *expected || message->data.len > size_bytes - at) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                        "the daemon's bytes came out of order");
    }
    uint64_t checksum = 0;
    kvk_copy_checksum(data + at, message->data.data, message->data.len, &checksum);
    if (checksum != message->checksum) {
        return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "",
                        "bytes of a block were damaged on the way");
    }
    *expected += message->data.len;
    return KVK_OK;
}

/* Everything that the daemon sends, into `data`. */
static enum kvk_status read_all(struct kvkeep_stream *stream, uint64_t first_block,
                                uint64_t shard_bytes, void *data, uint64_t size_bytes,
                                struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    uint64_t expected = 0;
    while (status == KVK_OK) {
        Kvkeep__V1__ReadBlocksResponse *message =
            (Kvkeep__V1__ReadBlocksResponse *)kvkeep_stream_receive(
                stream, &kvkeep__v1__read_blocks_response__descriptor);
        if (message == NULL) {
            break;
        }
        status = read_take(message, first_block, shard_bytes, data, size_bytes, &expected, error);
        kvkeep__v1__read_blocks_response__free_unpacked(message, NULL);
    }
    if (status != KVK_OK) {
        kvkeep_stream_cancel(stream);
        (void)kvkeep_stream_finish(stream, NULL);
        return status;
    }
    status = kvkeep_stream_finish(stream, error);
    if (status == KVK_OK && expected != size_bytes) {
        status = kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                          "the daemon sent fewer bytes than were asked for");
    }
    return status;
}

enum kvk_status kvkeep_read(struct kvkeep_session *session, const struct kvkeep_sequence *sequence,
                            const struct kvkeep_lease *lease, uint32_t group, uint32_t rank,
                            uint64_t first_block, uint64_t block_count, void *data,
                            uint64_t size_bytes, struct kvk_error *error)
{
    if (block_count == 0 || size_bytes % block_count != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "size_bytes",
                        "must be a multiple of the number of blocks, which must not be 0");
    }
    struct kvkeep_connection *connection = NULL;
    struct kvkeep_stream *stream = NULL;
    enum kvk_status status = kvkeep_client_bulk(session->client, &connection, error);
    if (status == KVK_OK) {
        status = kvkeep_stream_open(connection, KVKEEP_METHOD("ReadBlocks"),
                                    session->client->timeout_ms, &stream, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__ReadBlocksRequest request = KVKEEP__V1__READ_BLOCKS_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence == NULL ? 0 : sequence->id;
    request.lease_id = lease == NULL ? 0 : lease->id;
    request.group = group;
    request.rank = rank;
    request.first_block = first_block;
    request.block_count = block_count;
    if (!kvkeep_stream_send(stream, &request.base) || !kvkeep_stream_half_close(stream)) {
        return kvkeep_stream_finish(stream, error);
    }
    return read_all(stream, first_block, size_bytes / block_count, data, size_bytes, error);
}

/* ---- attention ---- */

struct attend_message {
    Kvkeep__V1__AttendRequest request;
    Kvkeep__V1__AttendItem *items;
    Kvkeep__V1__AttendItem **item_pointers;
    Kvkeep__V1__Operand *operands;
};

static void attend_drop(struct attend_message *message)
{
    free(message->items);
    free(message->item_pointers);
    free(message->operands);
}

static enum kvk_status attend_make(const struct kvkeep_session *session,
                                   const struct kvkeep_attend *attend,
                                   const struct kvkeep_attend_item *items, uint32_t item_count,
                                   struct attend_message *message, struct kvk_error *error)
{
    kvkeep__v1__attend_request__init(&message->request);
    message->items = calloc(item_count, sizeof message->items[0]);
    message->item_pointers = calloc(item_count, sizeof message->item_pointers[0]);
    message->operands = calloc(item_count, sizeof message->operands[0]);
    if (message->items == NULL || message->item_pointers == NULL || message->operands == NULL) {
        attend_drop(message);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a request");
    }
    Kvkeep__V1__AttendRequest *request = &message->request;
    request->session_id = session->id;
    request->group = attend->group;
    request->layer = attend->layer;
    request->rank = attend->rank;
    request->query_heads = attend->query_heads;
    request->format = (Kvkeep__V1__Format)attend->format;
    request->scale = attend->scale;
    request->soft_cap = attend->soft_cap;
    request->causal = attend->causal;
    request->group_window = attend->group_window;
    request->window = attend->window;
    request->sinks = attend->sinks;
    request->alibi_slopes = (float *)(uintptr_t)attend->alibi_slopes;
    request->n_alibi_slopes = attend->alibi_slopes != NULL ? attend->query_heads : 0;
    request->sink_logits = (float *)(uintptr_t)attend->sink_logits;
    request->n_sink_logits = attend->sink_logits != NULL ? attend->query_heads : 0;
    for (uint32_t i = 0; i < item_count; i++) {
        Kvkeep__V1__AttendItem *item = &message->items[i];
        kvkeep__v1__attend_item__init(item);
        kvkeep__v1__operand__init(&message->operands[i]);
        item->sequence_id = items[i].sequence == NULL ? 0 : items[i].sequence->id;
        item->lease_id = items[i].lease == NULL ? 0 : items[i].lease->id;
        item->position = items[i].position;
        item->query_count = items[i].query_count;
        item->token_limit = items[i].token_limit;
        message->operands[i].data.data = (uint8_t *)(uintptr_t)items[i].queries;
        message->operands[i].data.len = (size_t)items[i].query_count * attend->query_heads *
                                        attend->head_size_k * kvk_format_bytes(attend->format);
        item->queries = &message->operands[i];
        message->item_pointers[i] = item;
    }
    request->n_items = item_count;
    request->items = message->item_pointers;
    return KVK_OK;
}

static enum kvk_status attend_take(const Kvkeep__V1__AttendResponse *response,
                                   const struct kvkeep_attend *attend,
                                   struct kvkeep_attend_item *items, uint32_t item_count,
                                   struct kvk_error *error)
{
    if (response->n_results != item_count) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "results",
                        "the daemon answered with another number of results");
    }
    for (uint32_t i = 0; i < item_count; i++) {
        const Kvkeep__V1__AttendResult *result = response->results[i];
        size_t rows = (size_t)items[i].query_count * attend->query_heads;
        if (result->output.len != rows * attend->head_size_v * sizeof(float) ||
            result->lse.len != rows * sizeof(float)) {
            return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "results",
                            "a result of the daemon has another shape");
        }
        memcpy(items[i].output, result->output.data, result->output.len);
        memcpy(items[i].lse, result->lse.data, result->lse.len);
        items[i].device_tokens = result->device_tokens;
        items[i].host_tokens = result->host_tokens;
    }
    if (attend->choice != NULL) {
        *attend->choice = (struct kvkeep_attend_choice){
            .host_place = (enum kvkeep_attend_place)response->host_place,
            .in_place_ns = response->in_place_ns,
            .bring_in_ns = response->bring_in_ns,
        };
    }
    return KVK_OK;
}

enum kvk_status kvkeep_attend(struct kvkeep_session *session, const struct kvkeep_attend *attend,
                              struct kvkeep_attend_item *items, uint32_t item_count,
                              struct kvk_error *error)
{
    if (item_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "items", "must not be empty");
    }
    struct attend_message message;
    enum kvk_status status = attend_make(session, attend, items, item_count, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__AttendResponse *response = NULL;
    status = kvkeep_client_call(session->client, KVKEEP_METHOD("Attend"), &message.request.base,
                                &kvkeep__v1__attend_response__descriptor, &response, error);
    attend_drop(&message);
    if (status == KVK_OK) {
        status = attend_take(response, attend, items, item_count, error);
        kvkeep__v1__attend_response__free_unpacked(response, NULL);
    }
    return status;
}
