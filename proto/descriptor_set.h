/*
 * The FileDescriptorSet of every .proto that the daemon serves, imports included, as protoc wrote
 * it: what server reflection answers from.
 */
#ifndef KVK_PROTO_DESCRIPTOR_SET_H
#define KVK_PROTO_DESCRIPTOR_SET_H

#include <stddef.h>
#include <stdint.h>

/* Static; imports come before the files that need them. */
const uint8_t *kvk_descriptor_set(size_t *size_bytes);

#endif
