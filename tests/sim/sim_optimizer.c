/*
 * The optimizer's process: steps 4 to 6 of a gradient's path with the real core, ledger, journal,
 * recovery and checkpoint policy.  Around them it does what optimizer/server.c and gq_run_open do,
 * in their order.  It can die at every named point; it must never know that it will.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "frame.h"
#include "sim.h"

typedef unsigned long long ull;

#define EPOCH_BLOCK     1024 /* as in optimizer/identity.c */
#define INTERVAL_NS     (100 * SIM_MS)
#define REPEAT_NS       (1000 * SIM_MS)
#define KEPT            2
#define DISK_CALLS_SOON 6

/* ---- dying ---- */

static _Noreturn void
die (sim *self)
{
    longjmp (self->optimizer.grave, 1);
}

void
sim_optimizer_dies_here (sim *self, sim_death here)
{
    if (self->optimizer.death == here)
        die (self);
}

/* These stand where src/crash.c stands in the service. */
void
gq_crash_point (const char *name)
{
    if (sim_now != NULL && strcmp (name, "before-apply") == 0)
        sim_optimizer_dies_here (sim_now, SIM_DIES_BEFORE_APPLY);
}

/* Not in the midst of a step: no memory outlives a life here. */
bool
gq_crash_wanted (void)
{
    return false;
}

/* Run one part of the optimizer's life; false: it died in it. */
static bool
survives (sim *self, void (*part) (sim *self))
{
    if (setjmp (self->optimizer.grave) != 0)
        return false;
    part (self);
    return true;
}

/* What a process leaves behind: nothing but the disk. */
static void
bury (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_core_clear (&optimizer->core);
    gq_recovery_clear (&optimizer->recovery);
    gq_rule_free (&optimizer->run.rule);
    gq_life_clear (&optimizer->run.life);
    free (optimizer->run.life_text);
    optimizer->run.life_text = NULL;
    optimizer->holding = false;
    optimizer->up = false;
    sim_lose (self, SIM_OPTIMIZER);
}

void
sim_optimizer_die (sim *self)
{
    bool power = self->faults.power && sim_chance (self, 2);
    uint64_t room_bytes = self->disk->room_bytes;
    bury (self);
    gq_memory_disk_repair (self->disk);
    self->disk->room_bytes = room_bytes;
    sim_model_scan (self); /* a record may have come to the disk in the last moment */
    uint64_t durable_lsn = sim_model_durable (self);
    sim_trace (self, "optimizer: dies (%s), lsn %llu, synced %llu",
               power ? "with its host" : "alone", (ull)self->model.lsn, (ull)durable_lsn);
    self->tally.deaths[self->optimizer.death]++;
    self->optimizer.death = SIM_LIVES;
    if (!power)
        gq_memory_disk_kill (self->disk);
    else if (sim_chance (self, 2))
        gq_memory_disk_crash (self->disk);
    else
        gq_memory_disk_crash_anywhere (self->disk, &self->random);
    sim_model_after_death (self, power, durable_lsn);
    self->tally.optimizer_deaths++;
    self->tally.power_losses += power ? 1 : 0;
    if (power && self->fsync != GQ_FSYNC_ALWAYS) {
        self->weak = true;
        self->optimizer.seen_version = 0;
    }
}

/* Decide whether this part of the life is the last. */
static void
draw_death (sim *self, sim_death first, sim_death last)
{
    sim_optimizer *optimizer = &self->optimizer;
    optimizer->death = SIM_LIVES;
    if (self->healing || !sim_chance (self, self->faults.optimizer_dies))
        return;
    uint64_t choice = sim_below (self, (uint64_t)(last - first) + 2);
    optimizer->death = choice == 0 ? SIM_DIES_IN_DISK : (sim_death)(first + choice - 1);
    optimizer->death_after = (uint32_t)sim_below (self, 4);
    if (optimizer->death == SIM_DIES_IN_DISK) {
        self->disk->fail_at_call = self->disk->calls + 1 + sim_below (self, DISK_CALLS_SOON);
        self->disk->partial_bytes = sim_below (self, 256);
    }
}

/* ---- coming to life ---- */

static void
draw_life (sim *self)
{
    static const float rates[] = {0.5f, 0.25f, 0.1f}, momenta[] = {0, 0.5f, 0.9f};
    sim_life *life = &self->optimizer.life;
    if (self->optimizer.life_drawn && (!self->swaps || sim_chance (self, 2)))
        return;
    self->tally.swaps += self->optimizer.life_drawn ? 1 : 0;
    self->optimizer.life_drawn = true;
    life->lr = rates[sim_below (self, 3)];
    life->momentum = momenta[sim_below (self, 3)];
    life->nesterov = life->momentum > 0 && sim_chance (self, 2);
    gq_core_config *config = &life->config;
    config->aggregate = sim_chance (self, 2) ? 1 : 1 + (uint32_t)sim_below (self, SIM_ACTORS);
    config->weigh_samples = sim_chance (self, 2);
    config->max_staleness = sim_chance (self, 3) ? sim_below (self, 6) : UINT64_MAX;
    config->damp = sim_chance (self, 4);
}

