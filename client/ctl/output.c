#include "client/ctl/ctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/clock.h"

#define RING_COUNT 16
#define RING_SIZE 320

/* Short-lived texts for printf arguments. */
static char *ring_next(void)
{
    static _Thread_local char ring[RING_COUNT][RING_SIZE];
    static _Thread_local unsigned next;
    return ring[next++ % RING_COUNT];
}

const char *ctl_bytes(uint64_t bytes)
{
    return kvk_bytes_text(bytes, ring_next());
}

const char *ctl_duration_ms(uint64_t ms)
{
    char *text = ring_next();
    if (ms < 1000) {
        (void)snprintf(text, RING_SIZE, "%llu ms", (unsigned long long)ms);
    } else if (ms < 120 * 1000) {
        (void)snprintf(text, RING_SIZE, "%.1f s", (double)ms / 1000);
    } else if (ms < 120 * 60 * 1000) {
        (void)snprintf(text, RING_SIZE, "%.1f min", (double)ms / 60000);
    } else {
        (void)snprintf(text, RING_SIZE, "%.1f h", (double)ms / 3600000);
    }
    return text;
}

const char *ctl_count(uint64_t count)
{
    char digits[32];
    int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)count);
    char *text = ring_next();
    char *out = text;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) {
            *out++ = ',';
        }
        *out++ = digits[i];
    }
    *out = '\0';
    return text;
}

const char *ctl_text(ProtobufCBinaryData data)
{
    char *text = ring_next();
    size_t length = data.len < RING_SIZE - 1 ? data.len : RING_SIZE - 1;
    for (size_t i = 0; i < length; i++) {
        /* A name from outside must not steer the terminal. */
        text[i] = data.data[i] < 0x20 || data.data[i] == 0x7f ? '?' : (char)data.data[i];
    }
    text[length] = '\0';
    return text;
}

json_t *ctl_json_text(ProtobufCBinaryData data)
{
    if (kvk_utf8_ok(data.data, data.len)) {
        return json_stringn(data.data == NULL ? "" : (const char *)data.data, data.len);
    }
    char hex[2 * RING_SIZE + 1];
    size_t length = data.len < RING_SIZE ? data.len : RING_SIZE;
    kvk_hex_write(data.data, length, hex);
    return json_string(hex);
}

