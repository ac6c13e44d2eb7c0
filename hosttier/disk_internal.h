/*
 * The disk store's insides, for hosttier/disk*.c alone.
 *
 * A call cuts its pieces into requests of at most KVK_DISK_STEP_BYTES, has a window of them under
 * way and waits for them on its own thread, which also hashes and copies to and from the bounce
 * buffers: so callers share that work, and whoever does the I/O only does I/O. Requests lie in
 * the call's own frame; nothing is allocated while bytes move.
 *
 * One queue (disk_queue.c) decides what goes next by class. Behind it is one of two runners:
 * disk_uring.c (one thread that owns the ring) or disk_threads.c (a few threads with plain calls).
 *
 * Locking: queue.lock and health_lock are leaves, held for arithmetic only.
 */
#ifndef KVK_HOSTTIER_DISK_INTERNAL_H
#define KVK_HOSTTIER_DISK_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/lock.h"
#include "hosttier/disk.h"

#define KVK_DISK_STEP_BYTES (1U << 20) /* the largest single request */
#define KVK_DISK_WINDOW 64U            /* requests of one call that are under way */
#define KVK_DISK_DEPTH_MAX 1024U
#define KVK_DISK_THREADS_MAX 64U
#define KVK_DISK_CLASS_COUNT 3U
#define KVK_DISK_TRIES_MAX 64U    /* EINTR and EAGAIN in a row, of one request */
#define KVK_DISK_OFF_FAILURES 8U  /* of one kind, in a row */
#define KVK_DISK_BIG_COUNT 16U    /* bounce buffers of KVK_DISK_STEP_BYTES */
#define KVK_DISK_SMALL_COUNT 256U /* and of KVK_DISK_ALIGN, for tails */

/* request.error where the file ended before the bytes did: no errno of the system's. */
#define KVK_DISK_ENDED (-1)

struct kvk_disk_run;

/* One system call's worth of a piece. Written by its caller until it is pushed, by the runner until
 * it is finished, then by its caller again. */
struct kvk_disk_request {
    struct kvk_disk_request *next; /* in its class's queue, or of its run's finished ones */
    struct kvk_disk_run *run;
    uint8_t *memory; /* what the system reads into or writes from */
    uint64_t file_offset;
    uint32_t size;
    uint32_t done; /* bytes */
    uint32_t tries;
    int error; /* errno, KVK_DISK_ENDED, or 0 */
    int fd;
    uint8_t class;
    bool write;
    bool direct;
    /* the caller's own */
    bool busy;
    uint32_t piece;
    uint8_t *bounce; /* NULL: memory is the piece's */
    uint8_t *target; /* with a bounce: where in the piece */
    uint32_t target_bytes;
};

/* One call's requests; in its frame. */
struct kvk_disk_run {
    pthread_cond_t done;
    struct kvk_disk_request *finished; /* with the queue's lock, as the next two */
    uint32_t finished_count;
    uint32_t wanted_count; /* that the call waits for: it is not woken before */
    struct kvk_disk_request requests[KVK_DISK_WINDOW];
};

struct kvk_disk_bounces {
    uint8_t *memory; /* one mapping; pages come when used */
    uint32_t size_bytes;
    uint32_t count;
    uint32_t free_count;
    uint16_t free[KVK_DISK_SMALL_COUNT];
};

struct kvk_disk_queue {
    struct kvk_lock lock;
    struct kvk_disk_request *first[KVK_DISK_CLASS_COUNT], *last[KVK_DISK_CLASS_COUNT];
    uint32_t waiting[KVK_DISK_CLASS_COUNT];
    uint32_t running[KVK_DISK_CLASS_COUNT];
    uint32_t depth;
    uint32_t picks;
    uint64_t restore_ns;       /* when a restore was last seen */
    pthread_cond_t work;       /* for the threads */
    pthread_cond_t bounce_set; /* a bounce buffer came back */
    struct kvk_disk_bounces big, small;
    int wake_fd;   /* for the ring's thread; -1: none */
    bool sleeping; /* the ring's thread waits: write to wake_fd */
    bool stopping;
};

enum kvk_disk_kind {
    KVK_DISK_KIND_READ = 0,
    KVK_DISK_KIND_WRITE,
    KVK_DISK_KIND_SYNC,
};
#define KVK_DISK_KIND_COUNT 3

/* Bytes and time of the last batches; both are halved now and then. */
struct kvk_disk_speed {
    uint64_t bytes, ns;
};

struct kvk_disk_feeling {
    struct kvk_lock lock;
    struct kvk_disk_health health;
    uint32_t failures[KVK_DISK_KIND_COUNT]; /* in a row */
    struct kvk_disk_speed read_speed, write_speed;
    uint64_t told_ns;       /* when a change of state was last logged */
    pthread_cond_t changed; /* something to probe, or stopping */
    pthread_t prober;
    bool prober_running;
    bool stopping;
};

