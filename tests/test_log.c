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
        json_t *line = json_loadb (text, (size_t) bytes, JSON_REJECT_DUPLICATES, &error);
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
            UINT64_MAX, "change", "i", INT64_MIN, "share", "f", 0.1, "last", "b", 3, "none", "s",
            (const char *) NULL, NULL);
    json_t *lines = read_log ();
    const json_t *line = json_array_get (lines, 0);
    cr_assert_eq (json_array_size (lines), 1);
    cr_assert_str_eq (text_of (line, "level"), "warning");
    cr_assert_str_eq (text_of (line, "process"), "broker");
    cr_assert_str_eq (text_of (line, "event"), "checkpoint written");
    cr_assert_str_eq (text_of (line, "path"), "run/a b");
    cr_assert_eq (json_integer_value (json_object_get (line, "change")), INT64_MIN);
    cr_assert_eq (json_real_value (json_object_get (line, "share")), 0.1);
    cr_assert (json_is_true (json_object_get (line, "last")));
    cr_assert (json_is_null (json_object_get (line, "none")));
    cr_assert_eq (json_object_size (line), 10);
    json_decref (lines);
}
