/*
 * Reader of safetensors files (src/safetensors_write.c is the writer): beside the gradient's path,
 * it brings the first weights (--init), checkpoints (--resume) and the data of tests.
 *
 * It must never trust a byte: every length is compared with what is there before it is used, every
 * product is checked for overflow, and a bad file costs a status, not the process.
 *
 *     u64 little-endian   N, bytes of the header
 *     N bytes             JSON object {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...,
 *                         "__metadata__": {string: string}}, spaces allowed at its end
 *     the rest            the data; the tensors cover it exactly, without holes or overlaps
 */
#include "safetensors.h"
#include "safetensors_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"

/* Linux moves at most 0x7ffff000 bytes in one read; 1 GiB is below that everywhere. */
#define READ_BYTES_MAX ((size_t)1 << 30)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tensor data is little-endian and is used in place");

struct gq_safetensors {
    void *owned;               /* the file's bytes when we read them ourselves, else NULL */
    json_t *header;            /* names and metadata strings live in here */
    gq_tensor *tensors;        /* [count], by offset */
    const gq_tensor **by_name; /* [count], sorted */
    size_t count;
    gq_meta *meta; /* [meta_count], in the file's order */
    size_t meta_count;
};

/* Every type of the format; sizes in bits, for some are less than a byte. */
static const struct {
    const char *word;
    gq_dtype dtype;
    unsigned bits;
} dtypes[] = {
    {"F32", GQ_DTYPE_F32, 32},      {"F64", GQ_DTYPE_F64, 64},      {"I32", GQ_DTYPE_I32, 32},
    {"I64", GQ_DTYPE_I64, 64},      {"U8", GQ_DTYPE_U8, 8},         {"BOOL", GQ_DTYPE_OTHER, 8},
    {"I8", GQ_DTYPE_OTHER, 8},      {"I16", GQ_DTYPE_OTHER, 16},    {"U16", GQ_DTYPE_OTHER, 16},
    {"F16", GQ_DTYPE_OTHER, 16},    {"BF16", GQ_DTYPE_OTHER, 16},   {"U32", GQ_DTYPE_OTHER, 32},
    {"U64", GQ_DTYPE_OTHER, 64},    {"C64", GQ_DTYPE_OTHER, 64},    {"F8_E4M3", GQ_DTYPE_OTHER, 8},
    {"F8_E5M2", GQ_DTYPE_OTHER, 8}, {"F8_E8M0", GQ_DTYPE_OTHER, 8}, {"F4", GQ_DTYPE_OTHER, 4},
    {"F6_E2M3", GQ_DTYPE_OTHER, 6}, {"F6_E3M2", GQ_DTYPE_OTHER, 6},
};
#define DTYPE_COUNT (sizeof dtypes / sizeof dtypes[0])

/* elements and bytes of shape[rank]; false when either does not fit 64 bits or the bits fill no
 * whole byte. */
static bool
measure (const uint64_t *shape, uint32_t rank, unsigned bits, uint64_t *elements, uint64_t *bytes)
{
    uint64_t product = 1, product_bits;
    for (uint32_t i = 0; i < rank; i++) {
        if (__builtin_mul_overflow (product, shape[i], &product))
            return false;
    }
    if (__builtin_mul_overflow (product, (uint64_t)bits, &product_bits) || product_bits % 8 != 0)
        return false;
    *elements = product;
    *bytes = product_bits / 8;
    return true;
}

const char *
gq_dtype_word (gq_dtype dtype)
{
    for (size_t i = 0; i < DTYPE_COUNT && dtype != GQ_DTYPE_OTHER; i++) {
        if (dtypes[i].dtype == dtype)
            return dtypes[i].word;
    }
    return NULL;
}

bool
gq_dtype_measure (gq_dtype dtype, const uint64_t *shape, uint32_t rank, uint64_t *elements,
                  uint64_t *bytes)
{
    for (size_t i = 0; i < DTYPE_COUNT && dtype != GQ_DTYPE_OTHER; i++) {
        if (dtypes[i].dtype == dtype)
            return measure (shape, rank, dtypes[i].bits, elements, bytes);
    }
    return false;
}

