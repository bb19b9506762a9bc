/*
 * One writer shows versions on a board, readers lease them in place: no reader may ever see a block
 * that is being written.  A plain main, for ThreadSanitizer cannot run Criterion.  Readers are
 * threads here and processes elsewhere; they share the writer's mapping, so that ThreadSanitizer
 * sees both sides, but for the first, which opens the file as a process would.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "board.h"
#include "stats.h"

enum {
    COUNT = 5000, /* elements: long enough to be interrupted while writing */
    READERS = 4,
    SEEN_MIN = 300, /* versions that each reader must see */
    LIMIT_S = 60
};

typedef struct reader {
    pthread_t thread;
    const gq_board *board;
    atomic_uint lease;
    atomic_size_t seen;
} reader;

static const gq_board_config config = {.run = {1, 2, 3}, .term = 1, .digest = 7, .count = COUNT};
static char directory[] = "/tmp/gradq-test-XXXXXX";
static char path[64];
static reader readers[READERS];
static atomic_bool stop, failed;

static void
fail (const char *what, uint64_t version)
{
    printf ("FAILED: %s at version %llu\n", what, (unsigned long long)version);
    atomic_store (&failed, true);
    atomic_store (&stop, true);
}

static void *
read_versions (void *argument)
{
    reader *self = argument;
    uint64_t last = 0;
    uint64_t version;
    while (!atomic_load (&stop)) {
        const float *values = gq_board_lease (self->board, &self->lease, &version);
        if (values == NULL || version == last)
            continue;
        if (version < last)
            fail ("went back", version);
        last = version;
        for (int pass = 0; pass < 3; pass++)
            for (size_t i = 0; i < COUNT; i++)
                if (values[i] != (float)version) {
                    fail ("torn", version);
                    pass = 3;
                    break;
                }
        atomic_fetch_add (&self->seen, 1);
    }
    atomic_store (&self->lease, GQ_LEASE_NONE);
    return NULL;
}

/* A block that nobody can see; GQ_BOARD_NONE: none. */
static uint32_t
free_block (const gq_board *board)
{
    uint32_t leased = 0;
    for (int i = 0; i < READERS; i++) {
        unsigned lease = atomic_load (&readers[i].lease);
        leased |= lease == GQ_LEASE_NONE ? 0 : 1u << (lease - 1);
    }
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++)
        if (i != gq_board_shown (board) && (leased >> i & 1) == 0)
            return i;
    return GQ_BOARD_NONE;
}

static bool
all_seen (void)
{
    for (int i = 0; i < READERS; i++)
        if (atomic_load (&readers[i].seen) < SEEN_MIN)
            return false;
    return true;
}

int
main (void)
{
    gq_board *board;
    gq_board *mapped;
    gq_error error;
    if (mkdtemp (directory) == NULL)
        return EXIT_FAILURE;
    snprintf (path, sizeof path, "%s/board", directory);
    if (gq_board_create (&board, path, &config, &error) != GQ_OK ||
        gq_board_open (&mapped, path, &config, &error) != GQ_OK) {
        printf ("FAILED: %s\n", error.text);
        return EXIT_FAILURE;
    }
    for (int i = 0; i < READERS; i++)
        readers[i].board = i == 0 ? mapped : board;
    for (int i = 0; i < READERS; i++)
        pthread_create (&readers[i].thread, NULL, read_versions, &readers[i]);
    uint64_t until_ns = gq_now_ns () + (uint64_t)LIMIT_S * 1000000000u;
    uint64_t version = 0;
    while (!all_seen () && !atomic_load (&stop)) {
        if (gq_now_ns () > until_ns)
            fail ("too slow", version);
        /* At most one lease a reader and the shown one: with fewer readers than blocks one is
         * always free. */
        uint32_t index = free_block (board);
        if (index == GQ_BOARD_NONE) {
            fail ("no free block", version);
            break;
        }
        version++;
        float *values = (float *)(void *)(gq_board_block (board, index) + GQ_FRAME_HEADER_BYTES);
        for (size_t i = 0; i < COUNT; i++)
            values[i] = (float)version;
        gq_board_show (board, index, version);
    }
    atomic_store (&stop, true);
    for (int i = 0; i < READERS; i++)
        pthread_join (readers[i].thread, NULL);
    gq_board_close (&board);
    gq_board_close (&mapped);
    unlink (path);
    rmdir (directory);
    if (!atomic_load (&failed))
        printf ("ok: %d readers saw whole versions out of %llu\n", READERS,
                (unsigned long long)version);
    return atomic_load (&failed) ? EXIT_FAILURE : EXIT_SUCCESS;
}
