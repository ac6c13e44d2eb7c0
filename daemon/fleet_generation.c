/*
 * Generations of spaces in the fleet: a journal for each space in the store, and a thread that
 * reads them again and again.
 *
 *     entry = "KVKG", version, number, HMAC(fleet's record key; digest of the space, number)
 * [0..16)
 *
 * Entries are only added, and the highest right one counts, wherever it stands in the last 2 KiB:
 * so what strangers write in between hides nothing, and a writer that comes late undoes nothing.
 * One that is no longer among the last ones, or was lost with the store's memory, is added again by
 * whoever knows it.
 *
 * A number is given only when the journal's highest was seen to be what is known here. A number
 * that was raised here counts as told when no higher one stands before it: then everything that was
 * stored before is under a lower one, whatever comes after.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/fleet.h"
#include "daemon/fleet_internal.h"
#include "hosttier/catalogue.h"

#define ENTRY_SIZE 32U
#define ENTRY_VERSION 1U
#define TAIL_SIZE (64 * ENTRY_SIZE)
#define JOURNAL_MAX (256U << 10)           /* bytes; a longer one is begun anew */
#define RECORDS_GROUP UINT32_C(0xffffffff) /* no layer group has this number */
#define READ_MAX 128U                      /* members that are read at a time */
#define ASK_NS_MAX (2 * KVK_NS_PER_SECOND)
#define SLEEP_NS_MAX KVK_NS_PER_SECOND
#define NUMBER_CHANCE_BITS 20

static const uint8_t magic[4] = {'K', 'V', 'K', 'G'};

struct kvk_fleet_member {
    struct kvk_fleet *fleet;
    void *user;
    uint8_t digest[KVK_REMOTE_KEY_SIZE];
    _Atomic uint64_t generation; /* that is given; 0: none */
    _Atomic uint64_t until_ns;   /* and so long */

    /* Under the fleet's lock. */
    struct kvk_fleet_member *next;
    uint64_t known;    /* the highest number known here; 0: none */
    uint64_t read_ns;  /* when it is read next */
    uint64_t added_ns; /* when its journal was last added to from here */
    bool raising;      /* between begin and end, or about to leave: the thread leaves it alone */
    bool pending;      /* raised here, and not told yet */
    bool busy;         /* the thread works with it */
    bool left;         /* nobody's any more: it stays until it is told */
};

struct kvk_fleet {
    struct kvk_fleet_options options;
    uint8_t check_key[32];
    struct kvk_remote_space tail_space;
    struct kvk_remote_space entry_space;

    struct kvk_lock lock;
    pthread_cond_t work;    /* the thread has some */
    pthread_cond_t changed; /* a member has, or a batch is done */
    struct kvk_fleet_member *members;
    uint32_t member_count; /* without those that have left */
    uint32_t left_count;
    bool stopping;
    bool started;
    struct kvk_fleet_counters counters;
    pthread_t thread;

    /* The thread's own, but for `done`. */
    bool done;
    struct kvk_fleet_member *due[READ_MAX];
    struct reading {
        bool ok;          /* it could be read; what is not there is empty */
        uint64_t highest; /* 0: none */
        uint64_t before;  /* the highest that stands before the wanted one; all, where that does not
                             stand there */
        bool wanted;      /* the wanted one stands there */
    } readings[READ_MAX];
    struct kvk_remote_block blocks[READ_MAX];
    struct kvk_remote_piece pieces[READ_MAX];
    uint8_t tails[READ_MAX][TAIL_SIZE];
};

