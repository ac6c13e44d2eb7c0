#include "daemon/fleet_nodes.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/random.h"
#include "daemon/fleet_internal.h"
#include "hosttier/catalogue.h"

#define NODES_GROUP UINT32_C(0xfffffffe) /* no layer group has this number */
#define RECORD_VERSION 1U
#define ANNOUNCE_NS_MAX (2 * KVK_NS_PER_SECOND)
#define CLOSE_NS_MAX (200 * KVK_NS_PER_MS)
#define LIVES 3      /* intervals that a record stays */
#define MOVES_MAX 64 /* places that are tried in one turn */
#define ID_SIZE 16

/* Where a record's fields lie: texts with their NUL, numbers little-endian. */
enum {
    AT_VERSION = 0, /* 4 bytes, and 4 of flags */
    AT_FLAGS = 4,
    AT_ID = 8,
    AT_NAME = 24,
    AT_ADDRESS = AT_NAME + KVK_FLEET_NODE_TEXT_SIZE,
    AT_EVENTS = AT_ADDRESS + KVK_FLEET_NODE_TEXT_SIZE,
    AT_PROGRAM = AT_EVENTS + KVK_FLEET_NODE_TEXT_SIZE,
    AT_NUMBERS = AT_PROGRAM + 32,
    NUMBER_COUNT = 19,
    RECORD_SIZE = AT_NUMBERS + 8 * NUMBER_COUNT,
};
_Static_assert(RECORD_SIZE == 976, "the record is stored");

#define FLAG_DRAINING 1U

struct kvk_fleet_directory {
    struct kvk_fleet_directory_options options;
    struct kvk_remote_space space;
    struct kvk_lock lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stopping;
    struct kvk_fleet_directory_counters counters;

    uint8_t id[ID_SIZE]; /* fixed once it runs */

    /* The thread's own. */
    uint32_t place;
    uint64_t number;
};

/* ---- Records ---- */

/* The numbers of a node in their order, read or written alike. */
static void numbers_of(struct kvk_fleet_node *node, uint64_t *numbers[NUMBER_COUNT])
{
    uint32_t count = 0;
    numbers[count++] = &node->started_s;
    numbers[count++] = &node->at_s;
    numbers[count++] = &node->number;
    for (int i = 0; i < KVK_FLEET_TIERS; i++) {
        numbers[count++] = &node->used_bytes[i];
        numbers[count++] = &node->limit_bytes[i];
        numbers[count++] = &node->uses[i];
    }
    numbers[count++] = &node->fetched_blocks;
    numbers[count++] = &node->lookups;
    numbers[count++] = &node->lookup_tokens;
    numbers[count++] = &node->hit_tokens;
    numbers[count++] = &node->sent_bytes;
    numbers[count++] = &node->fetched_bytes;
    numbers[count++] = &node->spaces;
    KVK_ASSERT(count == NUMBER_COUNT);
}

static void record_write(struct kvk_fleet_node *node, uint8_t record[RECORD_SIZE])
{
    uint64_t *numbers[NUMBER_COUNT];
    memset(record, 0, RECORD_SIZE);
    kvk_store_le32(record + AT_VERSION, RECORD_VERSION);
    kvk_store_le32(record + AT_FLAGS,
                   (node->draining ? FLAG_DRAINING : 0) | (node->store_state << 8));
    memcpy(record + AT_ID, node->id, ID_SIZE);
    memcpy(record + AT_NAME, node->name, strnlen(node->name, KVK_FLEET_NODE_TEXT_SIZE - 1));
    memcpy(record + AT_ADDRESS, node->address,
           strnlen(node->address, KVK_FLEET_NODE_TEXT_SIZE - 1));
    memcpy(record + AT_EVENTS, node->events, strnlen(node->events, KVK_FLEET_NODE_TEXT_SIZE - 1));
    memcpy(record + AT_PROGRAM, node->version, strnlen(node->version, sizeof(node->version) - 1));
    numbers_of(node, numbers);
    for (size_t i = 0; i < NUMBER_COUNT; i++) {
        kvk_store_le64(record + AT_NUMBERS + 8 * i, *numbers[i]);
    }
}

static bool text_read(char *target, const uint8_t *text, size_t size)
{
    memcpy(target, text, size);
    return text[size - 1] == 0 && kvk_utf8_ok(target, strlen(target));
}

