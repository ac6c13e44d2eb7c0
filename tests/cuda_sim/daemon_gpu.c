/*
 * kvkeepd with its device tier on two simulated GPUs, and workers that open its memory by handles:
 * K/V written through them, swaps, workers that are killed, slabs that a living worker keeps, and a
 * GPU that falls away in the middle of a swap.
 */
#include "base/slab_table.h"
#include "tests/cuda_sim/include/cuda_runtime_api.h"
#include "tests/daemon_worker.h"

#define MIB (UINT64_C(1) << 20)
#define DEVICE_BYTES (2 * MIB)
#define TOKENS 40
#define OPENED_MAX 256

/* What the tasks are told, and answer. */
static struct shared {
    char target[96];
    char model[32];
    uint64_t tokens;
    uint32_t first; /* token */
    uint32_t other_first;
    uint32_t on_device, on_host;
    uint64_t hit;
    enum kvk_status status;
    char text[KVK_ERROR_TEXT_SIZE];
} * shared;

/* ---- In an agent ---- */

static struct kvkeep_sequence sequence;
static struct prompt prompt;
static cudaStream_t stream;
static struct {
    uint8_t handle[KVK_SLAB_HANDLE_SIZE];
    uint8_t *address;
} opened[OPENED_MAX];
static uint32_t opened_count;

static void joins(void *argument)
{
    (void)argument;
    (void)unsetenv("KVKEEP_CUDA_SIM_FAULT"); /* the daemon's */
    const struct worker_options options = {
        .target = shared->target, .model = shared->model, .name = "gpu"};
    worker_open(&options);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no stream");
}

static uint8_t *slab_open(const struct kvk_slab_entry *entry)
{
    void *address;
    cudaIpcMemHandle_t handle;
    for (uint32_t i = 0; i < opened_count; i++) {
        if (memcmp(opened[i].handle, entry->handle, sizeof(entry->handle)) == 0) {
            return opened[i].address;
        }
    }
    memcpy(&handle, entry->handle, sizeof(handle));
    CHECK(opened_count < OPENED_MAX, "too many slabs");
    CHECK(cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess,
          "a slab cannot be opened");
    memcpy(opened[opened_count].handle, entry->handle, sizeof(entry->handle));
    opened[opened_count++].address = address;
    return address;
}

/* Where a block of the sequence lies in the GPU's memory, as this process has it. */
static uint8_t *gpu_block(uint64_t block)
{
    const struct kvkeep_table *table = &sequence.groups[0];
    struct kvkeep_map *map = &self.maps[KVKEEP_TIER_DEVICE];
    CHECK(table->tiers[block] == KVKEEP_TIER_DEVICE, "the block is in tier %u",
          table->tiers[block]);
    if (map->slabs == NULL) {
        CHECK_OK(kvkeep_map_slots(self.session, &self.space, 0, 0, KVKEEP_TIER_DEVICE, false, map,
                                  &self.error));
        CHECK(map->address == NULL && map->slabs != NULL, "it is mapped as memory");
        CHECK(map->slabs->magic == KVK_SLAB_TABLE_MAGIC, "no table of slabs");
        CHECK(map->slabs->slot_bytes == BLOCK_BYTES, "slots have another size");
    }
    const struct kvk_slab_entry *entry = kvk_slab_table_find(map->slabs, table->slots[block]);
    CHECK(entry != NULL, "slot %u is in no slab", table->slots[block]);
    return slab_open(entry) + (table->slots[block] - entry->first_slot) * BLOCK_BYTES;
}

static void gpu_copy(void *target, const void *source, uint64_t size)
{
    CHECK(cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream) == cudaSuccess &&
              cudaStreamSynchronize(stream) == cudaSuccess,
          "a copy failed");
}

/* Tokens of the prompt into the granted slots; the stream has ended before anything is sealed. */
static void gpu_write(uint64_t first, uint64_t end)
{
    static uint8_t bytes[BLOCK_BYTES];
    for (uint64_t block = first / BLOCK_TOKENS; block * BLOCK_TOKENS < end; block++) {
        for (uint64_t i = 0; i < BLOCK_TOKENS && block * BLOCK_TOKENS + i < prompt.count; i++) {
            uint64_t at = block * BLOCK_TOKENS + i;
            token_write(bytes, at, prompt.seeds[at], 0);
        }
        gpu_copy(gpu_block(block), bytes, BLOCK_BYTES);
    }
}

