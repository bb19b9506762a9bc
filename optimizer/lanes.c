/*
 * Lanes: the table of mapped files.
 */
#include "lanes.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bell.h"
#include "frame.h"
#include "lane_file.h"
#include "log.h"

/* Gradients of one actor that were taken before their descriptors came: more would only make a
 * queue of what is done. */
#define EARLY_MAX 16

typedef struct lane {
    gq_shm shm;
    uint32_t actor, epoch;
    uint32_t slot_count;
    uint32_t waits;                    /* seconds that nobody has attached it */
    uint64_t tried[GQ_WINDOW_MAX + 1]; /* by slot: the last one that lay ready there */
    uint64_t come;                     /* descriptors up to this number have come, or are lost */
    uint64_t early; /* bit i: come + 1 + i was taken, and its descriptor has not come */
} lane;

/* Files at most, each a descriptor and a mapping; further actors take lane inline. */
#define LANES_MAX 256
/* A grant whose file is not attached by then was not heard, or not wanted. */
#define WAITS_MAX  60
#define UNFINISHED ".new" /* of gq_shm_create */

struct gq_lanes {
    gq_lanes_config config;
    char directory[PATH_MAX];
    char board_path[PATH_MAX];
    gq_board *board;
    bool keep_board;
    char hop_path[PATH_MAX];
    gq_hop *hop;  /* NULL: none */
    lane **lanes; /* those in use, in no order: current lives, and earlier ones not yet over */
    size_t count, room;
    size_t turn;    /* whose turn it is, of `lanes` */
    int bell;       /* -1: none */
    uint64_t early; /* of all lanes */
    uint64_t early_total;
    lane *current[GQ_ACTORS_MAX]; /* of the actor's newest epoch; NULL: none */
};

static gq_lane_words *
words_of (const lane *which)
{
    return gq_lane_file_words (&which->shm);
}

/* Take a mapped file into the table; takes *which. */
static gq_status
add (gq_lanes *self, lane **which)
{
    if (self->count == self->room) {
        size_t room = self->room == 0 ? 16 : 2 * self->room;
        lane **grown = realloc (self->lanes, room * sizeof (lane *));
        if (grown == NULL)
            return GQ_MEMORY;
        self->lanes = grown;
        self->room = room;
    }
    self->lanes[self->count++] = *which;
    lane **current = &self->current[(*which)->actor];
    if (*current == NULL || (*current)->epoch < (*which)->epoch)
        *current = *which;
    *which = NULL;
    return GQ_OK;
}

static unsigned
early_count (const lane *which)
{
    return (unsigned)__builtin_popcountll (which->early);
}

/* Unmap and remove file i of the table. */
static void
drop (gq_lanes *self, size_t index)
{
    lane *which = self->lanes[index];
    gq_shm_remove (&which->shm);
    gq_shm_close (&which->shm);
    if (self->current[which->actor] == which)
        self->current[which->actor] = NULL;
    self->early -= early_count (which);
    free (which);
    self->lanes[index] = self->lanes[--self->count];
}

static gq_lane_identity
identity_of (const gq_lanes *self, uint32_t actor, uint32_t epoch)
{
    gq_lane_identity identity = {.actor = actor, .epoch = epoch, .count = self->config.count};
    memcpy (identity.run, self->config.run, GQ_RUN_ID_BYTES);
    return identity;
}

/* Was it ever used? */
static bool
attached (const lane *which)
{
    return atomic_load (&words_of (which)->attached) != 0;
}

/* Is its actor's process gone, as far as one can tell? */
static bool
over (const lane *which)
{
    return attached (which) && !gq_shm_locked (&which->shm);
}

/* Nobody attaches it.  Locked by us from here on, so that nobody can: what an actor leases by a
 * file that is gone would not be seen. */
static bool
given_up (const gq_lanes *self, const lane *which)
{
    return (which->waits > WAITS_MAX || self->current[which->actor] != which) &&
           gq_shm_lock (&which->shm);
}

/* The file of an actor that may have outlived the optimizer before us. */
static void
take_up (gq_lanes *self, const gq_ledger *ledger, uint32_t actor, uint32_t epoch, const char *path)
{
    gq_lane_identity identity = identity_of (self, actor, epoch);
    lane *which = calloc (1, sizeof *which);
    gq_status status =
        which == NULL ? GQ_MEMORY : gq_lane_file_open (&which->shm, path, &identity, NULL);
    if (status == GQ_OK) {
        which->actor = actor;
        which->epoch = epoch;
        which->slot_count = identity.slot_count;
        /* Never attached: its actor was told of it, perhaps, and may still come. */
        if (over (which) || !ledger->actors[actor].known || add (self, &which) != GQ_OK)
            gq_shm_close (&which->shm);
    }
    if (which == NULL)
        return;
    free (which);
    unlink (path);
}

