/*
 * The oracle.  It reads the journal's bytes where they lie on the simulated disk, by the format
 * alone, and makes of them, with plain float32 loops, the state that the optimizer must be in.
 * Must never call the code that it judges: of the product it uses the checksum and the codec.
 */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "frame.h"
#include "optimizer/journal_format.h"
#include "sim.h"

typedef unsigned long long ull;

void
sim_model_begin (sim *self)
{
    sim_model *model = &self->model;
    model->lsn = 0;
    model->at = 0;
    model->segment[0] = '\0';
    memset (&model->state, 0, sizeof model->state);
}

/* ---- what a record does ---- */

static void
make_step (const sim *self, sim_state *state, const float *gradient, float scale)
{
    const sim_life *life = &state->life;
    for (uint64_t i = 0; i < self->count; i++) {
        float g = gradient[i] * scale;
        float direction = g;
        if (life->momentum != 0) {
            float b = life->momentum * state->moment[i] + g;
            state->moment[i] = b;
            direction = life->nesterov ? g + life->momentum * b : b;
        }
        state->weights[i] = state->weights[i] - life->lr * direction;
    }
    state->version++;
}

static void
settle (sim_known *actor)
{
    if (actor->pending == 0)
        actor->settled = actor->count;
}

static void
finish_step (const sim *self, sim_state *state)
{
    if (state->held == 0 || state->held < state->life.config.aggregate)
        return;
    make_step (self, state, state->sum, (float)(1.0 / state->held_weight));
    state->applied += state->held;
    state->held = 0;
    for (size_t i = 0; i < SIM_ACTORS; i++) {
        state->actors[i].pending = 0;
        settle (&state->actors[i]);
    }
}

static uint64_t
staleness_of (const sim_state *state, const sim_entry *entry)
{
    return entry->version < state->version ? state->version - entry->version : 0;
}

static void
apply_gradient (const sim *self, sim_state *state, const sim_entry *entry)
{
    const gq_core_config *config = &state->life.config;
    sim_known *actor = &state->actors[entry->actor];
    uint64_t staleness = staleness_of (state, entry);
    double factor = 1, weight = config->weigh_samples ? (double)entry->samples : 1;
    state->staleness_sum += (double)staleness;
    state->staleness_count++;
    double mean = state->staleness_sum / (double)state->staleness_count;
    if (config->damp && staleness > 0 && mean < (double)staleness)
        factor = mean / (double)staleness;
    if (config->aggregate == 1) {
        make_step (self, state, entry->values, (float)factor);
        state->applied++;
        settle (actor);
        return;
    }
    for (uint64_t i = 0; i < self->count; i++) {
        float part = (float)(weight * factor) * entry->values[i];
        state->sum[i] = state->held == 0 ? part : state->sum[i] + part;
    }
    state->held_weight = state->held == 0 ? weight : state->held_weight + weight;
    state->held++;
    actor->pending++;
    finish_step (self, state);
}

static void
apply_entry (const sim *self, sim_state *state, const sim_entry *entry, uint64_t lsn)
{
    sim_known *actor = &state->actors[entry->actor];
    switch (entry->kind) {
    case GQ_RECORD_TERM:
        state->life = entry->life;
        finish_step (self, state);
        return;
    case GQ_RECORD_GRANT:
        SIM_REQUIRE (self, entry->epoch > actor->epoch, "actor %u: epoch %u is granted after %u",
                     entry->actor, entry->epoch, actor->epoch);
        memset (actor, 0, sizeof *actor);
        actor->epoch = entry->epoch;
        return;
    default:
        SIM_REQUIRE (self, entry->epoch == actor->epoch, "actor %u: epoch %u journaled in epoch %u",
                     entry->actor, entry->epoch, actor->epoch);
        SIM_REQUIRE (self, entry->sequence < SIM_SEQUENCES_MAX, "sequence %llu",
                     (ull)entry->sequence);
        SIM_REQUIRE (self, actor->decided[entry->sequence] == 0,
                     "journaled twice: actor %u, epoch %u, sequence %llu, lsn %u and %llu",
                     entry->actor, entry->epoch, (ull)entry->sequence,
                     actor->lsn[actor->decided[entry->sequence] - 1], (ull)lsn);
    }
    actor->lsn[actor->count++] = (uint32_t)lsn;
    actor->decided[entry->sequence] = (uint16_t)actor->count;
    if (entry->kind == GQ_RECORD_GRADIENT) {
        apply_gradient (self, state, entry);
        return;
    }
    actor->refused++;
    actor->refused_sequence = entry->sequence;
    actor->refused_reason = entry->reason;
    settle (actor);
}

