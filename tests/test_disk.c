/*
 * Directory of the real file system as a disk, alone and with a journal on it.
 */
#include "journal_testing.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stats.h"

TestSuite (disk, .timeout = 60);

static char path[64];
static gq_disk *disk;
static gq_error failure;

static void
begin (void)
{
    strcpy (path, "/tmp/gradq-disk-XXXXXX");
    cr_assert_not_null (mkdtemp (path));
    cr_assert_eq (gq_disk_open (&disk, path, &failure), GQ_OK, "%s", failure.text);
}

static void
finish (void)
{
    char **names;
    size_t count;
    cr_assert_eq (disk->ops->list (disk, "", &names, &count), GQ_OK);
    for (size_t i = 0; i < count; i++)
        if (names[i][0] != '.')
            cr_assert_eq (disk->ops->remove (disk, names[i]), GQ_OK);
    free (names);
    disk->ops->close (&disk);
    cr_assert_null (disk);
    cr_assert_eq (rmdir (path), 0);
}

static void
write_file (const char *name, const char *text)
{
    const struct iovec part = {.iov_base = (void *)(uintptr_t)text, .iov_len = strlen (text)};
    cr_assert_eq (disk->ops->open (disk, name, 0), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
}

static void
expect_file (const char *name, const void *expected, size_t expected_size)
{
    const uint8_t *bytes;
    size_t size;
    cr_assert_eq (disk->ops->map (disk, name, &bytes, &size), GQ_OK, "%s", name);
    cr_assert_eq (size, expected_size, "%s: %zu", name, size);
    cr_assert_arr_eq (bytes, expected, size);
    disk->ops->unmap (disk, bytes, size);
}

Test (disk, a_directory_is_made_once_and_opened_again)
{
    char below[100];
    gq_disk *again;
    begin ();
    snprintf (below, sizeof below, "%s/journal", path);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq (gq_disk_open (&again, below, &failure), GQ_OK, "%s", failure.text);
        again->ops->close (&again);
    }
    cr_assert_eq (rmdir (below), 0);
    finish ();
}

Test (disk, what_cannot_be_a_directory_is_refused_with_its_name)
{
    char below[100];
    gq_disk *none = disk;
    begin ();
    write_file ("file", "");
    static const char *const bad[] = {"file", "file/below", "missing/below"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf (below, sizeof below, "%s/%s", path, bad[i]);
        cr_assert_eq (gq_disk_open (&none, below, &failure), GQ_IO);
        cr_assert_null (none);
        cr_assert_not_null (strstr (failure.text, below), "%s", failure.text);
    }
    finish ();
}

Test (disk, list_is_sorted_and_has_the_prefix_only)
{
    char **names, name[32];
    size_t count;
    begin ();
    cr_assert_eq (disk->ops->list (disk, "segment-", &names, &count), GQ_OK);
    cr_assert_eq (count, 0);
    free (names);
    /* Made in another order than listed: 7 is a generator of the numbers below 499.  Their names
     * are more than the first block of memory holds. */
    for (unsigned i = 0, n = 1; i < 498; i++, n = n * 7 % 499) {
        snprintf (name, sizeof name, "segment-%016u", n);
        write_file (name, "");
    }
    write_file ("checkpoint", "");
    write_file ("segment", "");
    cr_assert_eq (disk->ops->list (disk, "segment-", &names, &count), GQ_OK);
    cr_assert_eq (count, 498);
    for (unsigned i = 0; i < count; i++) {
        snprintf (name, sizeof name, "segment-%016u", i + 1);
        cr_assert_str_eq (names[i], name);
    }
    free (names);
    finish ();
}

Test (disk, what_is_appended_in_parts_is_read_in_one)
{
    begin ();
    const struct iovec parts[] = {{.iov_base = "one ", .iov_len = 4},
                                  {.iov_base = NULL, .iov_len = 0},
                                  {.iov_base = "and two", .iov_len = 7}};
    cr_assert_eq (disk->ops->open (disk, "file", 0), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, parts, 3), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, parts, 1), GQ_OK);
    cr_assert_eq (disk->ops->sync (disk), GQ_OK);
    expect_file ("file", "one and twoone ", 15);
    finish ();
}