static uint64_t now_ns(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

/* ---- Numbers and entries ---- */

/*
 * Higher than `above`, and never used before, as far as clock and chance can tell. Where the clock
 * is behind what is known, chance alone tells two nodes' numbers apart: with one and the same, the
 * second of two invalidations would pass for the first, which others may have learnt long before.
 */
static uint64_t number_fresh(uint64_t above)
{
    struct timespec time;
    uint64_t chance = 0;
    int failed = clock_gettime(CLOCK_REALTIME, &time);
    KVK_ASSERT(failed == 0);
    kvk_random_secret(&chance, sizeof(chance));
    uint64_t ms = (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / KVK_NS_PER_MS;
    chance >>= 64 - NUMBER_CHANCE_BITS;
    uint64_t number = ms << NUMBER_CHANCE_BITS | chance;
    return number > above ? number : above + 1 + chance;
}

static void entry_check(const struct kvk_fleet *fleet, const uint8_t *digest, uint64_t number,
                        uint8_t check[16])
{
    uint8_t message[KVK_REMOTE_KEY_SIZE + 8];
    uint8_t hash[32];
    memcpy(message, digest, KVK_REMOTE_KEY_SIZE);
    kvk_store_le64(message + KVK_REMOTE_KEY_SIZE, number);
    kvk_fleet_hmac(fleet->check_key, message, sizeof(message), hash);
    memcpy(check, hash, 16);
}

static void entry_write(const struct kvk_fleet *fleet, const uint8_t *digest, uint64_t number,
                        uint8_t entry[ENTRY_SIZE])
{
    memcpy(entry, magic, sizeof(magic));
    kvk_store_le32(entry + 4, ENTRY_VERSION);
    kvk_store_le64(entry + 8, number);
    entry_check(fleet, digest, number, entry + 16);
}

/* What a tail says. What is not right in it is passed over, and counted. */
static void tail_read(const struct kvk_fleet *fleet, const uint8_t *digest, const uint8_t *tail,
                      uint64_t wanted, struct reading *reading, uint64_t *foreign)
{
    uint64_t right_bytes = 0;
    uint64_t bytes = 0;
    while (bytes < TAIL_SIZE && tail[bytes] == 0) {
        bytes++; /* what the journal is too short for */
    }
    bytes = TAIL_SIZE - bytes;
    for (size_t at = 0; at + ENTRY_SIZE <= TAIL_SIZE;) {
        const uint8_t *entry = tail + at;
        uint8_t check[16];
        uint64_t number = kvk_load_le64(entry + 8);
        bool right =
            memcmp(entry, magic, sizeof(magic)) == 0 && kvk_load_le32(entry + 4) == ENTRY_VERSION;
        if (right) {
            entry_check(fleet, digest, number, check);
            right = kvk_secret_equal(check, entry + 16, sizeof(check));
        }
        if (right && number > reading->highest) {
            reading->highest = number;
        }
        reading->wanted = reading->wanted || (right && number == wanted);
        if (!reading->wanted) {
            reading->before = reading->highest;
        }
        right_bytes += right ? ENTRY_SIZE : 0;
        at += right ? ENTRY_SIZE : 1;
    }
    /* The first entry may be cut by the tail's edge; with any more than that, somebody else wrote.
     */
    *foreign += bytes - right_bytes >= ENTRY_SIZE ? 1 : 0;
}

/* ---- What lasts ---- */

static void value_name(const uint8_t *digest, char name[64])
{
    char hex[2 * KVK_REMOTE_KEY_SIZE + 1];
    kvk_hex_write(digest, KVK_REMOTE_KEY_SIZE, hex);
    (void)snprintf(name, 64, "fleet.%s", hex);
}

static enum kvk_status value_put(struct kvk_fleet *fleet, const uint8_t *digest, uint64_t number,
                                 struct kvk_error *error)
{
    char name[64];
    uint8_t bytes[8];
    if (fleet->options.values == NULL) {
        return KVK_OK;
    }
    value_name(digest, name);
    kvk_store_le64(bytes, number);
    return kvk_catalogue_put_value(fleet->options.values, name, bytes, sizeof(bytes), error);
}

/* 0: none. */
static enum kvk_status value_get(struct kvk_fleet *fleet, const uint8_t *digest, uint64_t *number,
                                 struct kvk_error *error)
{
    char name[64];
    uint8_t bytes[8];
    size_t size = sizeof(bytes);
    *number = 0;
    if (fleet->options.values == NULL) {
        return KVK_OK;
    }
    value_name(digest, name);
    enum kvk_status status =
        kvk_catalogue_get_value(fleet->options.values, name, bytes, &size, error);
    if (status == KVK_NOT_FOUND) {
        return KVK_OK;
    }
    if (status == KVK_OK && size == sizeof(bytes)) {
        *number = kvk_load_le64(bytes);
    }
    return status;
}

/* ---- Asking the store: the thread's ---- */

static void batch_done(void *context, struct kvk_remote_batch *batch)
{
    struct kvk_fleet *fleet = context;
    (void)batch;
    kvk_lock(&fleet->lock);
    fleet->done = true;
    (void)pthread_cond_broadcast(&fleet->changed);
    kvk_unlock(&fleet->lock);
}

/* Ask for the first `count` of `blocks`, and wait. False: nothing was asked. */
static bool ask(struct kvk_fleet *fleet, enum kvk_remote_operation operation, uint32_t count)
{
    uint64_t ask_ns = fleet->options.generation_ms * KVK_NS_PER_MS;
    struct kvk_remote_batch batch = {
        .operation = operation,
        .space = operation == KVK_REMOTE_TAIL ? &fleet->tail_space : &fleet->entry_space,
        .blocks = fleet->blocks,
        .block_count = count,
        .deadline_ns = now_ns() + (ask_ns < ASK_NS_MAX ? ask_ns : ASK_NS_MAX),
        .done = batch_done,
        .context = fleet,
    };
    fleet->done = false;
    if (kvk_remote_submit(fleet->options.remote, &batch, NULL) != KVK_OK) {
        return false;
    }
    kvk_lock(&fleet->lock);
    while (!fleet->done) {
        (void)kvk_condition_wait(&fleet->changed, &fleet->lock, UINT64_MAX);
    }
    kvk_unlock(&fleet->lock);
    return true;
}

static void block_set(struct kvk_fleet *fleet, uint32_t index, const uint8_t *digest, void *memory,
                      uint64_t size)
{
    fleet->pieces[index] = (struct kvk_remote_piece){memory, size};
    fleet->blocks[index] = (struct kvk_remote_block){
        .pieces = &fleet->pieces[index],
        .piece_count = 1,
    };
    memcpy(fleet->blocks[index].id.key, digest, KVK_REMOTE_KEY_SIZE);
}

/* The journal gets this number. True: it has it. */
static bool number_add(struct kvk_fleet *fleet, const struct kvk_fleet_member *member,
                       uint64_t number)
{
    uint8_t entry[ENTRY_SIZE];
    entry_write(fleet, member->digest, number, entry);
    /* A second time where it is too long, or something else lies there: that goes first. */
    for (int i = 0; i < 2; i++) {
        block_set(fleet, 0, member->digest, entry, ENTRY_SIZE);
        if (!ask(fleet, KVK_REMOTE_APPEND, 1)) {
            return false;
        }
        enum kvk_remote_result result = fleet->blocks[0].result;
        if (result == KVK_REMOTE_HIT && fleet->blocks[0].length <= JOURNAL_MAX) {
            return true;
        }
        if ((result != KVK_REMOTE_HIT && result != KVK_REMOTE_NOT_OURS) ||
            !ask(fleet, KVK_REMOTE_DROP, 1)) {
            return false;
        }
    }
    return false;
}

/* Read the journals of the first `count` of `due`. */
static void journals_read(struct kvk_fleet *fleet, uint32_t count)
{
    uint64_t foreign = 0;
    uint64_t failures = 0;
    for (uint32_t i = 0; i < count; i++) {
        block_set(fleet, i, fleet->due[i]->digest, fleet->tails[i], TAIL_SIZE);
    }
    bool asked = ask(fleet, KVK_REMOTE_TAIL, count);
    kvk_lock(&fleet->lock);
    for (uint32_t i = 0; i < count; i++) {
        enum kvk_remote_result result = asked ? fleet->blocks[i].result : KVK_REMOTE_UNAVAILABLE;
        fleet->readings[i] = (struct reading){
            .ok = result == KVK_REMOTE_HIT || result == KVK_REMOTE_ABSENT ||
                  result == KVK_REMOTE_NOT_OURS,
        };
        if (result == KVK_REMOTE_HIT) {
            tail_read(fleet, fleet->due[i]->digest, fleet->tails[i], fleet->due[i]->known,
                      &fleet->readings[i], &foreign);
        }
        foreign += result == KVK_REMOTE_NOT_OURS ? 1 : 0;
        failures += fleet->readings[i].ok ? 0 : 1;
    }
    fleet->counters.reads += count;
    fleet->counters.read_failures += failures;
    fleet->counters.foreign += foreign;
    kvk_unlock(&fleet->lock);
}

/* ---- What a reading means ---- */

static void number_hide(struct kvk_fleet_member *member)
{
    atomic_store(&member->until_ns, 0);
    atomic_store(&member->generation, 0);
}

static void number_save(struct kvk_fleet *fleet, const struct kvk_fleet_member *member,
                        uint64_t number)
{
    struct kvk_error error;
    if (value_put(fleet, member->digest, number, &error) != KVK_OK) {
        /* The next life learns it from the journal. */
        kvk_log(KVK_LOG_WARNING, "fleet_number_unsaved", "reason=\"%s\"", error.text);
    }
}

/* Somebody raised it past what is known here. Our own blocks go first, then we know: a crash in
 * between has us learn it again. */
static void number_learn(struct kvk_fleet *fleet, struct kvk_fleet_member *member, uint64_t number)
{
    kvk_lock(&fleet->lock);
    bool first = member->known == 0 || member->left; /* there is nothing here to forget */
    number_hide(member);
    kvk_unlock(&fleet->lock);
    if (!first) {
        fleet->options.invalidated(fleet->options.context, member->user);
    }
    number_save(fleet, member, number);
    kvk_lock(&fleet->lock);
    fleet->counters.learned += first ? 0 : 1;
    member->known = number;
    member->read_ns = 0;
    kvk_unlock(&fleet->lock);
}

/* The journal has not what is known, or nothing at all. */
static void number_tell(struct kvk_fleet *fleet, struct kvk_fleet_member *member)
{
    kvk_lock(&fleet->lock);
    uint64_t number = member->known;
    bool pending = member->pending;
    kvk_unlock(&fleet->lock);
    bool begin = number == 0;
    if (begin) {
        number = number_fresh(0);
    }
    if (!number_add(fleet, member, number)) {
        return;
    }
    if (begin) {
        number_save(fleet, member, number);
    }
    kvk_lock(&fleet->lock);
    fleet->counters.begun += begin ? 1 : 0;
    fleet->counters.restored += begin || pending ? 0 : 1;
    member->known = number;
    /* What stands there now? At once, unless somebody wipes it out again and again. */
    uint64_t now = now_ns();
    if (now - member->added_ns > fleet->options.generation_ms * KVK_NS_PER_MS) {
        member->read_ns = 0;
    }
    member->added_ns = now;
    kvk_unlock(&fleet->lock);
}

/* A higher one stood there before ours came: ours must be higher than that. */
static void number_overtake(struct kvk_fleet *fleet, struct kvk_fleet_member *member,
                            uint64_t highest)
{
    uint64_t number = number_fresh(highest);
    number_save(fleet, member, number);
    kvk_lock(&fleet->lock);
    number_hide(member);
    member->known = number;
    member->added_ns = 0;
    kvk_unlock(&fleet->lock);
    number_tell(fleet, member);
}

static void reading_settle(struct kvk_fleet *fleet, struct kvk_fleet_member *member,
                           const struct reading *reading, uint64_t begun_ns)
{
    kvk_lock(&fleet->lock);
    uint64_t known = member->known;
    bool ends = member->pending && reading->wanted && reading->before < known;
    if (ends) {
        member->pending = false;
    }
    bool pending = member->pending;
    if (!pending && known != 0 && reading->highest == known) {
        atomic_store(&member->generation, known);
        atomic_store(&member->until_ns, begun_ns + fleet->options.generation_ms * KVK_NS_PER_MS);
    }
    (void)pthread_cond_broadcast(&fleet->changed);
    kvk_unlock(&fleet->lock);

    if (pending && reading->highest >= known) {
        number_overtake(fleet, member, reading->highest);
    } else if (reading->highest > known) {
        number_learn(fleet, member, reading->highest);
    } else if (reading->highest < known || known == 0) {
        number_tell(fleet, member);
    }
}

/* ---- The thread ---- */

/* Members whose time has come, marked busy; and when the next one's does. */
static uint32_t due_take(struct kvk_fleet *fleet, uint64_t now, uint64_t *next_ns)
{
    uint32_t count = 0;
    *next_ns = now + SLEEP_NS_MAX;
    for (struct kvk_fleet_member *member = fleet->members; member != NULL; member = member->next) {
        if (member->raising) {
            continue; /* its end says so */
        }
        if (member->read_ns <= now && count < READ_MAX) {
            member->busy = true;
            member->read_ns = now + fleet->options.generation_ms * KVK_NS_PER_MS / 2;
            fleet->due[count++] = member;
        }
        *next_ns = member->read_ns < *next_ns ? member->read_ns : *next_ns;
    }
    return count;
}

static void unlink_member(struct kvk_fleet *fleet, struct kvk_fleet_member *member)
{
    struct kvk_fleet_member **link = &fleet->members;
    while (*link != member) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = member->next;
}

static void round_run(struct kvk_fleet *fleet, uint32_t count, uint64_t begun_ns)
{
    journals_read(fleet, count);
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_fleet_member *member = fleet->due[i];
        if (fleet->readings[i].ok) {
            reading_settle(fleet, member, &fleet->readings[i], begun_ns);
        }
        kvk_lock(&fleet->lock);
        member->busy = false;
        (void)pthread_cond_broadcast(&fleet->changed);
        if (member->left && !member->pending) {
            unlink_member(fleet, member);
            fleet->left_count--;
            free(member);
        }
        kvk_unlock(&fleet->lock);
    }
}

static void *fleet_main(void *context)
{
    struct kvk_fleet *fleet = context;
    kvk_lock(&fleet->lock);
    while (!fleet->stopping) {
        uint64_t now = now_ns();
        uint64_t next_ns;
        uint32_t count = due_take(fleet, now, &next_ns);
        if (count == 0) {
            (void)kvk_condition_wait(&fleet->work, &fleet->lock, next_ns);
            continue;
        }
        kvk_unlock(&fleet->lock);
        round_run(fleet, count, now);
        kvk_lock(&fleet->lock);
    }
    kvk_unlock(&fleet->lock);
    return NULL;
}

/* ---- Life ---- */

static enum kvk_status spaces_init(struct kvk_fleet *fleet, struct kvk_error *error)
{
    static const uint8_t nothing[KVK_REMOTE_KEY_SIZE];
    uint8_t secret[KVK_REMOTE_SECRET_SIZE];
    kvk_fleet_record_secret(fleet->options.key, secret);
    struct kvk_remote_space_options options = {
        .secret = secret,
        .space = nothing,
        .shape = nothing,
        .group = RECORDS_GROUP,
        .generation = 1,
        .block_bytes = TAIL_SIZE,
    };
    enum kvk_status status = kvk_remote_space_init(&fleet->tail_space, &options, error);
    if (status == KVK_OK) {
        options.block_bytes = ENTRY_SIZE;
        status = kvk_remote_space_init(&fleet->entry_space, &options, error);
    }
    static const char tag[] = "kvkeep fleet generation checks 1";
    kvk_fleet_hmac(secret, tag, sizeof(tag), fleet->check_key);
    kvk_secret_wipe(secret, sizeof(secret));
    fleet->options.key = NULL; /* it was read */
    return status;
}

enum kvk_status kvk_fleet_open(const struct kvk_fleet_options *options, struct kvk_fleet **fleet,
                               struct kvk_error *error)
{
    KVK_ASSERT(options->generation_ms > 0 && options->invalidated != NULL);
    struct kvk_fleet *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the fleet");
    }
    made->options = *options;
    kvk_lock_init(&made->lock);
    kvk_condition_init(&made->work);
    kvk_condition_init(&made->changed);
    enum kvk_status status = spaces_init(made, error);
    if (status == KVK_OK) {
        int failed = pthread_create(&made->thread, NULL, fleet_main, made);
        made->started = failed == 0;
        if (failed != 0) {
            status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                              "the fleet's thread could not be started: %s", strerror(failed));
        }
    }
    if (status != KVK_OK) {
        kvk_fleet_close(made);
        return status;
    }
    *fleet = made;
    return KVK_OK;
}

