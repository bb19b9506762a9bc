/*
 * gradq-exporter: the broker's figures over HTTP, /metrics for Prometheus and /stats.json.
 *
 * Beside a gradient's path: asks the broker's control socket once an interval, however many ask
 * here, and serves the pages of the last answer.  Must never change a run, and never ask the broker
 * because a peer asks us; what HTTP peers send is libmicrohttpd's to read, within limits.
 */
#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "gradq/gradq.h"
#include "options.h"
#include "stats.h"
#include "top.h"

/* As gradq-top has it; while the broker is silent we look for it often and briefly. */
#define ANSWER_WAIT_MS 2000
#define SILENT_WAIT_MS 300
/* More wait in the kernel's queue until one of these ends. */
#define CONNECTIONS_MAX 32
/* From its beginning to its end, for a peer that sends or reads a byte now and then is never idle.
 * Prometheus itself gives up after 10 s. */
#define CONNECTION_NS_MAX UINT64_C (10000000000)
/* For the head of a request and of its answer. */
#define CONNECTION_BYTES_MAX 16384
#define HOST_BYTES           256

#define METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define JSON_TYPE    "application/json"

typedef enum page { PAGE_METRICS, PAGE_JSON, PAGE_COUNT } page;

/* A connection that is open; since_ns 0: none. */
typedef struct visit {
    int fd;
    uint64_t since_ns;
} visit;

/* What the thread of libmicrohttpd shares with ours, which asks the broker. */
typedef struct server {
    struct MHD_Daemon *daemon;
    struct MHD_Response *unknown, *not_allowed; /* fixed */
    pthread_mutex_t lock;                       /* over all below */
    struct MHD_Response *pages[PAGE_COUNT];     /* of the last answer; counted by libmicrohttpd */
    visit visits[CONNECTIONS_MAX];
} server;

typedef struct exporter {
    const char *run;     /* NULL: the address is fixed */
    const char *address; /* when run is NULL */
    uint64_t interval_ns;
    gq_top_report report; /* newest; stats NULL before the first */
    uint64_t answered_ns; /* when that was, or when we began */
    bool silent;
    gq_error error; /* why it is silent */
    server server;
} exporter;

/* ---- HTTP: the thread of libmicrohttpd ---- */

static enum MHD_Result
on_request (void *user, struct MHD_Connection *connection, const char *url, const char *method,
            const char *version, const char *upload, size_t *upload_bytes, void **state)
{
    server *self = user;
    (void)version, (void)upload, (void)upload_bytes, (void)state;
    page wanted = strcmp (url, "/metrics") == 0      ? PAGE_METRICS
                  : strcmp (url, "/stats.json") == 0 ? PAGE_JSON
                                                     : PAGE_COUNT;
    /* Answered before any body has come: nothing that a peer may send further is of use. */
    if (wanted == PAGE_COUNT)
        return MHD_queue_response (connection, MHD_HTTP_NOT_FOUND, self->unknown);
    if (strcmp (method, "GET") != 0 && strcmp (method, "HEAD") != 0)
        return MHD_queue_response (connection, MHD_HTTP_METHOD_NOT_ALLOWED, self->not_allowed);
    pthread_mutex_lock (&self->lock);
    enum MHD_Result queued = MHD_queue_response (connection, MHD_HTTP_OK, self->pages[wanted]);
    pthread_mutex_unlock (&self->lock);
    return queued;
}

