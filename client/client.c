#include "client/kvkeep.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/socket_path.h"
#include "client/internal.h"

#define TIMEOUT_MS_DEFAULT 30000
#define BACKOFF_MS_FIRST 2
#define BACKOFF_MS_MAX 500

const char *kvkeep_default_target(void)
{
    const char *target = getenv("KVKEEP_TARGET");
    if (target != NULL && target[0] != '\0') {
        return target;
    }
    static char path[KVK_SOCKET_PATH_SIZE + sizeof "unix:"];
    char socket_path[KVK_SOCKET_PATH_SIZE];
    kvk_socket_path_client(socket_path);
    (void)snprintf(path, sizeof path, "unix:%s", socket_path);
    return path;
}

bool kvkeep_default_tls(struct kvkeep_tls *tls)
{
    *tls = (struct kvkeep_tls){.ca = getenv("KVKEEP_CA"),
                               .certificate = getenv("KVKEEP_CERTIFICATE"),
                               .key = getenv("KVKEEP_KEY"),
                               .server_name = getenv("KVKEEP_SERVER_NAME")};
    return tls->ca != NULL || tls->certificate != NULL;
}

static void path_free(const char *text)
{
    free((void *)(uintptr_t)text); /* ours, behind a pointer that users may only read */
}

static void tls_free(struct kvkeep_tls *tls)
{
    path_free(tls->ca);
    path_free(tls->certificate);
    path_free(tls->key);
    path_free(tls->server_name);
}

/* False: no memory. */
static bool path_copy(const char *text, const char **copy)
{
    *copy = text == NULL ? NULL : strdup(text);
    return text == NULL || *copy != NULL;
}

static bool tls_copy(struct kvkeep_client *client, const struct kvkeep_tls *tls)
{
    client->use_tls = tls != NULL;
    return tls == NULL || (path_copy(tls->ca, &client->tls.ca) &&
                           path_copy(tls->certificate, &client->tls.certificate) &&
                           path_copy(tls->key, &client->tls.key) &&
                           path_copy(tls->server_name, &client->tls.server_name));
}

enum kvk_status kvkeep_client_connection(const struct kvkeep_client *client,
                                         struct kvkeep_connection **connection,
                                         struct kvk_error *error)
{
    return kvkeep_connection_create_tls(client->target, client->token,
                                        client->use_tls ? &client->tls : NULL, connection, error);
}

enum kvk_status kvkeep_connect(const struct kvkeep_options *options, struct kvkeep_client **client,
                               struct kvk_error *error)
{
    struct kvkeep_client *new = calloc(1, sizeof *new);
    if (new == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a client");
    }
    pthread_mutex_init(&new->bulk_mutex, NULL);
    new->target = strdup(options->target == NULL ? kvkeep_default_target() : options->target);
    new->token = options->token == NULL ? NULL : strdup(options->token);
    new->timeout_ms = options->timeout_ms == 0 ? TIMEOUT_MS_DEFAULT : options->timeout_ms;
    new->retry = !options->no_retry;
    enum kvk_status status = KVK_EXHAUSTED;
    if (new->target == NULL || (options->token != NULL && new->token == NULL) ||
        !tls_copy(new, options->tls)) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a client");
    } else {
        status = kvkeep_client_connection(new, &new->calls, error);
    }
    if (status != KVK_OK) {
        kvkeep_disconnect(new);
        return status;
    }
    *client = new;
    return KVK_OK;
}

void kvkeep_disconnect(struct kvkeep_client *client)
{
    if (client == NULL) {
        return;
    }
    kvkeep_connection_destroy(client->calls);
    kvkeep_connection_destroy(client->bulk);
    pthread_mutex_destroy(&client->bulk_mutex);
    tls_free(&client->tls);
    free(client->target);
    free(client->token);
    free(client);
}

enum kvk_status kvkeep_client_bulk(struct kvkeep_client *client,
                                   struct kvkeep_connection **connection, struct kvk_error *error)
{
    pthread_mutex_lock(&client->bulk_mutex);
    enum kvk_status status = KVK_OK;
    if (client->bulk == NULL) {
        status = kvkeep_client_connection(client, &client->bulk, error);
    }
    *connection = client->bulk;
    pthread_mutex_unlock(&client->bulk_mutex);
    return status;
}