void kvk_fleet_close(struct kvk_fleet *fleet)
{
    if (fleet == NULL) {
        return;
    }
    KVK_ASSERT(fleet->member_count == 0 && kvk_locks_held() == 0);
    kvk_lock(&fleet->lock);
    fleet->stopping = true;
    (void)pthread_cond_signal(&fleet->work);
    kvk_unlock(&fleet->lock);
    if (fleet->started) {
        (void)pthread_join(fleet->thread, NULL);
    }
    if (fleet->left_count > 0) {
        kvk_log(KVK_LOG_WARNING, "invalidations_untold", "spaces=%u", fleet->left_count);
    }
    while (fleet->members != NULL) {
        struct kvk_fleet_member *member = fleet->members;
        fleet->members = member->next;
        free(member);
    }
    kvk_remote_space_finish(&fleet->tail_space);
    kvk_remote_space_finish(&fleet->entry_space);
    kvk_secret_wipe(fleet->check_key, sizeof(fleet->check_key));
    kvk_lock_finish(&fleet->lock);
    free(fleet);
}

/* What others of the same space, which have left or are about to, have not told yet must not be
 * found by this one either: it tells it, too. */
static void untold_take(struct kvk_fleet *fleet, struct kvk_fleet_member *made)
{
    for (struct kvk_fleet_member *other = fleet->members; other != NULL; other = other->next) {
        if (other->pending && memcmp(other->digest, made->digest, sizeof(made->digest)) == 0) {
            made->known = other->known > made->known ? other->known : made->known;
            made->pending = true;
        }
    }
}

