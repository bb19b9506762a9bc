/*
 * Processes that push: steps 1 and 7 of a gradient's path, with the real window.  What they do is
 * what src/client.c does around it.  Must never send what the window does not allow.
 */
#include <assert.h>
#include <string.h>

#include "frame.h"
#include "sim.h"

#define HELLO_NS (200 * SIM_MS)
/* As in src/client.c: nothing is sent again while the optimizer is not heard. */
#define HEARD_NS (2500 * SIM_MS)
/* A client gives up when nothing moves for so long: gq_client_config.timeout_ms. */
#define TIMEOUT_NS (30000 * SIM_MS)

void
sim_process_start (sim *self, uint32_t index)
{
    sim_process *process = &self->processes[index];
    memset (process, 0, sizeof *process);
    process->running = true;
    process->self.actor = index % SIM_ACTORS;
    for (size_t i = 0; i < GQ_NONCE_BYTES; i++)
        process->self.nonce[i] = (uint8_t)sim_below (self, 256);
    gq_window_init (&process->window, self->window, 100 * SIM_MS, sim_random (self));
    process->hello_ns = self->now_ns;
    process->moved_ns = self->now_ns;
    sim_trace (self, "process %u: starts as actor %u", index, process->self.actor);
}

void
sim_process_die (sim *self, uint32_t index)
{
    sim_trace (self, "process %u: dies with %u on the way", index,
               gq_window_count (&self->processes[index].window));
    self->processes[index].running = false;
    self->tally.actor_deaths++;
    for (uint32_t i = self->letter_count; i-- > 0;)
        if (self->letters[i].to == SIM_PROCESS && self->letters[i].process == index)
            self->letters[i].process = SIM_PROCESSES; /* nobody's */
}

static void
check_window (const sim *self, const sim_process *process)
{
    const gq_window *window = &process->window;
    SIM_REQUIRE (self, gq_window_count (window) <= self->window, "%u gradients in a window of %u",
                 gq_window_count (window), self->window);
    SIM_REQUIRE (self, window->sequence - window->cumulative <= GQ_WINDOW_MAX,
                 "the window reaches from %llu to %llu", (unsigned long long)window->cumulative,
                 (unsigned long long)window->sequence);
}

void
sim_process_push (sim *self, uint32_t index)
{
    sim_process *process = &self->processes[index];
    float values[SIM_COUNT_MAX];
    uint32_t slot, samples;
    uint8_t bytes[SIM_LETTER_BYTES];
    if (!process->running || !process->ready || !process->has_weights ||
        !gq_window_room (&process->window) || process->window.sequence + 2 >= SIM_SEQUENCES_MAX)
        return;
    uint64_t sequence = process->window.sequence + 1;
    sim_gradient (self, process->self.actor, process->self.epoch, sequence, values, &samples);
    gq_frame frame = {.kind = GQ_KIND_GRADIENT,
                      .encoding = GQ_ENCODING_F32,
                      .actor = process->self.actor,
                      .epoch = process->self.epoch,
                      .term = process->term,
                      .digest = self->digest,
                      .sequence = sequence,
                      .version = process->version,
                      .count = self->count,
                      .samples = samples,
                      .payload_bytes = self->count * sizeof (float)};
    memcpy (frame.run, self->run, GQ_RUN_ID_BYTES);
    memcpy (bytes + GQ_FRAME_HEADER_BYTES, values, frame.payload_bytes);
    gq_frame_encode (&frame, values, bytes);
    if (gq_window_count (&process->window) == 0)
        process->moved_ns = self->now_ns;
    uint64_t given = gq_window_sent (&process->window, self->now_ns, &slot);
    assert (given == sequence && slot < SIM_WINDOW_MAX);
    (void)given;
    size_t size = GQ_FRAME_HEADER_BYTES + (size_t)frame.payload_bytes;
    memcpy (process->sent[slot], bytes, size);
    sim_trace (self, "process %u: pushes %u/%u/%llu from version %llu", index, frame.actor,
               frame.epoch, (unsigned long long)sequence, (unsigned long long)frame.version);
    sim_send (self, SIM_BROKER, index, bytes, size);
    self->tally.pushed++;
    check_window (self, process);
}

static void
take_grant (sim *self, uint32_t index, const sim_letter *letter)
{
    sim_process *process = &self->processes[index];
    sim_hello answer;
    memcpy (&answer, letter->bytes, sizeof answer);
    if (process->ready || memcmp (answer.nonce, process->self.nonce, GQ_NONCE_BYTES) != 0)
        return; /* to an earlier process, or once more */
    process->self.epoch = answer.epoch;
    process->ready = true;
    process->moved_ns = self->now_ns;
    sim_trace (self, "process %u: is actor %u, epoch %u", index, answer.actor, answer.epoch);
}

