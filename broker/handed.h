/*
 * What was handed on and is not taken yet.  Between steps 3 and 4 of a gradient's path: hundreds of
 * small frames lie in kernel buffers and ZeroMQ's pipes on their way to the optimizer, and wait
 * there as much as in the queue.
 *
 * Among the gradients the broker sends a mark now and then; the optimizer tells how many it has
 * taken since the last mark that reached it.  A mark overtakes nothing, so that whatever was handed
 * on before it is taken or lost: the count is right again after any death, cut or restart.
 *
 * It must never hold up a gradient.  One thread.
 */
#ifndef GQ_HANDED_H
#define GQ_HANDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gradq/protocol.h"

typedef struct gq_handed {
    uint64_t life;    /* of this broker, random: marks of another one say nothing */
    uint64_t count;   /* gradients handed on so far */
    uint64_t taken;   /* of them, taken or lost */
    uint64_t early;   /* taken whose frames have not come out yet, here or on the way (lane shm) */
    uint64_t marked;  /* count at the last mark */
    uint64_t mark_ns; /* of the last mark, 0: none */
    bool asked;       /* it is not answered yet */
    int peers;        /* connections on which gradients are handed on */
} gq_handed;

/* Frames handed on that have not come out, as far as is known. */
uint64_t gq_handed_waiting (const gq_handed *handed);

/* Gradients that nobody has taken, of those and `queued` ones that were not handed on yet. */
uint64_t gq_handed_depth (const gq_handed *handed, uint64_t queued);

/*
 * When the next mark is due, UINT64_MAX: none is.  `soon`: there is little room, so the count is
 * wanted as exact as it can be had.
 */
uint64_t gq_handed_mark_ns (const gq_handed *handed, bool soon);

/* Somebody wants the newest count: the next mark is due at once, unless one is on its way. */
void gq_handed_ask (gq_handed *handed);

/* Encode a mark; then say that it was sent. */
void gq_handed_mark (const gq_handed *handed, uint8_t mark[GQ_MARK_BYTES]);
void gq_handed_marked (gq_handed *handed, uint64_t now_ns);

/* What came back from the optimizer.  false: no report on a mark of ours. */
bool gq_handed_report (gq_handed *handed, const void *bytes, size_t size);

/* One more connection, or one less: what was handed to the last one is lost with it. */
void gq_handed_peer (gq_handed *handed, bool more);

#endif
