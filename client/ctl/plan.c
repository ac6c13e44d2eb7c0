/*
 * kvkeepctl plan: what can a deployment hold? From a model's config.json or flags, and a budget per
 * rank. Needs no daemon.
 */
#include "client/ctl/plan.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "client/ctl/ctl.h"

#define LENGTHS_MAX 1024
#define POINTS_MAX 24
/* Of the daemon, on the host: a known block, and its tokens. */
#define METADATA_BYTES 160
#define METADATA_TOKEN_BYTES 4

static const struct ctl_command command = {
    .name = "plan",
    .usage = "  CONFIG                 a model's config.json; or, in its place or over it:\n"
             "  --layers N --kv-heads N --head-size N [--window N [--sinks N]]\n"
             "  --format NAME          of values: fp32, bf16, fp16, fp8, int8, int4, int4z, or\n"
             "                         the daemon's fp8_e4m3, int8_channel, int8_32; or\n"
             "  --value-bits N [--scale-values N --scale-bits N [--zero-bits N]]\n"
             "  --tensor N, --pipeline N    ranks\n"
             "  --block-tokens N       16\n"
             "  --encoder-tokens N     of each sequence, for cross-attention\n"
             "  --budget SIZE          for KV on each rank; or\n"
             "  --device-memory SIZE --weights SIZE [--reserve SIZE] [--workspace SIZE]\n"
             "  --lengths N,N…         sequences to be held, in tokens\n"
             "  --sequences N          so many (of each length; or to share the budget)\n"
             "  --max-length N         what static allocation would give each\n"
             "  --prompt N --output N [--prefix-hit 0…1] [--preempt]    what runs at once\n"
             "  --plot FILE.svg        sequences at once against context\n"
             "or, of a running daemon:\n"
             "  --space ID|MODEL [--tenant NAME] [--budget SIZE] [--prompt N --output N]\n"
             "                         what was planned for a live space against what it takes\n",
};

struct plan {
    struct kvk_capacity capacity;
    struct plan_given given;
    struct plan_notes notes;
    char model[64];
    const char *config, *plot, *format;
    const char *space, *tenant; /* of a running daemon; NULL: none is asked */
    uint32_t window, sinks;
    uint64_t budget, device_memory, weights, reserve, workspace;
    bool budget_given;
    uint64_t lengths[LENGTHS_MAX];
    uint32_t length_count;
    uint64_t sequences, max_length;
    uint64_t prompt, output;
    double prefix_hit;
    bool preempt;
    struct plan_point points[POINTS_MAX];
    uint32_t point_count;
};

/* ---- Options ---- */

enum {
    OPTION_LAYERS = 256,
    OPTION_KV_HEADS,
    OPTION_HEAD_SIZE,
    OPTION_WINDOW,
    OPTION_SINKS,
    OPTION_FORMAT,
    OPTION_VALUE_BITS,
    OPTION_SCALE_BITS,
    OPTION_SCALE_VALUES,
    OPTION_ZERO_BITS,
    OPTION_TENSOR,
    OPTION_PIPELINE,
    OPTION_BLOCK_TOKENS,
    OPTION_ENCODER_TOKENS,
    OPTION_BUDGET,
    OPTION_DEVICE_MEMORY,
    OPTION_WEIGHTS,
    OPTION_RESERVE,
    OPTION_WORKSPACE,
    OPTION_LENGTHS,
    OPTION_SEQUENCES,
    OPTION_MAX_LENGTH,
    OPTION_PROMPT,
    OPTION_OUTPUT,
    OPTION_PREFIX_HIT,
    OPTION_PREEMPT,
    OPTION_PLOT,
    OPTION_SPACE,
    OPTION_TENANT,
};