static void sleep_ms(uint64_t ms)
{
    struct timespec time = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&time, &time) != 0) {
    }
}

enum kvk_status kvkeep_client_call(struct kvkeep_client *client, const char *method,
                                   const ProtobufCMessage *request,
                                   const ProtobufCMessageDescriptor *response_type, void *response,
                                   struct kvk_error *error)
{
    struct kvk_clock *clock = kvk_clock_monotonic();
    uint64_t until_ns = kvk_clock_now(clock) + client->timeout_ms * KVK_NS_PER_MS;
    uint64_t backoff_ms = BACKOFF_MS_FIRST;
    struct kvk_error local;
    struct kvk_error *told = error == NULL ? &local : error;
    for (;;) {
        uint64_t now_ns = kvk_clock_now(clock);
        uint64_t left_ms = until_ns > now_ns ? (until_ns - now_ns) / KVK_NS_PER_MS : 0;
        ProtobufCMessage *message = NULL;
        enum kvk_status status =
            kvkeep_connection_call(client->calls, method, request, response_type,
                                   (uint32_t)(left_ms == 0 ? 1 : left_ms), &message, told);
        if (status == KVK_OK) {
            *(ProtobufCMessage **)response = message;
            return KVK_OK;
        }
        uint64_t wait_ms = told->retry_after_ms > backoff_ms ? told->retry_after_ms : backoff_ms;
        if (status != KVK_UNAVAILABLE || !client->retry || wait_ms >= left_ms) {
            return status;
        }
        sleep_ms(wait_ms);
        backoff_ms = backoff_ms * 2 > BACKOFF_MS_MAX ? BACKOFF_MS_MAX : backoff_ms * 2;
    }
}

ProtobufCBinaryData kvkeep_text(const char *text)
{
    ProtobufCBinaryData data = {0};
    if (text != NULL) {
        data.data = (uint8_t *)(uintptr_t)text;
        data.len = strlen(text);
    }
    return data;
}

static void text_copy(char *target, size_t size, ProtobufCBinaryData data)
{
    (void)snprintf(target, size, "%.*s", (int)data.len, data.data == NULL ? "" : (char *)data.data);
}

