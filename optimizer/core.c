/*
 * Core.  A frame passes: header -> run -> ledger -> layout, count, checksum, finite, fresh -> step.
 *
 * The ledger comes first, so that whatever is refused after it is settled and answered: a gradient
 * nobody answers would keep its actor waiting.
 */
#include "core.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "core_internal.h"
#include "crash.h"
#include "frame.h"
#include "log.h"
#include "service.h"

/* As large as the weights: buffers, sums, frames that come. */
#define VECTORS 8

void
gq_core_init (gq_core *core, const gq_core_config *config, gq_rule *rule)
{
    assert (config->aggregate >= 1);
    memset (core, 0, sizeof *core);
    core->config = *config;
    core->rule = rule;
}

void
gq_core_clear (gq_core *core)
{
    gq_buffers_free (&core->buffers);
    if (core->live == NULL) {
        free (core->sum);
        free (core->spare);
    } else {
        /* Also after a clean end: should the last checkpoint be damaged, what was only named since
         * the one before it is nowhere else. */
        gq_lanes_keep_board (core->lanes);
    }
    gq_live_free (&core->live);
    gq_lanes_close (&core->lanes);
    gq_layout_clear (&core->layout);
    gq_rule_state_clear (&core->retired);
    free (core->aligned);
    core->sum = core->spare = core->aligned = NULL;
}

/* Memory for the step being aggregated, and for what it becomes with the next gradient. */
static gq_status
allocate_sums (gq_core *core, uint64_t count)
{
    if (core->sum != NULL)
        return GQ_OK;
    float *sum = malloc (count * sizeof *sum);
    float *spare = malloc (count * sizeof *spare);
    if (sum == NULL || spare == NULL) {
        free (sum);
        free (spare);
        return GQ_MEMORY;
    }
    core->sum = sum;
    core->spare = spare;
    return GQ_OK;
}

gq_status
gq_core_set_layout (gq_core *core, gq_layout *layout)
{
    assert (core->buffers == NULL);
    uint64_t count = layout->element_count;
    gq_service_expect ((size_t)count * sizeof (float) * VECTORS);
    core->buffers = gq_buffers_new (count, NULL);
    core->aligned = malloc (count * sizeof (float));
    if (core->buffers == NULL || core->aligned == NULL ||
        (core->config.aggregate > 1 && allocate_sums (core, count) != GQ_OK) ||
        gq_rule_reset (core->rule, count) != GQ_OK) {
        gq_layout keep = core->layout;
        gq_core_clear (core);
        core->layout = keep;
        return GQ_MEMORY;
    }
    core->layout = *layout;
    *layout = (gq_layout){0};
    return GQ_OK;
}

void
gq_core_set_weights (gq_core *core, const float *weights, uint64_t version, uint64_t applied)
{
    float *next = gq_buffers_next (core->buffers);
    memcpy (next, weights, core->layout.element_count * sizeof *next);
    gq_buffers_turn (core->buffers);
    core->version = core->start_version = version;
    core->applied = applied;
    core->has_weights = true;
    gq_core_commit (core);
}

uint64_t
gq_core_rejected (const gq_core *core)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < GQ_STATUS_COUNT; i++)
        sum += core->rejected_by[i];
    return sum;
}

/* The payload as floats: in place, or copied where it is bf16 or lies unaligned (small frames
 * only). */
static const float *
payload_of (gq_core *core, const uint8_t *bytes, const gq_frame *frame)
{
    const uint8_t *payload = bytes + GQ_FRAME_HEADER_BYTES;
    if (frame->encoding == GQ_ENCODING_BF16) {
        gq_bf16_decode (payload, core->aligned, frame->count);
        return core->aligned;
    }
    if ((uintptr_t)payload % _Alignof(float) == 0)
        return (const float *)(const void *)payload;
    memcpy (core->aligned, payload, core->layout.element_count * sizeof (float));
    return core->aligned;
}

