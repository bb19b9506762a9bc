/*
 * gradq-bench: gradients a second through the whole loop, beside the limits of this machine in the
 * same run.  Steps 0 to 7 of a gradient's path, from outside.
 *
 *     gradq-bench --params 1e6 --actors 1 --actors 4 --lane inline --seconds 5 --json
 *
 * Must never print a rate that was not measured, and never leave a process or a file behind.
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "bench.h"
#include "gradq/gradq.h"
#include "gradq/protocol.h"
#include "options.h"

/* Of each list. */
#define ITEMS_MAX 16
/* A small message: the size of an acknowledgement. */
#define SMALL_BYTES  (GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES)
#define HEADER_EVERY 20

/* The items of a list option, as whole numbers or as words. */
typedef struct items {
    size_t count;
    uint64_t numbers[ITEMS_MAX];
    const char *words[ITEMS_MAX];
} items;

typedef struct bench {
    const gq_options *options;
    gq_bench_point point;
    items params, actors, windows, lanes, journals;
    bool json;
    gq_bench_machine machine;
    gq_bench_limits limits;
    gq_bench_echo echoes[ITEMS_MAX][ITEMS_MAX]; /* of small messages: [actors][window] */
    size_t rows;                                /* printed, and of those: */
    size_t measured;
    gq_error missing; /* why the last one was not */
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
set_up_process (void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset (&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        sigaction (numbers[i], &action, NULL);
    signal (SIGPIPE, SIG_IGN);
    /* Each actor has a ZeroMQ context and four connections. */
    struct rlimit files;
    if (getrlimit (RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit (RLIMIT_NOFILE, &files);
    }
}

/* ---- options ---- */

static gq_status
read_items (const bench *self, const char *name, items *list, gq_error *error)
{
    const char *const *words = NULL;
    list->count = gq_options_list (self->options, name, &words);
    if (list->count > ITEMS_MAX)
        return gq_fail (error, GQ_INVALID, "--%s may be given %d times at most", name, ITEMS_MAX);
    for (size_t i = 0; i < list->count; i++)
        list->words[i] = words[i];
    return GQ_OK;
}

/* Whole numbers 1 .. max ("1e6" too). */
static gq_status
read_counts (const bench *self, const char *name, uint64_t max, items *list, gq_error *error)
{
    gq_status status = read_items (self, name, list, error);
    for (size_t i = 0; i < list->count && status == GQ_OK; i++) {
        char *end = NULL;
        double value = strtod (list->words[i], &end);
        if (end == list->words[i] || *end != '\0' || !(value >= 1 && value <= (double)max) ||
            value != floor (value))
            status =
                gq_fail (error, GQ_INVALID, "--%s takes a whole number from 1 to %llu, not \"%s\"",
                         name, (unsigned long long)max, list->words[i]);
        else
            list->numbers[i] = (uint64_t)value;
    }
    return status;
}

/* Words out of choices[3]. */
static gq_status
read_words (const bench *self, const char *name, const char *const *choices, items *list,
            gq_error *error)
{
    gq_status status = read_items (self, name, list, error);
    for (size_t i = 0; i < list->count && status == GQ_OK; i++) {
        bool known = false;
        for (size_t k = 0; k < 3; k++)
            known = known || strcmp (list->words[i], choices[k]) == 0;
        if (!known)
            status = gq_fail (error, GQ_INVALID, "--%s takes %s, %s or %s, not \"%s\"", name,
                              choices[0], choices[1], choices[2], list->words[i]);
    }
    return status;
}

static gq_status
read_options (bench *self, gq_error *error)
{
    static const char *const lanes[] = {"inline", "shm", "auto"};
    static const char *const journals[] = {"recycle", "keep", "off"};
    const gq_options *options = self->options;
    gq_bench_point *point = &self->point;
    point->seconds = gq_options_number (options, "seconds");
    point->tcp = strcmp (gq_options_text (options, "transport"), "tcp") == 0;
    point->threads = (uint32_t)gq_options_count (options, "threads");
    point->encoding = gq_options_text (options, "encoding");
    point->optimizer = gq_options_text (options, "optimizer");
    point->plugins = gq_options_text (options, "plugins");
    point->cpu = gq_options_text (options, "cpu");
    point->set_count = gq_options_list (options, "set", &point->sets);
    point->log_level = gq_options_text (options, "log-level");
    point->interrupted = interrupted;
    self->json = gq_options_flag (options, "json");
    gq_status status = read_counts (self, "params", GQ_PARAMETERS_MAX, &self->params, error);
    if (status == GQ_OK)
        status = read_counts (self, "actors", GQ_BENCH_ACTORS_MAX, &self->actors, error);
    if (status == GQ_OK)
        status = read_counts (self, "window", GQ_WINDOW_MAX, &self->windows, error);
    if (status == GQ_OK)
        status = read_words (self, "lane", lanes, &self->lanes, error);
    if (status == GQ_OK)
        status = read_words (self, "journal", journals, &self->journals, error);
    return status;
}

/* ---- a row ---- */

static gq_status
written (gq_status status, gq_error *error)
{
    if (status == GQ_OK && (fflush (stdout) != 0 || ferror (stdout)))
        status = gq_fail (error, GQ_IO, "cannot write the figures: %s", strerror (errno));
    return status;
}

/* A row of figures; loop NULL: why there are none, self->missing. */
static gq_status
print (bench *self, const gq_bench_loop *loop, const gq_bench_loop *unjournaled, gq_error *error)
{
    gq_status status = GQ_OK;
    if (!self->json && self->rows % HEADER_EVERY == 0)
        gq_bench_print_names ();
    self->rows++;
    if (loop == NULL) {
        status = gq_bench_print_missing (&self->point, self->missing.text, self->json, error);
    } else {
        self->measured++;
        if (self->json)
            status = gq_bench_print_json (&self->machine, &self->point, &self->limits, loop,
                                          unjournaled, error);
        else
            gq_bench_print_row (&self->point, &self->limits, loop, unjournaled);
    }
    return written (status, error);
}

/* The reason stands in self->missing. */
static gq_status
print_missing (bench *self, gq_error *error)
{
    gq_status status = GQ_OK;
    for (size_t i = 0; i < self->journals.count && status == GQ_OK; i++) {
        self->point.journal = self->journals.words[i];
        status = print (self, NULL, NULL, error);
    }
    return status;
}

/* A row for each journal, at the point's lane.  A lane that is refused is told, and no failure. */
static gq_status
measure_lane (bench *self, gq_error *error)
{
    gq_bench_point *point = &self->point;
    gq_bench_loop unjournaled, loop;
    point->journal = "off";
    gq_status status = gq_bench_loop_rate (&unjournaled, point, &self->missing);
    if (status == GQ_INVALID)
        return print_missing (self, error);
    if (status != GQ_OK)
        *error = self->missing;
    for (size_t i = 0; i < self->journals.count && status == GQ_OK; i++) {
        point->journal = self->journals.words[i];
        loop = unjournaled;
        if (strcmp (point->journal, "off") != 0)
            status = gq_bench_loop_rate (&loop, point, error);
        if (status == GQ_OK)
            status = print (self, &loop, &unjournaled, error);
    }
    return status;
}

/* ---- the limits, and all rows ---- */

/* Of the transport: they depend on everything but lane and journal. */
static gq_status
measure_transport (bench *self, gq_bench_echo *small, gq_error *error)
{
    const gq_bench_point *point = &self->point;
    gq_bench_limits *limits = &self->limits;
    uint64_t bytes = GQ_FRAME_HEADER_BYTES + point->params * sizeof (float);
    gq_status status = GQ_OK;
    if (small->per_s <= 0) /* the same for vectors of any size */
        status = gq_bench_echo_rate (small, SMALL_BYTES, point, error);
    limits->echo = *small;
    if (status == GQ_OK)
        status = gq_bench_echo_rate (&limits->round, bytes, point, error);
    if (status == GQ_OK)
        status = gq_bench_rule_round_rate (&limits->rule_round, point, error);
    if (!self->json)
        return status;
    if (status == GQ_OK)
        status = gq_bench_hops (&limits->one_hop_per_s, bytes, 1, GQ_BENCH_ROOMY, point, error);
    if (status == GQ_OK)
        status = gq_bench_hops (&limits->two_hops_per_s, bytes, 2, GQ_BENCH_ROOMY, point, error);
    if (status == GQ_OK)
        status = gq_bench_hops (&limits->tight_hops_per_s, bytes, 2, GQ_BENCH_TIGHT, point, error);
    return status;
}

/* Every lane and journal at the point's params, actors and window. */
static gq_status
measure_point (bench *self, gq_bench_echo *small, gq_error *error)
{
    gq_status memory = gq_bench_memory (&self->point, &self->missing);
    gq_status status = memory == GQ_OK ? measure_transport (self, small, error) : GQ_OK;
    for (size_t i = 0; i < self->lanes.count && status == GQ_OK; i++) {
        self->point.lane = self->lanes.words[i];
        status = memory == GQ_OK ? measure_lane (self, error) : print_missing (self, error);
    }
    return status;
}

/* The bare rule and the memory at the point's params; no other thread of ours runs.  A size that is
 * too large for any row is passed over. */
static gq_status
measure_size (bench *self, gq_error *error)
{
    self->point.actors = 1;
    self->point.window = 1;
    if (gq_bench_memory (&self->point, &self->missing) != GQ_OK)
        return GQ_OK;
    gq_status status = gq_bench_kernel_rate (&self->limits.kernel, &self->point, error);
    if (status == GQ_OK)
        status = gq_bench_triad (&self->limits.triad_cache_bytes_per_s,
                                 self->point.params * sizeof (float), &self->point, error);
    return status;
}

/* What is the machine's alone, and the head of the table. */
static gq_status
measure_machine (bench *self, int argc, char **argv, gq_error *error)
{
    gq_status status = gq_bench_triad (&self->limits.triad_bytes_per_s, 0, &self->point, error);
    if (status == GQ_OK)
        status = gq_bench_echo_rate (&self->limits.small, SMALL_BYTES, &self->point, error);
    if (status == GQ_OK && !self->json)
        gq_bench_print_head (&self->machine, &self->limits, argc, argv);
    return written (status, error);
}

static gq_status
measure (bench *self, int argc, char **argv, gq_error *error)
{
    gq_bench_point *point = &self->point;
    /* First what can be wrong with the command line. */
    gq_status status = gq_bench_service_find (error);
    for (size_t i = 0; i < self->params.count && status == GQ_OK; i++) {
        point->params = self->params.numbers[i];
        status = measure_size (self, error);
        if (status == GQ_OK && i == 0)
            status = measure_machine (self, argc, argv, error);
        for (size_t k = 0; k < self->actors.count; k++)
            for (size_t m = 0; m < self->windows.count && status == GQ_OK; m++) {
                point->actors = (uint32_t)self->actors.numbers[k];
                point->window = (uint32_t)self->windows.numbers[m];
                status = measure_point (self, &self->echoes[k][m], error);
            }
    }
    if (status == GQ_OK && self->measured == 0)
        status = gq_fail (error, GQ_REFUSED, "nothing could be measured: %s", self->missing.text);
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
    set_up_process ();
    bench self = {.options = options};
    gq_bench_machine_read (&self.machine);
    status = read_options (&self, &error);
    int code = GQ_EXIT_USAGE;
    if (status == GQ_OK) {
        status = measure (&self, argc, argv, &error);
        code = exit_code (status);
    }
    gq_options_free (&options);
    return status == GQ_OK ? GQ_EXIT_OK : failed (code, &error);
}
