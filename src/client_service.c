/*
 * What a client does in every call: take in weights and acknowledgements, send again what is due,
 * notice an optimizer that is deaf, dumb or has forgotten.  Steps 1 and 7 of a gradient's path.
 *
 * Sockets are polled together and never blocked in; a frame that does not fit this run is dropped.
 * Nothing here trusts a peer's bytes.
 */
#include <string.h>

#include "client_internal.h"
#include "frame.h"
#include "socket.h"
#include "stats.h"

#define MS_NS     UINT64_C (1000000)
#define REPORT_MS 1000
/* Nothing at all heard for this long: the connections may be dead beyond ZeroMQ's repair. */
#define SILENT_MS 3000
/* One way alone without a sign of life.  Longer, for a large vector may be on its way; so many ns
 * more for each of its bytes. */
#define DEAF_MS          10000
#define DEAF_NS_PER_BYTE 100u
/* Reopening in vain doubles the pause so often: the optimizer may simply be away. */
#define DOUBLINGS_MAX 2u
/* A later life of the optimizer publishes, and does not name this actor's epoch.  It repeats every
 * acknowledgement each second. */
#define UNKNOWN_MS 4000
/* On lane shm sockets only confirm what shared memory said before: look at them this often, and
 * sleep no longer than this without looking. */
#define SOCKET_MS 5
#define SLEEP_MS  20

/* Is this frame from the run that we belong to?  Notes when the optimizer was heard; the same
 * frame again, byte for byte, is only what the broker remembers of it. */
static bool
ours (gq_client *client, const gq_frame *frame, const void *bytes, gq_channel *channel)
{
    if (memcmp (frame->run, client->run, GQ_RUN_ID_BYTES) != 0) {
        if (frame->kind == GQ_KIND_WEIGHTS)
            client->foreign_ns = gq_now_ns ();
        return false;
    }
    if (memcmp (channel->header, bytes, sizeof channel->header) != 0) {
        memcpy (channel->header, bytes, sizeof channel->header);
        channel->heard_ns = client->heard_ns = gq_now_ns ();
    }
    return frame->digest == client->layout.digest;
}

/* Another run has taken this address over: it speaks, and ours no longer does.  Its last words may
 * still reach us at the start, out of the broker's memory. */
static bool
replaced (const gq_client *client)
{
    return client->foreign_ns > client->heard_ns + GQ_HEARD_MS_MAX * MS_NS;
}

/* Another process has taken this actor's id over.  While we ask for a new epoch ourselves, a higher
 * one may be the answer. */
static bool
fenced (const gq_client *client)
{
    return client->higher_epoch > client->epoch && !client->asking;
}

gq_status
gq_client_ended (const gq_client *client)
{
    if (fenced (client))
        return GQ_FENCED;
    if (replaced (client))
        return GQ_RUN;
    return gq_client_interrupted (client) ? GQ_CLOSED : GQ_OK;
}

/* Keep the frame in `arrived` as the newest weights; takes it. */
static void
install_weights (gq_client *client, const gq_frame *frame)
{
    zmq_msg_t *message = &client->arrived;
    gq_client_keep_weights (client);
    uint8_t *payload = (uint8_t *)zmq_msg_data (message) + GQ_FRAME_HEADER_BYTES;
    if ((uintptr_t)payload % _Alignof(float) == 0) {
        zmq_msg_move (&client->frame, message);
        payload = (uint8_t *)zmq_msg_data (&client->frame) + GQ_FRAME_HEADER_BYTES;
        client->data = (const float *)(const void *)payload;
    } else {
        /* Small frames lie where ZeroMQ's receive buffer happens to have them. */
        memcpy (client->aligned, payload, frame->payload_bytes);
        client->data = client->aligned;
    }
    client->version = client->shown_version = frame->version;
    client->term = client->shown_term = frame->term;
    client->has_weights = true;
}

static void
receive_weights (gq_client *client)
{
    gq_frame frame;
    gq_client_drain (client);
    size_t size = zmq_msg_size (&client->arrived);
    const void *bytes = zmq_msg_data (&client->arrived);
    if (size == 0)
        return;
    if (gq_frame_decode (bytes, size, &frame) == GQ_OK &&
        ours (client, &frame, bytes, &client->weights_heard) &&
        frame.count == client->layout.element_count &&
        (!client->has_weights ||
         gq_client_newer (frame.term, frame.version, client->term, client->version)) &&
        gq_frame_check_payload (bytes, size) == GQ_OK)
        install_weights (client, &frame);
    zmq_msg_close (&client->arrived);
    zmq_msg_init (&client->arrived);
}

