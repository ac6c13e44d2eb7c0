/*
 * A worker to learn from: a small Llama-shaped transformer that keeps all its K/V in kvkeepd.
 *
 * It proves the two-path check. Every prompt is generated twice: in one shot, with nothing cached
 * and nothing of kvkeep, and through the daemon, with whatever that brings: prefixes that others
 * computed, a swap out and in half-way, beams that fork, drafts of which half are rejected,
 * attention computed by the daemon. The greedy tokens must be the same wherever the two best logits
 * differ by more than 1e-4; nearer ties are counted and shown. With --disk-format, blocks that come
 * back from disk are rounded: then by more than what that moves logits.
 *
 * What a worker does, in the order of this file: a model; K/V in mapped slots; attention over what
 * is cached (read from the slots, or asked of the daemon) merged by log-sum-exp with the chunk at
 * hand; a step that appends, computes, writes, and seals.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "client/kvkeep.h"

enum {
    LAYERS = 3,
    WIDTH = 64,
    QUERY_HEADS = 4,
    KV_HEADS = 2,
    HEAD_SIZE = 32,
    HIDDEN = 128,
    VOCABULARY = 320,
    BLOCK_TOKENS = 8,
    CHUNK_MAX = 32,  /* tokens computed at once */
    LENGTH_MAX = 512 /* of prompt and answer together */
};
#define QUERY_WIDTH (QUERY_HEADS * HEAD_SIZE)
#define KV_WIDTH (KV_HEADS * HEAD_SIZE)
#define TIE 1e-4F
static float tie_margin = TIE; /* more where blocks come back from disk rounded */

/* ================= the model ================= */

struct layer {
    float norm_attention[WIDTH], norm_hidden[WIDTH];
    float query[QUERY_WIDTH][WIDTH];
    float key[KV_WIDTH][WIDTH], value[KV_WIDTH][WIDTH];
    float output[WIDTH][QUERY_WIDTH];
    float gate[HIDDEN][WIDTH], up[HIDDEN][WIDTH], down[WIDTH][HIDDEN];
};

struct model {
    float embedding[VOCABULARY][WIDTH];
    struct layer layers[LAYERS];
    float norm[WIDTH];
};

static float *weights_fill(struct kvk_random *random, float *weights, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++) {
        weights[i] = (float)(kvk_random_unit(random) * 2 - 1) * scale;
    }
    return weights;
}

static void ones_fill(float *weights, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        weights[i] = 1;
    }
}

#define FILL(random, matrix, inputs)                                                               \
    weights_fill(random, &(matrix)[0][0], sizeof(matrix) / sizeof(float),                          \
                 sqrtf(3.0F / (float)(inputs)))

static struct model *model_create(uint64_t seed)
{
    struct model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return NULL;
    }
    struct kvk_random random;
    kvk_random_init(&random, seed);
    FILL(&random, model->embedding, 3);
    for (int l = 0; l < LAYERS; l++) {
        struct layer *layer = &model->layers[l];
        ones_fill(layer->norm_attention, WIDTH);
        ones_fill(layer->norm_hidden, WIDTH);
        FILL(&random, layer->query, WIDTH);
        FILL(&random, layer->key, WIDTH);
        FILL(&random, layer->value, WIDTH);
        FILL(&random, layer->output, QUERY_WIDTH);
        FILL(&random, layer->gate, WIDTH);
        FILL(&random, layer->up, WIDTH);
        FILL(&random, layer->down, HIDDEN);
    }
    ones_fill(model->norm, WIDTH);
    return model;
}

/* output[rows] = matrix[rows][columns] x input */
static void multiply(float *output, const float *matrix, const float *input, int rows, int columns)
{
    for (int r = 0; r < rows; r++) {
        float sum = 0;
        for (int c = 0; c < columns; c++) {
            sum += matrix[r * columns + c] * input[c];
        }
        output[r] = sum;
    }
}

static void normalize(float *output, const float *input, const float *weight)
{
    float squares = 0;
    for (int i = 0; i < WIDTH; i++) {
        squares += input[i] * input[i];
    }
    float scale = 1.0F / sqrtf(squares / WIDTH + 1e-5F);
    for (int i = 0; i < WIDTH; i++) {
        output[i] = input[i] * scale * weight[i];
    }
}

