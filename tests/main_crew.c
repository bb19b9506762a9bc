/*
 * Steps that several threads share have the bits of steps that one thread makes, for every rule,
 * whatever the number of threads, and also when it changes on the way.  A plain main, for
 * ThreadSanitizer cannot run Criterion.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

enum { COUNT = 65536 + 333, STEPS = 12, CHANGE = 7 };

static unsigned failures;

static void
expect (bool fine, const char *rule, const char *what)
{
    failures += fine ? 0 : 1;
    if (!fine)
        printf ("FAILED: %s: %s\n", rule, what);
}

static gq_rule *
load (const char *name)
{
    static const char *const sets[] = {"clip_norm=3", "schedule=linear", "schedule_steps=40"};
    char plugins[4096];
    gq_error error = {""};
    gq_error warning;
    gq_rule *rule = NULL;
    const char *build = getenv ("BUILD");
    snprintf (plugins, sizeof plugins, "%s/plugins", build != NULL ? build : "build");
    if (gq_rule_load (&rule, name, plugins, sets, 3, "auto", &warning, &error) != GQ_OK ||
        gq_rule_reset (rule, COUNT) != GQ_OK) {
        printf ("FAILED: %s\n", error.text);
        exit (1);
    }
    return rule;
}

/* STEPS steps with threads[0], then threads[1] from step CHANGE on; 1: no crew.  Into weights. */
static gq_rule *
train (const char *name, const unsigned threads[2], float *weights)
{
    static float gradient[COUNT];
    static float next[COUNT];
    gq_rule *rule = load (name);
    gq_crew *crew = NULL;
    for (size_t i = 0; i < COUNT; i++)
        weights[i] = (float)(i % 101) * 0.01f - 0.5f;
    for (unsigned step = 0; step < STEPS; step++) {
        if (step == 0 || step == CHANGE) {
            const unsigned size = threads[step == 0 ? 0 : 1];
            gq_error error = {""};
            expect (gq_rule_use_crew (rule, NULL) == GQ_OK, name, "no memory");
            gq_crew_free (&crew);
            if (size > 1 && (gq_crew_new (&crew, size, &error) != GQ_OK ||
                             gq_rule_use_crew (rule, crew) != GQ_OK))
                expect (false, name, error.text);
        }
        for (size_t i = 0; i < COUNT; i++)
            gradient[i] = (float)((i * 7919 + step * 104729) % 1009) * 1e-3f - 0.5f;
        gq_rule_step (rule, weights, next, gradient, 0.5f);
        memcpy (weights, next, sizeof next);
    }
    expect (gq_rule_use_crew (rule, NULL) == GQ_OK, name, "no memory");
    gq_crew_free (&crew);
    return rule;
}

int
main (void)
{
    static const char *const rules[] = {"adam", "adamw", "rmsprop", "adagrad", "sgd", "lion"};
    static const unsigned plans[][2] = {{2, 2}, {3, 5}, {1, 4}, {4, 1}};
    static float one[COUNT];
    static float several[COUNT];
    for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
        gq_rule *expected = train (rules[r], (const unsigned[]){1, 1}, one);
        for (size_t p = 0; p < sizeof plans / sizeof plans[0]; p++) {
            gq_rule *rule = train (rules[r], plans[p], several);
            expect (memcmp (one, several, sizeof one) == 0, rules[r], "other weights");
            for (size_t i = 0; i < gq_rule_slot_count (rule); i++)
                expect (memcmp (gq_rule_slot (rule, i), gq_rule_slot (expected, i), sizeof one) ==
                            0,
                        rules[r], "another slot");
            gq_rule_free (&rule);
        }
        gq_rule_free (&expected);
    }
    printf ("%s: shared steps of %zu rules\n", failures == 0 ? "ok" : "FAILED",
            sizeof rules / sizeof rules[0]);
    return failures == 0 ? 0 : 1;
}
