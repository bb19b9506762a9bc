/*
 * What the parts of the client share: src/client.c (the calls), client_service.c (data plane),
 * client_sockets.c, client_lane.c (lane shm), client_hello.c (control plane).
 */
#ifndef GQ_CLIENT_INTERNAL_H
#define GQ_CLIENT_INTERNAL_H

#include <pthread.h>
#include <zmq.h>

#include "bell.h"
#include "board.h"
#include "control.h"
#include "endpoint.h"
#include "gradq/gradq.h"
#include "gradq/protocol.h"
#include "lane.h"
#include "layout.h"
#include "window.h"

/* Waiting is cut into slices so that `interrupted` is asked often. */
#define GQ_SLICE_MS 100
/* The optimizer speaks at least once a second; past this it counts as away, and nothing that is on
 * the way is given up. */
#define GQ_HEARD_MS_MAX 2500

/* Where a client's four sockets connect to. */
typedef struct gq_client_endpoints {
    char control[GQ_ENDPOINT_MAX];
    char gradients[GQ_ENDPOINT_MAX];
    char weights[GQ_ENDPOINT_MAX];
    char acks[GQ_ENDPOINT_MAX];
} gq_client_endpoints;

/* One of the two ways that the optimizer is heard on. */
typedef struct gq_channel {
    uint64_t heard_ns;                     /* last frame that the optimizer itself sent */
    uint8_t header[GQ_FRAME_HEADER_BYTES]; /* of the last one */
} gq_channel;

typedef struct gq_metric {
    char name[32];
    double value;
} gq_metric;

struct gq_client {
    gq_client_config config; /* tensors, initial, address: valid during open only */
    gq_client_endpoints endpoints;
    void *context;
    void *control;   /* DEALER */
    void *gradients; /* PUSH */
    void *weights;   /* SUB */
    void *acks;      /* SUB, this actor's */

    gq_encoding encoding; /* of gradients on lane inline */

    /* how gradients travel, and what shared memory tells (client_lane.c) */
    gq_lane *lane;
    gq_lane *parked;        /* earlier ones, in which the caller may still build a vector */
    gq_lane *building;      /* the one in which he does; NULL: he has reserved none */
    gq_error lane_reason;   /* why the lane is inline */
    gq_lane_words *words;   /* of the lane file; NULL: the lane is inline */
    gq_board *board;        /* NULL: none yet */
    uint32_t board_term;    /* of it */
    gq_bell_name bell_name; /* of the optimizer that shows it */
    int rope;               /* to wake that, -1: none */
    uint32_t shown_term;    /* newest version that could be had, on any lane */
    uint64_t shown_version;
    uint64_t boardless_ns; /* since when the board cannot be opened, 0: it can */
    char board_path[PATH_MAX];
    unsigned bell, beat; /* of the lane file, as seen last */
    uint64_t sockets_ns; /* when the sockets were looked at last */

    /* While the caller computes, a thread of ours keeps the newest weights and drops the others.
     * `lock` is held by whoever uses `weights` or `arrived`. */
    pthread_mutex_t lock;
    pthread_cond_t stop;
    pthread_t drainer;
    bool draining;
    zmq_msg_t arrived; /* newest frame that was not looked at yet; empty: none */

    /* granted by hello */
    gq_layout layout;
    uint8_t run[GQ_RUN_ID_BYTES];
    char run_text[2 * GQ_RUN_ID_BYTES + 1];
    uint32_t actor;
    uint32_t epoch;
    uint64_t max_staleness;
    bool need_weights; /* the run waits for somebody's first weights */

    /* newest weights: `frame` owns the bytes; `data` points into it, into `aligned`, or into the
     * board */
    zmq_msg_t frame;
    const float *data;
    bool leased;    /* `data` is a block of the board */
    float *aligned; /* f32[count], when a frame came unaligned, or for a copy of a block */
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
    uint64_t refused; /* in this epoch */
    gq_status refused_reason;
    uint32_t higher_epoch; /* highest one that an ack for this actor named, 0: none */

    /* lives: an optimizer that lost this actor's past grants another epoch */
    gq_client_counts before; /* what the lives before this one came to */
    uint32_t known_term;     /* latest one whose optimizer is known to know this epoch */
    uint64_t unknown_ns;     /* when weights of a later term were first heard, 0: none */
    char challenge[17];      /* to be repeated in that hello; empty: none was asked for */
    char nonce[33];          /* of the hello that granted this epoch, or that is being asked */
    bool asking;             /* nothing is sent until that hello is answered */
    bool forgotten;          /* it is certain that this epoch is over */
    uint64_t asked_ns;