/* Rotary position encoding, base 10,000. K is stored with it applied. */
static void rotate(float *vector, int heads, uint64_t position)
{
    for (int h = 0; h < heads; h++) {
        for (int i = 0; i < HEAD_SIZE / 2; i++) {
            float angle = (float)position * powf(10000.0F, -2.0F * (float)i / HEAD_SIZE);
            float *pair = vector + h * HEAD_SIZE + 2 * i;
            float x = pair[0];
            float y = pair[1];
            pair[0] = x * cosf(angle) - y * sinf(angle);
            pair[1] = x * sinf(angle) + y * cosf(angle);
        }
    }
}

static void feed_forward(const struct layer *layer, float *state)
{
    float input[WIDTH], gate[HIDDEN], up[HIDDEN], down[WIDTH];
    normalize(input, state, layer->norm_hidden);
    multiply(gate, &layer->gate[0][0], input, HIDDEN, WIDTH);
    multiply(up, &layer->up[0][0], input, HIDDEN, WIDTH);
    for (int i = 0; i < HIDDEN; i++) {
        gate[i] = gate[i] / (1.0F + expf(-gate[i])) * up[i];
    }
    multiply(down, &layer->down[0][0], gate, WIDTH, HIDDEN);
    for (int i = 0; i < WIDTH; i++) {
        state[i] += down[i];
    }
}

static void logits_of(const struct model *model, const float *state, float *logits)
{
    float input[WIDTH];
    normalize(input, state, model->norm);
    multiply(logits, &model->embedding[0][0], input, VOCABULARY, WIDTH);
}

/* The best token; *tie: the second is nearer than floating point can tell apart. */
static uint32_t best_token(const float *logits, bool *tie)
{
    uint32_t best = 0;
    for (uint32_t t = 1; t < VOCABULARY; t++) {
        best = logits[t] > logits[best] ? t : best;
    }
    *tie = false;
    for (uint32_t t = 0; t < VOCABULARY; t++) {
        *tie |= t != best && logits[best] - logits[t] <= tie_margin;
    }
    return best;
}

/* The n-th best token, 0 the best: where beams go. */
static uint32_t ranked_token(const float *logits, uint32_t rank)
{
    float copy[VOCABULARY];
    memcpy(copy, logits, sizeof copy);
    for (;; rank--) {
        bool tie;
        uint32_t best = best_token(copy, &tie);
        if (rank == 0) {
            return best;
        }
        copy[best] = -INFINITY;
    }
}

/* ---- attention over a run of K and V, as a partial result that can be merged ---- */

struct partial {
    float output[CHUNK_MAX][QUERY_HEADS][HEAD_SIZE]; /* normalised */
    float lse[CHUNK_MAX][QUERY_HEADS];               /* natural log; -inf: nothing seen */
};

static void partial_init(struct partial *partial, uint32_t count)
{
    memset(partial->output, 0, count * sizeof partial->output[0]);
    for (uint32_t t = 0; t < count; t++) {
        for (int h = 0; h < QUERY_HEADS; h++) {
            partial->lse[t][h] = -INFINITY;
        }
    }
}

/* Fold one more (output, lse) into a row: the LSE rule. */
static void merge_row(float *output, float *lse, const float *more, float more_lse)
{
    if (more_lse == -INFINITY) {
        return;
    }
    float high = fmaxf(*lse, more_lse);
    float a = expf(*lse - high);
    float b = expf(more_lse - high);
    for (int i = 0; i < HEAD_SIZE; i++) {
        output[i] = (a * output[i] + b * more[i]) / (a + b);
    }
    *lse = high + logf(a + b);
}

static void merge(struct partial *into, const struct partial *more, uint32_t count)
{
    for (uint32_t t = 0; t < count; t++) {
        for (int h = 0; h < QUERY_HEADS; h++) {
            merge_row(into->output[t][h], &into->lse[t][h], more->output[t][h], more->lse[t][h]);
        }
    }
}

/* One query head sees one key and value. */
static void see(struct partial *partial, uint32_t t, int h, const float *query, const float *key,
                const float *value)
{
    float logit = 0;
    for (int i = 0; i < HEAD_SIZE; i++) {
        logit += query[i] * key[i];
    }
    merge_row(partial->output[t][h], &partial->lse[t][h], value, logit / sqrtf((float)HEAD_SIZE));
}

/* ================= the first path: one shot, nothing cached ================= */

struct plain_cache {
    float key[LAYERS][LENGTH_MAX][KV_WIDTH], value[LAYERS][LENGTH_MAX][KV_WIDTH];
};

/* What goes between the projections of a layer and its output. */
typedef void attention_fn(void *context, int layer, uint32_t count, uint64_t first,
                          float queries[][QUERY_WIDTH], float keys[][KV_WIDTH],
                          float values[][KV_WIDTH], struct partial *result);

