#include "base/options.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"

#define LINE_SIZE 8192 /* a path of 4,095 bytes fits */
#define REASON_SIZE 160
#define PLACE_SIZE 64 /* "section label.field" as errors and struct kvk_error name it */

struct label {
    struct label *next;
    const struct kvk_option_section *section;
    char text[KVK_OPTION_LABEL_SIZE];
};

struct reader {
    const struct kvk_option_table *table;
    uint8_t *target;
    const char *name; /* of the file */
    struct kvk_error *error;
    uint32_t line;
    const struct kvk_option_section *section; /* NULL: none yet */
    uint32_t section_line;
    char label[KVK_OPTION_LABEL_SIZE];
    void *record;
    uint64_t fields_seen;                          /* of this section */
    uint64_t sections_seen;                        /* that come once */
    struct label *labels;                          /* seen; ours */
    uint32_t counts[KVK_OPTION_SECTION_COUNT_MAX]; /* of repeated ones, by section */
};

/* ---- Errors ---- */

/* "FILE:LINE: PLACE: REASON"; the place is left out where there is none. */
KVK_PRINTF(4, 5)
static enum kvk_status refuse(struct reader *reader, uint32_t line, const char *field,
                              const char *format, ...)
{
    char reason[REASON_SIZE];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(reason, sizeof(reason), format, arguments);
    va_end(arguments);

    char place[PLACE_SIZE] = "";
    if (reader->section != NULL) {
        const char *blank = reader->label[0] != '\0' ? " " : "";
        const char *dot = field[0] != '\0' ? "." : "";
        (void)snprintf(place, sizeof(place), "%s%s%.20s%s%.24s", reader->section->name, blank,
                       reader->label, dot, field);
    }
    const char *colon = place[0] != '\0' ? ": " : "";
    return kvk_fail(reader->error, KVK_INVALID, KVK_CAUSE_FIELD, place, "%s:%u: %s%s%s",
                    reader->name, line, place, colon, reason);
}

/* ---- Sections ---- */

static void set_defaults(const struct kvk_option_section *section, void *record)
{
    KVK_ASSERT(section->field_count <= KVK_OPTION_FIELD_COUNT_MAX);
    for (size_t i = 0; i < section->field_count; i++) {
        const struct kvk_option_field *field = &section->fields[i];
        if (field->fallback != NULL) {
            char reason[REASON_SIZE];
            bool good =
                kvk_options_read_value(field, record, field->fallback, reason, sizeof(reason));
            KVK_ASSERT(good);
        }
    }
}

void kvk_options_init(const struct kvk_option_table *table, void *target)
{
    KVK_ASSERT(table->section_count <= KVK_OPTION_SECTION_COUNT_MAX);
    for (size_t i = 0; i < table->section_count; i++) {
        const struct kvk_option_section *section = &table->sections[i];
        if (section->open == NULL) {
            set_defaults(section, (uint8_t *)target + section->offset);
        }
    }
}

/* The section before is at its end: is everything there that must be? */
static enum kvk_status end_section(struct reader *reader)
{
    if (reader->section == NULL) {
        return KVK_OK;
    }
    for (size_t i = 0; i < reader->section->field_count; i++) {
        const struct kvk_option_field *field = &reader->section->fields[i];
        if (field->fallback == NULL && (reader->fields_seen >> i & 1) == 0) {
            return refuse(reader, reader->section_line, field->name, "is missing");
        }
    }
    return KVK_OK;
}

/* The file is at its end: sections that did not come at all must not have required fields. */
static enum kvk_status end_file(struct reader *reader)
{
    enum kvk_status status = end_section(reader);
    reader->label[0] = '\0';
    reader->fields_seen = 0;
    for (size_t i = 0; i < reader->table->section_count && status == KVK_OK; i++) {
        reader->section = &reader->table->sections[i];
        reader->section_line = reader->line;
        if (reader->section->open == NULL && (reader->sections_seen >> i & 1) == 0) {
            status = end_section(reader);
        }
    }
    return status;
}

static enum kvk_status begin_once(struct reader *reader, size_t index)
{
    if (reader->label[0] != '\0') {
        return refuse(reader, reader->line, "", "takes no name");
    }
    if ((reader->sections_seen >> index & 1) != 0) {
        return refuse(reader, reader->line, "", "the section comes twice");
    }
    reader->sections_seen |= UINT64_C(1) << index;
    reader->record = reader->target + reader->section->offset;
    return KVK_OK;
}

