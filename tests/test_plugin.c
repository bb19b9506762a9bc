/*
 * The plug-in host: loading and its refusals, settings, clipping, schedules, state.  Step 5 of a
 * gradient's path.
 */
#include "rule_testing.h"

#include <stdbool.h>
#include <sys/resource.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "rule_settings.h"

TestSuite (plugin, .timeout = 60);

/* ---- defaults and settings ---- */

Test (plugin, defaults_are_those_of_pytorch)
{
    /* torch.optim's signatures of Adam, AdamW, RMSprop, Adagrad; SGD without lr: 1e-2, as its
     * tutorials; Lion: the authors' code (google/automl/lion). */
    static const struct {
        const char *rule, *text;
    } expected[] = {
        {"adam", "lr=0.001 beta1=0.9 beta2=0.999 eps=1e-08 epsilon=torch weight_decay=0"},
        {"adamw", "lr=0.001 beta1=0.9 beta2=0.999 eps=1e-08 weight_decay=0.01"},
        {"rmsprop", "lr=0.01 alpha=0.99 eps=1e-08 epsilon=outside momentum=0"},
        {"adagrad", "lr=0.01 eps=1e-10 initial_accumulator_value=0"},
        {"sgd", "lr=0.01 momentum=0 nesterov=false"},
        {"lion", "lr=0.0001 beta1=0.9 beta2=0.99 weight_decay=0"},
    };
    const char *host = " clip_norm=0 schedule=constant schedule_steps=0 warmup_steps=0";
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        gq_rule *rule = load (expected[i].rule, "auto", NO_SETS);
        char text[512] = "", whole[512], value[64];
        const char *key;
        for (size_t j = 0; gq_rule_setting (rule, j, &key, value); j++)
            snprintf (text + strlen (text), sizeof text - strlen (text), "%s%s=%s", j ? " " : "",
                      key, value);
        snprintf (whole, sizeof whole, "%s%s", expected[i].text, host);
        cr_expect_str_eq (text, whole);
        gq_rule_free (&rule);
    }
}

Test (plugin, settings_text_reads_back_as_the_same_number)
{
    uint64_t random = SEED;
    const gq_setting row = {"x", 0, -DBL_MAX, DBL_MAX, NULL, "any"};
    for (int i = 0; i < 10000; i++) {
        uint64_t bits = random_next (&random);
        double value, back;
        memcpy (&value, &bits, sizeof value);
        if (!isfinite (value))
            continue;
        char text[GQ_SETTING_TEXT], set[GQ_SETTING_TEXT + 2];
        gq_setting_text (&row, value, text);
        snprintf (set, sizeof set, "x=%s", text);
        gq_error error = {.text = ""};
        gq_status status = gq_settings_parse (&back, &row, 1, SETS (set), 1, "rule", &error);
        cr_assert (status == GQ_OK && back == value, "%a became \"%s\" (seed %u) %s", value, text,
                   SEED, error.text);
    }
}

Test (plugin, yes_and_no_have_all_the_words_that_flags_have)
{
    static const char *const yes[] = {"nesterov=1", "nesterov=True", "nesterov=yes", "nesterov=on"};
    static const char *const no[] = {"nesterov=0", "nesterov=FALSE", "nesterov=no", "nesterov=off"};
    for (size_t i = 0; i < 4; i++) {
        const char *key;
        char value[64];
        gq_rule *rule = load ("sgd", "auto", SETS (yes[i]));
        cr_assert (gq_rule_setting (rule, 2, &key, value));
        cr_expect_str_eq (value, "true", "%s", yes[i]);
        gq_rule_free (&rule);
        rule = load ("sgd", "auto", SETS (no[i]));
        cr_assert (gq_rule_setting (rule, 2, &key, value));
        cr_expect_str_eq (value, "false", "%s", no[i]);
        gq_rule_free (&rule);
    }
}

