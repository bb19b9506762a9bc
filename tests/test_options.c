/*
 * Options engine: which source wins, what each type takes, and that every wrong word is named.
 */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "options.h"

extern char **environ;

static gq_options *options;
static gq_error error;
static char ini_path[] = "/tmp/gradq-test-XXXXXX";

/* The variables of whoever runs the tests must not decide them. */
static void
clear_environment (void)
{
    for (char **entry = environ; *entry != NULL;) {
        char name[128];
        snprintf (name, sizeof name, "%.*s", (int)strcspn (*entry, "="), *entry);
        if (strncmp (name, "GRADQ_", 6) == 0) {
            unsetenv (name);
            entry = environ;
        } else {
            entry++;
        }
    }
}

static void
forget (void)
{
    gq_options_free (&options);
    unlink (ini_path);
}

TestSuite (options, .init = clear_environment, .fini = forget, .timeout = 30);

/* Read the NULL-terminated words as a command line. */
static gq_status
read_words (gq_program program, const char *const *words)
{
    int count = 0;
    while (words[count] != NULL)
        count++;
    gq_options_free (&options);
    memset (&error, 0, sizeof error);
    gq_status status =
        gq_options_read (&options, program, count, (char **)(uintptr_t)words, &error);
    cr_assert_eq (options != NULL, status == GQ_OK);
    return status;
}

#define READ(program, ...) \
    read_words (GQ_PROGRAM_##program, (const char *const[]){"gradq", __VA_ARGS__, NULL})

#define ACCEPT(...) cr_assert_eq (READ (__VA_ARGS__), GQ_OK, "%s", error.text)

/* The words must be refused with `status`, and the answer must be `sentence`. */
#define REFUSE(status, sentence, ...)                                                     \
    do {                                                                                  \
        gq_status refused_ = READ (__VA_ARGS__);                                          \
        cr_assert_eq (refused_, status, "%s: %s", gq_status_name (refused_), error.text); \
        cr_assert_str_eq (error.text, sentence);                                          \
    } while (0)

/* An INI file of this text, named by GRADQ_CONFIG. */
static void
use_ini_bytes (const char *text, size_t bytes)
{
    strcpy (ini_path, "/tmp/gradq-test-XXXXXX");
    const int fd = mkstemp (ini_path);
    cr_assert (fd >= 0);
    cr_assert_eq (write (fd, text, bytes), (ssize_t)bytes);
    close (fd);
    setenv ("GRADQ_CONFIG", ini_path, 1);
}

static void
use_ini (const char *text)
{
    unlink (ini_path);
    use_ini_bytes (text, strlen (text));
}

/* The INI text must be refused by the broker, and the sentence end with `text` behind the path. */
static void
refuse_ini (const char *ini, const char *text)
{
    char expected[1200];
    use_ini (ini);
    gq_status status = READ (BROKER, NULL);
    snprintf (expected, sizeof expected, "%s%s", ini_path, text);
    cr_assert_eq (status, GQ_MALFORMED, "%s: %s", gq_status_name (status), error.text);
    cr_assert_str_eq (error.text, expected);
}

static const gq_program programs[] = {GQ_PROGRAM_BROKER, GQ_PROGRAM_OPTIMIZER, GQ_PROGRAM_ACTOR,
                                      GQ_PROGRAM_TOP,    GQ_PROGRAM_TRY,       GQ_PROGRAM_BENCH,
                                      GQ_PROGRAM_REPLAY, GQ_PROGRAM_EXPORTER};
static const char *const program_names[] = {"gradq-broker", "gradq-optimizer", "gradq-actor",
                                            "gradq-top",    "gradq-try",       "gradq-bench",
                                            "gradq-replay", "gradq-exporter"};
#define PROGRAM_COUNT (sizeof programs / sizeof programs[0])

/* ---- which source wins ------------------------------------------------------------------ */

Test (options, defaults_of_every_program_are_valid)
{
    for (size_t i = 0; i < PROGRAM_COUNT; i++) {
        const char *const words[] = {program_names[i], NULL};
        cr_assert_eq (read_words (programs[i], words), GQ_OK, "%s", error.text);
        for (const gq_option_row *row = gq_option_table; row->name != NULL; row++) {
            if ((row->programs & (unsigned)programs[i]) != 0)
                cr_assert_not (gq_options_given (options, row->name), "%s", row->name);
        }
    }
}

Test (options, each_source_wins_over_those_below_it)
{
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 256);
    cr_assert_not (gq_options_given (options, "capacity"));

    use_ini ("[gradq]\ncapacity = 11\n");
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 11);
    cr_assert (gq_options_given (options, "capacity"));

    use_ini ("[broker]\ncapacity = 12\n[gradq]\ncapacity = 11\n");
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 12);

    setenv ("GRADQ_CAPACITY", "13", 1);
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 13);

    ACCEPT (BROKER, "--capacity", "14");
    cr_assert_eq (gq_options_count (options, "capacity"), 14);
    ACCEPT (BROKER, "--capacity", "14", "--capacity=15");
    cr_assert_eq (gq_options_count (options, "capacity"), 15);
}

