/*
 * From an environment's name to an environment.  Step 0 of a gradient's path.
 *
 * Must never be called after the process' first ZeroMQ call: gym:ID forks.
 */
#include "env.h"

#include <string.h>

gq_status
gq_env_create (gq_env **env_p, const gq_env_config *config, gq_error *error)
{
    *env_p = NULL;
    if (strcmp (config->name, "CartPole-v1") == 0)
        return gq_cartpole_create (env_p, config, error);
    if (strcmp (config->name, "Pong") == 0)
        return gq_pong_create (env_p, config, error);
    if (strncmp (config->name, "gym:", 4) == 0 && config->name[4] != '\0')
        return gq_gym_create (env_p, config->name + 4, config, error);
    return gq_fail (error, GQ_INVALID,
                    "--env %s: there is no such environment; built in are CartPole-v1 and Pong, "
                    "and gym:ID takes any of Gymnasium's",
                    config->name);
}

void
gq_env_destroy (gq_env **env_p)
{
    if (*env_p != NULL)
        (*env_p)->ops->destroy (env_p);
}
