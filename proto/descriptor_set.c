#include "proto/descriptor_set.h"

/* The assembler takes the file in as it is: no generated array of a few hundred kilobytes of C. */
__asm__(".pushsection .rodata\n"
        ".global kvk_descriptor_set_start\n"
        ".global kvk_descriptor_set_end\n"
        "kvk_descriptor_set_start:\n"
        ".incbin \"" KVK_DESCRIPTOR_SET_FILE "\"\n"
        "kvk_descriptor_set_end:\n"
        ".byte 0\n"
        ".popsection\n");

extern const uint8_t kvk_descriptor_set_start[];
extern const uint8_t kvk_descriptor_set_end[];

const uint8_t *kvk_descriptor_set(size_t *size_bytes)
{
    *size_bytes = (size_t)(kvk_descriptor_set_end - kvk_descriptor_set_start);
    return kvk_descriptor_set_start;
}
