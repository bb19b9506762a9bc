/*
 * The jobs of gradq-actor: --gradients against PyTorch (tests/data/golden), --evaluate, and how
 * training fails when it cannot begin.  Through the library and through the program.
 */
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "actors/jobs.h"
#include "gif_testing.h"
#include "layout.h"

#define DENSE "tests/data/golden/a3c_dense.safetensors"

static char folder[64];

static void
make_folder (void)
{
    snprintf (folder, sizeof folder, "/tmp/gradq-test-XXXXXX");
    cr_assert_not_null (mkdtemp (folder));
}

static void
drop_folder (void)
{
    char command[128];
    snprintf (command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq (system (command), 0);
}

TestSuite (actor_jobs, .init = make_folder, .fini = drop_folder);

/* Run the gradq-actor of this build with these words; its exit code, and all it prints. */
static int
run_actor (char *output, size_t size, const char *format, ...)
{
    char program[512], command[2048];
    ssize_t length = readlink ("/proc/self/exe", program, sizeof program - 32);
    size_t got = 0, part;
    va_list words;

    cr_assert_gt (length, 0);
    program[length] = '\0';
    strcpy (strrchr (program, '/'), "/../gradq-actor");
    cr_assert_eq (access (program, X_OK), 0, "no %s; build it first", program);
    int used = snprintf (command, sizeof command, "timeout 60 '%s' ", program);
    va_start (words, format);
    vsnprintf (command + used, sizeof command - (size_t)used, format, words);
    va_end (words);
    strcat (command, " 2>&1");
    FILE *pipe = popen (command, "r");
    cr_assert_not_null (pipe);
    while ((part = fread (output + got, 1, size - 1 - got, pipe)) > 0)
        got += part;
    output[got] = '\0';
    int status = pclose (pipe);
    cr_assert (WIFEXITED (status), "%s", output);
    return WEXITSTATUS (status);
}

static void
out_path (char path[128])
{
    snprintf (path, 128, "%s/out.safetensors", folder);
}

/* Every number of `out` against PyTorch's float64 one in `golden`. */
static void
compare (const char *golden_path, const char *out)
{
    gq_safetensors *golden = NULL, *file = NULL;
    gq_error error = {""};
    size_t compared = 0;

    cr_assert_eq (gq_safetensors_read (&golden, golden_path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_read (&file, out, &error), GQ_OK, "%s", error.text);
    for (size_t i = 0; i < gq_safetensors_count (golden); i++) {
        const gq_tensor *expected = gq_safetensors_at (golden, i);
        bool scalar = expected->element_count == 1 && expected->dtype == GQ_DTYPE_F64;
        if (strncmp (expected->name, "grad.", 5) != 0 && !scalar)
            continue;
        const gq_tensor *found = gq_safetensors_find (file, expected->name);
        cr_assert_not_null (found, "no %s", expected->name);
        cr_assert_eq (found->rank, expected->rank, "%s", expected->name);
        cr_assert_arr_eq (found->shape, expected->shape, found->rank * sizeof found->shape[0]);
        for (uint64_t k = 0; k < expected->element_count; k++, compared++) {
            double wanted, is;
            float narrow;
            memcpy (&wanted, (const char *)expected->data + 8 * k, 8);
            if (found->dtype == GQ_DTYPE_F64)
                memcpy (&is, (const char *)found->data + 8 * k, 8);
            else {
                memcpy (&narrow, (const char *)found->data + 4 * k, 4);
                is = (double)narrow;
            }
            /* tests/data/golden: float32 against float64, 1e-5 + 1e-4 relative. */
            cr_assert_float_eq (is, wanted, 1e-5 + 1e-4 * fabs (wanted), "%s[%llu]: %g is not %g",
                                expected->name, (unsigned long long)k, is, wanted);
        }
    }
    cr_assert_gt (compared, 1000u, "only %zu numbers compared", compared);
    gq_safetensors_free (&golden);
    gq_safetensors_free (&file);
}

static const struct {
    const char *net, *path;
} goldens[] = {{"dense", DENSE},
               {"conv-lstm", "tests/data/golden/a3c_conv_lstm.safetensors"},
               {"conv-lstm", "tests/data/golden/a3c_conv_lstm_gae.safetensors"}};

Test (actor_jobs, gradients_equal_pytorchs_through_the_library)
{
    char out[128];

    out_path (out);
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) {
        gq_error error = {""};
        gq_status status = gq_job_gradients (goldens[i].net, goldens[i].path, out, &error);
        cr_assert_eq (status, GQ_OK, "%s", error.text);
        compare (goldens[i].path, out);
    }
}

Test (actor_jobs, gradients_equal_pytorchs_through_the_program)
{
    char out[128], text[4096];

    out_path (out);
    for (size_t i = 0; i < sizeof goldens / sizeof goldens[0]; i++) {
        int code = run_actor (text, sizeof text, "--gradients --net %s --in %s --out %s",
                              goldens[i].net, goldens[i].path, out);
        cr_assert_eq (code, 0, "%s", text);
        compare (goldens[i].path, out);
    }
}

/* The dense golden file without tensor `drop`, with tensor `extra` in place of the one of its name
 * or else added, and with metadata `key` set to `value` (NULL: gone). */
static void
write_variant (const char *path, const char *drop, const gq_tensor *extra, const char *key,
               const char *value)
{
    gq_safetensors *golden = NULL;
    gq_error error = {""};
    cr_assert_eq (gq_safetensors_read (&golden, DENSE, &error), GQ_OK, "%s", error.text);
    size_t count = gq_safetensors_count (golden), kept = 0, meta_kept = 0;
    gq_tensor *tensors = calloc (count + 1, sizeof *tensors);
    gq_meta meta[16];
    cr_assert_not_null (tensors);
    for (size_t i = 0; i < count; i++) {
        const gq_tensor *tensor = gq_safetensors_at (golden, i);
        if (drop != NULL && strcmp (tensor->name, drop) == 0)
            continue;
        bool replaced = extra != NULL && strcmp (tensor->name, extra->name) == 0;
        tensors[kept++] = replaced ? *extra : *tensor;
    }
    if (extra != NULL && gq_safetensors_find (golden, extra->name) == NULL)
        tensors[kept++] = *extra;
    for (size_t i = 0; i < gq_safetensors_meta_count (golden); i++) {
        gq_meta entry = gq_safetensors_meta_at (golden, i);
        if (key != NULL && strcmp (entry.key, key) == 0)
            entry.value = value;
        if (entry.value != NULL)
            meta[meta_kept++] = entry;
    }
    gq_status status = gq_safetensors_write (path, tensors, kept, meta, meta_kept, &error);
    cr_assert_eq (status, GQ_OK, "%s", error.text);
    free (tensors);
    gq_safetensors_free (&golden);
}

static void
expect_refusal (const char *path, gq_status expected, const char *word)
{
    char out[128];
    gq_error error = {""};

    out_path (out);
    cr_assert_eq (gq_job_gradients ("dense", path, out, &error), expected, "%s: %s", word,
                  error.text);
    cr_assert_not_null (strstr (error.text, word), "no '%s' in: %s", word, error.text);
    cr_assert_neq (access (out, F_OK), 0, "%s: a result was written", word);
}

Test (actor_jobs, gradients_refuses_files_with_parts_missing)
{
    static const char *const tensors[] = {"obs",       "actions",   "rewards",  "done",
                                          "bootstrap", "pi.weight", "pi1.bias", "v2.weight"};
    static const char *const keys[] = {"gamma", "lambda", "value_weight", "entropy_weight",
                                       "reduction"};
    char path[128];

    snprintf (path, sizeof path, "%s/in.safetensors", folder);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        write_variant (path, tensors[i], NULL, NULL, NULL);
        expect_refusal (path, GQ_NOTFOUND, tensors[i]);
    }
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        write_variant (path, NULL, NULL, keys[i], NULL);
        expect_refusal (path, i < 4 ? GQ_NOTFOUND : GQ_INVALID, keys[i]);
        write_variant (path, NULL, NULL, keys[i], "1x");
        expect_refusal (path, GQ_INVALID, keys[i]);
        write_variant (path, NULL, NULL, keys[i], "-1");
        expect_refusal (path, GQ_INVALID, keys[i]);
    }
}

