/*
 * The stand-in's memory: what is allocated, locked and lent to other processes.
 *
 * Device memory is a memory file that is mapped twice: where the caller has it, between guard pages
 * and out of reach but while a kernel runs; and at an alias, for the runtime's own copies. Other
 * processes get the file over an abstract socket, one connection for each that has it open: so the
 * runtime knows when a piece is freed that others still have.
 */
#include "tests/cuda_sim/runtime.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/cuda_sim/runtime_internal.h"

#define ALIGNMENT 256
#define SLACK_BYTE 0xa5
#define CONNECTION_MAX 256

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- What there is ---- */

struct sim_allocation *sim_find(const void *address, uint64_t size_bytes)
{
    uintptr_t begin = (uintptr_t)address;
    for (struct sim_allocation *at = sim.allocations; at != NULL; at = at->next) {
        uintptr_t first = (uintptr_t)at->address;
        if (begin >= first && begin < first + at->size_bytes) {
            if (size_bytes > at->size_bytes - (begin - first)) {
                sim_abort("%llu bytes at %p reach past the end of their allocation",
                          (unsigned long long)size_bytes, address);
            }
            return at;
        }
        /* Within the mapping, but beside what was allocated. */
        uintptr_t map = (uintptr_t)at->map;
        if (at->map != NULL && begin >= map - page_bytes() &&
            begin < map + at->map_bytes + page_bytes()) {
            sim_abort("%p lies just beside an allocation", address);
        }
        if (begin < first && first < begin + size_bytes) {
            sim_abort("%llu bytes at %p are only in part of an allocation",
                      (unsigned long long)size_bytes, address);
        }
    }
    return NULL;
}

static struct sim_allocation *find_exactly(const void *address)
{
    struct sim_allocation *at = sim.allocations;
    while (at != NULL && at->address != address) {
        at = at->next;
    }
    return at;
}

static void unlink_from(struct sim_allocation *allocation)
{
    struct sim_allocation **link = &sim.allocations;
    while (*link != allocation) {
        link = &(*link)->next;
    }
    *link = allocation->next;
}

static void protect(const struct sim_allocation *allocation, int rights)
{
    if (allocation->map != NULL && mprotect(allocation->map, allocation->map_bytes, rights) != 0) {
        sim_abort("mprotect: %s", strerror(errno));
    }
}

void sim_kernel_begin(void)
{
    for (struct sim_allocation *at = sim.allocations; sim.kernels == 0 && at != NULL;
         at = at->next) {
        protect(at, PROT_READ | PROT_WRITE);
    }
    sim.kernels++;
}

void sim_kernel_end(void)
{
    sim.kernels--;
    for (struct sim_allocation *at = sim.allocations; sim.kernels == 0 && at != NULL;
         at = at->next) {
        protect(at, PROT_NONE);
    }
}

/* ---- Device memory ---- */

