/*
 * A simulator of a whole run in one thread: real window, queue, ledger, core, journal and recovery,
 * on a clock, a network and a disk that are not real.  One seed is one schedule of events.
 *
 * All of a gradient's path but sockets and files.  Must never read a real clock or any randomness
 * but the seed's: a failing seed has to fail again.
 */
#ifndef GQ_SIM_H
#define GQ_SIM_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>

#include "broker/queue.h"
#include "optimizer/core.h"
#include "optimizer/recover.h"
#include "optimizer/run.h"
#include "tests/memory_disk.h"
#include "window.h"

enum {
    SIM_COUNT_MAX = 4,     /* elements of the vector */
    SIM_ACTORS = 3,        /* ids */
    SIM_PROCESSES = 4,     /* of actors: two may claim one id */
    SIM_WINDOW_MAX = 8,    /* gradients that a process may have on the way */
    SIM_LETTERS_MAX = 128, /* messages on the way */
    SIM_LETTER_BYTES = GQ_FRAME_HEADER_BYTES + GQ_ACK_BYTES,
    SIM_ENTRIES_MAX = 4096,   /* records of one schedule's journal */
    SIM_SEQUENCES_MAX = 1024, /* gradients of one epoch */
    SIM_CHECKPOINTS_MAX = 4,
    SIM_QUEUE_MAX = 8
};
#define SIM_MS UINT64_C (1000000)

/* ---- what the seed decides before the first event; rates are "one in so many", 0: never ---- */
typedef struct sim_faults {
    uint32_t drop, duplicate, damage; /* letters */
    bool reorder;
    uint64_t delay_ns;
    uint64_t lost_sequence; /* gradients of this number are always dropped; 0: none */
    uint32_t actor_dies, broker_dies, optimizer_dies, disk_full; /* events */
    bool power; /* a dying optimizer may take its host along */
} sim_faults;

/* ---- network ---- */
typedef enum sim_place { SIM_BROKER, SIM_OPTIMIZER, SIM_HELLO, SIM_PROCESS } sim_place;
typedef struct sim_letter {
    sim_place to;
    uint32_t process; /* receiver, or sender of a hello */
    uint32_t size;
    uint64_t ready_ns;
    _Alignas(8) uint8_t bytes[SIM_LETTER_BYTES];
} sim_letter;

/* Hello and its answer; smaller than any frame, which tells them apart. */
typedef struct sim_hello {
    uint32_t actor;
    uint32_t epoch; /* 0: asking */
    uint8_t nonce[GQ_NONCE_BYTES];
} sim_hello;

typedef struct sim_broker {
    bool up;
    gq_queue *queue;
    zmq_msg_t hand; /* read, but the queue has no bytes left for it */
    bool holding;
    uint64_t inside[SIM_QUEUE_MAX]; /* what must be in the queue, oldest first */
    uint32_t count;
} sim_broker;

/* ---- a process that acts and pushes ---- */
typedef struct sim_process {
    bool running, ready; /* ready: it has been granted an epoch */
    sim_hello self;
    uint64_t hello_ns; /* when to say hello again */
    uint64_t heard_ns;
    uint64_t moved_ns; /* when something was last settled, or nothing was on the way */
    bool has_weights;
    uint32_t term;
    uint64_t version;
    gq_window window;
    uint8_t sent[SIM_WINDOW_MAX][SIM_LETTER_BYTES];
} sim_process;

/* ---- what the oracle knows: the journal as its bytes stand on the disk, and a naive model ---- */
typedef struct sim_life {
    gq_core_config config;
    float lr, momentum;
    bool nesterov;
} sim_life;

typedef struct sim_entry {
    uint8_t header[32];
    char segment[32];
    uint64_t start, end; /* in the segment, padding left out */
    uint32_t kind;
    uint32_t actor, epoch, samples;
    uint64_t sequence, version;
    gq_status reason;
    float values[SIM_COUNT_MAX];
    sim_life life;     /* of a TERM */
    bool acknowledged; /* somebody was told that it is settled */
} sim_entry;