/* Called when a connection begins, and before its descriptor is closed. */
static void
on_connection (void *user, struct MHD_Connection *connection, void **context,
               enum MHD_ConnectionNotificationCode code)
{
    server *self = user;
    pthread_mutex_lock (&self->lock);
    if (code == MHD_CONNECTION_NOTIFY_CLOSED && *context != NULL)
        *(visit *)*context = (visit){0};
    for (size_t i = 0; code == MHD_CONNECTION_NOTIFY_STARTED && i < CONNECTIONS_MAX; i++) {
        visit *one = &self->visits[i];
        if (one->since_ns != 0)
            continue;
        one->fd =
            MHD_get_connection_info (connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        one->since_ns = gq_now_ns ();
        *context = one;
        break;
    }
    pthread_mutex_unlock (&self->lock);
}

/* ---- HTTP: our thread ---- */

/* Shut down, which the other thread sees as the peer's end, and closes. */
static void
end_long_visits (server *self, uint64_t now_ns)
{
    pthread_mutex_lock (&self->lock);
    for (size_t i = 0; i < CONNECTIONS_MAX; i++)
        if (self->visits[i].since_ns != 0 && now_ns - self->visits[i].since_ns > CONNECTION_NS_MAX)
            shutdown (self->visits[i].fd, SHUT_RDWR);
    pthread_mutex_unlock (&self->lock);
}

/* One answer to a connection: then the limits on connections are limits on requests, too. */
static struct MHD_Response *
respond (char *text, size_t bytes, enum MHD_ResponseMemoryMode memory, const char *type)
{
    struct MHD_Response *response = MHD_create_response_from_buffer (bytes, text, memory);
    if (response == NULL) {
        if (memory == MHD_RESPMEM_MUST_FREE)
            free (text);
        return NULL;
    }
    if (MHD_add_response_header (response, MHD_HTTP_HEADER_CONTENT_TYPE, type) == MHD_YES &&
        MHD_add_response_header (response, MHD_HTTP_HEADER_CONNECTION, "close") == MHD_YES)
        return response;
    MHD_destroy_response (response);
    return NULL;
}

/* Put a page in the place of the one before, which goes when its last reader has it. */
static void
show (server *self, page which, struct MHD_Response *fresh)
{
    if (fresh == NULL)
        return; /* out of memory: the page before stays */
    pthread_mutex_lock (&self->lock);
    struct MHD_Response *before = self->pages[which];
    self->pages[which] = fresh;
    pthread_mutex_unlock (&self->lock);
    if (before != NULL)
        MHD_destroy_response (before);
}

static struct MHD_Response *
metrics_page (const exporter *self)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream (&text, &bytes);
    if (memory == NULL)
        return NULL;
    gq_top_metrics (memory, self->silent ? NULL : &self->report);
    if (fclose (memory) != 0) {
        free (text);
        return NULL;
    }
    return respond (text, bytes, MHD_RESPMEM_MUST_FREE, METRICS_TYPE);
}

/* The object that gradq-top --json prints. */
static struct MHD_Response *
json_page (const exporter *self)
{
    double silent_s = (double)(gq_now_ns () - self->answered_ns) / 1e9;
    json_t *object =
        self->silent ? gq_top_silent_json ((double)gq_wall_ns () / 1e9, silent_s, self->error.text)
                     : gq_top_report_json (&self->report);
    char *text =
        object != NULL ? json_dumps (object, JSON_COMPACT | JSON_REAL_PRECISION (15)) : NULL;
    json_decref (object);
    return text != NULL ? respond (text, strlen (text), MHD_RESPMEM_MUST_FREE, JSON_TYPE) : NULL;
}

/* HOST:PORT or [HOST]:PORT into its halves. */
static gq_status
split (const char *listen, char host[HOST_BYTES], const char **port_p, gq_error *error)
{
    const char *colon = strrchr (listen, ':');
    size_t length = colon != NULL ? (size_t)(colon - listen) : 0;
    bool bracketed = length > 2 && listen[0] == '[' && listen[length - 1] == ']';
    size_t digits = colon != NULL ? strspn (colon + 1, "0123456789") : 0;
    if (length == 0 || length >= HOST_BYTES || digits == 0 || digits > 5 ||
        colon[1 + digits] != '\0' || strtoul (colon + 1, NULL, 10) > 65535 ||
        (!bracketed && memchr (listen, ':', length) != NULL))
        return gq_fail (error, GQ_INVALID,
                        "--listen: '%s' is not HOST:PORT; 127.0.0.1:5610, [::1]:5610, or port 0 "
                        "for any free one",
                        listen);
    snprintf (host, HOST_BYTES, "%.*s", (int)(length - (bracketed ? 2 : 0)),
              listen + (bracketed ? 1 : 0));
    *port_p = colon + 1;
    return GQ_OK;
}

