/* The CPU device's memory and copies: what a mapping may do, and what it may not. */
#include "gpu/device.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/copy.h"
#include "base/random.h"

#define PAGE UINT64_C(4096)
#define MIB (UINT64_C(1) << 20)

static struct kvk_device *device;

static struct kvk_device *open_with(const struct kvk_device_cpu_options *options)
{
    struct kvk_device *result = NULL;
    struct kvk_error error;
    enum kvk_status status = kvk_device_cpu_open(options, &result, &error);

    cr_assert_eq(status, KVK_OK, "%s", error.text);
    return result;
}

static void setup(void)
{
    device = open_with(NULL);
}

static void teardown(void)
{
    device->ops->close(device);
}

TestSuite(gpu_device, .init = setup, .fini = teardown);

static struct kvk_region make_region(uint64_t size_bytes)
{
    struct kvk_region region;
    struct kvk_error error;
    enum kvk_status status = device->ops->alloc(device, size_bytes, 0, "test", &region, &error);

    cr_assert_eq(status, KVK_OK, "%s", error.text);
    return region;
}

static void back(struct kvk_region *region, uint64_t offset, uint64_t size_bytes)
{
    struct kvk_error error;
    enum kvk_status status = device->ops->back(device, region, offset, size_bytes, &error);

    cr_assert_eq(status, KVK_OK, "%s", error.text);
}

static void punch(struct kvk_region *region, uint64_t offset, uint64_t size_bytes)
{
    struct kvk_error error;
    enum kvk_status status = device->ops->punch(device, region, offset, size_bytes, &error);

    cr_assert_eq(status, KVK_OK, "%s", error.text);
}

