/*
 * Recovery.
 */
#include "recover.h"

#include <stdlib.h>
#include <string.h>

#include "crash.h"

typedef struct replayer {
    gq_recovery *recovery;
    gq_core *core;
} replayer;

/* text[size], which no NUL ends, as a string. */
static char *
copy_text (const char *text, size_t size)
{
    char *copy = malloc (size + 1);
    if (copy != NULL) {
        memcpy (copy, text, size);
        copy[size] = '\0';
    }
    return copy;
}

/* The life that `text` describes takes over: load its rule. */
static gq_status
load_life (gq_recovery *self, const char *text, size_t size, gq_rule **rule, gq_error *error)
{
    gq_life life;
    json_t *json = text == NULL ? NULL : json_loadb (text, size, 0, NULL);
    gq_status status = gq_life_from_json (&life, json);
    json_decref (json);
    if (status != GQ_OK)
        return gq_fail (error, status, "the settings of a term are not readable");
    status = gq_life_load (&life, rule, self->plugins, self->cpu, NULL, error);
    char *copy = status == GQ_OK ? copy_text (text, size) : NULL;
    if (status == GQ_OK && copy == NULL) {
        gq_rule_free (rule);
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    }
    if (status != GQ_OK) {
        gq_life_clear (&life);
        return status;
    }
    gq_life_clear (&self->life);
    free (self->life_text);
    self->life = life;
    self->life_text = copy;
    return GQ_OK;
}

/* A checkpoint was found: start the core with the rule that wrote it. */
static gq_status
prepare (void *context, gq_core *core, const char *life, gq_error *error)
{
    gq_recovery *self = context;
    uint8_t run[GQ_RUN_ID_BYTES];
    gq_status status = load_life (self, life, life == NULL ? 0 : strlen (life), &self->rule, error);
    if (status != GQ_OK)
        return status;
    memcpy (run, core->run, sizeof run);
    gq_core_init (core, &self->life.config, self->rule);
    memcpy (core->run, run, sizeof run);
    core->term = self->life.term;
    core->life = self->life_text;
    return GQ_OK;
}

/* Another life began here: its rule and settings take over. */
static gq_status
replay_term (replayer *self, const gq_record *record, gq_error *error)
{
    gq_recovery *recovery = self->recovery;
    gq_rule *rule = NULL;
    gq_status status =
        load_life (recovery, (const char *)record->payload, record->payload_bytes, &rule, error);
    if (status != GQ_OK)
        return status;
    if (recovery->life.version != self->core->version)
        status = gq_fail (error, GQ_MALFORMED,
                          "journal: term %u begins at version %llu, but the records before it lead "
                          "to %llu; a life with --journal off cannot be replayed",
                          recovery->life.term, (unsigned long long)recovery->life.version,
                          (unsigned long long)self->core->version);
    else
        status = gq_core_check_layout (rule, &self->core->layout, error);
    if (status == GQ_OK && gq_core_switch (self->core, &recovery->life.config, rule) != GQ_OK)
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    if (status != GQ_OK) {
        gq_rule_free (&rule);
        return status;
    }
    gq_rule_free (&recovery->rule);
    recovery->rule = rule;
    self->core->term = recovery->life.term;
    self->core->life = recovery->life_text;
    return GQ_OK;
}

static gq_status
replay (void *context, const gq_record *record, gq_error *error)
{
    replayer *self = context;
    if (record->lsn > self->recovery->lsn_max ||
        (self->core->has_weights && self->core->version >= self->recovery->version_max))
        return GQ_CLOSED;
    gq_status status = record->kind == GQ_RECORD_TERM ? replay_term (self, record, error)
                                                      : gq_core_replay (self->core, record, error);
    gq_crash_point ("recovering");
    if (status == GQ_OK)
        self->recovery->replayed++;
    return status;
}

gq_status
gq_recover (gq_recovery *self, gq_core *core, gq_error *error)
{
    gq_checkpoint_place place = {0};
    replayer context = {.recovery = self, .core = core};
    uint64_t from =
        self->checkpoint_max < self->version_max ? self->checkpoint_max : self->version_max;
    self->checkpoint_version = UINT64_MAX;
    gq_status status =
        gq_checkpoint_load (core, self->checkpoints, from, prepare, self, &place, error);
    if (status == GQ_OK)
        self->checkpoint_version = core->version;
    else if (status != GQ_NOTFOUND || gq_checkpoint_any (self->checkpoints))
        return status;
    self->checkpoint_lsn = place.lsn;
    status = gq_journal_read (self->disk, core->run, place.lsn, place.chain, replay, &context,
                              &self->end, error);
    return status == GQ_CLOSED ? GQ_OK : status;
}

void
gq_recovery_clear (gq_recovery *self)
{
    gq_rule_free (&self->rule);
    gq_life_clear (&self->life);
    free (self->life_text);
    self->life_text = NULL;
}
