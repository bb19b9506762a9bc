/*
 * What the suites of the live state share: lives of an optimizer, each a process of its own that
 * ends as kill -9 ends it.  It plays the actors as well; their lane files, like theirs, outlive it.
 */
#ifndef GQ_LIVE_TESTING_H
#define GQ_LIVE_TESTING_H

#include "run_testing.h"

#include <signal.h>
#include <sys/wait.h>

#include "lane_file.h"

/* What a suite may say before it includes this. */
#ifndef LIVE_BLOCKS
#define LIVE_BLOCKS 4
#endif

enum { BLOCKS = LIVE_BLOCKS, COUNT = (BLOCKS - 1) * GQ_SLIDE + 77 };
enum { EVENTS = 9, PAIR = 2, SLOTS = 3, INLINE_EACH = 4 };

/* What a life is told, and what it tells. */
typedef struct order {
    const char *const *words;
    const char *crash; /* NULL: lives on */
    unsigned until;    /* event before which it stops */
    bool checkpoint;   /* writes one before it stops */
    bool cleans_up;    /* and then removes what nobody needs, as a clean end does */
    bool only_opens;   /* stops when its run is open: nothing of it is in a checkpoint yet */
    bool shares_not;   /* no board, as with --lane inline: all gradients are whole */
    bool by_ticket;    /* whole ones go by way of the broker's memory */
} order;

typedef struct report {
    uint64_t digest, version;
    gq_status status; /* of opening the run, and what was said then */
    char error[512];
} report;

/* In a life, where Criterion must not be asked: it would wait for ever. */
#define MUST(condition)                                                      \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf (stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _exit (3);                                                       \
        }                                                                    \
    } while (0)

static inline float
value_of (unsigned event, size_t index)
{
    uint64_t seed = event * 1000003u + index;
    return ldexpf ((float)(int32_t)support_random (&seed), -31 - (int)(index % 13));
}

#define CHECKPOINT_EVENT 3   /* behind which a checkpoint is written */
#define FIRST            999 /* the event that gives the first weights */

/* The actor's file of its only life. */
static inline void
open_lane (gq_shm *file, uint32_t actor)
{
    char path[PATH_MAX];
    gq_error error = {""};
    gq_lane_identity identity = {.actor = actor, .epoch = EPOCH, .count = COUNT};
    memcpy (identity.run, core.run, GQ_RUN_ID_BYTES);
    MUST (gq_lane_file_path (path, run.lane_directory, actor, EPOCH));
    MUST (gq_lane_file_open (file, path, &identity, &error) == GQ_OK);
}

static inline bool
is_whole (unsigned event)
{
    return event % INLINE_EACH == INLINE_EACH - 1;
}

static inline uint32_t
actor_of (unsigned event)
{
    return is_whole (event) ? PAIR : (event - event / INLINE_EACH) % PAIR;
}

static inline uint64_t
sequence_of (unsigned event)
{
    return (is_whole (event) ? event / INLINE_EACH : (event - event / INLINE_EACH) / PAIR) + 1;
}

static bool by_ticket; /* this life's order */

static inline gq_status
open_hop (gq_hop **hop, const char *directory_of_lanes, const uint8_t *of_run, uint32_t term,
          uint64_t layout)
{
    char path[PATH_MAX];
    char board[PATH_MAX];
    gq_hop_identity identity = {.term = term, .digest = layout, .count = COUNT};
    memcpy (identity.run, of_run, GQ_RUN_ID_BYTES);
    snprintf (path, sizeof path, "%.4000s/" GQ_HOP_NAME, directory_of_lanes);
    snprintf (board, sizeof board, "%.4000s/board", directory_of_lanes);
    return gq_hop_open (hop, path, board, &identity, NULL);
}

