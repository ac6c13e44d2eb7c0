/*
 * A model's config.json, as Hugging Face's libraries write it, read for what its KV cache needs.
 *
 * Names differ between families (num_hidden_layers, n_layer, num_layers…), and so do the rules of
 * windows. A field that is there under none of its names, and whose default is not the libraries'
 * own, is an error that names it.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/plan.h"

#define LAYERS_MAX 4096

void plan_note(struct plan_notes *notes, const char *format, ...)
{
    if (notes->count == PLAN_NOTES_MAX) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(notes->text[notes->count++], PLAN_NOTE_SIZE, format, arguments);
    va_end(arguments);
}

/* ---- Fields ---- */

/* What is read, and where to say what is wrong. */
struct reader {
    const json_t *config;
    const char *type; /* model_type, "" if there is none */
    struct plan_notes *notes;
    char *why; /* [PLAN_NOTE_SIZE] */
};

static bool refuse(struct reader *reader, const char *format, ...) KVK_PRINTF(2, 3);

static bool refuse(struct reader *reader, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(reader->why, PLAN_NOTE_SIZE, format, arguments);
    va_end(arguments);
    return false;
}

/* The first of these names that is there with a positive number; 0: none. */
static uint32_t number(const struct reader *reader, const char *const *names)
{
    for (; *names != NULL; names++) {
        const json_t *value = json_object_get(reader->config, *names);
        if (json_is_integer(value)) {
            json_int_t found = json_integer_value(value);
            if (found > 0 && found <= INT32_MAX) {
                return (uint32_t)found;
            }
        }
    }
    return 0;
}

#define NUMBER(reader, ...) number(reader, (const char *const[]){__VA_ARGS__, NULL})

static bool is_true(const struct reader *reader, const char *name)
{
    return json_is_true(json_object_get(reader->config, name));
}

static bool has(const struct reader *reader, const char *name)
{
    const json_t *value = json_object_get(reader->config, name);
    return value != NULL && !json_is_null(value);
}

static bool type_is(const struct reader *reader, const char *const *types)
{
    for (; *types != NULL; types++) {
        if (strcmp(reader->type, *types) == 0) {
            return true;
        }
    }
    return false;
}

#define TYPE_IS(reader, ...) type_is(reader, (const char *const[]){__VA_ARGS__, NULL})

/* ---- Heads ---- */

static bool read_query_heads(struct reader *reader, uint32_t *heads)
{
    *heads = NUMBER(reader, "decoder_attention_heads", "num_attention_heads", "n_head", "n_heads",
                    "num_heads");
    return *heads > 0;
}

/* Families in which every query head has a KV head of its own unless the config says otherwise. */
static bool defaults_to_query_heads(const struct reader *reader)
{
    return TYPE_IS(reader, "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "t5", "mt5",
                   "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "whisper", "m2m_100",
                   "codegen", "llama", "mistral", "qwen", "phi", "mpt", "stablelm", "xglm",
                   "biogpt", "blenderbot");
}

static bool read_kv_heads(struct reader *reader, uint32_t *kv_heads)
{
    if (is_true(reader, "multi_query") && !is_true(reader, "new_decoder_architecture")) {
        *kv_heads = 1;
        return true;
    }
    if (is_true(reader, "multi_query_attention")) {
        *kv_heads = NUMBER(reader, "multi_query_group_num");
        return *kv_heads > 0 || refuse(reader, "multi_query_group_num is missing");
    }
    *kv_heads = NUMBER(reader, "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads");
    if (*kv_heads > 0) {
        return true;
    }
    if (TYPE_IS(reader, "falcon") || defaults_to_query_heads(reader)) {
        return read_query_heads(reader, kv_heads) ||
               refuse(reader, "num_attention_heads is missing");
    }
    return refuse(reader,
                  "num_key_value_heads is missing, and what model_type \"%.60s\" means by that is "
                  "not known: give --kv-heads",
                  reader->type);
}

