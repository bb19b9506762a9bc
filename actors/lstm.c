/*
 * PyTorch's LSTMCell over a rollout.  Step 0 of a gradient's path.  It must never let a gradient
 * cross an episode's end.
 *
 * Per step only what must be: the cell's own derivatives and W_hh^T d_gates.  Every other product
 * goes over the whole rollout at once, which reads the weights once instead of T times.
 */
#include "lstm.h"

#include <string.h>

#include "blas.h"

void
gq_lstm_forward (gq_lstm *lstm, size_t slot, const gq_lstm_weights *weights)
{
    const size_t hidden = lstm->hidden;
    float *gates = lstm->gates + slot * 4 * hidden;
    float *h_in = lstm->h_in + slot * hidden, *c_in = lstm->c_in + slot * hidden;
    memcpy (h_in, lstm->h, hidden * sizeof *h_in);
    memcpy (c_in, lstm->c, hidden * sizeof *c_in);
    for (size_t i = 0; i < 4 * hidden; i++)
        gates[i] = weights->bias_ih[i] + weights->bias_hh[i];
    gq_multiply_vector (CblasNoTrans, 4 * hidden, lstm->features, weights->ih,
                        lstm->x + slot * lstm->features, gates);
    gq_multiply_vector (CblasNoTrans, 4 * hidden, hidden, weights->hh, h_in, gates);
    float *i = gates, *f = i + hidden, *g = f + hidden, *o = g + hidden;
    lstm->loops->sigmoid (2 * hidden, i);
    lstm->loops->tanh (hidden, g);
    lstm->loops->sigmoid (hidden, o);
    float *c_tanh = lstm->c_tanh + slot * hidden, *h_out = lstm->h_out + slot * hidden;
    for (size_t u = 0; u < hidden; u++)
        c_tanh[u] = lstm->c_new[u] = f[u] * c_in[u] + i[u] * g[u];
    lstm->loops->tanh (hidden, c_tanh);
    for (size_t u = 0; u < hidden; u++)
        h_out[u] = o[u] * c_tanh[u];
}

void
gq_lstm_advance (gq_lstm *lstm, size_t slot)
{
    memcpy (lstm->h, lstm->h_out + slot * lstm->hidden, lstm->hidden * sizeof *lstm->h);
    memcpy (lstm->c, lstm->c_new, lstm->hidden * sizeof *lstm->c);
}

/* One step back: d_h (of h_out) and the carried c_back to d_gates (before their activations) and
 * the c_back of the step before. */
static void
step_backward (gq_lstm *lstm, size_t t)
{
    const size_t hidden = lstm->hidden;
    const float *restrict i = lstm->gates + t * 4 * hidden, *restrict f = i + hidden;
    const float *restrict g = f + hidden, *restrict o = g + hidden;
    const float *restrict c_in = lstm->c_in + t * hidden;
    const float *restrict c_tanh = lstm->c_tanh + t * hidden;
    const float *restrict d_h = lstm->d_h + t * hidden;
    float *restrict d_i = lstm->d_gates + t * 4 * hidden, *restrict d_f = d_i + hidden;
    float *restrict d_g = d_f + hidden, *restrict d_o = d_g + hidden;
    float *restrict c_back = lstm->c_back;
    for (size_t u = 0; u < hidden; u++) {
        float d_c = d_h[u] * o[u] * (1.0f - c_tanh[u] * c_tanh[u]) + c_back[u];
        d_o[u] = d_h[u] * c_tanh[u] * o[u] * (1.0f - o[u]);
        d_i[u] = d_c * g[u] * i[u] * (1.0f - i[u]);
        d_f[u] = d_c * c_in[u] * f[u] * (1.0f - f[u]);
        d_g[u] = d_c * i[u] * (1.0f - g[u] * g[u]);
        c_back[u] = d_c * f[u];
    }
}

void
gq_lstm_backward (gq_lstm *lstm, size_t count, const bool *ends, const gq_lstm_weights *weights,
                  const gq_lstm_gradients *gradients)
{
    const size_t hidden = lstm->hidden;
    memset (lstm->c_back, 0, hidden * sizeof *lstm->c_back);
    for (size_t t = count; t-- > 0;) {
        step_backward (lstm, t);
        if (t == 0)
            break;
        if (ends[t - 1]) {
            memset (lstm->c_back, 0, hidden * sizeof *lstm->c_back);
            continue;
        }
        gq_multiply_vector (CblasTrans, 4 * hidden, hidden, weights->hh,
                            lstm->d_gates + t * 4 * hidden, lstm->d_h + (t - 1) * hidden);
    }
    gq_multiply (CblasTrans, CblasNoTrans, 4 * hidden, lstm->features, count, lstm->d_gates,
                 lstm->x, 0.0f, gradients->ih);
    gq_multiply (CblasTrans, CblasNoTrans, 4 * hidden, hidden, count, lstm->d_gates, lstm->h_in,
                 0.0f, gradients->hh);
    memset (gradients->bias_ih, 0, 4 * hidden * sizeof (float));
    for (size_t t = 0; t < count; t++)
        lstm->loops->add (4 * hidden, lstm->d_gates + t * 4 * hidden, gradients->bias_ih);
    memcpy (gradients->bias_hh, gradients->bias_ih, 4 * hidden * sizeof (float));
    gq_multiply (CblasNoTrans, CblasNoTrans, count, lstm->features, 4 * hidden, lstm->d_gates,
                 weights->ih, 0.0f, lstm->d_x);
}
