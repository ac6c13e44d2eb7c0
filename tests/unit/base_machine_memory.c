/*
 * How much memory there is, from made-up machines: without control groups, in groups of both
 * versions, nested, without a limit, with names as long as they come; and from the real one.
 */
#include "base/machine_memory.h"

#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/folder.h"

#define MIB (UINT64_C(1) << 20)

static char root[64];

/* With all folders on the way. */
static void put(const char *name, const char *text)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file, "%s", path);
    cr_assert_geq(fputs(text, file), 0);
    cr_assert_eq(fclose(file), 0);
}

/* 1,000 MiB, of which 600 are available. */
static void machine_begin(void)
{
    (void)snprintf(root, sizeof(root), "/tmp/kvkeep-machine.XXXXXX");
    cr_assert_not_null(mkdtemp(root));
    put("proc/meminfo", "MemTotal:        1024000 kB\nMemFree:           10240 kB\n"
                        "MemAvailable:     614400 kB\nHugetlb:               0 kB\n");
}

static void expect(uint64_t limit_mib, uint64_t available_mib, bool is_group)
{
    struct kvk_machine_memory memory;
    bool known = kvk_machine_memory(root, &memory);
    cr_expect(known && memory.limit_bytes == limit_mib * MIB &&
                  memory.available_bytes == available_mib * MIB && memory.is_group == is_group,
              "%llu of %llu, group %d", (unsigned long long)memory.available_bytes,
              (unsigned long long)memory.limit_bytes, memory.is_group);
}

Test(machine_memory, of_the_machine)
{
    machine_begin();
    expect(1000, 600, false);
    put("proc/meminfo", "MemTotal:        1024000 kB\nMemAvailable:     614400 kB\n"
                        "Hugetlb:          102400 kB\n");
    expect(900, 600, false); /* huge pages that were reserved are for whoever asks for them */
    put("proc/meminfo", "nothing of the kind\n");
    struct kvk_machine_memory memory;
    cr_expect(!kvk_machine_memory(root, &memory));
    folder_remove(root);
    cr_expect(!kvk_machine_memory(root, &memory));
}

Test(machine_memory, of_a_control_group)
{
    machine_begin();
    put("proc/self/cgroup", "0::/system.slice/kvkeepd.service\n");
    expect(1000, 600, false); /* nothing is told of it */
    put("sys/fs/cgroup/system.slice/kvkeepd.service/memory.max", "max\n");
    put("sys/fs/cgroup/system.slice/kvkeepd.service/memory.current", "104857600\n");
    expect(1000, 600, false);
    put("sys/fs/cgroup/system.slice/kvkeepd.service/memory.max", "524288000\n");
    put("sys/fs/cgroup/system.slice/kvkeepd.service/memory.stat",
        "anon 1\nfile 99999999\ninactive_file 10485760\nactive_file 10485760\n"
        "inactive_file_more 999999999\n");
    expect(500, 420, true); /* 500 - (100 - 20) */
    /* The one above it is narrower. */
    put("sys/fs/cgroup/system.slice/memory.max", "419430400\n");
    put("sys/fs/cgroup/system.slice/memory.current", "314572800\n");
    expect(400, 100, true);
    /* More is used than is allowed now. */
    put("sys/fs/cgroup/system.slice/memory.current", "514572800\n");
    expect(400, 0, true);
    folder_remove(root);
}

Test(machine_memory, of_a_container)
{
    machine_begin();
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "209715200\n");
    put("sys/fs/cgroup/memory.current", "0\n");
    expect(200, 200, true);
    folder_remove(root);
}

Test(machine_memory, of_the_first_version)
{
    machine_begin();
    put("proc/self/cgroup", "12:cpu,cpuacct:/a\n4:memory:/docker/memory\n0::/\n");
    put("sys/fs/cgroup/memory/docker/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/docker/memory/memory.usage_in_bytes", "104857600\n");
    expect(1000, 600, false);
    put("sys/fs/cgroup/memory/docker/memory/memory.limit_in_bytes", "314572800\n");
    put("sys/fs/cgroup/memory/docker/memory/memory.stat", "total_inactive_file 52428800\n");
    expect(300, 250, true);
    /* A group of that name, of another controller. */
    put("proc/self/cgroup", "5:devices:/docker/memory\n");
    expect(1000, 600, false);
    folder_remove(root);
}

Test(machine_memory, strange_groups_tell_nothing)
{
    machine_begin();
    char line[8192];
    size_t size = (size_t)snprintf(line, sizeof(line), "0::");
    while (size < 6000) {
        line[size++] = '/';
        line[size++] = 'a';
    }
    line[size] = '\0';
    put("proc/self/cgroup", line);
    expect(1000, 600, false);
    put("proc/self/cgroup", "\n\n::\n0::\nmemory\n:memory:\n0::x/y");
    expect(1000, 600, false);
    folder_remove(root);
}

Test(machine_memory, of_this_machine)
{
    struct kvk_machine_memory memory;
    cr_assert(kvk_machine_memory("", &memory));
    cr_expect_gt(memory.limit_bytes, 64 * MIB);
    cr_expect_leq(memory.available_bytes, (uint64_t)1 << 50);
    cr_expect_gt(memory.available_bytes, 0);
}
