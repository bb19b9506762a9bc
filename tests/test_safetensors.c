/*
 * safetensors reader: what is accepted, and every class of what is not.  Inputs end at a guard
 * page, so that reading one byte too far is a crash.
 */
#include <criterion/criterion.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "safetensors.h"

TestSuite (safetensors, .timeout = 60);

/* ---- helpers ---------------------------------------------------------------------------- */

/* Copy bytes[size] so that they end where an unreadable page begins. */
typedef struct guarded {
    uint8_t *map;
    size_t map_bytes;
    uint8_t *bytes;
} guarded;

static guarded
guard (const void *bytes, size_t size)
{
    const size_t page = (size_t)sysconf (_SC_PAGESIZE);
    guarded result = {.map_bytes = (size / page + 2) * page};
    result.map =
        mmap (NULL, result.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert (result.map != MAP_FAILED);
    cr_assert (mprotect (result.map + result.map_bytes - page, page, PROT_NONE) == 0);
    result.bytes = result.map + result.map_bytes - page - size;
    if (size > 0)
        memcpy (result.bytes, bytes, size);
    return result;
}

static void
unguard (guarded *input)
{
    munmap (input->map, input->map_bytes);
}

#define FILE_BYTES_MAX 65536

/* A file of this header text and data_bytes bytes 0, 1, 2, ...; its size. */
static size_t
compose (uint8_t *bytes, const char *header, size_t header_bytes, size_t data_bytes)
{
    cr_assert (8 + header_bytes + data_bytes <= FILE_BYTES_MAX);
    for (size_t i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(header_bytes >> (8 * i));
    memcpy (bytes + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + header_bytes + i] = (uint8_t)i;
    return 8 + header_bytes + data_bytes;
}

static gq_status
parse_guarded (const uint8_t *bytes, size_t size, gq_error *error)
{
    gq_safetensors *file = NULL;
    guarded input = guard (bytes, size);
    gq_status status = gq_safetensors_parse (&file, input.bytes, size, error);
    cr_assert_eq (file != NULL, status == GQ_OK);
    gq_safetensors_free (&file);
    unguard (&input);
    return status;
}

static gq_status
parse_text (const char *header, size_t data_bytes, gq_error *error)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    const size_t size = compose (bytes, header, strlen (header), data_bytes);
    return parse_guarded (bytes, size, error);
}

/* The header must be refused as malformed, with `hint` in the sentence. */
static void
refuse (const char *header, size_t data_bytes, const char *hint)
{
    gq_error error = {""};
    gq_status status = parse_text (header, data_bytes, &error);
    cr_assert_eq (status, GQ_MALFORMED, "%s: status %s", header, gq_status_name (status));
    cr_assert (strstr (error.text, hint) != NULL, "%s: '%s' has no '%s'", header, error.text, hint);
}

static void
accept (const char *header, size_t data_bytes)
{
    gq_error error = {""};
    gq_status status = parse_text (header, data_bytes, &error);
    cr_assert_eq (status, GQ_OK, "%s: %s", header, error.text);
}

/* ---- reader: accepted ------------------------------------------------------------------- */

Test (safetensors, golden_file_reads_with_its_tensors_and_metadata)
{
    gq_safetensors *file = NULL;
    gq_error error;
    static float w0[257], grads[50 * 257];
    static double w64[257];
    gq_status status = gq_safetensors_read (&file, "tests/data/golden/sgd.safetensors", &error);
    cr_assert_eq (status, GQ_OK, "%s", error.text);
    cr_assert_str_eq (gq_safetensors_meta (file, "rule"), "sgd");
    cr_assert_str_eq (gq_safetensors_meta (file, "lr"), "0.05");
    cr_assert_null (gq_safetensors_meta (file, "absent"));
    cr_assert_eq (gq_safetensors_copy (file, "w0", GQ_DTYPE_F32, 257, w0, &error), GQ_OK);
    cr_assert_eq (gq_safetensors_copy (file, "grads", GQ_DTYPE_F32, 50 * 257, grads, &error),
                  GQ_OK);
    cr_assert_eq (gq_safetensors_copy (file, "w64@1", GQ_DTYPE_F64, 257, w64, &error), GQ_OK);
    /* The file's own content ties offsets together: one step of plain SGD, lr from its metadata. */
    for (size_t i = 0; i < 257; i++) {
        const double expected = (double)w0[i] - 0.05 * (double)grads[i];
        const double distance = expected - w64[i];
        cr_assert (distance * distance <= 1e-24 * (1 + w64[i] * w64[i]), "element %zu: %.17g %.17g",
                   i, expected, w64[i]);
    }
    gq_safetensors_free (&file);
    cr_assert_null (file);
}

Test (safetensors, every_golden_file_reads)
{
    char path[512];
    size_t count = 0;
    DIR *stream = opendir ("tests/data/golden");
    cr_assert (stream != NULL);
    for (struct dirent *entry = readdir (stream); entry != NULL; entry = readdir (stream)) {
        gq_safetensors *file = NULL;
        gq_error error;
        if (strstr (entry->d_name, ".safetensors") == NULL)
            continue;
        snprintf (path, sizeof path, "tests/data/golden/%s", entry->d_name);
        gq_status status = gq_safetensors_read (&file, path, &error);
        cr_assert_eq (status, GQ_OK, "%s", error.text);
        cr_assert_gt (gq_safetensors_count (file), 0);
        gq_safetensors_free (&file);
        count++;
    }
    closedir (stream);
    cr_assert_gt (count, 0);
}

Test (safetensors, what_the_format_allows_is_accepted)
{
    accept ("{}", 0);
    accept ("{}      ", 0);
    accept ("{\"__metadata__\":{}}", 0);
    accept ("{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4);
    accept ("{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]}}", 6);
    accept ("{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]}}", 2);
    accept ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[1,1]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
            2);
    accept ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1);
}

