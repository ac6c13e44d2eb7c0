/*
 * The filter of system calls: a list of what is refused, as a program for the kernel, without a
 * library. Everything that gRPC, glibc, io_uring and LMDB use stays allowed, so that an update of
 * theirs does not end the daemon; a list of what is allowed belongs to the service manager (see
 * deploy/kvkeepd.service).
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/harden.h"

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#define ARCHITECTURE 0
#endif

#define X32_BIT 0x40000000U /* the other table of numbers of x86-64 */

static const uint32_t refused[] = {
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_kcmp,
    SYS_pidfd_getfd,
    SYS_perf_event_open,
    SYS_bpf,
    SYS_userfaultfd,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_move_mount,
    SYS_open_tree,
    SYS_fsopen,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fspick,
    SYS_setns,
    SYS_unshare,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_reboot,
    SYS_swapon,
    SYS_swapoff,
    SYS_acct,
    SYS_quotactl,
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_clock_adjtime,
    SYS_adjtimex,
    SYS_sethostname,
    SYS_setdomainname,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    SYS_fanotify_init,
    SYS_personality,
    SYS_syslog,
    SYS_vhangup,
    SYS_lookup_dcookie,
    SYS_setuid,
    SYS_setgid,
    SYS_setreuid,
    SYS_setregid,
    SYS_setresuid,
    SYS_setresgid,
    SYS_setgroups,
    SYS_capset,
    SYS_mknodat,
#if defined(__x86_64__)
    SYS_mknod,
    SYS_iopl,
    SYS_ioperm,
    SYS_modify_ldt,
    SYS_kexec_file_load,
#endif
};
#define REFUSED_COUNT (sizeof(refused) / sizeof(refused[0]))
_Static_assert(REFUSED_COUNT < 250, "a jump is one byte");

#define LOAD(member)                                                                               \
    (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, member))
#define RESULT(value) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, value)

/* The list, then "allow", then "refuse"; the architecture comes first. Answers its length. */
static size_t program_write(struct sock_filter *program)
{
    size_t count = 0;
    program[count++] = LOAD(arch);
    program[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
    program[count++] = RESULT(SECCOMP_RET_ERRNO | EPERM);
    program[count++] = LOAD(nr);
    program[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, X32_BIT,
                                                    (uint8_t)(REFUSED_COUNT + 1), 0);
    for (size_t i = 0; i < REFUSED_COUNT; i++) {
        program[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i],
                                                        (uint8_t)(REFUSED_COUNT - i), 0);
    }
    program[count++] = RESULT(SECCOMP_RET_ALLOW);
    program[count++] = RESULT(SECCOMP_RET_ERRNO | EPERM);
    return count;
}

enum kvk_status kvk_harden_calls(struct kvk_error *error)
{
    struct sock_filter program[REFUSED_COUNT + 7];
    if (ARCHITECTURE == 0) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "process.seccomp",
                        "process.seccomp: not known on this architecture");
    }
    const struct sock_fprog filter = {.len = (unsigned short)program_write(program),
                                      .filter = program};
    /* All threads at once; those that they start later inherit it. */
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) != 0) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "process.seccomp",
                        "process.seccomp: the kernel takes no filter: %s", strerror(errno));
    }
    return KVK_OK;
}