/* As many frames as there is room for, and none of them sense. */
static inline unsigned
put_nonsense (gq_hop *hop)
{
    static uint8_t bytes[GQ_FRAME_HEADER_BYTES + COUNT * sizeof (float)];
    gq_hop_ticket ticket;
    unsigned count = 0;
    memset (bytes, 0xff, sizeof bytes);
    while (gq_hop_put (hop, bytes, sizeof bytes, &ticket))
        count++;
    return count;
}

/* A frame by way of a broker's memory; the broker is another one each time. */
static inline gq_outcome
take_by_hop (const gq_frame *frame, const void *payload)
{
    uint8_t message[GQ_HOP_MESSAGE_BYTES];
    gq_frame read;
    gq_hop *hop;
    gq_hop_ticket ticket;
    gq_status reason;
    size_t size;
    uint8_t *bytes = support_message (frame, payload, &size);
    MUST (open_hop (&hop, run.lane_directory, core.run, core.term, core.layout.digest) == GQ_OK);
    MUST (gq_hop_put (hop, bytes, size, &ticket));
    memcpy (message, bytes, GQ_FRAME_HEADER_BYTES);
    gq_hop_write (&ticket, message);
    free (bytes);
    const gq_outcome outcome = gq_core_take (&core, message, sizeof message, &read, &reason);
    /* Nobody may look there again. */
    MUST (put_nonsense (hop) == GQ_HOP_SLOTS);
    gq_hop_close (&hop);
    return outcome;
}

/* A frame that comes whole; each second one of them in bf16. */
static inline gq_outcome
play_whole (const gq_frame *frame, const float *values, bool half)
{
    static uint16_t halves[COUNT];
    const gq_frame other = half ? support_bf16 (*frame) : *frame;
    const void *payload = half ? (const void *)halves : values;
    gq_status reason;
    gq_bf16_encode (values, halves, COUNT);
    if (by_ticket && core.lanes != NULL)
        return take_by_hop (&other, payload);
    return take_frame (&other, payload, &reason);
}

/* Event `event`: a gradient of one of a PAIR on lane shm, or each INLINE_EACH-th a whole one of an
 * actor that has no such lane. */
static inline gq_outcome
play (unsigned event)
{
    static float values[COUNT];
    gq_shm file;
    gq_frame read;
    gq_status reason;
    size_t size = GQ_FRAME_HEADER_BYTES;
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, core.layout.digest, COUNT);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    frame.actor = actor_of (event);
    frame.epoch = EPOCH;
    frame.sequence = sequence_of (event);
    frame.samples = 1 + event % 3;
    frame.version = core.version > event % 3 ? core.version - event % 3 : 0;
    for (size_t i = 0; i < COUNT; i++)
        values[i] = value_of (event, i);
    if (core.lanes == NULL || is_whole (event))
        return play_whole (&frame, values, is_whole (event) && event / INLINE_EACH % 2 == 1);
    frame.lane = GQ_LANE_SHM;
    frame.slot = (uint32_t)(frame.sequence % SLOTS);
    open_lane (&file, frame.actor);
    float *slot = gq_lane_file_slot (&file, COUNT, frame.slot);
    memcpy (slot, values, sizeof values);
    atomic_store (&gq_lane_file_words (&file)->holds[frame.slot], frame.sequence);
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    gq_frame_encode (&frame, NULL, header);
    gq_outcome outcome = gq_core_take (&core, header, size, &read, &reason);
    /* Nobody may look there again. */
    atomic_store (&gq_lane_file_words (&file)->holds[frame.slot], 0);
    memset (slot, 0xff, sizeof values);
    gq_shm_close (&file);
    return outcome;
}