/* False: of a version that is not known, or texts that are none. */
static bool record_read(const uint8_t record[RECORD_SIZE], struct kvk_fleet_node *node)
{
    uint64_t *numbers[NUMBER_COUNT];
    uint32_t flags = kvk_load_le32(record + AT_FLAGS);
    memset(node, 0, sizeof(*node));
    if (kvk_load_le32(record + AT_VERSION) != RECORD_VERSION) {
        return false;
    }
    memcpy(node->id, record + AT_ID, ID_SIZE);
    node->draining = (flags & FLAG_DRAINING) != 0;
    node->store_state = flags >> 8;
    numbers_of(node, numbers);
    for (size_t i = 0; i < NUMBER_COUNT; i++) {
        *numbers[i] = kvk_load_le64(record + AT_NUMBERS + 8 * i);
    }
    return text_read(node->name, record + AT_NAME, KVK_FLEET_NODE_TEXT_SIZE) &&
           text_read(node->address, record + AT_ADDRESS, KVK_FLEET_NODE_TEXT_SIZE) &&
           text_read(node->events, record + AT_EVENTS, KVK_FLEET_NODE_TEXT_SIZE) &&
           text_read(node->version, record + AT_PROGRAM, sizeof(node->version)) &&
           node->store_state <= KVK_REMOTE_GOOD;
}

/* ---- Asking ---- */

struct asking {
    struct kvk_lock lock;
    pthread_cond_t ended;
    bool done;
};

static void asking_done(void *context, struct kvk_remote_batch *batch)
{
    struct asking *asking = context;
    (void)batch;
    kvk_lock(&asking->lock);
    asking->done = true;
    (void)pthread_cond_signal(&asking->ended);
    kvk_unlock(&asking->lock);
}

/* See the batch to its end. */
static enum kvk_status ask(struct kvk_fleet_directory *directory, struct kvk_remote_batch *batch,
                           struct kvk_error *error)
{
    struct asking asking = {.done = false};
    kvk_lock_init(&asking.lock);
    kvk_condition_init(&asking.ended);
    batch->space = &directory->space;
    batch->done = asking_done;
    batch->context = &asking;
    enum kvk_status status = kvk_remote_submit(directory->options.remote, batch, error);
    kvk_lock(&asking.lock);
    while (status == KVK_OK && !asking.done) {
        (void)kvk_condition_wait(&asking.ended, &asking.lock, UINT64_MAX);
    }
    kvk_unlock(&asking.lock);
    (void)pthread_cond_destroy(&asking.ended);
    kvk_lock_finish(&asking.lock);
    return status;
}

static void block_set(struct kvk_remote_block *block, struct kvk_remote_piece *piece,
                      uint32_t place, uint8_t *record)
{
    *piece = (struct kvk_remote_piece){record, RECORD_SIZE};
    *block = (struct kvk_remote_block){.pieces = piece, .piece_count = 1};
    kvk_store_le32(block->id.key, place);
}

/* One place, one operation: what became of it. */
static enum kvk_remote_result ask_place(struct kvk_fleet_directory *directory,
                                        enum kvk_remote_operation operation, uint32_t place,
                                        uint8_t record[RECORD_SIZE], uint64_t wait_ns)
{
    struct kvk_error error;
    struct kvk_remote_piece piece;
    struct kvk_remote_block block;
    block_set(&block, &piece, place, record);
    struct kvk_remote_batch batch = {
        .operation = operation,
        .blocks = &block,
        .block_count = 1,
        .deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + wait_ns,
        .ttl_ms = directory->options.interval_ms * LIVES,
    };
    if (ask(directory, &batch, &error) != KVK_OK) {
        return KVK_REMOTE_UNAVAILABLE;
    }
    return block.result;
}

/* ---- Announcing ---- */