Test (safetensors, tensors_come_in_the_order_of_their_data)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    static const char header[] = "{\"z\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]},"
                                 "\"m\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                 "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}";
    gq_safetensors *file = NULL;
    const size_t size = compose (bytes, header, strlen (header), 5);
    cr_assert_eq (gq_safetensors_parse (&file, bytes, size, NULL), GQ_OK);
    cr_assert_eq (gq_safetensors_count (file), 3);
    static const char *const names[] = {"m", "a", "z"};
    for (size_t i = 0; i < 3; i++) {
        const gq_tensor *tensor = gq_safetensors_at (file, i);
        cr_assert_str_eq (tensor->name, names[i]);
        cr_assert_eq (gq_safetensors_find (file, names[i]), tensor);
    }
    cr_assert_null (gq_safetensors_find (file, "b"));
    gq_safetensors_free (&file);
}

/* ---- reader: refused -------------------------------------------------------------------- */

Test (safetensors, every_truncation_is_malformed_and_reads_nothing_beyond)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    static const char header[] =
        "{\"__metadata__\":{\"k\":\"v\"},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[24,27]}}  ";
    gq_error error;
    const size_t size = compose (bytes, header, strlen (header), 27);
    for (size_t length = 0; length < size; length++) {
        gq_status status = parse_guarded (bytes, length, &error);
        cr_assert_eq (status, GQ_MALFORMED, "length %zu: %s", length, gq_status_name (status));
    }
    cr_assert_eq (parse_guarded (bytes, size, &error), GQ_OK, "%s", error.text);
    bytes[size] = 0;
    cr_assert_eq (parse_guarded (bytes, size + 1, &error), GQ_MALFORMED);
}

Test (safetensors, header_length_beyond_file_or_limit_is_malformed)
{
    uint8_t bytes[16] = {9, 0, 0, 0, 0, 0, 0, 0, '{', '}', ' ', ' ', ' ', ' ', ' ', ' '};
    gq_error error;
    cr_assert_eq (parse_guarded (bytes, 16, &error), GQ_MALFORMED);
    cr_assert (strstr (error.text, "needs 9 bytes but only 8") != NULL, "%s", error.text);
    bytes[0] = 8;
    cr_assert_eq (parse_guarded (bytes, 16, &error), GQ_OK, "%s", error.text);
    memset (bytes, 0xff, 8);
    cr_assert_eq (parse_guarded (bytes, 16, &error), GQ_MALFORMED);
    cr_assert (strstr (error.text, "limit") != NULL, "%s", error.text);
}

Test (safetensors, header_that_is_no_json_object_is_malformed)
{
    refuse ("", 0, "begin with '{'");
    refuse (" {}", 0, "begin with '{'");
    refuse ("[]", 0, "begin with '{'");
    refuse ("{", 0, "header byte");
    refuse ("{}x", 0, "header byte");
    refuse ("{\"a\":1}", 0, "'a' is not an object");
    refuse ("{\"a\":[]}", 0, "'a' is not an object");
    refuse ("{\"a\":null}", 0, "'a' is not an object");
    refuse ("{\"\xff\":{}}", 0, "decode");
}