static void
take_weights (sim *self, uint32_t index, const gq_frame *frame)
{
    sim_process *process = &self->processes[index];
    if (process->has_weights &&
        (frame->term < process->term ||
         (frame->term == process->term && frame->version <= process->version)))
        return; /* as gq_client does */
    SIM_REQUIRE (self, !process->has_weights || self->weak || frame->version >= process->version,
                 "actor %u had version %llu and gets %llu in term %u", process->self.actor,
                 (unsigned long long)process->version, (unsigned long long)frame->version,
                 frame->term);
    process->has_weights = true;
    process->term = frame->term;
    process->version = frame->version;
}

static void
take_ack (sim *self, uint32_t index, const gq_frame *frame, const uint8_t *payload)
{
    sim_process *process = &self->processes[index];
    gq_ack ack;
    gq_ack_decode (payload, &ack);
    if (frame->epoch > process->self.epoch) {
        sim_trace (self, "process %u: fenced by epoch %u", index, frame->epoch);
        self->tally.fenced++;
        sim_process_die (self, index);
        return;
    }
    if (frame->epoch < process->self.epoch)
        return;
    uint64_t cumulative = process->window.cumulative;
    if (gq_window_settle (&process->window, ack.cumulative, ack.beyond) != 0)
        process->moved_ns = self->now_ns;
    gq_window_received (&process->window, ack.cumulative + ack.held);
    SIM_REQUIRE (self, process->window.cumulative >= cumulative, "the window went back");
    check_window (self, process);
}

void
sim_process_receive (sim *self, uint32_t index)
{
    sim_process *process = &self->processes[index];
    sim_letter letter;
    gq_frame frame;
    if (!process->running || !sim_arrived (self, SIM_PROCESS, index, &letter))
        return;
    if (letter.size == sizeof (sim_hello)) {
        take_grant (self, index, &letter);
        return;
    }
    if (!process->ready || gq_frame_decode (letter.bytes, letter.size, &frame) != GQ_OK ||
        gq_frame_check_payload (letter.bytes, letter.size) != GQ_OK)
        return;
    process->heard_ns = self->now_ns;
    if (frame.kind == GQ_KIND_WEIGHTS)
        take_weights (self, index, &frame);
    else if (frame.actor == process->self.actor)
        take_ack (self, index, &frame, letter.bytes + GQ_FRAME_HEADER_BYTES);
}

/* Nothing moves: the caller's call times out, the process ends, a supervisor starts the next. */
static bool
timed_out (sim *self, uint32_t index)
{
    sim_process *process = &self->processes[index];
    if (gq_window_count (&process->window) == 0)
        process->moved_ns = self->now_ns;
    if (self->now_ns - process->moved_ns < TIMEOUT_NS)
        return false;
    /* Only when the optimizer was made to forget what it had told this process. */
    SIM_REQUIRE (self, !self->healing || self->weak,
                 "actor %u, epoch %u: %u gradients are never settled, the oldest after %llu",
                 process->self.actor, process->self.epoch, gq_window_count (&process->window),
                 (unsigned long long)process->window.cumulative);
    self->tally.timed_out++;
    sim_process_die (self, index);
    return true;
}

void
sim_process_timers (sim *self, uint32_t index)
{
    sim_process *process = &self->processes[index];
    if (!process->running)
        return;
    if (!process->ready) {
        if (self->now_ns >= process->hello_ns) {
            process->hello_ns = self->now_ns + HELLO_NS;
            sim_send (self, SIM_HELLO, index, &process->self, sizeof process->self);
        }
        return;
    }
    if (timed_out (self, index) || self->now_ns - process->heard_ns > HEARD_NS)
        return;
    for (int slot = gq_window_due (&process->window, self->now_ns); slot >= 0;
         slot = gq_window_due (&process->window, self->now_ns)) {
        sim_trace (self, "process %u: sends %llu again", index,
                   (unsigned long long)process->window.slots[slot].sequence);
        sim_send (self, SIM_BROKER, index, process->sent[slot],
                  GQ_FRAME_HEADER_BYTES + self->count * sizeof (float));
        gq_window_resent (&process->window, (uint32_t)slot, self->now_ns);
        self->tally.resent++;
    }
}
