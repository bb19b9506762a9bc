/*
 * gradq-broker: keeps the queue of gradients and relays weights.  Steps 2, 3 and the way from 6 to
 * 7 of a gradient's path.
 *
 * Three threads, so that nothing blocks anything else: gradients, weights, and this one, which
 * answers control requests and signals.
 */
#include <czmq.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bind.h"
#include "control.h"
#include "endpoint.h"
#include "gradients.h"
#include "log.h"
#include "options.h"
#include "relay.h"
#include "service.h"
#include "stats.h"

#define IDLE_MS  1000
#define OWING_MS 1

typedef struct broker {
    gq_endpoints endpoints;
    int signal_fd;
    int lock_fd;
    zsock_t *router;
    gq_near *near;
    zactor_t *gradients;
    zactor_t *relay;
    gq_broker_control *control;
} broker;

/* Say why this process ends: to whoever started it, and to the log when that is elsewhere. */
static int
complain (const gq_options *options, const gq_error *error, int code)
{
    fprintf (stderr, "gradq-broker: %s\n", error->text);
    if (options != NULL && gq_options_text (options, "log-file") != NULL)
        gq_log (GQ_LOG_ERROR, "stopped", "message", "s", error->text, NULL);
    return code;
}

/* Binding an ipc path takes it away from whoever has it, without a word: lock it first. */
static gq_status
lock_address (broker *self, gq_error *error)
{
    const char *path = self->endpoints.control + strlen ("ipc://");
    if (strncmp (self->endpoints.control, "ipc://", strlen ("ipc://")) != 0)
        return GQ_OK;
    char lock[GQ_ENDPOINT_MAX + 8];
    snprintf (lock, sizeof lock, "%s.lock", path);
    gq_status status = gq_service_lock (&self->lock_fd, lock, error);
    if (status == GQ_REFUSED)
        gq_fail (error, status, "another broker serves %s; stop it or choose another --address",
                 self->endpoints.control);
    return status;
}

static gq_status
start (broker *self, const gq_options *options, gq_error *error)
{
    gq_status status = lock_address (self, error);
    if (status != GQ_OK)
        return status;
    uint64_t queue_bytes = gq_options_count (options, "queue-bytes");
    const gq_socket_options router = {.type = ZMQ_ROUTER,
                                      .send_hwm = 1024,
                                      .receive_hwm = 64,
                                      .message_bytes_max = GQ_CONTROL_BYTES_MAX};
    self->router = gq_bind (&router, self->endpoints.control, error);
    if (self->router == NULL)
        return GQ_IO;
    self->near = gq_near_new ();
    if (self->near == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_gradients_config gradients = {.in = self->endpoints.gradients_in,
                                     .out = self->endpoints.gradients_out,
                                     .capacity = gq_options_count (options, "capacity"),
                                     .bytes_capacity = queue_bytes,
                                     .near = self->near};
    self->gradients = gq_gradients_start (&gradients);
    if (self->gradients == NULL) {
        *error = gradients.error;
        return GQ_IO;
    }
    gq_relay_config relay = {.weights_in = self->endpoints.weights_in,
                             .weights_out = self->endpoints.weights_out,
                             .acks_out = self->endpoints.acks_out,
                             .frame_bytes_max = queue_bytes,
                             .near = self->near};
    self->relay = gq_relay_start (&relay);
    if (self->relay == NULL) {
        *error = relay.error;
        return GQ_IO;
    }
    self->control = gq_broker_control_new (self->router, self->gradients, self->relay, self->near,
                                           &self->endpoints, queue_bytes, gq_now_ns ());
    return self->control != NULL ? GQ_OK : gq_fail (error, GQ_MEMORY, "out of memory");
}

static void
serve (broker *self)
{
    for (int signal_number = 0; signal_number != SIGINT && signal_number != SIGTERM;) {
        zmq_pollitem_t items[] = {{.socket = zsock_resolve (self->router), .events = ZMQ_POLLIN},
                                  {.fd = self->signal_fd, .events = ZMQ_POLLIN}};
        zmq_poll (items, 2, gq_broker_control_owes (self->control) ? OWING_MS : IDLE_MS);
        gq_broker_control_serve (self->control, gq_now_ns ());
        signal_number = gq_service_signal (self->signal_fd);
    }
    gq_log (GQ_LOG_INFO, "stopping", NULL);
}

static void
stop (broker *self)
{
    gq_broker_control_free (&self->control);
    zactor_destroy (&self->gradients);
    zactor_destroy (&self->relay);
    gq_near_free (&self->near);
    zsock_destroy (&self->router);
    if (self->lock_fd >= 0)
        close (self->lock_fd);
}

static int
run (const gq_options *options)
{
    gq_error error = {""};
    broker self = {.signal_fd = -1, .lock_fd = -1};
    gq_status status =
        gq_endpoints_derive (&self.endpoints, gq_options_text (options, "address"), &error);
    if (status != GQ_OK)
        return complain (options, &error, GQ_EXIT_CONFIG);
    umask (0077); /* ipc sockets are for this user */
    self.signal_fd = gq_service_start (&error);
    if (self.signal_fd < 0)
        return complain (options, &error, GQ_EXIT_FAILED);
    status = start (&self, options, &error);
    if (status == GQ_OK) {
        gq_log (GQ_LOG_INFO, "ready", "address", "s", self.endpoints.control, "capacity", "u",
                gq_options_count (options, "capacity"), NULL);
        serve (&self);
    }
    stop (&self);
    close (self.signal_fd);
    zsys_shutdown ();
    return status == GQ_OK ? GQ_EXIT_OK : complain (options, &error, GQ_EXIT_FAILED);
}

int
main (int argc, char **argv)
{
    gq_error error;
    gq_options *options = NULL;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_BROKER, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status == GQ_OK)
        status = gq_log_open ("broker", gq_options_text (options, "log-file"),
                              gq_log_level_from (gq_options_text (options, "log-level")), &error);
    int code = status == GQ_OK ? run (options) : complain (NULL, &error, gq_options_exit (status));
    gq_options_free (&options);
    return code;
}
