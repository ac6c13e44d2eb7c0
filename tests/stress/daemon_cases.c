/*
 * Cases of the field that need a real daemon and real time: E1 (blocks freed while copies still
 * read them), D1 (a chain loses its leaf first), C6 (free and used add up in every sample), H1 (a
 * lease that is over), L3 (three blocks of 2 MiB in one call), L1 (sizes that cannot be), and a
 * daemon that is stopped and goes on: its own silence ends nobody's lease or session.
 *
 *     test_stress_daemon_cases [--rounds N] [--stops N]
 */
#include <fcntl.h>

#include "base/copy.h"
#include "tests/daemon_look.h"

#define MIB (UINT64_C(1) << 20)

enum {
    E1_BLOCKS = 16,
    LARGE_BLOCK_BYTES = 2 << 20,
};

struct shared {
    char target[96];
    _Atomic bool stop;
    _Atomic uint64_t grabbed, moved_rounds, moved_tokens;
    _Atomic uint32_t lost; /* notices that the session is over */
    uint64_t hit;
    uint64_t rounds;
    uint64_t release_us; /* when the daemon was let go on */
    struct look look;
};
static struct shared *shared;
static struct agent observer = {.name = "observer"};
static struct prompt prompt; /* each process's own */
static struct kvkeep_sequence sequence;
static struct kvkeep_lease lease;

static void on_notice(void *context, enum kvkeep_notice notice, uint64_t value)
{
    (void)context;
    (void)value;
    atomic_fetch_add(&shared->lost, notice == KVKEEP_NOTICE_LOST ? 1 : 0);
}

static void opens(void *unused)
{
    (void)unused;
    worker_open(&(struct worker_options){.target = shared->target,
                                         .tenant = "default",
                                         .model = "model",
                                         .name = "worker",
                                         .on_notice = on_notice});
}

static uint32_t fresh_tokens(void)
{
    static uint32_t token;
    token += TOKENS_MAX;
    return token ^ (uint32_t)getpid() << 7;
}

static void begin(struct daemon *daemon, uint64_t device_bytes, uint64_t host_bytes,
                  const char *server)
{
    const struct daemon_setup setup = {
        .device_bytes = device_bytes, .host_bytes = host_bytes, .server = server};
    daemon_start(daemon, &setup);
    memcpy(shared->target, daemon->target, sizeof(shared->target));
    shared->look = (struct look){.copy_delay_us = 0};
    memcpy(shared->look.target, daemon->target, sizeof(shared->look.target));
    agent_start(&observer, "observer", worker_close);
}

static void end(struct daemon *daemon)
{
    (void)expect_free(&observer, &shared->look, false, now_us());
    agent_finish(&observer);
    daemon_stop(daemon);
}

/* ---- E1 ---- */

static struct prompt previous; /* of the round before, closed: it was moved to make room */

static void e1_fills(void *unused)
{
    (void)unused;
    previous = prompt;
    prompt_set(&prompt, fresh_tokens(), 16);
    worker_fill(&prompt, NULL, &sequence);
}

static void e1_swaps_out(void *unused)
{
    (void)unused;
    CHECK_OK(kvkeep_swap_out(self.session, &sequence, NULL, &self.error));
}

/* Every free block, overwritten, until the copies are over and all of the pool was taken: by two,
 * since who makes room waits for the copies himself, but the other takes what comes free. */
static void e1_overwrites(void *unused)
{
    (void)unused;
    static struct kvkeep_sequence grabbed[E1_BLOCKS + 1];
    static struct prompt prompts[E1_BLOCKS + 1];
    uint32_t count = 0;
    uint64_t until_ms = now_ms() + 10000;
    while (atomic_load(&shared->grabbed) < E1_BLOCKS || !atomic_load(&shared->stop)) {
        CHECK(now_ms() < until_ms, "not all blocks could be taken: %s", self.error.text);
        prompt_set(&prompts[count], fresh_tokens(), BLOCK_TOKENS);
        enum kvk_status status = worker_try_open(&prompts[count], NULL, &grabbed[count]);
        if (status != KVK_EXHAUSTED) {
            CHECK_OK(status);
            worker_write(&grabbed[count], &prompts[count], 0, BLOCK_TOKENS);
            count++;
            atomic_fetch_add(&shared->grabbed, 1);
        }
    }
    while (count > 0) {
        count--;
        worker_verify(&grabbed[count], &prompts[count], 0, BLOCK_TOKENS);
        worker_close_sequence(&grabbed[count]);
    }
}

