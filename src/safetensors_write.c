/*
 * Writer of safetensors files: beside the gradient's path, it keeps what the path has led to
 * (checkpoints) and the results of gradq-try and gradq-actor --gradients.
 *
 * It must never leave half a file, or a file that is not on the disk yet, under the name that was
 * asked for: a crash at any point leaves the old file or the new one.
 */
#include "safetensors.h"
#include "safetensors_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <libgen.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crash.h"
#include "file.h"

#define DATA_ALIGNMENT  64  /* a cache line: data of a mapped file can be used in place */
#define TEMP_NAME_TRIES 100 /* leftovers of dead processes with our id; more is something else */

/* Room for a tensor's name in an error sentence. */
#define NAME_SHOWN "'%.80s'"

/* ---- header ----------------------------------------------------------------------------- */

/* A header entry for *tensor, whose data begin at `begin`; *end is where they end. */
static gq_status
describe (const gq_tensor *tensor, uint64_t begin, uint64_t *end, json_t **entry_p, gq_error *error)
{
    uint64_t elements, bytes;

    if (tensor->rank > GQ_RANK_MAX)
        return gq_fail (error, GQ_INVALID,
                        "tensor " NAME_SHOWN " has %" PRIu32 " dimensions, over %d", tensor->name,
                        tensor->rank, GQ_RANK_MAX);
    if (!gq_dtype_measure (tensor->dtype, tensor->shape, tensor->rank, &elements, &bytes))
        return gq_fail (error, GQ_INVALID,
                        "tensor " NAME_SHOWN " has a type or a size that cannot be written",
                        tensor->name);
    if (elements != tensor->element_count || bytes != tensor->bytes)
        return gq_fail (error, GQ_INVALID,
                        "tensor " NAME_SHOWN " says %" PRIu64 " elements in %" PRIu64
                        " bytes, but its shape and type make %" PRIu64 " in %" PRIu64,
                        tensor->name, tensor->element_count, tensor->bytes, elements, bytes);
    if (tensor->data == NULL && bytes > 0)
        return gq_fail (error, GQ_INVALID, "tensor " NAME_SHOWN " has no data", tensor->name);
    /* JSON integers of other readers, and file offsets, are signed. */
    if (__builtin_add_overflow (begin, bytes, end) || *end > INT64_MAX)
        return gq_fail (error, GQ_INVALID, "the tensors are too large for one file");

    json_t *shape = json_array ();
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] > INT64_MAX) { /* beside a size of 0 */
            json_decref (shape);
            return gq_fail (error, GQ_INVALID, "tensor " NAME_SHOWN " has too large a size",
                            tensor->name);
        }
        if (json_array_append_new (shape, json_integer ((json_int_t)tensor->shape[i])) != 0) {
            json_decref (shape);
            return gq_fail (error, GQ_MEMORY, "no memory for a header");
        }
    }
    *entry_p = json_pack ("{s:s, s:o, s:[I, I]}", "dtype", gq_dtype_word (tensor->dtype), "shape",
                          shape, "data_offsets", (json_int_t)begin, (json_int_t)*end);
    return *entry_p != NULL ? GQ_OK : gq_fail (error, GQ_MEMORY, "no memory for a header");
}

/* Put key: value (taken) into *object.  A key that is not UTF-8 is the caller's mistake. */
static gq_status
put (json_t *object, const char *key, json_t *value, gq_error *error)
{
    if (value != NULL && json_object_get (object, key) != NULL) {
        json_decref (value);
        return gq_fail (error, GQ_INVALID, "the name " NAME_SHOWN " is there twice", key);
    }
    if (json_object_set_new (object, key, value) != 0)
        return gq_fail (error, GQ_INVALID,
                        "the name " NAME_SHOWN " or its value is not UTF-8, or memory is short",
                        key);
    return GQ_OK;
}

static gq_status
build_header (json_t *header, const gq_tensor *tensors, size_t count, const gq_meta *meta,
              size_t meta_count, gq_error *error)
{
    gq_status status = GQ_OK;
    uint64_t offset = 0;

    if (meta_count > 0) {
        json_t *metadata = json_object ();
        for (size_t i = 0; i < meta_count && status == GQ_OK; i++)
            status = put (metadata, meta[i].key, json_string (meta[i].value), error);
        if (status == GQ_OK)
            status = put (header, GQ_METADATA_KEY, metadata, error);
        else
            json_decref (metadata);
    }
    for (size_t i = 0; i < count && status == GQ_OK; i++) {
        json_t *entry = NULL;
        uint64_t end = offset;
        if (strcmp (tensors[i].name, GQ_METADATA_KEY) == 0)
            return gq_fail (error, GQ_INVALID, "no tensor can be named " GQ_METADATA_KEY);
        status = describe (&tensors[i], offset, &end, &entry, error);
        if (status == GQ_OK)
            status = put (header, tensors[i].name, entry, error);
        offset = end;
    }
    return status;
}

