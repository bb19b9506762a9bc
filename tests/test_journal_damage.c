/*
 * Journal reader against damage: every cut and every flipped byte of a small journal.
 *
 * The oracle is the place of each record, by the rules of the format alone: damage gives a prefix
 * that ends in an unfinished record at the very end, or is refused with its place.  The handler
 * knows every record's bytes, so a wrong one is never let through.
 */
#include "frame.h"
#include "journal_testing.h"

TestSuite (journal_damage, .timeout = 60);

/* Three segments, the last with three records. */
#define RECORDS 8

static gq_memory_disk *memory;
static gq_journal journal;
static gq_error failure;
static place places[RECORDS + 1];
static size_t segments;
/* What the whole journal's segments hold. */
static struct {
    char name[64];
    uint8_t bytes[512];
    size_t size;
    uint64_t first, last; /* lsn */
} whole[RECORDS];

static void
begin (void)
{
    memory = journal_of (&journal, RECORDS);
    segments = places_of (places, RECORDS);
    cr_assert_eq (segments, 3);
    for (uint64_t lsn = RECORDS; lsn >= 1; lsn--) {
        const size_t number = places[lsn].number;
        const uint8_t *live =
            gq_memory_disk_bytes (memory, places[lsn].segment, &whole[number].size);
        cr_assert (live != NULL && whole[number].size <= sizeof whole[number].bytes);
        memcpy (whole[number].bytes, live, whole[number].size);
        memcpy (whole[number].name, places[lsn].segment, sizeof whole[number].name);
        whole[number].first = lsn;
        if (whole[number].last == 0)
            whole[number].last = lsn;
    }
}

static void
finish (void)
{
    disk_close (memory);
}

static void
put (size_t number, size_t size)
{
    const gq_status status =
        gq_memory_disk_put (memory, whole[number].name, whole[number].bytes, size);
    REQUIRE (status == GQ_OK, "%zu", number);
}

/* The error names this segment and offset. */
static void
expect_place (size_t number, uint64_t offset)
{
    char words[128];
    snprintf (words, sizeof words, "%s at offset %" PRIu64 ":", whole[number].name, offset);
    REQUIRE (strstr (failure.text, words) != NULL, "not \"%s\" but: %s", words, failure.text);
}

/* A prefix of `lsn` records; unless `torn`, nothing behind it.  Going on behind it works. */
static void
expect_prefix (uint64_t lsn, bool torn, size_t torn_bytes)
{
    gq_journal_end end;
    gq_status status = read_all (&memory->base, &end, &failure);
    REQUIRE (status == GQ_OK, "%s", failure.text);
    REQUIRE (end.lsn == lsn, "%" PRIu64 " instead of %" PRIu64, end.lsn, lsn);
    REQUIRE (end.torn == torn && end.torn_bytes == torn_bytes, "lsn %" PRIu64 ", %" PRIu64, lsn,
             end.torn_bytes);
    gq_memory_disk_kill (memory);
    reopen (&journal, &memory->base);
    append_to (&journal, lsn + 1);
    status = read_all (&memory->base, &end, &failure);
    REQUIRE (status == GQ_OK, "healed: %s", failure.text);
    REQUIRE (end.lsn == lsn + 1 && !end.torn, "healed: %" PRIu64, end.lsn);
}

/* Remove what a test added or left, and lay down the first `count` segments. */
static void
restore (size_t count)
{
    char **names;
    size_t found;
    REQUIRE (gq_segment_list (&memory->base, &names, &found) == GQ_OK, "list");
    for (size_t i = 0; i < found; i++)
        REQUIRE (memory->base.ops->remove (&memory->base, names[i]) == GQ_OK, "%s", names[i]);
    free (names);
    for (size_t i = 0; i < count; i++)
        put (i, whole[i].size);
}

/* Records of segment `number` that lie in its first `size` bytes, and where the last one ends. */
static uint64_t
whole_records (size_t number, size_t size, size_t *end)
{
    uint64_t lsn = whole[number].first - 1;
    *end = size < sizeof (gq_segment_header) ? 0 : sizeof (gq_segment_header);
    while (lsn < whole[number].last && places[lsn + 1].end <= size)
        *end = places[++lsn].padded;
    return lsn;
}

