/*
 * Socket options.  The measured reasons stand in docs/ARCHITECTURE.md, "What ZeroMQ does".
 */
#include "socket.h"

#include <assert.h>
#include <zmq.h>

/* Back from a dead peer within a tenth of a second at first, then every second. */
enum { RECONNECT_MS = 100, RECONNECT_MS_MAX = 1000 };

/*
 * A link that swallows everything is noticed within DEAD_MS, and a connection is tried anew at
 * least every CONNECT_MS + RECONNECT_MS_MAX: that much after the link has healed both sides talk
 * again.  TCP alone doubles its pause with each retransmission, so that after an outage it stays
 * silent for as long again as the outage was.
 */
enum { DEAD_MS = 3000, CONNECT_MS = 1000, HANDSHAKE_MS = 3000 };
/* Probes of an idle connection, in seconds, and how many may stay without an answer. */
enum { PROBE_IDLE_S = 1, PROBE_S = 1, PROBES = 2 };

static void
set_int (void *socket, int option, int value)
{
    int rc = zmq_setsockopt (socket, option, &value, sizeof value);
    assert (rc == 0);
    (void)rc;
}

/* How a dead connection shows.  ipc has none of this but the handshake, and needs none. */
static void
notice_dead_link (void *socket, int type)
{
    /* Who only receives learns it from probes alone. */
    set_int (socket, ZMQ_TCP_KEEPALIVE, 1);
    set_int (socket, ZMQ_TCP_KEEPALIVE_IDLE, PROBE_IDLE_S);
    set_int (socket, ZMQ_TCP_KEEPALIVE_INTVL, PROBE_S);
    set_int (socket, ZMQ_TCP_KEEPALIVE_CNT, PROBES);
    set_int (socket, ZMQ_CONNECT_TIMEOUT, CONNECT_MS);
    /* A peer may vanish in the middle of it, with nothing on its way that could be missed. */
    set_int (socket, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    /* Not for gradients: a full queue stops reading for as long as it likes, and to TCP that is the
     * same as a dead peer.  The client opens its sockets anew when it hears nothing; the broker's
     * side of the way to the optimizer is probed by the optimizer's. */
    if (type != ZMQ_PUSH)
        set_int (socket, ZMQ_TCP_MAXRT, DEAD_MS);
}

void
gq_socket_set (void *socket, const gq_socket_options *options)
{
    set_int (socket, ZMQ_LINGER, options->linger_ms);
    set_int (socket, ZMQ_SNDHWM, options->send_hwm);
    set_int (socket, ZMQ_RCVHWM, options->receive_hwm);
    if (options->buffer_bytes > 0) {
        set_int (socket, ZMQ_SNDBUF, options->buffer_bytes);
        set_int (socket, ZMQ_RCVBUF, options->buffer_bytes);
    }
    int64_t bytes_max = options->message_bytes_max;
    int rc = zmq_setsockopt (socket, ZMQ_MAXMSGSIZE, &bytes_max, sizeof bytes_max);
    assert (rc == 0);
    (void)rc;
    set_int (socket, ZMQ_RECONNECT_IVL, RECONNECT_MS);
    set_int (socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MS_MAX);
    notice_dead_link (socket, options->type);
    /* Queue nothing for a peer that is not there: the caller keeps what it could not send.  An XPUB
     * that connects hears only so that its subscriber is gone. */
    if (options->type == ZMQ_PUSH || options->type == ZMQ_DEALER || options->type == ZMQ_XPUB)
        set_int (socket, ZMQ_IMMEDIATE, 1);
    if (options->watched != NULL) {
        rc = zmq_socket_monitor (socket, options->watched,
                                 ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED);
        assert (rc == 0);
    }
}

void *
gq_socket_connect (void *context, const gq_socket_options *options, const char *endpoint,
                   gq_error *error)
{
    void *socket = zmq_socket (context, options->type);
    if (socket == NULL) {
        gq_fail (error, GQ_MEMORY, "no socket: %s", zmq_strerror (zmq_errno ()));
        return NULL;
    }
    gq_socket_set (socket, options);
    if (zmq_connect (socket, endpoint) != 0) {
        gq_fail (error, GQ_INVALID, "cannot connect to %s: %s", endpoint,
                 zmq_strerror (zmq_errno ()));
        zmq_close (socket);
        return NULL;
    }
    return socket;
}

gq_status
gq_socket_send (void *socket, const void *bytes, size_t size)
{
    return zmq_send (socket, bytes, size, ZMQ_DONTWAIT) >= 0 ? GQ_OK : GQ_AGAIN;
}

bool
gq_socket_whole (void *socket)
{
    bool whole = true;
    int more = 0;
    size_t more_size = sizeof more;
    while (zmq_getsockopt (socket, ZMQ_RCVMORE, &more, &more_size) == 0 && more) {
        whole = false;
        zmq_msg_t rest;
        zmq_msg_init (&rest);
        int rc = zmq_msg_recv (&rest, socket, ZMQ_DONTWAIT);
        zmq_msg_close (&rest);
        if (rc < 0)
            break;
    }
    return whole;
}
