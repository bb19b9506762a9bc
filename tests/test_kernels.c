/*
 * Arithmetic on whole vectors: kernels of the shipped rules bit for bit against naive scalar twins,
 * and the reductions.  Step 5 of a gradient's path.
 */
#include "rule_testing.h"

#include "frame.h"
#include "rule_settings.h"

TestSuite (kernels, .timeout = 60);

static const size_t sizes_large[] = {4099, 100003};

/* f32[n], `offset` elements past an address that malloc aligned. */
static float *
vector (float **raw, size_t n, size_t offset)
{
    *raw = malloc ((n + offset) * sizeof (float) + 1);
    cr_assert_not_null (*raw);
    return *raw + offset;
}

/* ---- naive twins: one element, every operation rounded to float32 on its own ---- */

typedef struct element {
    volatile float w, a, b; /* weight, first and second slot */
} element;

typedef struct twin_step {
    const double *s; /* settings in the table's order */
    double power1, power2;
    float scale;
} twin_step;

#define F volatile float

static void
twin_adam (element *e, float gradient, const twin_step *k, double decay, int torch)
{
    double c1 = 1 - k->power1, c2 = sqrt (1 - k->power2);
    F scaled = gradient * k->scale;
    F penalty = (float)decay * e->w;
    F g = scaled + penalty;
    F old = (float)k->s[1] * e->a, new = (float)(1 - k->s[1]) * g;
    e->a = old + new;
    F square = g * g;
    F old2 = (float)k->s[2] * e->b, new2 = (float)(1 - k->s[2]) * square;
    e->b = old2 + new2;
    F root = sqrtf (e->b);
    F corrected = torch ? root * (float)(1 / c2) : root;
    F denominator = corrected + (float)k->s[3];
    F ratio = e->a / denominator;
    F step = (float)(torch ? k->s[0] / c1 : k->s[0] * c2 / c1) * ratio;
    e->w = e->w - step;
}

static void
twin_of_adam (element *e, float gradient, const twin_step *k)
{
    twin_adam (e, gradient, k, k->s[5], k->s[4] == 0);
}

static void
twin_of_adamw (element *e, float gradient, const twin_step *k)
{
    F kept = e->w * (float)(1 - k->s[0] * k->s[4]);
    element inner = {.w = kept, .a = e->a, .b = e->b};
    twin_adam (&inner, gradient, k, 0, 1);
    e->w = inner.w;
    e->a = inner.a;
    e->b = inner.b;
}

static void
twin_of_rmsprop (element *e, float gradient, const twin_step *k)
{
    F g = gradient * k->scale;
    F square = g * g;
    F old = (float)k->s[1] * e->a, new = (float)(1 - k->s[1]) * square;
    e->a = old + new;
    F inside = e->a + (float)k->s[2];
    F root = sqrtf (k->s[3] == 0 ? inside : e->a);
    F denominator = root;
    if (k->s[3] != 0)
        denominator = root + (float)k->s[2];
    F direction = g / denominator;
    if (k->s[4] != 0) {
        F kept = (float)k->s[4] * e->b;
        e->b = kept + direction;
        direction = e->b;
    }
    F step = (float)k->s[0] * direction;
    e->w = e->w - step;
}

static void
twin_of_adagrad (element *e, float gradient, const twin_step *k)
{
    F g = gradient * k->scale;
    F square = g * g;
    e->a = e->a + square;
    F root = sqrtf (e->a);
    F denominator = root + (float)k->s[1];
    F direction = 0;
    if (denominator > 0)
        direction = g / denominator;
    F step = (float)k->s[0] * direction;
    e->w = e->w - step;
}

static void
twin_of_sgd (element *e, float gradient, const twin_step *k)
{
    F g = gradient * k->scale, direction = g;
    if (k->s[1] != 0) {
        F kept = (float)k->s[1] * e->a;
        e->a = kept + g;
        F ahead = (float)k->s[1] * e->a;
        direction = e->a;
        if (k->s[2] != 0)
            direction = g + ahead;
    }
    F step = (float)k->s[0] * direction;
    e->w = e->w - step;
}