Test (actor_jobs, gradients_refuses_values_and_shapes_that_do_not_fit)
{
    static const int32_t actions[20] = {[7] = 2};
    static const float zeros[4096];
    const gq_tensor wrong[] = {{.name = "actions",
                                .dtype = GQ_DTYPE_I32,
                                .rank = 1,
                                .shape = {20},
                                .element_count = 20,
                                .data = actions,
                                .bytes = 80},
                               {.name = "rewards",
                                .dtype = GQ_DTYPE_F32,
                                .rank = 1,
                                .shape = {19},
                                .element_count = 19,
                                .data = zeros,
                                .bytes = 76},
                               {.name = "pi2.weight",
                                .dtype = GQ_DTYPE_F32,
                                .rank = 2,
                                .shape = {32, 128},
                                .element_count = 4096,
                                .data = zeros,
                                .bytes = 16384},
                               {.name = "pi1.weight",
                                .dtype = GQ_DTYPE_F32,
                                .rank = 1,
                                .shape = {256},
                                .element_count = 256,
                                .data = zeros,
                                .bytes = 1024},
                               {.name = "obs",
                                .dtype = GQ_DTYPE_F32,
                                .rank = 1,
                                .shape = {80},
                                .element_count = 80,
                                .data = zeros,
                                .bytes = 320},
                               {.name = "obs",
                                .dtype = GQ_DTYPE_F32,
                                .rank = 2,
                                .shape = {20, 5},
                                .element_count = 100,
                                .data = zeros,
                                .bytes = 400}};
    static const char *const words[] = {"actions[7]", "rewards", "pi2.weight",
                                        "pi1.weight", "obs",     "pi1.weight"};
    char path[128];

    snprintf (path, sizeof path, "%s/in.safetensors", folder);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        write_variant (path, NULL, &wrong[i], NULL, NULL);
        expect_refusal (path, GQ_INVALID, words[i]);
    }
}