/* Of the round before, as much as the policy has kept. */
static void e1_reads_leased(const struct prompt *of, uint64_t least)
{
    struct kvkeep_prompt view = prompt_view(of);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 10000, false, &lease, &self.error));
    CHECK(lease.cached_tokens >= least, "%llu tokens are leased",
          (unsigned long long)lease.cached_tokens);
    if (lease.cached_tokens > 0) {
        worker_verify_stream(NULL, &lease, of, lease.cached_tokens);
    }
    atomic_fetch_add(&shared->moved_tokens, lease.cached_tokens);
    CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
}

static void e1_restores(void *unused)
{
    (void)unused;
    worker_verify_stream(&sequence, NULL, &prompt, 16);
    CHECK(worker_hit(&prompt) == 16, "the swapped out are not found");
    CHECK_OK(kvkeep_swap_in(self.session, &sequence, NULL, &self.error));
    worker_verify(&sequence, &prompt, 0, 16);
    CHECK(worker_hit(&prompt) == 16, "the restored are not found");
    e1_reads_leased(&prompt, 16);
    if (previous.count > 0) {
        e1_reads_leased(&previous, 0);
    }
    worker_close_sequence(&sequence);
}

static void case_e1(uint64_t rounds)
{
    struct daemon daemon;
    struct agent swapper = {.name = "swapper"};
    struct agent writers[2] = {{.name = "writer 0"}, {.name = "writer 1"}};
    uint64_t overwritten = 0;
    phase("E1: swapped out, and every free block overwritten at once");
    begin(&daemon, E1_BLOCKS * BLOCK_BYTES, 64 * BLOCK_BYTES, NULL);
    copies_take(&observer, &shared->look, 500);
    agent_start(&swapper, "swapper", worker_close);
    agent_do(&swapper, opens, NULL);
    for (int i = 0; i < 2; i++) {
        agent_start(&writers[i], writers[i].name, worker_close);
        agent_do(&writers[i], opens, NULL);
    }
    for (uint64_t round = 0; round < rounds; round++) {
        atomic_store(&shared->stop, false);
        atomic_store(&shared->grabbed, 0);
        agent_do(&swapper, e1_fills, NULL);
        agent_begin(&swapper, e1_swaps_out, NULL);
        agent_begin(&writers[0], e1_overwrites, NULL);
        agent_begin(&writers[1], e1_overwrites, NULL);
        agent_end(&swapper);
        atomic_store(&shared->stop, true);
        agent_end(&writers[0]);
        agent_end(&writers[1]);
        overwritten += atomic_load(&shared->grabbed);
        agent_do(&swapper, e1_restores, NULL);
    }
    (void)printf("            %llu rounds, %llu blocks overwritten, %llu tokens of others right\n",
                 (unsigned long long)rounds, (unsigned long long)overwritten,
                 (unsigned long long)atomic_load(&shared->moved_tokens));
    agent_finish(&swapper);
    agent_finish(&writers[0]);
    agent_finish(&writers[1]);
    end(&daemon);
}

/* ---- D1 ---- */

static void d1_runs(void *unused)
{
    (void)unused;
    static struct prompt other;
    for (int run = 0; run < 200; run++) {
        prompt_set(&prompt, fresh_tokens(), 12);
        worker_fill(&prompt, NULL, &sequence);
        worker_close_sequence(&sequence);
        CHECK(worker_hit(&prompt) == 12, "what was sealed is not found");
        prompt_set(&other, fresh_tokens(), BLOCK_TOKENS);
        worker_open_sequence(&other, NULL, &sequence);
        uint64_t hit = worker_hit(&prompt);
        CHECK(hit == 8, "run %d: %llu tokens are found", run, (unsigned long long)hit);
        worker_close_sequence(&sequence);
    }
}