enum kvk_status kvk_fleet_join(struct kvk_fleet *fleet, const struct kvk_fleet_identity *identity,
                               void *user, struct kvk_fleet_member **member,
                               struct kvk_error *error)
{
    uint64_t known = 0;
    enum kvk_status status = value_get(fleet, identity->digest, &known, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_fleet_member *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a space's number");
    }
    made->fleet = fleet;
    made->user = user;
    made->known = known;
    memcpy(made->digest, identity->digest, sizeof(made->digest));
    kvk_lock(&fleet->lock);
    uint32_t count = fleet->member_count;
    if (count < fleet->options.member_count_max) {
        untold_take(fleet, made);
        made->next = fleet->members;
        fleet->members = made;
        fleet->member_count++;
        (void)pthread_cond_signal(&fleet->work);
    }
    kvk_unlock(&fleet->lock);
    if (count >= fleet->options.member_count_max) {
        free(made);
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "spaces", count,
                              fleet->options.member_count_max,
                              "%u spaces are in the remote store already", count);
    }
    *member = made;
    return KVK_OK;
}

void kvk_fleet_leave(struct kvk_fleet_member *member)
{
    struct kvk_fleet *fleet = member->fleet;
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock(&fleet->lock);
    member->raising = true; /* the thread does not take it again */
    while (member->busy) {
        (void)kvk_condition_wait(&fleet->changed, &fleet->lock, UINT64_MAX);
    }
    member->raising = false;
    fleet->member_count--;
    /* What was answered as pending is told when the store is back. */
    bool stays = member->pending && fleet->left_count < fleet->options.member_count_max;
    if (stays) {
        member->left = true;
        member->user = NULL;
        member->read_ns = 0;
        fleet->left_count++;
        (void)pthread_cond_signal(&fleet->work);
    } else {
        unlink_member(fleet, member);
    }
    kvk_unlock(&fleet->lock);
    if (!stays) {
        free(member);
    }
}

