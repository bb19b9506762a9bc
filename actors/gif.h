/*
 * An episode as an animated GIF.  Beside a gradient's path: for people to look at.
 */
#ifndef GQ_GIF_H
#define GQ_GIF_H

#include "env.h"

typedef struct gq_gif gq_gif;

/* The file gets its name when it is finished; until then it lies beside that, under another one.
 * GQ_OK: *gif_p is yours; GQ_IO, GQ_MEMORY. */
GQ_CHECK gq_status gq_gif_create (gq_gif **gif_p, const char *path, gq_error *error);

/* The next picture, to be seen for 1/15 s; all are of one size.  Up to 256 colours in a picture are
 * kept as they are, more become the nearest of a fixed 256.  O(width * height).
 * GQ_OK, GQ_INVALID: another size, GQ_IO, GQ_MEMORY: the recording is then only to be dropped. */
GQ_CHECK gq_status gq_gif_add (gq_gif *gif, const gq_picture *picture, gq_error *error);

/* After at least one picture.  *gif_p is NULL afterwards; GQ_OK: the file is whole and under its
 * name; GQ_IO: nothing is left of it, and a file of that name is as it was. */
GQ_CHECK gq_status gq_gif_finish (gq_gif **gif_p, gq_error *error);
/* Leave nothing of it.  *gif_p may be NULL, and is NULL afterwards. */
void gq_gif_drop (gq_gif **gif_p);

#endif
