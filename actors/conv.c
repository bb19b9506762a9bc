/*
 * One convolution of the pixel net as matrix products.  Step 0 of a gradient's path.  It must never
 * write an image's border, whose zeros are the padding.
 */
#include "conv.h"

#include <string.h>

#include "blas.h"

#define SIDE 3 /* of a kernel; stride 2 and padding 1 are in the indices below */
/* Floats of patches gathered before they are multiplied: 144 kB stay in a core's L2 cache. */
#define PATCHES_TARGET 36864

void
gq_conv_size (gq_conv *conv, size_t channels, size_t height, size_t width, size_t filters,
              size_t steps_max)
{
    conv->channels = channels, conv->filters = filters;
    conv->height = height, conv->width = width;
    conv->out_height = (height + 1) / 2, conv->out_width = (width + 1) / 2;
    conv->places = conv->out_height * conv->out_width;
    conv->patch = GQ_CONV_TAPS * channels;
    conv->padded = (height + 2) * (width + 2) * channels;
    conv->batch = PATCHES_TARGET / (conv->places * conv->patch);
    if (conv->batch > steps_max)
        conv->batch = steps_max;
    if (conv->batch < 1)
        conv->batch = 1;
}

size_t
gq_conv_row (const gq_conv *conv)
{
    return (conv->width + 2) * conv->channels;
}

size_t
gq_conv_inside (const gq_conv *conv)
{
    return gq_conv_row (conv) + conv->channels;
}

void
gq_conv_pack (gq_conv *conv, const float *weights)
{
    const size_t channels = conv->channels;
    float *restrict kernels = conv->kernels, *restrict columns = conv->columns;
    for (size_t f = 0; f < conv->filters; f++, weights += conv->patch)
        for (size_t tap = 0; tap < GQ_CONV_TAPS; tap++)
            for (size_t c = 0; c < channels; c++) {
                *kernels = weights[c * GQ_CONV_TAPS + tap];
                columns[(tap * channels + c) * conv->filters + f] = *kernels++;
            }
}

void
gq_conv_unpack (const gq_conv *conv, float *d_weights)
{
    const size_t channels = conv->channels;
    const float *restrict kernels = conv->d_kernels;
    for (size_t f = 0; f < conv->filters; f++, d_weights += conv->patch)
        for (size_t tap = 0; tap < GQ_CONV_TAPS; tap++)
            for (size_t c = 0; c < channels; c++)
                d_weights[c * GQ_CONV_TAPS + tap] = *kernels++;
}

/* Padded image to patches (P, 9 C). */
static void
gather (const gq_conv *conv, const float *restrict image, float *restrict patches)
{
    const size_t run = SIDE * conv->channels, row = gq_conv_row (conv);
    for (size_t y = 0; y < conv->out_height; y++)
        for (size_t x = 0; x < conv->out_width; x++)
            for (size_t k = 0; k < SIDE; k++) {
                const float *from = image + (2 * y + k) * row + 2 * x * conv->channels;
                if (run == SIDE) /* one channel is usual, and a known size spares the call */
                    memcpy (patches, from, SIDE * sizeof *patches);
                else
                    memcpy (patches, from, run * sizeof *patches);
                patches += run;
            }
}

/* The transpose: add patches (P, 9 C) into a padded image. */
static void
scatter (const gq_conv *conv, const gq_activation *loops, const float *patches, float *image)
{
    const size_t run = SIDE * conv->channels, row = gq_conv_row (conv);
    for (size_t y = 0; y < conv->out_height; y++)
        for (size_t x = 0; x < conv->out_width; x++)
            for (size_t k = 0; k < SIDE; k++) {
                loops->add (run, patches, image + (2 * y + k) * row + 2 * x * conv->channels);
                patches += run;
            }
}

void
gq_conv_forward (const gq_conv *conv, const gq_conv_scratch *scratch, size_t first, size_t count,
                 const float *bias, float *out, size_t out_row, size_t out_image)
{
    const size_t row = conv->out_width * conv->filters, patches = conv->places * conv->patch;
    for (size_t done = 0; done < count; done += conv->batch) {
        size_t inputs = count - done < conv->batch ? count - done : conv->batch;
        for (size_t i = 0; i < inputs; i++)
            gather (conv, conv->input + (first + done + i) * conv->padded,
                    scratch->patches + i * patches);
        gq_multiply (CblasNoTrans, CblasNoTrans, inputs * conv->places, conv->filters, conv->patch,
                     scratch->patches, conv->columns, 0.0f, scratch->rows);
        const float *rows = scratch->rows;
        for (size_t i = 0; i < inputs; i++, out += out_image)
            for (size_t y = 0; y < conv->out_height; y++, rows += row)
                scratch->loops->elu (conv->out_width, conv->filters, bias, rows, out + y * out_row);
    }
}

/* The gradient of one input, through the ELU that made it, from that of its patches. */
static void
input_backward (const gq_conv *conv, const gq_conv_scratch *scratch, size_t slot,
                const float *d_patches, float *d_below)
{
    const float *image = conv->input + slot * conv->padded + gq_conv_inside (conv);
    const float *d_image = scratch->d_image + gq_conv_inside (conv);
    memset (scratch->d_image, 0, conv->padded * sizeof *scratch->d_image);
    scatter (conv, scratch->loops, d_patches, scratch->d_image);
    for (size_t y = 0; y < conv->height; y++) {
        scratch->loops->elu_backward (conv->width * conv->channels, image, d_image, d_below);
        image += gq_conv_row (conv), d_image += gq_conv_row (conv);
        d_below += conv->width * conv->channels;
    }
}

void
gq_conv_backward (gq_conv *conv, const gq_conv_scratch *scratch, size_t first, size_t count,
                  float *d_bias, float *d_below)
{
    const size_t patches = conv->places * conv->patch, below = conv->height * conv->width;
    for (size_t done = 0; done < count; done += conv->batch) {
        size_t steps = count - done < conv->batch ? count - done : conv->batch;
        size_t rows = steps * conv->places;
        const float *d_rows = conv->d_output + done * conv->places * conv->filters;
        for (size_t i = 0; i < steps; i++)
            gather (conv, conv->input + (first + done + i) * conv->padded,
                    scratch->patches + i * patches);
        gq_multiply (CblasTrans, CblasNoTrans, conv->filters, conv->patch, rows, d_rows,
                     scratch->patches, 1.0f, conv->d_kernels);
        for (size_t row = 0; row < rows; row++)
            scratch->loops->add (conv->filters, d_rows + row * conv->filters, d_bias);
        if (d_below == NULL)
            continue;
        /* The patches have served; their gradient takes their place. */
        gq_multiply (CblasNoTrans, CblasNoTrans, rows, conv->patch, conv->filters, d_rows,
                     conv->kernels, 0.0f, scratch->patches);
        for (size_t i = 0; i < steps; i++)
            input_backward (conv, scratch, first + done + i, scratch->patches + i * patches,
                            d_below + (done + i) * below * conv->channels);
    }
}
