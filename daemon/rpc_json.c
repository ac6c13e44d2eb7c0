#include "daemon/rpc_json.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "daemon/rpc_private.h"

#define DEADLINE_NS (UINT64_C(10) * KVK_NS_PER_SECOND)
#define DEPTH_MAX 8
#define HEX_BYTES_MAX 64

/* ---- Messages as JSON ---- */

static json_t *message_json(const ProtobufCMessage *message, int depth);

static json_t *bytes_json(const ProtobufCBinaryData *bytes)
{
    if (kvk_utf8_ok(bytes->data, bytes->len)) {
        return json_stringn(bytes->data == NULL ? "" : (const char *)bytes->data, bytes->len);
    }
    char hex[2 * HEX_BYTES_MAX + 1];
    kvk_hex_write(bytes->data, bytes->len < HEX_BYTES_MAX ? bytes->len : HEX_BYTES_MAX, hex);
    return json_string(hex);
}

/* "SEQUENCE_STATE_SWAPPED_OUT" of enum SequenceState as "swapped_out". */
static json_t *enum_json(const ProtobufCEnumDescriptor *descriptor, int number)
{
    const ProtobufCEnumValue *value = protobuf_c_enum_descriptor_get_value(descriptor, number);
    if (value == NULL) {
        return json_integer(number);
    }
    size_t common = strlen(descriptor->values[0].name);
    for (unsigned i = 1; i < descriptor->n_values; i++) {
        size_t same = 0;
        while (same < common &&
               descriptor->values[0].name[same] == descriptor->values[i].name[same]) {
            same++;
        }
        common = same;
    }
    while (common > 0 && value->name[common - 1] != '_') {
        common--;
    }
    char text[96];
    size_t length = 0;
    for (const char *c = value->name + common; *c != '\0' && length + 1 < sizeof(text); c++) {
        text[length++] = (char)tolower((unsigned char)*c);
    }
    text[length] = '\0';
    return json_string(text);
}

static json_t *id_json(uint64_t id)
{
    char digits[24];
    (void)snprintf(digits, sizeof(digits), "%llu", (unsigned long long)id);
    return json_string(digits);
}

static bool is_id(const char *name)
{
    size_t length = strlen(name);
    return (length >= 3 && strcmp(name + length - 3, "_id") == 0) ||
           (length >= 4 && strcmp(name + length - 4, "_ids") == 0);
}

static json_t *unsigned_json(uint64_t value)
{
    return value <= INT64_MAX ? json_integer((json_int_t)value) : json_real((double)value);
}

/* One value, at `at` in its message or array. */
static json_t *value_json(const ProtobufCFieldDescriptor *field, const void *at, int depth)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return is_id(field->name) ? id_json(*(const uint64_t *)at)
                                  : unsigned_json(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return json_integer(*(const int64_t *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return json_real((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_real(*(const double *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_json(field->descriptor, *(const int *)at);
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(char *const *)at == NULL ? "" : *(char *const *)at);
    case PROTOBUF_C_TYPE_BYTES:
        return bytes_json(at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return message_json(*(ProtobufCMessage *const *)at, depth + 1);
    }
    return json_null();
}

static size_t element_size(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        return 4;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_ENUM:
        return sizeof(int);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    }
    return 0;
}

static json_t *message_json(const ProtobufCMessage *message, int depth)
{
    if (message == NULL || depth > DEPTH_MAX) {
        return json_null();
    }
    json_t *object = json_object();
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const uint8_t *at = (const uint8_t *)message + field->offset;
        json_t *value;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t count = *(const size_t *)(const void *)((const uint8_t *)message +
                                                           field->quantifier_offset);
            const uint8_t *elements = *(uint8_t *const *)(const void *)at;
            value = json_array();
            for (size_t e = 0; e < count; e++) {
                (void)json_array_append_new(
                    value, value_json(field, elements + e * element_size(field->type), depth));
            }
        } else {
            value = value_json(field, at, depth);
        }
        (void)json_object_set_new(object, field->name, value);
    }
    return object;
}

/* ---- JSON as a request: flat fields only, which all methods here have ---- */

static enum kvk_status refuse_field(const char *name, struct kvk_error *error)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, name,
                    "%.64s: no such field, or not its kind", name);
}

static bool number_of(const json_t *value, uint64_t *number)
{
    if (json_is_integer(value) && json_integer_value(value) >= 0) {
        *number = (uint64_t)json_integer_value(value);
        return true;
    }
    const char *text = json_string_value(value);
    if (text == NULL || *text < '0' || *text > '9') {
        return false;
    }
    char *end;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0; /* else it is larger than any */
}

static enum kvk_status field_set(ProtobufCMessage *message, const char *name, const json_t *value,
                                 struct kvk_error *error)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(message->descriptor, name);
    uint64_t number = 0;
    if (field == NULL || field->label == PROTOBUF_C_LABEL_REPEATED) {
        return refuse_field(name, error);
    }
    uint8_t *at = (uint8_t *)message + field->offset;
    if (field->type == PROTOBUF_C_TYPE_BYTES && json_is_string(value)) {
        /* The JSON text outlives the call. */
        *(ProtobufCBinaryData *)(void *)at =
            kvk_rpc_bytes(json_string_value(value), json_string_length(value));
    } else if (field->type == PROTOBUF_C_TYPE_UINT64 && number_of(value, &number)) {
        *(uint64_t *)(void *)at = number;
    } else if (field->type == PROTOBUF_C_TYPE_UINT32 && number_of(value, &number) &&
               number <= UINT32_MAX) {
        *(uint32_t *)(void *)at = (uint32_t)number;
    } else if (field->type == PROTOBUF_C_TYPE_BOOL && json_is_boolean(value)) {
        *(protobuf_c_boolean *)(void *)at = json_is_true(value);
    } else {
        return refuse_field(name, error);
    }
    return KVK_OK;
}

