/*
 * Core, again: what the records of the journal say was decided.  Nothing is judged anew.
 */
#include <string.h>

#include "core_internal.h"
#include "frame.h"

static gq_status
misfit (const gq_record *record, const char *what, gq_error *error)
{
    return gq_fail (
        error, GQ_MALFORMED, "journal: record %llu (%s, offset %llu) does not fit the state: %s",
        (unsigned long long)record->lsn, record->segment, (unsigned long long)record->offset, what);
}

static gq_status
replay_grant (gq_core *core, const gq_record *record, gq_error *error)
{
    uint32_t words[2];
    if (record->payload_bytes != sizeof words + GQ_NONCE_BYTES)
        return misfit (record, "a grant has 24 bytes", error);
    memcpy (words, record->payload, sizeof words);
    if (words[0] >= GQ_ACTORS_MAX || words[1] == 0 ||
        words[1] <= core->ledger.actors[words[0]].epoch)
        return misfit (record, "its actor or epoch is impossible", error);
    gq_ledger_grant (&core->ledger, words[0], words[1], record->payload + sizeof words);
    return GQ_OK;
}

/* The frame (or, of a refusal, its header) is one that this state could have met. */
static gq_status
check_replayed (const gq_core *core, const gq_record *record, const gq_frame *frame,
                gq_error *error)
{
    if (memcmp (frame->run, core->run, GQ_RUN_ID_BYTES) != 0)
        return misfit (record, "it is of another run", error);
    if (gq_ledger_judge (&core->ledger, frame->actor, frame->epoch, frame->sequence) != GQ_OK)
        return misfit (record, "its gradient is not new", error);
    return GQ_OK;
}

static gq_status
replay_gradient (gq_core *core, const gq_record *record, gq_error *error)
{
    gq_frame frame;
    const float *vector = NULL;
    if (gq_frame_decode (record->payload, record->payload_bytes, &frame) != GQ_OK ||
        frame.kind != GQ_KIND_GRADIENT)
        return misfit (record, "it holds no gradient", error);
    gq_status status = check_replayed (core, record, &frame, error);
    if (status != GQ_OK)
        return status;
    if (!core->has_weights || frame.lane != GQ_LANE_INLINE ||
        (!core->numbers_only &&
         gq_core_check_vector (core, record->payload, false, &frame, &vector) != GQ_OK))
        return misfit (record, "the gradient could not have been accepted", error);
    (void)gq_core_apply (core, &frame, vector);
    return GQ_OK;
}

/* Its gradient lay in memory that outlives a process: whoever replays it found it there, or not. */
static gq_status
replay_named (gq_core *core, const gq_record *record, gq_error *error)
{
    gq_frame frame;
    if (record->payload_bytes != GQ_FRAME_HEADER_BYTES + sizeof (uint64_t) ||
        gq_frame_decode_header (record->payload, &frame) != GQ_OK || frame.kind != GQ_KIND_GRADIENT)
        return misfit (record, "it names no gradient", error);
    gq_status status = check_replayed (core, record, &frame, error);
    if (status != GQ_OK)
        return status;
    if (!core->has_weights || frame.digest != core->layout.digest ||
        frame.count != core->layout.element_count)
        return misfit (record, "the gradient could not have been accepted", error);
    if (!core->numbers_only && record->vector == NULL)
        return gq_fail (error, GQ_NOTFOUND,
                        "journal: record %llu (%s, offset %llu) only names its gradient, which lay "
                        "in shared memory and is gone: files in lane/ were removed, the machine "
                        "was restarted, or an optimizer is at work and has to be stopped first; "
                        "version %llu is the last that can be made, and gradq-replay --cut goes "
                        "back to it",
                        (unsigned long long)record->lsn, record->segment,
                        (unsigned long long)record->offset, (unsigned long long)core->version);
    (void)gq_core_apply (core, &frame, record->vector);
    return GQ_OK;
}

static gq_status
replay_refusal (gq_core *core, const gq_record *record, gq_error *error)
{
    gq_frame frame;
    uint32_t words[2];
    if (record->payload_bytes != sizeof words + GQ_FRAME_HEADER_BYTES)
        return misfit (record, "a refusal has 136 bytes", error);
    memcpy (words, record->payload, sizeof words);
    if (words[0] == GQ_OK || words[0] >= GQ_STATUS_COUNT ||
        gq_frame_decode_header (record->payload + sizeof words, &frame) != GQ_OK ||
        frame.kind != GQ_KIND_GRADIENT)
        return misfit (record, "its reason or header is wrong", error);
    gq_status status = check_replayed (core, record, &frame, error);
    if (status == GQ_OK)
        gq_core_refuse (core, &frame, (gq_status)words[0]);
    return status;
}

gq_status
gq_core_replay (gq_core *core, const gq_record *record, gq_error *error)
{
    switch (record->kind) {
    case GQ_RECORD_GRANT:
        return replay_grant (core, record, error);
    case GQ_RECORD_GRADIENT:
        return replay_gradient (core, record, error);
    case GQ_RECORD_NAMED:
        return replay_named (core, record, error);
    case GQ_RECORD_REFUSAL:
        return replay_refusal (core, record, error);
    default:
        return misfit (record, "its kind is unknown", error);
    }
}
