/*
 * One writer makes versions and lends them, readers on other threads hold them: no reader may ever
 * see a buffer that is being written.  A plain main, for ThreadSanitizer cannot run Criterion.
 *
 * Two rounds.  By hand: nothing orders the writer after a reader but the way back through
 * gq_buffers, so that ThreadSanitizer sees when that is not enough.  By ZeroMQ: PUB and SUB as in
 * the optimizer, whose inner order ThreadSanitizer cannot see; there the values tell.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "frame.h"
#include "optimizer/buffers.h"
#include "stats.h"

enum {
    COUNT = 20000, /* elements: long enough to be interrupted while writing */
    READERS = 3,
    SEEN_MIN = 400,  /* versions that each reader must see */
    AT_VERSION = 56, /* of a header; docs/PROTOCOL.md */
    LIMIT_S = 60
};
static const char endpoint[] = "inproc://weights";

typedef struct reader {
    pthread_t thread;
    void *context;      /* of ZeroMQ; NULL: by hand */
    uint64_t last;      /* version */
    atomic_size_t seen; /* versions */
    /* By hand: the writer fills one after the other and never uses one twice, so that it need not
     * learn from the reader that one is free. */
    zmq_msg_t letters[SEEN_MIN];
    atomic_size_t letter_count;
} reader;

static reader readers[READERS];
static atomic_bool stop, failed;
/* ZeroMQ counts the references to a message by itself; this shows ThreadSanitizer the order among
 * readers.  Never taken by the writer. */
static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER;

static void
fail (const char *what, uint64_t version)
{
    printf ("FAILED: %s at version %llu\n", what, (unsigned long long)version);
    atomic_store (&failed, true);
    atomic_store (&stop, true);
}

/* ---- reading ---- */

/* Version, and whether all elements are it.  Three passes, to hold the message for a while. */
#define CHECK_BODY                                                                      \
    const float *values = (const float *)(const void *)(bytes + GQ_FRAME_HEADER_BYTES); \
    bool whole = true;                                                                  \
    uint64_t version = 0;                                                               \
    for (int i = 7; i >= 0; i--)                                                        \
        version = version << 8 | bytes[AT_VERSION + i];                                 \
    for (int pass = 0; pass < 3; pass++)                                                \
        for (size_t i = 0; i < COUNT; i++)                                              \
            whole = whole && values[i] == (float)version;                               \
    *version_p = version;                                                               \
    return whole;

static bool
check (const uint8_t *bytes, uint64_t *version_p)
{
    CHECK_BODY
}

/* For messages that came through ZeroMQ: the write and this read are ordered by its queues. */
static __attribute__ ((no_sanitize ("thread"))) bool
check_unseen (const uint8_t *bytes, uint64_t *version_p)
{
    CHECK_BODY
}

static void
read_message (reader *self, zmq_msg_t *message)
{
    uint64_t version = 0;
    const uint8_t *bytes = zmq_msg_data (message);
    const bool whole =
        self->context == NULL ? check (bytes, &version) : check_unseen (bytes, &version);
    if (!whole)
        fail ("a torn version", version);
    else if (version <= self->last)
        fail ("a version that does not rise", version);
    self->last = version;
    atomic_fetch_add_explicit (&self->seen, 1, memory_order_relaxed);
    pthread_mutex_lock (&closing);
    zmq_msg_close (message);
    pthread_mutex_unlock (&closing);
}

static void *
read_by_hand (void *argument)
{
    reader *self = argument;
    size_t next = 0;
    while (next < SEEN_MIN && !atomic_load (&stop)) {
        if (next < atomic_load_explicit (&self->letter_count, memory_order_acquire))
            read_message (self, &self->letters[next++]);
        else
            sched_yield ();
    }
    /* Only after a failure is there anything left. */
    pthread_mutex_lock (&closing);
    for (; next < atomic_load_explicit (&self->letter_count, memory_order_acquire); next++)
        zmq_msg_close (&self->letters[next]);
    pthread_mutex_unlock (&closing);
    return NULL;
}