/* All layers over `count` tokens that begin at position `first`; logits of each into [count]. */
static void forward(const struct model *model, const uint32_t *tokens, uint32_t count,
                    uint64_t first, attention_fn *attention, void *context,
                    float logits[][VOCABULARY])
{
    static float state[CHUNK_MAX][WIDTH], queries[CHUNK_MAX][QUERY_WIDTH];
    static float keys[CHUNK_MAX][KV_WIDTH], values[CHUNK_MAX][KV_WIDTH];
    static struct partial result;
    for (uint32_t t = 0; t < count; t++) {
        memcpy(state[t], model->embedding[tokens[t]], sizeof state[t]);
    }
    for (int l = 0; l < LAYERS; l++) {
        const struct layer *layer = &model->layers[l];
        for (uint32_t t = 0; t < count; t++) {
            float input[WIDTH];
            normalize(input, state[t], layer->norm_attention);
            multiply(queries[t], &layer->query[0][0], input, QUERY_WIDTH, WIDTH);
            multiply(keys[t], &layer->key[0][0], input, KV_WIDTH, WIDTH);
            multiply(values[t], &layer->value[0][0], input, KV_WIDTH, WIDTH);
            rotate(queries[t], QUERY_HEADS, first + t);
            rotate(keys[t], KV_HEADS, first + t);
        }
        attention(context, l, count, first, queries, keys, values, &result);
        for (uint32_t t = 0; t < count; t++) {
            float output[WIDTH];
            multiply(output, &layer->output[0][0], &result.output[t][0][0], WIDTH, QUERY_WIDTH);
            for (int i = 0; i < WIDTH; i++) {
                state[t][i] += output[i];
            }
            feed_forward(layer, state[t]);
        }
    }
    for (uint32_t t = 0; t < count; t++) {
        logits_of(model, state[t], logits[t]);
    }
}

static void plain_attention(void *context, int layer, uint32_t count, uint64_t first,
                            float queries[][QUERY_WIDTH], float keys[][KV_WIDTH],
                            float values[][KV_WIDTH], struct partial *result)
{
    struct plain_cache *cache = context;
    memcpy(cache->key[layer][first], keys, count * sizeof keys[0]);
    memcpy(cache->value[layer][first], values, count * sizeof values[0]);
    partial_init(result, count);
    for (uint32_t t = 0; t < count; t++) {
        for (int h = 0; h < QUERY_HEADS; h++) {
            int at = h / (QUERY_HEADS / KV_HEADS) * HEAD_SIZE;
            for (uint64_t j = 0; j <= first + t; j++) {
                see(result, t, h, queries[t] + h * HEAD_SIZE, cache->key[layer][j] + at,
                    cache->value[layer][j] + at);
            }
        }
    }
}

struct answer {
    uint32_t tokens[LENGTH_MAX]; /* the prompt, then what was generated */
    bool ties[LENGTH_MAX];       /* the choice of this token was a near tie */
    uint32_t length;
};

/* Go on greedily from the prompt in `answer` until it is `length` long. */
static void plain_generate(const struct model *model, struct answer *answer, uint32_t length)
{
    static struct plain_cache cache;
    static float logits[CHUNK_MAX][VOCABULARY];
    uint32_t done = 0;
    while (answer->length < length) {
        uint32_t count = answer->length - done;
        count = count > CHUNK_MAX ? CHUNK_MAX : count;
        forward(model, answer->tokens + done, count, done, plain_attention, &cache, logits);
        done += count;
        if (done == answer->length) {
            bool tie;
            answer->tokens[done] = best_token(logits[count - 1], &tie);
            answer->ties[done] = tie;
            answer->length++;
        }
    }
}

/* ================= the second path: all K/V in kvkeepd ================= */

struct worker {
    const struct model *model;
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    struct kvkeep_map maps[3];        /* by enum kvkeep_tier */
    bool ask_daemon;                  /* attention over what is cached: by the daemon */
    struct kvkeep_sequence *sequence; /* at hand */
    enum kvk_status status;           /* the first failure */
    struct kvk_error error;
    uint64_t daemon_tokens[3]; /* attended by the daemon, by tier */
};

static bool failed(struct worker *worker, enum kvk_status status)
{
    if (status != KVK_OK && worker->status == KVK_OK) {
        worker->status = status;
    }
    return worker->status != KVK_OK;
}

/* K of one layer, KV head and token in a slot; V lies behind all K of the layer. Heads first:
 * [layer][K or V][head][token][dim]. A NULL row: a failure, or memory of a GPU. */
