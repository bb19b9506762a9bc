/*
 * Core in shared memory: weights, slots and sums move there when a life begins, and come back from
 * there when it was killed.
 */
#include <string.h>

#include "core_internal.h"
#include "log.h"

/* How many vectors of sums this core keeps. */
static uint32_t
sum_count (const gq_core *core)
{
    return core->sum != NULL ? 2 : 0;
}

void
gq_core_commit (gq_core *core)
{
    const gq_rule_state *state = gq_rule_state_of (core->rule);
    if (core->live == NULL)
        return;
    gq_live_mark mark = {.lsn = core->journal->lsn,
                         .chain = core->journal->chain,
                         .block = gq_buffers_current_block (core->buffers),
                         .version = core->version,
                         .applied = core->applied,
                         .held = core->held,
                         .held_weight = core->held_weight,
                         .steps = state->steps,
                         .slot_count = (uint32_t)state->slot_count,
                         .scalar_count = (uint32_t)state->scalar_count};
    for (size_t i = 0; i < state->slot_count; i++)
        mark.at[i] = (uint64_t)(state->slots[i] - state->rings[i]);
    mark.sum = core->sum != NULL && core->sum == gq_live_sum (core->live, 1) ? 1 : 0;
    memcpy (mark.rule, state->name, sizeof mark.rule);
    memcpy (mark.scalars, state->scalars, sizeof mark.scalars);
    gq_live_commit (core->live, &mark);
}

static gq_live_shape
live_shape (const gq_core *core)
{
    const gq_rule_state *state = gq_rule_state_of (core->rule);
    return (gq_live_shape){.count = core->layout.element_count,
                           .slide = state->slide,
                           .slot_count = (uint32_t)state->slot_count,
                           .sum_count = sum_count (core)};
}

/* Slots and sums move behind the weights. */
static void
begin_live (gq_core *core)
{
    gq_board *board = gq_lanes_board (core->lanes);
    const gq_live_shape shape = live_shape (core);
    uint64_t at[GQ_SLOTS_MAX];
    gq_live *live = gq_live_new (board, &shape);
    for (size_t i = 0; live != NULL && i < shape.slot_count; i++)
        at[i] = gq_live_ring_at (live, i);
    if (live == NULL || gq_rule_move (core->rule, gq_board_fd (board), at) != GQ_OK) {
        gq_live_free (&live);
        gq_log (GQ_LOG_WARNING, "no live state: every gradient goes into the journal", NULL);
        return;
    }
    if (core->sum != NULL) {
        float *sum = gq_live_sum (live, 0);
        if (core->held > 0)
            memcpy (sum, core->sum, (size_t)shape.count * sizeof *sum);
        free (core->sum);
        free (core->spare);
        core->sum = sum;
        core->spare = gq_live_sum (live, 1);
    }
    core->live = live;
    core->boot = gq_live_boot ();
    if (core->has_weights)
        gq_core_commit (core);
}

void
gq_core_share (gq_core *core)
{
    gq_error error = {""};
    if (core->lane_directory == NULL || core->lanes != NULL || core->layout.tensor_count == 0)
        return;
    const uint64_t count = core->layout.element_count;
    const bool keep = core->name_gradients && core->journal != NULL;
    const gq_live_shape shape = live_shape (core);
    gq_lanes_config config = {.directory = core->lane_directory,
                              .term = core->term,
                              .digest = core->layout.digest,
                              .count = count,
                              .board_rest_bytes = keep ? gq_live_bytes (&shape) : 0};
    memcpy (config.run, core->run, GQ_RUN_ID_BYTES);
    core->lane_directory = NULL; /* tried */
    gq_buffers *shared = NULL;
    gq_status status = gq_lanes_open (&core->lanes, &config, &core->ledger, &error);
    if (status == GQ_FULL) {
        /* No room beside what an earlier life left, which a checkpoint has by now. */
        gq_lanes_sweep (config.directory);
        status = gq_lanes_open (&core->lanes, &config, &core->ledger, &error);
    }
    if (status == GQ_OK)
        shared = gq_buffers_new (count, core->lanes);
    if (shared == NULL) {
        gq_lanes_close (&core->lanes);
        gq_log (GQ_LOG_WARNING, "no shared memory: actors of this host take lane inline, too",
                "message", "s", status == GQ_OK ? "out of memory" : error.text, NULL);
        return;
    }
    memcpy (gq_buffers_next (shared), gq_buffers_current (core->buffers), count * sizeof (float));
    gq_buffers_turn (shared);
    gq_buffers_free (&core->buffers);
    core->buffers = shared;
    if (keep)
        begin_live (core);
}

/* Does the state continue what checkpoint and records lead to? */
static bool
continues (const gq_core *core, const gq_live *live, const gq_live_mark *mark)
{
    const gq_rule_state *state = gq_rule_state_of (core->rule);
    return mark->version == core->version && mark->applied == core->applied &&
           mark->held == core->held && (mark->held == 0 || core->sum != NULL) &&
           (mark->held == 0 || mark->held_weight == core->held_weight) &&
           strcmp (mark->rule, state->name) == 0 && mark->slot_count == state->slot_count &&
           mark->slot_count == gq_live_shape_of (live)->slot_count &&
           mark->scalar_count == state->scalar_count;
}

/* Weights, slots and sum, and what a step that was interrupted had made of them. */
static gq_status
copy_vectors (gq_core *core, const gq_live *live, const gq_board *board, const gq_live_mark *mark,
              const gq_live_step *step)
{
    const size_t bytes = (size_t)core->layout.element_count * sizeof (float);
    gq_rule_place place = {.slide = gq_live_shape_of (live)->slide};
    for (size_t i = 0; i < mark->slot_count; i++) {
        place.rings[i] = gq_live_ring (live, i);
        place.at[i] = mark->at[i];
    }
    gq_status status = gq_rule_install (core->rule, &place, mark->scalars, mark->steps);
    if (status != GQ_OK)
        return status;
    memcpy (gq_buffers_next (core->buffers),
            gq_board_block (board, mark->block) + GQ_FRAME_HEADER_BYTES, bytes);
    gq_buffers_turn (core->buffers);
    if (step->done > 0)
        memcpy (gq_buffers_next (core->buffers),
                gq_board_block (board, step->block) + GQ_FRAME_HEADER_BYTES, bytes);
    if (mark->held > 0)
        memcpy (core->sum, gq_live_sum (live, mark->sum), bytes);
    return GQ_OK;
}

gq_status
gq_core_install (gq_core *core, const gq_live *live, const gq_board *board, gq_error *error)
{
    gq_live_mark mark;
    gq_live_mark mark_after;
    gq_live_step step;
    gq_live_step step_after;
    if (!gq_live_read (live, &mark, &step) || !continues (core, live, &mark))
        return gq_fail (error, GQ_CHECKSUM,
                        "it does not continue what checkpoint and journal lead to");
    gq_status status = copy_vectors (core, live, board, &mark, &step);
    if (status != GQ_OK)
        return gq_fail (error, status, "out of memory");
    if (!gq_live_read (live, &mark_after, &step_after) || mark_after.lsn != mark.lsn ||
        step_after.done != step.done)
        return gq_fail (error, GQ_AGAIN, "an optimizer is at work on it");
    core->pending = step.done;
    core->numbers_only = false;
    return GQ_OK;
}
