/*
 * Turns: who comes with nothing waiting goes next whatever the backlog of others, time is shared
 * alike, none is forgotten; and the same through a real server, whose calls of one owner make those
 * of another wait for a few of them at most.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/random.h"
#include "daemon/server_fair.h"
#include "tests/grpc_client.h"
#include "tests/server_fixture.h"

#define US UINT64_C(1000)
#define QUANTUM (100 * US)
#define OWNERS 8

static struct kvk_fair fair;
static uint64_t now_ns; /* of the tests' own clock */

static void begin(uint32_t running_max)
{
    struct kvk_error error;
    now_ns = 1000 * KVK_NS_PER_SECOND;
    cr_assert_eq(kvk_fair_init(&fair, OWNERS, running_max, QUANTUM, &error), KVK_OK);
}

/* Take the next and let it last so long; its owner, or UINT32_MAX. */
static uint32_t serve(uint64_t took_ns)
{
    struct kvk_fair_item *item = kvk_fair_take(&fair, now_ns);
    if (item == NULL) {
        return UINT32_MAX;
    }
    uint32_t owner = item->owner;
    now_ns += took_ns;
    (void)kvk_fair_end(&fair, owner, took_ns, now_ns);
    return owner;
}

static void drain(void)
{
    while (fair.waiting_count > 0) {
        (void)serve(US);
        now_ns += KVK_NS_PER_MS; /* some may have been held back */
    }
    kvk_fair_finish(&fair);
}

Test(server_fair, a_newcomer_goes_next_whatever_the_backlog)
{
    static struct kvk_fair_item noisy[1000], quiet[10];
    begin(1);
    for (int i = 0; i < 1000; i++) {
        kvk_fair_add(&fair, &noisy[i], 1, now_ns);
    }
    for (int i = 0; i < 20; i++) {
        cr_assert_eq(serve(50 * US), 1);
    }
    for (int i = 0; i < 10; i++) {
        kvk_fair_add(&fair, &quiet[i], 2, now_ns);
        cr_expect(kvk_fair_is_fresh(&fair));
        cr_expect_eq(serve(10 * US), 2, "call %d waited", i);
        for (int j = 0; j < 5; j++) {
            cr_expect_eq(serve(50 * US), 1);
        }
    }
    drain();
}

Test(server_fair, time_is_shared_not_calls)
{
    static struct kvk_fair_item items[2][4000];
    const uint64_t took_ns[2] = {5 * US, 700 * US}; /* one of them far past a quantum */
    uint64_t served_ns[2] = {0, 0};
    uint32_t next[2] = {0, 0};
    begin(1);
    for (int i = 0; i < 4000; i++) {
        for (uint32_t owner = 0; owner < 2; owner++) {
            kvk_fair_add(&fair, &items[owner][i], owner, now_ns);
        }
    }
    while (next[0] < 4000 && next[1] < 4000) {
        struct kvk_fair_item *item = kvk_fair_take(&fair, now_ns);
        uint32_t owner = item->owner;
        cr_assert(item == &items[owner][next[owner]], "in the order they came");
        next[owner]++;
        served_ns[owner] += took_ns[owner];
        (void)kvk_fair_end(&fair, owner, took_ns[owner], now_ns);
        uint64_t ahead =
            served_ns[0] > served_ns[1] ? served_ns[0] - served_ns[1] : served_ns[1] - served_ns[0];
        cr_assert(ahead <= 2 * QUANTUM + 700 * US, "%llu ns apart", (unsigned long long)ahead);
    }
    drain();
}

/* Who sends its next call when the one before is served, and nothing else, is not always first. */
Test(server_fair, small_bursts_gain_nothing)
{
    static struct kvk_fair_item backlog[4000], single;
    uint64_t served_ns[2] = {0, 0};
    begin(1);
    for (int i = 0; i < 4000; i++) {
        kvk_fair_add(&fair, &backlog[i], 0, now_ns);
    }
    kvk_fair_add(&fair, &single, 1, now_ns);
    for (int i = 0; i < 3000; i++) {
        uint32_t owner = serve(50 * US);
        cr_assert_lt(owner, 2);
        served_ns[owner < 2 ? owner : 0] += 50 * US;
        if (owner == 1) {
            kvk_fair_add(&fair, &single, 1, now_ns);
        }
    }
    cr_expect(served_ns[1] <= served_ns[0] + 2 * QUANTUM, "%llu and %llu",
              (unsigned long long)served_ns[1], (unsigned long long)served_ns[0]);
    cr_expect(served_ns[1] + 4 * QUANTUM >= served_ns[0]);
    drain();
}