Test (journal_damage, every_cut_of_the_end_leaves_the_whole_records_before_it)
{
    begin ();
    for (size_t last = 0; last < segments; last++)
        for (size_t size = 0; size <= whole[last].size; size++) {
            size_t end;
            const uint64_t lsn = whole_records (last, size, &end);
            const size_t torn_bytes = size > end ? size - end : 0;
            restore (last);
            put (last, size);
            expect_prefix (lsn, torn_bytes > 0 || size < sizeof (gq_segment_header), torn_bytes);
        }
    finish ();
}

Test (journal_damage, a_cut_segment_that_others_follow_is_refused_with_its_place)
{
    begin ();
    for (size_t number = 0; number + 1 < segments; number++)
        for (size_t size = 0; size < whole[number].size; size++) {
            gq_journal_end end;
            size_t good;
            const uint64_t lsn = whole_records (number, size, &good);
            restore (segments);
            put (number, size);
            const gq_status status = read_all (&memory->base, &end, &failure);
            if (lsn == whole[number].last) { /* only padding is gone */
                REQUIRE (status == GQ_OK && end.lsn == RECORDS, "%s", failure.text);
                continue;
            }
            REQUIRE (status == GQ_MALFORMED, "segment %zu cut to %zu: %s", number, size,
                     gq_status_name (status));
            REQUIRE (end.lsn == lsn, "%" PRIu64, end.lsn);
            /* Cut between two records, it is the next segment that does not fit. */
            if (size >= sizeof (gq_segment_header) && size <= good)
                expect_place (number + 1, 0);
            else
                expect_place (number, size < sizeof (gq_segment_header) ? 0 : good);
        }
    finish ();
}

/* Read with one byte changed, and hold it against the record it lies in. */
static void
check_flip (size_t number, size_t at)
{
    gq_journal_end end;
    uint64_t lsn = whole[number].first;
    const gq_status status = read_all (&memory->base, &end, &failure);
    if (at < sizeof (gq_segment_header)) {
        REQUIRE (status == GQ_MALFORMED, "header of %zu, byte %zu: %s", number, at,
                 gq_status_name (status));
        expect_place (number, 0);
        return;
    }
    while (places[lsn].padded <= at)
        lsn++;
    if (at >= places[lsn].end) { /* padding: no part of a record */
        REQUIRE (status == GQ_OK && end.lsn == RECORDS, "%s", failure.text);
        return;
    }
    if (lsn == RECORDS) { /* as if it had not been finished */
        REQUIRE (status == GQ_OK && end.torn && end.lsn == RECORDS - 1, "byte %zu: %s", at,
                 failure.text);
        REQUIRE (end.torn_bytes == whole[number].size - places[lsn].offset, "%zu", at);
        return;
    }
    REQUIRE (status == GQ_MALFORMED, "record %" PRIu64 ", byte %zu: %s", lsn, at,
             gq_status_name (status));
    REQUIRE (end.lsn == lsn - 1, "%" PRIu64 " before the damage, not %" PRIu64, lsn - 1, end.lsn);
    expect_place (number, places[lsn].offset);
}

Test (journal_damage, every_flipped_byte_is_refused_with_its_place_or_ends_the_journal)
{
    begin ();
    for (size_t number = 0; number < segments; number++)
        for (size_t at = 0; at < whole[number].size; at++)
            for (unsigned mask = 1; mask <= 256; mask *= 2) {
                size_t size;
                /* Each bit alone, and all of them. */
                const uint8_t flipped = (uint8_t)(mask == 256 ? 255 : mask);
                gq_memory_disk_bytes (memory, whole[number].name, &size)[at] ^= flipped;
                check_flip (number, at);
                gq_memory_disk_bytes (memory, whole[number].name, &size)[at] ^= flipped;
            }
    gq_journal_end end;
    cr_assert_eq (read_all (&memory->base, &end, &failure), GQ_OK, "put right again");
    finish ();
}

