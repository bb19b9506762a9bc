/*
 * Process-wide set-up of broker and optimizer.
 */
#include "service.h"

#include <czmq.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "file.h"

/* Free memory at the heap's end that is kept for the next frames; what is beyond goes back. */
#define KEPT_BYTES_MAX ((size_t)256 * 1024 * 1024)
/* A huge page of most machines. */
#define HUGE_BYTES ((size_t)2 << 20)

/*
 * glibc maps each block above 32 MiB (its largest M_MMAP_THRESHOLD) and unmaps it again, so that
 * every large frame pays for zeroed pages.  Nothing is mapped alone here, and threads share one
 * heap: their own would end at 64 MiB.  An allocator that knows no mallopt (a sanitizer's) ignores
 * this.
 */
static void
reuse_memory (void)
{
    (void)!mallopt (M_MMAP_MAX, 0);
    (void)!mallopt (M_ARENA_MAX, 1);
    (void)!mallopt (M_TRIM_THRESHOLD, (int)KEPT_BYTES_MAX);
}

void
gq_service_expect (size_t bytes)
{
    /* What is free beyond that goes back to the system, and all of it is free in a moment. */
    if (bytes > KEPT_BYTES_MAX / 2)
        bytes = KEPT_BYTES_MAX / 2;
    if (bytes < HUGE_BYTES)
        return;
    char *memory = malloc (bytes);
    if (memory == NULL)
        return;
    /* Inwards: what lies beside it is somebody else's.  A system that has no huge pages says so. */
    char *start = memory + (HUGE_BYTES - (uintptr_t)memory % HUGE_BYTES) % HUGE_BYTES;
    if (start < memory + bytes)
        (void)!madvise (start, (size_t)(memory + bytes - start) / HUGE_BYTES * HUGE_BYTES,
                        MADV_HUGEPAGE);
    free (memory);
}

int
gq_service_start (gq_error *error)
{
    reuse_memory ();
    signal (SIGPIPE, SIG_IGN);
    struct rlimit files;
    if (getrlimit (RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit (RLIMIT_NOFILE, &files);
    }
    sigset_t signals;
    sigemptyset (&signals);
    sigaddset (&signals, SIGINT);
    sigaddset (&signals, SIGTERM);
    sigaddset (&signals, SIGUSR1);
    int fd = -1;
    if (sigprocmask (SIG_BLOCK, &signals, NULL) == 0)
        fd = signalfd (-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
    if (fd < 0)
        gq_fail (error, GQ_IO, "no signalfd: %s", strerror (errno));
    zsys_handler_set (NULL);
    zsys_init ();
    return fd;
}

int
gq_service_signal (int signal_fd)
{
    struct signalfd_siginfo info;
    return read (signal_fd, &info, sizeof info) == sizeof info ? (int)info.ssi_signo : 0;
}

gq_status
gq_service_lock (int *fd, const char *path, gq_error *error)
{
    *fd = gq_file_open (AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (*fd < 0)
        return gq_fail (error, GQ_IO, "cannot open %s: %s", path, strerror (errno));
    if (flock (*fd, LOCK_EX | LOCK_NB) == 0)
        return GQ_OK;
    int reason = errno;
    close (*fd);
    *fd = -1;
    if (reason == EWOULDBLOCK)
        return gq_fail (error, GQ_REFUSED, "%s is locked by another process", path);
    return gq_fail (error, GQ_IO, "cannot lock %s: %s", path, strerror (reason));
}
