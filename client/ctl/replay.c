/*
 * kvkeepctl replay: a real trace of requests through a real daemon, over gRPC.
 *
 * Every request opens a sequence over its prompt, verifies the bytes of what was found, writes the
 * rest into mapped slots, seals, closes. Blocks are small (256 opaque bytes that follow from the
 * id), tokens are as many as the trace says, so that what is measured is the index, the policy and
 * the calls. A private daemon takes the policy's time from the trace: an hour replays in a minute,
 * and the policy sees true ages. Leases and all else stay on the machine's clock.
 */
#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "client/ctl/ctl.h"
#include "client/ctl/private_daemon.h"
#include "client/ctl/trace.h"
#include "client/internal.h"

#define BLOCK_BYTES 256
#define WORKERS_MAX 64
/* A block's cost: tokens x (linear + quadratic x (position + half a block)), Llama-3.1-8B. */
#define FLOPS_PER_TOKEN 16.06e9
#define FLOPS_PER_TOKEN_POSITION 524288.0

struct replay_settings {
    const char *trace;
    uint64_t group;
    const char *policy;
    uint64_t device_blocks;
    uint64_t host_blocks;
    uint64_t workers;
    uint64_t requests; /* 0: all */
};

/* What one worker counts; summed at the end. */
struct tally {
    uint64_t requests;
    uint64_t refused; /* tries with fewer blocks, after the pool was too small */
    uint64_t blocks;
    uint64_t hit_blocks;
    uint64_t device_hit_blocks;
    double flops;
    double saved_flops;
    uint64_t bytes_verified;
    uint64_t mismatches;
};

struct replay {
    const struct ctl_options *options;
    const struct replay_settings *settings;
    const char *target;
    bool clock_from_trace;
    struct ctl_trace trace;
    uint64_t request_count;
    _Atomic uint64_t next;
    _Atomic bool failed;
    uint64_t *lookup_ns;    /* [request_count] */
    struct kvk_error error; /* the first failure's; guarded by mutex */
    pthread_mutex_t mutex;
    struct ctl_progress progress;
    uint64_t started_ns;
    uint64_t ended_ns;
};

struct replay_worker {
    struct replay *replay;
    pthread_t thread;
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    struct kvkeep_map maps[3]; /* by enum kvkeep_tier */
    uint32_t *tokens;
    uint64_t token_capacity;
    struct tally tally;
};

static double block_flops(uint32_t block_tokens, uint64_t index, uint32_t tokens)
{
    double position = (double)index * block_tokens;
    return tokens * (FLOPS_PER_TOKEN + FLOPS_PER_TOKEN_POSITION * (position + tokens / 2.0));
}

/* The bytes of an id's block: word k of it. */
static uint64_t pattern_word(uint32_t id, uint32_t k)
{
    uint64_t x = ((uint64_t)id << 8 | k) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 31) * UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ x >> 29;
}