Test (journal_damage, a_last_segment_with_nothing_right_in_it_is_begun_anew)
{
    /* A loss of power may leave any size with zeros or with what the disk held before. */
    begin ();
    static const uint8_t filling[] = {0, 0xff, 'G'};
    for (size_t size = 0; size <= 300; size++)
        for (size_t i = 0; i < sizeof filling; i++) {
            uint8_t bytes[300];
            memset (bytes, filling[i], sizeof bytes);
            restore (2);
            REQUIRE (gq_memory_disk_put (memory, whole[2].name, bytes, size) == GQ_OK, "put");
            expect_prefix (whole[1].last, true, size);
        }
    finish ();
}

Test (journal_damage, a_missing_segment_is_noticed)
{
    begin ();
    for (size_t missing = 0; missing < segments; missing++) {
        /* The last one once whole, once without a header: its name alone says what was there. */
        for (int empty = 0; empty < 2 && missing + 1 < segments; empty++) {
            gq_journal_end end;
            restore (segments);
            if (empty)
                put (segments - 1, 0);
            cr_assert_eq (memory->base.ops->remove (&memory->base, whole[missing].name), GQ_OK);
            const gq_status status = read_all (&memory->base, &end, &failure);
            cr_assert_eq (status, GQ_MALFORMED, "segment %zu, empty %d: %s", missing, empty,
                          gq_status_name (status));
            expect_place (missing + 1, 0);
        }
    }
    finish ();
}

Test (journal_damage, a_segment_of_another_journal_does_not_fit)
{
    /* The same run, numbers and sizes, but other kinds of records: as after a wrong restore. */
    begin ();
    gq_memory_disk *other = gq_memory_disk_new ();
    gq_journal second;
    reopen (&second, &other->base);
    for (uint64_t lsn = 1; lsn <= RECORDS; lsn++) {
        uint8_t payload[PAYLOAD_BYTES_MAX] = {0};
        const struct iovec part = {.iov_base = payload, .iov_len = payload_bytes (lsn)};
        cr_assert_eq (gq_journal_append (&second, GQ_RECORD_GRANT, &part, 1), GQ_OK);
    }
    for (size_t number = 1; number < segments; number++) {
        size_t size;
        gq_journal_end end;
        const uint8_t *bytes = gq_memory_disk_bytes (other, whole[number].name, &size);
        cr_assert_not_null (bytes);
        restore (segments);
        cr_assert_eq (gq_memory_disk_put (memory, whole[number].name, bytes, size), GQ_OK);
        cr_assert_eq (read_all (&memory->base, &end, &failure), GQ_MALFORMED);
        expect_place (number, 0);
    }
    disk_close (other);
    finish ();
}

Test (journal_damage, a_renamed_segment_is_refused)
{
    begin ();
    gq_journal_end end;
    restore (0);
    cr_assert_eq (gq_memory_disk_put (memory, whole[0].name, whole[1].bytes, whole[1].size), GQ_OK);
    cr_assert_eq (read_all (&memory->base, &end, &failure), GQ_MALFORMED);
    cr_assert_not_null (strstr (failure.text, "name"), "%s", failure.text);
    finish ();
}

/* Lay down the second segment made of the records `lsns`, in this order; they are right in
 * themselves. */
static void
put_records (const uint64_t *lsns, size_t count)
{
    uint8_t bytes[1024];
    size_t size = sizeof (gq_segment_header);
    memcpy (bytes, whole[1].bytes, size);
    for (size_t i = 0; i < count; i++) {
        const size_t length = (size_t)record_bytes (lsns[i]);
        memcpy (bytes + size, whole[places[lsns[i]].number].bytes + places[lsns[i]].offset, length);
        size += length;
    }
    REQUIRE (gq_memory_disk_put (memory, whole[1].name, bytes, size) == GQ_OK, "put");
}