static int
by_offset (const void *left, const void *right)
{
    const gq_tensor *a = left, *b = right;
    const uintptr_t a_begin = (uintptr_t)a->data, b_begin = (uintptr_t)b->data;
    if (a_begin != b_begin)
        return a_begin < b_begin ? -1 : 1;
    if (a->bytes != b->bytes) /* empty ones first: they may stand where another begins */
        return a->bytes < b->bytes ? -1 : 1;
    return strcmp (a->name, b->name);
}

static int
by_name (const void *left, const void *right)
{
    return strcmp ((*(const gq_tensor *const *)left)->name,
                   (*(const gq_tensor *const *)right)->name);
}

/* ---- reading ---------------------------------------------------------------------------- */

static gq_status
read_shape (const json_t *json, gq_tensor *tensor, const char *where, gq_error *error)
{
    if (!json_is_array (json) || json_array_size (json) > GQ_RANK_MAX)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: tensor '%.80s': \"shape\" is not an array of at most %d sizes", where,
                        tensor->name, GQ_RANK_MAX);
    tensor->rank = (uint32_t)json_array_size (json);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        const json_t *size = json_array_get (json, i);
        if (!json_is_integer (size) || json_integer_value (size) < 0)
            return gq_fail (error, GQ_MALFORMED,
                            "%s: tensor '%.80s': \"shape\"[%" PRIu32 "] is not an integer >= 0",
                            where, tensor->name, i);
        tensor->shape[i] = (uint64_t)json_integer_value (size);
    }
    return GQ_OK;
}

/* One entry of the header.  data[data_bytes] is all that may be pointed into. */
static gq_status
read_tensor (const char *name, const json_t *json, const uint8_t *data, uint64_t data_bytes,
             const char *where, gq_tensor *tensor, gq_error *error)
{
    size_t type = 0;
    const char *word = json_string_value (json_object_get (json, "dtype"));
    const json_t *offsets = json_object_get (json, "data_offsets");
    const json_t *begin_json = json_array_get (offsets, 0), *end_json = json_array_get (offsets, 1);

    tensor->name = name;
    while (word != NULL && type < DTYPE_COUNT && strcmp (dtypes[type].word, word) != 0)
        type++;
    if (word == NULL || type == DTYPE_COUNT)
        return gq_fail (error, GQ_MALFORMED, "%s: tensor '%.80s': \"dtype\" %.20s is no known type",
                        where, name, word != NULL ? word : "(missing)");
    tensor->dtype = dtypes[type].dtype;

    gq_status status = read_shape (json_object_get (json, "shape"), tensor, where, error);
    if (status != GQ_OK)
        return status;
    if (!measure (tensor->shape, tensor->rank, dtypes[type].bits, &tensor->element_count,
                  &tensor->bytes))
        return gq_fail (error, GQ_MALFORMED,
                        "%s: tensor '%.80s': its shape and type give no size in whole bytes that "
                        "fits 64 bits",
                        where, name);

    if (json_array_size (offsets) != 2 || !json_is_integer (begin_json) ||
        !json_is_integer (end_json) || json_integer_value (begin_json) < 0 ||
        json_integer_value (end_json) < json_integer_value (begin_json))
        return gq_fail (error, GQ_MALFORMED,
                        "%s: tensor '%.80s': \"data_offsets\" is not [begin, end] with 0 <= begin "
                        "<= end",
                        where, name);
    const uint64_t begin = (uint64_t)json_integer_value (begin_json);
    const uint64_t end = (uint64_t)json_integer_value (end_json);
    if (end > data_bytes)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: tensor '%.80s': data ends at byte %" PRIu64 " of %" PRIu64
                        "; the file is cut short or damaged",
                        where, name, end, data_bytes);
    if (end - begin != tensor->bytes)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: tensor '%.80s': shape and type need %" PRIu64
                        " bytes but \"data_offsets\" spans %" PRIu64,
                        where, name, tensor->bytes, end - begin);
    tensor->data = data + begin;
    return GQ_OK;
}