/* What a process that died in gq_shm_create has left. */
static bool
unfinished (const char *name)
{
    size_t length = strlen (name);
    return length > sizeof UNFINISHED - 1 &&
           strcmp (name + length - (sizeof UNFINISHED - 1), UNFINISHED) == 0;
}

static void
scan (gq_lanes *self, const gq_ledger *ledger)
{
    DIR *directory = opendir (self->directory);
    for (struct dirent *entry; directory != NULL && (entry = readdir (directory)) != NULL;) {
        uint32_t actor;
        uint32_t epoch;
        char path[PATH_MAX];
        if (gq_lane_file_parse (entry->d_name, &actor, &epoch) &&
            gq_lane_file_path (path, self->directory, actor, epoch))
            take_up (self, ledger, actor, epoch, path);
        else if (unfinished (entry->d_name))
            unlinkat (dirfd (directory), entry->d_name, 0);
    }
    if (directory != NULL)
        closedir (directory);
}

void
gq_lanes_sweep (const char *path)
{
    DIR *directory = opendir (path);
    for (struct dirent *entry; directory != NULL && (entry = readdir (directory)) != NULL;) {
        uint32_t actor;
        uint32_t epoch;
        char whole[PATH_MAX];
        gq_shm shm = {.fd = -1};
        bool used = gq_lane_file_parse (entry->d_name, &actor, &epoch) &&
                    gq_lane_file_path (whole, path, actor, epoch) &&
                    gq_shm_open (&shm, whole, GQ_SHM_PAGE, NULL) == GQ_OK && gq_shm_locked (&shm);
        gq_shm_close (&shm);
        if (!used && entry->d_name[0] != '.')
            unlinkat (dirfd (directory), entry->d_name, 0);
    }
    if (directory != NULL)
        closedir (directory);
    rmdir (path);
}

/* May one more actor hold a block for as long as it computes?  There are fewer than actors. */
static bool
room_to_hold (const gq_lanes *self)
{
    int holders = 0;
    for (size_t i = 0; i < self->count; i++)
        holders += atomic_load (&words_of (self->lanes[i])->may_hold) != 0 ? 1 : 0;
    return holders < GQ_BOARD_HOLDERS;
}

/* This life serves the file from now on. */
static void
serve (const gq_lanes *self, const lane *which)
{
    gq_lane_words *words = words_of (which);
    if (atomic_load (&words->term) != self->config.term) {
        /* Of a block of another board.  Our own is opened only once the term is there. */
        atomic_store (&words->lease, GQ_LEASE_NONE);
        atomic_store (&words->term, self->config.term);
    }
    atomic_store (&words->fenced, self->current[which->actor] != which);
    if (room_to_hold (self))
        atomic_store (&words->may_hold, 1);
    gq_lane_ring (words);
}

/* Without it vectors go through the sockets. */
static void
open_hop (gq_lanes *self)
{
    gq_hop_identity identity = {
        .term = self->config.term, .digest = self->config.digest, .count = self->config.count};
    gq_error error = {""};
    memcpy (identity.run, self->config.run, GQ_RUN_ID_BYTES);
    int size =
        snprintf (self->hop_path, sizeof self->hop_path, "%s/" GQ_HOP_NAME, self->config.directory);
    if (size < PATH_MAX && gq_hop_create (&self->hop, self->hop_path, &identity, &error) != GQ_OK)
        gq_log (GQ_LOG_INFO, "no shared memory with the broker; large vectors go through sockets",
                "message", "s", error.text, NULL);
}

gq_status
gq_lanes_open (gq_lanes **lanes_p, const gq_lanes_config *config, const gq_ledger *ledger,
               gq_error *error)
{
    *lanes_p = NULL;
    gq_lanes *self = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    self->config = *config;
    self->bell = -1;
    snprintf (self->directory, sizeof self->directory, "%s", config->directory);
    int size = snprintf (self->board_path, sizeof self->board_path, "%s/board", config->directory);
    gq_status status = GQ_OK;
    if (size >= PATH_MAX)
        status = gq_fail (error, GQ_IO, "the name of %.900s is too long", config->directory);
    else if (mkdir (self->directory, 0700) != 0 && errno != EEXIST)
        status =
            gq_fail (error, GQ_IO, "cannot create %.900s: %s", self->directory, strerror (errno));
    gq_board_config board = {.term = config->term,
                             .digest = config->digest,
                             .count = config->count,
                             .rest_bytes = config->board_rest_bytes};
    memcpy (board.run, config->run, GQ_RUN_ID_BYTES);
    if (status == GQ_OK)
        status = gq_board_create (&self->board, self->board_path, &board, error);
    if (status != GQ_OK) {
        free (self);
        return status;
    }
    open_hop (self);
    self->bell = gq_bell_open (gq_bell_name_of (gq_board_fd (self->board)));
    scan (self, ledger);
    for (size_t i = 0; i < self->count; i++)
        serve (self, self->lanes[i]);
    *lanes_p = self;
    return GQ_OK;
}

