/*
 * The shipped rules against trajectories in float64 from the written-out formulas, and gradq-try as
 * people run it: as a process.  Step 5 of a gradient's path.
 *
 * Data: tests/data/golden/ (n = 257, 50 steps; columns 0-5 are always zero, 1e-20, 1e4, rare,
 * constant and alternating; steps 20-24 are silent).
 */
#include "rule_testing.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "safetensors.h"

TestSuite (golden, .timeout = 60);

#define ARGUMENTS_MAX   64
#define ENVIRONMENT_MAX 1024
extern char **environ;

typedef struct place {
    char program[600];
    char scratch[64], in[80], out[80], log[80];
    char said[4096]; /* stderr of the last run */
} place;

static void
setup (place *p)
{
    snprintf (p->program, sizeof p->program, "%s", build_path ("gradq-try"));
    cr_assert_eq (access (p->program, X_OK), 0, "%s is not built", p->program);
    snprintf (p->scratch, sizeof p->scratch, "/tmp/gradq-golden-XXXXXX");
    cr_assert_not_null (mkdtemp (p->scratch));
    snprintf (p->in, sizeof p->in, "%s/in", p->scratch);
    snprintf (p->out, sizeof p->out, "%s/out", p->scratch);
    snprintf (p->log, sizeof p->log, "%s/log", p->scratch);
}

static void
teardown (const place *p)
{
    unlink (p->in);
    unlink (p->out);
    unlink (p->log);
    cr_expect_eq (rmdir (p->scratch), 0, "something was left in %s", p->scratch);
}

/* Run gradq-try with words (NULL-terminated); its exit code, and what it said in p->said. */
static int
try (place *p, const char *const *words)
{
    char *arguments[ARGUMENTS_MAX] = {p->program}, *environment[ENVIRONMENT_MAX] = {NULL};
    size_t count = 1;
    for (; *words != NULL; words++) {
        cr_assert (count + 1 < ARGUMENTS_MAX);
        arguments[count++] = (char *)(uintptr_t)*words;
    }
    count = 0; /* settings of whoever runs the tests do not reach the program */
    for (char **e = environ; *e != NULL && count + 1 < ENVIRONMENT_MAX; e++)
        if (strncmp (*e, "GRADQ_", 6) != 0)
            environment[count++] = *e;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init (&actions);
    posix_spawn_file_actions_addopen (&actions, 2, p->log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    cr_assert_eq (posix_spawn (&child, p->program, &actions, NULL, arguments, environment), 0);
    posix_spawn_file_actions_destroy (&actions);
    int state;
    cr_assert_eq (waitpid (child, &state, 0), child);
    FILE *log = fopen (p->log, "r");
    cr_assert_not_null (log);
    p->said[fread (p->said, 1, sizeof p->said - 1, log)] = '\0';
    fclose (log);
    cr_assert (WIFEXITED (state), "gradq-try died of signal %d: %s", WTERMSIG (state), p->said);
    return WEXITSTATUS (state);
}

/* ---- trajectories ---- */

static gq_safetensors *
read_file (const char *path)
{
    gq_safetensors *file = NULL;
    gq_error error = {.text = ""};
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_OK, "%s", error.text);
    return file;
}

/* Every element of `mine` (f32) within 1e-6 + 2e-5 |want| of `golden` (f64): the bound that came
 * with the data, of which PyTorch's float32 uses up to 0.7. */
static void
expect_near (const gq_safetensors *out, const char *mine, const gq_safetensors *in,
             const char *golden, const char *label)
{
    const gq_tensor *want = gq_safetensors_find (in, golden);
    cr_assert (want != NULL && want->element_count > 0, "%s: no %s", label, golden);
    float *got = calloc (want->element_count, sizeof *got);
    gq_error error = {.text = ""};
    gq_status status =
        gq_safetensors_copy (out, mine, GQ_DTYPE_F32, want->element_count, got, &error);
    cr_assert_eq (status, GQ_OK, "%s: %s", label, error.text);
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < want->element_count; i++) {
        double exact;
        memcpy (&exact, (const char *)want->data + i * sizeof exact, sizeof exact);
        double share = fabs (got[i] - exact) / (1e-6 + 2e-5 * fabs (exact));
        if (!(share <= worst)) {
            worst = share;
            at = i;
        }
    }
    cr_expect (worst <= 1, "%s: %s[%zu] = %.9g is off by %.3g of the tolerance", label, mine, at,
               got[at], worst);
    free (got);
}

