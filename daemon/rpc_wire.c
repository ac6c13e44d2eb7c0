#include "daemon/rpc_wire.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/hint.h"
#include "daemon/rpc_messages.h"
#include "daemon/space.h"

/* ---- memory ---- */

#define ARENA_KEPT_MAX ((size_t)1 << 20) /* holds a prompt of 131,072 tokens and some */
#define ARENA_KEPT_MIN ((size_t)16 << 10)
#define ARENA_CHUNK_MIN ((size_t)64 << 10)
#define ARENA_ALIGN ((size_t)64)

/* What a message may take beside its own bytes: structs and arrays for its elements. */
#define UNPACK_FACTOR 16
#define UNPACK_EXTRA_MAX ((size_t)32 << 20)
#define UNPACK_EXTRA_MIN ((size_t)256 << 10)

/* Fields of one message that are not repeated, unknown ones too. Far more than any message has;
 * a repeated one takes memory each time. */
#define PLAIN_FIELDS_MAX 256

struct kvk_rpc_chunk {
    _Alignas(64) struct kvk_rpc_chunk *next;
};

static size_t align_up(size_t value, size_t align)
{
    return (value + align - 1) & ~(align - 1);
}

static void *arena_take_chunk(struct kvk_rpc_arena *arena, size_t size_bytes)
{
    size_t chunk_bytes = size_bytes < ARENA_CHUNK_MIN ? ARENA_CHUNK_MIN : size_bytes;
    chunk_bytes = align_up(chunk_bytes, ARENA_ALIGN);
    struct kvk_rpc_chunk *chunk =
        aligned_alloc(ARENA_ALIGN, sizeof(struct kvk_rpc_chunk) + chunk_bytes);
    if (chunk == NULL) {
        return NULL;
    }
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    arena->chunk_bytes = chunk_bytes;
    arena->chunk_used = size_bytes;
    return chunk + 1;
}

void *kvk_rpc_arena_take(struct kvk_rpc_arena *arena, size_t size_bytes)
{
    size_t align = size_bytes >= ARENA_ALIGN ? ARENA_ALIGN : 16;
    if (size_bytes > arena->limit_bytes - arena->taken_bytes) {
        return NULL;
    }
    arena->taken_bytes += size_bytes;
    size_t at = align_up(arena->used, align);
    if (at <= arena->capacity && size_bytes <= arena->capacity - at) {
        arena->used = at + size_bytes;
        return arena->base + at;
    }
    at = align_up(arena->chunk_used, align);
    if (arena->chunks != NULL && at <= arena->chunk_bytes &&
        size_bytes <= arena->chunk_bytes - at) {
        arena->chunk_used = at + size_bytes;
        return (uint8_t *)(arena->chunks + 1) + at;
    }
    return arena_take_chunk(arena, size_bytes);
}

void *kvk_rpc_arena_take_extra(struct kvk_rpc_arena *arena, size_t size_bytes)
{
    KVK_ASSERT(size_bytes <= SIZE_MAX - arena->limit_bytes);
    arena->limit_bytes += size_bytes;
    return kvk_rpc_arena_take(arena, size_bytes);
}

static void arena_free_chunks(struct kvk_rpc_arena *arena)
{
    while (arena->chunks != NULL) {
        struct kvk_rpc_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        free(chunk);
    }
    arena->chunk_bytes = 0;
    arena->chunk_used = 0;
}

void kvk_rpc_arena_reset(struct kvk_rpc_arena *arena)
{
    bool grow =
        arena->base == NULL || (arena->chunks != NULL && arena->taken_bytes <= ARENA_KEPT_MAX &&
                                arena->capacity < ARENA_KEPT_MAX);
    if (grow) {
        size_t capacity = arena->capacity == 0 ? ARENA_KEPT_MIN : arena->capacity * 2;
        while (capacity < arena->taken_bytes) {
            capacity *= 2;
        }
        free(arena->base);
        arena->base = aligned_alloc(ARENA_ALIGN, capacity);
        arena->capacity = arena->base != NULL ? capacity : 0;
    }
    arena_free_chunks(arena);
    arena->used = 0;
    arena->taken_bytes = 0;
    arena->limit_bytes = UNPACK_EXTRA_MIN;
}

void kvk_rpc_arena_finish(struct kvk_rpc_arena *arena)
{
    arena_free_chunks(arena);
    free(arena->base);
    memset(arena, 0, sizeof(*arena));
}

static pthread_once_t memory_once = PTHREAD_ONCE_INIT;
static pthread_key_t memory_key;
static _Thread_local struct kvk_rpc_memory *thread_memory;

static void memory_free(void *value)
{
    struct kvk_rpc_memory *memory = value;
    kvk_rpc_arena_finish(&memory->arena);
    kvk_tables_finish(&memory->tables);
    free(memory);
}

static void memory_make_key(void)
{
    int result = pthread_key_create(&memory_key, memory_free);
    KVK_ASSERT(result == 0);
}

