/*
 * What the parts of the options engine share: options.c (sources and their order), option_value.c
 * (words to values), option_ini.c (the file), option_help.c (--help).  Nobody else includes this.
 */
#ifndef GQ_OPTIONS_INTERNAL_H
#define GQ_OPTIONS_INTERNAL_H

#include <stdio.h>

#include "options.h"

/* Longest option name with its end: the INI library cuts names at 50 bytes. */
#define GQ_OPTION_NAME_MAX 48
/* Longest word that is compared for "did you mean": longer ones are no typing errors. */
#define GQ_NEAREST_BYTES_MAX 64
/* Items of one list: far more than any rule has hyperparameters; it bounds the memory that an
 * environment variable can take. */
#define GQ_LIST_ITEMS_MAX 1024

/* One parsed value.  Which fields count depends on the row's type. */
typedef struct gq_option_value {
    char *text;     /* TEXT, CHOICE: owned; NULL: unset */
    uint64_t count; /* COUNT, BYTES */
    double number;  /* NUMBER */
    bool flag;      /* FLAG */
    char **items;   /* LIST: [item_count], owned, as are the strings */
    size_t item_count;
} gq_option_value;

/*
 * Set *value (zeroed, or to be appended to for a LIST) from `word`.  `where` begins the sentence:
 * "--capacity", "GRADQ_CAPACITY", "gradq.ini:3: capacity".  `split`: a list's word holds items
 * separated by ';'.
 *
 * GQ_OK; GQ_INVALID (what is allowed is said), GQ_MEMORY.  *value stays good for
 * gq_option_value_clear in any case.
 */
GQ_CHECK gq_status gq_option_value_parse (gq_option_value *value, const gq_option_row *row,
                                          const char *word, bool split, const char *where,
                                          gq_error *error);
void gq_option_value_clear (gq_option_value *value);

/* "1 to 64 gradients", "0 or more steps, or inf"; "" for types without bounds. */
void gq_option_bounds (const gq_option_row *row, char *text, size_t size);

/* GRADQ_MAX_STALENESS for max-staleness. */
void gq_option_env_name (const char *name, char env_name[GQ_OPTION_NAME_MAX + 8]);

/*
 * What to do with one "name = value" under [section] ("" above the first section).  `where` is
 * "FILE:LINE: name", to begin an error sentence with.  Any status but GQ_OK ends the reading.
 */
typedef gq_status gq_ini_handler (void *user, const char *section, const char *name,
                                  const char *value, const char *where, gq_error *error);

/*
 * Read the INI file at `path`.  GQ_OK; GQ_NOTFOUND, GQ_IO, GQ_MALFORMED (with the line),
 * GQ_MEMORY, or the first status that the handler gave.
 */
GQ_CHECK gq_status gq_ini_read (const char *path, gq_ini_handler *handler, void *user,
                                gq_error *error);

const char *gq_program_name (gq_program program);    /* "gradq-broker" */
const char *gq_program_section (gq_program program); /* "broker" */
const char *gq_program_summary (gq_program program); /* one line for --help */

void gq_option_print_help (FILE *out, gq_program program);

#endif