static const struct option names[] = {
    {"layers", required_argument, NULL, OPTION_LAYERS},
    {"kv-heads", required_argument, NULL, OPTION_KV_HEADS},
    {"head-size", required_argument, NULL, OPTION_HEAD_SIZE},
    {"window", required_argument, NULL, OPTION_WINDOW},
    {"sinks", required_argument, NULL, OPTION_SINKS},
    {"format", required_argument, NULL, OPTION_FORMAT},
    {"value-bits", required_argument, NULL, OPTION_VALUE_BITS},
    {"scale-bits", required_argument, NULL, OPTION_SCALE_BITS},
    {"scale-values", required_argument, NULL, OPTION_SCALE_VALUES},
    {"zero-bits", required_argument, NULL, OPTION_ZERO_BITS},
    {"tensor", required_argument, NULL, OPTION_TENSOR},
    {"pipeline", required_argument, NULL, OPTION_PIPELINE},
    {"block-tokens", required_argument, NULL, OPTION_BLOCK_TOKENS},
    {"encoder-tokens", required_argument, NULL, OPTION_ENCODER_TOKENS},
    {"budget", required_argument, NULL, OPTION_BUDGET},
    {"device-memory", required_argument, NULL, OPTION_DEVICE_MEMORY},
    {"weights", required_argument, NULL, OPTION_WEIGHTS},
    {"reserve", required_argument, NULL, OPTION_RESERVE},
    {"workspace", required_argument, NULL, OPTION_WORKSPACE},
    {"lengths", required_argument, NULL, OPTION_LENGTHS},
    {"sequences", required_argument, NULL, OPTION_SEQUENCES},
    {"max-length", required_argument, NULL, OPTION_MAX_LENGTH},
    {"prompt", required_argument, NULL, OPTION_PROMPT},
    {"output", required_argument, NULL, OPTION_OUTPUT},
    {"prefix-hit", required_argument, NULL, OPTION_PREFIX_HIT},
    {"preempt", no_argument, NULL, OPTION_PREEMPT},
    {"plot", required_argument, NULL, OPTION_PLOT},
    {"space", required_argument, NULL, OPTION_SPACE},
    {"tenant", required_argument, NULL, OPTION_TENANT},
    {NULL, 0, NULL, 0},
};

static bool parse_small(const char *text, uint32_t *value)
{
    uint64_t count;
    if (!ctl_parse_count(text, &count) || count > UINT32_MAX) {
        return false;
    }
    *value = (uint32_t)count;
    return true;
}

static bool parse_tokens(const char *text, uint64_t *value)
{
    return ctl_parse_count(text, value) && *value <= KVK_CAPACITY_TOKENS_MAX;
}

static bool parse_size(const char *text, uint64_t *size_bytes)
{
    static const struct kvk_option_field field = {
        .name = "size", .kind = KVK_OPTION_SIZE, .width = 8, .maximum = UINT64_C(1) << 60};
    char reason[160];
    return kvk_options_read_value(&field, size_bytes, text, reason, sizeof(reason));
}

static bool parse_lengths(struct plan *plan, const char *text)
{
    char *copy = strdup(text);
    char *rest = copy;
    bool good = copy != NULL;
    for (char *word = good ? strsep(&rest, ",") : NULL; word != NULL && good;
         word = strsep(&rest, ",")) {
        good = plan->length_count < LENGTHS_MAX &&
               parse_tokens(word, &plan->lengths[plan->length_count++]);
    }
    free(copy);
    return good;
}

static bool parse_share(const char *text, double *share)
{
    char *end;
    *share = strtod(text, &end);
    return end != text && *end == '\0' && *share >= 0 && *share <= 1;
}

