/*
 * gradq-bench: gradients a second through the whole loop, beside the limits of this machine in the
 * same run.  Steps 0 to 7 of a gradient's path, from outside.
 *
 *     gradq-bench --params 1000000 --actors 4 --seconds 5 --json
 *
 * Must never print a rate that was not measured, and never leave a process or a file behind.
 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "gradq/gradq.h"
#include "gradq/protocol.h"
#include "options.h"

/* Sizes or numbers of actors in one run. */
#define ITEMS_MAX 64
/* A small message: the size of an acknowledgement. */
#define SMALL_BYTES  (GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES)
#define HEADER_EVERY 20

typedef struct machine {
    char cpu[128];
    long cores;
} machine;

typedef struct figures {
    gq_bench_kernel kernel;
    gq_bench_loop loop;
    gq_bench_loop unjournaled; /* the same with --journal off */
    double one_hop_per_s, two_hops_per_s, tight_hops_per_s;
    gq_bench_echo echo; /* frames as large as the gradients, as many on the way as in the loop */
} figures;

typedef struct bench {
    const gq_options *options;
    gq_bench_point point;
    uint64_t params[ITEMS_MAX], actors[ITEMS_MAX];
    size_t params_count, actors_count;
    bool json;
    machine machine;
    double triad_bytes_per_s;
    gq_bench_echo small; /* small messages, one on the way */
    size_t rows;
} bench;

static volatile sig_atomic_t stop_asked;

static void
on_signal (int number)
{
    (void)number;
    stop_asked = 1;
}

static bool
interrupted (void)
{
    return stop_asked != 0;
}