static void
load_life (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_run *run = &optimizer->run;
    gq_error error;
    draw_life (self);
    run->life =
        (gq_life){.config = optimizer->life.config,
                  .sets = json_pack (
                      "[o, o, o]", json_sprintf ("lr=%.9g", (double)optimizer->life.lr),
                      json_sprintf ("momentum=%.9g", (double)optimizer->life.momentum),
                      json_sprintf ("nesterov=%s", optimizer->life.nesterov ? "true" : "false"))};
    memcpy (run->life.plugin, "sgd", sizeof "sgd");
    gq_status status = gq_life_load (&run->life, &run->rule, self->plugins, "auto", NULL, &error);
    SIM_REQUIRE (self, status == GQ_OK, "%s", error.text);
}

/* GQ_IO is the end of this process, and only a disk that was told to fail gives it. */
static void
require (sim *self, gq_status status, const char *what, const gq_error *error)
{
    if (status == GQ_IO || status == GQ_FULL) {
        SIM_REQUIRE (self, status == GQ_FULL || self->disk->failed, "%s: %s", what, error->text);
        die (self);
    }
    SIM_REQUIRE (self, status == GQ_OK, "%s: %s: %s", what, gq_status_name (status), error->text);
}

static void
recover (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_core *core = &optimizer->core;
    gq_error error = {""};
    /* The newest checkpoint is damaged: what the older one needs must still be in the journal. */
    uint64_t newest = UINT64_MAX;
    if (optimizer->checkpoint_count == KEPT && !self->weak && sim_chance (self, 8)) {
        newest = optimizer->checkpoints[KEPT - 1].version - 1;
        self->tally.checkpoints_damaged++;
    }
    optimizer->recovery = (gq_recovery){.disk = &self->disk->base,
                                        .checkpoints = "",
                                        .plugins = self->plugins,
                                        .cpu = "auto",
                                        .checkpoint_max = newest,
                                        .version_max = UINT64_MAX,
                                        .lsn_max = UINT64_MAX};
    if (optimizer->death == SIM_DIES_RECOVERING)
        optimizer->recovery.version_max = sim_below (self, self->model.state.version + 1);
    gq_status status = gq_recover (&optimizer->recovery, core, &error);
    if (optimizer->death == SIM_DIES_RECOVERING)
        die (self); /* in the middle: as long as it writes nothing, the next one can do it again */
    require (self, status, "recovery", &error);
    optimizer->run.checkpoint_version = optimizer->recovery.checkpoint_version;
    self->tally.torn_tails += optimizer->recovery.end.torn ? 1 : 0;
    self->tally.replayed += optimizer->recovery.replayed;
    self->tally.recoveries++;
    sim_trace (self, "optimizer: recovered version %llu, lsn %llu, %llu records replayed",
               (ull)core->version, (ull)optimizer->recovery.end.lsn,
               (ull)optimizer->recovery.replayed);
    if (!core->has_weights)
        require (self, gq_checkpoint_init (core, "", &error), "first weights", &error);
}

/* As begin_life of optimizer/run.c. */
static void
begin_life (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_core *core = &optimizer->core;
    gq_run *run = &optimizer->run;
    gq_error error = {""};
    run->life.term = core->term = optimizer->term;
    run->life.version = core->version;
    json_t *json = gq_life_to_json (&run->life);
    run->life_text = json_dumps (json, JSON_COMPACT);
    json_decref (json);
    assert (run->life_text != NULL);
    require (self,
             gq_journal_start (&run->journal, &self->disk->base, self->run,
                               &optimizer->recovery.end, self->segment_bytes, &error),
             "journal", &error);
    const struct iovec part = {.iov_base = run->life_text, .iov_len = strlen (run->life_text)};
    require (self, gq_journal_append (&run->journal, GQ_RECORD_TERM, &part, 1), "term", &error);
    require (self, gq_run_sync (run, UINT64_MAX), "sync", &error);
    require (self, gq_core_switch (core, &run->life.config, run->rule), "switch", &error);
    core->life = run->life_text;
    core->journal = &run->journal;
    core->start_version = core->version;
    gq_recovery_clear (&optimizer->recovery);
}

