#include "client/ctl/trace.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/table.h"

#define LINE_BYTES_MAX (64u << 20)
#define IDS_MAX (1u << 30)
#define MOONCAKE_BLOCK_TOKENS 512
#define RUNS_BLOCK_TOKENS 64

/* A trace while it is read. */
struct loader {
    struct ctl_trace *trace;
    const char *path;
    uint64_t line;
    uint32_t group;
    uint64_t request_capacity;
    uint64_t id_capacity;
    struct kvk_table numbers; /* the file's id -> ours */
    struct kvk_error *error;
};

static enum kvk_status line_fail(struct loader *loader, const char *field, const char *what)
{
    return kvk_fail(loader->error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s:%llu: %s %s",
                    loader->path, (unsigned long long)loader->line, field, what);
}

static enum kvk_status no_memory(struct loader *loader)
{
    return kvk_fail(loader->error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the trace");
}

/* Room for one more of a growing array. */
static void *grow(void *array, uint64_t count, uint64_t *capacity, size_t size)
{
    if (count < *capacity) {
        return array;
    }
    uint64_t wider = *capacity == 0 ? 4096 : *capacity * 2;
    void *moved = realloc(array, wider * size);
    if (moved != NULL) {
        *capacity = wider;
    }
    return moved;
}

static enum kvk_status id_add(struct loader *loader, uint64_t id)
{
    struct ctl_trace *trace = loader->trace;
    if (trace->id_count >= IDS_MAX) {
        return line_fail(loader, "hash_ids", "are more than can be replayed");
    }
    uint32_t *ids = grow(trace->ids, trace->id_count, &loader->id_capacity, sizeof ids[0]);
    if (ids == NULL) {
        return no_memory(loader);
    }
    trace->ids = ids;
    uint32_t number = kvk_table_get_index(&loader->numbers, id);
    if (number == KVK_TABLE_NONE) {
        number = (uint32_t)trace->unique_count;
        if (kvk_table_put_index(&loader->numbers, id, number) != KVK_OK) {
            return line_fail(loader, "hash_ids", "has too many different ids");
        }
        trace->unique_count++;
    }
    ids[trace->id_count++] = number;
    return KVK_OK;
}

static bool json_u64(const json_t *value, uint64_t *number)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *number = (uint64_t)json_integer_value(value);
    return true;
}

/* Every group-th id of the list, or of the runs. */
static enum kvk_status ids_add(struct loader *loader, const json_t *list, bool runs)
{
    const char *field = runs ? "hash_runs" : "hash_ids";
    size_t count = json_array_size(list);
    if (!json_is_array(list) || (runs && count % 2 != 0)) {
        return line_fail(loader, field, "must be an array (of pairs)");
    }
    uint64_t seen = 0;
    for (size_t i = 0; i < count; i += runs ? 2 : 1) {
        uint64_t start = 0;
        uint64_t length = 1;
        if (!json_u64(json_array_get(list, i), &start) ||
            (runs && !json_u64(json_array_get(list, i + 1), &length)) || length > IDS_MAX) {
            return line_fail(loader, field, "must hold numbers from 0");
        }
        for (uint64_t k = 0; k < length; k++) {
            if (++seen % loader->group != 0) {
                continue;
            }
            enum kvk_status status = id_add(loader, start + k);
            if (status != KVK_OK) {
                return status;
            }
        }
    }
    return KVK_OK;
}

