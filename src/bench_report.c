/*
 * The figures of gradq-bench as a table or as JSON.  Off a gradient's path.
 *
 * The table has the figures that a reader compares, JSON has all.  A ratio is always of two figures
 * of the same run, and the names in both are those of docs/PERFORMANCE.md.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "gradq/protocol.h"

#define MB 1e6
#define GB 1e9

/* How the columns of the point are laid out, names and figures alike. */
#define POINT_NAMES  "%9s %6s %6s %6s %7s "
#define POINT_VALUES "%9llu %6u %6u %6s %7s "

void
gq_bench_print_head (const gq_bench_machine *machine, const gq_bench_limits *limits, int argc,
                     char **argv)
{
    printf ("# %s, %ld cores, load %.1f; memory triad %.1f GB/s on one; a message of %d bytes over "
            "two ZeroMQ hops and back: %.0f us, %.0f/s\n# gradq-bench",
            machine->cpu, machine->cores, machine->load, limits->triad_bytes_per_s / GB,
            GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES, limits->small.p50_us, limits->small.per_s);
    for (int i = 1; i < argc; i++)
        printf (" %s", argv[i]);
    printf (
        "\n# loop_per_s: gradients pushed, applied, acknowledged and their weights seen; ratio: "
        "to the bare kernel_per_s; ratio_2hop: to zmq_round_per_s, raw ZeroMQ moving the same "
        "bytes; ratio_rule: to zmq_rule_per_s, the same when who turns them round makes a step of "
        "the "
        "bare rule of each; "
        "zmq_echo_per_s: %d bytes out and back\n",
        GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES);
}

void
gq_bench_print_names (void)
{
    printf (POINT_NAMES "%10s %10s %12s %6s %15s %10s %14s %10s %14s %9s %9s %13s %7s\n", "params",
            "actors", "window", "lane", "journal", "loop_per_s", "no_journal", "kernel_per_s",
            "ratio", "zmq_round_per_s", "ratio_2hop", "zmq_rule_per_s", "ratio_rule",
            "zmq_echo_per_s", "p50_us", "p99_us", "slowest_share", "rss_mb");
}

static double
rss_mb (const gq_bench_loop *loop)
{
    return (double)(loop->broker_bytes + loop->optimizer_bytes) / MB;
}

void
gq_bench_print_row (const gq_bench_point *point, const gq_bench_limits *limits,
                    const gq_bench_loop *loop, const gq_bench_loop *unjournaled)
{
    printf (
        POINT_VALUES "%10.1f %10.1f %12.1f %6.3f %15.1f %10.3f %14.1f %10.3f %14.1f %9.1f %9.1f "
                     "%13.2f %7.1f\n",
        (unsigned long long)point->params, point->actors, point->window, loop->lane, point->journal,
        loop->per_s, unjournaled->per_s, limits->kernel.per_s, loop->per_s / limits->kernel.per_s,
        limits->round.per_s, loop->per_s / limits->round.per_s, limits->rule_round.per_s,
        loop->per_s / limits->rule_round.per_s, limits->echo.per_s, loop->p50_us, loop->p99_us,
        loop->slowest_share, rss_mb (loop));
}

/* What tells one point from another. */
static json_t *
point_json (const gq_bench_point *point, const char *lane)
{
    /* Lane shm has the one only. */
    const char *encoding = strcmp (lane, "shm") == 0 ? "f32" : point->encoding;
    return json_pack ("{s:I, s:s, s:s, s:i, s:i, s:s, s:s, s:s}", "params",
                      (json_int_t)point->params, "lane", lane, "encoding", encoding, "actors",
                      (int)point->actors, "window", (int)point->window, "journal", point->journal,
                      "transport", point->tcp ? "tcp" : "ipc", "optimizer", point->optimizer);
}

