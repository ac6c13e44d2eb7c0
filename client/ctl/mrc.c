/*
 * kvkeepctl mrc: the hit ratio of an LRU cache against its size, per tenant, as a table, a plot in
 * the terminal, JSON, or a page of SVG.
 */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

/* ---- In the terminal ---- */

#define PLOT_COLUMNS 64
#define PLOT_ROWS 10

/* Where a size stands between the first and the last point, 0 to 1, by its logarithm. */
static double place_of(const Kvkeep__V1__MissRatioCurve *curve, uint64_t size_bytes)
{
    double first = log2((double)curve->points[0]->size_bytes);
    double last = log2((double)curve->points[curve->n_points - 1]->size_bytes);
    return size_bytes == 0 ? -1 : (log2((double)size_bytes) - first) / (last - first);
}

/* The hit ratio at a place, between the points. */
static double hits_at(const Kvkeep__V1__MissRatioCurve *curve, double place)
{
    double at = place * (double)(curve->n_points - 1);
    size_t before = at <= 0 ? 0 : (size_t)at;
    if (before + 1 >= curve->n_points) {
        return curve->points[curve->n_points - 1]->hits;
    }
    double part = at - (double)before;
    return (1 - part) * curve->points[before]->hits + part * curve->points[before + 1]->hits;
}

static void mark(char line[PLOT_COLUMNS + 1], const Kvkeep__V1__MissRatioCurve *curve,
                 uint64_t size_bytes, char letter)
{
    double place = place_of(curve, size_bytes);
    if (place >= 0 && place <= 1) {
        line[(size_t)(place * (PLOT_COLUMNS - 1) + 0.5)] = letter;
    }
}

static void plot_print(const Kvkeep__V1__MissRatioCurve *curve)
{
    char line[PLOT_COLUMNS + 1];
    /* The least tenth that has room for all of it. */
    double top = ceil(10 * curve->ceiling->hits) / 10;
    top = top < 0.1 ? 0.1 : top;
    int ceiling_row = (int)(curve->ceiling->hits / top * PLOT_ROWS + 0.5);
    for (int row = PLOT_ROWS; row >= 0; row--) {
        for (int column = 0; column < PLOT_COLUMNS; column++) {
            double hits = hits_at(curve, (double)column / (PLOT_COLUMNS - 1));
            int height = (int)(hits / top * PLOT_ROWS + 0.5);
            line[column] = (char)(height == row ? '*' : row == ceiling_row ? '-' : ' ');
        }
        line[PLOT_COLUMNS] = '\0';
        (void)printf("%5.1f %% |%s|%s\n", 100 * top * row / PLOT_ROWS, line,
                     row == ceiling_row ? " ceiling" : "");
    }
    memset(line, ' ', PLOT_COLUMNS);
    line[PLOT_COLUMNS] = '\0';
    mark(line, curve, 4 * curve->now_bytes, '4');
    mark(line, curve, 2 * curve->now_bytes, '2');
    mark(line, curve, curve->now_bytes, '1');
    (void)printf("         %s  1, 2, 4: times what it has now\n", line);
    const char *first = ctl_bytes(curve->points[0]->size_bytes);
    (void)printf("         %s%*s  (logarithmic)\n\n", first, PLOT_COLUMNS - (int)strlen(first),
                 ctl_bytes(curve->points[curve->n_points - 1]->size_bytes));
}

static void row_add(struct ctl_table *table, const char *what, uint64_t size_bytes,
                    const Kvkeep__V1__MissRatioPoint *point)
{
    ctl_table_row(table, "%s\t%s\t%.1f %%\t+-%.1f", what,
                  size_bytes == 0 ? "" : ctl_bytes(size_bytes), 100 * point->hits,
                  100 * point->error);
}