/* Is this decision the right one, in this state, about what the actor really pushed? */
static void
judge (const sim *self, const sim_entry *entry, uint64_t lsn)
{
    const gq_core_config *config = &self->model.state.life.config;
    float values[SIM_COUNT_MAX];
    uint32_t samples;
    gq_status right = GQ_OK;
    sim_gradient (self, entry->actor, entry->epoch, entry->sequence, values, &samples);
    if (!config->damp && staleness_of (&self->model.state, entry) > config->max_staleness)
        right = GQ_STALE;
    for (uint64_t i = 0; i < self->count; i++)
        if (!isfinite (values[i]))
            right = GQ_NONFINITE;
    if (entry->reason == GQ_CHECKSUM && self->faults.damage != 0)
        return; /* damaged on the way: refused, and never asked for again */
    SIM_REQUIRE (self, entry->reason == right, "lsn %llu: decided %s, %s is right", (ull)lsn,
                 gq_status_name (entry->reason), gq_status_name (right));
    SIM_REQUIRE (self, entry->samples == samples, "lsn %llu: %u samples, not %u", (ull)lsn,
                 entry->samples, samples);
    SIM_REQUIRE (
        self, right != GQ_OK || memcmp (values, entry->values, self->count * sizeof (float)) == 0,
        "lsn %llu: other values than actor %u pushed", (ull)lsn, entry->actor);
}

/* ---- the bytes ---- */

static const gq_memory_file *
file_of (const sim *self, const char *name)
{
    for (size_t i = 0; i < self->disk->count; i++)
        if (strcmp (self->disk->files[i].name, name) == 0)
            return &self->disk->files[i];
    return NULL;
}

/* The whole record at `start` of a file; false: there is none. */
static bool
record_in (const gq_memory_bytes *all, uint64_t start, gq_record_header *header)
{
    if (all->size < start + sizeof *header)
        return false;
    const uint8_t *bytes = all->at + start;
    memcpy (header, bytes, sizeof *header);
    if (header->magic != GQ_RECORD_MAGIC ||
        header->payload_bytes > all->size - start - sizeof *header)
        return false;
    uint32_t crc = gq_crc32c (bytes, offsetof (gq_record_header, crc));
    return gq_crc32c_more (crc, bytes + sizeof *header, header->payload_bytes) == header->crc;
}

/* As a process sees it. */
static bool
record_at (const gq_memory_file *file, uint64_t start, gq_record_header *header)
{
    return file != NULL && file->here && record_in (&file->live, start, header);
}

static void
read_frame (const sim *self, sim_entry *entry, const uint8_t *bytes)
{
    gq_frame frame;
    gq_status status = gq_frame_decode_header (bytes, &frame);
    SIM_REQUIRE (self, status == GQ_OK && frame.actor < SIM_ACTORS && frame.count == self->count,
                 "a journaled frame is %s", gq_status_name (status));
    entry->actor = frame.actor;
    entry->epoch = frame.epoch;
    entry->sequence = frame.sequence;
    entry->samples = frame.samples;
    entry->version = frame.version;
}

