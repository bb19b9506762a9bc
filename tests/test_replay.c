/*
 * Replay: a journal leads another core to the same bits as the live one, record by record, whatever
 * the mode; and a record that does not fit is refused with its place.
 */
#include "replay_testing.h"

#include "memory_disk.h"

TestSuite (replay, .timeout = 120);

enum { EVENTS = 400, RECORDS_MAX = EVENTS + 1, SEGMENT_BYTES = 4096 };

static gq_memory_disk *memory;
static gq_journal journal;
static gq_core twin;
static gq_rule *twin_rule;
static uint64_t digests[RECORDS_MAX]; /* [lsn] of the live core after that record */

/* The twin begins where the live core does: the same actors, layout and weights. */
static void
begin_pair (const gq_core_config *config)
{
    const gq_journal_end nothing = {0};
    begin (config, 10);
    twin = core;
    twin_rule = rule;
    begin (config, 10);
    memory = gq_memory_disk_new ();
    cr_assert_eq (
        gq_journal_start (&journal, &memory->base, core.run, &nothing, SEGMENT_BYTES, NULL), GQ_OK);
    core.journal = &journal;
}

static void
end_pair (void)
{
    gq_disk *disk = &memory->base;
    disk->ops->close (&disk);
    end ();
    gq_core_clear (&twin);
    gq_rule_free (&twin_rule);
}

static gq_status
replay_one (void *context, const gq_record *record, gq_error *error)
{
    (void)context;
    const gq_status status = gq_core_replay (&twin, record, error);
    if (status == GQ_OK && digest_of (&twin) != digests[record->lsn])
        cr_assert_fail ("another state after record %llu", (unsigned long long)record->lsn);
    return status;
}

static void
replay_all (void)
{
    gq_journal_end last;
    gq_error error = {""};
    cr_assert_eq (gq_journal_read (&memory->base, core.run, 0, 0, replay_one, NULL, &last, &error),
                  GQ_OK, "%s", error.text);
    cr_assert_eq (last.lsn, journal.lsn);
}

static const gq_core_config modes[] = {
    {.aggregate = 1, .max_staleness = UINT64_MAX},
    {.aggregate = 1, .max_staleness = 3},
    {.aggregate = 1, .damp = true},
    {.aggregate = 3, .max_staleness = 4},
    {.aggregate = 4, .max_staleness = UINT64_MAX, .weigh_samples = true},
    {.aggregate = 5, .damp = true, .weigh_samples = true}};

static void
expect_equal_after (uint64_t seed, const gq_core_config *config)
{
    driver actors;
    begin_pair (config);
    driver_begin (&actors, seed);
    for (unsigned i = 0; i < EVENTS; i++) {
        driver_step (&actors);
        digests[journal.lsn] = digest_of (&core);
    }
    /* The claim is about a life in which everything happened. */
    cr_assert (actors.outcomes[GQ_OUTCOME_STEPPED] > 0 && actors.outcomes[GQ_OUTCOME_REFUSED] > 0 &&
               actors.outcomes[GQ_OUTCOME_IGNORED] > 0);
    cr_assert_eq (actors.outcomes[GQ_OUTCOME_HELD] > 0, config->aggregate > 1);
    replay_all ();
    expect_same_core (&twin, &core);
    cr_assert_arr_eq (twin.rejected_by, core.rejected_by, sizeof core.rejected_by);
    end_pair ();
}

Test (replay, every_record_leads_to_the_bits_that_the_live_core_had_in_every_mode)
{
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++)
        expect_equal_after (100 + i, &modes[i]);
}

Test (replay, every_shipped_rule_replays_with_clipping_and_a_schedule)
{
    static const char *const rules[] = {"adam", "adamw", "rmsprop", "adagrad", "sgd", "lion"};
    static const char *const sets[] = {"lr=0.01",         "clip_norm=0.5",
                                       "schedule=cosine", "schedule_steps=150",
                                       "warmup_steps=20", NULL};
    rule_sets = sets;
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        rule_name = rules[i];
        expect_equal_after (200 + i, &modes[i]);
    }
}

