/*
 * Sessions with real processes behind them: the side socket, what they map, and what waits for one
 * that may still write.
 */
#include "daemon/side_socket.h"

#include <dirent.h>
#include <stdio.h>

#include "tests/engine_house.h"
#include "tests/engine_worker.h"

#define BLOCK_BYTES 1024 /* of house_geometry() */
#define PAGE_BLOCK_BYTES 4096

/* ---- A house with a side socket ---- */

struct side_house {
    struct house house;
    struct kvk_side_socket *side;
    char path[108];
    uint64_t space_id;
};

static void side_start(struct side_house *side, uint64_t device_bytes, uint64_t host_bytes,
                       uint32_t connections)
{
    const struct house_options options = {
        .device_bytes = device_bytes, .host_bytes = host_bytes, .threads = true};

    house_init(&side->house);
    house_start(&side->house, &options);
    (void)snprintf(side->path, sizeof(side->path), "/tmp/kvkeep-test-%d.side", (int)getpid());
    cr_assert_eq(kvk_side_socket_create(side->house.cache, side->path, 0600, connections,
                                        &side->side, &side->house.error),
                 KVK_OK, "%s", side->house.error.text);
    side->space_id = house_space(&side->house, "model");
}

static void side_stop(struct side_house *side)
{
    kvk_side_socket_destroy(side->side);
    house_stop(&side->house);
}

static struct kvk_hello worker_hello(const struct worker *worker)
{
    return (struct kvk_hello){.local = true,
                              .pid = (int32_t)worker->pid,
                              .uid = (uint32_t)geteuid(),
                              .pidfd = worker->pidfd};
}

/* A worker with a session and a bound side socket. */
static struct kvk_welcome worker_join(struct side_house *side, const struct worker *worker)
{
    const struct kvk_hello hello = worker_hello(worker);
    struct kvk_welcome welcome = house_begin(&side->house, &hello);
    cr_assert_eq(worker_send_token(worker, 'b', side->path, welcome.side_token), 0);
    return welcome;
}

static enum kvk_status try_map(struct side_house *side, uint64_t session_id, enum kvk_tier tier,
                               bool read_only, struct kvk_map_reply *reply)
{
    const struct kvk_map_request request = {.session_id = session_id,
                                            .kind = KVK_MAP_SLOTS,
                                            .space_id = side->space_id,
                                            .tier = tier,
                                            .read_only = read_only};
    return kvk_session_map(side->house.cache, &side->house.caller, &request, reply,
                           &side->house.error);
}

/* The worker maps the slots of the space. */
static struct kvk_map_reply worker_map_slots(struct side_house *side, const struct worker *worker,
                                             uint64_t session_id, enum kvk_tier tier,
                                             bool read_only)
{
    struct kvk_map_reply reply;

    cr_assert_eq(try_map(side, session_id, tier, read_only, &reply), KVK_OK, "%s",
                 side->house.error.text);
    cr_assert_eq(worker_send_token(worker, 't', side->path, reply.map_token), 0);
    cr_assert_eq(
        worker_say(worker, 'm', reply.size_bytes, read_only ? PROT_READ : PROT_READ | PROT_WRITE),
        0);
    return reply;
}

/* Wait until so many bytes are bound: what a dead worker had is back within a second. */
static void wait_bound(struct house *house, enum kvk_tier tier, uint64_t bytes)
{
    for (uint64_t ms = 0; ms < promised_ms(1000); ms++) {
        if (house_bound(house, tier) == bytes) {
            return;
        }
        house_sleep_ms(1);
    }
    cr_expect_eq(house_bound(house, tier), bytes, "%llu bytes bound after a second, not %llu",
                 (unsigned long long)house_bound(house, tier), (unsigned long long)bytes);
}

static uint32_t session_count(struct house *house)
{
    kvk_lock(&house->cache->lock);
    uint32_t count = house->cache->session_table.count;
    kvk_unlock(&house->cache->lock);
    return count;
}

static void wait_sessions(struct house *house, uint32_t count)
{
    for (uint64_t ms = 0; ms < promised_ms(1000) && session_count(house) != count; ms++) {
        house_sleep_ms(1);
    }
    cr_expect_eq(session_count(house), count);
}

/* ---- The side socket ---- */

Test(engine_process, side_tokens_work_once)
{
    struct side_house side;
    struct worker worker = worker_start();
    struct worker other = worker_start();

    side_start(&side, 0, 1 << 20, 16);
    const struct kvk_hello hello = worker_hello(&worker);
    struct kvk_welcome welcome = house_begin(&side.house, &hello);
    struct kvk_map_reply reply;
    cr_expect_eq(try_map(&side, welcome.session_id, KVK_TIER_HOST, false, &reply),
                 KVK_PRECONDITION);
    cr_expect_eq(side.house.error.cause, KVK_CAUSE_NOT_MAPPED);

    /* Another process, though of the same user, does not get in with it. */
    cr_expect_eq(worker_send_token(&other, 'b', side.path, welcome.side_token), 1);
    uint8_t wrong[KVK_TOKEN_SIZE] = {0};
    cr_expect_eq(worker_send_token(&worker, 'b', side.path, wrong), 1);
    cr_expect_eq(worker_say(&worker, 'e', 0, 0), 0);
    cr_expect_eq(worker_send_token(&worker, 'b', side.path, welcome.side_token), 0);
    cr_expect_eq(worker_send_token(&worker, 'b', side.path, welcome.side_token), 1);

    cr_assert_eq(try_map(&side, welcome.session_id, KVK_TIER_HOST, false, &reply), KVK_OK);
    worker_kill(&other);
    worker_kill(&worker);
    kvk_session_end(side.house.cache, welcome.session_id);
    wait_sessions(&side.house, 0);
    side_stop(&side);
}

