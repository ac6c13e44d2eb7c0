/*
 * What a look-up costs through the daemon: against a bare echo that unpacks and packs the same
 * messages on the same server code, for a long prompt, and while swaps run at full speed.
 *
 * Three processes beside this one: the echo server, a kvkeepd of its own, and a worker that swaps.
 * Rounds of the two sides of a ratio take turns, so that both see the same machine.
 */
#include <grpc/byte_buffer.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "bench/report.h"
#include "client/kvkeep.h"
#include "daemon/server.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define ECHO_PATH "/kvkeep.bench.Echo/Lookup"
#define LOOKUP_PATH "/kvkeep.v1.Kvkeep/Lookup"
#define LANES_MAX 16
#define ROUNDS 41
#define CALLS_PER_ROUND 600
#define LONG_TOKENS 131072
#define LONG_CALLS 100
#define SWAP_ROUNDS 6
#define SWAP_CALLS 4000
#define SWAP_SEQUENCES 2
#define SWAP_TOKENS 2048
#define START_MS_MAX 20000

static char folder[] = "/tmp/kvkeep-bench-XXXXXX";

static _Noreturn void give_up(const char *what, const char *why)
{
    (void)fprintf(stderr, "bench_rpc: %s: %s\n", what, why);
    exit(1); /* the children go with us, see child_begin() */
}

static void expect_ok(enum kvk_status status, const struct kvk_error *error, const char *what)
{
    if (status != KVK_OK) {
        give_up(what, error->text);
    }
}

/* ---- the processes beside this one ---- */

static void child_begin(void)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
}

static void echo_called(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    struct kvk_bytes bytes = kvk_call_message(call);
    Kvkeep__V1__LookupRequest *request =
        kvkeep__v1__lookup_request__unpack(NULL, bytes.size_bytes, bytes.data);
    if (request == NULL) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_INVALID, KVK_CAUSE_FIELD, "", "not a LookupRequest");
        kvk_call_fail(call, &error);
        return;
    }
    Kvkeep__V1__LookupResponse response = KVKEEP__V1__LOOKUP_RESPONSE__INIT;
    response.cached_tokens = request->prompt != NULL ? request->prompt->tokens.len / 4 : 0;
    response.device_tokens = response.cached_tokens;
    kvkeep__v1__lookup_request__free_unpacked(request, NULL);
    size_t size = kvkeep__v1__lookup_response__get_packed_size(&response);
    (void)kvkeep__v1__lookup_response__pack(&response, kvk_call_reply_alloc(call, size));
    kvk_call_reply(call);
}

static _Noreturn void echo_run(const char *path, uint32_t spin_us)
{
    const struct kvk_method method = {.path = ECHO_PATH,
                                      .kind = KVK_METHOD_UNARY,
                                      .class = KVK_CLASS_INLINE,
                                      .on_call = echo_called};
    struct kvk_server_options options;
    kvk_server_options_init(&options);
    options.unix_path = path;
    options.spin_us = spin_us;
    struct kvk_server *server;
    struct kvk_error error;
    expect_ok(kvk_server_create(&options, &method, 1, &server, &error), &error, "echo server");
    expect_ok(kvk_server_start(server, &error), &error, "echo server");
    for (;;) {
        (void)pause();
    }
}

/*
 * This program once more, not a mere fork: a fork has gRPC at the client's addresses, so that what
 * the processor learnt of its branches in one serves the other, which no real daemon enjoys.
 */
static pid_t echo_start(const char *path, uint32_t spin_us)
{
    pid_t pid = fork();
    if (pid == 0) {
        char spin[16];
        (void)snprintf(spin, sizeof(spin), "%u", spin_us);
        child_begin();
        (void)execl("/proc/self/exe", "bench_rpc", "--spin-us", spin, "--echo-server", path,
                    (char *)NULL);
        give_up("cannot run", "/proc/self/exe");
    }
    return pid;
}

