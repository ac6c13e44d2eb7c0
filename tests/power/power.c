/*
 * Power cuts. A real kvkeepd with catalogue and disk tier works under load while a library writes
 * down what it does to its files (record.h); then folders are built as a power cut at a random
 * moment could have left them (image.h), and on each kvkeepd starts again, or refuses in words.
 * Whatever it serves there must be right, byte for byte: blocks of one model were invalidated in
 * the middle of the load and sealed again with other bytes, slots on disk were used many times
 * over, and all that must never be mixed up. Every law is walked on every image.
 *
 *     test_power_power [--images N] [--seed N]
 */
#include <sys/stat.h>

#include "tests/daemon_worker.h"
#include "tests/folder.h"
#include "tests/power/image.h"

#define MODELS 2
#define PROMPTS 24
#define PROMPT_BLOCKS 6
#define ROUNDS 12 /* of each model */
#define ROUND_PROMPTS 12
#define HOST_BLOCKS 40
#define DISK_BLOCKS 100
#define IMAGES_DEFAULT 100
#define START_MS_MAX 20000

static const char *const models[MODELS] = {"sharded", "latent"};

/* What the agents are told and answer; shared with them. */
struct told {
    char target[96];
    char log[128]; /* of the recording; "": none */
    uint64_t seed;
    /* The record's size when the invalidation of models[0] was asked for, and when answered. */
    uint64_t invalidate_begin, invalidate_end;
    /* For a verification: where the power went. */
    uint64_t cut;
    uint64_t verified_blocks;
    uint64_t old_blocks; /* of them with bytes from before the invalidation */
};

static uint64_t log_size(const struct told *told)
{
    struct stat about;
    CHECK(stat(told->log, &about) == 0, "no record at %s", told->log);
    return (uint64_t)about.st_size;
}

static void model_open(const struct told *told, uint32_t model)
{
    const struct worker_options options = {
        .target = told->target, .model = models[model], .name = "power", .latent = model == 1};
    worker_open(&options);
}

/* The bytes of a model's tokens before and after its invalidation. */
static void version_set(uint32_t model, uint32_t version)
{
    self.seed = mix(seed_of(NULL, models[model]) + version);
}

static uint32_t prompt_first(uint32_t model, uint32_t number)
{
    return 1 + (model * PROMPTS + number) * 1000;
}

/* ---- Load ---- */

static void prompt_run(struct prompt *prompt, uint32_t model, uint32_t number)
{
    struct kvkeep_sequence sequence;
    const struct kvkeep_open_options options = {.growth_tokens = 0};
    prompt_set(prompt, prompt_first(model, number), PROMPT_BLOCKS * BLOCK_TOKENS);
    worker_fill(prompt, &options, &sequence);
    worker_verify_stream(&sequence, NULL, prompt, prompt->count);
    worker_close_sequence(&sequence);
}

static void invalidate(struct told *told)
{
    told->invalidate_begin = log_size(told);
    Kvkeep__V1__InvalidateRequest request = KVKEEP__V1__INVALIDATE_REQUEST__INIT;
    Kvkeep__V1__InvalidateResponse *response = NULL;
    request.space_id = self.space.id;
    CHECK_OK(worker_call(KVKEEP_METHOD("Invalidate"), &request.base,
                         &kvkeep__v1__invalidate_response__descriptor, &response));
    CHECK(response->spaces == 1, "%u spaces", (unsigned)response->spaces);
    message_free(response);
    told->invalidate_end = log_size(told);
}

static void load_task(void *shared)
{
    struct told *told = shared;
    struct kvk_random random;
    struct prompt *prompt = malloc(sizeof(*prompt));
    uint32_t versions[MODELS] = {0, 0};
    CHECK(prompt != NULL, "no memory");
    kvk_random_init(&random, told->seed);
    for (uint32_t round = 0; round < ROUNDS * MODELS; round++) {
        uint32_t model = round % MODELS;
        model_open(told, model);
        if (round == ROUNDS) {
            invalidate(told);
            versions[model] = 1;
        }
        version_set(model, versions[model]);
        for (uint32_t i = 0; i < ROUND_PROMPTS; i++) {
            prompt_run(prompt, model, (uint32_t)kvk_random_below(&random, PROMPTS));
        }
        worker_close();
        pause_us(kvk_random_below(&random, 120000)); /* writing behind gets its turn, or not */
    }
    free(prompt);
}