Test(engine_process, map_tokens_work_once)
{
    struct side_house side;
    struct worker worker = worker_start();
    struct worker other = worker_start();

    side_start(&side, 0, 1 << 20, 16);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    (void)worker_join(&side, &other);
    struct kvk_map_reply reply;
    cr_assert_eq(try_map(&side, welcome.session_id, KVK_TIER_HOST, false, &reply), KVK_OK);
    cr_expect_eq(worker_send_token(&other, 't', side.path, reply.map_token), 1);
    cr_expect_eq(worker_send_token(&worker, 't', side.path, reply.map_token), 0);
    cr_expect_eq(worker_send_token(&worker, 't', side.path, reply.map_token), 1);

    /* Sixteen wrong ones and the connection is closed. */
    for (int i = 1; i < 15; i++) {
        cr_expect_eq(worker_send_token(&worker, 't', side.path, reply.map_token), 1);
    }
    cr_expect_eq(worker_send_token(&worker, 't', side.path, reply.map_token), 1);
    cr_expect_eq(worker_send_token(&worker, 't', side.path, reply.map_token), -1);
    worker_kill(&worker);
    worker_kill(&other);
    side_stop(&side);
}

/* Tokens that are not used in 60 s are good for nothing, and their mappings go. */
Test(engine_process, tokens_expire)
{
    struct house house;
    uint64_t session_id = 0;
    int pidfd = -1;
    int fds[2];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20, .manual_clock = true});
    uint64_t space_id = house_space(&house, "model");
    const struct kvk_hello hello = house_hello();
    struct kvk_welcome late = house_begin(&house, &hello);
    uint64_t now = kvk_clock_now(&house.manual.clock);
    kvk_clock_manual_set(&house.manual, now + 60 * KVK_NS_PER_SECOND);
    cr_expect_eq(kvk_side_bind(house.cache, late.side_token, (int32_t)getpid(), (uint32_t)geteuid(),
                               &session_id, &pidfd),
                 KVK_NOT_FOUND);

    struct kvk_welcome welcome = house_begin(&house, &hello);
    kvk_clock_manual_set(&house.manual, now + 119 * KVK_NS_PER_SECOND);
    cr_expect_eq(kvk_side_bind(house.cache, welcome.side_token, (int32_t)getpid() + 1,
                               (uint32_t)geteuid(), &session_id, &pidfd),
                 KVK_PERMISSION);
    cr_expect_eq(kvk_side_bind(house.cache, welcome.side_token, (int32_t)getpid(),
                               (uint32_t)geteuid() + 1, &session_id, &pidfd),
                 KVK_PERMISSION);
    cr_assert_eq(kvk_side_bind(house.cache, welcome.side_token, (int32_t)getpid(),
                               (uint32_t)geteuid(), &session_id, &pidfd),
                 KVK_OK);
    cr_expect_eq(session_id, welcome.session_id);
    cr_expect(pidfd >= 0);
    (void)close(pidfd);

    struct kvk_map_reply reply;
    const struct kvk_map_request request = {.session_id = session_id,
                                            .kind = KVK_MAP_SLOTS,
                                            .space_id = space_id,
                                            .tier = KVK_TIER_HOST};
    cr_assert_eq(kvk_session_map(house.cache, &house.caller, &request, &reply, &house.error),
                 KVK_OK, "%s", house.error.text);
    cr_expect_eq(reply.slot_stride, BLOCK_BYTES);
    cr_expect_geq(reply.slot_count, 1024);
    kvk_clock_manual_set(&house.manual, now + 179 * KVK_NS_PER_SECOND);
    cr_expect_eq(kvk_side_take(house.cache, session_id, reply.map_token, fds), KVK_NOT_FOUND);
    kvk_cache_maintain(house.cache);
    kvk_lock(&house.cache->lock);
    struct kvk_session *session = NULL;
    cr_assert_eq(kvk_session_find(house.cache, &house.caller, session_id, &session, &house.error),
                 KVK_OK);
    cr_expect_null(session->mappings);
    kvk_unlock(&house.cache->lock);
    kvk_side_closed(house.cache, session_id);
    house_stop(&house);
}

