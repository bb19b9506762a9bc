/*
 * The Gymnasium bridge: the real CartPole-v1, and environments that misbehave
 * (tests/python/gradq_trouble.py).  Without Gymnasium in build/venv these tests say so and are
 * skipped.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "actors/env.h"
#include "safetensors.h"
#include "stats.h"

#define PYTHON    "build/venv/bin/python"
#define RECORDING "tests/data/cartpole/episodes.safetensors"
#define WAIT_MS   30000 /* longest wait for anything here; fails loudly */

static bool
have_gymnasium (void)
{
    static int known = -1;
    if (known < 0)
        known = access (PYTHON, X_OK) == 0 &&
                system (PYTHON " -c 'import gymnasium' >/dev/null 2>&1") == 0;
    return known == 1;
}

#define NEED_GYMNASIUM()                                                          \
    do {                                                                          \
        if (!have_gymnasium ())                                                   \
            cr_skip_test ("no gymnasium in " PYTHON "; `make venv` installs it"); \
    } while (0)

static gq_status
make_with (gq_env **env, const char *name, const char *const *sets, size_t set_count,
           gq_error *error)
{
    gq_env_config config = GQ_ENV_CONFIG;
    cr_assert_eq (setenv ("PYTHONPATH", "tests/python", 1), 0);
    cr_assert_eq (setenv ("PYTHONDONTWRITEBYTECODE", "1", 1), 0);
    config.name = name;
    config.sets = sets, config.set_count = set_count;
    config.python = PYTHON;
    config.start_timeout_ms = config.step_timeout_ms = WAIT_MS;
    return gq_env_create (env, &config, error);
}

static gq_env *
make (const char *name)
{
    gq_error error = {""};
    gq_env *env = NULL;
    cr_assert_eq (make_with (&env, name, NULL, 0, &error), GQ_OK, "%s", error.text);
    return env;
}

static void
expect_refusal (const char *name, const char *words)
{
    gq_error error = {""};
    gq_env *env = NULL;
    gq_status status = make_with (&env, name, NULL, 0, &error);
    cr_assert_eq (status, GQ_INVALID, "%s: %s", name, error.text);
    cr_assert_null (env);
    cr_assert_not_null (strstr (error.text, words), "no '%s' in: %s", words, error.text);
}

/* Reset and one step of an environment; the step's status and text. */
static gq_status
first_step (gq_env *env, gq_error *error)
{
    float observation[16];
    gq_env_outcome outcome;
    cr_assert_leq (env->spec.observation_count, 16u);
    cr_assert_eq (env->ops->reset (env, 0, NULL, observation, error), GQ_OK, "%s", error->text);
    return env->ops->step (env, &(uint32_t){0}, observation, &outcome, error);
}

static void
expect_failure (const char *name, gq_status expected, const char *words)
{
    gq_error error = {""};
    gq_env *env = make (name);
    cr_assert_eq (first_step (env, &error), expected, "%s: %s", name, error.text);
    cr_assert_not_null (strstr (error.text, words), "no '%s' in: %s", words, error.text);
    env->ops->destroy (&env);
    cr_assert_eq (waitpid (-1, NULL, 0), -1, "the child was not reaped");
    cr_assert_eq (errno, ECHILD);
}

Test (gym, plays_the_recorded_episodes_from_their_seeds)
{
    NEED_GYMNASIUM ();
    gq_safetensors *file = NULL;
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_read (&file, RECORDING, &error), GQ_OK, "%s", error.text);
    size_t episodes = gq_safetensors_find (file, "seed")->element_count;
    size_t steps = gq_safetensors_find (file, "actions")->element_count;
    int64_t *seeds = calloc (episodes, sizeof *seeds);
    int32_t *lengths = calloc (episodes, sizeof *lengths);
    int32_t *actions = calloc (steps, sizeof *actions);
    float *expected = calloc (4 * steps, sizeof *expected);
    cr_assert (seeds && lengths && actions && expected);
    gq_status status = gq_safetensors_copy (file, "seed", GQ_DTYPE_I64, episodes, seeds, &error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (file, "length", GQ_DTYPE_I32, episodes, lengths, &error);
    if (status == GQ_OK)
        status = gq_safetensors_copy (file, "actions", GQ_DTYPE_I32, steps, actions, &error);
    if (status == GQ_OK)
        status =
            gq_safetensors_copy (file, "observations", GQ_DTYPE_F32, 4 * steps, expected, &error);
    cr_assert_eq (status, GQ_OK, "%s", error.text);
    gq_safetensors_free (&file);

    gq_env *env = make ("gym:CartPole-v1");
    cr_assert_eq (env->spec.observation_rank, 1);
    cr_assert_eq (env->spec.observation_count, 4);
    cr_assert_eq (env->spec.action_count, 2);
    size_t i = 0;
    for (size_t e = 0; e < episodes; e++) {
        uint64_t seed = (uint64_t)seeds[e];
        float observation[4];
        gq_env_outcome outcome = {0};
        cr_assert_eq (env->ops->reset (env, 0, &seed, observation, &error), GQ_OK, "%s",
                      error.text);
        for (int32_t t = 0; t < lengths[e]; t++, i++) {
            cr_assert (!outcome.terminated && !outcome.truncated);
            uint32_t action = (uint32_t)actions[i];
            cr_assert_eq (env->ops->step (env, &action, observation, &outcome, &error), GQ_OK, "%s",
                          error.text);
            cr_assert_arr_eq (observation, expected + 4 * i, sizeof observation,
                              "episode %zu step %d", e, t);
            cr_assert_eq ((double)outcome.reward, 1.0);
        }
        cr_assert_eq (outcome.truncated, lengths[e] == 500);
        cr_assert_eq (outcome.terminated, lengths[e] < 500);
    }
    env->ops->destroy (&env);
    free (seeds), free (lengths), free (actions), free (expected);
}

