/* One message over the keeper's socket, and the descriptor beside it. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hosttier/keeper_internal.h"

bool kvk_keeper_send(int socket, const struct kvk_keeper_message *message, int fd)
{
    union {
        struct cmsghdr header; /* aligns the bytes */
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct kvk_keeper_message copy = *message;
    struct iovec part = {.iov_base = &copy, .iov_len = sizeof(copy)};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof(control));
        envelope.msg_control = control.bytes;
        envelope.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket, &envelope, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof(copy);
}

/* Every descriptor of the envelope, into fds; how many. */
static uint32_t descriptors_of(struct msghdr *envelope, int fds[KVK_KEEPER_DESCRIPTORS_MAX])
{
    uint32_t count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(envelope); header != NULL;
         header = CMSG_NXTHDR(envelope, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t size = header->cmsg_len - CMSG_LEN(0);
        for (size_t at = 0; at + sizeof(int) <= size && count < KVK_KEEPER_DESCRIPTORS_MAX;
             at += sizeof(int)) {
            memcpy(&fds[count], CMSG_DATA(header) + at, sizeof(int));
            count++;
        }
    }
    return count;
}

bool kvk_keeper_receive(int socket, struct kvk_keeper_message *message, int *fd)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(KVK_KEEPER_DESCRIPTORS_MAX * sizeof(int))];
    } control;
    uint8_t bytes[sizeof(*message) + 1]; /* one more: a longer message shows */
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof(bytes)};
    struct msghdr envelope = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    int fds[KVK_KEEPER_DESCRIPTORS_MAX];
    *fd = -1;
    ssize_t size;
    do {
        size = recvmsg(socket, &envelope, MSG_CMSG_CLOEXEC);
    } while (size < 0 && errno == EINTR);
    if (size < 0) {
        return false;
    }
    uint32_t count = descriptors_of(&envelope, fds);
    bool whole = size == (ssize_t)sizeof(*message) && count <= 1 &&
                 (envelope.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
    if (whole) {
        memcpy(message, bytes, sizeof(*message));
        whole = message->magic == KVK_KEEPER_MAGIC && message->version == KVK_KEEPER_VERSION;
    }
    if (!whole) {
        for (uint32_t i = 0; i < count; i++) {
            (void)close(fds[i]);
        }
        errno = size == 0 && count == 0 ? 0 : EBADMSG;
        return false;
    }
    if (count == 1) {
        *fd = fds[0];
    }
    return true;
}
