/*
 * Crash points.
 */
#include "crash.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char wanted[64]; /* "": none */
static long passes = 1;

static void
read_environment (void)
{
    const char *text = getenv ("GRADQ_TEST_CRASH");
    if (text == NULL)
        return;
    size_t length = strcspn (text, ":");
    if (length >= sizeof wanted)
        return;
    memcpy (wanted, text, length);
    if (text[length] == ':')
        passes = strtol (text + length + 1, NULL, 10);
}

void
gq_crash_point (const char *name)
{
    pthread_once (&once, read_environment);
    if (wanted[0] != '\0' && strcmp (name, wanted) == 0 && --passes <= 0)
        kill (getpid (), SIGKILL);
}

bool
gq_crash_wanted (void)
{
    pthread_once (&once, read_environment);
    return wanted[0] != '\0';
}
