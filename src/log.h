/*
 * JSON-lines log: one object a line on stderr (or the file of gq_log_open), with time, level,
 * process, event, and typed fields.  Thread-safe; a line is written by one write(2).
 *
 *     gq_log (GQ_LOG_INFO, "checkpoint written", "path", "s", path, "version", "u", version, NULL);
 *
 * Fields are triples: name, type, value.  Types: "s" const char *, "u" uint64_t, "i" int64_t,
 * "f" double, "b" int.  NULL ends the list.
 */
#ifndef GQ_LOG_H
#define GQ_LOG_H

#include <stdint.h>

#include "gradq/status.h"

typedef enum gq_log_level { GQ_LOG_DEBUG, GQ_LOG_INFO, GQ_LOG_WARNING, GQ_LOG_ERROR } gq_log_level;

/* process: static string, "broker".  path NULL: stderr.  GQ_OK, GQ_IO with *error. */
GQ_CHECK gq_status gq_log_open (const char *process, const char *path, gq_log_level least,
                                gq_error *error);
/* "debug|info|warning|error" to its level; the options table allows no other word. */
gq_log_level gq_log_level_from (const char *word);
/* Nothing below `least` costs more than a comparison: check before computing fields. */
int gq_log_on (gq_log_level level);
void gq_log (gq_log_level level, const char *event, ...) __attribute__ ((sentinel));

#endif