Test (actor_jobs, gradients_names_a_file_that_is_missing_or_damaged)
{
    char path[128];

    snprintf (path, sizeof path, "%s/absent.safetensors", folder);
    expect_refusal (path, GQ_NOTFOUND, path);
    FILE *file = fopen (path, "w");
    cr_assert (file != NULL && fputs ("not safetensors", file) >= 0 && fclose (file) == 0);
    expect_refusal (path, GQ_MALFORMED, path);
}

Test (actor_jobs, evaluate_reports_every_return_and_repeats_from_its_seed)
{
    char text[2][8192];
    double sum = 0;

    for (int i = 0; i < 2; i++) {
        int code = run_actor (text[i], sizeof text[i], "--evaluate %s --episodes 7 --seed 5 --json",
                              DENSE);
        cr_assert_eq (code, 0, "%s", text[i]);
    }
    cr_assert_str_eq (text[0], text[1]);
    json_t *answer = json_loads (text[0], 0, NULL);
    cr_assert_not_null (answer, "no JSON: %s", text[0]);
    json_t *returns = json_object_get (answer, "returns");
    cr_assert_eq (json_array_size (returns), 7u);
    for (size_t i = 0; i < 7; i++) {
        double r = json_number_value (json_array_get (returns, i));
        cr_assert (r >= 1 && r <= 500, "%g", r);
        sum += r;
    }
    cr_assert_float_eq (json_number_value (json_object_get (answer, "mean")), sum / 7, 1e-6);
    json_decref (answer);
    cr_assert_eq (run_actor (text[1], sizeof text[1], "--evaluate %s --episodes 2 --greedy", DENSE),
                  0);
    cr_assert_not_null (strstr (text[1], "episode 2  return "), "%s", text[1]);
    cr_assert_not_null (strstr (text[1], "deviation"), "%s", text[1]);
}

