/*
 * Core and journal: a decision is written before it takes effect, with all that it needs to be
 * taken again; and what cannot be written does not happen.
 */
#include "core_testing.h"

#include "memory_disk.h"

TestSuite (core_journal, .timeout = 60);

enum { SEGMENT_BYTES = 4096 };

static gq_memory_disk *memory;
static gq_journal journal;

/* A core of actors and weights, whose decisions from now on go to `disk`. */
static void
begin_on (gq_disk *disk, const gq_core_config *config)
{
    const gq_journal_end nothing = {0};
    begin (config, 0);
    cr_assert_eq (gq_journal_start (&journal, disk, core.run, &nothing, SEGMENT_BYTES, NULL),
                  GQ_OK);
    core.journal = &journal;
}

static void
begin_journaled (const gq_core_config *config)
{
    memory = gq_memory_disk_new ();
    cr_assert_not_null (memory);
    begin_on (&memory->base, config);
}

static void
end_journaled (void)
{
    gq_disk *disk = &memory->base;
    disk->ops->close (&disk);
    end ();
}

/* ---- before it takes effect ---- */

/* A disk that looks at the core whenever something is written to it. */
typedef struct watch {
    gq_disk base;
    unsigned appends;
} watch;

static gq_status
watch_open (gq_disk *disk, const char *name, uint64_t size)
{
    (void)disk;
    (void)name;
    (void)size;
    return GQ_OK;
}

static gradient expected; /* what is being decided */
static uint64_t expected_version;

static gq_status
watch_append (gq_disk *disk, const struct iovec *parts, int count)
{
    (void)parts;
    (void)count;
    ((watch *)disk)->appends++;
    const gq_ledger_entry *entry = &core.ledger.actors[expected.actor];
    if (expected.sequence == 0)
        cr_assert_lt (entry->epoch, expected.epoch, "granted before it was written");
    else
        cr_assert_eq (
            gq_ledger_judge (&core.ledger, expected.actor, expected.epoch, expected.sequence),
            GQ_OK, "entered before it was written");
    cr_assert_eq (core.version, expected_version);
    expect_all (-(float)expected_version);
    return GQ_OK;
}

Test (core_journal, every_decision_is_written_before_it_takes_effect)
{
    static const gq_disk_ops ops = {.open = watch_open, .append = watch_append};
    watch disk = {.base = {.ops = &ops}};
    begin_on (&disk.base, &plain);
    disk.appends = 0;
    expected = of (1, 1, 1);
    cr_assert_eq (take (expected), GQ_OUTCOME_STEPPED);
    cr_assert_eq (disk.appends, 2, "the segment's header and the record");
    expected = of (1, 2, NAN);
    expected_version = 1;
    cr_assert_eq (take (expected), GQ_OUTCOME_REFUSED);
    cr_assert_eq (disk.appends, 3);
    expected = of (1, 0, 0);
    expected.epoch = EPOCH + 1;
    grant (1, EPOCH + 1);
    cr_assert_eq (disk.appends, 4);
    cr_assert_eq (core.ledger.actors[1].epoch, EPOCH + 1);
    end ();
}

/* ---- what is written ---- */

typedef struct noted {
    uint32_t kind;
    uint64_t bytes;
    uint8_t payload[512];
} noted;

typedef struct notes {
    noted of[16];
    size_t count;
} notes;

static gq_status
note (void *context, const gq_record *record, gq_error *error)
{
    notes *self = context;
    (void)error;
    noted *next = &self->of[self->count++];
    cr_assert (self->count <= 16 && record->payload_bytes <= sizeof next->payload);
    next->kind = record->kind;
    next->bytes = record->payload_bytes;
    memcpy (next->payload, record->payload, (size_t)record->payload_bytes);
    return GQ_OK;
}

Test (core_journal, records_hold_what_was_decided_and_ignored_frames_leave_none)
{
    static notes all;
    gq_journal_end last;
    gq_error error = {""};
    size_t size;
    begin_journaled (&plain);
    const gradient good = of (3, 1, 1.5f), bad = of (3, 2, INFINITY), lost = of (ACTORS, 1, 1);
    const gq_frame good_frame = header_of (&good), bad_frame = header_of (&bad);
    const gradient short_one = of (3, 3, 0.5f);
    const gq_frame short_frame = header_of (&short_one), halves = support_bf16 (short_frame);
    gq_status reason;
    take (good);
    take (good); /* a duplicate */
    take (lost); /* nobody's */
    take (bad);
    take (bad);
    grant (6, EPOCH + 5);
    cr_assert_eq (take_bf16 (&short_frame, short_one.values, &reason), GQ_OUTCOME_STEPPED);
    cr_assert_eq (gq_journal_read (&memory->base, core.run, 0, 0, note, &all, &last, &error), GQ_OK,
                  "%s", error.text);
    cr_assert_eq (all.count, 4);
    uint8_t *bytes = support_message (&good_frame, good.values, &size);
    cr_assert_eq (all.of[0].kind, GQ_RECORD_GRADIENT);
    cr_assert_eq (all.of[0].bytes, size);
    cr_assert_arr_eq (all.of[0].payload, bytes, size);
    free (bytes);
    const uint32_t words[2] = {GQ_NONFINITE, 0}, ids[2] = {6, EPOCH + 5};
    bytes = support_message (&bad_frame, bad.values, &size);
    cr_assert_eq (all.of[1].kind, GQ_RECORD_REFUSAL);
    cr_assert_eq (all.of[1].bytes, sizeof words + GQ_FRAME_HEADER_BYTES);
    cr_assert_arr_eq (all.of[1].payload, words, sizeof words);
    cr_assert_arr_eq (all.of[1].payload + sizeof words, bytes, GQ_FRAME_HEADER_BYTES);
    free (bytes);
    cr_assert_eq (all.of[2].kind, GQ_RECORD_GRANT);
    cr_assert_eq (all.of[2].bytes, sizeof ids + GQ_NONCE_BYTES);
    cr_assert_arr_eq (all.of[2].payload, ids, sizeof ids);
    cr_assert_arr_eq (all.of[2].payload + sizeof ids, core.ledger.actors[6].nonce, GQ_NONCE_BYTES);
    uint16_t half_values[N];
    for (size_t i = 0; i < N; i++)
        half_values[i] = 0x3f00; /* 0.5 */
    bytes = support_message (&halves, half_values, &size);
    cr_assert_eq (all.of[3].kind, GQ_RECORD_GRADIENT);
    cr_assert_eq (all.of[3].bytes, size);
    cr_assert_arr_eq (all.of[3].payload, bytes, size, "as it came");
    free (bytes);
    end_journaled ();
}