    /* liveness; monotonic nanoseconds */
    uint64_t heard_ns;         /* last frame from the optimizer */
    gq_channel weights_heard;  /* weights */
    gq_channel acks_heard;     /* acknowledgements */
    uint64_t progress_ns;      /* last time that gradients were known to get through */
    bool blocked;              /* a gradient waits for room in the socket */
    uint64_t reopened_ns;      /* when the sockets were opened last */
    uint32_t reopened_in_vain; /* how often in a row */
    uint64_t reported_ns;
    uint64_t foreign_ns; /* last weights of another run at this address, 0: none */

    gq_metric metrics[GQ_METRICS_MAX];
    size_t metric_count;
};

/* ---- client_sockets.c ---- */

/* Open the control socket, or the others, anew: a connection that libzmq has given up, after a
 * protocol error, is never made again.  Failing leaves the old ones.  The caller holds the lock. */
GQ_CHECK gq_status gq_client_open_control (gq_client *client, gq_error *error);
GQ_CHECK gq_status gq_client_open_data (gq_client *client, gq_error *error);

/* Take all weights that are here and keep the newest in `arrived`.  The caller holds the lock. */
void gq_client_drain (gq_client *client);

/* Have weights sent to us, and drain them. */
void gq_client_subscribe (gq_client *client);

/* Begin and end the thread that drains while the caller computes. */
GQ_CHECK gq_status gq_client_drainer_start (gq_client *client, gq_error *error);
void gq_client_drainer_stop (gq_client *client);

/* ---- client_lane.c ---- */

/*
 * Take the lane that the configuration asks for and *offer (of hello's answer, may be NULL) allows.
 * GQ_OK; GQ_REFUSED: lane shm was insisted upon; GQ_MEMORY.
 */
GQ_CHECK gq_status gq_client_open_lane (gq_client *client, const json_t *offer, gq_error *error);

/* Go on by lane inline, the gradients on the way included, for this reason. */
void gq_client_leave_shm (gq_client *client, const char *reason);

/* Copy what the caller has built in a lane that was left into the one in use, to be sent.  GQ_OK,
 * GQ_MEMORY. */
GQ_CHECK gq_status gq_client_bring_along (gq_client *client);

/* Close lanes that were left.  Nothing may be under construction in them any more. */
void gq_client_close_parked (gq_client *client);

/* Take the newest version from the board, if it is newer than what we have.  The lane is shm. */
void gq_client_take_weights (gq_client *client);
/* Copy it out of the board, whose block is free then: before the board or the lane changes. */
void gq_client_keep_weights (gq_client *client);

/* A gradient lies in its slot, and its descriptor is on its way: the optimizer need not wait for
 * that, if it sleeps. */
void gq_client_wake_optimizer (gq_client *client);

/* What the lane file and the board tell; false: nothing new.  No system call.  The lane is shm. */
bool gq_client_lane_news (gq_client *client);

/* ---- client_service.c ---- */

/* An acknowledgement of this actor's epoch, from an optimizer of `term` that was at `version`. */
void gq_client_take_ack (gq_client *client, uint32_t term, uint64_t version, const gq_ack *ack);

/* Take in what has arrived, waiting up to wait_ms for something, or `for_room` in the socket for
 * gradients; send again what is due. */
void gq_client_service (gq_client *client, int wait_ms, bool for_room);

/* Why this client can do no more; GQ_OK when it can. */
gq_status gq_client_ended (const gq_client *client);

/* ---- client_hello.c ---- */

/*
 * Hello until granted or `deadline_ns`.  On GQ_OK layout, run, actor, epoch and the rest are set
 * and the data sockets are connected.
 */
GQ_CHECK gq_status gq_client_hello (gq_client *client, uint64_t deadline_ns, gq_error *error);

/*
 * The optimizer does not know this epoch any more, or not all that it had acknowledged: ask for a
 * new one.  `forgotten`: it is certain; otherwise the answer tells.  Until it is here the client
 * is `asking`, and gq_client_ask_again repeats the question when it is time.
 */
void gq_client_ask (gq_client *client, bool forgotten);
void gq_client_ask_again (gq_client *client, uint64_t now_ns);

/* Read what the broker answers. */
void gq_client_read_control (gq_client *client);

/* One report or bye on the control socket, dropped when it cannot go out. */
void gq_client_tell (gq_client *client, const char *op);

/* ---- client.c ---- */

bool gq_client_interrupted (const gq_client *client);

/* (term, version) is later than another. */
bool gq_client_newer (uint32_t term, uint64_t version, uint32_t than_term, uint64_t than_version);

/* Begin the life that was granted: what was on the way is dropped, numbers start anew. */
void gq_client_begin_life (gq_client *client, uint32_t epoch);

#endif
