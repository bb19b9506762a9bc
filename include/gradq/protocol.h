/*
 * The bytes on the wire: one fixed header, then the payload, in a single ZeroMQ part.
 *
 * docs/PROTOCOL.md is the same in prose, exact enough to write a peer from.  All integers are
 * little-endian.  The first 8 bytes select a kind, the first 12 a kind for one actor: they are
 * ZeroMQ subscription prefixes.
 */
#ifndef GRADQ_PROTOCOL_H
#define GRADQ_PROTOCOL_H

#include <stdbool.h>
#include <stdint.h>

#include "gradq/limits.h"
#include "gradq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GQ_PROTOCOL_VERSION   1
#define GQ_FRAME_MAGIC        0x31515247u /* "GRQ1" */
#define GQ_FRAME_HEADER_BYTES 128
#define GQ_RUN_ID_BYTES       16

typedef enum gq_frame_kind {
    GQ_KIND_GRADIENT = 1, /* actor -> optimizer: f32[count], inline also bf16[count] */
    GQ_KIND_INIT = 2,     /* actor -> optimizer: proposed first weights, f32[count] */
    GQ_KIND_WEIGHTS = 3,  /* optimizer -> actors: one whole version, f32[count] */
    GQ_KIND_ACK = 4       /* optimizer -> one actor: gq_ack */
} gq_frame_kind;

typedef enum gq_encoding {
    GQ_ENCODING_RAW = 0, /* the payload is no vector (acknowledgements) */
    GQ_ENCODING_F32 = 1,
    GQ_ENCODING_BF16 = 2 /* gradients on lane inline only: the upper halves of float32 */
} gq_encoding;

typedef enum gq_lane_kind {
    GQ_LANE_INLINE = 0, /* the payload follows the header */
    GQ_LANE_SHM = 1     /* the payload lies in a slot of the actor's lane file: the header is all */
} gq_lane_kind;

/* A header in host form; offsets on the wire stand in src/frame.c and docs/PROTOCOL.md. */
typedef struct gq_frame {
    uint16_t kind;     /* gq_frame_kind */
    uint16_t encoding; /* gq_encoding */
    uint16_t lane;     /* gq_lane_kind */
    uint32_t actor;    /* who sent the gradient, or whom an ack is for; 0 in weights */
    uint32_t epoch;    /* granted at hello: one life of that actor */
    uint32_t term;     /* one life of the optimizer; a gradient names the term of its weights */
    uint64_t digest;   /* of the layout */
    uint8_t run[GQ_RUN_ID_BYTES];
    uint64_t sequence;      /* gradients: 1, 2, 3, ... within (actor, epoch) */
    uint64_t version;       /* weights: this version; gradients: the version they come from */
    uint64_t count;         /* elements in the payload, 0 for acks */
    uint32_t slot;          /* lane shm: where the payload lies; 0 otherwise */
    bool finite;            /* lane shm: its actor has looked, and every element is */
    uint32_t samples;       /* environment steps or examples behind the gradient, >= 1 */
    uint64_t sent_ns;       /* sender's wall clock, for people only; nothing is decided by it */
    uint64_t applied;       /* weights, acks: gradients applied up to this version */
    uint64_t payload_bytes; /* what follows the header, or lies in the slot */
} gq_frame;

/* Payload of an acknowledgement, 40 bytes. */
#define GQ_ACK_BYTES 40
typedef struct gq_ack {
    uint64_t cumulative;       /* every sequence number up to here is settled */
    uint64_t beyond;           /* bit i: cumulative + 1 + i is settled too */
    uint64_t refused;          /* how many of the settled ones were refused in this epoch */
    uint64_t refused_sequence; /* the last refused one, 0 for none */
    uint32_t refused_reason;   /* gq_status of that one */
    uint32_t held; /* every number up to cumulative + held has come; some wait for their step */
} gq_ack;

/* Between broker and optimizer alone: a mark among the gradients, shorter than any frame, and what
 * the optimizer answers: the newest mark that reached it, the gradients that came out since, and
 * those taken before they came out, a u64 each. */
#define GQ_MARK_BYTES  16
#define GQ_TAKEN_BYTES (GQ_MARK_BYTES + 16)

#ifdef __cplusplus
}
#endif
#endif
