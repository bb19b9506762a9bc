/*
 * The client's sockets, and the thread that empties the one for weights.  Steps 1 and 7 of a
 * gradient's path.
 *
 * Between two looks of the caller versions pile up in a socket, and a publisher drops the newest
 * for who is full.  ZMQ_CONFLATE is no remedy: it loses the newest message when it arrives while
 * the reader takes the one before, and leaks others.  So the socket has room for what arrives
 * between two looks of the drainer, which keeps the newest.  It never looks inside a vector, and
 * touches nothing but the socket and that one frame.
 */
#include <signal.h>
#include <string.h>
#include <time.h>

#include "client_internal.h"
#include "frame.h"
#include "socket.h"

#define MS_NS 1000000u
/* Between two looks of the drainer. */
#define DRAIN_MS 10
/* Room for what arrives meanwhile, in bytes, and in frames at least and at most. */
#define WEIGHTS_BYTES   (8u << 20)
#define WEIGHTS_HWM_MIN 4u
#define WEIGHTS_HWM_MAX 1024u

gq_status
gq_client_open_control (gq_client *client, gq_error *error)
{
    const gq_socket_options dealer = {.type = ZMQ_DEALER,
                                      .send_hwm = 16,
                                      .receive_hwm = 16,
                                      .message_bytes_max = GQ_CONTROL_BYTES_MAX,
                                      .linger_ms = 200};
    void *socket = gq_socket_connect (client->context, &dealer, client->endpoints.control, error);
    if (socket == NULL)
        return GQ_INVALID;
    if (client->control != NULL)
        zmq_close (client->control);
    client->control = socket;
    return GQ_OK;
}

/* Put a socket in the place of another. */
static void
replace (void **place, void *socket)
{
    if (*place != NULL)
        zmq_close (*place);
    *place = socket;
}

gq_status
gq_client_open_data (gq_client *client, gq_error *error)
{
    uint64_t frame_bytes = GQ_FRAME_HEADER_BYTES + client->layout.element_count * sizeof (float);
    uint64_t frames = WEIGHTS_BYTES / frame_bytes;
    frames = frames < WEIGHTS_HWM_MIN ? WEIGHTS_HWM_MIN : frames;
    frames = frames > WEIGHTS_HWM_MAX ? WEIGHTS_HWM_MAX : frames;
    /* A high-water mark of one: what the broker does not read stays here, but for one message and
     * what the kernel's buffers take.  The linger lets a last gradient out that close no longer
     * waits for. */
    const gq_socket_options push = {.type = ZMQ_PUSH,
                                    .send_hwm = 1,
                                    .receive_hwm = 1,
                                    .message_bytes_max = GQ_CONTROL_BYTES_MAX,
                                    .linger_ms = 1000};
    const gq_socket_options weights = {.type = ZMQ_SUB,
                                       .send_hwm = 1,
                                       .receive_hwm = (int)frames,
                                       .message_bytes_max = (int64_t)frame_bytes};
    const gq_socket_options acks = {.type = ZMQ_SUB,
                                    .send_hwm = 1,
                                    .receive_hwm = 1024,
                                    .message_bytes_max = GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES};
    const gq_client_endpoints *to = &client->endpoints;
    void *sockets[] = {gq_socket_connect (client->context, &push, to->gradients, error),
                       gq_socket_connect (client->context, &weights, to->weights, error),
                       gq_socket_connect (client->context, &acks, to->acks, error)};
    if (sockets[0] == NULL || sockets[1] == NULL || sockets[2] == NULL) {
        for (size_t i = 0; i < 3; i++)
            if (sockets[i] != NULL)
                zmq_close (sockets[i]);
        return GQ_INVALID;
    }
    replace (&client->gradients, sockets[0]);
    replace (&client->weights, sockets[1]);
    replace (&client->acks, sockets[2]);
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
    gq_topic (GQ_KIND_ACK, client->actor, topic);
    zmq_setsockopt (client->acks, ZMQ_SUBSCRIBE, topic, GQ_TOPIC_ACTOR_BYTES);
    if (client->words == NULL)
        gq_client_subscribe (client);
    return GQ_OK;
}

void
gq_client_subscribe (gq_client *client)
{
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES];
    gq_topic (GQ_KIND_WEIGHTS, 0, topic);
    zmq_setsockopt (client->weights, ZMQ_SUBSCRIBE, topic, GQ_TOPIC_KIND_BYTES);
    /* Without the thread old versions may come first, and the newest a second later. */
    if (!client->draining)
        (void)!gq_client_drainer_start (client, NULL);
}

/* May a frame take the place of the newest one?  The last words of an optimizer that died may come
 * after the first ones of its successor. */
static bool
replaces (gq_client *client, const gq_frame *frame)
{
    gq_frame before;
    if (gq_frame_decode (zmq_msg_data (&client->arrived), zmq_msg_size (&client->arrived),
                         &before) != GQ_OK)
        return true; /* nothing there */
    return memcmp (frame->run, before.run, GQ_RUN_ID_BYTES) != 0 ||
           !gq_client_newer (before.term, before.version, frame->term, frame->version);
}

void
gq_client_drain (gq_client *client)
{
    zmq_msg_t message;
    zmq_msg_init (&message);
    while (zmq_msg_recv (&message, client->weights, ZMQ_DONTWAIT) >= 0) {
        gq_frame frame;
        if (gq_socket_whole (client->weights) &&
            gq_frame_decode (zmq_msg_data (&message), zmq_msg_size (&message), &frame) == GQ_OK &&
            frame.kind == GQ_KIND_WEIGHTS && replaces (client, &frame))
            zmq_msg_move (&client->arrived, &message);
    }
    zmq_msg_close (&message);
}

static void *
drain_on (void *argument)
{
    gq_client *client = argument;
    pthread_mutex_lock (&client->lock);
    while (client->draining) {
        struct timespec until;
        clock_gettime (CLOCK_MONOTONIC, &until);
        until.tv_nsec += DRAIN_MS * (long)MS_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait (&client->stop, &client->lock, &until);
        gq_client_drain (client);
    }
    pthread_mutex_unlock (&client->lock);
    return NULL;
}

gq_status
gq_client_drainer_start (gq_client *client, gq_error *error)
{
    sigset_t all, before;
    sigfillset (&all);
    client->draining = true;
    pthread_sigmask (SIG_BLOCK, &all, &before); /* signals are for the caller's threads */
    int rc = pthread_create (&client->drainer, NULL, drain_on, client);
    pthread_sigmask (SIG_SETMASK, &before, NULL);
    if (rc != 0)
        client->draining = false; /* no thread reads it */
    return rc == 0 ? GQ_OK : gq_fail (error, GQ_MEMORY, "no thread: %s", strerror (rc));
}

void
gq_client_drainer_stop (gq_client *client)
{
    pthread_mutex_lock (&client->lock);
    const bool was = client->draining;
    client->draining = false;
    pthread_cond_signal (&client->stop);
    pthread_mutex_unlock (&client->lock);
    if (was)
        pthread_join (client->drainer, NULL);
}
