/*
 * What gradq-bench measures: the limits of this machine, and the whole loop beside them.
 *
 * Off a gradient's path: it sends gradients of its own through real processes.  Must never touch a
 * run that it did not start, and never leave a process or a file behind.
 */
#ifndef GQ_BENCH_H
#define GQ_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "gradq/limits.h"
#include "gradq/status.h"

/* Actors, each a thread with a client: more tells nothing about one machine. */
#define GQ_BENCH_ACTORS_MAX 256
/* Longest time to get processes, connections or a first message going. */
#define GQ_BENCH_START_MS 30000
/* Messages or gradients that a rate is made of, at least: a measurement waits for them beyond its
 * time, but no longer than GQ_BENCH_START_MS, and then takes what came. */
#define GQ_BENCH_COUNT_MIN 16

/* One point to measure. */
typedef struct gq_bench_point {
    uint64_t params; /* elements of the vector */
    uint32_t actors; /* 1 .. GQ_BENCH_ACTORS_MAX */
    uint32_t window; /* gradients that each may have on the way */
    const char *lane;
    const char *encoding; /* of gradients on lane inline */
    const char *journal;  /* as --journal of the optimizer */
    uint32_t threads;     /* as --threads of the optimizer; the bare rule has one */
    bool tcp;             /* sockets are bound to tcp on 127.0.0.1, else to ipc */
    double seconds;       /* of each measurement, after its warm-up */
    /* Of the update rule, as in gq_rule_load. */
    const char *optimizer;
    const char *plugins;
    const char *cpu;
    const char *const *sets;
    size_t set_count;
    const char *log_level;      /* of broker and optimizer */
    bool (*interrupted) (void); /* true: come back with GQ_CLOSED */
} gq_bench_point;

/*
 * Bytes/s of a[i] = b[i] + s c[i] over arrays of doubles, one thread, the best of several passes,
 * counted as STREAM does: 24 bytes an element, write-allocate not counted (McCalpin, 1995).
 * array_bytes: of each array; 0: well beyond the last cache.  GQ_OK, GQ_MEMORY, GQ_CLOSED.
 */
GQ_CHECK gq_status gq_bench_triad (double *bytes_per_s, uint64_t array_bytes,
                                   const gq_bench_point *point, gq_error *error);

typedef struct gq_bench_kernel {
    double per_s;       /* calls of gq_rule_step, one thread: the median over slices of the time */
    double best_per_s;  /* in the best slice */
    double bytes_per_s; /* at the median; read: weights, gradient, slots; written: weights, slots */
    char cpu[16];       /* instruction set in use */
} gq_bench_kernel;

/* The bare update rule on params elements, from one buffer of weights into another as in the
 * optimizer; warm at sizes that fit a cache.  As gq_rule_load, GQ_MEMORY, GQ_CLOSED. */
GQ_CHECK gq_status gq_bench_kernel_rate (gq_bench_kernel *kernel, const gq_bench_point *point,
                                         gq_error *error);

/* How messages wait at a raw ZeroMQ socket. */
typedef enum gq_bench_buffers {
    GQ_BENCH_ROOMY, /* ZeroMQ's default of 1,000 messages, less when that is too much memory */
    GQ_BENCH_TIGHT  /* what gradq's gradient sockets have: 1 message, 64 KiB in the kernel */
} gq_bench_buffers;

/*
 * Messages/s of `bytes` from point->actors senders to one receiver: PUSH to PULL (hops 1), or
 * through a thread that forwards (hops 2).  Every thread has a context of its own, as processes
 * have; senders make each message anew from a vector, as actors do.  GQ_OK, GQ_IO, GQ_TIMEOUT,
 * GQ_MEMORY, GQ_CLOSED.
 */
GQ_CHECK gq_status gq_bench_hops (double *per_s, uint64_t bytes, unsigned hops,
                                  gq_bench_buffers buffers, const gq_bench_point *point,
                                  gq_error *error);

typedef struct gq_bench_echo {
    double per_s;  /* round trips, all actors together */
    double p50_us; /* of one round trip */
    double p99_us;
} gq_bench_echo;

/*
 * Messages of `bytes` that go two hops out and come two hops back to the actor that sent them, as
 * gradient and weights do, with point->window of each of point->actors on the way.  Nothing looks
 * into them.  Statuses as gq_bench_hops.
 */
GQ_CHECK gq_status gq_bench_echo_rate (gq_bench_echo *echo, uint64_t bytes,
                                       const gq_bench_point *point, gq_error *error);

/*
 * The same with messages as large as the point's frames, where the one that turns them round makes
 * a step of the bare rule of each, and the weights behind it go back: what a loop without checks,
 * journal and numbers could do at most.  Statuses as gq_bench_hops and gq_rule_load.
 */
GQ_CHECK gq_status gq_bench_rule_round_rate (gq_bench_echo *echo, const gq_bench_point *point,
                                             gq_error *error);

/* A broker and an optimizer of our own, in a directory of their own. */
typedef struct gq_bench_service {
    char directory[64];
    char address[96];
    pid_t broker, optimizer; /* 0: not running */
} gq_bench_service;

