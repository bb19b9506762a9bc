/*
 * Opening a client: what a broker may grant, refuse, postpone or garble, and that every failure
 * comes with its status and sentence.
 */
#include "client_testing.h"

TestSuite (client_open, .timeout = 60);

/* For openings that must time out: the fake broker has to be heard within it on a busy machine. */
#define OPEN_MS 1500

Test (client_open, takes_what_hello_grants_and_the_first_weights)
{
    size_t tensors;
    uint64_t elements;
    begin (quick ());
    cr_assert_eq (gq_client_actor (client), FAKE_ACTOR);
    cr_assert_eq (gq_client_max_staleness (client), 4);
    cr_assert_str_eq (gq_client_layout (client, &tensors, &elements)[1].name, "b");
    cr_assert_eq (tensors, 2);
    cr_assert_eq (elements, FAKE_COUNT);
    const gq_weights first = weights ();
    cr_assert (first.version == FAKE_VERSION && first.term == FAKE_TERM);
    for (size_t i = 0; i < FAKE_COUNT; i++)
        cr_assert_eq (first.data[i], 1);
    end ();
}

Test (client_open, without_a_layout_of_its_own_it_takes_the_runs)
{
    gq_client_config config = quick ();
    config.tensors = NULL;
    begin (config);
    cr_assert_eq (client->layout.digest, fake.layout.digest);
    end ();
}

Test (client_open, asks_again_while_told_not_yet)
{
    fake.retries = 3;
    begin (quick ());
    cr_assert_eq (fake.hellos, 4);
    end ();
}

Test (client_open, offers_its_first_weights_to_a_run_that_has_none)
{
    const float initial[FAKE_COUNT] = {1, 2, 3, 4, 5, 6};
    gq_client_config config = quick ();
    config.initial = initial;
    fake.wants_initial = true;
    begin (config);
    const gq_weights first = weights ();
    cr_assert_eq (first.version, 0);
    cr_assert_arr_eq (first.data, initial, sizeof initial);
    end ();
}

Test (client_open, first_weights_are_never_rounded)
{
    const float initial[FAKE_COUNT] = {1.1f, 1e-40f, 3.3e38f, 4.4f, -5.5f, 6.6f};
    gq_client_config config = quick ();
    config.initial = initial;
    config.encoding = "bf16";
    fake.wants_initial = true;
    begin (config);
    const gq_weights first = weights ();
    cr_assert_arr_eq (first.data, initial, sizeof initial);
    end ();
}

static void
expect_open_fails (gq_client_config config, gq_status expected, const char *word)
{
    gq_error error;
    memset (&error, 'x', sizeof error); /* a caller need not clear it */
    error.text[sizeof error.text - 1] = '\0';
    fake_begin (&fake);
    cr_assert_eq (fake_open (&fake, &client, config, &error), expected, "%s", error.text);
    cr_assert_null (client);
    cr_assert_not_null (strstr (error.text, word), "%s", error.text);
    fake_end (&fake);
}

Test (client_open, a_refusal_is_passed_on_with_its_sentence)
{
    static const struct {
        const char *answer;
        gq_status status;
        const char *word;
    } refusals[] = {
        {"{\"op\": \"hello\", \"ok\": false, \"error\": \"layout\", \"message\": \"other model\"}",
         GQ_LAYOUT, "other model"},
        {"{\"op\": \"hello\", \"ok\": false, \"error\": \"invalid\", \"message\": \"bad id\"}",
         GQ_INVALID, "bad id"},
        {"{\"op\": \"hello\", \"ok\": false, \"error\": \"full\"}", GQ_REFUSED, "refused"},
        {"{\"op\": \"hello\", \"ok\": false}", GQ_REFUSED, "refused"},
        {"{\"op\": \"hello\", \"ok\": true}", GQ_MALFORMED, "lacks run"},
        {"{\"op\": \"hello\", \"ok\": true, \"run\": \"00112233445566778899aabbccddeeff\", "
         "\"actor\": 1, \"epoch\": 1}",
         GQ_INVALID, "layout"},
        {"{\"op\": \"hello\", \"ok\": true, \"run\": \"00112233445566778899aabbccddeeff\", "
         "\"actor\": 4096, \"epoch\": 1}",
         GQ_MALFORMED, "lacks run"}};
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        memset (&fake, 0, sizeof fake);
        fake.answer = refusals[i].answer;
        expect_open_fails (quick (), refusals[i].status, refusals[i].word);
    }
}

