/*
 * A daemon whose own allocations fail now and then, under load: calls are refused in words, nothing
 * is half done, and when memory is there again all works and all laws hold.
 *
 *     test_stress_daemon_memory [--seconds N] [--one-in N]
 *
 * KVKEEP_MALLOC_FAIL is the library to preload (tests/faults/malloc_fail.c).
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "tests/daemon_load.h"
#include "tests/daemon_look.h"
#include "tests/daemon_restart.h"

#define WORKERS 3
#define STEP_MS 200

struct switchboard {
    _Atomic uint32_t one_in;
    _Atomic uint32_t refused;
};
static struct switchboard *switchboard;
static struct look *looked;

static struct switchboard *switchboard_make(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(struct switchboard)) == 0, "cannot write %s", path);
    void *memory =
        mmap(NULL, sizeof(struct switchboard), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED, "cannot map %s", path);
    (void)close(fd);
    return memory;
}

/* Lives until time is over, under whatever is refused. */
static void work(void *milliseconds)
{
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid() ^ now_us());
    open_worker(NULL, "model");
    uint64_t end = now_ms() + *(const uint64_t *)milliseconds;
    while (now_ms() < end) {
        document((uint32_t)kvk_random_below(&random, DOCUMENTS), DOCUMENT_TOKENS);
        one_life(&random);
    }
}

static void finish(void)
{
    worker_close();
}

int main(int argc, char **argv)
{
    uint64_t seconds = option_number(argc, argv, "--seconds", 6);
    uint64_t one_in = option_number(argc, argv, "--one-in", 150);
    const char *library = getenv("KVKEEP_MALLOC_FAIL");
    test_begin((unsigned)seconds + 120);
    CHECK(library != NULL, "KVKEEP_MALLOC_FAIL names no library");
    char path[64];
    (void)snprintf(path, sizeof(path), "/tmp/kvkeep-memory-%d", (int)getpid());
    switchboard = switchboard_make(path);
    load = shared_alloc(sizeof(*load));
    looked = shared_alloc(sizeof(*looked));
    uint64_t *milliseconds = shared_alloc(sizeof(*milliseconds));

    struct agent workers[WORKERS];
    struct agent observer;
    for (int i = 0; i < WORKERS; i++) {
        agent_start(&workers[i], "worker", finish);
    }
    agent_start(&observer, "observer", finish);
    struct durable_daemon durable = {.disk_bytes = 0};
    const struct daemon *daemon = &durable.daemon;
    (void)setenv("LD_PRELOAD", library, 1);
    (void)setenv("KVKEEP_FAIL_MALLOC", path, 1);
    const struct durable_setup setup = {.device_bytes = 64 * BLOCK_BYTES,
                                        .host_bytes = 96 * BLOCK_BYTES,
                                        .disk_bytes = UINT64_C(8) << 20};
    durable_configure(&durable, &setup);
    (void)durable_start(&durable);
    (void)unsetenv("LD_PRELOAD");
    (void)snprintf(load->target, sizeof(load->target), "%s", daemon->target);
    (void)snprintf(looked->target, sizeof(looked->target), "%s", daemon->target);

    phase("memory for all: everybody opens");
    *milliseconds = STEP_MS;
    for (int i = 0; i < WORKERS; i++) {
        agent_do(&workers[i], work, milliseconds);
    }
    uint64_t before = atomic_load(&load->sealed);
    CHECK(before > 0, "nothing was sealed");

    phase("one allocation in some is refused");
    atomic_store(&switchboard->one_in, (uint32_t)one_in);
    *milliseconds = seconds * 1000;
    for (int i = 0; i < WORKERS; i++) {
        agent_begin(&workers[i], work, milliseconds);
    }
    for (int i = 0; i < WORKERS; i++) {
        agent_end(&workers[i]);
    }
    atomic_store(&switchboard->one_in, 0);
    daemon_check_alive(daemon);
    CHECK(atomic_load(&switchboard->refused) > 20, "only %u allocations were refused",
          atomic_load(&switchboard->refused));
    (void)printf("            %u allocations refused, %llu calls refused, %llu sequences sealed\n",
                 atomic_load(&switchboard->refused),
                 (unsigned long long)atomic_load(&load->refused),
                 (unsigned long long)(atomic_load(&load->sealed) - before));

    phase("memory again: all works, all laws hold, nothing is left");
    uint64_t refused = atomic_load(&load->refused);
    *milliseconds = 4 * STEP_MS;
    agent_do(&workers[0], work, milliseconds);
    CHECK(atomic_load(&load->refused) == refused, "calls are still refused");
    agent_do(&observer, observe_laws, looked);
    for (int i = 0; i < WORKERS; i++) {
        agent_finish(&workers[i]);
    }
    (void)expect_free(&observer, looked, false, now_us());
    agent_finish(&observer);
    durable_end(&durable);
    (void)unlink(path);
    phase("passed");
    return 0;
}
