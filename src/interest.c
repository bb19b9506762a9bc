/*
 * Interest in weights.  Ends of subscriptions come from ZeroMQ also for a peer that died.
 */
#include "interest.h"

#include <string.h>
#include <zmq.h>

#include "frame.h"

bool
gq_interest_any (const gq_interest *self)
{
    return self->lengths != 0;
}

bool
gq_interest_take (gq_interest *self, void *xpub, int count_max)
{
    uint8_t topic[GQ_TOPIC_ACTOR_BYTES], bytes[GQ_SUBSCRIPTION_BYTES_MAX];
    bool joined = false;
    gq_topic (GQ_KIND_WEIGHTS, 0, topic);
    for (int i = 0; i < count_max; i++) {
        int size = zmq_recv (xpub, bytes, sizeof bytes, ZMQ_DONTWAIT);
        if (size < 0)
            break;
        /* A longer topic is none that docs/PROTOCOL.md has. */
        if (size < 1 || size - 1 > GQ_TOPIC_KIND_BYTES ||
            memcmp (bytes + 1, topic, (size_t)size - 1) != 0)
            continue;
        const uint32_t bit = UINT32_C (1) << (size - 1);
        if (bytes[0] == 1) {
            self->lengths |= bit;
            joined = true;
        } else if (bytes[0] == 0) {
            self->lengths &= ~bit;
        }
    }
    return joined;
}