static void case_d1(void)
{
    struct daemon daemon;
    struct agent worker = {.name = "worker"};
    phase("D1: a pool of three, the chain loses its leaf, 200 runs");
    begin(&daemon, 3 * BLOCK_BYTES, 0, NULL);
    agent_start(&worker, "worker", worker_close);
    agent_do(&worker, opens, NULL);
    agent_do(&worker, d1_runs, NULL);
    agent_finish(&worker);
    end(&daemon);
}

/* ---- C6 ---- */

static void c6_moves(void *unused)
{
    (void)unused;
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    while (!atomic_load(&shared->stop)) {
        prompt_set(&prompt, fresh_tokens(), kvk_random_between(&random, 20, 120));
        worker_fill(&prompt, NULL, &sequence);
        if (kvk_random_chance(&random, 0.3)) {
            enum kvk_status status = kvkeep_swap_out(self.session, &sequence, NULL, &self.error);
            CHECK(status == KVK_OK || status == KVK_EXHAUSTED, "%s", self.error.text);
        }
        worker_close_sequence(&sequence);
        atomic_fetch_add(&shared->moved_rounds, 1);
    }
}

static enum kvk_status close_twice(uint64_t id, bool twice)
{
    Kvkeep__V1__CloseRequest request = KVKEEP__V1__CLOSE_REQUEST__INIT;
    Kvkeep__V1__CloseResponse *response = NULL;
    uint64_t ids[2] = {id, id};
    request.session_id = kvkeep_session_id(self.session);
    request.sequence_ids = ids;
    request.n_sequence_ids = twice ? 2 : 1;
    enum kvk_status status = worker_call(KVKEEP_METHOD("Close"), &request.base,
                                         &kvkeep__v1__close_response__descriptor, &response);
    if (status == KVK_OK) {
        message_free(response);
    }
    return status;
}

static void c6_frees_twice(void *unused)
{
    (void)unused;
    prompt_set(&prompt, fresh_tokens(), 13);
    worker_fill(&prompt, NULL, &sequence);
    enum kvk_status status = close_twice(sequence.id, true);
    CHECK(status == KVK_INVALID && strcmp(self.error.field, "sequence_ids") == 0,
          "a repeated id: %s, field \"%s\"", kvk_status_name(status), self.error.field);
    worker_verify(&sequence, &prompt, 0, 13);
    CHECK_OK(close_twice(sequence.id, false));
    status = close_twice(sequence.id, false);
    CHECK(status == KVK_NOT_FOUND, "a second close: %s", kvk_status_name(status));
    kvkeep_table_finish(&sequence.groups[0]);
}

static void expect_sums(const struct look *look, uint64_t device_bytes, uint64_t host_bytes)
{
    const uint64_t limits[3] = {0, device_bytes, host_bytes};
    for (int i = 1; i < 3; i++) {
        const struct tier_look *tier = &look->tiers[i];
        if (tier->limit != limits[i] || tier->used > tier->limit ||
            tier->used + tier->free != tier->limit || tier->slabs > tier->limit) {
            look_print(look);
            CHECK(false, "tier %d does not add up", i);
        }
    }
}

static void case_c6(void)
{
    struct daemon daemon;
    struct agent movers[3] = {{.name = "mover 0"}, {.name = "mover 1"}, {.name = "mover 2"}};
    uint64_t device_bytes = 64 * BLOCK_BYTES;
    uint64_t host_bytes = 96 * BLOCK_BYTES;
    uint64_t fullest = 0;
    phase("C6: free and used add up in 1,000 samples while blocks move");
    begin(&daemon, device_bytes, host_bytes, NULL);
    copies_take(&observer, &shared->look, 20);
    atomic_store(&shared->stop, false);
    for (int i = 0; i < 3; i++) {
        agent_start(&movers[i], movers[i].name, worker_close);
        agent_do(&movers[i], opens, NULL);
        agent_begin(&movers[i], c6_moves, NULL);
    }
    for (int i = 0; i < 1000; i++) {
        agent_do(&observer, observe_tiers, &shared->look);
        expect_sums(&shared->look, device_bytes, host_bytes);
        fullest = shared->look.tiers[2].used > fullest ? shared->look.tiers[2].used : fullest;
    }
    atomic_store(&shared->stop, true);
    for (int i = 0; i < 3; i++) {
        agent_end(&movers[i]);
        agent_do(&movers[i], c6_frees_twice, NULL);
        agent_finish(&movers[i]);
    }
    CHECK(fullest > 0, "nothing moved");
    agent_do(&observer, observe_tiers, &shared->look);
    expect_sums(&shared->look, device_bytes, host_bytes);
    (void)printf("            %llu rounds of the movers, at most %llu KiB on the host\n",
                 (unsigned long long)atomic_load(&shared->moved_rounds),
                 (unsigned long long)fullest >> 10);
    end(&daemon);
}

