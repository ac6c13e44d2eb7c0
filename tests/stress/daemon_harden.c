/*
 * What kvkeepd has given up before it serves, looked at from outside: user, capabilities, inherited
 * descriptors, system calls, cores; and what it tells a service manager.
 *
 *     test_stress_daemon_harden
 */
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "daemon/harden.h"
#include "tests/daemon_worker.h"

#define MIB (UINT64_C(1) << 20)
#define SECRET "token-that-nobody-may-read-0123456789"
#define LEAKED_FD 77

static struct prompt prompt;
static char target[96];
static bool is_service; /* the next daemon is started as a service manager would start it */

/*
 * What deploy/kvkeepd.service makes of a process before it is kvkeepd: no capabilities, and no
 * calls that only the privileged need, capset among them.
 */
static void become_a_service(void)
{
    static const uint32_t forbidden[] = {SYS_capset,    SYS_setuid,    SYS_setgid, SYS_setgroups,
                                         SYS_setresuid, SYS_setresgid, SYS_fchown, SYS_fchownat,
                                         SYS_chroot,    SYS_bpf};
    enum { COUNT = sizeof(forbidden) / sizeof(forbidden[0]) };
    struct sock_filter program[COUNT + 3] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (uint8_t i = 0; i < COUNT; i++) {
        program[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[i],
                                                      (uint8_t)(COUNT - i), 0);
    }
    program[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    program[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    const struct sock_fprog filter = {.len = COUNT + 3, .filter = program};
    /* Without a bounding set root's next program has none; who is not root has none as it is. */
    for (unsigned long capability = 0; capability <= 63; capability++) {
        (void)prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
    }
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
              prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0,
          "no filter: %s", strerror(errno));
}

/* ---- a daemon with a folder and an environment of the test's making ---- */

static void spawn(struct daemon *daemon, const char *process, uid_t owner)
{
    char config[96];
    char rest[1024];
    (void)snprintf(daemon->folder, sizeof(daemon->folder), "/tmp/kvkeep-harden.XXXXXX");
    CHECK(mkdtemp(daemon->folder) != NULL, "no folder: %s", strerror(errno));
    (void)snprintf(config, sizeof(config), "%s/kvkeepd.conf", daemon->folder);
    (void)snprintf(daemon->target, sizeof(daemon->target), "unix:%s/kvkeep.sock", daemon->folder);
    (void)snprintf(daemon_log_path, sizeof(daemon_log_path), "%s/log", daemon->folder);
    (void)snprintf(
        rest, sizeof(rest),
        "[process]\n%s\n[limits]\nblocks = 4096\nroots = 64\nsequences = 64\nleases = 64\n"
        "transfers = 64\ntokens = 4096\n[tenant default]\n[credential all]\nuids = %u\n"
        "token = " SECRET "\ntenants = default\n",
        process, (unsigned)getuid());
    const struct daemon_setup setup = {
        .device_bytes = 4 * MIB, .host_bytes = 4 * MIB, .rest = rest};
    daemon_configure(daemon, &setup, config);
    CHECK(chown(daemon->folder, owner, (gid_t)-1) == 0, "chown: %s", strerror(errno));
    memcpy(target, daemon->target, sizeof(target));
    (void)fflush(stdout);
    daemon->pid = fork();
    CHECK(daemon->pid >= 0, "fork: %s", strerror(errno));
    if (daemon->pid == 0) {
        int leaked = open("/etc/hostname", O_RDONLY);
        CHECK(leaked < 0 || dup2(leaked, LEAKED_FD) == LEAKED_FD, "dup2");
        CHECK(chdir(daemon->folder) == 0, "chdir"); /* where a core would go */
        if (is_service) {
            become_a_service();
        }
        daemon_exec(config);
    }
}

/* A change of user lets the kernel forget that a daemon is to end with its test. */
static void guard(pid_t daemon)
{
    int ends[2];
    char byte;
    int process = (int)syscall(SYS_pidfd_open, daemon, 0);
    CHECK(process >= 0 && pipe2(ends, O_CLOEXEC) == 0, "guard: %s", strerror(errno));
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        (void)close(ends[1]);
        (void)!read(ends[0], &byte, 1); /* until the test is at its end */
        (void)syscall(SYS_pidfd_send_signal, process, SIGKILL, NULL, 0);
        _exit(0);
    }
    (void)close(ends[0]); /* the other end stays open as long as this process */
    (void)close(process);
}