static enum kvk_status worker_slot(struct replay_worker *worker,
                                   const struct kvkeep_sequence *sequence, uint64_t block,
                                   uint64_t **slot, struct kvk_error *error)
{
    const struct kvkeep_table *table = &sequence->groups[0];
    if (block >= table->count || table->tiers[block] == KVKEEP_TIER_NONE ||
        table->tiers[block] > KVKEEP_TIER_HOST) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "tables",
                        "the daemon's table has no place for block %llu",
                        (unsigned long long)block);
    }
    enum kvkeep_tier tier = (enum kvkeep_tier)table->tiers[block];
    struct kvkeep_map *map = &worker->maps[tier];
    if (map->address == NULL) {
        enum kvk_status status =
            kvkeep_map_slots(worker->session, &worker->space, 0, 0, tier, false, map, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    *slot = (uint64_t *)(void *)(map->address + table->slots[block] * map->slot_stride);
    return KVK_OK;
}

/* Verify what was found, write what was not. */
static enum kvk_status blocks_walk(struct replay_worker *worker, const uint32_t *ids,
                                   uint32_t count, const struct kvkeep_sequence *sequence,
                                   struct kvk_error *error)
{
    uint64_t cached = sequence->cached_tokens / worker->space.block_tokens;
    for (uint32_t b = 0; b < count; b++) {
        uint64_t *slot = NULL;
        enum kvk_status status = worker_slot(worker, sequence, b, &slot, error);
        if (status != KVK_OK) {
            return status;
        }
        KVK_ASSERT(slot != NULL);
        bool same = true;
        for (uint32_t k = 0; k < BLOCK_BYTES / sizeof slot[0]; k++) {
            if (b >= cached) {
                slot[k] = pattern_word(ids[b], k);
            } else {
                same &= slot[k] == pattern_word(ids[b], k);
            }
        }
        if (b < cached) {
            worker->tally.bytes_verified += BLOCK_BYTES;
            worker->tally.mismatches += same ? 0 : 1;
        }
    }
    return KVK_OK;
}

static enum kvk_status policy_time_set(struct replay_worker *worker, uint64_t time_ms,
                                       struct kvk_error *error)
{
    Kvkeep__V1__TestControlRequest request = KVKEEP__V1__TEST_CONTROL_REQUEST__INIT;
    /* The trace begins now, as the daemon's own clock has it: its time never goes back. */
    request.policy_time_ns = worker->replay->started_ns + time_ms * KVK_NS_PER_MS;
    Kvkeep__V1__TestControlResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(worker->client, "/kvkeep.v1.Admin/TestControl", &request.base,
                           &kvkeep__v1__test_control_response__descriptor, &response, error);
    if (status == KVK_OK) {
        kvkeep__v1__test_control_response__free_unpacked(response, NULL);
    }
    return status;
}

/* Tokens that an id stands for: as many as the trace's block, all of them its own. */
static bool tokens_make(struct replay_worker *worker, const uint32_t *ids, uint32_t count)
{
    uint32_t block_tokens = worker->space.block_tokens;
    uint64_t needed = (uint64_t)count * block_tokens;
    if (needed > worker->token_capacity) {
        uint32_t *tokens = realloc(worker->tokens, needed * sizeof tokens[0]);
        if (tokens == NULL) {
            return false;
        }
        worker->tokens = tokens;
        worker->token_capacity = needed;
    }
    for (uint32_t b = 0; b < count; b++) {
        uint32_t *block = worker->tokens + (uint64_t)b * block_tokens;
        for (uint32_t j = 0; j < block_tokens; j++) {
            block[j] = ids[b] ^ j << 22;
        }
    }
    return true;
}

/* Open over as many blocks as the pool has room for: a pool smaller than a request keeps its head.
 */
static enum kvk_status sequence_open(struct replay_worker *worker, uint32_t *count,
                                     struct kvkeep_sequence *sequence, struct kvk_error *error)
{
    struct kvkeep_open_options options = {.retry = true}; /* the look-up before counted */
    for (;;) {
        struct kvkeep_prompt prompt = {
            .tokens = worker->tokens, .token_count = (uint64_t)*count * worker->space.block_tokens};
        enum kvk_status status = kvkeep_sequence_open(worker->session, &worker->space, &prompt,
                                                      &options, sequence, error);
        if (status != KVK_EXHAUSTED || *count <= 1 || error->cause == KVK_CAUSE_LIMIT) {
            return status;
        }
        worker->tally.refused++;
        uint64_t fits = error->cause == KVK_CAUSE_TOO_LARGE ? error->limit / BLOCK_BYTES : 0;
        *count = fits > 0 && fits < *count ? (uint32_t)fits : *count - (*count + 15) / 16;
    }
}

static void request_count(struct replay_worker *worker, const struct ctl_trace_request *request,
                          const struct kvkeep_lookup *found)
{
    struct tally *tally = &worker->tally;
    uint32_t block_tokens = worker->space.block_tokens;
    uint64_t hits = found->cached_tokens / block_tokens;
    tally->requests++;
    tally->blocks += request->id_count;
    tally->hit_blocks += hits;
    tally->device_hit_blocks += found->device_tokens / block_tokens;
    for (uint32_t b = 0; b < request->id_count; b++) {
        bool last = b + 1 == request->id_count;
        double flops = block_flops(block_tokens, b, last ? request->last_tokens : block_tokens);
        tally->flops += flops;
        tally->saved_flops += b < hits ? flops : 0;
    }
}

static enum kvk_status request_run(struct replay_worker *worker, uint64_t index,
                                   struct kvk_error *error)
{
    struct replay *replay = worker->replay;
    const struct ctl_trace_request *request = &replay->trace.requests[index];
    const uint32_t *ids = replay->trace.ids + request->first_id;
    enum kvk_status status = KVK_OK;
    if (replay->clock_from_trace) {
        status = policy_time_set(worker, request->time_ms, error);
    }
    if (status == KVK_OK && !tokens_make(worker, ids, request->id_count)) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for tokens");
    }
    if (status != KVK_OK) {
        return status;
    }
    uint32_t count = request->id_count;
    struct kvkeep_prompt prompt = {.tokens = worker->tokens,
                                   .token_count = (uint64_t)count * worker->space.block_tokens};
    struct kvkeep_lookup found;
    uint64_t began_ns = kvk_clock_now(kvk_clock_monotonic());
    status = kvkeep_lookup(worker->client, &worker->space, &prompt, false, &found, error);
    replay->lookup_ns[index] = kvk_clock_now(kvk_clock_monotonic()) - began_ns;
    if (status != KVK_OK) {
        return status;
    }
    request_count(worker, request, &found);
    struct kvkeep_sequence sequence;
    status = sequence_open(worker, &count, &sequence, error);
    if (status != KVK_OK) {
        return status;
    }
    status = blocks_walk(worker, ids, count, &sequence, error);
    if (status == KVK_OK) {
        status = kvkeep_seal(worker->session, &sequence, sequence.length, true, error);
    }
    struct kvk_error close_error;
    enum kvk_status closed = kvkeep_close(worker->session, &sequence, &close_error);
    if (status == KVK_OK && closed != KVK_OK) {
        *error = close_error;
        status = closed;
    }
    return status;
}

