/*
 * The network between the processes, and the broker with its real queue: steps 2 and 3 of a
 * gradient's path.  The network may lose, repeat, damage, delay and reorder; the broker never.
 */
#include <assert.h>
#include <string.h>

#include "frame.h"
#include "sim.h"

/* Letters that wait at one receiver: what sockets hold at most, before PUSH waits and PUB drops. */
static const uint32_t room[] = {
    [SIM_BROKER] = 24, [SIM_OPTIMIZER] = 4, [SIM_HELLO] = 8, [SIM_PROCESS] = 16};

uint32_t
sim_waiting (const sim *self, sim_place to, uint32_t process)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < self->letter_count; i++)
        count +=
            self->letters[i].to == to && (to != SIM_PROCESS || self->letters[i].process == process)
                ? 1
                : 0;
    return count;
}

static void
post (sim *self, const sim_letter *letter)
{
    if (self->letter_count == SIM_LETTERS_MAX ||
        sim_waiting (self, letter->to, letter->process) >= room[letter->to]) {
        self->tally.dropped++;
        return;
    }
    sim_letter *posted = &self->letters[self->letter_count++];
    *posted = *letter;
    posted->ready_ns = self->now_ns;
    if (self->faults.delay_ns > 0 && sim_chance (self, 4))
        posted->ready_ns += sim_below (self, self->faults.delay_ns);
    if (sim_chance (self, self->faults.damage) && posted->size >= GQ_FRAME_HEADER_BYTES) {
        uint64_t bit = sim_below (self, 8 * (uint64_t)posted->size);
        posted->bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        self->tally.damaged++;
    }
}

/* Is it the gradient that this schedule never lets through? */
static bool
is_lost (const sim *self, const sim_letter *letter)
{
    gq_frame frame;
    return self->faults.lost_sequence != 0 && letter->to == SIM_BROKER &&
           gq_frame_decode (letter->bytes, letter->size, &frame) == GQ_OK &&
           frame.sequence == self->faults.lost_sequence;
}

void
sim_send (sim *self, sim_place to, uint32_t process, const void *bytes, size_t size)
{
    assert (size <= SIM_LETTER_BYTES);
    sim_letter letter = {.to = to, .process = process, .size = (uint32_t)size};
    memcpy (letter.bytes, bytes, size);
    if (is_lost (self, &letter) || sim_chance (self, self->faults.drop)) {
        self->tally.dropped++;
        return;
    }
    post (self, &letter);
    if (sim_chance (self, self->faults.duplicate)) {
        self->tally.duplicated++;
        post (self, &letter);
    }
}

static void
discard (sim *self, uint32_t index)
{
    self->letter_count--;
    memmove (&self->letters[index], &self->letters[index + 1],
             (self->letter_count - index) * sizeof self->letters[0]);
}

bool
sim_arrived (sim *self, sim_place to, uint32_t process, sim_letter *letter)
{
    uint32_t found[SIM_LETTERS_MAX], count = 0;
    for (uint32_t i = 0; i < self->letter_count; i++)
        if (self->letters[i].to == to &&
            (to != SIM_PROCESS || self->letters[i].process == process) &&
            self->letters[i].ready_ns <= self->now_ns)
            found[count++] = i;
    if (count == 0)
        return false;
    uint32_t index = found[self->faults.reorder ? sim_below (self, count) : 0];
    *letter = self->letters[index];
    discard (self, index);
    return true;
}

void
sim_lose (sim *self, sim_place to)
{
    for (uint32_t i = self->letter_count; i-- > 0;)
        if (self->letters[i].to == to && sim_chance (self, 2)) {
            discard (self, i);
            self->tally.dropped++;
        }
}

/* ---- broker ---- */

void
sim_broker_start (sim *self)
{
    sim_broker *broker = &self->broker;
    uint64_t frame_bytes = GQ_FRAME_HEADER_BYTES + self->count * sizeof (float);
    assert (!broker->up);
    uint64_t capacity = 1 + sim_below (self, SIM_QUEUE_MAX);
    uint64_t bytes_capacity = frame_bytes * (1 + sim_below (self, SIM_QUEUE_MAX));
    broker->queue = gq_queue_new (capacity, bytes_capacity);
    assert (broker->queue != NULL);
    broker->count = 0;
    broker->up = true;
    sim_trace (self, "broker: starts");
}