/* ---- Verification ---- */

static void laws_check(void)
{
    Kvkeep__V1__TestControlRequest request = KVKEEP__V1__TEST_CONTROL_REQUEST__INIT;
    Kvkeep__V1__TestControlResponse *response = NULL;
    request.check_laws = true;
    CHECK_OK(worker_call("/kvkeep.v1.Admin/TestControl", &request.base,
                         &kvkeep__v1__test_control_response__descriptor, &response));
    message_free(response);
}

/* A record never names bytes that are not there: with all that was served, nothing was found to be
 * damaged. Bytes that are wrong would be found out by their checksums, and not be served. */
static void records_check(void)
{
    static const char *const names[] = {
        "kvkeep_disk_damaged_blocks_total", "kvkeep_disk_read_failures_total",
        "kvkeep_checksum_failures_total", "kvkeep_disk_short_reads_total"};
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    Kvkeep__V1__GetStatsResponse *response = NULL;
    uint32_t seen = 0;
    CHECK_OK(worker_call("/kvkeep.v1.Admin/GetStats", &request.base,
                         &kvkeep__v1__get_stats_response__descriptor, &response));
    for (size_t i = 0; i < response->n_stats; i++) {
        const Kvkeep__V1__Stat *stat = response->stats[i];
        for (size_t n = 0; n < sizeof(names) / sizeof(names[0]); n++) {
            if (stat->name.len == strlen(names[n]) &&
                memcmp(stat->name.data, names[n], stat->name.len) == 0) {
                CHECK(stat->value == 0, "%s is %g", names[n], stat->value);
                seen++;
            }
        }
    }
    CHECK(seen >= 3, "the counters are not there");
    message_free(response);
}

/* Which version of the block it is, all of its tokens; -1: none. */
static int block_version(uint8_t *block, const struct prompt versions[2], uint64_t first)
{
    for (int version = 0; version < 2; version++) {
        bool right = true;
        for (uint64_t i = first; i < first + BLOCK_TOKENS && right; i++) {
            right = token_is_right(block, i, versions[version].seeds[i], shard_rank());
        }
        if (right) {
            return version;
        }
    }
    return -1;
}

static void prompt_verify(struct told *told, uint32_t model, uint32_t number,
                          struct prompt versions[2])
{
    struct kvkeep_sequence sequence;
    const struct kvkeep_open_options options = {.growth_tokens = 0};
    for (uint32_t version = 0; version < 2; version++) {
        version_set(model, version);
        prompt_set(&versions[version], prompt_first(model, number), PROMPT_BLOCKS * BLOCK_TOKENS);
    }
    worker_open_sequence(&versions[0], &options, &sequence);
    uint64_t blocks = sequence.cached_tokens / BLOCK_TOKENS;
    uint8_t *bytes = malloc(blocks * block_bytes() + 1);
    CHECK(bytes != NULL, "no memory");
    if (blocks > 0) {
        CHECK_OK(kvkeep_read(self.session, &sequence, NULL, 0, self.rank, 0, blocks, bytes,
                             blocks * block_bytes(), &self.error));
    }
    bool old_allowed = model != 0 || told->cut < told->invalidate_end;
    bool new_allowed = model == 0 && told->cut >= told->invalidate_begin;
    for (uint64_t i = 0; i < blocks; i++) {
        int version = block_version(bytes + i * block_bytes(), versions, i * BLOCK_TOKENS);
        CHECK(version >= 0, "block %u of prompt %u of model %s has bytes that it never had",
              (unsigned)i, number, models[model]);
        CHECK(version == 0 ? old_allowed : new_allowed,
              "block %u of prompt %u of model %s is of version %d", (unsigned)i, number,
              models[model], version);
        told->verified_blocks++;
        told->old_blocks += version == 0 ? 1 : 0;
    }
    free(bytes);
    worker_close_sequence(&sequence);
}