static void
read_payload (const sim *self, sim_entry *entry, const uint8_t *payload)
{
    uint32_t words[2];
    memcpy (words, payload, sizeof words);
    switch (entry->kind) {
    case GQ_RECORD_TERM:
        entry->life = self->optimizer.life;
        return;
    case GQ_RECORD_GRANT:
        entry->actor = words[0];
        entry->epoch = words[1];
        SIM_REQUIRE (self, words[0] < SIM_ACTORS, "granted to actor %u", words[0]);
        return;
    case GQ_RECORD_REFUSAL:
        entry->reason = (gq_status)words[0];
        SIM_REQUIRE (self, entry->reason != GQ_OK, "a refusal without a reason");
        read_frame (self, entry, payload + sizeof words);
        return;
    default:
        read_frame (self, entry, payload);
        memcpy (entry->values, payload + GQ_FRAME_HEADER_BYTES, self->count * sizeof (float));
    }
}

static void
take_record (sim *self, const gq_record_header *header, const uint8_t *bytes)
{
    sim_model *model = &self->model;
    assert (model->lsn < SIM_ENTRIES_MAX);
    SIM_REQUIRE (self, header->lsn == model->lsn + 1, "record %llu follows %llu", (ull)header->lsn,
                 (ull)model->lsn);
    sim_entry *entry = &model->entries[model->lsn++];
    memset (entry, 0, sizeof *entry);
    memcpy (entry->header, bytes, sizeof entry->header);
    memcpy (entry->segment, model->segment, sizeof entry->segment);
    entry->start = model->at;
    entry->end = model->at + sizeof *header + header->payload_bytes;
    entry->kind = header->kind;
    read_payload (self, entry, bytes + sizeof *header);
    if (entry->kind == GQ_RECORD_GRADIENT || entry->kind == GQ_RECORD_REFUSAL) {
        judge (self, entry, model->lsn);
        self->tally.journaled++;
        self->tally.refused += entry->kind == GQ_RECORD_REFUSAL ? 1 : 0;
    }
    sim_trace (self, "journal: %llu is kind %u, %u/%u/%llu %s", (ull)model->lsn, entry->kind,
               entry->actor, entry->epoch, (ull)entry->sequence, gq_status_name (entry->reason));
    uint64_t version = model->state.version;
    apply_entry (self, &model->state, entry, model->lsn);
    self->tally.steps += model->state.version - version;
    self->tally.held += model->state.held > 0 ? 1 : 0;
    model->at = (entry->end + GQ_RECORD_ALIGN - 1) / GQ_RECORD_ALIGN * GQ_RECORD_ALIGN;
}

void
sim_model_scan (sim *self)
{
    sim_model *model = &self->model;
    for (;;) {
        gq_record_header header;
        const gq_memory_file *file = model->at == 0 ? NULL : file_of (self, model->segment);
        if (record_at (file, model->at, &header)) {
            take_record (self, &header, file->live.at + model->at);
            continue;
        }
        char next[32];
        snprintf (next, sizeof next, GQ_SEGMENT_PREFIX "%016llu", (ull)model->lsn + 1);
        file = file_of (self, next);
        if (file == NULL || !record_at (file, sizeof (gq_segment_header), &header))
            return;
        memcpy (model->segment, next, sizeof next);
        model->at = sizeof (gq_segment_header);
    }
}

bool
sim_model_has (const sim *self, uint64_t lsn)
{
    gq_record_header header;
    const sim_entry *entry = &self->model.entries[lsn - 1];
    return record_at (file_of (self, entry->segment), entry->start, &header) &&
           memcmp (&header, entry->header, sizeof header) == 0;
}

static uint64_t
checkpoint_lsn (const sim *self)
{
    const sim_optimizer *optimizer = &self->optimizer;
    return optimizer->checkpoint_count == 0
               ? 0
               : optimizer->checkpoints[optimizer->checkpoint_count - 1].lsn;
}