static gq_status
check_shm (gq_core *core, const gq_frame *frame, const float **vector)
{
    const float *slot = core->lanes == NULL ? NULL : gq_lanes_vector (core->lanes, frame);
    if (slot == NULL)
        return GQ_NOTFOUND;
    *vector = slot;
    /* What is journaled and applied must be the same, even if its actor goes on writing; and
     * finite, whatever the actor says, for replay looks as well. */
    if (core->journal != NULL && !core->journal->off && core->live == NULL) {
        *vector = core->aligned;
        return gq_copy_finite (core->aligned, slot, frame->count) ? GQ_OK : GQ_NONFINITE;
    }
    /* An actor's word that it is finite will do: the step looks again, at each element it takes. */
    return frame->finite || gq_all_finite (slot, frame->count) ? GQ_OK : GQ_NONFINITE;
}

static gq_status
check_inline (gq_core *core, const uint8_t *bytes, const gq_frame *frame, const float **vector)
{
    if (frame->encoding == GQ_ENCODING_F32) {
        *vector = payload_of (core, bytes, frame);
        return gq_check_vector (*vector, frame->count, gq_frame_payload_crc (bytes));
    }
    gq_status status = gq_frame_check_payload (bytes, GQ_FRAME_HEADER_BYTES + frame->payload_bytes);
    if (status != GQ_OK)
        return status;
    *vector = payload_of (core, bytes, frame);
    return gq_all_finite (*vector, frame->count) ? GQ_OK : GQ_NONFINITE;
}

/* The same of a copy in the live state, which outlives us while its step runs. */
static gq_status
keep_inline (gq_core *core, const uint8_t *bytes, const gq_frame *frame, const float **vector)
{
    uint8_t *hand = gq_live_hand (core->live);
    if (frame->encoding != GQ_ENCODING_F32) {
        memcpy (hand, bytes, GQ_FRAME_HEADER_BYTES + (size_t)frame->payload_bytes);
        return check_inline (core, hand, frame, vector);
    }
    float *payload = (float *)(void *)(hand + GQ_FRAME_HEADER_BYTES);
    memcpy (hand, bytes, GQ_FRAME_HEADER_BYTES);
    *vector = payload;
    return gq_copy_vector (payload, bytes + GQ_FRAME_HEADER_BYTES, frame->count,
                           gq_frame_payload_crc (bytes));
}

/* Shape, bytes and values of the vector are sound. */
gq_status
gq_core_check_vector (gq_core *core, const uint8_t *bytes, bool kept, const gq_frame *frame,
                      const float **vector)
{
    if (core->layout.tensor_count == 0 || frame->digest != core->layout.digest)
        return GQ_LAYOUT;
    if (frame->count != core->layout.element_count)
        return GQ_COUNT;
    if (frame->lane == GQ_LANE_SHM)
        return check_shm (core, frame, vector);
    return core->live != NULL && !kept ? keep_inline (core, bytes, frame, vector)
                                       : check_inline (core, bytes, frame, vector);
}

/* Steps between the weights that the gradient was computed from and the current ones. */
static uint64_t
staleness_of (const gq_core *core, const gq_frame *frame)
{
    return frame->version < core->version ? core->version - frame->version : 0;
}

/* Factor of min(1, mean staleness / staleness), the mean over all gradients so far, this one
 * included. */
static double
damping (gq_core *core, uint64_t staleness)
{
    double mean = core->staleness_sum / (double)core->staleness_count;
    return staleness == 0 || mean >= (double)staleness ? 1.0 : mean / (double)staleness;
}

/* Elements that are not finite, in a gradient that was looked at before: they counted as 0. */
static void
note_unsound (gq_core *core, const gq_frame *frame)
{
    core->unsound++;
    if ((core->unsound & (core->unsound - 1)) == 0)
        gq_log (GQ_LOG_WARNING,
                "an actor wrote to a gradient that it had committed, or called it finite without a "
                "look: what is not finite in it counts as 0",
                "actor", "u", (uint64_t)frame->actor, "sequence", "u", frame->sequence, "times",
                "u", core->unsound, NULL);
}

