/*
 * Identity file.  Written by temp file, fsync and rename, so a crash leaves the old or the new one.
 * Epochs are reserved in blocks: a grant costs a disk write only once in EPOCH_BLOCK.
 */
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "file.h"
#include "hex.h"

#define EPOCH_BLOCK 1024

static gq_status
io_error (const char *path, gq_error *error)
{
    return gq_fail (error, GQ_IO, "cannot write %s: %s", path, strerror (errno));
}

static int
write_synced (const char *path, const char *text)
{
    int fd = gq_file_open (AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    int rc = gq_file_write (fd, text, strlen (text)) == 0 && gq_file_sync (fd) == 0 ? 0 : -1;
    return close (fd) == 0 ? rc : -1;
}

static gq_status
store (const gq_identity *identity, gq_error *error)
{
    char run[2 * GQ_RUN_ID_BYTES + 1];
    char text[256];
    char temp[PATH_MAX + 8];
    gq_hex_encode (identity->run, GQ_RUN_ID_BYTES, run);
    snprintf (text, sizeof text, "{\"run\": \"%s\", \"term\": %u, \"epochs_reserved\": %u}\n", run,
              identity->term, identity->reserved_epoch);
    snprintf (temp, sizeof temp, "%s.tmp", identity->path);
    if (write_synced (temp, text) != 0 || rename (temp, identity->path) != 0)
        return io_error (identity->path, error);
    /* The rename itself must reach the disk, or a crash could bring an old term back. */
    char directory[PATH_MAX];
    memcpy (directory, identity->path, sizeof directory);
    *strrchr (directory, '/') = '\0';
    int fd = gq_file_open (AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    int rc = fd < 0 ? -1 : gq_file_sync (fd);
    if (fd >= 0)
        close (fd);
    return rc == 0 ? GQ_OK : io_error (identity->path, error);
}

static gq_status
load (gq_identity *identity, gq_error *error)
{
    json_error_t where;
    json_t *json = json_load_file (identity->path, 0, &where);
    const char *run = json_string_value (json_object_get (json, "run"));
    json_int_t term = json_integer_value (json_object_get (json, "term"));
    json_int_t epochs = json_integer_value (json_object_get (json, "epochs_reserved"));
    gq_status status = GQ_OK;
    if (run == NULL || !gq_hex_decode (run, identity->run, GQ_RUN_ID_BYTES) || term < 1 ||
        term >= UINT32_MAX || epochs < 1 || epochs > UINT32_MAX - EPOCH_BLOCK)
        status = gq_fail (error, GQ_MALFORMED,
                          "%s is damaged (run, term and epochs_reserved are expected); move the "
                          "run directory away and start a new one with --init CHECKPOINT",
                          identity->path);
    identity->term = (uint32_t)term;
    identity->reserved_epoch = (uint32_t)epochs;
    json_decref (json);
    return status;
}

static gq_status
find (gq_identity *identity, const char *directory, gq_error *error)
{
    memset (identity, 0, sizeof *identity);
    int length = snprintf (identity->path, sizeof identity->path, "%s/identity.json", directory);
    return length > 0 && (size_t)length < sizeof identity->path
               ? GQ_OK
               : gq_fail (error, GQ_INVALID, "the run directory's name is too long");
}

gq_status
gq_identity_read (uint8_t run[GQ_RUN_ID_BYTES], const char *directory, gq_error *error)
{
    gq_identity identity;
    gq_status status = find (&identity, directory, error);
    if (status == GQ_OK && access (identity.path, F_OK) != 0)
        status = gq_fail (error, GQ_NOTFOUND, "%s does not exist; is this a run directory?",
                          identity.path);
    if (status == GQ_OK)
        status = load (&identity, error);
    memcpy (run, identity.run, GQ_RUN_ID_BYTES);
    return status;
}

gq_status
gq_identity_open (gq_identity *identity, const char *directory, gq_error *error)
{
    gq_status status = find (identity, directory, error);
    if (status != GQ_OK)
        return status;
    if (access (identity->path, F_OK) == 0) {
        status = load (identity, error);
        if (status != GQ_OK)
            return status;
    } else {
        if (getrandom (identity->run, GQ_RUN_ID_BYTES, 0) != GQ_RUN_ID_BYTES)
            return gq_fail (error, GQ_IO, "the system gives no random bytes");
        identity->reserved_epoch = 1;
    }
    if (getrandom (&identity->secret, sizeof identity->secret, 0) != sizeof identity->secret)
        return gq_fail (error, GQ_IO, "the system gives no random bytes");
    identity->term++;
    identity->next_epoch = identity->reserved_epoch;
    identity->reserved_epoch += EPOCH_BLOCK;
    return store (identity, error);
}

gq_status
gq_identity_reserve (gq_identity *identity, gq_error *error)
{
    if (identity->next_epoch < identity->reserved_epoch)
        return GQ_OK;
    if (identity->reserved_epoch > UINT32_MAX - EPOCH_BLOCK)
        return gq_fail (error, GQ_FULL,
                        "this run has granted all its epochs; start a new one with "
                        "--init CHECKPOINT");
    identity->reserved_epoch += EPOCH_BLOCK;
    gq_status status = store (identity, error);
    if (status != GQ_OK)
        identity->reserved_epoch -= EPOCH_BLOCK;
    return status;
}