Test (gym, interpreter_that_is_not_there_is_refused_by_name)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "gym:CartPole-v1";
    config.python = "/nonexistent/python";
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID);
    cr_assert_null (env);
    cr_assert_not_null (strstr (error.text, "/nonexistent/python"), "%s", error.text);
    cr_assert_not_null (strstr (error.text, "--python"), "%s", error.text);
}

Test (gym, missing_package_says_what_to_install_and_where)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "gym:CartPole-v1";
    config.python = "tests/python/python_without_packages";
    config.start_timeout_ms = WAIT_MS;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID, "%s", error.text);
    cr_assert_not_null (strstr (error.text, "pip install gymnasium"), "%s", error.text);
}

Test (gym, program_that_is_no_python_is_an_error_and_no_hang)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "gym:CartPole-v1";
    config.python = "/bin/true";
    config.start_timeout_ms = WAIT_MS;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_IO, "%s", error.text);
    cr_assert_not_null (strstr (error.text, "has ended"), "%s", error.text);
}

Test (gym, unknown_environment_is_refused_in_gymnasiums_own_words)
{
    NEED_GYMNASIUM ();
    expect_refusal ("gym:NoSuchThing-v0", "NoSuchThing");
}

Test (gym, spaces_that_are_not_supported_are_refused)
{
    NEED_GYMNASIUM ();
    expect_refusal ("gym:Pendulum-v1", "action space");
    expect_refusal ("gym:Blackjack-v1", "observation space");
}

Test (gym, wrong_keyword_is_refused_with_its_name)
{
    NEED_GYMNASIUM ();
    static const char *const wrong[] = {"colour=3", "colour", "=3"};
    for (size_t i = 0; i < 3; i++) {
        gq_error error = {""};
        gq_env *env = NULL;
        gq_status status = make_with (&env, "gym:CartPole-v1", &wrong[i], 1, &error);
        cr_assert_eq (status, GQ_INVALID, "%s: %s", wrong[i], error.text);
        cr_assert_not_null (strstr (error.text, i == 0 ? "colour" : wrong[i]), "%s", error.text);
    }
}

Test (gym, keywords_come_as_json_else_as_text_and_actions_from_their_start)
{
    NEED_GYMNASIUM ();
    static const char *const sets[] = {"number=2.5", "flag=true", "word=three words here"};
    gq_error error = {""};
    gq_env *env = NULL;
    float observation[4];
    gq_env_outcome outcome;
    gq_status status = make_with (&env, "gym:gradq_trouble:Shifted-v0", sets, 3, &error);
    cr_assert_eq (status, GQ_OK, "%s", error.text);
    /* A (2, 2) box of float64 comes flattened, as float32. */
    cr_assert_eq (env->spec.observation_rank, 1);
    cr_assert_eq (env->spec.observation_count, 4);
    cr_assert_eq (env->spec.action_count, 3);
    cr_assert_eq (env->ops->reset (env, 0, NULL, observation, &error), GQ_OK, "%s", error.text);
    const float expected[4] = {2.5f, 1, 16, 0};
    cr_assert_arr_eq (observation, expected, sizeof expected);
    for (uint32_t action = 0; action < 3; action++) {
        cr_assert_eq (env->ops->step (env, &action, observation, &outcome, &error), GQ_OK);
        cr_assert_eq ((double)outcome.reward, 5.0 + action);
        cr_assert_eq (outcome.terminated, action == 1);
        cr_assert_eq (outcome.truncated, action == 2);
    }
    env->ops->destroy (&env);
}

