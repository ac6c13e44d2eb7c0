/*
 * kvkeepctl audit: who changed what, from the audit log in the durable folder.
 *
 * The file is read, not the daemon asked: it is there when the daemon is not, and who may read it
 * is the file system's business (it is for the daemon's user alone). Tokens over the network open
 * no way to it. The older file first; a line that is no entry is counted and left out.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/ctl/ctl.h"

#define LINE_MAX_BYTES 8192
#define TIME_SIZE sizeof("2026-01-31T23:59:59.999Z")

struct filter {
    const char *folder;
    const char *tenant; /* NULL: all, as below */
    const char *who;
    const char *call;
    const char *since; /* as the log writes times, which order as text */
    bool failed;
    char since_text[TIME_SIZE];
};

struct reading {
    const struct filter *filter;
    struct ctl_table table;
    json_t *entries;
    uint64_t shown;
    uint64_t broken; /* lines */
    bool json;
};

static const char *text_of(const json_t *entry, const char *key)
{
    const char *text = json_string_value(json_object_get(entry, key));
    return text != NULL ? text : "";
}

/* Does "key=value key=value…" have the value under one of these keys? */
static bool details_name(const char *details, const char *tenant)
{
    static const char *const keys[] = {"tenant=", "first="};
    size_t size = strlen(tenant);
    for (const char *at = details; at != NULL && *at != '\0';) {
        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
            size_t key = strlen(keys[i]);
            if (strncmp(at, keys[i], key) == 0 && strncmp(at + key, tenant, size) == 0 &&
                (at[key + size] == ' ' || at[key + size] == '\0')) {
                return true;
            }
        }
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    return false;
}

static bool is_wanted(const struct filter *filter, const json_t *entry)
{
    if (filter->tenant != NULL && strcmp(text_of(entry, "object"), filter->tenant) != 0 &&
        !details_name(text_of(entry, "details"), filter->tenant)) {
        return false;
    }
    return (filter->who == NULL || strcmp(text_of(entry, "who"), filter->who) == 0) &&
           (filter->call == NULL || strcmp(text_of(entry, "call"), filter->call) == 0) &&
           (filter->since == NULL || strcmp(text_of(entry, "time"), filter->since) >= 0) &&
           (!filter->failed || strcmp(text_of(entry, "result"), "OK") != 0);
}

/* What stands in a name or a reason may not move a terminal's cursor, or a table's columns. */
static const char *shown(const char *text, char *buffer, size_t size)
{
    size_t length = 0;
    for (; text[length] != '\0' && length + 1 < size; length++) {
        unsigned char byte = (unsigned char)text[length];
        buffer[length] = byte < 0x20 || byte == 0x7f ? '?' : text[length];
    }
    buffer[length] = '\0';
    return buffer;
}

static void entry_take(struct reading *reading, json_t *entry)
{
    char who[256], call[64], object[256], result[32], peer[128], more[512];
    const char *reason = text_of(entry, "reason");
    reading->shown++;
    if (reading->json) {
        (void)json_array_append(reading->entries, entry);
        return;
    }
    const char *details = reason[0] != '\0' ? reason : text_of(entry, "details");
    ctl_table_row(&reading->table, "%s\t%s\t%s\t%s\t%s\t%s\t%s", text_of(entry, "time"),
                  shown(text_of(entry, "who"), who, sizeof(who)),
                  shown(text_of(entry, "call"), call, sizeof(call)),
                  shown(text_of(entry, "object"), object, sizeof(object)),
                  shown(text_of(entry, "result"), result, sizeof(result)),
                  shown(text_of(entry, "peer"), peer, sizeof(peer)),
                  shown(details, more, sizeof(more)));
}

/* False: told. */
static bool file_read(struct reading *reading, const char *name, bool may_be_missing)
{
    char path[4096];
    char line[LINE_MAX_BYTES];
    (void)snprintf(path, sizeof(path), "%s/%s", reading->filter->folder, name);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        if (errno == ENOENT && may_be_missing) {
            return true;
        }
        (void)fprintf(stderr, "kvkeepctl: audit: %s: %s\n", path, strerror(errno));
        return false;
    }
    while (fgets(line, sizeof(line), file) != NULL) {
        json_t *entry = json_loads(line, 0, NULL);
        if (!json_is_object(entry) || text_of(entry, "time")[0] == '\0') {
            reading->broken++;
        } else if (is_wanted(reading->filter, entry)) {
            entry_take(reading, entry);
        }
        json_decref(entry);
    }
    (void)fclose(file);
    return true;
}