Test (options, section_of_the_program_wins_whichever_comes_first)
{
    use_ini ("[gradq]\ncapacity = 11\n[broker]\ncapacity = 12\n");
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 12);
}

Test (options, config_flag_wins_over_GRADQ_CONFIG)
{
    setenv ("GRADQ_CONFIG", "/nonexistent/gradq.ini", 1);
    cr_assert_eq (READ (BROKER, NULL), GQ_NOTFOUND);
    cr_assert (strstr (error.text, "/nonexistent/gradq.ini") != NULL, "%s", error.text);
    use_ini ("[gradq]\ncapacity = 11\n");
    setenv ("GRADQ_CONFIG", "/nonexistent/gradq.ini", 1);
    ACCEPT (BROKER, "--config", ini_path);
    cr_assert_eq (gq_options_count (options, "capacity"), 11);
}

Test (options, empty_variable_counts_as_not_set)
{
    setenv ("GRADQ_CAPACITY", "", 1);
    setenv ("GRADQ_CONFIG", "", 1);
    ACCEPT (BROKER, NULL);
    cr_assert_not (gq_options_given (options, "capacity"));
}

Test (options, list_collects_within_a_source_and_replaces_those_below)
{
    const char *const *items;
    use_ini ("[optimizer]\nset = lr=1; beta1=2\nset = eps=3\n");
    ACCEPT (OPTIMIZER, NULL);
    cr_assert_eq (gq_options_list (options, "set", &items), 3);
    cr_assert_str_eq (items[0], "lr=1");
    cr_assert_str_eq (items[1], "beta1=2");
    cr_assert_str_eq (items[2], "eps=3");
    setenv ("GRADQ_SET", ";lr=4;;eps=5;", 1);
    ACCEPT (OPTIMIZER, NULL);
    cr_assert_eq (gq_options_list (options, "set", &items), 2);
    cr_assert_str_eq (items[1], "eps=5");
    ACCEPT (OPTIMIZER, "--set", "a=6;7", "--set=b=8");
    cr_assert_eq (gq_options_list (options, "set", &items), 2);
    cr_assert_str_eq (items[0], "a=6;7");
    cr_assert_str_eq (items[1], "b=8");
}

Test (options, settings_of_other_programs_are_passed_over)
{
    setenv ("GRADQ_WINDOW", "3", 1);
    setenv ("GRADQ_PYTHON", "python3", 1);
    setenv ("GRADQ_TEST_SOMETHING", "1", 1);
    use_ini ("[gradq]\nwindow = 4\ncapacity = 5\n[actor]\nwindow = 6\nwindow = 7\n"
             "log-level = debug\n");
    ACCEPT (BROKER, NULL);
    cr_assert_str_eq (gq_options_text (options, "log-level"), "info");
    cr_assert_eq (gq_options_count (options, "capacity"), 5);
}

Test (options, a_name_may_be_of_another_type_for_another_program)
{
    const char *const *items;
    ACCEPT (BENCH, "--window", "3", "--window=4");
    cr_assert_eq (gq_options_list (options, "window", &items), 2);
    cr_assert_str_eq (items[1], "4");
    ACCEPT (ACTOR, "--window", "3");
    cr_assert_eq (gq_options_count (options, "window"), 3);

    setenv ("GRADQ_WINDOW", "5", 1);
    ACCEPT (BENCH, NULL);
    cr_assert_eq (gq_options_list (options, "window", &items), 1);
    cr_assert_str_eq (items[0], "5");
    ACCEPT (ACTOR, NULL);
    cr_assert_eq (gq_options_count (options, "window"), 5);
    unsetenv ("GRADQ_WINDOW");

    use_ini ("[gradq]\nwindow = 6\n[bench]\njournal = off;keep\n[optimizer]\njournal = keep\n");
    ACCEPT (BENCH, NULL);
    cr_assert_eq (gq_options_list (options, "window", &items), 1);
    cr_assert_str_eq (items[0], "6");
    cr_assert_eq (gq_options_list (options, "journal", &items), 2);
    ACCEPT (ACTOR, NULL);
    cr_assert_eq (gq_options_count (options, "window"), 6);
    ACCEPT (OPTIMIZER, NULL);
    cr_assert_str_eq (gq_options_text (options, "journal"), "keep");
}