void ctl_json_print(json_t *value)
{
    (void)json_dumpf(value, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    (void)putchar('\n');
    json_decref(value);
}

/* ---- failures ---- */

/* What is to be done where no daemon could be talked to, by gRPC's own words for why; NULL: nothing
 * that is known. */
static const char *connecting_hint(const char *text)
{
    static const struct {
        const char *where; /* of the address */
        const char *what;
        const char *hint;
    } hints[] = {
        {"ipv", "Socket closed",
         "a daemon that serves TLS there wants --ca FILE: the roots of its certificate"},
        {"ipv", "not in peer certificate",
         "connect by a name that its certificate has, or say which it has: --server-name NAME"},
        {"unix:", "Permission denied",
         "the socket lets in only whom server.unix_mode says: run this as the daemon's user"},
        {"unix:", "No such file",
         "no kvkeepd listens there: start one, or say where it is by --connect or KVKEEP_TARGET"},
        {"unix:", "Connection refused",
         "the kvkeepd that made this socket has ended: start it, or say where another is by "
         "--connect or KVKEEP_TARGET"},
    };
    for (size_t i = 0; i < sizeof hints / sizeof hints[0]; i++) {
        if (strstr(text, hints[i].where) != NULL && strstr(text, hints[i].what) != NULL) {
            return hints[i].hint;
        }
    }
    return NULL;
}

int ctl_fail(const char *what, const struct kvk_error *error)
{
    (void)fprintf(stderr, "kvkeepctl %s: %s", what, error->text);
    if (error->cause != KVK_CAUSE_NONE) {
        (void)fprintf(stderr, " [%s]", kvk_cause_name(error->cause));
    }
    if (error->field[0] != '\0') {
        (void)fprintf(stderr, " field=%s", error->field);
    }
    if (error->limit > 0) {
        (void)fprintf(stderr, " value=%llu limit=%llu", (unsigned long long)error->value,
                      (unsigned long long)error->limit);
    }
    if (error->retry_after_ms > 0) {
        (void)fprintf(stderr, " retry_after=%s", ctl_duration_ms(error->retry_after_ms));
    }
    (void)fputc('\n', stderr);
    const char *hint = error->status == KVK_UNAVAILABLE ? connecting_hint(error->text) : NULL;
    if (hint != NULL) {
        (void)fprintf(stderr, "%s\n", hint);
    }
    /* A daemon that is there says why. */
    return error->status == KVK_UNAVAILABLE && error->cause == KVK_CAUSE_NONE ? CTL_NO_DAEMON
                                                                              : CTL_FAILED;
}

static bool usage_is_asked_for; /* set once, before any command runs */

void ctl_usage_is_asked_for(void)
{
    usage_is_asked_for = true;
}

static int usage_print(const struct ctl_command *command, const char *verb, const char *complaint)
{
    FILE *file = usage_is_asked_for ? stdout : stderr;
    if (complaint != NULL && !usage_is_asked_for) {
        (void)fprintf(file, "kvkeepctl %s: %s%s\n", command->name, verb, complaint);
    }
    (void)fprintf(file, "usage: kvkeepctl [--connect TARGET] [--token TOKEN] [--json] %s\n%s",
                  command->name, command->usage == NULL ? "" : command->usage);
    return CTL_USAGE;
}

int ctl_usage(const struct ctl_command *command, const char *complaint)
{
    return usage_print(command, "wants ", complaint);
}

int ctl_usage_told(const struct ctl_command *command, const char *sentence)
{
    return usage_print(command, "", sentence);
}

int ctl_option_wrong(const char *command, const char *option, const char *value, const char *wanted)
{
    (void)fprintf(stderr, "kvkeepctl %s: --%s: \"%s\" is not %s\nusage: kvkeepctl %s --help\n",
                  command, option, value, wanted, command);
    return CTL_USAGE;
}

/* ---- tables ---- */

void ctl_table_init(struct ctl_table *table, uint32_t column_count, const char *const *titles)
{
    memset(table, 0, sizeof *table);
    table->column_count = column_count < CTL_COLUMNS_MAX ? column_count : CTL_COLUMNS_MAX;
    for (uint32_t c = 0; c < table->column_count; c++) {
        table->titles[c] = titles[c];
    }
}

void ctl_table_row(struct ctl_table *table, const char *format, ...)
{
    char *line = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&line, format, arguments);
    va_end(arguments);
    size_t cells = (size_t)(table->row_count + 1) * table->column_count;
    char **wider = length < 0 ? NULL : realloc(table->cells, cells * sizeof wider[0]);
    if (wider == NULL) {
        free(length < 0 ? NULL : line);
        return;
    }
    table->cells = wider;
    char *rest = line;
    for (uint32_t c = 0; c < table->column_count; c++) {
        char *cell = rest == NULL ? NULL : strsep(&rest, "\t");
        table->cells[(size_t)table->row_count * table->column_count + c] =
            strdup(cell == NULL ? "" : cell);
    }
    table->row_count++;
    free(line);
}

/* Columns that a terminal gives the text: UTF-8 continuation bytes take none. */
static int width_of(const char *text)
{
    int width = 0;
    for (; *text != '\0'; text++) {
        width += ((unsigned char)*text & 0xc0) != 0x80;
    }
    return width;
}

static void cell_print(const char *text, int width, bool left, bool last)
{
    int pad = width - width_of(text);
    (void)printf("%*s%s%*s%s", left ? 0 : pad, "", text, left && !last ? pad : 0, "",
                 last ? "\n" : "  ");
}

