/*
 * WriteBlocks and ReadBlocks: K/V through gRPC, for workers that cannot map memory.
 *
 * Written bytes go from the message into their slots, read without unpacking it: protobuf-c would
 * copy them once more. Read bytes go out from where they lie: gRPC borrows the block, and the read
 * of that block ends when its last message is through or dropped. A few messages are under way at a
 * time, so that a slow reader pins little.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/copy.h"
#include "daemon/rpc_private.h"

#define READ_MESSAGE_BYTES (UINT64_C(1) << 20)
#define READ_MESSAGES_MAX 4 /* under way */

/* End a stream that failed; the call must not be touched after it. */
static void stream_fail(struct kvk_call *call, enum kvk_status status, struct kvk_error *error)
{
    error->status = status;
    kvk_call_fail(call, error);
}

static void stream_cancelled(struct kvk_call *call)
{
    struct kvk_error error;
    enum kvk_status status = kvk_fail(&error, KVK_CANCELLED, KVK_CAUSE_NONE, "",
                                      "the client has cancelled the call or is gone");
    stream_fail(call, status, &error);
}

/* ---- writing ---- */

struct rpc_write {
    const struct kvk_rpc_bound *bound;
    uint64_t session_id;
    uint64_t sequence_id;
    uint64_t written_bytes;
    uint64_t pieces;
};

/* An id of the call: in the first message, and the same wherever it comes again. */
static enum kvk_status take_id(uint64_t *id, uint64_t value, const char *field,
                               struct kvk_error *error)
{
    if (*id != 0 && value != *id) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, *id,
                              "%s differs from that of an earlier message", field);
    }
    *id = value;
    return kvk_rpc_check_id(value, field, error);
}

static enum kvk_status fail_type(const char *field, struct kvk_error *error)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s is not well-formed", field);
}

enum kvk_status kvk_rpc_read_piece(struct kvk_bytes bytes, struct kvk_write_piece *piece,
                                   struct kvk_error *error)
{
    struct kvk_wire_reader reader = {.at = bytes.data, .end = bytes.data + bytes.size_bytes};
    struct kvk_wire_field field;
    memset(piece, 0, sizeof(*piece));
    while (kvk_wire_next(&reader, &field)) {
        const ProtobufCFieldDescriptor *known =
            protobuf_c_message_descriptor_get_field(&kvkeep__v1__block_piece__descriptor, field.id);
        if (known == NULL) {
            continue;
        }
        enum kvk_wire_type type = known->type == PROTOBUF_C_TYPE_BYTES     ? KVK_WIRE_BYTES
                                  : known->type == PROTOBUF_C_TYPE_FIXED64 ? KVK_WIRE_FIXED64
                                                                           : KVK_WIRE_VARINT;
        if (field.type != type) {
            return fail_type("pieces", error);
        }
        switch (field.id) {
        case 1:
            piece->group = (uint32_t)field.value;
            break;
        case 2:
            piece->rank = (uint32_t)field.value;
            break;
        case 3:
            piece->block = field.value;
            break;
        case 4:
            piece->offset = field.value;
            break;
        case 5:
            piece->data = field.bytes.data;
            piece->size_bytes = field.bytes.size_bytes;
            break;
        case 6:
            piece->checksum = field.value;
            break;
        default:
            KVK_UNREACHABLE(); /* BlockPiece got a field that is not read here */
        }
    }
    if (reader.at != reader.end) {
        return fail_type("pieces", error);
    }
    if (piece->size_bytes == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "pieces.data",
                        "pieces.data must not be empty");
    }
    return kvk_rpc_check_range(piece->offset, piece->size_bytes, "pieces.offset", error);
}

static enum kvk_status write_piece(struct rpc_write *write, const struct kvk_rpc_run *run,
                                   struct kvk_bytes bytes, struct kvk_error *error)
{
    struct kvk_write_piece piece;
    enum kvk_status status = kvk_rpc_read_piece(bytes, &piece, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(write->session_id, "session_id", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(write->sequence_id, "sequence_id", error);
    }
    if (status == KVK_OK) {
        status = kvk_sequence_write(run->rpc->cache, &run->caller, write->session_id,
                                    write->sequence_id, &piece, error);
    }
    if (status == KVK_OK) {
        write->written_bytes += piece.size_bytes;
        write->pieces++;
    }
    return status;
}

/* The ids first, wherever they stand in the message: fields may come in any order. */
static enum kvk_status read_ids(struct rpc_write *write, struct kvk_bytes bytes,
                                struct kvk_error *error)
{
    struct kvk_wire_reader reader = {.at = bytes.data, .end = bytes.data + bytes.size_bytes};
    struct kvk_wire_field field;
    enum kvk_status status = KVK_OK;
    while (status == KVK_OK && kvk_wire_next(&reader, &field)) {
        if (field.id == 1) {
            status = field.type == KVK_WIRE_VARINT
                         ? take_id(&write->session_id, field.value, "session_id", error)
                         : fail_type("session_id", error);
        } else if (field.id == 2) {
            status = field.type == KVK_WIRE_VARINT
                         ? take_id(&write->sequence_id, field.value, "sequence_id", error)
                         : fail_type("sequence_id", error);
        }
    }
    if (status == KVK_OK && reader.at != reader.end) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "",
                          "the message is not a well-formed WriteBlocksRequest");
    }
    return status;
}