/* `sound`: it was looked at and nobody writes it.  false: the gradient was not finite any more. */
static bool
step (gq_core *core, const float *gradient, float scale, bool sound)
{
    core->version++;
    if (core->numbers_only)
        return true;
    assert (core->live == NULL || core->pending == 0);
    float *next = gq_buffers_next (core->buffers);
    atomic_ullong done;
    atomic_init (&done, core->pending);
    core->pending = 0;
    const bool finite = gq_rule_step_on (
        core->rule, gq_buffers_current (core->buffers), next, gradient, scale, sound,
        core->live == NULL
            ? &done
            : gq_live_begin_step (core->live, gq_buffers_next_block (core->buffers)));
    gq_buffers_turn (core->buffers);
    return finite;
}

/* Into the spare vector, which becomes the sum: sum = weight * gradient, or sum + weight *
 * gradient. */
static bool
accumulate (gq_core *core, const float *gradient, uint64_t count, float weight)
{
    const float *restrict sum = core->sum;
    float *restrict next = core->spare;
    float block[GQ_SLIDE];
    bool finite = true;
    for (uint64_t at = 0; at < count; at += GQ_SLIDE) {
        const uint64_t size = count - at < GQ_SLIDE ? count - at : GQ_SLIDE;
        finite &= gq_copy_finite (block, gradient + at, size);
        if (core->held == 0)
            for (uint64_t i = 0; i < size; i++)
                next[at + i] = weight * block[i];
        else
            for (uint64_t i = 0; i < size; i++)
                next[at + i] = sum[at + i] + weight * block[i];
    }
    core->spare = core->sum;
    core->sum = next;
    return finite;
}

/* Make the step being aggregated, if it is complete. */
static gq_outcome
finish_step (gq_core *core)
{
    if (core->held < core->config.aggregate)
        return GQ_OUTCOME_HELD;
    (void)step (core, core->sum, (float)(1.0 / core->held_weight), false);
    core->applied += core->held;
    core->held = 0;
    gq_ledger_settle_all (&core->ledger);
    return GQ_OUTCOME_STEPPED;
}

/* Add to the step being aggregated; make it when it is complete. */
static gq_outcome
aggregate (gq_core *core, const gq_frame *frame, const float *gradient, double factor)
{
    double weight = core->config.weigh_samples ? (double)frame->samples : 1.0;
    if (!core->numbers_only && !accumulate (core, gradient, frame->count, (float)(weight * factor)))
        note_unsound (core, frame);
    core->held_weight = core->held == 0 ? weight : core->held_weight + weight;
    core->held++;
    gq_ledger_hold (&core->ledger, frame->actor);
    return finish_step (core);
}

gq_outcome
gq_core_apply (gq_core *core, const gq_frame *frame, const float *gradient)
{
    uint64_t staleness = staleness_of (core, frame);
    gq_ledger_enter (&core->ledger, frame->actor, frame->sequence);
    gq_histogram_add (&core->staleness, staleness);
    core->staleness_sum += (double)staleness;
    core->staleness_count++;
    double factor = core->config.damp ? damping (core, staleness) : 1.0;
    if (core->config.aggregate > 1)
        return aggregate (core, frame, gradient, factor);
    if (!step (core, gradient, (float)factor, frame->lane == GQ_LANE_INLINE))
        note_unsound (core, frame);
    core->applied++;
    gq_ledger_settle (&core->ledger, frame->actor);
    return GQ_OUTCOME_STEPPED;
}

/* Why a vector that came is not to be applied; GQ_OK: it is. */
static gq_status
judge (gq_core *core, const uint8_t *bytes, bool kept, const gq_frame *frame, const float **vector)
{
    gq_status status = gq_core_check_vector (core, bytes, kept, frame, vector);
    if (status == GQ_OK && !core->has_weights)
        status = GQ_LAYOUT;
    if (status == GQ_OK && !core->config.damp &&
        staleness_of (core, frame) > core->config.max_staleness)
        status = GQ_STALE;
    return status;
}

void
gq_core_refuse (gq_core *core, const gq_frame *frame, gq_status reason)
{
    core->rejected_by[reason]++;
    gq_ledger_enter (&core->ledger, frame->actor, frame->sequence);
    gq_ledger_refuse (&core->ledger, frame->actor, frame->sequence, reason);
}