static bool take_shape(struct plan *plan, int option, const char *value)
{
    switch (option) {
    case OPTION_LAYERS:
        return parse_small(value, &plan->given.layers);
    case OPTION_KV_HEADS:
        return parse_small(value, &plan->given.kv_heads);
    case OPTION_HEAD_SIZE:
        return parse_small(value, &plan->given.head_size);
    case OPTION_WINDOW:
        return parse_small(value, &plan->window);
    case OPTION_SINKS:
        return parse_small(value, &plan->sinks);
    case OPTION_FORMAT:
        plan->format = value;
        return kvk_capacity_format_named(value, &plan->capacity.format);
    case OPTION_VALUE_BITS:
        plan->capacity.format.stored = KVK_FORMAT_NONE;
        return parse_small(value, &plan->capacity.format.value_bits);
    case OPTION_SCALE_BITS:
        return parse_small(value, &plan->capacity.format.scale_bits);
    case OPTION_SCALE_VALUES:
        return parse_small(value, &plan->capacity.format.scale_values);
    case OPTION_ZERO_BITS:
        return parse_small(value, &plan->capacity.format.zero_bits);
    case OPTION_TENSOR:
        return parse_small(value, &plan->capacity.tensor_ranks);
    case OPTION_PIPELINE:
        return parse_small(value, &plan->capacity.pipeline_ranks);
    case OPTION_BLOCK_TOKENS:
        return parse_small(value, &plan->capacity.block_tokens);
    default:
        return parse_tokens(value, &plan->capacity.encoder_tokens);
    }
}

static bool take_load(struct plan *plan, int option, const char *value)
{
    switch (option) {
    case OPTION_BUDGET:
        plan->budget_given = true;
        return parse_size(value, &plan->budget);
    case OPTION_DEVICE_MEMORY:
        return parse_size(value, &plan->device_memory);
    case OPTION_WEIGHTS:
        return parse_size(value, &plan->weights);
    case OPTION_RESERVE:
        return parse_size(value, &plan->reserve);
    case OPTION_WORKSPACE:
        return parse_size(value, &plan->workspace);
    case OPTION_LENGTHS:
        return parse_lengths(plan, value);
    case OPTION_SEQUENCES:
        return parse_tokens(value, &plan->sequences) && plan->sequences <= 100000000;
    case OPTION_MAX_LENGTH:
        return parse_tokens(value, &plan->max_length);
    case OPTION_PROMPT:
        return parse_tokens(value, &plan->prompt);
    case OPTION_OUTPUT:
        return parse_tokens(value, &plan->output);
    case OPTION_PREFIX_HIT:
        return parse_share(value, &plan->prefix_hit);
    case OPTION_PREEMPT:
        plan->preempt = true;
        return true;
    case OPTION_SPACE:
        plan->space = value;
        return true;
    case OPTION_TENANT:
        plan->tenant = value;
        return true;
    default:
        plan->plot = value;
        return true;
    }
}

static bool options_take(struct plan *plan, int argc, char **argv)
{
    int option;
    int at = 0;
    while ((option = getopt_long(argc, argv, "", names, &at)) != -1) {
        if (option == '?') {
            return false;
        }
        bool good = option <= OPTION_ENCODER_TOKENS ? take_shape(plan, option, optarg)
                                                    : take_load(plan, option, optarg);
        if (!good) {
            (void)fprintf(
                stderr,
                "kvkeepctl plan: --%s: \"%s\" is none that it takes; sizes have a unit (40 GiB)\n",
                names[at].name, optarg);
            return false;
        }
    }
    if (optind + 1 < argc) {
        (void)fprintf(stderr, "kvkeepctl plan: one config.json\n");
        return false;
    }
    plan->config = optind < argc ? argv[optind] : NULL;
    return true;
}

/* ---- The model and the budget ---- */

static bool model_from_flags(struct plan *plan)
{
    const struct plan_given *given = &plan->given;
    if (given->layers == 0 || given->kv_heads == 0 || given->head_size == 0) {
        (void)fprintf(stderr, "kvkeepctl plan: a config.json, or --layers, --kv-heads and "
                              "--head-size\n");
        return false;
    }
    plan->capacity.groups[0] = (struct kvk_capacity_layers){.layers = given->layers,
                                                            .kv_heads = given->kv_heads,
                                                            .head_size_k = given->head_size,
                                                            .head_size_v = given->head_size};
    plan->capacity.group_count = 1;
    if (plan->capacity.encoder_tokens > 0) {
        plan->capacity.groups[1] = plan->capacity.groups[0];
        plan->capacity.groups[1].cross = true;
        plan->capacity.group_count = 2;
    }
    (void)snprintf(plan->model, sizeof(plan->model), "given by flags");
    return true;
}

