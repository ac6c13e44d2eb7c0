/*
 * grpc.reflection.v1 and v1alpha, from the embedded FileDescriptorSet. The two have the same
 * messages on the wire, so v1's are used for both.
 *
 * One request at a time: the next is received after the answer to the last has gone out.
 */
#include "daemon/server_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "google/protobuf/descriptor.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"

#define FILES_MAX 64
#define SERVICES_MAX 32

/* The generated names fill a line each. */
#define ASKS(what) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##what
#define ANSWERS(what) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##what

typedef Google__Protobuf__FileDescriptorProto file_proto;
typedef Google__Protobuf__DescriptorProto message_proto;
typedef Grpc__Reflection__V1__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_response;

struct symbol {
    char *name; /* "package.Message", "package.Service.Method"; ours */
    uint32_t file;
};

struct file {
    struct kvk_bytes bytes; /* the serialized FileDescriptorProto, in the set */
    char *name;             /* ours */
    uint32_t imports[FILES_MAX];
    uint32_t import_count;
};

struct kvk_reflection {
    struct file files[FILES_MAX];
    uint32_t file_count;
    struct symbol *symbols; /* sorted by name once all are there; ours */
    uint32_t symbol_count;
    uint32_t symbol_capacity;
    const char *services[SERVICES_MAX]; /* names of symbols */
    uint32_t service_count;
    bool failed; /* while it is filled: no memory, or too much of something */
};

/* ---- filling ---- */

/* "scope.name", or "name" in no package. Returns the symbol's name, owned by the reflection. */
static const char *symbol_add(struct kvk_reflection *reflection, uint32_t file, const char *scope,
                              const char *name)
{
    if (reflection->symbol_count == reflection->symbol_capacity) {
        uint32_t capacity = reflection->symbol_capacity * 2 + 256;
        struct symbol *symbols = realloc(reflection->symbols, capacity * sizeof(symbols[0]));
        if (symbols == NULL) {
            reflection->failed = true;
            return "";
        }
        reflection->symbols = symbols;
        reflection->symbol_capacity = capacity;
    }
    char *full = NULL;
    if (asprintf(&full, "%s%s%s", scope, scope[0] != '\0' ? "." : "", name) < 0) {
        reflection->failed = true;
        return "";
    }
    struct symbol *symbol = &reflection->symbols[reflection->symbol_count++];
    symbol->name = full;
    symbol->file = file;
    return full;
}

static void enum_add(struct kvk_reflection *reflection, uint32_t file, const char *scope,
                     const Google__Protobuf__EnumDescriptorProto *descriptor)
{
    (void)symbol_add(reflection, file, scope, descriptor->name);
    for (size_t i = 0; i < descriptor->n_value; i++) {
        /* Values of an enum live in the scope around it, as in C++. */
        (void)symbol_add(reflection, file, scope, descriptor->value[i]->name);
    }
}

static void message_add(struct kvk_reflection *reflection, uint32_t file, const char *scope,
                        const message_proto *descriptor)
{
    const char *full = symbol_add(reflection, file, scope, descriptor->name);
    for (size_t i = 0; i < descriptor->n_field; i++) {
        (void)symbol_add(reflection, file, full, descriptor->field[i]->name);
    }
    for (size_t i = 0; i < descriptor->n_enum_type; i++) {
        enum_add(reflection, file, full, descriptor->enum_type[i]);
    }
    for (size_t i = 0; i < descriptor->n_nested_type; i++) {
        message_add(reflection, file, full, descriptor->nested_type[i]);
    }
}

static void service_add(struct kvk_reflection *reflection, uint32_t file, const char *scope,
                        const Google__Protobuf__ServiceDescriptorProto *descriptor)
{
    const char *full = symbol_add(reflection, file, scope, descriptor->name);
    if (reflection->service_count == SERVICES_MAX) {
        reflection->failed = true;
        return;
    }
    reflection->services[reflection->service_count++] = full;
    for (size_t i = 0; i < descriptor->n_method; i++) {
        (void)symbol_add(reflection, file, full, descriptor->method[i]->name);
    }
}