static gq_status
read_metadata (gq_safetensors *file, json_t *json, const char *where, gq_error *error)
{
    const char *key;
    json_t *value;

    if (!json_is_object (json))
        return gq_fail (error, GQ_MALFORMED, "%s: \"" GQ_METADATA_KEY "\" is not an object", where);
    file->meta = calloc (json_object_size (json) + 1, sizeof *file->meta);
    if (file->meta == NULL)
        return gq_fail (error, GQ_MEMORY, "%s: no memory for its metadata", where);
    json_object_foreach (json, key, value)
    {
        if (!json_is_string (value))
            return gq_fail (error, GQ_MALFORMED,
                            "%s: \"" GQ_METADATA_KEY "\" entry '%.80s' is not a string", where,
                            key);
        file->meta[file->meta_count++] = (gq_meta){key, json_string_value (value)};
    }
    return GQ_OK;
}

/* The tensors, sorted, must tile data[data_bytes]: the format allows no hole and no overlap. */
static gq_status
check_tiling (const gq_safetensors *file, const uint8_t *data, uint64_t data_bytes,
              const char *where, gq_error *error)
{
    uint64_t reached = 0;
    for (size_t i = 0; i < file->count; i++) {
        const gq_tensor *tensor = &file->tensors[i];
        const uint64_t begin = (uint64_t)((const uint8_t *)tensor->data - data);
        if (begin != reached)
            return gq_fail (error, GQ_MALFORMED,
                            "%s: tensor '%.80s' begins at data byte %" PRIu64 " where %" PRIu64
                            " is next: tensors must not overlap or leave holes",
                            where, tensor->name, begin, reached);
        reached += tensor->bytes;
    }
    if (reached != data_bytes)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: the tensors hold %" PRIu64 " bytes but %" PRIu64
                        " follow the header; the file is damaged",
                        where, reached, data_bytes);
    return GQ_OK;
}

static gq_status
read_header (gq_safetensors *file, const uint8_t *data, uint64_t data_bytes, const char *where,
             gq_error *error)
{
    const char *name;
    json_t *entry;
    const size_t entries = json_object_size (file->header) + 1; /* + 1: never calloc (0) */

    file->tensors = calloc (entries, sizeof *file->tensors);
    file->by_name = calloc (entries, sizeof *file->by_name);
    if (file->tensors == NULL || file->by_name == NULL)
        return gq_fail (error, GQ_MEMORY, "%s: no memory for %zu tensors", where, entries);
    json_object_foreach (file->header, name, entry)
    {
        gq_status status;
        if (strcmp (name, GQ_METADATA_KEY) == 0)
            status = read_metadata (file, entry, where, error);
        else if (!json_is_object (entry))
            status =
                gq_fail (error, GQ_MALFORMED, "%s: tensor '%.80s' is not an object", where, name);
        else
            status = read_tensor (name, entry, data, data_bytes, where,
                                  &file->tensors[file->count++], error);
        if (status != GQ_OK)
            return status;
    }
    qsort (file->tensors, file->count, sizeof *file->tensors, by_offset);
    for (size_t i = 0; i < file->count; i++)
        file->by_name[i] = &file->tensors[i];
    qsort (file->by_name, file->count, sizeof *file->by_name, by_name);
    return check_tiling (file, data, data_bytes, where, error);
}

