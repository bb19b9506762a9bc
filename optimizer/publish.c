/*
 * Publisher.  Weights leave before the acknowledgements that name their version.  Readers get the
 * newest version, so a version that could not be lent or sent is simply left out.
 */
#include "publish.h"

#include <string.h>
#include <zmq.h>

#include "frame.h"
#include "socket.h"

#define REPEAT_NS 1000000000u
#define RETRY_NS 2000000u

static bool
publish_weights (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    gq_frame frame = {.kind = GQ_KIND_WEIGHTS,
                      .encoding = GQ_ENCODING_F32,
                      .term = core->term,
                      .digest = core->layout.digest,
                      .version = core->version,
                      .count = core->layout.element_count,
                      .samples = 0,
                      .sent_ns = gq_wall_ns (),
                      .applied = core->applied,
                      .payload_bytes = core->layout.element_count * sizeof (float)};
    memcpy (frame.run, core->run, GQ_RUN_ID_BYTES);
    zmq_msg_t message;
    self->attempt_ns = now_ns;
    if (gq_buffers_lend (core->buffers, &frame, &message) != GQ_OK)
        return false;
    if (zmq_msg_send (&message, self->socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close (&message);
        return false;
    }
    self->weights_ns = now_ns;
    self->version = core->version;
    self->published++;
    gq_histogram_add (&self->publish_us, (gq_now_ns () - now_ns) / 1000);
    return true;
}

static void
publish_ack (gq_publisher *self, const gq_core *core, uint32_t actor)
{
    const gq_ledger_entry *entry = &core->ledger.actors[actor];
    uint8_t bytes[GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES];
    gq_ack ack = gq_ledger_ack (&core->ledger, actor);
    gq_ack_encode (&ack, bytes + GQ_FRAME_HEADER_BYTES);
    gq_frame frame = {.kind = GQ_KIND_ACK,
                      .encoding = GQ_ENCODING_RAW,
                      .actor = actor,
                      .epoch = entry->epoch,
                      .term = core->term,
                      .digest = core->layout.digest,
                      .sequence = entry->settled,
                      .version = core->version,
                      .sent_ns = gq_wall_ns (),
                      .applied = core->applied,
                      .payload_bytes = GQ_ACK_BYTES};
    memcpy (frame.run, core->run, GQ_RUN_ID_BYTES);
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    (void) !gq_socket_send (self->socket, bytes, sizeof bytes); /* repeated within a second */
}

static bool
weights_due (const gq_publisher *self, const gq_core *core, uint64_t now_ns)
{
    if (!core->has_weights)
        return false;
    uint64_t age_ns = now_ns - self->weights_ns;
    bool changed = self->weights_ns == 0 || core->version != self->version;
    return changed ? self->weights_ns == 0 || age_ns >= self->interval_ns : age_ns >= REPEAT_NS;
}

void
gq_publish_due (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    if (weights_due (self, core, now_ns))
        publish_weights (self, core, now_ns);
    bool all = now_ns - self->repeated_ns >= REPEAT_NS;
    for (uint32_t i = 0; i < core->ledger.actor_count; i++) {
        gq_ledger_entry *entry = &core->ledger.actors[i];
        if (entry->known && (entry->owed || all)) {
            publish_ack (self, core, i);
            entry->owed = false;
        }
    }
    if (all)
        self->repeated_ns = now_ns;
}

uint64_t
gq_publish_next_ns (const gq_publisher *self, const gq_core *core)
{
    uint64_t acks_ns = self->repeated_ns + REPEAT_NS;
    if (!core->has_weights)
        return acks_ns;
    uint64_t wait_ns = core->version != self->version ? self->interval_ns : REPEAT_NS;
    uint64_t weights_ns = self->weights_ns + wait_ns;
    /* A version that could not be lent is tried again soon, not in a busy loop. */
    if (weights_ns < self->attempt_ns + RETRY_NS)
        weights_ns = self->attempt_ns + RETRY_NS;
    return weights_ns < acks_ns ? weights_ns : acks_ns;
}
