/*
 * One question to the broker's control socket.  For tools; actors and optimizer keep a DEALER open.
 */
#include "control.h"

#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "endpoint.h"
#include "socket.h"

/* Wait for the connection, send; wait for the answer, take it.  The time-out is for each. */
static gq_status
exchange (void *socket, const char *text, int timeout_ms, zmq_msg_t *answer)
{
    zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLOUT};
    if (zmq_poll (&item, 1, timeout_ms) <= 0 ||
        gq_socket_send (socket, text, strlen (text)) != GQ_OK)
        return GQ_UNREACHABLE;
    item.events = ZMQ_POLLIN;
    if (zmq_poll (&item, 1, timeout_ms) <= 0 || zmq_msg_recv (answer, socket, ZMQ_DONTWAIT) < 0)
        return GQ_UNREACHABLE;
    return gq_socket_whole (socket) ? GQ_OK : GQ_MALFORMED;
}

static gq_status
ask (void *context, json_t **answer_p, const char *address, const char *text, int timeout_ms,
     gq_error *error)
{
    const gq_socket_options options = {.type = ZMQ_DEALER,
                                       .send_hwm = 4,
                                       .receive_hwm = 4,
                                       .message_bytes_max = GQ_CONTROL_BYTES_MAX};
    void *socket = gq_socket_connect (context, &options, address, error);
    if (socket == NULL)
        return GQ_INVALID;
    zmq_msg_t answer;
    zmq_msg_init (&answer);
    gq_status status = exchange (socket, text, timeout_ms, &answer);
    if (status == GQ_UNREACHABLE)
        gq_fail (error, status, "the broker at %s did not answer within %d ms; is it running?",
                 address, timeout_ms);
    if (status == GQ_OK) {
        json_error_t where;
        *answer_p = json_loadb (zmq_msg_data (&answer), zmq_msg_size (&answer), 0, &where);
        if (!json_is_object (*answer_p)) {
            json_decref (*answer_p);
            *answer_p = NULL;
            status = GQ_MALFORMED;
        }
    }
    if (status == GQ_MALFORMED)
        gq_fail (error, status,
                 "%s answered with something other than a JSON object; is it a "
                 "gradq broker's control socket?",
                 address);
    zmq_msg_close (&answer);
    zmq_close (socket);
    return status;
}

gq_status
gq_control_ask (json_t **answer_p, const char *address, const json_t *request, int timeout_ms,
                gq_error *error)
{
    gq_endpoints endpoints;
    gq_status status = gq_endpoints_derive (&endpoints, address, error);
    if (status != GQ_OK)
        return status;
    char *text = json_dumps (request, JSON_COMPACT);
    void *context = zmq_ctx_new ();
    if (text != NULL && context != NULL)
        status = ask (context, answer_p, address, text, timeout_ms, error);
    else
        status = gq_fail (error, GQ_MEMORY, "out of memory");
    free (text);
    if (context != NULL)
        zmq_ctx_term (context);
    return status;
}
