/*
 * Hexadecimal text, and the names and sentences of statuses.
 */
#include "support.h"

#include "hex.h"

TestSuite (hex, .timeout = 60);

Test (hex, every_byte_survives_a_round_trip_as_two_lower_case_digits)
{
    uint8_t bytes[256], read[256];
    char text[513], one[3];
    for (size_t i = 0; i < 256; i++)
        bytes[i] = (uint8_t)i;
    gq_hex_encode (bytes, 256, text);
    cr_assert_eq (strlen (text), 512);
    for (size_t i = 0; i < 256; i++) {
        snprintf (one, sizeof one, "%02zx", i);
        cr_assert_eq (memcmp (text + 2 * i, one, 2), 0);
    }
    cr_assert (gq_hex_decode (text, read, 256));
    cr_assert_arr_eq (read, bytes, 256);
}

Test (hex, upper_case_is_read_too)
{
    uint8_t bytes[3];
    cr_assert (gq_hex_decode ("aBCdEf", bytes, 3));
    cr_assert (bytes[0] == 0xab && bytes[1] == 0xcd && bytes[2] == 0xef);
}

Test (hex, anything_else_is_refused_and_writes_nothing)
{
    /* The last is a UTF-8 letter and "12", in octal because \xa412 would be one escape. */
    static const char *const bad[] = {"",     "0",    "012",  "01234",     "0g12", "g012",
                                      "012g", "01 2", "0x12", "-123",      "01:2", "01/2",
                                      "01@2", "01`2", "01G2", "\303\24412"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t bytes[2] = {0x77, 0x77};
        cr_assert_not (gq_hex_decode (bad[i], bytes, 2), "%s", bad[i]);
        cr_assert (bytes[0] == 0x77 && bytes[1] == 0x77, "%s", bad[i]);
    }
}

Test (hex, no_bytes_are_an_empty_text)
{
    char text[1] = "x";
    gq_hex_encode ((const uint8_t *)"", 0, text);
    cr_assert_str_empty (text);
    cr_assert (gq_hex_decode ("", NULL, 0));
}

TestSuite (status, .timeout = 60);

Test (status, every_status_has_a_word_of_its_own_and_a_sentence)
{
    for (int i = 0; i < GQ_STATUS_COUNT; i++) {
        const char *word = gq_status_name ((gq_status)i);
        cr_assert_str_not_empty (word);
        cr_assert_eq (strspn (word, "abcdefghijklmnopqrstuvwxyz"), strlen (word), "%s", word);
        cr_assert_str_not_empty (gq_status_text ((gq_status)i));
        for (int k = 0; k < i; k++)
            cr_assert_str_neq (word, gq_status_name ((gq_status)k));
    }
}

Test (status, numbers_that_are_none_have_a_name_too)
{
    /* They come from the wire: refused_reason. */
    static const unsigned numbers[] = {GQ_STATUS_COUNT, 4711, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        cr_assert_str_eq (gq_status_name ((gq_status)numbers[i]), "unknown");
        cr_assert_not_null (gq_status_text ((gq_status)numbers[i]));
    }
}

Test (status, a_sentence_that_is_too_long_is_cut_and_ends)
{
    gq_error error;
    char text[3000];
    memset (text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    cr_assert_eq (gq_fail (&error, GQ_IO, "%s", text), GQ_IO);
    cr_assert_eq (strlen (error.text), sizeof error.text - 1);
    cr_assert_eq (gq_fail (NULL, GQ_FULL, "%s", text), GQ_FULL);
}
