/*
 * Recovery.
 */
#include "recover.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crash.h"
#include "frame.h"
#include "lane_file.h"
#include "log.h"

typedef struct replayer {
    gq_recovery *recovery;
    gq_core *core;
    gq_live *live; /* of the last life; NULL: none */
    gq_board *board;
    gq_live_mark mark; /* of it */
    bool awaited; /* it is ahead of the checkpoint: to be taken when the records are there, too */
    bool installed;
    bool unfit;           /* it is why reading ended */
    gq_shm lane;          /* of the actor whose gradient was replayed last; */
    atomic_ullong *holds; /* what its slot held must still be there after that; NULL: no slot */
    uint64_t number;
    const uint8_t *frame;  /* or the frame, of lane inline */
    gq_hop *hop;           /* to the broker of the last life; NULL: none */
    float *zeros;          /* f32[count], for a gradient of which nothing is left; or NULL */
    gq_journal_end unmade; /* before the record that recovery->unmade is about */
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
    /* What retired would have to come from vectors that were passed over. */
    if (status == GQ_OK && self->core->numbers_only && self->awaited &&
        !gq_rule_state_same (gq_rule_state_of (rule), gq_rule_state_of (self->core->rule))) {
        self->unfit = true;
        status = gq_fail (error, GQ_CHECKSUM,
                          "another rule took over between the last checkpoint and it");
    }
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

/* In its actor's slot: nobody writes there before it is settled, and it is settled only after its
 * step.  Mapped until the next call. */
static const float *
find_in_slot (replayer *self, const gq_frame *frame)
{
    char path[PATH_MAX];
    if (!gq_lane_file_path (path, self->recovery->lane_directory, frame->actor, frame->epoch))
        return NULL;
    gq_lane_identity identity = {
        .actor = frame->actor, .epoch = frame->epoch, .count = self->core->layout.element_count};
    memcpy (identity.run, self->core->run, GQ_RUN_ID_BYTES);
    if (gq_lane_file_open (&self->lane, path, &identity, NULL) != GQ_OK ||
        frame->slot >= identity.slot_count)
        return NULL;
    self->holds = &gq_lane_file_words (&self->lane)->holds[frame->slot];
    self->number = frame->sequence;
    return gq_lane_file_slot (&self->lane, identity.count, frame->slot);
}

/* Is it the frame with this very header, and whole? */
static bool
is_frame (const replayer *self, const uint8_t *bytes, const uint8_t *header, const gq_frame *frame)
{
    return bytes != NULL && frame->count == self->core->layout.element_count &&
           memcmp (bytes, header, GQ_FRAME_HEADER_BYTES) == 0 &&
           gq_frame_check_payload (bytes, GQ_FRAME_HEADER_BYTES + (size_t)frame->payload_bytes) ==
               GQ_OK;
}

/* The way to the broker that the last life had. */
static void
look_for_hop (replayer *self)
{
    const gq_layout *layout = &self->core->layout;
    gq_hop_identity identity = {.digest = layout->digest, .count = layout->element_count};
    char path[PATH_MAX];
    memcpy (identity.run, self->core->run, GQ_RUN_ID_BYTES);
    if (self->hop == NULL &&
        snprintf (path, sizeof path, "%s/" GQ_HOP_NAME, self->recovery->lane_directory) < PATH_MAX)
        (void)!gq_hop_look (&self->hop, path, &identity, NULL);
}

/* The frame of the last step that was begun: in the live state, or where the broker put it. */
static bool
find_frame (replayer *self, const uint8_t *header, const gq_frame *frame, gq_record *found)
{
    const uint8_t *bytes = self->live == NULL ? NULL : gq_live_hand (self->live);
    bool is = is_frame (self, bytes, header, frame);
    if (!is)
        look_for_hop (self);
    for (uint32_t i = 0; !is && self->hop != NULL && i < GQ_HOP_SLOTS; i++) {
        bytes = gq_hop_taken (self->hop, i);
        is = is_frame (self, bytes, header, frame);
    }
    if (!is)
        return false;
    /* It is then all that a record of it as a whole would be. */
    found->kind = GQ_RECORD_GRADIENT;
    found->payload = self->frame = bytes;
    found->payload_bytes = GQ_FRAME_HEADER_BYTES + (size_t)frame->payload_bytes;
    return true;
}

/* Is what was found still there?  Another process may be at work. */
static bool
still_there (const replayer *self, const gq_record *record)
{
    if (self->holds != NULL)
        return atomic_load (self->holds) == self->number;
    return self->frame != NULL && memcmp (self->frame, record->payload, GQ_FRAME_HEADER_BYTES) == 0;
}

/* The gradient that a record names, into *found, which is a copy of it.  After another boot the
 * files may be of any moment.  false: it is gone. */
static bool
find_gradient (replayer *self, const gq_record *record, gq_record *found)
{
    gq_frame frame;
    uint64_t boot;
    gq_shm_close (&self->lane);
    self->holds = NULL;
    self->frame = NULL;
    if (self->recovery->lane_directory == NULL ||
        record->payload_bytes != GQ_FRAME_HEADER_BYTES + sizeof boot ||
        gq_frame_decode_header (record->payload, &frame) != GQ_OK)
        return false;
    memcpy (&boot, record->payload + GQ_FRAME_HEADER_BYTES, sizeof boot);
    const uint64_t now = gq_live_boot ();
    /* A host that does not say which boot this is has not said that it is another one. */
    self->recovery->restarted = now != 0 && boot != now;
    if (boot != now || boot == 0)
        return false;
    if (frame.lane == GQ_LANE_INLINE)
        return find_frame (self, record->payload, &frame, found);
    const float *slot = find_in_slot (self, &frame);
    if (slot == NULL || !still_there (self, record))
        return false;
    found->vector = slot;
    return true;
}

/* Behind the live state stands one gradient at most, which nobody was told of.  Its actor may have
 * cut its file short, and killed us by that: then it is as if it had not come, or, where its step
 * was begun and cannot be undone, as if the rest of it were 0.  *vector: what to go on with; NULL:
 * nothing. */
static gq_status
do_without (replayer *self, const float **vector, gq_error *error)
{
    if (!self->installed || !self->recovery->alone)
        return GQ_OK;
    if (self->core->pending == 0) {
        self->recovery->unmade = true;
        self->unmade = self->recovery->end;
        return GQ_OK;
    }
    if (self->zeros == NULL)
        self->zeros = calloc (self->core->layout.element_count, sizeof *self->zeros);
    if (self->zeros == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_log (GQ_LOG_WARNING, "a gradient is gone whose step was begun; the rest of it counts as 0",
            NULL);
    *vector = self->zeros;
    return GQ_OK;
}

static gq_status
replay_named (replayer *self, const gq_record *record, gq_error *error)
{
    gq_record found = *record;
    gq_status status = GQ_OK;
    const bool needed = !self->core->numbers_only;
    const bool there = needed && find_gradient (self, record, &found);
    if (needed && !there)
        status = do_without (self, &found.vector, error);
    if (status != GQ_OK || self->recovery->unmade)
        return status;
    status = gq_core_replay (self->core, &found, error);
    self->recovery->lost = status == GQ_NOTFOUND;
    if (status == GQ_OK && there && !still_there (self, record))
        return gq_fail (error, GQ_AGAIN,
                        "an actor or an optimizer is at work in this run: a gradient in shared "
                        "memory changed while it was read; stop them first");
    if (status == GQ_OK)
        self->recovery->named++;
    return status;
}

/* What follows a gradient that nobody was told of: the beginnings of lives that came no further. */
static gq_status
pass_over (const gq_record *record, gq_error *error)
{
    return record->kind == GQ_RECORD_TERM
               ? GQ_OK
               : gq_fail (error, GQ_MALFORMED,
                          "journal: record %llu (%s, offset %llu) follows one whose gradient is "
                          "gone; gradq-replay --cut goes back to before that",
                          (unsigned long long)record->lsn, record->segment,
                          (unsigned long long)record->offset);
}

static gq_status
replay_record (replayer *self, const gq_record *record, gq_error *error)
{
    if (self->recovery->unmade)
        return pass_over (record, error);
    if (record->kind == GQ_RECORD_TERM)
        return replay_term (self, record, error);
    if (record->kind == GQ_RECORD_NAMED)
        return replay_named (self, record, error);
    return gq_core_replay (self->core, record, error);
}

/* At the record that the live state includes last: from here on vectors count. */
static gq_status
install (replayer *self, uint32_t chain, gq_error *error)
{
    gq_live_mark mark = self->mark;
    gq_status status = chain == mark.chain
                           ? gq_core_install (self->core, self->live, self->board, error)
                           : gq_fail (error, GQ_CHECKSUM, "it belongs to another journal");
    self->unfit = status != GQ_OK;
    if (status == GQ_AGAIN)
        gq_fail (error, status, "an optimizer is at work in this run: stop it first");
    if (status == GQ_OK) {
        self->recovery->live_lsn = mark.lsn;
        self->recovery->live_version = mark.version;
        self->installed = true;
    }
    return status;
}

static gq_status
replay (void *context, const gq_record *record, gq_error *error)
{
    replayer *self = context;
    const bool waiting = self->awaited && !self->installed;
    if (!waiting &&
        (record->lsn > self->recovery->lsn_max ||
         (self->core->has_weights && self->core->version >= self->recovery->version_max)))
        return GQ_CLOSED;
    gq_status status = replay_record (self, record, error);
    gq_crash_point ("recovering");
    if (status == GQ_OK)
        self->recovery->replayed++;
    if (status == GQ_OK && waiting && record->lsn == self->mark.lsn)
        status = install (self, record->crc, error);
    return status;
}

/* The live state of the last life, if there is one.  It is awaited if the checkpoint does not have
 * it already and it does not lead too far; what it has in hand may be named either way. */
static void
look_for_live (replayer *self, const gq_checkpoint_place *place)
{
    const gq_recovery *recovery = self->recovery;
    const gq_core *core = self->core;
    char path[PATH_MAX];
    gq_error error = {""};
    gq_live_step step;
    if (recovery->lane_directory == NULL ||
        snprintf (path, sizeof path, "%s/board", recovery->lane_directory) >= PATH_MAX)
        return;
    gq_status status = gq_live_open (&self->live, &self->board, path, core->run,
                                     core->layout.digest, core->layout.element_count, &error);
    if (status != GQ_OK && status != GQ_NOTFOUND)
        gq_log (GQ_LOG_WARNING, "no state is taken from shared memory", "path", "s", path,
                "message", "s", error.text, NULL);
    if (status != GQ_OK)
        return;
    self->awaited = gq_live_read (self->live, &self->mark, &step) && self->mark.lsn > place->lsn &&
                    self->mark.lsn <= recovery->lsn_max &&
                    self->mark.version <= recovery->version_max;
}

static void
forget_live (replayer *self)
{
    gq_shm_close (&self->lane);
    gq_live_free (&self->live);
    gq_board_close (&self->board);
    gq_hop_close (&self->hop);
    free (self->zeros);
}

/* Did all that was in the live state find its place?  *status is that of the reading. */
static gq_status
check_live (replayer *self, gq_status status, gq_error *error)
{
    if (self->unfit || !self->awaited || (status != GQ_OK && status != GQ_CLOSED))
        return status;
    self->unfit = !self->installed || (status == GQ_OK && self->core->pending > 0);
    if (!self->unfit)
        return status;
    return gq_fail (error, GQ_CHECKSUM, "the journal ends before the records that it includes");
}

/* Checkpoint, then records; with the live state, unless `live` is false.  *unfit: it was there, and
 * is why this failed. */
static gq_status
attempt (gq_recovery *self, gq_core *core, bool live, bool *unfit, gq_error *error)
{
    gq_checkpoint_place place = {0};
    replayer context = {.recovery = self, .core = core, .lane = {.fd = -1}};
    uint64_t from =
        self->checkpoint_max < self->version_max ? self->checkpoint_max : self->version_max;
    *unfit = false;
    self->checkpoint_version = UINT64_MAX;
    self->replayed = self->named = self->live_lsn = 0;
    self->lost = self->restarted = self->unmade = false;
    gq_status status =
        gq_checkpoint_load (core, self->checkpoints, from, prepare, self, &place, error);
    if (status == GQ_OK)
        self->checkpoint_version = core->version;
    else if (status != GQ_NOTFOUND || gq_checkpoint_any (self->checkpoints))
        return status;
    self->checkpoint_lsn = place.lsn;
    if (status == GQ_OK && live)
        look_for_live (&context, &place);
    core->numbers_only = self->numbers_only || context.awaited;
    status = gq_journal_read (self->disk, core->run, place.lsn, place.chain, replay, &context,
                              &self->end, error);
    status = check_live (&context, status, error);
    if (self->unmade)
        self->end = context.unmade;
    *unfit = context.unfit;
    forget_live (&context);
    return status == GQ_CLOSED ? GQ_OK : status;
}

gq_status
gq_recover (gq_recovery *self, gq_core *core, gq_error *error)
{
    bool unfit;
    gq_status status = attempt (self, core, true, &unfit, error);
    if (!unfit || status == GQ_AGAIN)
        return status;
    gq_log (GQ_LOG_WARNING, "no state is taken from shared memory", "message", "s", error->text,
            NULL);
    gq_recovery_begin_anew (self, core);
    return attempt (self, core, false, &unfit, error);
}

void
gq_recovery_begin_anew (gq_recovery *self, gq_core *core)
{
    uint8_t run[GQ_RUN_ID_BYTES];
    memcpy (run, core->run, sizeof run);
    gq_core_clear (core);
    gq_recovery_clear (self);
    memcpy (core->run, run, sizeof run);
}

void
gq_recovery_clear (gq_recovery *self)
{
    gq_rule_free (&self->rule);
    gq_life_clear (&self->life);
    free (self->life_text);
    self->life_text = NULL;
}
