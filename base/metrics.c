#include "base/metrics.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/lock.h"

/* ---- Counters and gauges ---- */

void kvk_counter_add(struct kvk_counter *counter, uint64_t amount)
{
    atomic_fetch_add_explicit(&counter->value, amount, memory_order_relaxed);
}

uint64_t kvk_counter_value(const struct kvk_counter *counter)
{
    return atomic_load_explicit(&counter->value, memory_order_relaxed);
}

void kvk_gauge_set(struct kvk_gauge *gauge, int64_t value)
{
    atomic_store_explicit(&gauge->value, value, memory_order_relaxed);
}

void kvk_gauge_add(struct kvk_gauge *gauge, int64_t amount)
{
    atomic_fetch_add_explicit(&gauge->value, amount, memory_order_relaxed);
}

int64_t kvk_gauge_value(const struct kvk_gauge *gauge)
{
    return atomic_load_explicit(&gauge->value, memory_order_relaxed);
}

/* ---- Histograms ---- */

#define SUB_BITS 3U
#define SUB_COUNT (UINT64_C(1) << SUB_BITS)

/* Values below 8 have a bucket each; from there on eight buckets share each power of two. */
static uint32_t bucket_of(uint64_t value)
{
    if (value < SUB_COUNT) {
        return (uint32_t)value;
    }
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(value);
    uint32_t shift = exponent - SUB_BITS;
    return (shift + 1) * (uint32_t)SUB_COUNT + (uint32_t)(value >> shift & (SUB_COUNT - 1));
}

_Static_assert(KVK_HISTOGRAM_BUCKET_COUNT == (64 - SUB_BITS + 1) * SUB_COUNT,
               "a bucket for every value");

static uint64_t bucket_low(uint32_t bucket)
{
    if (bucket < SUB_COUNT) {
        return bucket;
    }
    uint32_t shift = bucket / (uint32_t)SUB_COUNT - 1;
    return (SUB_COUNT + bucket % SUB_COUNT) << shift;
}

static uint64_t bucket_middle(uint32_t bucket)
{
    if (bucket < SUB_COUNT) {
        return bucket;
    }
    uint32_t shift = bucket / (uint32_t)SUB_COUNT - 1;
    return bucket_low(bucket) + ((UINT64_C(1) << shift) - 1) / 2;
}

void kvk_histogram_init(struct kvk_histogram *histogram)
{
    atomic_init(&histogram->sum, 0);
    for (uint32_t i = 0; i < KVK_HISTOGRAM_BUCKET_COUNT; i++) {
        atomic_init(&histogram->buckets[i], 0);
    }
}

void kvk_histogram_record(struct kvk_histogram *histogram, uint64_t value)
{
    atomic_fetch_add_explicit(&histogram->sum, value, memory_order_relaxed);
    atomic_fetch_add_explicit(&histogram->buckets[bucket_of(value)], 1, memory_order_relaxed);
}

static uint64_t bucket_value(const struct kvk_histogram *histogram, uint32_t bucket)
{
    return atomic_load_explicit(&histogram->buckets[bucket], memory_order_relaxed);
}

uint64_t kvk_histogram_count(const struct kvk_histogram *histogram)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < KVK_HISTOGRAM_BUCKET_COUNT; i++) {
        count += bucket_value(histogram, i);
    }
    return count;
}

uint64_t kvk_histogram_sum(const struct kvk_histogram *histogram)
{
    return atomic_load_explicit(&histogram->sum, memory_order_relaxed);
}

uint64_t kvk_histogram_quantile(const struct kvk_histogram *histogram, double share)
{
    KVK_ASSERT(share >= 0.0);
    KVK_ASSERT(share <= 1.0);
    uint64_t total = kvk_histogram_count(histogram);
    double wanted = share * (double)total;
    uint64_t seen = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < KVK_HISTOGRAM_BUCKET_COUNT; i++) {
        uint64_t here = bucket_value(histogram, i);
        if (here == 0) {
            continue;
        }
        seen += here;
        last = i;
        if ((double)seen >= wanted) {
            break;
        }
    }
    return bucket_middle(last);
}

/* ---- Registry ---- */

enum kind {
    KIND_COUNTER,
    KIND_GAUGE,
    KIND_HISTOGRAM,
};

struct series {
    struct series *next; /* of the same family */
    char labels[KVK_METRIC_LABELS_SIZE];
    union {
        struct kvk_counter counter;
        struct kvk_gauge gauge;
        struct kvk_histogram histogram;
    } value; /* allocated as large as its kind needs; last, for that reason */
};

struct family {
    struct family *next;
    struct series *first;
    struct series *last;
    enum kind kind;
    double scale;
    uint64_t low;
    uint64_t high;
    char name[KVK_METRIC_NAME_SIZE];
    char help[KVK_METRIC_HELP_SIZE];
};

struct kvk_metrics {
    struct kvk_lock lock; /* guards the lists; the values need none */
    struct family *first;
    struct family *last;
    uint32_t series_count;
    uint32_t series_max;
};

