/*
 * The optimizer's sockets.
 */
#include "server_sockets.h"

#include <czmq.h>
#include <errno.h>

#include "gradq/protocol.h"
#include "interest.h"
#include "socket.h"

static zsock_t *
connected (const gq_socket_options *options, const char *endpoint, gq_error *error)
{
    zsock_t *socket = zsock_new (options->type);
    if (socket == NULL) {
        gq_fail (error, GQ_MEMORY, "no socket: %s", zmq_strerror (errno));
        return NULL;
    }
    gq_socket_set (zsock_resolve (socket), options);
    if (zmq_connect (zsock_resolve (socket), endpoint) != 0) {
        gq_fail (error, GQ_INVALID, "cannot connect to %s: %s", endpoint, zmq_strerror (errno));
        zsock_destroy (&socket);
    }
    return socket;
}

gq_status
gq_server_sockets_open (gq_server_sockets *self, gq_error *error)
{
    int64_t frame_max = (int64_t)(GQ_FRAME_HEADER_BYTES + GQ_PARAMETERS_MAX * sizeof (float));
    const gq_socket_options gradients = {.type = ZMQ_PULL,
                                         .send_hwm = 1,
                                         .receive_hwm = 1,
                                         .buffer_bytes = 64 * 1024,
                                         .message_bytes_max = frame_max};
    /* Versions on their way are bounded by the buffers; this bounds acknowledgements. */
    const gq_socket_options weights = {.type = ZMQ_XPUB,
                                       .send_hwm = 1024,
                                       .receive_hwm = 16,
                                       .message_bytes_max = GQ_SUBSCRIPTION_BYTES_MAX,
                                       .linger_ms = 200};
    const gq_socket_options control = {.type = ZMQ_DEALER,
                                       .send_hwm = 1024,
                                       .receive_hwm = 64,
                                       .message_bytes_max = GQ_CONTROL_BYTES_MAX,
                                       .linger_ms = 200};
    self->control = connected (&control, self->endpoints.control, error);
    self->weights = connected (&weights, self->endpoints.weights_in, error);
    self->gradients = connected (&gradients, self->endpoints.gradients_out, error);
    bool all = self->control != NULL && self->weights != NULL && self->gradients != NULL;
    return all ? GQ_OK : GQ_IO;
}

void
gq_server_sockets_close (gq_server_sockets *self)
{
    zsock_destroy (&self->gradients);
    zsock_destroy (&self->control);
    zsock_destroy (&self->weights);
}