void
gq_client_take_ack (gq_client *client, uint32_t term, uint64_t version, const gq_ack *ack)
{
    if (term < client->known_term)
        return; /* of a life that is over: the one after it says more, or has lost it */
    if (term > client->known_term &&
        gq_window_rolled_back (&client->window, ack->cumulative, ack->beyond)) {
        gq_client_ask (client, true);
        return;
    }
    client->known_term = term;
    if (gq_client_newer (term, version, client->ack_term, client->ack_version)) {
        client->ack_term = term;
        client->ack_version = version;
    }
    uint64_t freed = gq_window_settle (&client->window, ack->cumulative, ack->beyond);
    gq_window_received (&client->window, ack->cumulative + ack->held);
    for (uint32_t i = 0; i < client->window.size; i++)
        if (freed >> i & 1) {
            client->lane->ops->settled (client->lane, &client->sent[i]);
            zmq_msg_close (&client->sent[i]);
        }
    if (freed != 0)
        client->progress_ns = gq_now_ns ();
    if (ack->refused > client->refused) {
        client->refused = ack->refused;
        client->refused_reason = (gq_status)ack->refused_reason;
    }
}

static void
receive_acks (gq_client *client)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    while (zmq_msg_recv (&message, client->acks, ZMQ_DONTWAIT) >= 0) {
        gq_frame frame;
        size_t size = zmq_msg_size (&message);
        const uint8_t *bytes = zmq_msg_data (&message);
        if (gq_socket_whole (client->acks) && gq_frame_decode (bytes, size, &frame) == GQ_OK &&
            gq_frame_check_payload (bytes, size) == GQ_OK && frame.kind == GQ_KIND_ACK &&
            ours (client, &frame, bytes, &client->acks_heard) && frame.actor == client->actor) {
            gq_ack ack;
            gq_ack_decode (bytes + GQ_FRAME_HEADER_BYTES, &ack);
            /* Whoever serves our lane file says so there before he says anything here. */
            if (client->words != NULL && frame.term > atomic_load (&client->words->term))
                gq_client_leave_shm (client, "a later optimizer offers no shared memory");
            if (frame.epoch == client->epoch)
                gq_client_take_ack (client, frame.term, frame.version, &ack);
            if (frame.epoch > client->higher_epoch)
                client->higher_epoch = frame.epoch;
        }
    }
    zmq_msg_close (&message);
}

/* Send again what is due, while somebody is there to hear it: the same bytes, under the same
 * number, so that the ledger knows them. */
