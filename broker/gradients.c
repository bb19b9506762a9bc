/*
 * Gradient thread.  One loop: read while there is room, hand on while somebody takes.
 *
 * Full means that it stops reading: PUSH then blocks the actors.  It must never drop an admitted
 * frame while it lives, and never wait for either side: the weights have a thread of their own.
 */
#include "gradients.h"

#include <sys/random.h>

#include "bind.h"
#include "frame.h"
#include "handed.h"
#include "log.h"
#include "socket.h"
#include "stats.h"

/* Frames moved per phase of the loop: enough to spread the cost of a poll, few enough that the
 * other phases and STATS wait only microseconds. */
#define BATCH_MAX 64
/* A bound socket that is never polled leaks the pipes of peers that left. */
#define IDLE_MS 1000
#define MS_NS   1000000u
#define PEERS   "inproc://gradq-gradients-out"

typedef struct gradient_thread {
    zsock_t *in;    /* PULL, bound */
    zsock_t *out;   /* PUSH, bound: gradients, and marks among them */
    zsock_t *peers; /* PAIR: connections to `out` that come and go */
    gq_queue *queue;
    gq_near *near;
    gq_handed handed;
    zmq_msg_t hand; /* read, but more bytes than the queue has room for now */
    bool holding;
} gradient_thread;

static bool
open_gradients (gradient_thread *self, gq_gradients_config *config)
{
    self->near = config->near;
    self->queue = gq_queue_new (config->capacity, config->bytes_capacity);
    if (self->queue == NULL) {
        gq_fail (&config->error, GQ_MEMORY, "no memory for a queue of %llu gradients",
                 (unsigned long long)config->capacity);
        return false;
    }
    /* One message a connection before the queue, and one or two behind it, whose kernel buffers are
     * small: what waits, waits in the queue.  Those of actors are the system's, or a large gradient
     * would wake both sides for every 64 KiB. */
    const gq_socket_options in = {.type = ZMQ_PULL,
                                  .send_hwm = 1,
                                  .receive_hwm = 1,
                                  .message_bytes_max = (int64_t)config->bytes_capacity};
    gq_socket_options out = in;
    out.type = ZMQ_PUSH;
    out.buffer_bytes = 64 * 1024;
    out.watched = PEERS;
    if (getrandom (&self->handed.life, sizeof self->handed.life, 0) != sizeof self->handed.life) {
        gq_fail (&config->error, GQ_IO, "no random numbers from the system");
        return false;
    }
    self->in = gq_bind (&in, config->in, &config->error);
    if (self->in != NULL)
        self->out = gq_bind (&out, config->out, &config->error);
    if (self->out != NULL && (self->peers = zsock_new_pair (">" PEERS)) == NULL)
        gq_fail (&config->error, GQ_MEMORY, "no socket: %s", zmq_strerror (errno));
    return self->peers != NULL;
}

/* All that was received and not taken, wherever it lies. */
static uint64_t
depth (const gradient_thread *self)
{
    return gq_handed_depth (&self->handed, gq_queue_count (self->queue).depth);
}

static void
close_gradients (gradient_thread *self)
{
    if (self->queue != NULL && depth (self) > 0)
        gq_log (GQ_LOG_WARNING, "gradients discarded at exit", "count", "u",
                depth (self) + (self->holding ? 1u : 0u), NULL);
    if (self->holding)
        zmq_msg_close (&self->hand);
    zsock_destroy (&self->in);
    zsock_destroy (&self->out);
    zsock_destroy (&self->peers);
    gq_queue_free (&self->queue);
}

/* Admit the frame in hand.  false: the queue is full and the hand still holds it. */
static bool
admit (gradient_thread *self)
{
    gq_status status = gq_queue_push (self->queue, &self->hand, gq_now_ns ());
    if (status == GQ_FULL)
        return false;
    if (status != GQ_OK)
        gq_log (GQ_LOG_DEBUG, "frame refused", "reason", "s", gq_status_name (status), "bytes", "u",
                (uint64_t)zmq_msg_size (&self->hand), NULL);
    zmq_msg_close (&self->hand);
    self->holding = false;
    return true;
}

/* A frame's size shows only once it is read, so the byte bound may leave one in the hand; the bound
 * in frames is kept by not reading. */
static bool
readable (const gradient_thread *self)
{
    return !self->holding && depth (self) < gq_queue_count (self->queue).capacity;
}

static void
take_in (gradient_thread *self)
{
    void *in = zsock_resolve (self->in);
    for (int i = 0; i < BATCH_MAX; i++) {
        if (!self->holding) {
            if (!readable (self))
                return;
            zmq_msg_init (&self->hand);
            if (zmq_msg_recv (&self->hand, in, ZMQ_DONTWAIT) < 0) {
                zmq_msg_close (&self->hand);
                return;
            }
            if (!gq_socket_whole (in)) {
                gq_queue_refuse (self->queue);
                zmq_msg_close (&self->hand);
                continue;
            }
            self->holding = true;
        }
        if (!admit (self))
            return;
    }
}

/* When to send the next mark; at once while a count that is late could make actors wait. */
static uint64_t
mark_ns (const gradient_thread *self)
{
    return gq_handed_mark_ns (&self->handed,
                              depth (self) > gq_queue_count (self->queue).capacity / 2);
}

static void
send_mark (gradient_thread *self)
{
    uint8_t mark[GQ_MARK_BYTES];
    uint64_t now_ns = gq_now_ns ();
    if (mark_ns (self) > now_ns)
        return;
    gq_handed_mark (&self->handed, mark);
    if (gq_socket_send (zsock_resolve (self->out), mark, sizeof mark) == GQ_OK)
        gq_handed_marked (&self->handed, now_ns);
}