static int64_t file_find(const struct kvk_reflection *reflection, const char *name)
{
    for (uint32_t i = 0; i < reflection->file_count; i++) {
        if (strcmp(reflection->files[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

static void file_add(struct kvk_reflection *reflection, struct kvk_bytes bytes)
{
    file_proto *descriptor =
        google__protobuf__file_descriptor_proto__unpack(NULL, bytes.size_bytes, bytes.data);
    if (descriptor == NULL || reflection->file_count == FILES_MAX) {
        reflection->failed = true;
        goto out;
    }
    struct file *file = &reflection->files[reflection->file_count];
    file->bytes = bytes;
    file->name = strdup(descriptor->name);
    if (file->name == NULL) {
        reflection->failed = true;
        goto out;
    }
    uint32_t number = reflection->file_count++;
    for (size_t i = 0; i < descriptor->n_dependency && i < FILES_MAX; i++) {
        int64_t import = file_find(reflection, descriptor->dependency[i]);
        if (import >= 0) { /* protoc writes imports first */
            file->imports[file->import_count++] = (uint32_t)import;
        }
    }
    const char *package = descriptor->package != NULL ? descriptor->package : "";
    for (size_t i = 0; i < descriptor->n_message_type; i++) {
        message_add(reflection, number, package, descriptor->message_type[i]);
    }
    for (size_t i = 0; i < descriptor->n_enum_type; i++) {
        enum_add(reflection, number, package, descriptor->enum_type[i]);
    }
    for (size_t i = 0; i < descriptor->n_service; i++) {
        service_add(reflection, number, package, descriptor->service[i]);
    }
out:
    google__protobuf__file_descriptor_proto__free_unpacked(descriptor, NULL);
}

/* The next file of a FileDescriptorSet: field 1, length-delimited. False: malformed. */
static bool set_next(struct kvk_bytes *set, struct kvk_bytes *file)
{
    if (set->data[0] != 0x0a) {
        return false;
    }
    size_t at = 1;
    uint64_t size = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
        if (at >= set->size_bytes) {
            return false;
        }
        uint8_t byte = set->data[at++];
        size |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) {
            break;
        }
    }
    if (size > set->size_bytes - at) {
        return false;
    }
    file->data = set->data + at;
    file->size_bytes = (size_t)size;
    set->data += at + size;
    set->size_bytes -= at + (size_t)size;
    return true;
}

static int symbol_compare(const void *a, const void *b)
{
    return strcmp(((const struct symbol *)a)->name, ((const struct symbol *)b)->name);
}

enum kvk_status kvk_reflection_create(struct kvk_bytes descriptor_set,
                                      struct kvk_reflection **reflection, struct kvk_error *error)
{
    struct kvk_reflection *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for reflection");
    }
    struct kvk_bytes rest = descriptor_set;
    while (rest.size_bytes > 0 && !made->failed) {
        struct kvk_bytes file;
        if (set_next(&rest, &file)) {
            file_add(made, file);
        } else {
            made->failed = true;
        }
    }
    if (made->failed) {
        kvk_reflection_destroy(made);
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "descriptor_set",
                        "is malformed or larger than reflection allows");
    }
    if (made->symbol_count > 0) {
        qsort(made->symbols, made->symbol_count, sizeof(made->symbols[0]), symbol_compare);
    }
    *reflection = made;
    return KVK_OK;
}

void kvk_reflection_destroy(struct kvk_reflection *reflection)
{
    if (reflection == NULL) {
        return;
    }
    for (uint32_t i = 0; i < reflection->symbol_count; i++) {
        free(reflection->symbols[i].name);
    }
    free(reflection->symbols);
    for (uint32_t i = 0; i < reflection->file_count; i++) {
        free(reflection->files[i].name);
    }
    free(reflection);
}

/* ---- answering: `head` has what stands in every response ---- */

static int64_t symbol_file(const struct kvk_reflection *reflection, const char *name)
{
    if (reflection->symbol_count == 0) {
        return -1;
    }
    struct symbol key = {.name = (char *)(uintptr_t)name, .file = 0};
    const struct symbol *found = bsearch(&key, reflection->symbols, reflection->symbol_count,
                                         sizeof(reflection->symbols[0]), symbol_compare);
    return found != NULL ? (int64_t)found->file : -1;
}

/* The file and all that it imports, itself first. Returns how many. */
static uint32_t file_closure(const struct kvk_reflection *reflection, uint32_t file,
                             uint32_t closure[FILES_MAX])
{
    bool seen[FILES_MAX] = {false};
    uint32_t count = 0;
    closure[count++] = file;
    seen[file] = true;
    for (uint32_t i = 0; i < count; i++) {
        const struct file *at = &reflection->files[closure[i]];
        for (uint32_t j = 0; j < at->import_count; j++) {
            if (!seen[at->imports[j]]) {
                seen[at->imports[j]] = true;
                closure[count++] = at->imports[j];
            }
        }
    }
    return count;
}

static void send_response(struct kvk_call *call, const reflection_response *response)
{
    size_t size = grpc__reflection__v1__server_reflection_response__get_packed_size(response);
    (void)grpc__reflection__v1__server_reflection_response__pack(response,
                                                                 kvk_call_reply_alloc(call, size));
    /* Cannot be full: one request at a time. Of a lost client on_cancel tells. */
    enum kvk_status status = kvk_call_send(call);
    KVK_ASSERT(status == KVK_OK || status == KVK_CANCELLED);
}

static void answer_services(struct kvk_call *call, const struct kvk_reflection *reflection,
                            const reflection_response *head)
{
    reflection_response response = *head;
    Grpc__Reflection__V1__ServiceResponse services[SERVICES_MAX];
    Grpc__Reflection__V1__ServiceResponse *pointers[SERVICES_MAX];
    Grpc__Reflection__V1__ListServiceResponse list =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    for (uint32_t i = 0; i < reflection->service_count; i++) {
        grpc__reflection__v1__service_response__init(&services[i]);
        services[i].name = (char *)(uintptr_t)reflection->services[i];
        pointers[i] = &services[i];
    }
    list.n_service = reflection->service_count;
    list.service = pointers;
    response.message_response_case = ANSWERS(LIST_SERVICES_RESPONSE);
    response.list_services_response = &list;
    send_response(call, &response);
}

static void answer_file(struct kvk_call *call, const struct kvk_reflection *reflection,
                        uint32_t file, const reflection_response *head)
{
    reflection_response response = *head;
    uint32_t closure[FILES_MAX];
    ProtobufCBinaryData bytes[FILES_MAX];
    uint32_t count = file_closure(reflection, file, closure);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_bytes *from = &reflection->files[closure[i]].bytes;
        bytes[i].data = (uint8_t *)(uintptr_t)from->data;
        bytes[i].len = from->size_bytes;
    }
    Grpc__Reflection__V1__FileDescriptorResponse files =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    files.n_file_descriptor_proto = count;
    files.file_descriptor_proto = bytes;
    response.message_response_case = ANSWERS(FILE_DESCRIPTOR_RESPONSE);
    response.file_descriptor_response = &files;
    send_response(call, &response);
}

