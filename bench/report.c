/* The report of a benchmark, as a table or as JSON. */
#include "bench/report.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

void kvk_report_init(struct kvk_report *report, const char *benchmark)
{
    *report = (struct kvk_report){.benchmark = benchmark};
}

bool kvk_report_option(struct kvk_report *report, const char *argument)
{
    if (strcmp(argument, "--json") != 0) {
        return false;
    }
    report->json = true;
    return true;
}

void kvk_report_ratio(struct kvk_report *report, const char *name, double value, const char *unit,
                      double reference)
{
    KVK_ASSERT(report->result_count < KVK_REPORT_RESULT_COUNT_MAX);
    report->results[report->result_count++] = (struct kvk_report_result){
        .name = name,
        .unit = unit,
        .value = value,
        .reference = reference,
        .ratio = value / reference,
    };
}

void kvk_report_value(struct kvk_report *report, const char *name, double value, const char *unit)
{
    kvk_report_ratio(report, name, value, unit, (double)NAN);
}

/* "AMD EPYC 9654, 2 CPUs": enough to see that two reports are of two machines. */
static void machine_name(char *name, size_t size)
{
    char model[160] = "unknown CPU";
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        char *value = strstr(line, ": ");
        if (strncmp(line, "model name", 10) == 0 && value != NULL) {
            value[strcspn(value, "\n")] = '\0';
            (void)snprintf(model, sizeof(model), "%.150s", value + 2);
            break;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    (void)snprintf(name, size, "%s, %ld CPUs", model, sysconf(_SC_NPROCESSORS_ONLN));
}

static json_t *number_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static int print_json(const struct kvk_report *report, const char *machine)
{
    json_t *results = json_array();
    for (uint32_t i = 0; i < report->result_count; i++) {
        const struct kvk_report_result *result = &report->results[i];
        json_array_append_new(results,
                              json_pack("{s:s, s:o, s:s, s:o, s:o}", "name", result->name, "value",
                                        number_or_null(result->value), "unit", result->unit,
                                        "reference", number_or_null(result->reference), "ratio",
                                        number_or_null(result->ratio)));
    }
    json_t *object = json_pack("{s:s, s:s, s:o}", "benchmark", report->benchmark, "machine",
                               machine, "results", results);
    int failed = json_dumpf(object, stdout, JSON_REAL_PRECISION(6));
    json_decref(object);
    return failed != 0 || printf("\n") < 0 || fflush(stdout) != 0 ? 1 : 0;
}

static int print_table(const struct kvk_report *report, const char *machine)
{
    printf("%s on %s\n\n", report->benchmark, machine);
    printf("%-28s %14s  %-12s %14s %8s\n", "", "value", "unit", "reference", "ratio");
    for (uint32_t i = 0; i < report->result_count; i++) {
        const struct kvk_report_result *result = &report->results[i];
        printf("%-28s %14.6g  %-12s", result->name, result->value, result->unit);
        if (isfinite(result->ratio)) {
            printf(" %14.6g %8.3f", result->reference, result->ratio);
        }
        printf("\n");
    }
    return fflush(stdout) != 0 ? 1 : 0;
}

int kvk_report_print(const struct kvk_report *report)
{
    char machine[256];
    machine_name(machine, sizeof(machine));
    return report->json ? print_json(report, machine) : print_table(report, machine);
}

double kvk_report_seconds(void)
{
    return (double)kvk_clock_now(kvk_clock_monotonic()) / (double)KVK_NS_PER_SECOND;
}

static int compare(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;
    return (left > right) - (left < right);
}

double kvk_report_median(double *values, uint32_t count)
{
    KVK_ASSERT(count > 0);
    qsort(values, count, sizeof(*values), compare);
    return values[count / 2];
}
