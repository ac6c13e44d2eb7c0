/*
 * gRPC's library is not built with ThreadSanitizer, so the order that its completion queue gives to
 * our memory is unseen. These two say it: what was written before a tag went to gRPC is seen by who
 * gets it back.
 */
#ifndef KVK_DAEMON_SERVER_SANITIZE_H
#define KVK_DAEMON_SERVER_SANITIZE_H

#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *address);
void __tsan_release(void *address);

static inline void kvk_handoff_release(void *address)
{
    __tsan_release(address);
}

static inline void kvk_handoff_acquire(void *address)
{
    __tsan_acquire(address);
}
#else
static inline void kvk_handoff_release(void *address)
{
    (void)address;
}

static inline void kvk_handoff_acquire(void *address)
{
    (void)address;
}
#endif

#endif