bool kvk_fleet_generation(const struct kvk_fleet_member *member, uint64_t *generation)
{
    uint64_t number = atomic_load(&member->generation);
    uint64_t until_ns = atomic_load(&member->until_ns);
    /* The time could be a newer number's: numbers are never used twice, so this tells. */
    if (number == 0 || now_ns() >= until_ns || atomic_load(&member->generation) != number) {
        return false;
    }
    *generation = number;
    return true;
}

/* ---- Raising ---- */

enum kvk_status kvk_fleet_raise_begin(struct kvk_fleet_member *member, struct kvk_error *error)
{
    struct kvk_fleet *fleet = member->fleet;
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock(&fleet->lock);
    KVK_ASSERT(!member->raising);
    member->raising = true; /* the thread does not take it again */
    while (member->busy) {
        (void)kvk_condition_wait(&fleet->changed, &fleet->lock, UINT64_MAX);
    }
    number_hide(member);
    uint64_t number = number_fresh(member->known);
    kvk_unlock(&fleet->lock);

    enum kvk_status status = value_put(fleet, member->digest, number, error);

    kvk_lock(&fleet->lock);
    if (status == KVK_OK) {
        member->known = number;
        member->pending = true;
        fleet->counters.raises++;
    } else {
        member->raising = false;
    }
    kvk_unlock(&fleet->lock);
    return status;
}

enum kvk_status kvk_fleet_raise_end(struct kvk_fleet_member *member, uint64_t deadline_ns,
                                    struct kvk_error *error)
{
    struct kvk_fleet *fleet = member->fleet;
    bool in_time = true;
    kvk_lock(&fleet->lock);
    KVK_ASSERT(member->raising);
    member->raising = false;
    member->read_ns = 0;
    member->added_ns = 0;
    (void)pthread_cond_signal(&fleet->work);
    while (member->pending && in_time) {
        in_time = kvk_condition_wait(&fleet->changed, &fleet->lock, deadline_ns);
    }
    bool there = !member->pending;
    kvk_unlock(&fleet->lock);
    if (there) {
        return KVK_OK;
    }
    (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                   "it is gone from this daemon; the remote store was not reached yet, so other "
                   "daemons hear of it when it is back");
    kvk_error_retry(error, 1000);
    return KVK_UNAVAILABLE;
}

void kvk_fleet_counters(const struct kvk_fleet *fleet, struct kvk_fleet_counters *counters)
{
    struct kvk_lock *lock = (struct kvk_lock *)(uintptr_t)&fleet->lock;
    kvk_lock(lock);
    *counters = fleet->counters;
    kvk_unlock(lock);
}