static void announce(struct kvk_fleet_directory *directory)
{
    struct kvk_fleet_node node = {0};
    uint8_t record[RECORD_SIZE];
    uint32_t moves = 0;
    enum kvk_remote_result result = KVK_REMOTE_PENDING;
    directory->options.describe(directory->options.context, &node);
    memcpy(node.id, directory->id, ID_SIZE);
    node.number = ++directory->number;
    node.at_s = (uint64_t)time(NULL);
    for (; moves < MOVES_MAX; moves++) {
        struct kvk_fleet_node other;
        result = ask_place(directory, KVK_REMOTE_FETCH, directory->place, record, ANNOUNCE_NS_MAX);
        bool taken = result == KVK_REMOTE_HIT && record_read(record, &other) &&
                     memcmp(other.id, directory->id, ID_SIZE) != 0;
        if (!taken) {
            break;
        }
        directory->place = (directory->place + 1) % KVK_FLEET_PLACES;
    }
    if (moves < MOVES_MAX && result < KVK_REMOTE_FULL) {
        record_write(&node, record);
        result = ask_place(directory, KVK_REMOTE_STORE, directory->place, record, ANNOUNCE_NS_MAX);
    }
    kvk_lock(&directory->lock);
    directory->counters.moves += moves;
    directory->counters.announcements += result == KVK_REMOTE_HIT && moves < MOVES_MAX ? 1 : 0;
    directory->counters.announce_failures += result != KVK_REMOTE_HIT || moves == MOVES_MAX ? 1 : 0;
    kvk_unlock(&directory->lock);
}

static void *directory_main(void *context)
{
    struct kvk_fleet_directory *directory = context;
    kvk_lock(&directory->lock);
    while (!directory->stopping) {
        uint64_t failures = directory->counters.announce_failures;
        kvk_unlock(&directory->lock);
        announce(directory);
        kvk_lock(&directory->lock);
        /* The first one soon, where the store was not there yet. */
        bool failed = directory->counters.announce_failures != failures;
        uint64_t pause_ms = directory->options.interval_ms / (failed ? 10 : 1);
        uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + pause_ms * KVK_NS_PER_MS;
        bool in_time = true;
        while (!directory->stopping && in_time) {
            in_time = kvk_condition_wait(&directory->changed, &directory->lock, until_ns);
        }
    }
    kvk_unlock(&directory->lock);
    return NULL;
}

/* ---- Listing ---- */

static int by_name(const void *a, const void *b)
{
    const struct kvk_fleet_node *one = a;
    const struct kvk_fleet_node *other = b;
    int order = strcmp(one->name, other->name);
    return order != 0 ? order : memcmp(one->id, other->id, ID_SIZE);
}

/* A node that moved may stand in two places for a while: the later one counts. */
static uint32_t nodes_settle(struct kvk_fleet_node *nodes, uint32_t count)
{
    uint32_t kept = 0;
    qsort(nodes, count, sizeof(*nodes), by_name);
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_fleet_node *last = kept > 0 ? &nodes[kept - 1] : NULL;
        if (last != NULL && memcmp(last->id, nodes[i].id, ID_SIZE) == 0) {
            *last = nodes[i].at_s > last->at_s ? nodes[i] : *last;
        } else {
            nodes[kept++] = nodes[i];
        }
    }
    return kept;
}

struct listing {
    uint8_t (*records)[RECORD_SIZE];
    struct kvk_remote_block *blocks;
    struct kvk_remote_piece *pieces;
};

enum kvk_status kvk_fleet_directory_list(struct kvk_fleet_directory *directory,
                                         uint64_t deadline_ns, struct kvk_fleet_node **nodes,
                                         uint32_t *count, bool *incomplete, struct kvk_error *error)
{
    struct listing listing = {
        .records = malloc(sizeof(*listing.records) * KVK_FLEET_PLACES),
        .blocks = calloc(KVK_FLEET_PLACES, sizeof(*listing.blocks)),
        .pieces = calloc(KVK_FLEET_PLACES, sizeof(*listing.pieces)),
    };
    struct kvk_fleet_node *found = calloc(KVK_FLEET_PLACES, sizeof(*found));
    enum kvk_status status = KVK_OK;
    *count = 0;
    *incomplete = false;
    if (listing.records == NULL || listing.blocks == NULL || listing.pieces == NULL ||
        found == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the fleet");
        goto end;
    }
    for (uint32_t i = 0; i < KVK_FLEET_PLACES; i++) {
        block_set(&listing.blocks[i], &listing.pieces[i], i, listing.records[i]);
    }
    struct kvk_remote_batch batch = {
        .operation = KVK_REMOTE_FETCH,
        .blocks = listing.blocks,
        .block_count = KVK_FLEET_PLACES,
        .deadline_ns = deadline_ns,
    };
    status = ask(directory, &batch, error);
    uint32_t silent = 0;
    for (uint32_t i = 0; status == KVK_OK && i < KVK_FLEET_PLACES; i++) {
        silent += listing.blocks[i].result >= KVK_REMOTE_FULL ? 1 : 0;
        if (listing.blocks[i].result == KVK_REMOTE_HIT &&
            record_read(listing.records[i], &found[*count])) {
            (*count)++;
        }
    }
    if (status == KVK_OK && silent == KVK_FLEET_PLACES) {
        status =
            kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "the remote store did not answer");
    }
    *count = nodes_settle(found, *count);
    *incomplete = silent > 0;