/* The length in front of the header, compared with the size of the whole. */
static gq_status
read_prefix (const uint8_t *bytes, uint64_t size, uint64_t *header_bytes, const char *where,
             gq_error *error)
{
    uint64_t length = 0;
    if (size < GQ_PREFIX_BYTES)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: %" PRIu64 " bytes are too few for a safetensors file", where, size);
    for (int i = GQ_PREFIX_BYTES - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    if (length > GQ_SAFETENSORS_HEADER_MAX)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: a header of %" PRIu64 " bytes is over the limit of %d; is this a "
                        "safetensors file?",
                        where, length, GQ_SAFETENSORS_HEADER_MAX);
    if (length > size - GQ_PREFIX_BYTES)
        return gq_fail (error, GQ_MALFORMED,
                        "%s: the header needs %" PRIu64 " bytes but only %" PRIu64
                        " follow; the file is cut short or is not safetensors",
                        where, length, size - GQ_PREFIX_BYTES);
    *header_bytes = length;
    return GQ_OK;
}

static gq_status
parse (gq_safetensors **file_p, const uint8_t *bytes, size_t size, const char *where,
       gq_error *error)
{
    uint64_t header_bytes = 0;
    json_error_t json_error;

    *file_p = NULL;
    gq_status status = read_prefix (bytes, size, &header_bytes, where, error);
    if (status != GQ_OK)
        return status;
    if (header_bytes == 0 || bytes[GQ_PREFIX_BYTES] != '{')
        return gq_fail (error, GQ_MALFORMED, "%s: the header does not begin with '{'", where);

    gq_safetensors *file = calloc (1, sizeof *file);
    if (file == NULL)
        return gq_fail (error, GQ_MEMORY, "%s: out of memory", where);
    /* Without JSON_ALLOW_NUL jansson refuses "\u0000", so names are whole C strings; it bounds
     * nesting itself (JSON_PARSER_MAX_DEPTH). */
    file->header = json_loadb ((const char *)bytes + GQ_PREFIX_BYTES, (size_t)header_bytes,
                               JSON_REJECT_DUPLICATES, &json_error);
    if (file->header == NULL) {
        const bool memory = json_error_code (&json_error) == json_error_out_of_memory;
        status = gq_fail (error, memory ? GQ_MEMORY : GQ_MALFORMED,
                          "%s: header byte %d: %s; the file is damaged", where, json_error.position,
                          json_error.text);
    } else { /* it began with '{', so it is an object */
        status = read_header (file, bytes + GQ_PREFIX_BYTES + header_bytes,
                              size - GQ_PREFIX_BYTES - header_bytes, where, error);
    }
    if (status != GQ_OK)
        gq_safetensors_free (&file);
    *file_p = file;
    return status;
}

gq_status
gq_safetensors_parse (gq_safetensors **file_p, const void *bytes, size_t size, gq_error *error)
{
    return parse (file_p, bytes, size, "safetensors", error);
}

/* bytes[size] from fd; false with errno (0: the file ended early). */
static bool
read_all (int fd, uint8_t *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        const size_t rest = size - done;
        ssize_t got = read (fd, bytes + done, rest < READ_BYTES_MAX ? rest : READ_BYTES_MAX);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            errno = got == 0 ? 0 : errno;
            return false;
        }
        done += (size_t)got;
    }
    return true;
}

/* Load and parse an open file.  Into memory of our own, not mapped: a mapped file that another
 * process cuts short would end this process by SIGBUS. */
static gq_status
read_open (gq_safetensors **file_p, int fd, const char *path, gq_error *error)
{
    struct stat info;
    uint8_t prefix[GQ_PREFIX_BYTES];
    uint64_t header_bytes;

    if (fstat (fd, &info) != 0)
        return gq_fail (error, GQ_IO, "%s: %s", path, strerror (errno));
    if (!S_ISREG (info.st_mode))
        return gq_fail (error, GQ_IO, "%s: not a regular file", path);
    const size_t size = (size_t)info.st_size;
    /* Refuse what cannot be safetensors before making room for all of it. */
    const size_t prefix_bytes = size < GQ_PREFIX_BYTES ? size : GQ_PREFIX_BYTES;
    if (!read_all (fd, prefix, prefix_bytes))
        return gq_fail (error, GQ_IO, "%s: %s", path,
                        errno != 0 ? strerror (errno) : "changed while it was read");
    gq_status status = read_prefix (prefix, size, &header_bytes, path, error);
    if (status != GQ_OK)
        return status;

    uint8_t *bytes = malloc (size);
    if (bytes == NULL)
        return gq_fail (error, GQ_MEMORY, "%s: no memory for its %zu bytes", path, size);
    memcpy (bytes, prefix, GQ_PREFIX_BYTES);
    if (!read_all (fd, bytes + GQ_PREFIX_BYTES, size - GQ_PREFIX_BYTES))
        status = gq_fail (error, GQ_IO, "%s: %s", path,
                          errno != 0 ? strerror (errno) : "changed while it was read");
    else
        status = parse (file_p, bytes, size, path, error);
    if (status == GQ_OK)
        (*file_p)->owned = bytes;
    else
        free (bytes);
    return status;
}