/* Its socket is there before it serves: it says when. */
static void wait_until_ready(const struct daemon *daemon)
{
    char line[1024] = "";
    guard(daemon->pid);
    for (int i = 0;; i++) {
        FILE *log = fopen(daemon_log_path, "r");
        while (log != NULL && fgets(line, sizeof(line), log) != NULL) {
            if (strncmp(line, "ready ", 6) == 0) {
                (void)fclose(log);
                return;
            }
        }
        if (log != NULL) {
            (void)fclose(log);
        }
        CHECK(waitpid(daemon->pid, NULL, WNOHANG) == 0, "kvkeepd did not start");
        CHECK(i < 1000, "kvkeepd is not ready after 20 s");
        pause_us(20000);
    }
}

/* ---- what /proc says ---- */

static void expect_line(pid_t pid, const char *file, const char *wanted)
{
    char path[64];
    char line[512];
    char key[64];
    (void)snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, file);
    (void)snprintf(key, sizeof(key), "%.*s", (int)(strchr(wanted, ':') - wanted + 1), wanted);
    FILE *input = fopen(path, "r");
    CHECK(input != NULL, "cannot read %s", path);
    while (fgets(line, sizeof(line), input) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            line[strcspn(line, "\n")] = '\0';
            CHECK(strcmp(line, wanted) == 0, "\"%s\", not \"%s\"", line, wanted);
            (void)fclose(input);
            return;
        }
    }
    CHECK(false, "%s has no line %s", path, key);
}

/* Soft and hard are alike: it has what it may have. */
static void expect_equal_limits(pid_t pid, const char *name)
{
    char path[64];
    char line[256];
    char soft[32] = "";
    char hard[32] = "";
    (void)snprintf(path, sizeof(path), "/proc/%d/limits", (int)pid);
    FILE *input = fopen(path, "r");
    CHECK(input != NULL, "cannot read %s", path);
    while (fgets(line, sizeof(line), input) != NULL && strncmp(line, name, strlen(name)) != 0) {
    }
    (void)fclose(input);
    CHECK(sscanf(line + strlen(name), "%31s %31s", soft, hard) == 2 && strcmp(soft, hard) == 0,
          "%s", line);
}

static bool has_descriptor(pid_t pid, int fd)
{
    char path[64];
    struct stat status;
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, fd);
    return lstat(path, &status) == 0;
}

/* ---- a worker, to see that all of it still serves ---- */

static void works(void *unused)
{
    struct kvkeep_sequence sequence;
    (void)unused;
    worker_open(&(struct worker_options){.target = target, .model = "model", .name = "worker"});
    prompt_set(&prompt, 1, 256);
    worker_fill(&prompt, NULL, &sequence);
    CHECK_OK(kvkeep_swap_out(self.session, &sequence, NULL, &self.error));
    CHECK_OK(kvkeep_swap_in(self.session, &sequence, NULL, &self.error));
    worker_verify(&sequence, &prompt, 0, prompt.count);
    worker_close_sequence(&sequence);
    CHECK(worker_hit(&prompt) == 256, "what was sealed is not found");
}

static void with_worker(void)
{
    struct agent agent = {.name = "worker"};
    agent_start(&agent, "worker", worker_close);
    agent_do(&agent, works, NULL);
    agent_finish(&agent);
}

/* ---- privileges ---- */

static void privileges(void)
{
    struct daemon daemon;
    const struct passwd *nobody = getuid() == 0 ? getpwnam("nobody") : NULL;
    char line[96];
    phase("privileges, descriptors, calls");
    spawn(&daemon, nobody != NULL ? "user = nobody" : "",
          nobody != NULL ? nobody->pw_uid : getuid());
    wait_until_ready(&daemon);
    if (nobody != NULL) {
        struct stat status;
        unsigned uid = (unsigned)nobody->pw_uid;
        unsigned gid = (unsigned)nobody->pw_gid;
        (void)snprintf(line, sizeof(line), "Uid:\t%u\t%u\t%u\t%u", uid, uid, uid, uid);
        expect_line(daemon.pid, "status", line);
        (void)snprintf(line, sizeof(line), "Gid:\t%u\t%u\t%u\t%u", gid, gid, gid, gid);
        expect_line(daemon.pid, "status", line);
        (void)snprintf(line, sizeof(line), "/proc/%d/environ", (int)daemon.pid);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        CHECK(stat(line, &status) == 0 && status.st_uid == 0,
              "its user could trace it: /proc is owned by uid %u", (unsigned)status.st_uid);
#endif
        (void)snprintf(line, sizeof(line), "%s/kvkeep.sock", daemon.folder);
        CHECK(stat(line, &status) == 0 && status.st_uid == uid && (status.st_mode & 0777) == 0600,
              "the socket is uid %u's, mode %o", (unsigned)status.st_uid, status.st_mode & 0777);
    } else {
        (void)printf("            not root: a change of user is not tried\n");
    }
    static const char *const none[] = {"CapInh:\t0000000000000000",
                                       "CapPrm:\t0000000000000000",
                                       "CapEff:\t0000000000000000",
                                       "CapAmb:\t0000000000000000",
                                       "NoNewPrivs:\t1",
                                       "Seccomp:\t2"};
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        expect_line(daemon.pid, "status", none[i]);
    }
    if (getuid() == 0) {
        expect_line(daemon.pid, "status", "CapBnd:\t0000000000000000");
    }
    if (sees_descriptors()) {
        CHECK(!has_descriptor(daemon.pid, LEAKED_FD), "an inherited descriptor is still open");
        CHECK(has_descriptor(daemon.pid, 2), "no standard error");
    } else {
        (void)printf("            not root: inherited descriptors are not looked for\n");
    }
    expect_equal_limits(daemon.pid, "Max open files");
    with_worker();
    daemon_stop(&daemon);
}