static json_t *
loop_json (const gq_bench_loop *loop, const gq_bench_loop *unjournaled)
{
    return json_pack ("{s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
                      "loop_per_s", loop->per_s, "p50_us", loop->p50_us, "p99_us", loop->p99_us,
                      "max_us", loop->max_us, "gradients", (json_int_t)loop->gradients, "seconds",
                      loop->seconds, "versions_per_s", loop->versions_per_s, "seen_per_s",
                      loop->seen_per_s, "slowest_share", loop->slowest_share, "rss_mb",
                      rss_mb (loop), "broker_rss_mb", (double)loop->broker_bytes / MB,
                      "optimizer_rss_mb", (double)loop->optimizer_bytes / MB, "unjournaled_per_s",
                      unjournaled->per_s);
}

static json_t *
limits_json (const gq_bench_limits *limits)
{
    return json_pack (
        "{s:f, s:f, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
        "kernel_per_s", limits->kernel.per_s, "kernel_best_per_s", limits->kernel.best_per_s, "cpu",
        limits->kernel.cpu, "kernel_gb_per_s", limits->kernel.bytes_per_s / GB, "triad_gb_per_s",
        limits->triad_bytes_per_s / GB, "triad_cache_gb_per_s",
        limits->triad_cache_bytes_per_s / GB, "zmq_round_per_s", limits->round.per_s,
        "zmq_round_p50_us", limits->round.p50_us, "zmq_rule_per_s", limits->rule_round.per_s,
        "zmq_echo_per_s", limits->echo.per_s, "zmq_echo_p50_us", limits->echo.p50_us,
        "zmq_small_p50_us", limits->small.p50_us, "zmq_1hop_per_s", limits->one_hop_per_s,
        "zmq_2hop_per_s", limits->two_hops_per_s, "zmq_2hop_tight_per_s", limits->tight_hops_per_s);
}

static json_t *
ratios_json (const gq_bench_limits *limits, const gq_bench_loop *loop,
             const gq_bench_loop *unjournaled)
{
    return json_pack (
        "{s:f, s:f, s:f, s:f, s:f, s:f}", "ratio", loop->per_s / limits->kernel.per_s, "ratio_2hop",
        loop->per_s / limits->round.per_s, "ratio_rule", loop->per_s / limits->rule_round.per_s,
        "ratio_echo", loop->per_s / limits->echo.per_s, "ratio_2hop_one_way",
        loop->per_s / limits->two_hops_per_s, "journal_ratio", loop->per_s / unjournaled->per_s);
}

/* Print *row and free it. */
static gq_status
print_object (json_t *row, gq_error *error)
{
    char *text = row == NULL ? NULL : json_dumps (row, JSON_COMPACT);
    json_decref (row);
    if (text == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    printf ("%s\n", text);
    free (text);
    return GQ_OK;
}

gq_status
gq_bench_print_json (const gq_bench_machine *machine, const gq_bench_point *point,
                     const gq_bench_limits *limits, const gq_bench_loop *loop,
                     const gq_bench_loop *unjournaled, gq_error *error)
{
    json_t *row = point_json (point, loop->lane);
    json_t *parts[] = {loop_json (loop, unjournaled), ratios_json (limits, loop, unjournaled),
                       limits_json (limits),
                       json_pack ("{s:s, s:i, s:f}", "machine", machine->cpu, "cores",
                                  (int)machine->cores, "load", machine->load)};
    bool whole = row != NULL;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        whole = whole && parts[i] != NULL && json_object_update (row, parts[i]) == 0;
        json_decref (parts[i]);
    }
    if (whole)
        return print_object (row, error);
    json_decref (row);
    return gq_fail (error, GQ_MEMORY, "out of memory");
}

gq_status
gq_bench_print_missing (const gq_bench_point *point, const char *reason, bool json, gq_error *error)
{
    if (!json) {
        printf (POINT_VALUES "not available: %s\n", (unsigned long long)point->params,
                point->actors, point->window, point->lane, point->journal, reason);
        return GQ_OK;
    }
    json_t *row = point_json (point, point->lane);
    if (row != NULL && (json_object_set_new (row, "loop_per_s", json_null ()) != 0 ||
                        json_object_set_new (row, "not_available", json_string (reason)) != 0)) {
        json_decref (row);
        row = NULL;
    }
    return print_object (row, error);
}
