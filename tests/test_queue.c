/*
 * The broker's queue: bounded in frames and in bytes, first in first out, and nothing ever dropped
 * or copied.
 */
#include "support.h"

#include "broker/queue.h"

TestSuite (queue, .timeout = 60);

enum { COUNT = 10, FRAME_BYTES = GQ_FRAME_HEADER_BYTES + COUNT * 4 };

/* A gradient of `count` elements; its version says which one it is. */
static zmq_msg_t
gradient_of (uint32_t actor, uint64_t version, uint64_t count)
{
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, 1, count);
    zmq_msg_t message;
    frame.actor = actor;
    frame.version = version;
    cr_assert_eq (zmq_msg_init_size (&message, GQ_FRAME_HEADER_BYTES + count * 4), 0);
    uint8_t *bytes = zmq_msg_data (&message);
    memset (bytes, 0, zmq_msg_size (&message));
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    return message;
}

static uint64_t
version_of (zmq_msg_t *message)
{
    gq_frame frame;
    cr_assert_eq (gq_frame_decode (zmq_msg_data (message), zmq_msg_size (message), &frame), GQ_OK);
    return frame.version;
}

static gq_status
push (gq_queue *queue, uint64_t version)
{
    zmq_msg_t message = gradient_of (0, version, COUNT);
    const gq_status status = gq_queue_push (queue, &message, version);
    zmq_msg_close (&message);
    return status;
}

/* As the broker does: the message is sent away, then forgotten. */
static uint64_t
pop (gq_queue *queue)
{
    zmq_msg_t *front = gq_queue_front (queue);
    cr_assert_not_null (front);
    const uint64_t version = version_of (front);
    zmq_msg_close (front);
    zmq_msg_init (front);
    gq_queue_pop (queue);
    return version;
}

Test (queue, takes_exactly_its_capacity_in_frames)
{
    for (uint64_t capacity = 1; capacity <= 9; capacity++) {
        gq_queue *queue = gq_queue_new (capacity, UINT64_MAX);
        for (uint64_t i = 0; i < capacity; i++)
            cr_assert_eq (push (queue, i), GQ_OK);
        cr_assert_eq (push (queue, 99), GQ_FULL);
        cr_assert_eq (gq_queue_count (queue).depth, capacity);
        pop (queue);
        cr_assert_eq (push (queue, 99), GQ_OK);
        cr_assert_eq (push (queue, 99), GQ_FULL);
        gq_queue_free (&queue);
        cr_assert_null (queue);
    }
}

Test (queue, takes_exactly_its_capacity_in_bytes)
{
    gq_queue *queue = gq_queue_new (100, 3 * FRAME_BYTES);
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq (push (queue, i), GQ_OK);
    cr_assert_eq (gq_queue_count (queue).bytes, 3 * FRAME_BYTES);
    cr_assert_eq (push (queue, 3), GQ_FULL);
    pop (queue);
    cr_assert_eq (gq_queue_count (queue).bytes, 2 * FRAME_BYTES);
    zmq_msg_t larger = gradient_of (0, 4, COUNT + 1);
    cr_assert_eq (gq_queue_push (queue, &larger, 1), GQ_FULL, "4 bytes more than are left");
    zmq_msg_close (&larger);
    cr_assert_eq (push (queue, 5), GQ_OK);
    gq_queue_free (&queue);
}

Test (queue, what_it_has_no_room_for_stays_whole_with_the_caller)
{
    gq_queue *queue = gq_queue_new (1, UINT64_MAX);
    zmq_msg_t message = gradient_of (3, 77, COUNT);
    cr_assert_eq (push (queue, 1), GQ_OK);
    const void *bytes = zmq_msg_data (&message);
    cr_assert_eq (gq_queue_push (queue, &message, 1), GQ_FULL);
    cr_assert_eq (zmq_msg_size (&message), FRAME_BYTES);
    cr_assert_eq (zmq_msg_data (&message), bytes);
    cr_assert_eq (version_of (&message), 77);
    cr_assert_eq (gq_queue_count (queue).received, 1);
    cr_assert_eq (gq_queue_count (queue).refused, 0, "it may come again: not refused");
    cr_assert_eq (gq_queue_actors (queue)[3].received, 0);
    pop (queue);
    cr_assert_eq (gq_queue_push (queue, &message, 1), GQ_OK);
    cr_assert_eq (zmq_msg_size (&message), 0, "the queue's now");
    zmq_msg_close (&message);
    gq_queue_free (&queue);
}

Test (queue, a_gradient_is_moved_not_copied)
{
    gq_queue *queue = gq_queue_new (2, UINT64_MAX);
    zmq_msg_t message = gradient_of (0, 1, COUNT);
    const void *bytes = zmq_msg_data (&message);
    cr_assert_eq (gq_queue_push (queue, &message, 1), GQ_OK);
    cr_assert_eq (zmq_msg_data (gq_queue_front (queue)), bytes);
    zmq_msg_close (&message);
    gq_queue_free (&queue);
}