Test(server_fair, one_owner_cannot_take_all_threads)
{
    static struct kvk_fair_item slow[10], other;
    begin(3);
    for (int i = 0; i < 10; i++) {
        kvk_fair_add(&fair, &slow[i], 4, now_ns);
    }
    for (int i = 0; i < 3; i++) {
        cr_assert_not_null(kvk_fair_take(&fair, now_ns));
    }
    cr_expect_null(kvk_fair_take(&fair, now_ns));
    kvk_fair_add(&fair, &other, 5, now_ns);
    cr_expect(kvk_fair_take(&fair, now_ns) == &other);
    cr_expect_null(kvk_fair_take(&fair, now_ns));
    cr_expect_not(kvk_fair_end(&fair, 5, US, now_ns));
    cr_expect(kvk_fair_end(&fair, 4, US, now_ns), "one more may be taken");
    cr_expect(kvk_fair_take(&fair, now_ns) == &slow[3]);
    cr_expect_null(kvk_fair_take(&fair, now_ns));
    for (int i = 0; i < 3; i++) {
        (void)kvk_fair_end(&fair, 4, US, now_ns);
    }
    drain();
}

Test(server_fair, what_was_owed_is_forgiven_once_nobody_waits)
{
    static struct kvk_fair_item first, mine, backlog[100];
    begin(1);
    kvk_fair_add(&fair, &first, 0, now_ns);
    cr_assert_eq(serve(1000 * 1000 * US), 0); /* a second */
    cr_assert_eq(serve(US), UINT32_MAX);      /* idle */
    for (int i = 0; i < 100; i++) {
        kvk_fair_add(&fair, &backlog[i], 1, now_ns);
    }
    cr_assert_eq(serve(QUANTUM), 1);
    cr_assert_eq(serve(QUANTUM), 1);
    kvk_fair_add(&fair, &mine, 0, now_ns);
    cr_expect_eq(serve(US), 0);
    drain();
}

/* Against the plainest model: per owner a list in order of coming; what is taken is the first of
 * one of them, and something is taken whenever one of an owner with room waits. With paces: at the
 * latest when it said that it would be. */
