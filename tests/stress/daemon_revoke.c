/*
 * Memory that cannot be revoked: a mapping outlives what its process may do with it.
 *
 * A process that keeps its mapping after its space's room went to another tenant sees none of that
 * tenant's bytes and writes none. One whose connection was cut but which lives on and keeps writing
 * writes into nobody's slots. What was handed out can neither be cut short nor made writable, and
 * whatever strays into memory that is not its own any more is charged.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "tests/daemon_look.h"

enum {
    POOL_BLOCKS = 128, /* a slab of 2 blocks each */
    POOL_BYTES = POOL_BLOCKS * BLOCK_BYTES,
};

#define MARK_MASK (UINT64_C(0xffff) << 48)
#define MARK_A (UINT64_C(0xaaaa) << 48)
#define MARK_B (UINT64_C(0xbbbb) << 48)

struct shared {
    char target[96];
    _Atomic bool stop;
    _Atomic uint64_t writes;
    uint64_t want_blocks, got_blocks; /* told to and by grab() */
    enum kvk_cause refusal;
    uint64_t space_id; /* of tenant a */
    uint8_t map_token[16];
    pid_t child;
    struct look look;
};
static struct shared *shared;
static struct agent observer = {.name = "observer"};
static struct prompt prompt;
static struct kvkeep_sequence held[POOL_BLOCKS]; /* each process's own */
static uint32_t held_count;

/* ---- marked bytes: every word says whose it is ---- */

static void mark(uint8_t *memory, uint64_t size_bytes, uint64_t owner)
{
    volatile uint64_t *words = (volatile uint64_t *)(void *)memory;
    for (uint64_t i = 0; i < size_bytes / 8; i++) {
        words[i] = owner | i;
    }
}

/* Nothing but zeros and the owner's own. */
static void scan(const uint8_t *memory, uint64_t size_bytes, uint64_t owner)
{
    const volatile uint64_t *words = (const volatile uint64_t *)(const void *)memory;
    for (uint64_t i = 0; i < size_bytes / 8; i++) {
        uint64_t word = words[i];
        CHECK(word == 0 || (word & MARK_MASK) == owner, "foreign bytes %llx at offset %llu",
              (unsigned long long)word, (unsigned long long)i * 8);
    }
}

static void expect_marked(const uint8_t *memory, uint64_t size_bytes, uint64_t owner)
{
    const uint64_t *words = (const uint64_t *)(const void *)memory;
    for (uint64_t i = 0; i < size_bytes / 8; i++) {
        CHECK(words[i] == (owner | i), "word %llu is %llx", (unsigned long long)i,
              (unsigned long long)words[i]);
    }
}

/* ---- tasks of tenants' workers ---- */

static void open_as(const char *tenant)
{
    worker_open(&(struct worker_options){
        .target = shared->target, .tenant = tenant, .model = "model", .name = tenant});
}

static void a_opens(void *unused)
{
    (void)unused;
    open_as("a");
    shared->space_id = self.space.id;
}

static void b_opens(void *unused)
{
    (void)unused;
    open_as("b");
}

static uint32_t next_token(void)
{
    static uint32_t token;
    token += TOKENS_MAX;
    return token ^ (uint32_t)getpid() << 8;
}

/* Take up to want_blocks blocks of the pool, one sequence each, and mark them. */
static void grab(uint64_t owner)
{
    uint64_t until_ms = now_ms() + 3000;
    shared->got_blocks = 0;
    while (shared->got_blocks < shared->want_blocks) {
        CHECK(held_count < POOL_BLOCKS, "more than the pool");
        prompt_set(&prompt, next_token(), BLOCK_TOKENS);
        enum kvk_status status = worker_try_open(&prompt, NULL, &held[held_count]);
        if (status == KVK_EXHAUSTED) {
            shared->refusal = self.error.cause;
            if (now_ms() < until_ms) {
                pause_us(1000); /* room that is just being given back comes soon */
                continue;
            }
            break;
        }
        CHECK_OK(status);
        mark(worker_block(&held[held_count].groups[0], 0), BLOCK_BYTES, owner);
        held_count++;
        shared->got_blocks++;
        until_ms = now_ms() + 1500;
    }
}

