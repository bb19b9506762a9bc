/*
 * Bound sockets and thread start-up for the broker.
 */
#include "bind.h"

zsock_t *
gq_bind (const gq_socket_options *options, const char *endpoint, gq_error *error)
{
    zsock_t *socket = zsock_new (options->type);
    if (socket == NULL) {
        gq_fail (error, GQ_MEMORY, "no socket: %s", zmq_strerror (errno));
        return NULL;
    }
    gq_socket_set (zsock_resolve (socket), options);
    /* With a ZAP domain libzmq turns peers away that do not speak ZMTP 3.  Without one it takes any
     * bytes for the greeting of an old peer, and a web browser on the wrong port for a PULL that
     * gradients may be handed to.  No handler is installed: nobody else is turned away. */
    zsock_set_zap_domain (socket, "gradq");
    if (zmq_bind (zsock_resolve (socket), endpoint) != 0) {
        gq_fail (error, GQ_IO,
                 "cannot bind %s: %s; is another broker running there?  Stop it or choose another "
                 "--address",
                 endpoint, zmq_strerror (errno));
        zsock_destroy (&socket);
    }
    return socket;
}

zactor_t *
gq_thread_start (zactor_fn *run, void *config, gq_error *error)
{
    /* zactor_new waits for the thread's signal but does not tell what it was: *error does. */
    error->text[0] = '\0';
    zactor_t *thread = zactor_new (run, config);
    if (thread != NULL && error->text[0] != '\0')
        zactor_destroy (&thread);
    return thread;
}

bool
gq_thread_ask (zactor_t *thread, void *stats, size_t size)
{
    if (zstr_send (thread, "STATS") != 0)
        return false;
    zframe_t *answer = zframe_recv (thread);
    bool whole = answer != NULL && zframe_size (answer) == size;
    if (whole)
        memcpy (stats, zframe_data (answer), size);
    zframe_destroy (&answer);
    return whole;
}