/* ---- H1 ---- */

static enum kvk_status read_leased(uint64_t first, uint64_t count)
{
    static uint8_t bytes[2 * BLOCK_BYTES];
    memset(bytes, 0, sizeof(bytes));
    enum kvk_status status = kvkeep_read(self.session, NULL, &lease, 0, 0, first, count, bytes,
                                         count * BLOCK_BYTES, &self.error);
    for (size_t i = 0; status != KVK_OK && i < sizeof(bytes); i++) {
        CHECK(bytes[i] == 0, "bytes came with the refusal");
    }
    return status;
}

static void h1_runs(void *unused)
{
    (void)unused;
    static struct prompt flood;
    prompt_set(&prompt, fresh_tokens(), 8);
    worker_fill(&prompt, NULL, &sequence);
    worker_close_sequence(&sequence);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 500, true, &lease, &self.error));
    CHECK(lease.cached_tokens == 8, "%llu tokens are leased",
          (unsigned long long)lease.cached_tokens);
    CHECK_OK(read_leased(0, 2));
    pause_us(700000);
    for (int i = 0; i < 20; i++) {
        prompt_set(&flood, fresh_tokens(), 40);
        worker_fill(&flood, NULL, &sequence);
        worker_close_sequence(&sequence);
    }
    for (uint64_t i = 0; i < 3; i++) { /* one by one, then both */
        enum kvk_status status = i < 2 ? read_leased(i, 1) : read_leased(0, 2);
        CHECK(status == KVK_PRECONDITION || status == KVK_NOT_FOUND, "%s", kvk_status_name(status));
        CHECK(self.error.cause == KVK_CAUSE_LEASE_EXPIRED, "cause %s",
              kvk_cause_name(self.error.cause));
    }
    enum kvk_status status = kvkeep_release(self.session, &lease, &self.error);
    CHECK(status != KVK_OK && self.error.cause == KVK_CAUSE_LEASE_EXPIRED, "release: %s",
          kvk_status_name(status));
}

static void case_h1(void)
{
    struct daemon daemon;
    struct agent worker = {.name = "worker"};
    phase("H1: a lease of 500 ms after 700 ms");
    begin(&daemon, 16 * BLOCK_BYTES, 0, NULL);
    agent_start(&worker, "worker", worker_close);
    agent_do(&worker, opens, NULL);
    agent_do(&worker, h1_runs, NULL);
    agent_finish(&worker);
    end(&daemon);
}

/* ---- L3 ---- */

static const struct kvk_geometry large = {.layers = 32,
                                          .kv_heads = 8,
                                          .head_size_k = 128,
                                          .head_size_v = 128,
                                          .block_tokens = 16,
                                          .format_k = KVK_FORMAT_BF16,
                                          .format_v = KVK_FORMAT_BF16,
                                          .layout = KVK_LAYOUT_HEADS_FIRST,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = 1,
                                          .pipeline_shards = 1};

