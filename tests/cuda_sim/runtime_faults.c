/*
 * The stand-in for CUDA's runtime library catches what goes wrong unseen on a GPU: each test plants
 * a mistake and sees it told. Those that end the process are expected to.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/cuda_sim/include/cuda_runtime_api.h"
#include "tests/cuda_sim/runtime.h"

#define BYTES ((size_t)65536)

static cudaStream_t streams[2];
static uint8_t *memory;
static uint8_t *pinned;

static void good(cudaError_t result)
{
    cr_assert_eq(result, cudaSuccess, "%s", cudaGetErrorString(result));
}

static void setup(void)
{
    const struct kvk_sim_options options = {.device_count = 2, .late_us = 3000, .seed = 3};
    void *made;
    kvk_sim_reset(&options);
    for (int i = 0; i < 2; i++) {
        good(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    good(cudaMalloc(&made, BYTES));
    memory = made;
    good(cudaHostAlloc(&made, BYTES, 0));
    pinned = made;
}

TestSuite(cuda_runtime, .init = setup);

static void put(uint8_t *target, const uint8_t *source, size_t size, int stream)
{
    good(cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, streams[stream]));
}

static bool is_all(const uint8_t *bytes, size_t size, uint8_t value)
{
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* ---- Order ---- */

Test(cuda_runtime, what_is_not_waited_for_is_not_there)
{
    memset(pinned, 7, BYTES);
    put(memory, pinned, BYTES, 0);
    good(cudaStreamSynchronize(streams[0]));
    memset(pinned, 0, BYTES);
    put(pinned, memory, BYTES, 0);
    cr_assert_not(is_all(pinned, BYTES, 7), "a read without a wait sees what was before");
    good(cudaStreamSynchronize(streams[0]));
    cr_assert(is_all(pinned, BYTES, 7));
}

/* The early reuse of a buffer: it is filled anew before the copy out of it is over. */
Test(cuda_runtime, a_buffer_that_is_reused_early_spoils_the_copy)
{
    uint8_t back[64];
    int spoiled = 0;
    for (int i = 0; i < 20; i++) {
        memset(pinned, 1, BYTES);
        put(memory, pinned, BYTES, 0);
        memset(pinned, 2, BYTES); /* the mistake */
        good(cudaStreamSynchronize(streams[0]));
        kvk_sim_peek(back, memory, sizeof(back));
        spoiled += back[0] == 2;
    }
    cr_assert_gt(spoiled, 0);
}

Test(cuda_runtime, streams_without_an_order_are_told)
{
    put(memory, pinned, 100, 0);
    put(memory + 100, pinned + 100, 100, 1); /* beside it: none */
    cr_assert_eq(kvk_sim_race_count(), 0);
    put(memory + 199, pinned + 300, 100, 0); /* the last byte of what the other stream writes */
    cr_assert_eq(kvk_sim_race_count(), 1);
}

Test(cuda_runtime, two_reads_are_no_race)
{
    put(memory, pinned, 100, 0);
    put(memory + 1000, pinned, 100, 1);
    cr_assert_eq(kvk_sim_race_count(), 0);
    put(pinned + 50, memory + 2000, 100, 1);
    cr_assert_eq(kvk_sim_race_count(), 1, "what one reads the other writes");
}

/* Rows at a distance touch nothing between them. */
Test(cuda_runtime, rows_are_told_apart)
{
    good(cudaMemcpy2DAsync(memory, 200, pinned, 100, 100, 10, cudaMemcpyDefault, streams[0]));
    good(cudaMemcpy2DAsync(memory + 100, 200, pinned + 5000, 100, 100, 9, cudaMemcpyDefault,
                           streams[1]));
    cr_assert_eq(kvk_sim_race_count(), 0);
    good(cudaMemcpy2DAsync(memory + 90, 200, pinned + 9000, 100, 20, 1, cudaMemcpyDefault,
                           streams[1]));
    cr_assert_eq(kvk_sim_race_count(), 1);
}

