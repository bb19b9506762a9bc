/*
 * Ledger: which gradients of each actor have come, and which of them are settled.  Between steps 4
 * and 6 of a gradient's path.  Owns no socket, reads no clock, never forgets an actor.
 *
 * A hop that dies loses a hole in the middle, not a tail: later gradients arrive, and the lost ones
 * come again after them.  So "the highest number seen" is not enough: what has come is everything
 * up to a number, and a map of the 64 numbers beyond it.
 */
#ifndef GQ_LEDGER_H
#define GQ_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "gradq/protocol.h"

#define GQ_NONCE_BYTES 16

/* A set of sequence numbers: 1 .. cumulative, and cumulative + 1 + i for each bit i of beyond.  Bit
 * 0 is never set: cumulative would be higher. */
typedef struct gq_sequences {
    uint64_t cumulative;
    uint64_t beyond;
} gq_sequences;

bool gq_sequences_has (const gq_sequences *set, uint64_t sequence);
/* Add one that the map can hold: asserted. */
void gq_sequences_add (gq_sequences *set, uint64_t sequence);

typedef struct gq_ledger_entry {
    bool known;
    uint8_t nonce[GQ_NONCE_BYTES]; /* of the hello that was granted `epoch` */
    uint32_t epoch;
    gq_sequences received; /* in this epoch */
    gq_sequences settled;  /* applied or refused: what an ack says; a subset of received */
    uint32_t pending;      /* received, but waiting for the rest of their step (--aggregate) */
    uint64_t refused;      /* in this epoch */
    uint64_t refused_sequence;
    gq_status refused_reason;
    bool owed;          /* an acknowledgement is due */
    uint64_t repeat_ns; /* when to repeat the last one */
    uint32_t repeats;   /* of it so far */
} gq_ledger_entry;

typedef struct gq_ledger {
    gq_ledger_entry actors[GQ_ACTORS_MAX];
    uint32_t actor_count; /* highest known id + 1 */
    uint64_t duplicates;
    uint64_t outdated; /* frames of an epoch that ended */
} gq_ledger;

/*
 * Who a hello would make of its sender: *actor, the id asked for or GQ_ACTORS_MAX for any, becomes
 * the id; *epoch the one that this nonce was granted before, 0 when a new one is due.
 * GQ_OK; GQ_FULL: all ids are taken.  Changes nothing.
 */
GQ_CHECK gq_status gq_ledger_find (const gq_ledger *ledger, uint32_t *actor,
                                   const uint8_t nonce[GQ_NONCE_BYTES], uint32_t *epoch);

/* Grant `epoch`, higher than any before, to the actor: its earlier life ends. */
void gq_ledger_grant (gq_ledger *ledger, uint32_t actor, uint32_t epoch,
                      const uint8_t nonce[GQ_NONCE_BYTES]);

/*
 * Is a gradient new?  GQ_OK: yes.  GQ_AGAIN: it has come before.  GQ_REFUSED: of an epoch that
 * ended.  GQ_MALFORMED: of an epoch that was never granted, or a number further ahead than a window
 * reaches.  Changes nothing.
 */
GQ_CHECK gq_status gq_ledger_judge (const gq_ledger *ledger, uint32_t actor, uint32_t epoch,
                                    uint64_t sequence);

/* Count one that gq_ledger_judge did not find new; a duplicate is owed another acknowledgement. */
void gq_ledger_discard (gq_ledger *ledger, uint32_t actor, gq_status judgement);

/* Enter a gradient that is new: asserted.  Then say what becomes of it, one of three: */
void gq_ledger_enter (gq_ledger *ledger, uint32_t actor, uint64_t sequence);
void gq_ledger_settle (gq_ledger *ledger, uint32_t actor); /* applied */
void gq_ledger_refuse (gq_ledger *ledger, uint32_t actor, uint64_t sequence, gq_status reason);
void gq_ledger_hold (gq_ledger *ledger, uint32_t actor); /* waits for the rest of its step */

/* The step was made: everything that waited for it is settled. */
void gq_ledger_settle_all (gq_ledger *ledger);

gq_ack gq_ledger_ack (const gq_ledger *ledger, uint32_t actor);

#endif
