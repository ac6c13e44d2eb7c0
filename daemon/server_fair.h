/*
 * Whose turn is it? Calls that wait for a thread, in a queue per owner (a tenant, for whoever sees
 * more than this file), served by deficit round robin over the time that they take.
 *
 * One queue for all would let an owner with a hundred calls in flight make every other wait for a
 * hundred; and turns by number of calls would favour whoever sends the longest ones. So each owner
 * has an allowance of time, filled up by a quantum when its turn comes, from which what its calls
 * really took is paid. An owner that comes with nothing waiting goes before those that have a
 * backlog, for one quantum; it joins them when it is spent, or when its queue is empty, so that
 * nobody gains by sending in small bursts. So a call of an owner that uses little waits for the
 * call that is being served and for those of others like it, whatever the backlog of the rest.
 *
 * No owner has more than `running_max` calls taken and not ended: of several threads, one owner's
 * slow calls cannot take all.
 *
 * Where the time of a call is only known when it has ended, several taken at once are paid for
 * late; what is owed then is made up for in later turns.
 *
 * Paces: turns order what waits here, not what is on its way here. An owner that may use all the
 * time that is left has always as much on its way as it has calls, and what others send waits
 * behind that. So, while others come too, one owner has `share_percent` of the time at most: after
 * each of its calls it waits as long as keeps it there, the rest of it stays where it is, and the
 * thread is idle meanwhile and at once ready for others. Whoever is alone is never held back.
 *
 * Locking: the caller's, for all functions. Nothing is allocated after init.
 */
#ifndef KVK_DAEMON_SERVER_FAIR_H
#define KVK_DAEMON_SERVER_FAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct kvk_fair_owner;

/* In what waits; at most once at a time. */
struct kvk_fair_item {
    struct kvk_fair_item *next;
    uint32_t owner;
};

struct kvk_fair_list {
    struct kvk_fair_owner *first, *last;
};

struct kvk_fair {
    struct kvk_fair_owner *owners; /* [owner_count], ours */
    uint32_t owner_count;
    uint32_t running_max;
    uint64_t quantum_ns;
    struct kvk_fair_list fresh;   /* had nothing waiting when they came */
    struct kvk_fair_list backlog; /* all others with a place in the round */
    struct kvk_fair_list paced;   /* whose time has not come */
    uint64_t paced_until_ns;      /* not later than the first of them is to be looked at again */
    uint32_t waiting_count;       /* items */
    uint32_t paced_count;         /* of them, of owners in `paced` */
    uint32_t share_percent;       /* 100: nobody is held back */
    uint32_t nobody;              /* whose calls hold nobody back; UINT32_MAX: there is no such */
    struct kvk_fair_came {
        uint64_t ns;
        uint32_t owner;
    } came[2];           /* when one came last, and when another than that one did */
    uint32_t idle_count; /* times that nothing waited: what was owed before is forgiven */
};

/* KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_fair_init(struct kvk_fair *fair, uint32_t owner_count,
                                          uint32_t running_max, uint64_t quantum_ns,
                                          struct kvk_error *error);
void kvk_fair_finish(struct kvk_fair *fair); /* nothing waits */
/* Hold back who uses more than this share while others come, but not for calls of `nobody`. */
void kvk_fair_pace(struct kvk_fair *fair, uint32_t share_percent, uint32_t nobody);

void kvk_fair_add(struct kvk_fair *fair, struct kvk_fair_item *item, uint32_t owner,
                  uint64_t now_ns);
/* The next to be served, to be ended by kvk_fair_end(). NULL: nothing waits, or only calls of
 * owners that have as many taken as they may, or that are held back. */
struct kvk_fair_item *kvk_fair_take(struct kvk_fair *fair, uint64_t now_ns);
/* Would kvk_fair_take() give a call of an owner that had nothing waiting when it came? */
bool kvk_fair_is_fresh(const struct kvk_fair *fair);
/* From when on kvk_fair_take() is worth a call: 0: now; UINT64_MAX: nothing waits. */
uint64_t kvk_fair_ready_ns(const struct kvk_fair *fair);
/* Have others than this one come within the last moments? */
bool kvk_fair_others_come(const struct kvk_fair *fair, uint32_t owner, uint64_t now_ns);
/* One of the owner's has taken so long. True: others of it may be taken now that could not before.
 */
bool kvk_fair_end(struct kvk_fair *fair, uint32_t owner, uint64_t took_ns, uint64_t now_ns);
/* Hold the owner back for so long, bounded, as if its calls had taken time. Nothing happens where
 * nobody is held back. */
void kvk_fair_hold(struct kvk_fair *fair, uint32_t owner, uint64_t hold_ns, uint64_t now_ns);

#endif