Test(cuda_runtime, an_event_or_the_host_makes_an_order)
{
    cudaEvent_t event;
    good(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    memset(pinned, 5, BYTES);
    put(memory, pinned, BYTES, 0);
    good(cudaEventRecord(event, streams[0]));
    good(cudaStreamWaitEvent(streams[1], event, 0));
    put(pinned, memory, BYTES, 1);
    good(cudaStreamSynchronize(streams[1]));
    cr_assert(is_all(pinned, BYTES, 5));
    cr_assert_eq(kvk_sim_race_count(), 0);

    put(memory, pinned, BYTES, 0);
    good(cudaEventRecord(event, streams[0]));
    good(cudaEventSynchronize(event));
    put(pinned, memory, BYTES, 1);
    cr_assert_eq(kvk_sim_race_count(), 0);
    good(cudaStreamSynchronize(streams[1]));
    /* The same without the event. */
    put(memory, pinned, BYTES, 0);
    put(pinned, memory, BYTES, 1);
    cr_assert_eq(kvk_sim_race_count(), 1);
    good(cudaEventDestroy(event));
}

static void kernel_fill(void *context)
{
    memset(memory, *(const uint8_t *)context, BYTES);
}

Test(cuda_runtime, kernels_run_at_their_turn)
{
    static uint8_t value = 9;
    memset(pinned, 3, BYTES);
    put(memory, pinned, BYTES, 0);
    cr_assert_eq(kvk_sim_launch(streams[0], kernel_fill, &value), 0);
    put(pinned, memory, BYTES, 0);
    good(cudaStreamSynchronize(streams[0]));
    cr_assert(is_all(pinned, BYTES, 9));
}

/* ---- Memory ---- */

Test(cuda_runtime, memory_comes_poisoned)
{
    uint8_t bytes[256];
    kvk_sim_peek(bytes, memory + BYTES - 256, sizeof(bytes));
    cr_assert(is_all(bytes, sizeof(bytes), 0xff));
}

Test(cuda_runtime, the_processor_cannot_read_it, .signal = SIGSEGV)
{
    volatile uint8_t value = *(volatile uint8_t *)memory;
    (void)value;
}

Test(cuda_runtime, a_copy_past_the_end_is_told, .signal = SIGABRT)
{
    put(memory + 1, pinned, BYTES, 0);
}

Test(cuda_runtime, a_copy_from_just_before_is_told, .signal = SIGABRT)
{
    put(pinned, memory - 1, 1, 0);
}

Test(cuda_runtime, memory_is_not_freed_twice, .signal = SIGABRT)
{
    good(cudaFree(memory));
    (void)cudaFree(memory);
}

Test(cuda_runtime, memory_is_not_unlocked_under_a_copy, .signal = SIGABRT)
{
    put(memory, pinned, BYTES, 0);
    (void)cudaFreeHost(pinned);
}

Test(cuda_runtime, a_kernel_past_the_end_is_trapped, .signal = SIGSEGV)
{
    static uint8_t value = 1;
    good(cudaFree(memory)); /* and its addresses are nobody's */
    cr_assert_eq(kvk_sim_launch(streams[0], kernel_fill, &value), 0);
    (void)cudaStreamSynchronize(streams[0]);
}

Test(cuda_runtime, a_device_has_so_much_memory)
{
    const struct kvk_sim_options options = {.device_count = 1, .memory_bytes = 3 * BYTES};
    void *made[4];
    for (int i = 0; i < 2; i++) {
        good(cudaStreamDestroy(streams[i]));
    }
    kvk_sim_reset(&options);
    for (int i = 0; i < 3; i++) {
        good(cudaMalloc(&made[i], BYTES));
    }
    cr_assert_eq(cudaMalloc(&made[3], 1), cudaErrorMemoryAllocation);
    cr_assert_eq(cudaGetLastError(), cudaErrorMemoryAllocation);
    cr_assert_eq(cudaGetLastError(), cudaSuccess, "told once");
    good(cudaFree(made[1]));
    good(cudaMalloc(&made[3], BYTES));
}

Test(cuda_runtime, memory_is_locked_once)
{
    uint8_t *plain = aligned_alloc(4096, BYTES);
    cr_assert_not_null(plain);
    good(cudaHostRegister(plain, BYTES, 0));
    cr_assert_eq(cudaHostRegister(plain + 4096, 4096, 0), cudaErrorHostMemoryAlreadyRegistered);
    good(cudaHostUnregister(plain));
    free(plain);
}

/* ---- Failures ---- */

Test(cuda_runtime, the_nth_call_fails)
{
    kvk_sim_fail("cudaStreamQuery", 2, cudaErrorInvalidResourceHandle, false);
    good(cudaStreamQuery(streams[0]));
    cr_assert_eq(cudaStreamQuery(streams[0]), cudaErrorInvalidResourceHandle);
    good(cudaStreamQuery(streams[0]));
}

Test(cuda_runtime, a_lost_device_fails_for_ever_and_others_do_not)
{
    void *made;
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorECCUncorrectable, true);
    cr_assert_eq(cudaMemcpyAsync(memory, pinned, 10, cudaMemcpyDefault, streams[0]),
                 cudaErrorECCUncorrectable);
    cr_assert_eq(cudaStreamSynchronize(streams[0]), cudaErrorECCUncorrectable);
    cr_assert_eq(cudaMalloc(&made, 10), cudaErrorECCUncorrectable);
    good(cudaSetDevice(1));
    good(cudaMalloc(&made, 10));
}