static bool
is_durable (const sim *self, uint64_t lsn)
{
    const sim_entry *entry = &self->model.entries[lsn - 1];
    const gq_memory_file *file = file_of (self, entry->segment);
    gq_record_header header;
    /* Its own bytes: a tail that was cut off since may still be there in its place. */
    return lsn <= checkpoint_lsn (self) ||
           (file != NULL && file->stays && record_in (&file->durable, entry->start, &header) &&
            memcmp (&header, entry->header, sizeof header) == 0);
}

uint64_t
sim_model_durable (const sim *self)
{
    uint64_t lsn = checkpoint_lsn (self);
    while (lsn < self->model.lsn && is_durable (self, lsn + 1))
        lsn++;
    return lsn;
}

/* Forget what the disk forgot: the state is made anew from what is left. */
static void
cut_back (sim *self, uint64_t lsn, bool power)
{
    sim_model *model = &self->model;
    for (uint64_t i = lsn + 1; i <= model->lsn; i++) {
        const sim_entry *entry = &model->entries[i - 1];
        SIM_REQUIRE (self, power, "lsn %llu is gone, and the power never failed", (ull)i);
        SIM_REQUIRE (self, !entry->acknowledged || self->fsync != GQ_FSYNC_ALWAYS,
                     "lsn %llu was acknowledged, and is lost", (ull)i);
        self->tally.acknowledged_lost += entry->acknowledged ? 1 : 0;
        self->tally.records_lost++;
    }
    model->lsn = lsn;
    memset (&model->state, 0, sizeof model->state);
    for (uint64_t i = 1; i <= lsn; i++)
        apply_entry (self, &model->state, &model->entries[i - 1], i);
    model->at = 0;
    if (lsn > 0 && sim_model_has (self, lsn)) {
        const sim_entry *last = &model->entries[lsn - 1];
        memcpy (model->segment, last->segment, sizeof model->segment);
        model->at = (last->end + GQ_RECORD_ALIGN - 1) / GQ_RECORD_ALIGN * GQ_RECORD_ALIGN;
    }
}

void
sim_model_after_death (sim *self, bool power, uint64_t durable_lsn)
{
    uint64_t lsn = checkpoint_lsn (self);
    while (lsn < self->model.lsn && sim_model_has (self, lsn + 1))
        lsn++;
    SIM_REQUIRE (self, lsn >= durable_lsn, "lsn %llu was synced, and only %llu are left",
                 (ull)durable_lsn, (ull)lsn);
    if (lsn < self->model.lsn || power)
        cut_back (self, lsn, power);
}

/* ---- comparing ---- */

static gq_sequences
set_of (const sim_known *actor, uint32_t limit)
{
    gq_sequences set = {0};
    for (uint64_t i = 1; i < SIM_SEQUENCES_MAX; i++) {
        bool in = actor->decided[i] != 0 && actor->decided[i] <= limit;
        if (in && set.cumulative == i - 1)
            set.cumulative = i;
        else if (in && i - set.cumulative <= 64)
            set.beyond |= UINT64_C (1) << (i - set.cumulative - 1);
        if (i > set.cumulative + 64)
            break;
    }
    return set;
}

static void
compare_set (const sim *self, uint32_t actor, const char *what, gq_sequences is, gq_sequences right)
{
    SIM_REQUIRE (self, is.cumulative == right.cumulative && is.beyond == right.beyond,
                 "actor %u: %s are 1..%llu and %llx, the journal says 1..%llu and %llx", actor,
                 what, (ull)is.cumulative, (ull)is.beyond, (ull)right.cumulative,
                 (ull)right.beyond);
}

