/*
 * safetensors writer: what was written reads back, whole or not at all, and a write that fails
 * changes nothing.
 */
#include <criterion/criterion.h>

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "safetensors.h"

TestSuite (safetensors_write, .timeout = 60);

#define FILE_BYTES_MAX 65536

static char directory[64];

static void
make_directory (void)
{
    strcpy (directory, "/tmp/gradq-test-XXXXXX");
    cr_assert (mkdtemp (directory) != NULL);
}

static size_t
directory_entries (void)
{
    size_t count = 0;
    DIR *stream = opendir (directory);
    cr_assert (stream != NULL);
    for (struct dirent *entry = readdir (stream); entry != NULL; entry = readdir (stream))
        count += entry->d_name[0] != '.';
    closedir (stream);
    return count;
}

static void
remove_directory (void)
{
    char command[128];
    snprintf (command, sizeof command, "rm -rf '%s'", directory);
    cr_assert (system (command) == 0);
}

static const float pi_weight[] = {1, -2.5F, 3e-20F, 4, 5, 6};
static const double bias[] = {0.1, -1e300};
static const uint8_t done[] = {1, 0, 1};
static const int64_t steps[] = {INT64_MIN};

/* A scalar, an empty tensor, an odd number of bytes, and 8-byte values behind it. */
static const gq_tensor sample[] = {
    {"pi.weight", GQ_DTYPE_F32, 2, {2, 3}, 6, pi_weight, 24},
    {"none", GQ_DTYPE_F32, 2, {0, 3}, 0, NULL, 0},
    {"done", GQ_DTYPE_U8, 1, {3}, 3, done, 3},
    {"bias \"\xc3\xbc\"", GQ_DTYPE_F64, 1, {2}, 2, bias, 16},
    {"steps", GQ_DTYPE_I64, 0, {0}, 1, steps, 8},
};
#define SAMPLE_COUNT (sizeof sample / sizeof sample[0])
static const gq_meta sample_meta[] = {{"optimizer", "adam"}, {"line", "one\ntwo"}};

static void
sample_path (char *path, size_t size)
{
    make_directory ();
    snprintf (path, size, "%s/file.safetensors", directory);
}

static gq_status
write_sample (const char *path, gq_error *error)
{
    return gq_safetensors_write (path, sample, SAMPLE_COUNT, sample_meta, 2, error);
}

/* Any whole file into bytes[FILE_BYTES_MAX]. */
static size_t
slurp (const char *path, uint8_t *bytes)
{
    FILE *stream = fopen (path, "rb");
    cr_assert (stream != NULL, "%s", path);
    const size_t size = fread (bytes, 1, FILE_BYTES_MAX, stream);
    fclose (stream);
    return size;
}

