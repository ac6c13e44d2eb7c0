/*
 * kvkeepctl plan: what its parts share. plan_config.c reads a model's config.json, plan.c asks
 * and answers, plan_plot.c draws.
 */
#ifndef KVK_CLIENT_CTL_PLAN_H
#define KVK_CLIENT_CTL_PLAN_H

#include <jansson.h>

#include "base/capacity.h"

#define PLAN_NOTES_MAX 16
#define PLAN_NOTE_SIZE 200

/* Sentences about what the figures do not include, or how a field was taken. */
struct plan_notes {
    char text[PLAN_NOTES_MAX][PLAN_NOTE_SIZE];
    uint32_t count;
};
void plan_note(struct plan_notes *notes, const char *format, ...) KVK_PRINTF(2, 3);

/* What stands in a config.json of Hugging Face's form, as layer groups. Fields that are given as
 * flags are not looked for: `given` non-zero ones win. False, with `why`: a field is missing or
 * not understood, named; nothing is guessed. */
struct plan_given {
    uint32_t layers, kv_heads, head_size;
};
bool plan_config_read(const char *path, const struct plan_given *given,
                      struct kvk_capacity *capacity, char model[64], struct plan_notes *notes,
                      char why[PLAN_NOTE_SIZE]);

/* Sequences at once against context length, as an SVG picture. points: [count]. */
struct plan_point {
    uint64_t context_tokens;
    uint64_t sequences;
};
bool plan_plot(const char *path, const char *title, const struct plan_point *points,
               uint32_t count);

/* Planned against measured, of a live space. The exit code. */
struct ctl_options;
struct plan_live {
    const char *space;  /* its number, or its model */
    const char *tenant; /* NULL: any */
    uint64_t budget;    /* of each rank; 0: the daemon's first tier */
    uint64_t prompt, output;
    bool preempt;
};
int plan_live(const struct ctl_options *options, const struct plan_live *live);

#endif
