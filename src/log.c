/*
 * JSON-lines log of every process, beside the gradient's path.
 *
 * It must never stop or slow the work: it allocates nothing, a line that cannot be written is
 * lost, and a line that grows too long loses fields and says so, but stays valid JSON.
 */
#include "log.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stats.h"

/* One line: a gq_error text with everything escaped (6 KiB) and room for other fields. */
#define LINE_BYTES_MAX 8192
/* Kept free for the end of the object. */
#define TAIL_BYTES 32

typedef struct line {
    char bytes[LINE_BYTES_MAX];
    size_t used;
    bool full; /* something did not fit; `used` is not to be trusted until it is set back */
} line;

static const char *const level_words[] = {[GQ_LOG_DEBUG] = "debug",
                                          [GQ_LOG_INFO] = "info",
                                          [GQ_LOG_WARNING] = "warning",
                                          [GQ_LOG_ERROR] = "error"};

/* Set once at the start; atomic so that a thread may log while another opens. */
static atomic_int log_fd = STDERR_FILENO;
static atomic_int log_least = GQ_LOG_INFO;
static _Atomic (const char *) log_process = "gradq";

gq_status
gq_log_open (const char *process, const char *path, gq_log_level least, gq_error *error)
{
    int fd = STDERR_FILENO;
    if (path != NULL) {
        fd = open (path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            return gq_fail (error, GQ_IO, "%s: the log cannot be opened: %s", path,
                            strerror (errno));
    }
    int old = atomic_exchange (&log_fd, fd);
    if (old != STDERR_FILENO)
        close (old);
    atomic_store (&log_process, process);
    atomic_store (&log_least, (int)least);
    return GQ_OK;
}

gq_log_level
gq_log_level_from (const char *word)
{
    size_t level = 0;
    while (level <= GQ_LOG_ERROR && strcmp (level_words[level], word) != 0)
        level++;
    assert (level <= GQ_LOG_ERROR);
    return (gq_log_level)level;
}

int
gq_log_on (gq_log_level level)
{
    return (int)level >= atomic_load_explicit (&log_least, memory_order_relaxed);
}

/* ---- one line --------------------------------------------------------------------------- */

static void
put (line *out, const char *bytes, size_t size)
{
    if (out->full || out->used + size > sizeof out->bytes - TAIL_BYTES) {
        out->full = true;
        return;
    }
    memcpy (out->bytes + out->used, bytes, size);
    out->used += size;
}

static void __attribute__ ((format (printf, 2, 3))) put_format (line *out, const char *format, ...)
{
    char text[64];
    va_list arguments;
    va_start (arguments, format);
    const int size = vsnprintf (text, sizeof text, format, arguments);
    va_end (arguments);
    assert (size >= 0 && (size_t)size < sizeof text);
    put (out, text, (size_t)size);
}

/* Bytes of the UTF-8 character at text, 0 when there is none that RFC 3629 allows: no overlong
 * form, no surrogate, nothing above U+10FFFF.  Never looks behind the final NUL. */
static size_t
utf8_bytes (const char *text)
{
    const unsigned char *byte = (const unsigned char *)text;
    unsigned char low = 0x80, high = 0xbf; /* what the second byte may be */
    size_t size;

    if (byte[0] < 0x80)
        return 1;
    if (byte[0] >= 0xc2 && byte[0] <= 0xdf)
        size = 2;
    else if (byte[0] >= 0xe0 && byte[0] <= 0xef)
        size = 3;
    else if (byte[0] >= 0xf0 && byte[0] <= 0xf4)
        size = 4;
    else
        return 0;
    if (byte[0] == 0xe0)
        low = 0xa0;
    else if (byte[0] == 0xed)
        high = 0x9f;
    else if (byte[0] == 0xf0)
        low = 0x90;
    else if (byte[0] == 0xf4)
        high = 0x8f;
    if (byte[1] < low || byte[1] > high)
        return 0;
    for (size_t i = 2; i < size; i++) {
        if (byte[i] < 0x80 || byte[i] > 0xbf)
            return 0;
    }
    return size;
}

static void
put_string (line *out, const char *text)
{
    if (text == NULL) {
        put (out, "null", 4);
        return;
    }
    put (out, "\"", 1);
    while (*text != '\0' && !out->full) {
        const size_t size = utf8_bytes (text);
        if (size == 0)
            put (out, "\xef\xbf\xbd", 3); /* U+FFFD for a byte that is no UTF-8 */
        else if (*text == '"' || *text == '\\')
            put_format (out, "\\%c", *text);
        else if (*text == '\n')
            put (out, "\\n", 2);
        else if ((unsigned char)*text < 0x20)
            put_format (out, "\\u%04x", (unsigned)(unsigned char)*text);
        else
            put (out, text, size);
        text += size > 0 ? size : 1;
    }
    put (out, "\"", 1);
}

/* The shortest of 15 or 17 digits that reads back as the same double; JSON has no infinity. */
static void
put_double (line *out, double value)
{
    char text[32];
    if (!isfinite (value)) {
        put (out, "null", 4);
        return;
    }
    snprintf (text, sizeof text, "%.15g", value);
    if (strtod (text, NULL) != value)
        snprintf (text, sizeof text, "%.17g", value);
    put (out, text, strlen (text));
}

static void
put_time (line *out)
{
    const uint64_t now_ns = gq_wall_ns ();
    const time_t seconds = (time_t)(now_ns / UINT64_C (1000000000));
    struct tm utc;
    char text[32];
    gmtime_r (&seconds, &utc);
    strftime (text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    put_format (out, "%s.%06" PRIu64 "Z", text, now_ns % UINT64_C (1000000000) / 1000);
}

/* The value behind a field's type; false when the type is none of ours: a bug of the caller. */
static bool
put_value (line *out, const char *type, va_list *arguments)
{
    switch (type[0]) {
    case 's':
        put_string (out, va_arg (*arguments, const char *));
        return true;
    case 'u':
        put_format (out, "%" PRIu64, va_arg (*arguments, uint64_t));
        return true;
    case 'i':
        put_format (out, "%" PRId64, va_arg (*arguments, int64_t));
        return true;
    case 'f':
        put_double (out, va_arg (*arguments, double));
        return true;
    case 'b':
        if (va_arg (*arguments, int))
            put (out, "true", 4);
        else
            put (out, "false", 5);
        return true;
    default:
        return false;
    }
}

void
gq_log (gq_log_level level, const char *event, ...)
{
    line out;
    bool cut = false;
    const int saved = errno; /* the caller may still want to tell it */
    va_list arguments;

    if (!gq_log_on (level))
        return;
    out.used = 0;
    out.full = false;
    put (&out, "{\"time\":\"", 9);
    put_time (&out);
    put_format (&out, "\",\"level\":\"%s\",\"process\":", level_words[level]);
    put_string (&out, atomic_load (&log_process));
    put (&out, ",\"event\":", 9);
    put_string (&out, event);
    assert (!out.full); /* both are literals of ours */

    va_start (arguments, event);
    for (const char *name = va_arg (arguments, const char *); name != NULL;
         name = va_arg (arguments, const char *)) {
        const size_t before = out.used;
        put (&out, ",", 1);
        put_string (&out, name);
        put (&out, ":", 1);
        const bool known = put_value (&out, va_arg (arguments, const char *), &arguments);
        assert (known);
        if (out.full) { /* without this field; a shorter one may still fit */
            out.used = before;
            out.full = false;
            cut = true;
        }
    }
    va_end (arguments);

    const char *tail = cut ? ",\"truncated\":true}\n" : "}\n";
    memcpy (out.bytes + out.used, tail, strlen (tail)); /* fits TAIL_BYTES */
    out.used += strlen (tail);
    ssize_t done;
    do {
        done = write (atomic_load (&log_fd), out.bytes, out.used);
    } while (done < 0 && errno == EINTR);
    errno = saved;
}