static void
twin_of_lion (element *e, float gradient, const twin_step *k)
{
    F g = gradient * k->scale;
    F old = (float)k->s[1] * e->a, new = (float)(1 - k->s[1]) * g;
    F c = old + new;
    F old2 = (float)k->s[2] * e->a, new2 = (float)(1 - k->s[2]) * g;
    e->a = old2 + new2;
    F kept = e->w * (float)(1 - k->s[0] * k->s[3]);
    F step = (float)k->s[0];
    if (c > 0)
        e->w = kept - step;
    else if (c < 0)
        e->w = kept + step;
    else
        e->w = kept - 0.0f;
}

typedef struct variant {
    const char *rule;
    const char *sets[SETS_MAX];
    void (*twin) (element *, float, const twin_step *);
} variant;

static const variant variants[] = {
    {"adam", {"lr=0.01"}, twin_of_adam},
    {"adam", {"epsilon=tensorflow", "eps=1e-3"}, twin_of_adam},
    {"adam", {"weight_decay=0.02", "beta1=0.8", "eps=1e-37"}, twin_of_adam},
    {"adamw", {"weight_decay=0.1"}, twin_of_adamw},
    {"rmsprop", {"lr=0.02"}, twin_of_rmsprop},
    {"rmsprop", {"epsilon=inside", "eps=0.1"}, twin_of_rmsprop},
    {"rmsprop", {"momentum=0.9", "alpha=0.95"}, twin_of_rmsprop},
    {"rmsprop", {"momentum=0.5", "epsilon=inside"}, twin_of_rmsprop},
    {"adagrad", {"lr=0.1"}, twin_of_adagrad},
    {"adagrad", {"eps=0"}, twin_of_adagrad},
    {"adagrad", {"eps=0", "initial_accumulator_value=0.1"}, twin_of_adagrad},
    {"sgd", {"lr=0.1"}, twin_of_sgd},
    {"sgd", {"momentum=0.9"}, twin_of_sgd},
    {"sgd", {"momentum=0.9", "nesterov=true"}, twin_of_sgd},
    {"lion", {"lr=0.01"}, twin_of_lion},
    {"lion", {"weight_decay=0.1", "beta1=0.95"}, twin_of_lion},
};
#define VARIANT_COUNT (sizeof variants / sizeof *variants)

/* ---- a run of kernels beside its twin ---- */

#define STEPS      4
#define SPLITS_MAX 3

typedef struct vectors {
    float *raw[7]; /* exactly as long as needed, so that a sanitizer sees one element past */
    float *w, *next, *gradient, *slots[2], *after[2];
    element *twins; /* [n] */
} vectors;

static void
vectors_init (vectors *v, size_t n, uint64_t *random, double initial_a)
{
    float **all[7] = {&v->w,        &v->next,     &v->gradient, &v->slots[0],
                      &v->slots[1], &v->after[0], &v->after[1]};
    for (size_t i = 0; i < 7; i++)
        *all[i] = vector (&v->raw[i], n, random_next (random) % 5);
    v->twins = calloc (n + 1, sizeof *v->twins);
    for (size_t i = 0; i < n; i++) {
        v->w[i] = random_float (random);
        v->slots[0][i] = (float)initial_a;
        v->slots[1][i] = 0;
        v->twins[i] = (element){.w = v->w[i], .a = (float)initial_a, .b = 0};
    }
}

static void
vectors_clear (vectors *v)
{
    for (size_t i = 0; i < 7; i++)
        free (v->raw[i]);
    free (v->twins);
}

static void
expect_bits (float got, float want, const char *what, const variant *c, int level, size_t n,
             size_t i)
{
    cr_assert (!isnan (want), "the test's own numbers became NaN");
    cr_assert (same_bits (&got, &want, 1),
               "%s %s: level %d, n %zu: %s[%zu] is %a, its twin %a (seed %u)", c->rule, c->sets[0],
               level, n, what, i, (double)got, (double)want, SEED);
}

/* One step: apply over the ranges between cuts[cut_count], then every twin, then compare.  Bit i of
 * `used`: the rule has slot i, which is not idle. */
