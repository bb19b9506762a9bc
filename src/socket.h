/*
 * ZeroMQ sockets with every trap's remedy set: explicit linger, small buffers, bounded messages,
 * no ZMTP heartbeats, TCP keep-alive.
 */
#ifndef GQ_SOCKET_H
#define GQ_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/status.h"

typedef struct gq_socket_options {
    int type;                  /* ZMQ_PUSH ... */
    int send_hwm, receive_hwm; /* messages to each peer */
    int buffer_bytes;          /* SNDBUF and RCVBUF; 0: the system's */
    int64_t message_bytes_max; /* a larger one closes the connection before it is read */
    int linger_ms;
    const char *watched; /* inproc endpoint where a PAIR hears of connections and ends, or NULL */
} gq_socket_options;

/*
 * Set the options on a socket that is neither bound nor connected.  A failure here is a bug of
 * ours, so it is asserted.
 */
void gq_socket_set (void *socket, const gq_socket_options *options);

/* New socket on `context` with the options, connected.  NULL and *error: bad endpoint or no
 * memory. */
void *gq_socket_connect (void *context, const gq_socket_options *options, const char *endpoint,
                         gq_error *error);

/* Send bytes[size] without waiting.  GQ_OK, GQ_AGAIN (nobody there, or full). */
GQ_CHECK gq_status gq_socket_send (void *socket, const void *bytes, size_t size);

/* Did the last zmq_msg_recv bring the whole message?  If more parts follow, read and drop them:
 * gradq knows no multipart frames.  Returns whether it was whole. */
bool gq_socket_whole (void *socket);

#endif
