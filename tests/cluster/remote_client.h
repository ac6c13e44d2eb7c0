/*
 * A caller of the remote store for tests: waits for its batches, knows what every block must hold,
 * and holds the promises to account: no wrong byte, no blocked caller, done by the deadline.
 */
#ifndef KVK_TESTS_CLUSTER_REMOTE_CLIENT_H
#define KVK_TESTS_CLUSTER_REMOTE_CLIENT_H

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/random.h"
#include "hosttier/remote.h"
#include "tests/patience.h"
#include "tests/remote_server.h"

/* A submission is a few microseconds; a loaded machine may take the CPU away meanwhile. */
#define SUBMIT_NS_MAX (promised_ms(200) * KVK_NS_PER_MS)
#define LATE_NS_MAX                                                                                \
    (promised_ms(500) * KVK_NS_PER_MS) /* a callback after its deadline, likewise                  \
                                        */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);          \
            client_fail();                                                                         \
        }                                                                                          \
    } while (0)

/* Each program says how what it started ends. */
void house_end(void);

static inline _Noreturn void client_fail(void)
{
    house_end();
    (void)fflush(stdout);
    _exit(1);
}

/* No servers are left behind, however it ends. */
static inline void client_ended(int number)
{
    house_end();
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static inline void client_end_well(void)
{
    (void)signal(SIGABRT, client_ended);
    (void)signal(SIGTERM, client_ended);
    (void)signal(SIGINT, client_ended);
}

static inline uint64_t now_ns(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

/* Blocks of a space as one thread sees them: numbers, whose bytes follow from them. */
struct client {
    struct kvk_remote *remote;
    struct kvk_remote_space *space;
    uint32_t block_max; /* of a batch */
    struct kvk_remote_block *blocks;
    struct kvk_remote_piece *pieces;
    uint8_t *memory;
    struct kvk_remote_batch batch;
    struct kvk_lock lock;
    pthread_cond_t changed;
    bool done;
    uint64_t submit_ns_worst, late_ns_worst;
    uint64_t refused;
    uint64_t results[KVK_REMOTE_RESULT_COUNT];
};

static inline void client_init(struct client *client, struct kvk_remote *remote,
                               struct kvk_remote_space *space, uint32_t block_max)
{
    memset(client, 0, sizeof(*client));
    client->remote = remote;
    client->space = space;
    client->block_max = block_max;
    client->blocks = calloc(block_max, sizeof(struct kvk_remote_block));
    client->pieces = calloc(block_max, sizeof(struct kvk_remote_piece));
    client->memory = malloc(block_max * space->block_bytes);
    KVK_ASSERT(client->blocks != NULL && client->pieces != NULL && client->memory != NULL);
    kvk_lock_init(&client->lock);
    kvk_condition_init(&client->changed);
}

static inline void client_finish(struct client *client)
{
    kvk_lock_finish(&client->lock);
    free(client->blocks);
    free(client->pieces);
    free(client->memory);
}

static inline void client_id(struct kvk_remote_id *id, uint64_t number)
{
    memset(id, 0, sizeof(*id));
    kvk_store_le64(id->key, number + 1);
    kvk_store_le64(id->parent, number);
}

static inline void client_fill(uint8_t *memory, uint64_t size, uint64_t number)
{
    struct kvk_random random;
    kvk_random_init(&random, number);
    uint64_t a = kvk_random_next(&random);
    for (uint64_t i = 0; i < size; i++) {
        memory[i] = (uint8_t)((a >> (i % 57)) + i * 31 + (i >> 9));
    }
}

static inline bool client_right(const uint8_t *memory, uint64_t size, uint64_t number)
{
    struct kvk_random random;
    kvk_random_init(&random, number);
    uint64_t a = kvk_random_next(&random);
    for (uint64_t i = 0; i < size; i++) {
        if (memory[i] != (uint8_t)((a >> (i % 57)) + i * 31 + (i >> 9))) {
            return false;
        }
    }
    return true;
}

static inline void client_done(void *context, struct kvk_remote_batch *batch)
{
    struct client *client = context;
    KVK_ASSERT(batch == &client->batch);
    kvk_lock(&client->lock);
    client->done = true;
    (void)pthread_cond_signal(&client->changed);
    kvk_unlock(&client->lock);
}

/* Submit blocks first, first + step, …, without waiting. False: the store refused. */
static inline bool client_submit(struct client *client, enum kvk_remote_operation operation,
                                 uint64_t first, uint32_t count, uint64_t step, bool chain,
                                 uint64_t deadline_ms)
{
    uint64_t block_bytes = client->space->block_bytes;
    KVK_ASSERT(count <= client->block_max);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *memory = client->memory + i * block_bytes;
        client_id(&client->blocks[i].id, first + i * step);
        client->pieces[i] = (struct kvk_remote_piece){memory, block_bytes};
        client->blocks[i].pieces = &client->pieces[i];
        client->blocks[i].piece_count = 1;
        if (operation == KVK_REMOTE_STORE) {
            client_fill(memory, block_bytes, first + i * step);
        } else if (operation == KVK_REMOTE_FETCH) {
            memset(memory, 0xee, block_bytes);
        }
    }
    uint64_t begun = now_ns();
    client->done = false;
    client->batch = (struct kvk_remote_batch){
        .operation = operation,
        .space = client->space,
        .blocks = client->blocks,
        .block_count = count,
        .chain = chain,
        .deadline_ns = begun + deadline_ms * KVK_NS_PER_MS,
        .done = client_done,
        .context = client,
    };
    enum kvk_status status = kvk_remote_submit(client->remote, &client->batch, NULL);
    uint64_t took = now_ns() - begun;
    client->submit_ns_worst = took > client->submit_ns_worst ? took : client->submit_ns_worst;
    CHECK(took < SUBMIT_NS_MAX);
    client->refused += status != KVK_OK;
    return status == KVK_OK;
}

static inline void client_wait(struct client *client)
{
    kvk_lock(&client->lock);
    while (!client->done) {
        uint64_t patience = client->batch.deadline_ns + 10 * KVK_NS_PER_SECOND;
        bool in_time = kvk_condition_wait(&client->changed, &client->lock, patience);
        CHECK(in_time || client->done);
    }
    kvk_unlock(&client->lock);
    uint64_t now = now_ns();
    uint64_t late = now > client->batch.deadline_ns ? now - client->batch.deadline_ns : 0;
    client->late_ns_worst = late > client->late_ns_worst ? late : client->late_ns_worst;
    CHECK(late < LATE_NS_MAX);
    for (uint32_t i = 0; i < client->batch.block_count; i++) {
        enum kvk_remote_result result = client->blocks[i].result;
        client->results[result]++;
        if (client->batch.operation == KVK_REMOTE_FETCH && result == KVK_REMOTE_HIT) {
            uint64_t number = kvk_load_le64(client->blocks[i].id.parent);
            CHECK(client_right(client->memory + i * client->space->block_bytes,
                               client->space->block_bytes, number));
        }
    }
}

/* The whole of it: how many were HIT; 0 where the store refused. */
static inline uint32_t client_run(struct client *client, enum kvk_remote_operation operation,
                                  uint64_t first, uint32_t count, bool chain, uint64_t deadline_ms)
{
    if (!client_submit(client, operation, first, count, 1, chain, deadline_ms)) {
        return 0;
    }
    client_wait(client);
    return client->batch.hit_count;
}

static inline struct kvk_remote_health client_health(struct kvk_remote *remote)
{
    struct kvk_remote_health health;
    kvk_remote_health(remote, &health);
    return health;
}

/* False: it did not get so in time. */
static inline bool client_await(struct kvk_remote *remote, enum kvk_remote_state state,
                                uint64_t wait_ms)
{
    uint64_t until = now_ns() + wait_ms * KVK_NS_PER_MS;
    while (client_health(remote).state != state) {
        if (now_ns() > until) {
            (void)fprintf(stderr, "state %d, not %d: %s\n", (int)client_health(remote).state,
                          (int)state, client_health(remote).reason);
            return false;
        }
        (void)usleep(5000);
    }
    return true;
}

#endif
