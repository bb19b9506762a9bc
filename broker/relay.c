/*
 * Weights thread.  Relays whole frames, keeps the last one of each topic, and sends it again when
 * somebody subscribes.  Asks the optimizer for weights while somebody wants them, and no longer.
 *
 * Weights and acknowledgements leave through sockets of their own: a slow reader of large weights
 * must keep few of them waiting, while a burst of small acknowledgements must not be cut.  Nothing
 * here ever waits for a subscriber.
 */
#include "relay.h"

#include "bind.h"
#include "frame.h"
#include "interest.h"
#include "socket.h"
#include "stats.h"

#define BATCH_MAX 64
#define IDLE_MS   1000
/* Many actors joining at once get one repetition together. */
#define REPEAT_MS_MIN 50
#define MS_NS         1000000u
/* Versions that wait for a slow subscriber.  Beyond it the newest is dropped, until it is repeated;
 * each one more costs a frame of memory for every reader that has stalled. */
#define WEIGHTS_HWM 4
#define ACKS_HWM    1024
/* The optimizer's buffers bound its weights; this bounds its acknowledgements. */
#define IN_HWM 1024

typedef struct relay_thread {
    zsock_t *in;      /* XSUB, bound */
    zsock_t *weights; /* XPUB, bound */
    zsock_t *acks;    /* XPUB, bound */
    gq_relay_stats stats;
    gq_interest interest;   /* in weights; what `in` subscribes to */
    zmq_msg_t last_weights; /* empty: none, or nobody wants them */
    gq_near *near;
    gq_frame fetched; /* header of last_weights, when they were read from the board */
    uint64_t told;    /* the version that the optimizer has told of last */
    zmq_msg_t last_acks[GQ_ACTORS_MAX];
    uint8_t run[GQ_RUN_ID_BYTES]; /* of all these */
    uint64_t sent_ns;             /* when weights last went out */
    bool waited_for;              /* a late joiner waits for the last weights */
} relay_thread;

/* Begin or end the subscription to a kind of frames at the optimizer.  ZeroMQ repeats what is in
 * force to an optimizer that comes back. */
static bool
subscribe (relay_thread *self, gq_frame_kind kind, bool begin)
{
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES], bytes[1 + GQ_TOPIC_KIND_BYTES] = {begin ? 1 : 0};
    gq_topic (kind, 0, topic);
    memcpy (bytes + 1, topic, GQ_TOPIC_KIND_BYTES);
    return gq_socket_send (zsock_resolve (self->in), bytes, sizeof bytes) == GQ_OK;
}

static bool
open_relay (relay_thread *self, gq_relay_config *config)
{
    self->near = config->near;
    zmq_msg_init (&self->last_weights);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        zmq_msg_init (&self->last_acks[i]);
    /* Subscriptions are not repeated, so none may be dropped: no mark for them. */
    const gq_socket_options in = {.type = ZMQ_XSUB,
                                  .send_hwm = 0,
                                  .receive_hwm = IN_HWM,
                                  .message_bytes_max = (int64_t)config->frame_bytes_max};
    const gq_socket_options weights = {.type = ZMQ_XPUB,
                                       .send_hwm = WEIGHTS_HWM,
                                       .receive_hwm = IN_HWM,
                                       .message_bytes_max = GQ_SUBSCRIPTION_BYTES_MAX};
    gq_socket_options acks = weights;
    acks.send_hwm = ACKS_HWM;
    self->in = gq_bind (&in, config->weights_in, &config->error);
    if (self->in != NULL)
        self->weights = gq_bind (&weights, config->weights_out, &config->error);
    if (self->weights != NULL)
        self->acks = gq_bind (&acks, config->acks_out, &config->error);
    if (self->acks == NULL)
        return false;
    zsock_set_xpub_verbose (self->weights, 1);
    zsock_set_xpub_verbose (self->acks, 1);
    return subscribe (self, GQ_KIND_ACK, true);
}

static void
close_relay (relay_thread *self)
{
    zsock_destroy (&self->in);
    zsock_destroy (&self->weights);
    zsock_destroy (&self->acks);
    zmq_msg_close (&self->last_weights);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        zmq_msg_close (&self->last_acks[i]);
}