struct kvk_disk {
    char *folder; /* ours */
    int folder_fd;
    int probe_fd; /* -1: could not be made yet */
    bool direct;
    bool uring;
    uint32_t memory_align; /* of what direct I/O takes */
    uint32_t thread_count;
    uint64_t probe_ms;
    uint64_t probe_count; /* the prober's */
    struct kvk_disk_io io;
    struct kvk_disk_queue queue;
    struct kvk_disk_feeling feeling;
    pthread_t threads[KVK_DISK_THREADS_MAX]; /* [threads_running] */
    uint32_t threads_running;
    struct kvk_disk_ring *ring; /* disk_uring.c's own; NULL: threads */
    _Atomic uint32_t file_count;
};

struct kvk_disk_file {
    struct kvk_disk *disk; /* borrowed */
    uint64_t space_id;
    uint32_t group;
    int fd;
    bool direct;
    uint64_t slot_bytes;
    uint32_t slot_count;
    _Atomic uint64_t end;   /* the file is known to reach so far */
    _Atomic uint8_t *there; /* one bit per slot: allocated or written, so that a hole that came
                               about behind our back is not read as zeros. Ours */
};

static inline uint64_t kvk_disk_round_up(uint64_t bytes)
{
    return (bytes + KVK_DISK_ALIGN - 1) / KVK_DISK_ALIGN * KVK_DISK_ALIGN;
}

static inline uint64_t kvk_disk_now(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

/* ---- disk_queue.c ---- */

KVK_CHECKED enum kvk_status kvk_disk_queue_init(struct kvk_disk_queue *queue, uint32_t depth,
                                                struct kvk_error *error);
void kvk_disk_queue_finish(struct kvk_disk_queue *queue);
/* Put a chain of `count` requests of one class at the end of its queue, and wake who runs them. */
void kvk_disk_queue_push(struct kvk_disk_queue *queue, struct kvk_disk_request *first,
                         struct kvk_disk_request *last, uint32_t count);
/* The next one that may go now, or NULL. With the lock. */
struct kvk_disk_request *kvk_disk_queue_pick(struct kvk_disk_queue *queue);
/* A system call for it returned `result` (bytes, or -errno). True: it is over, request.error says
 * how; false: issue the rest. */
bool kvk_disk_request_advance(struct kvk_disk_request *request, int64_t result);
/* Give requests that are over, a chain, back to their calls. Takes the lock. */
void kvk_disk_queue_done(struct kvk_disk_queue *queue, struct kvk_disk_request *chain);
/* A buffer for `size` bytes, or NULL: none is free for this class now. Takes the lock. */
uint8_t *kvk_disk_bounce_take(struct kvk_disk_queue *queue, enum kvk_disk_class class,
                              uint32_t size);
void kvk_disk_bounce_give(struct kvk_disk_queue *queue, uint8_t *bounce);
/* Until one may be free. Only by who has none. */
void kvk_disk_bounce_wait(struct kvk_disk_queue *queue, enum kvk_disk_class class, uint32_t size);

/* ---- The two runners ---- */

KVK_CHECKED enum kvk_status kvk_disk_threads_start(struct kvk_disk *disk, struct kvk_error *error);
void kvk_disk_threads_stop(struct kvk_disk *disk);

/* KVK_UNSUPPORTED: no io_uring in this build, kernel or container; the text says which. */
KVK_CHECKED enum kvk_status kvk_disk_uring_start(struct kvk_disk *disk, struct kvk_error *error);
void kvk_disk_uring_stop(struct kvk_disk *disk);

extern const struct kvk_disk_io kvk_disk_system_io;

/* ---- disk_health.c ---- */

KVK_CHECKED enum kvk_status kvk_disk_health_start(struct kvk_disk *disk, struct kvk_error *error);
void kvk_disk_health_stop(struct kvk_disk *disk);
/* May a request of this kind be tried? KVK_UNAVAILABLE with the reason. */
KVK_CHECKED enum kvk_status kvk_disk_health_admits(struct kvk_disk *disk, enum kvk_disk_kind kind,
                                                   struct kvk_error *error);
/* One request went well, or failed with an errno or KVK_DISK_ENDED: the status it gets. `what`
 * names it in words. */
void kvk_disk_health_good(struct kvk_disk *disk, enum kvk_disk_kind kind, uint64_t bytes);
enum kvk_status kvk_disk_health_failed(struct kvk_disk *disk, enum kvk_disk_kind kind, int error,
                                       const char *what);
/* Outside of requests: allocation met a full file system, or room again. */
void kvk_disk_health_full(struct kvk_disk *disk, bool full, const char *what);
void kvk_disk_health_unpunched(struct kvk_disk *disk);
void kvk_disk_health_speed(struct kvk_disk *disk, bool write, uint64_t bytes, uint64_t ns);

/* ---- disk_file.c ---- */

/* Open (make) the file that is written and read to find out how the disk is; and choose direct or
 * not. */
KVK_CHECKED enum kvk_status kvk_disk_probe_open(struct kvk_disk *disk, bool want_direct,
                                                struct kvk_error *error);
/* Write, sync and read it back: 0, or an errno. */
int kvk_disk_probe(struct kvk_disk *disk);
/* Has the file become shorter behind our back? Then what lay there is gone. */
void kvk_disk_file_look(struct kvk_disk_file *file);
bool kvk_disk_file_there(const struct kvk_disk_file *file, uint32_t slot);
/* The slot was written, up to this offset in the file. */
void kvk_disk_file_wrote(struct kvk_disk_file *file, uint32_t slot, uint64_t end);

#endif
