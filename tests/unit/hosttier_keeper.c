/*
 * The keeper: the process with everything that can come over its socket, and systemd's store with
 * a stand-in for the service manager.
 */
#include "hosttier/keeper.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "hosttier/keeper_internal.h"
#include "tests/patience.h"

/* ---- A keeper process ---- */

static char folder[64];
static char path[96];
static pid_t process;

static void pause_ms(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&time, NULL);
}

static void folder_make(void)
{
    (void)snprintf(folder, sizeof(folder), "/tmp/kvk-keeper-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(path, sizeof(path), "%s/keeper", folder);
}

static void listener_wait(void)
{
    for (int i = 0; i < PATIENCE_MS / 5 && !unix_listens(path); i++) {
        pause_ms(5);
    }
}

static void process_start(uint64_t hold_ms)
{
    folder_make();
    process = fork();
    cr_assert_geq(process, 0);
    if (process == 0) {
        _exit(kvk_keeper_main(path, hold_ms));
    }
    listener_wait();
}

static bool process_ended_within(int ms)
{
    for (int i = 0; i <= ms / 10; i++) {
        int result;
        if (waitpid(process, &result, WNOHANG) == process) {
            cr_assert(WIFEXITED(result));
            cr_assert_eq(WEXITSTATUS(result), 0);
            process = 0;
            return true;
        }
        pause_ms(10);
    }
    return false;
}

static void process_stop(void)
{
    if (process > 0) {
        (void)kill(process, SIGKILL);
        (void)waitpid(process, NULL, 0);
        process = 0;
    }
    (void)unlink(path);
    (void)rmdir(folder);
}

static struct kvk_keeper *connect_with(uint64_t hold_ms)
{
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS,
        .socket_path = path,
        .program = "/bin/false", /* none is started here */
        .hold_ms = hold_ms,
    };
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    return keeper;
}