Test (options, indented_lines_comments_and_byte_order_mark_are_read)
{
    use_ini ("\xef\xbb\xbf# comment\n[gradq]\n  ; comment\n  capacity = 5 ; five\n"
             "\tlog-level: debug\n");
    ACCEPT (BROKER, NULL);
    cr_assert_eq (gq_options_count (options, "capacity"), 5);
    cr_assert_str_eq (gq_options_text (options, "log-level"), "debug");
}

/* ---- values ----------------------------------------------------------------------------- */

Test (options, counts_are_taken_at_their_bounds_and_refused_beyond)
{
    ACCEPT (BROKER, "--capacity", "1");
    cr_assert_eq (gq_options_count (options, "capacity"), 1);
    ACCEPT (BROKER, "--capacity=65536");
    cr_assert_eq (gq_options_count (options, "capacity"), 65536);
    static const char *const bad[] = {"0",
                                      "65537",
                                      "-1",
                                      "+1",
                                      " 1",
                                      "1 ",
                                      "1.0",
                                      "0x10",
                                      "x",
                                      "inf",
                                      "18446744073709551617",
                                      "18446744073709551621"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_assert_eq (READ (BROKER, "--capacity", bad[i]), GQ_INVALID, "'%s' was taken", bad[i]);
}

Test (options, unbounded_count_takes_all_64_bits_and_inf)
{
    ACCEPT (OPTIMIZER, "--max-staleness", "0");
    cr_assert_eq (gq_options_count (options, "max-staleness"), 0);
    ACCEPT (OPTIMIZER, "--max-staleness", "18446744073709551615");
    cr_assert_eq (gq_options_count (options, "max-staleness"), UINT64_MAX);
    ACCEPT (OPTIMIZER, "--max-staleness", "inf");
    cr_assert_eq (gq_options_count (options, "max-staleness"), UINT64_MAX);
    REFUSE (GQ_INVALID,
            "--max-staleness: '18446744073709551616' is not allowed; give a whole number, 0 or "
            "more steps, or inf",
            OPTIMIZER, "--max-staleness", "18446744073709551616");
}

Test (options, bytes_take_binary_units)
{
    static const struct {
        const char *word;
        uint64_t bytes;
    } good[] = {{"4096", 4096},      {"4K", 4096},
                {"4k", 4096},        {"4KiB", 4096},
                {"256M", 268435456}, {"2MiB", 2097152},
                {"1G", 1073741824},  {"1000000000000000", UINT64_C (1000000000000000)}};
    static const char *const bad[] = {"4095",  "1000000000000001",   "4KB", "4 K", "K", "4T",
                                      "4KiBx", "18014398509481988K", "-4K", "4.5M"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        ACCEPT (BROKER, "--queue-bytes", good[i].word);
        cr_assert_eq (gq_options_count (options, "queue-bytes"), good[i].bytes, "%s", good[i].word);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_assert_eq (READ (BROKER, "--queue-bytes", bad[i]), GQ_INVALID, "'%s' was taken", bad[i]);
}

Test (options, numbers_are_taken_at_their_bounds_and_refused_beyond)
{
    static const char *const bad[] = {"1.0000001", "-0.1", "nan",   "inf", "0x1p-1", " 0.5",
                                      "0.5 ",      "0,5",  "1e999", "e",   "."};
    ACCEPT (ACTOR, "--gamma", "0");
    cr_assert_eq (gq_options_number (options, "gamma"), 0);
    ACCEPT (ACTOR, "--gamma", "1");
    cr_assert_eq (gq_options_number (options, "gamma"), 1);
    ACCEPT (ACTOR, "--gamma", "2.5e-1");
    cr_assert_eq (gq_options_number (options, "gamma"), 0.25);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_assert_eq (READ (ACTOR, "--gamma", bad[i]), GQ_INVALID, "'%s' was taken", bad[i]);
    REFUSE (GQ_INVALID, "--gamma: '2' is not allowed; give a number, 0 to 1", ACTOR, "--gamma=2");
}

Test (options, flags_are_set_and_cleared)
{
    static const char *const yes[] = {"1", "true", "yes", "on", "ON"};
    static const char *const no[] = {"0", "false", "no", "off", "False"};
    ACCEPT (OPTIMIZER, NULL);
    cr_assert_not (gq_options_flag (options, "resume"));
    for (size_t i = 0; i < 5; i++) {
        setenv ("GRADQ_RESUME", yes[i], 1);
        ACCEPT (OPTIMIZER, NULL);
        cr_assert (gq_options_flag (options, "resume"), "%s", yes[i]);
        ACCEPT (OPTIMIZER, "--no-resume");
        cr_assert_not (gq_options_flag (options, "resume"));
        setenv ("GRADQ_RESUME", no[i], 1);
        ACCEPT (OPTIMIZER, NULL);
        cr_assert_not (gq_options_flag (options, "resume"), "%s", no[i]);
        ACCEPT (OPTIMIZER, "--resume");
        cr_assert (gq_options_flag (options, "resume"));
    }
    REFUSE (GQ_INVALID, "--resume: takes no value; write --resume or --no-resume", OPTIMIZER,
            "--resume=1");
    setenv ("GRADQ_RESUME", "maybe", 1);
    REFUSE (GQ_MALFORMED,
            "GRADQ_RESUME (environment): 'maybe' is none of 1, 0, true, false, yes, no, on, off",
            OPTIMIZER, NULL);
}

Test (options, text_is_taken_as_it_is_and_unset_without_default)
{
    ACCEPT (OPTIMIZER, NULL);
    cr_assert_null (gq_options_text (options, "run"));
    ACCEPT (OPTIMIZER, "--run=--odd= name");
    cr_assert_str_eq (gq_options_text (options, "run"), "--odd= name");
    REFUSE (GQ_INVALID, "--run: the value is empty", OPTIMIZER, "--run", "");
}

/* ---- wrong words ------------------------------------------------------------------------ */

Test (options, unknown_option_names_the_nearest)
{
    REFUSE (GQ_INVALID,
            "--capcity: no such option of gradq-broker; did you mean --capacity? (gradq-broker "
            "--help lists all)",
            BROKER, "--capcity", "3");
    REFUSE (GQ_INVALID, "--zzzzzz: no such option of gradq-broker (gradq-broker --help lists all)",
            BROKER, "--zzzzzz=3");
    REFUSE (GQ_INVALID,
            "--hlep: no such option of gradq-try; did you mean --help? (gradq-try --help lists "
            "all)",
            TRY, "--hlep");
    REFUSE (GQ_INVALID,
            "--window: an option of gradq-actor, not of gradq-broker (gradq-broker --help lists "
            "all)",
            BROKER, "--window", "3");
    REFUSE (GQ_INVALID,
            "--no-capacity: no such option of gradq-broker; did you mean --capacity? "
            "(gradq-broker --help lists all)",
            BROKER, "--no-capacity");
}

Test (options, wrong_choice_lists_all_and_names_the_nearest)
{
    REFUSE (GQ_INVALID,
            "--log-level: 'debgu' is none of debug|info|warning|error; did you mean debug?", BROKER,
            "--log-level=debgu");
    REFUSE (GQ_INVALID, "--log-level: 'loud' is none of debug|info|warning|error", BROKER,
            "--log-level", "loud");
}

Test (options, missing_value_is_told)
{
    REFUSE (GQ_INVALID, "--capacity: needs a value", BROKER, "--capacity");
    REFUSE (GQ_INVALID,
            "--log-file: needs a value; if it is '--capacity', write --log-file=--capacity", BROKER,
            "--log-file", "--capacity", "3");
    REFUSE (GQ_INVALID, "--config: the name is empty", BROKER, "--config=");
}

Test (options, operands_are_refused)
{
    static const char *const words[] = {"run", "-h", "-", "--", ""};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        cr_assert_eq (READ (BROKER, words[i]), GQ_INVALID, "'%s' was taken", words[i]);
        cr_assert (strstr (error.text, "takes options only") != NULL, "%s", error.text);
    }
}

Test (options, wrong_variable_names_itself_and_the_nearest)
{
    setenv ("GRADQ_CAPACITY", "many", 1);
    REFUSE (GQ_MALFORMED,
            "GRADQ_CAPACITY (environment): 'many' is not allowed; give a whole number, 1 to 65536 "
            "gradients",
            BROKER, NULL);
    unsetenv ("GRADQ_CAPACITY");
    setenv ("GRADQ_MAX_STALENES", "3", 1);
    REFUSE (GQ_MALFORMED,
            "GRADQ_MAX_STALENES (environment): no option has this name; did you mean "
            "GRADQ_MAX_STALENESS?",
            BROKER, NULL);
    unsetenv ("GRADQ_MAX_STALENES");
    setenv ("GRADQ_ZZZZZZZZZZ", "3", 1);
    REFUSE (GQ_MALFORMED, "GRADQ_ZZZZZZZZZZ (environment): no option has this name; unset it",
            BROKER, NULL);
}

Test (options, variable_that_a_flag_overrides_is_still_checked)
{
    setenv ("GRADQ_CAPACITY", "many", 1);
    cr_assert_eq (READ (BROKER, "--capacity", "3"), GQ_MALFORMED);
}

Test (options, wrong_ini_line_is_named_with_file_and_line)
{
    refuse_ini ("[gradq]\n\ncapcity = 3\n",
                ":3: capcity: no such option for [gradq]; did you mean capacity?");
    refuse_ini ("[broker]\ncapacity = 0\n",
                ":2: capacity: '0' is not allowed; give a whole number, 1 to 65536 gradients");
    refuse_ini ("[broker]\ncapacity = 1\ncapacity = 2\n",
                ":3: capacity: set twice in [broker]; remove one");
    refuse_ini ("[broker]\nwindow = 1\n",
                ":2: window: an option of gradq-actor; it does not belong in [broker]");
    refuse_ini ("[actor]\nwindwo = 1\n",
                ":2: windwo: no such option for [actor]; did you mean window?");
    refuse_ini ("[brokr]\ncapacity = 1\n",
                ":2: capacity: no such section [brokr]; did you mean [broker]?; there are gradq, "
                "broker, optimizer, actor, top, try, bench");
    refuse_ini ("capacity = 1\n", ":1: capacity: stands before any section; write [gradq] or a "
                                  "program's name above it");
    refuse_ini ("[broker]\ncapacity\n", ":2: neither [section] nor name = value");
    refuse_ini ("[broker\ncapacity = 1\n", ":1: neither [section] nor name = value");
    refuse_ini ("[broker]\nlog-file =\n", ":2: log-file: the value is empty");
}

Test (options, earliest_wrong_ini_line_is_told)
{
    refuse_ini ("[broker]\nwhat\ncapacity = 0\n", ":2: neither [section] nor name = value");
    refuse_ini ("[broker]\ncapacity = 0\nwhat\n",
                ":2: capacity: '0' is not allowed; give a whole number, 1 to 65536 gradients");
}

Test (options, long_ini_line_is_refused_and_not_cut)
{
    char ini[512], path[256];
    memset (path, 'p', sizeof path);
    for (size_t bytes = 150; bytes < 250; bytes++) {
        snprintf (ini, sizeof ini, "[broker]\nlog-file = %.*s\n", (int)bytes, path);
        use_ini (ini);
        gq_status status = READ (BROKER, NULL);
        if (status == GQ_OK)
            cr_assert_eq (strlen (gq_options_text (options, "log-file")), bytes);
        else
            cr_assert (strstr (error.text, ":2: longer than") != NULL, "%s", error.text);
        cr_assert_eq (status, bytes < 188 ? GQ_OK : GQ_MALFORMED, "%zu", bytes);
    }
}

Test (options, nul_in_the_ini_file_is_refused)
{
    unlink (ini_path);
    use_ini_bytes ("[broker]\ncapa\0city = 3\n", 23);
    cr_assert_eq (READ (BROKER, NULL), GQ_MALFORMED);
    cr_assert (strstr (error.text, ":2: holds a NUL byte") != NULL, "%s", error.text);
}

Test (options, directory_as_ini_file_is_io)
{
    cr_assert_eq (READ (BROKER, "--config", "/tmp"), GQ_IO);
    cr_assert (strstr (error.text, "/tmp: ") != NULL, "%s", error.text);
}

Test (options, too_many_list_items_are_refused)
{
    static char items[4096];
    for (size_t i = 0; i < 1025; i++)
        memcpy (items + 2 * i, "a;", 2);
    setenv ("GRADQ_SET", items, 1);
    cr_assert_eq (READ (OPTIMIZER, NULL), GQ_MALFORMED);
    cr_assert (strstr (error.text, "more than 1024 items") != NULL, "%s", error.text);
}

Test (options, exit_codes_follow_the_contract)
{
    cr_assert_eq (gq_options_exit (READ (BROKER, "--what")), 2);
    cr_assert_eq (gq_options_exit (READ (BROKER, "--config", "/nonexistent/gradq.ini")), 78);
    setenv ("GRADQ_CAPACITY", "0", 1);
    cr_assert_eq (gq_options_exit (READ (BROKER, NULL)), 78);
    cr_assert_eq (gq_options_exit (GQ_AGAIN), 0);
    cr_assert_eq (gq_options_exit (GQ_OK), 0);
    cr_assert_eq (gq_options_exit (GQ_MEMORY), 1);
}