/* Map the file of device memory, its end where the mapping ends. */
static void device_map(struct sim_allocation *made)
{
    uint64_t page = page_bytes();
    uint64_t aligned = (made->size_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    made->map_bytes = (aligned + page - 1) / page * page;
    uint8_t *span = mmap(NULL, made->map_bytes + 2 * page, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t *alias = mmap(NULL, made->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->fd, 0);
    if (span == MAP_FAILED || alias == MAP_FAILED) {
        sim_abort("no addresses for device memory");
    }
    int rights = sim.kernels > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    made->map = mmap(span + page, made->map_bytes, rights, MAP_SHARED | MAP_FIXED, made->fd, 0);
    if (made->map == MAP_FAILED) {
        sim_abort("no addresses for device memory");
    }
    uint64_t head = made->map_bytes - aligned;
    made->address = made->map + head;
    made->alias = alias + head;
}

/* The addresses stay taken, so that who uses them later is caught. */
static void device_unmap(struct sim_allocation *allocation)
{
    uint64_t head = (uint64_t)(allocation->address - allocation->map);
    if (mmap(allocation->map, allocation->map_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
        sim_abort("unmapping device memory: %s", strerror(errno));
    }
    (void)munmap(allocation->alias - head, allocation->map_bytes);
}

/* What lies around the allocation within its pages. */
static void slack_check(const struct sim_allocation *allocation, bool fill)
{
    uint64_t head = (uint64_t)(allocation->address - allocation->map);
    uint8_t *map = allocation->alias - head;
    for (uint64_t i = 0; i < allocation->map_bytes; i++) {
        if (i == head) {
            i += allocation->size_bytes;
            if (i >= allocation->map_bytes) {
                break;
            }
        }
        if (fill) {
            map[i] = SLACK_BYTE;
        } else if (map[i] != SLACK_BYTE) {
            sim_abort("a byte just beside an allocation was written");
        }
    }
}

cudaError_t cudaMalloc(void **pointer, size_t size)
{
    cudaError_t result = sim_enter("cudaMalloc");
    if (result != cudaSuccess) {
        return result;
    }
    int device = sim_device();
    (void)pthread_mutex_lock(&sim.lock);
    if (size == 0 || sim.used_bytes[device] + size > sim.options.memory_bytes) {
        (void)pthread_mutex_unlock(&sim.lock);
        return sim_fail(size == 0 ? cudaErrorInvalidValue : cudaErrorMemoryAllocation);
    }
    struct sim_allocation *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        sim_abort("no memory");
    }
    *made = (struct sim_allocation){.kind = SIM_DEVICE,
                                    .device = device,
                                    .size_bytes = size,
                                    .id = ++sim.next_id,
                                    .connection = -1,
                                    .next = sim.allocations};
    made->fd = memfd_create("cuda-sim", MFD_CLOEXEC);
    if (made->fd < 0 || ftruncate(made->fd, (off_t)(size + 2 * page_bytes())) != 0) {
        sim_abort("no memory file: %s", strerror(errno));
    }
    device_map(made);
    memset(made->alias, SIM_POISON, size);
    slack_check(made, true);
    sim.allocations = made;
    sim.used_bytes[device] += size;
    *pointer = made->address;
    (void)pthread_mutex_unlock(&sim.lock);
    return cudaSuccess;
}

/* ---- Lending to other processes ---- */

struct ticket {
    uint64_t id;
    uint64_t nonce;
};

struct handle {
    struct ticket ticket;
    uint64_t size_bytes;
    int32_t pid;
    int32_t device;
};
_Static_assert(sizeof(struct handle) <= sizeof(cudaIpcMemHandle_t), "fits");

static struct {
    bool running;
    uint64_t nonce;
    int listener;
    uint32_t count;
    struct {
        int fd;
        struct sim_allocation *allocation; /* NULL: has not asked yet */
    } connections[CONNECTION_MAX];
} lender;

static socklen_t lender_address(struct sockaddr_un *address, int32_t pid, uint64_t nonce)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int size = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "cuda-sim-%d-%llx",
                        (int)pid, (unsigned long long)nonce);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)size);
}

static bool send_fd(int to, int fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    char byte = fd >= 0 ? 0 : 1;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(int));
    }
    return sendmsg(to, &message, MSG_NOSIGNAL) == 1;
}

/* The lock is held. */
static void connection_drop(uint32_t index)
{
    if (lender.connections[index].allocation != NULL) {
        lender.connections[index].allocation->imports--;
    }
    (void)close(lender.connections[index].fd);
    lender.connections[index] = lender.connections[--lender.count];
}

/* Asked for something, or over. False: it is gone. The lock is held. */
static bool connection_read(uint32_t index)
{
    struct ticket ticket;
    int fd = lender.connections[index].fd;
    ssize_t size = recv(fd, &ticket, sizeof(ticket), MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN) {
        return true;
    }
    struct sim_allocation *found = size == sizeof(ticket) ? sim.allocations : NULL;
    while (found != NULL && (found->kind != SIM_DEVICE || found->id != ticket.id)) {
        found = found->next;
    }
    if (lender.connections[index].allocation != NULL || !send_fd(fd, found ? found->fd : -1) ||
        found == NULL) {
        connection_drop(index);
        return false;
    }
    lender.connections[index].allocation = found;
    found->imports++;
    return true;
}

