/*
 * Networks of the actor: one flat parameter vector in, one flat gradient out.  Step 0 of a
 * gradient's path.  A net owns activations and recurrent state, never weights: it computes with the
 * snapshot that it is handed, so a rollout sees one version from its first step to its gradient.
 *
 * The forward pass of each step of a rollout is kept, so that backward needs no second one.
 * No allocation after creation.
 */
#ifndef GQ_NET_H
#define GQ_NET_H

#include <stddef.h>
#include <stdint.h>

#include "gradq/gradq.h"

typedef struct gq_net gq_net;

typedef struct gq_net_config {
    uint32_t observation_rank; /* 1 for dense, 3 (channels, height, width) for images */
    uint64_t observation_shape[GQ_RANK_MAX];
    uint32_t action_count; /* A, discrete */
    uint32_t hidden;       /* width of dense layers, or of the LSTM */
    uint32_t rollout_max;  /* T, most steps between begin and backward */
    uint32_t env_count;    /* K, environments that act together; 0: 1 */
    uint32_t filters;      /* of each convolution; 0: 32; dense ignores it */
} gq_net_config;

typedef struct gq_net_ops {
    const char *name; /* as --net takes it */

    /* GQ_OK: *net_p is yours; GQ_INVALID (shape does not suit) with *error, GQ_MEMORY. */
    gq_status (*create) (gq_net **net_p, const gq_net_config *config, gq_error *error);
    void (*destroy) (gq_net **net_p);

    /* Fill weights[net->element_count] from a generator seeded with `seed`. */
    void (*initialise) (const gq_net *net, uint64_t seed, float *weights);

    /* Start a rollout: forget the kept steps.  Recurrent state carries on, detached. */
    void (*begin) (gq_net *net);

    /* One step: observations (K, product of shape) -> logits (K, A), values (K).  Kept for
     * backward.  At most rollout_max calls after begin. */
    void (*step) (gq_net *net, const float *weights, const float *observations, float *logits,
                  float *values);

    /* Value of an observation of environment k as the next step would give it; nothing kept, state
     * untouched. */
    float (*peek) (gq_net *net, const float *weights, uint32_t k, const float *observation);

    /* Environment k's episode ended after the last step: its recurrent state is zero from the next
     * step on, and no gradient flows across. */
    void (*reset) (gq_net *net, uint32_t k);

    /* Gradient of the loss over the T steps kept since begin: d_logits (T, K, A) and d_values
     * (T, K) are its derivatives; gradient[element_count] is overwritten. */
    void (*backward) (gq_net *net, const float *weights, const float *d_logits,
                      const float *d_values, float *gradient);

    /* Recurrent state h (K, hidden), c (K, hidden); NULL for nets without one. */
    void (*set_state) (gq_net *net, const float *h, const float *c);
} gq_net_ops;

/* First member of every net. */
struct gq_net {
    const gq_net_ops *ops;
    gq_net_config config;
    gq_tensor_shape *tensors; /* PyTorch state_dict names and shapes, in flat order */
    size_t tensor_count;
    uint64_t element_count;
};

extern const gq_net_ops gq_net_dense;     /* pi1 pi2 pi v1 v2 v, tanh between */
extern const gq_net_ops gq_net_conv_lstm; /* conv1..conv4, lstm, pi, v */

/* xoshiro256** seeded by splitmix64: the only source of randomness in the actor. */
typedef struct gq_random {
    uint64_t state[4];
} gq_random;
void gq_random_seed (gq_random *random, uint64_t seed);
/* A seed for stream `stream` of `seed`: actor k of a run draws from its own. */
uint64_t gq_random_stream (uint64_t seed, uint64_t stream);
uint64_t gq_random_next (gq_random *random);
double gq_random_uniform (gq_random *random); /* [0, 1), 53 bits */
double gq_random_normal (gq_random *random);  /* mean 0, deviation 1 */

#endif