Test (actor_jobs, evaluate_reads_weights_beside_an_optimizers_slots)
{
    static const float slot[64 * 64];
    char path[128], text[4096];
    const gq_tensor extra = {.name = "exp_avg.pi2.weight",
                             .dtype = GQ_DTYPE_F32,
                             .rank = 2,
                             .shape = {64, 64},
                             .element_count = 4096,
                             .data = slot,
                             .bytes = sizeof slot};

    snprintf (path, sizeof path, "%s/in.safetensors", folder);
    write_variant (path, "obs", &extra, NULL, NULL);
    cr_assert_eq (run_actor (text, sizeof text, "--evaluate %s --episodes 1", path), 0, "%s", text);
}

Test (actor_jobs, evaluate_refuses_weights_of_another_net_or_environment)
{
    static const float zeros[64 * 5];
    const gq_tensor wide = {.name = "pi1.weight",
                            .dtype = GQ_DTYPE_F32,
                            .rank = 2,
                            .shape = {64, 5},
                            .element_count = 320,
                            .data = zeros,
                            .bytes = sizeof zeros};
    const gq_tensor many = {.name = "pi.weight",
                            .dtype = GQ_DTYPE_F32,
                            .rank = 2,
                            .shape = {5, 64},
                            .element_count = 320,
                            .data = zeros,
                            .bytes = sizeof zeros};
    char path[128], text[4096];

    snprintf (path, sizeof path, "%s/in.safetensors", folder);
    write_variant (path, NULL, &wide, NULL, NULL);
    cr_assert_eq (run_actor (text, sizeof text, "--evaluate %s", path), 78);
    cr_assert_not_null (strstr (text, "(64, 5) where this environment and net need (64, 4)"), "%s",
                        text);
    write_variant (path, NULL, &many, NULL, NULL);
    cr_assert_eq (run_actor (text, sizeof text, "--evaluate %s", path), 78);
    cr_assert_not_null (strstr (text, "5 actions, the environment has 2"), "%s", text);
    cr_assert_eq (run_actor (text, sizeof text, "--evaluate %s --net conv-lstm", DENSE), 1);
    cr_assert_not_null (strstr (text, "try another --net"), "%s", text);
}

/* Pictures of the recording at `path`, and its size. */
static int
count_pictures (const char *path, int width, int height)
{
    GifFileType *gif = read_gif (path);
    int count = gif->ImageCount;
    cr_assert (gif->SWidth == width && gif->SHeight == height, "%d x %d", gif->SWidth,
               gif->SHeight);
    DGifCloseFile (gif, NULL);
    return count;
}

/* Lengths of the episodes of this evaluation, the first one recorded to `path`. */
static void
evaluate_recorded (const char *words, const char *path, int lengths[2])
{
    char text[8192];
    int code = run_actor (text, sizeof text, "%s --episodes 2 --json --record %s", words, path);
    cr_assert_eq (code, 0, "%s", text);
    json_t *answer = json_loads (text, 0, NULL);
    cr_assert_not_null (answer, "no JSON: %s", text);
    for (size_t i = 0; i < 2; i++)
        lengths[i] =
            (int)json_integer_value (json_array_get (json_object_get (answer, "lengths"), i));
    json_decref (answer);
}

