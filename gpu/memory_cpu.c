#include "gpu/memory_cpu.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/assert.h"

#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)

/* Known to kernels since 6.1; the C library may be older. */
#define ADVICE_COLLAPSE 25

/* NUMA nodes that are told apart. */
#define NODE_COUNT_MAX 1024
#define NODE_WORD_BITS (8 * sizeof(unsigned long))
#define NODE_WORDS (NODE_COUNT_MAX / NODE_WORD_BITS)

/* No file of another process can shrink or grow it, or lift that. */
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)
#define REGION_SEALS (SIZE_SEALS | F_SEAL_SEAL)
/* Nor can it be mapped writably any more: since Linux 5.1. */
#define PUBLIC_SEALS (F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t round_down(uint64_t value, uint64_t unit)
{
    return value - value % unit;
}

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return round_down(value + unit - 1, unit);
}

static void check_range(const struct kvk_region *region, uint64_t offset, uint64_t size_bytes)
{
    KVK_ASSERT(offset <= region->size_bytes);
    KVK_ASSERT(size_bytes <= region->size_bytes - offset);
}

/* Map the file where huge pages of the file are huge pages of the mapping too: the kernel itself
 * promises no more than page alignment. */
static uint8_t *map_aligned(int fd, uint64_t offset, uint64_t size_bytes)
{
    uint64_t span_bytes = size_bytes + HUGE_PAGE_BYTES;
    uint8_t *span =
        mmap(NULL, span_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (span == MAP_FAILED) {
        return NULL;
    }
    uint64_t skip_bytes = round_up((uintptr_t)span, HUGE_PAGE_BYTES) - (uintptr_t)span;
    uint8_t *address = mmap(span + skip_bytes, size_bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, (off_t)offset);
    if (address == MAP_FAILED) {
        (void)munmap(span, span_bytes);
        return NULL;
    }
    if (skip_bytes > 0) {
        (void)munmap(span, skip_bytes);
    }
    (void)munmap(address + size_bytes, HUGE_PAGE_BYTES - skip_bytes);
    return address;
}

/* ---- NUMA: the system calls themselves, since no library is needed for one of them ---- */

/* Nodes with memory, as the kernel lists them ("0-1,3"); how many. */
static uint32_t nodes_with_memory(unsigned long mask[NODE_WORDS])
{
    char text[256];
    uint32_t count = 0;
    FILE *file = fopen("/sys/devices/system/node/has_memory", "re");
    if (file == NULL) {
        return 0;
    }
    bool read = fgets(text, sizeof(text), file) != NULL;
    (void)fclose(file);
    for (char *at = text; read && *at >= '0' && *at <= '9';) {
        char *end;
        unsigned long first = strtoul(at, &end, 10);
        unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
        for (unsigned long node = first; node <= last && node < NODE_COUNT_MAX; node++) {
            mask[node / NODE_WORD_BITS] |= 1UL << (node % NODE_WORD_BITS);
            count++;
        }
        at = *end == ',' ? end + 1 : end;
    }
    return count;
}

/* The policy is the file's: it holds for whoever touches a page first. A wish: without it, pages
 * lie on the node of the thread that backs them. */
static void interleave(uint8_t *address, uint64_t size_bytes)
{
    unsigned long mask[NODE_WORDS] = {0};
    if (nodes_with_memory(mask) > 1) {
        (void)syscall(SYS_mbind, address, size_bytes, MPOL_INTERLEAVE, mask,
                      (unsigned long)NODE_COUNT_MAX, 0UL);
    }
}

/* ---- Regions ---- */

/* Map a part of the file, and say what is wished of it. */
static uint8_t *part_map(int fd, uint64_t offset, uint64_t size_bytes,
                         const struct kvk_memory_cpu_wishes *wishes, struct kvk_error *error)
{
    uint8_t *address = map_aligned(fd, offset, size_bytes);
    if (address == NULL) {
        (void)kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                       "mapping %llu bytes of a memfd: %s", (unsigned long long)size_bytes,
                       strerror(errno));
        return NULL;
    }
    /* Tenants' data stays out of core files. Both are wishes, no promises. */
    (void)madvise(address, size_bytes, MADV_DONTDUMP);
    if (wishes->huge_pages) {
        (void)madvise(address, size_bytes, MADV_HUGEPAGE);
    }
    if (wishes->interleave) {
        interleave(address, size_bytes);
    }
    return address;
}

/* Is nothing in this part of the file? Pages that were backed were also touched, so that they count
 * as data. */
