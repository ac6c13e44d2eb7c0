/*
 * What an operator should look at: findings about the present state, each with its evidence in
 * figures and what to do about it. Nothing to say is an answer too: which checks were made.
 *
 * Gathered with the lock held in slices, judged without it. For admins alone.
 */
#ifndef KVK_DAEMON_DOCTOR_H
#define KVK_DAEMON_DOCTOR_H

#include "daemon/cache.h"

/* Numbers are the API's. */
enum kvk_severity {
    KVK_SEVERITY_NOTE = 1,    /* good to know */
    KVK_SEVERITY_WARNING = 2, /* costs something, or will */
    KVK_SEVERITY_FAULT = 3,   /* something is wrong */
};

const char *kvk_severity_name(enum kvk_severity severity); /* "warning", never NULL */

struct kvk_finding {
    const char *code; /* for scripts, such as "leases_old"; static */
    enum kvk_severity severity;
    char title[128];
    char evidence[512]; /* figures; never tokens */
    char action[320];   /* what to do */
};

#define KVK_FINDINGS_MAX 64

struct kvk_doctor_report {
    struct kvk_finding findings[KVK_FINDINGS_MAX]; /* [count], the gravest first */
    uint32_t count;
    uint32_t check_count; /* that were made */
};

/* KVK_PERMISSION: not an admin. */
KVK_CHECKED enum kvk_status kvk_doctor(struct kvk_cache *cache, const struct kvk_caller *caller,
                                       struct kvk_doctor_report *report, struct kvk_error *error);

#endif