static bool model_find(struct plan *plan)
{
    char why[PLAN_NOTE_SIZE] = "";
    if (plan->config == NULL) {
        if (!model_from_flags(plan)) {
            return false;
        }
    } else if (!plan_config_read(plan->config, &plan->given, &plan->capacity, plan->model,
                                 &plan->notes, why)) {
        (void)fprintf(stderr, "kvkeepctl plan: %s\n", why);
        return false;
    }
    if (plan->window > 0) {
        plan->capacity.groups[0].window = plan->window;
    }
    if (plan->sinks > 0) {
        for (uint32_t i = 0; i < plan->capacity.group_count; i++) {
            plan->capacity.groups[i].sinks = plan->capacity.groups[i].window > 0 ? plan->sinks : 0;
        }
    }
    struct kvk_error error;
    if (kvk_capacity_check(&plan->capacity, &error) != KVK_OK) {
        (void)fprintf(stderr, "kvkeepctl plan: %s\n", error.text);
        return false;
    }
    return true;
}

static bool budget_find(struct plan *plan)
{
    if (plan->device_memory > 0) {
        uint64_t taken = plan->weights + plan->reserve + plan->workspace;
        if (plan->budget_given) {
            (void)fprintf(stderr, "kvkeepctl plan: --budget or --device-memory, not both\n");
            return false;
        }
        if (taken >= plan->device_memory) {
            (void)fprintf(stderr,
                          "kvkeepctl plan: weights, reserve and workspace of %s leave nothing of "
                          "%s\n",
                          ctl_bytes(taken), ctl_bytes(plan->device_memory));
            return false;
        }
        plan->budget = plan->device_memory - taken;
        plan->budget_given = true;
    } else if (plan->weights > 0 || plan->reserve > 0 || plan->workspace > 0) {
        (void)fprintf(stderr, "kvkeepctl plan: of what --device-memory?\n");
        return false;
    }
    return true;
}

/* Sequences at once at growing contexts, prompt to output as asked (all prompt where not). */
static void points_find(struct plan *plan)
{
    if (!plan->budget_given) {
        return;
    }
    double outputs = plan->prompt + plan->output > 0
                         ? (double)plan->output / (double)(plan->prompt + plan->output)
                         : 0;
    for (uint64_t context = 512; plan->point_count < POINTS_MAX; context *= 2) {
        uint64_t output = (uint64_t)((double)context * outputs);
        struct kvk_capacity_load load = {
            .prompt_tokens = context - output, .output_tokens = output, .preempt = plan->preempt};
        load.shared_tokens = (uint64_t)((double)load.prompt_tokens * plan->prefix_hit);
        uint64_t count = kvk_capacity_sequences(&plan->capacity, &load, plan->budget);
        if (count == 0 || (context > 1048576 && plan->point_count > 0)) {
            break;
        }
        plan->points[plan->point_count++] =
            (struct plan_point){.context_tokens = context, .sequences = count};
    }
}

/* ---- Figures that both answers show ---- */

struct held {
    uint64_t sequences;
    uint64_t used_slots, paged_slots, static_slots; /* tokens, and room for them */
    uint64_t bytes;                                 /* all ranks of one pipeline and tensor place:
                                                       the fullest rank's */
};