/* Under a manager that leaves it nothing to give up, and refuses the calls that would. */
static void as_a_service(void)
{
    struct daemon daemon;
    phase("a service without privileges");
    is_service = true;
    spawn(&daemon, "", getuid());
    is_service = false;
    wait_until_ready(&daemon);
    expect_line(daemon.pid, "status", "CapEff:\t0000000000000000");
    expect_line(daemon.pid, "status", "NoNewPrivs:\t1");
    with_worker();
    daemon_stop(&daemon);
}

/* Exits with 2 and the field's name, before it makes anything. */
static void unknown_user(void)
{
    struct daemon daemon;
    char line[256] = "";
    int status = 0;
    phase("a user that is not there");
    spawn(&daemon, "user = kvkeep-no-such-user", getuid());
    CHECK(waitpid(daemon.pid, &status, 0) == daemon.pid && WIFEXITED(status) &&
              WEXITSTATUS(status) == 2,
          "status %x", (unsigned)status);
    FILE *log = fopen(daemon_log_path, "r");
    CHECK(log != NULL && fgets(line, sizeof(line), log) != NULL, "no word");
    (void)fclose(log);
    CHECK(strstr(line, "process.user") != NULL, "%s", line);
    daemon_clean(&daemon);
}

/* The filter in a process of our own: 0 where it refuses and lets through what it should. */
static void filtered_calls(void)
{
    int status = 0;
    phase("the filter of system calls");
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        struct kvk_error error;
        if (kvk_harden_calls(&error) != KVK_OK) {
            _exit(77);
        }
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0 || errno != EPERM) {
            _exit(1);
        }
        if (unshare(CLONE_NEWUTS) == 0 || errno != EPERM || setgid(getgid()) == 0) {
            _exit(2);
        }
        void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (memory == MAP_FAILED || fd < 0 || write(fd, "", 1) != 1 || getpid() <= 0) {
            _exit(3);
        }
        pid_t child = fork();
        if (child == 0) {
            _exit(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0 ? 4 : 0);
        }
        int child_status = 0;
        (void)waitpid(child, &child_status, 0);
        _exit(child_status == 0 ? 0 : 4);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status), "the filter kills");
    if (WEXITSTATUS(status) == 77) {
        (void)printf("            this kernel has no filters\n");
        return;
    }
    CHECK(WEXITSTATUS(status) == 0, "case %d", WEXITSTATUS(status));
}

/* ---- cores ---- */

/* Is the text anywhere in the file? Answers how often. */
static uint64_t count_in_file(const char *path, const void *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    CHECK(fd >= 0 && fstat(fd, &status) == 0, "cannot read %s", path);
    uint8_t *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(bytes != MAP_FAILED, "cannot map %s", path);
    uint64_t count = 0;
    uint8_t *at = bytes;
    uint8_t *end = bytes + status.st_size;
    while ((at = memmem(at, (size_t)(end - at), text, size)) != NULL) {
        count++;
        at++;
    }
    (void)munmap(bytes, (size_t)status.st_size);
    (void)close(fd);
    return count;
}

static bool make_core(const struct daemon *daemon, char *core, size_t size)
{
    char command[256];
    (void)snprintf(core, size, "%s/core", daemon->folder);
    (void)snprintf(command, sizeof(command), "gcore -o %s %d >/dev/null 2>&1", core,
                   (int)daemon->pid);
    int result = system(command); /* NOLINT(cert-env33-c): a test's own words */
    (void)snprintf(core, size, "%s/core.%d", daemon->folder, (int)daemon->pid);
    return result == 0 && access(core, R_OK) == 0;
}

