/*
 * A warm restart: how long until the records of many blocks in kept memory are blocks again.
 *
 *     bench_restart [--json] [--blocks N] [--chain N]
 *
 * A first daemon's engine is filled with N blocks in chains of so many, and kills itself. What is
 * measured is the start of the second: the files from the keeper, the sidecar read and checked, the
 * index built, every block in its queue again. The whole of it, on one thread. Blocks are small, so
 * that the records are what costs; they carry 16 tokens each, as real ones do.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "bench/report.h"
#include "daemon/cache_internal.h"
#include "daemon/durable.h"
#include "daemon/sidecar.h"
#include "daemon/warm.h"
#include "hosttier/keeper.h"
#include "tests/engine_bare.h"
#include "tests/folder.h"

#define BLOCK_TOKENS 16

static _Noreturn void give_up(const char *what, const struct kvk_error *error)
{
    (void)fprintf(stderr, "bench_restart: %s: %s\n", what,
                  error == NULL ? "no memory" : error->text);
    exit(1);
}

struct settings {
    uint32_t blocks;
    uint32_t chain;
    char folder[64];
    char socket[96];
};

struct house {
    struct kvk_config config;
    struct kvk_durable durable;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
};

static void house_open(const struct settings *settings, struct house *house)
{
    struct kvk_error error;
    struct kvk_config *config = &house->config;
    kvk_log_set_level(KVK_LOG_WARNING);
    kvk_config_init(config);
    config->device_bytes = 0;
    config->host_bytes = (settings->blocks + UINT64_C(1024)) * 128;
    config->blocks = settings->blocks + 1024;
    config->roots = 16;
    config->salt_bytes = 64;
    config->tokens = 65536;
    config->keeper = KVK_CONFIG_KEEPER_PROCESS;
    config->keeper_hold_ms = 60000;
    (void)snprintf(config->durable_folder, sizeof(config->durable_folder), "%s/data",
                   settings->folder);
    (void)snprintf(config->keeper_socket, sizeof(config->keeper_socket), "%s", settings->socket);
    if (kvk_durable_open(config, &house->durable, &error) != KVK_OK) {
        give_up("folder", &error);
    }
    const struct kvk_tenants_options tenants = {.config = config,
                                                .catalogue = house->durable.catalogue};
    if (kvk_tenants_open(&tenants, &house->tenants, &error) != KVK_OK) {
        give_up("tenants", &error);
    }
    const struct kvk_cache_options options = {.config = config,
                                              .tenants = house->tenants,
                                              .host_device = bare_device(),
                                              .catalogue = house->durable.catalogue,
                                              .keeper = house->durable.keeper};
    if (kvk_cache_create(&options, &house->cache, &error) != KVK_OK) {
        give_up("cache", &error);
    }
}

static struct kvk_group *space_open(struct house *house)
{
    const struct kvk_caller caller = bare_user(house->tenants);
    const struct kvk_geometry geometry = bare_geometry(1, 1, 1, BLOCK_TOKENS);
    uint64_t id = bare_space(house->cache, &caller, "bench", &geometry).space_id;
    struct kvk_space *space = kvk_table_get(&house->cache->space_table, id);
    return space->groups[0];
}

/* ---- The first daemon ---- */

/* Blocks as a restore would bring them: the shortest way to many of them. */
static void chains_add(const struct settings *settings, struct kvk_group *group,
                       struct kvk_restore *restore, struct kvk_key root)
{
    const struct kvk_hasher *hasher = &group->space->tenant->hasher;
    struct kvk_error error;
    struct kvk_key key = root;
    for (uint32_t i = 0; i < settings->blocks; i++) {
        uint32_t tokens[BLOCK_TOKENS];
        const uint64_t checksum = i + UINT64_C(1);
        for (uint32_t t = 0; t < BLOCK_TOKENS; t++) {
            tokens[t] = i * BLOCK_TOKENS + t;
        }
        uint32_t position = i % settings->chain;
        struct kvk_key parent = position == 0 ? root : key;
        key = kvk_key_block(hasher, parent, tokens, BLOCK_TOKENS, NULL, 0);
        const struct kvk_restore_block block = {
            .group = group,
            .key = key,
            .parent = parent,
            .position = position,
            .tokens = tokens,
            .checksums = &checksum,
            .slot = {KVK_SLOT_NONE, i, KVK_SLOT_NONE},
            .use_count = 1 + i % 5,
            .idle_ns = (i % 3600) * KVK_NS_PER_SECOND,
        };
        if (kvk_restore_add(restore, &block, &error) != KVK_OK) {
            give_up("records", &error);
        }
    }
}

