/*
 * Near: which hop is in use, counted, so that it goes with its last user.
 */
#include "near.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "hex.h"
#include "log.h"
#include "shm.h"

typedef struct holding {
    gq_hop *hop;
    unsigned users; /* 1 for being the current one */
} holding;

/* The current one, and earlier ones that somebody still uses. */
#define HOLDINGS_MAX 4

struct gq_near {
    pthread_mutex_t lock;
    holding holdings[HOLDINGS_MAX];
    holding *current; /* NULL: none */
    bool said;        /* why there is none */
};

gq_near *
gq_near_new (void)
{
    gq_near *self = calloc (1, sizeof *self);
    if (self != NULL)
        pthread_mutex_init (&self->lock, NULL);
    return self;
}

static void
leave (holding *which)
{
    if (--which->users == 0)
        gq_hop_close (&which->hop);
}

static void
leave_current (gq_near *self)
{
    if (self->current != NULL)
        leave (self->current);
    self->current = NULL;
}

void
gq_near_free (gq_near **near_p)
{
    gq_near *self = *near_p;
    if (self == NULL)
        return;
    leave_current (self);
    pthread_mutex_destroy (&self->lock);
    free (self);
    *near_p = NULL;
}

/* false: the report names nothing that this host could have. */
static bool
identity_of (const json_t *report, gq_hop_identity *identity)
{
    const json_t *shm = json_object_get (report, "shm");
    const char *host = json_string_value (json_object_get (shm, "host"));
    const char *digest = json_string_value (json_object_get (shm, "digest"));
    const char *run = json_string_value (json_object_get (report, "run"));
    const json_int_t term = json_integer_value (json_object_get (report, "term"));
    const json_int_t count = json_integer_value (json_object_get (report, "parameters"));
    char ours[GQ_HOST_ID_BYTES];
    gq_host_id (ours);
    memset (identity, 0, sizeof *identity);
    if (host == NULL || digest == NULL || run == NULL || ours[0] == '\0' ||
        strcmp (host, ours) != 0 || !gq_hex_decode (run, identity->run, GQ_RUN_ID_BYTES) ||
        term < 1 || term > UINT32_MAX || count < 1 || (uint64_t)count > GQ_PARAMETERS_MAX)
        return false;
    char *end;
    identity->digest = strtoull (digest, &end, 16);
    identity->term = (uint32_t)term;
    identity->count = (uint64_t)count;
    return *end == '\0';
}

/* Open what a report names, in a place of the table that is free. */
static void
open_new (gq_near *self, const json_t *report, const gq_hop_identity *identity)
{
    const json_t *shm = json_object_get (report, "shm");
    const char *path = json_string_value (json_object_get (shm, "broker"));
    const char *board = json_string_value (json_object_get (shm, "board"));
    gq_error error = {""};
    holding *place = self->holdings;
    while (place < self->holdings + HOLDINGS_MAX && place->users > 0)
        place++;
    if (path == NULL || board == NULL || place == self->holdings + HOLDINGS_MAX)
        return;
    if (gq_hop_open (&place->hop, path, board, identity, &error) == GQ_OK) {
        place->users = 1;
        self->current = place;
        self->said = false;
        gq_log (GQ_LOG_INFO, "shares memory with the optimizer", "path", "s", path, NULL);
    } else if (!self->said) {
        self->said = true;
        gq_log (GQ_LOG_INFO,
                "large vectors go through sockets: the optimizer's memory is not shared", "message",
                "s", error.text, NULL);
    }
}

void
gq_near_see (gq_near *self, const json_t *report)
{
    gq_hop_identity identity;
    const bool named = report != NULL && identity_of (report, &identity);
    pthread_mutex_lock (&self->lock);
    if (!named || (self->current != NULL && !gq_hop_is (self->current->hop, &identity)))
        leave_current (self);
    if (named && self->current == NULL)
        open_new (self, report, &identity);
    pthread_mutex_unlock (&self->lock);
}

void
gq_near_forget (gq_near *self)
{
    pthread_mutex_lock (&self->lock);
    leave_current (self);
    pthread_mutex_unlock (&self->lock);
}

gq_hop *
gq_near_hold (gq_near *self)
{
    gq_hop *hop = NULL;
    pthread_mutex_lock (&self->lock);
    if (self->current != NULL) {
        self->current->users++;
        hop = self->current->hop;
    }
    pthread_mutex_unlock (&self->lock);
    return hop;
}

void
gq_near_release (gq_near *self, gq_hop *hop)
{
    if (hop == NULL)
        return;
    pthread_mutex_lock (&self->lock);
    for (size_t i = 0; i < HOLDINGS_MAX; i++)
        if (self->holdings[i].hop == hop)
            leave (&self->holdings[i]);
    pthread_mutex_unlock (&self->lock);
}
