/*
 * gradq-top: how deep the queue is, how fast it fills and drains, and who is silent.
 *
 * Beside a gradient's path: asks the broker's control socket and prints.  Must never change a run,
 * and never leave a terminal in another state than it found.
 */
#include <errno.h>
#include <inttypes.h>
#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "gradq/gradq.h"
#include "options.h"
#include "stats.h"
#include "top.h"

/* vmstat's habit. */
#define STAT_HEADER_EVERY 20
/* While the broker is silent a question waits no longer than this, so that keys are heard. */
#define SILENT_WAIT_MS  300
#define COLUMNS_DEFAULT 80

typedef enum top_mode { MODE_SCREEN, MODE_ONCE, MODE_STAT, MODE_JSON } top_mode;

typedef struct top_state {
    top_mode mode;
    bool once;
    const char *run;     /* NULL: the address is fixed */
    const char *address; /* when run is NULL */
    int wait_ms;
    uint64_t interval_ns;
    uint64_t limit; /* --fail-above; UINT64_MAX: none */
    gq_top_style style;
    gq_top_report report; /* newest; stats NULL before the first */
    uint64_t answered_ns; /* when that was, or when we began */
    uint64_t rows_printed;
    bool silent;
    gq_error error; /* why it is silent */
} top_state;

/* ---- signals and terminal: the only globals, because handlers need them ---- */

static volatile sig_atomic_t stop_asked, suspend_asked, resized;
static struct termios terminal_before;
static volatile sig_atomic_t terminal_changed;
static const char screen_on[] = "\033[?1049h\033[?25l";
static const char screen_off[] = "\033[0m\033[?25h\033[?1049l";

/* Async-signal-safe; a second call does nothing. */
static void
terminal_restore (void)
{
    if (!terminal_changed)
        return;
    terminal_changed = 0;
    ssize_t written = write (STDOUT_FILENO, screen_off, sizeof screen_off - 1);
    (void)written; /* a terminal that is gone needs no restoring */
    tcsetattr (STDIN_FILENO, TCSANOW, &terminal_before);
}

static void
on_signal (int number)
{
    if (number == SIGWINCH)
        resized = 1;
    else if (number == SIGTSTP)
        suspend_asked = 1;
    else
        stop_asked = 1;
}

/* Our own bug: put the terminal back, then die as the signal wants it. */
static void
on_crash (int number)
{
    terminal_restore ();
    signal (number, SIG_DFL);
    raise (number);
}

static void
handle (int number, void (*handler) (int))
{
    /* No SA_RESTART: a wait for keys ends at once. */
    struct sigaction action = {.sa_handler = handler};
    sigemptyset (&action.sa_mask);
    sigaction (number, &action, NULL);
}

static void
terminal_enter (void)
{
    struct termios raw = terminal_before;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    raw.c_cc[VMIN] = 0;
    raw.c_cc[VTIME] = 0;
    terminal_changed = 1;
    tcsetattr (STDIN_FILENO, TCSANOW, &raw);
    ssize_t written = write (STDOUT_FILENO, screen_on, sizeof screen_on - 1);
    (void)written;
}