static void first_life(const struct settings *settings)
{
    struct house house;
    struct kvk_error error;
    struct kvk_restore *restore;
    struct kvk_restore_counts counts;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    house_open(settings, &house);
    if (kvk_durable_start(house.cache, &error) != KVK_OK) {
        give_up("start", &error);
    }
    struct kvk_group *group = space_open(&house);
    if (kvk_sidecar_back_unlocked(house.cache, group, KVK_TIER_HOST, 0, settings->blocks, &error) !=
            KVK_OK ||
        kvk_restore_begin(house.cache, &restore, &error) != KVK_OK) {
        give_up("memory", &error);
    }
    kvk_lock(&house.cache->lock);
    if (kvk_space_roots(house.cache, group->space, NULL, 0, roots, &error) != KVK_OK) {
        give_up("root", &error);
    }
    struct kvk_key root = kvk_index_key_of_root(house.cache->index, roots[0]);
    kvk_unlock(&house.cache->lock);
    chains_add(settings, group, restore, root);
    if (kvk_restore_finish(restore, NULL, NULL, &counts, &error) != KVK_OK ||
        counts.blocks != settings->blocks) {
        give_up("blocks", &error);
    }
    (void)kill(getpid(), SIGKILL);
}

/* ---- The second ---- */

/* Of this thread: what it would take with a processor of its own. */
static double processor_seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void second_life(const struct settings *settings, struct kvk_report *report)
{
    struct house house;
    struct kvk_error error;
    struct kvk_restore_counts counts;
    house_open(settings, &house);
    double begun = kvk_report_seconds();
    double begun_cpu = processor_seconds();
    if (kvk_durable_start(house.cache, &error) != KVK_OK) {
        give_up("start", &error);
    }
    double seconds = kvk_report_seconds() - begun;
    double seconds_cpu = processor_seconds() - begun_cpu;
    kvk_warm_counts(house.cache, &counts);
    if (counts.blocks != settings->blocks || counts.copies[KVK_TIER_HOST] != settings->blocks) {
        (void)fprintf(stderr, "bench_restart: %llu of %u blocks came back\n",
                      (unsigned long long)counts.blocks, settings->blocks);
        exit(1);
    }
    kvk_report_value(report, "blocks", settings->blocks, "blocks");
    kvk_report_value(report, "warm start", seconds, "s");
    kvk_report_value(report, "of the processor", seconds_cpu, "s");
    kvk_report_value(report, "of it, records into the index", (double)counts.duration_ns / 1e9,
                     "s");
    kvk_report_value(report, "per block, of the processor", seconds_cpu / settings->blocks * 1e9,
                     "ns");
    if (kvk_keeper_forget(house.durable.keeper, &error) != KVK_OK) {
        give_up("keeper", &error);
    }
}

static uint32_t number(const char *text, uint32_t max)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > max) {
        (void)fprintf(stderr, "bench_restart: \"%s\" is not a number from 1 to %u\n", text, max);
        exit(2);
    }
    return (uint32_t)value;
}

/* The keeper that both lives use, in this program's own process. */
static pid_t keeper_start(const struct settings *settings)
{
    pid_t pid = fork();
    if (pid == 0) {
        _exit(kvk_keeper_main(settings->socket, 60000));
    }
    const struct timespec pause = {.tv_nsec = 10000000};
    for (int i = 0; i < 500 && access(settings->socket, F_OK) != 0; i++) {
        (void)nanosleep(&pause, NULL);
    }
    (void)nanosleep(&pause, NULL);
    return pid;
}

int main(int argc, char **argv)
{
    struct settings settings = {.blocks = 1000000, .chain = 64};
    struct kvk_report report;
    kvk_report_init(&report, "restart");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        if (i + 1 < argc && strcmp(argv[i], "--blocks") == 0) {
            settings.blocks = number(argv[++i], 60000000);
        } else if (i + 1 < argc && strcmp(argv[i], "--chain") == 0) {
            settings.chain = number(argv[++i], 1000000);
        } else {
            (void)fprintf(stderr, "usage: bench_restart [--json] [--blocks N] [--chain N]\n");
            return 2;
        }
    }
    (void)snprintf(settings.folder, sizeof(settings.folder), "/tmp/kvk-restart-XXXXXX");
    if (mkdtemp(settings.folder) == NULL) {
        give_up("folder in /tmp", NULL);
    }
    (void)snprintf(settings.socket, sizeof(settings.socket), "%s/keeper", settings.folder);
    pid_t keeper = keeper_start(&settings);
    pid_t first = fork();
    if (first == 0) {
        first_life(&settings);
    }
    int result = 0;
    (void)waitpid(first, &result, 0);
    int failed = 1;
    if (WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL) {
        second_life(&settings, &report);
        failed = kvk_report_print(&report);
    }
    (void)kill(keeper, SIGKILL);
    (void)waitpid(keeper, NULL, 0);
    folder_remove(settings.folder);
    return failed;
}