static void
step_and_compare (vectors *v, size_t n, const size_t *cuts, size_t cut_count, gq_apply *apply,
                  uint32_t used, const float *constants, const twin_step *k, const variant *c,
                  int level)
{
    for (size_t i = 0; i < n; i++)
        v->after[0][i] = v->after[1][i] = v->next[i] = NAN; /* every element is to be written */
    for (size_t i = 0, from = 0; i <= cut_count; i++) {
        size_t to = i < cut_count ? cuts[i] : n;
        const float *before[2] = {NULL};
        float *after[2] = {NULL};
        for (size_t slot = 0; slot < 2; slot++)
            if (used >> slot & 1) {
                before[slot] = v->slots[slot] + from;
                after[slot] = v->after[slot] + from;
            }
        apply (constants, k->scale, to - from, v->w + from, v->next + from, v->gradient + from,
               before, after);
        from = to;
    }
    for (size_t slot = 0; slot < 2; slot++)
        if (used >> slot & 1) {
            float *old = v->slots[slot];
            v->slots[slot] = v->after[slot];
            v->after[slot] = old;
        }
    for (size_t i = 0; i < n; i++) {
        c->twin (&v->twins[i], v->gradient[i], k);
        expect_bits (v->next[i], v->twins[i].w, "w", c, level, n, i);
        expect_bits (v->slots[0][i], v->twins[i].a, "slot 0", c, level, n, i);
        expect_bits (v->slots[1][i], v->twins[i].b, "slot 1", c, level, n, i);
        v->w[i] = v->next[i];
    }
}

static int
compare_sizes (const void *a, const void *b)
{
    size_t x, y;
    memcpy (&x, a, sizeof x);
    memcpy (&y, b, sizeof y);
    return (x > y) - (x < y);
}

static size_t
slot_count (const gq_optimizer *plugin)
{
    size_t count = 0;
    while (plugin->slots[count] != NULL)
        count++;
    return count;
}

/* STEPS steps of n elements; cut_count random cuts of the range. */
static void
compare_run (const gq_optimizer *plugin, const double *settings, const variant *c, int level,
             size_t n, size_t cut_count, uint64_t *random)
{
    double scalars[GQ_SCALARS_MAX] = {1, 1};
    float constants[GQ_CONSTANTS_MAX] = {0};
    twin_step k = {.s = settings, .power1 = 1, .power2 = 1};
    uint32_t used = plugin->idle == NULL ? 3 : 3 & ~plugin->idle (settings);
    for (size_t slot = 0; slot < 2; slot++)
        if (slot_count (plugin) <= slot)
            used &= ~(1u << slot);
    int adam = strncmp (plugin->name, "adam", 4) == 0;
    vectors v;
    vectors_init (&v, n, random,
                  plugin->initial ? plugin->initial (settings, plugin->slots[0]) : 0);
    for (uint64_t s = 1; s <= STEPS; s++) {
        gq_step step = {settings, 1, s, scalars, constants};
        plugin->begin (&step);
        k.power1 *= adam ? settings[1] : 1;
        k.power2 *= adam ? settings[2] : 1;
        k.scale = s % 2 ? 1.0f : 0.37f;
        size_t cuts[SPLITS_MAX];
        for (size_t i = 0; i < cut_count; i++)
            cuts[i] = random_next (random) % (n + 1);
        qsort (cuts, cut_count, sizeof *cuts, compare_sizes);
        for (size_t i = 0; i < n; i++)
            v.gradient[i] = random_float (random);
        step_and_compare (&v, n, cuts, cut_count, plugin->apply[level], used, constants, &k, c,
                          level);
    }
    vectors_clear (&v);
}

