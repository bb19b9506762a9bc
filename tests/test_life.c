/*
 * Life: what a TERM record says brings back the same rule, settings and modes, to the last bit.
 */
#include "run_testing.h"

#include "optimizer/life.h"

TestSuite (life, .timeout = 60);

/* A life of these words, through JSON text and back, with its rule loaded. */
static gq_rule *
reborn (gq_life *self, const gq_life *from)
{
    gq_rule *loaded = NULL;
    gq_error warning, error = {""};
    json_t *json = gq_life_to_json (from);
    char *text = json_dumps (json, JSON_COMPACT);
    json_decref (json);
    json = json_loads (text, 0, NULL);
    cr_assert_eq (gq_life_from_json (self, json), GQ_OK, "%s", text);
    json_decref (json);
    free (text);
    cr_assert_eq (gq_life_load (self, &loaded, build_path ("plugins"), "auto", &warning, &error),
                  GQ_OK, "%s", error.text);
    return loaded;
}

static gq_rule *
born (gq_life *self, const char *const *words)
{
    gq_rule *loaded = NULL;
    gq_error warning, error = {""};
    options = options_of (words);
    cr_assert_eq (gq_life_from_options (self, options), GQ_OK);
    self->term = 1;
    gq_options_free (&options);
    cr_assert_eq (gq_life_load (self, &loaded, build_path ("plugins"), "auto", &warning, &error),
                  GQ_OK, "%s", error.text);
    return loaded;
}

static void
expect_same_life (const gq_life *a, const gq_life *b)
{
    cr_assert (a->term == b->term && a->version == b->version);
    cr_assert_str_eq (a->plugin, b->plugin);
    cr_assert (json_equal (a->sets, b->sets));
    cr_assert (a->config.aggregate == b->config.aggregate && a->config.damp == b->config.damp &&
               a->config.weigh_samples == b->config.weigh_samples &&
               a->config.max_staleness == b->config.max_staleness);
}

/* Both make the same bits of the same gradients. */
static void
expect_same_steps (gq_rule *a, gq_rule *b)
{
    float weights[2][N] = {{0}}, next[N], values[N];
    uint64_t seed = 12;
    cr_assert_eq (gq_rule_reset (a, N), GQ_OK);
    cr_assert_eq (gq_rule_reset (b, N), GQ_OK);
    for (int step = 0; step < 40; step++) {
        for (size_t i = 0; i < N; i++)
            values[i] = ldexpf ((float)(int32_t)support_random (&seed), -30);
        for (int k = 0; k < 2; k++) {
            gq_rule_step (k == 0 ? a : b, weights[k], next, values, 1);
            memcpy (weights[k], next, sizeof next);
        }
        expect_same_vector (weights[0], weights[1], N, "weights");
    }
}

Test (life, all_that_decides_survives_json_to_the_last_bit)
{
    /* Numbers that no short decimal names, defaults that nobody gives, all modes. */
    static const char *const words[][20] = {
        {"--optimizer", "adam"},
        {"--optimizer", "adam", "--set", "lr=0.00031415926535897931", "--set",
         "beta2=0.99900000000000011", "--set", "eps=1e-30", "--aggregate", "65536",
         "--aggregate-weights", "samples", "--max-staleness", "0"},
        {"--optimizer", "rmsprop", "--set", "epsilon=inside", "--set", "lr=0.1", "--set",
         "clip_norm=0.3333333333333333", "--staleness-policy", "damp"},
        {"--optimizer", "sgd", "--set", "nesterov=1", "--set", "momentum=0.7", "--set",
         "schedule=cosine", "--set", "schedule_steps=33", "--set", "warmup_steps=5",
         "--max-staleness", "9007199254740993"}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        gq_life first, second;
        gq_rule *before = born (&first, words[i]);
        first.term = UINT32_MAX - (uint32_t)i;
        first.version = (UINT64_C (1) << 62) + 1;
        gq_rule *after = reborn (&second, &first);
        expect_same_life (&first, &second);
        expect_same_steps (before, after);
        gq_rule_free (&before);
        gq_rule_free (&after);
        gq_life_clear (&first);
        gq_life_clear (&second);
    }
}

Test (life, settings_that_nobody_gave_are_written_down_too)
{
    gq_life self;
    const char *key;
    char value[64];
    gq_rule *loaded = born (&self, SETS ("--optimizer", "adam", "--set", "lr=0.5"));
    size_t count = 0;
    while (gq_rule_setting (loaded, count, &key, value))
        count++;
    cr_assert_eq (json_array_size (self.sets), count);
    for (size_t i = 0; i < count; i++) {
        char word[256];
        gq_rule_setting (loaded, i, &key, value);
        snprintf (word, sizeof word, "%s=%s", key, value);
        cr_assert_str_eq (json_string_value (json_array_get (self.sets, i)), word);
    }
    cr_assert_eq (self.config.max_staleness, UINT64_MAX);
    gq_rule_free (&loaded);
    gq_life_clear (&self);
}

Test (life, a_plug_in_given_as_a_file_is_found_from_any_directory)
{
    gq_life first, second;
    char path[PATH_MAX], here[PATH_MAX];
    cr_assert_not_null (getcwd (here, sizeof here));
    cr_assert_eq (chdir (build_path ("plugins")), 0);
    gq_rule *before = born (&first, SETS ("--optimizer", "./sgd.so"));
    cr_assert_eq (chdir ("/"), 0);
    gq_rule *after = reborn (&second, &first);
    cr_assert_eq (first.plugin[0], '/', "%s", first.plugin);
    cr_assert_not_null (realpath (first.plugin, path));
    cr_assert_eq (chdir (here), 0);
    gq_rule_free (&before);
    gq_rule_free (&after);
    gq_life_clear (&first);
    gq_life_clear (&second);
}

Test (life, json_that_no_life_makes_is_refused)
{
#define GOOD(term, version, plugin, aggregate, sets)                                        \
    "{\"term\": " term ", \"version\": " version ", \"plugin\": " plugin ", \"set\": " sets \
    ", \"aggregate\": " aggregate                                                           \
    ", \"weigh_samples\": false, \"max_staleness\": null, \"damp\": false}"
    static const char *const bad[] = {"null",
                                      "7",
                                      "[]",
                                      "{}",
                                      GOOD ("0", "0", "\"sgd\"", "1", "[]"),
                                      GOOD ("4294967296", "0", "\"sgd\"", "1", "[]"),
                                      GOOD ("1", "-1", "\"sgd\"", "1", "[]"),
                                      GOOD ("1", "0", "7", "1", "[]"),
                                      GOOD ("1", "0", "\"sgd\"", "0", "[]"),
                                      GOOD ("1", "0", "\"sgd\"", "65537", "[]"),
                                      GOOD ("1", "0", "\"sgd\"", "1", "{}"),
                                      GOOD ("1", "0", "\"sgd\"", "1", "[7]")};
    gq_life self;
    json_t *json = json_loads (GOOD ("1", "0", "\"sgd\"", "1", "[\"lr=1\"]"), 0, NULL);
    cr_assert_eq (gq_life_from_json (&self, json), GQ_OK);
    gq_life_clear (&self);
    json_decref (json);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        json = json_loads (bad[i], JSON_DECODE_ANY, NULL);
        cr_assert_not_null (json, "%s", bad[i]);
        cr_assert_eq (gq_life_from_json (&self, json), GQ_MALFORMED, "%s", bad[i]);
        json_decref (json);
    }
    cr_assert_eq (gq_life_from_json (&self, NULL), GQ_MALFORMED);
}
