/*
 * What the machine is and has, before anything is measured on it.  Off a gradient's path.
 *
 * Must never start what would push the machine into its swap: rates would be those of the disk.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "gradq/protocol.h"

#define GIB 1073741824.0
/* Of a point, in frames: each actor's window, the one in the making, weights held, arriving and on
 * the way; and what broker and optimizer hold, their queue apart. */
#define FRAMES_ACTOR(window) ((window) + 4u)
#define FRAMES_SERVICE       16u
/* Of the memory that is free, at most this share. */
#define SHARE 0.75

void
gq_bench_machine_read (gq_bench_machine *machine)
{
    static const char key[] = "model name";
    snprintf (machine->cpu, sizeof machine->cpu, "unknown CPU");
    machine->cores = sysconf (_SC_NPROCESSORS_ONLN);
    if (getloadavg (&machine->load, 1) != 1)
        machine->load = 0;
    FILE *file = fopen ("/proc/cpuinfo", "re");
    if (file == NULL)
        return;
    char line[256];
    while (fgets (line, sizeof line, file) != NULL) {
        const char *colon = strchr (line, ':');
        if (strncmp (line, key, sizeof key - 1) != 0 || colon == NULL)
            continue;
        line[strcspn (line, "\n")] = '\0';
        snprintf (machine->cpu, sizeof machine->cpu, "%s", colon + 1 + strspn (colon + 1, " "));
        break;
    }
    fclose (file);
}

/* Bytes that can be had without swapping; 0: unknown. */
static double
available_bytes (void)
{
    FILE *file = fopen ("/proc/meminfo", "re");
    if (file == NULL)
        return 0;
    static const char key[] = "MemAvailable:";
    char line[128];
    double kib = 0;
    while (kib <= 0 && fgets (line, sizeof line, file) != NULL)
        if (strncmp (line, key, sizeof key - 1) == 0)
            kib = strtod (line + sizeof key - 1, NULL);
    fclose (file);
    return kib * 1024;
}

gq_status
gq_bench_memory (const gq_bench_point *point, gq_error *error)
{
    double frames = (double)point->actors * FRAMES_ACTOR (point->window) + FRAMES_SERVICE;
    double needed = frames * (double)(GQ_FRAME_HEADER_BYTES + point->params * sizeof (float));
    double available = available_bytes ();
    if (available > 0 && needed > SHARE * available)
        return gq_fail (error, GQ_INVALID,
                        "about %.1f GiB of memory are needed, of %.1f GiB that are free",
                        needed / GIB, available / GIB);
    return GQ_OK;
}