static int file_with(const char *text)
{
    int fd = memfd_create("kvk-test", MFD_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    return fd;
}

static void put(struct kvk_keeper *keeper, const char *name, const char *text)
{
    struct kvk_error error;
    int fd = file_with(text);
    cr_assert_eq(kvk_keeper_put(keeper, name, fd, &error), KVK_OK, "%s", error.text);
    (void)close(fd);
}

struct taken {
    uint32_t count;
    char names[16][KVK_KEEPER_NAME_SIZE];
    char texts[16][32];
};

static void take_one(void *context, const char *name, int fd)
{
    struct taken *taken = context;
    cr_assert_lt(taken->count, 16);
    (void)snprintf(taken->names[taken->count], KVK_KEEPER_NAME_SIZE, "%s", name);
    ssize_t size = pread(fd, taken->texts[taken->count], 31, 0);
    cr_assert_geq(size, 0);
    taken->texts[taken->count][size] = '\0';
    cr_assert((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    taken->count++;
    (void)close(fd);
}

static const char *taken_text(const struct taken *taken, const char *name)
{
    for (uint32_t i = 0; i < taken->count; i++) {
        if (strcmp(taken->names[i], name) == 0) {
            return taken->texts[i];
        }
    }
    return "(none)";
}

static void take_all(struct kvk_keeper *keeper, struct taken *taken)
{
    struct kvk_error error;
    memset(taken, 0, sizeof(*taken));
    cr_assert_eq(kvk_keeper_take(keeper, take_one, taken, &error), KVK_OK, "%s", error.text);
}

Test(keeper, holds_files_between_two_daemons, .fini = process_stop)
{
    struct taken taken;
    struct kvk_error error;
    process_start(60000);
    struct kvk_keeper *first = connect_with(60000);
    cr_assert_str_eq(kvk_keeper_kind_name(first), "process");
    put(first, "kvk-a", "one");
    put(first, "kvk-b", "two");
    put(first, "kvk-c", "three");
    cr_assert_eq(kvk_keeper_drop(first, "kvk-b", &error), KVK_OK);
    cr_assert_eq(kvk_keeper_count(first), 2);
    kvk_keeper_disconnect(first);

    struct kvk_keeper *second = connect_with(60000);
    cr_assert_eq(kvk_keeper_count(second), 2);
    take_all(second, &taken);
    cr_assert_eq(taken.count, 2);
    cr_assert_str_eq(taken_text(&taken, "kvk-a"), "one");
    cr_assert_str_eq(taken_text(&taken, "kvk-c"), "three");
    /* Taking is looking: they stay there for the one after. */
    take_all(second, &taken);
    cr_assert_eq(taken.count, 2);
    cr_assert_eq(kvk_keeper_forget(second, &error), KVK_OK);
    kvk_keeper_disconnect(second);
    cr_assert(process_ended_within(PATIENCE_MS));
    cr_assert_eq(access(path, F_OK), -1);
}

Test(keeper, names_are_unique_and_checked, .fini = process_stop)
{
    struct kvk_error error;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    int fd = file_with("x");
    put(keeper, "kvk-a", "one");
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-a", fd, &error), KVK_EXISTS);
    cr_assert_eq(kvk_keeper_drop(keeper, "kvk-b", &error), KVK_NOT_FOUND);
    const char *const wrong[] = {
        "",
        "a/b",
        "a b",
        "a:b",
        "a\n",
        "\xc3\x85",
        "0123456789012345678901234567890123456789012345678901234567890123"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cr_assert_eq(kvk_keeper_put(keeper, wrong[i], fd, &error), KVK_INVALID, "%s", wrong[i]);
        cr_assert_str_eq(error.field, "name");
    }
    cr_assert_eq(kvk_keeper_count(keeper), 1);
    (void)close(fd);
    kvk_keeper_disconnect(keeper);
}

Test(keeper, takes_one_daemon_at_a_time, .fini = process_stop)
{
    struct kvk_error error;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = path, .program = "/bin/false", .hold_ms = 1000};
    struct kvk_keeper *other = NULL;
    cr_assert_eq(kvk_keeper_connect(&options, &other, &error), KVK_EXISTS);
    put(keeper, "kvk-b", "two"); /* the first one was not disturbed */
    kvk_keeper_disconnect(keeper);
}

Test(keeper, ends_when_its_time_is_over, .fini = process_stop)
{
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(300);
    put(keeper, "kvk-a", "one");
    pause_ms(600);
    cr_assert_eq(kvk_keeper_count(keeper), 1); /* a daemon is there: no time runs */
    kvk_keeper_disconnect(keeper);
    cr_assert(!process_ended_within(100));
    cr_assert(process_ended_within(PATIENCE_MS));
}

Test(keeper, ends_when_it_holds_nothing_and_nobody_is_there, .fini = process_stop)
{
    struct kvk_error error;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    cr_assert_eq(kvk_keeper_drop(keeper, "kvk-a", &error), KVK_OK);
    cr_assert(!process_ended_within(200));
    kvk_keeper_disconnect(keeper);
    cr_assert(process_ended_within(PATIENCE_MS));
}

Test(keeper, ends_when_no_daemon_ever_comes, .fini = process_stop)
{
    process_start(200);
    cr_assert(process_ended_within(PATIENCE_MS));
}

Test(keeper, ends_when_nobody_can_find_it_any_more, .fini = process_stop)
{
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    (void)unlink(path);
    cr_assert(!process_ended_within(2500)); /* the daemon that has it goes on */
    kvk_keeper_disconnect(keeper);
    cr_assert(process_ended_within(PATIENCE_MS));
}

Test(keeper, outlives_the_signals_of_a_terminal, .fini = process_stop)
{
    struct taken taken;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    (void)kill(process, SIGTERM);
    (void)kill(process, SIGINT);
    (void)kill(process, SIGHUP);
    pause_ms(50);
    take_all(keeper, &taken);
    cr_assert_eq(taken.count, 1);
    kvk_keeper_disconnect(keeper);
}

Test(keeper, a_keeper_that_was_killed_is_told, .fini = process_stop)
{
    struct kvk_error error;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    (void)kill(process, SIGKILL);
    (void)waitpid(process, NULL, 0);
    process = 0;
    int fd = file_with("x");
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-a", fd, &error), KVK_UNAVAILABLE);
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-a", fd, &error), KVK_UNAVAILABLE); /* and again */
    (void)close(fd);
    kvk_keeper_disconnect(keeper);
    /* What it left at the path is no hindrance, and where none can be started that is told. */
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = path, .program = "/bin/false", .hold_ms = 1000};
    (void)signal(SIGALRM, SIG_DFL);
    (void)alarm(30);
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_UNAVAILABLE);
    process = fork();
    if (process == 0) {
        _exit(kvk_keeper_main(path, 60000));
    }
    listener_wait();
    keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    kvk_keeper_disconnect(keeper);
}

/* ---- Hostile bytes ---- */

