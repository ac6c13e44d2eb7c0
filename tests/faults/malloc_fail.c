/*
 * Memory that runs out, for a daemon under test: preloaded, it refuses allocations of the program
 * itself now and then. What libraries allocate is left alone: gRPC ends the process where it gets
 * none, and that is not ours to change.
 *
 * KVKEEP_FAIL_MALLOC names a file of two 32-bit words that test and daemon share: one in how many
 * allocations is refused (0: none), and how many were.
 */
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* The C library's own, under the names that it keeps for this. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

struct switchboard {
    _Atomic uint32_t one_in;
    _Atomic uint32_t refused;
};

static struct switchboard *switchboard;
static uintptr_t program_begin, program_end;

static int program_find(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X) != 0) {
            program_begin = info->dlpi_addr + part->p_vaddr;
            program_end = program_begin + part->p_memsz;
        }
    }
    return 1; /* the first one is the program */
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("KVKEEP_FAIL_MALLOC");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        void *memory = mmap(NULL, sizeof(*switchboard), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        (void)close(fd);
        (void)dl_iterate_phdr(program_find, NULL);
        switchboard = memory == MAP_FAILED ? NULL : memory;
    }
}

static bool is_refused(uintptr_t caller)
{
    static _Atomic uint64_t turn;
    uint32_t one_in = switchboard == NULL ? 0 : atomic_load(&switchboard->one_in);
    if (one_in == 0 || caller < program_begin || caller >= program_end) {
        return false;
    }
    uint64_t mixed = (atomic_fetch_add(&turn, 1) + 1) * UINT64_C(0x9e3779b97f4a7c15);
    if ((mixed >> 33) % one_in != 0) {
        return false;
    }
    atomic_fetch_add(&switchboard->refused, 1);
    errno = ENOMEM;
    return true;
}

__attribute__((visibility("default"))) void *malloc(size_t size)
{
    return is_refused((uintptr_t)__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

__attribute__((visibility("default"))) void *calloc(size_t count, size_t size)
{
    return is_refused((uintptr_t)__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

__attribute__((visibility("default"))) void *realloc(void *memory, size_t size)
{
    return is_refused((uintptr_t)__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}
