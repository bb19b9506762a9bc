/*
 * Registry: one optimizer at a time, states by age, and reports of a life that ended do not hide
 * the one that followed.
 */
#include "support.h"

#include "broker/registry.h"

TestSuite (registry, .timeout = 60);

#define MS_NS     UINT64_C (1000000)
#define RUN       "00112233445566778899aabbccddeeff"
#define OTHER_RUN "ff112233445566778899aabbccddeeff"

static gq_registry *registry;
static gq_queue_actor seen[GQ_ACTORS_MAX];

static gq_status
optimizer (const char *peer, const char *run, int term, int start, int version, uint64_t now_ms)
{
    gq_error error = {""};
    json_t *report = json_pack ("{s:s, s:i, s:i, s:i, s:s}", "run", run, "term", term,
                                "start_version", start, "version", version, "name", "adam");
    const gq_status status = gq_registry_optimizer (registry, peer, report, now_ms * MS_NS, &error);
    if (status != GQ_OK)
        cr_assert_str_not_empty (error.text);
    json_decref (report);
    return status;
}

static gq_status
actor (const char *run, int id, int epoch, int pushed, bool gone, uint64_t now_ms)
{
    json_t *report = json_pack ("{s:s, s:i, s:i, s:i, s:{s:f, s:f, s:i}}", "run", run, "actor", id,
                                "epoch", epoch, "pushed", pushed, "metrics", "return_mean", 12.5,
                                "loss", 0.25, "state", 1);
    const gq_status status = gq_registry_actor (registry, report, gone, now_ms * MS_NS);
    json_decref (report);
    return status;
}

static void
expect_text (const json_t *object, const char *key, const char *expected)
{
    const char *text = json_string_value (json_object_get (object, key));
    cr_assert_not_null (text, "%s", key);
    cr_assert_str_eq (text, expected, "%s: %s", key, text);
}

static void
expect_number (const json_t *object, const char *key, json_int_t expected)
{
    const json_t *value = json_object_get (object, key);
    cr_assert (json_is_integer (value), "%s", key);
    cr_assert_eq (json_integer_value (value), expected, "%s: %lld", key,
                  (long long)json_integer_value (value));
}

/* The one actor that there is. */
static void
expect_actor (uint64_t now_ms, const char *state, json_int_t pushed, json_int_t age_ms)
{
    json_t *list = gq_registry_actors_json (registry, seen, now_ms * MS_NS);
    cr_assert_eq (json_array_size (list), 1);
    const json_t *entry = json_array_get (list, 0);
    expect_text (entry, "state", state);
    expect_number (entry, "pushed", pushed);
    expect_number (entry, "last_seen_ms", age_ms);
    json_decref (list);
}

static void
expect_optimizer (uint64_t now_ms, const char *key, json_int_t expected)
{
    json_t *object = gq_registry_optimizer_json (registry, now_ms * MS_NS);
    expect_number (object, key, expected);
    json_decref (object);
}

static void
expect_optimizer_state (uint64_t now_ms, const char *expected)
{
    json_t *object = gq_registry_optimizer_json (registry, now_ms * MS_NS);
    expect_text (object, "state", expected);
    json_decref (object);
}

static void
begin (void)
{
    registry = gq_registry_new ();
    cr_assert_not_null (registry);
}

static void
end (void)
{
    gq_registry_free (&registry);
    cr_assert_null (registry);
    gq_registry_free (&registry);
}

/* ---- optimizer ---- */

Test (registry, there_is_no_optimizer_until_one_reports)
{
    begin ();
    cr_assert_null (gq_registry_peer (registry, 1));
    expect_optimizer_state (5000, "none");
    json_t *object = gq_registry_optimizer_json (registry, 1);
    cr_assert (json_is_null (json_object_get (object, "version")));
    cr_assert (json_is_null (json_object_get (object, "last_seen_ms")));
    json_decref (object);
    end ();
}

Test (registry, an_optimizer_is_alive_for_3_s_after_each_report)
{
    begin ();
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 7, 1000), GQ_OK);
    cr_assert_str_eq (gq_registry_peer (registry, 3999 * MS_NS), "aa");
    expect_optimizer_state (3999, "alive");
    cr_assert_null (gq_registry_peer (registry, 4000 * MS_NS));
    expect_optimizer_state (4000, "silent");
    expect_optimizer (4000, "last_seen_ms", 3000);
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 9, 9000), GQ_OK);
    cr_assert_str_eq (gq_registry_peer (registry, 9000 * MS_NS), "aa");
    expect_optimizer (9000, "version", 9);
    end ();
}