static struct held held_find(const struct plan *plan)
{
    const struct kvk_capacity *capacity = &plan->capacity;
    uint64_t times = plan->sequences > 0 ? plan->sequences : 1;
    struct held held = {.sequences = times * plan->length_count};
    for (uint32_t i = 0; i < plan->length_count; i++) {
        uint64_t tokens = plan->lengths[i];
        uint64_t blocks = (tokens + capacity->block_tokens - 1) / capacity->block_tokens;
        held.used_slots += tokens * times;
        held.paged_slots += blocks * capacity->block_tokens * times;
        held.static_slots += plan->max_length * times;
        held.bytes += kvk_capacity_sequence_bytes(capacity, tokens) * times;
    }
    return held;
}

static struct kvk_capacity_load load_of(const struct plan *plan)
{
    struct kvk_capacity_load load = {
        .prompt_tokens = plan->prompt, .output_tokens = plan->output, .preempt = plan->preempt};
    load.shared_tokens = (uint64_t)((double)plan->prompt * plan->prefix_hit);
    return load;
}

static uint64_t blocks_of_budget(const struct plan *plan)
{
    uint64_t block_bytes = kvk_capacity_block_bytes(&plan->capacity);
    return plan->budget / (block_bytes == 0 ? 1 : block_bytes);
}

static uint64_t metadata_bytes(const struct plan *plan, uint64_t blocks)
{
    return blocks * (METADATA_BYTES + (uint64_t)METADATA_TOKEN_BYTES * plan->capacity.block_tokens);
}

static const char *kind_of(const struct kvk_capacity_layers *layers)
{
    return layers->cross        ? "cross"
           : layers->latent     ? "latent"
           : layers->window > 0 ? "window"
                                : "full";
}

/* The length that the layers' lines are about. */
static uint64_t length_shown(const struct plan *plan)
{
    uint64_t longest = plan->prompt + plan->output;
    for (uint32_t i = 0; i < plan->length_count; i++) {
        longest = plan->lengths[i] > longest ? plan->lengths[i] : longest;
    }
    return longest > 0 ? longest : 4096;
}

/* ---- JSON ---- */

static json_t *integer(uint64_t value)
{
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

static void put(json_t *object, const char *name, uint64_t value)
{
    (void)json_object_set_new(object, name, integer(value));
}

static json_t *layers_json(const struct plan *plan)
{
    json_t *list = json_array();
    uint64_t tokens = length_shown(plan);
    for (uint32_t i = 0; i < plan->capacity.group_count; i++) {
        const struct kvk_capacity_layers *layers = &plan->capacity.groups[i];
        uint64_t kept = kvk_capacity_kept_tokens(&plan->capacity, i, tokens);
        uint64_t each = kvk_capacity_layer_bytes(&plan->capacity, i);
        json_t *row = json_object();
        (void)json_object_set_new(row, "kind", json_string(kind_of(layers)));
        put(row, "layers", layers->layers);
        put(row, "kv_heads", layers->kv_heads);
        put(row, "head_size_k", layers->head_size_k);
        put(row, "head_size_v", layers->head_size_v);
        put(row, "window", layers->window);
        put(row, "sinks", layers->sinks);
        put(row, "bytes_per_token_per_layer", each);
        put(row, "tokens", kept);
        put(row, "bytes", kept * each * layers->layers);
        (void)json_array_append_new(list, row);
    }
    return list;
}

static json_t *sequences_json(const struct plan *plan)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < plan->length_count; i++) {
        uint64_t tokens = plan->lengths[i];
        uint64_t block = plan->capacity.block_tokens;
        uint64_t blocks = (tokens + block - 1) / block;
        json_t *row = json_object();
        put(row, "tokens", tokens);
        put(row, "blocks", blocks);
        put(row, "unused_slots", blocks * block - tokens);
        put(row, "bytes_per_rank", kvk_capacity_sequence_bytes(&plan->capacity, tokens));
        (void)json_array_append_new(list, row);
    }
    return list;
}

