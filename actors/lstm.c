/*
 * PyTorch's LSTMCell over a rollout.  Step 0 of a gradient's path.  It must never let a gradient
 * cross an episode's end.
 *
 * Per step only what must be: the cell's own derivatives and W_hh^T d_gates, of all environments in
 * one product.  Every other product goes over the whole rollout at once, which reads the weights
 * once instead of T times.
 */
#include "lstm.h"

#include <string.h>

#include "blas.h"

/* The gates of one row to its new cell state and h_out. */
static void
activate (gq_lstm *lstm, size_t slot, float *restrict c_new)
{
    const size_t hidden = lstm->hidden;
    float *i = lstm->gates + slot * 4 * hidden, *f = i + hidden, *g = f + hidden, *o = g + hidden;
    const float *c_in = lstm->c_in + slot * hidden;
    float *c_tanh = lstm->c_tanh + slot * hidden, *h_out = lstm->h_out + slot * hidden;

    lstm->loops->sigmoid (2 * hidden, i);
    lstm->loops->tanh (hidden, g);
    lstm->loops->sigmoid (hidden, o);
    for (size_t u = 0; u < hidden; u++)
        c_tanh[u] = c_new[u] = f[u] * c_in[u] + i[u] * g[u];
    lstm->loops->tanh (hidden, c_tanh);
    for (size_t u = 0; u < hidden; u++)
        h_out[u] = o[u] * c_tanh[u];
}

void
gq_lstm_forward (gq_lstm *lstm, size_t slot, size_t first, size_t count,
                 const gq_lstm_weights *weights)
{
    const size_t hidden = lstm->hidden;
    float *gates = lstm->gates + slot * 4 * hidden, *h_in = lstm->h_in + slot * hidden;
    memcpy (h_in, lstm->h + first * hidden, count * hidden * sizeof *h_in);
    memcpy (lstm->c_in + slot * hidden, lstm->c + first * hidden,
            count * hidden * sizeof *lstm->c_in);
    for (size_t row = 0; row < count; row++)
        for (size_t i = 0; i < 4 * hidden; i++)
            gates[row * 4 * hidden + i] = weights->bias_ih[i] + weights->bias_hh[i];
    gq_multiply_rows (count, 4 * hidden, lstm->features, lstm->x + slot * lstm->features,
                      weights->ih, gates);
    gq_multiply_rows (count, 4 * hidden, hidden, h_in, weights->hh, gates);
    for (size_t row = 0; row < count; row++)
        activate (lstm, slot + row, lstm->c_new + (first + row) * hidden);
}

void
gq_lstm_advance (gq_lstm *lstm, size_t slot)
{
    const size_t bytes = lstm->envs * lstm->hidden * sizeof *lstm->h;
    memcpy (lstm->h, lstm->h_out + slot * lstm->hidden, bytes);
    memcpy (lstm->c, lstm->c_new, bytes);
}

/* One row back: d_h (of h_out) and the carried c_back[H] to d_gates (before their activations) and
 * the c_back of the step before. */
static void
row_backward (gq_lstm *lstm, size_t row, float *restrict c_back)
{
    const size_t hidden = lstm->hidden;
    const float *restrict i = lstm->gates + row * 4 * hidden, *restrict f = i + hidden;
    const float *restrict g = f + hidden, *restrict o = g + hidden;
    const float *restrict c_in = lstm->c_in + row * hidden;
    const float *restrict c_tanh = lstm->c_tanh + row * hidden;
    const float *restrict d_h = lstm->d_h + row * hidden;
    float *restrict d_i = lstm->d_gates + row * 4 * hidden, *restrict d_f = d_i + hidden;
    float *restrict d_g = d_f + hidden, *restrict d_o = d_g + hidden;
    for (size_t u = 0; u < hidden; u++) {
        float d_c = d_h[u] * o[u] * (1.0f - c_tanh[u] * c_tanh[u]) + c_back[u];
        d_o[u] = d_h[u] * c_tanh[u] * o[u] * (1.0f - o[u]);
        d_i[u] = d_c * g[u] * i[u] * (1.0f - i[u]);
        d_f[u] = d_c * c_in[u] * f[u] * (1.0f - f[u]);
        d_g[u] = d_c * i[u] * (1.0f - g[u] * g[u]);
        c_back[u] = d_c * f[u];
    }
}

/* d_h of the step before += d_gates W_hh of this one, whose first row is `row`, but not across an
 * episode's end. */
static void
carry_back (gq_lstm *lstm, size_t row, const bool *ends, const float *hh)
{
    const size_t hidden = lstm->hidden, envs = lstm->envs, before = row - envs;
    bool any = false;

    for (size_t k = 0; k < envs; k++)
        if (ends[before + k]) {
            memset (lstm->c_back + k * hidden, 0, hidden * sizeof *lstm->c_back);
            any = true;
        }
    if (envs > 1 && !any) {
        gq_multiply (CblasNoTrans, CblasNoTrans, envs, hidden, 4 * hidden,
                     lstm->d_gates + row * 4 * hidden, hh, 1.0f, lstm->d_h + before * hidden);
        return;
    }
    for (size_t k = 0; k < envs; k++)
        if (!ends[before + k])
            gq_multiply_vector (CblasTrans, 4 * hidden, hidden, hh,
                                lstm->d_gates + (row + k) * 4 * hidden,
                                lstm->d_h + (before + k) * hidden);
}

void
gq_lstm_backward (gq_lstm *lstm, size_t steps, const bool *ends, const gq_lstm_weights *weights,
                  const gq_lstm_gradients *gradients)
{
    const size_t hidden = lstm->hidden, envs = lstm->envs, rows = steps * envs;
    memset (lstm->c_back, 0, envs * hidden * sizeof *lstm->c_back);
    for (size_t t = steps; t-- > 0;) {
        for (size_t k = 0; k < envs; k++)
            row_backward (lstm, t * envs + k, lstm->c_back + k * hidden);
        if (t > 0)
            carry_back (lstm, t * envs, ends, weights->hh);
    }
    gq_multiply (CblasTrans, CblasNoTrans, 4 * hidden, lstm->features, rows, lstm->d_gates, lstm->x,
                 0.0f, gradients->ih);
    gq_multiply (CblasTrans, CblasNoTrans, 4 * hidden, hidden, rows, lstm->d_gates, lstm->h_in,
                 0.0f, gradients->hh);
    memset (gradients->bias_ih, 0, 4 * hidden * sizeof (float));
    for (size_t row = 0; row < rows; row++)
        lstm->loops->add (4 * hidden, lstm->d_gates + row * 4 * hidden, gradients->bias_ih);
    memcpy (gradients->bias_hh, gradients->bias_ih, 4 * hidden * sizeof (float));
    gq_multiply (CblasNoTrans, CblasNoTrans, rows, lstm->features, 4 * hidden, lstm->d_gates,
                 weights->ih, 0.0f, lstm->d_x);
}