Test (registry, a_second_optimizer_is_refused_while_the_first_is_alive)
{
    begin ();
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 7, 1000), GQ_OK);
    cr_assert_eq (optimizer ("bb", OTHER_RUN, 9, 0, 1, 1001), GQ_REFUSED);
    cr_assert_eq (optimizer ("bb", RUN, 1, 0, 1, 1001), GQ_REFUSED, "the same life twice");
    cr_assert_str_eq (gq_registry_peer (registry, 1002 * MS_NS), "aa");
    expect_optimizer (1002, "version", 7);
    cr_assert_eq (optimizer ("bb", OTHER_RUN, 1, 0, 1, 4000), GQ_OK, "silent: may be replaced");
    cr_assert_str_eq (gq_registry_peer (registry, 4000 * MS_NS), "bb");
    end ();
}

Test (registry, after_a_bye_another_may_come_at_once)
{
    begin ();
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 7, 1000), GQ_OK);
    cr_assert_not (gq_registry_optimizer_gone (registry, "bb"), "not its to say");
    cr_assert_not_null (gq_registry_peer (registry, 1000 * MS_NS));
    cr_assert (gq_registry_optimizer_gone (registry, "aa"));
    cr_assert_null (gq_registry_peer (registry, 1000 * MS_NS));
    expect_optimizer_state (1000, "gone");
    cr_assert_eq (optimizer ("bb", OTHER_RUN, 1, 0, 1, 1001), GQ_OK);
    expect_optimizer_state (1001, "alive");
    end ();
}

Test (registry, a_later_life_of_the_same_run_takes_over_and_the_earlier_one_cannot_come_back)
{
    begin ();
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 100, 1000), GQ_OK);
    cr_assert_eq (optimizer ("bb", RUN, 2, 80, 80, 1001), GQ_OK);
    expect_optimizer (1001, "rolled_back", 20);
    cr_assert_eq (optimizer ("aa", RUN, 1, 0, 101, 1002), GQ_REFUSED);
    cr_assert_eq (optimizer ("bb", RUN, 2, 80, 90, 1003), GQ_OK);
    cr_assert_eq (optimizer ("cc", RUN, 3, 95, 95, 1004), GQ_OK);
    expect_optimizer (1004, "rolled_back", 20);
    end ();
}

Test (registry, reports_without_what_they_should_hold_do_no_harm)
{
    gq_error error = {""};
    json_t *empty = json_object ();
    begin ();
    cr_assert_eq (gq_registry_optimizer (registry, "aa", empty, MS_NS, &error), GQ_OK);
    cr_assert_eq (gq_registry_optimizer (registry, "bb", empty, MS_NS, &error), GQ_REFUSED);
    cr_assert_not_null (strstr (error.text, "unknown"), "%s", error.text);
    cr_assert_eq (gq_registry_actor (registry, empty, false, MS_NS), GQ_INVALID);
    json_decref (empty);
    end ();
}

Test (registry, an_identity_that_does_not_fit_is_refused)
{
    char peer[600];
    memset (peer, 'a', sizeof peer - 1);
    peer[sizeof peer - 1] = '\0';
    begin ();
    cr_assert_eq (optimizer (peer, RUN, 1, 0, 1, 1), GQ_INVALID);
    cr_assert_null (gq_registry_peer (registry, MS_NS));
    peer[512] = '\0';
    cr_assert_eq (optimizer (peer, RUN, 1, 0, 1, 1), GQ_OK);
    end ();
}

/* ---- actors ---- */

Test (registry, an_actor_is_alive_then_silent_and_gone_when_it_said_bye)
{
    begin ();
    cr_assert_eq (actor (RUN, 5, 1, 10, false, 1000), GQ_OK);
    expect_actor (1000 + GQ_SILENT_MS - 1, "alive", 10, GQ_SILENT_MS - 1);
    expect_actor (1000 + GQ_SILENT_MS, "silent", 10, GQ_SILENT_MS);
    cr_assert_eq (actor (RUN, 5, 1, 11, true, 2000), GQ_OK);
    expect_actor (2001, "gone", 11, 1);
    end ();
}

Test (registry, gradients_keep_an_actor_alive_too)
{
    begin ();
    cr_assert_eq (actor (RUN, 5, 1, 10, false, 1000), GQ_OK);
    seen[5] = (gq_queue_actor){.received = 4, .last_ns = 8000 * MS_NS};
    expect_actor (8100, "alive", 10, 100);
    end ();
}

