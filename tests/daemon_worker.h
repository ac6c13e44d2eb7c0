/*
 * What an agent of a daemon's test is made of: one process's connection, session, space and
 * mappings; K/V whose every byte follows from tenant, model, rank and the tokens before it, so that
 * a byte that is another's is found when it is read; and an operator's look at what is held.
 */
#ifndef KVK_TESTS_DAEMON_WORKER_H
#define KVK_TESTS_DAEMON_WORKER_H

#include "base/random.h"
#include "client/internal.h"
#include "tests/daemon_process.h"

enum {
    BLOCK_TOKENS = 4,
    LAYERS = 2,
    HEAD_SIZE = 128,                                  /* bf16 values */
    ROW_BYTES = HEAD_SIZE * 2,                        /* one token, head, layer, K or V */
    ROW_WORDS = ROW_BYTES / 8,                        /* */
    PLANES = LAYERS * 2,                              /* rows of one token; a head per rank */
    BLOCK_BYTES = PLANES * BLOCK_TOKENS * ROW_BYTES,  /* one rank's: a page */
    LATENT_BYTES = LAYERS * BLOCK_TOKENS * ROW_BYTES, /* of a latent space: K alone */
    TOKENS_MAX = 65536,
};

/* Calls of this process that must succeed. */
#define CHECK_OK(call)                                                                             \
    CHECK((call) == KVK_OK, "%s [%s]", self.error.text, kvk_cause_name(self.error.cause))

/* One process's client; each process has its own. */
struct worker {
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    struct kvkeep_map maps[3]; /* by enum kvkeep_tier, of `rank` */
    struct kvk_error error;
    uint64_t seed; /* of tenant and model */
    uint32_t rank;
    bool latent;
};
static struct worker self;

/* ---- tokens and bytes ---- */

struct prompt {
    uint64_t count;
    uint32_t tokens[TOKENS_MAX];
    uint64_t seeds[TOKENS_MAX]; /* [i]: of the tokens up to i, itself included */
};

