/*
 * Figures as text for people: units, the depth bar, the view, the rows.  Beside a gradient's path.
 * Must never print a byte that a peer chose without looking at it: a terminal obeys some.
 */
#include "top.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Columns of one line at most; a terminal wider than that wraps nothing. */
#define LINE_BYTES_MAX  1024
#define BAR_COLUMNS_MAX 60

/* ---- units ---- */

void
gq_top_quantity (char text[GQ_TOP_TEXT_BYTES], double value)
{
    static const char units[] = {' ', 'k', 'M', 'G', 'T', 'P', 'E'};
    if (!isfinite (value)) {
        snprintf (text, GQ_TOP_TEXT_BYTES, "%s", isnan (value) ? "-" : "inf");
        return;
    }
    size_t unit = 0;
    /* 999.5 would round to 1000: the next unit's business. */
    while (fabs (value) >= 999.5 && unit + 1 < sizeof units) {
        value /= 1000;
        unit++;
    }
    if (unit == 0)
        snprintf (text, GQ_TOP_TEXT_BYTES,
                  fabs (value) < 9.95 && value != floor (value) ? "%.1f" : "%.0f", value);
    else
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.3g%c", value, units[unit]);
}

void
gq_top_bytes (char text[GQ_TOP_TEXT_BYTES], double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    if (!isfinite (bytes)) {
        snprintf (text, GQ_TOP_TEXT_BYTES, "-");
        return;
    }
    while (bytes >= 1023.5 && unit + 1 < sizeof units / sizeof *units) {
        bytes /= 1024;
        unit++;
    }
    snprintf (text, GQ_TOP_TEXT_BYTES, unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.3g %s", bytes,
              units[unit]);
}

void
gq_top_duration (char text[GQ_TOP_TEXT_BYTES], double seconds)
{
    if (isnan (seconds))
        snprintf (text, GQ_TOP_TEXT_BYTES, "-");
    else if (isinf (seconds))
        snprintf (text, GQ_TOP_TEXT_BYTES, "never");
    else if (seconds == 0)
        snprintf (text, GQ_TOP_TEXT_BYTES, "0 s");
    else if (seconds < 0.9995e-3)
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.3g us", seconds * 1e6);
    else if (seconds < 0.9995)
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.3g ms", seconds * 1e3);
    else if (seconds < 99.5)
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.2g s", seconds);
    else if (seconds < 99.5 * 60)
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.0f min", seconds / 60);
    else
        snprintf (text, GQ_TOP_TEXT_BYTES, "%.3g h", seconds / 3600);
}

/* ---- the bar ---- */

void
gq_top_bar (FILE *out, double share, int width, bool utf8)
{
    /* U+258F .. U+2588: one to eight eighths of a column. */
    static const char *const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█"};
    const int parts = utf8 ? 8 : 1;
    const int all = width * parts;
    int full = 0;
    if (share >= 1)
        full = all;
    else if (share > 0) {
        full = (int)(share * all);
        if (full == 0)
            full = 1;
    }
    int column = 0;
    for (; column < full / parts; column++)
        fputs (utf8 ? eighths[8] : "#", out);
    if (full % parts != 0) {
        fputs (eighths[full % parts], out);
        column++;
    }
    for (; column < width; column++)
        fputs (utf8 ? "·" : ".", out);
}

/* ---- lines ---- */

/* What is drawn on, and how many lines are left. */
typedef struct top_canvas {
    FILE *out;
    const gq_top_style *style;
    int rows_left;
} top_canvas;