enum kvk_status kvk_metrics_create(uint32_t series_max, struct kvk_metrics **metrics)
{
    *metrics = calloc(1, sizeof(**metrics));
    if (*metrics == NULL) {
        return KVK_EXHAUSTED;
    }
    kvk_lock_init(&(*metrics)->lock);
    (*metrics)->series_max = series_max;
    return KVK_OK;
}

void kvk_metrics_destroy(struct kvk_metrics *metrics)
{
    if (metrics == NULL) {
        return;
    }
    struct family *family = metrics->first;
    while (family != NULL) {
        struct series *series = family->first;
        while (series != NULL) {
            struct series *gone = series;
            series = series->next;
            free(gone);
        }
        struct family *gone = family;
        family = family->next;
        free(gone);
    }
    kvk_lock_finish(&metrics->lock);
    free(metrics);
}

static struct family *find_family(struct kvk_metrics *metrics, const char *name)
{
    struct family *family = metrics->first;
    while (family != NULL && strcmp(family->name, name) != 0) {
        family = family->next;
    }
    return family;
}

static struct family *make_family(struct kvk_metrics *metrics, const struct family *wanted)
{
    struct family *family = malloc(sizeof(*family));
    if (family == NULL) {
        return NULL;
    }
    *family = *wanted;
    if (metrics->last != NULL) {
        metrics->last->next = family;
    } else {
        metrics->first = family;
    }
    metrics->last = family;
    return family;
}

static size_t series_bytes(enum kind kind)
{
    size_t head = offsetof(struct series, value);
    switch (kind) {
    case KIND_COUNTER:
        return head + sizeof(struct kvk_counter);
    case KIND_GAUGE:
        return head + sizeof(struct kvk_gauge);
    case KIND_HISTOGRAM:
        return head + sizeof(struct kvk_histogram);
    }
    KVK_UNREACHABLE();
}

static struct series *find_series(struct family *family, const char *labels)
{
    struct series *series = family->first;
    while (series != NULL && strcmp(series->labels, labels) != 0) {
        series = series->next;
    }
    return series;
}

static struct series *make_series(struct kvk_metrics *metrics, struct family *family,
                                  const char *labels)
{
    if (metrics->series_count == metrics->series_max) {
        return NULL;
    }
    struct series *series = calloc(1, series_bytes(family->kind));
    if (series == NULL) {
        return NULL;
    }
    (void)snprintf(series->labels, sizeof(series->labels), "%s", labels);
    if (family->last != NULL) {
        family->last->next = series;
    } else {
        family->first = series;
    }
    family->last = series;
    metrics->series_count++;
    return series;
}

static struct series *get_series(struct kvk_metrics *metrics, const struct family *wanted,
                                 const char *labels)
{
    KVK_ASSERT(strlen(labels) < KVK_METRIC_LABELS_SIZE);
    struct series *series = NULL;
    kvk_lock(&metrics->lock);
    struct family *family = find_family(metrics, wanted->name);
    if (family == NULL) {
        family = make_family(metrics, wanted);
    }
    if (family != NULL) {
        KVK_ASSERT(family->kind == wanted->kind);
        series = find_series(family, labels);
        if (series == NULL) {
            series = make_series(metrics, family, labels);
        }
    }
    kvk_unlock(&metrics->lock);
    return series;
}

static struct family describe(enum kind kind, const char *name, const char *help)
{
    struct family family = {.kind = kind};
    KVK_ASSERT(strlen(name) < sizeof(family.name));
    KVK_ASSERT(strlen(help) < sizeof(family.help));
    (void)snprintf(family.name, sizeof(family.name), "%s", name);
    (void)snprintf(family.help, sizeof(family.help), "%s", help);
    return family;
}

enum kvk_status kvk_metrics_counter(struct kvk_metrics *metrics, const char *name, const char *help,
                                    const char *labels, struct kvk_counter **counter)
{
    struct family wanted = describe(KIND_COUNTER, name, help);
    struct series *series = get_series(metrics, &wanted, labels);
    *counter = series != NULL ? &series->value.counter : NULL;
    return series != NULL ? KVK_OK : KVK_EXHAUSTED;
}

enum kvk_status kvk_metrics_gauge(struct kvk_metrics *metrics, const char *name, const char *help,
                                  const char *labels, struct kvk_gauge **gauge)
{
    struct family wanted = describe(KIND_GAUGE, name, help);
    struct series *series = get_series(metrics, &wanted, labels);
    *gauge = series != NULL ? &series->value.gauge : NULL;
    return series != NULL ? KVK_OK : KVK_EXHAUSTED;
}