/* A core has the heap, but no slot of a block and no credential's token. */
static void cores_without_kv(void)
{
    struct daemon daemon;
    char core[128];
    phase("a core has no K/V and no token");
    spawn(&daemon, "core_dumps = yes", getuid());
    wait_until_ready(&daemon);
    with_worker();
    if (!make_core(&daemon, core, sizeof(core))) {
        (void)printf("            no gcore, or it may not trace: no core was looked at\n");
        daemon_stop(&daemon);
        return;
    }
    /* The agent's prompt, here again: its bytes follow from it. */
    self.seed = seed_of(NULL, "model");
    prompt_set(&prompt, 1, 256);
    CHECK(count_in_file(core, daemon.folder, strlen(daemon.folder)) > 0,
          "the core holds no memory at all");
    uint64_t found = 0;
    for (uint64_t i = 0; i < prompt.count; i += 16) {
        uint64_t row[8];
        for (uint32_t word = 0; word < 8; word++) {
            row[word] = row_word(prompt.seeds[i], 0, 1, word);
        }
        found += count_in_file(core, row, sizeof(row));
    }
    CHECK(found == 0, "K/V of %llu tokens is in the core", (unsigned long long)found);
    CHECK(count_in_file(core, SECRET, strlen(SECRET)) == 0, "a credential's token is in the core");
    (void)unlink(core);
    daemon_stop(&daemon);
}

static void no_cores(void)
{
    struct daemon daemon;
    int status = 0;
    phase("no core where none is wanted");
    spawn(&daemon, "", getuid());
    wait_until_ready(&daemon);
    CHECK(kill(daemon.pid, SIGABRT) == 0 && waitpid(daemon.pid, &status, 0) == daemon.pid, "kill");
    CHECK(WIFSIGNALED(status) && !WCOREDUMP(status), "status %x: it left a core", (unsigned)status);
    daemon_clean(&daemon);
}

/* ---- the service manager ---- */

static int manager_open(char *path, size_t size)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(path, size, "/tmp/kvkeep-manager.%d", (int)getpid());
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    (void)unlink(path);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (const struct sockaddr *)&address, sizeof(address)) == 0, "%s", path);
    return fd;
}

/* Is it said within the time? Other messages are read past. */
static bool manager_hears(int fd, const char *words, uint64_t within_ms)
{
    uint64_t until_ms = now_ms() + within_ms;
    char text[512];
    while (now_ms() < until_ms) {
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        if (poll(&wait, 1, 20) == 1) {
            ssize_t size = recv(fd, text, sizeof(text) - 1, 0);
            text[size < 0 ? 0 : size] = '\0';
            if (strncmp(text, words, strlen(words)) == 0) {
                return true;
            }
        }
    }
    return false;
}

static void service_manager(void)
{
    struct daemon daemon;
    char path[64];
    phase("what it tells a service manager");
    int fd = manager_open(path, sizeof(path));
    CHECK(setenv("NOTIFY_SOCKET", path, 1) == 0 && setenv("WATCHDOG_USEC", "1500000", 1) == 0,
          "setenv");
    spawn(&daemon, "", getuid());
    CHECK(unsetenv("NOTIFY_SOCKET") == 0 && unsetenv("WATCHDOG_USEC") == 0, "unsetenv");
    CHECK(manager_hears(fd, "READY=1", 20000), "not ready");
    CHECK(daemon_answers(&daemon), "it said that it is ready, and does not answer");
    for (int i = 0; i < 4; i++) {
        CHECK(manager_hears(fd, "WATCHDOG=1\nSTATUS=serving", 3000), "no sign of life");
    }
    CHECK(kill(daemon.pid, SIGSTOP) == 0, "SIGSTOP");
    while (manager_hears(fd, "WATCHDOG=1", 600)) {
    }
    CHECK(!manager_hears(fd, "", 2000), "a stopped process speaks");
    CHECK(kill(daemon.pid, SIGCONT) == 0, "SIGCONT");
    CHECK(manager_hears(fd, "WATCHDOG=1", 5000), "it does not speak again");
    CHECK(kill(daemon.pid, SIGTERM) == 0, "SIGTERM");
    CHECK(manager_hears(fd, "STOPPING=1", 5000), "it ends without a word");
    int status = 0;
    CHECK(waitpid(daemon.pid, &status, 0) == daemon.pid && status == 0, "status %x",
          (unsigned)status);
    daemon_clean(&daemon);
    (void)close(fd);
    (void)unlink(path);
}

int main(void)
{
    test_begin(240);
    filtered_calls();
    privileges();
    as_a_service();
    unknown_user();
    cores_without_kv();
    no_cores();
    service_manager();
    phase("passed");
    return 0;
}
