/*
 * gradq-top's figures and drawing, without broker or terminal.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "top.h"

static json_t *
answer (double depth, double received, double delivered)
{
    return json_pack ("{s:b, s:{s:f, s:i, s:f, s:f}}", "ok", 1, "queue", "depth", depth, "capacity",
                      256, "received", received, "delivered", delivered);
}

static gq_top_report
report_of (json_t *stats, const gq_top_report *previous, double at_s)
{
    gq_top_report report;
    gq_error error = {.text = ""};
    cr_assert_eq (gq_top_report_read (&report, &stats, previous, at_s, 1000, &error), GQ_OK, "%s",
                  error.text);
    cr_assert_null (stats);
    return report;
}

static char *
drawn (const gq_top_report *report, gq_top_style style)
{
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream (&text, &size);
    cr_assert_not_null (memory);
    gq_top_draw (memory, report, &style);
    fclose (memory);
    return text;
}

static void
expect_bar (double share, int width, bool utf8, const char *wanted)
{
    char *text = NULL;
    size_t size = 0;
    FILE *memory = open_memstream (&text, &size);
    cr_assert_not_null (memory);
    gq_top_bar (memory, share, width, utf8);
    fclose (memory);
    cr_expect_str_eq (text, wanted, "share %g: '%s', wanted '%s'", share, text, wanted);
    free (text);
}

Test (top, rates_are_the_change_of_the_counters_over_the_time_between)
{
    gq_top_report first = report_of (answer (0, 100, 100), NULL, 10);
    gq_top_report second = report_of (answer (30, 160, 130), &first, 12);
    cr_expect_eq (second.in_per_s, 30);
    cr_expect_eq (second.out_per_s, 15);
    cr_expect_eq (second.drain_s, 2);
    gq_top_report_clear (&first);
    gq_top_report_clear (&second);
}

Test (top, rates_are_unknown_in_the_first_report_and_after_a_counter_fell)
{
    gq_top_report first = report_of (answer (0, 100, 100), NULL, 10);
    cr_expect (isnan (first.in_per_s) && isnan (first.out_per_s) && isnan (first.drain_s));
    gq_top_report restarted = report_of (answer (0, 5, 5), &first, 11);
    cr_expect (isnan (restarted.in_per_s) && isnan (restarted.out_per_s));
    gq_top_report_clear (&first);
    gq_top_report_clear (&restarted);
}

Test (top, a_queue_that_nobody_reads_never_drains)
{
    gq_top_report first = report_of (answer (5, 100, 95), NULL, 10);
    gq_top_report second = report_of (answer (8, 103, 95), &first, 11);
    cr_expect (isinf (second.drain_s));
    json_t *json = gq_top_report_json (&second);
    cr_expect_null (json_object_get (json, "drain_s"), "JSON has no infinity");
    json_decref (json);
    gq_top_report_clear (&first);
    gq_top_report_clear (&second);
}

Test (top, an_answer_without_a_queue_is_malformed_and_stays_the_callers)
{
    gq_top_report report;
    gq_error error = {.text = ""};
    json_t *stats = json_pack ("{s:b, s:i}", "ok", 1, "queue", 3);
    cr_expect_eq (gq_top_report_read (&report, &stats, NULL, 0, 0, &error), GQ_MALFORMED);
    cr_expect_not_null (stats);
    cr_expect (strstr (error.text, "queue") != NULL);
    json_decref (stats);
}

Test (top, a_refusal_gives_the_brokers_reason)
{
    gq_top_report report;
    gq_error error = {.text = ""};
    json_t *stats = json_pack ("{s:b, s:s}", "ok", 0, "error", "too busy");
    cr_expect_eq (gq_top_report_read (&report, &stats, NULL, 0, 0, &error), GQ_REFUSED);
    cr_expect (strstr (error.text, "too busy") != NULL);
    json_decref (stats);
}

Test (top, json_has_every_field_of_the_contract_even_when_the_broker_knows_none)
{
    gq_top_report report = report_of (json_pack ("{s:{}}", "queue"), NULL, 0);
    json_t *json = gq_top_report_json (&report);
    static const char *const queue[] = {"depth",    "capacity",  "bytes",
                                        "received", "delivered", "refused"};
    static const char *const optimizer[] = {"name",          "version",     "applied",
                                            "rejected",      "duplicates",  "staleness_p50",
                                            "staleness_p99", "apply_us_p50"};
    for (size_t i = 0; i < sizeof queue / sizeof *queue; i++)
        cr_expect (json_is_null (json_object_get (json_object_get (json, "queue"), queue[i])), "%s",
                   queue[i]);
    for (size_t i = 0; i < sizeof optimizer / sizeof *optimizer; i++)
        cr_expect (
            json_is_null (json_object_get (json_object_get (json, "optimizer"), optimizer[i])),
            "%s", optimizer[i]);
    cr_expect (json_is_array (json_object_get (json, "actors")));
    cr_expect_eq (json_number_value (json_object_get (json, "time")), 1000);
    json_decref (json);
    gq_top_report_clear (&report);
}

Test (top, only_a_known_depth_is_above_a_limit)
{
    gq_top_report report = report_of (answer (8, 8, 0), NULL, 0);
    cr_expect (gq_top_above (&report, 7));
    cr_expect_not (gq_top_above (&report, 8));
    gq_top_report_clear (&report);
    report = report_of (json_pack ("{s:{s:n}}", "queue", "depth"), NULL, 0);
    cr_expect_not (gq_top_above (&report, 0));
    gq_top_report_clear (&report);
}

Test (top, the_bar_is_full_only_when_all_is_full_and_empty_only_when_nothing_is)
{
    expect_bar (0, 4, false, "....");
    expect_bar (0.001, 4, false, "#...");
    expect_bar (0.5, 4, false, "##..");
    expect_bar (0.999, 4, false, "###.");
    expect_bar (1, 4, false, "####");
    expect_bar (7, 4, false, "####");
    expect_bar ((double)NAN, 4, false, "....");
    expect_bar (0.5, 3, true, "█▌·");
    expect_bar (1e-9, 2, true, "▏·");
    expect_bar (1, 2, true, "██");
}

Test (top, quantities_round_into_the_next_unit)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0, "0"},       {7, "7"},          {0.5, "0.5"},     {950, "950"},
                 {999.4, "999"}, {999.6, "1k"},     {12345, "12.3k"}, {4.56e6, "4.56M"},
                 {999600, "1M"}, {(double)NAN, "-"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[GQ_TOP_TEXT_BYTES];
        gq_top_quantity (text, cases[i].value);
        cr_expect_str_eq (text, cases[i].text, "%g: '%s', wanted '%s'", cases[i].value, text,
                          cases[i].text);
    }
}

Test (top, durations_and_bytes_carry_the_nearest_unit)
{
    static const struct {
        double value;
        const char *duration, *bytes;
    } cases[] = {{0, "0 s", "0 B"},
                 {12e-6, "12 us", "1.2e-05 B"},
                 {3.4e-3, "3.4 ms", NULL},
                 {5.6, "5.6 s", NULL},
                 {640, "11 min", "640 B"},
                 {1024, "17 min", "1 KiB"},
                 {12345678, NULL, "11.8 MiB"},
                 {(double)INFINITY, "never", "-"},
                 {(double)NAN, "-", "-"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[GQ_TOP_TEXT_BYTES];
        gq_top_duration (text, cases[i].value);
        if (cases[i].duration != NULL)
            cr_expect_str_eq (text, cases[i].duration, "%g s: '%s'", cases[i].value, text);
        gq_top_bytes (text, cases[i].value);
        if (cases[i].bytes != NULL && cases[i].value >= 1)
            cr_expect_str_eq (text, cases[i].bytes, "%g bytes: '%s'", cases[i].value, text);
    }
}

Test (top, no_line_is_wider_and_no_view_taller_than_the_style)
{
    gq_top_report report = report_of (answer (8, 8, 0), NULL, 0);
    json_t *actors = json_array ();
    for (int i = 0; i < 30; i++)
        json_array_append_new (actors, json_pack ("{s:i, s:s}", "id", i, "state", "alive"));
    json_object_set_new (report.stats, "actors", actors);
    for (int columns = 1; columns <= 120; columns++)
        for (int rows = 1; rows <= 50; rows++) {
            char *text = drawn (&report, (gq_top_style){.columns = columns, .rows = rows});
            int lines = 0, width = 0;
            for (const char *at = text; *at != '\0'; at++) {
                width = *at == '\n' ? 0 : width + 1;
                lines += *at == '\n';
                cr_assert (width <= columns, "%d columns in %d", width, columns);
            }
            cr_assert (lines <= rows, "%d lines in %d", lines, rows);
            free (text);
        }
    gq_top_report_clear (&report);
}

Test (top, silent_actors_come_first_when_not_all_fit)
{
    gq_top_report report = report_of (answer (8, 8, 0), NULL, 0);
    json_t *actors = json_array ();
    for (int i = 0; i < 100; i++)
        json_array_append_new (actors, json_pack ("{s:i, s:s, s:s}", "id", i, "state",
                                                  i == 77 ? "silent" : "alive", "lane",
                                                  i == 77 ? "shm" : "inline"));
    json_object_set_new (report.stats, "actors", actors);
    char *text = drawn (&report, (gq_top_style){.columns = 100, .rows = 20});
    cr_expect (strstr (text, "!    77 silent   shm ") != NULL, "%s", text);
    cr_expect (strstr (text, " alive    inline ") != NULL, "%s", text);
    cr_expect (strstr (text, " more\n") != NULL, "%s", text);
    free (text);
    gq_top_report_clear (&report);
}

Test (top, control_characters_of_peers_do_not_reach_the_terminal)
{
    gq_top_report report =
        report_of (json_pack ("{s:s, s:s, s:{}, s:{s:s, s:s}, s:[{s:s}]}", "address",
                              "\033[2Jx\xc2\x9b", "run", "\007", "queue", "optimizer", "name",
                              "\033]0;t\007", "state", "\n", "actors", "state", "\033c"),
                   NULL, 0);
    char *text = drawn (&report, (gq_top_style){.columns = 200});
    for (const char *at = text; *at != '\0'; at++)
        cr_assert (*at == '\n' || (*at >= ' ' && *at <= '~'), "byte %02x", (unsigned char)*at);
    free (text);
    gq_top_report_clear (&report);
}

Test (top, colour_is_used_only_when_allowed)
{
    gq_top_report report = report_of (answer (256, 300, 0), NULL, 0);
    char *plain = drawn (&report, (gq_top_style){.columns = 80});
    char *coloured = drawn (&report, (gq_top_style){.columns = 80, .colour = true});
    cr_expect_null (strchr (plain, '\033'));
    cr_expect_not_null (strchr (coloured, '\033'));
    cr_expect_not_null (strstr (plain, "256/256 full"));
    free (plain);
    free (coloured);
    gq_top_report_clear (&report);
}

Test (top, a_row_stands_beneath_its_header)
{
    char *text = NULL;
    size_t size = 0;
    gq_top_report report = report_of (answer (8, 8, 0), NULL, 0);
    FILE *memory = open_memstream (&text, &size);
    cr_assert_not_null (memory);
    gq_top_stat_header (memory);
    gq_top_stat_row (memory, &report);
    fclose (memory);
    char *first = strchr (text, '\n') + 1, *second = strchr (first, '\n') + 1;
    cr_expect_eq (strcspn (first, "\n"), strcspn (second, "\n"), "%s", text);
    free (text);
    gq_top_report_clear (&report);
}
