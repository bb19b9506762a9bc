/*
 * What lies in shared memory when an optimizer begins: taken when it continues what checkpoint and
 * journal say, ignored when it does not, and never believed.
 */
#include "live_testing.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "frame.h"
#include "optimizer/journal_format.h"
#include "optimizer/live.h"

TestSuite (live_files, .timeout = 240);

/* A life that is killed in the midst of the step of event `until`. */
static void
kill_in_step (const char *const *words, unsigned event)
{
    report told;
    char crash[64];
    snprintf (crash, sizeof crash, "stepping:%u", 2 * BLOCKS * event + 3);
    cr_assert (!run_life (&(order){.words = words, .crash = crash, .until = EVENTS}, &told));
}

static report
expected_of (const char *const *words)
{
    directory_begin ();
    const report told = complete (&(order){.words = words, .until = EVENTS});
    remove_all ();
    return told;
}

static int
open_file (const char *name, uint64_t *size)
{
    char path[PATH_MAX];
    path_below (path, name);
    int fd = open (path, O_RDWR);
    cr_assert (fd >= 0, "%s", path);
    *size = (uint64_t)lseek (fd, 0, SEEK_END);
    return fd;
}

static void
copy_file (const char *from, const char *to)
{
    uint8_t *bytes;
    const size_t size = support_read (from, &bytes);
    support_write (to, bytes, size);
    free (bytes);
}

/* Turn bits of one byte of the live state's page around.  Again: as it was. */
static void
flip_live (uint64_t at)
{
    uint64_t size;
    uint8_t byte;
    int fd = open_file ("lane/board", &size);
    const gq_live_shape shape = {.count = COUNT, .slide = GQ_SLIDE, .slot_count = 2};
    const off_t offset = (off_t)(size - gq_live_bytes (&shape) + at);
    cr_assert_eq (pread (fd, &byte, 1, offset), 1);
    byte ^= 0x41;
    cr_assert_eq (pwrite (fd, &byte, 1, offset), 1);
    close (fd);
}

/* The next life does not begin, and says why. */
static void
expect_refused_with (const char *const *words, const char *sentence)
{
    report told;
    cr_assert (run_life (&(order){.words = words, .until = EVENTS}, &told));
    cr_assert_eq (told.status, GQ_NOTFOUND, "%s", gq_status_name (told.status));
    cr_assert_not_null (strstr (told.error, sentence), "%s", told.error);
    cr_assert_not_null (strstr (told.error, "--cut"), "%s", told.error);
}

static void
expect_goes_on (const char *const *words, const report *expected)
{
    const report told = complete (&(order){.words = words, .until = EVENTS});
    cr_assert_eq (told.version, expected->version);
    cr_assert_eq (told.digest, expected->digest, "other bits");
}