Test (queue, hands_on_all_it_took_in_the_order_it_came_under_any_pattern)
{
    for (uint64_t seed = 1; seed <= 10; seed++) {
        uint64_t state = seed, in = 0, out = 0;
        const uint64_t capacity = 1 + support_random (&state) % 7;
        gq_queue *queue = gq_queue_new (capacity, UINT64_MAX);
        printf ("seed %llu, capacity %llu\n", (unsigned long long)seed,
                (unsigned long long)capacity);
        for (int i = 0; i < 3000; i++) {
            if (support_random (&state) % 2) {
                const gq_status status = push (queue, in);
                cr_assert_eq (status, in - out < capacity ? GQ_OK : GQ_FULL);
                in += status == GQ_OK ? 1 : 0;
            } else if (gq_queue_front (queue) != NULL) {
                cr_assert_eq (pop (queue), out++);
            }
            const gq_queue_counts counts = gq_queue_count (queue);
            cr_assert_eq (counts.depth, in - out);
            cr_assert_eq (counts.bytes, (in - out) * FRAME_BYTES);
            cr_assert_eq (counts.received, in);
            cr_assert_eq (counts.delivered, out);
        }
        while (out < in)
            cr_assert_eq (pop (queue), out++);
        cr_assert_null (gq_queue_front (queue));
        gq_queue_free (&queue);
    }
}

/* Not admitted, counted as refused, still whole. */
static void
expect_refused (gq_queue *queue, const uint8_t *bytes, size_t size, gq_status expected)
{
    const uint64_t refused = gq_queue_count (queue).refused;
    zmq_msg_t message;
    zmq_msg_init_size (&message, size);
    memcpy (zmq_msg_data (&message), bytes, size);
    cr_assert_eq (gq_queue_push (queue, &message, 1), expected);
    cr_assert_eq (zmq_msg_size (&message), size);
    cr_assert_eq (gq_queue_count (queue).refused, refused + 1);
    cr_assert_eq (gq_queue_count (queue).depth, 0);
    zmq_msg_close (&message);
}

Test (queue, only_gradients_and_first_weights_are_admitted)
{
    const uint8_t payload[COUNT * 4] = {0};
    gq_queue *queue = gq_queue_new (4, UINT64_MAX);
    for (int kind = GQ_KIND_GRADIENT; kind <= GQ_KIND_ACK; kind++) {
        const gq_frame frame = support_frame ((gq_frame_kind)kind, 1, COUNT);
        size_t size;
        uint8_t *bytes = support_message (&frame, payload, &size);
        if (kind == GQ_KIND_WEIGHTS || kind == GQ_KIND_ACK)
            expect_refused (queue, bytes, size, GQ_MALFORMED);
        bytes[8] ^= 1;
        expect_refused (queue, bytes, size, GQ_CHECKSUM);
        expect_refused (queue, bytes, size - 1, GQ_CHECKSUM);
        expect_refused (queue, bytes, 0, GQ_MALFORMED);
        free (bytes);
    }
    zmq_msg_t init = gradient_of (0, 1, COUNT);
    gq_frame frame = support_frame (GQ_KIND_INIT, 1, COUNT);
    uint8_t *bytes = zmq_msg_data (&init);
    gq_frame_encode (&frame, bytes + GQ_FRAME_HEADER_BYTES, bytes);
    cr_assert_eq (gq_queue_push (queue, &init, 1), GQ_OK);
    zmq_msg_close (&init);
    gq_queue_free (&queue);
}

Test (queue, a_bad_frame_is_refused_even_when_the_queue_is_full)
{
    /* GQ_FULL would make the broker hold it and read no further. */
    gq_queue *queue = gq_queue_new (1, UINT64_MAX);
    zmq_msg_t message;
    cr_assert_eq (push (queue, 1), GQ_OK);
    zmq_msg_init (&message);
    cr_assert_eq (gq_queue_push (queue, &message, 1), GQ_MALFORMED);
    zmq_msg_close (&message);
    gq_queue_free (&queue);
}

Test (queue, every_actor_is_counted_by_itself_and_dated_and_its_lane_is_known)
{
    static const uint32_t actors[] = {0, 5, GQ_ACTORS_MAX - 1};
    gq_queue *queue = gq_queue_new (16, UINT64_MAX);
    for (uint64_t round = 1; round <= 3; round++)
        for (size_t i = 0; i < 3; i++) {
            zmq_msg_t message = gradient_of (actors[i], round, COUNT);
            cr_assert_eq (gq_queue_push (queue, &message, 100 * round + i), GQ_OK);
            zmq_msg_close (&message);
        }
    for (size_t i = 0; i < 3; i++) {
        cr_assert_eq (gq_queue_actors (queue)[actors[i]].received, 3);
        cr_assert_eq (gq_queue_actors (queue)[actors[i]].last_ns, 300 + i);
    }
    cr_assert_eq (gq_queue_actors (queue)[1].last_ns, 0, "never seen");
    cr_assert_eq (gq_queue_actors (queue)[5].lane, GQ_LANE_INLINE);
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, 1, COUNT);
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    zmq_msg_t message;
    frame.actor = 5;
    frame.lane = GQ_LANE_SHM;
    gq_frame_encode (&frame, NULL, header);
    zmq_msg_init_size (&message, sizeof header);
    memcpy (zmq_msg_data (&message), header, sizeof header);
    cr_assert_eq (gq_queue_push (queue, &message, 1), GQ_OK);
    cr_assert_eq (gq_queue_actors (queue)[5].lane, GQ_LANE_SHM);
    gq_queue_refuse (queue);
    cr_assert_eq (gq_queue_count (queue).refused, 1);
    gq_queue_free (&queue);
    gq_queue_free (&queue);
}