static void run_random_traffic(uint32_t share_percent)
{
    enum { ITEMS = 512 };
    static struct kvk_fair_item items[ITEMS];
    static uint32_t owner_of[ITEMS], came[ITEMS];
    static enum { OUT, WAITS, RUNS } state[ITEMS];
    struct kvk_random random;
    kvk_random_init(&random, 7);
    begin(2);
    kvk_fair_pace(&fair, share_percent, OWNERS - 1);
    uint32_t clock = 0, running[OWNERS] = {0};
    for (uint32_t step = 0; step < 200000; step++) {
        uint32_t i = (uint32_t)kvk_random_below(&random, ITEMS);
        if (kvk_random_chance(&random, 0.4) && state[i] == OUT) {
            owner_of[i] = (uint32_t)kvk_random_below(&random, OWNERS);
            came[i] = ++clock;
            state[i] = WAITS;
            kvk_fair_add(&fair, &items[i], owner_of[i], now_ns);
        } else if (state[i] == RUNS) {
            state[i] = OUT;
            running[owner_of[i]]--;
            uint64_t took_ns = kvk_random_below(&random, 400 * US);
            now_ns += took_ns / 4;
            (void)kvk_fair_end(&fair, owner_of[i], took_ns, now_ns);
        } else if (kvk_random_chance(&random, 0.5)) {
            uint32_t waiting = 0;
            uint32_t first[OWNERS];
            memset(first, 0xff, sizeof(first));
            bool room = false;
            for (uint32_t j = 0; j < ITEMS; j++) {
                waiting += state[j] == WAITS ? 1 : 0;
                uint32_t owner = owner_of[j];
                if (state[j] == WAITS) {
                    room = room || running[owner] < 2;
                    if (first[owner] == UINT32_MAX || came[j] < came[first[owner]]) {
                        first[owner] = j;
                    }
                }
            }
            cr_assert_eq(fair.waiting_count, waiting);
            struct kvk_fair_item *item = kvk_fair_take(&fair, now_ns);
            for (int again = 0; again < 100 && item == NULL && room; again++) {
                uint64_t ready_ns = kvk_fair_ready_ns(&fair);
                cr_assert(share_percent < 100);
                if (ready_ns == 0) {
                    break; /* of others, who have as many taken as they may */
                }
                cr_assert(ready_ns > now_ns && ready_ns <= now_ns + 10 * KVK_NS_PER_MS);
                now_ns = ready_ns;
                item = kvk_fair_take(&fair, now_ns);
            }
            cr_assert(share_percent < 100 ? item == NULL || room : (item != NULL) == room);
            if (item != NULL) {
                uint32_t taken = (uint32_t)(item - items);
                cr_assert_eq(first[owner_of[taken]], taken);
                cr_assert(running[owner_of[taken]]++ < 2);
                state[taken] = RUNS;
            }
        }
    }
    for (uint32_t i = 0; i < ITEMS; i++) {
        if (state[i] == RUNS) {
            (void)kvk_fair_end(&fair, owner_of[i], 1, now_ns);
        }
    }
    drain();
}

Test(server_fair, random_traffic_loses_nothing)
{
    run_random_traffic(100);
}

Test(server_fair, random_traffic_loses_nothing_at_a_pace)
{
    run_random_traffic(50);
}

/* ---- Paces ---- */

/* The part of a second, in percent, that an owner with a backlog had, while others come as often as
 * that (0: never). */
static unsigned busy_percent(uint32_t share_percent, uint64_t others_every_ns, uint32_t other)
{
    static struct kvk_fair_item backlog[64], single;
    begin(1);
    kvk_fair_pace(&fair, share_percent, OWNERS - 1);
    for (uint32_t i = 0; i < 64; i++) {
        kvk_fair_add(&fair, &backlog[i], 0, now_ns);
    }
    uint64_t end_ns = now_ns + KVK_NS_PER_SECOND;
    uint64_t busy_ns = 0;
    uint64_t next_ns = others_every_ns > 0 ? now_ns : UINT64_MAX;
    uint64_t came_ns = 0;
    while (now_ns < end_ns) {
        if (now_ns >= next_ns) {
            kvk_fair_add(&fair, &single, other, now_ns);
            came_ns = now_ns;
            next_ns = now_ns + others_every_ns;
        }
        struct kvk_fair_item *item = kvk_fair_take(&fair, now_ns);
        if (item == NULL) {
            uint64_t ready_ns = kvk_fair_ready_ns(&fair);
            cr_assert_gt(ready_ns, now_ns);
            now_ns = ready_ns < next_ns ? ready_ns : next_ns;
            continue;
        }
        uint64_t took_ns = item == &single ? US : 200 * US;
        cr_assert(item != &single || now_ns <= came_ns + 400 * US, "held back: %llu ns",
                  (unsigned long long)(now_ns - came_ns));
        now_ns += took_ns;
        (void)kvk_fair_end(&fair, item->owner, took_ns, now_ns);
        if (item != &single) {
            busy_ns += took_ns;
            kvk_fair_add(&fair, item, 0, now_ns);
        }
    }
    drain();
    return (unsigned)(busy_ns * 100 / KVK_NS_PER_SECOND);
}