static void curve_print(const Kvkeep__V1__MissRatioCurve *curve)
{
    static const char *const titles[] = {"-memory", "bytes", "LRU hits", "error"};
    (void)printf("tenant %s: of %.0f blocks asked for, the cache had %.1f %%\n",
                 ctl_text(curve->tenant), curve->references, 100 * curve->hits);
    if (curve->n_points < 2) {
        (void)printf("Too little was asked for again to draw a curve.\n");
        return;
    }
    (void)putchar('\n');
    plot_print(curve);
    struct ctl_table table;
    ctl_table_init(&table, 4, titles);
    row_add(&table, "now", curve->now_bytes, curve->now);
    row_add(&table, "twice", 2 * curve->now_bytes, curve->twice);
    row_add(&table, "four times", 4 * curve->now_bytes, curve->four_times);
    row_add(&table, "all tiers for it alone", curve->pool_bytes, curve->pool);
    row_add(&table, "ceiling: endless", 0, curve->ceiling);
    ctl_table_print(&table);
    (void)printf("\nThe curve is LRU's; [cache] policy may do better. Sampled: %s blocks, 1 in "
                 "%.0f.\n",
                 ctl_count(curve->samples), curve->rate > 0 ? 1 / curve->rate : 0);
}

/* ---- JSON ---- */

static json_t *point_json(const Kvkeep__V1__MissRatioPoint *point)
{
    return json_pack("{s:I, s:f, s:f}", "size_bytes", (json_int_t)point->size_bytes, "hits",
                     point->hits, "error", point->error);
}

static json_t *curve_json(const Kvkeep__V1__MissRatioCurve *curve)
{
    json_t *points = json_array();
    for (size_t i = 0; i < curve->n_points; i++) {
        json_array_append_new(points, point_json(curve->points[i]));
    }
    return json_pack("{s:s, s:o, s:I, s:I, s:f, s:I, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:I}",
                     "policy", "lru", "tenant", ctl_json_text(curve->tenant), "now_bytes",
                     (json_int_t)curve->now_bytes, "pool_bytes", (json_int_t)curve->pool_bytes,
                     "rate", curve->rate, "samples", (json_int_t)curve->samples, "references",
                     curve->references, "hits", curve->hits, "now", point_json(curve->now), "twice",
                     point_json(curve->twice), "four_times", point_json(curve->four_times), "pool",
                     point_json(curve->pool), "ceiling", point_json(curve->ceiling), "points",
                     points, "distinct_bytes", (json_int_t)curve->distinct_bytes);
}

/* ---- SVG ---- */

#define SVG_WIDTH 720
#define SVG_HEIGHT 360
#define SVG_LEFT 60
#define SVG_TOP 40
#define SVG_INNER_WIDTH (SVG_WIDTH - SVG_LEFT - 30)
#define SVG_INNER_HEIGHT (SVG_HEIGHT - SVG_TOP - 60)

static double svg_x(double place)
{
    return SVG_LEFT + place * SVG_INNER_WIDTH;
}

static double svg_y(double hits)
{
    return SVG_TOP + (1 - hits) * SVG_INNER_HEIGHT;
}

static void svg_text(FILE *file, ProtobufCBinaryData text)
{
    for (size_t i = 0; i < text.len; i++) {
        bool is_plain =
            text.data[i] >= 0x20 && text.data[i] != 0x7f && strchr("<>&\"", text.data[i]) == NULL;
        (void)fputc(is_plain ? text.data[i] : '?', file);
    }
}

static void svg_mark(FILE *file, const Kvkeep__V1__MissRatioCurve *curve, uint64_t size_bytes,
                     const char *label)
{
    double place = place_of(curve, size_bytes);
    if (place < 0 || place > 1) {
        return;
    }
    (void)fprintf(file,
                  "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#bbb\"/>\n"
                  "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                  svg_x(place), SVG_TOP, svg_x(place), SVG_TOP + SVG_INNER_HEIGHT, svg_x(place),
                  SVG_TOP - 6, label);
}

