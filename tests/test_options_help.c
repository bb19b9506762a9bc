/*
 * --help and --version, and the nearest right word.
 */
#include <criterion/criterion.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "options.h"

TestSuite (options_help, .timeout = 30);

static const struct {
    gq_program program;
    const char *name;
} programs[] = {{GQ_PROGRAM_BROKER, "gradq-broker"}, {GQ_PROGRAM_OPTIMIZER, "gradq-optimizer"},
                {GQ_PROGRAM_ACTOR, "gradq-actor"},   {GQ_PROGRAM_TOP, "gradq-top"},
                {GQ_PROGRAM_TRY, "gradq-try"},       {GQ_PROGRAM_BENCH, "gradq-bench"},
                {GQ_PROGRAM_REPLAY, "gradq-replay"}, {GQ_PROGRAM_EXPORTER, "gradq-exporter"}};
#define PROGRAM_COUNT (sizeof programs / sizeof programs[0])

/* What `program WORDS` prints to standard output; the caller frees it. */
static char *
print (gq_program program, const char *const *words)
{
    static const size_t size = 65536;
    gq_options *options = NULL;
    gq_error error = {""};
    int count = 0;
    while (words[count] != NULL)
        count++;
    char *text = calloc (1, size);
    FILE *file = tmpfile ();
    cr_assert (text != NULL && file != NULL);
    fflush (stdout);
    const int saved = dup (STDOUT_FILENO);
    cr_assert (dup2 (fileno (file), STDOUT_FILENO) >= 0);
    gq_status status =
        gq_options_read (&options, program, count, (char **)(uintptr_t)words, &error);
    fflush (stdout);
    cr_assert (dup2 (saved, STDOUT_FILENO) >= 0);
    close (saved);
    cr_assert_eq (status, GQ_AGAIN, "%s", error.text);
    cr_assert_null (options);
    rewind (file);
    cr_assert_gt (fread (text, 1, size - 1, file), 0);
    fclose (file);
    return text;
}

/* Is `word` in `text`, not as a part of a longer name? */
static bool
names (const char *text, const char *word)
{
    for (const char *at = strstr (text, word); at != NULL; at = strstr (at + 1, word)) {
        const char after = at[strlen (word)];
        if (!isalnum ((unsigned char)after) && after != '-' && after != '_')
            return true;
    }
    return false;
}

/* Has the program an option of this name?  Another row may be another program's. */
static bool
has (gq_program program, const char *name)
{
    for (const gq_option_row *row = gq_option_table; row->name != NULL; row++)
        if ((row->programs & (unsigned)program) != 0 && strcmp (row->name, name) == 0)
            return true;
    return false;
}

Test (options_help, help_names_every_row_of_the_program_and_no_other)
{
    for (size_t i = 0; i < PROGRAM_COUNT; i++) {
        const char *const words[] = {programs[i].name, "--help", NULL};
        char *text = print (programs[i].program, words);
        cr_assert (names (text, programs[i].name));
        for (const gq_option_row *row = gq_option_table; row->name != NULL; row++) {
            char flag[64], begin[64], variable[64] = "GRADQ_";
            snprintf (flag, sizeof flag, "--%s", row->name);
            snprintf (begin, sizeof begin, "\n  --%s", row->name);
            for (size_t j = 0; j <= strlen (row->name); j++)
                variable[6 + j] =
                    row->name[j] == '-' ? '_' : (char)toupper ((unsigned char)row->name[j]);
            const bool mine = (row->programs & (unsigned)programs[i].program) != 0;
            cr_assert_eq (names (text, begin), has (programs[i].program, row->name), "%s %s",
                          programs[i].name, flag);
            cr_assert (!mine || names (text, variable), "%s %s", programs[i].name, variable);
            cr_assert (!mine || row->fallback == NULL || row->type == GQ_OPTION_FLAG ||
                           strstr (text, row->fallback) != NULL,
                       "%s %s: no default", programs[i].name, flag);
        }
        for (const char *line = text; *line != '\0'; line += strcspn (line, "\n") + 1)
            cr_assert_leq (strcspn (line, "\n"), 100, "%.*s", (int)strcspn (line, "\n"), line);
        free (text);
    }
}

Test (options_help, version_is_the_name_and_the_number)
{
    for (size_t i = 0; i < PROGRAM_COUNT; i++) {
        const char *const words[] = {programs[i].name, "--version", NULL};
        char *text = print (programs[i].program, words), expected[64];
        snprintf (expected, sizeof expected, "%s 0.1.0\n", programs[i].name);
        cr_assert_str_eq (text, expected);
        free (text);
    }
}

Test (options_help, help_works_in_a_wrong_environment)
{
    const char *const words[] = {"gradq-broker", "--help", NULL};
    setenv ("GRADQ_CAPACITY", "many", 1);
    setenv ("GRADQ_CONFIG", "/nonexistent/gradq.ini", 1);
    free (print (GQ_PROGRAM_BROKER, words));
}

Test (options_help, nearest_is_by_edits_and_only_when_near)
{
    static const char *const words[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
    static const struct {
        const char *word, *nearest;
    } cases[] = {{"weight_deacy", "weight_decay"}, /* a swap */
                 {"wieght_dcay", "weight_decay"},  /* a swap and a lost letter */
                 {"beta", "beta1"},                /* a lost letter; the first of two as near */
                 {"beta3", "beta1"},               /* a replaced letter */
                 {"beta22", "beta2"},              /* a letter too many */
                 {"epz", "eps"},
                 {"lr", "lr"},
                 {"momentum", NULL},
                 {"xyz", NULL},
                 {"", NULL}};
    char longest[65], too_long[66];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *nearest = gq_nearest (cases[i].word, words, 5);
        if (cases[i].nearest == NULL)
            cr_assert_null (nearest, "%s: %s", cases[i].word, nearest);
        else
            cr_assert_str_eq (nearest, cases[i].nearest, "%s", cases[i].word);
    }
    cr_assert_null (gq_nearest ("lr", words, 0));
    /* Words up to the limit of the table of distances, and longer ones on both sides. */
    memset (longest, 'a', sizeof longest);
    memset (too_long, 'a', sizeof too_long);
    longest[64] = too_long[65] = '\0';
    const char *const long_words[] = {too_long, longest};
    cr_assert_eq (gq_nearest (longest, long_words, 2), longest);
    cr_assert_null (gq_nearest (too_long, long_words, 2));
}
