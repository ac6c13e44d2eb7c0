#include "daemon/http_metrics.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/rpc_stats.h"

/* ---- Gathering: the engine visits series in an order of its own ---- */

struct sample {
    char *name;       /* with labels; ours */
    size_t base_size; /* of the name without labels */
    double value;
    uint32_t order;
};

struct samples {
    struct sample *rows;
    uint32_t count, capacity;
    bool failed;
};

static void sample_add(void *context, const char *name, double value)
{
    struct samples *samples = context;
    if (samples->count == samples->capacity && !samples->failed) {
        uint32_t capacity = samples->capacity == 0 ? 512 : samples->capacity * 2;
        struct sample *rows = realloc(samples->rows, capacity * sizeof(*rows));
        if (rows == NULL) {
            samples->failed = true;
        } else {
            samples->rows = rows;
            samples->capacity = capacity;
        }
    }
    char *copy = samples->failed ? NULL : strdup(name);
    if (copy == NULL) {
        samples->failed = true;
        return;
    }
    samples->rows[samples->count] = (struct sample){
        .name = copy, .base_size = strcspn(name, "{"), .value = value, .order = samples->count};
    samples->count++;
}

/* By name without labels, then as they came: text format wants all of one name together. */
static int sample_compare(const void *a, const void *b)
{
    const struct sample *left = a;
    const struct sample *right = b;
    size_t common = left->base_size < right->base_size ? left->base_size : right->base_size;
    int order = memcmp(left->name, right->name, common);
    if (order == 0 && left->base_size != right->base_size) {
        return left->base_size < right->base_size ? -1 : 1;
    }
    return order != 0 ? order : (left->order > right->order) - (left->order < right->order);
}

/* ---- Words ---- */

/* What a name is about, by what it begins with; the most telling first. */
static const struct {
    const char *prefix;
    const char *help;
} helps[] = {
    {"kvkeep_tier_", "Of a tier's pool, by what fills it."},
    {"kvkeep_tenant_", "Of one tenant."},
    {"kvkeep_disk_", "Of the disk tier."},
    {"kvkeep_remote_generation_", "Of invalidations that daemons tell each other of."},
    {"kvkeep_remote_", "Of the store that daemons share."},
    {"kvkeep_device_", "Of the GPUs of the device tier: fallen away, and what failed on them."},
    {"kvkeep_scrub_", "Of the slow check of all checksums."},
    {"kvkeep_catalogue_", "Of the catalogue, which outlives the daemon."},
    {"kvkeep_index_", "Of the index of known blocks."},
    {"kvkeep_evict_", "Of the eviction policy's own memory."},
    {"kvkeep_lookup_seconds_total", "Time spent on finding prefixes."},
    {"kvkeep_lookup", "Of look-ups."},
    {"kvkeep_saved_seconds_total", "Estimated computing time that hits saved."},
    {"kvkeep_hit_tokens", "Tokens that were found cached."},
    {"kvkeep_partial_", "Of hits that end within a block, and copy a part of it."},
    {"kvkeep_evictions", "Copies dropped to make room."},
    {"kvkeep_block_uses", "Blocks of hits, by the best tier that had them then."},
    {"kvkeep_blocks", "Known blocks by state."},
    {"kvkeep_refusals", "Calls that were refused for want of room or state."},
    {"kvkeep_events_", "Of the log of what can be found, and who is told."},
    {"kvkeep_public_", "Of prefixes that were published for all tenants."},
    {"kvkeep_swapped_", "Of sequences swapped out and in."},
    {"kvkeep_wrong_reuse", "Blocks computed again that differ from their cached twin."},
    {"kvkeep_checksum_failures", "Copies whose bytes were not those that were sealed."},
    {"kvkeep_healed_blocks", "Blocks damaged in memory while held, made whole from disk."},
};

static const char *help_of(const char *name, size_t size)
{
    for (size_t i = 0; i < sizeof(helps) / sizeof(helps[0]); i++) {
        size_t length = strlen(helps[i].prefix);
        if (size >= length && memcmp(name, helps[i].prefix, length) == 0) {
            return helps[i].help;
        }
    }
    return "";
}

/* "kvkeep_sealed_blocks_total" as "sealed blocks." */
static void name_write(FILE *file, const char *name, size_t size)
{
    static const char prefix[] = "kvkeep_";
    static const char suffix[] = "_total";
    size_t first = sizeof(prefix) - 1;
    if (size > sizeof(suffix) - 1 &&
        memcmp(name + size - (sizeof(suffix) - 1), suffix, sizeof(suffix) - 1) == 0) {
        size -= sizeof(suffix) - 1;
    }
    for (size_t i = first; i < size; i++) {
        (void)fputc(name[i] == '_' ? ' ' : name[i], file);
    }
    (void)fputc('.', file);
}

static bool is_counter(const char *name, size_t size)
{
    return size > 6 && memcmp(name + size - 6, "_total", 6) == 0;
}

static void value_write(FILE *file, double value)
{
    if (value == floor(value) && fabs(value) < 9007199254740992.0) {
        (void)fprintf(file, "%.0f", value);
    } else {
        (void)fprintf(file, "%.9g", value);
    }
}

/* Quantiles are for answers without histograms; here there are those. */
static bool is_wanted(const struct sample *row)
{
    return strstr(row->name, "quantile=") == NULL;
}

static void samples_write(const struct samples *samples, FILE *file)
{
    for (uint32_t i = 0; i < samples->count; i++) {
        const struct sample *row = &samples->rows[i];
        if (!is_wanted(row)) {
            continue;
        }
        const struct sample *before = i > 0 ? row - 1 : NULL;
        int size = (int)row->base_size;
        if (before == NULL || before->base_size != row->base_size ||
            memcmp(before->name, row->name, row->base_size) != 0) {
            const char *help = help_of(row->name, row->base_size);
            (void)fprintf(file, "# HELP %.*s %s%s", size, row->name, help,
                          help[0] == '\0' ? "" : " ");
            name_write(file, row->name, row->base_size);
            (void)fprintf(file, "\n# TYPE %.*s %s\n", size, row->name,
                          is_counter(row->name, row->base_size) ? "counter" : "gauge");
        }
        (void)fprintf(file, "%s ", row->name);
        value_write(file, row->value);
        (void)fputc('\n', file);
    }
}

char *kvk_http_metrics(struct kvk_rpc *rpc)
{
    struct samples samples = {.rows = NULL};
    char *text = NULL;
    size_t size = 0;
    kvk_rpc_stats(rpc, sample_add, &samples);
    FILE *file = samples.failed ? NULL : open_memstream(&text, &size);
    if (file != NULL) {
        if (samples.count > 0) {
            qsort(samples.rows, samples.count, sizeof(samples.rows[0]), sample_compare);
        }
        samples_write(&samples, file);
        char *latencies = NULL;
        size_t latencies_size = 0;
        if (kvk_rpc_stats_latencies(rpc, &latencies, &latencies_size) == KVK_OK) {
            (void)fwrite(latencies, 1, latencies_size, file);
            free(latencies);
        }
        if (fclose(file) != 0) {
            free(text);
            text = NULL;
        }
    }
    for (uint32_t i = 0; i < samples.count; i++) {
        free(samples.rows[i].name);
    }
    free(samples.rows);
    return text;
}
