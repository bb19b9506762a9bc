/*
 * An actor for tests/chaos/: pushes gradients for ever and writes down what it was promised.
 * Steps 1 and 7 of a gradient's path.
 *
 *     chaos_client ADDRESS ACTOR SEED LOG [key=value]...      keys: see `keys` below
 *
 * LOG.ack gets a line "ACTOR EPOCH SEQUENCE" for each gradient as soon as this client knows that it
 * is settled, LOG.see a line "TERM VERSION CRC32C" for each version of the weights that it sees;
 * both are appended to by one write a time, so that a kill leaves whole lines and at most one cut
 * one.  Gradients are a function of (seed, actor, epoch, sequence, element), so that oracle.py
 * knows the bytes that must stand in the journal.
 *
 * Must never write down a sequence number that gq_client still keeps bytes for: that is why it
 * looks below gradq.h.  Ends with 3 when the weights are torn or fall back, or when the optimizer
 * has forgotten an epoch; with 4 when fenced; with 5 when a second signal came before everything
 * was settled.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client_internal.h"
#include "frame.h"
#include "gradq/gradq.h"

#define EXIT_BROKEN    3
#define EXIT_FENCED    4
#define EXIT_UNSETTLED 5
/* Lines of one look: a whole window settled, and one version. */
#define TEXT_MAX ((GQ_WINDOW_MAX + 1) * 64)

enum { HALF, WINDOW, PAUSE_US, RESEND_MS, COUNT, ODD, BF16, INLINE, KEY_COUNT };

/* half: elements in each of the two tensors.  pause_us: between two gradients, so that the oracle's
 * loop in Python can follow.  count: gradients to push.  odd: one gradient in this many is NaN, one
 * infinite; 0: none.  bf16: 1 is that encoding.  inline: 1 is that lane, whatever is offered. */
static const struct {
    const char *name;
    uint64_t value;
} keys[KEY_COUNT] = {[HALF] = {"half", 32},
                     [WINDOW] = {"window", 4},
                     [PAUSE_US] = {"pause_us", 1000},
                     [RESEND_MS] = {"resend_ms", 200},
                     [COUNT] = {"count", UINT64_MAX},
                     [ODD] = {"odd", 64},
                     [BF16] = {"bf16", 0},
                     [INLINE] = {"inline", 0}};

typedef struct chaos_client {
    gq_client *client;
    uint64_t seed;
    uint64_t set[KEY_COUNT];
    int ack_fd, see_fd;
    uint64_t way[GQ_WINDOW_MAX]; /* sequence numbers not known to be settled */
    size_t way_count;
    uint32_t term; /* of the weights seen last */
    uint64_t version;
    bool seen;
} chaos_client;

static volatile sig_atomic_t stop;
static volatile sig_atomic_t draining; /* one signal ends the pushing, a second one this wait too */

static void
on_signal (int number)
{
    (void)number;
    stop = stop + 1;
}