struct kvk_rpc_memory *kvk_rpc_memory_begin(void)
{
    struct kvk_rpc_memory *memory = thread_memory;
    if (memory == NULL) {
        (void)pthread_once(&memory_once, memory_make_key);
        memory = calloc(1, sizeof(*memory));
        if (memory == NULL || pthread_setspecific(memory_key, memory) != 0) {
            free(memory);
            return NULL;
        }
        thread_memory = memory;
    }
    kvk_rpc_arena_reset(&memory->arena);
    memory->tables.part_count = 0;
    return memory;
}

/* ---- reading ---- */

static bool read_varint(struct kvk_wire_reader *reader, uint64_t *value)
{
    uint64_t result = 0;
    const uint8_t *at = reader->at;
    for (unsigned shift = 0; shift < 70 && at < reader->end; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1) {
            return false; /* past 64 bits */
        }
        result |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            reader->at = at;
            *value = result;
            return true;
        }
    }
    return false;
}

bool kvk_wire_next(struct kvk_wire_reader *reader, struct kvk_wire_field *field)
{
    const uint8_t *start = reader->at;
    uint64_t tag;
    if (start == reader->end || !read_varint(reader, &tag) || tag >> 3 == 0 || tag > UINT32_MAX) {
        reader->at = start;
        return false;
    }
    field->id = (uint32_t)(tag >> 3);
    field->type = (enum kvk_wire_type)(tag & 7);
    field->value = 0;
    field->bytes = (struct kvk_bytes){.data = NULL, .size_bytes = 0};
    size_t left = (size_t)(reader->end - reader->at);
    bool whole = false;
    switch (field->type) { /* groups, which nobody sends, are none of these */
    case KVK_WIRE_VARINT:
        whole = read_varint(reader, &field->value);
        break;
    case KVK_WIRE_FIXED64:
        whole = left >= 8;
        if (whole) {
            field->value = kvk_load_le64(reader->at);
            reader->at += 8;
        }
        break;
    case KVK_WIRE_FIXED32:
        whole = left >= 4;
        if (whole) {
            field->value = kvk_load_le32(reader->at);
            reader->at += 4;
        }
        break;
    case KVK_WIRE_BYTES:
        whole = read_varint(reader, &field->value) &&
                field->value <= (size_t)(reader->end - reader->at);
        if (whole) {
            field->bytes.data = reader->at;
            field->bytes.size_bytes = (size_t)field->value;
            reader->at += field->bytes.size_bytes;
        }
        break;
    }
    if (!whole) {
        reader->at = start;
    }
    return whole;
}

/* ---- writing ---- */

uint8_t *kvk_wire_write_varint(uint8_t *target, uint64_t value)
{
    while (value >= 0x80) {
        *target++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *target++ = (uint8_t)value;
    return target;
}

uint8_t *kvk_wire_write_tag(uint8_t *target, uint32_t id, enum kvk_wire_type type)
{
    return kvk_wire_write_varint(target, (uint64_t)id << 3 | (uint64_t)type);
}

/* ---- the walk ---- */

/* Where the walk is, for the name of a field that is refused. */
struct wire_path {
    const struct wire_path *parent; /* NULL: the message itself */
    const char *name;
    uint32_t index;
    bool repeated;
};

static void path_write(const struct wire_path *path, char *text, size_t text_size)
{
    if (path == NULL) {
        text[0] = '\0';
        return;
    }
    path_write(path->parent, text, text_size);
    size_t used = strlen(text);
    (void)snprintf(text + used, text_size - used, "%s%s", used > 0 ? "." : "", path->name);
    if (path->repeated) {
        used = strlen(text);
        (void)snprintf(text + used, text_size - used, "[%u]", path->index);
    }
}

static uint64_t count_limit(const struct kvk_config *config,
                            const ProtobufCMessageDescriptor *descriptor)
{
    if (descriptor == &kvkeep__v1__prompt__descriptor ||
        descriptor == &kvkeep__v1__append_request__descriptor) {
        return config->spans;
    }
    if (descriptor == &kvkeep__v1__attend_request__descriptor) {
        return config->attend_queries; /* an item has one query at least */
    }
    if (descriptor == &kvkeep__v1__close_request__descriptor) {
        return config->sequences;
    }
    if (descriptor == &kvkeep__v1__release_request__descriptor) {
        return config->leases;
    }
    if (descriptor == &kvkeep__v1__open_space_request__descriptor) {
        return KVK_GROUP_COUNT_MAX;
    }
    if (descriptor == &kvkeep__v1__identity__descriptor) {
        return KVK_IDENTITY_EXTRA_MAX;
    }
    if (descriptor == &kvkeep__v1__create_credential_request__descriptor) {
        return KVK_CREDENTIAL_TENANTS_MAX; /* of uids fewer, by their check */
    }
    if (descriptor == &kvkeep__v1__touch_request__descriptor ||
        descriptor == &kvkeep__v1__open_sequence_request__descriptor) {
        return KVK_HINTS_MAX;
    }
    if (descriptor == &kvkeep__v1__plan_request__descriptor) {
        return KVK_PLAN_LENGTHS_MAX; /* of groups fewer, by their check */
    }
    KVK_UNREACHABLE(); /* a request with a repeated field that nobody bounded */
}

/* Elements in one occurrence of a repeated field: more than one where packed. */
static uint64_t element_count(const ProtobufCFieldDescriptor *descriptor,
                              const struct kvk_wire_field *field)
{
    bool scalar = descriptor->type != PROTOBUF_C_TYPE_MESSAGE &&
                  descriptor->type != PROTOBUF_C_TYPE_BYTES &&
                  descriptor->type != PROTOBUF_C_TYPE_STRING;
    if (!scalar || field->type != KVK_WIRE_BYTES) {
        return 1;
    }
    uint64_t count = 0; /* all repeated scalars of requests are varints */
    for (size_t i = 0; i < field->bytes.size_bytes; i++) {
        count += field->bytes.data[i] < 0x80;
    }
    return count;
}

static enum kvk_status fail_at(const struct wire_path *parent, const char *name, uint64_t value,
                               uint64_t limit, const char *text, struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];
    struct wire_path path = {.parent = parent, .name = name};
    path_write(name != NULL ? &path : parent, field, sizeof(field));
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s %s",
                          field[0] != '\0' ? field : "the message", text);
}

