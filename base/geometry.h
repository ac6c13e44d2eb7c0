/*
 * The geometry of KV: what one block of one layer group is made of, and how many bytes that is.
 * The daemon's pools, its admission and the capacity planner all count with this file.
 *
 * One block holds K and V of `block_tokens` consecutive tokens, cut into shards (tensor x pipeline
 * ranks). The bytes of a shard are contiguous: [layer][K or V][head][token][dim] (heads first); in
 * compact formats the scales of a layer's K follow its rows, and so do V's (base/format.h).
 * A latent cache (MLA) stores K alone: V is the first head_size_v values of K.
 */
#ifndef KVK_BASE_GEOMETRY_H
#define KVK_BASE_GEOMETRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/format.h"
#include "base/status.h"

#define KVK_GROUP_COUNT_MAX 8
#define KVK_SHARD_COUNT_MAX 64
#define KVK_BLOCK_TOKENS_MAX 4096
#define KVK_LAYER_COUNT_MAX 1024
#define KVK_HEAD_COUNT_MAX 1024
#define KVK_HEAD_SIZE_MAX 4096
#define KVK_BLOCK_BYTES_MAX (UINT64_C(1) << 30) /* one shard of one block */

enum kvk_layout {
    KVK_LAYOUT_HEADS_FIRST = 1,  /* [layer][K or V][head][token][dim]; can be attended */
    KVK_LAYOUT_TOKENS_FIRST = 2, /* [layer][K or V][token][head][dim]; kept, not attended */
    KVK_LAYOUT_OPAQUE = 3,       /* opaque_bytes per block and shard; kept, not attended */
};

enum kvk_attention {
    KVK_ATTENTION_SELF = 1,
    KVK_ATTENTION_CROSS = 2, /* K/V of an encoder: all of it is seen by every query */
};

struct kvk_geometry {
    uint32_t layers;      /* of the group, over all pipeline ranks; 1 to KVK_LAYER_COUNT_MAX */
    uint32_t kv_heads;    /* over all tensor ranks */
    uint32_t head_size_k; /* values per head of K */
    uint32_t head_size_v; /* values per head of V */
    uint32_t block_tokens;
    enum kvk_format format_k;
    enum kvk_format format_v; /* format_k, where that or this is compact; NONE too where latent */
    enum kvk_layout layout;
    enum kvk_attention attention;
    uint32_t tensor_shards; /* heads are dealt out; fewer heads than ranks: each has one, copied */
    uint32_t pipeline_shards; /* layers are dealt out; the first ranks take the rest */
    bool latent;              /* V is a view of K; one copy serves all tensor ranks */
    uint32_t window;          /* tokens that a query sees back, itself counted; 0: all */
    uint32_t sinks;           /* first tokens that stay visible past the window */
    uint64_t opaque_bytes;    /* KVK_LAYOUT_OPAQUE only: per block and shard */
};

/*
 * KVK_INVALID, naming the field, for a geometry that cannot be: a zero or absurd count, an unknown
 * enum value, more layers' shards than layers, a block past KVK_BLOCK_BYTES_MAX, sinks without a
 * window. `prefix` is put before the field's name, such as "groups[2].".
 */
KVK_CHECKED enum kvk_status kvk_geometry_check(const struct kvk_geometry *geometry,
                                               const char *prefix, struct kvk_error *error);

/* All below need a checked geometry. */

/* Ranks: tensor_shards x pipeline_shards. Rank r is tensor rank r % tensor_shards of pipeline
 * rank r / tensor_shards. */
uint32_t kvk_geometry_rank_count(const struct kvk_geometry *geometry);

/* Shards that are stored: as many as ranks, but one per pipeline rank where latent. */
uint32_t kvk_geometry_shard_count(const struct kvk_geometry *geometry);
uint32_t kvk_geometry_rank_shard(const struct kvk_geometry *geometry, uint32_t rank);

uint32_t kvk_geometry_shard_layers(const struct kvk_geometry *geometry, uint32_t shard);
uint32_t kvk_geometry_shard_first_layer(const struct kvk_geometry *geometry, uint32_t shard);
uint32_t kvk_geometry_shard_heads(const struct kvk_geometry *geometry, uint32_t shard);
uint32_t kvk_geometry_shard_first_head(const struct kvk_geometry *geometry, uint32_t shard);

/* Bytes of one shard of one block, and where in it a layer's K and V begin. */
uint64_t kvk_geometry_shard_bytes(const struct kvk_geometry *geometry, uint32_t shard);
uint64_t kvk_geometry_k_offset(const struct kvk_geometry *geometry, uint32_t shard,
                               uint32_t shard_layer);
uint64_t kvk_geometry_v_offset(const struct kvk_geometry *geometry, uint32_t shard,
                               uint32_t shard_layer);

/* All shards of one block together. */
uint64_t kvk_geometry_block_bytes(const struct kvk_geometry *geometry);

/* A layer's K (or V, of no bytes where latent) in a shard. */
struct kvk_part kvk_geometry_part(const struct kvk_geometry *geometry, uint32_t shard,
                                  bool is_value);

/*
 * Bytes of K and V per token over all ranks as an engine counts them, without rounding to blocks:
 * layers x (kv_heads x head_size_k x bytes_k + kv_heads x head_size_v x bytes_v). Of compact
 * formats a layer's bytes with its scales, dealt out over the block's tokens and rounded up.
 */
uint64_t kvk_geometry_token_bytes(const struct kvk_geometry *geometry);

/*
 * The first token position that a query at `position` or any later one can still see, sinks apart:
 * 0 under full attention, position + 1 - window under a window.
 */
uint64_t kvk_geometry_window_start(const struct kvk_geometry *geometry, uint64_t position);

bool kvk_geometry_equal(const struct kvk_geometry *a, const struct kvk_geometry *b);

#endif
