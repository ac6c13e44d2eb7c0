/*
 * One spelling for one name: Unicode has several ways to write what looks the same (U+00C5, U+212B,
 * and A followed by U+030A). Names that people type are compared in normalisation form C alone.
 */
#ifndef KVK_BASE_UNICODE_H
#define KVK_BASE_UNICODE_H

#include <stddef.h>

#include "base/status.h"

/*
 * A name as it is kept: NFC with a final NUL in `name` (name_size bytes, NUL included).
 * KVK_INVALID, with `field` named: empty, not UTF-8, with a NUL, control characters or commas
 * (lists of names are split there), or too long in NFC. Allocates nothing where the text is ASCII.
 */
KVK_CHECKED enum kvk_status kvk_name_normalise(const void *text, size_t size, const char *field,
                                               char *name, size_t name_size,
                                               struct kvk_error *error);

#endif