static void
compare_actor (const sim *self, uint32_t id)
{
    const gq_ledger_entry *is = &self->optimizer.core.ledger.actors[id];
    const sim_known *right = &self->model.state.actors[id];
    SIM_REQUIRE (self, is->epoch == right->epoch, "actor %u: epoch %u, the journal says %u", id,
                 is->epoch, right->epoch);
    compare_set (self, id, "received", is->received, set_of (right, right->count));
    compare_set (self, id, "settled", is->settled, set_of (right, right->settled));
    SIM_REQUIRE (self, is->pending == right->pending, "actor %u: %u wait, the journal says %u", id,
                 is->pending, right->pending);
    SIM_REQUIRE (self,
                 is->refused == right->refused && is->refused_sequence == right->refused_sequence &&
                     is->refused_reason == right->refused_reason,
                 "actor %u: %llu refused, last %llu (%s); the journal says %llu, %llu (%s)", id,
                 (ull)is->refused, (ull)is->refused_sequence, gq_status_name (is->refused_reason),
                 (ull)right->refused, (ull)right->refused_sequence,
                 gq_status_name (right->refused_reason));
}

static void
compare_vector (const sim *self, const char *what, const float *is, const float *right)
{
    for (uint64_t i = 0; i < self->count; i++)
        SIM_REQUIRE (self, memcmp (&is[i], &right[i], sizeof is[i]) == 0,
                     "%s[%llu] is %a at version %llu, the journal makes it %a", what, (ull)i,
                     (double)is[i], (ull)self->optimizer.core.version, (double)right[i]);
}

void
sim_model_compare (sim *self)
{
    gq_core *core = &self->optimizer.core;
    const sim_state *state = &self->model.state;
    SIM_REQUIRE (self, core->journal->lsn == self->model.lsn,
                 "the optimizer is at lsn %llu, the disk at %llu", (ull)core->journal->lsn,
                 (ull)self->model.lsn);
    SIM_REQUIRE (self, core->version == state->version && core->applied == state->applied,
                 "version %llu of %llu gradients, the journal makes it %llu of %llu",
                 (ull)core->version, (ull)core->applied, (ull)state->version, (ull)state->applied);
    compare_vector (self, "weights", gq_buffers_current (core->buffers), state->weights);
    compare_vector (self, "moment", gq_rule_slot (core->rule, 0), state->moment);
    SIM_REQUIRE (self, core->held == state->held, "%u are held, the journal says %u", core->held,
                 state->held);
    if (core->held > 0) {
        compare_vector (self, "sum", core->sum, state->sum);
        SIM_REQUIRE (self, core->held_weight == state->held_weight, "the held weight is %a, not %a",
                     core->held_weight, state->held_weight);
    }
    SIM_REQUIRE (self,
                 core->staleness_sum == state->staleness_sum &&
                     core->staleness_count == state->staleness_count,
                 "the mean staleness is of %llu, not %llu", (ull)core->staleness_count,
                 (ull)state->staleness_count);
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        compare_actor (self, i);
}

void
sim_model_acknowledged (sim *self, uint32_t id, uint32_t epoch, const gq_ack *ack)
{
    sim_known *actor = &self->model.state.actors[id];
    SIM_REQUIRE (self, epoch == actor->epoch, "actor %u: acknowledged in epoch %u, journaled in %u",
                 id, epoch, actor->epoch);
    for (uint64_t i = 1; i <= ack->cumulative + 64 && i < SIM_SEQUENCES_MAX; i++) {
        if (i > ack->cumulative && (ack->beyond >> (i - ack->cumulative - 1) & 1) == 0)
            continue;
        uint32_t place = actor->decided[i];
        SIM_REQUIRE (self, place != 0 && place <= actor->settled,
                     "acknowledged, but not %s: actor %u, epoch %u, sequence %llu",
                     place == 0 ? "journaled" : "applied", id, epoch, (ull)i);
        sim_entry *entry = &self->model.entries[actor->lsn[place - 1] - 1];
        SIM_REQUIRE (self,
                     entry->acknowledged || self->fsync != GQ_FSYNC_ALWAYS ||
                         is_durable (self, actor->lsn[place - 1]),
                     "acknowledged, but not synced: actor %u, epoch %u, sequence %llu", id, epoch,
                     (ull)i);
        self->tally.acknowledged += entry->acknowledged ? 0 : 1;
        entry->acknowledged = true;
    }
}