static void table_finish(struct ctl_table *table)
{
    for (size_t i = 0; i < (size_t)table->row_count * table->column_count; i++) {
        free(table->cells[i]);
    }
    free(table->cells);
    memset(table, 0, sizeof *table);
}

void ctl_table_print(struct ctl_table *table)
{
    int widths[CTL_COLUMNS_MAX] = {0};
    for (uint32_t c = 0; c < table->column_count; c++) {
        widths[c] = width_of(table->titles[c]) - (table->titles[c][0] == '-');
        for (uint32_t r = 0; r < table->row_count; r++) {
            const char *cell = table->cells[(size_t)r * table->column_count + c];
            int width = cell == NULL ? 0 : width_of(cell);
            widths[c] = width > widths[c] ? width : widths[c];
        }
    }
    for (uint32_t c = 0; c < table->column_count; c++) {
        bool left = table->titles[c][0] == '-';
        cell_print(table->titles[c] + left, widths[c], left, c + 1 == table->column_count);
    }
    for (uint32_t r = 0; r < table->row_count; r++) {
        for (uint32_t c = 0; c < table->column_count; c++) {
            const char *cell = table->cells[(size_t)r * table->column_count + c];
            cell_print(cell == NULL ? "" : cell, widths[c], table->titles[c][0] == '-',
                       c + 1 == table->column_count);
        }
    }
    table_finish(table);
}

void ctl_list_print(const struct ctl_options *options, struct ctl_table *table, json_t *list,
                    bool more)
{
    if (options->json) {
        table_finish(table);
        ctl_json_print(list);
        return;
    }
    json_decref(list);
    ctl_table_print(table);
    if (more) {
        (void)printf("… and more; see --limit\n");
    }
}

/* ---- progress ---- */

#define PROGRESS_EVERY_NS (100 * KVK_NS_PER_MS)
#define PROGRESS_WIDTH 32

void ctl_progress_begin(struct ctl_progress *progress, const char *what, uint64_t total)
{
    progress->what = what;
    progress->total = total;
    progress->started_ns = kvk_clock_now(kvk_clock_monotonic());
    progress->shown_ns = 0;
}

void ctl_progress_show(struct ctl_progress *progress, uint64_t done)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    if (!isatty(STDERR_FILENO) || now_ns - progress->shown_ns < PROGRESS_EVERY_NS) {
        return;
    }
    progress->shown_ns = now_ns;
    double share = progress->total == 0 ? 1 : (double)done / (double)progress->total;
    share = share > 1 ? 1 : share;
    double seconds = (double)(now_ns - progress->started_ns) / 1e9;
    char bar[PROGRESS_WIDTH + 1];
    for (int i = 0; i < PROGRESS_WIDTH; i++) {
        bar[i] = i < (int)(share * PROGRESS_WIDTH) ? '#' : '.';
    }
    bar[PROGRESS_WIDTH] = '\0';
    (void)fprintf(stderr, "\r%s [%s] %3.0f %%  %s left  ", progress->what, bar, share * 100,
                  share <= 0 ? "?"
                             : ctl_duration_ms((uint64_t)(seconds * (1 - share) / share * 1000)));
}

void ctl_progress_end(struct ctl_progress *progress)
{
    if (isatty(STDERR_FILENO) && progress->shown_ns > 0) {
        (void)fprintf(stderr, "\r\033[K");
    }
}

bool ctl_parse_count(const char *text, uint64_t *count)
{
    char *end = NULL;
    if (text[0] < '0' || text[0] > '9') {
        return false;
    }
    unsigned long long value = strtoull(text, &end, 10);
    uint64_t unit = 1;
    if (*end == 'k' || *end == 'K') {
        unit = 1000;
        end++;
    } else if (*end == 'M') {
        unit = 1000000;
        end++;
    }
    return *end == '\0' && kvk_multiply_fits(value, unit, count);
}
