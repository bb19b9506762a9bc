/*
 * Process-wide set-up of broker and optimizer.
 */
#include "service.h"

#include <czmq.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "file.h"

int
gq_service_start (gq_error *error)
{
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