/* A listening socket, or -1 with errno. */
static int
bind_one (const struct addrinfo *address)
{
    static const int yes = 1;
    int fd = socket (address->ai_family, address->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    /* Started again at once, while connections of the life before linger. */
    setsockopt (fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind (fd, address->ai_addr, address->ai_addrlen) == 0 && listen (fd, SOMAXCONN) == 0)
        return fd;
    int reason = errno;
    close (fd);
    errno = reason;
    return -1;
}

/* GQ_OK: *fd_p listens at `listen`, and url is where /metrics is then.  GQ_INVALID, GQ_IO. */
static gq_status
open_door (const char *listen, int *fd_p, char url[HOST_BYTES + 32], gq_error *error)
{
    char host[HOST_BYTES], name[HOST_BYTES], number[8];
    const char *port = NULL;
    if (split (listen, host, &port, error) != GQ_OK)
        return GQ_INVALID;
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    int failed = getaddrinfo (host, port, &hints, &found);
    if (failed != 0)
        return gq_fail (error, GQ_INVALID, "--listen: %s: %s; 127.0.0.1 is this host", host,
                        gai_strerror (failed));
    *fd_p = bind_one (found);
    int reason = errno;
    freeaddrinfo (found);
    struct sockaddr_storage at = {0};
    socklen_t length = sizeof at;
    if (*fd_p < 0)
        return gq_fail (error, GQ_IO, "--listen %s: %s; choose another port, or 0 for any", listen,
                        strerror (reason));
    if (getsockname (*fd_p, (struct sockaddr *)&at, &length) != 0 ||
        getnameinfo ((struct sockaddr *)&at, length, name, sizeof name, number, sizeof number,
                     NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        close (*fd_p);
        return gq_fail (error, GQ_IO, "--listen %s: the port cannot be read back", listen);
    }
    bool six = at.ss_family == AF_INET6;
    snprintf (url, HOST_BYTES + 32, "http://%s%s%s:%s/metrics", six ? "[" : "", name,
              six ? "]" : "", number);
    return GQ_OK;
}

static void
stop_server (server *self)
{
    if (self->daemon != NULL)
        MHD_stop_daemon (self->daemon); /* closes the listening socket as well */
    struct MHD_Response *const responses[] = {self->unknown, self->not_allowed,
                                              self->pages[PAGE_METRICS], self->pages[PAGE_JSON]};
    for (size_t i = 0; i < sizeof responses / sizeof *responses; i++)
        if (responses[i] != NULL)
            MHD_destroy_response (responses[i]);
    pthread_mutex_destroy (&self->lock);
}

/* The pages are there already: no peer finds an empty one.  Takes fd. */
static gq_status
start_server (server *self, int fd, gq_error *error)
{
    static char unknown[] = "There are /metrics and /stats.json.\n";
    static char not_allowed[] = "GET and HEAD, nothing else.\n";
    self->unknown = respond (unknown, strlen (unknown), MHD_RESPMEM_PERSISTENT, "text/plain");
    self->not_allowed =
        respond (not_allowed, strlen (not_allowed), MHD_RESPMEM_PERSISTENT, "text/plain");
    if (self->unknown != NULL && self->not_allowed != NULL && self->pages[PAGE_METRICS] != NULL &&
        self->pages[PAGE_JSON] != NULL &&
        MHD_add_response_header (self->not_allowed, MHD_HTTP_HEADER_ALLOW, "GET, HEAD") == MHD_YES)
        self->daemon = MHD_start_daemon (
            MHD_USE_POLL_INTERNAL_THREAD, 0, NULL, NULL, on_request, self, MHD_OPTION_LISTEN_SOCKET,
            fd, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
            (size_t)CONNECTION_BYTES_MAX, MHD_OPTION_NOTIFY_CONNECTION, on_connection, self,
            MHD_OPTION_END);
    if (self->daemon != NULL)
        return GQ_OK;
    close (fd);
    return gq_fail (error, GQ_IO, "the HTTP server cannot start: no memory or no thread");
}

/* ---- the loop ---- */

/* Ask, and make the pages.  A sentence when the broker falls silent or comes back. */
static gq_status
look (exporter *self, bool first)
{
    bool before = self->silent;
    gq_status status = gq_top_ask (&self->report, self->run, self->address,
                                   before ? SILENT_WAIT_MS : ANSWER_WAIT_MS, &self->error);
    self->silent = status != GQ_OK;
    if (!self->silent)
        self->answered_ns = gq_now_ns ();
    if (self->silent && (first || !before))
        fprintf (stderr, "gradq-exporter: gradq_up is 0: %s\n", self->error.text);
    if (!self->silent && before && !first)
        fprintf (stderr, "gradq-exporter: the broker answers again\n");
    show (&self->server, PAGE_METRICS, metrics_page (self));
    show (&self->server, PAGE_JSON, json_page (self));
    return status;
}

/* Wait until then.  True: a signal asks us to end. */
static bool
told_to_stop (const sigset_t *signals, uint64_t until_ns)
{
    for (;;) {
        uint64_t now_ns = gq_now_ns ();
        uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
        const struct timespec wait = {.tv_sec = (time_t)(left_ns / 1000000000),
                                      .tv_nsec = (long)(left_ns % 1000000000)};
        if (sigtimedwait (signals, NULL, &wait) > 0)
            return true;
        if (errno != EINTR)
            return false;
    }
}

static gq_status
serve (exporter *self, const char *listen)
{
    int fd = -1;
    char url[HOST_BYTES + 32];
    /* Never handled: waited for, by our thread alone. */
    sigset_t signals;
    sigemptyset (&signals);
    sigaddset (&signals, SIGINT);
    sigaddset (&signals, SIGTERM);
    sigaddset (&signals, SIGHUP);
    pthread_sigmask (SIG_BLOCK, &signals, NULL);
    signal (SIGPIPE, SIG_IGN);
    gq_status status = open_door (listen, &fd, url, &self->error);
    if (status != GQ_OK)
        return status;
    uint64_t next_ns = gq_now_ns ();
    self->answered_ns = next_ns;
    self->silent = true; /* so that a first look at nothing is short */
    status = look (self, true);
    if (status == GQ_INVALID) {
        close (fd);
        return status; /* no waiting makes that address right */
    }
    status = start_server (&self->server, fd, &self->error);
    if (status != GQ_OK)
        return status;
    printf ("%s\n", url);
    fflush (stdout);
    do {
        end_long_visits (&self->server, gq_now_ns ());
        /* On the beat; beats that were missed while waiting for an answer are left out. */
        uint64_t now_ns = gq_now_ns ();
        while (next_ns <= now_ns)
            next_ns += self->interval_ns;
        if (told_to_stop (&signals, next_ns))
            return GQ_OK;
        status = look (self, false);
    } while (status != GQ_INVALID);
    return status;
}

int
main (int argc, char **argv)
{
    gq_options *options = NULL;
    gq_error error;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_EXPORTER, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status != GQ_OK) {
        fprintf (stderr, "gradq-exporter: %s\n", error.text);
        return gq_options_exit (status);
    }
    exporter self = {.run = gq_options_text (options, "run"),
                     .address = gq_options_text (options, "address"),
                     .interval_ns = gq_options_count (options, "interval-ms") * 1000000,
                     .server = {.lock = PTHREAD_MUTEX_INITIALIZER}};
    status = serve (&self, gq_options_text (options, "listen"));
    if (status != GQ_OK)
        fprintf (stderr, "gradq-exporter: %s\n", self.error.text);
    stop_server (&self.server);
    gq_top_report_clear (&self.report);
    gq_options_free (&options);
    if (status == GQ_INVALID)
        return GQ_EXIT_USAGE;
    return status == GQ_OK ? GQ_EXIT_OK : GQ_EXIT_FAILED;
}
