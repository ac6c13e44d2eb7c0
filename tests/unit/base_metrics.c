/* Counters, histograms against sorted samples, and Prometheus text to the letter. */
#include "base/metrics.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"

static int compare(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return left < right ? -1 : left > right ? 1 : 0;
}

/* Samples spread over many powers of two; the true quantile and the told one within 1/16. */
Test(base_metrics, quantiles_are_within_a_sixteenth)
{
    static uint64_t samples[20000];
    static struct kvk_histogram histogram;
    static const double shares[] = {0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0};
    struct kvk_random random;
    kvk_random_init(&random, 2);
    kvk_histogram_init(&histogram);
    cr_assert_eq(kvk_histogram_quantile(&histogram, 0.5), 0);
    uint64_t sum = 0;
    for (size_t i = 0; i < 20000; i++) {
        samples[i] = kvk_random_next(&random) >> kvk_random_between(&random, 20, 63);
        sum += samples[i];
        kvk_histogram_record(&histogram, samples[i]);
    }
    qsort(samples, 20000, sizeof(samples[0]), compare);
    cr_assert_eq(kvk_histogram_count(&histogram), 20000);
    cr_assert_eq(kvk_histogram_sum(&histogram), sum);
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        double wanted = shares[i] * 20000;
        size_t rank = wanted <= 1 ? 0 : (size_t)(wanted + 0.999999) - 1;
        double truth = (double)samples[rank];
        double told = (double)kvk_histogram_quantile(&histogram, shares[i]);
        cr_assert(told >= truth * 15 / 16 && told <= truth * 17 / 16 + 0.5, "%g: %g, told %g",
                  shares[i], truth, told);
    }
}

Test(base_metrics, any_value_has_a_bucket)
{
    static struct kvk_histogram histogram;
    for (unsigned bit = 0; bit < 64; bit++) {
        for (int offset = -1; offset <= 1; offset++) {
            kvk_histogram_init(&histogram);
            uint64_t value = (UINT64_C(1) << bit) + (uint64_t)(int64_t)offset;
            kvk_histogram_record(&histogram, value);
            double told = (double)kvk_histogram_quantile(&histogram, 0.5);
            double truth = (double)value;
            cr_assert(told >= truth * 15 / 16 && told <= truth * 17 / 16, "%g told %g", truth,
                      told);
        }
    }
    kvk_histogram_record(&histogram, UINT64_MAX);
    cr_assert_eq(kvk_histogram_count(&histogram), 2);
}

static struct kvk_metrics *make(uint32_t series_max)
{
    struct kvk_metrics *metrics = NULL;
    cr_assert_eq(kvk_metrics_create(series_max, &metrics), KVK_OK);
    return metrics;
}