/* Send a copy (a reference) of what is kept; PUB sockets drop rather than wait. */
static void
send_kept (zsock_t *socket, zmq_msg_t *kept)
{
    zmq_msg_t copy;
    zmq_msg_init (&copy);
    if (zmq_msg_copy (&copy, kept) != 0 ||
        zmq_msg_send (&copy, zsock_resolve (socket), ZMQ_DONTWAIT) < 0)
        zmq_msg_close (&copy);
}

static void
forget_weights (relay_thread *self)
{
    zmq_msg_close (&self->last_weights);
    zmq_msg_init (&self->last_weights);
    self->fetched = (gq_frame){.kind = 0};
    self->waited_for = false;
}

/* Of a new run: what is kept of the one before must not reach its actors. */
static void
forget_other_run (relay_thread *self, const gq_frame *frame)
{
    if (memcmp (self->run, frame->run, GQ_RUN_ID_BYTES) == 0)
        return;
    memcpy (self->run, frame->run, GQ_RUN_ID_BYTES);
    forget_weights (self);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++) {
        zmq_msg_close (&self->last_acks[i]);
        zmq_msg_init (&self->last_acks[i]);
    }
}

static void
send_last_weights (relay_thread *self)
{
    send_kept (self->weights, &self->last_weights);
    self->sent_ns = gq_now_ns ();
    self->waited_for = false;
}

/* *message becomes the last weights. */
static void
relay_weights (relay_thread *self, zmq_msg_t *message)
{
    zmq_msg_move (&self->last_weights, message);
    send_last_weights (self);
    self->stats.weights++;
}

/* The version that is on the board now, which may be newer than the one we were told of. */
static void
fetch (relay_thread *self)
{
    zmq_msg_t message;
    gq_hop *hop = gq_near_hold (self->near);
    if (hop == NULL || zmq_msg_init_size (&message, gq_hop_weights_bytes (hop)) != 0) {
        gq_near_release (self->near, hop);
        return; /* it is told again, or comes whole */
    }
    if (gq_hop_weights (hop, zmq_msg_data (&message)) == GQ_OK &&
        gq_frame_decode_header (zmq_msg_data (&message), &self->fetched) == GQ_OK)
        relay_weights (self, &message);
    zmq_msg_close (&message);
    gq_near_release (self->near, hop);
}

/* The optimizer tells of a version that lies on its board. */
static void
take_ticket (relay_thread *self, const gq_frame *frame)
{
    const bool here = self->fetched.kind != 0 && self->fetched.term == frame->term &&
                      self->fetched.version >= frame->version;
    const bool again = here && self->told == frame->version;
    self->told = frame->version;
    if (again)
        send_last_weights (self);
    else if (!here) /* else it was overtaken: what is newer is on its way to the readers */
        fetch (self);
}

static void
relay (relay_thread *self, zmq_msg_t *message)
{
    gq_frame frame;
    gq_hop_ticket ticket;
    gq_status status = gq_frame_decode (zmq_msg_data (message), zmq_msg_size (message), &frame);
    const bool by_hop = status != GQ_OK && gq_hop_read (zmq_msg_data (message),
                                                        zmq_msg_size (message), &frame, &ticket);
    if ((status == GQ_OK || by_hop) && frame.kind == GQ_KIND_WEIGHTS) {
        forget_other_run (self, &frame);
        /* One that was on its way when the last subscriber left would be old to the next one. */
        if (!gq_interest_any (&self->interest))
            return;
        if (by_hop) {
            take_ticket (self, &frame);
        } else if (self->fetched.kind == 0 || self->fetched.term != frame.term ||
                   self->fetched.version <= frame.version) {
            /* Not behind what was fetched for an earlier ticket. */
            self->fetched = (gq_frame){.kind = 0};
            relay_weights (self, message);
        }
    } else if (status == GQ_OK && frame.kind == GQ_KIND_ACK) {
        forget_other_run (self, &frame);
        zmq_msg_move (&self->last_acks[frame.actor], message);
        send_kept (self->acks, &self->last_acks[frame.actor]);
        self->stats.acks++;
    } else {
        self->stats.malformed++;
    }
}

static void
take_in (relay_thread *self)
{
    void *in = zsock_resolve (self->in);
    zmq_msg_t message;
    zmq_msg_init (&message);
    for (int i = 0; i < BATCH_MAX && zmq_msg_recv (&message, in, ZMQ_DONTWAIT) >= 0; i++) {
        if (gq_socket_whole (in))
            relay (self, &message);
        else
            self->stats.malformed++;
    }
    zmq_msg_close (&message);
}

