/*
 * Block operations: queued without waiting, committed in batches by one committer: the writer
 * thread, or whoever flushes where there are no threads.
 *
 * A batch holds at most one operation per key, the last one, in the order of the first ticket that
 * it stands for. It is committed in parts of bounded size, in that order; after each, all tickets
 * below the first one of what is left are durable. What could not be committed stays and is tried
 * again after a pause, longer each time; new puts are refused meanwhile, removals are taken as long
 * as there is room.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/priority.h"
#include "hosttier/catalogue_internal.h"

#define QUEUE_DEFAULT 65536
#define COMMIT_MS_DEFAULT 50
#define PART_OPERATIONS_MAX 4096
#define PART_OPERATIONS_MIN 8
#define PAUSE_NS_MIN (100 * KVK_NS_PER_MS)
#define PAUSE_NS_MAX (5 * KVK_NS_PER_SECOND)
#define RECORD_OVERHEAD 32 /* of LMDB, per record, about */

/* ---- Batches: with the queue's lock, or the committer's alone ---- */

static uint64_t key_hash(const uint8_t *key)
{
    return XXH3_64bits(key, KVK_RECORD_BLOCK_KEY_SIZE);
}

static uint32_t *place_of(const struct kvk_catalogue_batch *batch, const uint8_t *key)
{
    KVK_ASSERT(batch->place_count > batch->count);
    uint32_t mask = batch->place_count - 1;
    uint32_t at = (uint32_t)key_hash(key) & mask;
    while (batch->places[at] != 0 && memcmp(batch->operations[batch->places[at] - 1].key, key,
                                            KVK_RECORD_BLOCK_KEY_SIZE) != 0) {
        at = (at + 1) & mask;
    }
    return &batch->places[at];
}

/* Room for one more; false: no memory. */
static bool batch_grow(struct kvk_catalogue_batch *batch)
{
    if (batch->count < batch->capacity) {
        return true;
    }
    uint32_t capacity = batch->capacity == 0 ? 64 : batch->capacity * 2;
    struct kvk_catalogue_operation *operations =
        realloc(batch->operations, capacity * sizeof(*operations));
    if (operations == NULL) {
        return false;
    }
    batch->operations = operations;
    uint32_t *places = calloc((size_t)capacity * 2, sizeof(*places));
    if (places == NULL) {
        return false;
    }
    free(batch->places);
    batch->places = places;
    batch->place_count = capacity * 2;
    batch->capacity = capacity;
    for (uint32_t i = 0; i < batch->count; i++) {
        *place_of(batch, operations[i].key) = i + 1;
    }
    return true;
}

static void batch_clear(struct kvk_catalogue_batch *batch)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        free(batch->operations[i].record.data);
    }
    if (batch->count > 0) {
        memset(batch->places, 0, batch->place_count * sizeof(*batch->places));
    }
    batch->count = 0;
    batch->put_bytes = 0;
}

static void batch_finish(struct kvk_catalogue_batch *batch)
{
    batch_clear(batch);
    free(batch->operations);
    free(batch->places);
}

/* ---- The queue ---- */

void kvk_catalogue_queue_init(struct kvk_catalogue_queue *queue,
                              const struct kvk_catalogue_options *options)
{
    kvk_lock_init(&queue->lock);
    kvk_condition_init(&queue->wake);
    kvk_condition_init(&queue->done);
    queue->operations_max = options->queue_max == 0 ? QUEUE_DEFAULT : options->queue_max;
    queue->commit_ns_max =
        (options->commit_ms_max == 0 ? COMMIT_MS_DEFAULT : options->commit_ms_max) * KVK_NS_PER_MS;
    queue->next_ticket = 1;
}

void kvk_catalogue_queue_finish(struct kvk_catalogue_queue *queue)
{
    batch_finish(&queue->filling);
    batch_finish(&queue->committing);
    pthread_cond_destroy(&queue->wake);
    pthread_cond_destroy(&queue->done);
    kvk_lock_finish(&queue->lock);
}

static uint32_t queue_count(const struct kvk_catalogue_queue *queue)
{
    return queue->filling.count + queue->committing.count - queue->committed_count;
}