static void a_grabs(void *unused)
{
    (void)unused;
    grab(MARK_A);
}

static void b_grabs(void *unused)
{
    (void)unused;
    grab(MARK_B);
}

static void seal_and_close(void)
{
    while (held_count > 0) {
        held_count--;
        worker_seal(&held[held_count], BLOCK_TOKENS);
        worker_close_sequence(&held[held_count]);
    }
}

static void closes_all(void *unused)
{
    (void)unused;
    seal_and_close();
}

static void b_expects_its_bytes(void *unused)
{
    (void)unused;
    uint8_t bytes[BLOCK_BYTES];
    for (uint32_t i = 0; i < held_count; i++) {
        expect_marked(worker_block(&held[i].groups[0], 0), BLOCK_BYTES, MARK_B);
        worker_seal(&held[i], BLOCK_TOKENS);
        CHECK_OK(
            kvkeep_read(self.session, &held[i], NULL, 0, 0, 0, 1, bytes, BLOCK_BYTES, &self.error));
        expect_marked(bytes, BLOCK_BYTES, MARK_B);
    }
}

/* ---- 1. room that went to another tenant ---- */

/* All that was ever mapped. Reading it faults memory in, too: strays, for a while. */
static void a_scans(void *unused)
{
    (void)unused;
    const struct kvkeep_map *map = &self.maps[KVKEEP_TIER_DEVICE];
    scan(map->address, map->size_bytes, MARK_A);
}

static void a_scribbles(void *unused)
{
    (void)unused;
    const struct kvkeep_map *map = &self.maps[KVKEEP_TIER_DEVICE];
    while (!atomic_load(&shared->stop)) {
        mark(map->address, map->size_bytes, MARK_A);
        atomic_fetch_add(&shared->writes, 1);
    }
}

static void observe_now(void)
{
    agent_do(&observer, observe, &shared->look);
}

/* Until the daemon has seen strays (or none any more). */
static uint64_t wait_for_strays(bool some)
{
    uint64_t until_ms = now_ms() + promised_ms(5000);
    const struct tier_look *tier = &shared->look.tiers[1];
    for (;;) {
        observe_now();
        if ((tier->stray > 0) == some) {
            return tier->stray;
        }
        if (now_ms() > until_ms) {
            look_print(&shared->look);
            CHECK(false, some ? "strays are not charged" : "strays stay charged");
        }
        pause_us(20000);
    }
}