Test (replay, a_replayed_core_goes_on_with_the_same_bits)
{
    driver actors;
    rule_name = "adam";
    begin_pair (&modes[5]);
    driver_begin (&actors, 300);
    for (unsigned i = 0; i < EVENTS / 2; i++) {
        driver_step (&actors);
        digests[journal.lsn] = digest_of (&core);
    }
    replay_all ();
    /* The same frames to both: the twin takes what the live core journals from here on. */
    const uint64_t from = journal.lsn;
    const uint32_t chain = journal.chain;
    for (unsigned i = 0; i < EVENTS / 2; i++) {
        driver_step (&actors);
        digests[journal.lsn] = digest_of (&core);
    }
    gq_journal_end last;
    gq_error error = {""};
    cr_assert_eq (
        gq_journal_read (&memory->base, core.run, from, chain, replay_one, NULL, &last, &error),
        GQ_OK, "%s", error.text);
    expect_same_core (&twin, &core);
    end_pair ();
}

/* ---- what does not fit ---- */

/* A record of these parts; its place is what the sentence must name. */
static gq_status
replay_made (uint32_t kind, const void *first, size_t first_bytes, const void *second,
             size_t second_bytes, gq_error *error)
{
    uint8_t *payload =
        malloc (first_bytes + second_bytes + 1); /* 8-byte aligned, as in a segment */
    memcpy (payload, first, first_bytes);
    if (second_bytes > 0)
        memcpy (payload + first_bytes, second, second_bytes);
    const gq_record record = {.lsn = 4711,
                              .kind = kind,
                              .payload = payload,
                              .payload_bytes = first_bytes + second_bytes,
                              .segment = "segment-of-the-test",
                              .offset = 99};
    const gq_status status = gq_core_replay (&core, &record, error);
    free (payload);
    return status;
}

static void
expect_misfit (uint32_t kind, const void *first, size_t first_bytes, const void *second,
               size_t second_bytes, const char *word)
{
    gq_error error = {""};
    const uint64_t before = digest_of (&core);
    cr_assert_eq (replay_made (kind, first, first_bytes, second, second_bytes, &error),
                  GQ_MALFORMED, "%s", word);
    cr_assert_not_null (strstr (error.text, "4711"), "%s", error.text);
    cr_assert_not_null (strstr (error.text, "segment-of-the-test"), "%s", error.text);
    cr_assert_not_null (strstr (error.text, word), "%s", error.text);
    cr_assert_eq (digest_of (&core), before, "%s: something changed", word);
}

Test (replay, grants_that_do_not_fit_are_refused)
{
    const uint8_t nonce[GQ_NONCE_BYTES + 1] = {0};
    const uint32_t good[2] = {1, EPOCH + 1}, stranger[2] = {GQ_ACTORS_MAX, 1}, zero[2] = {1, 0},
                   same[2] = {1, EPOCH}, lower[2] = {1, EPOCH - 1};
    gq_error error = {""};
    begin (&plain, 0);
    for (size_t size = 0; size <= sizeof nonce; size++)
        if (size != GQ_NONCE_BYTES)
            expect_misfit (GQ_RECORD_GRANT, good, sizeof good, nonce, size, "24 bytes");
    expect_misfit (GQ_RECORD_GRANT, stranger, sizeof good, nonce, GQ_NONCE_BYTES, "impossible");
    expect_misfit (GQ_RECORD_GRANT, zero, sizeof good, nonce, GQ_NONCE_BYTES, "impossible");
    expect_misfit (GQ_RECORD_GRANT, same, sizeof good, nonce, GQ_NONCE_BYTES, "impossible");
    expect_misfit (GQ_RECORD_GRANT, lower, sizeof good, nonce, GQ_NONCE_BYTES, "impossible");
    cr_assert_eq (replay_made (GQ_RECORD_GRANT, good, sizeof good, nonce, GQ_NONCE_BYTES, &error),
                  GQ_OK);
    end ();
}

/* A gradient whose frame is changed before it is encoded. */
static void
expect_gradient_misfit (const gradient *g, void (*change) (gq_frame *frame), const char *word)
{
    gq_frame frame = header_of (g);
    size_t size;
    if (change != NULL)
        change (&frame);
    uint8_t *bytes = support_message (&frame, g->values, &size);
    expect_misfit (GQ_RECORD_GRADIENT, bytes, size, NULL, 0, word);
    free (bytes);
}