/* Beside this program, unless --kvkeepd names another. */
static void daemon_path(const char *given, char *path, size_t size)
{
    if (given != NULL) {
        (void)snprintf(path, size, "%s", given);
        return;
    }
    ssize_t length = readlink("/proc/self/exe", path, size - 1);
    if (length < 0) {
        give_up("where is kvkeepd", "no /proc/self/exe");
    }
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    (void)snprintf(slash + 1, size - (size_t)(slash + 1 - path), "kvkeepd");
}

static pid_t daemon_start(const char *given, const char *socket_path, uint32_t spin_us)
{
    char config[128];
    char program[512];
    (void)snprintf(config, sizeof(config), "%s/config", folder);
    FILE *file = fopen(config, "w");
    if (file == NULL) {
        give_up("cannot write", config);
    }
    (void)fprintf(file,
                  "[server]\nunix_path = %s\nspin_us = %u\n"
                  "[tiers]\ndevice_bytes = 1 GiB\nhost_bytes = 1 GiB\n"
                  "[limits]\nblocks = 1000000\n",
                  socket_path, spin_us);
    (void)fclose(file);
    daemon_path(given, program, sizeof(program));
    pid_t pid = fork();
    if (pid == 0) {
        child_begin();
        (void)execl(program, program, "--config", config, "--log", "warning", (char *)NULL);
        give_up("cannot run", program);
    }
    return pid;
}

static void wait_for_socket(const char *path)
{
    for (int ms = 0; access(path, F_OK) != 0; ms += 10) {
        if (ms > START_MS_MAX) {
            give_up("does not serve", path);
        }
        usleep(10000);
    }
}

static double process_seconds(pid_t pid)
{
    clockid_t clock;
    struct timespec time = {0};
    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) {
        give_up("cannot read", "a child's processor time");
    }
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* The daemon touches its pools ahead when it starts; that is not what is measured here. */
static void wait_until_idle(pid_t pid)
{
    double before = process_seconds(pid);
    for (int ms = 0; ms < START_MS_MAX; ms += 200) {
        usleep(200000);
        double now = process_seconds(pid);
        if (now - before < 0.01) {
            return;
        }
        before = now;
    }
    give_up("kvkeepd", "does not come to rest after its start");
}

/* ---- prompts and spaces ---- */

static uint32_t *tokens_make(uint64_t count, uint32_t seed)
{
    uint32_t *tokens = malloc(count * sizeof(*tokens));
    KVK_ASSERT(tokens != NULL);
    uint64_t state = seed;
    for (uint64_t i = 0; i < count; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        tokens[i] = (uint32_t)(state >> 40) % 128256;
    }
    return tokens;
}

static struct kvk_geometry geometry_make(uint32_t layers, uint32_t heads, uint32_t head_size)
{
    return (struct kvk_geometry){
        .layers = layers,
        .kv_heads = heads,
        .head_size_k = head_size,
        .head_size_v = head_size,
        .block_tokens = 16,
        .format_k = KVK_FORMAT_BF16,
        .format_v = KVK_FORMAT_BF16,
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 1,
        .pipeline_shards = 1,
    };
}

struct worker {
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
};

static void worker_open(struct worker *worker, const char *target, const char *model,
                        const struct kvk_geometry *geometry)
{
    struct kvk_error error;
    const struct kvkeep_options options = {.target = target};
    expect_ok(kvkeep_connect(&options, &worker->client, &error), &error, "connect");
    const struct kvkeep_space_options space = {.identity = {.model = model},
                                               .block_tokens = geometry->block_tokens,
                                               .groups = geometry,
                                               .group_count = 1};
    expect_ok(kvkeep_space_open(worker->client, &space, &worker->space, &error), &error,
              "open a space");
    const struct kvkeep_session_options session = {.name = "bench"};
    expect_ok(kvkeep_session_open(worker->client, &session, &worker->session, &error), &error,
              "open a session");
}

