#include "base/status.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

/* Cut rather than refuse: half a sentence about a failure is better than none. */
static void fill(struct kvk_error *error, enum kvk_status status, enum kvk_cause cause,
                 const char *field, const char *format, va_list arguments)
{
    error->status = status;
    error->cause = cause;
    error->value = 0;
    error->limit = 0;
    error->retry_after_ms = 0;
    error->advice = (struct kvk_advice){.kind = KVK_ADVISE_NOTHING};
    (void)snprintf(error->field, sizeof(error->field), "%s", field != NULL ? field : "");
    if (vsnprintf(error->text, sizeof(error->text), format, arguments) < 0) {
        error->text[0] = '\0';
    }
}

enum kvk_status kvk_fail(struct kvk_error *error, enum kvk_status status, enum kvk_cause cause,
                         const char *field, const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        fill(error, status, cause, field, format, arguments);
        va_end(arguments);
    }
    return status;
}

enum kvk_status kvk_fail_limit(struct kvk_error *error, enum kvk_status status,
                               enum kvk_cause cause, const char *field, uint64_t value,
                               uint64_t limit, const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        fill(error, status, cause, field, format, arguments);
        va_end(arguments);
        error->value = value;
        error->limit = limit;
    }
    return status;
}

void kvk_error_retry(struct kvk_error *error, uint64_t retry_after_ms)
{
    if (error != NULL) {
        error->retry_after_ms = retry_after_ms;
    }
}

const char *kvk_status_name(enum kvk_status status)
{
    switch (status) {
    case KVK_OK:
        return "OK";
    case KVK_CANCELLED:
        return "CANCELLED";
    case KVK_INVALID:
        return "INVALID";
    case KVK_DEADLINE:
        return "DEADLINE";
    case KVK_NOT_FOUND:
        return "NOT_FOUND";
    case KVK_EXISTS:
        return "EXISTS";
    case KVK_PERMISSION:
        return "PERMISSION";
    case KVK_EXHAUSTED:
        return "EXHAUSTED";
    case KVK_PRECONDITION:
        return "PRECONDITION";
    case KVK_ABORTED:
        return "ABORTED";
    case KVK_OUT_OF_RANGE:
        return "OUT_OF_RANGE";
    case KVK_UNSUPPORTED:
        return "UNSUPPORTED";
    case KVK_INTERNAL:
        return "INTERNAL";
    case KVK_UNAVAILABLE:
        return "UNAVAILABLE";
    case KVK_DATA_LOSS:
        return "DATA_LOSS";
    case KVK_UNAUTHENTICATED:
        return "UNAUTHENTICATED";
    case KVK_WOULD_BLOCK:
        return "WOULD_BLOCK";
    }
    return "UNKNOWN";
}

const char *kvk_cause_name(enum kvk_cause cause)
{
    switch (cause) {
    case KVK_CAUSE_NONE:
        return "none";
    case KVK_CAUSE_FIELD:
        return "field";
    case KVK_CAUSE_POOL_ACTIVE:
        return "pool_active";
    case KVK_CAUSE_POOL_LEASED:
        return "pool_leased";
    case KVK_CAUSE_TENANT_LIMIT:
        return "tenant_limit";
    case KVK_CAUSE_GROWTH_RESERVED:
        return "growth_reserved";
    case KVK_CAUSE_SLABS_SCATTERED:
        return "slabs_scattered";
    case KVK_CAUSE_COPIES_IN_FLIGHT:
        return "copies_in_flight";
    case KVK_CAUSE_QUARANTINE:
        return "quarantine";
    case KVK_CAUSE_TOO_LARGE:
        return "too_large";
    case KVK_CAUSE_QUEUE_FULL:
        return "queue_full";
    case KVK_CAUSE_LENGTH_MISMATCH:
        return "length_mismatch";
    case KVK_CAUSE_SWAPPED_OUT:
        return "swapped_out";
    case KVK_CAUSE_GRANT_UNWRITTEN:
        return "grant_unwritten";
    case KVK_CAUSE_WINDOW_GONE:
        return "window_gone";
    case KVK_CAUSE_LEASE_EXPIRED:
        return "lease_expired";
    case KVK_CAUSE_SESSION_ENDED:
        return "session_ended";
    case KVK_CAUSE_NOT_OWNER:
        return "not_owner";
    case KVK_CAUSE_IDENTITY_MISMATCH:
        return "identity_mismatch";
    case KVK_CAUSE_CHECKSUM:
        return "checksum";
    case KVK_CAUSE_INVALIDATED:
        return "invalidated";
    case KVK_CAUSE_DRAINING:
        return "draining";
    case KVK_CAUSE_NOT_MAPPED:
        return "not_mapped";
    case KVK_CAUSE_LIMIT:
        return "limit";
    case KVK_CAUSE_BUSY:
        return "busy";
    case KVK_CAUSE_GUARANTEED:
        return "guaranteed";
    case KVK_CAUSE_SWITCHED_OFF:
        return "switched_off";
    }
    return "unknown";
}