static inline uint64_t mix(uint64_t value)
{
    value += UINT64_C(0x9e3779b97f4a7c15);
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static inline uint64_t seed_of(const char *tenant, const char *model)
{
    uint64_t seed = 1;
    for (const char *at = tenant; at != NULL && *at != '\0'; at++) {
        seed = mix(seed ^ (uint64_t)(unsigned char)*at);
    }
    for (const char *at = model; *at != '\0'; at++) {
        seed = mix(seed ^ (uint64_t)(unsigned char)*at << 8);
    }
    return seed;
}

static inline void prompt_add(struct prompt *prompt, uint32_t token)
{
    uint64_t before = prompt->count == 0 ? self.seed : prompt->seeds[prompt->count - 1];
    CHECK(prompt->count < TOKENS_MAX, "the test's prompt is too long");
    prompt->tokens[prompt->count] = token;
    prompt->seeds[prompt->count] = mix(before ^ token);
    prompt->count++;
}

/* `count` tokens from `first` on; worker_open() comes before, since bytes follow from the space. */
static inline void prompt_set(struct prompt *prompt, uint32_t first, uint64_t count)
{
    prompt->count = 0;
    for (uint64_t i = 0; i < count; i++) {
        prompt_add(prompt, first + (uint32_t)i);
    }
}

static inline struct kvkeep_prompt prompt_view(const struct prompt *prompt)
{
    return (struct kvkeep_prompt){.tokens = prompt->tokens, .token_count = prompt->count};
}

static inline uint32_t planes(void)
{
    return self.latent ? LAYERS : PLANES;
}

/* Whose bytes this process's shard holds: a latent cache is the same for all ranks. */
static inline uint32_t shard_rank(void)
{
    return self.latent ? 0 : self.rank;
}

static inline uint64_t block_bytes(void)
{
    return self.latent ? LATENT_BYTES : BLOCK_BYTES;
}

static inline uint64_t row_word(uint64_t seed, uint32_t rank, uint32_t plane, uint32_t word)
{
    return mix(seed + UINT64_C(0x100000001b3) * (rank * 4096u + plane * ROW_WORDS + word));
}

static inline uint64_t *token_row(uint8_t *block, uint64_t position, uint32_t plane)
{
    uint64_t row = (uint64_t)plane * BLOCK_TOKENS + position % BLOCK_TOKENS;
    return (uint64_t *)(void *)(block + row * ROW_BYTES);
}

static inline void token_write(uint8_t *block, uint64_t position, uint64_t seed, uint32_t rank)
{
    for (uint32_t plane = 0; plane < planes(); plane++) {
        for (uint32_t word = 0; word < ROW_WORDS; word++) {
            token_row(block, position, plane)[word] = row_word(seed, rank, plane, word);
        }
    }
}

static inline bool token_is_right(uint8_t *block, uint64_t position, uint64_t seed, uint32_t rank)
{
    uint64_t wrong = 0;
    for (uint32_t plane = 0; plane < planes(); plane++) {
        for (uint32_t word = 0; word < ROW_WORDS; word++) {
            wrong |= token_row(block, position, plane)[word] ^ row_word(seed, rank, plane, word);
        }
    }
    return wrong == 0;
}

/* ---- a worker's life ---- */

struct worker_options {
    const char *target;
    const char *tenant; /* NULL: the credential's own */
    const char *model;
    const char *name;              /* of the instance */
    const uint8_t *instance_token; /* NULL: open one */
    uint32_t tensor_shards;        /* 0: 1 */
    uint32_t rank;
    bool latent;
    bool no_session;
    void (*on_notice)(void *context, enum kvkeep_notice notice, uint64_t value);
    uint32_t timeout_ms; /* 0: the client's */
};

/* Set: the daemon is about to be killed, and whoever cannot begin any more ends well. */
static const _Atomic bool *worker_daemon_goes;

static inline void worker_begun(enum kvk_status status)
{
    if (status != KVK_OK && worker_daemon_goes != NULL && atomic_load(worker_daemon_goes)) {
        exit(0);
    }
    CHECK_OK(status);
}

static inline void worker_connect(const struct worker_options *options)
{
    struct kvkeep_options connect = {.target = options->target, .timeout_ms = options->timeout_ms};
    worker_begun(kvkeep_connect(&connect, &self.client, &self.error));
}

static inline void worker_open_space(const struct worker_options *options)
{
    uint32_t shards = options->tensor_shards == 0 ? 1 : options->tensor_shards;
    const struct kvk_geometry geometry = {.layers = LAYERS,
                                          .kv_heads = options->latent ? 1 : shards,
                                          .head_size_k = HEAD_SIZE,
                                          .head_size_v = HEAD_SIZE,
                                          .block_tokens = BLOCK_TOKENS,
                                          .format_k = KVK_FORMAT_BF16,
                                          .format_v =
                                              options->latent ? KVK_FORMAT_NONE : KVK_FORMAT_BF16,
                                          .layout = KVK_LAYOUT_HEADS_FIRST,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = shards,
                                          .pipeline_shards = 1,
                                          .latent = options->latent};
    const struct kvkeep_space_options space = {.tenant = options->tenant,
                                               .identity = {.model = options->model},
                                               .block_tokens = BLOCK_TOKENS,
                                               .groups = &geometry,
                                               .group_count = 1,
                                               .tensor_shards = shards};
    self.rank = options->rank;
    self.latent = options->latent;
    self.seed = seed_of(options->tenant, options->model);
    worker_begun(kvkeep_space_open(self.client, &space, &self.space, &self.error));
}

static inline void worker_open_session(const struct worker_options *options)
{
    const struct kvkeep_session_options session = {.tenant = options->tenant,
                                                   .instance_token = options->instance_token,
                                                   .rank = options->rank,
                                                   .name = options->name,
                                                   .on_notice = options->on_notice};
    worker_begun(kvkeep_session_open(self.client, &session, &self.session, &self.error));
}

static inline void worker_open(const struct worker_options *options)
{
    worker_connect(options);
    worker_open_space(options);
    if (!options->no_session) {
        worker_open_session(options);
    }
}

static inline void worker_close(void)
{
    for (int tier = 0; tier < 3; tier++) {
        kvkeep_unmap(&self.maps[tier]);
    }
    kvkeep_session_close(self.session);
    kvkeep_disconnect(self.client);
    self = (struct worker){0};
}

/* ---- sequences ---- */

static inline enum kvk_status worker_try_open(const struct prompt *prompt,
                                              const struct kvkeep_open_options *options,
                                              struct kvkeep_sequence *sequence)
{
    struct kvkeep_prompt view = prompt_view(prompt);
    return kvkeep_sequence_open(self.session, &self.space, &view, options, sequence, &self.error);
}

/* Until there is room, for at most 20 s. */
static inline void worker_open_sequence(const struct prompt *prompt,
                                        const struct kvkeep_open_options *options,
                                        struct kvkeep_sequence *sequence)
{
    uint64_t until_ms = now_ms() + 20000;
    enum kvk_status status;
    while ((status = worker_try_open(prompt, options, sequence)) == KVK_EXHAUSTED &&
           now_ms() < until_ms) {
        pause_us(1000);
    }
    CHECK_OK(status);
}

/* The bytes of a block of a table, mapped at the first use. */
static inline uint8_t *worker_block(const struct kvkeep_table *table, uint64_t block)
{
    CHECK(block < table->count, "block %llu of %llu", (unsigned long long)block,
          (unsigned long long)table->count);
    uint8_t tier = table->tiers[block];
    CHECK(tier == KVKEEP_TIER_DEVICE || tier == KVKEEP_TIER_HOST, "block %llu is in tier %u",
          (unsigned long long)block, tier);
    struct kvkeep_map *map = &self.maps[tier];
    if (map->address == NULL) {
        CHECK_OK(kvkeep_map_slots(self.session, &self.space, 0, self.rank, (enum kvkeep_tier)tier,
                                  false, map, &self.error));
    }
    return map->address + table->slots[block] * map->slot_stride;
}

static inline void worker_write(const struct kvkeep_sequence *sequence, const struct prompt *prompt,
                                uint64_t first, uint64_t end)
{
    for (uint64_t i = first; i < end; i++) {
        token_write(worker_block(&sequence->groups[0], i / BLOCK_TOKENS), i, prompt->seeds[i],
                    shard_rank());
    }
}

static inline void worker_seal(struct kvkeep_sequence *sequence, uint64_t length)
{
    CHECK_OK(kvkeep_seal(self.session, sequence, length, false, &self.error));
}

/* Open it, write what is not cached, seal. */
static inline void worker_fill(const struct prompt *prompt,
                               const struct kvkeep_open_options *options,
                               struct kvkeep_sequence *sequence)
{
    worker_open_sequence(prompt, options, sequence);
    worker_write(sequence, prompt, sequence->grant_first, prompt->count);
    worker_seal(sequence, prompt->count);
}

static inline void worker_close_sequence(struct kvkeep_sequence *sequence)
{
    CHECK_OK(kvkeep_close(self.session, sequence, &self.error));
}

static inline void bytes_check(uint8_t *block, const struct prompt *prompt, uint64_t first,
                               uint64_t end, uint32_t rank, const char *where)
{
    for (uint64_t i = first; i < end; i++) {
        CHECK(token_is_right(block, i, prompt->seeds[i], rank),
              "token %llu of %llu has other bytes, read %s", (unsigned long long)i,
              (unsigned long long)prompt->count, where);
    }
}

/* Tokens [first, end) of a running sequence, in mapped memory. */
static inline void worker_verify(const struct kvkeep_sequence *sequence,
                                 const struct prompt *prompt, uint64_t first, uint64_t end)
{
    for (uint64_t at = first; at < end; at++) {
        uint8_t *block = worker_block(&sequence->groups[0], at / BLOCK_TOKENS);
        bytes_check(block, prompt, at, at + 1, shard_rank(), "in mapped memory");
    }
}

/* The same through gRPC, of any state of the sequence, or of a lease. */
static inline void worker_verify_stream(const struct kvkeep_sequence *sequence,
                                        const struct kvkeep_lease *lease,
                                        const struct prompt *prompt, uint64_t end)
{
    uint64_t blocks = (end + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    uint8_t *bytes = malloc(blocks * block_bytes() + 1);
    CHECK(bytes != NULL, "no memory");
    CHECK_OK(kvkeep_read(self.session, sequence, lease, 0, self.rank, 0, blocks, bytes,
                         blocks * block_bytes(), &self.error));
    for (uint64_t i = 0; i < end; i++) {
        bytes_check(bytes + i / BLOCK_TOKENS * block_bytes(), prompt, i, i + 1, shard_rank(),
                    "through gRPC");
    }
    free(bytes);
}

static inline uint64_t worker_hit(const struct prompt *prompt)
{
    struct kvkeep_prompt view = prompt_view(prompt);
    struct kvkeep_lookup found;
    CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &found, &self.error));
    return found.cached_tokens;
}

/* A call that libkvkeep has no function for. The answer is the caller's. */
static inline enum kvk_status worker_call(const char *method, const ProtobufCMessage *request,
                                          const ProtobufCMessageDescriptor *type, void *response)
{
    return kvkeep_client_call(self.client, method, request, type, response, &self.error);
}

static inline void message_free(void *message)
{
    protobuf_c_message_free_unpacked(message, NULL);
}

/* Forget all that the process's tenant has cached. */
static inline void worker_forget_all(const char *tenant)
{
    Kvkeep__V1__InvalidateRequest request = KVKEEP__V1__INVALIDATE_REQUEST__INIT;
    Kvkeep__V1__InvalidateResponse *response = NULL;
    request.tenant = kvkeep_text(tenant);
    CHECK_OK(worker_call(KVKEEP_METHOD("Invalidate"), &request.base,
                         &kvkeep__v1__invalidate_response__descriptor, &response));
    message_free(response);
}

#endif