static uint64_t now(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

/* Takes the record over where it returns KVK_OK. */
static enum kvk_status queue_add(struct kvk_catalogue_queue *queue,
                                 const struct kvk_record_key *key,
                                 const struct kvk_record_bytes *record, uint64_t *ticket)
{
    struct kvk_catalogue_batch *batch = &queue->filling;
    bool removal = record->data == NULL;
    if (!batch_grow(batch)) {
        return KVK_EXHAUSTED;
    }
    uint32_t *place = place_of(batch, key->bytes);
    if (*place == 0 && queue_count(queue) >= queue->operations_max) {
        return KVK_EXHAUSTED;
    }
    if (!removal && atomic_load(&queue->failing)) {
        return KVK_EXHAUSTED;
    }
    uint64_t given = queue->next_ticket++;
    if (*place == 0) {
        batch->operations[batch->count] = (struct kvk_catalogue_operation){.first_ticket = given};
        memcpy(batch->operations[batch->count].key, key->bytes, KVK_RECORD_BLOCK_KEY_SIZE);
        *place = ++batch->count;
        queue->first_queued_ns = batch->count == 1 ? now() : queue->first_queued_ns;
    }
    struct kvk_catalogue_operation *operation = &batch->operations[*place - 1];
    batch->put_bytes -= operation->record.size;
    free(operation->record.data);
    operation->record = *record;
    batch->put_bytes += record->size;
    batch->last_ticket = given;
    if (ticket != NULL) {
        *ticket = given;
    }
    if (batch->count == 1 || batch->count >= queue->operations_max / 2) {
        pthread_cond_signal(&queue->wake);
    }
    return KVK_OK;
}

enum kvk_status kvk_catalogue_block_put(struct kvk_catalogue *catalogue,
                                        const struct kvk_disk_block_record *record,
                                        uint64_t *ticket)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    kvk_record_key_block(record->space_id, record->group, record->slot, &key);
    enum kvk_status status = kvk_record_write_block(&key, record, &bytes);
    if (status != KVK_OK) {
        return status;
    }
    status = kvk_catalogue_check_room(catalogue, bytes.size + RECORD_OVERHEAD, NULL);
    if (status == KVK_OK) {
        kvk_lock(&catalogue->queue.lock);
        status = queue_add(&catalogue->queue, &key, &bytes, ticket);
        kvk_unlock(&catalogue->queue.lock);
    }
    if (status != KVK_OK) {
        free(bytes.data);
    }
    return status;
}

enum kvk_status kvk_catalogue_block_remove(struct kvk_catalogue *catalogue, uint64_t space_id,
                                           uint32_t group, uint32_t slot, uint64_t *ticket)
{
    struct kvk_record_key key;
    const struct kvk_record_bytes none = {.data = NULL};
    kvk_record_key_block(space_id, group, slot, &key);
    kvk_lock(&catalogue->queue.lock);
    enum kvk_status status = queue_add(&catalogue->queue, &key, &none, ticket);
    kvk_unlock(&catalogue->queue.lock);
    return status;
}

uint64_t kvk_catalogue_committed(const struct kvk_catalogue *catalogue)
{
    return atomic_load(&catalogue->queue.committed_ticket);
}

uint64_t kvk_catalogue_queued_bytes(struct kvk_catalogue *catalogue)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    kvk_lock(&queue->lock);
    uint64_t bytes = queue->filling.put_bytes + queue->committing.put_bytes +
                     (uint64_t)queue_count(queue) * RECORD_OVERHEAD;
    kvk_unlock(&queue->lock);
    return bytes;
}

void kvk_catalogue_listen(struct kvk_catalogue *catalogue, void (*committed)(void *context),
                          void *context)
{
    kvk_lock(&catalogue->queue.lock);
    catalogue->queue.committed = committed;
    catalogue->queue.context = context;
    kvk_unlock(&catalogue->queue.lock);
}

/* ---- Committing ---- */

static int compare_operations(const void *a, const void *b)
{
    const struct kvk_catalogue_operation *const *one = a;
    const struct kvk_catalogue_operation *const *other = b;
    return memcmp((*one)->key, (*other)->key, KVK_RECORD_BLOCK_KEY_SIZE);
}

static enum kvk_status apply(struct kvk_catalogue_transaction *transaction,
                             const struct kvk_catalogue_operation *operation,
                             struct kvk_error *error)
{
    struct kvk_record_key key = {.size = KVK_RECORD_BLOCK_KEY_SIZE};
    memcpy(key.bytes, operation->key, KVK_RECORD_BLOCK_KEY_SIZE);
    if (operation->record.data != NULL) {
        return kvk_catalogue_put(transaction, KVK_CATALOGUE_BLOCKS, &key, &operation->record,
                                 error);
    }
    enum kvk_status status = kvk_catalogue_delete(transaction, KVK_CATALOGUE_BLOCKS, &key, error);
    return status == KVK_NOT_FOUND ? KVK_OK : status;
}

/* One transaction of operations [first, first + count), in the order of their keys: neighbours lie
 * on one page. */