/* ---- workers ---- */

static enum kvk_status worker_open(struct replay_worker *worker, struct kvk_error *error)
{
    struct replay *replay = worker->replay;
    struct kvkeep_options options = {.target = replay->target,
                                     .token = replay->options->token,
                                     .tls = replay->options->tls,
                                     .timeout_ms = 120000};
    struct kvk_geometry geometry = {.layers = 1,
                                    .kv_heads = 1,
                                    .block_tokens = replay->trace.block_tokens,
                                    .layout = KVK_LAYOUT_OPAQUE,
                                    .attention = KVK_ATTENTION_SELF,
                                    .tensor_shards = 1,
                                    .pipeline_shards = 1,
                                    .opaque_bytes = BLOCK_BYTES};
    struct kvkeep_space_options space = {.identity = {.model = "replay"},
                                         .block_tokens = replay->trace.block_tokens,
                                         .groups = &geometry,
                                         .group_count = 1,
                                         .flops_per_token = FLOPS_PER_TOKEN,
                                         .flops_per_token_position = FLOPS_PER_TOKEN_POSITION};
    struct kvkeep_session_options session = {.name = "replay"};
    enum kvk_status status = kvkeep_connect(&options, &worker->client, error);
    if (status == KVK_OK) {
        status = kvkeep_space_open(worker->client, &space, &worker->space, error);
    }
    if (status == KVK_OK) {
        status = kvkeep_session_open(worker->client, &session, &worker->session, error);
    }
    return status;
}

static void worker_close(struct replay_worker *worker)
{
    for (int tier = 0; tier < 3; tier++) {
        kvkeep_unmap(&worker->maps[tier]);
    }
    kvkeep_session_close(worker->session);
    kvkeep_disconnect(worker->client);
    free(worker->tokens);
}

static void *worker_run(void *argument)
{
    struct replay_worker *worker = argument;
    struct replay *replay = worker->replay;
    struct kvk_error error = {0};
    enum kvk_status status = worker_open(worker, &error);
    while (status == KVK_OK && !atomic_load(&replay->failed)) {
        uint64_t index = atomic_fetch_add(&replay->next, 1);
        if (index >= replay->request_count) {
            break;
        }
        status = request_run(worker, index, &error);
        if (pthread_mutex_trylock(&replay->mutex) == 0) {
            ctl_progress_show(&replay->progress, index + 1);
            pthread_mutex_unlock(&replay->mutex);
        }
    }
    if (status != KVK_OK) {
        pthread_mutex_lock(&replay->mutex);
        if (!atomic_exchange(&replay->failed, true)) {
            replay->error = error;
        }
        pthread_mutex_unlock(&replay->mutex);
    }
    return NULL;
}

/* ---- the answer ---- */

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double percentile_us(uint64_t *sorted, uint64_t count, double share)
{
    uint64_t at = (uint64_t)(share * (double)(count - 1));
    return (double)sorted[at] / 1000.0;
}

static double stat_value(const Kvkeep__V1__GetStatsResponse *stats, const char *prefix)
{
    double sum = 0;
    size_t length = strlen(prefix);
    for (size_t i = 0; i < stats->n_stats; i++) {
        const ProtobufCBinaryData *name = &stats->stats[i]->name;
        if (name->len >= length && memcmp(name->data, prefix, length) == 0) {
            sum += stats->stats[i]->value;
        }
    }
    return sum;
}

