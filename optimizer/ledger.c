/*
 * Ledger.  One PUSH, one queue and one PULL keep an actor's gradients in order, so a number that is
 * skipped was lost with a process that held it; a lower one than seen is a duplicate.
 */
#include "ledger.h"

#include <assert.h>
#include <string.h>

static gq_ledger_entry *
entry_of (gq_ledger *ledger, uint32_t actor)
{
    assert (actor < GQ_ACTORS_MAX);
    return &ledger->actors[actor];
}

static void
start_epoch (gq_ledger *ledger, uint32_t actor, uint32_t epoch, uint64_t received)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    *entry =
        (gq_ledger_entry){.known = true, .epoch = epoch, .received = received, .settled = received};
    if (ledger->actor_count <= actor)
        ledger->actor_count = actor + 1;
}

/* An id that this nonce has, or the lowest that nobody ever had; GQ_ACTORS_MAX: none left. */
static uint32_t
free_id (const gq_ledger *ledger, const uint8_t nonce[GQ_NONCE_BYTES])
{
    uint32_t lowest = GQ_ACTORS_MAX;
    for (uint32_t i = 0; i < GQ_ACTORS_MAX; i++) {
        const gq_ledger_entry *entry = &ledger->actors[i];
        if (entry->known && memcmp (entry->nonce, nonce, GQ_NONCE_BYTES) == 0)
            return i;
        if (!entry->known && lowest == GQ_ACTORS_MAX)
            lowest = i;
    }
    return lowest;
}

gq_status
gq_ledger_hello (gq_ledger *ledger, uint32_t *actor, const uint8_t nonce[GQ_NONCE_BYTES],
                 uint32_t *next_epoch, uint32_t *epoch)
{
    uint32_t id = *actor == GQ_ACTORS_MAX ? free_id (ledger, nonce) : *actor;
    if (id >= GQ_ACTORS_MAX)
        return GQ_FULL;
    gq_ledger_entry *entry = entry_of (ledger, id);
    if (!entry->known || memcmp (entry->nonce, nonce, GQ_NONCE_BYTES) != 0) {
        start_epoch (ledger, id, (*next_epoch)++, 0);
        memcpy (entry->nonce, nonce, GQ_NONCE_BYTES);
    }
    *actor = id;
    *epoch = entry->epoch;
    return GQ_OK;
}

gq_status
gq_ledger_enter (gq_ledger *ledger, uint32_t actor, uint32_t epoch, uint64_t sequence)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    if (entry->known && epoch < entry->epoch) {
        ledger->outdated++;
        return GQ_REFUSED;
    }
    /* Granted by an earlier life of this process, whose memory of it is gone: go on from here. */
    if (!entry->known || epoch > entry->epoch)
        start_epoch (ledger, actor, epoch, sequence - 1);
    if (sequence <= entry->received) {
        ledger->duplicates++;
        entry->owed = true;
        return GQ_AGAIN;
    }
    ledger->lost += sequence - entry->received - 1;
    entry->received = sequence;
    return GQ_OK;
}

void
gq_ledger_settle (gq_ledger *ledger, uint32_t actor)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    /* Cumulative: what waits for its step holds back all that came after it. */
    if (entry->pending == 0)
        entry->settled = entry->received;
    entry->owed = true;
}

void
gq_ledger_refuse (gq_ledger *ledger, uint32_t actor, uint64_t sequence, gq_status reason)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    entry->refused++;
    entry->refused_sequence = sequence;
    entry->refused_reason = reason;
    gq_ledger_settle (ledger, actor);
}

void
gq_ledger_hold (gq_ledger *ledger, uint32_t actor)
{
    entry_of (ledger, actor)->pending++;
}

void
gq_ledger_settle_all (gq_ledger *ledger)
{
    for (uint32_t i = 0; i < ledger->actor_count; i++)
        if (ledger->actors[i].pending > 0) {
            ledger->actors[i].pending = 0;
            gq_ledger_settle (ledger, i);
        }
}

gq_ack
gq_ledger_ack (const gq_ledger *ledger, uint32_t actor)
{
    assert (actor < GQ_ACTORS_MAX);
    const gq_ledger_entry *entry = &ledger->actors[actor];
    return (gq_ack){.cumulative = entry->settled,
                    .refused = entry->refused,
                    .refused_sequence = entry->refused_sequence,
                    .refused_reason = (uint32_t)entry->refused_reason};
}