/* ---- Two processes ---- */

/* In a process of its own, forked before this one has threads: opens what comes through the pipe,
 * adds one to its first byte, and says so; ends when told, or is killed. */
static void borrower(int orders, int answers)
{
    const struct kvk_sim_options options = {.device_count = 1, .late_us = 100};
    cudaIpcMemHandle_t handle;
    cudaStream_t stream;
    void *opened;
    uint8_t byte = 0;
    kvk_sim_reset(&options);
    if (read(orders, &handle, sizeof(handle)) != sizeof(handle) ||
        cudaStreamCreateWithFlags(&stream, 0) != cudaSuccess) {
        _exit(1);
    }
    cudaError_t result = cudaIpcOpenMemHandle(&opened, handle, 1);
    if (result == cudaSuccess) {
        (void)cudaMemcpyAsync(&byte, opened, 1, cudaMemcpyDeviceToHost, stream);
        (void)cudaStreamSynchronize(stream);
        byte++;
        (void)cudaMemcpyAsync(opened, &byte, 1, cudaMemcpyHostToDevice, stream);
        (void)cudaStreamSynchronize(stream);
    }
    (void)!write(answers, &result, sizeof(result));
    (void)!read(orders, &byte, 1);
    _exit(result == cudaSuccess && cudaIpcCloseMemHandle(opened) == cudaSuccess ? 0 : 1);
}

struct pair {
    int orders[2], answers[2];
    pid_t child;
};

static void pair_begin(struct pair *pair)
{
    cr_assert_eq(pipe(pair->orders), 0);
    cr_assert_eq(pipe(pair->answers), 0);
    pair->child = fork();
    if (pair->child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* where the test ends as it should */
        (void)close(pair->orders[1]);
        (void)close(pair->answers[0]);
        borrower(pair->orders[0], pair->answers[1]);
    }
    setup();
}

static cudaError_t pair_lend(struct pair *pair)
{
    cudaIpcMemHandle_t handle;
    cudaError_t result = cudaErrorUnknown;
    const uint8_t seven = 7;
    kvk_sim_poke(memory, &seven, 1);
    good(cudaIpcGetMemHandle(&handle, memory));
    cr_assert_eq(write(pair->orders[1], &handle, sizeof(handle)), (ssize_t)sizeof(handle));
    cr_assert_eq(read(pair->answers[0], &result, sizeof(result)), (ssize_t)sizeof(result));
    return result;
}

Test(cuda_processes, one_sees_what_the_other_writes)
{
    struct pair pair;
    uint8_t byte;
    int status;
    pair_begin(&pair);
    good(pair_lend(&pair));
    kvk_sim_peek(&byte, memory, 1);
    cr_assert_eq(byte, 8);
    cr_assert_eq(kvk_sim_import_count(), 1);
    cr_assert_eq(write(pair.orders[1], &byte, 1), 1);
    cr_assert_eq(waitpid(pair.child, &status, 0), pair.child);
    cr_assert_eq(status, 0);
    cr_assert_eq(kvk_sim_import_count(), 0);
    good(cudaFree(memory));
}

Test(cuda_processes, memory_that_another_has_is_not_freed, .signal = SIGABRT)
{
    struct pair pair;
    pair_begin(&pair);
    good(pair_lend(&pair));
    (void)cudaFree(memory);
}

Test(cuda_processes, a_killed_process_has_nothing_more)
{
    struct pair pair;
    int status;
    pair_begin(&pair);
    good(pair_lend(&pair));
    cr_assert_eq(kill(pair.child, SIGKILL), 0);
    cr_assert_eq(waitpid(pair.child, &status, 0), pair.child);
    good(cudaFree(memory));
}

Test(cuda_processes, what_was_freed_cannot_be_opened)
{
    struct pair pair;
    cudaIpcMemHandle_t handle;
    cudaError_t result = cudaSuccess;
    pair_begin(&pair);
    good(cudaIpcGetMemHandle(&handle, memory));
    good(cudaFree(memory));
    cr_assert_eq(write(pair.orders[1], &handle, sizeof(handle)), (ssize_t)sizeof(handle));
    cr_assert_eq(read(pair.answers[0], &result, sizeof(result)), (ssize_t)sizeof(result));
    cr_assert_eq(result, cudaErrorMapBufferObjectFailed);
    (void)close(pair.orders[1]);
    cr_assert_eq(waitpid(pair.child, NULL, 0), pair.child);
}
