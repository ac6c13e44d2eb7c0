/*
 * What every benchmark prints: a table for people, or with --json one object for programs,
 *
 *     {"benchmark": "index", "machine": "…", "results": [
 *         {"name": "…", "value": 1.5, "unit": "us", "reference": 3.0, "ratio": 0.5}]}
 *
 * A figure is a ratio against a reference measured in the same run wherever there is one; where
 * there is none, reference and ratio are null.
 */
#ifndef KVK_BENCH_REPORT_H
#define KVK_BENCH_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#define KVK_REPORT_RESULT_COUNT_MAX 64

struct kvk_report_result {
    const char *name;
    const char *unit;
    double value;
    double reference; /* in the same unit; NAN: none */
    double ratio;     /* value / reference; NAN: none */
};

/* The caller's memory. Names and units are borrowed until kvk_report_print(). */
struct kvk_report {
    const char *benchmark;
    bool json;
    uint32_t result_count;
    struct kvk_report_result results[KVK_REPORT_RESULT_COUNT_MAX];
};

void kvk_report_init(struct kvk_report *report, const char *benchmark);

/* Take one argument of the command line, if it is the report's (--json). */
bool kvk_report_option(struct kvk_report *report, const char *argument);

void kvk_report_value(struct kvk_report *report, const char *name, double value, const char *unit);
void kvk_report_ratio(struct kvk_report *report, const char *name, double value, const char *unit,
                      double reference);

/* Print all of it to standard output: 0, or 1 where that failed. */
int kvk_report_print(const struct kvk_report *report);

/* ---- Measuring ---- */

double kvk_report_seconds(void); /* of a clock that only goes forward */

/* The median; sorts `values`. */
double kvk_report_median(double *values, uint32_t count);

#endif