static void
resend_due (gq_client *client, uint64_t now_ns)
{
    if (replaced (client) || fenced (client) || client->asking ||
        now_ns - client->heard_ns > GQ_HEARD_MS_MAX * MS_NS)
        return;
    for (int slot = gq_window_due (&client->window, now_ns); slot >= 0;
         slot = gq_window_due (&client->window, now_ns)) {
        zmq_msg_t copy;
        zmq_msg_init (&copy);
        if (zmq_msg_copy (&copy, &client->sent[slot]) != 0 ||
            zmq_msg_send (&copy, client->gradients, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close (&copy);
            return; /* no room: the next call tries again */
        }
        gq_window_resent (&client->window, (uint32_t)slot, now_ns);
    }
}

/* A later life of the optimizer speaks: does it know us?  After a while, ask it. */
static void
ask_if_unknown (gq_client *client, uint64_t now_ns)
{
    if (client->shown_term <= client->known_term || fenced (client) || client->asking) {
        client->unknown_ns = 0;
        return;
    }
    if (client->unknown_ns == 0)
        client->unknown_ns = now_ns;
    if (now_ns - client->unknown_ns >= UNKNOWN_MS * MS_NS &&
        now_ns - client->heard_ns < GQ_HEARD_MS_MAX * MS_NS)
        gq_client_ask (client, false);
}

/* Have the sockets lost their peers?  Weights and acknowledgements come each second, and gradients
 * show by being settled, or taken, that they get through.  *pause_ns: how long to bear it. */
static bool
deaf (const gq_client *client, uint64_t now_ns, uint64_t *pause_ns)
{
    const uint64_t frame_bytes = client->layout.element_count * sizeof (float);
    const uint64_t way_ns = DEAF_MS * MS_NS + frame_bytes * DEAF_NS_PER_BYTE;
    const bool waiting = client->blocked || gq_window_count (&client->window) > 0;
    const bool silent = now_ns - client->heard_ns > SILENT_MS * MS_NS;
    *pause_ns = silent ? SILENT_MS * MS_NS : way_ns;
    return silent || now_ns - client->weights_heard.heard_ns > way_ns ||
           now_ns - client->acks_heard.heard_ns > way_ns ||
           (waiting && now_ns - client->progress_ns > way_ns);
}

/* What the window keeps is not lost by this: it is sent again. */
static void
reopen_if_deaf (gq_client *client, uint64_t now_ns)
{
    uint64_t pause_ns;
    if (!deaf (client, now_ns, &pause_ns)) {
        client->reopened_in_vain = 0;
        return;
    }
    if (now_ns - client->reopened_ns < pause_ns << client->reopened_in_vain)
        return;
    client->reopened_ns = now_ns;
    if (client->reopened_in_vain < DOUBLINGS_MAX)
        client->reopened_in_vain++;
    /* No memory for new ones: the old ones stay, and it is tried again. */
    (void)!gq_client_open_data (client, NULL);
    (void)!gq_client_open_control (client, NULL);
}

/* Whether a gradient could go out tells whether they get through. */
static void
note_room (gq_client *client, bool sendable, uint64_t now_ns)
{
    if (client->blocked == sendable)
        client->progress_ns = now_ns;
    client->blocked = !sendable;
}

/* On lane shm: look at the words, sleep on them when they say nothing new.  Milliseconds to wait
 * for sockets, -1: no need to look at them now. */
static int
service_lane (gq_client *client, int wait_ms, bool sockets_matter)
{
    bool news = gq_client_lane_news (client);
    if (client->words == NULL)
        return 0; /* the lane has ended */
    if (sockets_matter)
        return news || wait_ms < SOCKET_MS ? 0 : SOCKET_MS;
    if (!news && wait_ms > 0) {
        uint64_t sleep_ns = (wait_ms < SLEEP_MS ? (uint64_t)wait_ms : SLEEP_MS) * MS_NS;
        gq_lane_sleep (client->words, client->bell, sleep_ns);
        gq_client_lane_news (client);
        if (client->words == NULL)
            return 0;
    }
    uint64_t now_ns = gq_now_ns ();
    if (now_ns - client->sockets_ns < SOCKET_MS * MS_NS)
        return -1;
    client->sockets_ns = now_ns;
    return 0;
}

void
gq_client_service (gq_client *client, int wait_ms, bool for_room)
{
    pthread_mutex_lock (&client->lock);
    if (client->words != NULL)
        wait_ms = service_lane (client, wait_ms, for_room);
    if (wait_ms < 0) {
        pthread_mutex_unlock (&client->lock);
        return;
    }
    zmq_pollitem_t items[] = {{.socket = client->weights, .events = ZMQ_POLLIN},
                              {.socket = client->acks, .events = ZMQ_POLLIN},
                              {.socket = client->control, .events = ZMQ_POLLIN},
                              {.socket = client->gradients, .events = for_room ? ZMQ_POLLOUT : 0}};
    if (zmq_msg_size (&client->arrived) > 0)
        wait_ms = 0;
    zmq_poll (items, for_room ? 4 : 3, wait_ms); /* EINTR: the caller's loop comes again */
    receive_weights (client);
    if (items[1].revents)
        receive_acks (client);
    if (items[2].revents)
        gq_client_read_control (client);
    uint64_t now_ns = gq_now_ns ();
    if (for_room)
        note_room (client, items[3].revents != 0, now_ns);
    ask_if_unknown (client, now_ns);
    gq_client_ask_again (client, now_ns);
    resend_due (client, now_ns);
    reopen_if_deaf (client, now_ns);
    if (now_ns - client->reported_ns >= REPORT_MS * MS_NS) {
        client->reported_ns = now_ns;
        gq_client_tell (client, "report");
        if (client->words != NULL && gq_lane_shm_removed (client->lane))
            gq_client_leave_shm (client, "the optimizer has removed this actor's lane file");
    }
    pthread_mutex_unlock (&client->lock);
}
