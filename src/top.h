/*
 * What gradq-top and gradq-exporter show: the broker's statistics as figures, JSON, rows, a screen,
 * and Prometheus' text.
 *
 * Beside a gradient's path, reading only.  But for gq_top_ask nothing here knows a socket, a clock
 * or a terminal: bytes and times come in, text goes out.  Trusts no field of the answer: any may be
 * missing or null.
 */
#ifndef GQ_TOP_H
#define GQ_TOP_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "gradq/status.h"

/* One answer to {"op": "stats"}.  A figure that is not known is NAN. */
typedef struct gq_top_report {
    json_t *stats;                /* owned: the whole answer */
    double at_s;                  /* monotonic time of the answer */
    double wall_s;                /* Unix time of the answer */
    double depth, capacity;       /* gradients */
    double bytes, bytes_capacity; /* bytes */
    double received, delivered;   /* gradients, since the broker started */
    double in_per_s, out_per_s;   /* gradients/s since the report before */
    double drain_s;               /* depth / out_per_s; INFINITY: it does not drain */
} gq_top_report;

/*
 * Take an answer apart.  previous: the report before, NULL for none; rates are unknown without it,
 * and when a counter fell (the broker was started anew) or no time passed.
 *
 * GQ_OK: *report holds *stats_p, which becomes NULL; gq_top_report_clear it.
 * GQ_REFUSED: the broker answered "ok": false.  GQ_MALFORMED: there is no queue in the answer.
 */
GQ_CHECK gq_status gq_top_report_read (gq_top_report *report, json_t **stats_p,
                                       const gq_top_report *previous, double at_s, double wall_s,
                                       gq_error *error);
void gq_top_report_clear (gq_top_report *report);

/*
 * Ask the broker once, and replace *report (zeroed before the first) by its answer.  run: the run
 * directory whose file names the address now, for it changes when a run is started anew; NULL:
 * `address` it is.  Waits for connection and answer, wait_ms at most for each.
 *
 * GQ_OK; GQ_INVALID (the address or the path is none, which no waiting mends), GQ_UNREACHABLE,
 * GQ_REFUSED, GQ_MALFORMED, GQ_MEMORY: *report is as it was.
 */
GQ_CHECK gq_status gq_top_ask (gq_top_report *report, const char *run, const char *address,
                               int wait_ms, gq_error *error);

/* A number of the answer by its place ("optimizer", "applied"); NAN when there is none. */
double gq_top_number (const gq_top_report *report, const char *group, const char *name);

/* The answer with "time" and, when known, "in_per_s", "out_per_s", "drain_s"; the fields of the
 * contract that are missing are null.  Yours to json_decref; NULL: out of memory. */
json_t *gq_top_report_json (const gq_top_report *report);
/* What stands in its place while the broker is silent: "time", "silent_s" and "error". */
json_t *gq_top_silent_json (double wall_s, double silent_s, const char *error);

/* Is the depth known and above `limit`? */
bool gq_top_above (const gq_top_report *report, double limit);

/* The longest text of the functions below, final NUL included. */
#define GQ_TOP_TEXT_BYTES 24

/* For people, three or four digits: 950, 12.3k, 4.56M; "-" for NAN. */
void gq_top_quantity (char text[GQ_TOP_TEXT_BYTES], double value);
/* 640 B, 12.3 MiB. */
void gq_top_bytes (char text[GQ_TOP_TEXT_BYTES], double bytes);
/* 12 us, 3.4 ms, 5.6 s, 12 min, 3.4 h; "never" for INFINITY. */
void gq_top_duration (char text[GQ_TOP_TEXT_BYTES], double seconds);

/* A bar of `width` columns, `share` in [0, 1] of it full; NAN draws it empty.  A share above 0
 * shows at least a trace, and only a whole one looks full. */
void gq_top_bar (FILE *out, double share, int width, bool utf8);

/* How to draw. */
typedef struct gq_top_style {
    int columns; /* longest line */
    int rows;    /* lines at most; 0: no bound */
    bool utf8;   /* may print block characters */
    bool colour; /* may print ANSI attributes */
} gq_top_style;

/*
 * The whole view, a line at a time, each ended by "\n".  With more actors than rows, silent ones
 * come first.  Strings from peers lose their control characters.
 */
void gq_top_draw (FILE *out, const gq_top_report *report, const gq_top_style *style);

/* vmstat-like: the two header lines, and the row beneath them. */
void gq_top_stat_header (FILE *out);
void gq_top_stat_row (FILE *out, const gq_top_report *report);

/*
 * The figures in Prometheus' text format, version 0.0.4: base units, HELP and TYPE before each
 * family, and no sample of what is not known.  report NULL: the broker is silent, gradq_up is 0.
 */
void gq_top_metrics (FILE *out, const gq_top_report *report);

#endif
