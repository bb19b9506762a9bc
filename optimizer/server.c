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

#include "core.h"
#include "crash.h"
#include "hello.h"
#include "log.h"
#include "outcome_log.h"
#include "publish.h"
#include "run.h"
#include "server_sockets.h"
#include "service.h"
#include "socket.h"
#include "stats.h"
#include "taken.h"

#define MS_NS 1000000u
#define S_NS  1000000000u
/* Gradients between two looks at the other phases, in number and in time. */
#define BATCH_MAX 64
#define BATCH_NS  1000000u
/* Gradients already on their way to us that a clean stop still applies, at most. */
#define DRAIN_MAX    64
#define REQUESTS_MAX 64
#define REPORT_NS    1000000000u
/* Between two looks whether the journal has room again. */
#define RETRY_NS 100000000u
/* Between two tries to write a checkpoint that the journal's size asks for. */
#define CHECKPOINT_RETRY_NS 1000000000u
/* With --aggregate, say so when a step has waited this long for its gradients. */
#define ALONE_NS   5000000000u
#define STARVED_NS 10000000000u

typedef struct server {
    const gq_options *options;
    gq_run run;
    int signal_fd;
    gq_server_sockets sockets;
    gq_core core;
    gq_publisher publisher;
    gq_histogram apply_us;
    gq_taken taken;
    uint64_t report_ns;     /* due */
    uint64_t checkpoint_ns; /* due */
    uint64_t checkpoint_interval_ns;
    uint64_t checkpoint_retry_ns; /* after one that failed: none before this */
    uint64_t alone_ns; /* last time that the broker took a report, or its absence was logged */
    uint64_t step_ns;  /* last time that a step was made or got one more of its gradients */
    gq_outcome_log log;
    zmq_msg_t hand; /* a gradient that the journal had no room for: nothing more is taken */
    bool holding;
    uint64_t retry_ns; /* when to try it again */
    gq_status end;     /* why this process has to end; GQ_OK: it has not */
    gq_error reason;
} server;

static gq_status
write_checkpoint (server *self, gq_error *error)
{
    char path[PATH_MAX];
    uint64_t start_ns = gq_now_ns ();
    self->checkpoint_ns = start_ns + self->checkpoint_interval_ns;
    /* The version may stand still while refusals or a long step fill the journal. */
    if (!self->core.has_weights ||
        (self->run.checkpoint_version == self->core.version && !gq_run_checkpoint_due (&self->run)))
        return GQ_OK;
    gq_status status = gq_run_checkpoint (&self->run, &self->core, path, error);
    if (status != GQ_OK) {
        self->checkpoint_retry_ns = gq_now_ns () + CHECKPOINT_RETRY_NS;
        gq_log (GQ_LOG_ERROR, "checkpoint failed", "message", "s", error->text, NULL);
        return status;
    }
    gq_log (GQ_LOG_INFO, "checkpoint written", "path", "s", path, "version", "u",
            self->core.version, "ms", "u", (gq_now_ns () - start_ns) / MS_NS, NULL);
    return GQ_OK;
}

/* This process cannot go on: the disk failed, or another optimizer is in its place. */
static void
give_up (server *self, gq_status status, const char *sentence)
{
    self->end = gq_fail (&self->reason, status, "%s", sentence);
}

static void
disk_failed (server *self)
{
    give_up (self, GQ_IO,
             "the journal cannot be written: the disk failed.  Nothing that was "
             "acknowledged is lost; repair the disk and start with --resume");
}

/* The journal had no room for the gradient in hand, or failed. */
static void
journal_blocked (server *self, gq_status reason)
{
    if (reason != GQ_FULL) {
        disk_failed (self);
        return;
    }
    if (self->retry_ns == 0)
        gq_log (GQ_LOG_ERROR, "no space for the journal; no gradient is taken until there is",
                NULL);
    self->retry_ns = gq_now_ns () + RETRY_NS;
}

/* Without a checkpoint of the first weights the journal behind them would be worth nothing. */
static void
keep_first_weights (server *self)
{
    gq_error error;
    if (write_checkpoint (self, &error) == GQ_OK)
        return;
    self->core.has_weights = false; /* the actor offers them again */
}

