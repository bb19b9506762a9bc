/*
 * PyTorch's LSTMCell over a rollout, with truncated back-propagation through time.  Step 0 of a
 * gradient's path.
 *
 *     z = W_ih x + b_ih + W_hh h + b_hh; its quarters through sigmoid, sigmoid, tanh, sigmoid are
 *     i f g o;  c' = f c + i g;  h' = o tanh (c')
 */
#ifndef GQ_LSTM_H
#define GQ_LSTM_H

#include <stdbool.h>
#include <stddef.h>

#include "activation.h"

typedef struct gq_lstm_weights {
    const float *ih;      /* [4 H, features] */
    const float *hh;      /* [4 H, H] */
    const float *bias_ih; /* [4 H] */
    const float *bias_hh; /* [4 H] */
} gq_lstm_weights;

typedef struct gq_lstm_gradients {
    float *ih, *hh, *bias_ih, *bias_hh; /* shapes as above */
} gq_lstm_gradients;

/* The arrays are the net's.  K rows a step, one of each environment; S slots of forward, of which
 * the first T K are differentiated. */
typedef struct gq_lstm {
    size_t features, hidden; /* H */
    size_t envs;             /* K */
    const gq_activation *loops;
    float *x;       /* [S, features] */
    float *gates;   /* [S, 4 H], i f g o after their activation */
    float *h_in;    /* [S, H] */
    float *c_in;    /* [S, H] */
    float *c_tanh;  /* [S, H], tanh of the new cell state */
    float *h_out;   /* [S, H] */
    float *h, *c;   /* [K, H], the state that the next step starts from */
    float *c_new;   /* [K, H], cell states after the newest forward */
    float *d_gates; /* [T K, 4 H], before their activation */
    float *d_h;     /* [T K, H], of h_out */
    float *d_x;     /* [T K, features] */
    float *c_back;  /* [K, H], what the cell states hand to the step before */
} gq_lstm;

/* x and the states (h, c) of environments first .. first + count - 1, which stay, to `count` rows
 * from `slot` on and to c_new[first ..]. */
void gq_lstm_forward (gq_lstm *lstm, size_t slot, size_t first, size_t count,
                      const gq_lstm_weights *weights);

/* Make the outcome of the K rows from `slot` on, the newest forward, the state. */
void gq_lstm_advance (gq_lstm *lstm, size_t slot);

/*
 * From d_h, the loss' direct derivatives, to d_x and gradients, over the first `steps` > 0 steps.
 * No gradient leaves the first step, nor crosses from t + 1 to t when ends[t K + k].  d_h is
 * changed; gradients are overwritten.
 */
void gq_lstm_backward (gq_lstm *lstm, size_t steps, const bool *ends,
                       const gq_lstm_weights *weights, const gq_lstm_gradients *gradients);

#endif
