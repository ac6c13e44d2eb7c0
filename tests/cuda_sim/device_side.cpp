/* Blocks of fibers: barriers, warps, shared memory and asynchronous copies. */
#include "tests/cuda_sim/device_side.h"

#include <atomic>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/cuda_sim/fiber.hpp"
#include "tests/cuda_sim/kernel_side.hpp"
#include "tests/cuda_sim/runtime.h"
#include "tests/cuda_sim/warp.hpp"

namespace kvk_sim
{

#define THREADS_MAX 1024
#define STACK_BYTES (256 * 1024)
#define COPIES_MAX 512 /* of a thread, under way */
#define GROUPS_MAX 16
#define SITES_MAX 32
#define BARRIER_WARPS_LEFT_OUT 1 /* by a planted divergence */

enum thread_state {
    THREAD_READY,
    THREAD_AT_BARRIER,
    THREAD_AT_WARP,
    THREAD_ENDED,
};

/* Bytes on their way into shared memory. */
struct copy {
    void *target;
    const void *source; /* NULL: zeros */
    uint32_t size_bytes;
};

struct thread {
    fiber own;
    uint32_t index;
    enum thread_state state;
    const char *file; /* where it waits */
    int line;
    copy copies[COPIES_MAX]; /* oldest first */
    uint32_t copy_count;
    uint32_t group_ends[GROUPS_MAX]; /* of closed groups, in copies; oldest first */
    uint32_t group_count;
};

struct warp_state {
    lane_in in[32];
    lane_out out[32];
    enum warp_work work;
    const char *file;
    int line;
    uint32_t arrived;
};

struct block {
    thread *threads; /* [THREADS_MAX], made once for each thread of the processor */
    warp_state warps[THREADS_MAX / 32];
    fiber main;
    uint64_t ready[THREADS_MAX / 64]; /* a bit for each thread: which one goes on is asked often */
    uint32_t thread_count;
    uint32_t live_count;
    uint32_t at_barrier;
    const char *barrier_file; /* where the first of them waits */
    int barrier_line;
    uint32_t barrier_first;
    uint32_t current;
    place index;
    kernel_call *call;
    const void *parameters;
    uint8_t *shared_area; /* with guard pages on both sides */
    size_t shared_area_bytes;
    uint8_t *shared; /* ends where the upper guard page begins */
    uint32_t shared_bytes;
    uint64_t random;
};

static enum kvk_sim_order order;
static uint64_t order_seed;
static uint32_t shared_limit = 163 * 1024;
/* Past this a kernel must ask. */
#define SHARED_BYTES_USUAL (48 * 1024)
/* All kernels, in all their variants. */
#define KERNELS_MAX 128
static struct kvk_sim_faults faults;
static std::atomic<uint64_t> kernel_count;

struct site {
    const char *file;
    int line;
};

static site sites[SITES_MAX];
static uint32_t site_count;
static pthread_mutex_t site_lock = PTHREAD_MUTEX_INITIALIZER;

static thread_local block *running;

static thread &self(void)
{
    return running->threads[running->current];
}

[[noreturn]] static void breach(const char *what, const char *file, int line)
{
    (void)fprintf(stderr, "cuda_sim: %s: thread %u of block (%u, %u) at %s:%d\n", what,
                  self().index, running->index.x, running->index.y, file, line);
    abort();
}

/* ---- Which thread goes on ------------------------------------------------------------------- */

static uint32_t random_below(uint32_t bound)
{
    running->random = running->random * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (uint32_t)((running->random >> 33) % bound);
}

/* Nobody can go on. */
[[noreturn]] static void tell_deadlock(void)
{
    block &b = *running;

    (void)fprintf(stderr, "cuda_sim: threads of block (%u, %u) wait for each other:\n", b.index.x,
                  b.index.y);
    for (uint32_t i = 0; i < b.thread_count; i++) {
        const thread &t = b.threads[i];
        bool told = i > 0 && t.state == b.threads[i - 1].state && t.line == b.threads[i - 1].line;
        if (told) {
            continue;
        }
        if (t.state == THREAD_ENDED) {
            (void)fprintf(stderr, "cuda_sim:   from thread %u on: ended\n", i);
        } else {
            (void)fprintf(stderr, "cuda_sim:   from thread %u on: at the %s of %s:%d\n", i,
                          t.state == THREAD_AT_BARRIER ? "barrier" : "warp's work", t.file, t.line);
        }
    }
    abort();
}

static void set_state(thread &t, enum thread_state state)
{
    uint64_t bit = UINT64_C(1) << (t.index % 64);

    t.state = state;
    if (state == THREAD_READY) {
        running->ready[t.index / 64] |= bit;
    } else {
        running->ready[t.index / 64] &= ~bit;
    }
}

/* The first thread that can go on, from `at` up, all around. */
static uint32_t ready_from(uint32_t at)
{
    const block &b = *running;
    const uint32_t words = THREADS_MAX / 64;

    for (uint32_t i = 0; i <= words; i++) {
        uint32_t word = (at / 64 + i) % words;
        uint64_t bits = b.ready[word];
        if (i == 0) {
            bits &= UINT64_MAX << (at % 64);
        }
        if (bits != 0) {
            return word * 64 + (uint32_t)__builtin_ctzll(bits);
        }
    }
    tell_deadlock();
}

static uint32_t ready_last(void)
{
    const block &b = *running;

    for (uint32_t word = THREADS_MAX / 64; word-- > 0;) {
        if (b.ready[word] != 0) {
            return word * 64 + 63 - (uint32_t)__builtin_clzll(b.ready[word]);
        }
    }
    tell_deadlock();
}

/* Forward, the first warp goes as far as it can before the second begins: so one is as far ahead
 * of the others as the barriers let it be. At random, a warp is stayed with for a while. */
static uint32_t next_ready(void)
{
    if (order == KVK_SIM_FORWARD) {
        return ready_from(0);
    }
    if (order == KVK_SIM_REVERSE) {
        return ready_last();
    }
    if (random_below(64) == 0) {
        return ready_from(random_below(running->thread_count));
    }
    return ready_from(running->current / 32 * 32 + random_below(32));
}

static void go_on(void)
{
    block &b = *running;
    uint32_t from = b.current;
    uint32_t to = next_ready();

    if (to != from) {
        b.current = to;
        fiber_switch(&b.threads[from].own, &b.threads[to].own);
    }
}

/* A place where a thread may as well be slower than the others. */
static void pause_perhaps(void)
{
    if (order == KVK_SIM_RANDOM && random_below(8) == 0) {
        go_on();
    }
}

/* ---- Barriers -------------------------------------------------------------------------------- */

/* Its number, from 1 on. */
static uint32_t site_number(const char *file, int line)
{
    uint32_t at = 0;

    (void)pthread_mutex_lock(&site_lock);
    while (at < site_count && (sites[at].line != line || strcmp(sites[at].file, file) != 0)) {
        at++;
    }
    if (at == site_count) {
        if (site_count == SITES_MAX) {
            abort();
        }
        sites[site_count++] = {file, line};
    }
    (void)pthread_mutex_unlock(&site_lock);
    return at + 1;
}

static void barrier_open_if_complete(void)
{
    block &b = *running;

    if (b.at_barrier != b.thread_count) {
        return;
    }
    b.at_barrier = 0;
    for (uint32_t i = 0; i < b.thread_count; i++) {
        set_state(b.threads[i], THREAD_READY);
    }
}

void barrier(const char *file, int line)
{
    block &b = *running;
    thread &t = self();
    uint32_t number = site_number(file, line);

    if (number == faults.skipped_barrier) {
        return;
    }
    if (number == faults.divergent_barrier &&
        t.index >= b.thread_count - 32 * BARRIER_WARPS_LEFT_OUT) {
        return;
    }
    if (b.live_count < b.thread_count) {
        breach("barrier after a thread has ended", file, line);
    }
    if (b.at_barrier == 0) {
        b.barrier_file = file;
        b.barrier_line = line;
        b.barrier_first = t.index;
    } else if (b.barrier_line != line || strcmp(b.barrier_file, file) != 0) {
        (void)fprintf(stderr, "cuda_sim: thread %u waits at %s:%d\n", b.barrier_first,
                      b.barrier_file, b.barrier_line);
        breach("divergent barrier", file, line);
    }
    t.file = file;
    t.line = line;
    set_state(t, THREAD_AT_BARRIER);
    b.at_barrier++;
    barrier_open_if_complete();
    go_on();
}

/* ---- Shared memory and asynchronous copies --------------------------------------------------- */

uint8_t *shared_memory(void)
{
    return running->shared;
}

static void check_shared(const void *address, uint32_t size_bytes, const char *file, int line)
{
    const uint8_t *at = (const uint8_t *)address;
    const block &b = *running;

    if (at < b.shared || at + size_bytes > b.shared + b.shared_bytes) {
        breach("bytes that are not in shared memory", file, line);
    }
    if ((uintptr_t)at % size_bytes != 0) {
        breach("shared memory that is not aligned", file, line);
    }
}

void copy_async(void *shared, const void *global, uint32_t size_bytes, bool take, const char *file,
                int line)
{
    thread &t = self();

    check_shared(shared, size_bytes, file, line);
    if (take && (uintptr_t)global % size_bytes != 0) {
        breach("a source that is not aligned", file, line);
    }
    if (t.copy_count == COPIES_MAX) {
        breach("more copies under way than the simulator counts", file, line);
    }
    memset(shared, 0xff, size_bytes); /* whoever reads it before the wait gets NaN */
    t.copies[t.copy_count++] = {shared, take ? global : nullptr, size_bytes};
    pause_perhaps();
}

void copy_async_close(void)
{
    thread &t = self();

    if (faults.forgotten_close) {
        return;
    }
    if (t.group_count == GROUPS_MAX) {
        breach("more groups under way than the simulator counts", "", 0);
    }
    t.group_ends[t.group_count++] = t.copy_count;
}

static void copies_land(thread &t, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (t.copies[i].source == nullptr) {
            memset(t.copies[i].target, 0, t.copies[i].size_bytes);
        } else {
            memcpy(t.copies[i].target, t.copies[i].source, t.copies[i].size_bytes);
        }
    }
    memmove(t.copies, t.copies + count, (t.copy_count - count) * sizeof(copy));
    t.copy_count -= count;
}

