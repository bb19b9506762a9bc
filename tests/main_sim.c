/*
 * Runs the simulator: schedules of events drawn from seeds, invariants after every event, and at
 * the end of each everything heals and all that was pushed has to be settled.
 *
 *     main_sim                      a short round, for make test
 *     main_sim --seeds 1..100000    a long one, for make sim
 *     main_sim --seed 17 --trace    one schedule, told event by event
 */
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "frame.h"
#include "sim/sim.h"

#define SEEDS_SHORT 2000
#define EVENTS_MIN  200
#define EVENTS_MORE 300
/* Rounds of healing, 100 ms each: a resend waits up to 1 s, a client gives up after 30 s. */
#define ROUNDS_MAX 2000

sim *sim_now;

/* ---- what the parts share ---- */

/* splitmix64 (Steele, Lea and Flood, 2014). */
static uint64_t
mix (uint64_t *state)
{
    uint64_t z = *state += UINT64_C (0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C (0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t
sim_random (sim *self)
{
    return mix (&self->random);
}

uint64_t
sim_below (sim *self, uint64_t bound)
{
    return mix (&self->random) % bound;
}

bool
sim_chance (sim *self, uint32_t one_in)
{
    return one_in != 0 && sim_below (self, one_in) == 0;
}

void
sim_trace (const sim *self, const char *format, ...)
{
    va_list arguments;
    if (!self->trace)
        return;
    printf ("%5" PRIu64 " %8" PRIu64 " ms  ", self->event, self->now_ns / SIM_MS);
    va_start (arguments, format);
    vprintf (format, arguments);
    va_end (arguments);
    putchar ('\n');
}

void
sim_fail (const sim *self, const char *format, ...)
{
    va_list arguments;
    printf ("FAILED: seed %" PRIu64 ", event %" PRIu64 ": ", self->seed, self->event);
    va_start (arguments, format);
    vprintf (format, arguments);
    va_end (arguments);
    printf ("\nagain: build/tests/main_sim --seed %" PRIu64 " --trace\n", self->seed);
    fflush (stdout);
    _exit (1);
}

void
sim_gradient (const sim *self, uint32_t actor, uint32_t epoch, uint64_t sequence,
              float values[SIM_COUNT_MAX], uint32_t *samples)
{
    uint64_t state = self->seed ^ (uint64_t)actor << 56 ^ (uint64_t)epoch << 24 ^ sequence;
    assert (self->count > 0);
    for (uint64_t i = 0; i < self->count; i++)
        values[i] = (float)(mix (&state) >> 40) * 0x1p-23f - 1;
    *samples = 1 + (uint32_t)(mix (&state) % 4);
    uint64_t choice = mix (&state);
    if (choice % 16 == 0)
        values[choice / 32 % self->count] = choice / 16 % 2 == 0 ? NAN : INFINITY;
}

/* ---- a schedule ---- */

static uint32_t
draw_rate (sim *self, uint64_t least, uint64_t most)
{
    return sim_chance (self, 3) ? 0 : (uint32_t)(least + sim_below (self, most - least + 1));
}

static void
draw_schedule (sim *self)
{
    sim_faults *faults = &self->faults;
    *faults = (sim_faults){0};
    self->count = 2 + sim_below (self, SIM_COUNT_MAX - 1);
    self->fsync = (gq_fsync)sim_below (self, 3);
    self->keep_journal = sim_chance (self, 8);
    self->segment_bytes = 200 + sim_below (self, 3000);
    /* All of a step's gradients have to fit into the windows, or it waits for ever. */
    uint64_t sizes = sim_chance (self, 4) ? SIM_WINDOW_MAX - 1 : 2;
    self->window = 2 + (uint32_t)sim_below (self, sizes);
    self->swaps = sim_chance (self, 2);
    /* One by one: the order in which an initialiser is evaluated is the compiler's choice. */
    faults->drop = draw_rate (self, 3, 40);
    faults->duplicate = draw_rate (self, 3, 40);
    faults->damage = sim_chance (self, 4) ? draw_rate (self, 10, 60) : 0;
    faults->reorder = sim_chance (self, 2);
    faults->delay_ns = sim_chance (self, 2) ? 500 * SIM_MS : 0;
    faults->actor_dies = draw_rate (self, 20, 200);
    faults->broker_dies = draw_rate (self, 15, 150);
    faults->optimizer_dies = draw_rate (self, 3, 40);
    faults->disk_full = draw_rate (self, 20, 100);
    faults->power = sim_chance (self, 2);
    if (sim_chance (self, 8))
        faults->lost_sequence = 1 + sim_below (self, 3);
}

static void
begin (sim *self, uint64_t seed)
{
    gq_tensor_shape shape = {.name = "w", .rank = 1};
    gq_layout layout;
    self->seed = seed;
    self->random = seed * UINT64_C (0x2545f4914f6cdd1d);
    self->event = 0;
    self->now_ns = 1000 * SIM_MS;
    self->healing = self->weak = false;
    self->letter_count = 0;
    memset (self->processes, 0, sizeof self->processes);
    draw_schedule (self);
    shape.shape[0] = self->count;
    gq_status status = gq_layout_init (&layout, &shape, 1, NULL);
    assert (status == GQ_OK);
    (void)status;
    self->digest = layout.digest;
    gq_layout_clear (&layout);
    for (size_t i = 0; i < GQ_RUN_ID_BYTES; i++)
        self->run[i] = (uint8_t)sim_random (self);
    self->disk = gq_memory_disk_new ();
    assert (self->disk != NULL);
    sim_model_begin (self);
    sim_optimizer *optimizer = &self->optimizer;
    optimizer->term = optimizer->reserved_epoch = 0;
    optimizer->seen_term = 0;
    optimizer->seen_version = 0;
    optimizer->life_drawn = false;
    sim_broker_start (self);
    sim_optimizer_start (self);
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        sim_process_start (self, i);
}

static void
end (sim *self)
{
    gq_disk *disk = &self->disk->base;
    if (self->optimizer.up)
        sim_optimizer_die (self);
    if (self->broker.up)
        sim_broker_die (self);
    sim_checkpoints_clear (self);
    disk->ops->close (&disk);
    self->tally.schedules++;
}

/* The file system fills up, or has room again. */
static void
fill_disk (sim *self)
{
    if (self->disk->room_bytes != UINT64_MAX) {
        self->disk->room_bytes = UINT64_MAX;
        sim_trace (self, "disk: has room again");
        return;
    }
    uint64_t used = 0;
    for (size_t i = 0; i < self->disk->count; i++)
        used += self->disk->files[i].here ? self->disk->files[i].live.size : 0;
    self->disk->room_bytes = used + sim_below (self, 400);
    self->tally.disk_full++;
    sim_trace (self, "disk: nearly full");
}

/* Deaths and other misfortune; false: none this time. */
static bool
misfortune (sim *self)
{
    uint32_t process = (uint32_t)sim_below (self, SIM_PROCESSES);
    if (sim_chance (self, self->faults.actor_dies) && self->processes[process].running)
        sim_process_die (self, process);
    else if (sim_chance (self, self->faults.broker_dies) && self->broker.up) {
        self->tally.broker_deaths++;
        sim_broker_die (self);
    } else if (sim_chance (self, self->faults.optimizer_dies) && sim_chance (self, 12) &&
               self->optimizer.up)
        sim_optimizer_die (self);
    else if (sim_chance (self, self->faults.disk_full) ||
             (self->disk->room_bytes != UINT64_MAX && sim_chance (self, 30)))
        fill_disk (self);
    else
        return false;
    return true;
}

/* Another process for this place, and with its id, perhaps while an older one still lives. */
static void
start_process (sim *self, uint32_t process)
{
    if (!self->processes[process].running && sim_chance (self, process < SIM_ACTORS ? 3 : 40))
        sim_process_start (self, process);
}

static void
one_event (sim *self)
{
    uint32_t process = (uint32_t)sim_below (self, SIM_PROCESSES);
    self->event++;
    self->tally.events++;
    self->now_ns += sim_below (self, sim_chance (self, 50) ? 2000 * SIM_MS : 20 * SIM_MS);
    if (misfortune (self))
        return;
    switch (sim_below (self, 8)) {
    case 0:
    case 1:
        for (uint32_t i = 0; i < SIM_PROCESSES; i++)
            if (!sim_chance (self, 3))
                sim_process_push (self, i);
        return;
    case 2:
        sim_process_timers (self, process);
        start_process (self, process);
        return;
    case 3:
    case 4:
        for (uint32_t i = 0; i < SIM_PROCESSES; i++)
            for (uint64_t n = sim_below (self, 4); n > 0; n--)
                sim_process_receive (self, i);
        return;
    case 5:
        if (!self->broker.up && sim_chance (self, 2))
            sim_broker_start (self);
        for (uint64_t n = sim_below (self, 4); n > 0; n--)
            sim_broker_turn (self);
        return;
    default:
        for (uint64_t n = sim_below (self, 4); n > 0; n--)
            sim_broker_turn (self);
        if (self->optimizer.up)
            sim_optimizer_turn (self);
        else if (sim_chance (self, 2))
            sim_optimizer_start (self);
    }
}

/* ---- healing ---- */

static uint32_t
on_the_way (const sim *self)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < SIM_PROCESSES; i++)
        if (self->processes[i].running)
            count += gq_window_count (&self->processes[i].window);
    return count;
}

static bool
all_ready (const sim *self)
{
    for (uint32_t i = 0; i < SIM_ACTORS; i++) {
        bool ready = false;
        for (uint32_t k = i; k < SIM_PROCESSES; k += SIM_ACTORS)
            ready = ready || (self->processes[k].running && self->processes[k].ready &&
                              self->processes[k].has_weights);
        if (!ready)
            return false;
    }
    return true;
}

static void
supervise (sim *self)
{
    if (!self->broker.up)
        sim_broker_start (self);
    if (!self->optimizer.up)
        sim_optimizer_start (self);
    for (uint32_t i = 0; i < SIM_ACTORS; i++) {
        bool alive = false;
        for (uint32_t k = i; k < SIM_PROCESSES; k += SIM_ACTORS)
            alive = alive || self->processes[k].running;
        if (!alive)
            sim_process_start (self, i);
    }
}

/* 100 ms in which everything works. */
static void
one_round (sim *self)
{
    self->event++;
    self->now_ns += 100 * SIM_MS;
    supervise (self);
    for (uint32_t i = 0; i < SIM_PROCESSES; i++)
        sim_process_timers (self, i);
    for (int i = 0; i < 8; i++) {
        sim_broker_turn (self);
        sim_optimizer_turn (self);
        for (uint32_t k = 0; k < SIM_PROCESSES; k++)
            for (uint32_t n = sim_waiting (self, SIM_PROCESS, k); n > 0; n--)
                sim_process_receive (self, k);
    }
}

/* With --aggregate the last gradients wait for others: push some, one at a time. */
static void
fill_step (sim *self)
{
    const sim_state *state = &self->model.state;
    uint32_t waiting = 0;
    for (uint32_t i = 0; i < SIM_ACTORS; i++)
        waiting += state->actors[i].count - state->actors[i].settled;
    if (state->held == 0 || on_the_way (self) > waiting)
        return;
    for (uint32_t i = 0; i < SIM_PROCESSES; i++)
        if (self->processes[i].running && self->processes[i].ready &&
            gq_window_room (&self->processes[i].window)) {
            sim_process_push (self, i);
            return;
        }
}

static void
heal (sim *self)
{
    self->healing = true;
    self->faults = (sim_faults){.power = self->faults.power, .damage = self->faults.damage};
    self->disk->room_bytes = UINT64_MAX;
    sim_trace (self, "everything heals");
    for (int round = 0; round < ROUNDS_MAX; round++) {
        one_round (self);
        if (all_ready (self) && on_the_way (self) == 0 && self->model.state.held == 0)
            break;
        fill_step (self);
    }
    SIM_REQUIRE (self, all_ready (self), "an actor is never granted an epoch, or gets no weights");
    SIM_REQUIRE (self, on_the_way (self) == 0, "%u gradients are never settled", on_the_way (self));
    SIM_REQUIRE (self, self->model.state.held == 0, "a step waits for ever with %u gradients",
                 self->model.state.held);
    for (uint32_t i = 0; i < SIM_PROCESSES; i++) {
        const sim_process *process = &self->processes[i];
        const sim_known *actor = &self->model.state.actors[process->self.actor];
        for (uint64_t k = 1; process->running && process->ready && !self->weak &&
                             process->self.epoch == actor->epoch && k <= process->window.sequence;
             k++)
            SIM_REQUIRE (self, actor->decided[k] != 0, "%u/%u/%" PRIu64 " was pushed, and is gone",
                         process->self.actor, actor->epoch, k);
    }
    /* And once more from the disk alone. */
    sim_optimizer_die (self);
    sim_optimizer_start (self);
}

static void
run_seed (sim *self, uint64_t seed)
{
    begin (self, seed);
    uint64_t events = EVENTS_MIN + sim_below (self, EVENTS_MORE);
    for (uint64_t i = 0; i < events; i++)
        one_event (self);
    heal (self);
    end (self);
}

/* ---- the program ---- */

static void
report (const sim *self)
{
#define REPORT(name) {#name, self->tally.name},
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {SIM_TALLY (REPORT)};
    static const char *const deaths[SIM_DEATHS] = {
        "between_turns", "in_disk",           "after_receive",    "before_apply", "before_publish",
        "in_publish",    "before_checkpoint", "after_checkpoint", "recovering"};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        printf ("%s %" PRIu64 "%s", rows[i].name, rows[i].value, i % 5 == 4 ? "\n" : ", ");
    printf ("\noptimizer died:");
    for (size_t i = 0; i < SIM_DEATHS; i++)
        printf (" %s %" PRIu64, deaths[i], self->tally.deaths[i]);
    putchar ('\n');
}

/* A fault that never happened was not tested. */
static bool
check_tally (const sim *self)
{
#define COUNT(name) self->tally.name,
    const uint64_t values[] = {SIM_TALLY (COUNT)};
    bool all = true;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        all = all && values[i] != 0;
    for (size_t i = 0; i < SIM_DEATHS; i++)
        all = all && self->tally.deaths[i] != 0;
    return all;
}

/* build/tests/main_sim: the plug-ins lie in build/plugins. */
static void
find_plugins (sim *self)
{
    char program[512];
    ssize_t length = readlink ("/proc/self/exe", program, sizeof program - 1);
    assert (length > 0);
    program[length] = '\0';
    for (int up = 0; up < 2; up++)
        *strrchr (program, '/') = '\0';
    snprintf (self->plugins, sizeof self->plugins, "%s/plugins", program);
}

static int
usage (void)
{
    fprintf (stderr, "usage: main_sim [--seeds A..B | --seed N] [--trace]\n");
    return 2;
}

static double
seconds (void)
{
    struct timespec now;
    clock_gettime (CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* "N" or "A..B"; false: neither. */
static bool
read_seeds (const char *word, uint64_t *first, uint64_t *last)
{
    char *end = NULL;
    *first = *last = strtoull (word, &end, 10);
    if (end == word || *end == '\0')
        return end != word;
    if (strncmp (end, "..", 2) != 0)
        return false;
    word = end + 2;
    *last = strtoull (word, &end, 10);
    return end != word && *end == '\0' && *first <= *last;
}

int
main (int count, char **words)
{
    static sim self;
    uint64_t first = 1, last = SEEDS_SHORT;
    for (int i = 1; i < count; i++) {
        bool seeds = strcmp (words[i], "--seeds") == 0 || strcmp (words[i], "--seed") == 0;
        if (strcmp (words[i], "--trace") == 0)
            self.trace = true;
        else if (!seeds || i + 1 == count || !read_seeds (words[++i], &first, &last))
            return usage ();
    }
    find_plugins (&self);
    sim_now = &self;
    double start_s = seconds ();
    for (uint64_t seed = first; seed <= last; seed++) {
        run_seed (&self, seed);
        if ((seed - first + 1) % 10000 == 0) {
            printf ("%" PRIu64 " schedules, %.0f s\n", seed - first + 1, seconds () - start_s);
            fflush (stdout);
        }
    }
    report (&self);
    printf ("seeds %" PRIu64 "..%" PRIu64 ": all invariants held, %.1f s\n", first, last,
            seconds () - start_s);
    if (last - first + 1 >= SEEDS_SHORT && !check_tally (&self)) {
        printf ("FAILED: a kind of fault never happened; see the zero above\n");
        return 1;
    }
    return 0;
}