/* What has happened on the connections until now. The lock is held. */
static void connections_look(void)
{
    for (uint32_t i = 0; i < lender.count;) {
        i += connection_read(i) ? 1 : 0;
    }
}

static void *lender_main(void *argument)
{
    struct pollfd watched[CONNECTION_MAX + 2];
    (void)argument;
    for (;;) {
        (void)pthread_mutex_lock(&sim.lock);
        uint32_t count = lender.count;
        watched[0] = (struct pollfd){.fd = lender.listener, .events = POLLIN};
        for (uint32_t i = 0; i < count; i++) {
            watched[i + 1] = (struct pollfd){.fd = lender.connections[i].fd, .events = POLLIN};
        }
        (void)pthread_mutex_unlock(&sim.lock);
        (void)poll(watched, count + 1, 20);
        (void)pthread_mutex_lock(&sim.lock);
        if ((watched[0].revents & POLLIN) != 0 && lender.count < CONNECTION_MAX) {
            int fd = accept4(lender.listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0) {
                lender.connections[lender.count].fd = fd;
                lender.connections[lender.count++].allocation = NULL;
            }
        }
        connections_look();
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return NULL;
}

/* The lock is held. */
static void lender_start(void)
{
    struct sockaddr_un address;
    pthread_t thread;
    if (lender.running) {
        return;
    }
    lender.running = true;
    if (getentropy(&lender.nonce, sizeof(lender.nonce)) != 0) {
        sim_abort("no random number");
    }
    socklen_t size = lender_address(&address, getpid(), lender.nonce);
    lender.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (lender.listener < 0 ||
        bind(lender.listener, (const struct sockaddr *)&address, size) != 0 ||
        listen(lender.listener, 64) != 0 || pthread_create(&thread, NULL, lender_main, NULL) != 0) {
        sim_abort("no socket to lend memory over: %s", strerror(errno));
    }
    (void)pthread_detach(thread);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer)
{
    cudaError_t result = sim_enter("cudaIpcGetMemHandle");
    if (result != cudaSuccess) {
        return result;
    }
    (void)pthread_mutex_lock(&sim.lock);
    const struct sim_allocation *found = find_exactly(pointer);
    if (found == NULL || found->kind != SIM_DEVICE) {
        sim_abort("cudaIpcGetMemHandle of what is no allocation");
    }
    lender_start();
    const struct handle made = {.ticket = {.id = found->id, .nonce = lender.nonce},
                                .size_bytes = found->size_bytes,
                                .pid = getpid(),
                                .device = found->device};
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &made, sizeof(made));
    (void)pthread_mutex_unlock(&sim.lock);
    return cudaSuccess;
}

static int receive_fd(int from)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    char byte;
    int fd = -1;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || byte != 0) {
        return -1;
    }
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) {
        memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    }
    return fd;
}

