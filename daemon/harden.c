#include "daemon/harden.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/log.h"

/* A sanitizer's leak check traces its own process at the end. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TRACED_BY_ITSELF true
#else
#define TRACED_BY_ITSELF false
#endif

#define CORE_FILTER "0x11" /* private memory and ELF headers: no mapping that is shared */

/* ---- descriptors, modes, limits ---- */

static long number_of(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    if (text == NULL || text[0] < '0' || text[0] > '9') {
        return 0;
    }
    long number = strtol(text, &end, 10);
    return *end == '\0' && number < (1 << 20) ? number : 0;
}

static void close_inherited(void)
{
    long passed = number_of("LISTEN_PID") == (long)getpid() ? number_of("LISTEN_FDS") : 0;
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        /* The lowest free number is taken, so this fills the gap itself. */
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) {
            abort(); /* without a word: there is nowhere to say it */
        }
    }
    unsigned first = STDERR_FILENO + 1U + (unsigned)passed;
    if (syscall(SYS_close_range, first, ~0U, 0) != 0 && errno == ENOSYS) {
        for (int fd = (int)first; fd < 4096; fd++) {
            (void)close(fd);
        }
    }
}

/* Up to the hard limit, or past it where the process still may. */
static void raise_limit(__rlimit_resource_t resource, bool past, const char *name)
{
    struct rlimit limit;
    if (getrlimit(resource, &limit) != 0) {
        return;
    }
    struct rlimit wanted = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
    if (past && setrlimit(resource, &wanted) == 0) {
        return;
    }
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(resource, &limit) != 0) {
            kvk_log(KVK_LOG_WARNING, "limit_kept", "limit=%s errno=%d", name, errno);
        }
    }
}

void kvk_harden_begin(void)
{
    close_inherited();
    (void)umask(077);
    raise_limit(RLIMIT_NOFILE, false, "nofile");  /* connections, mappings and sessions */
    raise_limit(RLIMIT_MEMLOCK, true, "memlock"); /* the host tier */
}

/* ---- user and group ---- */

struct identity {
    uid_t uid;
    gid_t gid;
    bool set;
    char name[64]; /* of the user, for its supplementary groups */
};

static enum kvk_status refuse(struct kvk_error *error, const char *field, const char *what,
                              const char *name)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %s %.64s", field, what, name);
}

static enum kvk_status find_identity(const char *user, const char *group, struct identity *identity,
                                     struct kvk_error *error)
{
    *identity = (struct identity){.uid = getuid(), .gid = getgid()};
    if (user[0] != '\0') {
        errno = 0;
        const struct passwd *entry = getpwnam(user);
        if (entry == NULL) {
            return refuse(error, "process.user", "there is no user", user);
        }
        identity->uid = entry->pw_uid;
        identity->gid = entry->pw_gid;
        identity->set = true;
        (void)snprintf(identity->name, sizeof(identity->name), "%s", user);
    }
    if (group[0] != '\0') {
        const struct group *entry = getgrnam(group);
        if (entry == NULL) {
            return refuse(error, "process.group", "there is no group", group);
        }
        identity->gid = entry->gr_gid;
        identity->set = true;
    }
    return KVK_OK;
}

static enum kvk_status become(const struct identity *identity, struct kvk_error *error)
{
    if (geteuid() != 0) {
        if (identity->uid != geteuid() || identity->gid != getegid()) {
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "process.user",
                            "process.user: only root can become another user or group; this is "
                            "uid %u",
                            (unsigned)geteuid());
        }
        return KVK_OK;
    }
    int result =
        identity->name[0] != '\0' ? initgroups(identity->name, identity->gid) : setgroups(0, NULL);
    if (result != 0 || setresgid(identity->gid, identity->gid, identity->gid) != 0 ||
        setresuid(identity->uid, identity->uid, identity->uid) != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "process.user",
                        "process.user: cannot become uid %u, gid %u: %s", (unsigned)identity->uid,
                        (unsigned)identity->gid, strerror(errno));
    }
    return KVK_OK;
}

/* ---- capabilities ---- */

static void drop_bounding_set(void)
{
    for (unsigned long capability = 0; capability <= 63; capability++) {
        if (prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1) {
            (void)prctl(PR_CAPBSET_DROP, capability, 0, 0, 0); /* only root can, or needs to */
        }
    }
}

/* A service manager that gives none may forbid the call that gives them up, too. */
static bool give_up_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct own[_LINUX_CAPABILITY_U32S_3];
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3];
    memset(none, 0, sizeof(none));
    (void)prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (syscall(SYS_capset, &header, none) == 0) {
        return true;
    }
    int refusal = errno;
    memset(own, 0xff, sizeof(own));
    bool is_bare = syscall(SYS_capget, &header, own) == 0 && memcmp(own, none, sizeof(own)) == 0;
    errno = refusal;
    return is_bare;
}

static enum kvk_status drop_capabilities(struct kvk_error *error)
{
    if (!give_up_capabilities() || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                        "cannot give up the process's capabilities: %s", strerror(errno));
    }
    return KVK_OK;
}

/* ---- cores ---- */

static void filter_cores(void)
{
    int fd = open("/proc/self/coredump_filter", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, CORE_FILTER, strlen(CORE_FILTER)) < 0) {
        kvk_log(KVK_LOG_WARNING, "core_filter_kept", "errno=%d", errno);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
}

/* A limit of one byte stops handlers that a pipe leads to as well; 0 would not. */
static void forbid_cores(void)
{
    const struct rlimit none = {.rlim_cur = 1, .rlim_max = 1};
    bool forbidden = setrlimit(RLIMIT_CORE, &none) == 0 || errno == EPERM;
    if (!TRACED_BY_ITSELF) {
        forbidden = prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0 && forbidden;
    }
    if (!forbidden) {
        kvk_log(KVK_LOG_WARNING, "core_limit_kept", "errno=%d", errno);
    }
}

enum kvk_status kvk_harden_privileges(const char *user, const char *group, bool core_dumps,
                                      struct kvk_error *error)
{
    struct identity identity;
    enum kvk_status status = find_identity(user, group, &identity, error);
    if (status != KVK_OK) {
        return status;
    }
    filter_cores(); /* while /proc/self is ours for sure */
    drop_bounding_set();
    if (identity.set) {
        status = become(&identity, error);
    }
    if (status == KVK_OK) {
        status = drop_capabilities(error);
    }
    if (status != KVK_OK) {
        return status;
    }
    /* Last: a change of user sets it anew. */
    if (core_dumps) {
        (void)prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    } else {
        forbid_cores();
    }
    return KVK_OK;
}
