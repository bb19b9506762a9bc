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

#include "frame.h"

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
    gq_layout_clear (&core->layout);
    free (core->sum);
    free (core->aligned);
    core->sum = core->aligned = NULL;
}

static bool
has_tensor (const gq_layout *layout, const char *name)
{
    for (size_t i = 0; i < layout->tensor_count; i++)
        if (strcmp (layout->tensors[i].name, name) == 0)
            return true;
    return false;
}

gq_status
gq_core_check_layout (const gq_core *core, const gq_layout *layout, gq_error *error)
{
    const gq_optimizer *plugin = gq_rule_plugin (core->rule);
    for (size_t k = 0; plugin->slots[k] != NULL; k++) {
        size_t length = strlen (plugin->slots[k]);
        for (size_t i = 0; i < layout->tensor_count; i++) {
            const char *name = layout->tensors[i].name;
            if (strncmp (name, plugin->slots[k], length) == 0 && name[length] == '.' &&
                has_tensor (layout, name + length + 1))
                return gq_fail (error, GQ_INVALID,
                                "a parameter is called %s, which is what a checkpoint calls the "
                                "%s of %s; rename one of the two parameters",
                                name, plugin->slots[k], name + length + 1);
        }
    }
    return GQ_OK;
}

gq_status
gq_core_set_layout (gq_core *core, gq_layout *layout)
{
    assert (core->buffers == NULL);
    uint64_t count = layout->element_count;
    core->buffers = gq_buffers_new (count);
    core->aligned = malloc (count * sizeof (float));
    if (core->config.aggregate > 1)
        core->sum = malloc (count * sizeof (float));
    if (core->buffers == NULL || core->aligned == NULL ||
        (core->config.aggregate > 1 && core->sum == NULL) ||
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
}

uint64_t
gq_core_rejected (const gq_core *core)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < GQ_STATUS_COUNT; i++)
        sum += core->rejected_by[i];
    return sum;
}

/* The payload as floats: in place, or copied where it lies unaligned (small frames only). */
static const float *
payload_of (gq_core *core, const void *bytes)
{
    const uint8_t *payload = (const uint8_t *)bytes + GQ_FRAME_HEADER_BYTES;
    if ((uintptr_t)payload % _Alignof(float) == 0)
        return (const float *)(const void *)payload;
    memcpy (core->aligned, payload, core->layout.element_count * sizeof (float));
    return core->aligned;
}

/* Shape, bytes and values of the vector are sound. */
static gq_status
check_vector (gq_core *core, const void *bytes, size_t size, const gq_frame *frame,
              const float **vector)
{
    if (core->layout.tensor_count == 0 || frame->digest != core->layout.digest)
        return GQ_LAYOUT;
    if (frame->count != core->layout.element_count)
        return GQ_COUNT;
    gq_status status = gq_frame_check_payload (bytes, size);
    if (status != GQ_OK)
        return status;
    *vector = payload_of (core, bytes);
    return gq_all_finite (*vector, frame->count) ? GQ_OK : GQ_NONFINITE;
}

/*
 * Steps between the weights that the gradient was computed from and the current ones.  A gradient
 * of an earlier term comes from weights that a restart may have undone: count it from what both
 * terms have in common at the most.
 */
static uint64_t
staleness_of (const gq_core *core, const gq_frame *frame)
{
    uint64_t from = frame->version;
    if (frame->term != core->term && from > core->start_version)
        from = core->start_version;
    return from < core->version ? core->version - from : 0;
}

/* Factor of min(1, mean staleness / staleness), the mean over all gradients so far, this one
 * included. */
static double
damping (gq_core *core, uint64_t staleness)
{
    double mean = core->staleness_sum / (double)core->staleness_count;
    return staleness == 0 || mean >= (double)staleness ? 1.0 : mean / (double)staleness;
}

static void
step (gq_core *core, const float *gradient, float scale)
{
    float *next = gq_buffers_next (core->buffers);
    gq_rule_step (core->rule, gq_buffers_current (core->buffers), next, gradient, scale);
    gq_buffers_turn (core->buffers);
    core->version++;
}