Test(base_metrics, text_for_prometheus)
{
    struct kvk_metrics *metrics = make(10);
    struct kvk_counter *device = NULL;
    struct kvk_counter *host = NULL;
    struct kvk_gauge *gauge = NULL;
    struct kvk_histogram *histogram = NULL;
    char labels[KVK_METRIC_LABELS_SIZE] = "";
    cr_assert(kvk_metrics_label(labels, "tier", "device"));
    cr_assert_eq(
        kvk_metrics_counter(metrics, "kvkeep_evictions_total", "Blocks evicted.", labels, &device),
        KVK_OK);
    cr_assert_eq(kvk_metrics_gauge(metrics, "kvkeep_sequences", "Open sequences.", "", &gauge),
                 KVK_OK);
    labels[0] = '\0';
    cr_assert(kvk_metrics_label(labels, "tier", "host"));
    cr_assert(kvk_metrics_label(labels, "tenant", "a\"b\\c\nd"));
    cr_assert_eq(kvk_metrics_counter(metrics, "kvkeep_evictions_total", "", labels, &host), KVK_OK);
    cr_assert_eq(kvk_metrics_histogram(metrics, "kvkeep_lookup_seconds", "Time of a look-up.", "",
                                       1e-9, 1024, 4096, &histogram),
                 KVK_OK);
    kvk_counter_add(device, 3);
    kvk_counter_add(host, UINT64_C(1) << 40);
    kvk_gauge_set(gauge, 5);
    kvk_gauge_add(gauge, -7);
    kvk_histogram_record(histogram, 10);
    kvk_histogram_record(histogram, 1500);
    kvk_histogram_record(histogram, 1600);
    kvk_histogram_record(histogram, 1000000);

    char *text = NULL;
    size_t size = 0;
    cr_assert_eq(kvk_metrics_render(metrics, &text, &size), KVK_OK);
    cr_assert_str_eq(text, "# HELP kvkeep_evictions_total Blocks evicted.\n"
                           "# TYPE kvkeep_evictions_total counter\n"
                           "kvkeep_evictions_total{tier=\"device\"} 3\n"
                           "kvkeep_evictions_total{tier=\"host\",tenant=\"a\\\"b\\\\c\\nd\"} "
                           "1099511627776\n"
                           "# HELP kvkeep_sequences Open sequences.\n"
                           "# TYPE kvkeep_sequences gauge\n"
                           "kvkeep_sequences -2\n"
                           "# HELP kvkeep_lookup_seconds Time of a look-up.\n"
                           "# TYPE kvkeep_lookup_seconds histogram\n"
                           "kvkeep_lookup_seconds_bucket{le=\"1.024e-06\"} 1\n"
                           "kvkeep_lookup_seconds_bucket{le=\"2.048e-06\"} 3\n"
                           "kvkeep_lookup_seconds_bucket{le=\"4.096e-06\"} 3\n"
                           "kvkeep_lookup_seconds_bucket{le=\"+Inf\"} 4\n"
                           "kvkeep_lookup_seconds_sum 0.00100311\n"
                           "kvkeep_lookup_seconds_count 4\n");
    cr_assert_eq(size, strlen(text));
    free(text);
    kvk_metrics_destroy(metrics);
    kvk_metrics_destroy(NULL);
}

Test(base_metrics, the_same_name_and_labels_are_one_series)
{
    struct kvk_metrics *metrics = make(2);
    struct kvk_counter *a = NULL;
    struct kvk_counter *b = NULL;
    cr_assert_eq(kvk_metrics_counter(metrics, "x_total", "X.", "", &a), KVK_OK);
    cr_assert_eq(kvk_metrics_counter(metrics, "x_total", "X.", "", &b), KVK_OK);
    cr_assert_eq(a, b);
    cr_assert_eq(kvk_metrics_counter(metrics, "x_total", "X.", "k=\"1\"", &b), KVK_OK);
    cr_assert_neq(a, b);
    cr_assert_eq(kvk_metrics_counter(metrics, "x_total", "X.", "k=\"2\"", &b), KVK_EXHAUSTED);
    cr_assert_null(b);
    cr_assert_eq(kvk_metrics_counter(metrics, "x_total", "X.", "", &b), KVK_OK);
    kvk_metrics_destroy(metrics);
}

Test(base_metrics, another_kind_under_one_name_aborts, .signal = SIGABRT)
{
    struct kvk_metrics *metrics = make(2);
    struct kvk_counter *counter = NULL;
    struct kvk_gauge *gauge = NULL;
    cr_assert_eq(kvk_metrics_counter(metrics, "x", "X.", "", &counter), KVK_OK);
    (void)!kvk_metrics_gauge(metrics, "x", "X.", "", &gauge);
}

Test(base_metrics, labels_that_do_not_fit_change_nothing)
{
    char labels[KVK_METRIC_LABELS_SIZE] = "";
    char value[KVK_METRIC_LABELS_SIZE];
    for (size_t size = 0; size < sizeof(value) - 1; size++) {
        memset(value, size % 2 == 0 ? '"' : 'v', size);
        value[size] = '\0';
        labels[0] = '\0';
        cr_assert(kvk_metrics_label(labels, "a", "b"));
        if (kvk_metrics_label(labels, "key", value)) {
            cr_assert_lt(strlen(labels), KVK_METRIC_LABELS_SIZE);
            cr_assert_eq(labels[strlen(labels) - 1], '"');
        } else {
            cr_assert_str_eq(labels, "a=\"b\"");
            cr_assert_gt(size, 100);
        }
    }
}