static bool
interrupted (void)
{
    return stop > draining;
}

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014).  oracle.py has the same. */
static uint64_t
mix (uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C (0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t
key_of (uint64_t seed, uint32_t actor, uint32_t epoch, uint64_t sequence)
{
    return mix (mix (mix (seed) + ((uint64_t)actor << 32) + epoch) + sequence);
}

/* Both halves are the same, so under an element-wise rule those of the weights are as well. */
static void
fill (float *gradient, uint64_t half, uint64_t key, uint64_t odd)
{
    for (uint64_t i = 0; i < half; i++) {
        uint64_t bits = mix (key + (i + 1) * UINT64_C (0x9e3779b97f4a7c15)) >> 40;
        gradient[i] = (float)((int64_t)bits - (1 << 23)) / (float)(1 << 23);
    }
    if (odd != 0 && key % odd < 2)
        gradient[0] = key % odd == 0 ? NAN : INFINITY;
    memcpy (gradient + half, gradient, half * sizeof *gradient);
}

/* So that weighing by samples weighs. */
static uint32_t
samples_of (uint64_t key)
{
    return 1 + (uint32_t)((key >> 32) % 8);
}

static void
append (int fd, const char *text, size_t size)
{
    if (size > 0 && write (fd, text, size) != (ssize_t)size) {
        perror ("chaos_client: log");
        _exit (1);
    }
}

static bool
kept (const chaos_client *self, uint64_t sequence)
{
    const gq_window *window = &self->client->window;
    for (uint32_t i = 0; i < window->size; i++)
        if (window->slots[i].sequence == sequence)
            return true;
    return false;
}

/* Write down what is settled since the last look. */
static void
note_settled (chaos_client *self)
{
    char text[TEXT_MAX];
    size_t size = 0;
    size_t left = 0;
    for (size_t i = 0; i < self->way_count; i++) {
        uint64_t sequence = self->way[i];
        if (kept (self, sequence))
            self->way[left++] = sequence;
        else
            size += (size_t)snprintf (text + size, sizeof text - size,
                                      "%" PRIu32 " %" PRIu32 " %" PRIu64 "\n", self->client->actor,
                                      self->client->epoch, sequence);
    }
    self->way_count = left;
    append (self->ack_fd, text, size);
}

/* Look at the newest weights; false: they are not what may be seen. */
static bool
look (chaos_client *self)
{
    gq_weights weights;
    char text[64];
    if (gq_client_weights (self->client, &weights) != GQ_OK)
        return false;
    if (self->seen && weights.term == self->term && weights.version == self->version)
        return true;
    if (self->seen && (weights.term < self->term || weights.version < self->version)) {
        fprintf (stderr,
                 "chaos_client: weights fell from term %" PRIu32 " version %" PRIu64
                 " to term %" PRIu32 " version %" PRIu64 "\n",
                 self->term, self->version, weights.term, weights.version);
        return false;
    }
    if (gq_client_count (self->client).rolled_back > 0) {
        fprintf (stderr, "chaos_client: the optimizer has forgotten this actor\n");
        return false;
    }
    uint64_t half = weights.count / 2;
    if (memcmp (weights.data, weights.data + half, half * sizeof *weights.data) != 0) {
        fprintf (stderr, "chaos_client: torn weights at version %" PRIu64 "\n", weights.version);
        return false;
    }
    int size =
        snprintf (text, sizeof text, "%" PRIu32 " %" PRIu64 " %08" PRIx32 "\n", weights.term,
                  weights.version, gq_crc32c (weights.data, weights.count * sizeof *weights.data));
    append (self->see_fd, text, (size_t)size);
    self->seen = true;
    self->term = weights.term;
    self->version = weights.version;
    return true;
}

static gq_status
push (chaos_client *self)
{
    float *gradient = gq_client_reserve (self->client);
    uint64_t sequence = 0;
    if (gradient == NULL)
        return GQ_MEMORY;
    uint64_t key = key_of (self->seed, self->client->actor, self->client->epoch,
                           self->client->window.sequence + 1);
    fill (gradient, self->set[HALF], key, self->set[ODD]);
    gq_status status = gq_client_commit (self->client, samples_of (key), &sequence);
    note_settled (self);
    if (status == GQ_OK)
        self->way[self->way_count++] = sequence;
    return status;
}

static int
work (chaos_client *self)
{
    gq_status status = GQ_OK;
    const struct timespec pause = {.tv_sec = (time_t)(self->set[PAUSE_US] / 1000000),
                                   .tv_nsec = (long)(self->set[PAUSE_US] % 1000000) * 1000};
    for (uint64_t i = 0; i < self->set[COUNT] && !stop && status == GQ_OK; i++) {
        if (!look (self))
            return EXIT_BROKEN;
        status = push (self);
        nanosleep (&pause, NULL);
    }
    if (status == GQ_OK || status == GQ_CLOSED) {
        draining = 1;
        status = gq_client_wait (self->client, self->client->window.sequence);
        note_settled (self);
        if (!look (self))
            return EXIT_BROKEN;
        /* With --aggregate the rest of a step may never come; closing would wait for it too. */
        if (status == GQ_CLOSED)
            _exit (EXIT_UNSETTLED);
    }
    if (status != GQ_OK)
        fprintf (stderr, "chaos_client: %s: %s\n", gq_status_name (status),
                 gq_status_text (status));
    return status == GQ_OK ? 0 : status == GQ_FENCED ? EXIT_FENCED : 1;
}

static gq_status
open_client (chaos_client *self, const char *address, uint32_t actor)
{
    uint64_t half = self->set[HALF];
    const gq_tensor_shape tensors[] = {{.name = "a", .rank = 1, .shape = {half}},
                                       {.name = "b", .rank = 1, .shape = {half}}};
    float *initial = malloc (2 * half * sizeof *initial);
    gq_error error = {""};
    gq_client_config config = GQ_CLIENT_CONFIG;
    if (initial == NULL)
        return GQ_MEMORY;
    fill (initial, half, mix (self->seed), 0);
    config.address = address;
    config.actor = actor;
    config.window = (uint32_t)self->set[WINDOW];
    config.timeout_ms = -1;
    config.resend_ms = (int)self->set[RESEND_MS];
    config.tensors = tensors;
    config.tensor_count = 2;
    config.initial = initial;
    config.interrupted = interrupted;
    config.encoding = self->set[BF16] != 0 ? "bf16" : "f32";
    config.lane = self->set[INLINE] != 0 ? "inline" : "auto";
    gq_status status = gq_client_open (&self->client, &config, &error);
    free (initial);
    if (status != GQ_OK && status != GQ_CLOSED)
        fprintf (stderr, "chaos_client: %s: %s\n", gq_status_name (status), error.text);
    return status;
}

static int
open_log (const char *stem, const char *ending)
{
    char path[4096];
    snprintf (path, sizeof path, "%s.%s", stem, ending);
    int fd = open (path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        perror (path);
    return fd;
}

/* One key=value of the command line; false: unknown or no number. */
static bool
take_word (const char *word, uint64_t *set)
{
    for (size_t i = 0; i < KEY_COUNT; i++) {
        size_t length = strlen (keys[i].name);
        if (strncmp (word, keys[i].name, length) == 0 && word[length] == '=') {
            char *end = NULL;
            set[i] = strtoull (word + length + 1, &end, 10);
            return end != word + length + 1 && *end == '\0';
        }
    }
    return false;
}

int
main (int argc, char **argv)
{
    chaos_client self = {0};
    for (size_t i = 0; i < KEY_COUNT; i++)
        self.set[i] = keys[i].value;
    bool good = argc >= 5;
    for (int i = 5; good && i < argc; i++)
        good = take_word (argv[i], self.set);
    if (!good || self.set[HALF] == 0) {
        fprintf (stderr, "usage: chaos_client ADDRESS ACTOR SEED LOG [key=NUMBER]...\n");
        return 2;
    }
    signal (SIGTERM, on_signal);
    signal (SIGINT, on_signal);
    self.seed = strtoull (argv[3], NULL, 10);
    self.ack_fd = open_log (argv[4], "ack");
    self.see_fd = open_log (argv[4], "see");
    if (self.ack_fd < 0 || self.see_fd < 0)
        return 1;
    gq_status status = open_client (&self, argv[1], (uint32_t)strtoul (argv[2], NULL, 10));
    if (status != GQ_OK)
        return status == GQ_CLOSED ? 0 : 1;
    int code = work (&self);
    gq_client_close (&self.client);
    return code;
}