static void budget_json(const struct plan *plan, json_t *object)
{
    uint64_t blocks = blocks_of_budget(plan);
    uint64_t most = kvk_capacity_tokens_max(&plan->capacity, plan->budget);
    put(object, "budget_bytes", plan->budget);
    put(object, "blocks", blocks);
    put(object, "max_tokens", most == UINT64_MAX ? KVK_CAPACITY_TOKENS_MAX : most);
    put(object, "metadata_host_bytes", metadata_bytes(plan, blocks));
    put(object, "workspace_bytes", plan->workspace);
    if (plan->sequences > 0 && plan->length_count == 0) {
        put(object, "tokens_per_sequence",
            kvk_capacity_tokens_max(&plan->capacity, plan->budget / plan->sequences));
    }
    if (plan->prompt + plan->output > 0) {
        struct kvk_capacity_load load = load_of(plan);
        put(object, "sequences_at_once",
            kvk_capacity_sequences(&plan->capacity, &load, plan->budget));
        put(object, "prefix_shared_tokens", load.shared_tokens);
    }
    json_t *table = json_array();
    for (uint32_t i = 0; i < plan->point_count; i++) {
        json_t *row = json_object();
        put(row, "context_tokens", plan->points[i].context_tokens);
        put(row, "sequences", plan->points[i].sequences);
        (void)json_array_append_new(table, row);
    }
    (void)json_object_set_new(object, "table", table);
}

/* What other sizes of blocks would leave unused at these lengths. */
static json_t *block_sizes_json(const struct plan *plan)
{
    json_t *list = json_array();
    for (uint64_t size = 1; size <= 256; size *= 4) {
        uint64_t unused = 0;
        for (uint32_t i = 0; i < plan->length_count; i++) {
            unused += (size - plan->lengths[i] % size) % size;
        }
        json_t *row = json_object();
        put(row, "block_tokens", size);
        put(row, "unused_slots", unused);
        (void)json_array_append_new(list, row);
    }
    return list;
}

static void answer_json(const struct plan *plan)
{
    const struct kvk_capacity *capacity = &plan->capacity;
    json_t *object = json_object();
    (void)json_object_set_new(object, "model", json_string(plan->model));
    put(object, "bytes_per_token", kvk_capacity_token_bytes(capacity));
    put(object, "bytes_per_token_per_rank", kvk_capacity_token_rank_bytes(capacity));
    put(object, "block_tokens", capacity->block_tokens);
    (void)json_object_set_new(object, "bytes_per_value",
                              json_real(kvk_capacity_value_bytes(capacity)));
    put(object, "block_bytes_per_rank", kvk_capacity_block_bytes(capacity));
    put(object, "cross_bytes", kvk_capacity_cross_bytes(capacity));
    (void)json_object_set_new(object, "layers", layers_json(plan));
    struct held held = held_find(plan);
    put(object, "unused_slots", held.paged_slots - held.used_slots);
    if (plan->length_count > 0) {
        (void)json_object_set_new(object, "sequences", sequences_json(plan));
        (void)json_object_set_new(object, "block_sizes", block_sizes_json(plan));
        put(object, "total_bytes_per_rank", held.bytes);
        put(object, "paged_slots", held.paged_slots);
        if (plan->max_length > 0) {
            put(object, "static_slots", held.static_slots);
        }
    }
    if (plan->budget_given) {
        budget_json(plan, object);
    }
    json_t *left_out = json_array();
    for (uint32_t i = 0; i < plan->notes.count; i++) {
        (void)json_array_append_new(left_out, json_string(plan->notes.text[i]));
    }
    (void)json_object_set_new(object, "left_out", left_out);
    ctl_json_print(object);
}

/* ---- For people ---- */

