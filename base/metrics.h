/*
 * What the daemon counts: counters, gauges and histograms, in a registry that prints them as
 * Prometheus text.
 *
 * Moving a metric is one or two relaxed atomic operations and never takes a lock. Registering and
 * printing do take one. Everything is bounded: a registry has room for a fixed number of series,
 * and a histogram is a fixed number of buckets.
 *
 * A histogram has eight buckets for each power of two, so a quantile is within 1/16 of the
 * truth over the whole range of 64 bits.
 */
#ifndef KVK_BASE_METRICS_H
#define KVK_BASE_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_METRIC_NAME_SIZE 96
#define KVK_METRIC_HELP_SIZE 192
#define KVK_METRIC_LABELS_SIZE 320 /* of one series, as printed between the braces */
#define KVK_HISTOGRAM_BUCKET_COUNT 496

struct kvk_counter {
    _Atomic uint64_t value;
};

struct kvk_gauge {
    _Atomic int64_t value;
};

struct kvk_histogram {
    _Atomic uint64_t sum;
    _Atomic uint64_t buckets[KVK_HISTOGRAM_BUCKET_COUNT];
};

void kvk_counter_add(struct kvk_counter *counter, uint64_t amount);
uint64_t kvk_counter_value(const struct kvk_counter *counter);

void kvk_gauge_set(struct kvk_gauge *gauge, int64_t value);
void kvk_gauge_add(struct kvk_gauge *gauge, int64_t amount);
int64_t kvk_gauge_value(const struct kvk_gauge *gauge);

void kvk_histogram_init(struct kvk_histogram *histogram); /* all zero bytes will do too */
void kvk_histogram_record(struct kvk_histogram *histogram, uint64_t value);
uint64_t kvk_histogram_count(const struct kvk_histogram *histogram);
uint64_t kvk_histogram_sum(const struct kvk_histogram *histogram);

/* The value that `share` (0 to 1) of the records do not exceed, such as 0.5 or 0.99: the middle of
 * its bucket. 0 where nothing is recorded. */
uint64_t kvk_histogram_quantile(const struct kvk_histogram *histogram, double share);

/* ---- Registry ---- */

struct kvk_metrics;

KVK_CHECKED enum kvk_status kvk_metrics_create(uint32_t series_max, struct kvk_metrics **metrics);
void kvk_metrics_destroy(struct kvk_metrics *metrics); /* and every series of it */

/*
 * One series, made at its first call; a later call with the same name and labels gives the same
 * one. It lives as long as the registry. `labels` is "" or made by kvk_metrics_label().
 * KVK_EXHAUSTED: series_max are there, or no memory. The name's kind and help are those of its
 * first series; another kind under a name that is taken is a bug, and aborts.
 */
KVK_CHECKED enum kvk_status kvk_metrics_counter(struct kvk_metrics *metrics, const char *name,
                                                const char *help, const char *labels,
                                                struct kvk_counter **counter);
KVK_CHECKED enum kvk_status kvk_metrics_gauge(struct kvk_metrics *metrics, const char *name,
                                              const char *help, const char *labels,
                                              struct kvk_gauge **gauge);

/* What is recorded is printed times `scale`: 1e-9 for nanoseconds under a name in seconds. Bounds
 * are printed from `low` to `high` in powers of two, both as recorded; `high` is at most 2^62. */
KVK_CHECKED enum kvk_status kvk_metrics_histogram(struct kvk_metrics *metrics, const char *name,
                                                  const char *help, const char *labels,
                                                  double scale, uint64_t low, uint64_t high,
                                                  struct kvk_histogram **histogram);

/* Put `key="value"` behind what `labels` [KVK_METRIC_LABELS_SIZE] holds, escaped. False: no room,
 * and nothing changed. */
KVK_CHECKED bool kvk_metrics_label(char *labels, const char *key, const char *value);

/* All series as Prometheus text (version 0.0.4), by name in the order of registration. The caller
 * frees `text`, which ends with a NUL that `size` does not count. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_metrics_render(struct kvk_metrics *metrics, char **text,
                                               size_t *size);

#endif