static void
terminal_open (void)
{
    static const int crashes[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    handle (SIGWINCH, on_signal);
    handle (SIGTSTP, on_signal);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        handle (crashes[i], on_crash);
    atexit (terminal_restore);
    terminal_enter ();
}

static void
terminal_suspend (void)
{
    suspend_asked = 0;
    terminal_restore ();
    raise (SIGSTOP);
    terminal_enter ();
}

static void
terminal_size (gq_top_style *style)
{
    struct winsize size;
    if (ioctl (STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        style->columns = size.ws_col;
        style->rows = size.ws_row;
    }
}

/* ---- asking ---- */

/* One question and its answer into top->report.  On failure the old report stays. */
static gq_status
ask (top_state *top)
{
    int wait_ms = top->silent && top->wait_ms > SILENT_WAIT_MS ? SILENT_WAIT_MS : top->wait_ms;
    gq_status status = gq_top_ask (&top->report, top->run, top->address, wait_ms, &top->error);
    if (status == GQ_OK)
        top->answered_ns = gq_now_ns ();
    return status;
}

/* ---- showing ---- */

static double
silent_s (const top_state *top)
{
    return (double)(gq_now_ns () - top->answered_ns) / 1e9;
}

static void
show_json (const top_state *top)
{
    json_t *object = top->silent ? gq_top_silent_json ((double)gq_wall_ns () / 1e9, silent_s (top),
                                                       top->error.text)
                                 : gq_top_report_json (&top->report);
    if (object != NULL) {
        json_dumpf (object, stdout, JSON_COMPACT | JSON_REAL_PRECISION (15));
        fputc ('\n', stdout);
    }
    json_decref (object);
}

static void
show_stat (top_state *top)
{
    if (top->silent) {
        printf ("broker silent for %.0f s\n", silent_s (top));
        return;
    }
    if (top->rows_printed++ % STAT_HEADER_EVERY == 0)
        gq_top_stat_header (stdout);
    gq_top_stat_row (stdout, &top->report);
}

/* Copy the drawing with "clear to end of line" at each line's end: nothing flickers. */
static void
paint (const char *text)
{
    fputs ("\033[H", stdout);
    for (const char *end; (end = strchr (text, '\n')) != NULL; text = end + 1) {
        fwrite (text, 1, (size_t)(end - text), stdout);
        /* No line feed after the last row: it would scroll. */
        fputs (end[1] != '\0' ? "\033[K\n" : "\033[K", stdout);
    }
    fputs ("\033[J", stdout);
}

static void
show_screen (top_state *top)
{
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream (&text, &size);
    if (memory == NULL)
        return;
    gq_top_style style = top->style;
    if (top->silent) {
        char notice[128];
        snprintf (notice, sizeof notice, "broker silent for %.0f s    (q quits)", silent_s (top));
        fprintf (memory, "%s%.*s%s\n", style.colour ? "\033[1;31m" : "", style.columns, notice,
                 style.colour ? "\033[0m" : "");
        if (style.rows > 0)
            style.rows--;
    }
    if (top->report.stats != NULL && !(top->silent && top->style.rows == 1))
        gq_top_draw (memory, &top->report, &style);
    fclose (memory);
    paint (text);
    free (text);
}

static void
show (top_state *top)
{
    if (top->mode == MODE_JSON)
        show_json (top);
    else if (top->mode == MODE_STAT)
        show_stat (top);
    else if (top->mode == MODE_SCREEN)
        show_screen (top);
    else
        gq_top_draw (stdout, &top->report, &top->style);
}

/* ---- the loop ---- */

/* Wait until `until_ns`; on the screen, for a key too. */
static void
wait_until (top_state *top, uint64_t until_ns)
{
    while (!stop_asked) {
        if (suspend_asked)
            terminal_suspend ();
        if (resized) {
            resized = 0;
            terminal_size (&top->style);
            return; /* draw at once */
        }
        uint64_t now_ns = gq_now_ns ();
        if (now_ns >= until_ns)
            return;
        struct pollfd keys = {.fd = top->mode == MODE_SCREEN ? STDIN_FILENO : -1, .events = POLLIN};
        /* Rounded up: a wait of 0 ms would spin. */
        if (poll (&keys, 1, (int)((until_ns - now_ns + 999999) / 1000000)) <= 0)
            continue;
        char key = 0;
        ssize_t got = read (STDIN_FILENO, &key, 1);
        /* 0 bytes, or an error other than an interruption: the terminal is gone. */
        if (key == 'q' || key == 'Q' || got == 0 || (got < 0 && errno != EINTR))
            stop_asked = 1;
    }
}

static int
too_deep (const top_state *top)
{
    if (top->silent || top->limit == UINT64_MAX || !gq_top_above (&top->report, (double)top->limit))
        return 0;
    terminal_restore ();
    fprintf (stderr, "gradq-top: depth %.0f is above %" PRIu64 "\n", top->report.depth, top->limit);
    return 1;
}

/* Say why there is no report; the exit code for it. */
static int
give_up (const top_state *top, gq_status status)
{
    terminal_restore ();
    fprintf (stderr, "gradq-top: %s\n", top->error.text);
    if (status == GQ_INVALID)
        return GQ_EXIT_USAGE;
    return status == GQ_UNREACHABLE ? GQ_EXIT_UNREACHABLE : GQ_EXIT_FAILED;
}

static int
run_once (top_state *top)
{
    gq_status status = ask (top);
    if (status == GQ_OK && top->mode != MODE_JSON) {
        /* People want to see rates, which take two looks; a program takes its own. */
        wait_until (top, gq_now_ns () + top->interval_ns);
        if (!stop_asked)
            status = ask (top);
    }
    if (status != GQ_OK)
        return give_up (top, status);
    show (top);
    return fflush (stdout) != 0 || too_deep (top) ? GQ_EXIT_FAILED : GQ_EXIT_OK;
}

static int
run_on (top_state *top)
{
    uint64_t next_ns = gq_now_ns ();
    top->answered_ns = next_ns;
    while (!stop_asked) {
        gq_status status = ask (top);
        if (stop_asked)
            break;
        if (status == GQ_INVALID)
            return give_up (top, status); /* no waiting makes that address right */
        /* A question that a signal cut short says nothing about the broker. */
        if (status == GQ_OK || !(resized || suspend_asked))
            top->silent = status != GQ_OK;
        show (top);
        if (fflush (stdout) != 0)
            return GQ_EXIT_FAILED; /* the reader is gone */
        if (too_deep (top))
            return GQ_EXIT_FAILED;
        /* On the beat; beats that were missed while waiting for an answer are left out. */
        uint64_t now_ns = gq_now_ns ();
        while (next_ns <= now_ns)
            next_ns += top->interval_ns;
        wait_until (top, next_ns);
    }
    return GQ_EXIT_OK;
}

static void
configure (top_state *top, const gq_options *options)
{
    bool terminal = isatty (STDIN_FILENO) && isatty (STDOUT_FILENO);
    const char *no_colour = getenv ("NO_COLOR");
    *top = (top_state){.run = gq_options_text (options, "run"),
                       .address = gq_options_text (options, "address"),
                       .once = gq_options_flag (options, "once"),
                       .wait_ms = (int)gq_options_count (options, "wait-ms"),
                       .interval_ns = gq_options_count (options, "interval-ms") * 1000000,
                       .limit = gq_options_count (options, "fail-above")};
    if (gq_options_flag (options, "json"))
        top->mode = MODE_JSON;
    else if (gq_options_flag (options, "stat") || (!terminal && !top->once))
        top->mode = MODE_STAT; /* without a terminal there is no screen to fill */
    else
        top->mode = top->once ? MODE_ONCE : MODE_SCREEN;
    top->style = (gq_top_style){.columns = COLUMNS_DEFAULT,
                                .utf8 = strcmp (nl_langinfo (CODESET), "UTF-8") == 0,
                                .colour = isatty (STDOUT_FILENO) &&
                                          (no_colour == NULL || *no_colour == '\0')};
    if (top->mode == MODE_SCREEN || isatty (STDOUT_FILENO))
        terminal_size (&top->style);
    if (top->mode == MODE_ONCE)
        top->style.rows = 0; /* all of it: the terminal scrolls */
}

int
main (int argc, char **argv)
{
    gq_options *options = NULL;
    gq_error error;
    setlocale (LC_CTYPE, "");
    gq_status status = gq_options_read (&options, GQ_PROGRAM_TOP, argc, argv, &error);
    if (status == GQ_AGAIN)
        return GQ_EXIT_OK;
    if (status != GQ_OK) {
        fprintf (stderr, "gradq-top: %s\n", error.text);
        return gq_options_exit (status);
    }
    top_state top;
    configure (&top, options);
    handle (SIGINT, on_signal);
    handle (SIGTERM, on_signal);
    handle (SIGHUP, on_signal);
    handle (SIGPIPE, SIG_IGN);
    if (top.mode == MODE_SCREEN && tcgetattr (STDIN_FILENO, &terminal_before) == 0)
        terminal_open ();
    int code = top.once ? run_once (&top) : run_on (&top);
    terminal_restore ();
    gq_top_report_clear (&top.report);
    gq_options_free (&options);
    return code;
}