enum kvk_status kvkeep_server_info(struct kvkeep_client *client, struct kvkeep_server_info *info,
                                   struct kvk_error *error)
{
    Kvkeep__V1__GetServerInfoRequest request = KVKEEP__V1__GET_SERVER_INFO_REQUEST__INIT;
    Kvkeep__V1__GetServerInfoResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(client, KVKEEP_METHOD("GetServerInfo"), &request.base,
                           &kvkeep__v1__get_server_info_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    memset(info, 0, sizeof *info);
    text_copy(info->version, sizeof info->version, response->version);
    text_copy(info->policy, sizeof info->policy, response->policy);
    text_copy(info->device, sizeof info->device, response->device);
    text_copy(info->device_path, sizeof info->device_path, response->device_path);
    text_copy(info->tenant, sizeof info->tenant, response->tenant);
    if (response->boot_id.len == sizeof info->boot_id) {
        memcpy(info->boot_id, response->boot_id.data, sizeof info->boot_id);
    }
    for (size_t t = 0; t < response->n_tenants && t < KVKEEP_TENANTS_SHOWN; t++) {
        text_copy(info->tenants[t], sizeof info->tenants[t], response->tenants[t]);
        info->tenant_count++;
    }
    info->admin = response->admin;
    info->device_bytes = response->device_bytes;
    info->host_bytes = response->host_bytes;
    info->uptime_ms = response->uptime_ms;
    if (response->limits != NULL) {
        info->tokens_max = response->limits->tokens;
        info->message_bytes_max = response->limits->message_bytes;
    }
    kvkeep__v1__get_server_info_response__free_unpacked(response, NULL);
    return KVK_OK;
}

/* ---- spaces ---- */

static Kvkeep__V1__LayerGroup group_message(const struct kvk_geometry *geometry)
{
    Kvkeep__V1__LayerGroup group = KVKEEP__V1__LAYER_GROUP__INIT;
    group.layers = geometry->layers;
    group.kv_heads = geometry->kv_heads;
    group.head_size_k = geometry->head_size_k;
    group.head_size_v = geometry->head_size_v;
    group.format_k = (Kvkeep__V1__Format)geometry->format_k;
    group.format_v = (Kvkeep__V1__Format)geometry->format_v;
    group.layout = (Kvkeep__V1__Layout)geometry->layout;
    group.attention = (Kvkeep__V1__Attention)geometry->attention;
    group.latent = geometry->latent;
    group.window = geometry->window;
    group.sinks = geometry->sinks;
    group.opaque_bytes = geometry->opaque_bytes;
    return group;
}

static Kvkeep__V1__Identity identity_message(const struct kvkeep_identity *identity)
{
    Kvkeep__V1__Identity message = KVKEEP__V1__IDENTITY__INIT;
    message.model = kvkeep_text(identity->model);
    message.revision = kvkeep_text(identity->revision);
    message.tokenizer_digest = kvkeep_text(identity->tokenizer_digest);
    message.template_digest = kvkeep_text(identity->template_digest);
    message.position_encoding = kvkeep_text(identity->position_encoding);
    message.adapter_name = kvkeep_text(identity->adapter_name);
    message.adapter_id = kvkeep_text(identity->adapter_id);
    message.adapter_version = kvkeep_text(identity->adapter_version);
    message.kv_format = kvkeep_text(identity->kv_format);
    message.mask_rule = kvkeep_text(identity->mask_rule);
    return message;
}

enum kvk_status kvkeep_space_open(struct kvkeep_client *client,
                                  const struct kvkeep_space_options *options,
                                  struct kvkeep_space *space, struct kvk_error *error)
{
    if (options->group_count < 1 || options->group_count > KVK_GROUP_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "groups", options->group_count,
                              KVK_GROUP_COUNT_MAX, "a space has 1 to %u layer groups",
                              KVK_GROUP_COUNT_MAX);
    }
    Kvkeep__V1__LayerGroup groups[KVK_GROUP_COUNT_MAX];
    Kvkeep__V1__LayerGroup *pointers[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < options->group_count; g++) {
        groups[g] = group_message(&options->groups[g]);
        groups[g].disk_format =
            (Kvkeep__V1__Format)(options->disk_formats == NULL ? KVK_FORMAT_NONE
                                                               : options->disk_formats[g]);
        groups[g].host_format =
            (Kvkeep__V1__Format)(options->host_formats == NULL ? KVK_FORMAT_NONE
                                                               : options->host_formats[g]);
        pointers[g] = &groups[g];
    }
    Kvkeep__V1__Identity identity = identity_message(&options->identity);
    Kvkeep__V1__PrefillCost cost = KVKEEP__V1__PREFILL_COST__INIT;
    cost.flops_per_token = options->flops_per_token;
    cost.flops_per_token_position = options->flops_per_token_position;
    cost.flops_per_second = options->flops_per_second;
    Kvkeep__V1__OpenSpaceRequest request = KVKEEP__V1__OPEN_SPACE_REQUEST__INIT;
    request.tenant = kvkeep_text(options->tenant);
    request.identity = &identity;
    request.block_tokens = options->block_tokens;
    request.n_groups = options->group_count;
    request.groups = pointers;
    request.tensor_shards = options->tensor_shards;
    request.pipeline_shards = options->pipeline_shards;
    request.prefill_cost = &cost;
    request.lookup_min_tokens = options->lookup_min_tokens;
    request.partial_reuse = (Kvkeep__V1__PartialReuse)options->partial_reuse;
    Kvkeep__V1__OpenSpaceResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(client, KVKEEP_METHOD("OpenSpace"), &request.base,
                           &kvkeep__v1__open_space_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    memset(space, 0, sizeof *space);
    space->id = response->space_id;
    space->block_tokens = options->block_tokens;
    space->group_count = options->group_count;
    space->partial_reuse = response->partial_reuse;
    for (uint32_t g = 0; g < options->group_count; g++) {
        struct kvk_geometry *geometry = &space->groups[g];
        *geometry = options->groups[g];
        geometry->block_tokens = options->block_tokens;
        geometry->tensor_shards = options->tensor_shards == 0 ? 1 : options->tensor_shards;
        geometry->pipeline_shards = options->pipeline_shards == 0 ? 1 : options->pipeline_shards;
    }
    kvkeep__v1__open_space_response__free_unpacked(response, NULL);
    return KVK_OK;
}

/* ---- prompts and look-ups ---- */

enum kvk_status kvkeep_prompt_make(const struct kvkeep_prompt *prompt,
                                   struct kvkeep_prompt_message *message, struct kvk_error *error)
{
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens travel little-endian");
    kvkeep__v1__prompt__init(&message->message);
    message->spans = NULL;
    message->span_pointers = NULL;
    message->message.tokens.data = (uint8_t *)(uintptr_t)prompt->tokens;
    message->message.tokens.len = prompt->token_count * sizeof prompt->tokens[0];
    message->message.salt.data = (uint8_t *)(uintptr_t)prompt->salt;
    message->message.salt.len = prompt->salt_size;
    message->message.use_public = prompt->use_public;
    message->message.whole_blocks = prompt->whole_blocks;
    if (prompt->span_count == 0) {
        return KVK_OK;
    }
    message->spans = calloc(prompt->span_count, sizeof message->spans[0]);
    message->span_pointers = calloc(prompt->span_count, sizeof message->span_pointers[0]);
    if (message->spans == NULL || message->span_pointers == NULL) {
        kvkeep_prompt_drop(message);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a prompt");
    }
    for (uint32_t i = 0; i < prompt->span_count; i++) {
        const struct kvkeep_span *span = &prompt->spans[i];
        kvkeep__v1__content_span__init(&message->spans[i]);
        message->spans[i].first = span->first;
        message->spans[i].count = span->count;
        message->spans[i].digest.data = (uint8_t *)(uintptr_t)span->digest;
        message->spans[i].digest.len = span->digest_size;
        message->span_pointers[i] = &message->spans[i];
    }
    message->message.n_spans = prompt->span_count;
    message->message.spans = message->span_pointers;
    return KVK_OK;
}

void kvkeep_prompt_drop(struct kvkeep_prompt_message *message)
{
    free(message->spans);
    free(message->span_pointers);
}

static enum kvk_status lookup(struct kvkeep_client *client, const struct kvkeep_space *space,
                              const struct kvkeep_prompt *prompt, bool leave_last, bool read_ahead,
                              struct kvkeep_lookup *result, struct kvk_error *error)
{
    struct kvkeep_prompt_message message;
    enum kvk_status status = kvkeep_prompt_make(prompt, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__LookupRequest request = KVKEEP__V1__LOOKUP_REQUEST__INIT;
    request.space_id = space->id;
    request.prompt = &message.message;
    request.leave_last = leave_last;
    request.read_ahead = read_ahead;
    Kvkeep__V1__LookupResponse *response = NULL;
    status = kvkeep_client_call(client, KVKEEP_METHOD("Lookup"), &request.base,
                                &kvkeep__v1__lookup_response__descriptor, &response, error);
    kvkeep_prompt_drop(&message);
    if (status != KVK_OK) {
        return status;
    }
    result->cached_tokens = response->cached_tokens;
    result->device_tokens = response->device_tokens;
    result->host_tokens = response->host_tokens;
    result->load_ns = response->load_ns;
    result->recompute_ns = response->recompute_ns;
    result->disk_tokens = response->disk_tokens;
    result->restore_ns = response->restore_ns;
    result->restore_recompute_ns = response->restore_recompute_ns;
    result->partial_tokens = response->partial_tokens;
    result->remote_state = response->remote == NULL
                               ? KVKEEP_REMOTE_NONE
                               : (enum kvkeep_remote_state)response->remote->state;
    result->remote_tokens = response->remote == NULL ? 0 : response->remote->tokens;
    kvkeep__v1__lookup_response__free_unpacked(response, NULL);
    return KVK_OK;
}

enum kvk_status kvkeep_lookup(struct kvkeep_client *client, const struct kvkeep_space *space,
                              const struct kvkeep_prompt *prompt, bool leave_last,
                              struct kvkeep_lookup *result, struct kvk_error *error)
{
    return lookup(client, space, prompt, leave_last, false, result, error);
}

enum kvk_status kvkeep_lookup_ahead(struct kvkeep_client *client, const struct kvkeep_space *space,
                                    const struct kvkeep_prompt *prompt, bool leave_last,
                                    struct kvkeep_lookup *result, struct kvk_error *error)
{
    return lookup(client, space, prompt, leave_last, true, result, error);
}

enum kvk_status kvkeep_touch(struct kvkeep_client *client, const struct kvkeep_space *space,
                             const struct kvkeep_prompt *prompt, uint64_t *touched_tokens,
                             struct kvk_error *error)
{
    struct kvkeep_prompt_message message;
    enum kvk_status status = kvkeep_prompt_make(prompt, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__TouchRequest request = KVKEEP__V1__TOUCH_REQUEST__INIT;
    request.space_id = space->id;
    request.prompt = &message.message;
    Kvkeep__V1__TouchResponse *response = NULL;
    status = kvkeep_client_call(client, KVKEEP_METHOD("Touch"), &request.base,
                                &kvkeep__v1__touch_response__descriptor, &response, error);
    kvkeep_prompt_drop(&message);
    if (status == KVK_OK) {
        *touched_tokens = response->touched_tokens;
        kvkeep__v1__touch_response__free_unpacked(response, NULL);
    }
    return status;
}

/* ---- tables ---- */

static bool table_grow(struct kvkeep_table *table, uint64_t count)
{
    if (count <= table->capacity) {
        return true;
    }
    uint64_t capacity = table->capacity * 2 > count ? table->capacity * 2 : count;
    uint32_t *slots = realloc(table->slots, capacity * sizeof slots[0]);
    table->slots = slots == NULL ? table->slots : slots;
    uint8_t *tiers = realloc(table->tiers, capacity);
    table->tiers = tiers == NULL ? table->tiers : tiers;
    uint32_t *generations = realloc(table->generations, capacity * sizeof generations[0]);
    table->generations = generations == NULL ? table->generations : generations;
    uint64_t *spaces = realloc(table->spaces, capacity * sizeof spaces[0]);
    table->spaces = spaces == NULL ? table->spaces : spaces;
    if (slots == NULL || tiers == NULL || generations == NULL || spaces == NULL) {
        return false;
    }
    table->capacity = capacity;
    return true;
}

enum kvk_status kvkeep_table_merge(struct kvkeep_table *table, const Kvkeep__V1__BlockTable *part,
                                   struct kvk_error *error)
{
    uint64_t count = part->tiers.len;
    uint64_t end = 0;
    if (part->slots.len != 4 * count || part->generations.len != 4 * count ||
        (part->spaces.len != 0 && part->spaces.len != 8 * count) ||
        !kvk_add_fits(part->first_block, count, &end) || part->first_block > table->count ||
        end > UINT32_MAX) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "tables",
                        "the daemon's block table does not fit the sequence");
    }
    if (!table_grow(table, end)) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a block table");
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t index = part->first_block + i;
        table->slots[index] = kvk_load_le32(part->slots.data + 4 * i);
        table->tiers[index] = part->tiers.data[i];
        table->generations[index] = kvk_load_le32(part->generations.data + 4 * i);
        table->spaces[index] = part->spaces.len == 0 ? 0 : kvk_load_le64(part->spaces.data + 8 * i);
    }
    table->count = end > table->count ? end : table->count;
    return KVK_OK;
}

void kvkeep_table_finish(struct kvkeep_table *table)
{
    free(table->slots);
    free(table->tiers);
    free(table->generations);
    free(table->spaces);
    memset(table, 0, sizeof *table);
}