/* "2026-11-29", "2026-11-29T22:00:00" (UTC), or how long ago: "90s", "30m", "2h", "7d". */
static bool since_parse(struct filter *filter, const char *text)
{
    char *end = NULL;
    unsigned long count = strtoul(text, &end, 10);
    const char *units = "smhd";
    const time_t seconds[] = {1, 60, 3600, 86400};
    const char *unit = *end != '\0' && end != text && end[1] == '\0' ? strchr(units, *end) : NULL;
    if (unit != NULL && count < 100000) {
        struct tm broken;
        time_t at = time(NULL) - (time_t)count * seconds[unit - units];
        if (gmtime_r(&at, &broken) == NULL ||
            strftime(filter->since_text, sizeof(filter->since_text), "%Y-%m-%dT%H:%M:%S",
                     &broken) == 0) {
            return false;
        }
        filter->since = filter->since_text;
        return true;
    }
    struct tm broken = {.tm_sec = 0};
    const char *rest = strptime(text, "%Y-%m-%d", &broken);
    if (rest != NULL && *rest == 'T') {
        rest = strptime(rest, "T%H:%M:%S", &broken);
    }
    filter->since = text;
    return rest != NULL && (*rest == '\0' || strcmp(rest, "Z") == 0);
}

static const char *filter_parse(struct filter *filter, int argc, char **argv)
{
    static const struct option names[] = {{"folder", required_argument, NULL, 'f'},
                                          {"tenant", required_argument, NULL, 't'},
                                          {"who", required_argument, NULL, 'w'},
                                          {"action", required_argument, NULL, 'a'},
                                          {"since", required_argument, NULL, 's'},
                                          {"failed", no_argument, NULL, 'x'},
                                          {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'f':
            filter->folder = optarg;
            break;
        case 't':
            filter->tenant = optarg;
            break;
        case 'w':
            filter->who = optarg;
            break;
        case 'a':
            filter->call = optarg;
            break;
        case 's':
            if (!since_parse(filter, optarg)) {
                return "--since takes a date, a time or an age: 2026-01-31, 2026-01-31T12:00:00, "
                       "30m, 2h, 7d";
            }
            break;
        case 'x':
            filter->failed = true;
            break;
        default:
            return "unknown option";
        }
    }
    if (optind != argc) {
        return "no arguments beside the options";
    }
    return filter->folder == NULL ? "--folder is needed: the daemon's durable.folder" : NULL;
}

int ctl_audit(const struct ctl_options *options, int argc, char **argv)
{
    static const struct ctl_command command = {
        .name = "audit",
        .usage = "  --folder FOLDER   the daemon's durable.folder; needed\n"
                 "  --tenant NAME     entries about this tenant\n"
                 "  --who NAME        by this credential\n"
                 "  --action CALL     of this call, such as CreateTenant\n"
                 "  --since WHEN      a date or a time (UTC), or an age: 30m, 2h, 7d\n"
                 "  --failed          only what was refused or failed\n"
                 "  Reads the file, so it needs no daemon, and the right to read the folder.\n"};
    static const char *const titles[] = {"-time (UTC)", "-who",  "-action", "-object",
                                         "-result",     "-from", "-details"};
    struct filter filter = {.folder = NULL};
    const char *complaint = filter_parse(&filter, argc, argv);
    if (complaint != NULL) {
        return ctl_usage_told(&command, complaint);
    }
    struct reading reading = {.filter = &filter, .json = options->json};
    ctl_table_init(&reading.table, sizeof(titles) / sizeof(titles[0]), titles);
    reading.entries = json_array();
    bool read = file_read(&reading, "audit.log.1", true) && file_read(&reading, "audit.log", false);
    if (read && options->json) {
        ctl_json_print(json_incref(reading.entries));
    } else if (read && reading.shown > 0) {
        ctl_table_print(&reading.table);
    }
    if (reading.broken > 0) {
        (void)fprintf(stderr, "kvkeepctl: audit: %s lines are no entries and were left out\n",
                      ctl_count(reading.broken));
    }
    json_decref(reading.entries);
    return read ? CTL_OK : CTL_FAILED;
}