/* One message of 6 MiB, more than gRPC takes by default. */
static void write_in_one_message(uint8_t *bytes)
{
    Kvkeep__V1__BlockPiece pieces[3];
    Kvkeep__V1__BlockPiece *pointers[3];
    Kvkeep__V1__WriteBlocksRequest request = KVKEEP__V1__WRITE_BLOCKS_REQUEST__INIT;
    struct kvkeep_stream *stream = NULL;
    for (uint64_t i = 0; i < 3; i++) {
        kvkeep__v1__block_piece__init(&pieces[i]);
        pieces[i].block = i;
        pieces[i].data.data = bytes + i * LARGE_BLOCK_BYTES;
        pieces[i].data.len = LARGE_BLOCK_BYTES;
        pieces[i].checksum = kvk_checksum(pieces[i].data.data, LARGE_BLOCK_BYTES);
        pointers[i] = &pieces[i];
    }
    request.session_id = kvkeep_session_id(self.session);
    request.sequence_id = sequence.id;
    request.n_pieces = 3;
    request.pieces = pointers;
    CHECK_OK(kvkeep_stream_open(self.client->calls, KVKEEP_METHOD("WriteBlocks"), 30000, &stream,
                                &self.error));
    Kvkeep__V1__WriteBlocksResponse *response = NULL;
    if (kvkeep_stream_send(stream, &request.base) && kvkeep_stream_half_close(stream)) {
        response = (Kvkeep__V1__WriteBlocksResponse *)kvkeep_stream_receive(
            stream, &kvkeep__v1__write_blocks_response__descriptor);
    }
    CHECK_OK(kvkeep_stream_finish(stream, &self.error));
    CHECK(response != NULL && response->pieces == 3 &&
              response->written_bytes == 3 * LARGE_BLOCK_BYTES,
          "not all of it was written");
    message_free(response);
}

static void l3_runs(void *unused)
{
    (void)unused;
    struct kvk_random random;
    const struct kvkeep_space_options space = {
        .identity = {.model = "large"}, .block_tokens = 16, .groups = &large, .group_count = 1};
    uint8_t *bytes = malloc(3 * LARGE_BLOCK_BYTES);
    uint8_t *read = malloc(3 * LARGE_BLOCK_BYTES);
    CHECK(bytes != NULL && read != NULL, "no memory");
    kvk_random_init(&random, 1);
    opens(NULL);
    CHECK_OK(kvkeep_space_open(self.client, &space, &self.space, &self.error));
    for (int way = 0; way < 2; way++) {
        struct kvkeep_piece pieces[3];
        kvk_random_fill(&random, bytes, 3 * LARGE_BLOCK_BYTES);
        prompt_set(&prompt, fresh_tokens(), 48);
        worker_open_sequence(&prompt, NULL, &sequence);
        for (uint32_t i = 0; i < 3; i++) {
            pieces[i] = (struct kvkeep_piece){.block = i,
                                              .data = bytes + i * (size_t)LARGE_BLOCK_BYTES,
                                              .size_bytes = LARGE_BLOCK_BYTES};
        }
        if (way == 0) {
            write_in_one_message(bytes);
        } else {
            CHECK_OK(kvkeep_write(self.session, &sequence, pieces, 3, &self.error));
        }
        worker_seal(&sequence, 48);
        CHECK_OK(kvkeep_read(self.session, &sequence, NULL, 0, 0, 0, 3, read, 3 * LARGE_BLOCK_BYTES,
                             &self.error));
        CHECK(memcmp(bytes, read, 3 * LARGE_BLOCK_BYTES) == 0, "other bytes came back");
        worker_close_sequence(&sequence);
    }
    free(bytes);
    free(read);
}

static void case_l3(void)
{
    struct daemon daemon;
    struct agent worker = {.name = "worker"};
    phase("L3: three blocks of 2 MiB in one call");
    begin(&daemon, 16 * MIB, 0, NULL);
    agent_start(&worker, "worker", worker_close);
    agent_do(&worker, l3_runs, NULL);
    agent_finish(&worker);
    end(&daemon);
}

/* ---- L1 ---- */

struct bad_configuration {
    const char *text;
    const char *field; /* that the refusal must name */
};

static const struct bad_configuration bad_configurations[] = {
    {"[tiers]\ndevice_bytes = NaN\n", "device_bytes"},
    {"[tiers]\ndevice_bytes = -1\n", "device_bytes"},
    {"[tiers]\ndevice_bytes = -1 GiB\n", "device_bytes"},
    {"[tiers]\nhost_bytes = inf\n", "host_bytes"},
    {"[tiers]\nhost_bytes = 1e9\n", "host_bytes"},
    {"[tiers]\nhost_bytes = 99999999999999999999 GiB\n", "host_bytes"},
    {"[tiers]\ndevice_bytes = 0\nhost_bytes = 0\n", "device_bytes"},
    {"[tiers]\ndisk_bytes = 1 GiB\nhost_bytes = 0\n", "disk_bytes"},
    {"[tiers]\ncopy_threads = 0\n", "copy_threads"},
    {"[tiers]\ndevice_free_percent = 101\n", "device_free_percent"},
    {"[limits]\nblocks = 0\n", "blocks"},
    {"[limits]\nsequences = -1\n", "sequences"},
    {"[limits]\nlease_ms = 10 parsecs\n", "lease_ms"},
    {"[server]\nmessage_bytes = 1 B\n", "message_bytes"},
    {"[cache]\npolicy = best\n", "policy"},
    {"[tenant a]\nquota = NaN\n", "quota"},
    {"[credential a]\ntenants = nobody\nuids = 0\n", "tenants"},
};

