/*
 * From the options of gradq-actor to its environment, net and rollout.  Step 0 of a gradient's
 * path.
 *
 * Must never be asked for an environment after the process' first ZeroMQ call: gym:ID forks.
 */
#include <string.h>

#include "jobs.h"

#define LSTM_HIDDEN 256 /* of the original agent, when --hidden is not given */

gq_status
gq_env_from_options (gq_env **env_p, const gq_options *options, uint32_t count, gq_error *error)
{
    gq_env_config config = GQ_ENV_CONFIG;

    config.name = gq_options_text (options, "env");
    config.python = gq_options_text (options, "python");
    config.count = count;
    config.pictures = gq_options_given (options, "record");
    config.set_count = gq_options_list (options, "env-set", &config.sets);
    config.interrupted = gq_stop_requested;
    return gq_env_create (env_p, &config, error);
}

const gq_net_ops *
gq_net_named (const char *name)
{
    return strcmp (name, gq_net_conv_lstm.name) == 0 ? &gq_net_conv_lstm : &gq_net_dense;
}

gq_status
gq_net_from_options (gq_net **net_p, const gq_options *options, const gq_env *env,
                     uint32_t rollout_steps, gq_error *error)
{
    const gq_net_ops *ops = gq_net_named (gq_options_text (options, "net"));
    gq_net_config config = {.observation_rank = env->spec.observation_rank,
                            .action_count = env->spec.action_count,
                            .hidden = (uint32_t)gq_options_count (options, "hidden"),
                            .rollout_max = rollout_steps,
                            .env_count = env->count};

    memcpy (config.observation_shape, env->spec.observation_shape, sizeof config.observation_shape);
    if (ops == &gq_net_conv_lstm && !gq_options_given (options, "hidden"))
        config.hidden = LSTM_HIDDEN;
    return ops->create (net_p, &config, error);
}

bool
gq_normalise_from_options (const gq_options *options)
{
    return strcmp (gq_options_text (options, "normalise"), "running") == 0;
}

void
gq_rollout_from_options (gq_rollout_config *config, const gq_options *options, gq_net *net,
                         gq_env *env, uint32_t rollout_steps)
{
    *config = (gq_rollout_config){
        .net = net,
        .env = env,
        .steps_max = rollout_steps,
        .normalise = gq_normalise_from_options (options),
        .reward_clip = (float)gq_options_number (options, "reward-clip"),
        .loss = {.gamma = gq_options_number (options, "gamma"),
                 .lambda = gq_options_number (options, "lambda"),
                 .value_weight = gq_options_number (options, "value-weight"),
                 .entropy_weight = gq_options_number (options, "entropy-weight"),
                 .mean = strcmp (gq_options_text (options, "reduction"), "mean") == 0},
        .interrupted = gq_stop_requested};
}