void
sim_broker_die (sim *self)
{
    sim_broker *broker = &self->broker;
    sim_trace (self, "broker: dies with %u queued", broker->count);
    if (broker->holding)
        zmq_msg_close (&broker->hand);
    broker->holding = false;
    gq_queue_free (&broker->queue);
    broker->up = false;
    sim_lose (self, SIM_BROKER);
    sim_lose (self, SIM_OPTIMIZER);
}

/* Names one gradient, so that the order of the queue can be checked. */
static uint64_t
name_of (const void *bytes, size_t size)
{
    gq_frame frame = {0};
    (void)!gq_frame_decode (bytes, size, &frame);
    return (uint64_t)frame.actor << 56 ^ (uint64_t)frame.epoch << 32 ^ frame.sequence;
}

static void
check_queue (const sim *self)
{
    const sim_broker *broker = &self->broker;
    gq_queue_counts counts = gq_queue_count (broker->queue);
    SIM_REQUIRE (self, counts.depth == broker->count && counts.depth <= counts.capacity,
                 "the queue's depth is %llu of %llu, and should be %u",
                 (unsigned long long)counts.depth, (unsigned long long)counts.capacity,
                 broker->count);
    SIM_REQUIRE (self,
                 counts.bytes <= counts.bytes_capacity &&
                     counts.bytes ==
                         counts.depth * (GQ_FRAME_HEADER_BYTES + self->count * sizeof (float)),
                 "the queue holds %llu bytes of %llu", (unsigned long long)counts.bytes,
                 (unsigned long long)counts.bytes_capacity);
}

static void
take_in (sim *self)
{
    sim_broker *broker = &self->broker;
    sim_letter letter;
    gq_queue_counts counts = gq_queue_count (broker->queue);
    if (!broker->holding) {
        if (counts.depth == counts.capacity || !sim_arrived (self, SIM_BROKER, 0, &letter))
            return;
        int rc = zmq_msg_init_size (&broker->hand, letter.size);
        assert (rc == 0);
        (void)rc;
        memcpy (zmq_msg_data (&broker->hand), letter.bytes, letter.size);
        broker->holding = true;
    }
    uint64_t name = name_of (zmq_msg_data (&broker->hand), zmq_msg_size (&broker->hand));
    gq_status status = gq_queue_push (broker->queue, &broker->hand, self->now_ns);
    if (status == GQ_FULL)
        return;
    if (status == GQ_OK)
        broker->inside[broker->count++] = name;
    zmq_msg_close (&broker->hand);
    broker->holding = false;
}

static void
hand_on (sim *self)
{
    sim_broker *broker = &self->broker;
    zmq_msg_t *front = gq_queue_front (broker->queue);
    /* Without an optimizer PUSH has nobody to send to. */
    if (front == NULL || !self->optimizer.up ||
        sim_waiting (self, SIM_OPTIMIZER, 0) >= room[SIM_OPTIMIZER])
        return;
    uint64_t name = name_of (zmq_msg_data (front), zmq_msg_size (front));
    SIM_REQUIRE (self, name == broker->inside[0], "the queue is out of order: %llx before %llx",
                 (unsigned long long)name, (unsigned long long)broker->inside[0]);
    sim_send (self, SIM_OPTIMIZER, 0, zmq_msg_data (front), zmq_msg_size (front));
    zmq_msg_close (front);
    zmq_msg_init (front); /* as after a send */
    gq_queue_pop (broker->queue);
    broker->count--;
    memmove (broker->inside, broker->inside + 1, broker->count * sizeof broker->inside[0]);
}

void
sim_broker_turn (sim *self)
{
    if (!self->broker.up)
        return;
    take_in (self);
    check_queue (self);
    if (!sim_chance (self, self->healing ? 0 : 3))
        hand_on (self);
    check_queue (self);
}
