/*
 * Every repeated field of every request has a bound: a message with one that nobody bounded would
 * end the daemon, whoever sends it. Found by fuzzing once; walked here, so that a new field cannot
 * be forgotten.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/rpc_private.h"

#define DEPTH_MAX 8

static struct kvk_config config;
static unsigned repeated_count;

/* A field around what is inside: a message's, or one byte of a scalar's or a text's. */
static size_t wrap(uint8_t *bytes, size_t size, uint32_t id)
{
    uint8_t head[16];
    uint8_t *end = kvk_wire_write_tag(head, id, KVK_WIRE_BYTES);
    end = kvk_wire_write_varint(end, size);
    size_t head_size = (size_t)(end - head);
    memmove(bytes + head_size, bytes, size);
    memcpy(bytes, head, head_size);
    return head_size + size;
}

/* The message of the top, with this field somewhere in it: `path` holds the ids from the top. */
static void try_one(const ProtobufCMessageDescriptor *top, const uint32_t *path, uint32_t depth)
{
    uint8_t bytes[256];
    struct kvk_error error;
    ProtobufCMessage *message = NULL;
    size_t size = 0;
    for (uint32_t i = depth; i > 0; i--) {
        size = wrap(bytes, size, path[i - 1]);
    }
    struct kvk_rpc_memory *memory = kvk_rpc_memory_begin();
    cr_assert_not_null(memory);
    /* Taken or refused, but not the end of the process. */
    (void)!kvk_wire_unpack(&config, &memory->arena, top,
                           (struct kvk_bytes){.data = bytes, .size_bytes = size}, &message, &error);
    repeated_count++;
}

static void walk(const ProtobufCMessageDescriptor *top,
                 const ProtobufCMessageDescriptor *descriptor, uint32_t *path, uint32_t depth)
{
    cr_assert_lt(depth, DEPTH_MAX, "messages of messages without an end");
    for (unsigned i = 0; i < descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
        path[depth] = field->id;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            try_one(top, path, depth + 1);
        }
        if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            walk(top, field->descriptor, path, depth + 1);
        }
    }
}

Test(wire_bounds, every_repeated_field_of_every_request)
{
    const struct kvk_rpc_options options = {.config = &config};
    struct kvk_rpc *rpc = NULL;
    struct kvk_error error;
    uint32_t path[DEPTH_MAX];
    uint32_t method_count;
    uint32_t request_count = 0;
    kvk_config_init(&config);
    cr_assert_eq(kvk_rpc_create(&options, &rpc, &error), KVK_OK, "%s", error.text);
    const struct kvk_method *methods = kvk_rpc_methods(rpc, &method_count);
    for (uint32_t i = 0; i < method_count; i++) {
        const struct kvk_rpc_bound *bound = methods[i].user_data;
        if (bound->method->request != NULL) {
            walk(bound->method->request, bound->method->request, path, 0);
            request_count++;
        }
    }
    walk(&kvkeep__v1__session_request__descriptor, &kvkeep__v1__session_request__descriptor, path,
         0);
    cr_assert_gt(request_count, 20);
    cr_assert_gt(repeated_count, 10);
    kvk_rpc_destroy(rpc);
    kvk_config_finish(&config);
}