static void layers_print(const struct plan *plan)
{
    static const char *const titles[] = {"-layers",       "count",       "KV heads", "head size",
                                         "B/token/layer", "tokens kept", "bytes"};
    struct ctl_table table;
    uint64_t tokens = length_shown(plan);
    (void)printf("at %s tokens:\n", ctl_count(tokens));
    ctl_table_init(&table, 7, titles);
    for (uint32_t i = 0; i < plan->capacity.group_count; i++) {
        const struct kvk_capacity_layers *layers = &plan->capacity.groups[i];
        uint64_t kept = kvk_capacity_kept_tokens(&plan->capacity, i, tokens);
        uint64_t each = kvk_capacity_layer_bytes(&plan->capacity, i);
        ctl_table_row(&table, "%s\t%u\t%u\t%u\t%s\t%s\t%s", kind_of(layers), layers->layers,
                      layers->kv_heads, layers->head_size_k, ctl_count(each), ctl_count(kept),
                      ctl_bytes(kept * each * layers->layers));
    }
    ctl_table_print(&table);
}

static void lengths_print(const struct plan *plan)
{
    struct held held = held_find(plan);
    uint64_t unused = held.paged_slots - held.used_slots;
    (void)printf("\n%s sequences: %s per rank, %s of %s slots unused (%.1f %%)\n",
                 ctl_count(held.sequences), ctl_bytes(held.bytes), ctl_count(unused),
                 ctl_count(held.paged_slots),
                 held.paged_slots > 0 ? 100.0 * (double)unused / (double)held.paged_slots : 0.0);
    if (plan->max_length > 0) {
        (void)printf("allocated at %s each: %s slots; paged: %s\n", ctl_count(plan->max_length),
                     ctl_count(held.static_slots), ctl_count(held.paged_slots));
    }
    (void)printf("slots unused by block size:");
    for (uint64_t size = 1; size <= 256; size *= 4) {
        uint64_t waste = 0;
        for (uint32_t i = 0; i < plan->length_count; i++) {
            waste += (size - plan->lengths[i] % size) % size;
        }
        (void)printf("  %llu: %s", (unsigned long long)size,
                     ctl_count(waste * (plan->sequences > 0 ? plan->sequences : 1)));
    }
    (void)printf("\n");
}

/* A bar for each doubling of the context; lengths are logarithms, so that all can be seen. */
static void chart_print(const struct plan *plan)
{
    if (plan->point_count == 0) {
        return;
    }
    double widest = log2(1 + (double)plan->points[0].sequences);
    (void)printf("\n%12s  sequences at once (bars are logarithms)\n", "context");
    for (uint32_t i = 0; i < plan->point_count; i++) {
        double width = 44 * log2(1 + (double)plan->points[i].sequences) / widest;
        (void)printf("%12s  ", ctl_count(plan->points[i].context_tokens));
        for (int column = 0; column < (int)width; column++) {
            (void)printf("█");
        }
        (void)printf(" %s\n", ctl_count(plan->points[i].sequences));
    }
}

static void budget_print(const struct plan *plan)
{
    uint64_t blocks = blocks_of_budget(plan);
    uint64_t most = kvk_capacity_tokens_max(&plan->capacity, plan->budget);
    (void)printf("\nbudget for KV per rank %s: %s blocks of %u tokens (%s each)\n",
                 ctl_bytes(plan->budget), ctl_count(blocks), plan->capacity.block_tokens,
                 ctl_bytes(kvk_capacity_block_bytes(&plan->capacity)));
    if (plan->device_memory > 0) {
        (void)printf("  = device memory %s - weights %s - reserve %s - workspace %s\n",
                     ctl_bytes(plan->device_memory), ctl_bytes(plan->weights),
                     ctl_bytes(plan->reserve), ctl_bytes(plan->workspace));
    }
    (void)printf("  longest sequence alone: %s tokens\n",
                 most == UINT64_MAX ? "any number of" : ctl_count(most));
    if (plan->sequences > 0 && plan->length_count == 0) {
        (void)printf(
            "  %s sequences share it: %s tokens each\n", ctl_count(plan->sequences),
            ctl_count(kvk_capacity_tokens_max(&plan->capacity, plan->budget / plan->sequences)));
    }
    if (plan->prompt + plan->output > 0) {
        struct kvk_capacity_load load = load_of(plan);
        (void)printf("  %s at once with prompts of %s (%s of it shared) and outputs of %s, %s\n",
                     ctl_count(kvk_capacity_sequences(&plan->capacity, &load, plan->budget)),
                     ctl_count(load.prompt_tokens), ctl_count(load.shared_tokens),
                     ctl_count(load.output_tokens),
                     plan->preempt ? "preempted when they must be" : "never preempted");
    }
    (void)printf("  metadata, in host memory: %s\n", ctl_bytes(metadata_bytes(plan, blocks)));
    chart_print(plan);
}

