/*
 * Ledger.
 */
#include "ledger.h"

#include <assert.h>
#include <string.h>

#define MAP_BITS 64

bool
gq_sequences_has (const gq_sequences *set, uint64_t sequence)
{
    if (sequence <= set->cumulative)
        return true;
    uint64_t bit = sequence - set->cumulative - 1;
    return bit < MAP_BITS && (set->beyond >> bit & 1) != 0;
}

void
gq_sequences_add (gq_sequences *set, uint64_t sequence)
{
    uint64_t bit = sequence - set->cumulative - 1; /* huge for one that is in the set */
    assert (bit < MAP_BITS);
    set->beyond |= (uint64_t)1 << bit;
    while (set->beyond & 1) {
        set->beyond >>= 1;
        set->cumulative++;
    }
}

static gq_ledger_entry *
entry_of (gq_ledger *ledger, uint32_t actor)
{
    assert (actor < GQ_ACTORS_MAX);
    return &ledger->actors[actor];
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
gq_ledger_find (const gq_ledger *ledger, uint32_t *actor, const uint8_t nonce[GQ_NONCE_BYTES],
                uint32_t *epoch)
{
    uint32_t id = *actor == GQ_ACTORS_MAX ? free_id (ledger, nonce) : *actor;
    if (id >= GQ_ACTORS_MAX)
        return GQ_FULL;
    const gq_ledger_entry *entry = &ledger->actors[id];
    bool same = entry->known && memcmp (entry->nonce, nonce, GQ_NONCE_BYTES) == 0;
    *actor = id;
    *epoch = same ? entry->epoch : 0;
    return GQ_OK;
}

void
gq_ledger_grant (gq_ledger *ledger, uint32_t actor, uint32_t epoch,
                 const uint8_t nonce[GQ_NONCE_BYTES])
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    /* What waits for its step stays in it; nobody is left to be told. */
    *entry = (gq_ledger_entry){.known = true, .epoch = epoch};
    memcpy (entry->nonce, nonce, GQ_NONCE_BYTES);
    if (ledger->actor_count <= actor)
        ledger->actor_count = actor + 1;
}

gq_status
gq_ledger_judge (const gq_ledger *ledger, uint32_t actor, uint32_t epoch, uint64_t sequence)
{
    assert (actor < GQ_ACTORS_MAX);
    const gq_ledger_entry *entry = &ledger->actors[actor];
    if (!entry->known || epoch > entry->epoch)
        return GQ_MALFORMED;
    if (epoch < entry->epoch)
        return GQ_REFUSED;
    if (gq_sequences_has (&entry->received, sequence))
        return GQ_AGAIN;
    return sequence - entry->received.cumulative <= MAP_BITS ? GQ_OK : GQ_MALFORMED;
}

void
gq_ledger_discard (gq_ledger *ledger, uint32_t actor, gq_status judgement)
{
    if (judgement == GQ_AGAIN) {
        ledger->duplicates++;
        entry_of (ledger, actor)->owed = true;
    } else if (judgement == GQ_REFUSED) {
        ledger->outdated++;
        /* The acknowledgement names the new epoch: so the older life learns that it ended. */
        entry_of (ledger, actor)->owed = true;
    }
}

void
gq_ledger_enter (gq_ledger *ledger, uint32_t actor, uint64_t sequence)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    assert (!gq_sequences_has (&entry->received, sequence));
    gq_sequences_add (&entry->received, sequence);
}

void
gq_ledger_settle (gq_ledger *ledger, uint32_t actor)
{
    gq_ledger_entry *entry = entry_of (ledger, actor);
    /* What waits for its step holds back all that came after it: one set less to keep. */
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
    gq_ledger_entry *entry = entry_of (ledger, actor);
    entry->pending++;
    /* It may have filled the hole that keeps its actor from giving out numbers. */
    entry->owed = entry->owed || entry->settled.beyond != 0;
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
    return (gq_ack){.cumulative = entry->settled.cumulative,
                    .beyond = entry->settled.beyond,
                    .refused = entry->refused,
                    .refused_sequence = entry->refused_sequence,
                    .refused_reason = (uint32_t)entry->refused_reason,
                    .held = (uint32_t)(entry->received.cumulative - entry->settled.cumulative)};
}