Test (client_open, epochs_that_no_header_could_carry_are_refused)
{
    static const char *const epochs[] = {"0", "-1", "4294967296", "\"1\"", "null", "1.5"};
    for (size_t i = 0; i < sizeof epochs / sizeof epochs[0]; i++) {
        memset (&fake, 0, sizeof fake);
        fake.epoch_text = epochs[i];
        expect_open_fails (quick (), GQ_MALFORMED, "epoch");
    }
}

Test (client_open, a_grant_of_another_layout_than_proposed_is_refused)
{
    fake.other_layout = true;
    expect_open_fails (quick (), GQ_LAYOUT, "layout");
}

Test (client_open, answers_that_are_no_hello_end_in_a_timeout_that_says_so)
{
    static const char *const answers[] = {"", "no JSON", "[]", "{\"op\": \"stats\"}",
                                          "{\"op\": \"hello\", \"nonce\": \"another's\"}"};
    gq_client_config config = quick ();
    config.timeout_ms = OPEN_MS;
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        memset (&fake, 0, sizeof fake);
        fake.answer = answers[i];
        expect_open_fails (config, GQ_TIMEOUT, "not to a hello");
    }
}

Test (client_open, a_broker_that_only_says_not_yet_ends_in_its_own_sentence)
{
    gq_client_config config = quick ();
    config.timeout_ms = OPEN_MS;
    fake.retries = UINT32_MAX;
    expect_open_fails (config, GQ_TIMEOUT, "not yet, says the test");
}

Test (client_open, a_run_that_publishes_nothing_ends_in_a_timeout)
{
    gq_client_config config = quick ();
    config.timeout_ms = OPEN_MS;
    fake.no_weights = true;
    expect_open_fails (config, GQ_TIMEOUT, "no weights");
}

Test (client_open, an_address_where_nobody_listens_is_unreachable)
{
    gq_client_config config = quick ();
    gq_error error = {""};
    config.address = "ipc:///tmp/gradq-test-nobody-listens-here";
    config.timeout_ms = 150;
    cr_assert_eq (gq_client_open (&client, &config, &error), GQ_UNREACHABLE);
    cr_assert_not_null (strstr (error.text, config.address), "%s", error.text);
    cr_assert_null (client);
}

Test (client_open, opening_can_be_interrupted)
{
    gq_client_config config = quick ();
    gq_error error = {""};
    config.address = "ipc:///tmp/gradq-test-nobody-listens-here";
    config.timeout_ms = -1;
    config.interrupted = always;
    cr_assert_eq (gq_client_open (&client, &config, &error), GQ_CLOSED);
}

Test (client_open, a_configuration_out_of_bounds_is_refused)
{
    gq_client_config bad[9];
    for (size_t i = 0; i < 9; i++) {
        bad[i] = quick ();
        bad[i].address = "ipc:///tmp/gradq-test-nobody-listens-here";
    }
    gq_tensor_shape empty = {.name = ""};
    bad[0].address = NULL;
    bad[1].window = 0;
    bad[2].window = GQ_WINDOW_MAX + 1;
    bad[3].actor = GQ_ACTORS_MAX;
    bad[4].resend_ms = 0;
    bad[5].lane = "carrier pigeon";
    bad[6].address = "udp://nowhere:1";
    bad[7].tensors = &empty, bad[7].tensor_count = 1;
    bad[8].encoding = "f16";
    for (size_t i = 0; i < 9; i++) {
        gq_error error = {""};
        cr_assert_eq (gq_client_open (&client, &bad[i], &error), GQ_INVALID, "case %zu", i);
        cr_assert_str_not_empty (error.text);
        cr_assert_eq (gq_client_open (&client, &bad[i], NULL), GQ_INVALID);
    }
}