/* We have no extensions: an empty list for any type that is there. */
static void answer_extensions(struct kvk_call *call, const char *type,
                              const reflection_response *head)
{
    reflection_response response = *head;
    Grpc__Reflection__V1__ExtensionNumberResponse numbers =
        GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;
    numbers.base_type_name = (char *)(uintptr_t)type;
    response.message_response_case = ANSWERS(ALL_EXTENSION_NUMBERS_RESPONSE);
    response.all_extension_numbers_response = &numbers;
    send_response(call, &response);
}

static void answer_error(struct kvk_call *call, enum kvk_status status, const char *text,
                         const reflection_response *head)
{
    reflection_response response = *head;
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
    error.error_code = kvk_status_rpc_code(status);
    error.error_message = (char *)(uintptr_t)text;
    response.message_response_case = ANSWERS(ERROR_RESPONSE);
    response.error_response = &error;
    send_response(call, &response);
}

static void answer(struct kvk_call *call, const struct kvk_reflection *reflection,
                   reflection_request *request)
{
    reflection_response response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    response.valid_host = request->host;
    response.original_request = request;
    int64_t file = -1;
    switch (request->message_request_case) {
    case ASKS(LIST_SERVICES):
        answer_services(call, reflection, &response);
        return;
    case ASKS(FILE_BY_FILENAME):
        file = file_find(reflection, request->file_by_filename);
        break;
    case ASKS(FILE_CONTAINING_SYMBOL):
        file = symbol_file(reflection, request->file_containing_symbol);
        break;
    case ASKS(ALL_EXTENSION_NUMBERS_OF_TYPE):
        if (symbol_file(reflection, request->all_extension_numbers_of_type) >= 0) {
            answer_extensions(call, request->all_extension_numbers_of_type, &response);
            return;
        }
        break;
    case ASKS(FILE_CONTAINING_EXTENSION):
        break;
    case ASKS(_NOT_SET):
    case _GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST__CASE_IS_INT_SIZE:
        answer_error(call, KVK_INVALID, "the request asks nothing", &response);
        return;
    }
    if (file >= 0) {
        answer_file(call, reflection, (uint32_t)file, &response);
    } else {
        answer_error(call, KVK_NOT_FOUND, "not found", &response);
    }
}

/* ---- the stream ---- */

static bool reflection_message(struct kvk_call *call)
{
    struct kvk_bytes bytes = kvk_call_message(call);
    reflection_request *request =
        grpc__reflection__v1__server_reflection_request__unpack(NULL, bytes.size_bytes, bytes.data);
    if (request == NULL) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_INVALID, KVK_CAUSE_FIELD, "", "not a ServerReflectionRequest");
        kvk_call_fail(call, &error);
        return false;
    }
    answer(call, kvk_call_context(call), request);
    grpc__reflection__v1__server_reflection_request__free_unpacked(request, NULL);
    return false;
}

static const struct kvk_stream_events reflection_events = {
    .on_message = reflection_message,
    .on_half_close = kvk_call_finish,
    .on_sent = kvk_call_receive,
    .on_cancel = kvk_call_finish,
};

static void reflection_called(struct kvk_call *call, void *user_data)
{
    kvk_call_stream(call, &reflection_events, user_data);
}

uint32_t kvk_reflection_methods(struct kvk_reflection *reflection, struct kvk_method *methods)
{
    static const char *const paths[] = {
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    };
    for (uint32_t i = 0; i < 2; i++) {
        methods[i] = (struct kvk_method){
            .path = paths[i],
            .kind = KVK_METHOD_BIDI,
            .class = KVK_CLASS_BULK,
            .on_call = reflection_called,
            .user_data = reflection,
        };
    }
    return 2;
}