Test (registry, a_gradient_newer_than_the_question_has_age_0)
{
    /* The queue has a thread of its own: it may see one between clock and answer. */
    begin ();
    cr_assert_eq (actor (RUN, 5, 1, 10, false, 1000), GQ_OK);
    seen[5] = (gq_queue_actor){.received = 4, .last_ns = 2000 * MS_NS + 1};
    expect_actor (2000, "alive", 10, 0);
    end ();
}

Test (registry, the_bye_of_an_earlier_life_does_not_hide_the_present_one)
{
    begin ();
    cr_assert_eq (actor (RUN, 5, 2, 1, false, 1000), GQ_OK);
    cr_assert_eq (actor (RUN, 5, 1, 99, true, 1001), GQ_OK);
    expect_actor (1001, "alive", 1, 1);
    end ();
}

Test (registry, epochs_of_another_run_begin_anew)
{
    begin ();
    cr_assert_eq (actor (OTHER_RUN, 5, 3000, 99, true, 1000), GQ_OK);
    cr_assert_eq (actor (RUN, 5, 1, 4, false, 2000), GQ_OK);
    expect_actor (2000, "alive", 4, 0);
    end ();
}

Test (registry, metrics_are_shown_but_overwrite_nothing)
{
    begin ();
    cr_assert_eq (actor (RUN, 0, 1, 10, false, 1000), GQ_OK);
    json_t *list = gq_registry_actors_json (registry, seen, 1000 * MS_NS);
    const json_t *entry = json_array_get (list, 0);
    cr_assert_eq (json_real_value (json_object_get (entry, "return_mean")), 12.5);
    cr_assert_eq (json_real_value (json_object_get (entry, "loss")), 0.25);
    expect_text (entry, "state", "alive");
    cr_assert (json_is_null (json_object_get (entry, "lane")), "no gradient came");
    expect_number (entry, "id", 0);
    json_decref (list);
    end ();
}

Test (registry, of_a_report_only_a_bounded_part_is_kept)
{
    begin ();
    json_t *report = json_pack ("{s:s, s:i, s:i, s:s, s:[i], s:s}", "run", RUN, "actor", 3, "epoch",
                                1, "pushed", "many", "junk", 7, "state", "own");
    json_t *metrics = json_object ();
    for (int i = 0; i < 1000; i++) {
        char name[64];
        snprintf (name, sizeof name, "metric_%d", i);
        json_object_set_new (metrics, name, json_integer (i));
    }
    json_object_set_new (report, "metrics", metrics);
    cr_assert_eq (gq_registry_actor (registry, report, false, MS_NS), GQ_OK);
    json_decref (report);
    json_t *list = gq_registry_actors_json (registry, seen, MS_NS);
    const json_t *entry = json_array_get (list, 0);
    cr_assert (json_is_null (json_object_get (entry, "pushed")), "not a number");
    cr_assert_null (json_object_get (entry, "junk"));
    expect_text (entry, "state", "alive");
    cr_assert (json_object_size (entry) <= GQ_METRICS_MAX + 16, "%zu keys",
               json_object_size (entry));
    json_decref (list);
    end ();
}

Test (registry, ids_out_of_range_are_refused)
{
    begin ();
    cr_assert_eq (actor (RUN, -1, 1, 1, false, 1), GQ_INVALID);
    cr_assert_eq (actor (RUN, GQ_ACTORS_MAX, 1, 1, false, 1), GQ_INVALID);
    cr_assert_eq (actor (RUN, GQ_ACTORS_MAX - 1, 1, 1, false, 1), GQ_OK);
    end ();
}

Test (registry, an_actor_that_only_sent_gradients_is_listed)
{
    begin ();
    seen[9] = (gq_queue_actor){.received = 2, .last_ns = 500 * MS_NS, .lane = GQ_LANE_SHM};
    json_t *list = gq_registry_actors_json (registry, seen, 600 * MS_NS);
    cr_assert_eq (json_array_size (list), 1);
    expect_number (json_array_get (list, 0), "id", 9);
    expect_number (json_array_get (list, 0), "received", 2);
    expect_text (json_array_get (list, 0), "lane", "shm");
    cr_assert (json_is_null (json_object_get (json_array_get (list, 0), "pushed")));
    json_decref (list);
    end ();
}
