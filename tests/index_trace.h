/*
 * Traces of real requests, for tests of the index and of what follows from it. They are not part of
 * the tree: KVK_TRACES names their folder; without them the tests say so and are skipped.
 */
#ifndef KVK_TESTS_INDEX_TRACE_H
#define KVK_TESTS_INDEX_TRACE_H

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define TRACES_FOLDER "../shared/data/traces" /* beside the source tree's top */
#define LINE_SIZE (4 << 20)

struct request {
    uint64_t time_ms;
    uint64_t input_tokens;
    uint32_t first; /* in trace.ids */
    uint32_t count;
};

struct trace {
    struct request *requests;
    uint32_t request_count;
    uint32_t *ids;
    uint32_t id_count;
    uint32_t block_tokens;
    bool whole_blocks; /* no partial last one */
};

static inline void *grown(void *memory, uint32_t count, size_t size)
{
    /* Doubled at each power of two. */
    if (count != 0 && (count & (count - 1)) != 0) {
        return memory;
    }
    memory = realloc(memory, (count == 0 ? 1 : 2 * (size_t)count) * size);
    cr_assert_not_null(memory);
    return memory;
}

static inline void trace_add_id(struct trace *trace, uint64_t id)
{
    trace->ids = grown(trace->ids, trace->id_count, sizeof(*trace->ids));
    trace->ids[trace->id_count++] = (uint32_t)id;
}

static inline uint64_t number_after(const char *line, const char *name)
{
    const char *found = strstr(line, name);
    cr_assert_not_null(found, "no %s", name);
    return strtoull(found + strlen(name), NULL, 10);
}

/* One line of JSON: ids as they are, or as runs of which every group-th id stays. */
static inline void trace_add_line(struct trace *trace, const char *line, uint32_t group)
{
    static const char plain[] = "\"hash_ids\":";
    static const char coded[] = "\"hash_runs\":";
    const char *runs = strstr(line, coded);
    const char *next = runs != NULL ? runs + strlen(coded) : strstr(line, plain) + strlen(plain);
    struct request request = {
        .time_ms = number_after(line, "\"timestamp\":"),
        .input_tokens = number_after(line, "\"input_length\":"),
        .first = trace->id_count,
    };
    uint64_t seen = 0;
    uint64_t start = 0;
    bool has_start = false;
    for (next += strspn(next, " ["); *next != ']'; next += strspn(next, ", ")) {
        char *end;
        uint64_t value = strtoull(next, &end, 10);
        cr_assert(end != next);
        next = end;
        if (runs != NULL && !has_start) {
            start = value;
            has_start = true;
            continue;
        }
        uint64_t count = runs != NULL ? value : 1;
        uint64_t first = runs != NULL ? start : value;
        has_start = false;
        for (uint64_t i = 0; i < count; i++) {
            if (++seen % group == 0) {
                trace_add_id(trace, first + i);
            }
        }
    }
    request.count = trace->id_count - request.first;
    trace->requests = grown(trace->requests, trace->request_count, sizeof(request));
    trace->requests[trace->request_count++] = request;
}

/* False: the file is not here. */
static inline bool trace_read(struct trace *trace, const char *name, uint32_t block_tokens,
                              uint32_t group)
{
    const char *folder = getenv("KVK_TRACES");
    char path[4096];
    if (folder != NULL) {
        snprintf(path, sizeof(path), "%s/%s", folder, name);
    } else {
        /* tests/ is one folder below the top. */
        const char *slash = strrchr(__FILE__, '/');
        snprintf(path, sizeof(path), "%.*s/../%s/%s", (int)(slash - __FILE__), __FILE__,
                 TRACES_FOLDER, name);
    }
    gzFile file = gzopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    *trace = (struct trace){.block_tokens = block_tokens, .whole_blocks = group > 1};
    char *line = malloc(LINE_SIZE);
    cr_assert_not_null(line);
    while (gzgets(file, line, LINE_SIZE) != NULL) {
        trace_add_line(trace, line, group);
    }
    free(line);
    gzclose(file);
    for (uint32_t i = 1; i < trace->request_count; i++) {
        cr_assert(trace->requests[i - 1].time_ms <= trace->requests[i].time_ms);
    }
    return true;
}

static inline void trace_free(struct trace *trace)
{
    free(trace->requests);
    free(trace->ids);
}

static inline void skip_without_trace(void)
{
    cr_skip_test("the trace is not here; KVK_TRACES names the folder that has it");
}

#endif
