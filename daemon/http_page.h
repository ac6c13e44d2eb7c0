/* The page's files, inside the program. */
#ifndef KVK_DAEMON_HTTP_PAGE_H
#define KVK_DAEMON_HTTP_PAGE_H

#include <stddef.h>

struct kvk_page_file {
    const char *path; /* "/page.css" */
    const char *type; /* "text/css; charset=utf-8" */
    const unsigned char *data;
    size_t size_bytes;
};

/* NULL: no such file. */
const struct kvk_page_file *kvk_page_find(const char *path);

#endif