static int
is_continuation (unsigned char byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Bytes of `text` that fit into `columns`, one column for each code point. */
static size_t
fitting (const char *text, int columns)
{
    size_t used = 0;
    while (text[used] != '\0') {
        if (!is_continuation ((unsigned char)text[used]) && columns-- == 0)
            break;
        used++;
    }
    return used;
}

static void line (top_canvas *canvas, const char *attribute, const char *format, ...)
    __attribute__ ((format (printf, 3, 4)));

/* One line, cut to the width; attribute: an ANSI number ("1" bold, "7" inverse) or NULL. */
static void
line (top_canvas *canvas, const char *attribute, const char *format, ...)
{
    char text[LINE_BYTES_MAX];
    if (canvas->rows_left == 0)
        return;
    canvas->rows_left--;
    va_list arguments;
    va_start (arguments, format);
    vsnprintf (text, sizeof text, format, arguments);
    va_end (arguments);
    size_t bytes = fitting (text, canvas->style->columns);
    bool coloured = attribute != NULL && canvas->style->colour;
    if (coloured)
        fprintf (canvas->out, "\033[%sm", attribute);
    fwrite (text, 1, bytes, canvas->out);
    fputs (coloured ? "\033[0m\n" : "\n", canvas->out);
}

/* A peer's string: printable ASCII stays, the rest becomes '?'. */
static const char *
safe_text (char *text, size_t size, const json_t *value)
{
    const char *given = json_string_value (value);
    if (given == NULL)
        given = "-";
    size_t used = 0;
    for (; used + 1 < size && given[used] != '\0'; used++)
        text[used] = given[used] >= ' ' && given[used] <= '~' ? given[used] : '?';
    text[used] = '\0';
    return text;
}

static const json_t *
field (const gq_top_report *report, const char *group, const char *name)
{
    return json_object_get (json_object_get (report->stats, group), name);
}

/* ---- the view ---- */

static void
draw_head (top_canvas *canvas, const gq_top_report *report)
{
    char address[256], run[40], up[GQ_TOP_TEXT_BYTES];
    const json_t *uptime = json_object_get (report->stats, "uptime_ms");
    gq_top_duration (up, json_is_number (uptime) ? json_number_value (uptime) / 1e3 : NAN);
    safe_text (address, sizeof address, json_object_get (report->stats, "address"));
    safe_text (run, sizeof run,
               json_object_get (json_object_get (report->stats, "optimizer"), "run"));
    line (canvas, "1", "gradq  %s  run %.8s  broker up %s", address, run, up);
}

static void
draw_queue (top_canvas *canvas, const gq_top_report *report)
{
    char *bar = NULL, depth[GQ_TOP_TEXT_BYTES], capacity[GQ_TOP_TEXT_BYTES];
    char bytes[GQ_TOP_TEXT_BYTES], room[GQ_TOP_TEXT_BYTES];
    size_t size = 0;
    int width = canvas->style->columns / 2;
    FILE *memory = open_memstream (&bar, &size);
    if (memory == NULL)
        return;
    gq_top_bar (memory, report->depth / report->capacity,
                width > BAR_COLUMNS_MAX ? BAR_COLUMNS_MAX : width, canvas->style->utf8);
    fclose (memory);
    gq_top_quantity (depth, report->depth);
    gq_top_quantity (capacity, report->capacity);
    gq_top_bytes (bytes, report->bytes);
    gq_top_bytes (room, report->bytes_capacity);
    bool full = report->depth >= report->capacity;
    line (canvas, full ? "31" : "32", "queue     %s %s/%s%s", bar, depth, capacity,
          full ? " full" : "");
    line (canvas, NULL, "          %s of %s", bytes, room);
    free (bar);
}

static void
draw_rates (top_canvas *canvas, const gq_top_report *report)
{
    char in[GQ_TOP_TEXT_BYTES], out[GQ_TOP_TEXT_BYTES], drained[GQ_TOP_TEXT_BYTES];
    char received[GQ_TOP_TEXT_BYTES], delivered[GQ_TOP_TEXT_BYTES];
    char refused[GQ_TOP_TEXT_BYTES];
    gq_top_quantity (in, report->in_per_s);
    gq_top_quantity (out, report->out_per_s);
    gq_top_duration (drained, report->drain_s);
    gq_top_quantity (received, report->received);
    gq_top_quantity (delivered, report->delivered);
    gq_top_quantity (refused, gq_top_number (report, "queue", "refused"));
    line (canvas, NULL, "rates     in %s/s  out %s/s  drains in %s", in, out, drained);
    line (canvas, NULL, "          received %s  delivered %s  refused %s", received, delivered,
          refused);
}

static void
draw_optimizer (top_canvas *canvas, const gq_top_report *report)
{
    char name[64], state[32], version[GQ_TOP_TEXT_BYTES], applied[GQ_TOP_TEXT_BYTES];
    char rejected[GQ_TOP_TEXT_BYTES], duplicates[GQ_TOP_TEXT_BYTES], resent[GQ_TOP_TEXT_BYTES];
    char p50[GQ_TOP_TEXT_BYTES], p99[GQ_TOP_TEXT_BYTES], apply[GQ_TOP_TEXT_BYTES];
    safe_text (name, sizeof name, field (report, "optimizer", "name"));
    safe_text (state, sizeof state, field (report, "optimizer", "state"));
    gq_top_quantity (version, gq_top_number (report, "optimizer", "version"));
    gq_top_quantity (applied, gq_top_number (report, "optimizer", "applied"));
    gq_top_quantity (rejected, gq_top_number (report, "optimizer", "rejected"));
    gq_top_quantity (duplicates, gq_top_number (report, "optimizer", "duplicates"));
    gq_top_quantity (resent, gq_top_number (report, "optimizer", "lsn"));
    gq_top_quantity (p50, gq_top_number (report, "optimizer", "staleness_p50"));
    gq_top_quantity (p99, gq_top_number (report, "optimizer", "staleness_p99"));
    gq_top_duration (apply, gq_top_number (report, "optimizer", "apply_us_p50") / 1e6);
    bool alive = strcmp (state, "alive") == 0;
    line (canvas, alive ? NULL : "31", "optimizer %s %s  version %s  applied %s  rejected %s%s",
          name, state, version, applied, rejected, alive ? "" : "  <- not alive");
    line (canvas, NULL, "          duplicates %s  journal at %s  a step takes %s", duplicates,
          resent, apply);
    line (canvas, NULL, "staleness p50 %s  p99 %s steps", p50, p99);
}

static double
actor_number (const json_t *actor, const char *name)
{
    const json_t *value = json_object_get (actor, name);
    return json_is_number (value) ? json_number_value (value) : NAN;
}

static bool
actor_is (const json_t *actor, const char *state)
{
    const char *given = json_string_value (json_object_get (actor, "state"));
    return given != NULL && strcmp (given, state) == 0;
}

static void
draw_actor (top_canvas *canvas, const json_t *actor)
{
    char id[GQ_TOP_TEXT_BYTES], state[12], lane[8], pushed[GQ_TOP_TEXT_BYTES];
    char acknowledged[GQ_TOP_TEXT_BYTES], resent[GQ_TOP_TEXT_BYTES], seen[GQ_TOP_TEXT_BYTES];
    char returned[GQ_TOP_TEXT_BYTES];
    double mean = actor_number (actor, "return_mean");
    snprintf (id, sizeof id, isnan (actor_number (actor, "id")) ? "-" : "%.0f",
              actor_number (actor, "id"));
    safe_text (state, sizeof state, json_object_get (actor, "state"));
    safe_text (lane, sizeof lane, json_object_get (actor, "lane"));
    gq_top_quantity (pushed, actor_number (actor, "pushed"));
    gq_top_quantity (acknowledged, actor_number (actor, "acknowledged"));
    gq_top_quantity (resent, actor_number (actor, "resent"));
    gq_top_duration (seen, actor_number (actor, "last_seen_ms") / 1e3);
    snprintf (returned, sizeof returned, isnan (mean) ? "-" : "%.4g", mean);
    bool silent = actor_is (actor, "silent");
    line (canvas,
          silent                     ? "33"
          : actor_is (actor, "gone") ? "2"
                                     : NULL,
          "%c %5s %-8s %-7s %9s %9s %7s %9s %10s", silent ? '!' : ' ', id, state, lane, pushed,
          acknowledged, resent, returned, seen);
}

static void
draw_actors (top_canvas *canvas, const gq_top_report *report)
{
    const json_t *actors = json_object_get (report->stats, "actors");
    size_t count = json_array_size (actors), index, silent = 0, shown = 0;
    const json_t *actor;
    json_array_foreach (actors, index, actor) silent += actor_is (actor, "silent");
    line (canvas, "1",
          "  actor state    lane       pushed     acked  resent    return       seen%s",
          silent > 0 ? "   ! silent" : "");
    bool all_fit = canvas->rows_left < 0 || count <= (size_t)canvas->rows_left;
    /* Silent ones first when not all fit: they are what one looks for. */
    for (int pass = all_fit ? 1 : 0; pass < 2; pass++)
        json_array_foreach (actors, index, actor)
        {
            bool wanted = all_fit || actor_is (actor, "silent") == (pass == 0);
            bool room = all_fit || canvas->rows_left > 1;
            if (!wanted || !room)
                continue;
            draw_actor (canvas, actor);
            shown++;
        }
    if (shown < count)
        line (canvas, NULL, "  ... and %zu more", count - shown);
}

void
gq_top_draw (FILE *out, const gq_top_report *report, const gq_top_style *style)
{
    top_canvas canvas = {
        .out = out, .style = style, .rows_left = style->rows > 0 ? style->rows : -1};
    draw_head (&canvas, report);
    draw_queue (&canvas, report);
    draw_rates (&canvas, report);
    draw_optimizer (&canvas, report);
    draw_actors (&canvas, report);
}

/* ---- rows ---- */

void
gq_top_stat_header (FILE *out)
{
    fputs ("------- queue -------- ------- rates -------- -------- optimizer -------- actors\n",
           out);
    fputs (
        "  depth capacity bytes    in/s   out/s  drain  applied rejected stale99  alive silent\n",
        out);
}

void
gq_top_stat_row (FILE *out, const gq_top_report *report)
{
    enum { DEPTH, CAPACITY, BYTES, IN, OUT, APPLIED, REJECTED, STALE, ALIVE, SILENT, COLUMNS };
    double values[COLUMNS] = {[DEPTH] = report->depth,
                              [CAPACITY] = report->capacity,
                              [BYTES] = report->bytes,
                              [IN] = report->in_per_s,
                              [OUT] = report->out_per_s,
                              [APPLIED] = gq_top_number (report, "optimizer", "applied"),
                              [REJECTED] = gq_top_number (report, "optimizer", "rejected"),
                              [STALE] = gq_top_number (report, "optimizer", "staleness_p99")};
    const json_t *actors = json_object_get (report->stats, "actors"), *actor;
    size_t index;
    json_array_foreach (actors, index, actor)
    {
        values[ALIVE] += actor_is (actor, "alive");
        values[SILENT] += actor_is (actor, "silent");
    }
    char text[COLUMNS][GQ_TOP_TEXT_BYTES], drained[GQ_TOP_TEXT_BYTES];
    for (size_t i = 0; i < COLUMNS; i++)
        gq_top_quantity (text[i], values[i]);
    gq_top_duration (drained, report->drain_s);
    fprintf (out, "%7s %8s %5s %7s %7s %6s %8s %8s %7s %6s %6s\n", text[DEPTH], text[CAPACITY],
             text[BYTES], text[IN], text[OUT], drained, text[APPLIED], text[REJECTED], text[STALE],
             text[ALIVE], text[SILENT]);
}