static bool is_empty(int fd, uint64_t begin, uint64_t end)
{
    off_t data = lseek(fd, (off_t)begin, SEEK_DATA);
    return (data < 0 && errno == ENXIO) || data >= (off_t)end;
}

/* ---- Windows ---- */

static struct kvk_windows *windows_create(uint64_t size_bytes, uint64_t piece_bytes,
                                          uint64_t window_bytes)
{
    uint64_t count = (size_bytes + window_bytes - 1) / window_bytes;
    struct kvk_windows *windows =
        calloc(1, sizeof(*windows) + count * sizeof(windows->addresses[0]));
    if (windows != NULL) {
        (void)pthread_mutex_init(&windows->lock, NULL);
        windows->window_bytes = window_bytes;
        windows->reach_bytes = round_up(piece_bytes, page_bytes());
        windows->count = count;
    }
    return windows;
}

/* Bytes that a window's mapping has: the file's end cuts the last ones short. */
static uint64_t window_span(const struct kvk_region *region, uint64_t index)
{
    const struct kvk_windows *windows = region->windows;
    uint64_t left = region->size_bytes - index * windows->window_bytes;
    uint64_t span = windows->window_bytes + windows->reach_bytes;
    return left < span ? left : span;
}

static void window_unmap(const struct kvk_region *region, uint64_t index)
{
    uint8_t *address = atomic_load(&region->windows->addresses[index]);
    if (address != NULL) {
        atomic_store(&region->windows->addresses[index], NULL);
        int result = munmap(address, window_span(region, index));
        KVK_ASSERT(result == 0);
    }
}

static void windows_destroy(struct kvk_region *region)
{
    for (uint64_t i = 0; i < region->windows->count; i++) {
        window_unmap(region, i);
    }
    (void)pthread_mutex_destroy(&region->windows->lock);
    free(region->windows);
}

static bool window_is_empty(const struct kvk_region *region, uint64_t index)
{
    uint64_t begin = index * region->windows->window_bytes;
    return is_empty(region->fd, begin, begin + region->windows->window_bytes);
}

/* ---- The whole ---- */

static enum kvk_status region_map(int fd, uint64_t size_bytes, uint64_t piece_bytes,
                                  const struct kvk_memory_cpu_wishes *wishes,
                                  struct kvk_region *region, struct kvk_error *error)
{
    struct kvk_region made = {.size_bytes = size_bytes, .fd = fd};
    if (piece_bytes > 0 && size_bytes > wishes->window_bytes) {
        made.windows = windows_create(size_bytes, piece_bytes, wishes->window_bytes);
        if (made.windows == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a region");
        }
    } else {
        made.address = part_map(fd, 0, size_bytes, wishes, error);
        if (made.address == NULL) {
            return KVK_EXHAUSTED;
        }
    }
    *region = made;
    return KVK_OK;
}

static enum kvk_status size_check(uint64_t size_bytes, struct kvk_error *error)
{
    if (size_bytes == 0 || size_bytes > INT64_MAX - HUGE_PAGE_BYTES) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "size_bytes",
                        "a region cannot have %llu bytes", (unsigned long long)size_bytes);
    }
    return KVK_OK;
}

/* A file of the size, with these seals. */
static enum kvk_status file_make(const char *name, uint64_t rounded_bytes, int seals, int *result,
                                 struct kvk_error *error)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "memfd_create: %s",
                        strerror(errno));
    }
    if (ftruncate(fd, (off_t)rounded_bytes) != 0 || fcntl(fd, F_ADD_SEALS, seals) != 0) {
        int cause = errno;
        (void)close(fd);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "sizing and sealing a memfd of %llu bytes: %s",
                        (unsigned long long)rounded_bytes, strerror(cause));
    }
    *result = fd;
    return KVK_OK;
}