/* What kvkeepd says of the file, and how it ends; at most 2 s. */
static int daemon_says(const char *path, char *text, size_t size)
{
    int pipes[2];
    char program[512];
    daemon_program(program, sizeof(program));
    CHECK(pipe2(pipes, O_CLOEXEC) == 0, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)dup2(pipes[1], STDERR_FILENO);
        (void)execl(program, "kvkeepd", "--config", path, (char *)NULL);
        _exit(127);
    }
    (void)close(pipes[1]);
    uint64_t begun_ms = now_ms();
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        CHECK(now_ms() - begun_ms < 2000, "kvkeepd still runs after 2 s");
        pause_us(1000);
    }
    ssize_t got = read(pipes[0], text, size - 1);
    text[got < 0 ? 0 : got] = '\0';
    (void)close(pipes[0]);
    CHECK(WIFEXITED(status), "kvkeepd ended with status %x", (unsigned)status);
    return WEXITSTATUS(status);
}

static void l1_refusals(void)
{
    char path[] = "/tmp/kvkeep-test-conf.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0, "mkstemp: %s", strerror(errno));
    (void)close(fd);
    for (size_t i = 0; i < sizeof(bad_configurations) / sizeof(bad_configurations[0]); i++) {
        const struct bad_configuration *bad = &bad_configurations[i];
        char text[2048];
        FILE *file = fopen(path, "w");
        CHECK(file != NULL, "cannot write %s", path);
        /* Well away from a daemon that may run here. */
        if (strncmp(bad->text, "[server]", 8) != 0) {
            (void)fprintf(file, "[server]\nunix_path = %s.sock\n", path);
        }
        (void)fputs(bad->text, file);
        (void)fclose(file);
        int code = daemon_says(path, text, sizeof(text));
        if (code == 0 || code == 127 || strstr(text, bad->field) == NULL) {
            (void)unlink(path);
            CHECK(false, "exit %d and \"%s\" for:\n%s", code, text, bad->text);
        }
    }
    (void)unlink(path);
}

static void expect_block_size(uint32_t block_tokens, bool possible)
{
    struct kvk_geometry geometry = large;
    geometry.layers = 1;
    geometry.kv_heads = 1;
    geometry.block_tokens = block_tokens;
    char model[32];
    (void)snprintf(model, sizeof(model), "block of %u", block_tokens);
    const struct kvkeep_space_options space = {.identity = {.model = model},
                                               .block_tokens = block_tokens,
                                               .groups = &geometry,
                                               .group_count = 1};
    struct kvkeep_space opened;
    enum kvk_status status = kvkeep_space_open(self.client, &space, &opened, &self.error);
    if (!possible) {
        CHECK(status == KVK_INVALID && strstr(self.error.field, "block_tokens") != NULL,
              "block of %u: %s, field \"%s\"", block_tokens, kvk_status_name(status),
              self.error.field);
        return;
    }
    CHECK_OK(status);
    self.space = opened;
    prompt_set(&prompt, fresh_tokens(), 10);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_seal(&sequence, 10);
    uint64_t hit = worker_hit(&prompt);
    CHECK(hit == 10 / block_tokens * block_tokens, "%llu of 10 tokens are found",
          (unsigned long long)hit);
    worker_close_sequence(&sequence);
}

