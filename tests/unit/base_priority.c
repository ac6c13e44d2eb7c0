/*
 * What a thread asks of the scheduler, as the system then says it is.
 */
#include "base/priority.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <sys/resource.h>

Test(priority, who_works_does_not_push_others_off_their_processor)
{
    int before = getpriority(PRIO_PROCESS, 0);
    kvk_priority_works();
    cr_expect_eq(sched_getscheduler(0), SCHED_BATCH);
    cr_expect_eq(getpriority(PRIO_PROCESS, 0), before);
    kvk_priority_answers();
    cr_expect_eq(sched_getscheduler(0), SCHED_OTHER);
    cr_expect_eq(getpriority(PRIO_PROCESS, 0), before);
}

Test(priority, who_stands_back_has_a_smaller_share_and_never_a_larger_one)
{
    int before = getpriority(PRIO_PROCESS, 0);
    kvk_priority_stands_back();
    cr_expect_eq(sched_getscheduler(0), SCHED_BATCH);
    cr_expect_eq(getpriority(PRIO_PROCESS, 0), before > 10 ? before : 10);
    cr_assert_eq(setpriority(PRIO_PROCESS, 0, 15), 0);
    kvk_priority_stands_back();
    cr_expect_eq(getpriority(PRIO_PROCESS, 0), 15);
    kvk_priority_answers();
    cr_expect_eq(getpriority(PRIO_PROCESS, 0), 15);
}

Test(priority, an_administrators_choice_is_left_alone)
{
    const struct sched_param none = {.sched_priority = 0};
    cr_assert_eq(sched_setscheduler(0, SCHED_IDLE, &none), 0);
    kvk_priority_answers();
    cr_expect_eq(sched_getscheduler(0), SCHED_IDLE);
}
