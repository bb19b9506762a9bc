/*
 * Names and sentences of gq_status.
 */
#include "gradq/status.h"

#include <stdarg.h>
#include <stdio.h>

static const char *const names[] = {
#define NAME(name, word, text) [GQ_##name] = word,
    GQ_STATUS_LIST (NAME)
#undef NAME
};
static const char *const texts[] = {
#define TEXT(name, word, text) [GQ_##name] = text,
    GQ_STATUS_LIST (TEXT)
#undef TEXT
};

const char *
gq_status_name (gq_status status)
{
    return (unsigned)status < GQ_STATUS_COUNT ? names[status] : "unknown";
}

const char *
gq_status_text (gq_status status)
{
    return (unsigned)status < GQ_STATUS_COUNT ? texts[status] : "unknown status";
}

gq_status
gq_fail (gq_error *error, gq_status status, const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        va_start (arguments, format);
        vsnprintf (error->text, sizeof error->text, format, arguments);
        va_end (arguments);
    }
    return status;
}