/* An accepted gradient goes into the journal as a frame of lane inline, wherever it lies; but where
 * the state outlives us, and the gradient until its step is in that, it is only named. */
static gq_status
record_gradient (gq_core *core, const uint8_t *bytes, const gq_frame *frame, const float *vector)
{
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    const uint8_t *payload = bytes + GQ_FRAME_HEADER_BYTES;
    struct iovec parts[] = {
        {.iov_base = (void *)(uintptr_t)bytes, .iov_len = GQ_FRAME_HEADER_BYTES},
        {.iov_base = (void *)(uintptr_t)payload, .iov_len = (size_t)frame->payload_bytes}};
    if (core->live != NULL) {
        parts[1] = (struct iovec){.iov_base = &core->boot, .iov_len = sizeof core->boot};
        return gq_journal_append (core->journal, GQ_RECORD_NAMED, parts, 2);
    }
    if (frame->lane == GQ_LANE_SHM) {
        gq_frame whole = *frame;
        whole.lane = GQ_LANE_INLINE;
        whole.slot = 0;
        whole.finite = false;
        gq_frame_encode (&whole, vector, header);
        parts[0].iov_base = header;
        parts[1].iov_base = (void *)(uintptr_t)vector;
    }
    /* The payload was summed a moment ago: not once more. */
    const uint32_t crc = gq_frame_payload_crc (parts[0].iov_base);
    return gq_journal_append_summed (core->journal, GQ_RECORD_GRADIENT, parts, 2, crc);
}

/* A refusal is journaled too: without it the gradient would come again for ever. */
static gq_status
record_refusal (gq_core *core, const uint8_t *bytes, gq_status reason)
{
    uint32_t words[2] = {(uint32_t)reason, 0};
    const struct iovec parts[] = {
        {.iov_base = words, .iov_len = sizeof words},
        {.iov_base = (void *)(uintptr_t)bytes, .iov_len = GQ_FRAME_HEADER_BYTES}};
    return gq_journal_append (core->journal, GQ_RECORD_REFUSAL, parts, 2);
}

static gq_outcome
take_gradient (gq_core *core, const uint8_t *bytes, bool kept, const gq_frame *frame,
               gq_status *reason)
{
    const float *vector = NULL;
    *reason = gq_ledger_judge (&core->ledger, frame->actor, frame->epoch, frame->sequence);
    const bool announced = frame->lane == GQ_LANE_SHM && core->lanes != NULL && !core->early &&
                           gq_lanes_announced (core->lanes, frame);
    if (*reason == GQ_AGAIN && announced)
        return GQ_OUTCOME_IGNORED;
    if (*reason != GQ_OK) {
        gq_ledger_discard (&core->ledger, frame->actor, *reason);
        core->malformed += *reason == GQ_MALFORMED ? 1 : 0;
        return GQ_OUTCOME_IGNORED;
    }
    if (core->lanes != NULL && frame->lane == GQ_LANE_INLINE)
        gq_lanes_goes_inline (core->lanes, frame->actor, frame->epoch);
    gq_status decision = judge (core, bytes, kept, frame, &vector);
    if (decision == GQ_NOTFOUND) {
        /* A slot that we do not see, or that holds something else by now: its actor sends again. */
        *reason = decision;
        core->malformed++;
        return GQ_OUTCOME_IGNORED;
    }
    if (core->journal != NULL)
        *reason = decision == GQ_OK ? record_gradient (core, bytes, frame, vector)
                                    : record_refusal (core, bytes, decision);
    if (*reason != GQ_OK)
        return GQ_OUTCOME_BLOCKED;
    gq_crash_point ("before-apply");
    *reason = decision;
    if (decision != GQ_OK) {
        gq_core_refuse (core, frame, decision);
        return GQ_OUTCOME_REFUSED;
    }
    gq_outcome outcome = gq_core_apply (core, frame, vector);
    gq_core_commit (core);
    return outcome;
}

