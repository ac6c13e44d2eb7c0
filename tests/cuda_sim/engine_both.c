/* The cases of tests/engine_both.h with the device tier on a simulated GPU; and what an operator is
 * told of one that falls away. */
#include "tests/engine_both.h"

#include "daemon/doctor.h"
#include "daemon/report.h"
#include "gpu/device_cuda.h"
#include "tests/cuda_sim/include/cuda_runtime_api.h"
#include "tests/cuda_sim/runtime.h"

static struct kvk_device *simulated(void)
{
    struct kvk_device *device = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_OK, "%s", error.text);
    return device;
}

Test(engine_both, on_a_simulated_gpu, .timeout = 120)
{
    for (size_t i = 0; i < BOTH_CASE_COUNT; i++) {
        both_cases[i].run(simulated);
        cr_expect_eq(kvk_sim_race_count(), 0, "%s", both_cases[i].name);
        cr_expect_eq(kvk_sim_device_bytes(), 0, "%s: memory is left over", both_cases[i].name);
    }
}

/* ---- A GPU that falls away ---- */

struct gauges {
    double lost, memory_failures, call_failures;
};

static void gauge_take(void *context, const char *name, double value)
{
    struct gauges *gauges = context;
    gauges->lost = strcmp(name, "kvkeep_device_lost") == 0 ? value : gauges->lost;
    gauges->memory_failures =
        strcmp(name, "kvkeep_device_memory_failures_total") == 0 ? value : gauges->memory_failures;
    gauges->call_failures =
        strcmp(name, "kvkeep_device_call_failures_total") == 0 ? value : gauges->call_failures;
}

static struct gauges gauges_of(struct stage *stage)
{
    struct gauges gauges = {-1, -1, -1};
    kvk_report_stats(stage->house.cache, gauge_take, &gauges);
    return gauges;
}

static bool doctor_finds(struct stage *stage, const char *code, const char *word)
{
    struct kvk_doctor_report report;
    const struct kvk_credential everything = {.admin = true};
    struct kvk_caller admin = stage->house.caller;
    admin.credential = &everything;
    STAGE_OK(stage, kvk_doctor(stage->house.cache, &admin, &report, &stage->house.error));
    for (uint32_t i = 0; i < report.count; i++) {
        if (strcmp(report.findings[i].code, code) == 0) {
            cr_expect_not_null(strstr(report.findings[i].evidence, word), "%s",
                               report.findings[i].evidence);
            return true;
        }
    }
    return false;
}

Test(engine_gpu, what_fails_on_it_is_told, .timeout = 60)
{
    struct stage stage;
    uint32_t tokens[8];
    struct kvk_geometry geometry = house_geometry();
    uint8_t bytes[1024] = {1};
    const struct kvk_write_piece piece = {.data = bytes, .size_bytes = sizeof(bytes)};
    house_init(&stage.house);
    kvk_log_set_level(KVK_LOG_ERROR);
    stage_start_on(&stage, &geometry, 8, 8, simulated());
    house_tokens(tokens, 8, 1);
    struct gauges gauges = gauges_of(&stage);
    cr_expect_eq(gauges.lost, 0);
    cr_expect_eq(gauges.memory_failures, 0);
    cr_expect_eq(gauges.call_failures, 0);
    cr_expect_not(doctor_finds(&stage, "gpu_lost", ""));
    cr_expect_not(doctor_finds(&stage, "gpu_memory", ""));
    cr_expect_not(doctor_finds(&stage, "gpu_failures", ""));

    uint64_t id = stage_open(&stage, tokens, 4).sequence_id;
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorInvalidValue, false);
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_INTERNAL);
    cr_expect_eq(gauges_of(&stage).call_failures, 1);
    cr_expect(doctor_finds(&stage, "gpu_failures", "1 calls"));
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorMemoryAllocation, false);
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_EXHAUSTED);
    cr_expect_eq(gauges_of(&stage).memory_failures, 1);
    cr_expect(doctor_finds(&stage, "gpu_memory", "1 calls"));

    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorECCUncorrectable, true);
    cr_expect_eq(kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session, id,
                                    &piece, &stage.house.error),
                 KVK_PRECONDITION);
    cr_expect_eq(gauges_of(&stage).lost, 1);
    cr_expect(doctor_finds(&stage, "gpu_lost", "CUDA error 214"));
    cr_expect_not(doctor_finds(&stage, "gpu_memory", ""), "the graver word is enough");
    struct kvk_device_health health;
    kvk_device_health_unlocked(stage.house.cache, &health);
    cr_expect(health.lost);
    stage_close(&stage, id);
    id = stage_open(&stage, tokens, 4).sequence_id; /* on the host */
    stage_fill(&stage, id, 1);
    stage_verify(&stage, id, 0, 4, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- What attention brings to it ---- */

/* The mover learns its rate from large jobs; the others are as the choice shall fall. */
static void bring_in_is_quicker(struct stage *stage)
{
    const uint64_t size_bytes = UINT64_C(16) << 20;
    struct kvk_cache *cache = stage->house.cache;
    uint8_t *memory = calloc(2, size_bytes);
    const struct kvk_copy copy = {
        .target = memory, .source = memory + size_bytes, .size_bytes = size_bytes};
    cr_assert_not_null(memory);
    if (kvk_mover_rate(cache->mover) == 0) {
        STAGE_OK(stage, kvk_mover_copy(cache->mover, cache->tiers[KVK_TIER_HOST].device, &copy, 1,
                                       &stage->house.error));
    }
    free(memory);
    cache->attention.host_rate = 1;
    cache->attention.device_rate = UINT64_C(1) << 40;
}

Test(engine_gpu, attention_frees_no_memory_of_it_from_call_to_call, .timeout = 60)
{
    struct stage stage;
    uint32_t tokens[20];
    struct kvk_swap_reply swapped;
    struct kvk_geometry geometry = house_geometry();
    house_init(&stage.house);
    stage.house.config.device_kind = KVK_DEVICE_CUDA;
    stage_start_on(&stage, &geometry, 8, 8, simulated());
    house_tokens(tokens, 20, 1);
    uint64_t id = stage_open(&stage, tokens, 20).sequence_id;
    write_values(&stage, id, 0, 20);
    house_seal(&stage.house, stage.session, id, 20);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swapped));
    bring_in_is_quicker(&stage);
    expect_attends(&stage, id, 19, 0);
    uint64_t frees = kvk_sim_call_count("cudaFree");
    uint64_t allocations = kvk_sim_call_count("cudaMalloc");
    for (uint64_t position = 19; position > 9; position--) {
        bring_in_is_quicker(&stage);
        expect_attends(&stage, id, position, 0);
    }
    cr_expect_eq(stage_stats(&stage).attended_brought_in, 11);
    cr_expect_eq(kvk_sim_call_count("cudaFree"), frees);
    cr_expect_eq(kvk_sim_call_count("cudaMalloc"), allocations);
    cr_expect_eq(kvk_sim_race_count(), 0);
    stage_close(&stage, id);
    stage_stop(&stage);
    cr_expect_eq(kvk_sim_device_bytes(), 0);
}
