/*
 * The A3C loss: returns, advantages, loss and its derivatives by the net's outputs.  Step 0 of a
 * gradient's path.  Pure functions: no net, no environment, no allocation, no clock.
 *
 * Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning" (2016), section 4 and
 * algorithm S3; advantages by Schulman et al., "High-Dimensional Continuous Control Using
 * Generalized Advantage Estimation" (2016), equation 16.
 */
#ifndef GQ_A3C_H
#define GQ_A3C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "net.h"

typedef struct gq_a3c_config {
    double gamma;          /* discount, 0 .. 1 */
    double lambda;         /* of GAE(lambda); 1: n-step advantages */
    double value_weight;   /* of 0.5 (V - R)^2 */
    double entropy_weight; /* of the entropy bonus */
    bool mean;             /* reduce over steps by the mean instead of the sum */
    /* Environments always by the mean: a gradient of K environments is the mean of K gradients, so
     * that learning rate, epsilon and clipping norm need not know K. */
} gq_a3c_config;

/* T steps in a row of K environments, A actions.  All borrowed. */
typedef struct gq_a3c_steps {
    size_t step_count;      /* T >= 1 */
    size_t env_count;       /* K >= 1 */
    uint32_t action_count;  /* A >= 1 */
    const float *logits;    /* (T, K, A) */
    const float *values;    /* (T, K) */
    const int32_t *actions; /* (T, K), each in [0, A) */
    const float *rewards;   /* (T, K) */
    const uint8_t *cut;     /* (T, K), 1: the episode ended after this step, for whatever reason */
    /* (T, K), value of what lies beyond step t; read where cut[t] and at t = T-1.  0 after a
     * termination, the critic's value of the last observation after a truncation. */
    const float *beyond;
} gq_a3c_steps;

/* Reduced over T and K as config->mean says; total = policy + value_weight * value
 * - entropy_weight * entropy. */
typedef struct gq_a3c_loss {
    double total;
    double policy;  /* -log pi(a) * advantage */
    double value;   /* 0.5 (V - R)^2 */
    double entropy; /* -sum p log p */
} gq_a3c_loss;

/*
 * returns[t] = r[t] + gamma * returns[t+1], advantages[t] = delta[t] + gamma * lambda *
 * advantages[t+1] with delta[t] = r[t] + gamma * V[t+1] - V[t]; both start anew from beyond[t] at
 * cuts and at the end.  Both (T, K).  O(T K).
 */
void gq_a3c_returns (const gq_a3c_config *config, const gq_a3c_steps *steps, double *returns,
                     double *advantages);

/*
 * Loss, and its derivatives d_logits (T, K, A) and d_values (T, K); returns and advantages (T, K)
 * are constants of the loss.  O(T K A).
 */
gq_a3c_loss gq_a3c_differentiate (const gq_a3c_config *config, const gq_a3c_steps *steps,
                                  const double *returns, const double *advantages, float *d_logits,
                                  float *d_values);

/* An action drawn from softmax (logits[A]); the most probable one (the first, of equals). */
uint32_t gq_a3c_sample (const float *logits, uint32_t action_count, gq_random *random);
uint32_t gq_a3c_greedy (const float *logits, uint32_t action_count);

#endif
