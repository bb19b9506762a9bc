/*
 * Named points at which a test makes the process die, as kill -9 would: GRADQ_TEST_CRASH=NAME dies
 * at the first pass, NAME:N at the N-th.  Without the variable a pass costs one comparison.
 */
#ifndef GQ_CRASH_H
#define GQ_CRASH_H

#include <stdbool.h>

void gq_crash_point (const char *name);
/* Is there any to come?  For a loop that should not ask at each pass. */
bool gq_crash_wanted (void);

#endif
