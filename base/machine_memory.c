#include "base/machine_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define PATH_SIZE 4352 /* a control group's path, and what stands around it */
#define KIB UINT64_C(1024)
#define GROUPS_PATH "/sys/fs/cgroup"

/* ---- Small files ---- */

static FILE *file_open(const char *root, const char *folder, const char *name)
{
    char path[PATH_SIZE];
    int size = snprintf(path, sizeof(path), "%s%s/%s", root, folder, name);
    return size > 0 && (size_t)size < sizeof(path) ? fopen(path, "re") : NULL;
}

/* A file that is one number; false: it is none ("max"), or not there. */
static bool number_read(const char *root, const char *folder, const char *name, uint64_t *number)
{
    unsigned long long value = 0;
    FILE *file = file_open(root, folder, name);
    if (file == NULL) {
        return false;
    }
    bool is_number = fscanf(file, "%llu", &value) == 1; /* NOLINT(cert-err34-c) */
    (void)fclose(file);
    *number = value;
    return is_number;
}

/* The sum of the lines "name number" of a file whose names are among these, "a|b". */
static uint64_t lines_sum(const char *root, const char *folder, const char *name,
                          const char *wanted)
{
    uint64_t sum = 0;
    char line[256];
    FILE *file = file_open(root, folder, name);
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        size_t size = strcspn(line, " \t:");
        const char *at = wanted;
        while (at != NULL && (strncmp(at, line, size) != 0 || strcspn(at, "|") != size)) {
            at = strchr(at, '|');
            at = at != NULL ? at + 1 : NULL;
        }
        if (at != NULL) {
            sum += strtoull(line + size + strspn(line + size, " \t:"), NULL, 10);
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return sum;
}

/* ---- Control groups ---- */

/* The names of the same things in both versions. */
struct names {
    const char *limit, *used, *files;
};

static const struct names versions[] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file|total_active_file"},
    {"memory.max", "memory.current", "inactive_file|active_file"},
};

static void group_take(const char *root, const char *folder, const struct names *names,
                       struct kvk_machine_memory *memory)
{
    uint64_t limit = 0;
    uint64_t used = 0;
    if (!number_read(root, folder, names->limit, &limit) ||
        !number_read(root, folder, names->used, &used)) {
        return;
    }
    uint64_t files = lines_sum(root, folder, "memory.stat", names->files);
    used = used > files ? used - files : 0;
    uint64_t available = limit > used ? limit - used : 0;
    if (limit < memory->limit_bytes) {
        memory->limit_bytes = limit;
        memory->is_group = true;
    }
    if (available < memory->available_bytes) {
        memory->available_bytes = available;
    }
}

/* The group of this path and all above it. */
static void groups_take(const char *root, const char *mount, char *path, const struct names *names,
                        struct kvk_machine_memory *memory)
{
    char folder[PATH_SIZE];
    for (;;) {
        int size = snprintf(folder, sizeof(folder), "%s%s", mount, path);
        if (size > 0 && (size_t)size < sizeof(folder)) {
            group_take(root, folder, names, memory);
        }
        char *slash = strrchr(path, '/');
        if (slash == NULL) {
            return;
        }
        *slash = '\0';
    }
}

bool kvk_machine_memory(const char *root, struct kvk_machine_memory *memory)
{
    char line[PATH_SIZE - 256];
    *memory = (struct kvk_machine_memory){
        .limit_bytes = lines_sum(root, "/proc", "meminfo", "MemTotal") * KIB,
        .available_bytes = lines_sum(root, "/proc", "meminfo", "MemAvailable") * KIB,
    };
    uint64_t reserved = lines_sum(root, "/proc", "meminfo", "Hugetlb") * KIB; /* for others */
    if (memory->limit_bytes <= reserved) {
        return false;
    }
    memory->limit_bytes -= reserved;
    FILE *file = file_open(root, "/proc/self", "cgroup");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        /* "0::/path" of version 2, "4:memory:/path" of version 1; containers see "/". */
        line[strcspn(line, "\n")] = '\0';
        char *path = strchr(line, '/');
        if (path == NULL) {
            continue;
        }
        if (path[1] == '\0') {
            *path = '\0';
        }
        const char *controller = strstr(line, "memory");
        if (strncmp(line, "0::", 3) == 0) {
            groups_take(root, GROUPS_PATH, path, &versions[1], memory);
        } else if (controller != NULL && controller < path) {
            groups_take(root, GROUPS_PATH "/memory", path, &versions[0], memory);
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return true;
}