Test (journal_damage, right_records_in_the_wrong_place_are_refused)
{
    begin ();
    const uint64_t a = whole[1].first, b = a + 1, c = a + 2;
    cr_assert_leq (c, whole[1].last, "three records");
    const struct {
        uint64_t lsns[4];
        size_t count;
        uint64_t good; /* records up to this one stand where they should */
    } wrongs[] = {{{b, c}, 2, a - 1},           {{a, c}, 2, a},        {{a, a, b, c}, 4, a},
                  {{a, b, b, c}, 4, b},         {{b, a, c}, 3, a - 1}, {{a, c, b}, 3, a},
                  {{a, b, c, c + 1}, 4, c + 1}, {{1, b, c}, 3, a - 1}};
    for (size_t i = 0; i < sizeof wrongs / sizeof wrongs[0]; i++) {
        gq_journal_end end;
        restore (segments);
        put_records (wrongs[i].lsns, wrongs[i].count);
        const gq_status status = read_all (&memory->base, &end, &failure);
        cr_assert_eq (status, GQ_MALFORMED, "%zu: %s", i, gq_status_name (status));
        cr_assert_eq (end.lsn, wrongs[i].good, "%zu: %s", i, failure.text);
        /* A record too many is right there, and the next segment is not. */
        if (wrongs[i].good < c)
            expect_place (1, wrongs[i].good < a ? 64 : places[wrongs[i].good].padded);
    }
    finish ();
}

Test (journal_damage, a_last_record_whose_number_or_chain_does_not_follow_is_refused)
{
    begin ();
    const place *last = &places[RECORDS];
    const uint8_t *payload = whole[segments - 1].bytes + last->offset + sizeof (gq_record_header);
    for (int i = 0; i < 4; i++) {
        gq_journal_end end;
        gq_record_header header;
        memcpy (&header, payload - sizeof header, sizeof header);
        header.lsn += i == 1 ? 1 : 0;
        header.lsn -= i == 2 ? 1 : 0;
        header.chain ^= i == 3 ? 1 : 0;
        header.crc = gq_crc32c (&header, offsetof (gq_record_header, crc));
        header.crc = gq_crc32c_more (header.crc, payload, header.payload_bytes);
        restore (segments);
        size_t size;
        uint8_t *live = gq_memory_disk_bytes (memory, last->segment, &size);
        cr_assert (live != NULL && size > last->offset);
        memcpy (live + last->offset, &header, sizeof header);
        const gq_status status = read_all (&memory->base, &end, &failure);
        cr_assert_eq (status, i == 0 ? GQ_OK : GQ_MALFORMED, "%d: %s", i, gq_status_name (status));
        if (i > 0)
            expect_place (segments - 1, last->offset);
    }
    finish ();
}

/* Append a record whose payload is a right record of number `lsn`, cut it at every length, and see
 * that the piece inside does not make the tail look damaged. */
static void
check_nested (uint64_t lsn)
{
    gq_record_header nested = {.magic = GQ_RECORD_MAGIC, .kind = GQ_RECORD_GRANT, .lsn = lsn};
    nested.crc = gq_crc32c (&nested, offsetof (gq_record_header, crc));
    const uint8_t more[8] = {0};
    const struct iovec parts[] = {{.iov_base = &nested, .iov_len = sizeof nested},
                                  {.iov_base = (void *)(uintptr_t)more, .iov_len = sizeof more}};
    begin ();
    cr_assert_eq (gq_journal_append (&journal, GQ_RECORD_GRADIENT, parts, 2), GQ_OK);
    const size_t before = whole[segments - 1].size;
    const size_t all = before + sizeof (gq_record_header) + sizeof nested + sizeof more;
    uint8_t bytes[1024];
    size_t size;
    const uint8_t *live = gq_memory_disk_bytes (memory, whole[segments - 1].name, &size);
    cr_assert (live != NULL && size == all && all <= sizeof bytes, "%zu", size);
    memcpy (bytes, live, all);
    for (size = before + 1; size < all; size++) {
        restore (segments - 1);
        cr_assert_eq (gq_memory_disk_put (memory, whole[segments - 1].name, bytes, size), GQ_OK);
        expect_prefix (RECORDS, true, size - before);
    }
    finish ();
}

Test (journal_damage, a_record_inside_an_unfinished_one_counts_only_with_a_number_that_can_follow)
{
    /* A payload may be anything, a piece of this or another journal too. */
    check_nested (1);
    check_nested (RECORDS);
    check_nested (RECORDS + 100);
    check_nested (UINT64_MAX);
}
