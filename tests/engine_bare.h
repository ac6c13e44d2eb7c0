/*
 * What programs that run an engine without a test framework begin with: benchmarks, fuzzers, and
 * tests of threads. What is refused here is a mistake of the program's: it says so and ends.
 */
#ifndef KVK_TESTS_ENGINE_BARE_H
#define KVK_TESTS_ENGINE_BARE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/tenant.h"
#include "gpu/device.h"

static inline void bare_must(enum kvk_status status, const struct kvk_error *error)
{
    if (status != KVK_OK) {
        (void)fprintf(stderr, "%s: %s\n", kvk_status_name(status), error->text);
        abort();
    }
}

static inline struct kvk_device *bare_device(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 1};
    struct kvk_device *device = NULL;
    struct kvk_error error;
    bare_must(kvk_device_cpu_open(&options, &device, &error), &error);
    return device;
}

static inline struct kvk_caller bare_caller(const struct kvk_credential *credential)
{
    return (struct kvk_caller){
        .credential = credential, .call = "Bare", .may_block = true, .deadline_ns = UINT64_MAX};
}

/* This user, without a token. */
static inline struct kvk_caller bare_user(struct kvk_tenants *tenants)
{
    const struct kvk_credential *credential = NULL;
    struct kvk_error error;
    bare_must(
        kvk_tenants_authenticate(tenants, NULL, 0, true, (uint32_t)geteuid(), &credential, &error),
        &error);
    return bare_caller(credential);
}

/* ---- Spaces and sessions ---- */

/* K and V of whole heads in fp32; heads are equally many and large. */
static inline struct kvk_geometry bare_geometry(uint32_t layers, uint32_t heads, uint32_t head_size,
                                                uint32_t block_tokens)
{
    return (struct kvk_geometry){.layers = layers,
                                 .kv_heads = heads,
                                 .head_size_k = head_size,
                                 .head_size_v = head_size,
                                 .block_tokens = block_tokens,
                                 .format_k = KVK_FORMAT_FP32,
                                 .format_v = KVK_FORMAT_FP32,
                                 .layout = KVK_LAYOUT_HEADS_FIRST,
                                 .attention = KVK_ATTENTION_SELF,
                                 .tensor_shards = 1,
                                 .pipeline_shards = 1};
}

/* Blocks of so many bytes, whatever they are. */
static inline struct kvk_geometry bare_opaque(uint64_t block_bytes, uint32_t block_tokens)
{
    struct kvk_geometry geometry = bare_geometry(1, 1, 1, block_tokens);
    geometry.layout = KVK_LAYOUT_OPAQUE;
    geometry.opaque_bytes = block_bytes;
    return geometry;
}

static inline struct kvk_space_request bare_space_request(const char *model,
                                                          const struct kvk_geometry *geometry)
{
    struct kvk_space_request request = {
        .block_tokens = geometry->block_tokens, .groups = {*geometry}, .group_count = 1};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){.data = (const uint8_t *)model, .size = strlen(model)};
    return request;
}

/* Of one group. */
static inline struct kvk_space_reply bare_space(struct kvk_cache *cache,
                                                const struct kvk_caller *caller, const char *model,
                                                const struct kvk_geometry *geometry)
{
    const struct kvk_space_request request = bare_space_request(model, geometry);
    struct kvk_space_reply reply;
    struct kvk_error error;
    bare_must(kvk_space_open(cache, caller, &request, &reply, &error), &error);
    return reply;
}

static inline uint64_t bare_session(struct kvk_cache *cache, const struct kvk_caller *caller)
{
    const struct kvk_hello hello = {
        .local = true, .pid = (int32_t)getpid(), .uid = (uint32_t)geteuid(), .pidfd = -1};
    struct kvk_welcome welcome;
    struct kvk_error error;
    bare_must(kvk_session_begin(cache, caller, &hello, &welcome, &error), &error);
    return welcome.session_id;
}

/* ---- Sequences ---- */

/* A prompt of whole blocks is cached; what is in them is whatever lay there. */
static inline void bare_compute(struct kvk_cache *cache, const struct kvk_caller *caller,
                                uint64_t session_id, uint64_t space_id, const uint32_t *tokens,
                                uint64_t count)
{
    struct kvk_sequence_reply reply;
    struct kvk_seal_reply sealed;
    struct kvk_close_reply closed;
    struct kvk_error error;
    const struct kvk_open_request request = {.session_id = session_id,
                                             .space_id = space_id,
                                             .prompt = {.tokens = tokens, .token_count = count},
                                             .tier = -1};
    bare_must(kvk_sequence_open(cache, caller, &request, &reply, NULL, &error), &error);
    const struct kvk_seal_request seal = {.session_id = session_id,
                                          .sequence_id = reply.sequence_id,
                                          .expected_length = count,
                                          .length = count,
                                          .all_ranks = true};
    bare_must(kvk_sequence_seal(cache, caller, &seal, &sealed, &error), &error);
    bare_must(kvk_sequence_close(cache, caller, session_id, &reply.sequence_id, 1, &closed, &error),
              &error);
}

#endif