static void room_handed_over(void)
{
    struct agent a = {.name = "tenant a"};
    struct agent b = {.name = "tenant b"};
    phase("room that went to another tenant");
    agent_start(&a, "tenant a", worker_close);
    agent_start(&b, "tenant b", worker_close);
    agent_do(&a, a_opens, NULL);
    agent_do(&b, b_opens, NULL);
    shared->want_blocks = POOL_BLOCKS;
    agent_do(&a, a_grabs, NULL);
    CHECK(shared->got_blocks == POOL_BLOCKS, "a got %llu blocks of an empty pool",
          (unsigned long long)shared->got_blocks);
    agent_do(&a, closes_all, NULL);

    for (int i = 0; i < 10; i++) {
        agent_do(&b, b_grabs, NULL);
        CHECK(shared->got_blocks == POOL_BLOCKS, "b got %llu blocks of a pool that nobody holds",
              (unsigned long long)shared->got_blocks);
        agent_do(&a, a_scans, NULL);
        agent_do(&b, b_expects_its_bytes, NULL);
        agent_do(&a, a_scans, NULL);
        if (i < 9) {
            agent_do(&b, closes_all, NULL);
        }
    }

    phase("a stray writer");
    agent_begin(&a, a_scribbles, NULL);
    uint64_t stray = wait_for_strays(true);
    agent_do(&b, b_expects_its_bytes, NULL);
    atomic_store(&shared->stop, true);
    agent_end(&a);
    agent_do(&b, b_expects_its_bytes, NULL);
    agent_do(&b, closes_all, NULL);
    CHECK(wait_for_strays(false) == 0, "strays stay");
    (void)printf("            %llu KiB of strays were charged, and are gone; %llu rounds written\n",
                 (unsigned long long)stray >> 10, (unsigned long long)atomic_load(&shared->writes));
    agent_do(&b, b_grabs, NULL);
    CHECK(shared->got_blocks == POOL_BLOCKS, "%llu blocks are left of the pool",
          (unsigned long long)shared->got_blocks);
    agent_do(&a, a_scans, NULL);
    agent_do(&b, b_expects_its_bytes, NULL);
    agent_finish(&a);
    agent_finish(&b);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

/* ---- 2. cut off, but alive ---- */

enum { LOST_BLOCKS = 40 };

/* The stream goes; process, mapping and side socket stay. */
static void lose_the_connection(void *unused)
{
    (void)unused;
    int kept = fcntl(self.session->side_fd, F_DUPFD_CLOEXEC, 0);
    CHECK(kept >= 0, "dup: %s", strerror(errno));
    kvkeep_session_close(self.session);
    self.session = NULL;
}

static void write_on(void)
{
    for (uint64_t round = 0; round < 200; round++) {
        for (uint32_t i = 0; i < held_count; i++) {
            const struct kvkeep_map *map = &self.maps[KVKEEP_TIER_DEVICE];
            mark(map->address + held[i].groups[0].slots[0] * map->slot_stride, BLOCK_BYTES, MARK_A);
        }
        atomic_fetch_add(&shared->writes, 1);
    }
}

static void writes_on(void *unused)
{
    (void)unused;
    while (!atomic_load(&shared->stop)) {
        write_on();
    }
}

/* A child that has the mapping, and the side socket, from its parent. */
static void forks_a_writer(void *unused)
{
    (void)unused;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        for (;;) {
            write_on();
        }
    }
    shared->child = pid;
}

static void expect_quarantine(uint64_t lost_sessions)
{
    uint64_t until_ms = now_ms() + promised_ms(1000);
    const struct look *look = &shared->look;
    do {
        observe_now();
    } while (look->lost_sessions != lost_sessions && now_ms() < until_ms);
    observe_now(); /* one look is several calls: all of them after the loss */
    if (look->lost_sessions != lost_sessions || look->quarantine_blocks != LOST_BLOCKS ||
        look->tiers[1].quarantine != LOST_BLOCKS * BLOCK_BYTES) {
        look_print(look);
        CHECK(false, "%d blocks should wait for the writer's end", LOST_BLOCKS);
    }
}

static void b_takes_what_is_left(struct agent *b)
{
    agent_do(b, b_grabs, NULL);
    CHECK(shared->got_blocks == POOL_BLOCKS - LOST_BLOCKS, "b got %llu blocks",
          (unsigned long long)shared->got_blocks);
    CHECK(shared->refusal == KVK_CAUSE_QUARANTINE || shared->refusal == KVK_CAUSE_POOL_ACTIVE,
          "refused for %s", kvk_cause_name(shared->refusal));
    uint64_t writes = atomic_load(&shared->writes);
    while (atomic_load(&shared->writes) < writes + 400) {
        pause_us(1000);
    }
    agent_do(b, b_expects_its_bytes, NULL);
    agent_do(b, closes_all, NULL);
}

static uint64_t expect_given_back(struct agent *b, uint64_t since_us)
{
    uint64_t took_us = 0;
    do {
        took_us = now_us() - since_us;
        observe_now();
    } while (shared->look.tiers[1].quarantine > 0 && took_us < promised_ms(1000) * 1000);
    if (shared->look.quarantine_blocks > 0 || shared->look.lost_sessions > 0) {
        look_print(&shared->look);
        CHECK(false, "not given back within a second");
    }
    agent_do(b, b_grabs, NULL);
    CHECK(shared->got_blocks == POOL_BLOCKS, "b got %llu blocks of all",
          (unsigned long long)shared->got_blocks);
    agent_do(b, b_expects_its_bytes, NULL);
    agent_do(b, closes_all, NULL);
    return took_us;
}