void copy_async_wait(uint32_t newest_groups)
{
    thread &t = self();
    uint32_t kept = newest_groups + faults.early_waits;

    pause_perhaps();
    if (t.group_count <= kept) {
        return;
    }
    uint32_t ended = t.group_count - kept;
    uint32_t landed = t.group_ends[ended - 1];
    copies_land(t, landed);
    t.group_count = kept;
    for (uint32_t i = 0; i < kept; i++) {
        t.group_ends[i] = t.group_ends[i + ended] - landed;
    }
    pause_perhaps();
}

/* ---- Warps ------------------------------------------------------------------------------------
 */

lane_out warp(enum warp_work work, const lane_in &in, const char *file, int line)
{
    block &b = *running;
    thread &t = self();
    uint32_t lane = t.index % 32;
    warp_state &w = b.warps[t.index / 32];

    if (w.arrived != 0 && (w.work != work || w.line != line)) {
        (void)fprintf(stderr, "cuda_sim: other lanes wait at %s:%d\n", w.file, w.line);
        breach("divergent warp", file, line);
    }
    if (work == WARP_LOAD_MATRICES || work == WARP_LOAD_MATRICES_TRANSPOSED) {
        check_shared(in.address, 16, file, line);
    }
    w.work = work;
    w.file = file;
    w.line = line;
    w.in[lane] = in;
    w.arrived |= UINT32_C(1) << lane;
    if (w.arrived == UINT32_MAX) {
        w.arrived = 0;
        warp_compute(work, w.in, w.out);
        for (uint32_t i = 0; i < 32; i++) {
            set_state(b.threads[t.index - lane + i], THREAD_READY);
        }
        pause_perhaps();
    } else {
        t.file = file;
        t.line = line;
        set_state(t, THREAD_AT_WARP);
        go_on();
    }
    return w.out[lane];
}