Test (safetensors_write, written_file_reads_back_equal)
{
    char path[128];
    gq_error error;
    gq_safetensors *file = NULL;
    sample_path (path, sizeof path);
    cr_assert_eq (write_sample (path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_count (file), SAMPLE_COUNT);
    for (size_t i = 0; i < SAMPLE_COUNT; i++) {
        const gq_tensor *tensor = gq_safetensors_at (file, i);
        cr_assert_str_eq (tensor->name, sample[i].name);
        cr_assert_eq (tensor->dtype, sample[i].dtype);
        cr_assert_eq (tensor->rank, sample[i].rank);
        cr_assert_eq (memcmp (tensor->shape, sample[i].shape, tensor->rank * sizeof (uint64_t)), 0);
        cr_assert_eq (tensor->bytes, sample[i].bytes);
        if (tensor->bytes > 0)
            cr_assert_eq (memcmp (tensor->data, sample[i].data, tensor->bytes), 0, "%s",
                          tensor->name);
    }
    cr_assert_eq (gq_safetensors_meta_count (file), 2);
    for (size_t i = 0; i < 2; i++) {
        cr_assert_str_eq (gq_safetensors_meta_at (file, i).key, sample_meta[i].key);
        cr_assert_str_eq (gq_safetensors_meta_at (file, i).value, sample_meta[i].value);
    }
    gq_safetensors_free (&file);
    cr_assert_eq (directory_entries (), 1, "a temporary file was left");
    remove_directory ();
}

Test (safetensors_write, data_begin_on_a_multiple_of_64)
{
    static uint8_t bytes[FILE_BYTES_MAX];
    char path[128], name[80] = "";
    gq_error error;
    sample_path (path, sizeof path);
    /* Names of 64 lengths: every remainder of the header's length comes up. */
    for (size_t i = 0; i < 64; i++) {
        const gq_tensor tensor = {name, GQ_DTYPE_U8, 1, {3}, 3, done, 3};
        strcat (name, "n");
        cr_assert_eq (gq_safetensors_write (path, &tensor, 1, NULL, 0, &error), GQ_OK, "%s",
                      error.text);
        const size_t size = slurp (path, bytes);
        cr_assert_eq ((size - 3) % 64, 0, "%zu", size);
        gq_safetensors *file = NULL;
        cr_assert_eq (gq_safetensors_parse (&file, bytes, size, &error), GQ_OK, "%s", error.text);
        gq_safetensors_free (&file);
    }
    remove_directory ();
}

Test (safetensors_write, nothing_at_all_can_be_written)
{
    char path[128];
    gq_error error;
    gq_safetensors *file = NULL;
    sample_path (path, sizeof path);
    cr_assert_eq (gq_safetensors_write (path, NULL, 0, NULL, 0, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_count (file), 0);
    gq_safetensors_free (&file);
    remove_directory ();
}

/* `path` must hold what write_sample wrote, with nothing beside it. */
static void
expect_untouched (const char *path, const uint8_t *before, size_t size)
{
    static uint8_t after[FILE_BYTES_MAX];
    cr_assert_eq (slurp (path, after), size);
    cr_assert_eq (memcmp (before, after, size), 0, "the old file has changed");
    cr_assert_eq (directory_entries (), 1, "a temporary file was left");
}

Test (safetensors_write, write_that_runs_out_of_room_leaves_the_old_file)
{
    static uint8_t before[FILE_BYTES_MAX];
    static float large[4096];
    char path[128];
    gq_error error;
    sample_path (path, sizeof path);
    cr_assert_eq (write_sample (path, &error), GQ_OK, "%s", error.text);
    const size_t size = slurp (path, before);

    /* Files of this process may not grow over 8 KiB: write(2) fails midway, as on a full disk. */
    const struct rlimit limit = {8192, RLIM_INFINITY};
    signal (SIGXFSZ, SIG_IGN);
    cr_assert_eq (setrlimit (RLIMIT_FSIZE, &limit), 0);
    const gq_tensor tensor = {"w", GQ_DTYPE_F32, 1, {4096}, 4096, large, sizeof large};
    gq_status status = gq_safetensors_write (path, &tensor, 1, NULL, 0, &error);
    const struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY};
    cr_assert_eq (setrlimit (RLIMIT_FSIZE, &none), 0);

    cr_assert_eq (status, GQ_IO);
    cr_assert (strstr (error.text, path) != NULL, "%s", error.text);
    expect_untouched (path, before, size);
    cr_assert_eq (gq_safetensors_write (path, &tensor, 1, NULL, 0, &error), GQ_OK, "%s",
                  error.text);
    remove_directory ();
}

Test (safetensors_write, write_into_a_missing_directory_is_io)
{
    char path[128];
    gq_error error;
    make_directory ();
    snprintf (path, sizeof path, "%s/none/file", directory);
    cr_assert_eq (write_sample (path, &error), GQ_IO);
    cr_assert (strstr (error.text, path) != NULL, "%s", error.text);
    cr_assert_eq (directory_entries (), 0);
    remove_directory ();
}

/* A FIFO stands for any device: a broken writer run as root would really replace /dev/full. */
Test (safetensors_write, write_onto_what_is_no_file_is_io)
{
    struct stat info;
    gq_error error;
    char path[128], fifo_path[128];
    sample_path (path, sizeof path);
    snprintf (fifo_path, sizeof fifo_path, "%s/fifo", directory);
    cr_assert_eq (mkfifo (fifo_path, 0600), 0);
    cr_assert_eq (write_sample (fifo_path, &error), GQ_IO);
    cr_assert_eq (stat (fifo_path, &info), 0);
    cr_assert (S_ISFIFO (info.st_mode), "it was replaced");
    cr_assert_eq (mkdir (path, 0700), 0);
    cr_assert_eq (write_sample (path, &error), GQ_IO);
    cr_assert_eq (directory_entries (), 2);
    remove_directory ();
}

Test (safetensors_write, symbolic_link_stays_and_its_target_is_replaced)
{
    struct stat info;
    char path[128], link_path[128];
    gq_error error;
    gq_safetensors *file = NULL;
    sample_path (path, sizeof path);
    snprintf (link_path, sizeof link_path, "%s/link", directory);
    cr_assert_eq (gq_safetensors_write (path, NULL, 0, NULL, 0, &error), GQ_OK);
    cr_assert_eq (symlink ("file.safetensors", link_path), 0);
    cr_assert_eq (write_sample (link_path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (lstat (link_path, &info), 0);
    cr_assert (S_ISLNK (info.st_mode));
    cr_assert_eq (gq_safetensors_read (&file, path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (gq_safetensors_count (file), SAMPLE_COUNT);
    gq_safetensors_free (&file);
    remove_directory ();
}

Test (safetensors_write, new_file_has_the_mode_that_the_umask_allows)
{
    struct stat info;
    char path[128];
    gq_error error;
    sample_path (path, sizeof path);
    umask (027);
    cr_assert_eq (write_sample (path, &error), GQ_OK, "%s", error.text);
    cr_assert_eq (stat (path, &info), 0);
    cr_assert_eq (info.st_mode & 0777, 0640, "mode %o", info.st_mode & 0777);
    remove_directory ();
}

Test (safetensors_write, tensors_that_cannot_be_written_are_invalid_and_change_nothing)
{
    static uint8_t before[FILE_BYTES_MAX];
    static const gq_tensor bad[] = {
        {"a", GQ_DTYPE_OTHER, 1, {1}, 1, done, 1},
        {"a", (gq_dtype)99, 1, {1}, 1, done, 1},
        {"a", GQ_DTYPE_U8, GQ_RANK_MAX + 1, {1}, 1, done, 1},
        {"a", GQ_DTYPE_U8, 1, {2}, 1, done, 1},
        {"a", GQ_DTYPE_U8, 1, {1}, 1, done, 2},
        {"a", GQ_DTYPE_U8, 1, {1}, 1, NULL, 1},
        {"a", GQ_DTYPE_F32, 1, {UINT64_C (1) << 62}, UINT64_C (1) << 62, done, 0},
        {"a", GQ_DTYPE_U8, 2, {UINT64_C (1) << 63, 0}, 0, NULL, 0},
        {"a\xff", GQ_DTYPE_U8, 1, {1}, 1, done, 1},
        {"__metadata__", GQ_DTYPE_U8, 1, {1}, 1, done, 1},
    };
    char path[128];
    gq_error error;
    sample_path (path, sizeof path);
    cr_assert_eq (write_sample (path, &error), GQ_OK, "%s", error.text);
    const size_t size = slurp (path, before);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gq_status status = gq_safetensors_write (path, &bad[i], 1, NULL, 0, &error);
        cr_assert_eq (status, GQ_INVALID, "%zu: %s", i, gq_status_name (status));
        expect_untouched (path, before, size);
    }
    const gq_tensor twice[] = {sample[0], sample[0]};
    cr_assert_eq (gq_safetensors_write (path, twice, 2, NULL, 0, &error), GQ_INVALID);
    const gq_meta meta[] = {{"k", "1"}, {"k", "2"}};
    cr_assert_eq (gq_safetensors_write (path, NULL, 0, meta, 2, &error), GQ_INVALID);
    cr_assert (strstr (error.text, "twice") != NULL, "%s", error.text);
    expect_untouched (path, before, size);
    remove_directory ();
}