static void answer_print(const struct plan *plan)
{
    const struct kvk_capacity *capacity = &plan->capacity;
    (void)printf("%s: %s B per token", plan->model, ctl_count(kvk_capacity_token_bytes(capacity)));
    if (capacity->tensor_ranks * capacity->pipeline_ranks > 1) {
        (void)printf("; %s B on each of %u x %u ranks",
                     ctl_count(kvk_capacity_token_rank_bytes(capacity)), capacity->tensor_ranks,
                     capacity->pipeline_ranks);
    }
    (void)printf("; %u bits a value", capacity->format.value_bits);
    if (capacity->format.stored != KVK_FORMAT_NONE) {
        (void)printf(", with scales %.4f B (%s)", kvk_capacity_value_bytes(capacity),
                     kvk_format_name(capacity->format.stored));
    } else if (capacity->format.scale_values > 0) {
        (void)printf(" and %u for every %u of them",
                     capacity->format.scale_bits + capacity->format.zero_bits,
                     capacity->format.scale_values);
    }
    (void)printf("\n");
    if (kvk_capacity_cross_bytes(capacity) > 0) {
        (void)printf("cross-attention: %s B for %s encoder tokens, however long the output\n",
                     ctl_count(kvk_capacity_cross_bytes(capacity)),
                     ctl_count(capacity->encoder_tokens));
    }
    layers_print(plan);
    if (plan->length_count > 0) {
        lengths_print(plan);
    }
    if (plan->budget_given) {
        budget_print(plan);
    }
    for (uint32_t i = 0; i < plan->notes.count; i++) {
        (void)printf("%s%s\n", i == 0 ? "\nnot counted:\n  " : "  ", plan->notes.text[i]);
    }
}

int ctl_plan(const struct ctl_options *options, int argc, char **argv)
{
    static struct plan plan;
    plan = (struct plan){.capacity = {.format = {.value_bits = 16},
                                      .tensor_ranks = 1,
                                      .pipeline_ranks = 1,
                                      .block_tokens = 16}};
    if (!options_take(&plan, argc, argv)) {
        return ctl_usage(&command, NULL);
    }
    if (plan.space != NULL) {
        const struct plan_live live = {.space = plan.space,
                                       .tenant = plan.tenant,
                                       .budget = plan.budget,
                                       .prompt = plan.prompt,
                                       .output = plan.output,
                                       .preempt = plan.preempt};
        return plan.config != NULL ? ctl_usage(&command, "a config.json or --space")
                                   : plan_live(options, &live);
    }
    if (!model_find(&plan) || !budget_find(&plan)) {
        return CTL_FAILED;
    }
    points_find(&plan);
    if (plan.plot != NULL) {
        if (plan.point_count == 0) {
            (void)fprintf(stderr, "kvkeepctl plan: nothing to plot: give a budget that holds a "
                                  "sequence\n");
            return CTL_FAILED;
        }
        if (!plan_plot(plan.plot, plan.model, plan.points, plan.point_count)) {
            (void)fprintf(stderr, "kvkeepctl plan: %s cannot be written\n", plan.plot);
            return CTL_FAILED;
        }
    }
    if (options->json) {
        answer_json(&plan);
    } else {
        answer_print(&plan);
    }
    return CTL_OK;
}