/* Counters of the daemon's whole life: of a running one, more than this replay's. */
static int evictions_ask(const struct replay *replay, double *evictions)
{
    struct ctl_options options = *replay->options;
    options.target = replay->target;
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    int code = CTL_OK;
    Kvkeep__V1__GetStatsResponse *stats =
        ctl_admin_call(&options, "/kvkeep.v1.Admin/GetStats", &request.base,
                       &kvkeep__v1__get_stats_response__descriptor, &code);
    if (stats != NULL) {
        *evictions = stat_value(stats, "kvkeep_evictions_total");
        kvkeep__v1__get_stats_response__free_unpacked(stats, NULL);
    }
    return code;
}

static json_t *result_json(struct replay *replay, const struct tally *tally, double evictions)
{
    qsort(replay->lookup_ns, replay->request_count, sizeof replay->lookup_ns[0], compare_u64);
    double seconds = (double)(replay->ended_ns - replay->started_ns) / 1e9;
    return json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:f, s:f, s:f}",
        "trace", replay->settings->trace, "policy", replay->settings->policy, "device_blocks",
        (json_int_t)replay->settings->device_blocks, "host_blocks",
        (json_int_t)replay->settings->host_blocks, "requests", (json_int_t)tally->requests,
        "blocks", (json_int_t)tally->blocks, "block_hit_ratio",
        (double)tally->hit_blocks / (double)tally->blocks, "device_block_hit_ratio",
        (double)tally->device_hit_blocks / (double)tally->blocks, "saved_flops_ratio",
        tally->saved_flops / tally->flops, "ceiling_block_hit_ratio",
        ctl_trace_ceiling(&replay->trace), "evictions", evictions, "truncated_opens",
        (json_int_t)tally->refused, "bytes_verified", (json_int_t)tally->bytes_verified,
        "mismatches", (json_int_t)tally->mismatches, "lookup_p50_us",
        percentile_us(replay->lookup_ns, replay->request_count, 0.5), "lookup_p99_us",
        percentile_us(replay->lookup_ns, replay->request_count, 0.99), "seconds", seconds);
}

static void result_print(const json_t *result)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)result, key, value)
    {
        if (json_is_string(value)) {
            (void)printf("  %-24s %s\n", key, json_string_value(value));
        } else if (json_is_integer(value)) {
            (void)printf("  %-24s %s\n", key, ctl_count((uint64_t)json_integer_value(value)));
        } else {
            (void)printf("  %-24s %.4f\n", key, json_number_value(value));
        }
    }
}

static int replay_report(struct replay *replay, struct replay_worker *workers)
{
    if (atomic_load(&replay->failed)) {
        return ctl_fail("replay", &replay->error);
    }
    struct tally sum = {0};
    for (uint64_t w = 0; w < replay->settings->workers; w++) {
        const struct tally *tally = &workers[w].tally;
        sum.requests += tally->requests;
        sum.refused += tally->refused;
        sum.blocks += tally->blocks;
        sum.hit_blocks += tally->hit_blocks;
        sum.device_hit_blocks += tally->device_hit_blocks;
        sum.flops += tally->flops;
        sum.saved_flops += tally->saved_flops;
        sum.bytes_verified += tally->bytes_verified;
        sum.mismatches += tally->mismatches;
    }
    double evictions = 0;
    int code = evictions_ask(replay, &evictions);
    if (code != CTL_OK) {
        return code;
    }
    json_t *result = result_json(replay, &sum, evictions);
    if (replay->options->json) {
        ctl_json_print(result);
    } else {
        result_print(result);
        json_decref(result);
    }
    return sum.mismatches == 0 ? CTL_OK : CTL_FAILED;
}