static void cut_off(bool forks)
{
    struct agent a = {.name = "tenant a"};
    struct agent b = {.name = "tenant b"};
    phase(forks ? "a writer's child that has its mapping" : "a writer whose connection was cut");
    atomic_store(&shared->stop, false);
    atomic_store(&shared->writes, 0);
    agent_start(&a, "tenant a", NULL);
    agent_start(&b, "tenant b", worker_close);
    agent_do(&a, a_opens, NULL);
    agent_do(&b, b_opens, NULL);
    shared->want_blocks = LOST_BLOCKS;
    agent_do(&a, a_grabs, NULL);
    CHECK(shared->got_blocks == LOST_BLOCKS, "a got %llu blocks",
          (unsigned long long)shared->got_blocks);
    shared->want_blocks = POOL_BLOCKS;
    if (forks) {
        agent_do(&a, forks_a_writer, NULL);
        agent_kill(&a);
    } else {
        agent_do(&a, lose_the_connection, NULL);
        agent_begin(&a, writes_on, NULL);
    }
    expect_quarantine(1);
    b_takes_what_is_left(&b);
    expect_quarantine(1);
    uint64_t killed_us;
    if (forks) {
        CHECK(kill(shared->child, SIGKILL) == 0, "the child is gone");
        killed_us = now_us();
    } else {
        agent_kill(&a);
        killed_us = now_us();
    }
    uint64_t took_us = expect_given_back(&b, killed_us);
    (void)printf("            given back after %.1f ms\n", (double)took_us / 1000);
    agent_finish(&b);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

/* ---- 3. what was handed out ---- */

/* A token of MapMemory. */
static enum kvk_status ask_for_map(uint64_t space_id, bool read_only, uint8_t token[16],
                                   uint64_t *size_bytes)
{
    Kvkeep__V1__MapMemoryRequest request = KVKEEP__V1__MAP_MEMORY_REQUEST__INIT;
    Kvkeep__V1__MapMemoryResponse *response = NULL;
    request.session_id = kvkeep_session_id(self.session);
    request.kind = KVKEEP__V1__MAP_MEMORY_REQUEST__KIND__KIND_SLOTS;
    request.space_id = space_id;
    request.tier = KVKEEP__V1__TIER__TIER_DEVICE;
    request.read_only = read_only;
    enum kvk_status status = worker_call(KVKEEP_METHOD("MapMemory"), &request.base,
                                         &kvkeep__v1__map_memory_response__descriptor, &response);
    if (status == KVK_OK) {
        CHECK(response->map_token.len == 16, "a token of %zu bytes", response->map_token.len);
        memcpy(token, response->map_token.data, 16);
        *size_bytes = response->size_bytes;
        message_free(response);
    }
    return status;
}

/* What the side socket answers to a token: true with two descriptors, or false. */
static bool side_take(const uint8_t token[16], int fds[2])
{
    uint8_t answer = 1;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = &answer, .iov_len = 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    CHECK(send(self.session->side_fd, token, 16, MSG_NOSIGNAL) == 16, "no side socket");
    ssize_t got = recvmsg(self.session->side_fd, &message, MSG_CMSG_CLOEXEC);
    const struct cmsghdr *header = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    if (got != 1 || answer != 0 || header == NULL) {
        return false;
    }
    CHECK(header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(2 * sizeof(int)),
          "two descriptors were expected");
    memcpy(fds, CMSG_DATA(header), 2 * sizeof(int));
    return true;
}

static void expect_uncuttable(int fd, uint64_t size_bytes)
{
    struct stat file;
    CHECK(ftruncate(fd, 0) != 0, "the file could be cut to nothing");
    CHECK(ftruncate(fd, (off_t)size_bytes - 4096) != 0, "the file could be cut short");
    CHECK(ftruncate(fd, (off_t)size_bytes + 4096) != 0, "the file could be made longer");
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0, "the file could be sealed");
    CHECK(fstat(fd, &file) == 0 && file.st_size >= (off_t)size_bytes, "the file has %lld bytes",
          (long long)file.st_size);
}

static void expect_read_only(int fd)
{
    void *address = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(address == MAP_FAILED && errno == EACCES, "it could be mapped for writing");
    CHECK(pwrite(fd, "x", 1, 0) != 1, "it could be written");
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0,
          "it could be punched");
    address = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(address != MAP_FAILED, "it cannot be read: %s", strerror(errno));
    CHECK(mprotect(address, 4096, PROT_READ | PROT_WRITE) != 0, "it could be made writable");
    (void)munmap(address, 4096);
}