static void
take (server *self)
{
    gq_frame frame;
    gq_status reason;
    uint64_t start_ns = gq_now_ns ();
    gq_crash_point ("after-receive");
    gq_outcome outcome = gq_core_take (&self->core, zmq_msg_data (&self->hand),
                                       zmq_msg_size (&self->hand), &frame, &reason);
    const uint64_t now_ns = gq_now_ns ();
    gq_outcome_log_add (&self->log, &self->core, outcome, &frame, reason, now_ns);
    if (outcome == GQ_OUTCOME_BLOCKED) {
        journal_blocked (self, reason);
        return;
    }
    if (outcome == GQ_OUTCOME_STEPPED || outcome == GQ_OUTCOME_HELD)
        self->step_ns = now_ns;
    if (outcome == GQ_OUTCOME_STEPPED)
        gq_histogram_add (&self->apply_us, (now_ns - start_ns) / 1000);
    if (outcome == GQ_OUTCOME_STARTED)
        keep_first_weights (self);
    zmq_msg_close (&self->hand);
    self->holding = false;
    self->retry_ns = 0;
    if (!self->core.early)
        gq_taken_add (&self->taken);
    if (self->core.lanes != NULL)
        gq_taken_early (&self->taken, gq_lanes_early (self->core.lanes));
}

/* The descriptor of a gradient that lies ready already, while it is still in the queue.  Only when
 * nothing else is here: who goes through sockets comes first; and first weights before any
 * gradient, or one that must follow them would be refused. */
static bool
receive_early (server *self)
{
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    if (self->core.lanes == NULL || !self->core.has_weights ||
        !gq_lanes_ready (self->core.lanes, &self->core.ledger, header))
        return false;
    if (zmq_msg_init_size (&self->hand, sizeof header) != 0)
        return false;
    memcpy (zmq_msg_data (&self->hand), header, sizeof header);
    self->core.early = self->holding = true;
    return true;
}

/* Is what is in hand the broker's mark, and no gradient? */
static bool
take_mark (server *self)
{
    bool another;
    if (!gq_taken_mark (&self->taken, zmq_msg_data (&self->hand), zmq_msg_size (&self->hand),
                        &another))
        return false;
    if (another && self->core.lanes != NULL)
        gq_lanes_forget_early (self->core.lanes);
    zmq_msg_close (&self->hand);
    self->holding = false;
    return true;
}

/* One frame, if one is here and can be taken. */
static bool
take_one (server *self)
{
    void *socket = zsock_resolve (self->sockets.gradients);
    if (self->end != GQ_OK || (self->holding && gq_now_ns () < self->retry_ns))
        return false;
    if (!self->holding) {
        self->core.early = false;
        zmq_msg_init (&self->hand);
        self->holding = zmq_msg_recv (&self->hand, socket, ZMQ_DONTWAIT) >= 0;
        if (self->holding && !gq_socket_whole (socket)) {
            self->core.malformed++;
            self->holding = false;
        }
        if (!self->holding) {
            zmq_msg_close (&self->hand);
            if (!receive_early (self))
                return false;
        }
        if (take_mark (self))
            return true;
    }
    take (self);
    return !self->holding;
}

static void
take_gradients (server *self)
{
    uint64_t until_ns = gq_now_ns () + BATCH_NS;
    for (int i = 0; i < BATCH_MAX && take_one (self) && gq_now_ns () < until_ns; i++)
        continue;
    gq_taken_report (&self->taken, zsock_resolve (self->sockets.control), gq_now_ns ());
}

/* Send and release.  false: no broker is connected, or it does not read. */
static bool
send_json (server *self, json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps (object, JSON_COMPACT);
    bool sent = text != NULL && gq_socket_send (zsock_resolve (self->sockets.control), text,
                                                strlen (text)) == GQ_OK;
    free (text);
    json_decref (object);
    return sent;
}

/* A request that the broker passes on, or its refusal of our report. */
static void
serve_message (server *self, const json_t *message)
{
    const char *op = json_string_value (json_object_get (message, "op"));
    if (op != NULL && strcmp (op, "report") == 0 &&
        json_is_false (json_object_get (message, "ok"))) {
        const char *text = json_string_value (json_object_get (message, "message"));
        give_up (self, GQ_REFUSED, text != NULL ? text : "refused by the broker");
    } else {
        const bool shared = self->core.lanes != NULL;
        json_t *answer = gq_hello_answer (&self->core, &self->run.identity, message);
        if (self->core.lanes != NULL && !shared)
            self->report_ns = 0; /* the broker may share memory, too */
        /* A grant is a promise too: as safe as --fsync says, before it is given. */
        if (self->run.journal.failed || gq_run_sync (&self->run, gq_now_ns ()) != GQ_OK) {
            disk_failed (self);
            json_decref (answer);
        } else {
            send_json (self, answer);
        }
    }
}

