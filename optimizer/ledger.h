/*
 * Ledger: which gradients of each actor have come, and which of them are settled.  Between steps 4
 * and 6 of a gradient's path.  Owns no socket, reads no clock.
 */
#ifndef GQ_LEDGER_H
#define GQ_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "gradq/protocol.h"

#define GQ_NONCE_BYTES 16

typedef struct gq_ledger_entry {
    bool known;
    uint8_t nonce[GQ_NONCE_BYTES]; /* of the hello that was granted `epoch` */
    uint32_t epoch;
    uint64_t received; /* highest sequence number seen in this epoch */
    uint64_t settled;  /* everything up to here was applied or refused: what an ack says */
    uint32_t pending;  /* received, but waiting for the rest of their step (--aggregate) */
    uint64_t refused;  /* in this epoch */
    uint64_t refused_sequence;
    gq_status refused_reason;
    bool owed;          /* an acknowledgement is due */
    uint64_t repeat_ns; /* when to repeat the last one */
    uint32_t repeats;   /* of it so far */
} gq_ledger_entry;

typedef struct gq_ledger {
    gq_ledger_entry actors[GQ_ACTORS_MAX];
    uint32_t actor_count; /* highest known id + 1 */
    uint64_t lost;        /* sequence numbers that were skipped */
    uint64_t duplicates;
    uint64_t outdated; /* frames of an epoch that ended */
} gq_ledger;

/*
 * The epoch for a hello: the one that this nonce was granted before, or `*next_epoch`, which is
 * then increased.  *actor: the id asked for, or GQ_ACTORS_MAX for any; out: the id granted.
 * GQ_FULL: all ids are taken.
 */
GQ_CHECK gq_status gq_ledger_hello (gq_ledger *ledger, uint32_t *actor,
                                    const uint8_t nonce[GQ_NONCE_BYTES], uint32_t *next_epoch,
                                    uint32_t *epoch);

/*
 * Enter a gradient that has come.  GQ_OK: it is new.  GQ_AGAIN: a duplicate, an ack is owed again.
 * GQ_REFUSED: of an epoch that ended, nobody waits for an ack.
 */
GQ_CHECK gq_status gq_ledger_enter (gq_ledger *ledger, uint32_t actor, uint32_t epoch,
                                    uint64_t sequence);

/* The gradient entered last from this actor is refused, or waits for the rest of its step. */
void gq_ledger_refuse (gq_ledger *ledger, uint32_t actor, uint64_t sequence, gq_status reason);
void gq_ledger_hold (gq_ledger *ledger, uint32_t actor);

/* The step was made: everything that waited for it is settled. */
void gq_ledger_settle_all (gq_ledger *ledger);
/* The same for one actor's gradient that did not have to wait. */
void gq_ledger_settle (gq_ledger *ledger, uint32_t actor);

gq_ack gq_ledger_ack (const gq_ledger *ledger, uint32_t actor);

#endif
