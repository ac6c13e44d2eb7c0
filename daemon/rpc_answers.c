/*
 * The operator's answers as messages: why a prompt missed, what the doctor found, the miss-ratio
 * curves; and the advice of a refusal.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/doctor.h"
#include "daemon/mrc.h"
#include "daemon/report_miss.h"
#include "daemon/rpc_private.h"

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
}

/* ---- Advice ---- */

Kvkeep__V1__Advice *kvk_rpc_fill_advice(struct kvk_rpc_advice *target,
                                        const struct kvk_advice *source)
{
    if (source->kind == KVK_ADVISE_NOTHING) {
        return NULL;
    }
    KVK_ASSERT(source->count <= KVK_ADVICE_MAX);
    kvkeep__v1__advice__init(&target->message);
    memcpy(target->ids, source->sequence_ids, source->count * sizeof(target->ids[0]));
    memcpy(target->bytes, source->sequence_bytes, source->count * sizeof(target->bytes[0]));
    target->message.kind = (Kvkeep__V1__Advice__Kind)source->kind;
    target->message.n_sequence_ids = source->count;
    target->message.sequence_ids = target->ids;
    target->message.n_sequence_bytes = source->count;
    target->message.sequence_bytes = target->bytes;
    target->message.total = source->total;
    target->message.missing_bytes = source->missing_bytes;
    target->message.bytes = source->bytes;
    target->message.cost_ns = source->cost_ns;
    return &target->message;
}

/* ---- ExplainMiss ---- */

static void fill_gone(Kvkeep__V1__ExplainMissResponse *response,
                      const struct kvk_miss_report *report)
{
    const struct kvk_gone *gone = &report->gone;
    response->reason = kvk_rpc_text(kvk_gone_reason_name((enum kvk_gone_reason)gone->reason));
    response->gone_age_ms = report->gone_age_ms;
    response->gone_tier = (Kvkeep__V1__Tier)(gone->tier + 1);
    response->gone_idle_ms = gone->idle_ms;
    response->gone_uses = gone->use_count;
    response->gone_score = (double)gone->score;
    response->gone_for_tenant =
        kvk_rpc_text(report->gone_for != NULL ? report->gone_for->name : "");
    response->gone_for_other = report->gone_for_other;
    response->gone_for_space_id = gone->for_space_id;
    response->gone_before = report->gone_before;
}