static enum kvk_status fields_set(ProtobufCMessage *message, json_t *request,
                                  struct kvk_error *error)
{
    const char *name;
    json_t *value;
    json_object_foreach(request, name, value)
    {
        enum kvk_status status = field_set(message, name, value, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* ---- Who asks ---- */

static struct kvk_auth_source source_of(const struct sockaddr *address)
{
    uint8_t bytes[16] = {0};
    uint32_t size_bytes = 0;
    if (address != NULL && address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)address;
        memcpy(bytes, &four->sin_addr, size_bytes = 4);
    } else if (address != NULL && address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;
        memcpy(bytes, &six->sin6_addr, size_bytes = 16);
    }
    return kvk_auth_source_address(bytes, size_bytes);
}

enum kvk_status kvk_rpc_json_identify(struct kvk_rpc *rpc, const uint8_t *token, size_t token_size,
                                      const struct sockaddr *address,
                                      const struct kvk_credential **credential,
                                      struct kvk_error *error)
{
    const struct kvk_proof proof = {.token = token, .token_size = token_size};
    const struct kvk_auth_source source = source_of(address);
    uint64_t now_ns = kvk_clock_now(rpc->clock);
    bool guessable = false;
    enum kvk_status status =
        kvk_tenants_identify(rpc->tenants, &proof, credential, &guessable, error);
    if (status == KVK_UNAUTHENTICATED) {
        enum kvk_status limited = kvk_auth_limit_fail(&rpc->auth_limit, &source, now_ns, error);
        return limited == KVK_OK ? status : limited;
    }
    if (status == KVK_OK && guessable && kvk_auth_limit_is_engaged(&rpc->auth_limit, now_ns)) {
        status = kvk_auth_limit_check(&rpc->auth_limit, &source, now_ns, error);
    }
    return status;
}

/* ---- Calls ---- */

/* What a page shows; none of these changes anything. */
static const char *const allowed[] = {
    "GetServerInfo", "GetOccupancy", "GetUsage", "ListSpaces",    "ListSequences",
    "ListLeases",    "ListTenants",  "Why",      "ListInstances", "GetStats",
    "Doctor",        "GetMissRatio", "GetFleet",
};

bool kvk_rpc_json_allows(const char *method)
{
    for (size_t i = 0; i < sizeof(allowed) / sizeof(allowed[0]); i++) {
        if (strcmp(method, allowed[i]) == 0) {
            return true;
        }
    }
    return false;
}

static const struct kvk_rpc_method *method_find(const struct kvk_rpc *rpc, const char *name)
{
    for (uint32_t i = 0; i < rpc->method_count; i++) {
        const struct kvk_rpc_method *method = rpc->bound[i].method;
        if (method->kind == KVK_METHOD_UNARY && strcmp(method->name, name) == 0) {
            return method;
        }
    }
    return NULL;
}

struct answer {
    json_t *value; /* NULL: no memory */
};

static void answer_take(void *context, const ProtobufCMessage *message)
{
    struct answer *answer = context;
    answer->value = message_json(message, 0);
}

static enum kvk_status method_run(struct kvk_rpc *rpc, const struct kvk_rpc_method *method,
                                  const ProtobufCMessage *message,
                                  const struct kvk_credential *credential, char **text,
                                  struct kvk_error *error)
{
    struct answer answer = {.value = NULL};
    struct kvk_rpc_run run = {
        .rpc = rpc,
        .memory = kvk_rpc_memory_begin(),
        .caller = {.credential = credential,
                   .call = method->name,
                   .may_block = true,
                   .deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + DEADLINE_NS},
        .sink = answer_take,
        .sink_context = &answer,
    };
    if (run.memory == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the call");
    }
    enum kvk_status status = method->handle(&run, message, error);
    if (status != KVK_OK) {
        return status;
    }
    *text = answer.value == NULL ? NULL : json_dumps(answer.value, JSON_COMPACT);
    json_decref(answer.value);
    return *text != NULL
               ? KVK_OK
               : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
}

enum kvk_status kvk_rpc_json_call(struct kvk_rpc *rpc, const char *name, const char *request,
                                  size_t request_size, const struct kvk_credential *credential,
                                  char **text, struct kvk_error *error)
{
    *text = NULL;
    const struct kvk_rpc_method *method = kvk_rpc_json_allows(name) ? method_find(rpc, name) : NULL;
    if (method == NULL) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "method",
                        "no method of this name can be asked here");
    }
    json_error_t wrong;
    json_t *fields =
        request_size == 0 ? json_object() : json_loadb(request, request_size, 0, &wrong);
    if (!json_is_object(fields)) {
        json_decref(fields);
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "", "the request is no JSON object");
    }
    ProtobufCMessage *message = calloc(1, method->request->sizeof_message);
    enum kvk_status status;
    if (message == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the call");
    } else {
        protobuf_c_message_init(method->request, message);
        status = fields_set(message, fields, error);
    }
    if (status == KVK_OK) {
        status = method_run(rpc, method, message, credential, text, error);
    }
    free(message); /* flat: its bytes are the JSON's */
    json_decref(fields);
    return status;
}