/* ---- Blocks and grids --------------------------------------------------------------------------
 */

uint32_t thread_index(void)
{
    return self().index;
}

place block_index(void)
{
    return running->index;
}

static void thread_run(void)
{
    fiber_arrived(&self().own);
    block &b = *running;
    b.call(b.parameters);
    thread &t = self();
    if (t.copy_count > 0) {
        breach("the thread ended with copies under way that nobody waits for", "", 0);
    }
    set_state(t, THREAD_ENDED);
    if (b.at_barrier > 0) {
        breach("the thread ended while others wait at a barrier", b.barrier_file, b.barrier_line);
    }
    b.live_count--;
    if (b.live_count > 0) {
        go_on();
    }
    fiber_switch(&t.own, &b.main);
    abort(); /* an ended thread goes on */
}

static void *guarded_area(size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *area =
        mmap(nullptr, size_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (area == MAP_FAILED ||
        mprotect((uint8_t *)area + page, size_bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("cuda_sim: no memory");
        abort();
    }
    return (uint8_t *)area + page;
}

#define SHARED_AREA_BYTES (256 * 1024)

static void block_free(void *context)
{
    block *b = (block *)context;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    for (uint32_t i = 0; i < THREADS_MAX; i++) {
        if (b->threads[i].own.stack != nullptr) {
            fiber_finish(&b->threads[i].own);
        }
    }
    if (munmap(b->shared_area - page, b->shared_area_bytes + 2 * page) != 0) {
        abort();
    }
    free(b->threads);
    free(b);
}

static pthread_key_t block_key;

static void block_key_make(void)
{
    if (pthread_key_create(&block_key, block_free) != 0) {
        abort();
    }
}

/* The stack that fibers leave and come back to. */
static void main_fiber_init(fiber *main)
{
    pthread_attr_t attributes;
    void *stack = nullptr;

    if (pthread_getattr_np(pthread_self(), &attributes) != 0 ||
        pthread_attr_getstack(&attributes, &stack, &main->stack_bytes) != 0) {
        abort();
    }
    main->stack = (uint8_t *)stack;
    (void)pthread_attr_destroy(&attributes);
}

/* One for each thread of the processor, until that ends. */
static block *block_of_thread(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    if (pthread_once(&once, block_key_make) != 0) {
        abort();
    }
    block *mine = (block *)pthread_getspecific(block_key);
    if (mine == nullptr) {
        mine = (block *)calloc(1, sizeof(block));
        thread *threads = (thread *)calloc(THREADS_MAX, sizeof(thread));
        if (mine == nullptr || threads == nullptr || pthread_setspecific(block_key, mine) != 0) {
            abort();
        }
        mine->threads = threads;
        mine->shared_area = (uint8_t *)guarded_area(SHARED_AREA_BYTES);
        mine->shared_area_bytes = SHARED_AREA_BYTES;
        main_fiber_init(&mine->main);
    }
    return mine;
}

static void run_block(block &b)
{
    memset(b.shared, 0xff, b.shared_bytes);
    memset(b.warps, 0, sizeof(b.warps));
    memset(b.ready, 0, sizeof(b.ready));
    b.live_count = b.thread_count;
    b.at_barrier = 0;
    for (uint32_t i = 0; i < b.thread_count; i++) {
        thread &t = b.threads[i];
        if (t.own.stack == nullptr) {
            fiber_init(&t.own, STACK_BYTES);
        }
        t.index = i;
        set_state(t, THREAD_READY);
        t.copy_count = 0;
        t.group_count = 0;
        fiber_begin(&t.own, thread_run);
    }
    b.current = order == KVK_SIM_REVERSE ? b.thread_count - 1 : 0;
    fiber_switch(&b.main, &b.threads[b.current].own);
}

/* What a launch takes with it; its parameters follow. */
struct alignas(16) launched {
    kernel_call *call;
    place grid;
    uint32_t block_threads;
    uint32_t shared_bytes;
};

static void run_grid(void *context)
{
    launched *work = (launched *)context;
    block &b = *block_of_thread();
    uint32_t count = work->grid.x * work->grid.y * work->grid.z;

    b.call = work->call;
    b.parameters = work + 1;
    b.thread_count = work->block_threads;
    b.shared_bytes = work->shared_bytes;
    b.shared = b.shared_area + b.shared_area_bytes - (work->shared_bytes + 15) / 16 * 16;
    b.random = order_seed;
    running = &b;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = order == KVK_SIM_REVERSE ? count - 1 - i : i;
        b.index = {at % work->grid.x, at / work->grid.x % work->grid.y,
                   at / work->grid.x / work->grid.y};
        run_block(b);
    }
    running = nullptr;
    kernel_count++;
    free(work);
}

int probe(void)
{
    return kvk_sim_probe();
}

/* What each kernel asks for, as its first launch had it. */
static void asked_check(const void *kernel, uint32_t shared_bytes, uint32_t shared_bytes_max)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        const void *kernel;
        uint32_t shared_bytes_max;
    } asked[KERNELS_MAX];
    static uint32_t count;
    uint32_t i = 0;

    (void)pthread_mutex_lock(&lock);
    while (i < count && asked[i].kernel != kernel) {
        i++;
    }
    if (i == count) {
        if (count == KERNELS_MAX) {
            abort();
        }
        asked[count++] = {kernel, shared_bytes_max};
    }
    if (shared_bytes > shared_bytes_max || shared_bytes_max != asked[i].shared_bytes_max) {
        fprintf(stderr,
                "cuda_sim: a launch needs %u bytes of shared memory and asks for %u, "
                "its kernel's first asked for %u\n",
                shared_bytes, shared_bytes_max, asked[i].shared_bytes_max);
        abort();
    }
    (void)pthread_mutex_unlock(&lock);
}

