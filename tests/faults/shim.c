/*
 * A file system and a wall clock that misbehave, for tests/process/test_faults.py: loaded in front
 * of libc with LD_PRELOAD.  Must never touch another file than the ones it is pointed at, and never
 * CLOCK_MONOTONIC.
 *
 *   FAULTS_PATH=TEXT       act on files with TEXT in their path, and on no others
 *   FAULTS_LOG=FILE        a line "CALL RESULT PATH" for each call on them: a number, or EIO, EINTR
 *   FAULTS_SHORT=BYTES     one write does at most this much
 *   FAULTS_EINTR=N         every N-th call is interrupted before it does anything
 *   FAULTS_EIO=CALL:N      the N-th CALL (write, fsync, ...) fails with EIO; the ones after it work
 *   FAULTS_CLOCK=SECONDS   the wall clock is off by this much
 *   FAULTS_CLOCK_JUMPS=1   to the other side at every second look
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SHOWN __attribute__ ((visibility ("default")))

typedef int open_at_function (int, const char *, int, ...);
typedef ssize_t write_function (int, const void *, size_t);
typedef int resize_function (int, off_t);
typedef int sync_function (int);
typedef int clock_function (clockid_t, struct timespec *);

static struct {
    open_at_function *open_at;
    write_function *write;
    resize_function *resize;
    sync_function *sync, *sync_data;
    clock_function *clock;
    const char *path; /* NULL: act on no file */
    size_t write_max;
    unsigned long interrupt_each; /* 0: none */
    char eio_call[16];
    unsigned long eio_number;
    long clock_s;
    bool clock_jumps;
    int log_fd;
} shim = {.log_fd = -1};

static atomic_ulong calls, eio_calls, looks;

/* The functions behind ours.  A data pointer becomes a function's as POSIX describes for dlsym. */
static void
find (const char *name, void *function)
{
    void *found = dlsym (RTLD_NEXT, name);
    if (found == NULL)
        abort ();
    memcpy (function, &found, sizeof found);
}

static unsigned long
number (const char *name)
{
    const char *text = getenv (name);
    return text == NULL ? 0 : strtoul (text, NULL, 10);
}