Test(server_fair, a_share_is_kept_while_others_come)
{
    cr_expect_eq(busy_percent(50, 0, 1), 100, "alone");
    unsigned half = busy_percent(50, 5 * KVK_NS_PER_MS, 1);
    cr_expect(half >= 48 && half <= 51, "%u", half);
    unsigned quarter = busy_percent(25, 5 * KVK_NS_PER_MS, 1);
    cr_expect(quarter >= 23 && quarter <= 26, "%u", quarter);
    cr_expect_geq(busy_percent(100, 5 * KVK_NS_PER_MS, 1), 99, "nobody is held back");
    cr_expect_geq(busy_percent(50, 5 * KVK_NS_PER_MS, OWNERS - 1), 99, "nobody's calls");
    unsigned seldom = busy_percent(50, 400 * KVK_NS_PER_MS, 1);
    cr_expect(seldom > 80, "only for a tenth of a second after each: %u", seldom);
}

Test(server_fair, held_back_for_a_while_and_no_longer)
{
    static struct kvk_fair_item mine, other;
    begin(1);
    kvk_fair_pace(&fair, 50, UINT32_MAX);
    kvk_fair_hold(&fair, 0, 3 * KVK_NS_PER_MS, now_ns);
    kvk_fair_add(&fair, &mine, 0, now_ns);
    cr_expect_eq(serve(US), 0, "nobody else comes");
    kvk_fair_add(&fair, &other, 1, now_ns);
    cr_expect_eq(serve(US), 1);
    kvk_fair_add(&fair, &mine, 0, now_ns);
    cr_expect_eq(serve(US), UINT32_MAX);
    cr_expect_eq(fair.paced_count, 1);
    uint64_t ready_ns = kvk_fair_ready_ns(&fair);
    cr_expect(ready_ns > now_ns + 2 * KVK_NS_PER_MS && ready_ns < now_ns + 4 * KVK_NS_PER_MS);
    now_ns = ready_ns;
    cr_expect_eq(serve(US), 0);
    kvk_fair_hold(&fair, 0, UINT64_MAX, now_ns);
    kvk_fair_add(&fair, &mine, 0, now_ns);
    cr_expect_eq(serve(US), UINT32_MAX);
    cr_expect_eq(kvk_fair_ready_ns(&fair), now_ns + 10 * KVK_NS_PER_MS, "bounded");
    now_ns = kvk_fair_ready_ns(&fair);
    cr_expect_eq(serve(US), 0);
    drain();
}

/* ---- Through a server ---- */

#define WORK_MS 5
#define WORKS 40
#define TRIES 50
#define LONG_BYTES 5000
#define HOLD_MS 5

static struct fixture fixture;
static struct client noisy, quiet;
static atomic_uint worked, worked_at_echo;
static atomic_uint long_inline, long_apart;
static atomic_bool noted;

/* The first connection is the noisy owner's, the second the quiet one's. */
static enum kvk_status owner_of_call(struct kvk_call *call, void *user_data, uint32_t *owner,
                                     struct kvk_error *error)
{
    (void)user_data;
    *owner = (uint32_t)kvk_call_peer(call)->connection_id - 1;
    if (*owner > 1) {
        return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "who", "nobody knows");
    }
    kvk_call_set_caller(call, &fixture);
    return KVK_OK;
}

static void work(struct kvk_call *call, void *user_data)
{
    cr_assert(kvk_call_caller(call) == user_data);
    usleep(WORK_MS * 1000);
    atomic_fetch_add(&worked, 1);
    kvk_call_reply(call);
}

static void note(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    atomic_store(&worked_at_echo, atomic_load(&worked));
    atomic_store(&noted, true);
    kvk_call_reply(call);
}

/* Refused, and what its owner has sent on is to wait. */
static void refuse(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    struct kvk_error error;
    (void)kvk_fail(&error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "not now");
    atomic_fetch_add(&worked, 1);
    kvk_call_hold_owner(call, HOLD_MS * KVK_NS_PER_MS);
    kvk_call_fail(call, &error);
}

/* On the look-up thread it says so; elsewhere it does not end before the note was taken. */
static void long_work(struct kvk_call *call, void *user_data)
{
    char name[16] = "";
    (void)user_data;
    (void)pthread_getname_np(pthread_self(), name, sizeof(name));
    bool on_lookup = strcmp(name, "kvk-lookup") == 0;
    atomic_fetch_add(on_lookup ? &long_inline : &long_apart, 1);
    for (int ms = 0; !on_lookup && !atomic_load(&noted) && ms < 20000; ms++) {
        usleep(1000);
    }
    atomic_fetch_add(&worked, 1);
    kvk_call_reply(call);
}