/* Loading must end with `status` and a sentence that has each of texts[] in it. */
static void
expect_refused (gq_status status, const char *name, const char *cpu, const char *const *sets,
                const char *const *texts)
{
    gq_rule *rule = NULL;
    gq_error error = {.text = ""};
    gq_status got = gq_rule_load (&rule, name, build_path ("plugins"), sets, count_words (sets),
                                  cpu, NULL, &error);
    cr_expect_eq (got, status, "%s: %s, expected %s (%s)", name, gq_status_name (got),
                  gq_status_name (status), error.text);
    cr_expect_null (rule);
    for (; *texts != NULL; texts++)
        cr_expect (strstr (error.text, *texts) != NULL, "\"%s\" is not in: %s", *texts, error.text);
}

Test (plugin, wrong_settings_are_refused_with_the_right_ones)
{
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("beta_1=0.5"),
                    SETS ("no setting \"beta_1\"", "did you mean beta1", "lr=0.001", "beta2=0.999",
                          "eps=1e-08", "epsilon=torch (torch|tensorflow)", "clip_norm=0"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("clip_nrom=1"), SETS ("clip_norm"));
    expect_refused (GQ_INVALID, "sgd", "auto", SETS ("lr=-0.1"), SETS ("lr=-0.1", "0 .. 10000"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("beta1=1"), SETS ("out of bounds"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("eps=0"), SETS ("out of bounds"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr=nan"), SETS ("takes a number"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr=inf"), SETS ("out of bounds"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr=1e-3x"), SETS ("\"1e-3x\""));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr="), SETS ("takes a number"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr= 1"), SETS ("takes a number"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("epsilon=keras"),
                    SETS ("torch|tensorflow", "keras"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("epsilon=tor"), SETS ("torch|tensorflow"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr"), SETS ("key=value"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("=1"), SETS ("key=value"));
    expect_refused (GQ_INVALID, "adam", "auto", SETS ("lr=1", "eps=1", "lr=1"),
                    SETS ("lr", "twice"));
    expect_refused (GQ_INVALID, "sgd", "sse9", NO_SETS, SETS ("avx512", "sse9"));
}

Test (plugin, a_key_of_any_length_is_refused)
{
    char set[5000];
    memset (set, 'k', sizeof set);
    snprintf (set + sizeof set - 3, 3, "=1");
    expect_refused (GQ_INVALID, "adam", "auto", SETS (set), SETS ("no setting \"kkk", "lr=0.001"));
}

Test (plugin, schedules_without_an_end_are_refused)
{
    expect_refused (GQ_INVALID, "sgd", "auto", SETS ("schedule_steps=5"),
                    SETS ("schedule_steps=5", "schedule=linear"));
    expect_refused (GQ_INVALID, "sgd", "auto", SETS ("schedule=linear"), SETS ("schedule_steps=N"));
    expect_refused (GQ_INVALID, "sgd", "auto", SETS ("schedule=cosine"), SETS ("schedule_steps=N"));
    expect_refused (GQ_INVALID, "sgd", "auto",
                    SETS ("schedule=cosine", "schedule_steps=5", "warmup_steps=5"),
                    SETS ("warmup_steps=5 leaves nothing"));
    expect_refused (GQ_INVALID, "sgd", "auto", SETS ("warmup_steps=1.5"), SETS ("whole numbers"));
    static const char *const bad[] = {"-1", "nan", "inf", "9007199254740994", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char total[64], warmup[64];
        snprintf (total, sizeof total, "schedule_steps=%s", bad[i]);
        snprintf (warmup, sizeof warmup, "warmup_steps=%s", bad[i]);
        expect_refused (GQ_INVALID, "sgd", "auto", SETS ("schedule=linear", total),
                        SETS ("setting schedule_steps"));
        expect_refused (GQ_INVALID, "sgd", "auto", SETS (warmup), SETS ("setting warmup_steps"));
    }
}

Test (plugin, a_schedule_is_refused_where_there_is_no_lr_to_act_on)
{
    static const char *const words[][2] = {{"schedule=linear", "schedule_steps=5"},
                                           {"schedule=cosine", "schedule_steps=5"},
                                           {"warmup_steps=5"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        expect_refused (GQ_INVALID, build_path ("tests/plugins/no_lr.so"), "auto",
                        SETS (words[i][0], words[i][1]),
                        SETS ("good has no setting lr", "leave them out"));
    gq_rule *rule = load (build_path ("tests/plugins/no_lr.so"), "auto", SETS ("clip_norm=1"));
    cr_expect (isnan (gq_rule_lr (rule)));
    gq_rule_free (&rule);
}

/* ---- plug-ins that are missing or wrong ---- */

Test (plugin, a_missing_plugin_is_refused_with_the_shipped_names)
{
    expect_refused (GQ_NOTFOUND, "adm", "auto", NO_SETS,
                    SETS ("\"adm\"", "adagrad, adam, adamw, lion, rmsprop, sgd"));
    expect_refused (GQ_NOTFOUND, "./none.so", "auto", NO_SETS, SETS ("./none.so", "No such file"));
    expect_refused (GQ_NOTFOUND, "none.so", "auto", NO_SETS, SETS ("./none.so"));
    expect_refused (GQ_NOTFOUND, "", "auto", NO_SETS, SETS ("empty"));
    char name[10000];
    memset (name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    expect_refused (GQ_NOTFOUND, name, "auto", NO_SETS, SETS ("too long"));
    name[10] = '/';
    expect_refused (GQ_NOTFOUND, name, "auto", NO_SETS, SETS ("too long"));
    gq_rule *rule = NULL;
    gq_error error;
    cr_expect_eq (gq_rule_load (&rule, "adam", "/no/where", NULL, 0, "auto", NULL, &error),
                  GQ_NOTFOUND);
    cr_expect (strstr (error.text, "/no/where") != NULL, "%s", error.text);
}

#define BAD(name, status, ...)                                                         \
    expect_refused (status, build_path ("tests/plugins/" name ".so"), "auto", NO_SETS, \
                    SETS (__VA_ARGS__))

Test (plugin, another_abi_is_refused_with_both_numbers)
{
    char size[32];
    snprintf (size, sizeof size, "%zu", sizeof (gq_optimizer));
    BAD ("wrong_abi", GQ_ABI, "4242", "ABI 2", "rebuild");
    BAD ("wrong_size", GQ_ABI, "24 bytes", size, "rebuild");
}

Test (plugin, a_wrong_table_is_refused_with_the_place)
{
    BAD ("no_symbol", GQ_INVALID, "exports no gq_optimizer_plugin");
    BAD ("bad_name", GQ_INVALID, "name is not of");
    BAD ("no_begin", GQ_INVALID, "no begin");
    BAD ("no_apply", GQ_INVALID, "no apply[GQ_CPU_BASE]");
    BAD ("slot_twice", GQ_INVALID, "slots: exp_avg twice");
    BAD ("slot_scalar", GQ_INVALID, "power is both slot and scalar");
    BAD ("slots_many", GQ_INVALID, "more than 8 slots");
    BAD ("bad_default", GQ_INVALID, "default 2 of setting beta");
    BAD ("bad_choices", GQ_INVALID, "setting kind", "red|green");
    BAD ("setting_twice", GQ_INVALID, "setting lr twice");
    BAD ("host_setting", GQ_INVALID, "clip_norm belongs to the host");
}

Test (plugin, a_file_that_is_no_library_is_refused)
{
    char path[] = "/tmp/gradq-plugin-XXXXXX.so";
    int file = mkstemps (path, 3);
    cr_assert (file >= 0);
    cr_assert_eq (write (file, "no library", 10), 10);
    close (file);
    expect_refused (GQ_INVALID, path, "auto", NO_SETS, SETS ("cannot be loaded", path));
    unlink (path);
}

Test (plugin, a_plugin_of_ones_own_is_loaded_by_its_path_and_uses_what_it_brings)
{
    gq_rule *rule = load (build_path ("tests/plugins/good.so"), "auto", SETS ("lr=0.25"));
    cr_expect_str_eq (gq_rule_plugin (rule)->name, "good");
    cr_expect_str_neq (gq_rule_cpu (rule), "avx2");
    cr_expect_str_neq (gq_rule_cpu (rule), "avx512");
    cr_expect_eq (gq_rule_slot_count (rule), 0);
    cr_expect_eq (gq_rule_scalar_count (rule), 0);
    cr_assert_eq (gq_rule_reset (rule, 3), GQ_OK);
    const float w[3] = {1, 2, 3}, g[3] = {4, 8, -4};
    float next[3];
    gq_rule_step (rule, w, next, g, 0.5f);
    cr_expect (next[0] == 0.5f && next[1] == 1 && next[2] == 3.5f);
    gq_rule_free (&rule);
    cr_expect_null (rule);
}

#if defined(__x86_64__)
Test (plugin, flush_to_zero_of_a_fast_math_plugin_is_undone_and_reported)
{
    unsigned before = _mm_getcsr ();
    gq_rule *rule = NULL;
    gq_error warning, error;
    cr_assert_eq (gq_rule_load (&rule, build_path ("tests/plugins/fast_math.so"), NULL, NULL, 0,
                                "auto", &warning, &error),
                  GQ_OK);
    cr_expect (strstr (warning.text, "-ffast-math") != NULL, "no warning: \"%s\"", warning.text);
    cr_expect_eq (before, _mm_getcsr ());
    volatile float smallest = FLT_MIN;
    cr_expect (smallest / 2 > 0, "denormals are flushed");
    gq_rule_free (&rule);
}
#endif

/* ---- one step by the host ---- */

Test (plugin, clipping_scales_to_the_norm_as_pytorch_does)
{
    gq_rule *rule = load ("sgd", "auto", SETS ("lr=1", "clip_norm=1"));
    cr_assert_eq (gq_rule_reset (rule, 2), GQ_OK);
    const float w[2] = {0, 0}, g[2] = {3, 4};
    float next[2];
    gq_rule_step (rule, w, next, g, 1);
    cr_expect_eq (gq_rule_last_norm (rule), 5);
    /* torch/nn/utils/clip_grad.py: clip_coef = max_norm / (total_norm + 1e-6), at most 1 */
    cr_expect (next[0] == -(3 * (float)(1 / (5 + 1e-6))), "%.9g", next[0]);
    gq_rule_step (rule, w, next, g, -2);
    cr_expect_eq (gq_rule_last_norm (rule), 10);
    cr_expect (next[1] == 4 * (float)(2 / (10 + 1e-6)), "%.9g", next[1]);
    gq_rule_step (rule, w, next, g, 0.125f);
    cr_expect_eq (gq_rule_last_norm (rule), 0.625);
    cr_expect (next[0] == -0.375f && next[1] == -0.5f, "a short gradient was changed");
    /* Of an actor that calls it finite: it passes no more than an infinite one. */
    const float odd[2][2] = {{NAN, 1e30f}, {INFINITY, 1e30f}};
    for (size_t i = 0; i < 2; i++) {
        gq_rule_step (rule, w, next, odd[i], 1);
        cr_expect (next[0] == 0 && next[1] == 0, "%.9g %.9g", next[0], next[1]);
    }
    gq_rule_free (&rule);
}

static double
factor (double schedule, double total, double warmup, uint64_t step)
{
    double values[GQ_HOST_SETTING_COUNT] = {[GQ_HOST_SCHEDULE] = schedule,
                                            [GQ_HOST_SCHEDULE_STEPS] = total,
                                            [GQ_HOST_WARMUP_STEPS] = warmup};
    return gq_schedule_factor (values, step);
}

Test (plugin, schedules_follow_their_formulas)
{
    const double pi = 3.14159265358979323846;
    cr_expect_eq (factor (0, 0, 0, 1), 1);
    cr_expect_eq (factor (0, 0, 0, 1000000), 1);
    for (uint64_t step = 1; step <= 130; step++) {
        double t = (double)step - 1, rising = (double)step / 10;
        cr_expect_eq (factor (0, 0, 10, step), step <= 10 ? rising : 1);
        double linear = step <= 10 ? rising : t >= 110 ? 0 : 1 - (t - 10) / 100;
        cr_expect_float_eq (factor (1, 110, 10, step), linear, 1e-15);
        /* libm's cosine is within an ulp of the truth; ours sums 13 terms of at most 1.3 */
        double cosine = step <= 10 ? rising : t >= 110 ? 0 : (1 + cos (pi * (t - 10) / 100)) / 2;
        cr_expect_float_eq (factor (2, 110, 10, step), cosine, 1e-15, "step %llu",
                            (unsigned long long)step);
    }
    cr_expect_eq (factor (1, 110, 10, 111), 0);
    cr_expect_eq (factor (2, 110, 10, 11), 1);
}

Test (plugin, the_schedule_reaches_the_learning_rate)
{
    gq_rule *rule = load ("sgd", "auto", SETS ("lr=1", "schedule=linear", "schedule_steps=4"));
    cr_assert_eq (gq_rule_reset (rule, 1), GQ_OK);
    const float w = 0, g = -1;
    float next;
    for (int step = 0; step < 6; step++) {
        const double lr = step < 4 ? 1 - 0.25 * step : 0;
        cr_expect_eq (gq_rule_lr (rule), lr, "said before the step");
        gq_rule_step (rule, &w, &next, &g, 1);
        cr_expect_eq (next, lr);
    }
    gq_rule_free (&rule);
}

Test (plugin, past_its_schedule_no_rule_changes_the_weights)
{
    static const char *const words[][4] = {
        {"adam", "lr=0.1", "weight_decay=0.5"}, {"adamw", "lr=0.1", "weight_decay=0.5"},
        {"rmsprop", "lr=0.1", "momentum=0.9"},  {"adagrad", "lr=0.1"},
        {"sgd", "lr=0.1", "momentum=0.9"},      {"lion", "lr=0.1", "weight_decay=0.5"}};
    const float g[3] = {1, -2, 0.5f};
    for (size_t r = 0; r < sizeof words / sizeof *words; r++) {
        gq_rule *rule =
            load (words[r][0], "auto",
                  SETS ("schedule=linear", "schedule_steps=3", words[r][1], words[r][2]));
        float w[3] = {1, 2, -3}, next[3];
        cr_assert_eq (gq_rule_reset (rule, 3), GQ_OK);
        for (int step = 1; step <= 6; step++) {
            gq_rule_step (rule, w, next, g, 1);
            cr_expect_eq (same_bits (w, next, 3), step > 3, "%s, step %d", words[r][0], step);
            memcpy (w, next, sizeof w);
        }
        gq_rule_free (&rule);
    }
}

/* steps `from` .. `to` of a seeded run; weights[n] in and out. */
static void
run_steps (gq_rule *rule, float *weights, size_t n, uint64_t from, uint64_t to)
{
    float next[64], gradient[64];
    for (uint64_t step = from; step <= to; step++) {
        uint64_t random = SEED + step;
        for (size_t i = 0; i < n; i++)
            gradient[i] = random_float (&random);
        gq_rule_step (rule, weights, next, gradient, 1);
        memcpy (weights, next, n * sizeof *next);
    }
}

Test (plugin, a_rule_restored_from_its_state_goes_on_with_the_same_bits)
{
    const char *const *sets =
        SETS ("schedule=cosine", "schedule_steps=12", "warmup_steps=3", "clip_norm=10");
    static const char *const rules[] = {"adam", "adamw", "rmsprop", "adagrad", "sgd", "lion"};
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        gq_rule *whole = load (rules[r], "auto", sets), *half = load (rules[r], "sse2", sets);
        float w[37] = {0}, other[37] = {0};
        cr_assert (gq_rule_reset (whole, 37) == GQ_OK && gq_rule_reset (half, 37) == GQ_OK);
        run_steps (whole, w, 37, 1, 10);
        memcpy (other, w, sizeof w);
        for (size_t i = 0; i < gq_rule_slot_count (half); i++)
            memcpy (gq_rule_slot (half, i), gq_rule_slot (whole, i), sizeof w);
        memcpy (gq_rule_scalars (half), gq_rule_scalars (whole),
                gq_rule_scalar_count (half) * sizeof (double));
        gq_rule_set_steps (half, gq_rule_steps (whole));
        cr_expect_eq (gq_rule_steps (half), 10);
        run_steps (whole, w, 37, 11, 15);
        run_steps (half, other, 37, 11, 15);
        cr_expect (same_bits (w, other, 37), "%s went another way", rules[r]);
        gq_rule_free (&whole);
        gq_rule_free (&half);
    }
}

Test (plugin, reset_gives_the_initial_state_in_aligned_slots)
{
    gq_rule *rule = load ("adagrad", "auto", SETS ("initial_accumulator_value=0.5"));
    for (int again = 0; again < 2; again++) {
        cr_assert_eq (gq_rule_reset (rule, 33), GQ_OK);
        cr_expect_eq ((uintptr_t)gq_rule_slot (rule, 0) % 64, 0);
        cr_expect_eq (gq_rule_steps (rule), 0);
        for (size_t i = 0; i < 33; i++)
            cr_expect_eq (gq_rule_slot (rule, 0)[i], 0.5f);
        gq_rule_set_steps (rule, 7);
        gq_rule_slot (rule, 0)[3] = 9;
    }
    gq_rule_free (&rule);
    rule = load ("adam", "auto", NO_SETS);
    cr_assert_eq (gq_rule_reset (rule, 0), GQ_OK);
    cr_expect_eq (gq_rule_scalar_count (rule), 2);
    cr_expect (gq_rule_scalars (rule)[0] == 1 && gq_rule_scalars (rule)[1] == 1);
    gq_rule_step (rule, NULL, NULL, NULL, 1);
    cr_expect_eq (gq_rule_scalars (rule)[0], 0.9);
    gq_rule_free (&rule);
}

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) /* they end the process instead */
Test (plugin, reset_without_memory_changes_nothing)
{
    gq_rule *rule = load ("adam", "auto", NO_SETS);
    cr_assert_eq (gq_rule_reset (rule, 4), GQ_OK);
    gq_rule_slot (rule, 1)[3] = 42;
    gq_rule_set_steps (rule, 5);
    struct rlimit limit = {.rlim_cur = 1 << 30, .rlim_max = RLIM_INFINITY};
    cr_assert_eq (setrlimit (RLIMIT_AS, &limit), 0); /* of this test's own process */
    cr_expect_eq (gq_rule_reset (rule, GQ_PARAMETERS_MAX), GQ_MEMORY);
    cr_expect (gq_rule_slot (rule, 1)[3] == 42 && gq_rule_steps (rule) == 5);
    gq_rule_free (&rule);
}
#endif

/* ---- the page ---- */

Test (plugin, the_plugins_page_shows_the_code_that_is_shipped)
{
    static char lion[16384], line[1024];
    FILE *file = fopen ("optimizer/plugins/lion.c", "r");
    cr_assert_not_null (file, "run the tests from the repository's root");
    cr_assert_lt (fread (lion, 1, sizeof lion - 1, file), sizeof lion - 1);
    fclose (file);
    file = fopen ("docs/PLUGINS.md", "r");
    cr_assert_not_null (file);
    bool code = false;
    size_t lines = 0;
    while (fgets (line, sizeof line, file) != NULL) {
        if (strncmp (line, "```", 3) == 0)
            code = strcmp (line, "```c\n") == 0;
        else if (code && ++lines > 0)
            cr_expect (strstr (lion, line) != NULL, "not in lion.c: %s", line);
    }
    fclose (file);
    cr_expect_gt (lines, 60, "the example was found");
}