static void
read_orders (void)
{
    const char *text = getenv ("FAULTS_CLOCK");
    shim.clock_s = text == NULL ? 0 : strtol (text, NULL, 10);
    shim.clock_jumps = number ("FAULTS_CLOCK_JUMPS") != 0;
    shim.write_max = number ("FAULTS_SHORT") != 0 ? number ("FAULTS_SHORT") : SSIZE_MAX;
    shim.interrupt_each = number ("FAULTS_EINTR");
    text = getenv ("FAULTS_EIO");
    const char *colon = text == NULL ? NULL : strchr (text, ':');
    if (colon != NULL) {
        snprintf (shim.eio_call, sizeof shim.eio_call, "%.*s", (int)(colon - text), text);
        shim.eio_number = strtoul (colon + 1, NULL, 10);
    }
    text = getenv ("FAULTS_LOG");
    if (text != NULL)
        shim.log_fd =
            shim.open_at (AT_FDCWD, text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    shim.path = getenv ("FAULTS_PATH");
}

/* Libraries read clocks and write before our constructor's turn: whoever comes first does it. */
static void __attribute__ ((constructor)) begin (void)
{
    if (shim.clock != NULL)
        return;
    find ("openat", &shim.open_at);
    find ("write", &shim.write);
    find ("ftruncate", &shim.resize);
    find ("fsync", &shim.sync);
    find ("fdatasync", &shim.sync_data);
    find ("clock_gettime", &shim.clock);
    read_orders ();
}

/* ---- files ------------------------------------------------------------------------------ */

/* One call on a file: where, and what is to become of it. */
typedef struct call {
    const char *name;
    char path[2 * PATH_MAX];
    bool ours;
    int failure; /* errno, 0: it is done */
} call;

static void
judge (call *self)
{
    self->ours = shim.path != NULL && strstr (self->path, shim.path) != NULL;
    self->failure = 0;
    if (!self->ours)
        return;
    unsigned long count = atomic_fetch_add (&calls, 1) + 1;
    if (shim.interrupt_each != 0 && count % shim.interrupt_each == 0)
        self->failure = EINTR;
    else if (strcmp (self->name, shim.eio_call) == 0 &&
             atomic_fetch_add (&eio_calls, 1) + 1 == shim.eio_number)
        self->failure = EIO;
}

static void
path_of (int fd, char path[PATH_MAX])
{
    char link[64];
    snprintf (link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink (link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = '\0';
}

static call
called (const char *name, int fd)
{
    call self = {.name = name};
    begin ();
    if (shim.path != NULL)
        path_of (fd, self.path);
    judge (&self);
    return self;
}

/* Note it and give `result` back, with the errno that it had. */
static ssize_t
noted (const call *self, ssize_t result)
{
    int reason = errno;
    if (self->ours && shim.log_fd >= 0) {
        char line[sizeof self->path + 64];
        int size = result < 0 ? snprintf (line, sizeof line, "%s %s %s\n", self->name,
                                          strerrorname_np (reason), self->path)
                              : snprintf (line, sizeof line, "%s %zd %s\n", self->name, result,
                                          self->path);
        if (shim.write (shim.log_fd, line, (size_t)size) != size)
            abort (); /* a test would count too few */
    }
    errno = reason;
    return result;
}

static ssize_t
refused (const call *self)
{
    errno = self->failure;
    return noted (self, -1);
}

SHOWN ssize_t
write (int fd, const void *bytes, size_t size)
{
    call self = called ("write", fd);
    if (self.failure != 0)
        return refused (&self);
    if (self.ours && size > shim.write_max)
        size = shim.write_max;
    return noted (&self, shim.write (fd, bytes, size));
}

SHOWN int
fsync (int fd)
{
    call self = called ("fsync", fd);
    return (int)(self.failure != 0 ? refused (&self) : noted (&self, shim.sync (fd)));
}

SHOWN int
fdatasync (int fd)
{
    call self = called ("fdatasync", fd);
    return (int)(self.failure != 0 ? refused (&self) : noted (&self, shim.sync_data (fd)));
}

SHOWN int
ftruncate (int fd, off_t size)
{
    call self = called ("ftruncate", fd);
    return (int)(self.failure != 0 ? refused (&self) : noted (&self, shim.resize (fd, size)));
}

static int
opened (int directory_fd, const char *name, int flags, mode_t mode)
{
    call self = {.name = "open"};
    begin ();
    char directory[PATH_MAX] = "";
    if (shim.path != NULL && name[0] != '/' && directory_fd != AT_FDCWD)
        path_of (directory_fd, directory);
    snprintf (self.path, sizeof self.path, "%s/%s", directory, name);
    judge (&self);
    if (self.failure != 0)
        return (int)refused (&self);
    return (int)noted (&self, shim.open_at (directory_fd, name, flags, mode));
}

/* The mode is there when a file may be created. */
static mode_t
mode_in (int flags, va_list more)
{
    return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg (more, mode_t) : 0;
}

SHOWN int
open (const char *name, int flags, ...)
{
    va_list more;
    va_start (more, flags);
    mode_t mode = mode_in (flags, more);
    va_end (more);
    return opened (AT_FDCWD, name, flags, mode);
}

SHOWN int
openat (int directory_fd, const char *name, int flags, ...)
{
    va_list more;
    va_start (more, flags);
    mode_t mode = mode_in (flags, more);
    va_end (more);
    return opened (directory_fd, name, flags, mode);
}

/* ---- the wall clock --------------------------------------------------------------------- */

SHOWN int
clock_gettime (clockid_t clock, struct timespec *now)
{
    begin ();
    int rc = shim.clock (clock, now);
    if (rc == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        bool other = shim.clock_jumps && atomic_fetch_add (&looks, 1) % 2 == 1;
        now->tv_sec += other ? -shim.clock_s : shim.clock_s;
    }
    return rc;
}

SHOWN int
gettimeofday (struct timeval *restrict now, void *restrict zone)
{
    (void)zone; /* obsolete, and nobody here asks for it */
    struct timespec wall = {0};
    int rc = clock_gettime (CLOCK_REALTIME, &wall);
    *now = (struct timeval){.tv_sec = wall.tv_sec, .tv_usec = wall.tv_nsec / 1000};
    return rc;
}

SHOWN time_t
time (time_t *now)
{
    struct timespec wall = {0};
    clock_gettime (CLOCK_REALTIME, &wall);
    if (now != NULL)
        *now = wall.tv_sec;
    return wall.tv_sec;
}