static enum kvk_status commit_part(struct kvk_catalogue *catalogue,
                                   struct kvk_catalogue_operation *first, uint32_t count,
                                   struct kvk_error *error)
{
    const struct kvk_catalogue_operation *sorted[PART_OPERATIONS_MAX];
    struct kvk_catalogue_transaction transaction;
    KVK_ASSERT(count > 0 && count <= PART_OPERATIONS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = &first[i];
    }
    qsort(sorted, count, sizeof(sorted[0]), compare_operations);
    uint64_t begin_ns = now();
    enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < count && status == KVK_OK; i++) {
        status = apply(&transaction, sorted[i], error);
    }
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    status = kvk_catalogue_write_commit(&transaction, error);
    if (status == KVK_OK) {
        atomic_fetch_add(&catalogue->commits, 1);
        atomic_fetch_add(&catalogue->committed_operations, count);
        atomic_store(&catalogue->commit_ns, now() - begin_ns);
    }
    return status;
}

/* How many of the operations go into one transaction: what it changes must be a small part of the
 * map, since LMDB writes every changed page anew before it gives the old one up. */
static uint32_t part_count(const struct kvk_catalogue *catalogue,
                           const struct kvk_catalogue_operation *first, uint32_t left)
{
    uint64_t page_bytes = 4096;
    uint64_t most = catalogue->map_bytes / page_bytes / 64;
    most = most < PART_OPERATIONS_MIN ? PART_OPERATIONS_MIN : most;
    most = most > PART_OPERATIONS_MAX ? PART_OPERATIONS_MAX : most;
    uint64_t bytes_left = catalogue->map_bytes / 32;
    uint32_t count = 0;
    while (count < left && count < most) {
        if (count > 0 && first[count].record.size > bytes_left) {
            break;
        }
        bytes_left -= first[count].record.size < bytes_left ? first[count].record.size : bytes_left;
        count++;
    }
    return count;
}

static void tell_committed(struct kvk_catalogue *catalogue)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    kvk_lock(&queue->lock);
    void (*committed)(void *context) = queue->committed;
    void *context = queue->context;
    kvk_unlock(&queue->lock);
    if (committed != NULL) {
        committed(context);
    }
}

static void note_success(struct kvk_catalogue *catalogue, uint32_t count)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    kvk_lock(&queue->lock);
    struct kvk_catalogue_batch *batch = &queue->committing;
    queue->committed_count += count;
    bool all = queue->committed_count == batch->count;
    uint64_t durable =
        all ? batch->last_ticket : batch->operations[queue->committed_count].first_ticket - 1;
    if (durable > atomic_load(&queue->committed_ticket)) {
        atomic_store(&queue->committed_ticket, durable);
    }
    if (all) {
        batch_clear(batch);
        queue->committed_count = 0;
    }
    bool failed_before = atomic_exchange(&queue->failing, false);
    uint64_t failures = queue->failures;
    queue->retry_ns = 0;
    queue->pause_ns = 0;
    kvk_unlock(&queue->lock);
    if (failed_before) {
        kvk_log(KVK_LOG_INFO, "catalogue_works_again", "failures=%llu",
                (unsigned long long)failures);
    }
}

static void note_failure(struct kvk_catalogue *catalogue, const struct kvk_error *error)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    atomic_fetch_add(&catalogue->commit_failures, 1);
    kvk_lock(&queue->lock);
    queue->error = *error;
    queue->failures++;
    queue->pause_ns = queue->pause_ns == 0 ? PAUSE_NS_MIN : queue->pause_ns * 2;
    queue->pause_ns = queue->pause_ns > PAUSE_NS_MAX ? PAUSE_NS_MAX : queue->pause_ns;
    queue->retry_ns = now() + queue->pause_ns;
    bool failed_before = atomic_exchange(&queue->failing, true);
    kvk_unlock(&queue->lock);
    if (!failed_before) {
        char text[KVK_ERROR_TEXT_SIZE + 16];
        kvk_log(KVK_LOG_ERROR, "catalogue_failing", "text=%s",
                kvk_log_text(text, sizeof(text), error->text));
    }
}

/* Commit all that was queued before. One thread at a time: the committer. */
static void commit_round(struct kvk_catalogue *catalogue)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    struct kvk_error error = {.status = KVK_OK};
    enum kvk_status status = KVK_OK;
    kvk_lock(&queue->lock);
    if (queue->committing.count == 0) {
        struct kvk_catalogue_batch empty = queue->committing;
        queue->committing = queue->filling;
        queue->filling = empty;
        queue->committed_count = 0;
    }
    uint32_t left = queue->committing.count - queue->committed_count;
    struct kvk_catalogue_operation *next = queue->committing.operations + queue->committed_count;
    kvk_unlock(&queue->lock);
    while (left > 0 && status == KVK_OK) {
        uint32_t count = part_count(catalogue, next, left);
        status = commit_part(catalogue, next, count, &error);
        if (status == KVK_OK) {
            next += count;
            left -= count;
            note_success(catalogue, count);
            tell_committed(catalogue);
        } else {
            note_failure(catalogue, &error);
        }
    }
    kvk_lock(&queue->lock);
    queue->rounds++;
    pthread_cond_broadcast(&queue->done);
    kvk_unlock(&queue->lock);
}