static enum kvk_status write_message(struct rpc_write *write, const struct kvk_rpc_run *run,
                                     struct kvk_bytes bytes, struct kvk_error *error)
{
    static const uint8_t nothing[1];
    if (bytes.size_bytes == 0) {
        bytes.data = nothing;
    }
    enum kvk_status status = read_ids(write, bytes, error);
    struct kvk_wire_reader reader = {.at = bytes.data, .end = bytes.data + bytes.size_bytes};
    struct kvk_wire_field field;
    while (status == KVK_OK && kvk_wire_next(&reader, &field)) {
        if (field.id != 3) {
            continue;
        }
        status = field.type == KVK_WIRE_BYTES ? write_piece(write, run, field.bytes, error)
                                              : fail_type("pieces", error);
    }
    return status;
}

static bool write_on_message(struct kvk_call *call)
{
    struct rpc_write *write = kvk_call_context(call);
    struct kvk_rpc_run run;
    struct kvk_error error;
    enum kvk_status status = kvk_rpc_run_begin(&run, write->bound, call, true, &error);
    if (status == KVK_OK) {
        status = write_message(write, &run, kvk_call_message(call), &error);
    }
    if (status != KVK_OK) {
        stream_fail(call, status, &error);
        return false;
    }
    return true;
}

static void write_on_half_close(struct kvk_call *call)
{
    struct rpc_write *write = kvk_call_context(call);
    struct kvk_rpc_run run = {.rpc = write->bound->rpc, .call = call};
    struct kvk_error error;
    Kvkeep__V1__WriteBlocksResponse response = KVKEEP__V1__WRITE_BLOCKS_RESPONSE__INIT;
    response.written_bytes = write->written_bytes;
    response.pieces = write->pieces;
    enum kvk_status status = kvk_rpc_check_id(write->session_id, "session_id", &error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(write->sequence_id, "sequence_id", &error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_reply(&run, &response.base, &error);
    }
    if (status != KVK_OK) {
        stream_fail(call, status, &error);
    }
}

static const struct kvk_stream_events write_events = {
    .on_message = write_on_message,
    .on_half_close = write_on_half_close,
    .on_cancel = stream_cancelled,
    .on_done = free,
};

void kvk_rpc_write_blocks(struct kvk_call *call, void *rpc_bound)
{
    struct kvk_rpc_run run;
    struct kvk_error error;
    enum kvk_status status = kvk_rpc_run_begin(&run, rpc_bound, call, true, &error);
    struct rpc_write *write = NULL;
    if (status == KVK_OK) {
        status = kvk_rpc_rate_take(&run, rpc_bound, NULL, &error);
    }
    if (status == KVK_OK) {
        write = calloc(1, sizeof(*write));
        if (write == NULL) {
            status = kvk_fail(&error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the call");
        }
    }
    if (write == NULL) {
        stream_fail(call, status, &error);
        return;
    }
    write->bound = rpc_bound;
    kvk_call_stream(call, &write_events, write);
}

/* ---- reading ---- */

/* A block while messages over its bytes are under way: gRPC's slices hold it, and the stream while
 * it is at it. */
struct rpc_read_block {
    struct kvk_cache *cache;
    struct kvk_read_handle handle;
    const uint8_t *data;
    uint64_t size_bytes;
    uint64_t block;
    atomic_uint references;
};

struct rpc_read {
    const struct kvk_rpc_bound *bound;
    struct kvk_read_request request; /* block: the next one */
    uint64_t end_block;
    struct rpc_read_block *current; /* NULL: none begun */
    uint64_t offset;                /* in current */
};

static void read_block_release(void *argument)
{
    struct rpc_read_block *block = argument;
    if (atomic_fetch_sub_explicit(&block->references, 1, memory_order_acq_rel) == 1) {
        kvk_read_end(block->cache, &block->handle);
        free(block);
    }
}

static enum kvk_status read_begin(struct rpc_read *read, const struct kvk_rpc_run *run,
                                  struct kvk_error *error)
{
    struct rpc_read_block *block = malloc(sizeof(*block));
    if (block == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the read");
    }
    block->cache = run->rpc->cache;
    block->block = read->request.block;
    atomic_init(&block->references, 1);
    enum kvk_status status =
        kvk_read_begin(block->cache, &run->caller, &read->request, &block->data, &block->size_bytes,
                       &block->handle, error);
    if (status != KVK_OK) {
        free(block);
        return status;
    }
    KVK_ASSERT(block->size_bytes > 0);
    read->current = block;
    read->offset = 0;
    read->request.block++;
    return KVK_OK;
}

/* The next message of the block at hand: its head in the reply's buffer, its bytes borrowed. */
static enum kvk_status read_send(struct rpc_read *read, struct kvk_call *call)
{
    struct rpc_read_block *block = read->current;
    KVK_ASSERT(block != NULL);
    uint64_t size_bytes = block->size_bytes - read->offset;
    if (size_bytes > READ_MESSAGE_BYTES) {
        size_bytes = READ_MESSAGE_BYTES;
    }
    const uint8_t *data = block->data + read->offset;
    Kvkeep__V1__ReadBlocksResponse head = KVKEEP__V1__READ_BLOCKS_RESPONSE__INIT;
    head.block = block->block;
    head.offset = read->offset;
    head.checksum = kvk_checksum(data, size_bytes);
    uint8_t field[20];
    uint8_t *end = kvk_wire_write_tag(field, 4, KVK_WIRE_BYTES);
    end = kvk_wire_write_varint(end, size_bytes);
    size_t field_bytes = (size_t)(end - field);
    size_t head_bytes = kvkeep__v1__read_blocks_response__get_packed_size(&head);
    uint8_t *buffer = kvk_call_reply_alloc(call, head_bytes + field_bytes);
    (void)kvkeep__v1__read_blocks_response__pack(&head, buffer);
    memcpy(buffer + head_bytes, field, field_bytes);

    atomic_fetch_add_explicit(&block->references, 1, memory_order_relaxed);
    const struct kvk_borrowed borrowed = {
        .data = data, .size_bytes = size_bytes, .release = read_block_release, .argument = block};
    read->offset += size_bytes;
    if (read->offset == block->size_bytes) {
        read->current = NULL;
        read_block_release(block); /* the slices hold it from here */
    }
    return kvk_call_send_borrowed(call, &borrowed);
}

/* Send until enough is under way, or all is sent. */
static void read_advance(struct kvk_call *call)
{
    struct rpc_read *read = kvk_call_context(call);
    struct kvk_rpc_run run;
    struct kvk_error error;
    enum kvk_status status = kvk_rpc_run_begin(&run, read->bound, call, true, &error);
    while (status == KVK_OK && kvk_call_sends_pending(call) < READ_MESSAGES_MAX) {
        if (read->current == NULL && read->request.block == read->end_block) {
            kvk_call_finish(call);
            return;
        }
        if (read->current == NULL) {
            status = read_begin(read, &run, &error);
        }
        if (status == KVK_OK) {
            status = read_send(read, call);
            if (status == KVK_CANCELLED) {
                return; /* on_cancel ends the call */
            }
            if (status != KVK_OK) {
                status = kvk_fail(&error, status, KVK_CAUSE_QUEUE_FULL, "",
                                  "messages of the stream pile up");
            }
        }
    }
    if (status != KVK_OK) {
        stream_fail(call, status, &error);
    }
}

static void read_on_done(void *context)
{
    struct rpc_read *read = context;
    if (read->current != NULL) {
        read_block_release(read->current);
    }
    free(read);
}

static const struct kvk_stream_events read_events = {
    .on_sent = read_advance,
    .on_cancel = stream_cancelled,
    .on_done = read_on_done,
};

static enum kvk_status read_check(struct kvk_rpc_run *run, struct rpc_read *read,
                                  struct kvk_error *error)
{
    ProtobufCMessage *message;
    enum kvk_status status = kvk_wire_unpack(run->rpc->config, &run->memory->arena,
                                             &kvkeep__v1__read_blocks_request__descriptor,
                                             kvk_call_message(run->call), &message, error);
    if (status != KVK_OK) {
        return status;
    }
    const Kvkeep__V1__ReadBlocksRequest *asked = (const Kvkeep__V1__ReadBlocksRequest *)message;
    status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_one_of(asked->sequence_id, asked->lease_id, "", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_range(asked->first_block, asked->block_count, "block_count", error);
    }
    read->request = (struct kvk_read_request){.session_id = asked->session_id,
                                              .sequence_id = asked->sequence_id,
                                              .lease_id = asked->lease_id,
                                              .group = asked->group,
                                              .rank = asked->rank,
                                              .block = asked->first_block};
    read->end_block = asked->first_block + asked->block_count;
    return status;
}

void kvk_rpc_read_blocks(struct kvk_call *call, void *rpc_bound)
{
    struct kvk_rpc_run run;
    struct kvk_error error;
    struct rpc_read *read = NULL;
    enum kvk_status status = kvk_rpc_run_begin(&run, rpc_bound, call, true, &error);
    if (status == KVK_OK) {
        status = kvk_rpc_rate_take(&run, rpc_bound, NULL, &error);
    }
    if (status == KVK_OK) {
        read = calloc(1, sizeof(*read));
        status = read != NULL ? read_check(&run, read, &error)
                              : kvk_fail(&error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                                         "no memory for the call");
    }
    if (status != KVK_OK || read == NULL) {
        free(read);
        stream_fail(call, status, &error);
        return;
    }
    read->bound = rpc_bound;
    kvk_call_stream(call, &read_events, read);
    read_advance(call);
}