gq_status
gq_safetensors_read (gq_safetensors **file_p, const char *path, gq_error *error)
{
    *file_p = NULL;
    /* O_NONBLOCK: opening a FIFO must not wait for a writer; regular files ignore it. */
    int fd = gq_file_open (AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0)
        return gq_fail (error, errno == ENOENT ? GQ_NOTFOUND : GQ_IO, "%s: %s", path,
                        strerror (errno));
    gq_status status = read_open (file_p, fd, path, error);
    close (fd);
    return status;
}

void
gq_safetensors_free (gq_safetensors **file_p)
{
    gq_safetensors *file = *file_p;
    if (file == NULL)
        return;
    json_decref (file->header);
    free (file->meta);
    free (file->by_name);
    free (file->tensors);
    free (file->owned);
    free (file);
    *file_p = NULL;
}

/* ---- what was read ---------------------------------------------------------------------- */

size_t
gq_safetensors_count (const gq_safetensors *file)
{
    return file->count;
}

const gq_tensor *
gq_safetensors_at (const gq_safetensors *file, size_t index)
{
    assert (index < file->count);
    return &file->tensors[index];
}

const gq_tensor *
gq_safetensors_find (const gq_safetensors *file, const char *name)
{
    const gq_tensor wanted = {.name = name};
    const gq_tensor *key = &wanted;
    const gq_tensor **found =
        bsearch (&key, file->by_name, file->count, sizeof *file->by_name, by_name);
    return found != NULL ? *found : NULL;
}

const char *
gq_safetensors_meta (const gq_safetensors *file, const char *key)
{
    for (size_t i = 0; i < file->meta_count; i++) {
        if (strcmp (file->meta[i].key, key) == 0)
            return file->meta[i].value;
    }
    return NULL;
}

size_t
gq_safetensors_meta_count (const gq_safetensors *file)
{
    return file->meta_count;
}

gq_meta
gq_safetensors_meta_at (const gq_safetensors *file, size_t index)
{
    assert (index < file->meta_count);
    return file->meta[index];
}

gq_status
gq_safetensors_copy (const gq_safetensors *file, const char *name, gq_dtype dtype,
                     uint64_t element_count, void *out, gq_error *error)
{
    const gq_tensor *tensor = gq_safetensors_find (file, name);
    if (tensor == NULL)
        return gq_fail (error, GQ_NOTFOUND, "there is no tensor '%.80s' in the file", name);
    if (tensor->dtype != dtype || dtype == GQ_DTYPE_OTHER) {
        const char *is = gq_dtype_word (tensor->dtype), *needed = gq_dtype_word (dtype);
        return gq_fail (error, GQ_INVALID, "tensor '%.80s' is %s, but %s is needed", name,
                        is != NULL ? is : "of a type that gradq does not compute with",
                        needed != NULL ? needed : "another");
    }
    if (tensor->element_count != element_count)
        return gq_fail (error, GQ_INVALID,
                        "tensor '%.80s' holds %" PRIu64 " elements, but %" PRIu64 " are needed",
                        name, tensor->element_count, element_count);
    if (tensor->bytes > 0)
        memcpy (out, tensor->data, (size_t)tensor->bytes);
    return GQ_OK;
}