Test (live_files, of_another_boot_it_is_ignored)
{
    const report expected = expected_of (ADAM);
    directory_begin ();
    kill_in_step (ADAM, 6);
    flip_live (8); /* the boot's id */
    expect_refused_with (ADAM, "only names its gradient");
    flip_live (8);
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

/* All records behind the checkpoint that name a gradient become records of another boot. */
static void
change_boot_of_records (void)
{
    uint64_t size;
    const uint64_t covered = 1 + (PAIR + 1) + CHECKPOINT_EVENT + 1; /* term, grants, events */
    uint32_t chain = 0;
    unsigned named = 0;
    int fd = open_file ("journal/segment-0000000000000001", &size);
    uint8_t *bytes = mmap (NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert (bytes != MAP_FAILED);
    for (uint64_t at = sizeof (gq_segment_header); at < size;) {
        gq_record_header header;
        memcpy (&header, bytes + at, sizeof header);
        uint8_t *payload = bytes + at + sizeof header;
        if (header.kind == GQ_RECORD_NAMED && header.lsn > covered) {
            payload[header.payload_bytes - 1] ^= 1;
            named++;
        }
        header.chain = chain;
        header.crc = gq_crc32c (&header, offsetof (gq_record_header, crc));
        header.crc = gq_crc32c_more (header.crc, payload, header.payload_bytes);
        chain = header.crc;
        memcpy (bytes + at, &header, sizeof header);
        at += sizeof header +
              (header.payload_bytes + GQ_RECORD_ALIGN - 1) / GQ_RECORD_ALIGN * GQ_RECORD_ALIGN;
    }
    cr_assert_geq (named, 2);
    munmap (bytes, size);
    close (fd);
}

/* Nothing of it is believed, though slots hold the numbers that are named.  With --fsync never that
 * may be lost, so the run goes on from the last version that does not need it. */
Test (live_files, after_a_restart_of_the_machine_the_run_goes_back_and_on)
{
    directory_begin ();
    kill_in_step (ADAM, 6);
    flip_live (8);
    change_boot_of_records ();
    const report told = complete (&(order){.words = ADAM, .until = EVENTS});
    cr_assert_eq (told.version, EVENTS, "what was lost came again");
    remove_all ();
    const report expected = expected_of (ADAM);
    cr_assert_eq (told.digest, expected.digest, "other bits");
}

Test (live_files, no_byte_of_its_marks_is_believed_when_it_is_damaged)
{
    const report expected = expected_of (ADAM);
    directory_begin ();
    kill_in_step (ADAM, 6);
    const report sound = complete (&(order){.words = ADAM, .only_opens = true});
    unsigned refused = 0;
    for (uint64_t at = 0; at < 128 + sizeof (gq_live_mark); at++) {
        report told;
        flip_live (at);
        cr_assert (run_life (&(order){.words = ADAM, .only_opens = true}, &told), "byte %u",
                   (unsigned)at);
        refused += told.status == GQ_NOTFOUND;
        cr_assert (told.status == GQ_NOTFOUND || told.status == GQ_OK, "byte %u: %s", (unsigned)at,
                   told.error);
        cr_assert (told.status != GQ_OK || told.digest == sound.digest, "byte %u: other bits",
                   (unsigned)at);
        flip_live (at);
    }
    /* One of the marks is not the active one, and between fields there is nothing. */
    cr_assert_geq (refused, 4 + 4 + 8 + 8 + 4 + 4);
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

Test (live_files, one_that_was_cut_short_or_is_of_another_run_is_ignored)
{
    const report expected = expected_of (ADAM);
    char path[PATH_MAX];
    char kept[PATH_MAX];
    uint64_t size;
    directory_begin ();
    kill_in_step (ADAM, 6);
    path_below (path, "lane/board");
    path_below (kept, "kept");
    cr_assert_eq (rename (path, kept), 0);
    expect_refused_with (ADAM, "only names its gradient");
    copy_file (kept, path);
    cr_assert_eq (truncate (path, 5 * 4096), 0);
    expect_refused_with (ADAM, "only names its gradient");
    copy_file (kept, path);
    int fd = open_file ("lane/board", &size);
    cr_assert_eq (pwrite (fd, "another run", 11, 8), 11);
    close (fd);
    expect_refused_with (ADAM, "only names its gradient");
    cr_assert_eq (rename (kept, path), 0);
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

/* The slot of event `event` is said to hold another gradient than it does. */
static void
change_number (unsigned event)
{
    gq_shm file;
    char path[PATH_MAX];
    char lanes[PATH_MAX];
    path_below (lanes, "lane");
    gq_lane_identity identity = {.actor = actor_of (event), .epoch = EPOCH, .count = COUNT};
    cr_assert_eq (gq_identity_read (identity.run, directory, NULL), GQ_OK);
    cr_assert (gq_lane_file_path (path, lanes, actor_of (event), EPOCH));
    cr_assert_eq (gq_lane_file_open (&file, path, &identity, NULL), GQ_OK);
    atomic_fetch_add (&gq_lane_file_words (&file)->holds[sequence_of (event) % SLOTS], 1);
    gq_shm_close (&file);
}

/* The gradient of event `event` is not what the journal names any more: in its slot, or in the live
 * state, whose last bytes before the page ends are the frame in hand. */
static void
spoil (unsigned event)
{
    const gq_live_shape shape = {.count = COUNT, .slide = GQ_SLIDE, .slot_count = 2};
    const uint64_t frame_bytes = GQ_FRAME_HEADER_BYTES + COUNT * sizeof (float);
    const uint64_t pages = (frame_bytes + GQ_SHM_PAGE - 1) / GQ_SHM_PAGE;
    if (!is_whole (event))
        change_number (event);
    else
        flip_live (gq_live_bytes (&shape) - pages * GQ_SHM_PAGE + GQ_FRAME_HEADER_BYTES + 5);
}

/* Nobody was told of it: it comes again, also when a life that began meanwhile came no further. */
Test (live_files, a_gradient_that_is_gone_before_its_step_began_is_as_if_it_had_not_come)
{
    const report expected = expected_of (ADAM);
    for (unsigned i = 0; i < 4; i++) {
        const unsigned event = 6 + i / 2;
        char crash[64];
        report told;
        snprintf (crash, sizeof crash, "before-apply:%u", event + 1);
        directory_begin ();
        cr_assert (!run_life (&(order){.words = ADAM, .crash = crash, .until = EVENTS}, &told));
        if (i % 2 == 1)
            complete (&(order){.words = ADAM, .only_opens = true});
        spoil (event);
        expect_goes_on (ADAM, &expected);
        remove_all ();
    }
}

/* What is made of it cannot be undone; all else is there. */
Test (live_files, the_rest_of_a_gradient_that_is_gone_in_the_midst_of_its_step_counts_as_0)
{
    const report expected = expected_of (ADAM);
    for (unsigned event = 6; event < 8; event++) {
        directory_begin ();
        kill_in_step (ADAM, event);
        spoil (event);
        const report told = complete (&(order){.words = ADAM, .until = EVENTS});
        cr_assert_eq (told.version, EVENTS);
        cr_assert_neq (told.digest, expected.digest, "event %u: another gradient was believed",
                       event);
        const report again = complete (&(order){.words = ADAM, .only_opens = true});
        cr_assert_eq (again.digest, told.digest, "other bits");
        remove_all ();
    }
}

Test (live_files, with_a_damaged_checkpoint_it_continues_the_one_before)
{
    const report expected = expected_of (ADAM);
    char newest[PATH_MAX];
    directory_begin ();
    kill_in_step (ADAM, 6);
    cr_assert_eq (count_files ("checkpoints", "checkpoint-", newest), 2);
    cr_assert_eq (truncate (newest, 1000), 0);
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

Test (live_files, an_older_one_than_the_checkpoint_is_not_taken)
{
    const report expected = expected_of (ADAM);
    report told;
    directory_begin ();
    kill_in_step (ADAM, 5);
    complete (&(order){.words = ADAM, .until = 7, .shares_not = true});
    cr_assert (!run_life (
        &(order){.words = ADAM, .until = EVENTS, .shares_not = true, .crash = "before-apply:1"},
        &told));
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

/* Another rule, other settings, another way to keep the journal: what the life before it left in
 * shared memory is all the same. */
Test (live_files, the_next_life_may_do_differently)
{
    static const char *const others[][6] = {{"--optimizer", "sgd", "--set", "momentum=0.9"},
                                            {"--optimizer", "adam", "--aggregate", "2"},
                                            {"--optimizer", "adam", "--journal", "keep"},
                                            {"--optimizer", "adam", "--fsync", "interval"}};
    static const char *const firsts[][6] = {{"--optimizer", "adam"},
                                            {"--optimizer", "adam", "--aggregate", "3"}};
    for (size_t i = 0; i < 4; i++)
        for (size_t k = 0; k < 2; k++) {
            directory_begin ();
            complete (&(order){.words = firsts[k], .until = 5, .checkpoint = true});
            const report expected = complete (&(order){.words = others[i], .until = EVENTS});
            remove_all ();
            directory_begin ();
            complete (&(order){.words = firsts[k], .until = 5});
            complete (&(order){.words = others[i], .only_opens = true});
            complete (&(order){.words = others[i], .only_opens = true});
            expect_goes_on (others[i], &expected);
            remove_all ();
        }
}

/* What was only named since the checkpoint before is nowhere else then. */
Test (live_files, after_a_clean_end_it_makes_up_for_a_damaged_checkpoint)
{
    char newest[PATH_MAX];
    directory_begin ();
    const report expected =
        complete (&(order){.words = ADAM, .until = EVENTS, .checkpoint = true, .cleans_up = true});
    cr_assert_geq (count_files ("checkpoints", "checkpoint-", newest), 2);
    cr_assert_eq (truncate (newest, 1000), 0);
    expect_goes_on (ADAM, &expected);
    remove_all ();
}

Test (live_files, only_the_defaults_name_gradients)
{
    static const char *const lives[][4] = {
        {"--journal", "recycle"}, {"--journal", "keep"}, {"--fsync", "interval"}};
    for (size_t i = 0; i < 3; i++) {
        static view seen;
        directory_begin ();
        const report told = complete (&(order){.words = lives[i], .until = EVENTS});
        const gq_status status = view_open (&seen, UINT64_MAX, UINT64_MAX);
        if (i == 0) {
            cr_assert (status == GQ_NOTFOUND && seen.recovery.lost, "the view has no lane/");
        } else {
            cr_assert_eq (status, GQ_OK, "%s", seen.error.text);
            cr_assert_eq (digest_of (&seen.core), told.digest);
        }
        view_close (&seen);
        remove_all ();
    }
}