static void gpu_verify(void)
{
    static uint8_t bytes[BLOCK_BYTES];
    for (uint64_t i = 0; i < prompt.count; i++) {
        gpu_copy(bytes, gpu_block(i / BLOCK_TOKENS), BLOCK_BYTES);
        bytes_check(bytes, &prompt, i, i + 1, 0, "by a handle");
    }
}

static void opens(void *argument)
{
    (void)argument;
    const struct kvkeep_open_options options = {0};
    prompt_set(&prompt, shared->first, shared->tokens);
    shared->status = worker_try_open(&prompt, &options, &sequence);
    (void)snprintf(shared->text, sizeof(shared->text), "%s", self.error.text);
    shared->on_device = 0;
    shared->on_host = 0;
    for (uint64_t i = 0; shared->status == KVK_OK && i < sequence.groups[0].count; i++) {
        shared->on_device += sequence.groups[0].tiers[i] == KVKEEP_TIER_DEVICE ? 1 : 0;
        shared->on_host += sequence.groups[0].tiers[i] == KVKEEP_TIER_HOST ? 1 : 0;
    }
}

static void opens_in_time(void *argument)
{
    uint64_t until_ms = now_ms() + 20000;
    do {
        opens(argument);
        pause_us(shared->status == KVK_OK ? 0 : 20000);
    } while (shared->status == KVK_EXHAUSTED && now_ms() < until_ms);
}

static void fills(void *argument)
{
    (void)argument;
    gpu_write(sequence.grant_first, prompt.count);
    worker_seal(&sequence, prompt.count);
}

static void writes_half(void *argument)
{
    (void)argument;
    gpu_write(0, prompt.count / 2);
}

static void verifies(void *argument)
{
    (void)argument;
    gpu_verify();
    worker_verify_stream(&sequence, NULL, &prompt, prompt.count);
}

static void verifies_on_host(void *argument)
{
    (void)argument;
    worker_verify_stream(&sequence, NULL, &prompt, prompt.count);
}

static void fills_on_host(void *argument)
{
    (void)argument;
    worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
    worker_seal(&sequence, prompt.count);
    worker_verify(&sequence, &prompt, 0, prompt.count);
}

static void swaps_out(void *argument)
{
    (void)argument;
    struct kvkeep_swap swap;
    shared->status = kvkeep_swap_out(self.session, &sequence, &swap, &self.error);
    (void)snprintf(shared->text, sizeof(shared->text), "%s", self.error.text);
}

/* What lies on the host is attended, and the answer says where and by which estimates. */
static void attends_on_host(void *argument)
{
    (void)argument;
    enum { HEADS = 4 };
    static const uint16_t queries[HEADS * HEAD_SIZE]; /* bf16 zeros */
    float output[HEADS * HEAD_SIZE];
    float lse[HEADS];
    struct kvkeep_attend_choice choice = {0};
    const struct kvkeep_attend attend = {.query_heads = HEADS,
                                         .head_size_k = HEAD_SIZE,
                                         .head_size_v = HEAD_SIZE,
                                         .format = KVK_FORMAT_BF16,
                                         .scale = 0.1f,
                                         .causal = true,
                                         .choice = &choice};
    struct kvkeep_attend_item item = {.sequence = &sequence,
                                      .position = prompt.count - 1,
                                      .query_count = 1,
                                      .queries = queries,
                                      .output = output,
                                      .lse = lse};
    CHECK_OK(kvkeep_attend(self.session, &attend, &item, 1, &self.error));
    CHECK(item.host_tokens == prompt.count, "%llu tokens attended on the host",
          (unsigned long long)item.host_tokens);
    CHECK(choice.host_place == KVKEEP_ATTEND_IN_PLACE ||
              choice.host_place == KVKEEP_ATTEND_BROUGHT_IN,
          "it does not say where: %d", (int)choice.host_place);
    bool quicker_in_place = choice.in_place_ns <= choice.bring_in_ns;
    CHECK(choice.in_place_ns == 0 || choice.bring_in_ns == 0 || !quicker_in_place ||
              choice.host_place == KVKEEP_ATTEND_IN_PLACE,
          "brought in for %llu ns, in place %llu ns", (unsigned long long)choice.bring_in_ns,
          (unsigned long long)choice.in_place_ns);
}

static void swaps_in(void *argument)
{
    (void)argument;
    struct kvkeep_swap swap;
    shared->status = kvkeep_swap_in(self.session, &sequence, &swap, &self.error);
    (void)snprintf(shared->text, sizeof(shared->text), "%s", self.error.text);
}

/* Write over what is sealed: only this tenant is harmed, and it is found out. */
static void scribbles(void *argument)
{
    (void)argument;
    const uint8_t byte = 0x5a;
    gpu_copy(gpu_block(2) + 77, &byte, 1);
}