#define FIELDS_MAX 32

static enum kvk_status walk(const struct kvk_config *config,
                            const ProtobufCMessageDescriptor *descriptor, struct kvk_bytes bytes,
                            const struct wire_path *parent, struct kvk_error *error)
{
    uint64_t counts[FIELDS_MAX];
    uint32_t plain_count = 0;
    KVK_ASSERT(descriptor->n_fields <= FIELDS_MAX);
    memset(counts, 0, descriptor->n_fields * sizeof(counts[0]));

    struct kvk_wire_reader reader = {.at = bytes.data, .end = bytes.data + bytes.size_bytes};
    struct kvk_wire_field field;
    while (kvk_wire_next(&reader, &field)) {
        const ProtobufCFieldDescriptor *known =
            protobuf_c_message_descriptor_get_field(descriptor, field.id);
        struct wire_path path = {.parent = parent};
        if (known != NULL && known->label == PROTOBUF_C_LABEL_REPEATED) {
            uint64_t *count = &counts[known - descriptor->fields];
            uint64_t limit = count_limit(config, descriptor);
            path.repeated = true;
            path.index = (uint32_t)*count;
            *count += element_count(known, &field);
            if (*count > limit) {
                return fail_at(parent, known->name, *count, limit, "comes too often", error);
            }
        } else if (++plain_count > PLAIN_FIELDS_MAX) {
            return fail_at(parent, known != NULL ? known->name : NULL, plain_count,
                           PLAIN_FIELDS_MAX,
                           "comes past the number of fields that a message may have", error);
        }
        if (known != NULL && known->type == PROTOBUF_C_TYPE_MESSAGE &&
            field.type == KVK_WIRE_BYTES) {
            path.name = known->name;
            enum kvk_status status = walk(config, known->descriptor, field.bytes, &path, error);
            if (status != KVK_OK) {
                return status;
            }
        }
    }
    if (reader.at != reader.end) {
        return fail_at(parent, NULL, 0, 0, "is not a well-formed message", error);
    }
    return KVK_OK;
}

enum kvk_status kvk_wire_check(const struct kvk_config *config,
                               const ProtobufCMessageDescriptor *descriptor, struct kvk_bytes bytes,
                               struct kvk_error *error)
{
    static const uint8_t nothing[1];
    if (bytes.size_bytes == 0) {
        bytes.data = nothing; /* an empty message may come as NULL */
    }
    return walk(config, descriptor, bytes, NULL, error);
}

/* ---- unpacking ---- */

static void *allocator_take(void *arena, size_t size_bytes)
{
    return kvk_rpc_arena_take(arena, size_bytes);
}

static void allocator_give(void *arena, void *pointer)
{
    (void)arena; /* all at once, at the reset */
    (void)pointer;
}

enum kvk_status kvk_wire_unpack(const struct kvk_config *config, struct kvk_rpc_arena *arena,
                                const ProtobufCMessageDescriptor *descriptor,
                                struct kvk_bytes bytes, ProtobufCMessage **message,
                                struct kvk_error *error)
{
    enum kvk_status status = kvk_wire_check(config, descriptor, bytes, error);
    if (status != KVK_OK) {
        return status;
    }
    size_t extra = bytes.size_bytes > UNPACK_EXTRA_MAX / UNPACK_FACTOR
                       ? UNPACK_EXTRA_MAX
                       : bytes.size_bytes * UNPACK_FACTOR;
    arena->limit_bytes = arena->taken_bytes + bytes.size_bytes + extra + UNPACK_EXTRA_MIN;
    ProtobufCAllocator allocator = {
        .alloc = allocator_take, .free = allocator_give, .allocator_data = arena};
    *message = protobuf_c_message_unpack(descriptor, &allocator, bytes.size_bytes, bytes.data);
    if (*message == NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "",
                        "the bytes are no %s, or take too much memory to unpack",
                        descriptor->short_name);
    }
    return KVK_OK;
}
