/*
 * Server.  One loop, each phase bounded: control requests, a batch of gradients, what is due to be
 * published, timers.  Only this thread touches weights, moments and ledger.
 */
#include "server.h"

#include <czmq.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "core.h"
#include "endpoint.h"
#include "hello.h"
#include "identity.h"
#include "log.h"
#include "publish.h"
#include "service.h"
#include "socket.h"
#include "stats.h"

#define MS_NS 1000000u
#define S_NS  1000000000u
/* Gradients between two looks at the other phases, in number and in time. */
#define BATCH_MAX 64
#define BATCH_NS  1000000u
/* Gradients already on their way to us that a clean stop still applies, at most. */
#define DRAIN_MAX    64
#define REQUESTS_MAX 64
#define REPORT_NS    1000000000u
/* With --aggregate, say so when a step has waited this long for its gradients. */
#define STARVED_NS 10000000000u

typedef struct server {
    const gq_options *options;
    char directory[PATH_MAX]; /* of checkpoints */
    int lock_fd;
    int signal_fd;
    zsock_t *gradients; /* PULL */
    zsock_t *weights;   /* PUB */
    zsock_t *control;   /* DEALER */
    gq_endpoints endpoints;
    gq_identity identity;
    gq_rule *rule;
    gq_core core;
    gq_publisher publisher;
    gq_histogram apply_us;
    uint64_t report_ns;     /* due */
    uint64_t checkpoint_ns; /* due */
    uint64_t checkpoint_interval_ns;
    uint64_t checkpoint_version; /* of the last one written, UINT64_MAX: none */
    uint64_t step_ns;            /* last time that a gradient came or a step was made */
    bool refused;                /* the broker serves another optimizer */
    gq_error reason;
} server;

static gq_status
write_checkpoint (server *self, gq_error *error)
{
    char path[PATH_MAX];
    uint64_t start_ns = gq_now_ns ();
    self->checkpoint_ns = start_ns + self->checkpoint_interval_ns;
    if (!self->core.has_weights || self->checkpoint_version == self->core.version)
        return GQ_OK;
    gq_status status =
        gq_checkpoint_write (&self->core, self->directory,
                             gq_options_count (self->options, "checkpoints-kept"), path, error);
    if (status != GQ_OK) {
        gq_log (GQ_LOG_ERROR, "checkpoint failed; training goes on", "message", "s", error->text,
                NULL);
        return status;
    }
    self->checkpoint_version = self->core.version;
    gq_log (GQ_LOG_INFO, "checkpoint written", "path", "s", path, "version", "u",
            self->core.version, "ms", "u", (gq_now_ns () - start_ns) / MS_NS, NULL);
    return GQ_OK;
}

static void
log_outcome (const server *self, gq_outcome outcome, const gq_frame *frame, gq_status reason)
{
    static const char *const names[] = {[GQ_OUTCOME_STEPPED] = "applied",
                                        [GQ_OUTCOME_HELD] = "held",
                                        [GQ_OUTCOME_REFUSED] = "refused",
                                        [GQ_OUTCOME_IGNORED] = "ignored",
                                        [GQ_OUTCOME_STARTED] = "started"};
    gq_log_level level = outcome == GQ_OUTCOME_REFUSED ? GQ_LOG_WARNING : GQ_LOG_DEBUG;
    if (gq_log_on (level))
        gq_log (level, names[outcome], "actor", "u", (uint64_t)frame->actor, "epoch", "u",
                (uint64_t)frame->epoch, "sequence", "u", frame->sequence, "from_version", "u",
                frame->version, "version", "u", self->core.version, "reason", "s",
                gq_status_name (reason), NULL);
}