/* Most of the device tier written anew. */
static void overwrites(void *argument)
{
    (void)argument;
    const struct kvkeep_open_options options = {0};
    prompt_set(&prompt, shared->other_first, 1200);
    worker_open_sequence(&prompt, &options, &sequence);
    gpu_write(sequence.grant_first, prompt.count);
    worker_seal(&sequence, prompt.count);
    worker_close_sequence(&sequence);
}

static void closes(void *argument)
{
    (void)argument;
    worker_close_sequence(&sequence);
}

static void looks(void *argument)
{
    (void)argument;
    prompt_set(&prompt, shared->first, shared->tokens);
    shared->hit = worker_hit(&prompt);
}

/* ---- The master ---- */

static void start(struct agent *agent, const char *model)
{
    (void)snprintf(shared->model, sizeof(shared->model), "%s", model);
    agent_start(agent, model, worker_close);
    agent_do(agent, joins, NULL);
}

static void must(struct agent *agent, agent_task task, enum kvk_status wanted)
{
    shared->status = KVK_OK;
    agent_do(agent, task, NULL);
    CHECK(shared->status == wanted, "status %s: %s", kvk_status_name(shared->status), shared->text);
}

static void open_tokens(struct agent *agent, uint32_t first, uint64_t tokens)
{
    shared->first = first;
    shared->tokens = tokens;
    must(agent, opens_in_time, KVK_OK);
}

static void a_workers_life(void)
{
    struct agent worker;
    phase("written by handles, swapped out and in, read both ways");
    start(&worker, "life");
    open_tokens(&worker, 1, TOKENS);
    CHECK(shared->on_device == TOKENS / BLOCK_TOKENS, "%u blocks on the device", shared->on_device);
    must(&worker, fills, KVK_OK);
    must(&worker, verifies, KVK_OK);
    agent_do(&worker, looks, NULL);
    CHECK(shared->hit == TOKENS, "%llu tokens are found", (unsigned long long)shared->hit);
    for (int i = 0; i < 5; i++) {
        must(&worker, swaps_out, KVK_OK);
        must(&worker, verifies_on_host, KVK_OK);
        must(&worker, attends_on_host, KVK_OK);
        must(&worker, swaps_in, KVK_OK);
        must(&worker, verifies, KVK_OK);
    }
    phase("a write over sealed bytes is found out at the next move");
    must(&worker, scribbles, KVK_OK);
    must(&worker, swaps_out, KVK_DATA_LOSS);
    must(&worker, closes, KVK_OK);
    agent_finish(&worker);
}

static void a_killed_worker(void)
{
    struct agent worker;
    phase("a worker is killed half-way; the next one writes the same");
    start(&worker, "killed");
    open_tokens(&worker, 1, TOKENS);
    must(&worker, writes_half, KVK_OK);
    agent_kill(&worker);
    start(&worker, "killed");
    open_tokens(&worker, 1, TOKENS);
    must(&worker, fills, KVK_OK);
    must(&worker, verifies, KVK_OK);
    must(&worker, closes, KVK_OK);
    agent_finish(&worker);
}

/* While one sequence's bytes are still on their way out, others write over all that is free. */
static void slots_reused(void)
{
    struct agent worker;
    struct agent other;
    phase("swapped out while others write over every slot that comes free");
    start(&worker, "reuse");
    start(&other, "overwrites");
    open_tokens(&worker, 1, TOKENS);
    must(&worker, fills, KVK_OK);
    for (uint32_t round = 0; round < 12; round++) {
        shared->other_first = 100000 + round * 10000;
        agent_begin(&other, overwrites, NULL);
        must(&worker, swaps_out, KVK_OK);
        agent_end(&other);
        must(&worker, verifies_on_host, KVK_OK);
        must(&worker, attends_on_host, KVK_OK);
        must(&worker, swaps_in, KVK_OK);
        must(&worker, verifies, KVK_OK);
    }
    must(&worker, closes, KVK_OK);
    agent_finish(&worker);
    agent_finish(&other);
}

/* Where the daemon gave memory on that a living process has open, the simulator would end it. */
static void slabs_that_are_lent(const struct daemon *daemon)
{
    struct agent keeper;
    struct agent other;
    uint64_t all = DEVICE_BYTES / BLOCK_BYTES * BLOCK_TOKENS;
    phase("what a living worker has open is given to nobody else");
    start(&keeper, "keeper");
    start(&other, "other");
    open_tokens(&keeper, 1, all);
    must(&keeper, fills, KVK_OK);
    must(&keeper, closes, KVK_OK);
    shared->tokens = TOKENS;
    must(&other, opens, KVK_EXHAUSTED);
    daemon_check_alive(daemon);
    phase("and to others once it is gone");
    agent_kill(&keeper);
    open_tokens(&other, 1, TOKENS);
    must(&other, fills, KVK_OK);
    must(&other, verifies, KVK_OK);
    must(&other, closes, KVK_OK);
    agent_finish(&other);
    daemon_check_alive(daemon);
}

