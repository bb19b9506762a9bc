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

/* The arrays are the net's.  One row a step: S slots of forward, T of them differentiated. */
typedef struct gq_lstm {
    size_t features, hidden; /* H */
    const gq_activation *loops;
    float *x;       /* [S, features] */
    float *gates;   /* [S, 4 H], i f g o after their activation */
    float *h_in;    /* [S, H] */
    float *c_in;    /* [S, H] */
    float *c_tanh;  /* [S, H], tanh of the new cell state */
    float *h_out;   /* [S, H] */
    float *h, *c;   /* [H], the state that the next step starts from */
    float *c_new;   /* [H], cell state after the newest forward */
    float *d_gates; /* [T, 4 H], before their activation */
    float *d_h;     /* [T, H], of h_out */
    float *d_x;     /* [T, features] */
    float *c_back;  /* [H], what the cell state hands to the step before */
} gq_lstm;

/* x[slot] and the state (h, c), which stays, to row `slot` and c_new. */
void gq_lstm_forward (gq_lstm *lstm, size_t slot, const gq_lstm_weights *weights);

/* Make the outcome of row `slot`, the newest forward, the state. */
void gq_lstm_advance (gq_lstm *lstm, size_t slot);

/*
 * From d_h, the loss' direct derivatives, to d_x and gradients, over rows 0 .. count - 1 with
 * count > 0.  No gradient leaves row 0, nor crosses from t + 1 to t when ends[t].  d_h is changed;
 * gradients are overwritten.
 */
void gq_lstm_backward (gq_lstm *lstm, size_t count, const bool *ends,
                       const gq_lstm_weights *weights, const gq_lstm_gradients *gradients);

#endif
