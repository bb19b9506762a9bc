/*
 * What the two halves of the client share: src/client.c (data plane) and src/client_hello.c.
 */
#ifndef GQ_CLIENT_INTERNAL_H
#define GQ_CLIENT_INTERNAL_H

#include <zmq.h>

#include "gradq/gradq.h"
#include "gradq/protocol.h"
#include "lane.h"
#include "layout.h"
#include "window.h"

/* Waiting is cut into slices so that `interrupted` is asked often. */
#define GQ_SLICE_MS 100

typedef struct gq_metric {
    char name[32];
    double value;
} gq_metric;

struct gq_client {
    gq_client_config config; /* tensors, initial, address: valid during open only */
    void *context;
    void *control;   /* DEALER */
    void *gradients; /* PUSH */
    void *weights;   /* SUB, newest only */
    void *acks;      /* SUB, this actor's */
    gq_lane *lane;

    /* granted by hello */
    gq_layout layout;
    uint8_t run[GQ_RUN_ID_BYTES];
    char run_text[2 * GQ_RUN_ID_BYTES + 1];
    uint32_t actor;
    uint32_t epoch;
    uint64_t max_staleness;
    bool need_weights; /* the run waits for somebody's first weights */

    /* newest weights: `frame` owns the bytes, `data` points into it or into `aligned` */
    zmq_msg_t frame;
    const float *data;
    float *aligned; /* f32[count], only when a frame came unaligned */
    uint64_t version;
    uint32_t term;
    bool has_weights;
    uint32_t given_term;    /* of the weights that the caller took last: */
    uint64_t given_version; /* what the next gradient was computed from */

    /* gradients on the way: their numbers and times, and their bytes to send again */
    gq_window window;
    zmq_msg_t sent[GQ_WINDOW_MAX]; /* [slot] of the window */
    uint64_t ack_version;          /* weights that the last ack came with */
    uint32_t ack_term;
    uint64_t refused;
    gq_status refused_reason;
    bool fenced; /* another process has taken this actor's id over */

    /* liveness; monotonic nanoseconds */
    uint64_t heard_ns; /* last frame from the optimizer */
    uint64_t reported_ns;
    uint64_t foreign_ns; /* last weights of another run at this address, 0: none */

    gq_metric metrics[GQ_METRICS_MAX];
    size_t metric_count;
};

/*
 * Hello until granted or `deadline_ns`.  On GQ_OK layout, run, actor, epoch and the rest are set
 * and the data sockets are connected.
 */
GQ_CHECK gq_status gq_client_hello (gq_client *client, uint64_t deadline_ns, gq_error *error);

/* One report or bye on the control socket, dropped when it cannot go out. */
void gq_client_tell (gq_client *client, const char *op);

bool gq_client_interrupted (const gq_client *client);

#endif