/* A connection to whoever has the memory, and its file. */
static bool fetch(const struct handle *handle, int *connection, int *fd)
{
    struct sockaddr_un address;
    socklen_t size = lender_address(&address, handle->pid, handle->ticket.nonce);
    *fd = -1;
    *connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*connection >= 0 && connect(*connection, (const struct sockaddr *)&address, size) == 0 &&
        send(*connection, &handle->ticket, sizeof(handle->ticket), MSG_NOSIGNAL) ==
            (ssize_t)sizeof(handle->ticket)) {
        *fd = receive_fd(*connection);
    }
    if (*fd < 0 && *connection >= 0) {
        (void)close(*connection);
    }
    return *fd >= 0;
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags)
{
    struct handle wanted;
    struct sim_allocation made = {.kind = SIM_IMPORTED, .device = sim_device(), .opened = 1};
    cudaError_t result = sim_enter("cudaIpcOpenMemHandle");
    (void)flags;
    if (result != cudaSuccess) {
        return result;
    }
    memcpy(&wanted, &handle, sizeof(wanted));
    if (wanted.pid == getpid()) {
        return sim_fail(cudaErrorDeviceUninitialized); /* as CUDA: not in the same process */
    }
    (void)pthread_mutex_lock(&sim.lock);
    for (struct sim_allocation *at = sim.allocations; at != NULL; at = at->next) {
        if (at->kind == SIM_IMPORTED && at->id == wanted.ticket.id) {
            at->opened++;
            *pointer = at->address;
            (void)pthread_mutex_unlock(&sim.lock);
            return cudaSuccess;
        }
    }
    (void)pthread_mutex_unlock(&sim.lock);
    if (!fetch(&wanted, &made.connection, &made.fd)) {
        return sim_fail(cudaErrorMapBufferObjectFailed);
    }
    struct sim_allocation *kept = malloc(sizeof(*kept));
    if (kept == NULL) {
        sim_abort("no memory");
    }
    (void)pthread_mutex_lock(&sim.lock);
    *kept = made;
    kept->size_bytes = wanted.size_bytes;
    kept->id = wanted.ticket.id;
    kept->next = sim.allocations;
    device_map(kept);
    sim.allocations = kept;
    *pointer = kept->address;
    (void)pthread_mutex_unlock(&sim.lock);
    return cudaSuccess;
}

/* ---- Giving back ---- */

static void allocation_end(struct sim_allocation *allocation)
{
    unlink_from(allocation);
    if (allocation->kind == SIM_DEVICE) {
        slack_check(allocation, false);
        sim.used_bytes[allocation->device] -= allocation->size_bytes;
    }
    if (allocation->map != NULL) {
        device_unmap(allocation);
        (void)close(allocation->fd);
    }
    if (allocation->kind == SIM_PINNED) {
        (void)munmap(allocation->address, allocation->size_bytes);
    }
    if (allocation->connection >= 0) {
        (void)close(allocation->connection);
    }
    free(allocation);
}

/* The lock is held. */
static void give_back(const char *call, void *pointer, enum sim_memory kind)
{
    struct sim_allocation *found = find_exactly(pointer);
    if (found == NULL || found->kind != kind) {
        sim_abort("%s of what is no such memory: %p", call, pointer);
    }
    if (sim_is_in_use((uintptr_t)pointer, found->size_bytes)) {
        sim_abort("%s of memory that a copy under way uses", call);
    }
    if (kind == SIM_DEVICE) {
        sim_drain(found->device); /* as CUDA does; kernels may use it */
        connections_look();
        if (found->imports > 0) {
            sim_abort("%s of memory that another process has open", call);
        }
    }
    allocation_end(found);
}