static void
handle_signals (void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset (&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        sigaction (numbers[i], &action, NULL);
    signal (SIGPIPE, SIG_IGN);
}

static void
read_machine (machine *self)
{
    static const char key[] = "model name";
    snprintf (self->cpu, sizeof self->cpu, "unknown CPU");
    self->cores = sysconf (_SC_NPROCESSORS_ONLN);
    FILE *file = fopen ("/proc/cpuinfo", "re");
    if (file == NULL)
        return;
    char line[256];
    while (fgets (line, sizeof line, file) != NULL) {
        const char *colon = strchr (line, ':');
        if (strncmp (line, key, sizeof key - 1) != 0 || colon == NULL)
            continue;
        line[strcspn (line, "\n")] = '\0';
        snprintf (self->cpu, sizeof self->cpu, "%s", colon + 1 + strspn (colon + 1, " "));
        break;
    }
    fclose (file);
}

/* The words of a list option as whole numbers 1 .. max ("1e6" too), or the defaults. */
static gq_status
read_counts (const bench *self, const char *name, uint64_t max, const char *const *defaults,
             size_t default_count, uint64_t *counts, size_t *count, gq_error *error)
{
    const char *const *words = NULL;
    *count = gq_options_list (self->options, name, &words);
    if (*count == 0) {
        words = defaults;
        *count = default_count;
    }
    if (*count > ITEMS_MAX)
        return gq_fail (error, GQ_INVALID, "--%s may be given %d times at most", name, ITEMS_MAX);
    for (size_t i = 0; i < *count; i++) {
        char *end = NULL;
        double value = strtod (words[i], &end);
        if (end == words[i] || *end != '\0' || !(value >= 1 && value <= (double)max) ||
            value != floor (value))
            return gq_fail (error, GQ_INVALID,
                            "--%s takes a whole number from 1 to %llu, not \"%s\"", name,
                            (unsigned long long)max, words[i]);
        counts[i] = (uint64_t)value;
    }
    return GQ_OK;
}

static gq_status
read_options (bench *self, gq_error *error)
{
    static const char *const params[] = {"1000", "10000", "100000", "1000000"};
    static const char *const actors[] = {"1", "4"};
    const gq_options *options = self->options;
    gq_bench_point *point = &self->point;
    point->seconds = gq_options_number (options, "seconds");
    point->window = (uint32_t)gq_options_count (options, "window");
    point->lane = gq_options_text (options, "lane");
    point->optimizer = gq_options_text (options, "optimizer");
    point->plugins = gq_options_text (options, "plugins");
    point->cpu = gq_options_text (options, "cpu");
    point->set_count = gq_options_list (options, "set", &point->sets);
    point->log_level = gq_options_text (options, "log-level");
    point->interrupted = interrupted;
    self->json = gq_options_flag (options, "json");
    gq_status status =
        read_counts (self, "params", GQ_PARAMETERS_MAX, params, sizeof params / sizeof params[0],
                     self->params, &self->params_count, error);
    if (status == GQ_OK)
        status = read_counts (self, "actors", GQ_BENCH_ACTORS_MAX, actors,
                              sizeof actors / sizeof actors[0], self->actors, &self->actors_count,
                              error);
    return status;
}

/* ---- output ---- */

static void
print_head (const bench *self, int argc, char **argv)
{
    if (self->json)
        return;
    printf ("# %s, %ld cores; memory triad %.1f GB/s on one; a message of %d bytes over two ZeroMQ "
            "hops and back: %.0f us, %.0f/s\n# %s",
            self->machine.cpu, self->machine.cores, self->triad_bytes_per_s / 1e9, SMALL_BYTES,
            self->small.p50_us, self->small.per_s, "gradq-bench");
    for (int i = 1; i < argc; i++)
        printf (" %s", argv[i]);
    printf ("\n");
    fflush (stdout);
}

static void
print_row (bench *self, const figures *f)
{
    if (self->rows++ % HEADER_EVERY == 0)
        printf ("%10s %6s %6s %6s %11s %11s %12s %6s %14s %14s %10s %9s %9s\n", "params", "actors",
                "lane", "window", "loop_per_s", "no_journal", "kernel_per_s", "ratio",
                "zmq_1hop_per_s", "zmq_2hop_per_s", "ratio_2hop", "p50_us", "p99_us");
    printf ("%10llu %6u %6s %6u %11.1f %11.1f %12.1f %6.3f %14.1f %14.1f %10.3f %9.1f %9.1f\n",
            (unsigned long long)self->point.params, self->point.actors, f->loop.lane,
            self->point.window, f->loop.per_s, f->unjournaled.per_s, f->kernel.per_s,
            f->loop.per_s / f->kernel.per_s, f->one_hop_per_s, f->two_hops_per_s,
            f->loop.per_s / f->two_hops_per_s, f->loop.p50_us, f->loop.p99_us);
}

static gq_status
print_json (const bench *self, const figures *f, gq_error *error)
{
    const gq_bench_point *point = &self->point;
    json_t *row = json_pack (
        "{s:I, s:i, s:s, s:i, s:b, s:s, s:s, s:f, s:I, s:f, s:f,"
        " s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f,"
        " s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:i}",
        "params", (json_int_t)point->params, "actors", (int)point->actors, "lane", f->loop.lane,
        "window", (int)point->window, "journal", 1, "optimizer", point->optimizer, "cpu",
        f->kernel.cpu, "seconds", f->loop.seconds, "gradients", (json_int_t)f->loop.gradients,
        "unjournaled_per_s", f->unjournaled.per_s, "journal_ratio",
        f->loop.per_s / f->unjournaled.per_s,
        /* the loop */
        "loop_per_s", f->loop.per_s, "kernel_per_s", f->kernel.per_s, "ratio",
        f->loop.per_s / f->kernel.per_s, "p50_us", f->loop.p50_us, "p99_us", f->loop.p99_us,
        "max_us", f->loop.max_us, "versions_per_s", f->loop.versions_per_s, "seen_per_s",
        f->loop.seen_per_s,
        /* the limits */
        "zmq_1hop_per_s", f->one_hop_per_s, "zmq_2hop_per_s", f->two_hops_per_s, "ratio_2hop",
        f->loop.per_s / f->two_hops_per_s, "zmq_2hop_tight_per_s", f->tight_hops_per_s,
        "zmq_echo_per_s", f->echo.per_s, "zmq_small_p50_us", self->small.p50_us, "kernel_gb_per_s",
        f->kernel.bytes_per_s / 1e9, "triad_gb_per_s", self->triad_bytes_per_s / 1e9, "machine",
        self->machine.cpu, "cores", (int)self->machine.cores);
    char *text = row == NULL ? NULL : json_dumps (row, JSON_COMPACT);
    json_decref (row);
    if (text == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    printf ("%s\n", text);
    free (text);
    return GQ_OK;
}

/* ---- measuring ---- */

static gq_status
measure_point (bench *self, figures *f, gq_error *error)
{
    gq_bench_point *point = &self->point;
    uint64_t bytes = GQ_FRAME_HEADER_BYTES + point->params * sizeof (float);
    gq_status status = gq_bench_hops (&f->one_hop_per_s, bytes, 1, GQ_BENCH_ROOMY, point, error);
    if (status == GQ_OK)
        status = gq_bench_hops (&f->two_hops_per_s, bytes, 2, GQ_BENCH_ROOMY, point, error);
    if (status == GQ_OK && self->json)
        status = gq_bench_hops (&f->tight_hops_per_s, bytes, 2, GQ_BENCH_TIGHT, point, error);
    if (status == GQ_OK && self->json)
        status = gq_bench_echo_rate (&f->echo, bytes, point->actors * point->window, point, error);
    point->journal = "off";
    if (status == GQ_OK)
        status = gq_bench_loop_rate (&f->unjournaled, point, error);
    point->journal = "recycle";
    if (status == GQ_OK)
        status = gq_bench_loop_rate (&f->loop, point, error);
    if (status == GQ_OK && self->json)
        status = print_json (self, f, error);
    else if (status == GQ_OK)
        print_row (self, f);
    if (status == GQ_OK && (fflush (stdout) != 0 || ferror (stdout)))
        status = gq_fail (error, GQ_IO, "cannot write the figures: %s", strerror (errno));
    return status;
}

static gq_status
measure (bench *self, int argc, char **argv, gq_error *error)
{
    gq_bench_point *point = &self->point;
    point->params = self->params[0];
    point->actors = 1;
    figures f = {.one_hop_per_s = 0};
    /* First what can be wrong with the command line. */
    gq_status status = gq_bench_service_find (error);
    for (size_t i = 0; i < self->params_count && status == GQ_OK; i++) {
        point->params = self->params[i];
        status = gq_bench_kernel_rate (&f.kernel, point, error);
        if (status == GQ_OK && i == 0) {
            status = gq_bench_triad (&self->triad_bytes_per_s, point, error);
            if (status == GQ_OK)
                status = gq_bench_echo_rate (&self->small, SMALL_BYTES, 1, point, error);
            if (status == GQ_OK)
                print_head (self, argc, argv);
        }
        for (size_t k = 0; k < self->actors_count && status == GQ_OK; k++) {
            point->actors = (uint32_t)self->actors[k];
            status = measure_point (self, &f, error);
        }
    }
    return status;
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
        return GQ_EXIT_CONFIG;
    case GQ_UNREACHABLE:
        return GQ_EXIT_UNREACHABLE;
    default:
        return GQ_EXIT_FAILED;
    }
}

static int
failed (int code, const gq_error *error)
{
    fprintf (stderr, "gradq-bench: %s\n", error->text);
    return code;
}

int
main (int argc, char **argv)
{
    gq_error error = {""};
    gq_options *options = NULL;
    gq_status status = gq_options_read (&options, GQ_PROGRAM_BENCH, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status != GQ_OK)
        return failed (gq_options_exit (status), &error);
    handle_signals ();
    bench self = {.options = options};
    read_machine (&self.machine);
    status = read_options (&self, &error);
    int code = GQ_EXIT_USAGE;
    if (status == GQ_OK) {
        status = measure (&self, argc, argv, &error);
        code = exit_code (status);
    }
    gq_options_free (&options);
    return status == GQ_OK ? GQ_EXIT_OK : failed (code, &error);
}