enum kvk_status kvk_metrics_histogram(struct kvk_metrics *metrics, const char *name,
                                      const char *help, const char *labels, double scale,
                                      uint64_t low, uint64_t high, struct kvk_histogram **histogram)
{
    KVK_ASSERT(low > 0);
    KVK_ASSERT(low <= high);
    KVK_ASSERT(high <= UINT64_C(1) << 62);
    struct family wanted = describe(KIND_HISTOGRAM, name, help);
    wanted.scale = scale;
    wanted.low = low;
    wanted.high = high;
    struct series *series = get_series(metrics, &wanted, labels);
    *histogram = series != NULL ? &series->value.histogram : NULL;
    return series != NULL ? KVK_OK : KVK_EXHAUSTED;
}

bool kvk_metrics_label(char *labels, const char *key, const char *value)
{
    size_t before = strlen(labels);
    size_t room = KVK_METRIC_LABELS_SIZE - before;
    int head = snprintf(labels + before, room, "%s%s=\"", before > 0 ? "," : "", key);
    size_t at = head > 0 ? before + (size_t)head : KVK_METRIC_LABELS_SIZE;
    /* One character may take two places, and the quote and the end take two more. */
    for (; *value != '\0' && at + 4 <= KVK_METRIC_LABELS_SIZE; value++) {
        if (*value == '"' || *value == '\\' || *value == '\n') {
            labels[at++] = '\\';
        }
        labels[at++] = *value == '\n' ? 'n' : *value;
    }
    if (*value != '\0' || at + 2 > KVK_METRIC_LABELS_SIZE) {
        labels[before] = '\0';
        return false;
    }
    labels[at++] = '"';
    labels[at] = '\0';
    return true;
}

/* ---- Printing ---- */

/* Prometheus escapes backslashes and line ends in help; help is ours and has neither. */
static void print_head(FILE *file, const struct family *family)
{
    static const char *const names[] = {
        [KIND_COUNTER] = "counter", [KIND_GAUGE] = "gauge", [KIND_HISTOGRAM] = "histogram"};
    (void)fprintf(file, "# HELP %s %s\n# TYPE %s %s\n", family->name, family->help, family->name,
                  names[family->kind]);
}

static void print_name(FILE *file, const struct family *family, const struct series *series)
{
    if (series->labels[0] != '\0') {
        (void)fprintf(file, "%s{%s} ", family->name, series->labels);
    } else {
        (void)fprintf(file, "%s ", family->name);
    }
}

/* Cumulative counts at powers of two. A record at a bound itself counts above it, since a bucket
 * begins there: as near as the buckets tell. */
static void print_histogram(FILE *file, const struct family *family, const struct series *series)
{
    const struct kvk_histogram *histogram = &series->value.histogram;
    const char *comma = series->labels[0] != '\0' ? "," : "";
    uint64_t cumulative = 0;
    uint64_t bound = family->low;
    for (uint32_t i = 0; i < KVK_HISTOGRAM_BUCKET_COUNT; i++) {
        while (bound <= family->high && bucket_low(i) >= bound) {
            (void)fprintf(file, "%s_bucket{%s%sle=\"%.9g\"} %llu\n", family->name, series->labels,
                          comma, (double)bound * family->scale, (unsigned long long)cumulative);
            bound *= 2;
        }
        cumulative += bucket_value(histogram, i);
    }
    (void)fprintf(file, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", family->name, series->labels, comma,
                  (unsigned long long)cumulative);
    const char *open = series->labels[0] != '\0' ? "{" : "";
    const char *close = series->labels[0] != '\0' ? "}" : "";
    (void)fprintf(file, "%s_sum%s%s%s %.9g\n", family->name, open, series->labels, close,
                  (double)kvk_histogram_sum(histogram) * family->scale);
    (void)fprintf(file, "%s_count%s%s%s %llu\n", family->name, open, series->labels, close,
                  (unsigned long long)cumulative);
}

static void print_series(FILE *file, const struct family *family, const struct series *series)
{
    switch (family->kind) {
    case KIND_COUNTER:
        print_name(file, family, series);
        (void)fprintf(file, "%llu\n",
                      (unsigned long long)kvk_counter_value(&series->value.counter));
        break;
    case KIND_GAUGE:
        print_name(file, family, series);
        (void)fprintf(file, "%lld\n", (long long)kvk_gauge_value(&series->value.gauge));
        break;
    case KIND_HISTOGRAM:
        print_histogram(file, family, series);
        break;
    }
}

enum kvk_status kvk_metrics_render(struct kvk_metrics *metrics, char **text, size_t *size)
{
    *text = NULL;
    *size = 0;
    FILE *file = open_memstream(text, size);
    if (file == NULL) {
        return KVK_EXHAUSTED;
    }
    kvk_lock(&metrics->lock); /* writes go to memory: nothing blocks here */
    for (const struct family *family = metrics->first; family != NULL; family = family->next) {
        print_head(file, family);
        for (const struct series *series = family->first; series != NULL; series = series->next) {
            print_series(file, family, series);
        }
    }
    kvk_unlock(&metrics->lock);
    bool failed = ferror(file) != 0;
    failed = fclose(file) != 0 || failed;
    if (failed) {
        free(*text);
        *text = NULL;
        *size = 0;
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}
