/*
 * The insides of the stand-in for CUDA's runtime library, for tests/cuda_sim/runtime*.c alone.
 *
 * Locking: `sim.lock` over everything here; work runs without it.
 */
#ifndef KVK_TESTS_CUDA_SIM_RUNTIME_INTERNAL_H
#define KVK_TESTS_CUDA_SIM_RUNTIME_INTERNAL_H

#include <pthread.h>
#include <stdint.h>

#include "tests/cuda_sim/include/cuda_runtime_api.h"
#include "tests/cuda_sim/runtime.h"

#define SIM_DEVICE_MAX 16
#define SIM_STREAM_MAX 512
#define SIM_POISON 0xff /* NaN in every format */
#define SIM_FETCH_POISON 0xdb

enum sim_memory {
    SIM_DEVICE,
    SIM_PINNED,     /* cudaHostAlloc */
    SIM_REGISTERED, /* cudaHostRegister */
    SIM_IMPORTED,   /* cudaIpcOpenMemHandle */
};

/* A piece of memory that the runtime knows. */
struct sim_allocation {
    struct sim_allocation *next;
    enum sim_memory kind;
    int device;
    uint8_t *address; /* what the caller has */
    uint64_t size_bytes;
    uint8_t *alias; /* device memory: the same bytes, where the runtime may touch them */
    uint8_t *map;   /* of `address`, without its guard pages */
    uint64_t map_bytes;
    int fd;           /* its memory file; -1 */
    uint64_t id;      /* in handles */
    int connection;   /* imported: open as long as it is; -1 */
    uint32_t opened;  /* imported: times */
    uint32_t imports; /* of other processes, now */
};

/* Bytes that a piece of work touches: rows at a distance. */
struct sim_rows {
    uintptr_t begin;
    uint64_t pitch, width, height; /* width 0: none */
};

enum sim_kind {
    SIM_COPY,
    SIM_SET,
    SIM_KERNEL,
    SIM_RECORD,
    SIM_WAIT,
};

struct sim_work {
    struct sim_work *next;
    enum sim_kind kind;
    uint64_t number; /* in its stream, from 1 */
    struct sim_rows reads, writes;
    uint8_t *target; /* as the runtime may touch it */
    const uint8_t *source;
    bool to_host;
    int value;
    kvk_sim_kernel *run;
    void *context;
    cudaEvent_t event;
    cudaStream_t other; /* WAIT: goes on when `other` has done work `until` */
    uint64_t until;
};

struct CUstream_st {
    int device;
    uint32_t index; /* in sim.streams */
    pthread_t thread;
    bool stopping;
    struct sim_work *first, *last; /* waiting, oldest first */
    struct sim_work *past;         /* done, but the host has not waited for it: for races */
    uint64_t put_count, done_count, seen_count; /* work; seen: the host knows that it is done */
    uint64_t knows[SIM_STREAM_MAX]; /* work of other streams that this one comes after */
};

struct CUevent_st {
    cudaStream_t stream; /* of the last record; NULL: none */
    uint64_t number;
    uint64_t knows[SIM_STREAM_MAX];
};

struct sim {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool ready;
    struct kvk_sim_options options;
    uint64_t random;
    uint64_t used_bytes[SIM_DEVICE_MAX];
    int lost[SIM_DEVICE_MAX]; /* a cudaError_t, or 0 */
    struct sim_allocation *allocations;
    cudaStream_t streams[SIM_STREAM_MAX];
    uint64_t races;
    uint64_t next_id;
    uint32_t kernels; /* running: device memory can be touched meanwhile */
};

extern struct sim sim;

/* Every function of the interface begins with it: counts the call, and says whether it fails. */
cudaError_t sim_enter(const char *call);
/* As sim_enter(), for calls that go on where the device is lost. */
cudaError_t sim_enter_always(const char *call);
int sim_device(void); /* the thread's current one */
cudaError_t sim_fail(cudaError_t error);
_Noreturn void sim_abort(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t sim_random(uint64_t below); /* the lock is held */

/* The lock is held. NULL: no memory that the runtime knows; aborts where only a part is. */
struct sim_allocation *sim_find(const void *address, uint64_t size_bytes);
/* Work that is put in and not done touches these bytes. The lock is held. */
bool sim_is_in_use(uintptr_t begin, uint64_t size_bytes);
/* A kernel runs, or runs no longer: device memory can be touched. The lock is held. */
void sim_kernel_begin(void);
void sim_kernel_end(void);
/* Everything of the device's streams is done. The lock is held, and given up meanwhile. */
void sim_drain(int device);
void sim_memory_reset(void);

#endif