static void sequence_open_sealed(struct worker *worker, const uint32_t *tokens, uint64_t count,
                                 struct kvkeep_sequence *sequence)
{
    struct kvk_error error;
    const struct kvkeep_prompt prompt = {.tokens = tokens, .token_count = count};
    const struct kvkeep_open_options options = {.no_lookup = true};
    expect_ok(
        kvkeep_sequence_open(worker->session, &worker->space, &prompt, &options, sequence, &error),
        &error, "open a sequence");
    expect_ok(kvkeep_seal(worker->session, sequence, count, true, &error), &error, "seal");
}

/* The prompt stays in the cache when the sequence goes. */
static void prompt_cache(struct worker *worker, const uint32_t *tokens, uint64_t count)
{
    struct kvk_error error;
    struct kvkeep_sequence sequence;
    sequence_open_sealed(worker, tokens, count, &sequence);
    expect_ok(kvkeep_close(worker->session, &sequence, &error), &error, "close");
    struct kvkeep_lookup found;
    const struct kvkeep_prompt prompt = {.tokens = tokens, .token_count = count};
    expect_ok(kvkeep_lookup(worker->client, &worker->space, &prompt, false, &found, &error), &error,
              "look up");
    if (found.cached_tokens != count) {
        give_up("the prompt", "is not cached whole");
    }
}

/* ---- the worker that swaps ---- */

struct swap_control {
    atomic_bool run;
    atomic_bool idle;
    atomic_ulong bytes;
};

static _Noreturn void swapper_run(const char *target, struct swap_control *control)
{
    child_begin();
    struct worker worker;
    struct kvk_geometry geometry = geometry_make(16, 8, 128);
    worker_open(&worker, target, "bench-swap", &geometry);
    struct kvkeep_sequence sequences[SWAP_SEQUENCES];
    for (uint32_t i = 0; i < SWAP_SEQUENCES; i++) {
        uint32_t *tokens = tokens_make(SWAP_TOKENS, 1000 + i);
        sequence_open_sealed(&worker, tokens, SWAP_TOKENS, &sequences[i]);
        free(tokens);
    }
    for (uint32_t i = 0;; i = (i + 1) % SWAP_SEQUENCES) {
        while (!atomic_load(&control->run)) {
            atomic_store(&control->idle, true);
            usleep(1000);
        }
        atomic_store(&control->idle, false);
        struct kvk_error error;
        struct kvkeep_swap swap;
        expect_ok(kvkeep_swap_out(worker.session, &sequences[i], &swap, &error), &error,
                  "swap out");
        atomic_fetch_add(&control->bytes, swap.moved_bytes);
        expect_ok(kvkeep_swap_in(worker.session, &sequences[i], &swap, &error), &error, "swap in");
        atomic_fetch_add(&control->bytes, swap.moved_bytes);
    }
}

static pid_t swapper_start(const char *target, struct swap_control **control)
{
    *control =
        mmap(NULL, sizeof(**control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KVK_ASSERT(*control != MAP_FAILED);
    pid_t pid = fork(); /* before gRPC starts in this process */
    if (pid == 0) {
        for (int i = 0; access(target + strlen("unix:"), F_OK) != 0 && i < START_MS_MAX; i++) {
            usleep(1000);
        }
        swapper_run(target, *control);
    }
    return pid;
}

/* ---- calls, as lean as gRPC's C core allows ---- */

struct lane {
    grpc_call *call;
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice text;
    grpc_byte_buffer *response;
    double begin;
};

struct caller {
    grpc_channel *channel;
    grpc_completion_queue *queue;
    void *method; /* registered */
    grpc_byte_buffer *request;
    struct lane lanes[LANES_MAX];
};

static void caller_open(struct caller *caller, const char *target, const char *path,
                        const uint8_t *request, size_t request_bytes)
{
    memset(caller, 0, sizeof(*caller));
    /* A connection of its own, and nothing on the client's side that is not needed. */
    grpc_arg storage[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_ENABLE_RETRIES,
         .value.integer = 0},
    };
    grpc_channel_args arguments = {.num_args = 2, .args = storage};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    caller->channel = grpc_channel_create(target, credentials, &arguments);
    grpc_channel_credentials_release(credentials);
    caller->queue = grpc_completion_queue_create_for_next(NULL);
    caller->method = grpc_channel_register_call(caller->channel, path, NULL, NULL);
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)request, request_bytes);
    caller->request = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
}

