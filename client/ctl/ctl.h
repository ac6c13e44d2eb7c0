/*
 * kvkeepctl: what its commands share: the connection, the way errors and tables look, progress.
 *
 * Exit codes: 0 done; 1 the daemon or the work failed; 2 wrong usage; 3 no daemon there.
 */
#ifndef KVK_CLIENT_CTL_CTL_H
#define KVK_CLIENT_CTL_CTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/connection.h"
#include "client/kvkeep.h"

enum {
    CTL_OK = 0,
    CTL_FAILED = 1,
    CTL_USAGE = 2,
    CTL_NO_DAEMON = 3,
};

/* Options before or after the command's name. */
struct ctl_options {
    const char *target;           /* never NULL */
    const char *token;            /* NULL: none */
    const struct kvkeep_tls *tls; /* NULL: none */
    bool json;
    bool connect_given; /* --connect was there */
};

/* One command: argv[0] is its name; what is common was taken out. */
struct ctl_command {
    const char *name;
    const char *summary; /* one line */
    const char *usage;   /* options, one a line */
    int (*run)(const struct ctl_options *options, int argc, char **argv);
};

/* Print how a command is used, and before it what is wrong; CTL_USAGE. After
 * ctl_usage_is_asked_for() it is an answer: without a complaint, and on standard output. */
int ctl_usage(const struct ctl_command *command, const char *complaint);
/* The same, where what is wrong is a sentence and not what the command wants. */
int ctl_usage_told(const struct ctl_command *command, const char *sentence);
void ctl_usage_is_asked_for(void);

/* An option's value is not what it must be: print which, what was given and what is meant, and not
 * the whole of the usage, in which that would be lost; CTL_USAGE. */
int ctl_option_wrong(const char *command, const char *option, const char *value,
                     const char *wanted);

/* Print a failure with its cause and hint; the exit code for it. */
int ctl_fail(const char *what, const struct kvk_error *error);

/* One admin call; NULL: failed, and printed; *code is the exit code. */
void *ctl_admin_call(const struct ctl_options *options, const char *method,
                     const ProtobufCMessage *request,
                     const ProtobufCMessageDescriptor *response_type, int *code);

/* The same for calls that may take their time: the answer is waited for so long. */
void *ctl_admin_call_within(const struct ctl_options *options, const char *method,
                            const ProtobufCMessage *request,
                            const ProtobufCMessageDescriptor *response_type, uint32_t timeout_ms,
                            int *code);

/* A space by its number, or the one space of that model (of that tenant; NULL: any). 0: none, and
 * it was said; *code is the exit code. */
uint64_t ctl_space_find(const struct ctl_options *options, const char *command, const char *name,
                        const char *tenant, int *code);

/* ---- tables for people ---- */

#define CTL_COLUMNS_MAX 16

struct ctl_table {
    uint32_t column_count;
    const char *titles[CTL_COLUMNS_MAX]; /* a leading '-' aligns left */
    char **cells;                        /* [row_count][column_count], ours */
    uint32_t row_count;
};

void ctl_table_init(struct ctl_table *table, uint32_t column_count, const char *const *titles);
/* Texts of one row, printf-like each, separated by '\t' in the format's output. */
void ctl_table_row(struct ctl_table *table, const char *format, ...) KVK_PRINTF(2, 3);
void ctl_table_print(struct ctl_table *table); /* and finish */

/* "12.5 GiB", "3.2 s"; in a static ring of buffers, for printf arguments. */
const char *ctl_bytes(uint64_t bytes);
const char *ctl_duration_ms(uint64_t ms);
const char *ctl_count(uint64_t count); /* with thousands separators */

/* A bytes field as text that a terminal can show; same ring. */
const char *ctl_text(ProtobufCBinaryData data);
const char *ctl_mode_name(int mode); /* the API's Mode; "on" where it is not given */

/* Print a JSON value on one line and free it. */
void ctl_json_print(json_t *value);
json_t *ctl_json_text(ProtobufCBinaryData data);

/* Print rows that were made both ways: the table, or with --json the list; and finish both. */
void ctl_list_print(const struct ctl_options *options, struct ctl_table *table, json_t *list,
                    bool more);

/* ---- progress on a terminal (silent elsewhere) ---- */

struct ctl_progress {
    const char *what;
    uint64_t total;
    uint64_t started_ns;
    uint64_t shown_ns;
};
void ctl_progress_begin(struct ctl_progress *progress, const char *what, uint64_t total);
void ctl_progress_show(struct ctl_progress *progress, uint64_t done);
void ctl_progress_end(struct ctl_progress *progress);

/* Parse a count such as 12, 4k, 2M. False: it is none. */
bool ctl_parse_count(const char *text, uint64_t *count);

/* What the daemon's scrub found, for `status`: printed, or as JSON. Admins only; NULL: no answer.
 */
void ctl_scrub_print(const struct ctl_options *options);
json_t *ctl_scrub_json(const struct ctl_options *options);

/* ---- the commands ---- */

int ctl_status(const struct ctl_options *options, int argc, char **argv);
int ctl_tenants(const struct ctl_options *options, int argc, char **argv);
int ctl_tenant(const struct ctl_options *options, int argc, char **argv);
int ctl_credential(const struct ctl_options *options, int argc, char **argv);
int ctl_spaces(const struct ctl_options *options, int argc, char **argv);
int ctl_space(const struct ctl_options *options, int argc, char **argv);
int ctl_sequences(const struct ctl_options *options, int argc, char **argv);
int ctl_leases(const struct ctl_options *options, int argc, char **argv);
int ctl_instances(const struct ctl_options *options, int argc, char **argv);
int ctl_usage_of_tenants(const struct ctl_options *options, int argc, char **argv);
int ctl_fleet(const struct ctl_options *options, int argc, char **argv);
int ctl_why(const struct ctl_options *options, int argc, char **argv);
/* why, where a prompt is given: why it missed. */
int ctl_why_miss(const struct ctl_options *options, int argc, char **argv);
bool ctl_why_is_miss(int argc, char **argv);
int ctl_doctor(const struct ctl_options *options, int argc, char **argv);
int ctl_audit(const struct ctl_options *options, int argc, char **argv);
int ctl_drain(const struct ctl_options *options, int argc, char **argv);
int ctl_mrc(const struct ctl_options *options, int argc, char **argv);
int ctl_invalidate(const struct ctl_options *options, int argc, char **argv);
int ctl_publish(const struct ctl_options *options, int argc, char **argv);
int ctl_unpublish(const struct ctl_options *options, int argc, char **argv);
int ctl_public(const struct ctl_options *options, int argc, char **argv);
int ctl_stats(const struct ctl_options *options, int argc, char **argv);
int ctl_top(const struct ctl_options *options, int argc, char **argv);
int ctl_replay(const struct ctl_options *options, int argc, char **argv);
int ctl_demo(const struct ctl_options *options, int argc, char **argv);
int ctl_bench(const struct ctl_options *options, int argc, char **argv);
int ctl_plan(const struct ctl_options *options, int argc, char **argv);

#endif