/* The words for gradq-try that the golden file's metadata asks for; freed with free_words. */
static size_t
words_of (const gq_safetensors *in, const char *optimizer, char **words)
{
    size_t count = 0;
    for (size_t i = 0; i < gq_safetensors_meta_count (in); i++) {
        gq_meta meta = gq_safetensors_meta_at (in, i);
        /* what the data is, and what is no setting because the rule's name says it */
        int facts = strcmp (meta.key, "rule") == 0 || strcmp (meta.key, "steps") == 0 ||
                    strcmp (meta.key, "n") == 0 || strcmp (meta.key, "decoupled") == 0;
        int implied = strcmp (optimizer, "adamw") == 0 && strcmp (meta.key, "epsilon") == 0;
        if (implied)
            cr_assert_str_eq (meta.value, "torch");
        if (facts || implied)
            continue;
        words[count++] = strdup ("--set");
        cr_assert (asprintf (&words[count++], "%s=%s", meta.key, meta.value) > 0);
    }
    return count;
}

static void
expect_trajectory (const char *name, const char *optimizer, size_t slot_count)
{
    place p;
    setup (&p);
    char path[128];
    snprintf (path, sizeof path, "tests/data/golden/%s.safetensors", name);
    gq_safetensors *in = read_file (path);
    const char *words[ARGUMENTS_MAX] = {"--optimizer", optimizer, "--in", path,   "--out",
                                        p.out,         "--at",    "1",    "--at", "2",
                                        "--at",        "10",      "--at", "50"};
    char *own[ARGUMENTS_MAX];
    size_t own_count = words_of (in, optimizer, own);
    memcpy (words + 14, own, own_count * sizeof *own);
    cr_assert_eq (try (&p, words), 0, "%s", p.said);
    cr_expect_str_empty (p.said);

    gq_safetensors *out = read_file (p.out);
    expect_near (out, "w@1", in, "w64@1", name);
    expect_near (out, "w@2", in, "w64@2", name);
    expect_near (out, "w@10", in, "w64@10", name);
    expect_near (out, "w@50", in, "w64@50", name);
    size_t slots = 0;
    for (size_t i = 0; i < gq_safetensors_count (in); i++) {
        const char *golden = gq_safetensors_at (in, i)->name;
        const char *suffix = strstr (golden, "64@50");
        if (suffix == NULL || golden[0] == 'w')
            continue;
        char mine[GQ_NAME_MAX];
        snprintf (mine, sizeof mine, "%.*s@50", (int)(suffix - golden), golden);
        expect_near (out, mine, in, golden, name);
        slots++;
    }
    cr_expect_eq (slots, slot_count, "%s: %zu slots compared", name, slots);
    cr_expect_str_eq (gq_safetensors_meta (out, "rule"), optimizer);
    cr_expect_str_eq (gq_safetensors_meta (out, "steps"), "50");
    for (size_t i = 0; i < own_count; i++)
        free (own[i]);
    gq_safetensors_free (&in);
    gq_safetensors_free (&out);
    teardown (&p);
}

