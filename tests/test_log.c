/*
 * The log: every line is one JSON object whatever is put into it, and lines of threads never mix.
 */
#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "log.h"

static char log_path[] = "/tmp/gradq-test-XXXXXX";

static void
open_log (void)
{
    gq_error error;
    const int fd = mkstemp (log_path);
    cr_assert (fd >= 0);
    close (fd);
    cr_assert_eq (gq_log_open ("broker", log_path, GQ_LOG_INFO, &error), GQ_OK, "%s", error.text);
}

static void
remove_log (void)
{
    cr_assert_eq (gq_log_open ("broker", NULL, GQ_LOG_INFO, NULL), GQ_OK); /* closes the file */
    unlink (log_path);
}

TestSuite (log, .init = open_log, .fini = remove_log, .timeout = 60);

/* Every line of the log as an array of objects; a line that is none fails the test. */
static json_t *
read_log (void)
{
    json_t *lines = json_array ();
    char *text = NULL;
    size_t size = 0;
    FILE *file = fopen (log_path, "r");
    cr_assert (file != NULL);
    for (ssize_t bytes = getline (&text, &size, file); bytes > 0;
         bytes = getline (&text, &size, file)) {
        json_error_t error;
        json_t *line = json_loadb (text, (size_t)bytes, JSON_REJECT_DUPLICATES, &error);
        cr_assert (json_is_object (line), "%s: %s", error.text, text);
        cr_assert_eq (text[bytes - 1], '\n');
        json_array_append_new (lines, line);
    }
    free (text);
    fclose (file);
    return lines;
}

static const char *
text_of (const json_t *line, const char *name)
{
    const char *text = json_string_value (json_object_get (line, name));
    return text != NULL ? text : "(not a string)";
}

Test (log, line_has_time_level_process_event_and_typed_fields)
{
    gq_log (GQ_LOG_WARNING, "checkpoint written", "path", "s", "run/a b", "version", "u",
            UINT64_C (42), "change", "i", INT64_MIN, "share", "f", 0.1, "last", "b", 3, "none", "s",
            (const char *)NULL, NULL);
    json_t *lines = read_log ();
    const json_t *line = json_array_get (lines, 0);
    cr_assert_eq (json_array_size (lines), 1);
    cr_assert_str_eq (text_of (line, "level"), "warning");
    cr_assert_str_eq (text_of (line, "process"), "broker");
    cr_assert_str_eq (text_of (line, "event"), "checkpoint written");
    cr_assert_str_eq (text_of (line, "path"), "run/a b");
    cr_assert_eq (json_integer_value (json_object_get (line, "version")), 42);
    cr_assert_eq (json_integer_value (json_object_get (line, "change")), INT64_MIN);
    cr_assert_eq (json_real_value (json_object_get (line, "share")), 0.1);
    cr_assert (json_is_true (json_object_get (line, "last")));
    cr_assert (json_is_null (json_object_get (line, "none")));
    cr_assert_eq (json_object_size (line), 10);
    json_decref (lines);
}

Test (log, unsigned_fields_have_all_64_bits)
{
    char text[512] = "";
    gq_log (GQ_LOG_INFO, "event", "version", "u", UINT64_MAX, NULL);
    FILE *file = fopen (log_path, "r"); /* jansson's integers are signed */
    cr_assert (file != NULL && fgets (text, sizeof text, file) != NULL);
    fclose (file);
    cr_assert (strstr (text, ",\"version\":18446744073709551615}\n") != NULL, "%s", text);
}

Test (log, time_is_now_in_utc_with_microseconds)
{
    struct tm parsed = {0};
    const time_t before = time (NULL);
    gq_log (GQ_LOG_INFO, "event", NULL);
    const time_t after = time (NULL);
    json_t *lines = read_log ();
    const char *text = text_of (json_array_get (lines, 0), "time");
    const char *rest = strptime (text, "%Y-%m-%dT%H:%M:%S", &parsed);
    cr_assert (rest != NULL && strlen (rest) == 8 && rest[0] == '.' && rest[7] == 'Z', "%s", text);
    const time_t told = timegm (&parsed);
    cr_assert (told >= before && told <= after, "%s", text);
    json_decref (lines);
}

