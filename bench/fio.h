/*
 * fio (Debian's) as the reference for what a file system gives: one sequential pass over a file, in
 * the same sizes and at the same depth as ours.
 */
#ifndef KVK_BENCH_FIO_H
#define KVK_BENCH_FIO_H

#include <stdbool.h>
#include <stdint.h>

struct kvk_fio_pass {
    const char *path; /* of the file, which is made where it is not there */
    uint64_t size_bytes;
    uint64_t block_bytes;
    uint32_t depth;
    bool direct;
    bool write;         /* else it is read; a write is synced at its end */
    const char *engine; /* "io_uring", "libaio" */
    double rate;        /* at most so many bytes per second; 0: as fast as it goes */
    double seconds;     /* over the file again and again for so long; 0: once */
};

bool kvk_fio_is_there(void);

/* Bytes per second; NAN: fio failed. */
double kvk_fio_run(const struct kvk_fio_pass *pass);

#endif