typedef struct sim_known {
    uint32_t epoch;
    uint32_t count, settled; /* decisions in this epoch; the first `settled` of them are settled */
    uint32_t lsn[SIM_SEQUENCES_MAX];     /* of each */
    uint16_t decided[SIM_SEQUENCES_MAX]; /* [sequence]: 1 + its index in lsn[], 0: not yet */
    uint32_t pending;
    uint64_t refused, refused_sequence;
    gq_status refused_reason;
} sim_known;

typedef struct sim_state {
    float weights[SIM_COUNT_MAX], moment[SIM_COUNT_MAX], sum[SIM_COUNT_MAX];
    uint64_t version, applied;
    uint32_t held;
    double held_weight, staleness_sum;
    uint64_t staleness_count;
    sim_life life;
    sim_known actors[SIM_ACTORS];
} sim_state;

typedef struct sim_model {
    uint64_t lsn; /* entries[lsn - 1] is the last one */
    char segment[32];
    uint64_t at; /* where the next record of `segment` would begin; 0: no segment yet */
    sim_state state;
    sim_entry entries[SIM_ENTRIES_MAX];
} sim_model;

/* ---- the optimizer ---- */
typedef struct sim_checkpoint {
    uint64_t version, applied, lsn, steps, staleness_count;
    uint32_t chain, term, held;
    double held_weight, staleness_sum;
    float weights[SIM_COUNT_MAX], slot[SIM_COUNT_MAX], sum[SIM_COUNT_MAX];
    char *ledger; /* JSON, as in a real one */
    char *life;
} sim_checkpoint;

/* Where an optimizer is to die next. */
typedef enum sim_death {
    SIM_LIVES,
    SIM_DIES_IN_DISK, /* in one of the next calls of the disk, perhaps in the middle of it */
    SIM_DIES_AFTER_RECEIVE,
    SIM_DIES_BEFORE_APPLY,
    SIM_DIES_BEFORE_PUBLISH,
    SIM_DIES_IN_PUBLISH, /* after some of the messages */
    SIM_DIES_BEFORE_CHECKPOINT,
    SIM_DIES_AFTER_CHECKPOINT, /* before the journal behind it is deleted */
    SIM_DIES_RECOVERING,
    SIM_DEATHS
} sim_death;

typedef struct sim_optimizer {
    bool up;
    gq_core core;
    gq_run run;
    gq_recovery recovery;
    sim_life life;
    bool life_drawn;
    uint32_t term, next_epoch, reserved_epoch;       /* the identity file: always on the disk */
    sim_checkpoint checkpoints[SIM_CHECKPOINTS_MAX]; /* oldest first; always on the disk */
    uint32_t checkpoint_count;
    sim_letter hand;
    bool holding;
    uint64_t weights_ns, weights_version; /* when and what was last published in this life */
    uint32_t seen_term;                   /* the highest ever published */
    uint64_t seen_version;
    sim_death death;
    uint32_t death_after; /* so many messages, when in publish */
    jmp_buf grave;
} sim_optimizer;

/* ---- what really happened, over all schedules ---- */
/* Laid out by hand: clang-format puts each name further to the right. */
// clang-format off
#define SIM_TALLY(X) \
    X (schedules) X (events) X (pushed) X (resent) X (dropped) X (duplicated) \
    X (damaged) X (journaled) X (refused) X (duplicates) X (outdated) X (acknowledged) \
    X (steps) X (held) X (actor_deaths) X (fenced) X (broker_deaths) \
    X (optimizer_deaths) X (power_losses) X (torn_tails) X (records_lost) \
    X (acknowledged_lost) X (recoveries) X (replayed) X (swaps) X (disk_full) \
    X (blocked) X (checkpoints) X (checkpoints_damaged) X (segments_forgotten) \
    X (timed_out)
// clang-format on
typedef struct sim_tally {
#define SIM_TALLY_FIELD(name) uint64_t name;
    SIM_TALLY (SIM_TALLY_FIELD)
#undef SIM_TALLY_FIELD
    uint64_t deaths[SIM_DEATHS];
} sim_tally;