/* In a child, which must die of it. */
static void expect_fault(volatile uint8_t *address)
{
    int status = 0;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        (void)signal(SIGSEGV, SIG_DFL); /* a sanitizer would only tell */
        *address = 1;
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV,
          "a write to a read-only mapping: status %x", (unsigned)status);
}

static void a_tries_its_descriptors(void *unused)
{
    (void)unused;
    uint64_t size_bytes = 0;
    uint8_t token[16];
    int fds[2];
    open_as("a");
    shared->space_id = self.space.id;
    CHECK_OK(ask_for_map(self.space.id, false, token, &size_bytes));
    CHECK(side_take(token, fds), "the token was refused");
    expect_uncuttable(fds[0], size_bytes);
    expect_read_only(fds[1]); /* generations */
    CHECK(ftruncate(fds[1], 0) != 0, "the generations could be cut");
    CHECK_OK(ask_for_map(self.space.id, true, token, &size_bytes));
    CHECK(side_take(token, fds), "the token was refused");
    expect_uncuttable(fds[0], size_bytes);
    expect_read_only(fds[0]);

    struct kvkeep_map map;
    CHECK_OK(kvkeep_map_slots(self.session, &self.space, 0, 0, KVKEEP_TIER_DEVICE, true, &map,
                              &self.error));
    scan(map.address, map.size_bytes, MARK_A);
    expect_fault(map.address);
    kvkeep_unmap(&map);
    CHECK_OK(ask_for_map(self.space.id, false, shared->map_token, &size_bytes));
}

static void b_tries_what_is_not_its_own(void *unused)
{
    (void)unused;
    uint64_t size_bytes = 0;
    uint8_t token[16];
    int fds[2];
    open_as("b");
    enum kvk_status status = ask_for_map(shared->space_id, false, token, &size_bytes);
    CHECK(status == KVK_PERMISSION || status == KVK_NOT_FOUND, "another tenant's space: %s",
          kvk_status_name(status));
    CHECK(!side_take(shared->map_token, fds), "another session's token was taken");
    worker_close();

    open_as("b"); /* a refused token may cost the side connection */
    CHECK_OK(ask_for_map(self.space.id, true, token, &size_bytes));
    CHECK(side_take(token, fds), "the token was refused");
    CHECK(!side_take(token, fds), "a token was taken twice");
}

static void a_takes_its_token(void *unused)
{
    (void)unused;
    int fds[2];
    CHECK(side_take(shared->map_token, fds), "the token's own session was refused");
}

static void handed_out(void)
{
    struct agent a = {.name = "tenant a"};
    struct agent b = {.name = "tenant b"};
    phase("what was handed out can be neither cut nor made writable, nor fetched by others");
    agent_start(&a, "tenant a", worker_close);
    agent_start(&b, "tenant b", worker_close);
    agent_do(&a, a_tries_its_descriptors, NULL);
    agent_do(&b, b_tries_what_is_not_its_own, NULL);
    agent_do(&a, a_takes_its_token, NULL);
    agent_finish(&a);
    agent_finish(&b);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

int main(void)
{
    struct daemon daemon;
    char rest[256];
    test_begin(180);
    shared = shared_alloc(sizeof(*shared));
    (void)snprintf(rest, sizeof(rest),
                   "[tenant a]\n[tenant b]\n[credential all]\nuids = %u\ntenants = a, b\n"
                   "admin = yes\n",
                   (unsigned)getuid());
    const struct daemon_setup setup = {.device_bytes = POOL_BYTES, .rest = rest};
    daemon_start(&daemon, &setup);
    memcpy(shared->target, daemon.target, sizeof(shared->target));
    memcpy(shared->look.target, daemon.target, sizeof(shared->look.target));
    agent_start(&observer, "observer", worker_close);

    room_handed_over();
    cut_off(false);
    cut_off(true);
    handed_out();

    agent_finish(&observer);
    daemon_stop(&daemon);
    phase("passed");
    return 0;
}
