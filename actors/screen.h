/*
 * The original agent's view of an Atari screen.  Step 0 of a gradient's path.
 */
#ifndef GQ_SCREEN_H
#define GQ_SCREEN_H

#include <stdint.h>

#define GQ_SCREEN_SIDE    160 /* of the field that goes in: rows 34 .. 193 of a 210 x 160 screen */
#define GQ_SCREEN_REDUCED 42  /* of what the net sees */

/*
 * field[160, 160], greys, to out[42, 42] in 0 .. 1: halved to 80 x 80 by the mean of 2 x 2 pixels,
 * then to 42 x 42 by linear interpolation between pixel centres, as OpenCV's INTER_LINEAR does both
 * in OpenAI's universe-starter-agent.  O(160 * 42), no allocation.
 */
void gq_screen_reduce (const uint8_t *field, float *out);

#endif