static int raw_connect(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    cr_assert_geq(fd, 0);
    const struct timeval wait = {.tv_sec = 5};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    cr_assert_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0, "%s",
                 strerror(errno));
    return fd;
}

static void raw_send(int fd, const void *bytes, size_t size, int descriptor_count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(16 * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1};
    int fds[16];
    if (descriptor_count > 0) {
        memset(&control, 0, sizeof(control));
        for (int i = 0; i < descriptor_count; i++) {
            fds[i] = STDERR_FILENO;
        }
        envelope.msg_control = control.bytes;
        envelope.msg_controllen = CMSG_SPACE((size_t)descriptor_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)descriptor_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)descriptor_count * sizeof(int));
    }
    (void)sendmsg(fd, &envelope, MSG_NOSIGNAL);
}

/* The keeper closes the connection, saying nothing or a refusal. */
static void raw_is_closed(int fd)
{
    uint8_t answer[256];
    ssize_t size;
    while ((size = recv(fd, answer, sizeof(answer), 0)) > 0) {
    }
    cr_assert(size == 0 || errno == ECONNRESET, "the keeper still listens: %s", strerror(errno));
    (void)close(fd);
}

static struct kvk_keeper_message message_of(enum kvk_keeper_message_kind kind)
{
    return (struct kvk_keeper_message){
        .magic = KVK_KEEPER_MAGIC, .version = KVK_KEEPER_VERSION, .kind = (uint16_t)kind};
}

static uint32_t descriptors_of_process(void)
{
    char name[64];
    uint32_t count = 0;
    for (int fd = 0; fd < 256; fd++) {
        (void)snprintf(name, sizeof(name), "/proc/%d/fd/%d", (int)process, fd);
        struct stat info;
        count += lstat(name, &info) == 0 ? 1 : 0;
    }
    return count;
}

Test(keeper, hostile_bytes_end_their_connection_alone, .fini = process_stop)
{
    struct taken taken;
    struct kvk_random random;
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    uint32_t before = descriptors_of_process();
    kvk_random_init(&random, 4711);
    for (int round = 0; round < 400; round++) {
        uint8_t bytes[256];
        struct kvk_keeper_message message =
            message_of((enum kvk_keeper_message_kind)(1 + kvk_random_next(&random) % 6));
        size_t size = sizeof(message);
        int descriptors = (int)(kvk_random_next(&random) % 4);
        memcpy(message.name, "kvk-hostile", 11);
        memcpy(bytes, &message, sizeof(message));
        switch (kvk_random_next(&random) % 5) {
        case 0: /* any bytes of any length */
            size = kvk_random_next(&random) % sizeof(bytes);
            for (size_t i = 0; i < size; i++) {
                bytes[i] = (uint8_t)kvk_random_next(&random);
            }
            break;
        case 1: /* one byte is another */
            bytes[kvk_random_next(&random) % sizeof(message)] ^=
                (uint8_t)(1 + kvk_random_next(&random) % 255);
            break;
        case 2: /* cut, or longer */
            size = kvk_random_next(&random) % (2 * sizeof(message));
            memset(bytes + sizeof(message), 0, sizeof(bytes) - sizeof(message));
            break;
        case 3: /* more descriptors than any message has */
            descriptors = 2 + (int)(kvk_random_next(&random) % 14);
            break;
        default: /* right in form, but nobody greeted */
            break;
        }
        int fd = raw_connect();
        raw_send(fd, bytes, size, descriptors);
        raw_is_closed(fd);
    }
    take_all(keeper, &taken);
    cr_assert_eq(taken.count, 1);
    cr_assert_str_eq(taken_text(&taken, "kvk-a"), "one");
    cr_assert_eq(descriptors_of_process(), before, "descriptors that came with junk are closed");
    kvk_keeper_disconnect(keeper);
}

Test(keeper, a_daemon_that_talks_nonsense_is_cut_off, .fini = process_stop)
{
    process_start(60000);
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    kvk_keeper_disconnect(keeper);
    int fd = raw_connect();
    struct kvk_keeper_message message = message_of(KVK_KEEPER_HELLO);
    message.hold_ms = 60000;
    raw_send(fd, &message, sizeof(message), 0);
    cr_assert_eq(recv(fd, &message, sizeof(message), 0), (ssize_t)sizeof(message));
    cr_assert_eq(message.count, 1);
    message = message_of(KVK_KEEPER_PUT); /* without a descriptor, without a name */
    raw_send(fd, &message, sizeof(message), 0);
    raw_is_closed(fd);
    keeper = connect_with(60000);
    cr_assert_eq(kvk_keeper_count(keeper), 1);
    kvk_keeper_disconnect(keeper);
}

