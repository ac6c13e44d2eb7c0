/*
 * What the files of the keeper share: the message between daemon and keeper process, and the two
 * kinds of keepers behind one header.
 *
 * The daemon asks, the keeper answers, one message each, both of one fixed size over a socket that
 * keeps their borders (SOCK_SEQPACKET). A message that is shorter, longer, of another version, of
 * an unknown kind, with a name that is none or with descriptors where none belong ends its
 * connection and nothing else.
 */
#ifndef KVK_HOSTTIER_KEEPER_INTERNAL_H
#define KVK_HOSTTIER_KEEPER_INTERNAL_H

#include <pthread.h>

#include "base/lock.h"
#include "hosttier/keeper.h"

#define KVK_KEEPER_MAGIC UINT32_C(0x4b504b56) /* "VKPK" as bytes */
#define KVK_KEEPER_VERSION 1
#define KVK_KEEPER_FILES_MAX 65536U
#define KVK_KEEPER_DESCRIPTORS_MAX 8 /* that are taken in with a message, to be refused */

enum kvk_keeper_message_kind {
    KVK_KEEPER_HELLO = 1, /* hold_ms; answer: count of files. First on every connection */
    KVK_KEEPER_PUT = 2,   /* name and one descriptor */
    KVK_KEEPER_DROP = 3,  /* name */
    KVK_KEEPER_TAKE = 4,  /* count: which; answer: its name and descriptor. NOT_FOUND: past all */
    KVK_KEEPER_FORGET = 5,
};

struct kvk_keeper_message {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;   /* enum kvk_keeper_message_kind; an answer repeats it */
    uint32_t status; /* enum kvk_status; of an answer */
    uint32_t count;
    uint64_t hold_ms;
    char name[KVK_KEEPER_NAME_SIZE]; /* NUL to the end behind it */
};
_Static_assert(sizeof(struct kvk_keeper_message) == 88, "one fixed size, without padding");

/* Letters, digits, '.' and '-', at least one, and nothing but NULs behind them. */
bool kvk_keeper_name_ok(const char name[KVK_KEEPER_NAME_SIZE]);

/* Send one message, with `fd` beside it where that is not negative. False: the peer does not take
 * it; errno says why. */
bool kvk_keeper_send(int socket, const struct kvk_keeper_message *message, int fd);

/*
 * Receive one message and at most one descriptor (*fd: -1, or the caller's). False: the other side
 * is gone (errno 0), nothing came in time (EAGAIN), or it is no message of ours (EBADMSG);
 * descriptors that came with it are closed.
 */
bool kvk_keeper_receive(int socket, struct kvk_keeper_message *message, int *fd);

/* What the keeper process does, without what makes a process of its own of it: listen, serve until
 * there is nothing to do, hold at most so many files. Its exit code. */
int kvk_keeper_serve(const char *socket_path, uint64_t hold_ms, uint32_t file_max);

/* ---- The kinds ---- */

struct kvk_keeper_ops {
    const char *name;
    enum kvk_status (*take)(struct kvk_keeper *keeper,
                            void (*visit)(void *context, const char *name, int fd), void *context,
                            struct kvk_error *error);
    enum kvk_status (*put)(struct kvk_keeper *keeper, const char *name, int fd,
                           struct kvk_error *error);
    enum kvk_status (*drop)(struct kvk_keeper *keeper, const char *name, struct kvk_error *error);
    enum kvk_status (*forget)(struct kvk_keeper *keeper, struct kvk_error *error);
    void (*disconnect)(struct kvk_keeper *keeper);
};

/* The kinds' functions are called by one thread at a time: see turn_begin() in keeper.c. */
struct kvk_keeper {
    const struct kvk_keeper_ops *ops;
    struct kvk_lock lock; /* of `busy` alone: never held across I/O */
    pthread_cond_t free;
    bool busy;
    uint32_t count; /* files held, as far as we know */

    /* process */
    int socket;

    /* systemd: the names that it has; and descriptors from the start, until they are taken */
    char (*names)[KVK_KEEPER_NAME_SIZE]; /* [count], ours */
    uint32_t name_capacity;
    uint32_t count_max; /* $FDSTORE; 0: not told */
    bool inherited;     /* kvk_keeper_take() has still to look at the descriptors of the start */
};

KVK_CHECKED enum kvk_status kvk_keeper_process_connect(const struct kvk_keeper_options *options,
                                                       struct kvk_keeper *keeper,
                                                       struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_keeper_systemd_connect(struct kvk_keeper *keeper,
                                                       struct kvk_error *error);
bool kvk_keeper_systemd_offered(void);

#endif