Test (gym, images_come_channels_first_and_scaled_to_one)
{
    NEED_GYMNASIUM ();
    gq_env *env = make ("gym:gradq_trouble:Image-v0");
    gq_error error = {""};
    float observation[18];
    const gq_env_spec *spec = &env->spec;
    cr_assert_eq (spec->observation_rank, 3);
    cr_assert (spec->observation_shape[0] == 3 && spec->observation_shape[1] == 2 &&
               spec->observation_shape[2] == 3);
    cr_assert_eq (env->ops->reset (env, 0, NULL, observation, &error), GQ_OK, "%s", error.text);
    for (int channel = 0, i = 0; channel < 3; channel++)
        for (int row = 0; row < 2; row++)
            for (int place = 0; place < 3; place++, i++)
                cr_assert_eq (observation[i], (float)(100 * channel + 10 * row + place) / 255.0f);
    env->ops->destroy (&env);
}

Test (gym, exception_in_a_step_comes_as_its_text)
{
    NEED_GYMNASIUM ();
    expect_failure ("gym:gradq_trouble:Raises-v0", GQ_IO, "the motor is on fire");
}

Test (gym, child_that_dies_is_an_error_and_no_hang)
{
    NEED_GYMNASIUM ();
    expect_failure ("gym:gradq_trouble:Dies-v0", GQ_IO, "has ended");
}

Test (gym, reward_that_is_not_finite_is_an_error)
{
    NEED_GYMNASIUM ();
    expect_failure ("gym:gradq_trouble:NotFinite-v0", GQ_IO, "not finite");
}

Test (gym, observation_of_another_size_is_an_error)
{
    NEED_GYMNASIUM ();
    expect_failure ("gym:gradq_trouble:Grows-v0", GQ_IO, "24 bytes");
}

Test (gym, what_an_environment_prints_disturbs_neither_the_protocol_nor_our_output)
{
    NEED_GYMNASIUM ();
    gq_error error = {""};
    int output[2];
    char byte;
    cr_assert_eq (pipe (output), 0);
    int kept = dup (STDOUT_FILENO);
    cr_assert_eq (dup2 (output[1], STDOUT_FILENO), STDOUT_FILENO);
    gq_env *env = make ("gym:gradq_trouble:Prints-v0");
    for (int i = 0; i < 3; i++)
        cr_assert_eq (first_step (env, &error), GQ_OK, "%s", error.text);
    env->ops->destroy (&env);
    cr_assert_eq (dup2 (kept, STDOUT_FILENO), STDOUT_FILENO);
    close (kept), close (output[1]);
    cr_assert_eq (read (output[0], &byte, 1), 0, "it came out on our standard output");
    close (output[0]);
}

Test (gym, environment_that_hangs_times_out_and_is_killed)
{
    NEED_GYMNASIUM ();
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = make ("gym:gradq_trouble:Hangs-v0");
    env->ops->destroy (&env);
    config.name = "gym:gradq_trouble:Hangs-v0";
    config.python = PYTHON;
    config.step_timeout_ms = 1000;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (first_step (env, &error), GQ_TIMEOUT, "%s", error.text);
    env->ops->destroy (&env);
    cr_assert_eq (waitpid (-1, NULL, 0), -1, "the child was not reaped");
}

/* gradq_trouble's painted environment with these settings, reset. */
static gq_env *
make_painted (size_t set_count, const char *const *sets)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    float observation[2];
    cr_assert_eq (setenv ("PYTHONPATH", "tests/python", 1), 0);
    cr_assert_eq (setenv ("PYTHONDONTWRITEBYTECODE", "1", 1), 0);
    config.name = "gym:gradq_trouble:Painted-v0";
    config.python = PYTHON;
    config.pictures = true;
    config.count = 2;
    config.sets = sets, config.set_count = set_count;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_OK, "%s", error.text);
    for (uint32_t k = 0; k < 2; k++)
        cr_assert_eq (env->ops->reset (env, k, NULL, observation, &error), GQ_OK, "%s", error.text);
    return env;
}