Test(keeper, silent_connections_do_not_keep_daemons_out, .fini = process_stop)
{
    int fds[12];
    process_start(60000);
    for (int i = 0; i < 12; i++) {
        fds[i] = raw_connect();
    }
    pause_ms(1500); /* they were given a second to speak */
    struct kvk_keeper *keeper = connect_with(60000);
    put(keeper, "kvk-a", "one");
    kvk_keeper_disconnect(keeper);
    for (int i = 0; i < 12; i++) {
        (void)close(fds[i]);
    }
}

/* ---- systemd ---- */

/* A service manager: reads notifications, keeps what it is given, closes barriers. */
struct manager {
    int socket;
    pthread_t thread;
    _Atomic bool stopping;
    _Atomic bool deaf; /* does not read */
    uint32_t count;
    char names[32][KVK_KEEPER_NAME_SIZE];
    int fds[32];
};

static void manager_hear(struct manager *manager, const char *text, int fd)
{
    char name[KVK_KEEPER_NAME_SIZE] = "";
    const char *found = strstr(text, "FDNAME=");
    if (found != NULL) {
        (void)sscanf(found, "FDNAME=%63s", name);
    }
    if (strstr(text, "FDSTORE=1") != NULL && fd >= 0) {
        (void)snprintf(manager->names[manager->count], KVK_KEEPER_NAME_SIZE, "%s", name);
        manager->fds[manager->count] = fd;
        manager->count++;
        return;
    }
    if (fd >= 0) {
        (void)close(fd); /* a barrier */
    }
    if (strstr(text, "FDSTOREREMOVE=1") == NULL) {
        return;
    }
    for (uint32_t i = 0; i < manager->count; i++) {
        if (strcmp(manager->names[i], name) == 0) {
            (void)close(manager->fds[i]);
            manager->count--;
            manager->fds[i] = manager->fds[manager->count];
            memmove(manager->names[i], manager->names[manager->count], KVK_KEEPER_NAME_SIZE);
            return;
        }
    }
}

static void *manager_main(void *argument)
{
    struct manager *manager = argument;
    while (!atomic_load(&manager->stopping)) {
        union {
            struct cmsghdr header;
            char bytes[CMSG_SPACE(4 * sizeof(int))];
        } control;
        char text[512];
        struct iovec part = {.iov_base = text, .iov_len = sizeof(text) - 1};
        struct msghdr envelope = {.msg_iov = &part,
                                  .msg_iovlen = 1,
                                  .msg_control = control.bytes,
                                  .msg_controllen = sizeof(control.bytes)};
        if (atomic_load(&manager->deaf)) {
            pause_ms(10);
            continue;
        }
        ssize_t size = recvmsg(manager->socket, &envelope, MSG_CMSG_CLOEXEC);
        if (size <= 0) {
            continue;
        }
        text[size] = '\0';
        int fd = -1;
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        if (header != NULL && header->cmsg_type == SCM_RIGHTS) {
            memcpy(&fd, CMSG_DATA(header), sizeof(fd));
        }
        manager_hear(manager, text, fd);
    }
    return NULL;
}

static void manager_start(struct manager *manager)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timeval wait = {.tv_usec = 20000};
    memset(manager, 0, sizeof(*manager));
    folder_make();
    (void)snprintf(path, sizeof(path), "%s/notify", folder);
    memcpy(address.sun_path, path, strlen(path) + 1);
    int low = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    manager->socket = fcntl(low, F_DUPFD_CLOEXEC, 100); /* out of the way of what is taken */
    (void)close(low);
    cr_assert_eq(bind(manager->socket, (struct sockaddr *)&address, sizeof(address)), 0);
    (void)setsockopt(manager->socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    cr_assert_eq(pthread_create(&manager->thread, NULL, manager_main, manager), 0);
    (void)setenv("NOTIFY_SOCKET", path, 1);
}

static void manager_stop(struct manager *manager)
{
    atomic_store(&manager->stopping, true);
    (void)pthread_join(manager->thread, NULL);
    (void)close(manager->socket);
    process_stop();
}

