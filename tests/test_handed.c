/*
 * The count of what waits between broker and optimizer: right whatever is lost, and asked for no
 * more often than it takes.  Both ends, with the marks and reports that they exchange.
 */
#include "support.h"

#include <zmq.h>

#include "broker/handed.h"
#include "optimizer/taken.h"

TestSuite (handed, .timeout = 60);

enum { MS_NS = 1000000 };

/* A mark from the broker reaches the optimizer. */
static void
mark (gq_handed *handed, gq_taken *taken, uint64_t now_ns)
{
    uint8_t bytes[GQ_MARK_BYTES];
    gq_handed_mark (handed, bytes);
    gq_handed_marked (handed, now_ns);
    bool another;
    cr_assert (gq_taken_mark (taken, bytes, sizeof bytes, &another));
}

/* What the optimizer would say now. */
static void
encode (const gq_taken *taken, uint8_t report[GQ_TAKEN_BYTES])
{
    memcpy (report, taken->mark, GQ_MARK_BYTES);
    memcpy (report + GQ_MARK_BYTES, &taken->count, sizeof taken->count);
    memcpy (report + GQ_MARK_BYTES + sizeof taken->count, &taken->early, sizeof taken->early);
}

static bool
report (gq_handed *handed, const gq_taken *taken)
{
    uint8_t bytes[GQ_TAKEN_BYTES];
    encode (taken, bytes);
    return gq_handed_report (handed, bytes, sizeof bytes);
}

static void
take (gq_taken *taken, int count)
{
    for (int i = 0; i < count; i++)
        gq_taken_add (taken);
}

Test (handed, what_was_taken_before_it_came_out_does_not_wait)
{
    gq_handed handed = {.life = 7};
    gq_taken taken = {0};
    mark (&handed, &taken, MS_NS);
    handed.count = 10;
    take (&taken, 2);
    gq_taken_early (&taken, 5);
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_waiting (&handed), 8, "frames");
    cr_assert_eq (gq_handed_depth (&handed, 4), 12 - 5, "gradients");
    cr_assert_eq (gq_handed_depth (&handed, 0), 3);
    take (&taken, 8); /* all came out, five of them known already */
    gq_taken_early (&taken, 0);
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_depth (&handed, 0), 0);
    gq_taken_early (&taken, 9); /* of frames that have not even reached the broker */
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_depth (&handed, 0), 0);
    gq_handed_peer (&handed, true);
    gq_handed_peer (&handed, false);
    cr_assert_eq (gq_handed_depth (&handed, 3), 3, "lost with the connection");
}

Test (handed, what_was_handed_on_waits_until_it_is_said_to_be_taken)
{
    gq_handed handed = {.life = 7};
    gq_taken taken = {0};
    cr_assert_eq (gq_handed_waiting (&handed), 0);
    handed.count = 10;
    cr_assert_eq (gq_handed_waiting (&handed), 10);
    mark (&handed, &taken, MS_NS);
    handed.count = 15;
    take (&taken, 2);
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_waiting (&handed), 3);
    take (&taken, 3);
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_waiting (&handed), 0);
}

Test (handed, what_was_lost_on_the_way_waits_only_until_the_next_mark)
{
    gq_handed handed = {.life = 7};
    gq_taken taken = {0};
    mark (&handed, &taken, MS_NS);
    handed.count = 10;
    take (&taken, 4); /* six are lost */
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_waiting (&handed), 6);
    mark (&handed, &taken, 2 * MS_NS);
    cr_assert (report (&handed, &taken));
    cr_assert_eq (gq_handed_waiting (&handed), 0);
}

Test (handed, another_optimizer_counts_from_the_first_mark_that_reaches_it)
{
    gq_handed handed = {.life = 7};
    gq_taken first = {0}, second = {0};
    mark (&handed, &first, MS_NS);
    handed.count = 10;
    take (&second, 3); /* before any mark: it has nothing to say */
    cr_assert_eq (gq_taken_next_ns (&second), UINT64_MAX);
    cr_assert (!report (&handed, &second));
    mark (&handed, &second, 2 * MS_NS);
    handed.count = 12;
    take (&second, 1);
    cr_assert (report (&handed, &second));
    cr_assert_eq (gq_handed_waiting (&handed), 1);
}

Test (handed, nothing_that_is_no_report_on_a_mark_of_this_life_counts)
{
    gq_handed before = {.life = 6}, handed = {.life = 7};
    gq_taken taken = {0};
    uint8_t bytes[GQ_TAKEN_BYTES + 1] = {0};
    before.count = handed.count = 5;
    mark (&before, &taken, MS_NS);
    cr_assert (!report (&handed, &taken), "of a broker before this one");
    mark (&handed, &taken, MS_NS);
    take (&taken, 1);
    cr_assert (!report (&handed, &taken), "more than was handed on");
    taken.count = UINT64_MAX;
    cr_assert (!report (&handed, &taken), "no sum wraps round");
    taken.count = 0;
    encode (&taken, bytes);
    for (size_t size = 0; size <= sizeof bytes; size++)
        if (size != GQ_TAKEN_BYTES)
            cr_assert (!gq_handed_report (&handed, bytes, size), "%zu bytes", size);
    cr_assert_eq (gq_handed_waiting (&handed), 5);
    cr_assert (gq_handed_report (&handed, bytes, GQ_TAKEN_BYTES));
    cr_assert_eq (gq_handed_waiting (&handed), 0);
}