typedef struct sim {
    uint64_t seed, random;
    bool trace;
    uint64_t event;
    uint64_t now_ns;
    bool healing;
    uint64_t count; /* elements */
    uint64_t digest;
    uint8_t run[GQ_RUN_ID_BYTES];
    gq_fsync fsync;
    bool keep_journal;
    uint64_t segment_bytes;
    uint32_t window;
    bool swaps; /* lives may differ in their settings */
    sim_faults faults;
    bool weak; /* power was lost, and --fsync does not promise to survive that */
    char plugins[600];

    sim_letter letters[SIM_LETTERS_MAX];
    uint32_t letter_count;
    sim_broker broker;
    sim_process processes[SIM_PROCESSES];
    sim_optimizer optimizer;
    gq_memory_disk *disk;
    sim_model model;
    sim_tally tally;
} sim;

/* The one that runs: stand-ins for checkpoint files and crash points have no other way to it. */
extern sim *sim_now;

/* ---- main_sim.c ---- */
uint64_t sim_random (sim *self);
uint64_t sim_below (sim *self, uint64_t bound); /* 0 .. bound - 1 */
bool sim_chance (sim *self, uint32_t one_in);   /* 0: never */
void sim_trace (const sim *self, const char *format, ...) __attribute__ ((format (printf, 2, 3)));
/* An invariant is broken: say which, and how to see it again; ends the program. */
void sim_fail (const sim *self, const char *format, ...)
    __attribute__ ((format (printf, 2, 3), noreturn));
#define SIM_REQUIRE(self, condition, ...)   \
    do {                                    \
        if (!(condition))                   \
            sim_fail ((self), __VA_ARGS__); \
    } while (0)
/* What (actor, epoch, sequence) pushes, from the seed: f32[count], some with NaN; its samples. */
void sim_gradient (const sim *self, uint32_t actor, uint32_t epoch, uint64_t sequence,
                   float values[SIM_COUNT_MAX], uint32_t *samples);

/* ---- sim_net.c: network and broker ---- */
void sim_send (sim *self, sim_place to, uint32_t process, const void *bytes, size_t size);
/* One that has arrived there (for SIM_PROCESS: of that process); false: none. */
bool sim_arrived (sim *self, sim_place to, uint32_t process, sim_letter *letter);
/* A hop broke: each letter to this place is lost with one chance in two. */
void sim_lose (sim *self, sim_place to);
uint32_t sim_waiting (const sim *self, sim_place to, uint32_t process);
void sim_broker_start (sim *self);
void sim_broker_die (sim *self);
void sim_broker_turn (sim *self); /* takes one in, hands one on */

/* ---- sim_actors.c ---- */
void sim_process_start (sim *self, uint32_t process);
void sim_process_die (sim *self, uint32_t process);
void sim_process_push (sim *self, uint32_t process);
void sim_process_receive (sim *self, uint32_t process); /* one letter */
void sim_process_timers (sim *self, uint32_t process);

/* ---- sim_optimizer.c ---- */
void sim_optimizer_start (sim *self);
void sim_optimizer_turn (sim *self);
void sim_optimizer_die (sim *self);
void sim_optimizer_dies_here (sim *self, sim_death here);

/* ---- sim_checkpoint.c ---- */
void sim_checkpoints_clear (sim *self);

/* ---- sim_model.c ---- */
void sim_model_begin (sim *self);
/* Take in the records that stand on the disk since the last look, and judge each. */
void sim_model_scan (sim *self);
/* The optimizer died: `process` only, or the power.  Call around what that does to the disk. */
uint64_t sim_model_durable (const sim *self); /* every record up to here is safe from both */
void sim_model_after_death (sim *self, bool power, uint64_t durable_lsn);
/* The core is exactly what the journal makes of it. */
void sim_model_compare (sim *self);
/* An acknowledgement is about to leave. */
void sim_model_acknowledged (sim *self, uint32_t actor, uint32_t epoch, const gq_ack *ack);
bool sim_model_has (const sim *self, uint64_t lsn); /* does that record stand on the disk? */

#endif
