/*
 * Configuration files, described by a table: every field with its kind, default, range and help.
 *
 *     # comment
 *     [tiers]
 *     host = 4 GiB        # a comment behind a value needs a blank before it
 *
 *     [tenant alice]      # a section that may come again under another name
 *     note = "quotes keep blanks, # and ;"
 *
 * One table serves three ends, so that they cannot drift apart: reading a file into structs,
 * printing the default file, and printing the page of the manual. Everything that a file says is
 * checked here, at the edge: unknown sections and fields, fields and sections that come twice,
 * numbers out of range, without a unit, negative, not a number or with something behind them. An
 * error names file, line, section, field and limit.
 *
 * Line reading is ours: of the stock readers, inih hides line numbers and empty sections and cuts
 * names at 50 bytes and lines at 200 without saying so.
 */
#ifndef KVK_BASE_OPTIONS_H
#define KVK_BASE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

#define KVK_OPTION_FILE_BYTES_MAX (UINT64_C(4) << 20)
#define KVK_OPTION_LABEL_SIZE 256 /* of a repeated section's name, NUL included */
#define KVK_OPTION_FIELD_COUNT_MAX 64
#define KVK_OPTION_SECTION_COUNT_MAX 32

enum kvk_option_kind {
    KVK_OPTION_SIZE,     /* bytes: 0, or a whole number with B, KiB, MiB, GiB or TiB */
    KVK_OPTION_DURATION, /* milliseconds: 0, or a whole number with ms, s, min or h */
    KVK_OPTION_COUNT,    /* a whole number */
    KVK_OPTION_MODE,     /* permission bits, octal */
    KVK_OPTION_BOOL,     /* yes or no */
    KVK_OPTION_TEXT,     /* UTF-8; minimum and maximum count bytes */
    KVK_OPTION_CHOICE,   /* one word of `choices`; its index is stored */
    KVK_OPTION_CUSTOM,   /* `read` makes of the text what it likes */
};

/* Where a field lies in its record: member of a struct. */
#define KVK_OPTION_AT(type, member)                                                                \
    .offset = offsetof(type, member), .width = sizeof(((type *)0)->member)

struct kvk_option_field {
    const char *name;
    enum kvk_option_kind kind;
    size_t offset;        /* by KVK_OPTION_AT */
    size_t width;         /* numbers: 4 or 8 bytes; bool: 1; text: the array's size; choice: 4 */
    const char *fallback; /* the default as a file would say it; NULL: the field is required */
    uint64_t minimum;
    uint64_t maximum;           /* 0: as much as the member holds */
    const char *const *choices; /* ended by NULL */
    bool secret;                /* errors do not show the value */
    const char *range;          /* CUSTOM: what it takes, for the manual; NULL: "text" */
    /* CUSTOM: store `text` at `member` of `record`. False: refused, with `reason` filled. */
    bool (*read)(void *record, void *member, const char *text, char *reason, size_t reason_size);
    const char *help; /* one or more sentences; wrapped where printed */
};

struct kvk_option_section {
    const char *name;
    const char *help;
    const struct kvk_option_field *fields; /* [field_count] */
    size_t field_count;
    size_t offset; /* of the record within the target; not for repeated ones */
    /* Repeated sections: [name LABEL]. NULL: the section comes once, without a label. Gives the
     * record that the section's fields go to, at its defaults soon after; it must stay in place
     * until the next call. The label is not empty, valid UTF-8 and was not seen before in this
     * file. */
    enum kvk_status (*open)(void *target, const char *label, void **record,
                            struct kvk_error *error);
    uint32_t count_max; /* of repeated ones */
};

struct kvk_option_table {
    const struct kvk_option_section *sections; /* [section_count] */
    size_t section_count;
};

/* Defaults into every section that comes once. A table whose defaults do not pass its own checks
 * is a bug, and aborts. */
void kvk_options_init(const struct kvk_option_table *table, void *target);

/* Read over what `target` holds. On failure some fields may have been stored. */
KVK_CHECKED enum kvk_status kvk_options_load(const struct kvk_option_table *table, void *target,
                                             const char *path, struct kvk_error *error);

/* The same from memory; `name` stands for the file in errors. */
KVK_CHECKED enum kvk_status kvk_options_load_text(const struct kvk_option_table *table,
                                                  void *target, const char *name, const char *text,
                                                  size_t text_size, struct kvk_error *error);

/* One value, as a file would say it. `reason` says what is wrong: "must be 1 to 64". */
KVK_CHECKED bool kvk_options_read_value(const struct kvk_option_field *field, void *record,
                                        const char *text, char *reason, size_t reason_size);

/* A file that says what the defaults say, every field explained. */
void kvk_options_print(const struct kvk_option_table *table, FILE *file);

/* The page of the manual: one Markdown table a section. */
void kvk_options_print_markdown(const struct kvk_option_table *table, FILE *file);

#endif
