/*
 * Live state: the bytes behind the blocks of a board.  docs/PROTOCOL.md has the same tables.
 */
#include "live.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "crash.h"
#include "frame.h"
#include "shm.h"

#define MAGIC   0x314c5147u /* "GQL1" */
#define VERSION 2
#define NONE    UINT32_MAX

typedef struct turn {
    gq_live_mark mark;
    uint32_t crc;       /* of the mark */
    atomic_ullong done; /* blocks of the step that runs from this mark */
    atomic_uint block;  /* that it writes */
} turn;

typedef struct header {
    uint32_t magic, version;
    uint64_t boot;
    gq_live_shape shape;
    _Alignas(64) atomic_uint active; /* index of a turn; NONE before the first commit */
    _Alignas(64) turn turns[2];
} header;

_Static_assert(sizeof (header) <= GQ_SHM_PAGE, "the header has a page");

struct gq_live {
    header *header;
    uint8_t *vectors;    /* rings, then sums, then the frame in hand */
    uint64_t vectors_at; /* offset in the file */
    gq_live_shape shape; /* as it was when it was opened */
};

uint64_t
gq_live_boot (void)
{
    char host[GQ_HOST_ID_BYTES];
    gq_host_id (host);
    return host[0] == '\0' ? 0 : XXH64 (host, strlen (host), 0);
}

static uint64_t
ring_bytes (const gq_live_shape *shape)
{
    return gq_rule_state_ring (shape->count, shape->slide) * sizeof (float);
}