Test (safetensors, nul_in_a_name_or_value_is_malformed)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    static const char raw[] = "{\"a\0b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    gq_error error;
    refuse ("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "header");
    refuse ("{\"__metadata__\":{\"k\":\"a\\u0000b\"}}", 0, "header");
    const size_t size = compose (bytes, raw, sizeof raw - 1, 1);
    cr_assert_eq (parse_guarded (bytes, size, &error), GQ_MALFORMED);
}

Test (safetensors, deep_nesting_is_malformed)
{
    static char header[40000];
    memset (header, '[', sizeof header - 1);
    memcpy (header, "{\"a\":", 5);
    refuse (header, 0, "depth");
}

Test (safetensors, names_given_twice_are_malformed)
{
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
            2, "duplicate");
    refuse ("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "duplicate");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
            "duplicate");
}

Test (safetensors, bad_metadata_is_malformed)
{
    refuse ("{\"__metadata__\":[]}", 0, "not an object");
    refuse ("{\"__metadata__\":{\"lr\":0.1}}", 0, "'lr' is not a string");
}

Test (safetensors, bad_dtype_is_malformed)
{
    refuse ("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype");
    refuse ("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype");
    refuse ("{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "f32");
    refuse ("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "whole bytes");
}

Test (safetensors, bad_shape_is_malformed)
{
    refuse ("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "shape");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, ">= 0");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, ">= 0");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
            "at most 8");
}

Test (safetensors, size_overflow_is_malformed)
{
    /* 2^32 * 2^32 elements: the product wraps to 0, which would match [0,0]. */
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
            0, "64 bits");
    /* 2^62 elements of 4 bytes wrap to 0 bytes. */
    refuse ("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
            "64 bits");
    /* The factor 0 must not hide that the others overflow. */
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,0],"
            "\"data_offsets\":[0,0]}}",
            0, "64 bits");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,0]}}", 0,
            "too big");
}

Test (safetensors, offsets_that_do_not_fit_are_malformed)
{
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[\"0\",1]}}", 1,
            "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1, "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1, "data_offsets");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 1, "byte 2 of 1");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1152921504606846976],"
            "\"data_offsets\":[0,1152921504606846976]}}",
            1, "of 1");
    refuse ("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "need 8 bytes");
}

Test (safetensors, overlaps_and_holes_are_malformed)
{
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
            3, "overlap");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
            1, "overlap");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
            3, "holes");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "holes");
    refuse ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2, "follow the");
    refuse ("{}", 1, "follow the");
}

Test (safetensors, missing_file_directory_and_fifo_are_told_apart)
{
    gq_safetensors *file = NULL;
    gq_error error;
    char directory[] = "/tmp/gradq-test-XXXXXX", path[64];
    cr_assert (mkdtemp (directory) != NULL);
    snprintf (path, sizeof path, "%s/none", directory);
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_NOTFOUND);
    cr_assert (strstr (error.text, path) != NULL, "%s", error.text);
    cr_assert_eq (gq_safetensors_read (&file, directory, &error), GQ_IO);
    cr_assert_eq (mkfifo (path, 0600), 0);
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_IO);
    cr_assert (strstr (error.text, "regular") != NULL, "%s", error.text);
    cr_assert_null (file);
    cr_assert_eq (unlink (path), 0);
    cr_assert_eq (rmdir (directory), 0);
}

Test (safetensors, copy_refuses_wrong_name_type_and_count)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"b\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[8,10]}}";
    gq_safetensors *file = NULL;
    gq_error error;
    double out[2] = {7, 7};
    const size_t size = compose (bytes, header, strlen (header), 10);
    cr_assert_eq (gq_safetensors_parse (&file, bytes, size, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_copy (file, "c", GQ_DTYPE_F32, 2, out, &error), GQ_NOTFOUND);
    cr_assert_eq (gq_safetensors_copy (file, "a", GQ_DTYPE_F64, 2, out, &error), GQ_INVALID);
    cr_assert_eq (gq_safetensors_copy (file, "a", GQ_DTYPE_F32, 3, out, &error), GQ_INVALID);
    cr_assert_eq (gq_safetensors_copy (file, "b", GQ_DTYPE_F32, 1, out, &error), GQ_INVALID);
    cr_assert_eq (gq_safetensors_copy (file, "b", GQ_DTYPE_OTHER, 1, out, &error), GQ_INVALID);
    cr_assert_eq (out[0], 7);
    cr_assert_eq (gq_safetensors_copy (file, "a", GQ_DTYPE_F32, 2, out, &error), GQ_OK);
    cr_assert_eq (memcmp (out, bytes + size - 10, 8), 0);
    gq_safetensors_free (&file);
}