Test (disk, open_cuts_or_fills_with_zeros_to_its_size)
{
    begin ();
    write_file ("file", "abcdef");
    const struct iovec part = {.iov_base = "X", .iov_len = 1};
    cr_assert_eq (disk->ops->open (disk, "file", 3), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
    expect_file ("file", "abcX", 4);
    cr_assert_eq (disk->ops->open (disk, "file", 6), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
    expect_file ("file", "abcX\0\0X", 7);
    finish ();
}

Test (disk, cut_takes_the_end_away_and_appending_goes_on_there)
{
    begin ();
    write_file ("file", "abcdef");
    const struct iovec part = {.iov_base = "X", .iov_len = 1};
    cr_assert_eq (disk->ops->cut (disk, 2), GQ_OK);
    cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
    expect_file ("file", "abX", 3);
    finish ();
}

Test (disk, an_empty_file_maps_as_empty)
{
    begin ();
    write_file ("file", "");
    expect_file ("file", "", 0);
    finish ();
}

Test (disk, what_is_not_there_is_not_found)
{
    const uint8_t *bytes;
    size_t size;
    begin ();
    cr_assert_eq (disk->ops->map (disk, "file", &bytes, &size), GQ_NOTFOUND);
    cr_assert_eq (disk->ops->remove (disk, "file"), GQ_NOTFOUND);
    write_file ("file", "x");
    cr_assert_eq (disk->ops->remove (disk, "file"), GQ_OK);
    cr_assert_eq (disk->ops->map (disk, "file", &bytes, &size), GQ_NOTFOUND);
    finish ();
}

static unsigned
open_descriptors (void)
{
    unsigned count = 0;
    DIR *directory = opendir ("/proc/self/fd");
    cr_assert_not_null (directory);
    while (readdir (directory) != NULL)
        count++;
    closedir (directory);
    return count;
}

/* Its pages go aside: the descriptor that holds them until then must go, too. */
Test (disk, a_large_file_that_is_removed_is_gone_at_once_and_holds_no_descriptor)
{
    static const uint8_t zeros[1 << 16];
    const struct iovec part = {.iov_base = (void *)(uintptr_t)zeros, .iov_len = sizeof zeros};
    const uint8_t *bytes;
    size_t size;
    begin ();
    cr_assert_eq (disk->ops->open (disk, "large", 0), GQ_OK);
    const unsigned before = open_descriptors ();
    for (int i = 0; i < 128; i++)
        cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
    cr_assert_eq (disk->ops->open (disk, "other", 0), GQ_OK);
    cr_assert_eq (disk->ops->remove (disk, "large"), GQ_OK);
    cr_assert_eq (disk->ops->map (disk, "large", &bytes, &size), GQ_NOTFOUND);
    const uint64_t deadline_ns = gq_now_ns () + UINT64_C (20000000000);
    while (open_descriptors () != before)
        cr_assert_lt (gq_now_ns (), deadline_ns, "%u descriptors, not %u", open_descriptors (),
                      before);
    finish ();
}

Test (disk, a_file_in_a_directory_that_is_gone_is_an_io_failure)
{
    begin ();
    cr_assert_eq (rmdir (path), 0);
    cr_assert_eq (disk->ops->open (disk, "file", 0), GQ_IO, "it cannot be made");
    disk->ops->close (&disk);
}

Test (disk, a_directory_in_the_place_of_a_file_is_an_io_failure)
{
    char below[100];
    const uint8_t *bytes;
    size_t size;
    begin ();
    snprintf (below, sizeof below, "%s/segment-0000000000000001", path);
    cr_assert_eq (mkdir (below, 0755), 0);
    cr_assert_eq (disk->ops->map (disk, "segment-0000000000000001", &bytes, &size), GQ_IO);
    gq_journal_end end;
    cr_assert_eq (read_all (disk, &end, &failure), GQ_IO);
    cr_assert_not_null (strstr (failure.text, "segment-0000000000000001"), "%s", failure.text);
    cr_assert_eq (rmdir (below), 0);
    finish ();
}

/* No file may grow beyond this, as if the disk were full. */
static void
limit_bytes (uint64_t bytes)
{
    struct rlimit limit;
    cr_assert_eq (getrlimit (RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes == UINT64_MAX ? limit.rlim_max : bytes;
    cr_assert_eq (setrlimit (RLIMIT_FSIZE, &limit), 0);
}

Test (disk, an_append_without_room_is_full_and_can_be_cut_off)
{
    begin ();
    cr_assert_neq (signal (SIGXFSZ, SIG_IGN), SIG_ERR);
    write_file ("file", "abc");
    const struct iovec part = {.iov_base = "defghi", .iov_len = 6};
    limit_bytes (5);
    const gq_status full = disk->ops->append (disk, &part, 1);
    const gq_status cut = disk->ops->cut (disk, 3);
    limit_bytes (UINT64_MAX);
    cr_assert_eq (full, GQ_FULL, "%s", gq_status_name (full));
    cr_assert_eq (cut, GQ_OK);
    expect_file ("file", "abc", 3);
    cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
    expect_file ("file", "abcdefghi", 9);
    finish ();
}

/* Bytes of the file on the disk, and its size. */
static uint64_t
taken (const char *name, uint64_t *size)
{
    char whole[256];
    struct stat info;
    snprintf (whole, sizeof whole, "%s/%s", path, name);
    cr_assert_eq (stat (whole, &info), 0);
    *size = (uint64_t)info.st_size;
    return (uint64_t)info.st_blocks * 512;
}

Test (disk, large_records_have_space_reserved_ahead_that_goes_back_when_the_file_is_left)
{
    static char record[100000];
    uint64_t size;
    begin ();
    const struct iovec part = {.iov_base = record, .iov_len = sizeof record};
    cr_assert_eq (disk->ops->open (disk, "file", 0), GQ_OK);
    for (int i = 1; i <= 3; i++) {
        cr_assert_eq (disk->ops->append (disk, &part, 1), GQ_OK);
        const uint64_t bytes = taken ("file", &size);
        cr_assert_eq (size, (uint64_t)i * sizeof record, "the reserve is no part of the file");
        cr_assert_geq (bytes, 16 * sizeof record);
    }
    cr_assert_eq (disk->ops->open (disk, "next", 0), GQ_OK);
    cr_assert_lt (taken ("file", &size), 4 * sizeof record);
    cr_assert_eq (size, 3 * sizeof record);
    finish ();
}

Test (disk, a_journal_on_it_comes_back_after_every_restart)
{
    gq_journal journal;
    gq_journal_end end;
    begin ();
    for (uint64_t lsn = 1; lsn <= 12; lsn++) {
        cr_assert_eq (reopen (&journal, disk).lsn, lsn - 1);
        append_to (&journal, lsn);
        cr_assert_eq (gq_journal_sync (&journal), GQ_OK);
        disk->ops->close (&disk);
        cr_assert_eq (gq_disk_open (&disk, path, &failure), GQ_OK, "%s", failure.text);
    }
    cr_assert_eq (read_all (disk, &end, &failure), GQ_OK, "%s", failure.text);
    cr_assert_eq (end.lsn, 12);
    finish ();
}

Test (disk, a_journal_on_a_full_one_goes_on_when_there_is_room)
{
    gq_journal journal;
    gq_journal_end end;
    cr_assert_neq (signal (SIGXFSZ, SIG_IGN), SIG_ERR);
    /* From no byte to all of the first segment: a missing header, a torn one, a torn record. */
    for (uint64_t room = 0; room < SEGMENT_BYTES; room += 5) {
        begin ();
        reopen (&journal, disk);
        gq_status status = GQ_OK;
        limit_bytes (room);
        while (status == GQ_OK && journal.lsn < 12)
            status = append_next (&journal);
        limit_bytes (UINT64_MAX);
        cr_assert_eq (status, GQ_FULL, "room %" PRIu64 ": %s", room, gq_status_name (status));
        const uint64_t lsn = journal.lsn;
        cr_assert_eq (read_all (disk, &end, &failure), GQ_OK, "%s", failure.text);
        cr_assert_eq (end.lsn, lsn);
        append_to (&journal, 12);
        cr_assert_eq (read_all (disk, &end, &failure), GQ_OK, "%s", failure.text);
        cr_assert_eq (end.lsn, 12);
        finish ();
    }
}