/* Where it is not said which tier: the one where sequences begin. */
Test(engine_process, maps_are_of_the_tier_where_sequences_begin)
{
    const uint64_t sizes[][2] = {{1 << 20, 1 << 20}, {1 << 20, 0}, {0, 1 << 20}};
    const int tiers[] = {KVK_TIER_DEVICE, KVK_TIER_DEVICE, KVK_TIER_HOST};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct side_house side;
        struct worker worker = worker_start();
        struct kvk_map_reply reply;
        side_start(&side, sizes[i][0], sizes[i][1], 16);
        struct kvk_welcome welcome = worker_join(&side, &worker);
        struct kvk_map_request request = {.session_id = welcome.session_id,
                                          .kind = KVK_MAP_SLOTS,
                                          .space_id = side.space_id,
                                          .tier = -1};
        cr_assert_eq(kvk_session_map(side.house.cache, &side.house.caller, &request, &reply,
                                     &side.house.error),
                     KVK_OK, "%s", side.house.error.text);
        cr_expect_eq(reply.tier, tiers[i], "case %zu", i);
        request.kind = KVK_MAP_SCRATCH;
        request.size_bytes = 4096;
        cr_assert_eq(kvk_session_map(side.house.cache, &side.house.caller, &request, &reply,
                                     &side.house.error),
                     KVK_OK, "%s", side.house.error.text);
        cr_expect_eq(reply.tier, -1, "it has none");
        worker_kill(&worker);
        kvk_session_end(side.house.cache, welcome.session_id);
        wait_sessions(&side.house, 0);
        side_stop(&side);
    }
}