/* sum = weight * gradient, or sum += weight * gradient. */
static void
accumulate (float *restrict sum, const float *restrict gradient, uint64_t count, float weight,
            bool first)
{
    if (first)
        for (uint64_t i = 0; i < count; i++)
            sum[i] = weight * gradient[i];
    else
        for (uint64_t i = 0; i < count; i++)
            sum[i] += weight * gradient[i];
}

/* Add to the step being aggregated; make it when it is complete. */
static gq_outcome
aggregate (gq_core *core, const gq_frame *frame, const float *gradient, double factor)
{
    double weight = core->config.weigh_samples ? (double)frame->samples : 1.0;
    accumulate (core->sum, gradient, frame->count, (float)(weight * factor), core->held == 0);
    core->held_weight = core->held == 0 ? weight : core->held_weight + weight;
    core->held++;
    gq_ledger_hold (&core->ledger, frame->actor);
    if (core->held < core->config.aggregate)
        return GQ_OUTCOME_HELD;
    step (core, core->sum, (float)(1.0 / core->held_weight));
    core->applied += core->held;
    core->held = 0;
    gq_ledger_settle_all (&core->ledger);
    return GQ_OUTCOME_STEPPED;
}

static gq_outcome
apply (gq_core *core, const gq_frame *frame, const float *gradient, uint64_t staleness)
{
    gq_histogram_add (&core->staleness, staleness);
    core->staleness_sum += (double)staleness;
    core->staleness_count++;
    double factor = core->config.damp ? damping (core, staleness) : 1.0;
    if (core->config.aggregate > 1)
        return aggregate (core, frame, gradient, factor);
    step (core, gradient, (float)factor);
    core->applied++;
    gq_ledger_settle (&core->ledger, frame->actor);
    return GQ_OUTCOME_STEPPED;
}

static gq_outcome
take_gradient (gq_core *core, const void *bytes, size_t size, const gq_frame *frame,
               gq_status *reason)
{
    gq_status status = gq_ledger_enter (&core->ledger, frame->actor, frame->epoch, frame->sequence);
    if (status != GQ_OK) {
        *reason = status;
        return GQ_OUTCOME_IGNORED;
    }
    const float *vector = NULL;
    uint64_t staleness = staleness_of (core, frame);
    status = check_vector (core, bytes, size, frame, &vector);
    if (status == GQ_OK && !core->config.damp && staleness > core->config.max_staleness)
        status = GQ_STALE;
    if (status == GQ_OK && !core->has_weights)
        status = GQ_LAYOUT;
    if (status == GQ_OK)
        return apply (core, frame, vector, staleness);
    *reason = status;
    core->rejected_by[status]++;
    gq_ledger_refuse (&core->ledger, frame->actor, frame->sequence, status);
    return GQ_OUTCOME_REFUSED;
}

/* First weights count only while there are none; later offers are what a late joiner may send. */
static gq_outcome
take_initial (gq_core *core, const void *bytes, size_t size, const gq_frame *frame,
              gq_status *reason)
{
    const float *vector = NULL;
    *reason = core->has_weights ? GQ_AGAIN : check_vector (core, bytes, size, frame, &vector);
    if (*reason != GQ_OK)
        return GQ_OUTCOME_IGNORED;
    gq_core_set_weights (core, vector, 0, 0);
    return GQ_OUTCOME_STARTED;
}

gq_outcome
gq_core_take (gq_core *core, const void *bytes, size_t size, gq_frame *frame, gq_status *reason)
{
    memset (frame, 0, sizeof *frame);
    *reason = gq_frame_decode (bytes, size, frame);
    if (*reason == GQ_OK && memcmp (frame->run, core->run, GQ_RUN_ID_BYTES) != 0)
        *reason = GQ_RUN;
    if (*reason == GQ_OK && frame->kind == GQ_KIND_GRADIENT)
        return take_gradient (core, bytes, size, frame, reason);
    if (*reason == GQ_OK && frame->kind == GQ_KIND_INIT)
        return take_initial (core, bytes, size, frame, reason);
    core->malformed++;
    if (*reason == GQ_OK)
        *reason = GQ_MALFORMED;
    return GQ_OUTCOME_IGNORED;
}