static enum kvk_status request_add(struct loader *loader, const json_t *object)
{
    struct ctl_trace *trace = loader->trace;
    const json_t *runs = json_object_get(object, "hash_runs");
    const json_t *ids = json_object_get(object, "hash_ids");
    const json_t *time = json_object_get(object, "timestamp");
    uint64_t input_length = 0;
    if (!json_is_number(time) || json_number_value(time) < 0) {
        return line_fail(loader, "timestamp", "must be a number of milliseconds");
    }
    if (!json_u64(json_object_get(object, "input_length"), &input_length)) {
        return line_fail(loader, "input_length", "must be a number of tokens");
    }
    if (trace->block_tokens == 0) {
        trace->block_tokens =
            (runs != NULL ? RUNS_BLOCK_TOKENS : MOONCAKE_BLOCK_TOKENS) * loader->group;
    }
    struct ctl_trace_request *requests =
        grow(trace->requests, trace->request_count, &loader->request_capacity, sizeof requests[0]);
    if (requests == NULL) {
        return no_memory(loader);
    }
    trace->requests = requests;
    struct ctl_trace_request *request = &requests[trace->request_count];
    request->time_ms = (uint64_t)json_number_value(time);
    request->first_id = trace->id_count;
    enum kvk_status status = ids_add(loader, runs != NULL ? runs : ids, runs != NULL);
    if (status != KVK_OK) {
        return status;
    }
    request->id_count = (uint32_t)(trace->id_count - request->first_id);
    uint64_t full =
        (uint64_t)(request->id_count == 0 ? 0 : request->id_count - 1) * trace->block_tokens;
    uint64_t last = input_length > full ? input_length - full : 0;
    request->last_tokens = (uint32_t)(last > trace->block_tokens ? trace->block_tokens : last);
    if (request->id_count > 0) {
        trace->request_count++;
    }
    return KVK_OK;
}

/* One line of any length into a growing buffer: 1 a line, 0 the end, -1 an error. */
static int line_read(gzFile file, char **buffer, size_t *capacity)
{
    size_t length = 0;
    for (;;) {
        if (*capacity - length < 2) {
            size_t wider = *capacity == 0 ? 1 << 16 : *capacity * 2;
            char *moved = wider > LINE_BYTES_MAX ? NULL : realloc(*buffer, wider);
            if (moved == NULL) {
                return -1;
            }
            *buffer = moved;
            *capacity = wider;
        }
        if (gzgets(file, *buffer + length, (int)(*capacity - length)) == NULL) {
            int code;
            (void)gzerror(file, &code);
            return code != Z_OK && code != Z_STREAM_END ? -1 : length > 0 ? 1 : 0;
        }
        length += strlen(*buffer + length);
        if (length > 0 && (*buffer)[length - 1] == '\n') {
            return 1;
        }
    }
}

static enum kvk_status lines_load(struct loader *loader, gzFile file)
{
    char *line = NULL;
    size_t capacity = 0;
    enum kvk_status status = KVK_OK;
    int got = 1;
    while (status == KVK_OK && (got = line_read(file, &line, &capacity)) > 0) {
        loader->line++;
        if (line[strspn(line, " \t\r\n")] == '\0') {
            continue;
        }
        json_error_t problem;
        json_t *object = json_loads(line, 0, &problem);
        status = json_is_object(object) ? request_add(loader, object)
                                        : line_fail(loader, "line", "is not a JSON object");
        json_decref(object);
    }
    free(line);
    if (status == KVK_OK && got < 0) {
        status = line_fail(loader, "file", "cannot be read on (damaged, or a line too long)");
    }
    if (status == KVK_OK && loader->trace->request_count == 0) {
        status = line_fail(loader, "file", "holds no request");
    }
    return status;
}

enum kvk_status ctl_trace_load(struct ctl_trace *trace, const char *path, uint32_t group,
                               struct kvk_error *error)
{
    memset(trace, 0, sizeof *trace);
    struct loader loader = {.trace = trace, .path = path, .group = group, .error = error};
    gzFile file = gzopen(path, "rb");
    if (file == NULL) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "trace", "cannot open %s: %s", path,
                        strerror(errno));
    }
    enum kvk_status status = kvk_table_init(&loader.numbers, 1u << 22);
    if (status == KVK_OK) {
        status = lines_load(&loader, file);
        kvk_table_finish(&loader.numbers);
    }
    gzclose(file);
    if (status != KVK_OK) {
        ctl_trace_finish(trace);
    }
    return status;
}

void ctl_trace_finish(struct ctl_trace *trace)
{
    free(trace->requests);
    free(trace->ids);
    memset(trace, 0, sizeof *trace);
}

double ctl_trace_ceiling(const struct ctl_trace *trace)
{
    /* Each id misses once: ids name whole prefixes, so a seen id's prefix was seen as well. */
    return trace->id_count == 0 ? 0 : 1.0 - (double)trace->unique_count / (double)trace->id_count;
}
