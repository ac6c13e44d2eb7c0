/*
 * Moves bytes between tiers: bounded queues of copies, shared out to a few threads.
 *
 * A job is a list of pieces. It returns, even when it fails, only when nothing reads or writes its
 * memory any more. Threads copy in small steps and yield, so that look-ups go on.
 *
 * Locking: thread safe; never called with a lock held (asserted).
 */
#ifndef KVK_DAEMON_MOVER_H
#define KVK_DAEMON_MOVER_H

#include "gpu/device.h"

struct kvk_mover;

struct kvk_mover_options {
    uint32_t thread_count; /* 0: jobs run on the caller's thread alone */
    uint32_t queue_max;    /* jobs that may wait or run; over it KVK_EXHAUSTED (queue full) */
};

KVK_CHECKED enum kvk_status kvk_mover_create(const struct kvk_mover_options *options,
                                             struct kvk_mover **mover);
void kvk_mover_destroy(struct kvk_mover *mover);

/* Copy all pieces by `device`, and wait. Each piece's checksum is stored where it asks for it. */
KVK_CHECKED enum kvk_status kvk_mover_copy(struct kvk_mover *mover, struct kvk_device *device,
                                           const struct kvk_copy *copies, uint32_t copy_count,
                                           struct kvk_error *error);

/*
 * The same for what nobody waits for: by one thread of its own that stands back behind all others,
 * so that where processors are scarce it is this job that waits. The rate below learns nothing
 * from it. Where there are no threads it runs on the caller's.
 */
KVK_CHECKED enum kvk_status kvk_mover_copy_behind(struct kvk_mover *mover,
                                                  struct kvk_device *device,
                                                  const struct kvk_copy *copies,
                                                  uint32_t copy_count, struct kvk_error *error);

/* Copied so far, and the measured rate of the last jobs (bytes per second; 0: none yet). */
uint64_t kvk_mover_bytes(struct kvk_mover *mover);
uint64_t kvk_mover_rate(struct kvk_mover *mover);

/* Test hooks. `hook` runs before each job, without any lock: a simulation lets other requests in
 * there. A failing job copies nothing and returns KVK_INTERNAL. */
void kvk_mover_test_hook(struct kvk_mover *mover, void (*hook)(void *context), void *context);
void kvk_mover_test_delay(struct kvk_mover *mover, uint32_t delay_us_per_piece);
void kvk_mover_test_fail_next(struct kvk_mover *mover);

#endif