static size_t row_offset(uint64_t position, int layer, bool value, int head)
{
    size_t plane = (size_t)KV_HEADS * BLOCK_TOKENS * HEAD_SIZE;
    return ((size_t)layer * 2 + (value ? 1 : 0)) * plane +
           ((size_t)head * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_SIZE;
}

static float *slot_row(struct worker *worker, uint64_t position, int layer, bool value, int head)
{
    const struct kvkeep_table *table = &worker->sequence->groups[0];
    uint64_t block = position / BLOCK_TOKENS;
    enum kvkeep_tier tier = (enum kvkeep_tier)table->tiers[block];
    struct kvkeep_map *map = &worker->maps[tier];
    if (map->address == NULL && map->slabs == NULL &&
        failed(worker, kvkeep_map_slots(worker->session, &worker->space, 0, 0, tier, false, map,
                                        &worker->error))) {
        return NULL;
    }
    float *slot = (float *)(void *)(map->address + table->slots[block] * map->slot_stride);
    return map->address == NULL ? NULL : slot + row_offset(position, layer, value, head);
}

/* The cached part, read from the mapped slots. */
static void attend_slots(struct worker *worker, int layer, uint32_t count, uint64_t cached,
                         float queries[][QUERY_WIDTH], struct partial *result)
{
    for (uint64_t j = 0; j < cached; j++) {
        for (int h = 0; h < QUERY_HEADS; h++) {
            int head = h / (QUERY_HEADS / KV_HEADS);
            const float *key = slot_row(worker, j, layer, false, head);
            const float *value = slot_row(worker, j, layer, true, head);
            if (key == NULL || value == NULL) {
                return;
            }
            for (uint32_t t = 0; t < count; t++) {
                see(result, t, h, queries[t] + h * HEAD_SIZE, key, value);
            }
        }
    }
}

/* The cached part, computed by the daemon where it lies. */
static void attend_daemon(struct worker *worker, int layer, uint32_t count, uint64_t cached,
                          float queries[][QUERY_WIDTH], struct partial *result)
{
    struct kvkeep_attend attend = {
        .layer = (uint32_t)layer,
        .query_heads = QUERY_HEADS,
        .head_size_k = HEAD_SIZE,
        .head_size_v = HEAD_SIZE,
        .format = KVK_FORMAT_FP32,
        .scale = 1.0F / sqrtf((float)HEAD_SIZE),
        .causal = true,
    };
    struct kvkeep_attend_item item = {
        .sequence = worker->sequence,
        .position = cached,
        .query_count = count,
        .queries = queries,
        .output = &result->output[0][0][0],
        .lse = &result->lse[0][0],
    };
    if (!failed(worker, kvkeep_attend(worker->session, &attend, &item, 1, &worker->error))) {
        worker->daemon_tokens[KVKEEP_TIER_DEVICE] += item.device_tokens;
        worker->daemon_tokens[KVKEEP_TIER_HOST] += item.host_tokens;
    }
}

/* What was computed goes into the slots; where they are a GPU's, as bytes over gRPC. */
static void write_rows(struct worker *worker, int layer, uint32_t count, uint64_t first,
                       float keys[][KV_WIDTH], float values[][KV_WIDTH])
{
    struct kvkeep_piece pieces[CHUNK_MAX * KV_HEADS * 2];
    uint32_t piece_count = 0;
    for (uint32_t i = 0; i < count * KV_HEADS * 2; i++) {
        uint32_t t = i / (KV_HEADS * 2);
        int head = (int)(i / 2 % KV_HEADS);
        const float *from = (i % 2 == 1 ? values : keys)[t] + head * HEAD_SIZE;
        float *row = slot_row(worker, first + t, layer, i % 2 == 1, head);
        if (row != NULL) {
            memcpy(row, from, HEAD_SIZE * sizeof(float));
        } else {
            pieces[piece_count++] = (struct kvkeep_piece){
                .block = (first + t) / BLOCK_TOKENS,
                .offset = row_offset(first + t, layer, i % 2 == 1, head) * sizeof(float),
                .data = from,
                .size_bytes = HEAD_SIZE * sizeof(float)};
        }
    }
    if (piece_count > 0 && worker->status == KVK_OK) {
        (void)failed(worker, kvkeep_write(worker->session, worker->sequence, pieces, piece_count,
                                          &worker->error));
    }
}

static void cached_attention(void *context, int layer, uint32_t count, uint64_t first,
                             float queries[][QUERY_WIDTH], float keys[][KV_WIDTH],
                             float values[][KV_WIDTH], struct partial *result)
{
    static struct partial chunk;
    struct worker *worker = context;
    partial_init(result, count);
    if (worker->status != KVK_OK) {
        return;
    }
    if (first > 0 && (worker->ask_daemon || slot_row(worker, 0, 0, false, 0) == NULL)) {
        attend_daemon(worker, layer, count, first, queries, result);
    } else {
        attend_slots(worker, layer, count, first, queries, result);
    }
    partial_init(&chunk, count);
    for (uint32_t t = 0; t < count; t++) {
        for (int h = 0; h < QUERY_HEADS; h++) {
            int at = h / (QUERY_HEADS / KV_HEADS) * HEAD_SIZE;
            for (uint32_t j = 0; j <= t; j++) {
                see(&chunk, t, h, queries[t] + h * HEAD_SIZE, keys[j] + at, values[j] + at);
            }
        }
    }
    merge(result, &chunk, count);
    /* A swapped-out sequence is only looked at: it has no slots to write to. */
    if (!worker->sequence->swapped_out) {
        write_rows(worker, layer, count, first, keys, values);
    }
}

/* Compute what the sequence has and is not sealed yet; logits of the last token computed. */
static bool compute_rest(struct worker *worker, const uint32_t *tokens, float logits[][VOCABULARY],
                         uint32_t *count)
{
    struct kvkeep_sequence *sequence = worker->sequence;
    *count = 0;
    while (sequence->sealed_tokens < sequence->length) {
        uint64_t first = sequence->sealed_tokens;
        uint64_t left = sequence->length - first;
        *count = left > CHUNK_MAX ? CHUNK_MAX : (uint32_t)left;
        forward(worker->model, tokens + first, *count, first, cached_attention, worker, logits);
        if (worker->status != KVK_OK ||
            failed(worker,
                   kvkeep_seal(worker->session, sequence, first + *count, true, &worker->error))) {
            return false;
        }
    }
    return true;
}

static bool append(struct worker *worker, const uint32_t *tokens, uint32_t count, bool draft)
{
    return !failed(worker, kvkeep_append(worker->session, worker->sequence, tokens, count, draft,
                                         &worker->error));
}

enum scenario {
    SCENARIO_PLAIN = 0, /* prefix hits alone */
    SCENARIO_SWAP,      /* preempted half-way */
    SCENARIO_BEAMS,     /* forks that go on with other tokens */
    SCENARIO_DRAFTS,    /* speculation, half of it wrong */
    SCENARIO_COUNT
};
static const char *const scenario_names[] = {"prefix hits", "swap out and in", "beams", "drafts"};

/* What is counted of the prompts of a scenario. */
enum count { PROMPTS, TOKENS, CACHED, IN_PARTS, TIES, MISMATCHES, COUNTS };
struct tally {
    uint64_t counts[COUNTS];
};

/* Hold what the daemon's path generated against the reference. */
static void compare(const struct answer *reference, const struct answer *got, uint32_t from,
                    struct tally *tally)
{
    for (uint32_t i = from; i < got->length; i++) {
        tally->counts[TOKENS]++;
        if (got->tokens[i] == reference->tokens[i]) {
            continue;
        }
        bool tie = reference->ties[i] || got->ties[i];
        tally->counts[tie ? TIES : MISMATCHES]++;
        return; /* what follows another token is another text */
    }
}

/* Preempt and come back. While it is out, the daemon attends in place: the same answer. */
static bool swap_round(struct worker *worker)
{
    struct kvkeep_sequence *sequence = worker->sequence;
    static struct partial in_place, brought_back;
    float queries[1][QUERY_WIDTH];
    for (int i = 0; i < QUERY_WIDTH; i++) {
        queries[0][i] = sinf((float)i);
    }
    struct kvkeep_swap out, in;
    if (failed(worker, kvkeep_swap_out(worker->session, sequence, &out, &worker->error))) {
        return false;
    }
    attend_daemon(worker, 0, 1, sequence->sealed_tokens, queries, &in_place);
    if (worker->status != KVK_OK ||
        failed(worker, kvkeep_swap_in(worker->session, sequence, &in, &worker->error))) {
        return false;
    }
    attend_daemon(worker, 0, 1, sequence->sealed_tokens, queries, &brought_back);
    for (int h = 0; h < QUERY_HEADS && worker->status == KVK_OK; h++) {
        if (fabsf(in_place.lse[0][h] - brought_back.lse[0][h]) > 1e-5F) {
            worker->status = kvk_fail(&worker->error, KVK_DATA_LOSS, KVK_CAUSE_NONE, "",
                                      "attention differs after a swap");
        }
    }
    return worker->status == KVK_OK;
}

/* Greedy from the sequence's state until `answer` is `length` long; a swap half-way if asked. */
static bool go_on(struct worker *worker, struct answer *answer, uint32_t length, bool swap)
{
    static float logits[CHUNK_MAX][VOCABULARY];
    uint32_t half = answer->length + (length - answer->length) / 2;
    for (;;) {
        uint32_t count;
        if (!compute_rest(worker, answer->tokens, logits, &count)) {
            return false;
        }
        if (answer->length >= length) {
            return true;
        }
        bool tie;
        uint32_t token = best_token(logits[count - 1], &tie);
        answer->tokens[answer->length] = token;
        answer->ties[answer->length++] = tie;
        if (swap && answer->length == half && !swap_round(worker)) {
            return false;
        }
        if (answer->length < length && !append(worker, &token, 1, false)) {
            return false;
        }
        if (answer->length >= length) {
            return true;
        }
    }
}

/* Fork into beams; each begins with another token, and goes on greedily. */
static bool beams(struct worker *worker, const struct answer *prompt, uint32_t length,
                  struct tally *tally)
{
    enum { BEAMS = 3 };
    static float logits[CHUNK_MAX][VOCABULARY];
    static struct answer reference, got;
    struct kvkeep_sequence *parent = worker->sequence;
    uint32_t count;
    if (!compute_rest(worker, prompt->tokens, logits, &count)) {
        return false;
    }
    struct kvkeep_sequence forks[BEAMS];
    if (failed(worker, kvkeep_fork(worker->session, parent, BEAMS, forks, &worker->error))) {
        return false;
    }
    for (uint32_t b = 0; b < BEAMS && worker->status == KVK_OK; b++) {
        reference = *prompt;
        reference.tokens[reference.length] = ranked_token(logits[count - 1], b);
        reference.ties[reference.length++] = false;
        got = reference;
        worker->sequence = &forks[b];
        if (append(worker, &got.tokens[got.length - 1], 1, false) &&
            go_on(worker, &got, length, false)) {
            plain_generate(worker->model, &reference, length);
            compare(&reference, &got, prompt->length + 1, tally);
        }
    }
    worker->sequence = parent;
    for (uint32_t b = 0; b < BEAMS; b++) {
        struct kvk_error error;
        enum kvk_status status = kvkeep_close(worker->session, &forks[b], &error);
        if (status != KVK_OK && worker->status == KVK_OK) {
            worker->error = error;
            worker->status = status;
        }
    }
    return worker->status == KVK_OK;
}

/* Speculate four tokens at a time: two right ones (from the reference), two wrong ones. */
static bool drafts(struct worker *worker, struct answer *answer, const struct answer *reference,
                   uint32_t length)
{
    enum { DRAFTS = 4 };
    static float logits[CHUNK_MAX][VOCABULARY];
    uint32_t count;
    if (!compute_rest(worker, answer->tokens, logits, &count)) {
        return false;
    }
    bool tie;
    uint32_t next = best_token(logits[count - 1], &tie);
    while (answer->length < length) {
        uint32_t draft[DRAFTS];
        for (uint32_t i = 0; i < DRAFTS; i++) {
            uint32_t at = answer->length + i;
            uint32_t right = at < length ? reference->tokens[at] : 0;
            draft[i] = i == 0 ? next : i < 2 ? right : (right + 1 + i) % VOCABULARY;
            answer->tokens[at] = draft[i];
        }
        if (!append(worker, draft, DRAFTS, true) ||
            !compute_rest(worker, answer->tokens, logits, &count)) {
            return false;
        }
        /* The first draft is what the model said; each next one stands if the model says it too. */
        uint32_t accepted = 1;
        answer->ties[answer->length] = tie;
        while (accepted < DRAFTS && answer->length + accepted < length &&
               best_token(logits[count - DRAFTS + accepted - 1], &tie) == draft[accepted]) {
            answer->ties[answer->length + accepted] = tie;
            accepted++;
        }
        next = best_token(logits[count - DRAFTS + accepted - 1], &tie);
        if (failed(worker,
                   kvkeep_commit(worker->session, worker->sequence, accepted, &worker->error))) {
            return false;
        }
        answer->length += accepted;
    }
    return true;
}

/* One prompt by both paths. */
static bool run_prompt(struct worker *worker, enum scenario scenario, const uint32_t *tokens,
                       uint32_t count, uint32_t length, struct tally *tally)
{
    static struct answer reference, got;
    memset(&reference, 0, sizeof reference);
    memcpy(reference.tokens, tokens, count * sizeof tokens[0]);
    reference.length = count;
    got = reference;
    struct kvkeep_prompt prompt = {.tokens = tokens, .token_count = count};
    struct kvkeep_open_options options = {.leave_last = true, .growth_tokens = length - count};
    struct kvkeep_sequence sequence;
    if (failed(worker, kvkeep_sequence_open(worker->session, &worker->space, &prompt, &options,
                                            &sequence, &worker->error))) {
        return false;
    }
    worker->sequence = &sequence;
    tally->counts[PROMPTS]++;
    tally->counts[CACHED] += sequence.cached_tokens;
    tally->counts[IN_PARTS] += sequence.partial_tokens;
    if (scenario == SCENARIO_BEAMS) {
        (void)beams(worker, &got, length, tally);
    } else {
        plain_generate(worker->model, &reference, length);
        bool done = scenario == SCENARIO_DRAFTS
                        ? drafts(worker, &got, &reference, length)
                        : go_on(worker, &got, length, scenario == SCENARIO_SWAP);
        if (done) {
            compare(&reference, &got, count, tally);
        }
    }
    worker->sequence = NULL;
    struct kvk_error error;
    enum kvk_status status = kvkeep_close(worker->session, &sequence, &error);
    if (status != KVK_OK && worker->status == KVK_OK) {
        worker->error = error;
        worker->status = status;
    }
    return worker->status == KVK_OK;
}

/* ================= the program ================= */

struct settings {
    const char *target;
    enum kvk_format disk_format; /* NONE: as in memory */
    uint64_t prompts, seed;
    bool partial; /* hits may end within a block */
};

static bool worker_open(struct worker *worker, const struct settings *settings)
{
    static const struct kvk_geometry geometry = {
        .layers = LAYERS,
        .kv_heads = KV_HEADS,
        .head_size_k = HEAD_SIZE,
        .head_size_v = HEAD_SIZE,
        .block_tokens = BLOCK_TOKENS,
        .format_k = KVK_FORMAT_FP32,
        .format_v = KVK_FORMAT_FP32,
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 1,
        .pipeline_shards = 1,
    };
    char revision[32];
    (void)snprintf(revision, sizeof revision, "seed %llu", (unsigned long long)settings->seed);
    struct kvkeep_space_options space = {
        .identity = {.model = "tiny-llama",
                     .revision = revision,
                     .position_encoding = "rope base=10000"},
        .block_tokens = BLOCK_TOKENS,
        .groups = &geometry,
        .group_count = 1,
        .disk_formats = &settings->disk_format,
        .flops_per_token = 2.0 * sizeof(struct layer) / sizeof(float) * LAYERS,
        .flops_per_token_position = 4.0 * LAYERS * QUERY_WIDTH,
        .partial_reuse = settings->partial ? KVKEEP_PARTIAL_REUSE_ON : KVKEEP_PARTIAL_REUSE_OFF,
    };
    struct kvkeep_options options = {.target = settings->target, .token = getenv("KVKEEP_TOKEN")};
    struct kvkeep_session_options session = {.name = "tiny_llama"};
    if (failed(worker, kvkeep_connect(&options, &worker->client, &worker->error)) ||
        failed(worker,
               kvkeep_session_open(worker->client, &session, &worker->session, &worker->error))) {
        return false;
    }
    return !failed(worker,
                   kvkeep_space_open(worker->client, &space, &worker->space, &worker->error));
}

static void worker_close(struct worker *worker)
{
    for (int tier = 0; tier < 3; tier++) {
        kvkeep_unmap(&worker->maps[tier]);
    }
    kvkeep_session_close(worker->session);
    kvkeep_disconnect(worker->client);
}

/* Prompts as people send them: one of a few system prompts, then a text of their own. */
static uint32_t prompt_make(struct kvk_random *random, uint32_t *tokens)
{
    struct kvk_random system;
    kvk_random_init(&system, kvk_random_below(random, 6));
    uint32_t shared = 16 + (uint32_t)kvk_random_below(&system, 120);
    uint32_t own = 1 + (uint32_t)kvk_random_below(random, 60);
    for (uint32_t i = 0; i < shared + own; i++) {
        tokens[i] = (uint32_t)kvk_random_below(i < shared ? &system : random, VOCABULARY);
    }
    return shared + own;
}

static void print_tally(const char *name, const struct tally *tally)
{
    (void)printf("  %-18s", name);
    for (int c = 0; c < COUNTS; c++) {
        (void)printf(" %10llu", (unsigned long long)tally->counts[c]);
    }
    (void)printf("\n");
}

static int report(const struct worker *worker, const struct settings *settings,
                  const struct tally *tallies)
{
    struct tally all = {{0}};
    (void)printf("\n  %-18s %10s %10s %10s %10s %10s %10s\n", "two-path check", "prompts", "tokens",
                 "cached", "in parts", "near ties", "mismatches");
    for (int s = 0; s < SCENARIO_COUNT; s++) {
        print_tally(scenario_names[s], &tallies[s]);
        for (int c = 0; c < COUNTS; c++) {
            all.counts[c] += tallies[s].counts[c];
        }
    }
    print_tally("all", &all);
    (void)printf("  tokens attended by the daemon: %llu on the device, %llu on the host\n",
                 (unsigned long long)worker->daemon_tokens[KVKEEP_TIER_DEVICE],
                 (unsigned long long)worker->daemon_tokens[KVKEEP_TIER_HOST]);
    if (worker->status != KVK_OK) {
        (void)fprintf(stderr, "tiny_llama: %s (%s)\n", worker->error.text,
                      kvk_cause_name(worker->error.cause));
        return 1;
    }
    if (all.counts[MISMATCHES] > 0 || all.counts[CACHED] == 0 ||
        settings->partial != (all.counts[IN_PARTS] > 0)) {
        (void)fprintf(stderr, "tiny_llama: the two paths do not agree, or nothing was cached\n");
        return 1;
    }
    return 0;
}

static bool settings_parse(struct settings *settings, int argc, char **argv)
{
    static const struct option options[] = {{"connect", required_argument, NULL, 'c'},
                                            {"prompts", required_argument, NULL, 'n'},
                                            {"seed", required_argument, NULL, 's'},
                                            {"partial", no_argument, NULL, 'p'},
                                            {"disk-format", required_argument, NULL, 'd'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    for (;;) {
        int option = getopt_long(argc, argv, "c:n:s:pd:h", options, NULL);
        char *end = NULL;
        if (option == -1) {
            return optind == argc;
        } else if (option == 'c') {
            settings->target = optarg;
        } else if (option == 'n') {
            settings->prompts = strtoull(optarg, &end, 10);
        } else if (option == 's') {
            settings->seed = strtoull(optarg, &end, 10);
        } else if (option == 'p') {
            settings->partial = true;
        } else if (option == 'd') {
            settings->disk_format = KVK_FORMAT_FP8_E4M3;
            while (strcmp(kvk_format_name(settings->disk_format), optarg) != 0) {
                if (settings->disk_format++ == KVK_FORMAT_MAX) {
                    return false;
                }
            }
            tie_margin = settings->disk_format == KVK_FORMAT_FP8_E4M3 ? 0.4F : 0.1F;
        } else {
            return false;
        }
        if (end != NULL && *end != '\0') {
            return false;
        }
    }
}

int main(int argc, char **argv)
{
    struct settings settings = {.prompts = 240, .seed = 1};
    if (!settings_parse(&settings, argc, argv)) {
        (void)fprintf(
            stderr, "usage: tiny_llama [--connect unix:PATH] [--prompts N] [--seed N] [--partial]\n"
                    "                  [--disk-format int8_channel|int8_32|fp8_e4m3]\n"
                    "Generates every prompt with and without kvkeepd and compares the tokens.\n"
                    "--partial: hits may end within a block.\n"
                    "Exit code: 0 they agree, 1 they do not or the daemon failed, 2 usage.\n");
        return 2;
    }
    struct worker worker = {.model = model_create(settings.seed)};
    struct tally tallies[SCENARIO_COUNT] = {{{0}}};
    struct kvk_random random;
    kvk_random_init(&random, settings.seed);
    bool going = worker.model != NULL && worker_open(&worker, &settings);
    for (uint64_t i = 0; i < settings.prompts && going; i++) {
        uint32_t tokens[LENGTH_MAX];
        uint32_t count = prompt_make(&random, tokens);
        uint32_t length = count + 8 + (uint32_t)kvk_random_below(&random, 24);
        enum scenario scenario = (enum scenario)(i % SCENARIO_COUNT);
        worker.ask_daemon = i / SCENARIO_COUNT % 2 == 1;
        going = run_prompt(&worker, scenario, tokens, count, length, &tallies[scenario]);
    }
    int code = report(&worker, &settings, tallies);
    worker_close(&worker);
    free((void *)(uintptr_t)worker.model);
    return code;
}
