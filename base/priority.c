#include "base/priority.h"

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TURN_NS UINT64_C(100000) /* the shortest that Linux gives */
#define BACK_NICE 10             /* a tenth of the share of a thread at 0 */

/* As the kernel has it (SCHED_ATTR_SIZE_VER0): not in every C library. */
struct attributes {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns; /* of ordinary threads: the length of a turn */
    uint64_t deadline_ns;
    uint64_t period_ns;
};
_Static_assert(sizeof(struct attributes) == 48, "the first size that the kernel knew");

/* How nice the thread is already: nobody may be less than before. */
static int nice_now(void)
{
    errno = 0;
    int nice = getpriority(PRIO_PROCESS, 0);
    return errno == 0 ? nice : 0;
}

/* An administrator's choice (chrt) is left alone, but for what belongs to this thread: whoever runs
 * the daemon as a real-time process wants that. */
static int is_ordinary(void)
{
    int policy = sched_getscheduler(0);
    return policy == SCHED_OTHER || policy == SCHED_BATCH;
}

static void ask(uint32_t policy, int nice, uint64_t runtime_ns)
{
    struct attributes attributes = {
        .size = sizeof(attributes), .policy = policy, .nice = nice, .runtime_ns = runtime_ns};
    if (is_ordinary()) {
        (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
    }
}

void kvk_priority_answers(void)
{
    ask(SCHED_OTHER, nice_now(), TURN_NS);
}

void kvk_priority_works(void)
{
    ask(SCHED_BATCH, nice_now(), 0);
}

void kvk_priority_stands_back(void)
{
    int nice = nice_now();
    ask(SCHED_BATCH, nice > BACK_NICE ? nice : BACK_NICE, 0);
}
