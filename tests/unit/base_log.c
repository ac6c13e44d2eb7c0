/* A log line is one line, in one write, with the event first. */
#include "base/log.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

static int ends[2];

static void open_pipe(void)
{
    cr_assert_eq(pipe(ends), 0);
    kvk_log_set_descriptor(ends[1]);
}

/* What was written since, as text; lines are short, so one read gets them all. */
static const char *written(void)
{
    static char text[8 * KVK_LOG_LINE_SIZE];
    kvk_log(KVK_LOG_ERROR, "end", "%s", ""); /* so that the read does not wait */
    ssize_t size = read(ends[0], text, sizeof(text) - 1);
    cr_assert_gt(size, 0);
    text[size] = '\0';
    char *end = strstr(text, "end level=error");
    cr_assert_not_null(end);
    *end = '\0';
    return text;
}

Test(base_log, event_first_then_pairs, .init = open_pipe)
{
    kvk_log(KVK_LOG_INFO, "lease_expired", "lease=%d age_ms=%u", 42, 30000U);
    const char *line = written();
    cr_assert_eq(strncmp(line, "lease_expired level=info time=20", 32), 0, "%s", line);
    cr_assert_not_null(strstr(line, "Z up="));
    const char *pairs = strstr(line, " lease=42 age_ms=30000\n");
    cr_assert_not_null(pairs);
    cr_assert_eq(strlen(pairs), strlen(" lease=42 age_ms=30000\n"));
}

Test(base_log, levels, .init = open_pipe)
{
    kvk_log(KVK_LOG_DEBUG, "quiet", "%s", "");
    cr_assert_str_eq(written(), "");
    kvk_log_set_level(KVK_LOG_DEBUG);
    kvk_log(KVK_LOG_DEBUG, "loud", "%s", "");
    cr_assert_eq(strncmp(written(), "loud level=debug ", 17), 0);
    kvk_log_set_level(KVK_LOG_ERROR);
    kvk_log(KVK_LOG_WARNING, "quiet", "%s", "");
    cr_assert_str_eq(written(), "");
    cr_assert_not(kvk_log_enabled(KVK_LOG_WARNING));
    cr_assert(kvk_log_enabled(KVK_LOG_ERROR));
}

Test(base_log, level_names)
{
    enum kvk_log_level level = KVK_LOG_DEBUG;
    cr_assert(kvk_log_level_from_name("warning", &level));
    cr_assert_eq(level, KVK_LOG_WARNING);
    cr_assert_not(kvk_log_level_from_name("warn", &level));
    cr_assert_not(kvk_log_level_from_name("", &level));
    cr_assert_eq(level, KVK_LOG_WARNING);
}

Test(base_log, stays_one_line, .init = open_pipe)
{
    char longer[2 * KVK_LOG_LINE_SIZE];
    memset(longer, 'x', sizeof(longer));
    longer[sizeof(longer) - 1] = '\0';
    longer[3] = '\n';
    longer[4] = '\x1b';
    errno = ENOSPC;
    kvk_log(KVK_LOG_INFO, "long", "value=%s", longer);
    cr_assert_eq(errno, ENOSPC);
    const char *line = written();
    cr_assert_eq(strlen(line), KVK_LOG_LINE_SIZE - 1);
    cr_assert_eq(strchr(line, '\n'), line + strlen(line) - 1);
    cr_assert_not_null(strstr(line, "value=xxx??xxx"));
}

Test(base_log, text_is_quoted_and_cut)
{
    char target[24];
    cr_assert_str_eq(kvk_log_text(target, sizeof(target), "plain"), "\"plain\"");
    cr_assert_str_eq(kvk_log_text(target, sizeof(target), "a\"b\\c\n"), "\"a\\\"b\\\\c\\x0a\"");
    cr_assert_str_eq(kvk_log_text(target, sizeof(target), ""), "\"\"");
    const char *cut = kvk_log_text(target, sizeof(target), "a text that is too long by far");
    cr_assert_leq(strlen(cut), sizeof(target) - 1);
    cr_assert_str_eq(cut + strlen(cut) - 4, "...\"");
    char small[8];
    (void)kvk_log_text(small, sizeof(small), "\n\n\n\n");
    cr_assert_leq(strlen(small), 7);
}
