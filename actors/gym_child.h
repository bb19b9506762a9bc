/*
 * The Python process behind a Gymnasium environment: started, and ended.  Step 0 of a gradient's
 * path.
 */
#ifndef GQ_GYM_CHILD_H
#define GQ_GYM_CHILD_H

#include <stddef.h>
#include <sys/types.h>

#include "gradq/status.h"

typedef struct gq_gym_child {
    pid_t pid;             /* 0: none */
    int requests, answers; /* our ends of its descriptors 3 and 4; -1: none */
} gq_gym_child;

#define GQ_GYM_CHILD                            \
    {                                           \
        .pid = 0, .requests = -1, .answers = -1 \
    }

/* The interpreter into path[size]: as told, or build/venv beside the program (one level up from the
 * builds with sanitizers and the tests), or python3 of the PATH. */
void gq_gym_python (const char *told, char *path, size_t size);

/* Fork and exec arguments[0]; `name` is for messages.  GQ_OK, GQ_INVALID: no such program, GQ_IO;
 * to be ended in any case. */
GQ_CHECK gq_status gq_gym_child_start (gq_gym_child *child, const char *name,
                                       char *const arguments[], gq_error *error);
/* Close the pipes and wait for its end, which SIGKILL brings about if need be. */
void gq_gym_child_end (gq_gym_child *child);

#endif