/* Every variant at one level, whole and in ranges. */
static void
expect_twins_agree (int level, const char *cpu)
{
    gq_rule *rule = NULL;
    gq_error error;
    if (gq_rule_load (&rule, "sgd", build_path ("plugins"), NULL, 0, cpu, NULL, &error) != GQ_OK) {
        cr_assert (level > 0 && strstr (error.text, "this CPU has no") != NULL, "%s", error.text);
        cr_skip_test ("%s", error.text);
    }
    gq_rule_free (&rule);
    uint64_t random = SEED;
    for (size_t i = 0; i < VARIANT_COUNT; i++) {
        const variant *c = &variants[i];
        rule = load (c->rule, cpu, c->sets);
        const gq_optimizer *plugin = gq_rule_plugin (rule);
        cr_assert_str_eq (gq_rule_cpu (rule), cpu);
        size_t rows = 0;
        while (plugin->settings[rows].name != NULL)
            rows++;
        double settings[GQ_SETTINGS_MAX];
        gq_status status = gq_settings_parse (settings, plugin->settings, rows, c->sets,
                                              count_words (c->sets), c->rule, &error);
        cr_assert_eq (status, GQ_OK);
        for (size_t n = 0; n <= SIZE_SMALL_MAX; n++)
            for (size_t cuts = 0; cuts <= SPLITS_MAX; cuts++)
                compare_run (plugin, settings, c, level, n, cuts, &random);
        for (size_t j = 0; j < sizeof sizes_large / sizeof *sizes_large; j++)
            compare_run (plugin, settings, c, level, sizes_large[j], j * SPLITS_MAX, &random);
        gq_rule_free (&rule);
    }
}

Test (kernels, sse2_kernels_have_the_bits_of_their_scalar_twins)
{
    expect_twins_agree (GQ_CPU_BASE, "sse2");
}
Test (kernels, avx2_kernels_have_the_bits_of_their_scalar_twins)
{
    expect_twins_agree (GQ_CPU_AVX2, "avx2");
}
Test (kernels, avx512_kernels_have_the_bits_of_their_scalar_twins)
{
    expect_twins_agree (GQ_CPU_AVX512, "avx512");
}

Test (kernels, momentum_buffer_is_not_touched_when_momentum_is_0)
{
    static const char *const rules[] = {"sgd", "rmsprop"};
    for (int i = 0; i < 2; i++) {
        gq_rule *rule = load (rules[i], "auto", NO_SETS);
        const gq_optimizer *plugin = gq_rule_plugin (rule);
        float constants[GQ_CONSTANTS_MAX] = {0}, w[40] = {0}, next[40], g[40] = {1}, v[40] = {0};
        double settings[2][GQ_SETTINGS_MAX] = {{0.1, 0, 0}, {0.1, 0.99, 1e-8, 1, 0}};
        cr_expect_eq (plugin->idle (settings[i]), i == 0 ? 1u : 2u, "%s says so", rules[i]);
        plugin->begin (&(gq_step){settings[i], 1, 1, NULL, constants});
        float after_v[40];
        const float *before[2] = {i == 0 ? NULL : v, NULL}; /* would crash if touched */
        float *after[2] = {i == 0 ? NULL : after_v, NULL};
        const char *most = gq_rule_cpu (rule);
        int levels = strcmp (most, "avx512") == 0 ? 3 : strcmp (most, "avx2") == 0 ? 2 : 1;
        for (int level = 0; level < levels; level++)
            plugin->apply[level](constants, 1, 40, w, next, g, before, after);
        cr_expect (next[0] < 0);
        gq_rule_free (&rule);
    }
}

/* ---- reductions ---- */

Test (kernels, copy_finite_copies_all_but_what_is_not_finite)
{
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    float *raw;
    for (size_t n = 0; n <= 600; n++) {
        float *x = vector (&raw, n, 1);
        float copy[600];
        for (size_t i = 0; i < n; i++)
            x[i] = i % 3 == 0 ? -0.0f : i % 3 == 1 ? FLT_MAX : -1e-45f;
        cr_assert (gq_copy_finite (copy, x, n), "n %zu", n);
        cr_assert (n == 0 || memcmp (copy, x, n * sizeof *x) == 0, "n %zu", n);
        for (size_t i = 0; i < n; i += 1 + n / 40) {
            float good = x[i];
            x[i] = bad[i % 4];
            cr_assert (!gq_copy_finite (copy, x, n), "n %zu, element %zu", n, i);
            cr_assert (copy[i] == 0 && !signbit (copy[i]));
            x[i] = copy[i] = good;
            cr_assert (memcmp (copy, x, n * sizeof *x) == 0, "n %zu, element %zu", n, i);
        }
        free (raw);
    }
}

