/*
 * Publisher.  Weights leave before the acknowledgements that name their version.  Readers get the
 * newest version, so a version that could not be lent or sent is simply left out.
 */
#include "publish.h"

#include <string.h>
#include <zmq.h>

#include "frame.h"
#include "socket.h"

#define SUBSCRIPTIONS_MAX 64 /* read at once */
#define REPEAT_NS         1000000000u
#define RETRY_NS          2000000u
/* Subscribers lose messages at high-water marks.  In a flow the next one heals that; the last one
 * before a pause is repeated after these pauses. */
#define ACK_REPEAT_NS              10000000u
#define ACK_REPEAT_FACTOR          10
#define WEIGHTS_REPEAT_NS          5000000u
#define WEIGHTS_REPEAT_NS_PER_BYTE 5u /* repeating costs a large model bandwidth */

void
gq_publish_subscriptions (gq_publisher *self)
{
    if (gq_interest_take (&self->interest, self->socket, SUBSCRIPTIONS_MAX))
        self->weights_ns = 0;
}

static gq_frame
weights_frame (const gq_core *core)
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
    return frame;
}

/* Does the broker read large versions from the board? */
static bool
broker_reads (const gq_publisher *self, const gq_core *core)
{
    const gq_hop *hop = core->lanes == NULL || self->last ? NULL : gq_lanes_hop (core->lanes);
    return hop != NULL && core->layout.element_count * sizeof (float) >= GQ_HOP_PAYLOAD_MIN &&
           gq_hop_attached (hop);
}

/* The current version, to a broker that reads it from the board.  false: readers hold all blocks,
 * so that it is not shown; or there is no room for the message. */
static bool
send_ticket (const gq_publisher *self, const gq_core *core, const gq_frame *frame)
{
    static const gq_hop_ticket none = {.number = 0};
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    uint64_t shown;
    if (!gq_board_peek (gq_lanes_board (core->lanes), &shown) || shown != frame->version)
        return false;
    gq_frame_encode_summed (frame, 0, message);
    gq_hop_write (&none, message);
    return gq_socket_send (self->socket, message, sizeof message) == GQ_OK;
}

static bool
send_whole (const gq_publisher *self, gq_core *core, const gq_frame *frame)
{
    zmq_msg_t message;
    if (gq_buffers_lend (core->buffers, frame, &message) != GQ_OK)
        return false;
    if (zmq_msg_send (&message, self->socket, ZMQ_DONTWAIT) >= 0)
        return true;
    zmq_msg_close (&message);
    return false;
}

static bool
publish_weights (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    const gq_frame frame = weights_frame (core);
    self->attempt_ns = now_ns;
    if (!(broker_reads (self, core) && send_ticket (self, core, &frame)) &&
        !send_whole (self, core, &frame))
        return false;
    self->repeats = core->version == self->version && self->weights_ns != 0 ? self->repeats + 1 : 0;
    uint64_t soon_ns = WEIGHTS_REPEAT_NS + WEIGHTS_REPEAT_NS_PER_BYTE * frame.payload_bytes;
    self->repeat_ns = now_ns + (self->repeats == 0 && soon_ns < REPEAT_NS ? soon_ns : REPEAT_NS);
    self->weights_ns = now_ns;
    self->version = core->version;
    self->published++;
    gq_histogram_add (&self->publish_us, (gq_now_ns () - now_ns) / 1000);
    return true;
}

/* Show the current version to readers of this host. */
static void
show (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    uint64_t shown;
    gq_board *board = gq_lanes_board (core->lanes);
    if (!core->has_weights || (gq_board_peek (board, &shown) && shown == core->version))
        return;
    const gq_frame frame = weights_frame (core);
    if (!gq_buffers_show (core->buffers, &frame)) {
        self->show_ns = now_ns + RETRY_NS;
    } else if (self->show_ns != 0) {
        self->show_ns = 0;
        gq_lanes_ring_all (core->lanes); /* its acknowledgement may have come before */
    }
}

/* `soon`: new, and an actor that reads it in shared memory has it without a message. */
static void
publish_ack (gq_publisher *self, const gq_core *core, uint32_t actor, bool soon)
{
    const gq_ledger_entry *entry = &core->ledger.actors[actor];
    uint8_t bytes[GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES];
    gq_ack ack = gq_ledger_ack (&core->ledger, actor);
    if (core->lanes != NULL &&
        gq_lanes_ack (core->lanes, actor, entry->epoch, &ack, core->version) && soon)
        return;
    gq_ack_encode (&ack, bytes + GQ_FRAME_HEADER_BYTES);
    gq_frame frame = {.kind = GQ_KIND_ACK,
                      .encoding = GQ_ENCODING_RAW,
                      .actor = actor,
                      .epoch = entry->epoch,
                      .term = core->term,
                      .digest = core->layout.digest,
                      .sequence = ack.cumulative,
                      .version = core->version,
                      .sent_ns = gq_wall_ns (),
                      .applied = core->applied,
                      .payload_bytes = GQ_ACK_BYTES};
    memcpy (frame.run, core->run, GQ_RUN_ID_BYTES);
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    (void)!gq_socket_send (self->socket, bytes, sizeof bytes); /* repeated soon */
}

/* When weights are to go out next; UINT64_MAX: there are none, or nobody wants them. */
static uint64_t
weights_next_ns (const gq_publisher *self, const gq_core *core)
{
    if (!core->has_weights || !gq_interest_any (&self->interest))
        return UINT64_MAX;
    if (self->weights_ns == 0)
        return 0;
    return core->version != self->version ? self->weights_ns + self->interval_ns : self->repeat_ns;
}

/* Acknowledgements that are new, or due for repetition. */
static void
publish_acks (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    self->acks_ns = UINT64_MAX;
    for (uint32_t i = 0; i < core->ledger.actor_count; i++) {
        gq_ledger_entry *entry = &core->ledger.actors[i];
        if (!entry->known)
            continue;
        if (entry->owed || now_ns >= entry->repeat_ns) {
            publish_ack (self, core, i, entry->owed);
            entry->repeats = entry->owed ? 0 : entry->repeats + 1;
            entry->owed = false;
            uint64_t pause_ns = ACK_REPEAT_NS;
            for (uint32_t k = 0; k < entry->repeats && pause_ns < REPEAT_NS; k++)
                pause_ns *= ACK_REPEAT_FACTOR;
            entry->repeat_ns = now_ns + pause_ns;
        }
        if (entry->repeat_ns < self->acks_ns)
            self->acks_ns = entry->repeat_ns;
    }
}

void
gq_publish_due (gq_publisher *self, gq_core *core, uint64_t now_ns)
{
    if (core->lanes != NULL)
        show (self, core, now_ns);
    if (now_ns >= weights_next_ns (self, core))
        publish_weights (self, core, now_ns);
    publish_acks (self, core, now_ns);
}

uint64_t
gq_publish_next_ns (const gq_publisher *self, const gq_core *core)
{
    uint64_t weights_ns = weights_next_ns (self, core);
    /* A version that could not be lent is tried again soon, not in a busy loop. */
    if (weights_ns < self->attempt_ns + RETRY_NS)
        weights_ns = self->attempt_ns + RETRY_NS;
    if (self->show_ns != 0 && self->show_ns < weights_ns)
        weights_ns = self->show_ns;
    return weights_ns < self->acks_ns ? weights_ns : self->acks_ns;
}