int launch(const void *kernel, kernel_call *call, const void *parameters, size_t parameters_bytes,
           place grid, uint32_t block_threads, uint32_t shared_bytes, uint32_t shared_bytes_max,
           void *stream)
{
    const int invalid = 1; /* cudaErrorInvalidValue */

    asked_check(kernel, shared_bytes, shared_bytes_max);

    if (block_threads == 0 || block_threads > THREADS_MAX || block_threads % 32 != 0 ||
        grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 ||
        shared_bytes > shared_limit ||
        (shared_bytes > SHARED_BYTES_USUAL && shared_bytes_max > shared_limit)) {
        return invalid;
    }
    launched *work = (launched *)malloc(sizeof(launched) + parameters_bytes);
    if (work == nullptr) {
        abort();
    }
    *work = {call, grid, block_threads, shared_bytes};
    memcpy(work + 1, parameters, parameters_bytes);
    int error = kvk_sim_launch(stream, run_grid, work);
    if (error != 0) {
        free(work);
    }
    return error;
}

} // namespace kvk_sim

using namespace kvk_sim;

/* Where the stand-in for CUDA's runtime is not linked, there are no streams: work is done at once.
 */
extern "C" __attribute__((weak)) int kvk_sim_launch(void *, kvk_sim_kernel *run, void *context)
{
    run(context);
    return 0;
}

extern "C" __attribute__((weak)) int kvk_sim_probe(void)
{
    return 0;
}

void kvk_sim_order_set(enum kvk_sim_order wanted, uint64_t seed)
{
    order = wanted;
    order_seed = seed;
}

void kvk_sim_shared_limit_set(uint32_t size_bytes)
{
    shared_limit = size_bytes < SHARED_AREA_BYTES ? size_bytes : SHARED_AREA_BYTES;
}

uint32_t kvk_sim_shared_limit(void)
{
    return shared_limit;
}

void kvk_sim_faults_set(const struct kvk_sim_faults *wanted)
{
    faults = *wanted;
    site_count = 0;
}

uint32_t kvk_sim_barrier_count(void)
{
    return site_count;
}

uint64_t kvk_sim_kernel_count(void)
{
    return kernel_count;
}