static int replay_work(struct replay *replay)
{
    uint64_t count = replay->settings->workers;
    struct replay_worker *workers = calloc(count, sizeof workers[0]);
    replay->lookup_ns = calloc(replay->request_count, sizeof replay->lookup_ns[0]);
    if (workers == NULL || replay->lookup_ns == NULL) {
        free(workers);
        return CTL_FAILED;
    }
    ctl_progress_begin(&replay->progress, "replaying", replay->request_count);
    replay->started_ns = kvk_clock_now(kvk_clock_monotonic());
    uint64_t started = 0;
    for (; started < count; started++) {
        workers[started].replay = replay;
        if (pthread_create(&workers[started].thread, NULL, worker_run, &workers[started]) != 0) {
            atomic_store(&replay->failed, true);
            break;
        }
    }
    for (uint64_t w = 0; w < started; w++) {
        pthread_join(workers[w].thread, NULL);
    }
    replay->ended_ns = kvk_clock_now(kvk_clock_monotonic());
    ctl_progress_end(&replay->progress);
    int code = replay_report(replay, workers);
    for (uint64_t w = 0; w < started; w++) {
        worker_close(&workers[w]);
    }
    free(workers);
    free(replay->lookup_ns);
    return code;
}

static int replay_run(const struct ctl_options *options, const struct replay_settings *settings)
{
    struct replay replay = {.options = options, .settings = settings, .target = options->target};
    struct kvk_error error;
    pthread_mutex_init(&replay.mutex, NULL);
    if (ctl_trace_load(&replay.trace, settings->trace, (uint32_t)settings->group, &error) !=
        KVK_OK) {
        return ctl_fail("replay", &error);
    }
    replay.request_count = replay.trace.request_count;
    if (settings->requests > 0 && settings->requests < replay.request_count) {
        replay.request_count = settings->requests;
    }
    struct ctl_private_daemon daemon = {.pid = 0};
    int code = CTL_OK;
    if (!options->connect_given) {
        struct ctl_private_daemon_options wanted = {
            .device_bytes = settings->device_blocks * BLOCK_BYTES,
            .host_bytes = settings->host_blocks * BLOCK_BYTES,
            .policy = settings->policy,
        };
        if (ctl_private_daemon_start(&daemon, &wanted, &error) != KVK_OK) {
            code = ctl_fail("replay", &error);
        }
        replay.target = daemon.target;
        replay.clock_from_trace = true;
    }
    if (code == CTL_OK) {
        code = replay_work(&replay);
    }
    if (!options->connect_given) {
        ctl_private_daemon_stop(&daemon);
    }
    ctl_trace_finish(&replay.trace);
    return code;
}

static const struct ctl_command command = {
    .name = "replay",
    .usage = "  --trace FILE         JSON lines, plain or gzip; required\n"
             "  --group N            keep every N-th id: larger blocks (1)\n"
             "  --policy NAME        lru, rp-cost or rp-lists: rp-cost with cost lists (rp-cost)\n"
             "  --device-blocks N    blocks of the device tier (10000)\n"
             "  --host-blocks N      blocks of the host tier (0)\n"
             "  --workers N          clients at a time (1: in the trace's order)\n"
             "  --requests N         only the first so many\n"
             "With --connect a running daemon is used as it is, on its own clock.\n"};

int ctl_replay(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{"trace", required_argument, NULL, 't'},
                                          {"group", required_argument, NULL, 'g'},
                                          {"policy", required_argument, NULL, 'p'},
                                          {"device-blocks", required_argument, NULL, 'd'},
                                          {"host-blocks", required_argument, NULL, 'h'},
                                          {"workers", required_argument, NULL, 'w'},
                                          {"requests", required_argument, NULL, 'n'},
                                          {NULL, 0, NULL, 0}};
    struct replay_settings settings = {
        .group = 1, .policy = "rp-cost", .device_blocks = 10000, .workers = 1};
    int option;
    bool right = true;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 't':
            settings.trace = optarg;
            break;
        case 'p':
            settings.policy = optarg;
            break;
        case 'g':
            right &= ctl_parse_count(optarg, &settings.group);
            break;
        case 'd':
            right &= ctl_parse_count(optarg, &settings.device_blocks);
            break;
        case 'h':
            right &= ctl_parse_count(optarg, &settings.host_blocks);
            break;
        case 'w':
            right &= ctl_parse_count(optarg, &settings.workers);
            break;
        case 'n':
            right &= ctl_parse_count(optarg, &settings.requests);
            break;
        default:
            right = false;
            break;
        }
    }
    if (!right || optind != argc || settings.trace == NULL || settings.group < 1 ||
        settings.group > 64 || settings.workers < 1 || settings.workers > WORKERS_MAX ||
        (strcmp(settings.policy, "lru") != 0 && strcmp(settings.policy, "rp-cost") != 0 &&
         strcmp(settings.policy, "rp-lists") != 0)) {
        return ctl_usage(&command, "a trace, a group of 1 to 64, 1 to 64 workers, a known policy");
    }
    return replay_run(options, &settings);
}