/* The next subscription to acknowledgements.  *actor: whose they are, or GQ_ACTORS_MAX. */
static bool
ack_subscription (relay_thread *self, uint32_t *actor)
{
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES], bytes[GQ_SUBSCRIPTION_BYTES_MAX];
    int size = zmq_recv (zsock_resolve (self->acks), bytes, sizeof bytes, ZMQ_DONTWAIT);
    if (size < 0)
        return false;
    *actor = GQ_ACTORS_MAX;
    if (size == 1 + GQ_TOPIC_ACTOR_BYTES && bytes[0] == 1) {
        memcpy (actor, bytes + 1 + GQ_TOPIC_KIND_BYTES, sizeof *actor);
        gq_topic (GQ_KIND_ACK, *actor, topic);
        if (*actor >= GQ_ACTORS_MAX || memcmp (topic, bytes + 1, sizeof topic) != 0)
            *actor = GQ_ACTORS_MAX;
    }
    return true;
}

static void
take_subscriptions (relay_thread *self)
{
    uint32_t actor;
    for (int i = 0; i < BATCH_MAX && ack_subscription (self, &actor); i++)
        if (actor < GQ_ACTORS_MAX && zmq_msg_size (&self->last_acks[actor]) > 0) {
            send_kept (self->acks, &self->last_acks[actor]);
            self->stats.repeated++;
        }
    const bool before = gq_interest_any (&self->interest);
    if (gq_interest_take (&self->interest, zsock_resolve (self->weights), BATCH_MAX))
        self->waited_for = zmq_msg_size (&self->last_weights) > 0;
    const bool after = gq_interest_any (&self->interest);
    if (before != after)
        subscribe (self, GQ_KIND_WEIGHTS, after);
    if (!after)
        forget_weights (self);
}

/* Repeat the last weights when somebody wants them.  Milliseconds until the next look. */
static int
repeat (relay_thread *self)
{
    if (!self->waited_for)
        return IDLE_MS;
    uint64_t age_ms = (gq_now_ns () - self->sent_ns) / MS_NS;
    if (age_ms < REPEAT_MS_MIN)
        return REPEAT_MS_MIN - (int)age_ms;
    send_last_weights (self);
    self->stats.repeated++;
    return IDLE_MS;
}

/* false: time to end. */
static bool
handle_pipe (relay_thread *self, zsock_t *pipe)
{
    char *command = zstr_recv (pipe);
    bool more = command != NULL && !streq (command, "$TERM");
    if (more && streq (command, "REPEAT"))
        self->waited_for = zmq_msg_size (&self->last_weights) > 0;
    if (more && streq (command, "STATS")) {
        zframe_t *answer = zframe_new (&self->stats, sizeof self->stats);
        zframe_send (&answer, pipe, 0);
    }
    zstr_free (&command);
    return more;
}

static void
loop (relay_thread *self, zsock_t *pipe)
{
    int wait_ms = IDLE_MS;
    for (bool more = true; more;) {
        zmq_pollitem_t items[] = {{.socket = zsock_resolve (pipe), .events = ZMQ_POLLIN},
                                  {.socket = zsock_resolve (self->in), .events = ZMQ_POLLIN},
                                  {.socket = zsock_resolve (self->weights), .events = ZMQ_POLLIN},
                                  {.socket = zsock_resolve (self->acks), .events = ZMQ_POLLIN}};
        if (zmq_poll (items, 4, wait_ms) < 0 && errno != EINTR)
            break;
        if (items[0].revents)
            more = handle_pipe (self, pipe);
        take_in (self);
        take_subscriptions (self);
        wait_ms = repeat (self);
    }
}

static void
run (zsock_t *pipe, void *arguments)
{
    gq_relay_config *config = arguments;
    relay_thread *self = calloc (1, sizeof *self);
    bool open = false;
    if (self == NULL)
        gq_fail (&config->error, GQ_MEMORY, "out of memory");
    else
        open = open_relay (self, config);
    zsock_signal (pipe, open ? 0 : 1);
    if (open)
        loop (self, pipe);
    if (self != NULL)
        close_relay (self);
    free (self);
}

zactor_t *
gq_relay_start (gq_relay_config *config)
{
    return gq_thread_start (run, config, &config->error);
}