void
gq_lanes_close (gq_lanes **lanes_p)
{
    gq_lanes *self = *lanes_p;
    if (self == NULL)
        return;
    for (size_t i = self->count; i-- > 0;) {
        lane *which = self->lanes[i];
        /* Actors that go on keep their files for the next optimizer. */
        if (over (which) || !attached (which)) {
            drop (self, i);
        } else {
            gq_shm_close (&which->shm);
            free (which);
        }
    }
    if (!self->keep_board)
        gq_board_remove (self->board);
    if (self->hop != NULL)
        gq_hop_remove (self->hop);
    gq_hop_close (&self->hop);
    rmdir (self->directory); /* only when nobody goes on */
    gq_board_close (&self->board);
    if (self->bell >= 0)
        close (self->bell);
    free (self->lanes);
    free (self);
    *lanes_p = NULL;
}

void
gq_lanes_keep_board (gq_lanes *self)
{
    self->keep_board = true;
}

gq_board *
gq_lanes_board (gq_lanes *self)
{
    return self->board;
}

const char *
gq_lanes_board_path (const gq_lanes *self)
{
    return self->board_path;
}

gq_hop *
gq_lanes_hop (gq_lanes *self)
{
    return self->hop;
}

const char *
gq_lanes_hop_path (const gq_lanes *self)
{
    return self->hop_path;
}

/* A mapped file for a new life; NULL: *error says why. */
static lane *
create (const gq_lanes *self, const gq_lane_identity *identity, gq_error *error)
{
    char path[PATH_MAX];
    lane *which = calloc (1, sizeof *which);
    if (which == NULL ||
        !gq_lane_file_path (path, self->directory, identity->actor, identity->epoch)) {
        gq_fail (error, GQ_MEMORY, "out of memory");
        free (which);
        return NULL;
    }
    which->actor = identity->actor;
    which->epoch = identity->epoch;
    which->slot_count = identity->slot_count;
    if (gq_lane_file_create (&which->shm, path, identity, error) == GQ_OK)
        return which;
    free (which);
    return NULL;
}

const char *
gq_lanes_grant (gq_lanes *self, uint32_t actor, uint32_t epoch, uint32_t window, gq_error *error)
{
    lane *earlier = self->current[actor];
    if (earlier != NULL && earlier->epoch == epoch)
        return earlier->shm.path;
    if (earlier != NULL) {
        /* Over, whether or not there will be a file for the new one. */
        self->current[actor] = NULL;
        serve (self, earlier);
    }
    if (self->count >= LANES_MAX) {
        gq_fail (error, GQ_FULL, "%d actors share memory already", LANES_MAX);
        return NULL;
    }
    gq_lane_identity identity = identity_of (self, actor, epoch);
    identity.slot_count = window + 1;
    lane *which = create (self, &identity, error);
    if (which == NULL)
        return NULL;
    const lane *kept = which;
    if (add (self, &which) != GQ_OK) {
        gq_fail (error, GQ_MEMORY, "out of memory");
        unlink (which->shm.path);
        gq_shm_close (&which->shm);
        free (which);
        return NULL;
    }
    serve (self, kept);
    return kept->shm.path;
}

const float *
gq_lanes_vector (const gq_lanes *self, const gq_frame *frame)
{
    const lane *which = self->current[frame->actor];
    if (which == NULL || which->epoch != frame->epoch || frame->slot >= which->slot_count ||
        atomic_load (&words_of (which)->holds[frame->slot]) != frame->sequence)
        return NULL;
    return gq_lane_file_slot (&which->shm, self->config.count, frame->slot);
}

/* The slot whose gradient is the next one that the ledger lacks; slot_count: none is. */
static uint32_t
next_ready (const lane *which, const gq_ledger *ledger)
{
    gq_lane_words *words = words_of (which);
    uint32_t found = which->slot_count;
    uint64_t lowest = UINT64_MAX;
    for (uint32_t i = 0; i < which->slot_count; i++) {
        const uint64_t sequence = atomic_load (&words->ready[i]);
        if (sequence != 0 && sequence < lowest && which->tried[i] != sequence &&
            gq_ledger_judge (ledger, which->actor, which->epoch, sequence) == GQ_OK) {
            lowest = sequence;
            found = i;
        }
    }
    return found;
}

