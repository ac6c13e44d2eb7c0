/* The audit log: every line whole JSON, nobody else may read it, and it does not grow for ever. */
#include "daemon/audit.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

static char folder[64];
static struct kvk_error error;

static void folder_make(void)
{
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)snprintf(folder, sizeof(folder), "/tmp/kvk-audit-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static const char *path_of(const char *name)
{
    static char path[128];
    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static char *content_of(const char *name)
{
    FILE *file = fopen(path_of(name), "r");
    if (file == NULL) {
        return NULL;
    }
    char *text = calloc(1, 1 << 20);
    cr_assert_not_null(text);
    size_t size = fread(text, 1, (1 << 20) - 1, file);
    text[size] = '\0';
    (void)fclose(file);
    return text;
}

static void folder_remove(void)
{
    (void)unlink(path_of("audit.log"));
    (void)unlink(path_of("audit.log.1"));
    (void)rmdir(folder);
}

static const struct kvk_audit_entry plain = {.who = "operator",
                                             .peer = "unix:uid=0",
                                             .call = "CreateTenant",
                                             .object = "a",
                                             .details = "mode=on",
                                             .result = KVK_OK,
                                             .reason = ""};

Test(engine_audit, lines)
{
    struct kvk_audit *audit = NULL;
    struct stat state;
    folder_make();
    cr_assert_eq(kvk_audit_open(folder, KVK_AUDIT_BYTES_MAX, &audit, &error), KVK_OK);
    kvk_audit_write(audit, &plain);
    kvk_audit_close(audit);
    /* Appended to after a restart. */
    cr_assert_eq(kvk_audit_open(folder, KVK_AUDIT_BYTES_MAX, &audit, &error), KVK_OK);
    struct kvk_audit_entry odd = plain;
    odd.object = "q\"uo\\te\nline\x7f \xc3\x85";
    odd.result = KVK_PERMISSION;
    odd.reason = "the credential has no admin rights";
    kvk_audit_write(audit, &odd);
    struct kvk_audit_stats stats;
    kvk_audit_stats(audit, &stats);
    cr_expect_eq(stats.entries, 1);
    cr_expect_eq(stats.failures, 0);
    kvk_audit_close(audit);
    char *text = content_of("audit.log");
    cr_assert_not_null(text);
    cr_expect(strncmp(text, "{\"time\":\"20", 11) == 0, "%s", text);
    cr_expect(strstr(text, "\"who\":\"operator\",\"peer\":\"unix:uid=0\",\"call\":\"CreateTenant\","
                           "\"object\":\"a\",\"details\":\"mode=on\",\"result\":\"OK\"") != NULL,
              "%s", text);
    char *second = strchr(text, '\n') + 1;
    cr_expect(strstr(second, "q\\\"uo\\\\te\\u000aline\\u007f \xc3\x85\"") != NULL, "%s", second);
    cr_expect(strstr(second, "\"result\":\"PERMISSION\",\"reason\":\"the credential") != NULL);
    cr_expect_null(strchr(strchr(second, '\n') + 1, '\n'));
    cr_expect_eq(stat(path_of("audit.log"), &state), 0);
    cr_expect_eq(state.st_mode & 0777, 0600);
    free(text);
    folder_remove();
}

/* Names as long as they can be: the line is cut inside its fields, never behind them. */
Test(engine_audit, long_fields_leave_whole_lines)
{
    struct kvk_audit *audit = NULL;
    static char long_text[5000];
    folder_make();
    for (size_t i = 0; i + 2 < sizeof(long_text); i += 2) {
        long_text[i] = '\xc3';
        long_text[i + 1] = '\x85';
    }
    cr_assert_eq(kvk_audit_open(folder, KVK_AUDIT_BYTES_MAX, &audit, &error), KVK_OK);
    struct kvk_audit_entry entry = plain;
    entry.who = entry.peer = entry.object = entry.details = entry.reason = long_text;
    kvk_audit_write(audit, &entry);
    memset(long_text, '\n', sizeof(long_text) - 1);
    kvk_audit_write(audit, &entry);
    kvk_audit_close(audit);
    char *text = content_of("audit.log");
    cr_assert_not_null(text);
    size_t size = strlen(text);
    cr_expect_str_eq(text + size - 3, "\"}\n");
    char *end = strchr(text, '\n');
    cr_expect_eq(memcmp(end - 2, "\"}", 2), 0);
    cr_expect_eq(strchr(end + 1, '\n'), text + size - 1);
    free(text);
    folder_remove();
}

Test(engine_audit, bounded_by_one_rotation)
{
    struct kvk_audit *audit = NULL;
    folder_make();
    cr_assert_eq(kvk_audit_open(folder, 1000, &audit, &error), KVK_OK);
    for (int i = 0; i < 100; i++) {
        kvk_audit_write(audit, &plain);
    }
    struct kvk_audit_stats stats;
    kvk_audit_stats(audit, &stats);
    cr_expect_eq(stats.entries, 100);
    cr_expect_eq(stats.failures, 0);
    kvk_audit_close(audit);
    for (int i = 0; i < 2; i++) {
        char *text = content_of(i == 0 ? "audit.log" : "audit.log.1");
        cr_assert_not_null(text);
        cr_expect_leq(strlen(text), 1000u);
        cr_expect_geq(strlen(text), 100u);
        cr_expect_eq(strncmp(text, "{\"time\"", 7), 0);
        free(text);
    }
    folder_remove();
}

Test(engine_audit, what_cannot_be_written)
{
    struct kvk_audit *audit = NULL;
    struct kvk_audit_stats stats;
    cr_expect_eq(kvk_audit_open("/nonexistent", 1000, &audit, &error), KVK_PRECONDITION);
    cr_expect_str_eq(error.field, "durable.folder");
    cr_assert_eq(kvk_audit_open("", 1000, &audit, &error), KVK_OK);
    kvk_audit_write(audit, &plain);
    kvk_audit_stats(audit, &stats);
    cr_expect_eq(stats.failures, 0);
    kvk_audit_close(audit);
    /* The file is no file any more: counted, and told. */
    kvk_log_set_level(KVK_LOG_ERROR);
    folder_make();
    cr_assert_eq(kvk_audit_open(folder, 10, &audit, &error), KVK_OK);
    kvk_audit_write(audit, &plain);
    cr_assert_eq(mkdir(path_of("audit.log.1"), 0700), 0);
    kvk_audit_write(audit, &plain);
    kvk_audit_stats(audit, &stats);
    cr_expect_eq(stats.failures, 1);
    kvk_audit_close(audit);
    (void)rmdir(path_of("audit.log.1"));
    folder_remove();
}
