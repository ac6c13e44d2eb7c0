/*
 * kvkeepctl top: rates and occupancy, live. On a terminal it repaints; elsewhere (and with --json)
 * it prints one frame a line or block, so that it can be piped.
 */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define BAR_WIDTH 40

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    interrupted = 1;
}

struct frame {
    Kvkeep__V1__GetStatsResponse *stats;
    Kvkeep__V1__GetOccupancyResponse *occupancy;
    uint64_t taken_ns;
};

static void frame_finish(struct frame *frame)
{
    if (frame->stats != NULL) {
        kvkeep__v1__get_stats_response__free_unpacked(frame->stats, NULL);
    }
    if (frame->occupancy != NULL) {
        kvkeep__v1__get_occupancy_response__free_unpacked(frame->occupancy, NULL);
    }
    memset(frame, 0, sizeof *frame);
}

static int frame_take(const struct ctl_options *options, struct frame *frame)
{
    int code;
    Kvkeep__V1__GetStatsRequest stats = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    Kvkeep__V1__GetOccupancyRequest occupancy = KVKEEP__V1__GET_OCCUPANCY_REQUEST__INIT;
    frame->taken_ns = kvk_clock_now(kvk_clock_monotonic());
    frame->stats = ctl_admin_call(options, "/kvkeep.v1.Admin/GetStats", &stats.base,
                                  &kvkeep__v1__get_stats_response__descriptor, &code);
    if (frame->stats != NULL) {
        frame->occupancy = ctl_admin_call(options, "/kvkeep.v1.Admin/GetOccupancy", &occupancy.base,
                                          &kvkeep__v1__get_occupancy_response__descriptor, &code);
    }
    return code;
}

/* All series of a name, whatever their labels, added up. */
static double stat_sum(const struct frame *frame, const char *name)
{
    size_t length = strlen(name);
    double sum = 0;
    for (size_t i = 0; i < frame->stats->n_stats; i++) {
        const ProtobufCBinaryData *data = &frame->stats->stats[i]->name;
        bool whole = data->len == length || (data->len > length && data->data[length] == '{');
        if (whole && memcmp(data->data, name, length) == 0) {
            sum += frame->stats->stats[i]->value;
        }
    }
    return sum;
}

static double rate(const struct frame *before, const struct frame *now, const char *name)
{
    double seconds = (double)(now->taken_ns - before->taken_ns) / 1e9;
    return seconds <= 0 ? 0 : (stat_sum(now, name) - stat_sum(before, name)) / seconds;
}

static void bar_print(const Kvkeep__V1__TierUse *use)
{
    char bar[BAR_WIDTH + 1];
    uint64_t limit = use->limit_bytes == 0 ? 1 : use->limit_bytes;
    int used = (int)(use->used_bytes * BAR_WIDTH / limit);
    for (int i = 0; i < BAR_WIDTH; i++) {
        bar[i] = i < used ? '#' : '.';
    }
    bar[BAR_WIDTH] = '\0';
    (void)printf("  %-7s [%s] %s of %s\n",
                 use->tier == KVKEEP__V1__TIER__TIER_DEVICE ? "device"
                 : use->tier == KVKEEP__V1__TIER__TIER_HOST ? "host"
                                                            : "disk",
                 bar, ctl_bytes(use->used_bytes), ctl_bytes(use->limit_bytes));
}

/* The counters that an operator watches; names as GetStats has them. */
static const struct {
    const char *title;
    const char *name;
} watched[] = {
    {"look-ups/s", "kvkeep_lookup_total"},
    {"looked-up tokens/s", "kvkeep_lookup_tokens_total"},
    {"hit tokens/s", "kvkeep_hit_tokens_total"},
    {"opened/s", "kvkeep_sequences_opened_total"},
    {"sealed blocks/s", "kvkeep_sealed_blocks_total"},
    {"evictions/s", "kvkeep_evictions_total"},
    {"demoted blocks/s", "kvkeep_demoted_blocks_total"},
    {"promoted blocks/s", "kvkeep_promoted_blocks_total"},
    {"swapped out blocks/s", "kvkeep_swapped_out_blocks_total"},
    {"refusals/s", "kvkeep_refusals_total"},
};
#define WATCHED_COUNT (sizeof watched / sizeof watched[0])

