/*
 * Crew: everybody waits for a round to begin, and the caller for it to end.
 */
#include "crew.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct member {
    gq_crew *crew;
    pthread_t thread;
    unsigned index;
} member;

struct gq_crew {
    unsigned size;
    unsigned started; /* threads, beside the caller's */
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    unsigned long round; /* under the lock, as all that follows */
    unsigned busy;
    bool over;
    void (*work) (void *context, unsigned index);
    void *context;
    member members[GQ_CREW_MAX];
};

static void *
member_main (void *argument)
{
    const member *self = argument;
    gq_crew *crew = self->crew;
    unsigned long seen = 0;
    pthread_mutex_lock (&crew->lock);
    for (;;) {
        while (crew->round == seen && !crew->over)
            pthread_cond_wait (&crew->begin, &crew->lock);
        if (crew->over)
            break;
        seen = crew->round;
        pthread_mutex_unlock (&crew->lock);
        crew->work (crew->context, self->index);
        pthread_mutex_lock (&crew->lock);
        if (--crew->busy == 0)
            pthread_cond_signal (&crew->end);
    }
    pthread_mutex_unlock (&crew->lock);
    return NULL;
}

gq_status
gq_crew_new (gq_crew **crew_p, unsigned size, gq_error *error)
{
    assert (size >= 1 && size <= GQ_CREW_MAX);
    gq_crew *self = *crew_p = calloc (1, sizeof *self);
    if (self == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    self->size = size;
    pthread_mutex_init (&self->lock, NULL);
    pthread_cond_init (&self->begin, NULL);
    pthread_cond_init (&self->end, NULL);
    for (unsigned i = 1; i < size; i++) {
        member *one = &self->members[self->started];
        *one = (member){.crew = self, .index = i};
        int cause = pthread_create (&one->thread, NULL, member_main, one);
        if (cause != 0) {
            gq_crew_free (crew_p);
            return gq_fail (error, GQ_IO, "no thread %u of %u: %s", i + 1, size, strerror (cause));
        }
        self->started++;
    }
    return GQ_OK;
}

void
gq_crew_free (gq_crew **crew_p)
{
    gq_crew *self = *crew_p;
    if (self == NULL)
        return;
    pthread_mutex_lock (&self->lock);
    self->over = true;
    pthread_cond_broadcast (&self->begin);
    pthread_mutex_unlock (&self->lock);
    for (unsigned i = 0; i < self->started; i++)
        pthread_join (self->members[i].thread, NULL);
    pthread_cond_destroy (&self->begin);
    pthread_cond_destroy (&self->end);
    pthread_mutex_destroy (&self->lock);
    free (self);
    *crew_p = NULL;
}

unsigned
gq_crew_size (const gq_crew *self)
{
    return self->size;
}

void
gq_crew_run (gq_crew *self, void (*work) (void *context, unsigned index), void *context)
{
    pthread_mutex_lock (&self->lock);
    self->work = work;
    self->context = context;
    self->busy = self->started;
    self->round++;
    pthread_cond_broadcast (&self->begin);
    pthread_mutex_unlock (&self->lock);
    work (context, 0);
    pthread_mutex_lock (&self->lock);
    while (self->busy > 0)
        pthread_cond_wait (&self->end, &self->lock);
    pthread_mutex_unlock (&self->lock);
}