static void server_begin(uint32_t calls_max)
{
    const struct kvk_method methods[] = {
        {"/t/Work", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 64, 0, work, &fixture, 0},
        {"/t/WorkBulk", KVK_METHOD_UNARY, KVK_CLASS_BULK, 64, 0, work, &fixture, 0},
        {"/t/Note", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 4, 0, note, &fixture, 0},
        {"/t/NoteBulk", KVK_METHOD_UNARY, KVK_CLASS_BULK, 4, 0, note, &fixture, 0},
        {"/t/Refuse", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 64, 0, refuse, &fixture, 0},
        {"/t/Long", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 4, 0, long_work, &fixture, LONG_BYTES},
    };
    struct kvk_error error;
    struct client_result result;
    fixture_init(&fixture, "fair");
    fixture.options.call_owner = owner_of_call;
    fixture.options.owner_count = 2;
    fixture.options.owner_calls_max = calls_max;
    fixture.options.owner_threads_max = 1;
    fixture.options.bulk_threads = 2;
    cr_assert_eq(kvk_server_create(&fixture.options, methods, 6, &fixture.server, &error), KVK_OK);
    cr_assert_eq(kvk_server_start(fixture.server, &error), KVK_OK);
    client_open(&noisy, fixture.target);
    client_unary(&noisy, "/t/Note", "", 0, NULL, 10000, &result);
    cr_assert_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
    client_open(&quiet, fixture.target);
    client_unary(&quiet, "/t/Note", "", 0, NULL, 10000, &result);
    cr_assert_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
}

static void server_end(void)
{
    client_close(&noisy);
    client_close(&quiet);
    fixture_finish(&fixture);
}

static void calls_begin(struct client_stream *calls, const char *path, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        cr_assert(client_stream_open(&calls[i], &noisy, path, 20000));
        cr_assert(client_stream_send(&calls[i], "", 0));
        cr_assert(client_stream_half_close(&calls[i]));
    }
}

static uint32_t calls_end(struct client_stream *calls, uint32_t count)
{
    uint32_t good = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct client_result result;
        uint8_t *bytes = NULL;
        size_t size;
        (void)client_stream_receive(&calls[i], &bytes, &size);
        free(bytes);
        client_stream_end(&calls[i], &result);
        good += result.code == GRPC_STATUS_OK ? 1 : 0;
    }
    return good;
}

