/*
 * Where blocks in host memory are attended: where they lie, by the CPU, or on the device, after
 * the call's layer of them was copied there for the time of the call.
 *
 * Where the device tier is memory of the CPU too there is no choice: both tiers are attended where
 * they lie. Else the quicker of the two by what was measured: how fast the CPU attends, and how
 * many calls share it now, against how fast the link copies, and the device attends. As long as
 * one of these is not known, blocks are attended where they lie, which measures it; copies that
 * other work makes measure the link.
 */
#ifndef KVK_DAEMON_ATTENTION_PLACE_H
#define KVK_DAEMON_ATTENTION_PLACE_H

#include <stdbool.h>
#include <stdint.h>

enum kvk_attention_place {
    KVK_ATTENTION_NO_CHOICE = 0, /* nothing in host memory, or the device is no other */
    KVK_ATTENTION_IN_PLACE = 1,
    KVK_ATTENTION_BROUGHT_IN = 2,
};

/* Rates are bytes per second, 0: not known yet. */
struct kvk_attention_load {
    bool apart;           /* the device has memory of its own */
    uint64_t host_bytes;  /* K and V in host memory that the call's queries see */
    uint64_t copy_bytes;  /* that would have to be copied: whole blocks of the layer */
    uint64_t room_bytes;  /* that may be brought in at most */
    uint64_t host_rate;   /* of one call that has the CPU alone */
    uint32_t host_calls;  /* that attend on the CPU now, this one counted: they share it */
    uint64_t link_rate;   /* of copies to the device */
    uint64_t device_rate; /* of attention there; not known: as if it took no time */
};

struct kvk_attention_choice {
    enum kvk_attention_place place;
    uint64_t in_place_ns; /* estimated; 0: not known, as the next */
    uint64_t bring_in_ns;
};

/* Pure. Bringing in must be quicker by a fifth, since it costs room and the link's time besides. */
struct kvk_attention_choice kvk_attention_choose_place(const struct kvk_attention_load *load);

/* Fold a measurement into a rate. Small calls say nothing about it, and leave it as it is. */
uint64_t kvk_attention_rate_after(uint64_t rate, uint64_t bytes, uint64_t took_ns);

#endif