static void fault_write(const char *path, const char *fault)
{
    char made[128];
    (void)snprintf(made, sizeof(made), "%s.new", path);
    FILE *file = fopen(made, "w");
    CHECK(file != NULL, "cannot write %s", made);
    (void)fputs(fault, file);
    CHECK(fclose(file) == 0 && rename(made, path) == 0, "cannot write %s", path);
}

/* Full for the moment, as a copy that cannot get its buffers says. */
static void a_gpu_without_memory(const char *fault_path)
{
    struct agent worker;
    phase("a GPU without memory for a slab is a refusal");
    start(&worker, "full");
    fault_write(fault_path, "cudaMalloc 1 2 0");
    shared->first = 1;
    shared->tokens = TOKENS;
    agent_do(&worker, opens, NULL);
    CHECK(shared->status == KVK_OK || shared->status == KVK_EXHAUSTED, "status %s: %s",
          kvk_status_name(shared->status), shared->text);
    if (shared->status != KVK_OK) {
        open_tokens(&worker, 1, TOKENS);
    }
    must(&worker, fills, KVK_OK);
    must(&worker, verifies, KVK_OK);
    must(&worker, closes, KVK_OK);
    agent_finish(&worker);
}

static void a_gpu_that_is_lost(const struct daemon *daemon, const char *fault_path)
{
    struct agent worker;
    struct agent other;
    phase("a GPU is lost in the middle of a swap");
    start(&worker, "lost");
    start(&other, "after");
    open_tokens(&worker, 1, TOKENS);
    must(&worker, fills, KVK_OK);
    must(&worker, swaps_out, KVK_OK);
    must(&worker, swaps_in, KVK_OK);
    fault_write(fault_path, "cudaEventSynchronize 1 214 1");
    must(&worker, swaps_out, KVK_PRECONDITION);
    daemon_check_alive(daemon);

    phase("the host tier serves on");
    open_tokens(&other, 1, TOKENS);
    CHECK(shared->on_host == TOKENS / BLOCK_TOKENS, "%u blocks on the host", shared->on_host);
    must(&other, fills_on_host, KVK_OK);
    must(&other, closes, KVK_OK);
    agent_do(&other, looks, NULL);
    CHECK(shared->hit == TOKENS, "%llu tokens are found", (unsigned long long)shared->hit);

    phase("what lay on it is found by nobody, and its sequences can be closed");
    uint64_t until_ms = now_ms() + 20000;
    do {
        agent_do(&worker, looks, NULL);
        pause_us(10000);
    } while (shared->hit > 0 && now_ms() < until_ms);
    CHECK(shared->hit == 0, "%llu tokens are found", (unsigned long long)shared->hit);
    must(&worker, closes, KVK_OK);
    open_tokens(&worker, 1, TOKENS);
    must(&worker, fills_on_host, KVK_OK);
    must(&worker, closes, KVK_OK);
    agent_finish(&worker);
    agent_finish(&other);
    daemon_check_alive(daemon);
}

int main(void)
{
    struct daemon daemon;
    char fault_path[96];
    test_begin(120);
    shared = shared_alloc(sizeof(*shared));
    (void)snprintf(fault_path, sizeof(fault_path), "/tmp/kvkeep-fault.%d", (int)getpid());
    (void)setenv("KVKEEP_CUDA_SIM", "devices=2 late_us=200 seed=5", 1);
    (void)setenv("KVKEEP_CUDA_SIM_FAULT", fault_path, 1);
    const struct daemon_setup setup = {.device_bytes = DEVICE_BYTES,
                                       .host_bytes = 16 * MIB,
                                       .rest =
                                           "[device]\nkind = cuda\ngpus = 0,1\nrequired = yes\n"};
    daemon_start(&daemon, &setup);
    memcpy(shared->target, daemon.target, sizeof(shared->target));
    a_workers_life();
    a_killed_worker();
    slots_reused();
    slabs_that_are_lent(&daemon);
    a_gpu_without_memory(fault_path);
    a_gpu_that_is_lost(&daemon, fault_path);
    daemon_stop(&daemon);
    phase("passed");
    return 0;
}