static bool read_head_size(struct reader *reader, uint32_t *head_size)
{
    *head_size = NUMBER(reader, "head_dim", "d_kv", "kv_channels", "attention_head_size");
    if (*head_size > 0) {
        return true;
    }
    uint32_t hidden = NUMBER(reader, "hidden_size", "n_embd", "d_model", "dim");
    uint32_t heads;
    if (hidden == 0 || !read_query_heads(reader, &heads)) {
        return refuse(reader, "head_dim is missing, and hidden_size and num_attention_heads are "
                              "not both there: give --head-size");
    }
    if (hidden % heads != 0) {
        return refuse(reader,
                      "head_dim is missing, and hidden_size %u is no multiple of %u heads: "
                      "give --head-size",
                      hidden, heads);
    }
    *head_size = hidden / heads;
    return true;
}

/* ---- Layers ---- */

enum layer_kind {
    LAYER_FULL,
    LAYER_WINDOW,
    LAYER_NONE, /* recurrent state, or another layer's KV */
};

struct layers {
    uint8_t kind[LAYERS_MAX]; /* enum layer_kind */
    uint32_t count;
    uint32_t window;
};

static bool read_count(struct reader *reader, uint32_t *count)
{
    *count = 0;
    if (is_true(reader, "is_encoder_decoder")) {
        *count = NUMBER(reader, "num_decoder_layers", "decoder_layers");
    }
    if (*count == 0) {
        *count = NUMBER(reader, "num_hidden_layers", "n_layer", "num_layers", "n_layers",
                        "decoder_layers");
    }
    if (*count == 0) {
        return refuse(reader, "num_hidden_layers is missing: give --layers");
    }
    if (*count > LAYERS_MAX) {
        return refuse(reader, "%u layers; at most %u", *count, LAYERS_MAX);
    }
    return true;
}

static bool layers_by_list(struct reader *reader, const json_t *list, struct layers *layers)
{
    if (json_array_size(list) != layers->count) {
        return refuse(reader, "layer_types has %zu entries for %u layers", json_array_size(list),
                      layers->count);
    }
    uint32_t others = 0;
    for (uint32_t i = 0; i < layers->count; i++) {
        const char *kind = json_string_value(json_array_get(list, i));
        if (kind != NULL && strcmp(kind, "full_attention") == 0) {
            layers->kind[i] = LAYER_FULL;
        } else if (kind != NULL && (strcmp(kind, "sliding_attention") == 0 ||
                                    strcmp(kind, "chunked_attention") == 0)) {
            layers->kind[i] = LAYER_WINDOW;
        } else if (kind != NULL &&
                   (strcmp(kind, "linear_attention") == 0 || strcmp(kind, "mamba") == 0 ||
                    strcmp(kind, "conv") == 0 || strcmp(kind, "recurrent") == 0)) {
            layers->kind[i] = LAYER_NONE;
            others++;
        } else {
            return refuse(reader, "layer_types[%u] \"%.60s\" is not understood", i,
                          kind == NULL ? "?" : kind);
        }
    }
    if (others > 0) {
        plan_note(reader->notes, "state of %u layers without attention", others);
    }
    return true;
}

/* Every n-th layer, counted from `first`, is of `kind`; the others of `other`. */
static void layers_by_pattern(struct layers *layers, uint32_t every, uint32_t first,
                              enum layer_kind kind, enum layer_kind other)
{
    for (uint32_t i = 0; i < layers->count; i++) {
        layers->kind[i] = (uint8_t)(i % every == first % every ? kind : other);
    }
}