Test (log, strings_of_any_bytes_come_back_or_are_replaced)
{
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"quote \" backslash \\ slash /", "quote \" backslash \\ slash /"},
        {"\n\t\r\b\x01\x1f\x7f", "\n\t\r\b\x01\x1f\x7f"},
        {"\xc3\xbc \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xbc \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"a\xff"
         "b",
         "a\xef\xbf\xbd"
         "b"},
        {"cut \xe2\x82", "cut \xef\xbf\xbd\xef\xbf\xbd"},
        {"overlong \xc0\xaf", "overlong \xef\xbf\xbd\xef\xbf\xbd"},
        {"surrogate \xed\xa0\x80", "surrogate \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"", ""},
    };
    const size_t count = sizeof cases / sizeof cases[0];
    for (size_t i = 0; i < count; i++)
        gq_log (GQ_LOG_INFO, "event", "text", "s", cases[i].in, NULL);
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), count);
    for (size_t i = 0; i < count; i++)
        cr_assert_str_eq (text_of (json_array_get (lines, i), "text"), cases[i].out);
    json_decref (lines);
}

Test (log, random_bytes_give_valid_json)
{
    uint64_t state = 20240229;
    char text[64];
    printf ("seed %llu\n", (unsigned long long)state);
    for (int i = 0; i < 2000; i++) {
        size_t bytes = 0;
        while (bytes < sizeof text - 1) {
            state = state * UINT64_C (6364136223846793005) + UINT64_C (1442695040888963407);
            text[bytes++] = (char)(state >> 56);
        }
        text[bytes] = '\0';
        gq_log (GQ_LOG_INFO, "event", "text", "s", text, NULL);
    }
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), 2000);
    json_decref (lines);
}

Test (log, doubles_read_back_equal_and_non_finite_ones_are_null)
{
    static const double values[] = {0.1, 1.0 / 3, 1e-320, -1.7976931348623157e308, 1e15 + 0.3, 2};
    const size_t count = sizeof values / sizeof values[0];
    for (size_t i = 0; i < count; i++)
        gq_log (GQ_LOG_INFO, "event", "x", "f", values[i], NULL);
    gq_log (GQ_LOG_INFO, "event", "x", "f", (double)NAN, "y", "f", (double)-INFINITY, NULL);
    json_t *lines = read_log ();
    for (size_t i = 0; i < count; i++)
        cr_assert_eq (json_number_value (json_object_get (json_array_get (lines, i), "x")),
                      values[i]);
    cr_assert (json_is_null (json_object_get (json_array_get (lines, count), "x")));
    cr_assert (json_is_null (json_object_get (json_array_get (lines, count), "y")));
    json_decref (lines);
}

Test (log, field_that_does_not_fit_is_left_out_and_told)
{
    static char text[20000];
    memset (text, 'x', sizeof text - 1);
    gq_log (GQ_LOG_INFO, "event", "long", "s", text, "short", "i", INT64_C (7), NULL);
    json_t *lines = read_log ();
    const json_t *line = json_array_get (lines, 0);
    cr_assert_null (json_object_get (line, "long"));
    cr_assert_eq (json_integer_value (json_object_get (line, "short")), 7);
    cr_assert (json_is_true (json_object_get (line, "truncated")));
    json_decref (lines);
}

Test (log, every_length_around_the_limit_is_one_valid_line)
{
    static char text[8300];
    memset (text, '"', sizeof text - 1);
    size_t count = 0, cut = 0;
    for (size_t bytes = 3900; bytes < 4200; bytes++, count++) {
        text[bytes] = '\0'; /* each quote takes two bytes: over and under 8192 both come up */
        gq_log (GQ_LOG_INFO, "event", "text", "s", text, NULL);
        text[bytes] = '"';
    }
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), count);
    for (size_t i = 0; i < count; i++)
        cut += json_object_get (json_array_get (lines, i), "truncated") != NULL;
    cr_assert (cut > 0 && cut < count, "%zu of %zu", cut, count);
    json_decref (lines);
}

