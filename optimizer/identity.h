/*
 * What outlives the optimizer process even without a checkpoint: the run's id, and counters that
 * must never repeat: the term, and the epochs granted to actors.  The file DIR/identity.json.
 */
#ifndef GQ_IDENTITY_H
#define GQ_IDENTITY_H

#include <limits.h>
#include <stdint.h>

#include "gradq/protocol.h"

typedef struct gq_identity {
    char path[PATH_MAX];
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term;           /* of this life: one more than the last life's */
    uint32_t next_epoch;     /* to grant */
    uint64_t secret;         /* of this process, for words that only one peer can know */
    uint32_t reserved_epoch; /* all below this may have been granted, says the file */
} gq_identity;

/*
 * Read DIR/identity.json or start a new run, raise the term, and store that before anybody hears
 * of it.  GQ_OK; GQ_MALFORMED (damaged file), GQ_IO with *error.
 */
GQ_CHECK gq_status gq_identity_open (gq_identity *identity, const char *directory, gq_error *error);

/* Only the run's id, from DIR/identity.json.  GQ_OK; GQ_NOTFOUND, GQ_MALFORMED with *error. */
GQ_CHECK gq_status gq_identity_read (uint8_t run[GQ_RUN_ID_BYTES], const char *directory,
                                     gq_error *error);

/* Call before granting next_epoch: makes sure that the file covers it.  GQ_OK, GQ_IO. */
GQ_CHECK gq_status gq_identity_reserve (gq_identity *identity, gq_error *error);

#endif