static void caller_close(struct caller *caller)
{
    grpc_byte_buffer_destroy(caller->request);
    grpc_channel_destroy(caller->channel);
    grpc_completion_queue_shutdown(caller->queue);
    while (
        grpc_completion_queue_next(caller->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
        GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(caller->queue);
}

static void lane_begin(struct caller *caller, struct lane *lane)
{
    lane->begin = kvk_report_seconds();
    lane->call = grpc_channel_create_registered_call(caller->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                                     caller->queue, caller->method,
                                                     gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    grpc_metadata_array_init(&lane->initial);
    grpc_metadata_array_init(&lane->trailing);
    lane->response = NULL;
    grpc_op operations[6];
    memset(operations, 0, sizeof(operations));
    operations[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    operations[1].op = GRPC_OP_SEND_MESSAGE;
    operations[1].data.send_message.send_message = grpc_byte_buffer_copy(caller->request);
    grpc_byte_buffer *request = operations[1].data.send_message.send_message;
    operations[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    operations[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    operations[3].data.recv_initial_metadata.recv_initial_metadata = &lane->initial;
    operations[4].op = GRPC_OP_RECV_MESSAGE;
    operations[4].data.recv_message.recv_message = &lane->response;
    operations[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    operations[5].data.recv_status_on_client.trailing_metadata = &lane->trailing;
    operations[5].data.recv_status_on_client.status = &lane->code;
    operations[5].data.recv_status_on_client.status_details = &lane->text;
    grpc_call_error error = grpc_call_start_batch(lane->call, operations, 6, lane, NULL);
    KVK_ASSERT(error == GRPC_CALL_OK);
    grpc_byte_buffer_destroy(request); /* gRPC has taken the slices */
}

/* Seconds since lane_begin(). */
static double lane_end(struct lane *lane)
{
    double seconds = kvk_report_seconds() - lane->begin;
    if (lane->code != GRPC_STATUS_OK || lane->response == NULL) {
        char text[256];
        (void)snprintf(text, sizeof(text), "%.*s", (int)GRPC_SLICE_LENGTH(lane->text),
                       (const char *)GRPC_SLICE_START_PTR(lane->text));
        give_up("a call failed", text);
    }
    grpc_slice_unref(lane->text);
    grpc_metadata_array_destroy(&lane->initial);
    grpc_metadata_array_destroy(&lane->trailing);
    grpc_byte_buffer_destroy(lane->response);
    grpc_call_unref(lane->call);
    return seconds;
}

/* `count` calls, `outstanding` at a time; their times into `seconds` [count], may be NULL. Returns
 * the seconds that all took. */
static double caller_run(struct caller *caller, uint32_t count, uint32_t outstanding,
                         double *seconds)
{
    double begin = kvk_report_seconds();
    uint32_t begun = 0;
    for (; begun < outstanding; begun++) {
        lane_begin(caller, &caller->lanes[begun]);
    }
    for (uint32_t ended = 0; ended < count; ended++) {
        grpc_event event =
            grpc_completion_queue_next(caller->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        KVK_ASSERT(event.type == GRPC_OP_COMPLETE);
        double took = lane_end(event.tag);
        if (seconds != NULL) {
            seconds[ended] = took;
        }
        if (begun < count) {
            lane_begin(caller, event.tag);
            begun++;
        }
    }
    return kvk_report_seconds() - begin;
}

static int double_compare(const void *a, const void *b)
{
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

/* Sorts `values`. */
static double quantile(double *values, uint32_t count, double part)
{
    qsort(values, count, sizeof(values[0]), double_compare);
    uint32_t at = (uint32_t)((double)count * part);
    return values[at < count ? at : count - 1];
}

/* ---- what is measured ---- */

static size_t lookup_pack(uint64_t space_id, const uint32_t *tokens, uint64_t count,
                          uint8_t **buffer)
{
    Kvkeep__V1__Prompt prompt = KVKEEP__V1__PROMPT__INIT;
    prompt.tokens.data =
        (uint8_t *)(uintptr_t)tokens; /* little-endian machines only, as the rest */
    prompt.tokens.len = count * sizeof(*tokens);
    Kvkeep__V1__LookupRequest request = KVKEEP__V1__LOOKUP_REQUEST__INIT;
    request.space_id = space_id;
    request.prompt = &prompt;
    *buffer = malloc(kvkeep__v1__lookup_request__get_packed_size(&request));
    KVK_ASSERT(*buffer != NULL);
    return kvkeep__v1__lookup_request__pack(&request, *buffer);
}

static void measure_short(struct kvk_report *report, struct caller *echo, struct caller *daemon)
{
    static double seconds[CALLS_PER_ROUND];
    double echo_p50[ROUNDS];
    double daemon_p50[ROUNDS];
    double echo_rate[ROUNDS];
    double daemon_rate[ROUNDS];
    struct caller *const callers[2] = {echo, daemon};
    double *const p50[2] = {echo_p50, daemon_p50};
    double *const rate[2] = {echo_rate, daemon_rate};
    for (uint32_t i = 0; i < 2; i++) {
        (void)caller_run(callers[i], CALLS_PER_ROUND, 1, NULL);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t side = (i + round) % 2; /* neither is always the second */
            (void)caller_run(callers[side], CALLS_PER_ROUND, 1, seconds);
            p50[side][round] = quantile(seconds, CALLS_PER_ROUND, 0.5);
        }
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t side = (i + round) % 2;
            double took = caller_run(callers[side], 2 * CALLS_PER_ROUND, LANES_MAX, NULL);
            rate[side][round] = 2 * CALLS_PER_ROUND / took;
        }
    }
    kvk_report_ratio(report, "lookup64_p50", kvk_report_median(daemon_p50, ROUNDS) * 1e6, "us",
                     kvk_report_median(echo_p50, ROUNDS) * 1e6);
    kvk_report_ratio(report, "lookup64_rate", kvk_report_median(daemon_rate, ROUNDS), "calls/s",
                     kvk_report_median(echo_rate, ROUNDS));
}

static void measure_long(struct kvk_report *report, const char *target, struct worker *worker)
{
    static double seconds[LONG_CALLS];
    uint32_t *tokens = tokens_make(LONG_TOKENS, 2);
    prompt_cache(worker, tokens, LONG_TOKENS);
    uint8_t *request;
    size_t size = lookup_pack(worker->space.id, tokens, LONG_TOKENS, &request);
    struct caller caller;
    caller_open(&caller, target, LOOKUP_PATH, request, size);
    (void)caller_run(&caller, LONG_CALLS / 10, 1, NULL);
    (void)caller_run(&caller, LONG_CALLS, 1, seconds);
    kvk_report_value(report, "lookup_131072", quantile(seconds, LONG_CALLS, 0.5) * 1e3, "ms");
    caller_close(&caller);
    free(request);
    free(tokens);
}

static void swaps_set(struct swap_control *control, bool run)
{
    atomic_store(&control->run, run);
    while (atomic_load(&control->idle) == run) {
        usleep(1000);
    }
}

static void measure_under_swap(struct kvk_report *report, struct caller *daemon,
                               struct swap_control *control)
{
    static double idle[SWAP_ROUNDS * SWAP_CALLS];
    static double busy[SWAP_ROUNDS * SWAP_CALLS];
    double swap_seconds = 0;
    for (uint32_t i = 0; i < SWAP_ROUNDS; i++) {
        swaps_set(control, false);
        (void)caller_run(daemon, SWAP_CALLS, 1, idle + i * SWAP_CALLS);
        swaps_set(control, true);
        swap_seconds += caller_run(daemon, SWAP_CALLS, 1, busy + i * SWAP_CALLS);
    }
    swaps_set(control, false);
    kvk_report_ratio(report, "lookup_p99_under_swap",
                     quantile(busy, SWAP_ROUNDS * SWAP_CALLS, 0.99) * 1e6, "us",
                     quantile(idle, SWAP_ROUNDS * SWAP_CALLS, 0.99) * 1e6);
    kvk_report_value(report, "swap_beside",
                     (double)atomic_load(&control->bytes) / swap_seconds / 1e9, "GB/s");
}

/* ---- main ---- */

static const char usage[] =
    "usage: bench_rpc [--json] [--kvkeepd PATH] [--spin-us N]\n"
    "Starts an echo server and a kvkeepd of its own; kvkeepd lies beside this program.\n";

static void end(pid_t pid)
{
    (void)kill(pid, SIGTERM);
    (void)waitpid(pid, NULL, 0);
}

static void measure(struct kvk_report *report, const char *echo_target, const char *daemon_target,
                    struct swap_control *control)
{
    struct worker worker;
    struct kvk_geometry geometry = geometry_make(1, 1, 8);
    worker_open(&worker, daemon_target, "bench", &geometry);
    uint32_t *tokens = tokens_make(64, 1);
    prompt_cache(&worker, tokens, 64);
    uint8_t *request;
    size_t size = lookup_pack(worker.space.id, tokens, 64, &request);
    struct caller echo;
    struct caller daemon;
    caller_open(&echo, echo_target, ECHO_PATH, request, size);
    caller_open(&daemon, daemon_target, LOOKUP_PATH, request, size);

    measure_short(report, &echo, &daemon);
    measure_long(report, daemon_target, &worker);
    measure_under_swap(report, &daemon, control);

    caller_close(&echo);
    caller_close(&daemon);
    kvkeep_session_close(worker.session);
    kvkeep_disconnect(worker.client);
    free(request);
    free(tokens);
}

int main(int argc, char **argv)
{
    struct kvk_report report;
    kvk_report_init(&report, "rpc");
    const char *kvkeepd = NULL;
    uint32_t spin_us = 0;
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        if (strcmp(argv[i], "--kvkeepd") == 0 && i + 1 < argc) {
            kvkeepd = argv[++i];
        } else if (strcmp(argv[i], "--echo-server") == 0 && i + 1 < argc) {
            echo_run(argv[i + 1], spin_us);
        } else if (strcmp(argv[i], "--spin-us") == 0 && i + 1 < argc) {
            spin_us = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else {
            (void)fputs(usage, stderr);
            return 2;
        }
    }
    if (mkdtemp(folder) == NULL) {
        give_up("no temporary folder", folder);
    }
    char echo_target[64];
    char daemon_target[64];
    (void)snprintf(echo_target, sizeof(echo_target), "unix:%s/echo", folder);
    (void)snprintf(daemon_target, sizeof(daemon_target), "unix:%s/kvkeepd", folder);
    const char *echo_path = echo_target + strlen("unix:");
    const char *socket_path = daemon_target + strlen("unix:");

    struct swap_control *control;
    pid_t daemon_pid = daemon_start(kvkeepd, socket_path, spin_us);
    pid_t swapper_pid = swapper_start(daemon_target, &control);
    pid_t echo_pid = echo_start(echo_path, spin_us);
    wait_for_socket(echo_path);
    wait_for_socket(socket_path);
    wait_until_idle(daemon_pid);
    grpc_init();
    measure(&report, echo_target, daemon_target, control);
    grpc_shutdown();

    (void)kill(swapper_pid, SIGKILL);
    (void)waitpid(swapper_pid, NULL, 0);
    (void)kill(echo_pid, SIGKILL);
    (void)waitpid(echo_pid, NULL, 0);
    end(daemon_pid);
    char command[128];
    (void)snprintf(command, sizeof(command), "rm -rf -- %s", folder);
    if (system(command) != 0) {
        (void)fprintf(stderr, "bench_rpc: %s is left over\n", folder);
    }
    return kvk_report_print(&report);
}