static uint64_t
whole_pages (uint64_t bytes)
{
    return (bytes + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE * GQ_SHM_PAGE;
}

static uint64_t
sum_bytes (const gq_live_shape *shape)
{
    return whole_pages (shape->count * sizeof (float));
}

/* Of all vectors that come before the frame in hand. */
static uint64_t
vector_bytes (const gq_live_shape *shape)
{
    return shape->slot_count * ring_bytes (shape) + shape->sum_count * sum_bytes (shape);
}

uint64_t
gq_live_bytes (const gq_live_shape *shape)
{
    return GQ_SHM_PAGE + vector_bytes (shape) +
           whole_pages (GQ_FRAME_HEADER_BYTES + shape->count * sizeof (float));
}

static gq_live *
view_of (void *bytes, uint64_t at, const gq_live_shape *shape)
{
    gq_live *self = calloc (1, sizeof *self);
    if (self == NULL)
        return NULL;
    *self = (gq_live){.header = bytes,
                      .vectors = (uint8_t *)bytes + GQ_SHM_PAGE,
                      .vectors_at = at + GQ_SHM_PAGE,
                      .shape = *shape};
    return self;
}

gq_live *
gq_live_new (gq_board *board, const gq_live_shape *shape)
{
    uint64_t size;
    uint64_t at;
    void *bytes = gq_board_rest (board, &size, &at);
    const uint64_t boot = gq_live_boot ();
    if (boot == 0)
        return NULL;
    assert (size >= gq_live_bytes (shape));
    gq_live *self = view_of (bytes, at, shape);
    if (self == NULL)
        return NULL;
    *self->header = (header){.version = VERSION, .boot = boot, .shape = *shape};
    atomic_store (&self->header->active, NONE);
    self->header->magic = MAGIC;
    return self;
}

static turn *
active_of (const gq_live *self)
{
    uint32_t index = atomic_load (&self->header->active);
    return index < 2 ? &self->header->turns[index] : NULL;
}

atomic_ullong *
gq_live_begin_step (gq_live *self, uint32_t block)
{
    turn *from = active_of (self);
    assert (from != NULL && atomic_load (&from->done) == 0); /* one step from each mark */
    atomic_store (&from->block, block);
    return &from->done;
}

void
gq_live_commit (gq_live *self, const gq_live_mark *mark)
{
    turn *from = active_of (self);
    turn *to = &self->header->turns[from == &self->header->turns[0] ? 1 : 0];
    gq_crash_point ("before-commit");
    to->mark = *mark;
    to->crc = gq_crc32c (&to->mark, sizeof to->mark);
    atomic_store (&to->done, 0);
    atomic_store (&to->block, NONE);
    gq_crash_point ("committing");
    atomic_store (&self->header->active, (uint32_t)(to - self->header->turns));
    gq_crash_point ("after-commit");
}

/* Is a state there that can be believed, in these bytes?  Only what is read once is used later. */
static gq_status
check (const header *found, uint64_t size, uint64_t count, gq_error *error)
{
    const uint64_t boot = gq_live_boot ();
    if (size < sizeof *found || found->magic != MAGIC)
        return gq_fail (error, GQ_NOTFOUND, "it holds no state");
    if (boot == 0 || found->boot != boot)
        return gq_fail (error, GQ_MALFORMED, "the machine was restarted since it was written");
    const gq_live_shape *shape = &found->shape;
    if (found->version != VERSION || shape->count != count || shape->slot_count > GQ_SLOTS_MAX ||
        (shape->sum_count != 0 && shape->sum_count != 2) || shape->slide == 0 ||
        shape->slide % GQ_SLIDE != 0 || shape->slide > GQ_PARAMETERS_MAX + GQ_SLIDE ||
        size < gq_live_bytes (shape))
        return gq_fail (error, GQ_MALFORMED, "its state is damaged, or of another version");
    if (atomic_load (&found->active) == NONE)
        return gq_fail (error, GQ_NOTFOUND, "its state was never begun");
    return GQ_OK;
}

gq_status
gq_live_open (gq_live **live_p, gq_board **board_p, const char *path,
              const uint8_t run[GQ_RUN_ID_BYTES], uint64_t digest, uint64_t count, gq_error *error)
{
    gq_board_config config = {.digest = digest, .count = count};
    uint64_t size;
    uint64_t at;
    *live_p = NULL;
    memcpy (config.run, run, GQ_RUN_ID_BYTES);
    gq_status status = gq_board_open (board_p, path, &config, error);
    if (status != GQ_OK)
        return status;
    header *found = gq_board_rest (*board_p, &size, &at);
    status = check (found, size, count, error);
    if (status == GQ_OK) {
        *live_p = view_of (found, at, &found->shape);
        if (*live_p == NULL)
            status = gq_fail (error, GQ_MEMORY, "out of memory");
    }
    gq_live_mark mark;
    gq_live_step step;
    if (status == GQ_OK && !gq_live_read (*live_p, &mark, &step))
        status = gq_fail (error, GQ_MALFORMED, "its state is damaged, or an optimizer is at work");
    if (status != GQ_OK) {
        gq_live_free (live_p);
        gq_board_close (board_p);
    }
    return status;
}

bool
gq_live_read (const gq_live *self, gq_live_mark *mark, gq_live_step *step)
{
    const turn *active = active_of (self);
    if (active == NULL)
        return false;
    *mark = active->mark;
    const uint32_t crc = active->crc;
    *step =
        (gq_live_step){.done = atomic_load (&active->done), .block = atomic_load (&active->block)};
    bool sound = gq_crc32c (mark, sizeof *mark) == crc && mark->block < GQ_BOARD_ALL &&
                 mark->sum < 2 && mark->scalar_count <= GQ_SCALARS_MAX &&
                 mark->slot_count == self->shape.slot_count &&
                 memchr (mark->rule, '\0', sizeof mark->rule) != NULL &&
                 (mark->held == 0 || self->shape.sum_count == 2) &&
                 (step->done == 0 || (step->block < GQ_BOARD_ALL && step->block != mark->block));
    for (uint32_t i = 0; sound && i < mark->slot_count; i++)
        sound = mark->at[i] < gq_rule_state_ring (self->shape.count, self->shape.slide) &&
                mark->at[i] % GQ_SLIDE == 0;
    return sound && active_of (self) == active && active->mark.lsn == mark->lsn &&
           atomic_load (&active->done) == step->done;
}

const gq_live_shape *
gq_live_shape_of (const gq_live *self)
{
    return &self->shape;
}

const float *
gq_live_ring (const gq_live *self, size_t index)
{
    assert (index < self->shape.slot_count);
    return (const float *)(const void *)(self->vectors + index * ring_bytes (&self->shape));
}

uint64_t
gq_live_ring_at (const gq_live *self, size_t index)
{
    return self->vectors_at + index * ring_bytes (&self->shape);
}

float *
gq_live_sum (const gq_live *self, size_t index)
{
    assert (index < self->shape.sum_count);
    return (float *)(void *)(self->vectors + self->shape.slot_count * ring_bytes (&self->shape) +
                             index * sum_bytes (&self->shape));
}

uint8_t *
gq_live_hand (gq_live *self)
{
    return self->vectors + vector_bytes (&self->shape);
}

void
gq_live_free (gq_live **live_p)
{
    free (*live_p);
    *live_p = NULL;
}
