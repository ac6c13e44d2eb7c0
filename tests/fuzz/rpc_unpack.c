/*
 * What anybody may send: bytes that are walked, unpacked into the bounded arena and checked, as a
 * handler does before the engine hears of them. What is taken must be what protobuf-c takes.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/rpc_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const ProtobufCMessageDescriptor *const requests[] = {
    &kvkeep__v1__lookup_request__descriptor,         &kvkeep__v1__open_sequence_request__descriptor,
    &kvkeep__v1__append_request__descriptor,         &kvkeep__v1__open_space_request__descriptor,
    &kvkeep__v1__attend_request__descriptor,         &kvkeep__v1__release_request__descriptor,
    &kvkeep__v1__session_request__descriptor,        &kvkeep__v1__invalidate_request__descriptor,
    &kvkeep__v1__begin_transfer_request__descriptor, &kvkeep__v1__test_control_request__descriptor,
};
#define REQUEST_COUNT (sizeof(requests) / sizeof(requests[0]))

/* The same bytes by protobuf-c alone, with malloc; small inputs only come here. */
static void compare(const ProtobufCMessage *message, struct kvk_bytes bytes)
{
    ProtobufCMessage *plain =
        protobuf_c_message_unpack(message->descriptor, NULL, bytes.size_bytes, bytes.data);
    KVK_ASSERT(plain != NULL);
    size_t size = protobuf_c_message_get_packed_size(message);
    KVK_ASSERT(protobuf_c_message_get_packed_size(plain) == size);
    uint8_t *one = malloc(size + 1);
    uint8_t *other = malloc(size + 1);
    (void)protobuf_c_message_pack(message, one);
    (void)protobuf_c_message_pack(plain, other);
    KVK_ASSERT(memcmp(one, other, size) == 0);
    free(one);
    free(other);
    protobuf_c_message_free_unpacked(plain, NULL);
}

static void check_values(struct kvk_rpc_run *run, const ProtobufCMessage *message)
{
    struct kvk_error error;
    struct kvk_prompt prompt;
    enum kvk_status status = KVK_OK;
    if (message->descriptor == requests[0]) {
        status = kvk_rpc_check_prompt(run, ((const Kvkeep__V1__LookupRequest *)message)->prompt,
                                      "prompt", &prompt, &error);
        for (uint32_t i = 0; status == KVK_OK && i < prompt.span_count; i++) {
            KVK_ASSERT(prompt.spans[i].first + prompt.spans[i].count <= prompt.token_count);
            KVK_ASSERT(i == 0 || prompt.spans[i].first >=
                                     prompt.spans[i - 1].first + prompt.spans[i - 1].count);
        }
    } else if (message->descriptor == requests[3]) {
        static struct kvk_space_request request;
        status =
            kvk_rpc_check_space((const Kvkeep__V1__OpenSpaceRequest *)message, &request, &error);
    } else if (message->descriptor == requests[5]) {
        const Kvkeep__V1__ReleaseRequest *asked = (const Kvkeep__V1__ReleaseRequest *)message;
        status = kvk_rpc_check_ids(run, asked->lease_ids, asked->n_lease_ids, "lease_ids", &error);
    }
    KVK_ASSERT(status == KVK_OK || (status == KVK_INVALID && error.field[0] != '\0'));
}

static void read_piece(struct kvk_bytes bytes)
{
    struct kvk_write_piece piece;
    struct kvk_error error;
    Kvkeep__V1__BlockPiece *plain =
        kvkeep__v1__block_piece__unpack(NULL, bytes.size_bytes, bytes.data);
    if (kvk_rpc_read_piece(bytes, &piece, &error) == KVK_OK && plain != NULL) {
        KVK_ASSERT(piece.block == plain->block && piece.offset == plain->offset);
        KVK_ASSERT(piece.group == plain->group && piece.rank == plain->rank);
        KVK_ASSERT(piece.checksum == plain->checksum && piece.size_bytes == plain->data.len);
        KVK_ASSERT(memcmp(piece.data, plain->data.data, piece.size_bytes) == 0);
    }
    if (plain != NULL) {
        kvkeep__v1__block_piece__free_unpacked(plain, NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvk_config config = {.tokens = 4096,
                                       .spans = 16,
                                       .salt_bytes = 64,
                                       .leases = 64,
                                       .sequences = 64,
                                       .attend_queries = 64,
                                       .message_bytes = 1 << 20};
    static struct kvk_rpc rpc = {.config = &config};
    if (size == 0) {
        return 0;
    }
    struct kvk_rpc_run run = {.rpc = &rpc, .memory = kvk_rpc_memory_begin()};
    KVK_ASSERT(run.memory != NULL);
    struct kvk_bytes bytes = {.data = data + 1, .size_bytes = size - 1};
    size_t which = data[0] % (REQUEST_COUNT + 1);
    if (which == REQUEST_COUNT) {
        read_piece(bytes);
        return 0;
    }
    struct kvk_error error;
    ProtobufCMessage *message;
    if (kvk_wire_unpack(&config, &run.memory->arena, requests[which], bytes, &message, &error) ==
        KVK_OK) {
        compare(message, bytes);
        check_values(&run, message);
    }
    return 0;
}
