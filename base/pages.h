/*
 * Zeroed memory for large tables that are looked into at random. From 2 MiB on it is made of huge
 * pages where the system allows: with small ones, such a look waits for the page tables as long as
 * for the data. What is not touched yet costs no memory.
 *
 * The sparse kind is for tables that are made for the most there can ever be, and of which little
 * may ever be touched: small pages, which the system need not promise memory for.
 */
#ifndef KVK_BASE_PAGES_H
#define KVK_BASE_PAGES_H

#include <stddef.h>

void *kvk_pages_create(size_t size);              /* NULL: no memory */
void kvk_pages_destroy(void *pages, size_t size); /* the size that it was created with */

void *kvk_pages_create_sparse(size_t size); /* NULL: no address space */
void kvk_pages_destroy_sparse(void *pages, size_t size);

#endif
