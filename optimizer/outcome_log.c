/*
 * What became of frames, in the log.
 */
#include "outcome_log.h"

#include "log.h"

#define S_NS 1000000000u

/* A run whose every gradient is refused would fill the disk with the news: once a second is
 * enough, with the number of those between. */
static void
log_refusal (gq_outcome_log *self, const gq_core *core, const gq_frame *frame, gq_status reason,
             uint64_t now_ns)
{
    if (self->refused_ns != 0 && now_ns - self->refused_ns < S_NS) {
        self->unlogged++;
        return;
    }
    gq_log (GQ_LOG_WARNING, "refused", "actor", "u", (uint64_t)frame->actor, "epoch", "u",
            (uint64_t)frame->epoch, "sequence", "u", frame->sequence, "from_version", "u",
            frame->version, "version", "u", core->version, "reason", "s", gq_status_name (reason),
            "message", "s", gq_status_text (reason), "others_since", "u", self->unlogged, NULL);
    self->refused_ns = now_ns;
    self->unlogged = 0;
}

/* Their actor offers them again until it gives up, and the run cannot begin: once is enough.  What
 * is meant for another run is none of our business. */
static void
log_refused_start (gq_outcome_log *self, const gq_frame *frame, gq_status reason, uint64_t now_ns)
{
    if (reason == GQ_RUN || (self->start_actor == frame->actor && self->start_reason == reason) ||
        (self->start_refused_ns != 0 && now_ns - self->start_refused_ns < S_NS))
        return;
    self->start_actor = frame->actor;
    self->start_reason = reason;
    self->start_refused_ns = now_ns;
    gq_log (GQ_LOG_WARNING, "first weights refused; the run waits for others", "actor", "u",
            (uint64_t)frame->actor, "reason", "s", gq_status_name (reason), "message", "s",
            gq_status_text (reason), NULL);
}

void
gq_outcome_log_add (gq_outcome_log *self, const gq_core *core, gq_outcome outcome,
                    const gq_frame *frame, gq_status reason, uint64_t now_ns)
{
    static const char *const names[] = {[GQ_OUTCOME_STEPPED] = "applied",
                                        [GQ_OUTCOME_HELD] = "held",
                                        [GQ_OUTCOME_IGNORED] = "ignored",
                                        [GQ_OUTCOME_STARTED] = "started",
                                        [GQ_OUTCOME_BLOCKED] = "blocked"};
    if (outcome == GQ_OUTCOME_REFUSED)
        log_refusal (self, core, frame, reason, now_ns);
    else if (outcome == GQ_OUTCOME_IGNORED && frame->kind == GQ_KIND_INIT && !core->has_weights)
        log_refused_start (self, frame, reason, now_ns);
    else if (gq_log_on (GQ_LOG_DEBUG))
        gq_log (GQ_LOG_DEBUG, names[outcome], "actor", "u", (uint64_t)frame->actor, "epoch", "u",
                (uint64_t)frame->epoch, "sequence", "u", frame->sequence, "from_version", "u",
                frame->version, "version", "u", core->version, "reason", "s",
                gq_status_name (reason), NULL);
}