static void l1_works(void *unused)
{
    (void)unused;
    opens(NULL);
    prompt_set(&prompt, fresh_tokens(), 30);
    worker_fill(&prompt, NULL, &sequence);
    worker_verify(&sequence, &prompt, 0, 30);
    worker_verify_stream(&sequence, NULL, &prompt, 30);
    CHECK(worker_hit(&prompt) == 28, "what was sealed is not found");
    worker_close_sequence(&sequence);
    expect_block_size(0, false);
    expect_block_size(UINT32_MAX, false); /* -1 */
    expect_block_size(1, true);
    expect_block_size(3, true);
}

static void case_l1(void)
{
    static const uint64_t sizes[][2] = {{0, MIB}, {MIB, 0}, {MIB, MIB}};
    phase("L1: sizes that cannot be are refused within 2 s, by name");
    l1_refusals();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct daemon daemon;
        struct agent worker = {.name = "worker"};
        phase(sizes[i][0] == 0   ? "L1: no device tier: the host alone"
              : sizes[i][1] == 0 ? "L1: no host tier: the device alone"
                                 : "L1: both");
        begin(&daemon, sizes[i][0], sizes[i][1], NULL);
        agent_start(&worker, "worker", worker_close);
        agent_do(&worker, l1_works, NULL);
        agent_finish(&worker);
        end(&daemon);
    }
}

/* ---- a daemon that was stopped ---- */

static void stop_prepares(void *unused)
{
    (void)unused;
    opens(NULL);
    prompt_set(&prompt, fresh_tokens(), 20);
    worker_fill(&prompt, NULL, &sequence);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 3500, true, &lease, &self.error));
}

/* A call that is made while the daemon stands still is answered when it goes on. */
static void stop_waits(void *unused)
{
    (void)unused;
    CHECK(worker_hit(&prompt) == 20, "what was sealed is not found");
    worker_verify_stream(NULL, &lease, &prompt, 20);
}

static void stop_goes_on(void *unused)
{
    (void)unused;
    CHECK(atomic_load(&shared->lost) == 0, "the session was dropped");
    CHECK(kvkeep_renew(self.session, &lease, 1000, &self.error) == KVK_OK,
          "the lease went with the daemon's own silence: %s", self.error.text);
    worker_verify(&sequence, &prompt, 0, 20);
    CHECK_OK(kvkeep_append(self.session, &sequence, prompt.tokens, 3, false, &self.error));
    worker_verify_stream(NULL, &lease, &prompt, 20);
    pause_us(2000000);
    enum kvk_status status = kvkeep_renew(self.session, &lease, 1000, &self.error);
    CHECK(status != KVK_OK && self.error.cause == KVK_CAUSE_LEASE_EXPIRED,
          "the lease does not end any more: %s", kvk_status_name(status));
    CHECK(atomic_load(&shared->lost) == 0, "the session was dropped");
    kvkeep_table_finish(&lease.groups[0]);
    worker_close_sequence(&sequence);
}

static void stopped(uint64_t rounds, const char *server)
{
    struct daemon daemon;
    begin(&daemon, MIB, MIB, server);
    for (uint64_t round = 0; round < rounds; round++) {
        struct agent worker = {.name = "worker"};
        agent_start(&worker, "worker", worker_close);
        agent_do(&worker, stop_prepares, NULL);
        CHECK(kill(daemon.pid, SIGSTOP) == 0, "the daemon is gone");
        agent_begin(&worker, stop_waits, NULL);
        pause_us(4000000);
        CHECK(kill(daemon.pid, SIGCONT) == 0, "the daemon is gone");
        agent_end(&worker);
        agent_do(&worker, stop_goes_on, NULL);
        agent_finish(&worker);
    }
    end(&daemon);
}

int main(int argc, char **argv)
{
    uint64_t rounds = option_number(argc, argv, "--rounds", 100);
    uint64_t stops = option_number(argc, argv, "--stops", 1);
    test_begin((unsigned)(240 + rounds + 60 * stops));
    shared = shared_alloc(sizeof(*shared));
    case_e1(rounds);
    case_d1();
    case_c6();
    case_h1();
    case_l3();
    case_l1();
    phase("a daemon that is stopped for 4 s");
    stopped(stops, NULL);
    phase("the same with impatient keepalive");
    stopped(stops, "keepalive_ms = 1 s\nkeepalive_timeout_ms = 300 ms");
    phase("passed");
    return 0;
}
