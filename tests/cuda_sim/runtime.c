/* Devices, failures, streams and events of the stand-in; its memory is in runtime_memory.c. */
#include "tests/cuda_sim/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/cuda_sim/device_side.h"
#include "tests/cuda_sim/runtime_internal.h"

struct sim sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;

void sim_abort(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    (void)fputs("cuda_sim: ", stderr);
    (void)vfprintf(stderr, format, list);
    (void)fputc('\n', stderr);
    va_end(list);
    abort();
}

uint64_t sim_random(uint64_t below)
{
    sim.random = sim.random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return below == 0 ? 0 : (sim.random >> 33) % below;
}

/* ---- Options ---- */

static void options_set(const struct kvk_sim_options *options)
{
    sim.options = *options;
    if (sim.options.memory_bytes == 0) {
        sim.options.memory_bytes = UINT64_C(1) << 30;
    }
    if (sim.options.device_count > SIM_DEVICE_MAX) {
        sim.options.device_count = SIM_DEVICE_MAX;
    }
    sim.random = options->seed * 2 + 1;
    memset(sim.lost, 0, sizeof(sim.lost));
    sim.races = 0;
    sim.ready = true;
}

static uint64_t word_number(const char *text, const char *name, uint64_t otherwise)
{
    const char *at = strstr(text, name);
    return at == NULL ? otherwise : strtoull(at + strlen(name), NULL, 10);
}

static void options_ready(void)
{
    if (sim.ready) {
        return;
    }
    const char *text = getenv("KVKEEP_CUDA_SIM");
    text = text == NULL ? "" : text;
    const struct kvk_sim_options options = {
        .device_count = (uint32_t)word_number(text, "devices=", 1),
        .memory_bytes = word_number(text, "memory=", 0),
        .late_us = (uint32_t)word_number(text, "late_us=", 0),
        .seed = word_number(text, "seed=", 1),
    };
    options_set(&options);
}

/* ---- Calls, and those that fail ---- */

#define CALL_COUNT_MAX 64
#define FAULT_COUNT_MAX 16

static struct {
    char name[48]; /* "": nobody called it yet, nor what comes after */
    uint64_t count;
} calls[CALL_COUNT_MAX];

static struct {
    char name[48];
    uint64_t at; /* this call, counted from the beginning */
    int error;
    bool sticky;
} faults[FAULT_COUNT_MAX];

static uint64_t *call_counter(const char *name)
{
    for (int i = 0; i < CALL_COUNT_MAX; i++) {
        if (calls[i].name[0] == '\0') {
            (void)snprintf(calls[i].name, sizeof(calls[i].name), "%s", name);
        }
        if (strcmp(calls[i].name, name) == 0) {
            return &calls[i].count;
        }
    }
    sim_abort("more than %d functions", CALL_COUNT_MAX);
}

static void fault_add(const char *call, uint32_t nth, int error, bool sticky)
{
    for (int i = 0; i < FAULT_COUNT_MAX; i++) {
        if (faults[i].name[0] != '\0') {
            continue;
        }
        (void)snprintf(faults[i].name, sizeof(faults[i].name), "%s", call);
        faults[i].at = *call_counter(call) + nth;
        faults[i].error = error;
        faults[i].sticky = sticky;
        return;
    }
    sim_abort("more than %d faults are waiting", FAULT_COUNT_MAX);
}

/* A test that has the process from outside writes its faults into a file. */
static void faults_from_file(void)
{
    const char *path = getenv("KVKEEP_CUDA_SIM_FAULT");
    FILE *file = path == NULL ? NULL : fopen(path, "re");
    char call[48];
    unsigned nth;
    int error;
    int sticky;
    if (file == NULL) {
        return;
    }
    if (fscanf(file, "%47s %u %d %d", call, &nth, &error, &sticky) == 4) {
        fault_add(call, nth, error, sticky != 0);
        (void)unlink(path);
    }
    (void)fclose(file);
}

