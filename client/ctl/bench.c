/*
 * kvkeepctl bench: how quick is this daemon, from here? Look-ups of three lengths, and a sequence
 * written, swapped out and in. In a space of its own, whose blocks are invalidated afterwards.
 * (Benchmarks against references in one run are the programs bench_*.)
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "client/ctl/ctl.h"
#include "client/internal.h"

#define BLOCK_TOKENS 16
#define BLOCK_BYTES (256 << 10)
#define LOOKUPS 2000

struct bench {
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    uint32_t *tokens;
    json_t *results;
    struct kvk_error error;
};

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void result_add(struct bench *bench, const char *name, double value, const char *unit)
{
    json_array_append_new(bench->results,
                          json_pack("{s:s, s:f, s:s}", "name", name, "value", value, "unit", unit));
}

static bool bench_lookup(struct bench *bench, uint64_t token_count)
{
    static uint64_t took_ns[LOOKUPS];
    struct kvkeep_prompt prompt = {.tokens = bench->tokens, .token_count = token_count};
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        struct kvkeep_lookup found;
        uint64_t began_ns = kvk_clock_now(kvk_clock_monotonic());
        if (kvkeep_lookup(bench->client, &bench->space, &prompt, false, &found, &bench->error) !=
            KVK_OK) {
            return false;
        }
        took_ns[i] = kvk_clock_now(kvk_clock_monotonic()) - began_ns;
    }
    qsort(took_ns, LOOKUPS, sizeof took_ns[0], compare_u64);
    const uint32_t middle = LOOKUPS / 2;
    const uint32_t nearly_last = LOOKUPS - LOOKUPS / 100;
    char name[64];
    (void)snprintf(name, sizeof name, "lookup_%llu_p50", (unsigned long long)token_count);
    result_add(bench, name, (double)took_ns[middle] / 1000, "us");
    (void)snprintf(name, sizeof name, "lookup_%llu_p99", (unsigned long long)token_count);
    result_add(bench, name, (double)took_ns[nearly_last] / 1000, "us");
    return true;
}

static bool swap_round(struct bench *bench, struct kvkeep_sequence *sequence,
                       struct kvkeep_swap *out, struct kvkeep_swap *in)
{
    return kvkeep_swap_out(bench->session, sequence, out, &bench->error) == KVK_OK &&
           kvkeep_swap_in(bench->session, sequence, in, &bench->error) == KVK_OK;
}

static bool bench_swap(struct bench *bench, uint64_t blocks)
{
    struct kvkeep_prompt prompt = {.tokens = bench->tokens, .token_count = blocks * BLOCK_TOKENS};
    struct kvkeep_sequence sequence;
    struct kvkeep_swap out = {0};
    struct kvkeep_swap in = {0};
    struct kvk_error *error = &bench->error;
    if (kvkeep_sequence_open(bench->session, &bench->space, &prompt, NULL, &sequence, error) !=
        KVK_OK) {
        return false;
    }
    bool done =
        kvkeep_seal(bench->session, &sequence, sequence.length, true, error) == KVK_OK &&
        bench_lookup(bench, 64) && bench_lookup(bench, blocks * BLOCK_TOKENS) &&
        swap_round(bench, &sequence, &out, &in) && /* the first one backs the host's memory */
        swap_round(bench, &sequence, &out, &in);
    if (done && out.moved_bytes > 0 && out.copy_ns > 0 && in.copy_ns > 0) {
        result_add(bench, "swap_out", (double)out.moved_bytes / (double)out.copy_ns, "GB/s");
        result_add(bench, "swap_in", (double)in.moved_bytes / (double)in.copy_ns, "GB/s");
    }
    struct kvk_error ignored;
    enum kvk_status closed = kvkeep_close(bench->session, &sequence, &ignored);
    return done && closed == KVK_OK;
}

static bool bench_open(struct bench *bench, const struct ctl_options *options)
{
    static const struct kvk_geometry geometry = {.layers = 1,
                                                 .kv_heads = 1,
                                                 .block_tokens = BLOCK_TOKENS,
                                                 .layout = KVK_LAYOUT_OPAQUE,
                                                 .attention = KVK_ATTENTION_SELF,
                                                 .tensor_shards = 1,
                                                 .pipeline_shards = 1,
                                                 .opaque_bytes = BLOCK_BYTES};
    struct kvkeep_space_options space = {.identity = {.model = "kvkeepctl-bench"},
                                         .block_tokens = BLOCK_TOKENS,
                                         .groups = &geometry,
                                         .group_count = 1};
    struct kvkeep_options connect = {
        .target = options->target, .token = options->token, .tls = options->tls};
    struct kvkeep_session_options session = {.name = "kvkeepctl bench"};
    struct kvk_error *error = &bench->error;
    return kvkeep_connect(&connect, &bench->client, error) == KVK_OK &&
           kvkeep_space_open(bench->client, &space, &bench->space, error) == KVK_OK &&
           kvkeep_session_open(bench->client, &session, &bench->session, error) == KVK_OK;
}

/* Leave nothing behind. */
static bool bench_forget(struct bench *bench)
{
    Kvkeep__V1__InvalidateRequest request = KVKEEP__V1__INVALIDATE_REQUEST__INIT;
    request.space_id = bench->space.id;
    Kvkeep__V1__InvalidateResponse *response = NULL;
    if (kvkeep_client_call(bench->client, KVKEEP_METHOD("Invalidate"), &request.base,
                           &kvkeep__v1__invalidate_response__descriptor, &response,
                           &bench->error) != KVK_OK) {
        return false;
    }
    kvkeep__v1__invalidate_response__free_unpacked(response, NULL);
    return true;
}

int ctl_bench(const struct ctl_options *options, int argc, char **argv)
{
    static const struct ctl_command command = {
        .name = "bench", .usage = "  --blocks N   of 256 KiB, to be swapped (128)\n"};
    static const struct option names[] = {{"blocks", required_argument, NULL, 'b'},
                                          {NULL, 0, NULL, 0}};
    uint64_t blocks = 128;
    bool right = true;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        right &= option == 'b' && ctl_parse_count(optarg, &blocks);
    }
    if (!right || optind != argc || blocks < 4 || blocks > 65536) {
        return ctl_usage(&command, "4 to 65536 blocks");
    }
    struct bench bench = {.results = json_array(),
                          .tokens = calloc(blocks * BLOCK_TOKENS, sizeof bench.tokens[0])};
    for (uint64_t i = 0; bench.tokens != NULL && i < blocks * BLOCK_TOKENS; i++) {
        bench.tokens[i] = (uint32_t)(i * 2654435761u);
    }
    bool done = bench.tokens != NULL && bench_open(&bench, options) && bench_swap(&bench, blocks);
    done = bench.client != NULL && bench.space.id != 0 && bench_forget(&bench) && done;
    if (done && options->json) {
        json_incref(bench.results);
        ctl_json_print(json_pack("{s:s, s:o}", "benchmark", "kvkeepctl", "results", bench.results));
    }
    size_t index;
    json_t *result;
    json_array_foreach(bench.results, index, result)
    {
        if (done && !options->json) {
            (void)printf("  %-24s %10.2f %s\n", json_string_value(json_object_get(result, "name")),
                         json_number_value(json_object_get(result, "value")),
                         json_string_value(json_object_get(result, "unit")));
        }
    }
    int code = done ? CTL_OK : ctl_fail("bench", &bench.error);
    json_decref(bench.results);
    kvkeep_session_close(bench.session);
    kvkeep_disconnect(bench.client);
    free(bench.tokens);
    return code;
}