/* A window whose layers the config does not list: by the rule of the family. */
static bool layers_by_family(struct reader *reader, struct layers *layers)
{
    uint32_t pattern = NUMBER(reader, "sliding_window_pattern", "_sliding_window_pattern");
    if (has(reader, "use_sliding_window") && !is_true(reader, "use_sliding_window")) {
        return true; /* there is a number, and it is switched off */
    }
    if (pattern > 0) {
        layers_by_pattern(layers, pattern, pattern - 1, LAYER_FULL, LAYER_WINDOW);
    } else if (TYPE_IS(reader, "gemma2")) {
        layers_by_pattern(layers, 2, 0, LAYER_WINDOW, LAYER_FULL);
    } else if (TYPE_IS(reader, "gemma3", "gemma3_text")) {
        layers_by_pattern(layers, 6, 5, LAYER_FULL, LAYER_WINDOW);
    } else if (TYPE_IS(reader, "cohere2")) {
        layers_by_pattern(layers, 4, 3, LAYER_FULL, LAYER_WINDOW);
    } else if (TYPE_IS(reader, "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")) {
        uint32_t full = NUMBER(reader, "max_window_layers");
        for (uint32_t i = 0; i < layers->count; i++) {
            layers->kind[i] = (uint8_t)(i < full ? LAYER_FULL : LAYER_WINDOW);
        }
    } else if (TYPE_IS(reader, "mistral", "mixtral", "phi3", "starcoder2", "phimoe")) {
        layers_by_pattern(layers, 1, 0, LAYER_WINDOW, LAYER_WINDOW);
    } else {
        plan_note(reader->notes,
                  "sliding_window %u: its layers under model_type \"%.60s\" are not known; all are "
                  "counted in full",
                  layers->window, reader->type);
        layers->window = 0;
    }
    return true;
}

static bool read_layers(struct reader *reader, struct layers *layers)
{
    const json_t *list = json_object_get(reader->config, "layer_types");
    uint32_t every = NUMBER(reader, "full_attention_interval", "attn_layer_period");
    layers->window = NUMBER(reader, "sliding_window", "attention_chunk_size");
    layers_by_pattern(layers, 1, 0, LAYER_FULL, LAYER_FULL);
    if (json_is_array(list)) {
        if (!layers_by_list(reader, list, layers)) {
            return false;
        }
    } else if (every > 0) {
        const json_t *offset = json_object_get(reader->config, "attn_layer_offset");
        uint32_t first = json_is_integer(offset) ? (uint32_t)json_integer_value(offset) : every - 1;
        layers_by_pattern(layers, every, first, LAYER_FULL, LAYER_NONE);
        plan_note(reader->notes, "state of the layers without attention (every %u-th has it)",
                  every);
    } else if (has(reader, "hybrid_override_pattern") || has(reader, "layers_block_type")) {
        return refuse(reader, "layers of several kinds in a form that is not understood "
                              "(hybrid_override_pattern, layers_block_type): give --layers");
    } else if (layers->window > 0 && !layers_by_family(reader, layers)) {
        return false;
    }
    uint32_t shared = NUMBER(reader, "num_kv_shared_layers");
    for (uint32_t i = 0; i < shared && i < layers->count; i++) {
        layers->kind[layers->count - 1 - i] = LAYER_NONE; /* they read an earlier layer's */
    }
    return true;
}

static uint32_t count_of(const struct layers *layers, enum layer_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < layers->count; i++) {
        count += layers->kind[i] == kind ? 1 : 0;
    }
    return count;
}

/* ---- The whole ---- */

/* One head of K and V, or what a latent cache keeps instead. */
static bool read_shape(struct reader *reader, const struct plan_given *given,
                       struct kvk_capacity_layers *shape)
{
    uint32_t latent = NUMBER(reader, "kv_lora_rank");
    if (latent > 0 && given->kv_heads == 0) {
        uint32_t rope = NUMBER(reader, "qk_rope_head_dim");
        if (rope == 0) {
            return refuse(reader, "kv_lora_rank is there, and qk_rope_head_dim is missing");
        }
        shape->latent = true;
        shape->kv_heads = 1;
        shape->head_size_k = latent + rope;
        return true;
    }
    shape->kv_heads = given->kv_heads;
    shape->head_size_k = given->head_size;
    if (shape->kv_heads == 0 && !read_kv_heads(reader, &shape->kv_heads)) {
        return false;
    }
    if (shape->head_size_k == 0 && !read_head_size(reader, &shape->head_size_k)) {
        return false;
    }
    uint32_t value_size = NUMBER(reader, "v_head_dim");
    shape->head_size_v = value_size > 0 && given->head_size == 0 ? value_size : shape->head_size_k;
    return true;
}