static void
to_other_run (gq_frame *frame)
{
    frame->run[3] ^= 1;
}

static void
to_other_layout (gq_frame *frame)
{
    frame->digest ^= 1;
}

static void
to_weights (gq_frame *frame)
{
    frame->kind = GQ_KIND_WEIGHTS;
}

Test (replay, gradients_that_do_not_fit_are_refused)
{
    begin (&plain, 0);
    cr_assert_eq (take (of (1, 1, 0)), GQ_OUTCOME_STEPPED);
    const gradient good = of (1, 2, 1), again = of (1, 1, 1), far = of (1, 66, 1),
                   nan = of (1, 2, NAN), nobody = of (ACTORS, 1, 1);
    gradient other_epoch = of (1, 2, 1);
    gq_frame frame = header_of (&good);
    gq_error error = {""};
    size_t size;
    other_epoch.epoch++;
    uint8_t *bytes = support_message (&frame, good.values, &size);
    expect_misfit (GQ_RECORD_GRADIENT, bytes, size - 1, NULL, 0, "no gradient");
    bytes[size - 1] ^= 1;
    expect_misfit (GQ_RECORD_GRADIENT, bytes, size, NULL, 0, "could not have been accepted");
    bytes[size - 1] ^= 1;
    expect_misfit (6, bytes, size, NULL, 0, "unknown");
    expect_misfit (GQ_RECORD_TERM, bytes, size, NULL, 0, "unknown");
    expect_gradient_misfit (&again, NULL, "not new");
    expect_gradient_misfit (&far, NULL, "not new");
    expect_gradient_misfit (&nobody, NULL, "not new");
    expect_gradient_misfit (&other_epoch, NULL, "not new");
    expect_gradient_misfit (&nan, NULL, "could not have been accepted");
    expect_gradient_misfit (&good, to_other_run, "another run");
    expect_gradient_misfit (&good, to_other_layout, "could not have been accepted");
    expect_gradient_misfit (&good, to_weights, "no gradient");
    core.has_weights = false;
    expect_gradient_misfit (&good, NULL, "could not have been accepted");
    core.has_weights = true;
    cr_assert_eq (replay_made (GQ_RECORD_GRADIENT, bytes, size, NULL, 0, &error), GQ_OK);
    cr_assert_eq (core.version, 2);
    free (bytes);
    end ();
}

Test (replay, refusals_that_do_not_fit_are_refused)
{
    const uint32_t good[2] = {GQ_STALE, 0}, ok[2] = {GQ_OK, 0}, unknown[2] = {GQ_STATUS_COUNT, 0};
    begin (&plain, 0);
    cr_assert_eq (take (of (1, 1, 0)), GQ_OUTCOME_STEPPED);
    const gradient fresh = of (1, 2, 1), again = of (1, 1, 1);
    gq_frame frame = header_of (&fresh);
    gq_error error = {""};
    size_t size;
    const size_t header = GQ_FRAME_HEADER_BYTES;
    uint8_t *bytes = support_message (&frame, fresh.values, &size);
    expect_misfit (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header - 1, "136 bytes");
    expect_misfit (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header + 8, "136 bytes");
    expect_misfit (GQ_RECORD_REFUSAL, ok, sizeof good, bytes, header, "reason");
    expect_misfit (GQ_RECORD_REFUSAL, unknown, sizeof good, bytes, header, "reason");
    bytes[40] ^= 1;
    expect_misfit (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header, "header");
    bytes[40] ^= 1;
    cr_assert_eq (replay_made (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header, &error), GQ_OK);
    cr_assert_eq (core.rejected_by[GQ_STALE], 1);
    expect_misfit (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header, "not new");
    free (bytes);
    frame = header_of (&again);
    frame.kind = GQ_KIND_WEIGHTS;
    bytes = support_message (&frame, again.values, &size);
    expect_misfit (GQ_RECORD_REFUSAL, good, sizeof good, bytes, header, "header");
    free (bytes);
    end ();
}
