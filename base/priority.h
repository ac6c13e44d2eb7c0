/*
 * What a thread may ask of the system's scheduler without any right: to run soon after it wakes,
 * or to stand back.
 *
 * Where processors are scarce, who runs when decides how long a short request takes. A thread that
 * answers asks for short turns, so that when it wakes it is put before those that have long ones.
 * One that works long never pushes another off its processor by waking up, and one whose work
 * nobody waits for has a smaller share besides. All of it is a wish: where the system does not know
 * it (short turns: Linux before 6.12) or says no, everything is as without.
 *
 * A thread with a smaller share must not take a lock that those wait for who answer: it may hold it
 * for as long as others run.
 */
#ifndef KVK_BASE_PRIORITY_H
#define KVK_BASE_PRIORITY_H

/* The calling thread answers at once and works briefly. */
void kvk_priority_answers(void);

/* The calling thread works long, and somebody waits for it. */
void kvk_priority_works(void);

/* The calling thread works long, and nobody waits for it. */
void kvk_priority_stands_back(void);

#endif