cudaError_t cudaFree(void *pointer)
{
    cudaError_t result = pointer == NULL ? sim_enter_always("cudaFree") : sim_enter("cudaFree");
    if (result == cudaSuccess && pointer != NULL) {
        (void)pthread_mutex_lock(&sim.lock);
        give_back("cudaFree", pointer, SIM_DEVICE);
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer)
{
    cudaError_t result = sim_enter("cudaIpcCloseMemHandle");
    if (result == cudaSuccess) {
        (void)pthread_mutex_lock(&sim.lock);
        struct sim_allocation *found = find_exactly(pointer);
        if (found != NULL && found->kind == SIM_IMPORTED && --found->opened > 0) {
            (void)pthread_mutex_unlock(&sim.lock);
            return cudaSuccess;
        }
        give_back("cudaIpcCloseMemHandle", pointer, SIM_IMPORTED);
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

/* ---- Pinned memory of the host ---- */

static void host_remember(enum sim_memory kind, void *address, uint64_t size)
{
    struct sim_allocation *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        sim_abort("no memory");
    }
    *made = (struct sim_allocation){.kind = kind,
                                    .address = address,
                                    .size_bytes = size,
                                    .fd = -1,
                                    .connection = -1,
                                    .next = sim.allocations};
    sim.allocations = made;
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int flags)
{
    cudaError_t result = sim_enter("cudaHostAlloc");
    (void)flags;
    if (result != cudaSuccess) {
        return result;
    }
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return sim_fail(cudaErrorMemoryAllocation);
    }
    memset(memory, SIM_POISON, size);
    (void)pthread_mutex_lock(&sim.lock);
    host_remember(SIM_PINNED, memory, size);
    (void)pthread_mutex_unlock(&sim.lock);
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer)
{
    cudaError_t result = sim_enter_always("cudaFreeHost");
    if (result == cudaSuccess && pointer != NULL) {
        (void)pthread_mutex_lock(&sim.lock);
        give_back("cudaFreeHost", pointer, SIM_PINNED);
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned int flags)
{
    cudaError_t result = sim_enter("cudaHostRegister");
    if (result != cudaSuccess) {
        return result;
    }
    if (flags != 0 && (flags & cudaHostRegisterMapped) == 0) {
        sim_abort("memory is locked, but not mapped for kernels, and kernels copy it");
    }
    (void)pthread_mutex_lock(&sim.lock);
    for (const struct sim_allocation *at = sim.allocations; at != NULL; at = at->next) {
        if ((uintptr_t)at->address < (uintptr_t)pointer + size &&
            (uintptr_t)pointer < (uintptr_t)at->address + at->size_bytes) {
            result = cudaErrorHostMemoryAlreadyRegistered;
        }
    }
    if (result == cudaSuccess) {
        host_remember(SIM_REGISTERED, pointer, size);
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return sim_fail(result);
}

cudaError_t cudaHostUnregister(void *pointer)
{
    cudaError_t result = sim_enter("cudaHostUnregister");
    if (result == cudaSuccess) {
        (void)pthread_mutex_lock(&sim.lock);
        give_back("cudaHostUnregister", pointer, SIM_REGISTERED);
        (void)pthread_mutex_unlock(&sim.lock);
    }
    return result;
}

/* ---- For tests ---- */

void sim_memory_reset(void)
{
    while (sim.allocations != NULL) {
        allocation_end(sim.allocations);
    }
    memset(sim.used_bytes, 0, sizeof(sim.used_bytes));
}

static uint64_t bytes_of(enum sim_memory a, enum sim_memory b)
{
    uint64_t bytes = 0;
    (void)pthread_mutex_lock(&sim.lock);
    for (const struct sim_allocation *at = sim.allocations; at != NULL; at = at->next) {
        bytes += at->kind == a || at->kind == b ? at->size_bytes : 0;
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return bytes;
}

uint64_t kvk_sim_device_bytes(void)
{
    return bytes_of(SIM_DEVICE, SIM_DEVICE);
}

uint64_t kvk_sim_pinned_bytes(void)
{
    return bytes_of(SIM_PINNED, SIM_REGISTERED);
}

uint32_t kvk_sim_import_count(void)
{
    uint32_t count = 0;
    (void)pthread_mutex_lock(&sim.lock);
    connections_look();
    for (const struct sim_allocation *at = sim.allocations; at != NULL; at = at->next) {
        count += at->imports;
    }
    (void)pthread_mutex_unlock(&sim.lock);
    return count;
}

static uint8_t *reach(const void *device_memory, uint64_t size_bytes)
{
    const struct sim_allocation *found = sim_find(device_memory, size_bytes);
    if (found == NULL || found->alias == NULL) {
        sim_abort("%p is no device memory", device_memory);
    }
    return found->alias + ((const uint8_t *)device_memory - found->address);
}

void kvk_sim_peek(void *target, const void *device_memory, uint64_t size_bytes)
{
    (void)pthread_mutex_lock(&sim.lock);
    memcpy(target, reach(device_memory, size_bytes), size_bytes);
    (void)pthread_mutex_unlock(&sim.lock);
}

void kvk_sim_poke(void *device_memory, const void *source, uint64_t size_bytes)
{
    (void)pthread_mutex_lock(&sim.lock);
    memcpy(reach(device_memory, size_bytes), source, size_bytes);
    (void)pthread_mutex_unlock(&sim.lock);
}