/* Length prefix, header and the spaces that align the data; *bytes_p is the caller's to free. */
static gq_status
make_head (const gq_tensor *tensors, size_t count, const gq_meta *meta, size_t meta_count,
           uint8_t **bytes_p, size_t *size, gq_error *error)
{
    char *text = NULL;
    json_t *header = json_object ();

    if (header == NULL)
        return gq_fail (error, GQ_MEMORY, "no memory for a header");
    gq_status status = build_header (header, tensors, count, meta, meta_count, error);
    if (status == GQ_OK && (text = json_dumps (header, JSON_COMPACT)) == NULL)
        status = gq_fail (error, GQ_MEMORY, "no memory for a header");
    json_decref (header);
    if (status != GQ_OK)
        return status;

    const size_t text_bytes = strlen (text);
    const size_t whole =
        (GQ_PREFIX_BYTES + text_bytes + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
    const uint64_t length = whole - GQ_PREFIX_BYTES;
    uint8_t *bytes = length <= GQ_SAFETENSORS_HEADER_MAX ? malloc (whole) : NULL;
    if (bytes != NULL) {
        for (int i = 0; i < GQ_PREFIX_BYTES; i++)
            bytes[i] = (uint8_t)(length >> (8 * i));
        memcpy (bytes + GQ_PREFIX_BYTES, text, text_bytes);
        memset (bytes + GQ_PREFIX_BYTES + text_bytes, ' ', whole - GQ_PREFIX_BYTES - text_bytes);
    } else if (length > GQ_SAFETENSORS_HEADER_MAX) {
        status = gq_fail (error, GQ_INVALID, "the names need a header of over %d bytes",
                          GQ_SAFETENSORS_HEADER_MAX);
    } else {
        status = gq_fail (error, GQ_MEMORY, "no memory for a header");
    }
    free (text);
    *bytes_p = bytes;
    *size = whole;
    return status;
}

/* ---- file ------------------------------------------------------------------------------- */

/* Create a new file beside `target`; its name goes to *temp_p.  The descriptor, or -1 with errno.
 * Not mkstemp: its mode 0600 would hide checkpoints from a group that the umask lets read. */
static int
open_temp (const char *target, char **temp_p)
{
    static atomic_uint serial;
    for (int i = 0; i < TEMP_NAME_TRIES; i++) {
        char *temp = NULL;
        if (asprintf (&temp, "%s.tmp-%ld-%u", target, (long)getpid (),
                      atomic_fetch_add (&serial, 1)) < 0) {
            errno = ENOMEM;
            return -1;
        }
        int fd = gq_file_open (AT_FDCWD, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) {
            *temp_p = temp;
            return fd;
        }
        free (temp);
        if (errno != EEXIST)
            return -1;
    }
    return -1;
}

static int
open_directory_of (const char *target)
{
    char *copy = strdup (target);
    if (copy == NULL)
        return -1;
    int fd = gq_file_open (AT_FDCWD, dirname (copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    const int saved = errno;
    free (copy);
    errno = saved;
    return fd;
}

/* Fill and flush the file behind fd, and close it in any case.  0 or -1 with errno. */
static int
fill (int fd, const uint8_t *head, size_t head_bytes, const gq_tensor *tensors, size_t count)
{
    int failed = gq_file_write (fd, head, head_bytes);
    for (size_t i = 0; i < count && failed == 0; i++)
        failed = gq_file_write (fd, tensors[i].data, tensors[i].bytes);
    if (failed == 0)
        failed = gq_file_sync (fd);
    const int saved = errno;
    if (close (fd) != 0 && failed == 0)
        return -1;
    gq_crash_point ("checkpointing"); /* the whole temp file is there, the name is the old file's */
    errno = saved;
    return failed;
}

/* Replace `target` by the new file, whole.  The directory is opened first, so that nothing is
 * left to fail after the rename but the flush of the directory itself. */
static gq_status
replace (const char *target, const uint8_t *head, size_t head_bytes, const gq_tensor *tensors,
         size_t count, gq_error *error)
{
    char *temp = NULL;
    gq_status status = GQ_OK;
    int directory = open_directory_of (target);
    int fd = directory < 0 ? -1 : open_temp (target, &temp);

    if (fd < 0) {
        status = gq_fail (error, GQ_IO, "%s: cannot write beside it: %s", target, strerror (errno));
    } else if (fill (fd, head, head_bytes, tensors, count) != 0) {
        status = gq_fail (error, GQ_IO, "%s: %s; the file is as it was", temp, strerror (errno));
        unlink (temp);
    } else if (rename (temp, target) != 0) {
        status = gq_fail (error, GQ_IO, "%s: %s; the file is as it was", target, strerror (errno));
        unlink (temp);
    } else if (gq_file_sync (directory) != 0 && errno != EINVAL) { /* EINVAL: nothing to flush */
        status =
            gq_fail (error, GQ_IO, "%s: written, but a power cut may bring the old one back: %s",
                     target, strerror (errno));
    }
    if (directory >= 0)
        close (directory);
    free (temp);
    return status;
}

gq_status
gq_safetensors_write (const char *path, const gq_tensor *tensors, size_t count, const gq_meta *meta,
                      size_t meta_count, gq_error *error)
{
    struct stat info;
    uint8_t *head = NULL;
    size_t head_bytes = 0;
    gq_error inner;

    /* rename () would put a plain file in the place of a device such as /dev/null. */
    if (stat (path, &info) == 0 && !S_ISREG (info.st_mode))
        return gq_fail (error, GQ_IO, "%s: not a regular file", path);
    gq_status status = make_head (tensors, count, meta, meta_count, &head, &head_bytes, &inner);
    if (status != GQ_OK)
        return gq_fail (error, status, "%s: %s", path, inner.text);
    /* A symbolic link stays one: what it points to is replaced. */
    char *target = realpath (path, NULL);
    status = replace (target != NULL ? target : path, head, head_bytes, tensors, count, error);
    free (target);
    free (head);
    return status;
}