KVK_RPC_HANDLER(kvk_rpc_explain_miss)
{
    const Kvkeep__V1__ExplainMissRequest *asked = (const Kvkeep__V1__ExplainMissRequest *)message;
    struct kvk_prompt prompt;
    struct kvk_miss_report report;
    enum kvk_status status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_report_miss(run->rpc->cache, &run->caller, asked->space_id, &prompt,
                                 asked->leave_last, &report, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__ExplainMissResponse response = KVKEEP__V1__EXPLAIN_MISS_RESPONSE__INIT;
    response.verdict = kvk_rpc_text(kvk_miss_name(report.miss));
    response.sentence = kvk_rpc_text(report.sentence);
    response.cached_tokens = report.cached_tokens;
    response.partial_tokens = report.partial_tokens;
    response.prompt_blocks = report.prompt_blocks;
    response.missing_block = report.missing_block;
    response.group = report.group;
    response.missing_looked = report.missing_looked;
    response.missing_gone = report.missing_gone;
    response.writing_sequence_id = report.writing_sequence_id;
    response.journal_reach_ms = report.journal_reach_ms;
    response.recompute_ns = report.recompute_ns;
    response.block_tokens = report.block_tokens;
    response.minimum_tokens = report.minimum_tokens;
    if (report.miss == KVK_MISS_GONE) {
        fill_gone(&response, &report);
    }
    Kvkeep__V1__RemoteUse remote;
    response.remote = kvk_rpc_fill_remote(&remote, &report.remote);
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- Doctor ---- */

KVK_RPC_HANDLER(kvk_rpc_doctor)
{
    (void)message;
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct kvk_doctor_report *report = kvk_rpc_arena_take_extra(arena, sizeof(*report));
    if (report == NULL) {
        return no_memory(error);
    }
    enum kvk_status status = kvk_doctor(run->rpc->cache, &run->caller, report, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__Finding rows[KVK_FINDINGS_MAX];
    Kvkeep__V1__Finding *pointers[KVK_FINDINGS_MAX];
    for (uint32_t i = 0; i < report->count; i++) {
        const struct kvk_finding *finding = &report->findings[i];
        kvkeep__v1__finding__init(&rows[i]);
        rows[i].severity = (Kvkeep__V1__Finding__Severity)finding->severity;
        rows[i].code = kvk_rpc_text(finding->code);
        rows[i].title = kvk_rpc_text(finding->title);
        rows[i].evidence = kvk_rpc_text(finding->evidence);
        rows[i].action = kvk_rpc_text(finding->action);
        pointers[i] = &rows[i];
    }
    Kvkeep__V1__DoctorResponse response = KVKEEP__V1__DOCTOR_RESPONSE__INIT;
    response.n_findings = report->count;
    response.findings = pointers;
    response.checks = report->check_count;
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- GetMissRatio ---- */

/* One curve with its messages. */
struct curve {
    Kvkeep__V1__MissRatioCurve message;
    Kvkeep__V1__MissRatioPoint now, twice, four_times, pool, ceiling;
    Kvkeep__V1__MissRatioPoint points[KVK_MRC_POINTS];
    Kvkeep__V1__MissRatioPoint *pointers[KVK_MRC_POINTS];
};

static Kvkeep__V1__MissRatioPoint *fill_point(Kvkeep__V1__MissRatioPoint *target,
                                              const struct kvk_mrc_point *point)
{
    kvkeep__v1__miss_ratio_point__init(target);
    target->size_bytes = point->size_bytes;
    target->hits = point->hits;
    target->error = point->error;
    return target;
}

static void fill_curve(struct curve *curve, const struct kvk_mrc_report *report)
{
    Kvkeep__V1__MissRatioCurve *message = &curve->message;
    kvkeep__v1__miss_ratio_curve__init(message);
    message->tenant = kvk_rpc_text(report->tenant->name);
    message->now_bytes = report->now_bytes;
    message->pool_bytes = report->pool_bytes;
    message->rate = report->rate;
    message->samples = report->samples;
    message->references = report->references;
    message->hits = report->hits;
    message->now = fill_point(&curve->now, &report->now);
    message->twice = fill_point(&curve->twice, &report->twice);
    message->four_times = fill_point(&curve->four_times, &report->four_times);
    message->pool = fill_point(&curve->pool, &report->pool);
    message->ceiling = fill_point(&curve->ceiling, &report->ceiling);
    curve->ceiling.size_bytes = 0;
    for (uint32_t i = 0; i < report->point_count; i++) {
        curve->pointers[i] = fill_point(&curve->points[i], &report->points[i]);
    }
    message->n_points = report->point_count;
    message->points = curve->pointers;
    message->distinct_bytes = report->distinct_bytes;
}

static enum kvk_status reply_curves(struct kvk_rpc_run *run, const struct kvk_mrc_report *reports,
                                    uint32_t count, struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct curve *curves = kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*curves));
    Kvkeep__V1__MissRatioCurve **pointers =
        kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(Kvkeep__V1__MissRatioCurve *));
    if (curves == NULL || pointers == NULL) {
        return no_memory(error);
    }
    for (uint32_t i = 0; i < count; i++) {
        fill_curve(&curves[i], &reports[i]);
        pointers[i] = &curves[i].message;
    }
    Kvkeep__V1__GetMissRatioResponse response = KVKEEP__V1__GET_MISS_RATIO_RESPONSE__INIT;
    response.n_curves = count;
    response.curves = pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_get_miss_ratio)
{
    const Kvkeep__V1__GetMissRatioRequest *asked = (const Kvkeep__V1__GetMissRatioRequest *)message;
    struct kvk_view tenant;
    struct kvk_mrc_report *reports = NULL;
    uint32_t count = 0;
    enum kvk_status status =
        kvk_rpc_check_name(&asked->tenant, 0, KVK_NAME_SIZE - 1, "tenant", &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_mrc(run->rpc->cache, &run->caller, tenant, &reports, &count, error);
    }
    if (status == KVK_OK) {
        status = reply_curves(run, reports, count, error);
        free(reports);
    }
    return status;
}
