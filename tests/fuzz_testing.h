/*
 * What the fuzzers share: claims that abort, and a directory for those that need files.
 */
#ifndef GQ_FUZZ_TESTING_H
#define GQ_FUZZ_TESTING_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput (const uint8_t *data, size_t size);

#define REQUIRE(claim) fuzz_require ((claim), #claim, __FILE__, __LINE__)

static inline void
fuzz_require (int holds, const char *claim, const char *file, int line)
{
    if (!holds) {
        fprintf (stderr, "%s:%d: does not hold: %s\n", file, line, claim);
        abort ();
    }
}

/* A new directory, in memory where the system has such a place: writers flush to the disk each
 * time. */
static inline void
fuzz_directory (char directory[64])
{
    strcpy (directory, "/dev/shm/gradq-fuzz-XXXXXX");
    if (mkdtemp (directory) == NULL) {
        strcpy (directory, "/tmp/gradq-fuzz-XXXXXX");
        REQUIRE (mkdtemp (directory) != NULL);
    }
}

#endif