/* ---- what cannot be written ---- */

/* All of the core, but what is the same memory anyway. */
typedef struct snapshot {
    gq_core core;
    float weights[N], sum[N], slot[N];
    uint64_t steps, lsn;
    uint32_t chain;
} snapshot;

static void
photograph (snapshot *self)
{
    memset (self, 0, sizeof *self);
    memcpy (&self->core, &core, sizeof core);
    memcpy (self->weights, gq_buffers_current (core.buffers), sizeof self->weights);
    if (core.held > 0)
        memcpy (self->sum, core.sum, sizeof self->sum);
    memcpy (self->slot, gq_rule_slot (rule, 0), sizeof self->slot);
    self->steps = gq_rule_steps (rule);
    self->lsn = journal.lsn;
    self->chain = journal.chain;
}

/* In the midst of a step of two, with a momentum to spoil. */
static void
begin_in_the_midst (void)
{
    const gq_core_config config = {.aggregate = 2, .max_staleness = UINT64_MAX, .damp = true};
    static const char *const sets[] = {"lr=1", "momentum=0.5", NULL};
    rule_sets = sets;
    begin_journaled (&config);
    for (uint64_t sequence = 1; sequence <= 3; sequence++)
        cr_assert_neq (take (of (1, sequence, 1)), GQ_OUTCOME_BLOCKED);
    cr_assert_eq (core.held, 1);
}

/* A gradient that would make a step, one that would be refused: 0 and 1. */
static gradient
either (int which)
{
    return which == 0 ? of (2, 1, 3) : of (2, 1, NAN);
}

static void
expect_blocked (const gradient *g, gq_status expected_reason)
{
    static snapshot before, after;
    gq_status reason;
    const gq_frame frame = header_of (g);
    photograph (&before);
    cr_assert_eq (take_frame (&frame, g->values, &reason), GQ_OUTCOME_BLOCKED);
    cr_assert_eq (reason, expected_reason, "%s", gq_status_name (reason));
    photograph (&after);
    cr_assert_eq (memcmp (&before, &after, sizeof before), 0, "something changed");
}

Test (core_journal, a_full_disk_blocks_and_changes_nothing_and_what_was_blocked_is_taken_later)
{
    for (int which = 0; which < 2; which++)
        for (uint64_t room = 0; room < 150; room += 7) {
            begin_in_the_midst ();
            const gradient g = either (which);
            const uint64_t room_before = memory->room_bytes;
            memory->room_bytes = memory->written_bytes + room;
            expect_blocked (&g, GQ_FULL);
            expect_blocked (&g, GQ_FULL);
            memory->room_bytes = room_before;
            cr_assert_eq (take (g), which == 0 ? GQ_OUTCOME_STEPPED : GQ_OUTCOME_REFUSED);
            cr_assert_eq (take (g), GQ_OUTCOME_IGNORED);
            end_journaled ();
        }
}

Test (core_journal, a_disk_that_failed_blocks_and_changes_nothing_and_is_never_asked_again)
{
    for (int which = 0; which < 2; which++)
        for (uint64_t partial = 0; partial < 150; partial += 7) {
            begin_in_the_midst ();
            const gradient g = either (which), other = of (3, 1, 1);
            memory->fail_at_call = memory->calls + 1;
            memory->partial_bytes = partial;
            expect_blocked (&g, GQ_IO);
            /* What follows a record that was cut short would be read as damage. */
            const uint64_t calls = memory->calls;
            expect_blocked (&g, GQ_IO);
            expect_blocked (&other, GQ_IO);
            cr_assert_eq (gq_journal_sync (&journal), GQ_IO);
            cr_assert_eq (memory->calls, calls);
            end_journaled ();
        }
}

Test (core_journal, an_epoch_that_cannot_be_written_is_not_granted)
{
    const uint8_t nonce[GQ_NONCE_BYTES] = {7};
    static snapshot before, after;
    for (int full = 0; full < 2; full++) {
        begin_in_the_midst ();
        if (full)
            memory->room_bytes = memory->written_bytes + 20;
        else
            memory->fail_at_call = memory->calls + 1;
        photograph (&before);
        cr_assert_eq (gq_core_grant (&core, 1, EPOCH + 1, nonce), full ? GQ_FULL : GQ_IO);
        photograph (&after);
        cr_assert_eq (memcmp (&before, &after, sizeof before), 0, "something changed");
        end_journaled ();
    }
}

Test (core_journal, what_the_ledger_ignores_needs_no_room)
{
    begin_in_the_midst ();
    memory->room_bytes = memory->written_bytes;
    cr_assert_eq (take (of (1, 2, 1)), GQ_OUTCOME_IGNORED, "a duplicate is answered all the same");
    cr_assert (core.ledger.actors[1].owed);
    end_journaled ();
}