enum kvk_status kvk_memory_cpu_alloc(uint64_t size_bytes, uint64_t piece_bytes, const char *name,
                                     const struct kvk_memory_cpu_wishes *wishes,
                                     struct kvk_region *region, struct kvk_error *error)
{
    enum kvk_status status = size_check(size_bytes, error);
    uint64_t rounded_bytes = round_up(size_bytes, page_bytes());
    int fd = -1;
    if (status == KVK_OK) {
        status = file_make(name, rounded_bytes, REGION_SEALS, &fd, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    status = region_map(fd, rounded_bytes, piece_bytes, wishes, region, error);
    if (status != KVK_OK) {
        (void)close(fd);
    }
    return status;
}

enum kvk_status kvk_memory_cpu_alloc_public(uint64_t size_bytes, const char *name,
                                            const struct kvk_memory_cpu_wishes *wishes,
                                            struct kvk_region *region, struct kvk_error *error)
{
    enum kvk_status status = size_check(size_bytes, error);
    uint64_t rounded_bytes = round_up(size_bytes, page_bytes());
    int fd = -1;
    if (status == KVK_OK) {
        status = file_make(name, rounded_bytes, SIZE_SEALS, &fd, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    status = region_map(fd, rounded_bytes, 0, wishes, region, error);
    if (status != KVK_OK) {
        (void)close(fd);
        return status;
    }
    if (fcntl(fd, F_ADD_SEALS, PUBLIC_SEALS) != 0) { /* the mapping above stays writable */
        status = kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                          "sealing a memfd against new writable mappings: %s", strerror(errno));
        kvk_memory_cpu_leave(region);
    }
    return status;
}

static bool is_public(const struct kvk_region *region)
{
    int seals = fcntl(region->fd, F_GET_SEALS);
    KVK_ASSERT(seals >= 0);
    return (seals & F_SEAL_FUTURE_WRITE) != 0;
}

/* Is it memory that some process of ours made as a region? */
static enum kvk_status file_check(int fd, struct stat *info, struct kvk_error *error)
{
    struct statfs system;
    const char *wrong = NULL;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, info) != 0 || fstatfs(fd, &system) != 0 || !S_ISREG(info->st_mode) ||
        (system.f_type != TMPFS_MAGIC && system.f_type != HUGETLBFS_MAGIC)) {
        wrong = "it is no memory file";
    } else if (info->st_uid != geteuid()) {
        wrong = "it is another user's";
    } else if (info->st_nlink != 0) {
        wrong = "it has a name in a file system";
    } else if (seals < 0 || (seals & REGION_SEALS) != REGION_SEALS) {
        wrong = "it is not sealed";
    }
    return wrong == NULL ? KVK_OK
                         : kvk_fail(error, KVK_INVALID, KVK_CAUSE_NONE, "",
                                    "a kept file cannot be a region: %s", wrong);
}

enum kvk_status kvk_memory_cpu_adopt(int fd, uint64_t size_bytes, uint64_t piece_bytes,
                                     const struct kvk_memory_cpu_wishes *wishes,
                                     struct kvk_region *region, struct kvk_error *error)
{
    struct stat info;
    enum kvk_status status = size_check(size_bytes, error);
    if (status == KVK_OK) {
        status = file_check(fd, &info, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    uint64_t rounded_bytes = round_up(size_bytes, page_bytes());
    uint64_t file_bytes = (uint64_t)info.st_size;
    if (file_bytes < rounded_bytes) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_NONE, "size_bytes", file_bytes,
                              rounded_bytes, "a kept file has %llu bytes, %llu are needed",
                              (unsigned long long)file_bytes, (unsigned long long)rounded_bytes);
    }
    if (file_bytes > rounded_bytes &&
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)rounded_bytes,
                  (off_t)(file_bytes - rounded_bytes)) != 0) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "", "punching a kept file: %s",
                        strerror(errno));
    }
    return region_map(fd, rounded_bytes, piece_bytes, wishes, region, error);
}

void kvk_memory_cpu_leave(struct kvk_region *region)
{
    KVK_ASSERT(region->size_bytes > 0);
    if (region->windows != NULL) {
        windows_destroy(region);
    } else {
        int result = munmap(region->address, region->size_bytes);
        KVK_ASSERT(result == 0);
    }
    (void)close(region->fd);
    *region = (struct kvk_region){.fd = -1};
}

void kvk_memory_cpu_free(struct kvk_region *region)
{
    KVK_ASSERT(region->size_bytes > 0);
    if (is_public(region)) {
        memset(region->address, 0, region->size_bytes);
        kvk_memory_cpu_leave(region);
        return;
    }
    int result = fallocate(region->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                           (off_t)region->size_bytes);
    KVK_ASSERT(result == 0);
    kvk_memory_cpu_leave(region);
}

/* ---- Backing ---- */

/* Takes all pages or, failing, none; a page fault instead would kill the daemon. */
static enum kvk_status pages_take(const struct kvk_region *region, uint64_t begin, uint64_t end,
                                  struct kvk_error *error)
{
    int result;
    do {
        result = fallocate(region->fd, 0, (off_t)begin, (off_t)(end - begin));
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", end - begin, 0,
                              "backing %llu bytes of memory: %s", (unsigned long long)(end - begin),
                              strerror(errno));
    }
    return KVK_OK;
}

/*
 * Write-fault every page of a backed range, so that the daemon's own writes never fault. The
 * pages are there already: this only fills page tables, and loses no byte that is there.
 */
