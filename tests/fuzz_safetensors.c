/*
 * Fuzzer of the safetensors reader and writer.
 *
 * For any input: parsing reads nothing beyond it and leaks nothing; the tensors of an accepted file
 * lie within it, one behind the other, and are found by name; and what the writer makes of them
 * reads back equal.
 */
#include "fuzz_testing.h"

#include "safetensors.h"

static char directory[64];
static char path[96];

static void
remove_directory (void)
{
    unlink (path);
    rmdir (directory);
}

static void
make_directory (void)
{
    if (*directory != '\0')
        return;
    fuzz_directory (directory);
    snprintf (path, sizeof path, "%s/file", directory);
    atexit (remove_directory);
}

/* Keeps the compiler from dropping the reads. */
static volatile unsigned read_sum;

/* The tensors tile the end of data[size]; every byte can be read.  True: all can be written. */
static int
check_tensors (const gq_safetensors *file, const uint8_t *data, size_t size)
{
    const size_t count = gq_safetensors_count (file);
    int writable = 1;
    uint64_t bytes = 0;
    unsigned sum = 0;
    for (size_t i = 0; i < count; i++) {
        const gq_tensor *tensor = gq_safetensors_at (file, i);
        const uint8_t *begin = tensor->data;
        REQUIRE (begin >= data && tensor->bytes <= size);
        REQUIRE (tensor->rank <= GQ_RANK_MAX);
        REQUIRE (gq_safetensors_find (file, tensor->name) == tensor);
        for (uint64_t at = 0; at < tensor->bytes; at++)
            sum += begin[at];
        bytes += tensor->bytes;
        writable = writable && tensor->dtype != GQ_DTYPE_OTHER;
    }
    if (count > 0) {
        const gq_tensor *last = gq_safetensors_at (file, count - 1);
        REQUIRE ((const uint8_t *)last->data + last->bytes == data + size);
    }
    REQUIRE (bytes <= size);
    /* Keeps the reads; no sum of bytes of such a file comes to this. */
    REQUIRE (sum != (unsigned)-1 || size > 1 << 20);
    return writable;
}

static void
compare (const gq_safetensors *file, const gq_safetensors *again)
{
    REQUIRE (gq_safetensors_count (file) == gq_safetensors_count (again));
    REQUIRE (gq_safetensors_meta_count (file) == gq_safetensors_meta_count (again));
    for (size_t i = 0; i < gq_safetensors_count (file); i++) {
        const gq_tensor *a = gq_safetensors_at (file, i);
        const gq_tensor *b = gq_safetensors_find (again, a->name);
        REQUIRE (b != NULL && a->dtype == b->dtype && a->rank == b->rank && a->bytes == b->bytes);
        REQUIRE (memcmp (a->shape, b->shape, a->rank * sizeof a->shape[0]) == 0);
        REQUIRE (a->bytes == 0 || memcmp (a->data, b->data, a->bytes) == 0);
    }
    for (size_t i = 0; i < gq_safetensors_meta_count (file); i++) {
        const gq_meta meta = gq_safetensors_meta_at (file, i);
        const char *value = gq_safetensors_meta (again, meta.key);
        REQUIRE (value != NULL && strcmp (value, meta.value) == 0);
    }
}

static void
round_trip (const gq_safetensors *file)
{
    const size_t count = gq_safetensors_count (file);
    const size_t meta_count = gq_safetensors_meta_count (file);
    gq_tensor *tensors = calloc (count + 1, sizeof *tensors);
    gq_meta *meta = calloc (meta_count + 1, sizeof *meta);
    gq_safetensors *again = NULL;
    gq_error error = {""};

    REQUIRE (tensors != NULL && meta != NULL);
    for (size_t i = 0; i < count; i++)
        tensors[i] = *gq_safetensors_at (file, i);
    for (size_t i = 0; i < meta_count; i++)
        meta[i] = gq_safetensors_meta_at (file, i);
    gq_status status = gq_safetensors_write (path, tensors, count, meta, meta_count, &error);
    if (status == GQ_OK)
        status = gq_safetensors_read (&again, path, &error);
    if (status != GQ_OK)
        fprintf (stderr, "%s\n", error.text);
    REQUIRE (status == GQ_OK);
    compare (file, again);
    gq_safetensors_free (&again);
    free (tensors);
    free (meta);
}

int
LLVMFuzzerTestOneInput (const uint8_t *data, size_t size)
{
    gq_safetensors *file = NULL;
    gq_error error = {""};

    make_directory ();
    gq_status status = gq_safetensors_parse (&file, data, size, &error);
    if (status != GQ_OK) {
        REQUIRE (status == GQ_MALFORMED && file == NULL && *error.text != '\0');
        return 0;
    }
    if (check_tensors (file, data, size))
        round_trip (file);
    gq_safetensors_free (&file);
    REQUIRE (file == NULL);
    return 0;
}