/* One frame, if one is here. */
static bool
take_one (server *self)
{
    void *socket = zsock_resolve (self->gradients);
    zmq_msg_t message;
    zmq_msg_init (&message);
    if (zmq_msg_recv (&message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close (&message);
        return false;
    }
    if (gq_socket_whole (socket)) {
        gq_frame frame;
        gq_status reason;
        uint64_t start_ns = gq_now_ns ();
        gq_outcome outcome = gq_core_take (&self->core, zmq_msg_data (&message),
                                           zmq_msg_size (&message), &frame, &reason);
        self->step_ns = gq_now_ns ();
        if (outcome == GQ_OUTCOME_STEPPED)
            gq_histogram_add (&self->apply_us, (self->step_ns - start_ns) / 1000);
        log_outcome (self, outcome, &frame, reason);
        gq_error error;
        if (outcome == GQ_OUTCOME_STARTED) /* a crash from now on comes back to these weights */
            (void)!write_checkpoint (self, &error);
    } else {
        self->core.malformed++;
    }
    zmq_msg_close (&message);
    return true;
}

static void
take_gradients (server *self)
{
    uint64_t until_ns = gq_now_ns () + BATCH_NS;
    for (int i = 0; i < BATCH_MAX && take_one (self) && gq_now_ns () < until_ns; i++)
        continue;
}

static void
send_json (server *self, json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps (object, JSON_COMPACT);
    if (text != NULL)
        (void)!gq_socket_send (zsock_resolve (self->control), text, strlen (text));
    free (text);
    json_decref (object);
}

/* A request that the broker passes on, or its refusal of our report. */
static void
serve_message (server *self, const json_t *message)
{
    const char *op = json_string_value (json_object_get (message, "op"));
    if (op != NULL && strcmp (op, "report") == 0 &&
        json_is_false (json_object_get (message, "ok"))) {
        const char *text = json_string_value (json_object_get (message, "message"));
        self->refused = true;
        gq_fail (&self->reason, GQ_REFUSED, "%s", text != NULL ? text : "refused by the broker");
    } else {
        send_json (self, gq_hello_answer (&self->core, &self->identity, message));
    }
}

static void
serve_control (server *self)
{
    void *socket = zsock_resolve (self->control);
    zmq_msg_t message;
    zmq_msg_init (&message);
    for (int i = 0; i < REQUESTS_MAX && zmq_msg_recv (&message, socket, ZMQ_DONTWAIT) >= 0; i++) {
        if (!gq_socket_whole (socket))
            continue;
        json_t *json = json_loadb (zmq_msg_data (&message), zmq_msg_size (&message), 0, NULL);
        if (json_is_object (json))
            serve_message (self, json);
        json_decref (json);
    }
    zmq_msg_close (&message);
}

static void
warn_if_starved (server *self, uint64_t now_ns)
{
    if (self->core.held == 0 || now_ns - self->step_ns < STARVED_NS)
        return;
    self->step_ns = now_ns;
    gq_log (GQ_LOG_WARNING, "a step waits for gradients; is --aggregate above actors x window?",
            "held", "u", (uint64_t)self->core.held, "aggregate", "u",
            (uint64_t)self->core.config.aggregate, NULL);
}

static void
run_timers (server *self)
{
    uint64_t now_ns = gq_now_ns ();
    gq_error error;
    if (now_ns >= self->report_ns) {
        self->report_ns = now_ns + REPORT_NS;
        send_json (self, gq_hello_report (&self->core, &self->publisher, &self->apply_us,
                                          self->checkpoint_version));
        warn_if_starved (self, now_ns);
    }
    if (self->checkpoint_interval_ns > 0 && now_ns >= self->checkpoint_ns)
        (void)!write_checkpoint (self, &error);
}

static long
wait_ms (const server *self, uint64_t now_ns)
{
    uint64_t next_ns = gq_publish_next_ns (&self->publisher, &self->core);
    if (self->report_ns < next_ns)
        next_ns = self->report_ns;
    if (self->checkpoint_interval_ns > 0 && self->checkpoint_ns < next_ns)
        next_ns = self->checkpoint_ns;
    return next_ns <= now_ns ? 0 : (long)((next_ns - now_ns + MS_NS - 1) / MS_NS);
}

/* false: time to stop. */
static bool
handle_signal (server *self)
{
    gq_error error;
    int number = gq_service_signal (self->signal_fd);
    if (number == SIGUSR1) {
        self->checkpoint_version = UINT64_MAX; /* asked for: write even when nothing changed */
        (void)!write_checkpoint (self, &error);
    }
    return number != SIGINT && number != SIGTERM;
}

static void
loop (server *self)
{
    for (bool more = true; more && !self->refused;) {
        zmq_pollitem_t items[] = {{.socket = zsock_resolve (self->gradients), .events = ZMQ_POLLIN},
                                  {.socket = zsock_resolve (self->control), .events = ZMQ_POLLIN},
                                  {.fd = self->signal_fd, .events = ZMQ_POLLIN}};
        zmq_poll (items, 3, wait_ms (self, gq_now_ns ()));
        if (items[1].revents)
            serve_control (self);
        take_gradients (self);
        gq_publish_due (&self->publisher, &self->core, gq_now_ns ());
        run_timers (self);
        if (items[2].revents)
            more = handle_signal (self);
    }
}

/* Apply what is on its way already, write the last checkpoint, say bye. */
static gq_status
finish (server *self, gq_error *error)
{
    for (int i = 0; i < DRAIN_MAX && take_one (self); i++)
        continue;
    self->publisher.interval_ns = 0;
    gq_publish_due (&self->publisher, &self->core, gq_now_ns ());
    if (self->core.held > 0)
        gq_log (GQ_LOG_WARNING, "an incomplete step is dropped", "held", "u",
                (uint64_t)self->core.held, NULL);
    gq_status status = write_checkpoint (self, error);
    send_json (self, gq_hello_report (&self->core, &self->publisher, &self->apply_us,
                                      self->checkpoint_version));
    send_json (self, json_pack ("{s:s, s:s}", "op", "bye", "role", "optimizer"));
    gq_log (GQ_LOG_INFO, "stopped", "version", "u", self->core.version, "applied", "u",
            self->core.applied, "rejected", "u", gq_core_rejected (&self->core), NULL);
    return status;
}

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

static gq_status
open_sockets (server *self, gq_error *error)
{
    int64_t frame_max = (int64_t)(GQ_FRAME_HEADER_BYTES + GQ_PARAMETERS_MAX * sizeof (float));
    const gq_socket_options gradients = {.type = ZMQ_PULL,
                                         .send_hwm = 1,
                                         .receive_hwm = 1,
                                         .buffer_bytes = 64 * 1024,
                                         .message_bytes_max = frame_max};
    /* Versions on their way are bounded by the buffers; this bounds acknowledgements. */
    const gq_socket_options weights = {.type = ZMQ_PUB,
                                       .send_hwm = 1024,
                                       .receive_hwm = 16,
                                       .message_bytes_max = 64,
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
    if (all)
        self->publisher.socket = zsock_resolve (self->weights);
    return all ? GQ_OK : GQ_IO;
}

/* Weights: from the newest checkpoint, from --init, or later from the first actor. */
static gq_status
find_weights (server *self, gq_error *error)
{
    const char *init = gq_options_text (self->options, "init");
    bool any = gq_checkpoint_any (self->directory);
    if (any && gq_options_flag (self->options, "resume"))
        return gq_checkpoint_resume (&self->core, self->directory, error);
    if (any)
        return gq_fail (error, GQ_INVALID,
                        "%s holds checkpoints of a run; add --resume to go on with it, or choose "
                        "another --run directory",
                        self->directory);
    return init == NULL ? GQ_OK : gq_checkpoint_init (&self->core, init, error);
}

static gq_status
open_run (server *self, gq_error *error)
{
    const char *run = gq_options_text (self->options, "run");
    char lock[PATH_MAX + 32];
    if (run == NULL)
        return gq_fail (error, GQ_INVALID,
                        "--run DIR is needed: checkpoints, the term and the lock live there");
    if (mkdir (run, 0755) != 0 && errno != EEXIST)
        return gq_fail (error, GQ_IO, "cannot create %s: %s", run, strerror (errno));
    snprintf (self->directory, sizeof self->directory, "%.4000s/checkpoints", run);
    snprintf (lock, sizeof lock, "%.4000s/optimizer.lock", run);
    gq_status status = gq_service_lock (&self->lock_fd, lock, error);
    if (status == GQ_REFUSED)
        return gq_fail (error, status,
                        "another optimizer works in %s; stop it, or choose another "
                        "--run directory",
                        run);
    if (status == GQ_OK)
        status = gq_identity_open (&self->identity, run, error);
    if (status == GQ_OK)
        status = find_weights (self, error);
    memcpy (self->core.run, self->identity.run, GQ_RUN_ID_BYTES);
    self->core.term = self->identity.term;
    return status;
}

static gq_status
load_rule (server *self, gq_error *error)
{
    gq_error warning = {""};
    const char *const *sets;
    size_t set_count = gq_options_list (self->options, "set", &sets);
    gq_status status = gq_rule_load (&self->rule, gq_options_text (self->options, "optimizer"),
                                     gq_options_text (self->options, "plugins"), sets, set_count,
                                     gq_options_text (self->options, "cpu"), &warning, error);
    if (status == GQ_OK && warning.text[0] != '\0')
        gq_log (GQ_LOG_WARNING, warning.text, NULL);
    return status;
}

static gq_status
start (server *self, gq_error *error)
{
    const gq_options *options = self->options;
    const char *weights = gq_options_text (options, "aggregate-weights");
    gq_status status =
        gq_endpoints_derive (&self->endpoints, gq_options_text (options, "address"), error);
    if (status == GQ_OK)
        status = load_rule (self, error);
    if (status != GQ_OK)
        return status;
    const gq_core_config config = {
        .aggregate = (uint32_t)gq_options_count (options, "aggregate"),
        .weigh_samples = strcmp (weights, "samples") == 0,
        .max_staleness = gq_options_count (options, "max-staleness"),
        .damp = strcmp (gq_options_text (options, "staleness-policy"), "damp") == 0};
    gq_core_init (&self->core, &config, self->rule);
    self->publisher.interval_ns =
        (uint64_t)(gq_options_number (options, "publish-interval-ms") * MS_NS);
    self->checkpoint_interval_ns =
        (uint64_t)(gq_options_number (options, "checkpoint-interval-s") * S_NS);
    self->checkpoint_version = UINT64_MAX;
    status = open_run (self, error);
    if (status == GQ_OK)
        status = open_sockets (self, error);
    if (status != GQ_OK)
        return status;
    gq_log (GQ_LOG_INFO, "ready", "address", "s", self->endpoints.control, "optimizer", "s",
            gq_rule_plugin (self->rule)->name, "cpu", "s", gq_rule_cpu (self->rule), "term", "u",
            (uint64_t)self->core.term, "version", "u", self->core.version, NULL);
    return write_checkpoint (self, error);
}

static void
stop (server *self)
{
    zsock_destroy (&self->gradients);
    zsock_destroy (&self->control);
    zsock_destroy (&self->weights);
    zsys_shutdown (); /* ends ZeroMQ's threads: after it, no buffer is lent any more */
    gq_core_clear (&self->core);
    gq_rule_free (&self->rule);
    if (self->lock_fd >= 0)
        close (self->lock_fd);
    if (self->signal_fd >= 0)
        close (self->signal_fd);
}

static int
exit_code (gq_status status)
{
    switch (status) {
    case GQ_OK:
        return GQ_EXIT_OK;
    case GQ_INVALID:
    case GQ_NOTFOUND:
    case GQ_ABI:
    case GQ_MALFORMED:
        return GQ_EXIT_CONFIG;
    default:
        return GQ_EXIT_FAILED;
    }
}

int
gq_server_run (const gq_options *options, gq_error *error)
{
    server *self = calloc (1, sizeof *self);
    if (self == NULL)
        return exit_code (gq_fail (error, GQ_MEMORY, "out of memory"));
    self->options = options;
    self->lock_fd = -1;
    self->signal_fd = gq_service_start (error);
    gq_status status = self->signal_fd < 0 ? GQ_IO : start (self, error);
    if (status == GQ_OK) {
        loop (self);
        status = finish (self, error);
        if (self->refused)
            status = gq_fail (error, GQ_REFUSED, "%s", self->reason.text);
    }
    stop (self);
    free (self);
    return exit_code (status);
}