static inline void
begin_first (void)
{
    const gq_tensor_shape shape = {.name = "w", .rank = 1, .shape = {COUNT}};
    static float weights[COUNT];
    gq_layout layout;
    gq_status reason;
    MUST (gq_layout_init (&layout, &shape, 1, NULL) == GQ_OK);
    MUST (gq_core_set_layout (&core, &layout) == GQ_OK);
    for (size_t i = 0; i < COUNT; i++)
        weights[i] = value_of (FIRST, i);
    gq_frame frame = support_frame (GQ_KIND_INIT, core.layout.digest, COUNT);
    memcpy (frame.run, core.run, GQ_RUN_ID_BYTES);
    core.lane_directory = run.lane_directory;
    gq_core_share (&core);
    MUST (core.lanes != NULL);
    grant (PAIR, EPOCH);
    for (uint32_t actor = 0; actor < PAIR; actor++) {
        gq_error error = {""};
        grant (actor, EPOCH);
        MUST (gq_lanes_grant (core.lanes, actor, EPOCH, SLOTS - 1, &error) != NULL);
    }
    MUST (take_frame (&frame, weights, &reason) == GQ_OUTCOME_STARTED);
    write_checkpoint ();
}

/* A life, from whatever the one before it left. */
static inline void
live (const order *given, report *told)
{
    gq_error error = {""};
    if (given->crash != NULL)
        setenv ("GRADQ_TEST_CRASH", given->crash, 1);
    by_ticket = given->by_ticket;
    told->status = try_open (given->words, &error);
    snprintf (told->error, sizeof told->error, "%.500s", error.text);
    if (told->status != GQ_OK)
        return;
    told->digest = digest_of (&core);
    if (given->only_opens)
        return;
    rule = core.rule;
    if (!core.has_weights) {
        begin_first ();
    } else {
        if (run.checkpoint_version != core.version)
            write_checkpoint ();
        core.lane_directory = given->shares_not ? NULL : run.lane_directory;
        gq_core_share (&core);
    }
    unsigned event = 0;
    for (uint32_t actor = 0; actor <= PAIR; actor++)
        event += (unsigned)core.ledger.actors[actor].received.cumulative;
    for (; event < given->until; event++) {
        gq_outcome outcome = play (event);
        MUST (outcome == GQ_OUTCOME_STEPPED || outcome == GQ_OUTCOME_HELD);
        if (event == CHECKPOINT_EVENT)
            write_checkpoint ();
    }
    told->digest = digest_of (&core);
    told->version = core.version;
    if (given->checkpoint)
        write_checkpoint ();
    if (given->cleans_up)
        die ();
}

/* Run a life in a process of its own.  true: it came to its end; false: it was killed. */
static inline bool
run_life (const order *given, report *told)
{
    int ends[2];
    int status;
    fflush (NULL);
    cr_assert_eq (pipe (ends), 0);
    pid_t child = fork ();
    cr_assert (child >= 0);
    if (child == 0) {
        report mine = {0};
        signal (SIGABRT, SIG_DFL);
        live (given, &mine);
        (void)!write (ends[1], &mine, sizeof mine);
        _exit (0);
    }
    close (ends[1]);
    ssize_t size = read (ends[0], told, sizeof *told);
    close (ends[0]);
    cr_assert_eq (waitpid (child, &status, 0), child);
    if (WIFSIGNALED (status) && WTERMSIG (status) == SIGKILL)
        return false;
    cr_assert (WIFEXITED (status) && WEXITSTATUS (status) == 0, "a life failed (%s): status %x",
               given->crash != NULL ? given->crash : "undisturbed", (unsigned)status);
    cr_assert_eq (size, (ssize_t)sizeof *told);
    return true;
}

/* One that begins and comes to its end. */
static inline report
complete (const order *given)
{
    report told;
    cr_assert (run_life (given, &told));
    cr_assert_eq (told.status, GQ_OK, "%s", told.error);
    return told;
}

static inline void
remove_all (void)
{
    char path[PATH_MAX];
    path_below (path, "lane");
    if (access (path, F_OK) == 0)
        support_remove (path);
    directory_end ();
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define ADAM       WORDS ("--optimizer", "adam", "--set", "lr=0.01")

#endif