/* How many of the noisy one's calls went before the quiet one's. */
static uint32_t went_before(const char *work_path, const char *note_path)
{
    static struct client_stream calls[WORKS];
    struct client_result result;
    atomic_store(&worked, 0);
    calls_begin(calls, work_path, WORKS);
    cr_assert(fixture_wait(&worked, 2));
    client_unary(&quiet, note_path, "", 0, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
    uint32_t before = atomic_load(&worked_at_echo);
    cr_expect_eq(calls_end(calls, WORKS), WORKS);
    return before;
}

/* Served in the order that they came it would be after all of them, always. On a machine that is
 * busy the quiet call itself may come late: then once more. */
static void expect_quiet_goes_first(const char *work_path, const char *note_path)
{
    uint32_t before = WORKS;
    server_begin(1000);
    for (uint32_t i = 0; i < TRIES && before > WORKS / 2; i++) {
        before = went_before(work_path, note_path);
    }
    cr_expect_leq(before, WORKS / 2, "after %u calls of the noisy one", before);
    server_end();
}

Test(server_fair, a_quiet_owner_is_served_before_a_backlog, .timeout = 280)
{
    expect_quiet_goes_first("/t/Work", "/t/Note");
}

Test(server_fair, a_bulk_thread_is_left_for_others, .timeout = 280)
{
    expect_quiet_goes_first("/t/WorkBulk", "/t/NoteBulk");
}

static void quiet_notes(void)
{
    struct client_result result;
    client_unary(&quiet, "/t/Note", "", 0, NULL, 20000, &result);
    cr_assert_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
}

/* A long call is in flight, and cannot end before a short one of another owner was answered. */
Test(server_fair, a_short_call_is_answered_while_a_long_one_runs, .timeout = 60)
{
    static const uint8_t message[LONG_BYTES];
    struct client_stream calls[2];
    server_begin(1000);
    quiet_notes();
    atomic_store(&noted, false);
    for (uint32_t i = 0; i < 2; i++) { /* one just as long as that, one shorter */
        cr_assert(client_stream_open(&calls[i], &noisy, "/t/Long", 20000));
        cr_assert(client_stream_send(&calls[i], message, LONG_BYTES - i));
        cr_assert(client_stream_half_close(&calls[i]));
    }
    cr_assert(fixture_wait(&worked, 1));
    cr_expect_eq(atomic_load(&long_inline), 1, "the shorter");
    cr_assert(fixture_wait(&long_apart, 1));
    quiet_notes();
    cr_expect_eq(atomic_load(&worked_at_echo), 1);
    cr_expect_eq(calls_end(calls, 2), 2);
    cr_expect_eq(atomic_load(&worked), 2);
    server_end();
}

/* Alone it is where it is served soonest. */
Test(server_fair, a_long_call_stays_where_nobody_waits_for_it, .timeout = 60)
{
    static const uint8_t message[LONG_BYTES];
    struct client_result result;
    server_begin(1000);
    quiet_notes();
    usleep(200 * 1000);
    client_unary(&noisy, "/t/Long", message, LONG_BYTES, NULL, 20000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
    cr_expect_eq(atomic_load(&long_inline), 1);
    server_end();
}

/* Each refusal makes what comes behind it wait; the others' calls do not. */
Test(server_fair, who_is_refused_again_and_again_is_held_back, .timeout = 60)
{
    static struct client_stream calls[WORKS];
    uint32_t notes = 0;
    server_begin(1000);
    quiet_notes();
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    calls_begin(calls, "/t/Refuse", WORKS);
    while (atomic_load(&worked) < WORKS) {
        quiet_notes();
        notes++;
    }
    uint64_t took_ns = kvk_clock_now(kvk_clock_monotonic()) - begun_ns;
    cr_expect_geq(took_ns, WORKS * HOLD_MS / 2 * KVK_NS_PER_MS, "%llu",
                  (unsigned long long)took_ns);
    cr_expect_geq(notes, 2);
    cr_expect_eq(calls_end(calls, WORKS), 0);
    server_end();
}

Test(server_fair, over_its_calls_one_owner_is_refused_and_others_are_not, .timeout = 280)
{
    static struct client_stream calls[WORKS];
    struct client_result result;
    struct kvk_server_stats stats;
    uint32_t sent = 0;
    uint32_t good = 0;
    server_begin(10);
    /* Where they trickle in, on a busy machine, they may never be too many: then once more. */
    for (uint32_t i = 0; i < TRIES && good == sent; i++) {
        calls_begin(calls, "/t/Work", WORKS);
        client_unary(&quiet, "/t/Note", "", 0, NULL, 10000, &result);
        cr_expect_eq(result.code, GRPC_STATUS_OK, "%s", result.text);
        client_result_free(&result);
        sent += WORKS;
        good += calls_end(calls, WORKS);
    }
    kvk_server_stats(fixture.server, &stats);
    cr_expect_geq(good, 10);
    cr_expect_lt(good, sent);
    cr_expect_eq(stats.calls_of_one_refused, sent - good);
    cr_expect_eq(stats.calls_refused, sent - good);
    /* What it had is given back. */
    client_unary(&noisy, "/t/Note", "", 0, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    client_result_free(&result);
    server_end();
}

Test(server_fair, who_is_nobody_is_refused, .timeout = 280)
{
    struct client third;
    struct client_result result;
    server_begin(10);
    client_open(&third, fixture.target);
    client_unary(&third, "/t/Note", "", 0, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_UNAUTHENTICATED, "%s", result.text);
    client_result_free(&result);
    client_close(&third);
    server_end();
}