Test (gym, picture_is_what_a_game_shows_now)
{
    NEED_GYMNASIUM ();
    gq_env *env = make_painted (0, NULL);
    gq_error error = {""};
    gq_picture picture;
    float observations[2];
    gq_env_outcome outcomes[2];
    for (int steps = 0; steps < 3; steps++) {
        cr_assert_eq (env->ops->picture (env, 1, &picture, &error), GQ_OK, "%s", error.text);
        cr_assert (picture.width == 3 && picture.height == 2);
        for (int i = 0; i < 18; i++)
            cr_assert_eq (picture.rgb[i], 100 * (i % 3) + 10 * (i / 9) + i / 3 % 3 + steps);
        cr_assert_eq (env->ops->step (env, (uint32_t[2]){0, 0}, observations, outcomes, &error),
                      GQ_OK);
    }
    env->ops->destroy (&env);
}

Test (gym, pictures_of_another_kind_or_size_are_errors)
{
    NEED_GYMNASIUM ();
    static const char *const sets[][2] = {
        {"dtype=float32", "width=3"}, {"height=0", "width=3"}, {"height=1", "width=5000"}};
    static const char *const words[] = {"float32", "3 x 0 pixels", "5000 x 1 pixels"};
    for (size_t i = 0; i < 3; i++) {
        gq_env *env = make_painted (2, sets[i]);
        gq_error error = {""};
        gq_picture picture;
        cr_assert_eq (env->ops->picture (env, 0, &picture, &error), GQ_IO);
        cr_assert_not_null (strstr (error.text, words[i]), "no '%s' in: %s", words[i], error.text);
        env->ops->destroy (&env);
    }
}

Test (gym, environment_without_pictures_is_refused_before_it_plays)
{
    NEED_GYMNASIUM ();
    static const char *const names[] = {"gym:gradq_trouble:Unpainted-v0",
                                        "gym:gradq_trouble:Shifted-v0"};
    static const char *const words[] = {"no pictures to record", "--record needs"};
    for (size_t i = 0; i < 2; i++) {
        gq_env_config config = GQ_ENV_CONFIG;
        gq_error error = {""};
        gq_env *env = NULL;
        cr_assert_eq (setenv ("PYTHONPATH", "tests/python", 1), 0);
        config.name = names[i];
        config.python = PYTHON;
        config.pictures = true;
        cr_assert_eq (gq_env_create (&env, &config, &error), GQ_INVALID, "%s", error.text);
        cr_assert_not_null (strstr (error.text, words[i]), "no '%s' in: %s", words[i], error.text);
    }
}

static bool
always (void)
{
    return true;
}

Test (gym, interrupt_ends_the_wait_for_the_child)
{
    gq_env_config config = GQ_ENV_CONFIG;
    gq_error error = {""};
    gq_env *env = NULL;
    config.name = "gym:CartPole-v1";
    config.interrupted = always;
    cr_assert_eq (gq_env_create (&env, &config, &error), GQ_CLOSED, "%s", error.text);
    cr_assert_null (env);
}

/* In the middle of a step the child reads no pipe: only the kernel's signal can end it. */
Test (gym, child_dies_with_an_actor_that_was_killed, .timeout = 60)
{
    NEED_GYMNASIUM ();
    char folder[] = "/tmp/gradq-test-XXXXXX", set[64], text[16] = "";
    cr_assert_not_null (mkdtemp (folder));
    snprintf (set, sizeof set, "path=%s/pid", folder);
    const char *path = set + strlen ("path="), *sets[] = {set};
    cr_assert_eq (mkfifo (path, 0600), 0);
    pid_t actor = fork ();
    cr_assert_geq (actor, 0);
    if (actor == 0) {
        gq_error error = {""};
        gq_env *env = NULL;
        if (make_with (&env, "gym:gradq_trouble:Busy-v0", sets, 1, &error) == GQ_OK)
            (void)first_step (env, &error);
        _exit (1);
    }
    FILE *file = fopen (path, "r"); /* waits until the step has begun */
    cr_assert (file != NULL && fgets (text, sizeof text, file) != NULL && fclose (file) == 0);
    const pid_t pid = (pid_t)strtol (text, NULL, 10);
    cr_assert_gt (pid, 0, "'%s' is no process", text);
    int child = pidfd_open (pid, 0);
    cr_assert_geq (child, 0, "no process '%s'", text);
    struct pollfd item = {.fd = child, .events = POLLIN};
    cr_assert_eq (poll (&item, 1, 0), 0, "the child is gone too early");
    cr_assert_eq (kill (actor, SIGKILL), 0);
    cr_assert_eq (waitpid (actor, NULL, 0), actor);
    bool ended = poll (&item, 1, WAIT_MS) == 1;
    if (!ended)
        kill (pid, SIGKILL);
    cr_assert (ended, "the child lives on");
    close (child);
    cr_assert (unlink (path) == 0 && rmdir (folder) == 0);
}