static void touch(uint8_t *address, uint64_t size_bytes)
{
    if (madvise(address, size_bytes, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    /* Before Linux 5.14. An atomic add of nothing keeps what a worker writes meanwhile. */
    for (uint64_t offset = 0; offset < size_bytes; offset += page_bytes()) {
        __atomic_fetch_add(&address[offset], 0, __ATOMIC_RELAXED);
    }
}

/* Only huge pages that lie whole in the range: a collapse fills holes, and what is beside the
 * range is not ours to back. Refused by many kernels; then small pages stay. */
static void collapse(uint8_t *address, uint64_t size_bytes)
{
    uintptr_t begin = round_up((uintptr_t)address, HUGE_PAGE_BYTES);
    uintptr_t end = round_down((uintptr_t)address + size_bytes, HUGE_PAGE_BYTES);
    if (begin < end) {
        (void)madvise(address + (begin - (uintptr_t)address), end - begin, ADVICE_COLLAPSE);
    }
}

/*
 * One small page for each huge one of [begin, end), so that a collapse has what to begin with: it
 * zeros the rest in place, where 512 small pages would each be found, zeroed and copied. It takes
 * memory on that page's node; so where pages go round the nodes by their number, the next huge
 * page's begins with the next node.
 */
static void seed(int fd, uint64_t begin, uint64_t end, bool interleave)
{
    const uint64_t pages = HUGE_PAGE_BYTES / page_bytes();
    unsigned long mask[NODE_WORDS] = {0};
    uint64_t nodes = interleave ? nodes_with_memory(mask) : 1;
    nodes = nodes == 0 ? 1 : nodes;
    for (uint64_t at = begin; at < end; at += HUGE_PAGE_BYTES) {
        uint64_t number = at / HUGE_PAGE_BYTES;
        uint64_t first_node = number * pages % nodes;
        uint64_t page = (number + nodes - first_node) % nodes % pages;
        (void)fallocate(fd, 0, (off_t)(at + page * page_bytes()), (off_t)page_bytes());
    }
}

/* The address of what begins at `at`, and how much of it, up to `end`, lies there in one run. */
static uint8_t *run_at(const struct kvk_region *region, uint64_t at, uint64_t end, uint64_t *bytes)
{
    const struct kvk_windows *windows = region->windows;
    *bytes = end - at;
    if (windows == NULL) {
        return region->address + at;
    }
    uint64_t within = at % windows->window_bytes;
    uint64_t left = windows->window_bytes - within;
    *bytes = left < *bytes ? left : *bytes;
    return atomic_load(&windows->addresses[at / windows->window_bytes]) + within;
}

static void range_collapse(const struct kvk_region *region, uint64_t begin, uint64_t end)
{
    uint64_t bytes;
    for (uint64_t at = begin; at < end; at += bytes) {
        uint8_t *address = run_at(region, at, end, &bytes);
        collapse(address, bytes);
    }
}

/* Backed pages become pages of the mapping. */
static void range_touch(const struct kvk_region *region, uint64_t begin, uint64_t end)
{
    uint64_t bytes;
    for (uint64_t at = begin; at < end; at += bytes) {
        uint8_t *address = run_at(region, at, end, &bytes);
        touch(address, bytes);
    }
}

static enum kvk_status range_lock(const struct kvk_region *region, uint64_t begin, uint64_t end,
                                  struct kvk_error *error)
{
    uint64_t bytes;
    for (uint64_t at = begin; at < end; at += bytes) {
        uint8_t *address = run_at(region, at, end, &bytes);
        if (mlock(address, bytes) != 0) {
            return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "lock_memory", bytes, 0,
                                  "lock_memory: locking %llu bytes: %s (see RLIMIT_MEMLOCK)",
                                  (unsigned long long)bytes, strerror(errno));
        }
    }
    return KVK_OK;
}

/*
 * Pages for the range, huge ones where they are wished for and lie whole in it. Where all of them
 * are there, as when a tier is attached again, they are left as they are: finding each anew for
 * this mapping, or huge ones for their bytes, takes minutes for a large tier, and the first comes
 * by itself where they are used.
 */
static enum kvk_status range_back(const struct kvk_region *region, uint64_t begin, uint64_t end,
                                  const struct kvk_memory_cpu_wishes *wishes,
                                  struct kvk_error *error)
{
    const uint64_t huge_begin = round_up(begin, HUGE_PAGE_BYTES);
    const uint64_t huge_end = round_down(end, HUGE_PAGE_BYTES);
    const bool huge = wishes->huge_pages && huge_begin < huge_end;
    const bool fresh = huge && is_empty(region->fd, huge_begin, huge_end);
    const uint64_t before = kvk_memory_cpu_backed_bytes(region);
    if (fresh) {
        seed(region->fd, huge_begin, huge_end, wishes->interleave);
        range_collapse(region, begin, end);
    }
    enum kvk_status status = pages_take(region, begin, end, error);
    if (status != KVK_OK) {
        if (fresh) {
            (void)fallocate(region->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            (off_t)huge_begin, (off_t)(huge_end - huge_begin));
        }
        return status;
    }
    if (kvk_memory_cpu_backed_bytes(region) != before) {
        if (huge && !fresh) {
            range_collapse(region, begin, end); /* with the bytes that are there */
        }
        range_touch(region, begin, end);
    }
    return wishes->lock ? range_lock(region, begin, end, error) : KVK_OK;
}

/* Every window in which something of the range lies is mapped. */
static enum kvk_status windows_map(struct kvk_region *region, uint64_t begin, uint64_t end,
                                   const struct kvk_memory_cpu_wishes *wishes,
                                   struct kvk_error *error)
{
    struct kvk_windows *windows = region->windows;
    for (uint64_t i = begin / windows->window_bytes; i * windows->window_bytes < end; i++) {
        if (atomic_load(&windows->addresses[i]) != NULL) {
            continue;
        }
        uint8_t *address =
            part_map(region->fd, i * windows->window_bytes, window_span(region, i), wishes, error);
        if (address == NULL) {
            return KVK_EXHAUSTED;
        }
        atomic_store_explicit(&windows->addresses[i], address, memory_order_release);
    }
    return KVK_OK;
}

/* Windows in which nothing is backed need no addresses. Nobody reads there: what is read is
 * backed. */
static void windows_trim(struct kvk_region *region, uint64_t begin, uint64_t end)
{
    struct kvk_windows *windows = region->windows;
    for (uint64_t i = begin / windows->window_bytes; i * windows->window_bytes < end; i++) {
        if (window_is_empty(region, i)) {
            window_unmap(region, i);
        }
    }
}

static enum kvk_status windows_back(struct kvk_region *region, uint64_t begin, uint64_t end,
                                    const struct kvk_memory_cpu_wishes *wishes,
                                    struct kvk_error *error)
{
    enum kvk_status status = windows_map(region, begin, end, wishes, error);
    if (status == KVK_OK) {
        status = range_back(region, begin, end, wishes, error);
    }
    if (status != KVK_OK) {
        windows_trim(region, begin, end);
    }
    return status;
}

enum kvk_status kvk_memory_cpu_back(struct kvk_region *region, uint64_t offset, uint64_t size_bytes,
                                    const struct kvk_memory_cpu_wishes *wishes,
                                    struct kvk_error *error)
{
    check_range(region, offset, size_bytes);
    if (size_bytes == 0) {
        return KVK_OK;
    }
    uint64_t begin = round_down(offset, page_bytes());
    uint64_t end = round_up(offset + size_bytes, page_bytes());
    if (region->windows != NULL) {
        (void)pthread_mutex_lock(&region->windows->lock);
        enum kvk_status status = windows_back(region, begin, end, wishes, error);
        (void)pthread_mutex_unlock(&region->windows->lock);
        return status;
    }
    return range_back(region, begin, end, wishes, error);
}

enum kvk_status kvk_memory_cpu_punch(struct kvk_region *region, uint64_t offset,
                                     uint64_t size_bytes, struct kvk_error *error)
{
    check_range(region, offset, size_bytes);
    uint64_t begin = round_up(offset, page_bytes());
    uint64_t end = round_down(offset + size_bytes, page_bytes());
    if (begin >= end) {
        return KVK_OK;
    }
    if (fallocate(region->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin,
                  (off_t)(end - begin)) != 0) {
        return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "", "punching %llu bytes: %s",
                        (unsigned long long)(end - begin), strerror(errno));
    }
    if (region->windows != NULL) {
        (void)pthread_mutex_lock(&region->windows->lock);
        windows_trim(region, begin, end);
        (void)pthread_mutex_unlock(&region->windows->lock);
    }
    return KVK_OK;
}

uint64_t kvk_memory_cpu_backed_bytes(const struct kvk_region *region)
{
    struct stat status;

    int result = fstat(region->fd, &status);
    KVK_ASSERT(result == 0);
    return (uint64_t)status.st_blocks * 512; /* st_blocks counts 512 bytes on every file system */
}