static cudaError_t fault_of(const char *call, uint64_t count)
{
    for (int i = 0; i < FAULT_COUNT_MAX; i++) {
        if (faults[i].name[0] != '\0' && strcmp(faults[i].name, call) == 0 &&
            faults[i].at == count) {
            faults[i].name[0] = '\0';
            if (faults[i].sticky) {
                sim.lost[current_device] = faults[i].error;
                (void)pthread_cond_broadcast(&sim.changed);
            }
            return (cudaError_t)faults[i].error;
        }
    }
    return cudaSuccess;
}

cudaError_t sim_fail(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        last_error = error;
    }
    return error;
}

static cudaError_t enter(const char *call, bool always)
{
    (void)pthread_mutex_lock(&sim.lock);
    options_ready();
    faults_from_file();
    cudaError_t result = fault_of(call, ++*call_counter(call));
    if (result == cudaSuccess && !always) {
        result = (cudaError_t)sim.lost[current_device];
        if (result == cudaSuccess && sim.options.device_count == 0) {
            result = cudaErrorInsufficientDriver;
        }
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return sim_fail(result);
}

cudaError_t sim_enter(const char *call)
{
    return enter(call, false);
}

cudaError_t sim_enter_always(const char *call)
{
    return enter(call, true);
}

int sim_device(void)
{
    return current_device;
}

/* ---- Devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t result = sim_enter_always("cudaGetDeviceCount");
    *count = result == cudaSuccess ? (int)sim.options.device_count : 0;
    if (result == cudaSuccess && *count == 0) {
        result = sim_fail(cudaErrorInsufficientDriver);
    }
    return result;
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t result = sim_enter_always("cudaSetDevice");
    if (result == cudaSuccess && (device < 0 || device >= (int)sim.options.device_count)) {
        result = sim_fail(cudaErrorInvalidDevice);
    }
    if (result == cudaSuccess) {
        current_device = device;
    }
    return result;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return sim_enter_always("cudaGetDevice");
}

/* Where the device side is not linked, no kernel runs. */
__attribute__((weak)) uint32_t kvk_sim_shared_limit(void)
{
    return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    cudaError_t result = sim_enter("cudaGetDeviceProperties");
    *properties = (struct cudaDeviceProp){.totalGlobalMem = sim.options.memory_bytes,
                                          .major = 9,
                                          .minor = 0,
                                          .multiProcessorCount = 4,
                                          .sharedMemPerBlockOptin = kvk_sim_shared_limit()};
    (void)snprintf(properties->name, sizeof(properties->name), "simulated GPU");
    memcpy(properties->uuid.bytes, "kvkeep-sim-gpu-", 15);
    properties->uuid.bytes[15] = (char)('0' + device);
    return result;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    (void)device;
    *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : 1;
    return sim_enter("cudaDeviceGetAttribute");
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    cudaError_t result = sim_enter("cudaMemGetInfo");
    (void)pthread_mutex_lock(&sim.lock);
    *total_bytes = sim.options.memory_bytes;
    *free_bytes = sim.options.memory_bytes - sim.used_bytes[current_device];
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t result = last_error;
    last_error = cudaSuccess;
    return result;
}

const char *cudaGetErrorString(cudaError_t error)
{
#define KVK_SIM_ERROR(name, number)                                                                \
    if (error == (name)) {                                                                         \
        return #name;                                                                              \
    }
#define KVK_SIM_COPY(name, number)
#define KVK_SIM_ATTRIBUTE(name, number)
#define KVK_SIM_FLAG(name, number)
#include "tests/cuda_sim/include/values.inc"
    return "another failure";
}

/* ---- What touches what ---- */

static bool spans_meet(uintptr_t a, uint64_t a_bytes, uintptr_t b, uint64_t b_bytes)
{
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

static uint64_t rows_span(const struct sim_rows *rows)
{
    return rows->width == 0 ? 0 : (rows->height - 1) * rows->pitch + rows->width;
}

static bool rows_meet(const struct sim_rows *a, const struct sim_rows *b)
{
    if (!spans_meet(a->begin, rows_span(a), b->begin, rows_span(b))) {
        return false;
    }
    for (uint64_t i = 0; i < a->height; i++) {
        for (uint64_t k = 0; k < b->height; k++) {
            if (spans_meet(a->begin + i * a->pitch, a->width, b->begin + k * b->pitch, b->width)) {
                return true;
            }
        }
    }
    return false;
}

static bool works_clash(const struct sim_work *a, const struct sim_work *b)
{
    return rows_meet(&a->writes, &b->writes) || rows_meet(&a->writes, &b->reads) ||
           rows_meet(&a->reads, &b->writes);
}

/* The new work against all of other streams that neither the host nor this stream knows to be over.
 */
static void races_look(cudaStream_t stream, const struct sim_work *work)
{
    for (int i = 0; i < SIM_STREAM_MAX; i++) {
        cudaStream_t other = sim.streams[i];
        if (other == NULL || other == stream) {
            continue;
        }
        for (int list = 0; list < 2; list++) {
            for (const struct sim_work *at = list == 0 ? other->past : other->first; at != NULL;
                 at = at->next) {
                if (at->number > other->seen_count && at->number > stream->knows[i] &&
                    works_clash(at, work)) {
                    sim.races++;
                    (void)fprintf(stderr, "cuda_sim: work of two streams touches the same bytes, "
                                          "and nothing orders it\n");
                    return;
                }
            }
        }
    }
}

bool sim_is_in_use(uintptr_t begin, uint64_t size_bytes)
{
    const struct sim_rows all = {
        .begin = begin, .pitch = size_bytes, .width = size_bytes, .height = 1};
    for (int i = 0; i < SIM_STREAM_MAX; i++) {
        cudaStream_t stream = sim.streams[i];
        for (const struct sim_work *at = stream == NULL ? NULL : stream->first; at != NULL;
             at = at->next) {
            if (rows_meet(&all, &at->reads) || rows_meet(&all, &at->writes)) {
                return true;
            }
        }
    }
    return false;
}

/* ---- Streams ---- */

static void past_forget(cudaStream_t stream)
{
    struct sim_work **link = &stream->past;
    while (*link != NULL) {
        struct sim_work *work = *link;
        if (work->number <= stream->seen_count) {
            *link = work->next;
            free(work);
        } else {
            link = &work->next;
        }
    }
}

static void sleep_us(uint64_t microseconds)
{
    const struct timespec time = {.tv_sec = (time_t)(microseconds / 1000000),
                                  .tv_nsec = (long)(microseconds % 1000000 * 1000)};
    (void)nanosleep(&time, NULL);
}

/* Rows one by one, in two halves with a pause between: who looks too early sees half of it. */
static void rows_copy(const struct sim_work *work, uint64_t pause_us)
{
    uint64_t half = work->writes.height / 2;
    for (uint64_t i = 0; i < work->writes.height; i++) {
        uint8_t *target = work->target + i * work->writes.pitch;
        if (i == half && pause_us > 0) {
            sleep_us(pause_us);
        }
        if (work->kind == SIM_SET) {
            memset(target, work->value, work->writes.width);
        } else {
            memcpy(target, work->source + i * work->reads.pitch, work->writes.width);
        }
    }
}

static void rows_poison(const struct sim_work *work)
{
    for (uint64_t i = 0; i < work->writes.height; i++) {
        memset(work->target + i * work->writes.pitch, SIM_FETCH_POISON, work->writes.width);
    }
}

/* The lock is held, and given up while the work is done. */
static void work_do(cudaStream_t stream, struct sim_work *work)
{
    uint64_t late_us = sim.options.late_us == 0 ? 0 : sim_random(sim.options.late_us);
    while (work->kind == SIM_WAIT && work->other->done_count < work->until &&
           sim.lost[stream->device] == 0) {
        (void)pthread_cond_wait(&sim.changed, &sim.lock);
    }
    if (sim.lost[stream->device] != 0) {
        return; /* whatever was there stays */
    }
    if (work->kind == SIM_KERNEL) {
        sim_kernel_begin();
    }
    (void)pthread_mutex_unlock(&sim.lock);
    if (work->kind == SIM_COPY && work->to_host) {
        rows_poison(work);
    }
    if (late_us > 0) {
        sleep_us(late_us);
    }
    if (work->kind == SIM_KERNEL) {
        work->run(work->context);
    } else if (work->kind == SIM_COPY || work->kind == SIM_SET) {
        rows_copy(work, late_us);
    }
    (void)pthread_mutex_lock(&sim.lock);
    if (work->kind == SIM_KERNEL) {
        sim_kernel_end();
    }
}

static void *stream_main(void *argument)
{
    cudaStream_t stream = argument;
    (void)pthread_mutex_lock(&sim.lock);
    while (!stream->stopping || stream->first != NULL) {
        struct sim_work *work = stream->first;
        if (work == NULL) {
            (void)pthread_cond_wait(&sim.changed, &sim.lock);
            continue;
        }
        work_do(stream, work);
        stream->first = work->next;
        stream->last = stream->first == NULL ? NULL : stream->last;
        stream->done_count = work->number;
        work->next = stream->past;
        stream->past = work;
        past_forget(stream);
        (void)pthread_cond_broadcast(&sim.changed);
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return NULL;
}

/* The lock is held. */
static void work_put(cudaStream_t stream, const struct sim_work *wanted)
{
    struct sim_work *work = malloc(sizeof(*work));
    if (work == NULL) {
        sim_abort("no memory");
    }
    *work = *wanted;
    work->next = NULL;
    races_look(stream, work);
    work->number = ++stream->put_count;
    if (stream->last == NULL) {
        stream->first = work;
    } else {
        stream->last->next = work;
    }
    stream->last = work;
    (void)pthread_cond_broadcast(&sim.changed);
}

/* The lock is held, and given up meanwhile. */
static void stream_wait(cudaStream_t stream, uint64_t number)
{
    while (stream->done_count < number) {
        (void)pthread_cond_wait(&sim.changed, &sim.lock);
    }
    if (stream->seen_count < number) {
        stream->seen_count = number;
        past_forget(stream);
    }
}

void sim_drain(int device)
{
    for (int i = 0; i < SIM_STREAM_MAX; i++) {
        if (sim.streams[i] != NULL && sim.streams[i]->device == device) {
            stream_wait(sim.streams[i], sim.streams[i]->put_count);
        }
    }
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *result, unsigned int flags)
{
    cudaError_t status = sim_enter("cudaStreamCreateWithFlags");
    (void)flags;
    if (status != cudaSuccess) {
        return status;
    }
    cudaStream_t stream = calloc(1, sizeof(*stream));
    if (stream == NULL) {
        sim_abort("no memory");
    }
    (void)pthread_mutex_lock(&sim.lock);
    stream->device = current_device;
    while (stream->index < SIM_STREAM_MAX && sim.streams[stream->index] != NULL) {
        stream->index++;
    }
    if (stream->index == SIM_STREAM_MAX) {
        sim_abort("more than %d streams", SIM_STREAM_MAX);
    }
    sim.streams[stream->index] = stream;
    (void)pthread_mutex_unlock(&sim.lock);
    if (pthread_create(&stream->thread, NULL, stream_main, stream) != 0) {
        sim_abort("no thread for a stream");
    }
    *result = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t result = sim_enter_always("cudaStreamDestroy");
    (void)pthread_mutex_lock(&sim.lock);
    stream->stopping = true;
    (void)pthread_cond_broadcast(&sim.changed);
    (void)pthread_mutex_unlock(&sim.lock);
    (void)pthread_join(stream->thread, NULL);
    (void)pthread_mutex_lock(&sim.lock);
    sim.streams[stream->index] = NULL;
    for (int i = 0; i < SIM_STREAM_MAX; i++) {
        if (sim.streams[i] != NULL) {
            sim.streams[i]->knows[stream->index] = 0;
        }
    }
    stream->seen_count = stream->put_count;
    past_forget(stream);
    (void)pthread_mutex_unlock(&sim.lock);
    free(stream);
    return result;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t result = sim_enter("cudaStreamSynchronize");
    (void)pthread_mutex_lock(&sim.lock);
    stream_wait(stream, stream->put_count);
    if (result == cudaSuccess) {
        result = (cudaError_t)sim.lost[stream->device];
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return sim_fail(result);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    cudaError_t result = sim_enter("cudaStreamQuery");
    (void)pthread_mutex_lock(&sim.lock);
    if (result == cudaSuccess && stream->done_count < stream->put_count) {
        result = cudaErrorNotReady;
    } else if (result == cudaSuccess) {
        stream_wait(stream, stream->put_count);
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t result = sim_enter("cudaDeviceSynchronize");
    (void)pthread_mutex_lock(&sim.lock);
    sim_drain(current_device);
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

int kvk_sim_probe(void)
{
    return (int)sim_fail(sim_enter("cudaFuncGetAttributes"));
}

int kvk_sim_launch(void *stream, kvk_sim_kernel *run, void *context)
{
    cudaError_t result = sim_enter("cudaLaunchKernel");
    if (result != cudaSuccess) {
        return (int)result; /* the context is the caller's still */
    }
    const struct sim_work work = {.kind = SIM_KERNEL, .run = run, .context = context};
    (void)pthread_mutex_lock(&sim.lock);
    work_put(stream, &work);
    (void)pthread_mutex_unlock(&sim.lock);
    return (int)cudaSuccess;
}

/* ---- Events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    cudaError_t result = sim_enter("cudaEventCreateWithFlags");
    (void)flags;
    *event = result == cudaSuccess ? calloc(1, sizeof(**event)) : NULL;
    return result;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t result = sim_enter_always("cudaEventDestroy");
    free(event);
    return result;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t result = sim_enter("cudaEventRecord");
    if (result == cudaSuccess) {
        const struct sim_work work = {.kind = SIM_RECORD, .event = event};
        (void)pthread_mutex_lock(&sim.lock);
        work_put(stream, &work);
        event->stream = stream;
        event->number = stream->put_count;
        memcpy(event->knows, stream->knows, sizeof(event->knows));
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    cudaError_t result = sim_enter("cudaStreamWaitEvent");
    (void)flags;
    (void)pthread_mutex_lock(&sim.lock);
    if (result == cudaSuccess && event->stream != NULL && event->stream != stream) {
        const struct sim_work work = {
            .kind = SIM_WAIT, .other = event->stream, .until = event->number};
        work_put(stream, &work);
        for (int i = 0; i < SIM_STREAM_MAX; i++) {
            if (stream->knows[i] < event->knows[i]) {
                stream->knows[i] = event->knows[i];
            }
        }
        if (stream->knows[event->stream->index] < event->number) {
            stream->knows[event->stream->index] = event->number;
        }
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t result = sim_enter("cudaEventSynchronize");
    (void)pthread_mutex_lock(&sim.lock);
    if (event->stream != NULL) {
        stream_wait(event->stream, event->number);
        if (result == cudaSuccess) {
            result = (cudaError_t)sim.lost[event->stream->device];
        }
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return sim_fail(result);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    cudaError_t result = sim_enter("cudaEventQuery");
    (void)pthread_mutex_lock(&sim.lock);
    if (result == cudaSuccess && event->stream != NULL &&
        event->stream->done_count < event->number) {
        result = cudaErrorNotReady;
    } else if (result == cudaSuccess && event->stream != NULL) {
        stream_wait(event->stream, event->number);
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return result;
}

/* ---- Copies ---- */

/* Where the runtime reaches these rows; those of the host as they are. The lock is held. */
static uint8_t *rows_reach(const struct sim_rows *rows, bool *of_device)
{
    const struct sim_allocation *found = sim_find((const void *)rows->begin, rows_span(rows));
    *of_device = found != NULL && (found->kind == SIM_DEVICE || found->kind == SIM_IMPORTED);
    return *of_device ? found->alias + (rows->begin - (uintptr_t)found->address)
                      : (uint8_t *)rows->begin;
}

static cudaError_t copy_put(const char *call, struct sim_work *work, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    bool to_device;
    bool from_device;
    cudaError_t result = sim_enter(call);
    if (result != cudaSuccess) {
        return result;
    }
    (void)pthread_mutex_lock(&sim.lock);
    work->target = rows_reach(&work->writes, &to_device);
    work->source = work->kind == SIM_COPY ? rows_reach(&work->reads, &from_device) : NULL;
    if (work->kind == SIM_SET) {
        from_device = to_device;
    }
    bool right = true;
    if (kind == cudaMemcpyHostToDevice) {
        right = to_device && !from_device;
    } else if (kind == cudaMemcpyDeviceToHost) {
        right = from_device && !to_device;
    } else if (kind == cudaMemcpyDeviceToDevice) {
        right = from_device && to_device;
    }
    if (!right) {
        sim_abort("%s: the ends are not where its direction says", call);
    }
    work->to_host = !to_device;
    work_put(stream, work);
    (void)pthread_mutex_unlock(&sim.lock);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    struct sim_work work = {
        .kind = SIM_COPY,
        .writes = {.begin = (uintptr_t)target, .pitch = size, .width = size, .height = 1},
        .reads = {.begin = (uintptr_t)source, .pitch = size, .width = size, .height = 1}};
    return copy_put("cudaMemcpyAsync", &work, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                              size_t source_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    struct sim_work work = {
        .kind = SIM_COPY,
        .writes = {.begin = (uintptr_t)target,
                   .pitch = target_pitch,
                   .width = width,
                   .height = height},
        .reads = {
            .begin = (uintptr_t)source, .pitch = source_pitch, .width = width, .height = height}};
    if (width > target_pitch || width > source_pitch || height == 0) {
        return sim_fail(cudaErrorInvalidValue);
    }
    return copy_put("cudaMemcpy2DAsync", &work, kind, stream);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream)
{
    struct sim_work work = {
        .kind = SIM_SET,
        .value = value,
        .writes = {.begin = (uintptr_t)target, .pitch = size, .width = size, .height = 1}};
    return copy_put("cudaMemsetAsync", &work, cudaMemcpyDeviceToDevice, stream);
}

/* ---- For tests ---- */

void kvk_sim_reset(const struct kvk_sim_options *options)
{
    (void)pthread_mutex_lock(&sim.lock);
    for (int i = 0; i < SIM_STREAM_MAX; i++) {
        if (sim.streams[i] != NULL) {
            sim_abort("a stream is left over");
        }
    }
    for (int i = 0; i < FAULT_COUNT_MAX; i++) {
        faults[i].name[0] = '\0';
    }
    options_set(options);
    sim_memory_reset();
    (void)pthread_mutex_unlock(&sim.lock);
    last_error = cudaSuccess;
    current_device = 0;
}

void kvk_sim_fail(const char *call, uint32_t nth, int error, bool sticky)
{
    (void)pthread_mutex_lock(&sim.lock);
    fault_add(call, nth, error, sticky);
    (void)pthread_mutex_unlock(&sim.lock);
}

uint64_t kvk_sim_call_count(const char *call)
{
    (void)pthread_mutex_lock(&sim.lock);
    uint64_t count = 0;
    for (int i = 0; i < CALL_COUNT_MAX && calls[i].name[0] != '\0'; i++) {
        count = strcmp(calls[i].name, call) == 0 ? calls[i].count : count;
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return count;
}

uint64_t kvk_sim_race_count(void)
{
    (void)pthread_mutex_lock(&sim.lock);
    uint64_t count = sim.races;
    (void)pthread_mutex_unlock(&sim.lock);
    return count;
}
