/*
 * Single values of configuration files: text to number and back. Private to base/options*.c.
 */
#ifndef KVK_BASE_OPTIONS_VALUE_H
#define KVK_BASE_OPTIONS_VALUE_H

#include <stddef.h>

#include "base/options.h"

/* The field's range, or its words, as people would write it: "64 KiB to 1 GiB". */
void kvk_option_range(const struct kvk_option_field *field, char *text, size_t text_size);

#endif
