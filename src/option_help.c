/*
 * --help of every program, written from the options table.  Before a gradient's path begins.
 *
 * It must never hold a name, default or bound of its own: those are the table's.
 */
#include "options_internal.h"

#include <assert.h>
#include <ctype.h>
#include <string.h>

#define HELP_COLUMN 30 /* where the explanations begin */
#define HELP_WIDTH  96 /* columns of a line; house limit for text in a terminal */

static const struct {
    gq_program program;
    const char *name;
    const char *summary;
} programs[] = {
    {GQ_PROGRAM_BROKER, "gradq-broker",
     "The queue between actors and optimizer: bounded, counted, and nothing is dropped silently."},
    {GQ_PROGRAM_OPTIMIZER, "gradq-optimizer",
     "Applies gradients one after another and publishes whole versions of the weights."},
    {GQ_PROGRAM_ACTOR, "gradq-actor",
     "Plays an environment, pushes A3C gradients, installs new weights between rollouts."},
    {GQ_PROGRAM_TOP, "gradq-top", "Shows queue depth, rates, staleness and actors of a run."},
    {GQ_PROGRAM_TRY, "gradq-try",
     "Runs an update rule over a file of gradients, without a broker."},
    {GQ_PROGRAM_BENCH, "gradq-bench", "Measures the service beside the limits of this machine."},
    {GQ_PROGRAM_REPLAY, "gradq-replay",
     "Reproduces and verifies the versions of a run from its checkpoints and journal."},
    {GQ_PROGRAM_EXPORTER, "gradq-exporter",
     "Serves the broker's figures over HTTP: /metrics for Prometheus, and /stats.json."},
};
#define PROGRAM_COUNT (sizeof programs / sizeof programs[0])

static size_t
program_index (gq_program program)
{
    size_t i = 0;
    while (i < PROGRAM_COUNT && programs[i].program != program)
        i++;
    assert (i < PROGRAM_COUNT);
    return i;
}

const char *
gq_program_name (gq_program program)
{
    return programs[program_index (program)].name;
}

const char *
gq_program_section (gq_program program)
{
    return gq_program_name (program) + strlen ("gradq-");
}

const char *
gq_program_summary (gq_program program)
{
    return programs[program_index (program)].summary;
}

void
gq_option_env_name (const char *name, char env_name[GQ_OPTION_NAME_MAX + 8])
{
    size_t used = strlen ("GRADQ_");
    assert (strlen (name) <= GQ_OPTION_NAME_MAX);
    memcpy (env_name, "GRADQ_", used);
    for (; *name != '\0'; name++)
        env_name[used++] = *name == '-' ? '_' : (char)toupper ((unsigned char)*name);
    env_name[used] = '\0';
}

/* `text` in words from `column` on, wrapped to HELP_COLUMN; then the line ends. */
static void
print_wrapped (FILE *out, size_t column, const char *text)
{
    bool first = true;
    if (column >= HELP_COLUMN) {
        fputc ('\n', out);
        column = 0;
    }
    column += (size_t)fprintf (out, "%*s", (int)(HELP_COLUMN - column), "");
    while (*text != '\0') {
        const size_t bytes = strcspn (text, " ");
        if (!first && column + 1 + bytes > HELP_WIDTH) {
            column = (size_t)fprintf (out, "\n%*s", HELP_COLUMN, "") - 1;
            first = true;
        }
        column += (size_t)fprintf (out, "%s%.*s", first ? "" : " ", (int)bytes, text);
        first = false;
        text += bytes;
        text += strspn (text, " ");
    }
    fputc ('\n', out);
}

static void
print_row (FILE *out, const gq_option_row *row)
{
    char env_name[GQ_OPTION_NAME_MAX + 8], bounds[160], facts[512];
    const bool flag = row->type == GQ_OPTION_FLAG;
    /* "FILE" stands for the value itself; "ms" is told with the bounds. */
    const char *value = row->choices != NULL                                         ? row->choices
                        : row->unit != NULL && isupper ((unsigned char)row->unit[0]) ? row->unit
                                                                                     : "N";

    gq_option_env_name (row->name, env_name);
    gq_option_bounds (row, bounds, sizeof bounds);
    const int column = flag ? fprintf (out, "  --%s, --no-%s", row->name, row->name)
                            : fprintf (out, "  --%s %s", row->name, value);
    print_wrapped (out, (size_t)column, row->help);
    snprintf (facts, sizeof facts, "[%s%s%s%s%s%s%s]", bounds, *bounds != '\0' ? "; " : "",
              row->fallback != NULL && !flag ? "default " : "",
              row->fallback != NULL && !flag ? row->fallback : "",
              row->fallback != NULL && !flag ? "; " : "",
              row->type == GQ_OPTION_LIST ? "may be given often; " : "", env_name);
    print_wrapped (out, 0, facts);
}

void
gq_option_print_help (FILE *out, gq_program program)
{
    fprintf (out, "usage: %s [OPTION]...\n%s\n\n", gq_program_name (program),
             gq_program_summary (program));
    for (const gq_option_row *row = gq_option_table; row->name != NULL; row++) {
        if ((row->programs & (unsigned)program) != 0)
            print_row (out, row);
    }
    print_wrapped (out, (size_t)fprintf (out, "  --config FILE"), "INI file with settings");
    print_wrapped (out, 0, "[GRADQ_CONFIG]");
    print_wrapped (out, (size_t)fprintf (out, "  --help"), "print this and exit");
    print_wrapped (out, (size_t)fprintf (out, "  --version"), "print the version and exit");
    fprintf (
        out,
        "\n"
        "A value is written --name VALUE or --name=VALUE.  The command line wins over the\n"
        "environment variable in brackets, that over section [%s] of the INI file, that over\n"
        "its section [gradq], that over the default.  An empty variable counts as not set.\n"
        "In the environment and the INI file the items of a list are separated by ';' (no\n"
        "space before it), and a flag is 1 or 0, true or false, yes or no, on or off.  A list\n"
        "from one source replaces the lists of those below it.\n"
        "\n"
        "Exit status: 0 done, 1 failed, 2 wrong usage, 69 broker unreachable, 78 wrong INI\n"
        "file or environment.\n",
        gq_program_section (program));
}
