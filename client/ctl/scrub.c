/*
 * One line of `kvkeepctl status`: what the daemon's scrub has looked at and found.
 */
#include <stdio.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

struct scrub {
    double blocks;
    double bytes;
    double damaged;
    double unreadable;
    double passes;
    double last_pass_s;
    double last_pass_age_s;
};

/* The sum over all labels of one name. */
static double stat_sum(const Kvkeep__V1__GetStatsResponse *stats, const char *name)
{
    double sum = 0;
    size_t size = strlen(name);
    for (size_t i = 0; i < stats->n_stats; i++) {
        const ProtobufCBinaryData *at = &stats->stats[i]->name;
        if (at->len >= size && memcmp(at->data, name, size) == 0 &&
            (at->len == size || at->data[size] == '{')) {
            sum += stats->stats[i]->value;
        }
    }
    return sum;
}

static bool scrub_ask(const struct ctl_options *options, struct scrub *scrub)
{
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    int code = CTL_OK;
    Kvkeep__V1__GetStatsResponse *stats =
        ctl_admin_call(options, "/kvkeep.v1.Admin/GetStats", &request.base,
                       &kvkeep__v1__get_stats_response__descriptor, &code);
    if (stats == NULL) {
        return false;
    }
    *scrub =
        (struct scrub){.blocks = stat_sum(stats, "kvkeep_scrub_blocks_total"),
                       .bytes = stat_sum(stats, "kvkeep_scrub_bytes_total"),
                       .damaged = stat_sum(stats, "kvkeep_scrub_damaged_total"),
                       .unreadable = stat_sum(stats, "kvkeep_scrub_unreadable_total"),
                       .passes = stat_sum(stats, "kvkeep_scrub_passes_total"),
                       .last_pass_s = stat_sum(stats, "kvkeep_scrub_last_pass_seconds"),
                       .last_pass_age_s = stat_sum(stats, "kvkeep_scrub_last_pass_age_seconds")};
    kvkeep__v1__get_stats_response__free_unpacked(stats, NULL);
    return true;
}

void ctl_scrub_print(const struct ctl_options *options)
{
    struct scrub scrub;
    if (!scrub_ask(options, &scrub)) {
        return;
    }
    (void)printf("\nscrub: %s copies (%s) checked, %s damaged, %s unreadable; ",
                 ctl_count((uint64_t)scrub.blocks), ctl_bytes((uint64_t)scrub.bytes),
                 ctl_count((uint64_t)scrub.damaged), ctl_count((uint64_t)scrub.unreadable));
    if (scrub.passes > 0) {
        (void)printf("the last full pass began %s ago and took %s\n",
                     ctl_duration_ms((uint64_t)(scrub.last_pass_age_s * 1000)),
                     ctl_duration_ms((uint64_t)(scrub.last_pass_s * 1000)));
    } else {
        (void)printf("no full pass yet\n");
    }
}

json_t *ctl_scrub_json(const struct ctl_options *options)
{
    struct scrub scrub;
    if (!scrub_ask(options, &scrub)) {
        return NULL;
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:f, s:f}", "blocks", (json_int_t)scrub.blocks,
                     "bytes", (json_int_t)scrub.bytes, "damaged", (json_int_t)scrub.damaged,
                     "unreadable", (json_int_t)scrub.unreadable, "passes", (json_int_t)scrub.passes,
                     "last_pass_s", scrub.last_pass_s, "last_pass_age_s", scrub.last_pass_age_s);
}