end:
    free(listing.records);
    free(listing.blocks);
    free(listing.pieces);
    if (status != KVK_OK) {
        free(found);
        return status;
    }
    *nodes = found;
    return KVK_OK;
}

/* ---- Life ---- */

/* The node's id, which lasts where there is a catalogue. */
static void id_find(struct kvk_fleet_directory *directory)
{
    static const char name[] = "fleet node";
    struct kvk_error error;
    struct kvk_catalogue *values = directory->options.values;
    size_t size = ID_SIZE;
    if (values != NULL &&
        kvk_catalogue_get_value(values, name, directory->id, &size, &error) == KVK_OK &&
        size == ID_SIZE) {
        return;
    }
    kvk_random_secret(directory->id, ID_SIZE);
    if (values != NULL) {
        /* Else it is another node in its next life, and this one's record goes by itself. */
        enum kvk_status status =
            kvk_catalogue_put_value(values, name, directory->id, ID_SIZE, &error);
        (void)status;
    }
}

static enum kvk_status space_init(struct kvk_fleet_directory *directory, struct kvk_error *error)
{
    static const uint8_t nothing[KVK_REMOTE_KEY_SIZE];
    uint8_t secret[KVK_REMOTE_SECRET_SIZE];
    kvk_fleet_record_secret(directory->options.key, secret);
    const struct kvk_remote_space_options options = {
        .secret = secret,
        .space = nothing,
        .shape = nothing,
        .group = NODES_GROUP,
        .generation = 1,
        .block_bytes = RECORD_SIZE,
        .encrypt = true,
    };
    enum kvk_status status = kvk_remote_space_init(&directory->space, &options, error);
    kvk_secret_wipe(secret, sizeof(secret));
    directory->options.key = NULL; /* it was read */
    return status;
}

enum kvk_status kvk_fleet_directory_open(const struct kvk_fleet_directory_options *options,
                                         struct kvk_fleet_directory **directory,
                                         struct kvk_error *error)
{
    struct kvk_fleet_directory *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the fleet");
    }
    made->options = *options;
    kvk_lock_init(&made->lock);
    kvk_condition_init(&made->changed);
    enum kvk_status status = space_init(made, error);
    if (status == KVK_OK) {
        id_find(made);
        made->place = kvk_load_le32(made->id) % KVK_FLEET_PLACES;
        sigset_t all;
        sigset_t before;
        (void)sigfillset(&all);
        (void)pthread_sigmask(SIG_SETMASK, &all, &before);
        int failed = pthread_create(&made->thread, NULL, directory_main, made);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
        made->started = failed == 0;
        if (failed != 0) {
            status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                              "the fleet's thread could not be started: %s", strerror(failed));
        }
    }
    if (status != KVK_OK) {
        kvk_fleet_directory_close(made);
        return status;
    }
    *directory = made;
    return KVK_OK;
}

void kvk_fleet_directory_close(struct kvk_fleet_directory *directory)
{
    uint8_t record[RECORD_SIZE];
    if (directory == NULL) {
        return;
    }
    kvk_lock(&directory->lock);
    directory->stopping = true;
    bool there = directory->counters.announcements > 0;
    (void)pthread_cond_signal(&directory->changed);
    kvk_unlock(&directory->lock);
    if (directory->started) {
        (void)pthread_join(directory->thread, NULL);
    }
    if (there) {
        (void)ask_place(directory, KVK_REMOTE_DROP, directory->place, record, CLOSE_NS_MAX);
    }
    kvk_remote_space_finish(&directory->space);
    (void)pthread_cond_destroy(&directory->changed);
    kvk_lock_finish(&directory->lock);
    free(directory);
}

void kvk_fleet_directory_self(const struct kvk_fleet_directory *directory, uint8_t id[ID_SIZE])
{
    memcpy(id, directory->id, ID_SIZE);
}

void kvk_fleet_directory_counters(struct kvk_fleet_directory *directory,
                                  struct kvk_fleet_directory_counters *counters)
{
    kvk_lock(&directory->lock);
    *counters = directory->counters;
    kvk_unlock(&directory->lock);
}