/* First weights count only while there are none; later offers are what a late joiner may send. */
static gq_outcome
take_initial (gq_core *core, const uint8_t *bytes, bool kept, const gq_frame *frame,
              gq_status *reason)
{
    const float *vector = NULL;
    *reason =
        core->has_weights ? GQ_AGAIN : gq_core_check_vector (core, bytes, kept, frame, &vector);
    if (*reason != GQ_OK)
        return GQ_OUTCOME_IGNORED;
    gq_core_set_weights (core, vector, 0, 0);
    return GQ_OUTCOME_STARTED;
}

/* A frame in one piece, whose header *frame is if *reason is GQ_OK. */
static gq_outcome
take_frame (gq_core *core, const uint8_t *bytes, bool kept, gq_frame *frame, gq_status *reason)
{
    if (*reason == GQ_OK && memcmp (frame->run, core->run, GQ_RUN_ID_BYTES) != 0)
        *reason = GQ_RUN;
    if (*reason == GQ_OK && frame->kind == GQ_KIND_GRADIENT)
        return take_gradient (core, bytes, kept, frame, reason);
    if (*reason == GQ_OK && frame->kind == GQ_KIND_INIT)
        return take_initial (core, bytes, kept, frame, reason);
    core->malformed++;
    if (*reason == GQ_OK)
        *reason = GQ_MALFORMED;
    return GQ_OUTCOME_IGNORED;
}

/* A frame that lies in memory of the broker's and ours. */
static gq_outcome
take_by_ticket (gq_core *core, const gq_hop_ticket *ticket, gq_frame *frame, gq_status *reason)
{
    gq_hop *hop = core->lanes == NULL ? NULL : gq_lanes_hop (core->lanes);
    const uint8_t *bytes = hop == NULL ? NULL : gq_hop_take (hop, ticket);
    gq_outcome outcome = GQ_OUTCOME_IGNORED;
    if (bytes != NULL && gq_frame_decode_header (bytes, frame) == GQ_OK &&
        frame->lane == GQ_LANE_INLINE) {
        *reason = GQ_OK;
        outcome = take_frame (core, bytes, true, frame, reason);
    } else {
        /* Lost on the way: its actor sends it again. */
        *reason = GQ_NOTFOUND;
        core->malformed++;
    }
    if (hop != NULL && outcome != GQ_OUTCOME_BLOCKED)
        gq_hop_done (hop, ticket);
    return outcome;
}

gq_outcome
gq_core_take (gq_core *core, const void *bytes, size_t size, gq_frame *frame, gq_status *reason)
{
    gq_hop_ticket ticket;
    memset (frame, 0, sizeof *frame);
    if (gq_hop_read (bytes, size, frame, &ticket))
        return take_by_ticket (core, &ticket, frame, reason);
    *reason = gq_frame_decode (bytes, size, frame);
    return take_frame (core, bytes, false, frame, reason);
}

gq_status
gq_core_grant (gq_core *core, uint32_t actor, uint32_t epoch, const uint8_t nonce[GQ_NONCE_BYTES])
{
    uint32_t words[2] = {actor, epoch};
    const struct iovec parts[] = {
        {.iov_base = words, .iov_len = sizeof words},
        {.iov_base = (void *)(uintptr_t)nonce, .iov_len = GQ_NONCE_BYTES}};
    gq_status status = core->journal == NULL
                           ? GQ_OK
                           : gq_journal_append (core->journal, GQ_RECORD_GRANT, parts, 2);
    if (status == GQ_OK)
        gq_ledger_grant (&core->ledger, actor, epoch, nonce);
    return status;
}

gq_status
gq_core_switch (gq_core *core, const gq_core_config *config, gq_rule *rule)
{
    uint64_t count = core->layout.element_count;
    bool have = core->layout.tensor_count > 0;
    assert (core->live == NULL); /* a life has one rule; its state is shared after */
    if (have && config->aggregate > 1 && allocate_sums (core, count) != GQ_OK)
        return GQ_MEMORY;
    if (have && rule != core->rule &&
        gq_rule_take_over (rule, core->rule, &core->retired, core->version, count) != GQ_OK)
        return GQ_MEMORY;
    core->config = *config;
    core->rule = rule;
    if (core->held > 0)
        (void)finish_step (core);
    return GQ_OK;
}