/* First weights of a small pixel net. */
static void
write_pong_weights (const char *path)
{
    gq_net *net = NULL;
    gq_error error = {""};
    gq_tensor tensors[32] = {{.name = NULL}};
    gq_net_config config = {.observation_rank = 3,
                            .observation_shape = {1, 42, 42},
                            .action_count = 6,
                            .hidden = 16,
                            .rollout_max = 1};
    cr_assert_eq (gq_net_conv_lstm.create (&net, &config, &error), GQ_OK, "%s", error.text);
    float *weights = calloc (net->element_count, sizeof *weights), *next = weights;
    cr_assert (weights != NULL && net->tensor_count <= 32);
    net->ops->initialise (net, 1, weights);
    for (size_t i = 0; i < net->tensor_count; i++) {
        const gq_tensor_shape *shape = &net->tensors[i];
        tensors[i] = (gq_tensor){.name = shape->name,
                                 .dtype = GQ_DTYPE_F32,
                                 .rank = shape->rank,
                                 .element_count = gq_tensor_elements (shape),
                                 .data = next,
                                 .bytes = gq_tensor_elements (shape) * sizeof *next};
        memcpy (tensors[i].shape, shape->shape, sizeof tensors[i].shape);
        next += tensors[i].element_count;
    }
    gq_status status = gq_safetensors_write (path, tensors, net->tensor_count, NULL, 0, &error);
    cr_assert_eq (status, GQ_OK, "%s", error.text);
    net->ops->destroy (&net);
    free (weights);
}

Test (actor_jobs, evaluate_records_a_picture_for_each_step_of_the_first_episode)
{
    char path[128], weights[128], words[256];
    int lengths[2];

    snprintf (path, sizeof path, "%s/episode.gif", folder);
    evaluate_recorded ("--evaluate " DENSE " --seed 5", path, lengths);
    cr_assert_neq (lengths[0], lengths[1], "choose a seed that tells the episodes apart");
    cr_assert_eq (count_pictures (path, 192, 96), lengths[0]);

    snprintf (weights, sizeof weights, "%s/pong.safetensors", folder);
    write_pong_weights (weights);
    snprintf (words, sizeof words,
              "--evaluate %s --env Pong --net conv-lstm --env-set max_steps=40", weights);
    evaluate_recorded (words, path, lengths);
    cr_assert_eq (count_pictures (path, 160, 160), 40);
}

Test (actor_jobs, recording_that_cannot_be_made_is_refused_and_leaves_nothing)
{
    char text[4096];

    cr_assert_eq (run_actor (text, sizeof text, "--record %s/a.gif", folder), 2);
    cr_assert_not_null (strstr (text, "add --evaluate"), "%s", text);
    cr_assert_eq (
        run_actor (text, sizeof text, "--evaluate " DENSE " --record %s/no/a.gif", folder), 1);
    cr_assert_not_null (strstr (text, "no/a.gif"), "%s", text);
    cr_assert_eq (run_actor (text, sizeof text, "--evaluate /dev/null --record %s/a.gif", folder),
                  1);
    cr_assert_eq (rmdir (folder), 0, "something was left");
    make_folder ();
}

Test (actor_jobs, training_without_a_broker_exits_69_and_says_so)
{
    char text[4096];

    int code = run_actor (text, sizeof text, "--address ipc://%s/control --timeout-ms 300", folder);
    cr_assert_eq (code, 69, "%s", text);
    cr_assert_not_null (strstr (text, "unreachable"), "%s", text);
}

Test (actor_jobs, wrong_settings_exit_78_and_wrong_words_2)
{
    static const struct {
        const char *words;
        int code;
    } cases[] = {{"--actor 4096", 78},
                 {"--env Nothing", 78},
                 {"--env-set a=b", 78},
                 {"--env gym:CartPole-v1 --python /nonexistent/python", 78},
                 {"--net conv-lstm --timeout-ms 300", 78},
                 {"--no-such-option", 2},
                 {"--gradients", 2},
                 {"--gradients --in a --out b --evaluate c", 2}};
    char text[4096];

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_assert_eq (run_actor (text, sizeof text, "%s", cases[i].words), cases[i].code, "%s: %s",
                      cases[i].words, text);
}
