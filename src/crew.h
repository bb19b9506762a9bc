/*
 * Crew: threads that do one piece of work each, together.  Step 5 of a gradient's path, with
 * --threads.
 */
#ifndef GQ_CREW_H
#define GQ_CREW_H

#include "gradq/status.h"

/* More would wait for memory, not for cores. */
#define GQ_CREW_MAX 64

typedef struct gq_crew gq_crew;

/* `size` counts the calling thread, 1 to GQ_CREW_MAX.  GQ_OK; GQ_MEMORY, GQ_IO (no thread) with
 * *error. */
GQ_CHECK gq_status gq_crew_new (gq_crew **crew_p, unsigned size, gq_error *error);
void gq_crew_free (gq_crew **crew_p);

unsigned gq_crew_size (const gq_crew *crew);

/* Call work (context, i) once for each i < size, 0 on the calling thread; returns when all have
 * come back. */
void gq_crew_run (gq_crew *crew, void (*work) (void *context, unsigned index), void *context);

#endif
