/* The watchdog speaks as long as look-up thread and maintenance come round, and no longer. */
#include "daemon/server_watchdog.h"

#include <criterion/criterion.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/engine_house.h"

#define WATCHDOG_MS 600

static int manager_fd;
static char socket_path[64];
static struct house house;
static struct kvk_server *server;
static struct kvk_watchdog *watchdog;

static void manager_open(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[64];
    int length = snprintf(name, sizeof(name), "@kvkeep-watchdog-%d", (int)getpid());
    memcpy(address.sun_path, name, (size_t)length);
    address.sun_path[0] = '\0';
    manager_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t size = (socklen_t)(sizeof(sa_family_t) + (size_t)length);
    cr_assert_eq(bind(manager_fd, (const struct sockaddr *)&address, size), 0);
    (void)snprintf(name, sizeof(name), "%d", WATCHDOG_MS * 1000);
    cr_assert_eq(setenv("WATCHDOG_USEC", name, 1), 0);
    (void)snprintf(name, sizeof(name), "@kvkeep-watchdog-%d", (int)getpid());
    cr_assert_eq(setenv("NOTIFY_SOCKET", name, 1), 0);
}

/* Without threads of the engine's own: maintenance comes round when the test says so. */
static void begin(bool serve)
{
    struct kvk_server_options options;
    struct kvk_error error;
    manager_open();
    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    kvk_server_options_init(&options);
    (void)snprintf(socket_path, sizeof(socket_path), "/tmp/kvk-watchdog.%d", (int)getpid());
    options.unix_path = socket_path;
    cr_assert_eq(kvk_server_create(&options, NULL, 0, &server, &error), KVK_OK, "%s", error.text);
    if (serve) {
        cr_assert_eq(kvk_server_start(server, &error), KVK_OK, "%s", error.text);
    }
    cr_assert_eq(kvk_watchdog_create(server, house.cache, &watchdog, &error), KVK_OK);
    cr_assert_not_null(watchdog);
}

static void end(void)
{
    char lock[80];
    kvk_watchdog_destroy(watchdog);
    kvk_server_destroy(server);
    (void)snprintf(lock, sizeof(lock), "%s.lock", socket_path);
    (void)unlink(lock);
    house_stop(&house);
}

/* Messages within a time, while maintenance comes round or not. */
static int messages(int ms, bool maintain)
{
    int count = 0;
    char text[512];
    for (int waited = 0; waited < ms; waited += 20) {
        struct pollfd wait = {.fd = manager_fd, .events = POLLIN};
        if (maintain) {
            kvk_cache_maintain(house.cache);
        }
        while (poll(&wait, 1, 0) == 1) {
            ssize_t size = recv(manager_fd, text, sizeof(text) - 1, 0);
            cr_assert_gt(size, 0);
            text[size] = '\0';
            cr_assert_eq(strncmp(text, "WATCHDOG=1\nSTATUS=serving: 0 sequences", 38), 0, "%s",
                         text);
            count++;
        }
        house_sleep_ms(20);
    }
    return count;
}

/* Until there were so many, while maintenance comes round. */
static void expect_messages(int count)
{
    for (int waited = 0; waited < PATIENCE_MS && count > 0; waited += 20) {
        count -= messages(20, true);
    }
    cr_assert_leq(count, 0);
}

/* It falls silent, for longer than its time: what was under way may come yet. */
static void expect_silence(bool maintain)
{
    for (int waited = 0; waited < PATIENCE_MS; waited += 2 * WATCHDOG_MS) {
        if (messages(2 * WATCHDOG_MS, maintain) == 0) {
            return;
        }
    }
    cr_assert_fail("it goes on speaking");
}

Test(server_watchdog, silent_when_maintenance_hangs)
{
    begin(true);
    expect_messages(3);
    expect_silence(false);
    expect_messages(2); /* it speaks again */
    end();
}

Test(server_watchdog, silent_when_nobody_answers_calls)
{
    begin(false);
    expect_silence(true);
    end();
}

Test(server_watchdog, silent_when_the_lock_is_never_given_back)
{
    begin(true);
    expect_messages(3);
    kvk_lock(&house.cache->lock);
    expect_silence(false);
    kvk_unlock(&house.cache->lock);
    expect_messages(2);
    end();
}

Test(server_watchdog, nobody_to_tell)
{
    struct kvk_error error;
    (void)unsetenv("NOTIFY_SOCKET");
    cr_assert_eq(kvk_watchdog_create(NULL, NULL, &watchdog, &error), KVK_OK);
    cr_assert_null(watchdog);
    kvk_watchdog_destroy(watchdog);
}
