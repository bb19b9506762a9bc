/*
 * The count of what waits between broker and optimizer.  Owns no socket and reads no clock.
 */
#include "handed.h"

#include <string.h>

/* Between two marks: how long a count that a loss made wrong stays so.  Longer while there is no
 * answer: marks are not to fill the buffers of an optimizer that is stopped. */
#define MARK_NS       100000000u
#define MARK_AGAIN_NS 1000000000u

uint64_t
gq_handed_waiting (const gq_handed *handed)
{
    return handed->count - handed->taken;
}

uint64_t
gq_handed_depth (const gq_handed *handed, uint64_t queued)
{
    const uint64_t frames = queued + gq_handed_waiting (handed);
    return frames > handed->early ? frames - handed->early : 0;
}

uint64_t
gq_handed_mark_ns (const gq_handed *handed, bool soon)
{
    if (gq_handed_waiting (handed) == 0)
        return UINT64_MAX;
    if (handed->mark_ns == 0 || (soon && !handed->asked))
        return 0;
    return handed->mark_ns + (handed->asked ? MARK_AGAIN_NS : MARK_NS);
}

void
gq_handed_ask (gq_handed *handed)
{
    if (!handed->asked)
        handed->mark_ns = 0;
}

void
gq_handed_mark (const gq_handed *handed, uint8_t mark[GQ_MARK_BYTES])
{
    memcpy (mark, &handed->life, sizeof handed->life);
    memcpy (mark + sizeof handed->life, &handed->count, sizeof handed->count);
}

void
gq_handed_marked (gq_handed *handed, uint64_t now_ns)
{
    handed->mark_ns = now_ns;
    handed->marked = handed->count;
    handed->asked = true;
}

bool
gq_handed_report (gq_handed *handed, const void *bytes, size_t size)
{
    uint64_t life, marked, since, early;
    if (size != GQ_TAKEN_BYTES)
        return false;
    memcpy (&life, bytes, sizeof life);
    memcpy (&marked, (const uint8_t *)bytes + 8, sizeof marked);
    memcpy (&since, (const uint8_t *)bytes + GQ_MARK_BYTES, sizeof since);
    memcpy (&early, (const uint8_t *)bytes + GQ_MARK_BYTES + sizeof since, sizeof early);
    if (life != handed->life || marked > handed->count || since > handed->count - marked)
        return false;
    handed->taken = marked + since;
    handed->early = early;
    if (marked == handed->marked)
        handed->asked = false;
    return true;
}

void
gq_handed_peer (gq_handed *handed, bool more)
{
    if (more)
        handed->peers++;
    else if (handed->peers > 0 && --handed->peers == 0) {
        handed->taken = handed->count;
        handed->early = 0;
    }
    /* Whoever is connected now has not seen the last mark, or it was lost. */
    handed->mark_ns = 0;
}