static void svg_curve(FILE *file, const Kvkeep__V1__MissRatioCurve *curve)
{
    (void)fprintf(file,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                  "font-family=\"sans-serif\" font-size=\"12\">\n<text x=\"%d\" y=\"16\">Hit ratio "
                  "of an LRU cache by its size: tenant ",
                  SVG_WIDTH, SVG_HEIGHT, SVG_LEFT);
    svg_text(file, curve->tenant);
    (void)fputs("</text>\n", file);
    for (int step = 0; step <= 4; step++) {
        (void)fprintf(file,
                      "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#eee\"/>\n"
                      "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d %%</text>\n",
                      SVG_LEFT, svg_y(step / 4.0), SVG_LEFT + SVG_INNER_WIDTH, svg_y(step / 4.0),
                      SVG_LEFT - 6, svg_y(step / 4.0) + 4, 25 * step);
    }
    svg_mark(file, curve, curve->now_bytes, "now");
    svg_mark(file, curve, 2 * curve->now_bytes, "2x");
    svg_mark(file, curve, 4 * curve->now_bytes, "4x");
    (void)fprintf(file,
                  "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#c60\" "
                  "stroke-dasharray=\"6 4\"/>\n<polyline fill=\"none\" stroke=\"#06c\" "
                  "stroke-width=\"2\" points=\"",
                  SVG_LEFT, svg_y(curve->ceiling->hits), SVG_LEFT + SVG_INNER_WIDTH,
                  svg_y(curve->ceiling->hits));
    for (size_t i = 0; i < curve->n_points; i++) {
        (void)fprintf(file, "%.1f,%.1f ", svg_x(place_of(curve, curve->points[i]->size_bytes)),
                      svg_y(curve->points[i]->hits));
    }
    (void)fprintf(
        file,
        "\"/>\n<text x=\"%d\" y=\"%d\">%s</text>\n<text x=\"%d\" y=\"%d\" "
        "text-anchor=\"end\">%s</text>\n<text x=\"%d\" y=\"%d\">dashed: an endless cache, "
        "%.1f %%; sampled 1 in %.0f, error +-%.1f %%</text>\n</svg>\n",
        SVG_LEFT, SVG_TOP + SVG_INNER_HEIGHT + 18, ctl_bytes(curve->points[0]->size_bytes),
        SVG_LEFT + SVG_INNER_WIDTH, SVG_TOP + SVG_INNER_HEIGHT + 18,
        ctl_bytes(curve->points[curve->n_points - 1]->size_bytes), SVG_LEFT,
        SVG_TOP + SVG_INNER_HEIGHT + 40, 100 * curve->ceiling->hits,
        curve->rate > 0 ? 1 / curve->rate : 0, 100 * curve->ceiling->error);
}

/* A page that needs nothing else. */
static int html_write(const char *path, const Kvkeep__V1__GetMissRatioResponse *response)
{
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        (void)fprintf(stderr, "kvkeepctl mrc: %s: %s\n", path, strerror(errno));
        return CTL_FAILED;
    }
    (void)fputs("<!DOCTYPE html>\n<meta charset=\"utf-8\">\n<title>kvkeep: hit ratio by "
                "memory</title>\n",
                file);
    for (size_t i = 0; i < response->n_curves; i++) {
        if (response->curves[i]->n_points >= 2) {
            svg_curve(file, response->curves[i]);
        }
    }
    if (ferror(file) != 0 || fclose(file) != 0) {
        (void)fprintf(stderr, "kvkeepctl mrc: %s: %s\n", path, strerror(errno));
        return CTL_FAILED;
    }
    return CTL_OK;
}

/* ---- The command ---- */

int ctl_mrc(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{"tenant", required_argument, NULL, 't'},
                                          {"html", required_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    static const struct ctl_command command = {.name = "mrc",
                                               .usage = "  --tenant NAME   only this tenant\n"
                                                        "  --html FILE     write a page of SVG, "
                                                        "too\n"};
    Kvkeep__V1__GetMissRatioRequest request = KVKEEP__V1__GET_MISS_RATIO_REQUEST__INIT;
    const char *path = NULL;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (option == 't') {
            request.tenant =
                (ProtobufCBinaryData){.data = (uint8_t *)optarg, .len = strlen(optarg)};
        } else if (option == 'h') {
            path = optarg;
        } else {
            return ctl_usage(&command, NULL);
        }
    }
    if (optind != argc) {
        return ctl_usage(&command, "options only");
    }
    int code;
    Kvkeep__V1__GetMissRatioResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Admin/GetMissRatio", &request.base,
                       &kvkeep__v1__get_miss_ratio_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_curves; i++) {
        if (options->json) {
            json_array_append_new(list, curve_json(response->curves[i]));
        } else {
            (void)fputs(i == 0 ? "" : "\n", stdout);
            curve_print(response->curves[i]);
        }
    }
    if (options->json) {
        json_incref(list);
        ctl_json_print(list);
    } else if (response->n_curves == 0) {
        (void)printf("No tenant is followed: none has a space, or [limits] mrc_samples is 0.\n");
    }
    json_decref(list);
    if (path != NULL) {
        code = html_write(path, response);
    }
    kvkeep__v1__get_miss_ratio_response__free_unpacked(response, NULL);
    return code;
}