Test (handed, what_was_handed_to_the_last_peer_is_lost_when_that_goes)
{
    gq_handed handed = {.life = 7, .count = 5};
    gq_handed_peer (&handed, true);
    gq_handed_peer (&handed, true);
    gq_handed_peer (&handed, false);
    cr_assert_eq (gq_handed_waiting (&handed), 5, "somebody else is there");
    gq_handed_peer (&handed, false);
    cr_assert_eq (gq_handed_waiting (&handed), 0);
    gq_handed_peer (&handed, false);
    gq_handed_peer (&handed, true);
    handed.count = 6;
    cr_assert_eq (gq_handed_waiting (&handed), 1);
}

Test (handed, marks_are_sent_while_something_waits_and_rarely_to_who_does_not_answer)
{
    gq_handed handed = {.life = 7};
    gq_taken taken = {0};
    const uint64_t now_ns = (uint64_t)5000 * MS_NS;
    cr_assert_eq (gq_handed_mark_ns (&handed, true), UINT64_MAX, "nothing waits");
    handed.count = 1;
    cr_assert_eq (gq_handed_mark_ns (&handed, false), 0, "the first one is due at once");
    mark (&handed, &taken, now_ns);
    const uint64_t unanswered_ns = gq_handed_mark_ns (&handed, true);
    cr_assert_gt (unanswered_ns, now_ns, "one on its way is enough, however little room there is");
    cr_assert (report (&handed, &taken));
    handed.count = 3;
    cr_assert_eq (gq_handed_mark_ns (&handed, true), 0, "little room: ask again at once");
    const uint64_t answered_ns = gq_handed_mark_ns (&handed, false);
    cr_assert (answered_ns > now_ns && answered_ns < unanswered_ns);
    gq_handed_ask (&handed);
    cr_assert_eq (gq_handed_mark_ns (&handed, false), 0, "somebody wants to know");
    mark (&handed, &taken, now_ns);
    gq_handed_ask (&handed);
    cr_assert_eq (gq_handed_mark_ns (&handed, false), unanswered_ns, "that one will do");
    gq_handed_peer (&handed, true);
    cr_assert_eq (gq_handed_mark_ns (&handed, false), 0, "a new peer has seen no mark");
}

/* A report that came, or not. */
static void
expect_report (void *socket, const char *expected)
{
    char text[256];
    int size = zmq_recv (socket, text, sizeof text - 1, ZMQ_DONTWAIT);
    text[size < 0 ? 0 : size] = '\0';
    cr_assert_str_eq (text, expected);
}

Test (handed, reports_are_due_at_once_after_a_mark_and_then_now_and_then)
{
    void *context = zmq_ctx_new ();
    void *out = zmq_socket (context, ZMQ_PAIR), *in = zmq_socket (context, ZMQ_PAIR);
    gq_handed handed = {.life = 0xab, .count = 2};
    gq_taken taken = {0};
    const uint64_t now_ns = (uint64_t)5000 * MS_NS;
    cr_assert_eq (zmq_bind (in, "inproc://taken"), 0);
    cr_assert_eq (zmq_connect (out, "inproc://taken"), 0);
    gq_taken_report (&taken, out, now_ns);
    expect_report (in, "");
    mark (&handed, &taken, now_ns);
    cr_assert_leq (gq_taken_next_ns (&taken), now_ns);
    gq_taken_report (&taken, out, now_ns);
    expect_report (in, "{\"op\":\"taken\",\"mark\":\"ab000000000000000200000000000000\","
                       "\"count\":0,\"early\":0}");
    cr_assert_eq (gq_taken_next_ns (&taken), UINT64_MAX, "said");
    take (&taken, 3);
    cr_assert_gt (gq_taken_next_ns (&taken), now_ns);
    cr_assert_leq (gq_taken_next_ns (&taken), now_ns + 20 * MS_NS);
    gq_taken_report (&taken, out, now_ns + 1);
    expect_report (in, "");
    gq_taken_report (&taken, out, gq_taken_next_ns (&taken));
    expect_report (in, "{\"op\":\"taken\",\"mark\":\"ab000000000000000200000000000000\","
                       "\"count\":3,\"early\":0}");
    zmq_close (out);
    zmq_close (in);
    zmq_ctx_term (context);
}

Test (handed, no_frame_is_taken_for_a_mark)
{
    gq_taken taken = {0};
    bool another;
    uint8_t bytes[GQ_FRAME_HEADER_BYTES] = {0};
    for (size_t size = 0; size <= sizeof bytes; size++)
        cr_assert_eq (gq_taken_mark (&taken, bytes, size, &another), size == GQ_MARK_BYTES);
}