Test(engine_process, maps_are_checked)
{
    struct side_house side;
    struct worker worker = worker_start();
    struct kvk_map_reply reply;

    side_start(&side, 0, 1 << 20, 16);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    struct kvk_map_request good = {.session_id = welcome.session_id,
                                   .kind = KVK_MAP_SLOTS,
                                   .space_id = side.space_id,
                                   .tier = KVK_TIER_HOST};
    const struct {
        struct kvk_map_request request;
        enum kvk_status status;
        const char *field;
    } wrong[] = {
        {{.kind = (enum kvk_map_kind)7}, KVK_INVALID, "kind"},
        {{.kind = KVK_MAP_SLOTS, .space_id = 1}, KVK_NOT_FOUND, "space_id"},
        {{.kind = KVK_MAP_SLOTS, .space_id = good.space_id, .group = 1}, KVK_INVALID, "group"},
        {{.kind = KVK_MAP_SLOTS, .space_id = good.space_id, .rank = 1}, KVK_INVALID, "rank"},
        {{.kind = KVK_MAP_SLOTS, .space_id = good.space_id, .tier = (enum kvk_tier)2},
         KVK_INVALID,
         "tier"},
        {{.kind = KVK_MAP_SLOTS, .space_id = good.space_id, .tier = KVK_TIER_DEVICE},
         KVK_PRECONDITION,
         "tier"},
        {{.kind = KVK_MAP_SCRATCH, .size_bytes = 0}, KVK_INVALID, "size_bytes"},
        {{.kind = KVK_MAP_SCRATCH, .size_bytes = UINT64_MAX}, KVK_INVALID, "size_bytes"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct kvk_map_request request = wrong[i].request;
        request.session_id = welcome.session_id;
        cr_expect_eq(kvk_session_map(side.house.cache, &side.house.caller, &request, &reply,
                                     &side.house.error),
                     wrong[i].status, "case %zu", i);
        cr_expect_str_eq(side.house.error.field, wrong[i].field);
    }
    good.session_id++;
    cr_expect_eq(
        kvk_session_map(side.house.cache, &side.house.caller, &good, &reply, &side.house.error),
        KVK_NOT_FOUND);

    /* Mappings of one session are bounded. */
    good.session_id = welcome.session_id;
    enum kvk_status status = KVK_OK;
    uint32_t count = 0;
    while (status == KVK_OK && count < 2000) {
        status =
            kvk_session_map(side.house.cache, &side.house.caller, &good, &reply, &side.house.error);
        count++;
    }
    cr_expect_eq(status, KVK_EXHAUSTED);
    cr_expect_eq(count, 1025);
    worker_kill(&worker);
    kvk_session_end(side.house.cache, welcome.session_id);
    wait_sessions(&side.house, 0);
    side_stop(&side);
}

/* A file that a process may only read cannot be written by any way that its descriptor offers, and
 * none can be cut short or grown. */
Test(engine_process, read_only_is_read_only)
{
    struct side_house side;
    struct worker worker = worker_start();

    side_start(&side, 0, 1 << 20, 16);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    struct kvk_map_reply reply =
        worker_map_slots(&side, &worker, welcome.session_id, KVK_TIER_HOST, true);
    cr_expect_eq(worker_say(&worker, 'p', 0, 0), -EACCES);
    cr_expect_eq(worker_say(&worker, 'm', reply.size_bytes, PROT_READ | PROT_WRITE), -EACCES);
    cr_expect_eq(worker_say(&worker, 'o', 0, 0), -EBADF);
    cr_expect_neq(worker_say(&worker, 'f', 0, 0), 0);
    /* Generations are never writable. */
    cr_expect_eq(worker_say(&worker, 'g', 4096, PROT_READ | PROT_WRITE), -EACCES);
    cr_expect_eq(worker_say(&worker, 'g', 4096, PROT_READ), 0);
    cr_expect_eq(worker_say(&worker, 'p', 0, 0), -EACCES);
    cr_expect_eq(worker_say(&worker, 'o', 1, 0), -EBADF);

    /* Nor does a writable one give the size away. */
    reply = worker_map_slots(&side, &worker, welcome.session_id, KVK_TIER_HOST, false);
    cr_expect_eq(worker_say(&worker, 'f', 0, 0), -EPERM);
    cr_expect_eq(worker_say(&worker, 'f', 0, reply.size_bytes * 2), -EPERM);
    worker_kill(&worker);
    side_stop(&side);
}

/* What a worker writes through its mapping is what others read. */
Test(engine_process, mapped_bytes_are_the_blocks)
{
    struct side_house side;
    struct worker worker = worker_start();
    uint32_t tokens[8];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;

    side_start(&side, 0, 1 << 20, 16);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    struct kvk_map_reply map =
        worker_map_slots(&side, &worker, welcome.session_id, KVK_TIER_HOST, false);
    house_tokens(tokens, 8, 1);
    struct kvk_sequence_reply sequence =
        house_open(&side.house, welcome.session_id, side.space_id, tokens, 8);
    cr_assert_eq(kvk_sequence_get(side.house.cache, &side.house.caller, welcome.session_id,
                                  sequence.sequence_id, &reply, &tables, &side.house.error),
                 KVK_OK);
    cr_assert_eq(tables.part_count, 1);
    uint64_t at = tables.parts[0].slots[1] * map.slot_stride;
    cr_expect_eq(worker_say(&worker, 'w', at + 7, 99), 0);
    house_seal(&side.house, welcome.session_id, sequence.sequence_id, 8);
    const struct kvk_read_request request = {
        .session_id = welcome.session_id, .sequence_id = sequence.sequence_id, .block = 1};
    const uint8_t *data = NULL;
    uint64_t size_bytes = 0;
    struct kvk_read_handle handle;
    cr_assert_eq(kvk_read_begin(side.house.cache, &side.house.caller, &request, &data, &size_bytes,
                                &handle, &side.house.error),
                 KVK_OK, "%s", side.house.error.text);
    cr_expect_eq(data[7], 99);
    kvk_read_end(side.house.cache, &handle);
    kvk_tables_finish(&tables);
    worker_kill(&worker);
    kvk_session_end(side.house.cache, welcome.session_id);
    side_stop(&side);
}

/* ---- Quarantine ---- */

/* A worker that mapped its slots and has granted, unsealed blocks. */
struct writer {
    struct worker worker;
    struct kvk_welcome welcome;
    struct kvk_map_reply map;
    struct kvk_sequence_reply sequence;
    uint32_t slot; /* of its second block, unsealed */
};

static void writer_start(struct side_house *side, struct writer *writer, enum kvk_tier tier)
{
    uint32_t tokens[12];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;

    writer->worker = worker_start();
    writer->welcome = worker_join(side, &writer->worker);
    writer->map = worker_map_slots(side, &writer->worker, writer->welcome.session_id, tier, false);
    house_tokens(tokens, 12, 1);
    writer->sequence =
        house_open(&side->house, writer->welcome.session_id, side->space_id, tokens, 12);
    /* One of three blocks is sealed. */
    cr_assert_eq(house_try_seal(&side->house, writer->welcome.session_id,
                                writer->sequence.sequence_id, 12, 4),
                 KVK_OK);
    cr_assert_eq(kvk_sequence_get(side->house.cache, &side->house.caller,
                                  writer->welcome.session_id, writer->sequence.sequence_id, &reply,
                                  &tables, &side->house.error),
                 KVK_OK);
    writer->slot = tables.parts[0].slots[1];
    kvk_tables_finish(&tables);
}

/* A worker whose connection was cut but which lives on writes into nobody's slots. */
Test(engine_process, a_lost_connection_is_not_a_dead_writer)
{
    struct side_house side;
    struct writer writer;
    uint32_t tokens[16 * 4];
    struct kvk_sequence_reply reply;

    side_start(&side, 0, 16 * BLOCK_BYTES, 16);
    writer_start(&side, &writer, KVK_TIER_HOST);
    kvk_session_end(side.house.cache, writer.welcome.session_id);
    /* What is sealed may be evicted; what is not waits. */
    cr_expect_eq(house_bound(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    cr_expect_eq(house_quarantine(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    kvk_cache_check(side.house.cache);

    uint64_t other = house_session(&side.house);
    house_tokens(tokens, 64, 1000);
    cr_expect_eq(house_try_open(&side.house, other, side.space_id, tokens, 64, &reply),
                 KVK_EXHAUSTED);
    cr_expect_eq(side.house.error.cause, KVK_CAUSE_QUARANTINE, "%s", side.house.error.text);
    struct kvk_sequence_reply filled = house_open(&side.house, other, side.space_id, tokens, 56);
    kvk_lock(&side.house.cache->lock);
    const struct kvk_space *space = side.house.cache->spaces;
    uint8_t *memory = space->groups[0]->tiers[KVK_TIER_HOST].regions[0].address;
    kvk_unlock(&side.house.cache->lock);
    memset(memory + (size_t)writer.slot * BLOCK_BYTES, 0, BLOCK_BYTES);

    /* It writes all over its slot, late. */
    for (uint64_t i = 0; i < 64; i++) {
        cr_expect_eq(
            worker_say(&writer.worker, 'w', writer.slot * writer.map.slot_stride + i, 0xee), 0);
    }
    cr_expect_eq(memory[(size_t)writer.slot * BLOCK_BYTES], 0xee);
    struct kvk_tables tables = {.part_count = 0};
    cr_assert_eq(kvk_sequence_get(side.house.cache, &side.house.caller, other, filled.sequence_id,
                                  &reply, &tables, &side.house.error),
                 KVK_OK);
    for (uint32_t i = 0; i < tables.parts[0].count; i++) {
        cr_expect_neq(tables.parts[0].slots[i], writer.slot);
    }
    kvk_tables_finish(&tables);
    house_close(&side.house, other, filled.sequence_id);

    worker_kill(&writer.worker);
    wait_bound(&side.house, KVK_TIER_HOST, 0);
    cr_expect_eq(house_quarantine(&side.house, KVK_TIER_HOST), 0);
    wait_sessions(&side.house, 1);
    filled = house_open(&side.house, other, side.space_id, tokens, 64);
    house_close(&side.house, other, filled.sequence_id);
    side_stop(&side);
}

/* Killed in the middle of anything: all it held is free within a second, whoever is seen first,
 * the process or the stream. */
Test(engine_process, a_killed_writer_waits_for_nothing)
{
    struct side_house side;
    struct writer writer;

    side_start(&side, 0, 16 * BLOCK_BYTES, 16);
    for (int round = 0; round < 20; round++) {
        writer_start(&side, &writer, KVK_TIER_HOST);
        cr_expect_eq(house_bound(&side.house, KVK_TIER_HOST), 3 * BLOCK_BYTES);
        if (round % 2 == 0) {
            worker_kill(&writer.worker);
            kvk_session_end(side.house.cache, writer.welcome.session_id);
        } else {
            cr_assert_eq(kill(writer.worker.pid, SIGSTOP), 0);
            kvk_session_end(side.house.cache, writer.welcome.session_id);
            worker_kill(&writer.worker);
        }
        wait_bound(&side.house, KVK_TIER_HOST, 0);
        wait_sessions(&side.house, 0);
        cr_expect_eq(side.house.cache->instance_count, 0);
    }
    side_stop(&side);
}

/* It hangs up its side socket and lives on; and: it dies, but a child has inherited all. */
Test(engine_process, both_must_be_at_their_end)
{
    struct side_house side;
    struct writer writer;

    side_start(&side, 0, 16 * BLOCK_BYTES, 16);
    writer_start(&side, &writer, KVK_TIER_HOST);
    cr_expect_eq(worker_say(&writer.worker, 'c', 0, 0), 0);
    kvk_session_end(side.house.cache, writer.welcome.session_id);
    house_sleep_ms(50);
    kvk_cache_maintain(side.house.cache);
    cr_expect_eq(house_quarantine(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    worker_kill(&writer.worker);
    wait_bound(&side.house, KVK_TIER_HOST, 0);

    writer_start(&side, &writer, KVK_TIER_HOST);
    pid_t heir = (pid_t)worker_say(&writer.worker, 'y', 0, 0);
    cr_assert(heir > 0);
    kvk_session_end(side.house.cache, writer.welcome.session_id);
    worker_kill(&writer.worker);
    house_sleep_ms(50);
    kvk_cache_maintain(side.house.cache);
    cr_expect_eq(house_quarantine(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    cr_assert_eq(kill(heir, SIGKILL), 0);
    wait_bound(&side.house, KVK_TIER_HOST, 0);
    wait_sessions(&side.house, 0);
    side_stop(&side);
}

/* Only what it can write waits: nothing where it mapped another tier, or read-only. */
Test(engine_process, readers_do_not_hold_up_blocks)
{
    struct side_house side;
    uint32_t tokens[12];

    side_start(&side, 16 * BLOCK_BYTES, 16 * BLOCK_BYTES, 16);
    house_tokens(tokens, 12, 1);
    for (int round = 0; round < 2; round++) {
        struct worker worker = worker_start();
        struct kvk_welcome welcome = worker_join(&side, &worker);
        (void)worker_map_slots(&side, &worker, welcome.session_id,
                               round == 0 ? KVK_TIER_DEVICE : KVK_TIER_HOST, round == 0);
        (void)house_open(&side.house, welcome.session_id, side.space_id, tokens, 12);
        cr_expect_eq(house_bound(&side.house, KVK_TIER_DEVICE), 3 * BLOCK_BYTES);
        kvk_session_end(side.house.cache, welcome.session_id);
        cr_expect_eq(house_bound(&side.house, KVK_TIER_DEVICE), 0);
        worker_kill(&worker);
        wait_sessions(&side.house, 0);
    }
    side_stop(&side);
}

/* A process without a side connection any more is looked at by maintenance. */
Test(engine_process, maintenance_looks_at_processes)
{
    struct house house;
    uint64_t session_id = 0;
    int pidfd = -1;
    int fds[2];
    uint32_t tokens[12];
    struct worker worker = worker_start();

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    uint64_t space_id = house_space(&house, "model");
    const struct kvk_hello hello = worker_hello(&worker);
    struct kvk_welcome welcome = house_begin(&house, &hello);
    cr_assert_eq(kvk_side_bind(house.cache, welcome.side_token, (int32_t)worker.pid,
                               (uint32_t)geteuid(), &session_id, &pidfd),
                 KVK_OK);
    (void)close(pidfd);
    struct kvk_map_reply reply;
    const struct kvk_map_request request = {.session_id = session_id,
                                            .kind = KVK_MAP_SLOTS,
                                            .space_id = space_id,
                                            .tier = KVK_TIER_HOST};
    cr_assert_eq(kvk_session_map(house.cache, &house.caller, &request, &reply, &house.error),
                 KVK_OK);
    cr_assert_eq(kvk_side_take(house.cache, session_id, reply.map_token, fds), KVK_OK);
    (void)close(fds[0]);
    (void)close(fds[1]);
    house_tokens(tokens, 12, 1);
    (void)house_open(&house, session_id, space_id, tokens, 12);
    kvk_side_closed(house.cache, session_id);
    kvk_session_end(house.cache, session_id);
    kvk_cache_maintain(house.cache);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 3 * BLOCK_BYTES);
    worker_kill(&worker);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 3 * BLOCK_BYTES);
    kvk_cache_maintain(house.cache);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 0);
    cr_expect_eq(session_count(&house), 0);
    house_stop(&house);
}

/* The daemon ends while processes live: nothing is left behind, and they see zeros. */
Test(engine_process, the_daemon_ends_first)
{
    struct side_house side;
    struct writer writer;

    side_start(&side, 0, 16 * BLOCK_BYTES, 16);
    writer_start(&side, &writer, KVK_TIER_HOST);
    uint64_t at = writer.slot * writer.map.slot_stride;
    cr_expect_eq(worker_say(&writer.worker, 'w', at, 5), 0);
    cr_expect_eq(worker_say(&writer.worker, 'r', at, 0), 5);
    kvk_session_end(side.house.cache, writer.welcome.session_id);
    cr_expect_eq(house_quarantine(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    side_stop(&side);
    cr_expect_eq(worker_say(&writer.worker, 'r', at, 0), 0);
    worker_kill(&writer.worker);
}

/* Memory that cannot be revoked: a process that keeps its mapping after the room went to another
 * tenant sees none of that tenant's bytes and writes none of them, and what it faults in counts. */
Test(engine_process, a_kept_mapping_reaches_nobody_else)
{
    struct side_house side;
    struct writer writer;
    uint32_t tokens[64];
    struct kvk_config *config = &side.house.config;

    house_init(&side.house);
    config->tenants = calloc(2, sizeof(config->tenants[0]));
    config->credentials = calloc(2, sizeof(config->credentials[0]));
    config->tenant_count = 2;
    config->credential_count = 2;
    strcpy(config->tenants[0].name, "a");
    strcpy(config->tenants[1].name, "b");
    config->credentials[0] = (struct kvk_credential_config){
        .name = "a", .token = "credential-of-a-0", .tenants = {0}, .tenant_count = 1};
    config->credentials[1] = (struct kvk_credential_config){
        .name = "b", .token = "credential-of-b-0", .tenants = {1}, .tenant_count = 1};
    house_start(&side.house,
                &(struct house_options){.host_bytes = 16 * PAGE_BLOCK_BYTES, .threads = true});
    (void)snprintf(side.path, sizeof(side.path), "/tmp/kvkeep-test-%d.side", (int)getpid());
    cr_assert_eq(kvk_side_socket_create(side.house.cache, side.path, 0600, 16, &side.side,
                                        &side.house.error),
                 KVK_OK);
    struct kvk_caller a = house_caller_of(&side.house, "credential-of-a-0");
    struct kvk_caller b = house_caller_of(&side.house, "credential-of-b-0");
    struct kvk_geometry geometry = house_geometry();
    geometry.head_size_k = 32; /* a page a block, so that none is left behind at an edge */
    geometry.head_size_v = 32;
    side.house.caller = a;
    side.space_id = house_space_of(&side.house, &a, "model", &geometry, 1);
    writer_start(&side, &writer, KVK_TIER_HOST);
    uint64_t at = writer.slot * writer.map.slot_stride;
    cr_expect_eq(worker_say(&writer.worker, 'w', at, 77), 0);
    house_seal(&side.house, writer.welcome.session_id, writer.sequence.sequence_id, 12);
    house_close(&side.house, writer.welcome.session_id, writer.sequence.sequence_id);

    /* b takes all the room there is, and fills it. */
    side.house.caller = b;
    uint64_t space_b = house_space_of(&side.house, &b, "model", &geometry, 1);
    uint64_t session_b = house_session(&side.house);
    house_tokens(tokens, 64, 1);
    struct kvk_sequence_reply all = house_open(&side.house, session_b, space_b, tokens, 64);
    cr_expect_eq(all.cached_tokens, 0);
    kvk_lock(&side.house.cache->lock);
    const struct kvk_sequence *sequence =
        kvk_table_get(&side.house.cache->sequence_table, all.sequence_id);
    uint8_t *blocks[16];
    for (uint32_t i = 0; i < 16; i++) {
        const struct kvk_block *block =
            kvk_index_block(side.house.cache->index, sequence->groups[0].blocks[i]);
        blocks[i] = kvk_block_address(side.house.cache, block, KVK_TIER_HOST, 0);
    }
    kvk_unlock(&side.house.cache->lock);
    for (uint32_t i = 0; i < 16; i++) {
        memset(blocks[i], 0xbb, PAGE_BLOCK_BYTES);
    }
    for (uint64_t offset = 0; offset < 4 * writer.map.slot_stride; offset += 512) {
        cr_expect_eq(worker_say(&writer.worker, 'r', offset, 0), 0);
        cr_expect_eq(worker_say(&writer.worker, 'w', offset, 0xaa), 0);
    }
    for (uint32_t i = 0; i < 16; i++) {
        for (uint32_t j = 0; j < PAGE_BLOCK_BYTES; j++) {
            cr_assert_eq(blocks[i][j], 0xbb);
        }
    }
    house_seal(&side.house, session_b, all.sequence_id, 64);
    worker_kill(&writer.worker);
    kvk_session_end(side.house.cache, writer.welcome.session_id);
    wait_sessions(&side.house, 1);
    side_stop(&side);
}

/* A ticket outlives its lease and its session, until the process is gone. */
Test(engine_process, transfers_outlive_the_session)
{
    struct side_house side;
    struct worker worker = worker_start();
    uint32_t tokens[8];
    struct kvk_tables tables = {.part_count = 0};

    side_start(&side, 0, 16 * BLOCK_BYTES, 16);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    (void)worker_map_slots(&side, &worker, welcome.session_id, KVK_TIER_HOST, true);
    house_tokens(tokens, 8, 1);
    struct kvk_sequence_reply sequence =
        house_open(&side.house, welcome.session_id, side.space_id, tokens, 8);
    house_seal(&side.house, welcome.session_id, sequence.sequence_id, 8);
    house_close(&side.house, welcome.session_id, sequence.sequence_id);
    const struct kvk_pin_request pin = {.session_id = welcome.session_id,
                                        .space_id = side.space_id,
                                        .prompt = {.tokens = tokens, .token_count = 8},
                                        .ttl_ms = 1000,
                                        .copy_pin = true};
    struct kvk_pin_reply lease;
    cr_assert_eq(kvk_lease_pin(side.house.cache, &side.house.caller, &pin, &lease, &tables,
                               &side.house.error),
                 KVK_OK, "%s", side.house.error.text);
    const struct kvk_transfer_request transfer = {
        .session_id = welcome.session_id, .lease_id = lease.lease_id, .block_count = 2};
    uint64_t ticket = 0;
    cr_assert_eq(kvk_transfer_begin(side.house.cache, &side.house.caller, &transfer, &ticket,
                                    &tables, &side.house.error),
                 KVK_OK, "%s", side.house.error.text);
    kvk_tables_finish(&tables);
    kvk_session_end(side.house.cache, welcome.session_id);
    cr_expect_eq(house_bound(&side.house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    worker_kill(&worker);
    wait_bound(&side.house, KVK_TIER_HOST, 0);
    cr_expect_eq(house_cached(&side.house, side.space_id, tokens, 8), 8);
    wait_sessions(&side.house, 0);
    side_stop(&side);
}

/* ---- Scratch ---- */

Test(engine_process, scratch_memory)
{
    struct side_house side;
    struct worker worker = worker_start();
    uint64_t handle = 0;
    uint64_t other_handle = 0;

    side_start(&side, 0, 1 << 20, 16);
    side.house.config.scratch_bytes = 16384;
    struct kvk_welcome welcome = worker_join(&side, &worker);
    struct kvk_map_request request = {
        .session_id = welcome.session_id, .kind = KVK_MAP_SCRATCH, .size_bytes = 8192};
    struct kvk_map_reply reply;
    struct kvk_caller impatient = side.house.caller;
    impatient.may_block = false;
    cr_expect_eq(kvk_session_map(side.house.cache, &impatient, &request, &reply, &side.house.error),
                 KVK_WOULD_BLOCK);
    cr_assert_eq(
        kvk_session_map(side.house.cache, &side.house.caller, &request, &reply, &side.house.error),
        KVK_OK, "%s", side.house.error.text);
    cr_expect_eq(reply.size_bytes, 8192);
    cr_assert_eq(worker_send_token(&worker, 't', side.path, reply.map_token), 0);
    cr_assert_eq(worker_say(&worker, 'm', 8192, PROT_READ | PROT_WRITE), 0);
    cr_expect_eq(worker_say(&worker, 'w', 100, 42), 0);

    struct kvk_cache *cache = side.house.cache;
    uint64_t id = welcome.session_id;
    uint8_t *address = kvk_scratch_address(cache, id, reply.map_id, 100, 8092, &handle);
    cr_assert_not_null(address);
    cr_expect_eq(address[0], 42);
    cr_expect_null(kvk_scratch_address(cache, id, reply.map_id, 100, 8093, &other_handle));
    cr_expect_null(kvk_scratch_address(cache, id, reply.map_id, 8193, 0, &other_handle));
    cr_expect_null(kvk_scratch_address(cache, id, reply.map_id, UINT64_MAX, 2, &other_handle));
    cr_expect_null(kvk_scratch_address(cache, id, reply.map_id, 2, UINT64_MAX, &other_handle));
    cr_expect_null(kvk_scratch_address(cache, id, reply.map_id + 1, 0, 1, &other_handle));
    cr_expect_null(kvk_scratch_address(cache, id + 1, reply.map_id, 0, 1, &other_handle));

    /* All scratch of a session together is bounded. */
    request.size_bytes = 8193;
    cr_expect_eq(kvk_session_map(cache, &side.house.caller, &request, &reply, &side.house.error),
                 KVK_EXHAUSTED);
    request.size_bytes = 16385;
    cr_expect_eq(kvk_session_map(cache, &side.house.caller, &request, &reply, &side.house.error),
                 KVK_INVALID);

    /* In use, it outlives its session. */
    kvk_session_end(cache, id);
    address[0] = 43;
    cr_expect_eq(address[0], 43);
    cr_expect_eq(worker_say(&worker, 'r', 100, 0), 43);
    kvk_scratch_release(cache, handle);
    cr_expect_eq(worker_say(&worker, 'r', 100, 0), 0);
    worker_kill(&worker);
    side_stop(&side);
}

/* ---- Hostile peers ---- */

Test(engine_process, hostile_bytes_close_the_connection)
{
    struct side_house side;
    struct worker worker = worker_start();
    struct worker_command connect_command = {.code = 'k'};

    side_start(&side, 0, 1 << 20, 4);
    strcpy(connect_command.path, side.path);

    /* Noise of every size, a half message, nothing at all: closed within the second. */
    for (uint64_t size = 0; size <= 64; size = size == 0 ? 1 : size * 4) {
        cr_assert_eq(worker_do(&worker, &connect_command), 0);
        cr_expect_eq(worker_say(&worker, 's', 0, size), (int64_t)size);
        int64_t answer = worker_say(&worker, 'e', 0, 0);
        cr_expect(answer <= 1);
        if (answer == 1) {
            answer = worker_say(&worker, 'e', 0, 0);
        }
        cr_expect(answer <= 0, "%d", (int)answer);
        cr_expect_eq(worker_say(&worker, 'c', 0, 0), 0);
    }

    /* Silent connections fill all places; a second later an honest one gets in. */
    for (int i = 0; i < 8; i++) {
        cr_assert_eq(worker_do(&worker, &connect_command), 0);
    }
    house_sleep_ms(1300);
    struct kvk_welcome welcome = worker_join(&side, &worker);
    cr_expect_neq(welcome.session_id, 0);
    worker_kill(&worker);
    kvk_session_end(side.house.cache, welcome.session_id);
    wait_sessions(&side.house, 0);
    side_stop(&side);
}

Test(engine_process, a_file_in_the_way_stays)
{
    struct house house;
    struct kvk_side_socket *side = NULL;
    char path[108];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    (void)snprintf(path, sizeof(path), "/tmp/kvkeep-test-%d.file", (int)getpid());
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    (void)fclose(file);
    cr_expect_eq(kvk_side_socket_create(house.cache, path, 0600, 4, &side, &house.error),
                 KVK_UNAVAILABLE);
    cr_expect_eq(access(path, F_OK), 0);
    (void)unlink(path);
    cr_expect_eq(
        kvk_side_socket_create(house.cache, "/nonexistent/side", 0600, 4, &side, &house.error),
        KVK_UNAVAILABLE);
    cr_expect_null(side);
    house_stop(&house);
}

/* ---- Again and again ---- */

static uint32_t open_descriptors(void)
{
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    cr_assert_not_null(folder);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

/* Workers that connect, map, write half and are killed leave no descriptor, session, instance or
 * byte behind. */
Test(engine_process, many_crashes_leave_nothing, .timeout = 240)
{
    struct side_house side;
    struct writer writer;

    side_start(&side, 0, 64 * BLOCK_BYTES, 16);
    uint32_t before = open_descriptors();
    for (int round = 0; round < 300; round++) {
        writer_start(&side, &writer, KVK_TIER_HOST);
        worker_kill(&writer.worker);
        kvk_session_end(side.house.cache, writer.welcome.session_id);
        if (round % 10 == 9) {
            wait_sessions(&side.house, 0);
        }
    }
    wait_sessions(&side.house, 0);
    wait_bound(&side.house, KVK_TIER_HOST, 0);
    for (uint64_t ms = 0; ms < promised_ms(1000) && open_descriptors() != before; ms++) {
        house_sleep_ms(1);
    }
    cr_expect_eq(open_descriptors(), before, "%u descriptors, before %u", open_descriptors(),
                 before);
    cr_expect_eq(side.house.cache->instance_count, 0);
    cr_expect_eq(side.house.cache->stats.instances_ended, 300);
    side_stop(&side);
}
