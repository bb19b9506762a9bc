/*
 * One convolution of the pixel net: 3x3, stride 2, padding 1, ELU.  Step 0 of a gradient's path.
 *
 * Images are (y, x, channel) with a border of one zero: a 3x3 patch is then three contiguous runs,
 * so gathering patches and adding their gradients back are plain row copies and row sums, and the
 * convolution is one matrix product, patches (P, 9 C) by kernels^T (9 C, F).  PyTorch's weights are
 * reordered to fit by gq_conv_pack.  The forward pass keeps the images, not the patches: gathering
 * again costs less than the memory they would take, 207 kB a step at 42x42.
 */
#ifndef GQ_CONV_H
#define GQ_CONV_H

#include <stddef.h>

#include "activation.h"

#define GQ_CONV_TAPS 9

/* Sizes are set by gq_conv_size; the arrays are the net's. */
typedef struct gq_conv {
    size_t channels, filters;     /* C, F */
    size_t height, width;         /* of the input */
    size_t out_height, out_width; /* half of them, rounded up */
    size_t places;                /* P = out_height * out_width */
    size_t patch;                 /* 9 C */
    size_t padded;                /* floats of one input: (height + 2) (width + 2) C */
    size_t batch;                 /* inputs of one product */
    float *input;                 /* [slots, height + 2, width + 2, C]; its border stays zero */
    float *kernels;               /* [F, 3, 3, C] */
    float *columns;               /* [3, 3, C, F], the same: forward is faster by these */
    float *d_kernels;             /* [F, 3, 3, C] */
    float *d_output;              /* [steps, P, F], gradient before the ELU */
} gq_conv;

/* Shared by all layers of a net, sized for the largest. */
typedef struct gq_conv_scratch {
    const gq_activation *loops;
    float *patches; /* [most of batch P 9 C] */
    float *rows;    /* [most of batch P F] */
    float *d_image; /* [most of padded] */
} gq_conv_scratch;

/* Sizes for an input (channels, height, width); batch for at most steps_max steps. */
void gq_conv_size (gq_conv *conv, size_t channels, size_t height, size_t width, size_t filters,
                   size_t steps_max);

/* Floats from the start of a padded image to its pixel (0, 0), and between two rows. */
size_t gq_conv_inside (const gq_conv *conv);
size_t gq_conv_row (const gq_conv *conv);

/* kernels, columns = weights (F, C, 3, 3), and weights = d_kernels. */
void gq_conv_pack (gq_conv *conv, const float *weights);
void gq_conv_unpack (const gq_conv *conv, float *d_weights);

/* Inputs first .. first + count - 1 to out: each out_height rows of out_width * F floats, out_row
 * floats apart; out_image floats from one's first to the next one's. */
void gq_conv_forward (const gq_conv *conv, const gq_conv_scratch *scratch, size_t first,
                      size_t count, const float *bias, float *out, size_t out_row,
                      size_t out_image);

/*
 * Inputs first .. first + count - 1, to which d_output[0 .. count - 1] belong: add to d_kernels and
 * d_bias[F], and write d_below[count, height, width, C], the gradient before the ELU that made the
 * input; NULL: the input is the observation, which needs none.
 */
void gq_conv_backward (gq_conv *conv, const gq_conv_scratch *scratch, size_t first, size_t count,
                       float *d_bias, float *d_below);

#endif