static void
write_checkpoint (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_error error = {""};
    if (optimizer->run.checkpoint_version == optimizer->core.version)
        return;
    uint64_t segments = 0;
    for (size_t i = 0; i < self->disk->count; i++)
        segments += self->disk->files[i].here ? 1 : 0;
    gq_status status = gq_run_checkpoint (&optimizer->run, &optimizer->core, NULL, &error);
    SIM_REQUIRE (self, status == GQ_OK, "checkpoint: %s", error.text);
    for (size_t i = 0; i < self->disk->count; i++)
        segments -= self->disk->files[i].here ? 1 : 0;
    self->tally.segments_forgotten += segments;
    /* Whichever of the kept ones is needed: what came after it has to be there. */
    for (uint64_t lsn = optimizer->checkpoints[0].lsn + 1; lsn <= self->model.lsn; lsn++)
        SIM_REQUIRE (self, self->weak || sim_model_has (self, lsn),
                     "the checkpoint of lsn %llu is kept, and record %llu is not",
                     (ull)optimizer->checkpoints[0].lsn, (ull)lsn);
}

static void
start (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    /* As gq_identity_open. */
    if (optimizer->reserved_epoch == 0)
        optimizer->reserved_epoch = 1;
    optimizer->term++;
    optimizer->next_epoch = optimizer->reserved_epoch;
    optimizer->reserved_epoch += EPOCH_BLOCK;
    optimizer->run = (gq_run){.checkpoint_version = UINT64_MAX,
                              .disk = &self->disk->base,
                              .fsync = self->fsync,
                              .fsync_interval_ns = INTERVAL_NS,
                              .keep_journal = self->keep_journal,
                              .kept = KEPT};
    optimizer->weights_ns = 0;
    load_life (self);
    gq_core_init (&optimizer->core, &optimizer->run.life.config, optimizer->run.rule);
    memcpy (optimizer->core.run, self->run, GQ_RUN_ID_BYTES);
    recover (self);
    begin_life (self);
    sim_model_scan (self);
    sim_model_compare (self);
    write_checkpoint (self);
    optimizer->up = true;
}

void
sim_optimizer_start (sim *self)
{
    assert (!self->optimizer.up);
    draw_death (self, SIM_DIES_BEFORE_CHECKPOINT, SIM_DIES_RECOVERING);
    gq_core_init (&self->optimizer.core, &(gq_core_config){.aggregate = 1}, NULL);
    if (!survives (self, start))
        sim_optimizer_die (self);
    else
        self->disk->fail_at_call = 0;
    self->optimizer.death = SIM_LIVES;
}

/* ---- working ---- */

/* As hello of optimizer/hello.c: journaled before it is granted. */
static void
serve_hello (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    sim_letter letter;
    sim_hello hello;
    uint32_t epoch, actor;
    if (!sim_arrived (self, SIM_HELLO, 0, &letter))
        return;
    memcpy (&hello, letter.bytes, sizeof hello);
    actor = hello.actor;
    gq_status status = gq_ledger_find (&optimizer->core.ledger, &actor, hello.nonce, &epoch);
    SIM_REQUIRE (self, status == GQ_OK && actor == hello.actor, "actor %u is not found", actor);
    if (epoch == 0) {
        epoch = optimizer->next_epoch;
        status = gq_core_grant (&optimizer->core, actor, epoch, hello.nonce);
        optimizer->next_epoch += status == GQ_OK ? 1 : 0;
    }
    if (optimizer->run.journal.failed || gq_run_sync (&optimizer->run, self->now_ns) != GQ_OK)
        die (self);
    if (status != GQ_OK)
        return; /* "the optimizer cannot write its journal now": the actor asks again */
    hello.epoch = epoch;
    sim_send (self, SIM_PROCESS, letter.process, &hello, sizeof hello);
}

static bool
take_one (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    gq_frame frame;
    gq_status reason;
    if (!optimizer->holding)
        optimizer->holding = sim_arrived (self, SIM_OPTIMIZER, 0, &optimizer->hand);
    if (!optimizer->holding)
        return false;
    sim_optimizer_dies_here (self, SIM_DIES_AFTER_RECEIVE);
    gq_outcome outcome = gq_core_take (&optimizer->core, optimizer->hand.bytes,
                                       optimizer->hand.size, &frame, &reason);
    if (outcome == GQ_OUTCOME_BLOCKED && reason != GQ_FULL)
        die (self);
    self->tally.blocked += outcome == GQ_OUTCOME_BLOCKED ? 1 : 0;
    optimizer->holding = outcome == GQ_OUTCOME_BLOCKED;
    return !optimizer->holding;
}