static void *
read_by_zmq (void *argument)
{
    reader *self = argument;
    const int timeout_ms = 100, high_water = 1, linger_ms = 0;
    void *socket = zmq_socket (self->context, ZMQ_SUB);
    zmq_setsockopt (socket, ZMQ_RCVTIMEO, &timeout_ms, sizeof timeout_ms);
    zmq_setsockopt (socket, ZMQ_RCVHWM, &high_water, sizeof high_water);
    zmq_setsockopt (socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
    zmq_setsockopt (socket, ZMQ_SUBSCRIBE, "", 0);
    if (zmq_connect (socket, endpoint) != 0)
        fail ("no connection", 0);
    while (!atomic_load (&stop)) {
        zmq_msg_t message;
        zmq_msg_init (&message);
        if (zmq_msg_recv (&message, socket, 0) >= 0)
            read_message (self, &message);
        else
            zmq_msg_close (&message);
    }
    zmq_close (socket);
    return NULL;
}

/* ---- writing ---- */

static void
write_version (gq_buffers *buffers, uint64_t version)
{
    float *next = gq_buffers_next (buffers);
    for (size_t i = 0; i < COUNT; i++)
        next[i] = (float)version;
    gq_buffers_turn (buffers);
}

/* One reference to each reader, none for us. */
static void
hand_out (zmq_msg_t *message, size_t index)
{
    zmq_msg_t copies[READERS];
    for (size_t i = 0; i < READERS; i++) {
        zmq_msg_init (&copies[i]);
        if (i + 1 < READERS)
            zmq_msg_copy (&copies[i], message);
        else
            zmq_msg_move (&copies[i], message);
    }
    for (size_t i = 0; i < READERS; i++) {
        zmq_msg_init (&readers[i].letters[index]);
        zmq_msg_move (&readers[i].letters[index], &copies[i]);
        atomic_store_explicit (&readers[i].letter_count, index + 1, memory_order_release);
    }
}

static bool
all_saw_enough (void)
{
    for (size_t i = 0; i < READERS; i++)
        if (atomic_load_explicit (&readers[i].seen, memory_order_relaxed) < SEEN_MIN)
            return false;
    return true;
}

/* Versions until every reader saw enough of them; *lent, *kept: how many could (not) be lent. */
static void
write_all (gq_buffers *buffers, void *socket, uint64_t *lent, uint64_t *kept)
{
    const uint64_t deadline_ns = gq_now_ns () + LIMIT_S * UINT64_C (1000000000);
    for (uint64_t version = 1; !atomic_load (&stop) && !all_saw_enough (); version++) {
        gq_frame frame = {.kind = GQ_KIND_WEIGHTS,
                          .encoding = GQ_ENCODING_F32,
                          .version = version,
                          .count = COUNT,
                          .payload_bytes = COUNT * sizeof (float)};
        zmq_msg_t message;
        write_version (buffers, version);
        if ((socket == NULL && *lent == SEEN_MIN) ||
            gq_buffers_lend (buffers, &frame, &message) != GQ_OK) {
            ++*kept;
        } else if (socket == NULL) {
            hand_out (&message, (size_t)(*lent)++);
        } else {
            ++*lent;
            if (zmq_msg_send (&message, socket, ZMQ_DONTWAIT) < 0)
                zmq_msg_close (&message);
        }
        if (gq_now_ns () > deadline_ns)
            fail ("readers did not see enough in time", version);
    }
    atomic_store (&stop, true);
}

static bool
run_round (const char *name, void *(*read) (void *), bool by_zmq)
{
    uint64_t lent = 0, kept = 0;
    void *context = by_zmq ? zmq_ctx_new () : NULL;
    void *socket = by_zmq ? zmq_socket (context, ZMQ_PUB) : NULL;
    const int high_water = 2, linger_ms = 0;
    gq_buffers *buffers = gq_buffers_new (COUNT, NULL);
    if (buffers == NULL)
        return false;
    if (by_zmq) {
        zmq_setsockopt (socket, ZMQ_SNDHWM, &high_water, sizeof high_water);
        zmq_setsockopt (socket, ZMQ_LINGER, &linger_ms, sizeof linger_ms);
        zmq_bind (socket, endpoint);
    }
    memset (readers, 0, sizeof readers);
    atomic_store (&stop, false);
    for (size_t i = 0; i < READERS; i++) {
        readers[i].context = context;
        pthread_create (&readers[i].thread, NULL, read, &readers[i]);
    }
    write_all (buffers, socket, &lent, &kept);
    for (size_t i = 0; i < READERS; i++)
        pthread_join (readers[i].thread, NULL);
    if (by_zmq) {
        zmq_close (socket);
        zmq_ctx_term (context);
    }
    gq_buffers_free (&buffers); /* asserts that all came back */
    printf ("%s: %llu versions lent, %llu kept back; readers saw", name, (unsigned long long)lent,
            (unsigned long long)kept);
    for (size_t i = 0; i < READERS; i++)
        printf (" %zu", atomic_load (&readers[i].seen));
    printf ("\n");
    return !atomic_load (&failed);
}

int
main (void)
{
    const bool by_hand = run_round ("by hand", read_by_hand, false);
    const bool by_zmq = by_hand && run_round ("by ZeroMQ", read_by_zmq, true);
    return by_hand && by_zmq ? 0 : 1;
}
