/*
 * One question to a control socket: answered, not answered, or answered by something else.
 */
#include "support.h"

#include <pthread.h>
#include <zmq.h>

#include "control.h"

TestSuite (control, .timeout = 60);

enum { WAIT_MS = 10000, BRIEF_MS = 100 };

static char directory[64], address[128];
static void *context, *router;

/* Answers one request with `text`, in two parts when it has a newline. */
static void *
answer_once (void *text)
{
    zmq_pollitem_t item = {.socket = router, .events = ZMQ_POLLIN};
    char identity[256], request[1024];
    if (zmq_poll (&item, 1, WAIT_MS) != 1)
        return NULL;
    const int size = zmq_recv (router, identity, sizeof identity, 0);
    const int length = zmq_recv (router, request, sizeof request, 0);
    cr_assert (size > 0 && length > 0);
    const char *second = strchr (text, '\n');
    const size_t first_bytes = second == NULL ? strlen (text) : (size_t)(second - (char *)text);
    zmq_send (router, identity, (size_t)size, ZMQ_SNDMORE);
    zmq_send (router, text, first_bytes, second == NULL ? 0 : ZMQ_SNDMORE);
    if (second != NULL)
        zmq_send (router, second, strlen (second), 0);
    return NULL;
}

static gq_status
ask (const char *text, json_t **answer_p, gq_error *error)
{
    pthread_t thread;
    json_t *request = json_pack ("{s:s}", "op", "stats");
    if (text != NULL)
        cr_assert_eq (pthread_create (&thread, NULL, answer_once, (void *)(uintptr_t)text), 0);
    const gq_status status =
        gq_control_ask (answer_p, address, request, text == NULL ? BRIEF_MS : WAIT_MS, error);
    if (text != NULL)
        pthread_join (thread, NULL);
    json_decref (request);
    return status;
}

static void
begin (void)
{
    const int linger_ms = 0;
    support_directory (directory);
    snprintf (address, sizeof address, "ipc://%s/c", directory);
    context = zmq_ctx_new ();
    router = zmq_socket (context, ZMQ_ROUTER);
    zmq_setsockopt (router, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
    cr_assert_eq (zmq_bind (router, address), 0);
}

static void
end (void)
{
    zmq_close (router);
    zmq_ctx_term (context);
    support_remove (directory);
}

Test (control, the_answer_is_the_callers)
{
    json_t *answer = NULL;
    gq_error error = {""};
    begin ();
    cr_assert_eq (ask ("{\"ok\": false, \"n\": 7}", &answer, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (json_integer_value (json_object_get (answer, "n")), 7);
    json_decref (answer);
    end ();
}

Test (control, an_answer_that_is_no_json_object_is_malformed)
{
    static const char *const texts[] = {"", "no JSON", "[]", "7", "{", "{}{}", "{}\n{}", "\xff"};
    begin ();
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        json_t *answer = NULL;
        gq_error error = {""};
        cr_assert_eq (ask (texts[i], &answer, &error), GQ_MALFORMED, "%s", texts[i]);
        cr_assert_null (answer);
        cr_assert_not_null (strstr (error.text, address), "%s", error.text);
    }
    end ();
}

Test (control, silence_and_absence_are_unreachable)
{
    json_t *answer = NULL;
    gq_error error = {""};
    begin ();
    cr_assert_eq (ask (NULL, &answer, &error), GQ_UNREACHABLE, "silence");
    cr_assert_not_null (strstr (error.text, address), "%s", error.text);
    end ();
    cr_assert_eq (ask (NULL, &answer, NULL), GQ_UNREACHABLE, "nobody there");
    cr_assert_null (answer);
}

Test (control, what_is_no_address_is_invalid)
{
    json_t *answer = NULL;
    gq_error error = {""};
    snprintf (address, sizeof address, "nowhere");
    cr_assert_eq (ask (NULL, &answer, &error), GQ_INVALID);
    cr_assert_str_not_empty (error.text);
}
