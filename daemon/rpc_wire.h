/*
 * Bytes of messages, before and while they are unpacked.
 *
 * protobuf-c trusts what it is sent: four megabytes of empty elements become a multiple of that in
 * heap. So a message is walked first, along its descriptor, and refused where a repeated field
 * comes more often than its limit says; and it is unpacked into an arena with an end.
 *
 * Every thread of the server has one arena and one buffer for block tables, used by one call at a
 * time and reused: a look-up allocates nothing.
 */
#ifndef KVK_DAEMON_RPC_WIRE_H
#define KVK_DAEMON_RPC_WIRE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/cache.h"
#include "daemon/server.h"

#define KVK_PLAN_LENGTHS_MAX 1024 /* of one Plan */

/* ---- memory ---- */

struct kvk_rpc_chunk;

/* Memory of one call: taken piece by piece, given back as a whole. */
struct kvk_rpc_arena {
    uint8_t *base; /* [capacity] kept from call to call; ours */
    size_t capacity;
    size_t used;                  /* of base */
    struct kvk_rpc_chunk *chunks; /* what did not fit; ours, until the reset */
    size_t chunk_bytes;           /* room of the newest chunk */
    size_t chunk_used;
    size_t taken_bytes; /* in all, this call */
    size_t limit_bytes; /* taken_bytes may reach this */
};

/* What a thread has for the call it is at. */
struct kvk_rpc_memory {
    struct kvk_rpc_arena arena;
    struct kvk_tables tables;
};

/* This thread's, with an empty arena; made at first use, freed when the thread ends. NULL: no
 * memory. */
struct kvk_rpc_memory *kvk_rpc_memory_begin(void);

/* Aligned to 64 bytes where it is as large, else to 16. NULL: past the limit, or no memory. */
void *kvk_rpc_arena_take(struct kvk_rpc_arena *arena, size_t size_bytes);
/* As kvk_rpc_arena_take(), and the limit grows along: for what was bounded otherwise. */
void *kvk_rpc_arena_take_extra(struct kvk_rpc_arena *arena, size_t size_bytes);
void kvk_rpc_arena_reset(struct kvk_rpc_arena *arena);
void kvk_rpc_arena_finish(struct kvk_rpc_arena *arena);

/* ---- messages ---- */

/*
 * Unpack into the arena. KVK_INVALID, naming the field: not a message of this kind, a repeated
 * field past its limit, fields beyond reason. KVK_EXHAUSTED: no memory.
 */
KVK_CHECKED enum kvk_status kvk_wire_unpack(const struct kvk_config *config,
                                            struct kvk_rpc_arena *arena,
                                            const ProtobufCMessageDescriptor *descriptor,
                                            struct kvk_bytes bytes, ProtobufCMessage **message,
                                            struct kvk_error *error);

/* The walk alone. */
KVK_CHECKED enum kvk_status kvk_wire_check(const struct kvk_config *config,
                                           const ProtobufCMessageDescriptor *descriptor,
                                           struct kvk_bytes bytes, struct kvk_error *error);

/* ---- reading field by field, where a copy of the bytes would cost too much ---- */

struct kvk_wire_reader {
    const uint8_t *at;
    const uint8_t *end;
};

enum kvk_wire_type {
    KVK_WIRE_VARINT = 0,
    KVK_WIRE_FIXED64 = 1,
    KVK_WIRE_BYTES = 2,
    KVK_WIRE_FIXED32 = 5,
};

struct kvk_wire_field {
    uint32_t id;
    enum kvk_wire_type type;
    uint64_t value;         /* of varints and fixed ones */
    struct kvk_bytes bytes; /* of KVK_WIRE_BYTES: a view */
};

/* The next field. False: at the end (reader->at == reader->end) or malformed (it is not). */
KVK_CHECKED bool kvk_wire_next(struct kvk_wire_reader *reader, struct kvk_wire_field *field);

/* ---- writing by hand: the head of a message whose last field's bytes follow on their own ---- */

uint8_t *kvk_wire_write_varint(uint8_t *target, uint64_t value); /* up to 10 bytes; past the last */
uint8_t *kvk_wire_write_tag(uint8_t *target, uint32_t id, enum kvk_wire_type type);

#endif
