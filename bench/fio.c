#include "bench/fio.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FIO_PATH_MAX 1024
#define FIO_OUTPUT_MAX (1U << 20)

/* Run it and take what it prints; false: it could not be run, or failed. Spawned, not forked: a
 * fork leaves all memory of this process to be faulted in for writing once more, in the middle of
 * what is measured next. */
static bool fio_run(char *const arguments[], char *output, size_t output_size)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return false;
    }
    posix_spawn_file_actions_t actions;
    pid_t child = -1;
    if (posix_spawn_file_actions_init(&actions) == 0) {
        if (posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO) != 0 ||
            posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0) !=
                0 ||
            posix_spawnp(&child, "fio", &actions, NULL, arguments, environ) != 0) {
            child = -1;
        }
        (void)posix_spawn_file_actions_destroy(&actions);
    }
    (void)close(ends[1]);
    size_t size = 0;
    for (;;) {
        ssize_t got = read(ends[0], output + size, output_size - 1 - size);
        if (got <= 0) {
            break;
        }
        size += (size_t)got;
    }
    output[size] = '\0';
    (void)close(ends[0]);
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

double kvk_fio_run(const struct kvk_fio_pass *pass)
{
    char filename[FIO_PATH_MAX + 32], size[64], bs[64], depth[64], direct[32], engine[64];
    (void)snprintf(filename, sizeof(filename), "--filename=%s", pass->path);
    (void)snprintf(size, sizeof(size), "--size=%llu", (unsigned long long)pass->size_bytes);
    (void)snprintf(bs, sizeof(bs), "--bs=%llu", (unsigned long long)pass->block_bytes);
    (void)snprintf(depth, sizeof(depth), "--iodepth=%u", pass->depth);
    (void)snprintf(direct, sizeof(direct), "--direct=%d", pass->direct ? 1 : 0);
    (void)snprintf(engine, sizeof(engine), "--ioengine=%s", pass->engine);
    const bool write = pass->write;
    char name[] = "fio", job[] = "--name=pass", json[] = "--output-format=json";
    char reading[] = "--rw=read", writing[] = "--rw=write", sync[] = "--end_fsync=1";
    char overwrite[] = "--overwrite=1", quiet[] = "--invalidate=1";
    char rate_most[64], runtime[64];
    (void)snprintf(rate_most, sizeof(rate_most), "--rate=%.0f", pass->rate);         /* 0: any */
    (void)snprintf(runtime, sizeof(runtime), "--runtime=%.0f", ceil(pass->seconds)); /* 0: any */
    char timed[32];
    (void)snprintf(timed, sizeof(timed), "--time_based=%d", pass->seconds > 0 ? 1 : 0);
    char *arguments[] = {name,
                         job,
                         json,
                         filename,
                         size,
                         bs,
                         depth,
                         direct,
                         engine,
                         overwrite,
                         quiet,
                         rate_most,
                         runtime,
                         timed,
                         write ? writing : reading,
                         write ? sync : NULL,
                         NULL};
    static char output[FIO_OUTPUT_MAX];
    if (!fio_run(arguments, output, sizeof(output))) {
        return NAN;
    }
    const char *begin = strchr(output, '{'); /* notes may stand before it */
    json_error_t problem;
    json_t *root = begin != NULL ? json_loads(begin, 0, &problem) : NULL;
    const json_t *jobs = json_object_get(root, "jobs");
    const json_t *side = json_object_get(json_array_get(jobs, 0), write ? "write" : "read");
    const json_t *rate = json_object_get(side, "bw_bytes");
    double value = json_is_integer(rate) ? (double)json_integer_value(rate) : NAN;
    json_decref(root);
    return value;
}

bool kvk_fio_is_there(void)
{
    static char output[4096];
    char name[] = "fio", version[] = "--version";
    char *arguments[] = {name, version, NULL};
    return fio_run(arguments, output, sizeof(output));
}
