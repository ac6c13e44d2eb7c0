/* A table of options as a commented file, and as a page of the manual. */
#include "base/options.h"

#include <string.h>

#include "base/options_value.h"

#define WIDTH 98

/* Words of `text`, wrapped, each line behind "# ". */
static void print_comment(FILE *file, const char *text)
{
    size_t column = 0;
    while (*text != '\0') {
        size_t size = strcspn(text, " ");
        if (column > 0 && column + 1 + size > WIDTH) {
            (void)fputc('\n', file);
            column = 0;
        }
        (void)fprintf(file, "%s%.*s", column == 0 ? "# " : " ", (int)size, text);
        column += size + (column == 0 ? 2 : 1);
        text += size;
        text += strspn(text, " ");
    }
    (void)fputc('\n', file);
}

static bool needs_quotes(const char *value)
{
    size_t size = strlen(value);
    return size == 0 || strpbrk(value, "#;") != NULL || value[0] == ' ' || value[size - 1] == ' ';
}

static void print_field(FILE *file, const struct kvk_option_section *section,
                        const struct kvk_option_field *field)
{
    char range[128];
    char note[160];
    kvk_option_range(field, range, sizeof(range));
    (void)snprintf(note, sizeof(note), "(%s%s)", range,
                   field->fallback == NULL ? "; required" : "");
    (void)fputc('\n', file);
    print_comment(file, field->help);
    print_comment(file, note);
    /* A repeated section is an example, so all of it stays a comment. */
    const char *mark = section->open != NULL ? "# " : "";
    const char *value = field->fallback != NULL ? field->fallback : "";
    const char *quote = needs_quotes(value) ? "\"" : "";
    (void)fprintf(file, "%s%s = %s%s%s\n", mark, field->name, quote, value, quote);
}

void kvk_options_print(const struct kvk_option_table *table, FILE *file)
{
    for (size_t i = 0; i < table->section_count; i++) {
        const struct kvk_option_section *section = &table->sections[i];
        if (i > 0) {
            (void)fputc('\n', file);
        }
        print_comment(file, section->help);
        if (section->open != NULL) {
            (void)fprintf(file, "# [%s NAME]\n", section->name);
        } else {
            (void)fprintf(file, "[%s]\n", section->name);
        }
        for (size_t j = 0; j < section->field_count; j++) {
            print_field(file, section, &section->fields[j]);
        }
    }
}

void kvk_options_print_markdown(const struct kvk_option_table *table, FILE *file)
{
    for (size_t i = 0; i < table->section_count; i++) {
        const struct kvk_option_section *section = &table->sections[i];
        (void)fprintf(file, "%s## `[%s%s]`\n\n%s\n\n", i > 0 ? "\n" : "", section->name,
                      section->open != NULL ? " NAME" : "", section->help);
        if (section->field_count == 0) {
            continue;
        }
        (void)fprintf(file, "| field | default | range | what it does |\n|---|---|---|---|\n");
        for (size_t j = 0; j < section->field_count; j++) {
            const struct kvk_option_field *field = &section->fields[j];
            char range[128];
            kvk_option_range(field, range, sizeof(range));
            const char *value = field->fallback;
            (void)fprintf(file, "| `%s` | %s%s%s | %s | %s |\n", field->name,
                          value != NULL && value[0] != '\0' ? "`" : "",
                          value == NULL      ? "required"
                          : value[0] == '\0' ? "empty"
                                             : value,
                          value != NULL && value[0] != '\0' ? "`" : "", range, field->help);
        }
    }
}
