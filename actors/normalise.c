/*
 * Running normalisation of observations.  Step 0 of a gradient's path.
 */
#include "normalise.h"

#include <math.h>

#define DECAY 0.9999
#define FLOOR 1e-8 /* an observation of one colour is not divided by 0 */

void
gq_normalise (gq_normaliser *normaliser, float *x, size_t count)
{
    double sum = 0, squares = 0;

    for (size_t i = 0; i < count; i++)
        sum += (double)x[i];
    double mean = sum / (double)count;
    for (size_t i = 0; i < count; i++)
        squares += ((double)x[i] - mean) * ((double)x[i] - mean);
    double deviation = sqrt (squares / (double)count);

    normaliser->mean = DECAY * normaliser->mean + (1 - DECAY) * mean;
    normaliser->deviation = DECAY * normaliser->deviation + (1 - DECAY) * deviation;
    normaliser->weight = DECAY * normaliser->weight + (1 - DECAY);
    float shift = (float)(normaliser->mean / normaliser->weight);
    float scale = (float)(1 / (normaliser->deviation / normaliser->weight + FLOOR));
    for (size_t i = 0; i < count; i++)
        x[i] = (x[i] - shift) * scale;
}