static void verify_task(void *shared)
{
    struct told *told = shared;
    struct prompt *versions = malloc(2 * sizeof(*versions));
    CHECK(versions != NULL, "no memory");
    told->verified_blocks = 0;
    told->old_blocks = 0;
    for (uint32_t model = 0; model < MODELS; model++) {
        model_open(told, model);
        laws_check();
        for (uint32_t number = 0; number < PROMPTS; number++) {
            prompt_verify(told, model, number, versions);
        }
        laws_check();
        records_check();
        worker_close();
    }
    free(versions);
}

/* ---- Folders and daemons ---- */

static void folder_clear(const char *path)
{
    folder_remove(path);
}

static void setup_make(const char *data, struct daemon_setup *setup, char *rest, size_t rest_size)
{
    (void)snprintf(rest, rest_size,
                   "[durable]\nfolder = %s\ndisk_bytes = %u B\ndisk_uring = no\n"
                   "disk_admit_uses = 1\nkeeper = no\n",
                   data, DISK_BLOCKS * BLOCK_BYTES);
    *setup = (struct daemon_setup){.host_bytes = HOST_BLOCKS * BLOCK_BYTES, .rest = rest};
}

/* As daemon_start(), but it may refuse: false, and its words are in the log. */
static bool daemon_try_start(struct daemon *daemon, const struct daemon_setup *setup)
{
    daemon_begin(daemon, setup);
    uint64_t until_ms = now_ms() + START_MS_MAX;
    while (!daemon_answers(daemon)) {
        int status = 0;
        if (waitpid(daemon->pid, &status, WNOHANG) != 0) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 0, "it ended with status %x",
                  (unsigned)status);
            return false;
        }
        CHECK(now_ms() < until_ms, "kvkeepd does not answer after %d ms", START_MS_MAX);
        pause_us(5000);
    }
    return true;
}

static void daemon_cut(struct daemon *daemon)
{
    CHECK(kill(daemon->pid, SIGKILL) == 0, "the daemon is gone");
    CHECK(waitpid(daemon->pid, NULL, 0) == daemon->pid, "it does not end");
    folder_clear(daemon->folder);
    daemon_log_path[0] = '\0';
}

/* One sentence at least says why it does not start. */
static void refusal_check(void)
{
    char line[1024];
    bool said = false;
    FILE *file = fopen(daemon_log_path, "r");
    CHECK(file != NULL, "no log");
    while (fgets(line, sizeof(line), file) != NULL) {
        said = said || strstr(line, "durable.folder") != NULL;
    }
    (void)fclose(file);
    CHECK(said, "it refused without a word of the folder");
}

/* ---- The test ---- */

struct tally {
    uint32_t started, refused;
    uint64_t verified_blocks, old_blocks, open_writes, kept_writes;
    uint32_t with_blocks; /* images on which something was served */
};

static void record_take(struct told *told, const char *root, struct agent *agent)
{
    char data[128];
    char rest[512];
    struct daemon daemon;
    struct daemon_setup setup;
    const char *library = getenv("KVKEEP_POWER_RECORD");
    CHECK(library != NULL, "KVKEEP_POWER_RECORD does not name the recording library");
    (void)snprintf(data, sizeof(data), "%s/data", root);
    CHECK(mkdir(data, 0700) == 0, "%s: %s", data, strerror(errno));
    setup_make(data, &setup, rest, sizeof(rest));
    (void)setenv("KVKEEP_RECORD_FOLDER", data, 1);
    (void)setenv("KVKEEP_RECORD_LOG", told->log, 1);
    (void)setenv("LD_PRELOAD", library, 1);
    daemon_start(&daemon, &setup);
    (void)unsetenv("LD_PRELOAD");
    (void)snprintf(told->target, sizeof(told->target), "%s", daemon.target);
    agent_do(agent, load_task, told);
    daemon_cut(&daemon);
}