static enum kvk_status begin_repeated(struct reader *reader, size_t index)
{
    if (reader->label[0] == '\0') {
        return refuse(reader, reader->line, "", "needs a name: [%s NAME]", reader->section->name);
    }
    if (reader->counts[index] == reader->section->count_max) {
        return refuse(reader, reader->line, "", "more than %u of these sections",
                      reader->section->count_max);
    }
    for (const struct label *label = reader->labels; label != NULL; label = label->next) {
        if (label->section == reader->section && strcmp(label->text, reader->label) == 0) {
            return refuse(reader, reader->line, "", "the section comes twice");
        }
    }
    struct label *label = malloc(sizeof(*label));
    if (label == NULL) {
        return kvk_fail(reader->error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
    }
    label->section = reader->section;
    memcpy(label->text, reader->label, sizeof(label->text));
    label->next = reader->labels;
    reader->labels = label;
    reader->counts[index]++;

    struct kvk_error inner = {.status = KVK_OK};
    enum kvk_status status =
        reader->section->open(reader->target, reader->label, &reader->record, &inner);
    if (status != KVK_OK) {
        return refuse(reader, reader->line, "", "%.140s", inner.text);
    }
    set_defaults(reader->section, reader->record);
    return KVK_OK;
}

/* `text` is what stood between the brackets. */
static enum kvk_status begin_section(struct reader *reader, char *text)
{
    enum kvk_status status = end_section(reader);
    if (status != KVK_OK) {
        return status;
    }
    size_t name_size = strcspn(text, " \t");
    const char *label = text + name_size + strspn(text + name_size, " \t");
    text[name_size] = '\0';
    reader->section = NULL;
    reader->label[0] = '\0';
    reader->section_line = reader->line;
    reader->fields_seen = 0;
    if (strlen(label) >= sizeof(reader->label)) {
        return refuse(reader, reader->line, "", "[%.40s …]: the name is longer than %d bytes", text,
                      KVK_OPTION_LABEL_SIZE - 1);
    }
    for (size_t i = 0; i < reader->table->section_count; i++) {
        const struct kvk_option_section *section = &reader->table->sections[i];
        if (strcmp(section->name, text) == 0) {
            reader->section = section;
            (void)snprintf(reader->label, sizeof(reader->label), "%s", label);
            return section->open != NULL ? begin_repeated(reader, i) : begin_once(reader, i);
        }
    }
    return refuse(reader, reader->line, "", "no section is named [%.40s]", text);
}

/* ---- Lines ---- */

static bool is_blank(char byte)
{
    return byte == ' ' || byte == '\t';
}

/* Cut blanks from both ends, in place. */
static char *trim(char *text)
{
    while (is_blank(*text)) {
        text++;
    }
    size_t size = strlen(text);
    while (size > 0 && is_blank(text[size - 1])) {
        size--;
    }
    text[size] = '\0';
    return text;
}

/* Cut a comment: '#' or ';' at the start or behind a blank, outside quotes. */
static void cut_comment(char *text)
{
    bool quoted = false;
    for (size_t i = 0; text[i] != '\0'; i++) {
        if (text[i] == '"') {
            quoted = !quoted;
        }
        bool begins = text[i] == '#' || text[i] == ';';
        if (begins && !quoted && (i == 0 || is_blank(text[i - 1]))) {
            text[i] = '\0';
            return;
        }
    }
}

/* Take the quotes off. False: there is only one, or something behind the second. */
static bool unquote(char **value)
{
    char *text = *value;
    if (text[0] != '"') {
        return strchr(text, '"') == NULL;
    }
    char *end = strchr(text + 1, '"');
    if (end == NULL || end[1] != '\0') {
        return false;
    }
    *end = '\0';
    *value = text + 1;
    return true;
}

static enum kvk_status read_field(struct reader *reader, const char *name, const char *value)
{
    const struct kvk_option_section *section = reader->section;
    for (size_t i = 0; i < section->field_count; i++) {
        if (strcmp(section->fields[i].name, name) != 0) {
            continue;
        }
        if ((reader->fields_seen >> i & 1) != 0) {
            return refuse(reader, reader->line, name, "comes twice in this section");
        }
        reader->fields_seen |= UINT64_C(1) << i;
        char reason[REASON_SIZE] = "is not valid";
        if (!kvk_options_read_value(&section->fields[i], reader->record, value, reason,
                                    sizeof(reason))) {
            if (section->fields[i].secret) {
                return refuse(reader, reader->line, name, "%.120s", reason);
            }
            return refuse(reader, reader->line, name, "\"%.24s%s\" %.120s", value,
                          strlen(value) > 24 ? "…" : "", reason);
        }
        return KVK_OK;
    }
    return refuse(reader, reader->line, name, "no such field");
}

static enum kvk_status read_pair(struct reader *reader, char *text)
{
    char *equals = strchr(text, '=');
    if (equals == NULL) {
        return refuse(reader, reader->line, "", "\"%.40s\" is neither [section] nor name = value",
                      text);
    }
    *equals = '\0';
    const char *name = trim(text);
    char *value = trim(equals + 1);
    if (reader->section == NULL) {
        return refuse(reader, reader->line, "", "\"%.40s\" stands before the first [section]",
                      name);
    }
    if (!unquote(&value)) {
        return refuse(reader, reader->line, name, "a quote without its pair");
    }
    return read_field(reader, name, value);
}

static enum kvk_status read_line(struct reader *reader, char line[LINE_SIZE], const char *bytes,
                                 size_t size)
{
    if (size > 0 && bytes[size - 1] == '\r') {
        size--;
    }
    if (size >= LINE_SIZE) {
        return refuse(reader, reader->line, "", "the line is longer than %d bytes", LINE_SIZE - 1);
    }
    if (!kvk_utf8_ok(bytes, size)) {
        return refuse(reader, reader->line, "", "the line is not UTF-8");
    }
    memcpy(line, bytes, size);
    line[size] = '\0';
    cut_comment(line);
    char *text = trim(line);
    size_t length = strlen(text);
    if (length == 0) {
        return KVK_OK;
    }
    if (text[0] != '[') {
        return read_pair(reader, text);
    }
    if (text[length - 1] != ']') {
        return refuse(reader, reader->line, "", "a [section] without its \"]\"");
    }
    text[length - 1] = '\0';
    return begin_section(reader, trim(text + 1));
}

static enum kvk_status read_lines(struct reader *reader, const char *text, size_t size)
{
    char line[LINE_SIZE] = {0};
    size_t at = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    enum kvk_status status = KVK_OK;
    while (at < size && status == KVK_OK) {
        const char *end = memchr(text + at, '\n', size - at);
        size_t length = end != NULL ? (size_t)(end - (text + at)) : size - at;
        reader->line++;
        status = read_line(reader, line, text + at, length);
        at += length + 1;
    }
    kvk_secret_wipe(line, sizeof(line)); /* a value may be one */
    return status == KVK_OK ? end_file(reader) : status;
}

enum kvk_status kvk_options_load_text(const struct kvk_option_table *table, void *target,
                                      const char *name, const char *text, size_t text_size,
                                      struct kvk_error *error)
{
    KVK_ASSERT(table->section_count <= KVK_OPTION_SECTION_COUNT_MAX);
    struct reader reader = {.table = table, .target = target, .name = name, .error = error};
    enum kvk_status status = read_lines(&reader, text, text_size);
    while (reader.labels != NULL) {
        struct label *gone = reader.labels;
        reader.labels = gone->next;
        free(gone);
    }
    return status;
}

/* ---- Files ---- */

static enum kvk_status refuse_file(struct kvk_error *error, const char *path, const char *reason)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "config", "%s: %s", path, reason);
}

enum kvk_status kvk_options_load(const struct kvk_option_table *table, void *target,
                                 const char *path, struct kvk_error *error)
{
    FILE *file = fopen(path, "rbe");
    if (file == NULL) {
        return refuse_file(error, path, strerror(errno));
    }
    enum kvk_status status = KVK_OK;
    char *text = malloc(KVK_OPTION_FILE_BYTES_MAX + 1);
    if (text == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "config", "no memory");
        goto close_file;
    }
    (void)setvbuf(file, NULL, _IONBF, 0); /* no copy that nobody wipes */
    size_t size = fread(text, 1, KVK_OPTION_FILE_BYTES_MAX + 1, file);
    if (ferror(file) != 0) {
        status = refuse_file(error, path, strerror(errno));
    } else if (size > KVK_OPTION_FILE_BYTES_MAX) {
        status = refuse_file(error, path, "larger than 4 MiB");
    } else {
        status = kvk_options_load_text(table, target, path, text, size, error);
    }
    kvk_secret_wipe(text, size); /* tokens may be in it */
    free(text);
close_file:
    (void)fclose(file); /* only read from */
    return status;
}