static void
serve_control (server *self)
{
    void *socket = zsock_resolve (self->sockets.control);
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

/* An optimizer waits for its broker for ever, since a supervisor may bring it back, but says so. */
static void
warn_if_alone (server *self, bool sent, uint64_t now_ns)
{
    if (sent)
        self->alone_ns = now_ns;
    if (now_ns - self->alone_ns < ALONE_NS)
        return;
    self->alone_ns = now_ns;
    gq_log (GQ_LOG_WARNING, "no broker answers; waiting for it", "address", "s",
            self->sockets.endpoints.control, NULL);
}

static void
run_timers (server *self)
{
    uint64_t now_ns = gq_now_ns ();
    gq_error error;
    if (now_ns >= self->report_ns) {
        bool sent =
            send_json (self, gq_hello_report (&self->core, &self->publisher, &self->apply_us,
                                              self->run.checkpoint_version));
        /* Before the connection stands, try often: actors wait for the broker to know us. */
        self->report_ns = now_ns + (sent ? REPORT_NS : RETRY_NS);
        if (self->core.lanes != NULL)
            gq_lanes_tend (self->core.lanes);
        warn_if_alone (self, sent, now_ns);
        warn_if_starved (self, now_ns);
    }
    if ((self->checkpoint_interval_ns > 0 && now_ns >= self->checkpoint_ns) ||
        (now_ns >= self->checkpoint_retry_ns && gq_run_checkpoint_due (&self->run)))
        (void)!write_checkpoint (self, &error);
}

static long
wait_ms (const server *self, uint64_t now_ns)
{
    uint64_t next_ns = gq_publish_next_ns (&self->publisher, &self->core);
    if (self->report_ns < next_ns)
        next_ns = self->report_ns;
    if (gq_taken_next_ns (&self->taken) < next_ns)
        next_ns = gq_taken_next_ns (&self->taken);
    if (self->checkpoint_interval_ns > 0 && self->checkpoint_ns < next_ns)
        next_ns = self->checkpoint_ns;
    if (self->holding && self->retry_ns < next_ns)
        next_ns = self->retry_ns;
    if (self->run.fsync == GQ_FSYNC_INTERVAL && self->run.journal.unsynced &&
        self->run.fsync_ns < next_ns)
        next_ns = self->run.fsync_ns;
    return next_ns <= now_ns ? 0 : (long)((next_ns - now_ns + MS_NS - 1) / MS_NS);
}

/* What is acknowledged is in the journal; how safely there, --fsync says. */
static void
publish (server *self)
{
    if (self->end == GQ_OK && gq_run_sync (&self->run, gq_now_ns ()) != GQ_OK)
        disk_failed (self);
    if (self->end != GQ_OK)
        return;
    gq_crash_point ("before-publish");
    gq_publish_due (&self->publisher, &self->core, gq_now_ns ());
}

/* false: time to stop. */
static bool
handle_signal (server *self)
{
    gq_error error;
    int number = gq_service_signal (self->signal_fd);
    if (number == SIGUSR1) {
        self->run.checkpoint_version = UINT64_MAX; /* asked for: write even when nothing changed */
        (void)!write_checkpoint (self, &error);
    }
    return number != SIGINT && number != SIGTERM;
}

/* How long to sleep, at most, when actors of this host know that we do and ring. */
static long
fall_asleep (server *self)
{
    const long timeout_ms = wait_ms (self, gq_now_ns ());
    if (timeout_ms == 0 || self->core.lanes == NULL)
        return timeout_ms;
    gq_board_set_idle (gq_lanes_board (self->core.lanes), true);
    /* Who was ready before has not rung. */
    if (!take_one (self))
        return timeout_ms;
    publish (self);
    return 0;
}

static void
loop (server *self)
{
    for (bool more = true; more && self->end == GQ_OK;) {
        const long timeout_ms = fall_asleep (self);
        const gq_lanes *lanes = self->core.lanes;
        const int bell = lanes != NULL ? gq_lanes_bell (lanes) : -1;
        zmq_pollitem_t items[] = {
            {.socket = zsock_resolve (self->sockets.gradients),
             .events = self->holding ? 0 : ZMQ_POLLIN},
            {.socket = zsock_resolve (self->sockets.control), .events = ZMQ_POLLIN},
            {.socket = zsock_resolve (self->sockets.weights), .events = ZMQ_POLLIN},
            {.fd = self->signal_fd, .events = ZMQ_POLLIN},
            {.fd = bell, .events = ZMQ_POLLIN}};
        zmq_poll (items, bell >= 0 ? 5 : 4, timeout_ms);
        if (lanes != NULL)
            gq_board_set_idle (gq_lanes_board (self->core.lanes), false);
        if (items[4].revents)
            gq_lanes_silence (lanes);
        if (items[1].revents)
            serve_control (self);
        if (items[2].revents)
            gq_publish_subscriptions (&self->publisher);
        take_gradients (self);
        publish (self);
        run_timers (self);
        if (items[3].revents)
            more = handle_signal (self);
    }
}

/* Apply what is on its way already, write the last checkpoint, say bye. */
static gq_status
finish (server *self, gq_error *error)
{
    for (int i = 0; i < DRAIN_MAX && take_one (self); i++)
        continue;
    self->taken.due_ns = 0;
    gq_taken_report (&self->taken, zsock_resolve (self->sockets.control), gq_now_ns ());
    self->publisher.interval_ns = 0;
    self->publisher.last = true;
    self->publisher.weights_ns = 0;
    publish (self);
    gq_status status = self->end == GQ_OK ? write_checkpoint (self, error)
                                          : gq_fail (error, self->end, "%s", self->reason.text);
    send_json (self, gq_hello_report (&self->core, &self->publisher, &self->apply_us,
                                      self->run.checkpoint_version));
    send_json (self, json_pack ("{s:s, s:s}", "op", "bye", "role", "optimizer"));
    gq_log (GQ_LOG_INFO, "stopped", "version", "u", self->core.version, "applied", "u",
            self->core.applied, "rejected", "u", gq_core_rejected (&self->core), NULL);
    return status;
}

static gq_status
start (server *self, gq_error *error)
{
    const gq_options *options = self->options;
    self->publisher.interval_ns =
        (uint64_t)(gq_options_number (options, "publish-interval-ms") * MS_NS);
    self->checkpoint_interval_ns =
        (uint64_t)(gq_options_number (options, "checkpoint-interval-s") * S_NS);
    gq_status status =
        gq_endpoints_derive (&self->sockets.endpoints, gq_options_text (options, "address"), error);
    if (status == GQ_OK)
        status = gq_run_open (&self->run, &self->core, options, error);
    if (status == GQ_OK)
        status = gq_server_sockets_open (&self->sockets, error);
    if (status != GQ_OK)
        return status;
    self->publisher.socket = zsock_resolve (self->sockets.weights);
    const bool shares = strcmp (gq_options_text (options, "lane"), "inline") != 0;
    if (shares)
        self->core.lane_directory = self->run.lane_directory;
    self->alone_ns = self->step_ns = gq_now_ns ();
    gq_log (GQ_LOG_INFO, "ready", "address", "s", self->sockets.endpoints.control, "optimizer", "s",
            gq_rule_plugin (self->core.rule)->name, "cpu", "s", gq_rule_cpu (self->core.rule),
            "term", "u", (uint64_t)self->core.term, "version", "u", self->core.version, NULL);
    /* Of weights or a rule that begin here, or of what lay in shared memory, which is used anew
     * after this; a life that cannot keep them takes no gradient. */
    status = write_checkpoint (self, error);
    if (status == GQ_OK && shares)
        gq_core_share (&self->core);
    else if (status == GQ_OK)
        gq_lanes_sweep (self->run.lane_directory);
    return status;
}

static void
stop (server *self)
{
    if (self->holding)
        zmq_msg_close (&self->hand);
    gq_server_sockets_close (&self->sockets);
    zsys_shutdown (); /* ends ZeroMQ's threads: after it, no buffer is lent any more */
    gq_core_clear (&self->core);
    gq_run_close (&self->run);
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
    self->run.lock_fd = -1;
    self->signal_fd = gq_service_start (error);
    gq_status status = self->signal_fd < 0 ? GQ_IO : start (self, error);
    if (status == GQ_OK) {
        loop (self);
        status = finish (self, error);
    }
    stop (self);
    free (self);
    return exit_code (status);
}
