/*
 * Lane file: its layout, its words, its bell.
 */
#include "lane_file.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC  0x31465147u /* "GQF1" */
#define LAYOUT 1
/* A reader that meets a writer at work looks again; one that died at it is not waited for. */
#define READS_MAX 1000

#define WORDS_BYTES ((size_t)3 * GQ_SHM_PAGE)

_Static_assert(sizeof (gq_lane_words) <= WORDS_BYTES, "the words have pages of their own");
/* docs/PROTOCOL.md has these. */
_Static_assert(offsetof (gq_lane_words, slot_bytes) == 48 && offsetof (gq_lane_words, bell) == 64 &&
                   offsetof (gq_lane_words, ack) == 88 &&
                   offsetof (gq_lane_words, may_hold) == 144 &&
                   offsetof (gq_lane_words, attached) == 192 &&
                   offsetof (gq_lane_words, holds) == 208 &&
                   offsetof (gq_lane_words, ready) == 728 &&
                   offsetof (gq_lane_words, headers) == 1248,
               "the layout is part of the protocol");

static uint64_t
slot_bytes (uint64_t count)
{
    return (count * sizeof (float) + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE * GQ_SHM_PAGE;
}

static size_t
file_bytes (uint64_t count, uint32_t slot_count)
{
    return (size_t)(WORDS_BYTES + slot_count * slot_bytes (count));
}

bool
gq_lane_file_path (char path[PATH_MAX], const char *directory, uint32_t actor, uint32_t epoch)
{
    int size = snprintf (path, PATH_MAX, "%s/actor-%" PRIu32 "-%" PRIu32, directory, actor, epoch);
    return size > 0 && size < PATH_MAX;
}

bool
gq_lane_file_parse (const char *name, uint32_t *actor, uint32_t *epoch)
{
    static const char prefix[] = "actor-";
    char *middle;
    char *end;
    if (strncmp (name, prefix, sizeof prefix - 1) != 0)
        return false;
    unsigned long id = strtoul (name + sizeof prefix - 1, &middle, 10);
    unsigned long life = *middle == '-' ? strtoul (middle + 1, &end, 10) : 0;
    if (life < 1 || life > UINT32_MAX || *end != '\0' || id >= GQ_ACTORS_MAX)
        return false;
    *actor = (uint32_t)id;
    *epoch = (uint32_t)life;
    return true;
}

gq_status
gq_lane_file_create (gq_shm *shm, const char *path, const gq_lane_identity *identity,
                     gq_error *error)
{
    gq_status status =
        gq_shm_create (shm, path, file_bytes (identity->count, identity->slot_count), error);
    if (status != GQ_OK)
        return status;
    gq_lane_words *words = gq_lane_file_words (shm);
    words->magic = MAGIC;
    words->layout = LAYOUT;
    words->identity = *identity;
    words->slot_bytes = slot_bytes (identity->count);
    status = gq_shm_show (shm, error);
    if (status != GQ_OK)
        gq_shm_close (shm);
    return status;
}

gq_status
gq_lane_file_open (gq_shm *shm, const char *path, gq_lane_identity *identity, gq_error *error)
{
    gq_status status = gq_shm_open (shm, path, file_bytes (identity->count, 1), error);
    if (status != GQ_OK)
        return status;
    const gq_lane_words *words = gq_lane_file_words (shm);
    const gq_lane_identity *found = &words->identity;
    if (words->magic != MAGIC || words->layout != LAYOUT ||
        memcmp (found->run, identity->run, GQ_RUN_ID_BYTES) != 0 ||
        found->actor != identity->actor || found->epoch != identity->epoch ||
        found->count != identity->count || words->slot_bytes != slot_bytes (identity->count) ||
        found->slot_count < 1 || found->slot_count > GQ_WINDOW_MAX + 1 ||
        shm->size < file_bytes (found->count, found->slot_count)) {
        gq_shm_close (shm);
        return gq_fail (error, GQ_MALFORMED, "%.900s is not the lane file of actor %u, epoch %u",
                        path, identity->actor, identity->epoch);
    }
    identity->slot_count = found->slot_count;
    return GQ_OK;
}

gq_lane_words *
gq_lane_file_words (const gq_shm *shm)
{
    return (gq_lane_words *)(void *)shm->bytes;
}

float *
gq_lane_file_slot (const gq_shm *shm, uint64_t count, uint32_t index)
{
    return (float *)(void *)(shm->bytes + WORDS_BYTES + index * slot_bytes (count));
}

/* A sequence lock whose payload is atomic words: sequentially consistent, for it is seven of them
 * and a system call is near. */
void
gq_lane_ack_write (gq_lane_words *words, const gq_lane_ack *ack)
{
    const uint64_t values[GQ_LANE_ACK_WORDS] = {ack->ack.cumulative,
                                                ack->ack.beyond,
                                                ack->ack.refused,
                                                ack->ack.refused_sequence,
                                                ack->ack.refused_reason | (uint64_t)ack->ack.held
                                                                              << 32,
                                                ack->version,
                                                ack->term};
    /* Also odd after a writer that died: the next even number ends it. */
    unsigned turn = atomic_load (&words->turn) | 1u;
    atomic_store (&words->turn, turn);
    for (int i = 0; i < GQ_LANE_ACK_WORDS; i++)
        atomic_store (&words->ack[i], values[i]);
    atomic_store (&words->turn, turn + 1);
}

bool
gq_lane_ack_read (gq_lane_words *words, gq_lane_ack *ack)
{
    uint64_t values[GQ_LANE_ACK_WORDS];
    for (int reads = 0; reads < READS_MAX; reads++) {
        unsigned turn = atomic_load (&words->turn);
        for (int i = 0; i < GQ_LANE_ACK_WORDS; i++)
            values[i] = atomic_load (&words->ack[i]);
        if (turn % 2 == 1 || atomic_load (&words->turn) != turn)
            continue;
        *ack = (gq_lane_ack){.ack = {.cumulative = values[0],
                                     .beyond = values[1],
                                     .refused = values[2],
                                     .refused_sequence = values[3],
                                     .refused_reason = (uint32_t)values[4],
                                     .held = (uint32_t)(values[4] >> 32)},
                             .version = values[5],
                             .term = (uint32_t)values[6]};
        return true;
    }
    return false;
}

void
gq_lane_ring (gq_lane_words *words)
{
    atomic_fetch_add (&words->bell, 1);
    if (atomic_load (&words->waiting) != 0)
        gq_futex_wake (&words->bell);
}

void
gq_lane_sleep (gq_lane_words *words, unsigned seen, uint64_t wait_ns)
{
    atomic_store (&words->waiting, 1);
    if (atomic_load (&words->bell) == seen)
        gq_futex_wait (&words->bell, seen, wait_ns);
    atomic_store (&words->waiting, 0);
}
