/*
 * Attention over what sequences and leases hold, where it lies: device blocks on the device, host
 * blocks on the CPU or, where that is quicker, brought to the device for the call
 * (daemon/attention_place.h); the parts merged by LSE.
 */
#ifndef KVK_DAEMON_ATTENTION_H
#define KVK_DAEMON_ATTENTION_H

#include "daemon/attention_place.h"
#include "daemon/cache.h"

struct kvk_attention_item {
    uint64_t sequence_id; /* one of the two */
    uint64_t lease_id;
    uint64_t position;
    uint32_t query_count;
    const uint8_t *queries; /* [query_count][query_heads][head_size_k] of format */
    uint64_t queries_size;  /* bytes; checked against the shape */
    float *output;          /* [query_count][query_heads][head_size_v] */
    float *lse;             /* [query_count][query_heads] */
    uint64_t token_limit;   /* 0: all sealed tokens */
    uint64_t device_tokens; /* out */
    uint64_t host_tokens;   /* out */
};

struct kvk_attention_request {
    uint64_t session_id;
    uint32_t group;
    uint32_t layer; /* over all pipeline ranks */
    uint32_t rank;  /* tensor rank */
    uint32_t query_heads;
    enum kvk_format format;
    float scale;
    float soft_cap;
    bool causal;
    bool group_window;
    uint32_t window;
    uint32_t sinks;
    const float *alibi_slopes; /* [alibi_slope_count], query_heads of them or none */
    size_t alibi_slope_count;
    const float *sink_logits; /* [sink_logit_count], likewise; -inf: no sink */
    size_t sink_logit_count;
    struct kvk_attention_item *items; /* [item_count], all of one space */
    uint32_t item_count;
    struct kvk_attention_choice choice; /* out: where the host's part was attended, and why */
};

/* Output sizes for a request, before memory for them is there: the head size of V for the group of
 * the first item's space. */
KVK_CHECKED enum kvk_status kvk_attention_shape(struct kvk_cache *cache,
                                                const struct kvk_caller *caller,
                                                const struct kvk_attention_request *request,
                                                uint32_t *head_size_k, uint32_t *head_size_v,
                                                struct kvk_error *error);

/* Blocks: pins the copies, attends without the lock, unpins. Only sealed tokens are seen. */
KVK_CHECKED enum kvk_status kvk_attention_run(struct kvk_cache *cache,
                                              const struct kvk_caller *caller,
                                              struct kvk_attention_request *request,
                                              struct kvk_error *error);

#endif