static void add_group(struct kvk_capacity *capacity, const struct kvk_capacity_layers *shape,
                      uint32_t layers, uint32_t window, bool cross)
{
    if (layers > 0) {
        struct kvk_capacity_layers *group = &capacity->groups[capacity->group_count++];
        *group = *shape;
        group->layers = layers;
        group->window = window;
        group->cross = cross;
    }
}

static void note_the_rest(struct reader *reader)
{
    uint32_t next = NUMBER(reader, "num_nextn_predict_layers");
    if (next > 0) {
        plan_note(reader->notes, "%u layers that predict further tokens (num_nextn_predict_layers)",
                  next);
    }
    if (has(reader, "cross_attention_layers")) {
        plan_note(reader->notes, "KV of images in cross_attention_layers");
    }
    if (has(reader, "index_topk")) {
        plan_note(reader->notes, "the sparse attention's index of keys");
    }
}

static bool read_model(struct reader *reader, const struct plan_given *given,
                       struct kvk_capacity *capacity)
{
    struct layers layers = {.count = given->layers};
    struct kvk_capacity_layers shape = {0};
    if (layers.count > LAYERS_MAX) {
        return refuse(reader, "%u layers; at most %u", layers.count, LAYERS_MAX);
    }
    if (layers.count == 0 &&
        (!read_count(reader, &layers.count) || !read_layers(reader, &layers))) {
        return false;
    }
    if (!read_shape(reader, given, &shape)) {
        return false;
    }
    capacity->group_count = 0;
    add_group(capacity, &shape, count_of(&layers, LAYER_FULL), 0, false);
    add_group(capacity, &shape, count_of(&layers, LAYER_WINDOW), layers.window, false);
    if (capacity->group_count == 0) {
        return refuse(reader, "no layer has attention");
    }
    if (is_true(reader, "is_encoder_decoder")) {
        add_group(capacity, &shape, layers.count, 0, true);
    }
    note_the_rest(reader);
    return true;
}

bool plan_config_read(const char *path, const struct plan_given *given,
                      struct kvk_capacity *capacity, char model[64], struct plan_notes *notes,
                      char why[PLAN_NOTE_SIZE])
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    if (root == NULL) {
        if (error.line < 0) { /* it was not opened, and the text has the path */
            (void)snprintf(why, PLAN_NOTE_SIZE, "%.160s", error.text);
        } else {
            (void)snprintf(why, PLAN_NOTE_SIZE, "%.80s:%d: %.80s", path, error.line, error.text);
        }
        return false;
    }
    struct reader reader = {.config = root, .type = "", .notes = notes, .why = why};
    const json_t *text = json_object_get(root, "text_config");
    if (json_is_object(text)) {
        reader.config = text;
        plan_note(notes, "encoders of images and sound, and what they keep");
    }
    const char *type = json_string_value(json_object_get(reader.config, "model_type"));
    if (type == NULL) {
        type = json_string_value(json_object_get(root, "model_type"));
    }
    reader.type = type == NULL ? "" : type;
    (void)snprintf(model, 64, "%.63s", reader.type[0] == '\0' ? "a model" : reader.type);
    bool read = json_is_object(root) && read_model(&reader, given, capacity);
    if (!json_is_object(root)) {
        (void)snprintf(why, PLAN_NOTE_SIZE, "%.80s: not an object", path);
    }
    json_decref(root);
    return read;
}