bool
gq_lanes_ready (gq_lanes *self, const gq_ledger *ledger, uint8_t header[GQ_FRAME_HEADER_BYTES])
{
    for (size_t i = 0; i < self->count; i++) {
        lane *which = self->lanes[(self->turn + i) % self->count];
        gq_frame frame;
        if (self->current[which->actor] != which || early_count (which) >= EARLY_MAX)
            continue;
        const uint32_t slot = next_ready (which, ledger);
        if (slot == which->slot_count)
            continue;
        which->tried[slot] = atomic_load (&words_of (which)->ready[slot]);
        /* The actor's to write: what is looked at is a copy, and says the same as the words. */
        memcpy (header, words_of (which)->headers[slot], GQ_FRAME_HEADER_BYTES);
        if (gq_frame_decode (header, GQ_FRAME_HEADER_BYTES, &frame) != GQ_OK ||
            frame.lane != GQ_LANE_SHM || frame.actor != which->actor ||
            frame.epoch != which->epoch || frame.slot != slot ||
            frame.sequence != which->tried[slot] || frame.sequence - which->come - 1 >= 64)
            continue;
        which->early |= UINT64_C (1) << (frame.sequence - which->come - 1);
        self->early++;
        self->early_total++;
        self->turn = (self->turn + i + 1) % self->count;
        return true;
    }
    return false;
}

bool
gq_lanes_announced (gq_lanes *self, const gq_frame *frame)
{
    lane *which = self->current[frame->actor];
    if (which == NULL || which->epoch != frame->epoch || frame->sequence <= which->come)
        return false;
    const uint64_t step = frame->sequence - which->come;
    const uint64_t before = early_count (which);
    const bool early = step <= 64 && (which->early >> (step - 1) & 1) != 0;
    /* Messages of one actor come in order: those before it have come, or are lost. */
    which->early = step < 64 ? which->early >> step : 0;
    which->come = frame->sequence;
    self->early -= before - early_count (which);
    return early;
}

uint64_t
gq_lanes_early_total (const gq_lanes *self)
{
    return self->early_total;
}

void
gq_lanes_forget_early (gq_lanes *self)
{
    for (size_t i = 0; i < self->count; i++)
        self->lanes[i]->early = 0;
    self->early = 0;
}

uint64_t
gq_lanes_early (const gq_lanes *self)
{
    return self->early;
}

int
gq_lanes_bell (const gq_lanes *self)
{
    return self->bell;
}

void
gq_lanes_silence (const gq_lanes *self)
{
    gq_bell_silence (self->bell);
}

bool
gq_lanes_ack (gq_lanes *self, uint32_t actor, uint32_t epoch, const gq_ack *ack, uint64_t version)
{
    const lane *which = self->current[actor];
    if (which == NULL || which->epoch != epoch || !attached (which))
        return false;
    const gq_lane_ack full = {.ack = *ack, .version = version, .term = self->config.term};
    gq_lane_ack_write (words_of (which), &full);
    atomic_fetch_add (&words_of (which)->beat, 1);
    gq_lane_ring (words_of (which));
    return true;
}

void
gq_lanes_goes_inline (gq_lanes *self, uint32_t actor, uint32_t epoch)
{
    const lane *which = self->current[actor];
    if (which == NULL || which->epoch != epoch || attached (which))
        return;
    for (size_t i = 0; i < self->count; i++)
        if (self->lanes[i] == which) {
            drop (self, i);
            return;
        }
}

/* Of the block that a lease word names. */
static uint32_t
bit_of (unsigned lease)
{
    return lease >= 1 && lease <= GQ_BOARD_BLOCKS ? 1u << (lease - 1) : 0;
}

uint32_t
gq_lanes_leased (const gq_lanes *self)
{
    uint32_t leased = self->hop == NULL ? 0 : bit_of (gq_hop_leased (self->hop));
    for (size_t i = 0; i < self->count; i++)
        leased |= bit_of (atomic_load (&words_of (self->lanes[i])->lease));
    return leased;
}

void
gq_lanes_ring_all (gq_lanes *self)
{
    for (size_t i = 0; i < self->count; i++)
        gq_lane_ring (words_of (self->lanes[i]));
}

void
gq_lanes_tend (gq_lanes *self)
{
    for (size_t i = self->count; i-- > 0;) {
        lane *which = self->lanes[i];
        atomic_fetch_add (&words_of (which)->beat, 1);
        const bool used = attached (which);
        which->waits = used ? 0 : which->waits + 1;
        if (room_to_hold (self))
            atomic_store (&words_of (which)->may_hold, 1);
        if (over (which) || (!used && given_up (self, which)))
            drop (self, i);
    }
}
