/*
 * INI files for the options engine, by inih.  Before a gradient's path begins.
 *
 * It must never lose part of a file silently.  Debian's inih hands over no line numbers, cuts
 * lines at 200 bytes and takes an indented line for more of the value above it; the line reader
 * given to it here counts lines, refuses long ones, and drops the indentation.
 */
#include "options_internal.h"

#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>

/* Room for "FILE:LINE: name". */
#define WHERE_BYTES 512

typedef struct ini_reader_state {
    FILE *file;
    const char *path;
    int line;      /* of what inih works on, from 1 */
    int fail_line; /* where the first failure was, 0 for none */
    gq_status status;
    gq_error *error;
    gq_ini_handler *handler;
    void *user;
} ini_reader_state;

/* Ours: the first failure counts. */
static void
fail_at (ini_reader_state *state, gq_status status)
{
    if (state->fail_line == 0) {
        state->fail_line = state->line;
        state->status = status;
    }
}

/* inih's fgets: one line into line[size] without its indentation; NULL at the end. */
static char *
read_line (char *line, int size, void *user)
{
    ini_reader_state *state = user;
    int used = 0, byte;

    if (state->fail_line != 0)
        return NULL;
    state->line++;
    while ((byte = getc (state->file)) != EOF && byte != '\n') {
        if (used == 0 && (byte == ' ' || byte == '\t'))
            continue;
        if (byte == '\0') {
            fail_at (state, gq_fail (state->error, GQ_MALFORMED,
                                     "%s:%d: holds a NUL byte; is this an INI file?", state->path,
                                     state->line));
            return NULL;
        }
        if (used >= size - 2) { /* one for the newline, one for the end */
            fail_at (state, gq_fail (state->error, GQ_MALFORMED,
                                     "%s:%d: longer than %d bytes; a list may be given on several "
                                     "lines",
                                     state->path, state->line, size - 2));
            return NULL;
        }
        line[used++] = (char)byte;
    }
    if (byte == EOF && used == 0)
        return NULL;
    line[used++] = '\n';
    line[used] = '\0';
    return line;
}

/* inih's handler: nonzero is success. */
static int
handle (void *user, const char *section, const char *name, const char *value)
{
    ini_reader_state *state = user;
    char where[WHERE_BYTES];

    if (state->fail_line != 0)
        return 0;
    snprintf (where, sizeof where, "%s:%d: %s", state->path, state->line, name);
    gq_status status = state->handler (state->user, section, name, value, where, state->error);
    if (status != GQ_OK)
        fail_at (state, status);
    return status == GQ_OK;
}

gq_status
gq_ini_read (const char *path, gq_ini_handler *handler, void *user, gq_error *error)
{
    ini_reader_state state = {.path = path, .error = error, .handler = handler, .user = user};

    state.file = fopen (path, "re");
    if (state.file == NULL)
        return gq_fail (error, errno == ENOENT ? GQ_NOTFOUND : GQ_IO,
                        "%s: the INI file cannot be read: %s", path, strerror (errno));
    const int result = ini_parse_stream (read_line, &state, handle, &state);
    const bool failed = ferror (state.file) != 0;
    const int saved = errno;
    fclose (state.file);

    if (failed)
        return gq_fail (error, GQ_IO, "%s: the INI file cannot be read: %s", path,
                        strerror (saved));
    if (result < 0)
        return gq_fail (error, GQ_MEMORY, "%s: no memory to read it", path);
    /* inih goes on behind a line that it does not understand; the earlier failure is the cause. */
    if (result > 0 && result != state.fail_line)
        return gq_fail (error, GQ_MALFORMED, "%s:%d: neither [section] nor name = value", path,
                        result);
    return state.fail_line != 0 ? state.status : GQ_OK;
}