Test (kernels, all_finite_sees_a_single_bad_element_anywhere)
{
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    float *raw;
    for (size_t n = 0; n <= 8200; n = n < SIZE_SMALL_MAX ? n + 1 : n + 2711) {
        float *x = vector (&raw, n, 1);
        for (size_t i = 0; i < n; i++)
            x[i] = i % 2 ? FLT_MAX : -1e-45f;
        cr_assert (gq_all_finite (x, n), "n %zu", n);
        for (size_t i = 0; i < n; i++) {
            float good = x[i];
            x[i] = bad[i % 4];
            cr_assert (!gq_all_finite (x, n), "n %zu, element %zu", n, i);
            x[i] = good;
        }
        free (raw);
    }
}

/* In place, and copied from where it lies unaligned. */
static void
expect_verdict (const float *x, size_t n, uint32_t crc, gq_status verdict)
{
    float *raw;
    uint8_t *bytes = malloc (n * sizeof *x + 1);
    float *copy = vector (&raw, n, 1);
    cr_assert_not_null (bytes);
    memcpy (bytes + 1, x, n * sizeof *x);
    cr_assert_eq (gq_check_vector (x, n, crc), verdict, "n %zu", n);
    cr_assert_eq (gq_copy_vector (copy, bytes + 1, n, crc), verdict, "n %zu", n);
    cr_assert (memcmp (copy, x, n * sizeof *x) == 0, "n %zu: other bytes", n);
    free (bytes);
    free (raw);
}

Test (kernels, a_vector_is_checked_for_its_sum_first_and_then_for_its_values)
{
    float *raw;
    for (size_t n = 0; n <= 8200; n = n < SIZE_SMALL_MAX ? n + 1 : n + 2711) {
        float *x = vector (&raw, n, 1);
        for (size_t i = 0; i < n; i++)
            x[i] = (float)i - 3.5f;
        const uint32_t crc = gq_crc32c (x, n * sizeof *x);
        expect_verdict (x, n, crc, GQ_OK);
        expect_verdict (x, n, ~crc, GQ_CHECKSUM);
        for (size_t i = 0; i < n; i += i < SIZE_SMALL_MAX ? 1 : 61) {
            const float good = x[i];
            x[i] = INFINITY;
            expect_verdict (x, n, crc, GQ_CHECKSUM);
            expect_verdict (x, n, gq_crc32c (x, n * sizeof *x), GQ_NONFINITE);
            x[i] = good;
        }
        free (raw);
    }
}

/* The order of gq_sum_squares by its definition: 16 lanes in a block of 4096, halved; blocks split
 * at the largest power of two below their number. */
static double
twin_sum_squares (const float *x, size_t n)
{
    size_t blocks = (n + 4095) / 4096, half = 1;
    if (blocks > 1) {
        while (half * 2 < blocks)
            half *= 2;
        return twin_sum_squares (x, half * 4096) +
               twin_sum_squares (x + half * 4096, n - half * 4096);
    }
    volatile double lanes[16] = {0};
    for (size_t i = 0; i < n; i++)
        lanes[i % 16] += (double)x[i] * (double)x[i];
    for (size_t width = 8; width > 0; width /= 2)
        for (size_t i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

Test (kernels, sum_of_squares_has_the_bits_of_its_definition)
{
    uint64_t random = SEED;
    for (size_t n = 0; n <= 70000; n = n < SIZE_SMALL_MAX ? n + 1 : n + 1 + n / 3) {
        float *raw, *x = vector (&raw, n, n % 3);
        long double exact = 0;
        for (size_t i = 0; i < n; i++) {
            x[i] = (float)(int64_t)random_next (&random) * 0x1p-60f;
            exact += (long double)x[i] * x[i];
        }
        double got = gq_sum_squares (x, n);
        cr_assert_eq (got, twin_sum_squares (x, n), "n %zu (seed %u)", n, SEED);
        /* at most 4096 / 16 + 4 + 5 roundings in a row, each 2^-53, of positive terms */
        cr_assert (fabsl (got - exact) <= 265 * 0x1p-53L * exact, "n %zu (seed %u)", n, SEED);
        free (raw);
    }
    const float huge[2] = {FLT_MAX, FLT_MAX};
    cr_expect (isfinite (gq_sum_squares (huge, 2)));
}
