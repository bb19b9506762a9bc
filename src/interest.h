/*
 * Does anybody want weights?  What an XPUB hands out about its subscribers, added up.  Between
 * steps 6 and 7 of a gradient's path, at both ends of the way from optimizer to broker.
 */
#ifndef GQ_INTEREST_H
#define GQ_INTEREST_H

#include <stdbool.h>
#include <stdint.h>

/* Longest subscription worth reading: 0x01, or 0x00 to end it, and a topic. */
#define GQ_SUBSCRIPTION_BYTES_MAX 64

/* All zero: nobody. */
typedef struct gq_interest {
    uint32_t lengths; /* bit n: somebody subscribes to the first n bytes of the weights' topic */
} gq_interest;

bool gq_interest_any (const gq_interest *interest);

/*
 * Take in up to `count_max` messages of `xpub`, without waiting.  Whether one of them subscribes to
 * weights.  The socket must tell of the end of a topic's last subscription only, as XPUB does
 * without ZMQ_XPUB_VERBOSER: ZeroMQ, which sees who it was, does not count a subscriber twice.
 */
bool gq_interest_take (gq_interest *interest, void *xpub, int count_max);

#endif