/* Are the programs beside this one?  GQ_OK, GQ_NOTFOUND. */
GQ_CHECK gq_status gq_bench_service_find (gq_error *error);

/*
 * Start both.  No ZeroMQ context may exist: they are forked.  They die with the calling thread.
 * GQ_OK: stop it.  GQ_IO, GQ_MEMORY: nothing is left.
 */
GQ_CHECK gq_status gq_bench_service_start (gq_bench_service *service, const gq_bench_point *point,
                                           gq_error *error);

/* GQ_OK: both run.  GQ_CLOSED: one ended, and *error has what it said last. */
GQ_CHECK gq_status gq_bench_service_alive (gq_bench_service *service, gq_error *error);

/* Resident memory of a process in bytes; 0: it cannot be read. */
uint64_t gq_bench_resident (pid_t pid);

/* End both and remove the directory. */
void gq_bench_service_stop (gq_bench_service *service);

typedef struct gq_bench_loop {
    uint64_t gradients;    /* that came back within the time */
    double seconds;        /* the time: what was asked for, longer when too few came back */
    double per_s;          /* of them, all actors together */
    double p50_us, p99_us; /* pushed until acknowledged and the weights of it are here */
    double max_us;
    double versions_per_s;                  /* steps of the optimizer */
    double seen_per_s;                      /* versions that one actor saw */
    double slowest_share;                   /* the slowest actor's rate / the mean of all */
    uint64_t broker_bytes, optimizer_bytes; /* resident when the time was over */
    char lane[16];                          /* that was in use */
} gq_bench_loop;

/*
 * The whole loop: broker and optimizer as processes, actors as threads that take the newest
 * weights, read them, copy a gradient in, commit it, and with `window` of them on the way wait for
 * the oldest.
 * GQ_OK.  GQ_INVALID: a client refuses or is refused what the point asks for, its lane say.
 * GQ_TIMEOUT: nothing came back in time.  GQ_REFUSED: a gradient was refused, so the rate would be
 * none.  GQ_CLOSED, GQ_IO, GQ_MEMORY, and as gq_client_open.
 */
GQ_CHECK gq_status gq_bench_loop_rate (gq_bench_loop *figures, const gq_bench_point *point,
                                       gq_error *error);

/* Is there memory for the point?  GQ_OK; GQ_INVALID with both numbers. */
GQ_CHECK gq_status gq_bench_memory (const gq_bench_point *point, gq_error *error);

/* Elements of what a gradient is made of, over and over: 16 KiB, which stay in the first-level
 * cache, so that making one writes it and reads nothing else. */
#define GQ_BENCH_PIECE 4096

/* Write piece[GQ_BENCH_PIECE] to to[bytes], over and over. */
void gq_bench_fill (void *to, uint64_t bytes, const float *piece);

/* A gradient, f32[count], 64-byte aligned: finite, of both signs, no denormals; yours to free.
 * NULL: memory. */
float *gq_bench_vector (uint64_t count);

/* Warm-up before a measurement of that many seconds, in ns. */
uint64_t gq_bench_warm_ns (double seconds);

/* The figures of the limits at one point. */
typedef struct gq_bench_limits {
    gq_bench_kernel kernel;
    double triad_bytes_per_s;       /* beyond the last cache */
    double triad_cache_bytes_per_s; /* arrays as large as the vectors */
    gq_bench_echo small;            /* a small message, one on the way */
    gq_bench_echo echo;             /* small messages, as many on the way as in the loop */
    gq_bench_echo round;            /* messages as large as f32 gradients, as many on the way */
    gq_bench_echo rule_round;       /* the same, with a step of the rule where they turn */
    double one_hop_per_s, two_hops_per_s, tight_hops_per_s; /* one way; --json only */
} gq_bench_limits;

typedef struct gq_bench_machine {
    char cpu[128];
    long cores;
    double load; /* of the last minute, before anything was measured */
} gq_bench_machine;

void gq_bench_machine_read (gq_bench_machine *machine);

/* Lines on top of the table; `limits` as far as they are the machine's alone. */
void gq_bench_print_head (const gq_bench_machine *machine, const gq_bench_limits *limits, int argc,
                          char **argv);

/* The names of the columns. */
void gq_bench_print_names (void);

void gq_bench_print_row (const gq_bench_point *point, const gq_bench_limits *limits,
                         const gq_bench_loop *loop, const gq_bench_loop *unjournaled);

/* One JSON object and a newline.  GQ_OK, GQ_MEMORY. */
GQ_CHECK gq_status gq_bench_print_json (const gq_bench_machine *machine,
                                        const gq_bench_point *point, const gq_bench_limits *limits,
                                        const gq_bench_loop *loop, const gq_bench_loop *unjournaled,
                                        gq_error *error);

/* Instead of a row: the point cannot be measured, and why.  GQ_OK, GQ_MEMORY. */
GQ_CHECK gq_status gq_bench_print_missing (const gq_bench_point *point, const char *reason,
                                           bool json, gq_error *error);

#endif
