/*
 * For clang-tidy only, included before every file (tools/lint.py): what the analyzer cannot know
 * because it sees one file at a time.  Never part of a program.
 */
#ifndef GQ_ANALYZER_H
#define GQ_ANALYZER_H

#include "gradq/status.h"

/* gq_fail gives back the status that it was given: a path that calls it does not go on as GQ_OK. */
#define gq_fail(error, status, ...) ((gq_fail)(error, status, __VA_ARGS__), (status))

#endif
