/*
 * The reduction of an Atari screen, against the two resizings written out.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "actors/net.h"
#include "actors/screen.h"

#define HALF 80 /* GQ_SCREEN_SIDE / 2 */

/* Linear interpolation of `half` at the centre of output (x, y), as OpenCV places it. */
static double
interpolate (double half[HALF][HALF], int x, int y)
{
    double ratio = (double)HALF / GQ_SCREEN_REDUCED;
    double across = (x + 0.5) * ratio - 0.5, down = (y + 0.5) * ratio - 0.5;
    int left = (int)floor (across), top = (int)floor (down);
    double right = across - left, below = down - top;
    return (1 - below) * ((1 - right) * half[top][left] + right * half[top][left + 1]) +
           below * ((1 - right) * half[top + 1][left] + right * half[top + 1][left + 1]);
}

Test (screen, equals_halving_and_then_linear_interpolation)
{
    static uint8_t field[GQ_SCREEN_SIDE * GQ_SCREEN_SIDE];
    static double half[HALF][HALF];
    static float out[GQ_SCREEN_REDUCED * GQ_SCREEN_REDUCED];
    gq_random random;

    printf ("seed 9\n");
    gq_random_seed (&random, 9);
    for (size_t i = 0; i < sizeof field; i++)
        field[i] = (uint8_t)(gq_random_next (&random) >> 56);
    for (int y = 0; y < HALF; y++)
        for (int x = 0; x < HALF; x++)
            for (int k = 0; k < 4; k++)
                half[y][x] +=
                    field[(2 * y + (k >> 1)) * GQ_SCREEN_SIDE + 2 * x + k % 2] / 4.0 / 255;
    gq_screen_reduce (field, out);
    for (int y = 0; y < GQ_SCREEN_REDUCED; y++)
        for (int x = 0; x < GQ_SCREEN_REDUCED; x++)
            cr_expect_float_eq ((double)out[y * GQ_SCREEN_REDUCED + x], interpolate (half, x, y),
                                1e-5, "(%d, %d)", x, y);
}

Test (screen, black_stays_0_and_white_becomes_1)
{
    static uint8_t field[GQ_SCREEN_SIDE * GQ_SCREEN_SIDE];
    static float out[GQ_SCREEN_REDUCED * GQ_SCREEN_REDUCED];

    for (int value = 0; value <= 255; value += 255) {
        for (size_t i = 0; i < sizeof field; i++)
            field[i] = (uint8_t)value;
        gq_screen_reduce (field, out);
        for (size_t i = 0; i < sizeof out / sizeof out[0]; i++)
            cr_expect_float_eq (out[i], (float)value / 255, 1e-6f);
    }
}
