/*
 * Raw ZeroMQ between threads that stand for processes: what bench_hops.c measures with.  Nobody
 * else includes this.
 */
#ifndef GQ_BENCH_ZMQ_H
#define GQ_BENCH_ZMQ_H

#include <pthread.h>
#include <stdatomic.h>
#include <zmq.h>

#include "bench.h"
#include "stats.h"

/* Stations beside actors: on the way out a forwarder and the receiver, on the way back another. */
#define GQ_RAW_OTHERS   3
#define GQ_RAW_STATIONS (GQ_BENCH_ACTORS_MAX + GQ_RAW_OTHERS)

typedef struct gq_raw gq_raw;
typedef struct gq_station gq_station;

/* One thread with a context of its own: takes from its endpoint and gives to others. */
struct gq_station {
    gq_raw *shared;
    void (*run) (gq_station *at); /* until shared->stop */
    uint32_t number;              /* of an actor, from 0 */
    void *context;
    char endpoint[GQ_ENDPOINT_MAX];
    void *pull;  /* bound to the endpoint; NULL: takes nothing */
    void **push; /* [push_count], connected; owned */
    uint32_t push_count;
    gq_histogram took_ns; /* of an actor's round trips */
    pthread_t thread;
    bool running;
};

struct gq_raw {
    const gq_bench_point *point;
    char directory[32]; /* of ipc endpoints */
    uint64_t bytes;     /* of a message */
    int hwm, buffer_bytes;
    float *vector; /* f32[GQ_BENCH_PIECE], what messages are made of */
    void *turn;    /* of who turns messages round, borrowed; NULL: they go back as they came */
    atomic_bool stop, failed;
    /* The measurement: from start_ns (0: not begun) to end_ns (0: not over). */
    atomic_uint ready; /* stations that had a first message */
    _Atomic uint64_t start_ns, end_ns;
    _Atomic uint64_t counted; /* messages within it */
    uint32_t station_count;
    gq_station stations[GQ_RAW_STATIONS];
};

/* GQ_OK: gq_raw_free it.  GQ_IO, GQ_MEMORY. */
GQ_CHECK gq_status gq_raw_new (gq_raw **raw_p, uint64_t bytes, int hwm, int buffer_bytes,
                               const gq_bench_point *point, gq_error *error);

/* End the threads: what stations hold is the caller's to read. */
void gq_raw_stop (gq_raw *raw);

/* gq_raw_stop, close the sockets, remove the files. */
void gq_raw_free (gq_raw **raw_p);

/* A station that runs `run`; binds: it has an endpoint.  NULL: ZeroMQ gives no context or socket.
 * No station may run yet. */
gq_station *gq_raw_add (gq_raw *raw, void (*run) (gq_station *at), bool binds);

/* Connect to another station's endpoint, as push[push_count].  Neither may run yet. */
GQ_CHECK bool gq_raw_connect (gq_station *from, const gq_station *to);

/*
 * Start every station, wait until `ready` of them had a first message, warm up, and let the time
 * of the measurement pass.  *per_s: what was counted.  GQ_OK, GQ_IO, GQ_TIMEOUT, GQ_CLOSED.
 */
GQ_CHECK gq_status gq_raw_measure (gq_raw *raw, uint32_t ready, double *per_s, gq_error *error);

/* A message came at now_ns: does it belong to the measurement?  Then it is counted. */
bool gq_raw_count (gq_raw *raw, uint64_t now_ns);

/* A new message made from the vector, for or from actor `number`; true when sent. */
bool gq_raw_send (gq_station *at, uint32_t number);

/* Whose message is it? */
uint32_t gq_raw_number (zmq_msg_t *message);

#endif