static struct kvk_keeper *systemd_connect(enum kvk_keeper_kind kind)
{
    const struct kvk_keeper_options options = {.kind = kind, .socket_path = "/nowhere/keeper"};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    return keeper;
}

Test(keeper_systemd, stores_and_removes)
{
    struct manager manager;
    struct kvk_error error;
    manager_start(&manager);
    (void)setenv("FDSTORE", "3", 1);
    struct kvk_keeper *keeper = systemd_connect(KVK_KEEPER_AUTO);
    cr_assert_str_eq(kvk_keeper_kind_name(keeper), "systemd");
    put(keeper, "kvk-a", "one");
    cr_assert_eq(manager.count, 1, "it has it when put returns");
    put(keeper, "kvk-b", "two");
    put(keeper, "kvk-c", "three");
    int fd = file_with("four");
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-a", fd, &error), KVK_EXISTS);
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-d", fd, &error), KVK_EXHAUSTED);
    cr_assert_str_eq(error.field, "FileDescriptorStoreMax");
    cr_assert_eq(error.limit, 3);
    cr_assert_eq(kvk_keeper_drop(keeper, "kvk-b", &error), KVK_OK);
    cr_assert_eq(kvk_keeper_drop(keeper, "kvk-b", &error), KVK_NOT_FOUND);
    cr_assert_eq(kvk_keeper_put(keeper, "kvk-d", fd, &error), KVK_OK);
    (void)close(fd);
    cr_assert_eq(kvk_keeper_count(keeper), 3);
    cr_assert_eq(kvk_keeper_forget(keeper, &error), KVK_OK);
    cr_assert_eq(manager.count, 0);
    kvk_keeper_disconnect(keeper);
    manager_stop(&manager);
}

/* The manager's descriptors begin at 3: what lies there now is put back at the end. */
Test(keeper_systemd, takes_what_the_manager_kept)
{
    static const char *const texts[4] = {"one", "web", "two", "twice"};
    struct manager manager;
    struct taken taken;
    char pid[32];
    int kept[4];
    manager_start(&manager);
    for (int i = 0; i < 4; i++) {
        int low = file_with(texts[i]);
        int high = fcntl(low, F_DUPFD_CLOEXEC, 400 + i);
        kept[i] = fcntl(3 + i, F_DUPFD_CLOEXEC, 300);
        (void)close(low);
        cr_assert_geq(dup2(high, 3 + i), 0);
        (void)close(high);
    }
    (void)snprintf(pid, sizeof(pid), "%d", (int)getpid());
    (void)setenv("LISTEN_PID", pid, 1);
    (void)setenv("LISTEN_FDS", "4", 1);
    (void)setenv("LISTEN_FDNAMES", "kvk-a:http:kvk-b:kvk-a", 1);
    struct kvk_keeper *keeper = systemd_connect(KVK_KEEPER_SYSTEMD);
    take_all(keeper, &taken);
    cr_assert_eq(taken.count, 2);
    cr_assert_str_eq(taken_text(&taken, "kvk-a"), "one");
    cr_assert_str_eq(taken_text(&taken, "kvk-b"), "two");
    cr_assert_eq(fcntl(4, F_GETFD), 0, "another's descriptor is left alone");
    take_all(keeper, &taken);
    cr_assert_eq(taken.count, 0, "they come once");
    kvk_keeper_disconnect(keeper);
    for (int i = 0; i < 4; i++) {
        if (kept[i] >= 0) {
            (void)dup2(kept[i], 3 + i);
        }
    }
    manager_stop(&manager);
}

Test(keeper_systemd, descriptors_of_another_process_are_not_taken)
{
    struct manager manager;
    struct taken taken;
    manager_start(&manager);
    (void)setenv("LISTEN_PID", "1", 1);
    (void)setenv("LISTEN_FDS", "1", 1);
    (void)setenv("LISTEN_FDNAMES", "kvk-a", 1);
    struct kvk_keeper *keeper = systemd_connect(KVK_KEEPER_SYSTEMD);
    take_all(keeper, &taken);
    cr_assert_eq(taken.count, 0);
    kvk_keeper_disconnect(keeper);
    manager_stop(&manager);
}

Test(keeper_systemd, without_a_manager_it_is_refused_in_words)
{
    const struct kvk_keeper_options options = {.kind = KVK_KEEPER_SYSTEMD};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    (void)unsetenv("NOTIFY_SOCKET");
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_UNAVAILABLE);
    cr_assert_str_eq(error.field, "keeper");
}
