/*
 * Weights thread.  Relays whole frames, keeps the last one of each topic, and sends it again when
 * somebody subscribes.
 *
 * Weights and acknowledgements leave through sockets of their own: a slow reader of large weights
 * must keep few of them waiting (a high-water mark of 2), while a burst of small acknowledgements
 * must not be cut.  Nothing here ever waits for a subscriber.
 */
#include "relay.h"

#include "bind.h"
#include "frame.h"
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
/* Longest subscription worth reading: 0x01 and a topic. */
#define SUBSCRIPTION_BYTES_MAX 64

typedef struct relay_thread {
    zsock_t *in;      /* XSUB, bound */
    zsock_t *weights; /* XPUB, bound */
    zsock_t *acks;    /* XPUB, bound */
    gq_relay_stats stats;
    zmq_msg_t last_weights; /* empty: none yet */
    zmq_msg_t last_acks[GQ_ACTORS_MAX];
    uint8_t run[GQ_RUN_ID_BYTES]; /* of those weights */
    uint64_t sent_ns;             /* when weights last went out */
    bool wanted;                  /* a late joiner waits for the last weights */
} relay_thread;

static bool
open_relay (relay_thread *self, gq_relay_config *config)
{
    zmq_msg_init (&self->last_weights);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++)
        zmq_msg_init (&self->last_acks[i]);
    const gq_socket_options in = {.type = ZMQ_XSUB,
                                  .send_hwm = IN_HWM,
                                  .receive_hwm = IN_HWM,
                                  .message_bytes_max = (int64_t)config->frame_bytes_max};
    const gq_socket_options weights = {.type = ZMQ_XPUB,
                                       .send_hwm = WEIGHTS_HWM,
                                       .receive_hwm = IN_HWM,
                                       .message_bytes_max = SUBSCRIPTION_BYTES_MAX};
    gq_socket_options acks = weights;
    acks.send_hwm = ACKS_HWM;
    self->in = gq_bind (&in, config->weights_in, &config->error);
    if (self->in != NULL)
        self->weights = gq_bind (&weights, config->weights_out, &config->error);
    if (self->weights != NULL)
        self->acks = gq_bind (&acks, config->acks_out, &config->error);
    if (self->acks == NULL)
        return false;
    static const uint8_t everything[] = {1};
    zsock_set_xpub_verbose (self->weights, 1);
    zsock_set_xpub_verbose (self->acks, 1);
    return zmq_send (zsock_resolve (self->in), everything, sizeof everything, 0) >= 0;
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

/* A new run's weights: what is kept of the run before must not reach its actors. */
static void
forget_other_run (relay_thread *self, const gq_frame *frame)
{
    if (memcmp (self->run, frame->run, GQ_RUN_ID_BYTES) == 0)
        return;
    memcpy (self->run, frame->run, GQ_RUN_ID_BYTES);
    for (size_t i = 0; i < GQ_ACTORS_MAX; i++) {
        zmq_msg_close (&self->last_acks[i]);
        zmq_msg_init (&self->last_acks[i]);
    }
}

static void
relay (relay_thread *self, zmq_msg_t *message)
{
    gq_frame frame;
    gq_status status = gq_frame_decode (zmq_msg_data (message), zmq_msg_size (message), &frame);
    if (status == GQ_OK && frame.kind == GQ_KIND_WEIGHTS) {
        forget_other_run (self, &frame);
        zmq_msg_move (&self->last_weights, message);
        send_kept (self->weights, &self->last_weights);
        self->sent_ns = gq_now_ns ();
        self->wanted = false;
        self->stats.weights++;
    } else if (status == GQ_OK && frame.kind == GQ_KIND_ACK) {
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

/* Subscriptions: bytes 0x01 topic.  *actor: the one whose acks they name, or GQ_ACTORS_MAX. */
static bool
subscription (zsock_t *socket, uint32_t *actor)
{
    uint8_t bytes[SUBSCRIPTION_BYTES_MAX];
    int size = zmq_recv (zsock_resolve (socket), bytes, sizeof bytes, ZMQ_DONTWAIT);
    if (size < 0)
        return false;
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
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
    for (int i = 0; i < BATCH_MAX && subscription (self->weights, &actor); i++)
        self->wanted = zmq_msg_size (&self->last_weights) > 0;
    for (int i = 0; i < BATCH_MAX && subscription (self->acks, &actor); i++)
        if (actor < GQ_ACTORS_MAX && zmq_msg_size (&self->last_acks[actor]) > 0) {
            send_kept (self->acks, &self->last_acks[actor]);
            self->stats.repeated++;
        }
}

/* Repeat the last weights when somebody wants them.  Milliseconds until the next look. */
static int
repeat (relay_thread *self)
{
    if (!self->wanted)
        return IDLE_MS;
    uint64_t age_ms = (gq_now_ns () - self->sent_ns) / MS_NS;
    if (age_ms < REPEAT_MS_MIN)
        return REPEAT_MS_MIN - (int)age_ms;
    send_kept (self->weights, &self->last_weights);
    self->sent_ns = gq_now_ns ();
    self->wanted = false;
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
        self->wanted = zmq_msg_size (&self->last_weights) > 0;
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