/* ---- The writer ---- */

/* When is there something to do? UINT64_MAX: when woken. With the lock. */
static uint64_t due_ns(const struct kvk_catalogue_queue *queue)
{
    if (queue_count(queue) == 0) {
        return UINT64_MAX;
    }
    if (queue->flush_ticket > atomic_load(&queue->committed_ticket)) {
        return 0;
    }
    if (queue->retry_ns > 0) {
        return queue->retry_ns;
    }
    if (queue->stopping || queue->committing.count > 0 ||
        queue->filling.count >= queue->operations_max / 2) {
        return 0;
    }
    return queue->first_queued_ns + queue->commit_ns_max;
}

static void *writer_main(void *argument)
{
    struct kvk_catalogue *catalogue = argument;
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    kvk_priority_works();
    kvk_lock(&queue->lock);
    for (;;) {
        uint64_t until_ns = due_ns(queue);
        if (queue->stopping && (until_ns == UINT64_MAX || atomic_load(&queue->failing))) {
            break;
        }
        if (until_ns > now()) {
            (void)kvk_condition_wait(&queue->wake, &queue->lock, until_ns);
            continue;
        }
        uint64_t failures = queue->failures;
        queue->flush_ticket = 0; /* each wish is one try; whoever waits sees how it ended */
        kvk_unlock(&queue->lock);
        commit_round(catalogue);
        kvk_lock(&queue->lock);
        if (queue->stopping && queue->failures != failures) {
            break;
        }
    }
    kvk_unlock(&queue->lock);
    return NULL;
}

enum kvk_status kvk_catalogue_writer_start(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&catalogue->writer, NULL, writer_main, catalogue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread for the catalogue");
    }
    (void)pthread_setname_np(catalogue->writer, "kvk-catalogue");
    catalogue->writer_running = true;
    return KVK_OK;
}

void kvk_catalogue_writer_stop(struct kvk_catalogue *catalogue)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    if (catalogue->writer_running) {
        kvk_lock(&queue->lock);
        queue->stopping = true;
        queue->retry_ns = 0; /* one more try, without a pause */
        atomic_store(&queue->failing, false);
        pthread_cond_signal(&queue->wake);
        kvk_unlock(&queue->lock);
        pthread_join(catalogue->writer, NULL);
        catalogue->writer_running = false;
    } else if (catalogue->environment != NULL && queue_count(queue) > 0) {
        commit_round(catalogue);
        if (queue->filling.count > 0 && !atomic_load(&queue->failing)) {
            commit_round(catalogue);
        }
    }
    if (queue_count(queue) > 0) {
        kvk_log(KVK_LOG_ERROR, "catalogue_operations_lost", "count=%u", queue_count(queue));
    }
}

/* ---- Flushing ---- */

static enum kvk_status flush_failed(struct kvk_catalogue_queue *queue, struct kvk_error *error)
{
    struct kvk_error last = queue->error;
    kvk_unlock(&queue->lock);
    (void)kvk_fail(error, last.status, last.cause, last.field, "%s", last.text);
    kvk_error_retry(error, 1000);
    return last.status;
}

enum kvk_status kvk_catalogue_flush(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock(&queue->lock);
    uint64_t wanted = queue->next_ticket - 1;
    uint64_t failures = queue->failures;
    while (atomic_load(&queue->committed_ticket) < wanted) {
        if (queue->failures != failures) {
            return flush_failed(queue, error);
        }
        if (catalogue->writer_running) {
            queue->flush_ticket = wanted > queue->flush_ticket ? wanted : queue->flush_ticket;
            pthread_cond_signal(&queue->wake);
            (void)kvk_condition_wait(&queue->done, &queue->lock, UINT64_MAX);
        } else if (queue->committer_busy) {
            (void)kvk_condition_wait(&queue->done, &queue->lock, UINT64_MAX);
        } else {
            queue->committer_busy = true;
            kvk_unlock(&queue->lock);
            commit_round(catalogue);
            kvk_lock(&queue->lock);
            queue->committer_busy = false;
            pthread_cond_broadcast(&queue->done);
        }
    }
    kvk_unlock(&queue->lock);
    return KVK_OK;
}