Test (log, levels_below_the_least_are_not_written)
{
    cr_assert_eq (gq_log_open ("broker", log_path, GQ_LOG_WARNING, NULL), GQ_OK);
    cr_assert (!gq_log_on (GQ_LOG_INFO) && gq_log_on (GQ_LOG_WARNING));
    gq_log (GQ_LOG_DEBUG, "debug", NULL);
    gq_log (GQ_LOG_INFO, "info", NULL);
    gq_log (GQ_LOG_WARNING, "warning", NULL);
    gq_log (GQ_LOG_ERROR, "error", NULL);
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), 2);
    cr_assert_str_eq (text_of (json_array_get (lines, 0), "event"), "warning");
    json_decref (lines);
}

Test (log, words_name_the_levels)
{
    cr_assert_eq (gq_log_level_from ("debug"), GQ_LOG_DEBUG);
    cr_assert_eq (gq_log_level_from ("info"), GQ_LOG_INFO);
    cr_assert_eq (gq_log_level_from ("warning"), GQ_LOG_WARNING);
    cr_assert_eq (gq_log_level_from ("error"), GQ_LOG_ERROR);
}

Test (log, opening_again_appends)
{
    gq_log (GQ_LOG_INFO, "first", NULL);
    cr_assert_eq (gq_log_open ("optimizer", log_path, GQ_LOG_INFO, NULL), GQ_OK);
    gq_log (GQ_LOG_INFO, "second", NULL);
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), 2);
    cr_assert_str_eq (text_of (json_array_get (lines, 0), "process"), "broker");
    cr_assert_str_eq (text_of (json_array_get (lines, 1), "process"), "optimizer");
    json_decref (lines);
}

Test (log, file_that_cannot_be_opened_is_io_and_the_old_one_stays)
{
    gq_error error;
    cr_assert_eq (gq_log_open ("broker", "/nonexistent/log", GQ_LOG_INFO, &error), GQ_IO);
    cr_assert (strstr (error.text, "/nonexistent/log") != NULL, "%s", error.text);
    gq_log (GQ_LOG_INFO, "still here", NULL);
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), 1);
    json_decref (lines);
}

Test (log, full_device_loses_lines_and_keeps_errno)
{
    struct stat info;
    cr_assert (stat ("/dev/full", &info) == 0 && S_ISCHR (info.st_mode), "no such device here");
    cr_assert_eq (gq_log_open ("broker", "/dev/full", GQ_LOG_INFO, NULL), GQ_OK);
    errno = ERANGE;
    gq_log (GQ_LOG_INFO, "lost", NULL);
    cr_assert_eq (errno, ERANGE);
}

#define THREADS          4
#define LINES_PER_THREAD 500

static void *
write_lines (void *user)
{
    const int64_t thread = (int64_t)(intptr_t)user;
    char text[200];
    memset (text, (int)('a' + thread), sizeof text - 1);
    text[sizeof text - 1] = '\0';
    for (int64_t i = 0; i < LINES_PER_THREAD; i++)
        gq_log (GQ_LOG_INFO, "line", "thread", "i", thread, "i", "i", i, "text", "s", text, NULL);
    return NULL;
}

Test (log, lines_of_threads_come_whole_and_in_each_threads_order)
{
    pthread_t threads[THREADS];
    int64_t next[THREADS] = {0};
    for (intptr_t i = 0; i < THREADS; i++)
        cr_assert_eq (pthread_create (&threads[i], NULL, write_lines, (void *)i), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join (threads[i], NULL);
    json_t *lines = read_log ();
    cr_assert_eq (json_array_size (lines), THREADS * LINES_PER_THREAD);
    for (size_t i = 0; i < THREADS * LINES_PER_THREAD; i++) {
        const json_t *line = json_array_get (lines, i);
        const json_int_t thread = json_integer_value (json_object_get (line, "thread"));
        cr_assert_eq (json_integer_value (json_object_get (line, "i")), next[thread]++);
        cr_assert_eq (strlen (text_of (line, "text")), 199);
    }
    json_decref (lines);
}
