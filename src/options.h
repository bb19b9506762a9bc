/*
 * Options of every process from one table (src/option_table.c): command line over GRADQ_*
 * environment over INI file over default.  The table is the only home of a name, default, bound,
 * unit and help text.
 */
#ifndef GQ_OPTIONS_H
#define GQ_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/status.h"

typedef enum gq_program {
    GQ_PROGRAM_BROKER = 1 << 0,
    GQ_PROGRAM_OPTIMIZER = 1 << 1,
    GQ_PROGRAM_ACTOR = 1 << 2,
    GQ_PROGRAM_TOP = 1 << 3,
    GQ_PROGRAM_TRY = 1 << 4,
    GQ_PROGRAM_BENCH = 1 << 5,
    GQ_PROGRAM_REPLAY = 1 << 6,
    GQ_PROGRAM_EXPORTER = 1 << 7
} gq_program;

typedef enum gq_option_type {
    GQ_OPTION_TEXT,   /* any string */
    GQ_OPTION_CHOICE, /* one of `choices`, "a|b|c" */
    GQ_OPTION_COUNT,  /* unsigned integer; "inf" where max is UINT64_MAX */
    GQ_OPTION_NUMBER, /* double */
    GQ_OPTION_BYTES,  /* unsigned integer with optional K, M, G (binary, "MiB" also) */
    GQ_OPTION_FLAG,   /* no value; "--no-NAME" clears; 1/0, true/false, yes/no, on/off elsewhere */
    GQ_OPTION_LIST    /* may be given often; in the environment and INI separated by ';' */
} gq_option_type;

typedef struct gq_option_row {
    const char *name;  /* "max-staleness": flag --max-staleness, GRADQ_MAX_STALENESS,
                             max-staleness = ... in the INI section of the program or [gradq] */
    unsigned programs; /* gq_program bits: who takes it */
    gq_option_type type;
    const char *fallback; /* default as text; NULL: none */
    double min, max;      /* COUNT, NUMBER, BYTES */
    const char *choices;  /* CHOICE */
    const char *unit;     /* shown in help: "ms", "gradients", "FILE"; may be NULL */
    const char *help;     /* one sentence */
} gq_option_row;

/* Ends with name NULL.  A name has a second row where it is of another type for other programs. */
extern const gq_option_row gq_option_table[];

typedef struct gq_options gq_options;

/*
 * Read the command line of `program`.  --help and --version print to stdout.  `--config FILE` or
 * GRADQ_CONFIG names the INI file.  Environment names GRADQ_* that no row has are errors too,
 * except those of other programs; INI keys likewise.
 *
 * GQ_OK: *options_p is yours to free.  GQ_AGAIN: help or version was printed, exit 0.
 * GQ_INVALID: the command line is wrong.  GQ_MALFORMED: the environment or the INI file is.
 * GQ_NOTFOUND, GQ_IO: the INI file cannot be read.  GQ_MEMORY.  *error says which word is wrong,
 * where it came from (command line, GRADQ_X, FILE:line) and names the nearest right one.
 * gq_options_exit (status) is what main returns then.
 */
GQ_CHECK gq_status gq_options_read (gq_options **options_p, gq_program program, int argc,
                                    char **argv, gq_error *error);
void gq_options_free (gq_options **options_p);

/* `name` must be a row of this program and of the getter's type: asserted. */
const char *gq_options_text (const gq_options *options, const char *name); /* NULL when unset */
uint64_t gq_options_count (const gq_options *options, const char *name);   /* COUNT and BYTES */
double gq_options_number (const gq_options *options, const char *name);
bool gq_options_flag (const gq_options *options, const char *name);
bool gq_options_given (const gq_options *options, const char *name); /* not the default */
size_t gq_options_list (const gq_options *options, const char *name, const char *const **items);

/* What main returns for a status (sysexits): 0, 1, 2 usage, 69 unreachable, 78 configuration. */
enum {
    GQ_EXIT_OK = 0,
    GQ_EXIT_FAILED = 1,
    GQ_EXIT_USAGE = 2,
    GQ_EXIT_UNREACHABLE = 69,
    GQ_EXIT_CONFIG = 78
};

/* What main returns when gq_options_read gave `status`: help 0, usage 2, configuration 78. */
int gq_options_exit (gq_status status);

/* The entry of words[count] nearest to `word` by edit distance, NULL when none is near. */
const char *gq_nearest (const char *word, const char *const *words, size_t count);

#endif