#define TRAJECTORY(name, optimizer, slots)           \
    Test (golden, name##_agrees_with_float64)        \
    {                                                \
        expect_trajectory (#name, optimizer, slots); \
    }
TRAJECTORY (adagrad_tensorflow, "adagrad", 1)
TRAJECTORY (adagrad_torch, "adagrad", 1)
TRAJECTORY (adam_tensorflow, "adam", 2)
TRAJECTORY (adam_torch, "adam", 2)
TRAJECTORY (adam_torch_l2, "adam", 2)
TRAJECTORY (adamw_torch, "adamw", 2)
TRAJECTORY (lion, "lion", 1)
TRAJECTORY (momentum, "sgd", 1)
TRAJECTORY (nesterov, "sgd", 1)
TRAJECTORY (rmsprop_a3c, "rmsprop", 1)
TRAJECTORY (rmsprop_torch, "rmsprop", 1)
TRAJECTORY (rmsprop_torch_momentum, "rmsprop", 2)
TRAJECTORY (sgd, "sgd", 0)

/* ---- gradq-try itself ---- */

static void
write_input (const place *p, const char *w0_name, gq_dtype w0_type, const void *w0,
             const float *grads, uint64_t columns)
{
    uint64_t bytes = w0_type == GQ_DTYPE_F64 ? 8 : 4;
    gq_tensor tensors[2] = {
        {.name = w0_name,
         .dtype = w0_type,
         .rank = 1,
         .shape = {2},
         .element_count = 2,
         .data = w0,
         .bytes = 2 * bytes},
        {.name = "grads",
         .dtype = GQ_DTYPE_F32,
         .rank = 2,
         .shape = {3, columns},
         .element_count = 3 * columns,
         .data = grads,
         .bytes = 12 * columns},
    };
    gq_error error = {.text = ""};
    cr_assert_eq (gq_safetensors_write (p->in, tensors, 2, NULL, 0, &error), GQ_OK, "%s",
                  error.text);
}

static const float two_weights[2] = {1, 2}, three_rows[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

/* The words run must end with `code`, a sentence that has `text` in it, and no output. */
static void
expect_refused (place *p, int code, const char *text, const char *const *words)
{
    int got = try (p, words);
    cr_expect_eq (got, code, "exit %d, expected %d: %s", got, code, p->said);
    cr_expect (strstr (p->said, text) != NULL, "\"%s\" is not in: %s", text, p->said);
    cr_expect_neq (access (p->out, F_OK), 0, "an output was written all the same");
}
#define REFUSED(code, text, ...) \
    expect_refused (&p, code, text, (const char *const[]){__VA_ARGS__, NULL})

Test (golden, try_writes_the_last_step_unless_told)
{
    place p;
    setup (&p);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    const char *const words[] = {"--optimizer", "sgd",   "--set", "lr=1", "--in",
                                 p.in,          "--out", p.out,   NULL};
    cr_assert_eq (try (&p, words), 0, "%s", p.said);
    gq_safetensors *out = read_file (p.out);
    float w[2];
    gq_error error = {.text = ""};
    cr_assert_eq (gq_safetensors_copy (out, "w@3", GQ_DTYPE_F32, 2, w, &error), GQ_OK, "%s",
                  error.text);
    cr_expect (w[0] == 1 - (1 + 3 + 5) && w[1] == 2 - (2 + 4 + 6), "%g %g", w[0], w[1]);
    cr_expect_eq (gq_safetensors_count (out), 2); /* and momentum_buffer@3 */
    gq_safetensors_free (&out);
    teardown (&p);
}

/* w@STEP of `out` is want[2], give or take `tolerance`. */
static void
expect_weights (const gq_safetensors *out, int step, const double *want, double tolerance)
{
    char name[16];
    float w[2];
    gq_error error = {.text = ""};
    snprintf (name, sizeof name, "w@%d", step);
    cr_assert_eq (gq_safetensors_copy (out, name, GQ_DTYPE_F32, 2, w, &error), GQ_OK, "%s",
                  error.text);
    for (size_t i = 0; i < 2; i++)
        cr_expect (fabs (w[i] - want[i]) <= tolerance, "%s[%zu] = %.9g, not %.9g", name, i, w[i],
                   want[i]);
}

Test (golden, try_anneals_the_learning_rate_to_0)
{
    place p;
    setup (&p);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    const char *const words[] = {"--optimizer", "sgd",
                                 "--set",       "lr=1",
                                 "--set",       "schedule=linear",
                                 "--set",       "schedule_steps=2",
                                 "--in",        p.in,
                                 "--out",       p.out,
                                 "--at",        "1",
                                 "--at",        "2",
                                 "--at",        "3",
                                 NULL};
    cr_assert_eq (try (&p, words), 0, "%s", p.said);
    gq_safetensors *out = read_file (p.out);
    /* lr 1, 1/2, 0 on the rows (1, 2), (3, 4), (5, 6), from (1, 2) */
    expect_weights (out, 1, (const double[]){0, 0}, 0);
    expect_weights (out, 2, (const double[]){-1.5, -2}, 0);
    expect_weights (out, 3, (const double[]){-1.5, -2}, 0);
    cr_expect_str_eq (gq_safetensors_meta (out, "schedule"), "linear");
    gq_safetensors_free (&out);
    teardown (&p);
}

/* The shared RMSProp of Mnih et al., 2016, arXiv:1602.01783, as README.md gives it. */
Test (golden, try_makes_the_steps_of_the_a3c_paper)
{
    place p;
    setup (&p);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    const char *const words[] = {"--optimizer", "rmsprop",
                                 "--set",       "epsilon=inside",
                                 "--set",       "eps=0.1",
                                 "--set",       "alpha=0.99",
                                 "--set",       "lr=7e-4",
                                 "--set",       "schedule=linear",
                                 "--set",       "schedule_steps=3",
                                 "--in",        p.in,
                                 "--out",       p.out,
                                 "--at",        "1",
                                 "--at",        "2",
                                 "--at",        "3",
                                 NULL};
    cr_assert_eq (try (&p, words), 0, "%s", p.said);
    gq_safetensors *out = read_file (p.out);
    double w[2] = {1, 2}, v[2] = {0, 0};
    for (int t = 1; t <= 3; t++) {
        for (size_t i = 0; i < 2; i++) {
            double d = three_rows[2 * (t - 1) + (int)i];
            v[i] = 0.99 * v[i] + 0.01 * d * d;
            w[i] -= 7e-4 * (1 - (t - 1) / 3.0) * d / sqrt (v[i] + 0.1);
        }
        /* Each step rounds a weight below 2 once, by half of 1.2e-7; the rest is smaller still. */
        expect_weights (out, t, w, 3e-7);
    }
    gq_safetensors_free (&out);
    teardown (&p);
}

Test (golden, try_refuses_wrong_words_with_exit_2)
{
    place p;
    setup (&p);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    REFUSED (2, "--in FILE is missing", "--out", p.out);
    REFUSED (2, "--out FILE is missing", "--in", p.in);
    REFUSED (2, "--at 4 is beyond the 3 steps", "--in", p.in, "--out", p.out, "--at", "4");
    REFUSED (2, "not \"0\"", "--in", p.in, "--out", p.out, "--at", "0");
    REFUSED (2, "not \"-1\"", "--in", p.in, "--out", p.out, "--at", "-1");
    REFUSED (2, "not \"2x\"", "--in", p.in, "--out", p.out, "--at", "2x");
    REFUSED (2, "99999999999999999999", "--in", p.in, "--out", p.out, "--at",
             "99999999999999999999");
    REFUSED (2, "optimizer", "--optimiser", "sgd", "--in", p.in, "--out", p.out);
    teardown (&p);
}

Test (golden, try_refuses_wrong_rules_with_exit_78)
{
    place p;
    setup (&p);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    REFUSED (78, "lion", "--optimizer", "adm", "--in", p.in, "--out", p.out);
    REFUSED (78, "did you mean beta1", "--set", "beta=1", "--in", p.in, "--out", p.out);
    REFUSED (78, "out of bounds", "--set", "lr=-1", "--in", p.in, "--out", p.out);
    teardown (&p);
}

Test (golden, try_refuses_wrong_data_with_exit_1)
{
    place p;
    setup (&p);
    const double wide[2] = {1, 2};
    const float bad_row[6] = {1, 2, 3, NAN, 5, 6}, bad_weights[2] = {1, INFINITY};
    REFUSED (1, p.in, "--in", p.in, "--out", p.out);
    write_input (&p, "weights", GQ_DTYPE_F32, two_weights, three_rows, 2);
    REFUSED (1, "no tensor \"w0\"", "--in", p.in, "--out", p.out);
    write_input (&p, "w0", GQ_DTYPE_F64, wide, three_rows, 2);
    REFUSED (1, "w0 is not F32", "--in", p.in, "--out", p.out);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 3);
    REFUSED (1, "shapes do not fit", "--in", p.in, "--out", p.out);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, bad_row, 2);
    REFUSED (1, "row 1 of grads holds NaN", "--in", p.in, "--out", p.out);
    write_input (&p, "w0", GQ_DTYPE_F32, bad_weights, three_rows, 2);
    REFUSED (1, "w0 holds NaN or infinity", "--in", p.in, "--out", p.out);
    write_input (&p, "w0", GQ_DTYPE_F32, two_weights, three_rows, 2);
    REFUSED (1, "/nowhere", "--in", p.in, "--out", "/nowhere/of/mine");
    FILE *file = fopen (p.in, "w");
    fputs ("this is no safetensors file", file);
    fclose (file);
    REFUSED (1, p.in, "--in", p.in, "--out", p.out);
    teardown (&p);
}

Test (golden, try_writes_the_same_weights_at_every_cpu_level)
{
    static const char *const levels[] = {"sse2", "avx2", "avx512"};
    place p;
    setup (&p);
    float first[257], w[257];
    gq_error error = {.text = ""};
    for (int i = 0; i < 3; i++) {
        const char *const words[] = {
            "--in", "tests/data/golden/adam_torch.safetensors", "--out", p.out, "--cpu", levels[i],
            NULL};
        int code = try (&p, words);
        if (code == 78 && i > 0 && strstr (p.said, "this CPU has no") != NULL) {
            fprintf (stderr, "not tested here, %s", p.said);
            continue;
        }
        cr_assert_eq (code, 0, "%s", p.said);
        gq_safetensors *out = read_file (p.out);
        cr_expect_str_eq (gq_safetensors_meta (out, "cpu"), levels[i]);
        cr_assert_eq (gq_safetensors_copy (out, "w@50", GQ_DTYPE_F32, 257, w, &error), GQ_OK);
        if (i == 0)
            memcpy (first, w, sizeof w);
        cr_expect (same_bits (first, w, 257), "%s gives other bits", levels[i]);
        gq_safetensors_free (&out);
    }
    teardown (&p);
}