/* Who takes gradients has come or gone.  An event is two parts: a number of 16 bits and its value,
 * then the endpoint. */
static void
see_peers (gradient_thread *self)
{
    uint16_t event;
    void *peers = zsock_resolve (self->peers);
    while (zmq_recv (peers, &event, sizeof event, ZMQ_DONTWAIT) >= 0) {
        (void)gq_socket_whole (peers);
        gq_handed_peer (&self->handed, event == ZMQ_EVENT_ACCEPTED);
        /* What was on the way to who left is lost, and whoever comes next has perhaps another
         * memory.  It may have been a stranger, with tickets that nobody gives back. */
        if (event != ZMQ_EVENT_ACCEPTED)
            gq_near_forget (self->near);
    }
}

/* A large gradient to an optimizer of this host: its payload into memory that both have, and a
 * ticket for it through the socket.  false: not so, and nothing was done. */
static bool
send_ticket (const gradient_thread *self, gq_hop *hop, zmq_msg_t *front)
{
    const size_t size = zmq_msg_size (front);
    const uint8_t *bytes = zmq_msg_data (front);
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    gq_frame frame;
    gq_hop_ticket ticket;
    if (gq_frame_decode (bytes, size, &frame) != GQ_OK || frame.kind != GQ_KIND_GRADIENT ||
        (zsock_events (self->out) & ZMQ_POLLOUT) == 0 || !gq_hop_put (hop, bytes, size, &ticket))
        return false;
    memcpy (message, bytes, GQ_FRAME_HEADER_BYTES);
    gq_hop_write (&ticket, message);
    if (gq_socket_send (zsock_resolve (self->out), message, sizeof message) == GQ_OK)
        return true;
    gq_hop_withdraw (hop, &ticket);
    return false;
}

/* *front is then empty.  false: there is no room now. */
static bool
send_on (const gradient_thread *self, zmq_msg_t *front)
{
    const bool large = zmq_msg_size (front) >= GQ_FRAME_HEADER_BYTES + GQ_HOP_PAYLOAD_MIN;
    gq_hop *hop = large ? gq_near_hold (self->near) : NULL;
    const bool sent = hop != NULL && send_ticket (self, hop, front);
    gq_near_release (self->near, hop);
    if (sent)
        zmq_msg_close (front);
    return sent || zmq_msg_send (front, zsock_resolve (self->out), ZMQ_DONTWAIT) >= 0;
}

static void
hand_on (gradient_thread *self)
{
    send_mark (self);
    for (int i = 0; i < BATCH_MAX; i++) {
        zmq_msg_t *front = gq_queue_front (self->queue);
        if (front == NULL || !send_on (self, front))
            return;
        gq_queue_pop (self->queue);
        self->handed.count++;
    }
}

/* false: time to end. */
static bool
handle_pipe (gradient_thread *self, zsock_t *pipe)
{
    char *command = zstr_recv (pipe);
    bool more = command != NULL && !streq (command, "$TERM");
    if (more && streq (command, "STATS")) {
        zframe_t *answer = zframe_new (NULL, sizeof (gq_gradients_stats));
        gq_gradients_stats *stats = (gq_gradients_stats *)(void *)zframe_data (answer);
        stats->queue = gq_queue_count (self->queue);
        stats->queue.depth = depth (self);
        stats->queue.delivered = stats->queue.received - stats->queue.depth;
        stats->on_the_way = gq_handed_waiting (&self->handed);
        memcpy (stats->actors, gq_queue_actors (self->queue), sizeof stats->actors);
        zframe_send (&answer, pipe, 0);
    }
    if (more && streq (command, "MARK"))
        gq_handed_ask (&self->handed);
    if (more && streq (command, "TAKEN")) {
        zframe_t *report = zframe_recv (pipe);
        if (report != NULL)
            (void)!gq_handed_report (&self->handed, zframe_data (report), zframe_size (report));
        zframe_destroy (&report);
    }
    zstr_free (&command);
    return more;
}

/* Until something is due that no socket tells of: a mark that cannot be sent yet waits for room. */
static int
wait_ms (uint64_t due_ns, uint64_t now_ns)
{
    if (due_ns <= now_ns || due_ns - now_ns > (uint64_t)IDLE_MS * MS_NS)
        return IDLE_MS;
    return (int)((due_ns - now_ns) / MS_NS) + 1;
}

static void
run (zsock_t *pipe, void *arguments)
{
    gradient_thread self = {0};
    bool open = open_gradients (&self, arguments);
    zsock_signal (pipe, open ? 0 : 1);
    for (bool more = open; more;) {
        const uint64_t now_ns = gq_now_ns (), due_ns = mark_ns (&self);
        const bool to_send = gq_queue_front (self.queue) != NULL || due_ns <= now_ns;
        zmq_pollitem_t items[] = {
            {.socket = zsock_resolve (pipe), .events = ZMQ_POLLIN},
            {.socket = zsock_resolve (self.in), .events = readable (&self) ? ZMQ_POLLIN : 0},
            {.socket = zsock_resolve (self.out), .events = to_send ? ZMQ_POLLOUT : 0},
            {.socket = zsock_resolve (self.peers), .events = ZMQ_POLLIN}};
        if (zmq_poll (items, 4, wait_ms (due_ns, now_ns)) < 0 && errno != EINTR)
            break;
        if (items[3].revents)
            see_peers (&self);
        if (items[0].revents)
            more = handle_pipe (&self, pipe);
        if (items[2].revents)
            hand_on (&self);
        take_in (&self);
        hand_on (&self);
    }
    close_gradients (&self);
}

zactor_t *
gq_gradients_start (gq_gradients_config *config)
{
    return gq_thread_start (run, config, &config->error);
}