static void
tell (sim *self, uint32_t process, gq_frame *frame, const void *payload)
{
    uint8_t bytes[SIM_LETTER_BYTES];
    sim_optimizer *optimizer = &self->optimizer;
    if (optimizer->death == SIM_DIES_IN_PUBLISH && optimizer->death_after-- == 0)
        die (self);
    frame->term = optimizer->core.term;
    frame->version = optimizer->core.version;
    frame->digest = self->digest;
    frame->applied = optimizer->core.applied;
    memcpy (frame->run, self->run, GQ_RUN_ID_BYTES);
    memcpy (bytes + GQ_FRAME_HEADER_BYTES, payload, frame->payload_bytes);
    gq_frame_encode (frame, payload, bytes);
    sim_send (self, SIM_PROCESS, process, bytes,
              GQ_FRAME_HEADER_BYTES + (size_t)frame->payload_bytes);
}

static void
publish_weights (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    const gq_core *core = &optimizer->core;
    if (optimizer->weights_ns != 0 && (core->version == optimizer->weights_version
                                           ? self->now_ns < optimizer->weights_ns + REPEAT_NS
                                           : sim_chance (self, 3)))
        return; /* the newest gets out in the end; the ones before it need not */
    SIM_REQUIRE (self,
                 core->term >= optimizer->seen_term && core->version >= optimizer->seen_version,
                 "version %llu of term %u is published after %llu of %u", (ull)core->version,
                 core->term, (ull)optimizer->seen_version, optimizer->seen_term);
    optimizer->seen_term = core->term;
    optimizer->seen_version = core->version;
    optimizer->weights_ns = self->now_ns;
    optimizer->weights_version = core->version;
    gq_frame frame = {.kind = GQ_KIND_WEIGHTS,
                      .encoding = GQ_ENCODING_F32,
                      .count = self->count,
                      .payload_bytes = self->count * sizeof (float)};
    for (uint32_t i = 0; i < SIM_PROCESSES; i++)
        if (self->processes[i].running)
            tell (self, i, &frame, gq_buffers_current (core->buffers));
}

static void
publish_ack (sim *self, uint32_t actor, gq_ledger_entry *entry)
{
    uint8_t payload[GQ_ACK_BYTES];
    gq_frame frame = {.kind = GQ_KIND_ACK,
                      .encoding = GQ_ENCODING_RAW,
                      .actor = actor,
                      .epoch = entry->epoch,
                      .payload_bytes = GQ_ACK_BYTES};
    gq_ack ack = gq_ledger_ack (&self->optimizer.core.ledger, actor);
    sim_model_acknowledged (self, actor, entry->epoch, &ack);
    gq_ack_encode (&ack, payload);
    for (uint32_t i = 0; i < SIM_PROCESSES; i++)
        if (self->processes[i].running && self->processes[i].self.actor == actor)
            tell (self, i, &frame, payload);
    entry->owed = false;
    entry->repeat_ns = self->now_ns + REPEAT_NS;
}

/* As publish of optimizer/server.c: what is told is journaled, and synced if --fsync says so. */
static void
publish (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    if (gq_run_sync (&optimizer->run, self->now_ns) != GQ_OK)
        die (self);
    sim_model_scan (self);
    sim_optimizer_dies_here (self, SIM_DIES_BEFORE_PUBLISH);
    publish_weights (self);
    for (uint32_t i = 0; i < optimizer->core.ledger.actor_count; i++) {
        gq_ledger_entry *entry = &optimizer->core.ledger.actors[i];
        if (entry->known && (entry->owed || self->now_ns >= entry->repeat_ns))
            publish_ack (self, i, entry);
    }
}

/* One turn of the server's loop. */
static void
turn (sim *self)
{
    serve_hello (self);
    for (uint64_t i = sim_below (self, 4); i > 0 && take_one (self); i--)
        continue;
    publish (self);
    bool asked = sim_chance (self, 40); /* SIGUSR1 */
    if (asked)
        self->optimizer.run.checkpoint_version = UINT64_MAX;
    if (asked || sim_chance (self, 10) || self->optimizer.death == SIM_DIES_BEFORE_CHECKPOINT ||
        self->optimizer.death == SIM_DIES_AFTER_CHECKPOINT)
        write_checkpoint (self);
}

void
sim_optimizer_turn (sim *self)
{
    sim_optimizer *optimizer = &self->optimizer;
    assert (optimizer->up);
    draw_death (self, SIM_DIES_AFTER_RECEIVE, SIM_DIES_AFTER_CHECKPOINT);
    uint64_t duplicates = optimizer->core.ledger.duplicates;
    uint64_t outdated = optimizer->core.ledger.outdated;
    bool survived = survives (self, turn);
    self->tally.duplicates += optimizer->core.ledger.duplicates - duplicates;
    self->tally.outdated += optimizer->core.ledger.outdated - outdated;
    if (!survived) {
        sim_optimizer_die (self);
        return;
    }
    self->disk->fail_at_call = 0;
    optimizer->death = SIM_LIVES;
    sim_model_scan (self);
    sim_model_compare (self);
}
