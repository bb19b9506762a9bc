/*
 * Stands where optimizer/checkpoint*.c stand in the service: checkpoints in memory.  A real one is
 * on the disk as a whole or not at all, and stays there whatever dies; so is this.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "optimizer/ledger_json.h"
#include "sim.h"

/* The checkpoints that a real directory would hold, oldest first. */
static sim_optimizer *
place (void)
{
    assert (sim_now != NULL);
    return &sim_now->optimizer;
}

static void
drop (sim_optimizer *self, uint32_t index)
{
    free (self->checkpoints[index].ledger);
    free (self->checkpoints[index].life);
    self->checkpoint_count--;
    for (uint32_t i = index; i < self->checkpoint_count; i++)
        self->checkpoints[i] = self->checkpoints[i + 1];
    self->checkpoints[self->checkpoint_count] = (sim_checkpoint){0};
}

void
sim_checkpoints_clear (sim *self)
{
    while (self->optimizer.checkpoint_count > 0)
        drop (&self->optimizer, 0);
}

static sim_checkpoint
taken (gq_core *core)
{
    size_t bytes = (size_t)core->layout.element_count * sizeof (float);
    sim_checkpoint checkpoint = {.version = core->version,
                                 .applied = core->applied,
                                 .lsn = core->journal->lsn,
                                 .chain = core->journal->chain,
                                 .term = core->term,
                                 .steps = gq_rule_steps (core->rule),
                                 .held = core->held,
                                 .held_weight = core->held_weight,
                                 .staleness_sum = core->staleness_sum,
                                 .staleness_count = core->staleness_count,
                                 .life = strdup (core->life)};
    json_t *ledger = gq_ledger_to_json (&core->ledger);
    checkpoint.ledger = json_dumps (ledger, JSON_COMPACT);
    json_decref (ledger);
    assert (checkpoint.ledger != NULL && checkpoint.life != NULL);
    memcpy (checkpoint.weights, gq_buffers_current (core->buffers), bytes);
    memcpy (checkpoint.slot, gq_rule_slot (core->rule, 0), bytes);
    if (core->held > 0)
        memcpy (checkpoint.sum, core->sum, bytes);
    return checkpoint;
}

gq_status
gq_checkpoint_write (gq_core *core, const char *directory, uint64_t kept, char *path,
                     gq_error *error)
{
    sim_optimizer *self = place ();
    (void)directory;
    (void)path;
    if (!gq_all_finite (gq_buffers_current (core->buffers), core->layout.element_count))
        return gq_fail (error, GQ_NONFINITE, "the weights are not finite");
    sim_optimizer_dies_here (sim_now, SIM_DIES_BEFORE_CHECKPOINT);
    /* One file for a version; the newest so many stay. */
    for (uint32_t i = self->checkpoint_count; i-- > 0;)
        if (self->checkpoints[i].version == core->version)
            drop (self, i);
    while (self->checkpoint_count >= kept)
        drop (self, 0);
    assert (self->checkpoint_count < SIM_CHECKPOINTS_MAX);
    self->checkpoints[self->checkpoint_count++] = taken (core);
    sim_now->tally.checkpoints++;
    sim_trace (sim_now, "optimizer: checkpoint of version %llu, lsn %llu",
               (unsigned long long)core->version, (unsigned long long)core->journal->lsn);
    sim_optimizer_dies_here (sim_now, SIM_DIES_AFTER_CHECKPOINT);
    return GQ_OK;
}

bool
gq_checkpoint_any (const char *directory)
{
    (void)directory;
    return place ()->checkpoint_count > 0;
}

static gq_status
set_vector (gq_core *core, const float *weights, uint64_t version, uint64_t applied)
{
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {sim_now->count}};
    gq_layout layout;
    gq_status status = gq_layout_init (&layout, &shape, 1, NULL);
    if (status == GQ_OK)
        status = gq_core_set_layout (core, &layout);
    if (status == GQ_OK)
        gq_core_set_weights (core, weights, version, applied);
    return status;
}

static gq_status
restore (gq_core *core, const sim_checkpoint *from)
{
    size_t bytes = (size_t)sim_now->count * sizeof (float);
    gq_status status = set_vector (core, from->weights, from->version, from->applied);
    if (status != GQ_OK)
        return status;
    memcpy (gq_rule_slot (core->rule, 0), from->slot, bytes);
    gq_rule_set_steps (core->rule, from->steps);
    core->held = from->held;
    core->held_weight = from->held_weight;
    core->staleness_sum = from->staleness_sum;
    core->staleness_count = from->staleness_count;
    if (core->held > 0 && (core->sum == NULL || core->held >= core->config.aggregate))
        return GQ_MALFORMED;
    if (core->held > 0)
        memcpy (core->sum, from->sum, bytes);
    json_t *ledger = json_loads (from->ledger, 0, NULL);
    status = gq_ledger_from_json (&core->ledger, ledger);
    json_decref (ledger);
    return status;
}

gq_status
gq_checkpoint_load (gq_core *core, const char *directory, uint64_t version_max,
                    gq_checkpoint_prepare *prepare, void *context, gq_checkpoint_place *where,
                    gq_error *error)
{
    sim_optimizer *self = place ();
    (void)directory;
    for (uint32_t i = self->checkpoint_count; i-- > 0;) {
        const sim_checkpoint *from = &self->checkpoints[i];
        if (from->version > version_max)
            continue;
        gq_status status = prepare (context, core, from->life, error);
        if (status == GQ_OK) {
            status = restore (core, from);
            if (status != GQ_OK)
                (void)gq_fail (error, status, "the checkpoint cannot be restored");
        }
        *where = (gq_checkpoint_place){.lsn = from->lsn, .chain = from->chain};
        return status;
    }
    return gq_fail (error, GQ_NOTFOUND, "there is no checkpoint");
}

/* --init: the first weights are zero. */
gq_status
gq_checkpoint_init (gq_core *core, const char *path, gq_error *error)
{
    const float zero[SIM_COUNT_MAX] = {0};
    (void)path;
    gq_status status = set_vector (core, zero, 0, 0);
    return status == GQ_OK ? GQ_OK : gq_fail (error, status, "no first weights");
}