static bool is_filled(const uint8_t *bytes, uint64_t size_bytes, uint8_t value)
{
    for (uint64_t i = 0; i < size_bytes; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* ---- Opening ---- */

Test(gpu_device, says_what_it_is)
{
    struct kvk_device_info info;
    const struct kvk_device_cpu_options options = {.attend_thread_count = 3, .path = "plain"};
    struct kvk_device *other = open_with(&options);

    other->ops->info(other, &info);
    cr_assert_str_eq(info.name, "cpu");
    cr_assert_str_eq(info.path, "plain");
    cr_assert_eq(info.thread_count, 3);
    other->ops->close(other);

    device->ops->info(device, &info);
    cr_assert_geq(info.thread_count, 1);
}

Test(gpu_device, refuses_options_that_cannot_be)
{
    const struct kvk_device_cpu_options unknown = {.path = "avx1024"};
    const struct kvk_device_cpu_options attend = {.attend_thread_count = 1025};
    const struct kvk_device_cpu_options copy = {.copy_thread_count = UINT32_MAX};
    struct kvk_device *other = NULL;
    struct kvk_error error;

    cr_assert_eq(kvk_device_cpu_open(&unknown, &other, &error), KVK_UNSUPPORTED);
    cr_assert_str_eq(error.field, "path");
    cr_assert_eq(kvk_device_cpu_open(&attend, &other, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "attend_thread_count");
    cr_assert_eq(kvk_device_cpu_open(&copy, &other, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "copy_thread_count");
}

Test(gpu_device, refuses_regions_that_cannot_be)
{
    struct kvk_region region;
    struct kvk_error error;

    cr_assert_eq(device->ops->alloc(device, 0, 0, "none", &region, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "size_bytes");
    cr_assert_eq(device->ops->alloc(device, UINT64_MAX, 0, "all", &region, &error), KVK_INVALID);
    /* More than there is address space: refused by the system, not by us. */
    cr_assert_eq(device->ops->alloc(device, UINT64_C(1) << 60, 0, "much", &region, &error),
                 KVK_EXHAUSTED);
}

/* ---- Memory ---- */

Test(gpu_device, seals_hold)
{
    struct kvk_region region = make_region(MIB);
    struct kvk_export export;
    struct kvk_error error;
    struct stat status;

    cr_assert_eq(device->ops->export(device, &region, &export, &error), KVK_OK);
    cr_assert_eq(export.kind, KVK_EXPORT_MEMFD);
    cr_assert_eq(export.fd, region.fd);
    cr_assert_eq(fstat(export.fd, &status), 0);
    cr_assert_eq((uint64_t)status.st_size, region.size_bytes);
    cr_assert_eq(ftruncate(export.fd, (off_t)PAGE), -1);
    cr_assert_eq(errno, EPERM);
    cr_assert_eq(ftruncate(export.fd, (off_t)(2 * MIB)), -1);
    cr_assert_eq(errno, EPERM);
    cr_assert_eq(fcntl(export.fd, F_ADD_SEALS, F_SEAL_WRITE), -1, "sealed against further seals");
    cr_assert_eq(errno, EPERM);
    device->ops->free(device, &region);
}

/* The daemon writes it by the mapping that it has; nobody gets another that could. */
Test(gpu_device, public_memory_takes_no_writable_mapping)
{
    struct kvk_region region;
    struct kvk_error error;
    char path[64];
    cr_assert_eq(device->ops->alloc_public(device, 3 * PAGE, "test", &region, &error), KVK_OK, "%s",
                 error.text);
    back(&region, 0, 3 * PAGE);
    memset(region.address, 0x5a, 3 * PAGE);
    int seals = fcntl(region.fd, F_GET_SEALS);
    cr_assert_eq(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE),
                 F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", region.fd);
    int again = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(again, 0);
    cr_assert_eq(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
    cr_assert_neq(pwrite(again, "x", 1, 0), 1);
    uint8_t *seen = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, again, 0);
    cr_assert_neq(seen, MAP_FAILED);
    cr_assert_neq(mprotect(seen, PAGE, PROT_READ | PROT_WRITE), 0);
    cr_assert_eq(seen[7], 0x5a);
    device->ops->free(device, &region);
    cr_assert_eq(seen[7], 0, "freed, it is zeros to whoever maps it still");
    cr_assert_eq(munmap(seen, PAGE), 0);
    (void)close(again);
}

Test(gpu_device, a_huge_region_costs_nothing_until_backed)
{
    struct kvk_region region = make_region(UINT64_C(1) << 40);

    cr_assert_eq(device->ops->backed_bytes(device, &region), 0);
    back(&region, (UINT64_C(1) << 39) + 1, 3 * MIB);
    uint64_t backed = device->ops->backed_bytes(device, &region);
    cr_assert(backed >= 3 * MIB && backed <= 3 * MIB + 2 * PAGE, "%llu",
              (unsigned long long)backed);
    memset(region.address + (UINT64_C(1) << 39) + 1, 7, 3 * MIB);
    cr_assert_eq(device->ops->backed_bytes(device, &region), backed, "writes faulted nothing in");
    device->ops->free(device, &region);
}

Test(gpu_device, an_older_mapping_sees_zeros_after_a_punch)
{
    struct kvk_region region = make_region(8 * MIB);

    back(&region, MIB, 2 * MIB);
    uint8_t *mapping =
        mmap(NULL, region.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd, 0);
    cr_assert_neq(mapping, MAP_FAILED);
    memset(region.address + MIB, 0xa5, 2 * MIB);
    cr_assert(is_filled(mapping + MIB, 2 * MIB, 0xa5));

    punch(&region, MIB, MIB);
    cr_assert_eq(device->ops->backed_bytes(device, &region), MIB);
    cr_assert(is_filled(mapping + MIB, MIB, 0));
    cr_assert(is_filled(mapping + 2 * MIB, MIB, 0xa5), "what was not punched stays");
    munmap(mapping, region.size_bytes);
    device->ops->free(device, &region);
}

Test(gpu_device, a_punch_rounds_inward)
{
    struct kvk_region region = make_region(MIB);

    back(&region, 0, MIB);
    memset(region.address, 1, MIB);
    punch(&region, 100, PAGE - 100 + PAGE + 1);
    cr_assert(is_filled(region.address, PAGE, 1));
    cr_assert(is_filled(region.address + PAGE, PAGE, 0));
    cr_assert(is_filled(region.address + 2 * PAGE, PAGE, 1));
    punch(&region, 100, PAGE); /* holds no whole page */
    cr_assert(is_filled(region.address, PAGE, 1));
    device->ops->free(device, &region);
}

Test(gpu_device, strays_count_as_backed)
{
    struct kvk_region region = make_region(64 * MIB);

    uint8_t *mapping =
        mmap(NULL, region.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd, 0);
    cr_assert_neq(mapping, MAP_FAILED);
    back(&region, 0, MIB);
    mapping[40 * MIB] = 1;
    mapping[50 * MIB] = 1;
    cr_assert_eq(device->ops->backed_bytes(device, &region), MIB + 2 * PAGE);
    punch(&region, 0, region.size_bytes);
    cr_assert_eq(device->ops->backed_bytes(device, &region), 0);
    munmap(mapping, region.size_bytes);
    device->ops->free(device, &region);
}

/* Another process keeps its mapping past the region's end: it reads zeros, and holds no memory. */
Test(gpu_device, a_freed_region_leaves_nothing_to_see)
{
    struct kvk_region region = make_region(4 * MIB);

    back(&region, 0, 4 * MIB);
    memset(region.address, 0x5a, 4 * MIB);
    int kept = dup(region.fd);
    uint8_t *mapping = mmap(NULL, 4 * MIB, PROT_READ, MAP_SHARED, kept, 0);
    cr_assert_neq(mapping, MAP_FAILED);
    cr_assert_eq(mapping[MIB], 0x5a);
    device->ops->free(device, &region);
    struct stat status;
    cr_assert_eq(fstat(kept, &status), 0);
    cr_assert_eq(status.st_blocks, 0);
    cr_assert(is_filled(mapping, 4 * MIB, 0));
    munmap(mapping, 4 * MIB);
    close(kept);
}

Test(gpu_device, backing_again_loses_nothing)
{
    struct kvk_device_cpu_options options = {.huge_pages = true};
    struct kvk_device *huge = open_with(&options);
    struct kvk_region region;
    struct kvk_error error;

    cr_assert_eq(huge->ops->alloc(huge, 16 * MIB, 0, "huge", &region, &error), KVK_OK);
    cr_assert_eq((uintptr_t)region.address % (2 * MIB), 0, "huge pages need their alignment");
    cr_assert_eq(huge->ops->back(huge, &region, MIB, 5 * MIB, &error), KVK_OK);
    memset(region.address + MIB, 0x3c, 5 * MIB);
    cr_assert_eq(huge->ops->back(huge, &region, 0, 16 * MIB, &error), KVK_OK);
    cr_assert(is_filled(region.address, MIB, 0));
    cr_assert(is_filled(region.address + MIB, 5 * MIB, 0x3c));
    cr_assert_eq(huge->ops->backed_bytes(huge, &region), 16 * MIB);
    huge->ops->free(huge, &region);
    huge->ops->close(huge);
}

/* One page taken in advance for each huge one counts for nothing more than itself: what lies beside
 * the range stays empty, and every byte in it reads as zero. */
Test(gpu_device, an_empty_range_is_backed_exactly)
{
    const struct kvk_device_cpu_options options = {.huge_pages = true, .interleave = true};
    struct kvk_device *huge = open_with(&options);
    struct kvk_region region;
    struct kvk_error error;

    cr_assert_eq(huge->ops->alloc(huge, 64 * MIB, 0, "huge", &region, &error), KVK_OK);
    cr_assert_eq(huge->ops->back(huge, &region, MIB, 12 * MIB, &error), KVK_OK);
    cr_assert_eq(huge->ops->backed_bytes(huge, &region), 12 * MIB);
    cr_assert(is_filled(region.address + MIB, 12 * MIB, 0));
    cr_assert_eq(huge->ops->back(huge, &region, 40 * MIB + PAGE, 7 * PAGE, &error), KVK_OK);
    cr_assert_eq(huge->ops->backed_bytes(huge, &region), 12 * MIB + 7 * PAGE);
    huge->ops->free(huge, &region);
    huge->ops->close(huge);
}

/* From here on, taking more than `bytes_max` bytes of a file at a time fails for want of memory, as
 * it does in a control group that is full. Punching goes on. */
static void memory_runs_out(uint32_t bytes_max)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, bytes_max, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
    cr_assert_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    cr_assert_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

/* With one mapping, and with windows of 4 MiB. */
Test(gpu_device, without_memory_nothing_is_backed)
{
    memory_runs_out(2 * MIB);
    for (uint64_t piece_bytes = 0; piece_bytes <= MIB; piece_bytes += MIB) {
        const struct kvk_device_cpu_options options = {.huge_pages = true, .window_bytes = 4 * MIB};
        struct kvk_device *huge = open_with(&options);
        struct kvk_region region;
        struct kvk_error error;
        cr_assert_eq(huge->ops->alloc(huge, 64 * MIB, piece_bytes, "huge", &region, &error),
                     KVK_OK);
        cr_assert_eq(huge->ops->back(huge, &region, 4 * MIB, 2 * MIB, &error), KVK_OK, "%s",
                     error.text);
        memset(kvk_region_at(&region, 4 * MIB), 0x3c, MIB);

        cr_assert_eq(huge->ops->back(huge, &region, 16 * MIB, 12 * MIB, &error), KVK_EXHAUSTED);
        cr_assert_not_null(strstr(error.text, "12582912 bytes"), "%s", error.text);
        cr_assert_eq(huge->ops->backed_bytes(huge, &region), 2 * MIB, "what was empty still is");
        cr_assert_eq(huge->ops->back(huge, &region, 4 * MIB, 12 * MIB, &error), KVK_EXHAUSTED);
        cr_assert_eq(huge->ops->backed_bytes(huge, &region), 2 * MIB);
        cr_assert(is_filled(kvk_region_at(&region, 4 * MIB), MIB, 0x3c), "and no byte is lost");
        if (piece_bytes > 0) {
            cr_assert_null(kvk_region_at(&region, 20 * MIB), "no window is kept for nothing");
        }
        huge->ops->free(huge, &region);
        huge->ops->close(huge);
    }
}

/* ---- Regions that outlive their device ---- */

Test(gpu_device, a_region_that_was_left_is_adopted_with_its_bytes)
{
    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(device->ops->alloc(device, 4 * MIB, 0, "kept", &region, &error), KVK_OK);
    cr_assert_eq(device->ops->back(device, &region, MIB, MIB, &error), KVK_OK);
    memset(region.address + MIB, 0x5a, MIB);
    int kept = dup(region.fd);
    device->ops->leave(device, &region);

    cr_assert_eq(device->ops->adopt(device, kept, 4 * MIB, 0, &region, &error), KVK_OK, "%s",
                 error.text);
    cr_assert_eq(region.fd, kept);
    cr_assert(is_filled(region.address, MIB, 0));
    cr_assert(is_filled(region.address + MIB, MIB, 0x5a));
    region.address[MIB] = 1;                                           /* writable */
    cr_assert_eq(device->ops->backed_bytes(device, &region), 2 * MIB); /* the zeros were read */
    kept = dup(region.fd);
    device->ops->leave(device, &region);

    /* A smaller region takes what it needs; the rest is given back. */
    cr_assert_eq(device->ops->adopt(device, kept, MIB + 4096, 0, &region, &error), KVK_OK);
    cr_assert_eq(region.size_bytes, MIB + 4096);
    cr_assert_eq(region.address[MIB], 1);
    cr_assert_eq(region.address[MIB + 1], 0x5a);
    cr_assert_eq(device->ops->backed_bytes(device, &region), MIB + 4096);
    device->ops->free(device, &region);
}

static void adopt_refused(int fd, uint64_t size, enum kvk_status wanted, const char *word)
{
    struct kvk_region region = {.fd = -1};
    struct kvk_error error;
    cr_assert_geq(fd, 0);
    cr_assert_eq(device->ops->adopt(device, fd, size, 0, &region, &error), wanted);
    cr_assert_not_null(strstr(error.text, word), "%s", error.text);
    cr_assert_null(region.address);
    cr_assert_eq(close(fd), 0, "the descriptor stays the caller's");
}

Test(gpu_device, only_what_was_a_region_is_adopted)
{
    int fd = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    cr_assert_eq(ftruncate(fd, MIB), 0);
    adopt_refused(fd, MIB, KVK_INVALID, "sealed"); /* it could shrink under us */
    fd = memfd_create("half", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    cr_assert_eq(ftruncate(fd, MIB), 0);
    cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    adopt_refused(fd, MIB, KVK_INVALID, "sealed");
    char path[] = "/tmp/kvk-adopt-XXXXXX";
    fd = mkstemp(path);
    cr_assert_eq(ftruncate(fd, MIB), 0);
    (void)unlink(path);
    adopt_refused(fd, MIB, KVK_INVALID, "");
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    (void)close(ends[1]);
    adopt_refused(ends[0], MIB, KVK_INVALID, "memory file");

    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(device->ops->alloc(device, MIB, 0, "small", &region, &error), KVK_OK);
    adopt_refused(dup(region.fd), 2 * MIB, KVK_OUT_OF_RANGE, "1048576");
    device->ops->free(device, &region);
}

static unsigned long locked_kib(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long locked = 0;
    while (fgets(line, sizeof(line), status) != NULL) {
        (void)sscanf(line, "VmLck: %lu kB", &locked);
    }
    (void)fclose(status);
    return locked;
}

/* Sanitizers make mlock() do nothing. */
static bool locking_works(void)
{
    unsigned long before = locked_kib();
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_eq(mlock(page, PAGE), 0);
    bool works = locked_kib() > before;
    munmap(page, PAGE);
    return works;
}

Test(gpu_device, wishes_do_no_harm)
{
    const struct kvk_device_cpu_options options = {.interleave = true, .lock_memory = true};
    struct kvk_device *other = open_with(&options);
    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(other->ops->alloc(other, MIB, 0, "locked", &region, &error), KVK_OK);
    cr_assert_eq(other->ops->back(other, &region, 0, 64 * 1024, &error), KVK_OK, "%s", error.text);
    if (locking_works()) {
        cr_assert_geq(locked_kib(), 64);
    }
    other->ops->free(other, &region);
    other->ops->close(other);
}

/* ---- Copies ---- */

static void copy_checked(struct kvk_device *with, const struct kvk_copy *copies, uint32_t count)
{
    struct kvk_error error;
    enum kvk_status status = with->ops->copy(with, copies, count, &error);

    cr_assert_eq(status, KVK_OK, "%s", error.text);
}

#define GUARD 80

/* A piece with guards around its target. */
struct piece {
    struct kvk_copy copy;
    uint64_t checksum;
    uint8_t *target; /* what was allocated */
    uint8_t *source;
};

static void piece_init(struct piece *piece, struct kvk_random *random, uint64_t size_max)
{
    uint64_t size = kvk_random_below(random, size_max);
    uint64_t target_skew = GUARD + kvk_random_below(random, 64);
    uint64_t source_skew = kvk_random_below(random, 64);

    piece->target = malloc(size + target_skew + GUARD);
    piece->source = malloc(size + source_skew + 1);
    cr_assert(piece->target != NULL && piece->source != NULL);
    memset(piece->target, 0xee, size + target_skew + GUARD);
    kvk_random_fill(random, piece->source, size + source_skew + 1);
    piece->copy = (struct kvk_copy){
        .target = piece->target + target_skew,
        .source = piece->source + source_skew,
        .size_bytes = size,
        .checksum = kvk_random_chance(random, 0.6) ? &piece->checksum : NULL,
    };
}

static void piece_check(struct piece *piece, uint64_t seed)
{
    const uint8_t *target = piece->copy.target;
    const uint8_t *source = piece->copy.source;
    uint64_t size = piece->copy.size_bytes;

    cr_assert(size == 0 || memcmp(target, source, size) == 0, "seed %llu",
              (unsigned long long)seed);
    cr_assert(is_filled(target - GUARD, GUARD, 0xee), "seed %llu", (unsigned long long)seed);
    cr_assert(is_filled(target + size, GUARD, 0xee), "seed %llu", (unsigned long long)seed);
    if (piece->copy.checksum != NULL) {
        cr_assert_eq(piece->checksum, kvk_checksum(source, size), "seed %llu",
                     (unsigned long long)seed);
    }
    free(piece->target);
    free(piece->source);
}

static void copy_random(struct kvk_device *with, uint64_t seed, uint64_t size_max)
{
    struct kvk_random random;
    struct piece pieces[9];
    struct kvk_copy copies[9];

    kvk_random_init(&random, seed);
    uint32_t count = 1 + (uint32_t)kvk_random_below(&random, 9);
    for (uint32_t i = 0; i < count; i++) {
        piece_init(&pieces[i], &random, size_max);
        copies[i] = pieces[i].copy;
    }
    copy_checked(with, copies, count);
    for (uint32_t i = 0; i < count; i++) {
        piece_check(&pieces[i], seed);
    }
}

Test(gpu_device, copies_any_size_and_alignment)
{
    for (uint64_t seed = 0; seed < 150; seed++) {
        copy_random(device, seed, seed % 3 == 0 ? 300 : 200000);
    }
}

Test(gpu_device, copies_with_threads_and_odd_steps)
{
    const struct kvk_device_cpu_options options = {.copy_thread_count = 3, .copy_step_bytes = 5000};
    struct kvk_device *other = open_with(&options);

    for (uint64_t seed = 1000; seed < 1040; seed++) {
        copy_random(other, seed, seed % 4 == 0 ? 4 * MIB : 100000);
    }
    other->ops->close(other);
}

/* A lone piece without a checksum is cut between threads: the cuts must meet. */
Test(gpu_device, a_lone_piece_is_cut_without_a_gap)
{
    const struct kvk_device_cpu_options options = {.copy_thread_count = 4};
    struct kvk_device *other = open_with(&options);
    const uint64_t sizes[] = {MIB - 1, MIB, MIB + 1, 4 * MIB, 4 * MIB + 63, 7 * MIB + 12345};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvk_random random;
        uint8_t *source = malloc(sizes[i]);
        uint8_t *target = calloc(sizes[i] + 1, 1);
        struct kvk_copy copy = {.target = target, .source = source, .size_bytes = sizes[i]};
        kvk_random_init(&random, i);
        kvk_random_fill(&random, source, sizes[i]);
        copy_checked(other, &copy, 1);
        cr_assert_eq(memcmp(source, target, sizes[i]), 0);
        cr_assert_eq(target[sizes[i]], 0);
        free(source);
        free(target);
    }
    other->ops->close(other);
}

Test(gpu_device, an_empty_piece_has_the_checksum_of_nothing)
{
    uint64_t checksum = 1;
    struct kvk_copy copy = {.checksum = &checksum};

    copy_checked(device, &copy, 1);
    cr_assert_eq(checksum, kvk_checksum("", 0));
    copy_checked(device, NULL, 0);
}

static void *copy_thread(void *argument)
{
    uint64_t seed = *(uint64_t *)argument;

    for (uint64_t i = 0; i < 20; i++) {
        copy_random(device, seed + i, 100000);
    }
    return NULL;
}

Test(gpu_device, copies_run_side_by_side)
{
    pthread_t threads[4];
    uint64_t seeds[4];

    for (uint64_t i = 0; i < 4; i++) {
        seeds[i] = 5000 + 100 * i;
        cr_assert_eq(pthread_create(&threads[i], NULL, copy_thread, &seeds[i]), 0);
    }
    for (uint64_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
}

Test(gpu_device, the_test_hook_delays_each_piece)
{
    const struct kvk_device_cpu_options options = {.test_copy_delay_us = 20000};
    struct kvk_device *slow = open_with(&options);
    struct kvk_copy copies[3];
    uint8_t target[3] = {0};
    struct timespec begin;
    struct timespec end;

    for (uint32_t i = 0; i < 3; i++) {
        copies[i] = (struct kvk_copy){.target = &target[i], .source = "x", .size_bytes = 1};
    }
    clock_gettime(CLOCK_MONOTONIC, &begin);
    copy_checked(slow, copies, 3);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    cr_assert_geq(seconds, 0.06);
    cr_assert_eq(memcmp(target, "xxx", 3), 0);
    slow->ops->close(slow);
}
