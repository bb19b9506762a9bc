/*
 * Observations brought to mean 0 and deviation 1 by running scalars.  Step 0 of a gradient's path.
 *
 * A ball is a few grey pixels on an even field: a net sees it many times sooner when the field is
 * 0.  The scalars are means over thousands of observations of one game and settle within the first
 * ones, so an evaluation finds the same without being told.
 */
#ifndef GQ_NORMALISE_H
#define GQ_NORMALISE_H

#include <stddef.h>
#include <stdint.h>

/* Of one game; zeros to start with. */
typedef struct gq_normaliser {
    double mean, deviation; /* exponential means of both, not yet divided by weight */
    double weight;          /* 1 - decay^observations */
} gq_normaliser;

/*
 * x[count] = (x - mean) / (deviation + 1e-8), where mean and deviation are the exponential means,
 * decay 0.9999, of those of all observations so far, this one included (Kingma & Ba 2015, section
 * 3, for the correction of their bias).  O(count).
 */
void gq_normalise (gq_normaliser *normaliser, float *x, size_t count);

#endif
