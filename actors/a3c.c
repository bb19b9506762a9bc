/*
 * The A3C loss and its derivatives.  Step 0 of a gradient's path.
 *
 * Must never hold state or touch a net: the golden files and the rollout go through the same
 * functions.  All sums are double, because a float32 sum over a long rollout costs digits that the
 * gradient check would see.
 */
#include "a3c.h"

#include <assert.h>
#include <math.h>

/* One environment's: rows k, k + K, k + 2 K, ... */
static void
returns_of (const gq_a3c_config *config, const gq_a3c_steps *steps, size_t k, double *returns,
            double *advantages)
{
    size_t last = steps->step_count - 1;
    double next_return = 0, next_value = 0, next_advantage = 0;

    for (size_t t = steps->step_count; t-- > 0;) {
        size_t row = t * steps->env_count + k;
        if (t == last || steps->cut[row]) {
            next_return = (double)steps->beyond[row];
            next_value = next_return;
            next_advantage = 0;
        }
        double reward = (double)steps->rewards[row], value = (double)steps->values[row];
        double delta = reward + config->gamma * next_value - value;
        next_return = reward + config->gamma * next_return;
        next_advantage = delta + config->gamma * config->lambda * next_advantage;
        next_value = value;
        returns[row] = next_return;
        advantages[row] = next_advantage;
    }
}

void
gq_a3c_returns (const gq_a3c_config *config, const gq_a3c_steps *steps, double *returns,
                double *advantages)
{
    assert (steps->step_count >= 1 && steps->env_count >= 1);
    for (size_t k = 0; k < steps->env_count; k++)
        returns_of (config, steps, k, returns, advantages);
}

/* log sum exp (logits[A]), shifted by the largest so that nothing overflows. */
static double
log_normaliser (const float *logits, uint32_t action_count)
{
    double largest = (double)logits[0], sum = 0;

    assert (action_count >= 1);
    for (uint32_t a = 1; a < action_count; a++)
        largest = fmax (largest, (double)logits[a]);
    for (uint32_t a = 0; a < action_count; a++)
        sum += exp ((double)logits[a] - largest);
    return largest + log (sum);
}

/* The loss of one step, and d_logits[A], both times `scale`.
 * d/dz_j of -log p_a * advantage is advantage * (p_j - [j = a]);
 * d/dz_j of the entropy H is -p_j (log p_j + H). */
static void
differentiate_policy (const gq_a3c_config *config, const float *logits, uint32_t action_count,
                      uint32_t action, double advantage, double scale, float *d_logits,
                      gq_a3c_loss *loss)
{
    double normaliser = log_normaliser (logits, action_count), entropy = 0;

    for (uint32_t a = 0; a < action_count; a++) {
        double log_p = (double)logits[a] - normaliser;
        entropy -= exp (log_p) * log_p;
    }
    for (uint32_t a = 0; a < action_count; a++) {
        double log_p = (double)logits[a] - normaliser, p = exp (log_p);
        double d_policy = advantage * (p - (a == action ? 1 : 0));
        double d_entropy = -p * (log_p + entropy);
        d_logits[a] = (float)(scale * (d_policy - config->entropy_weight * d_entropy));
    }
    loss->policy += scale * advantage * (normaliser - (double)logits[action]);
    loss->entropy += scale * entropy;
}

gq_a3c_loss
gq_a3c_differentiate (const gq_a3c_config *config, const gq_a3c_steps *steps, const double *returns,
                      const double *advantages, float *d_logits, float *d_values)
{
    gq_a3c_loss loss = {0};
    uint32_t action_count = steps->action_count;
    size_t rows = steps->step_count * steps->env_count;
    double scale = 1 / (double)(config->mean ? rows : steps->env_count);

    assert (rows >= 1 && action_count >= 1);
    for (size_t t = 0; t < rows; t++) {
        assert (steps->actions[t] >= 0 && (uint32_t)steps->actions[t] < action_count);
        differentiate_policy (config, steps->logits + t * action_count, action_count,
                              (uint32_t)steps->actions[t], advantages[t], scale,
                              d_logits + t * action_count, &loss);
        double error = (double)steps->values[t] - returns[t];
        d_values[t] = (float)(scale * config->value_weight * error);
        loss.value += scale * 0.5 * error * error;
    }
    loss.total =
        loss.policy + config->value_weight * loss.value - config->entropy_weight * loss.entropy;
    return loss;
}

uint32_t
gq_a3c_sample (const float *logits, uint32_t action_count, gq_random *random)
{
    double normaliser = log_normaliser (logits, action_count);
    double left = gq_random_uniform (random);

    for (uint32_t a = 0; a + 1 < action_count; a++) {
        left -= exp ((double)logits[a] - normaliser);
        if (left < 0)
            return a;
    }
    /* Whatever rounding left over, and NaN logits, end here: in range in any case. */
    return action_count - 1;
}

uint32_t
gq_a3c_greedy (const float *logits, uint32_t action_count)
{
    uint32_t best = 0;

    for (uint32_t a = 1; a < action_count; a++)
        if (logits[a] > logits[best])
            best = a;
    return best;
}
