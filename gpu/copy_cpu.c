#include "gpu/copy_cpu.h"

#include <sched.h>
#include <time.h>

#include "base/assert.h"
#include "base/copy.h"
#include "gpu/threads.h"

/* Some ten microseconds of work. Less would cost more than it gives: with another thread on its
 * processor, Linux takes a whole turn from who yields. */
#define STEP_BYTES_DEFAULT (UINT64_C(256) << 10)
#define STEP_BYTES_MIN UINT64_C(4096)

/* A lone piece is shared between threads from this size on, in cuts of whole cache lines. */
#define CUT_BYTES_MIN (UINT64_C(1) << 20)
#define CACHE_LINE_BYTES 64

enum kvk_status kvk_copy_cpu_init(struct kvk_copy_cpu *copy,
                                  const struct kvk_device_cpu_options *options,
                                  struct kvk_error *error)
{
    uint32_t thread_count = options->copy_thread_count;

    if (thread_count == 0) {
        thread_count = 1;
    }
    copy->step_bytes = options->copy_step_bytes;
    if (copy->step_bytes == 0) {
        copy->step_bytes = STEP_BYTES_DEFAULT;
    }
    if (copy->step_bytes < STEP_BYTES_MIN) {
        copy->step_bytes = STEP_BYTES_MIN;
    }
    copy->test_delay_us = options->test_copy_delay_us;
    return kvk_threads_create(thread_count, "kvk-copy", &copy->threads, error);
}

void kvk_copy_cpu_finish(struct kvk_copy_cpu *copy)
{
    kvk_threads_destroy(copy->threads);
    copy->threads = NULL;
}

static void delay(uint32_t delay_us)
{
    struct timespec time = {.tv_sec = delay_us / 1000000, .tv_nsec = delay_us % 1000000 * 1000};

    while (nanosleep(&time, &time) != 0) {
    }
}

/* One piece, step by step. */
static void piece_copy(const struct kvk_copy_cpu *copy, const struct kvk_copy *piece)
{
    uint8_t *target = piece->target;
    const uint8_t *source = piece->source;
    uint64_t left_bytes = piece->size_bytes;
    struct kvk_checksum_state state;

    if (copy->test_delay_us > 0) {
        delay(copy->test_delay_us);
    }
    if (piece->checksum != NULL) {
        kvk_checksum_begin(&state);
    }
    while (left_bytes > 0) {
        uint64_t step_bytes = left_bytes < copy->step_bytes ? left_bytes : copy->step_bytes;
        if (piece->checksum != NULL) {
            kvk_checksum_add_copy(&state, target, source, step_bytes);
        } else {
            kvk_copy_stream(target, source, step_bytes);
        }
        target += step_bytes;
        source += step_bytes;
        left_bytes -= step_bytes;
        if (left_bytes > 0) {
            (void)sched_yield();
        }
    }
    if (piece->checksum != NULL) {
        *piece->checksum = kvk_checksum_end(&state);
    }
}

struct batch {
    const struct kvk_copy_cpu *copy;
    const struct kvk_copy *pieces; /* borrowed from the caller of the run */
    uint64_t cut_bytes;            /* of a lone piece; 0: whole pieces */
};

static void batch_part(void *context, uint32_t part, uint32_t thread)
{
    const struct batch *batch = context;
    struct kvk_copy piece = batch->pieces[0];

    (void)thread;
    if (batch->cut_bytes == 0) {
        piece_copy(batch->copy, &batch->pieces[part]);
        return;
    }
    uint64_t offset = part * batch->cut_bytes;
    KVK_ASSERT(offset < piece.size_bytes);
    uint64_t left_bytes = piece.size_bytes - offset;
    piece.target = (uint8_t *)piece.target + offset;
    piece.source = (const uint8_t *)piece.source + offset;
    piece.size_bytes = left_bytes < batch->cut_bytes ? left_bytes : batch->cut_bytes;
    piece_copy(batch->copy, &piece);
}

void kvk_copy_cpu_run(struct kvk_copy_cpu *copy, const struct kvk_copy *copies, uint32_t copy_count)
{
    struct batch batch = {.copy = copy, .pieces = copies};
    uint32_t thread_count = kvk_threads_count(copy->threads);
    uint32_t part_count = copy_count;

    /* A checksum runs from a piece's first byte to its last, so such a piece stays whole. */
    if (copy_count == 1 && thread_count > 1 && copies[0].checksum == NULL &&
        copies[0].size_bytes >= CUT_BYTES_MIN) {
        uint64_t share_bytes = copies[0].size_bytes / thread_count + 1;
        batch.cut_bytes =
            (share_bytes + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
        part_count = (uint32_t)((copies[0].size_bytes + batch.cut_bytes - 1) / batch.cut_bytes);
    }
    kvk_threads_run(copy->threads, part_count, batch_part, &batch);
}
