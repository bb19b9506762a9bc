/*
 * Rotating weights on one thread; tests/main_buffers.c has the threads.  What is lent is never
 * written, there always is a next buffer, and what comes back is used again.
 */
#include "support.h"

#include "optimizer/buffers.h"

TestSuite (buffers, .timeout = 60);

enum { COUNT = 100, LENT_MAX = 16 };

static gq_frame
frame_of (uint64_t version)
{
    gq_frame frame = support_frame (GQ_KIND_WEIGHTS, 1, COUNT);
    frame.version = version;
    return frame;
}

/* Version `version`: all elements are it. */
static void
step (gq_buffers *buffers, uint64_t version)
{
    float *next = gq_buffers_next (buffers);
    cr_assert_neq (next, gq_buffers_current (buffers));
    for (size_t i = 0; i < COUNT; i++)
        next[i] = (float)version;
    gq_buffers_turn (buffers);
    cr_assert_eq (gq_buffers_current (buffers), next);
}

static void
expect_version (zmq_msg_t *message, uint64_t version)
{
    gq_frame frame;
    const uint8_t *bytes = zmq_msg_data (message);
    const size_t size = zmq_msg_size (message);
    cr_assert_eq (gq_frame_decode (bytes, size, &frame), GQ_OK);
    cr_assert_eq (frame.version, version);
    cr_assert_eq (gq_frame_check_payload (bytes, size), GQ_OK, "version %llu was written to",
                  (unsigned long long)version);
    float first;
    memcpy (&first, bytes + GQ_FRAME_HEADER_BYTES, sizeof first);
    cr_assert_eq (first, (float)version);
}

Test (buffers, begin_as_zeros_aligned_for_any_vector_unit)
{
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    const float *current = gq_buffers_current (buffers);
    cr_assert_eq ((uintptr_t)current % 64, 0);
    for (size_t i = 0; i < COUNT; i++)
        cr_assert_eq (current[i], 0);
    for (uint64_t version = 1; version < 20; version++) {
        step (buffers, version);
        cr_assert_eq ((uintptr_t)gq_buffers_current (buffers) % 64, 0);
    }
    gq_buffers_free (&buffers);
    cr_assert_null (buffers);
    gq_buffers_free (&buffers);
}

Test (buffers, the_next_one_is_the_same_until_the_turn)
{
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    float *next = gq_buffers_next (buffers);
    const gq_frame frame = frame_of (0);
    zmq_msg_t message;
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &message), GQ_OK);
    cr_assert_eq (gq_buffers_next (buffers), next);
    zmq_msg_close (&message);
    cr_assert_eq (gq_buffers_next (buffers), next);
    gq_buffers_turn (buffers);
    gq_buffers_free (&buffers);
}

Test (buffers, lending_copies_nothing)
{
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    const gq_frame frame = frame_of (1);
    zmq_msg_t message;
    step (buffers, 1);
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &message), GQ_OK);
    cr_assert_eq ((const uint8_t *)zmq_msg_data (&message) + GQ_FRAME_HEADER_BYTES,
                  (const uint8_t *)gq_buffers_current (buffers));
    expect_version (&message, 1);
    zmq_msg_close (&message);
    gq_buffers_free (&buffers);
}

Test (buffers, one_version_is_lent_once_at_a_time)
{
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    const gq_frame frame = frame_of (0);
    zmq_msg_t message, second;
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &message), GQ_OK);
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &second), GQ_AGAIN,
                  "its header would be written while it is read");
    zmq_msg_close (&message);
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &second), GQ_OK);
    zmq_msg_close (&second);
    gq_buffers_free (&buffers);
}

Test (buffers, when_readers_hold_everything_steps_go_on_and_lending_resumes_with_the_first_return)
{
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    zmq_msg_t lent[LENT_MAX];
    uint64_t versions[LENT_MAX], version = 0;
    size_t count = 0;
    for (bool more = true; more;) {
        step (buffers, ++version);
        const gq_frame frame = frame_of (version);
        more = count < LENT_MAX && gq_buffers_lend (buffers, &frame, &lent[count]) == GQ_OK;
        if (more)
            versions[count++] = version;
    }
    cr_assert_eq (count, 2, "%zu lent: one being written, one behind it", count);
    for (int i = 0; i < 100; i++) {
        step (buffers, ++version);
        const gq_frame frame = frame_of (version);
        cr_assert_eq (gq_buffers_lend (buffers, &frame, &lent[count]), GQ_AGAIN);
    }
    for (size_t i = 0; i < count; i++)
        expect_version (&lent[i], versions[i]);
    zmq_msg_close (&lent[0]);
    const gq_frame frame = frame_of (version);
    cr_assert_eq (gq_buffers_lend (buffers, &frame, &lent[0]), GQ_OK);
    step (buffers, ++version);
    for (size_t i = 0; i < count; i++)
        zmq_msg_close (&lent[i]);
    gq_buffers_free (&buffers);
}

Test (buffers, no_order_of_lending_and_returning_ever_changes_a_lent_version)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
        zmq_msg_t lent[LENT_MAX];
        uint64_t versions[LENT_MAX], state = seed, version = 0;
        size_t count = 0;
        printf ("seed %llu\n", (unsigned long long)seed);
        for (int i = 0; i < 2000; i++) {
            const uint64_t what = support_random (&state) % 3;
            const gq_frame frame = frame_of (version);
            if (what == 0) {
                step (buffers, ++version);
            } else if (what == 1 && gq_buffers_lend (buffers, &frame, &lent[count]) == GQ_OK) {
                versions[count++] = version;
            } else if (what == 2 && count > 0) {
                const size_t back = (size_t)(support_random (&state) % count);
                expect_version (&lent[back], versions[back]);
                zmq_msg_close (&lent[back]);
                lent[back] = lent[--count];
                versions[back] = versions[count];
            }
            for (size_t k = 0; k < count; k++)
                expect_version (&lent[k], versions[k]);
        }
        while (count > 0)
            zmq_msg_close (&lent[--count]);
        gq_buffers_free (&buffers);
    }
}
