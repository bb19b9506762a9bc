/*
 * Board: the file and its words.
 */
#include "board.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "shm.h"

#define MAGIC   0x31425147u /* "GQB1" */
#define VERSION 1

typedef struct header {
    uint32_t magic, version;
    uint8_t run[GQ_RUN_ID_BYTES];
    uint32_t term, block_count;
    uint64_t digest, count;
    uint64_t block_bytes; /* from one block to the next */
    uint64_t blocks_at;   /* offset of the first */
    _Alignas(64) atomic_uint shown;
    _Alignas(64) atomic_ullong versions[GQ_BOARD_BLOCKS]; /* of what the block holds */
    _Alignas(64) atomic_uint idle; /* 1: the optimizer sleeps, or is about to */
} header;

struct gq_board {
    gq_shm shm;
    header *header;
};

_Static_assert(sizeof (header) <= GQ_SHM_PAGE, "the header has a page");

static uint64_t
block_bytes (uint64_t count)
{
    uint64_t bytes = GQ_FRAME_HEADER_BYTES + count * sizeof (float);
    return (bytes + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE * GQ_SHM_PAGE;
}

static size_t
file_bytes (uint64_t count)
{
    return (size_t)(GQ_SHM_PAGE + GQ_BOARD_ALL * block_bytes (count));
}

gq_status
gq_board_create (gq_board **board_p, const char *path, const gq_board_config *config,
                 gq_error *error)
{
    *board_p = NULL;
    gq_board *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_status status = gq_shm_create (
        &self->shm, path, file_bytes (config->count) + (size_t)config->rest_bytes, error);
    if (status == GQ_OK) {
        self->header = (header *)(void *)self->shm.bytes;
        *self->header = (header){.magic = MAGIC,
                                 .version = VERSION,
                                 .term = config->term,
                                 .block_count = GQ_BOARD_ALL,
                                 .digest = config->digest,
                                 .count = config->count,
                                 .block_bytes = block_bytes (config->count),
                                 .blocks_at = GQ_SHM_PAGE};
        memcpy (self->header->run, config->run, GQ_RUN_ID_BYTES);
        atomic_init (&self->header->shown, GQ_BOARD_NONE);
        status = gq_shm_show (&self->shm, error);
    }
    *board_p = self;
    if (status != GQ_OK)
        gq_board_close (board_p);
    return status;
}

uint8_t *
gq_board_block (const gq_board *self, uint32_t index)
{
    return self->shm.bytes + self->header->blocks_at + index * self->header->block_bytes;
}

void *
gq_board_rest (const gq_board *self, uint64_t *bytes, uint64_t *at)
{
    *at = file_bytes (self->header->count);
    *bytes = self->shm.size - *at;
    return self->shm.bytes + *at;
}

int
gq_board_fd (const gq_board *self)
{
    return self->shm.fd;
}

void
gq_board_show (gq_board *self, uint32_t index, uint64_t version)
{
    atomic_store (&self->header->versions[index], version);
    atomic_store (&self->header->shown, index);
}

uint32_t
gq_board_shown (const gq_board *self)
{
    return atomic_load (&self->header->shown);
}

void
gq_board_set_idle (gq_board *self, bool idle)
{
    atomic_store (&self->header->idle, idle ? 1 : 0);
}

bool
gq_board_idle (const gq_board *self)
{
    return atomic_load (&self->header->idle) != 0;
}

/* Is it the board that we are to read?  Sizes are checked against the file, not believed. */
static bool
fits (const gq_shm *shm, const gq_board_config *config)
{
    const header *found = (const header *)(const void *)shm->bytes;
    return found->magic == MAGIC && found->version == VERSION &&
           memcmp (found->run, config->run, GQ_RUN_ID_BYTES) == 0 &&
           (config->term == 0 || found->term == config->term) && found->digest == config->digest &&
           found->count == config->count && found->block_count == GQ_BOARD_ALL &&
           found->block_bytes == block_bytes (config->count) && found->blocks_at == GQ_SHM_PAGE;
}

gq_status
gq_board_open (gq_board **board_p, const char *path, const gq_board_config *config, gq_error *error)
{
    *board_p = NULL;
    gq_board *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    gq_status status = gq_shm_open (&self->shm, path, file_bytes (config->count), error);
    if (status == GQ_OK && mprotect (self->shm.bytes, self->shm.size, PROT_READ) != 0)
        status = gq_fail (error, GQ_IO, "cannot protect %.900s: %s", path, strerror (errno));
    if (status == GQ_OK && !fits (&self->shm, config))
        status = gq_fail (error, GQ_MALFORMED, "%.900s is not this run's board of term %u", path,
                          config->term);
    self->header = (header *)(void *)self->shm.bytes;
    *board_p = self;
    if (status != GQ_OK)
        gq_board_close (board_p);
    return status;
}

bool
gq_board_peek (const gq_board *self, uint64_t *version)
{
    uint32_t shown = atomic_load (&self->header->shown);
    if (shown >= GQ_BOARD_BLOCKS)
        return false;
    *version = atomic_load (&self->header->versions[shown]);
    return true;
}

const float *
gq_board_lease (const gq_board *self, atomic_uint *lease, uint64_t *version)
{
    for (;;) {
        uint32_t shown = atomic_load (&self->header->shown);
        if (shown >= GQ_BOARD_BLOCKS)
            return NULL;
        atomic_store (lease, shown + 1);
        if (atomic_load (&self->header->shown) != shown)
            continue; /* a newer one: this block may be written already */
        *version = atomic_load (&self->header->versions[shown]);
        return (const float *)(const void *)(gq_board_block (self, shown) + GQ_FRAME_HEADER_BYTES);
    }
}

void
gq_board_remove (const gq_board *self)
{
    gq_shm_remove (&self->shm);
}

void
gq_board_close (gq_board **board_p)
{
    gq_board *self = *board_p;
    if (self == NULL)
        return;
    gq_shm_close (&self->shm);
    free (self);
    *board_p = NULL;
}
