/*
 * Assertions for our own bugs. They stay on in every build: a cache that goes on after a broken
 * law hands one request's bytes to another. Never assert on input; that is a status.
 */
#ifndef KVK_BASE_ASSERT_H
#define KVK_BASE_ASSERT_H

_Noreturn void kvk_assert_failed(const char *condition, const char *file, int line);

#define KVK_ASSERT(condition)                                                                      \
    (__builtin_expect(!!(condition), 1) ? (void)0                                                  \
                                        : kvk_assert_failed(#condition, __FILE__, __LINE__))

/* A place that no execution reaches. */
#define KVK_UNREACHABLE() kvk_assert_failed("unreachable", __FILE__, __LINE__)

#endif