static void image_try(struct told *told, const struct image_log *log, size_t records,
                      enum image_mode mode, struct kvk_random *random, const char *root,
                      struct agent *agent, struct tally *tally)
{
    char folder[128];
    char rest[512];
    struct daemon daemon;
    struct daemon_setup setup;
    struct image_facts facts;
    (void)snprintf(folder, sizeof(folder), "%s/image", root);
    image_build(log, records, mode, random, folder, &facts);
    setup_make(folder, &setup, rest, sizeof(rest));
    told->cut = records == 0 ? 0 : log->ends[records - 1];
    tally->open_writes += facts.open_writes;
    tally->kept_writes += facts.kept_writes;
    if (daemon_try_start(&daemon, &setup)) {
        (void)snprintf(told->target, sizeof(told->target), "%s", daemon.target);
        agent_do(agent, verify_task, told);
        tally->started++;
        tally->verified_blocks += told->verified_blocks;
        tally->old_blocks += told->old_blocks;
        tally->with_blocks += told->verified_blocks > 0 ? 1 : 0;
        /* By then many blocks had long been written and recorded. */
        CHECK(told->cut < told->invalidate_begin || told->verified_blocks > 0,
              "what was durable is gone (mode %d, %zu records)", (int)mode, records);
        daemon_cut(&daemon);
    } else {
        refusal_check();
        tally->refused++;
        folder_clear(daemon.folder);
    }
    folder_clear(folder);
}

static uint64_t option_read(int count, char **arguments, const char *name, uint64_t fallback)
{
    for (int i = 1; i + 1 < count; i++) {
        if (strcmp(arguments[i], name) == 0) {
            return strtoull(arguments[i + 1], NULL, 10);
        }
    }
    return fallback;
}

/* Anywhere; and time and again just after the invalidation was answered, when it must hold. */
static size_t moment_choose(const struct told *told, const struct image_log *log, uint32_t image,
                            struct kvk_random *random)
{
    size_t records = (size_t)kvk_random_below(random, log->record_count + 1);
    if (image % 4 == 3) {
        records = (size_t)kvk_random_below(random, 8);
        while (records < log->record_count && log->ends[records] <= told->invalidate_end) {
            records++;
        }
    }
    return records;
}

int main(int count, char **arguments)
{
    uint32_t images = (uint32_t)option_read(count, arguments, "--images", IMAGES_DEFAULT);
    uint64_t seed = option_read(count, arguments, "--seed", 1);
    char root[64] = "/tmp/kvkeep-power.XXXXXX";
    struct agent agent;
    struct image_log log;
    struct kvk_random random;
    struct tally tally = {0};
    test_begin(60 + images * 20);
    struct told *told = shared_alloc(sizeof(*told));
    CHECK(mkdtemp(root) != NULL, "no folder: %s", strerror(errno));
    told->seed = seed;
    (void)snprintf(told->log, sizeof(told->log), "%s/record", root);
    agent_start(&agent, "worker", NULL);

    phase("a load is recorded");
    record_take(told, root, &agent);
    image_log_open(&log, told->log);
    (void)printf("%zu records, %zu bytes\n", log.record_count, log.size);

    phase("the power goes");
    kvk_random_init(&random, seed);
    for (uint32_t i = 0; i < images; i++) {
        /* The last one is what kill -9 leaves: all of it. */
        bool last = i + 1 == images;
        size_t records = last ? log.record_count : moment_choose(told, &log, i, &random);
        enum image_mode mode = last ? IMAGE_ALL : (enum image_mode)(i % IMAGE_MODE_COUNT);
        image_try(told, &log, records, mode, &random, root, &agent, &tally);
    }
    (void)printf("%u images: %u started, %u refused in words; %u of them served blocks, %llu in "
                 "all, all right; %llu writes were open, %llu of them kept\n",
                 images, tally.started, tally.refused, tally.with_blocks,
                 (unsigned long long)tally.verified_blocks, (unsigned long long)tally.open_writes,
                 (unsigned long long)tally.kept_writes);
    CHECK(told->verified_blocks > 0, "nothing survived what kill -9 leaves");
    CHECK(tally.with_blocks * 2 > images, "most images have nothing to verify");
    CHECK(tally.refused * 10 <= images, "too many images are refused");
    CHECK(tally.open_writes > 0 && tally.kept_writes > 0, "no cut was in the middle of anything");
    agent_finish(&agent);
    image_log_close(&log);
    folder_clear(root);
    return 0;
}
