/*
 * Reducing an Atari screen.  Step 0 of a gradient's path.
 *
 * Both reductions are linear and separable, so they are one filter of four neighbours along each
 * axis: two halved pixels of two pixels each.
 */
#include "screen.h"

#define SIDE    GQ_SCREEN_SIDE
#define REDUCED GQ_SCREEN_REDUCED
#define TAPS    4

enum { HALF = SIDE / 2 };

/* Output i of an axis is sum over k of weight[k] * input[first + k]. */
typedef struct taps {
    int first;
    float weight[TAPS];
} taps;

/* OpenCV's centres: output i lies at (i + 1/2) * HALF / REDUCED - 1/2 of the halved axis, which for
 * these sizes never leaves its ends. */
static taps
taps_of (int i)
{
    float place = ((float)i + 0.5f) * (float)HALF / (float)REDUCED - 0.5f;
    int left = (int)place;
    float right = place - (float)left;

    return (taps){.first = 2 * left,
                  .weight = {0.5f * (1 - right), 0.5f * (1 - right), 0.5f * right, 0.5f * right}};
}

void
gq_screen_reduce (const uint8_t *field, float *out)
{
    taps axis[REDUCED]; /* both axes are alike */

    for (int i = 0; i < REDUCED; i++)
        axis[i] = taps_of (i);
    for (int y = 0; y < REDUCED; y++) {
        const taps rows = axis[y];
        const uint8_t *above = field + rows.first * SIDE;
        float line[SIDE];
        for (int x = 0; x < SIDE; x++)
            line[x] = rows.weight[0] * (float)(above[x] + above[SIDE + x]) +
                      rows.weight[2] * (float)(above[2 * SIDE + x] + above[3 * SIDE + x]);
        for (int x = 0; x < REDUCED; x++) {
            const taps columns = axis[x];
            const float *left = line + columns.first;
            *out++ = (columns.weight[0] * (left[0] + left[1]) +
                      columns.weight[2] * (left[2] + left[3])) /
                     255.0f;
        }
    }
}