static void frame_print(const struct frame *before, const struct frame *now)
{
    for (size_t i = 0; i < now->occupancy->n_tiers; i++) {
        bar_print(now->occupancy->tiers[i]);
    }
    double tokens = rate(before, now, "kvkeep_lookup_tokens_total");
    double hits = rate(before, now, "kvkeep_hit_tokens_total");
    (void)printf("\n  hit rate now          %.1f %%\n", tokens <= 0 ? 0 : 100 * hits / tokens);
    for (size_t i = 0; i < WATCHED_COUNT; i++) {
        (void)printf("  %-21s %s\n", watched[i].title,
                     ctl_count((uint64_t)(rate(before, now, watched[i].name) + 0.5)));
    }
    static const char *const titles[] = {"-tenant", "-model", "group", "device",
                                         "host",    "held",   "cached"};
    struct ctl_table table;
    ctl_table_init(&table, 7, titles);
    for (size_t i = 0; i < now->occupancy->n_rows && i < 20; i++) {
        const Kvkeep__V1__OccupancyRow *row = now->occupancy->rows[i];
        uint64_t held = 0;
        uint64_t cached = 0;
        if (row->counts != NULL) {
            held = row->counts->reserved + row->counts->active + row->counts->sealed +
                   row->counts->shared;
            cached = row->counts->evictable;
        }
        ctl_table_row(&table, "%s\t%s\t%u\t%s\t%s\t%s\t%s", ctl_text(row->tenant),
                      ctl_text(row->model), row->group, ctl_bytes(row->device_bytes),
                      ctl_bytes(row->host_bytes), ctl_count(held), ctl_count(cached));
    }
    (void)putchar('\n');
    ctl_table_print(&table);
}

static void frame_json(const struct frame *before, const struct frame *now)
{
    json_t *object = json_object();
    for (size_t i = 0; i < WATCHED_COUNT; i++) {
        json_object_set_new(object, watched[i].name, json_real(rate(before, now, watched[i].name)));
    }
    for (size_t i = 0; i < now->occupancy->n_tiers; i++) {
        const Kvkeep__V1__TierUse *use = now->occupancy->tiers[i];
        json_object_set_new(object,
                            use->tier == KVKEEP__V1__TIER__TIER_DEVICE ? "device_used_bytes"
                            : use->tier == KVKEEP__V1__TIER__TIER_HOST ? "host_used_bytes"
                                                                       : "disk_used_bytes",
                            json_integer((json_int_t)use->used_bytes));
    }
    ctl_json_print(object);
    (void)fflush(stdout);
}

int ctl_top(const struct ctl_options *options, int argc, char **argv)
{
    static const struct ctl_command command = {
        .name = "top",
        .usage = "  --interval MS   between frames (1000)\n"
                 "  --frames N      then end (0: until Ctrl-C)\n"};
    static const struct option names[] = {{"interval", required_argument, NULL, 'i'},
                                          {"frames", required_argument, NULL, 'n'},
                                          {NULL, 0, NULL, 0}};
    uint64_t interval_ms = 1000;
    uint64_t frames = 0;
    bool right = true;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        right &= option == 'i'   ? ctl_parse_count(optarg, &interval_ms)
                 : option == 'n' ? ctl_parse_count(optarg, &frames)
                                 : false;
    }
    if (!right || optind != argc || interval_ms < 50 || interval_ms > 3600000) {
        return ctl_usage(&command, "an interval of 50 ms to 1 h");
    }
    (void)signal(SIGINT, on_interrupt);
    bool repaint = isatty(STDOUT_FILENO) && !options->json;
    struct frame before = {0};
    int code = frame_take(options, &before);
    for (uint64_t n = 0; code == CTL_OK && !interrupted && (frames == 0 || n < frames); n++) {
        struct timespec wait = {.tv_sec = (time_t)(interval_ms / 1000),
                                .tv_nsec = (long)(interval_ms % 1000) * 1000000};
        (void)nanosleep(&wait, NULL);
        struct frame now = {0};
        code = frame_take(options, &now);
        if (code != CTL_OK || now.occupancy == NULL || before.occupancy == NULL) {
            frame_finish(&now);
            break;
        }
        if (options->json) {
            frame_json(&before, &now);
        } else {
            (void)printf("%skvkeepctl top, every %s\n\n", repaint ? "\033[H\033[2J" : "",
                         ctl_duration_ms(interval_ms));
            frame_print(&before, &now);
            (void)fflush(stdout);
        }
        frame_finish(&before);
        before = now;
    }
    frame_finish(&before);
    return code;
}
