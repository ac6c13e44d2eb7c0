/* A folder of a program's own, removed with all that is in it. */
#ifndef KVK_TESTS_FOLDER_H
#define KVK_TESTS_FOLDER_H

#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>

static inline int folder_remove_one(const char *path, const struct stat *status, int kind,
                                    struct FTW *place)
{
    (void)status;
    (void)kind;
    (void)place;
    return remove(path);
}

/* Fine where there is none. */
static inline void folder_remove(const char *path)
{
    (void)nftw(path, folder_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
