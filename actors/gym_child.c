/*
 * The Python process behind a Gymnasium environment.  Step 0 of a gradient's path.
 *
 * Must never run after the process' first ZeroMQ call (it forks), leave a child behind, or wait
 * without an end for one.
 */
#include "gym_child.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stats.h"

#define CHILD_REQUESTS 3 /* descriptors that the bridge reads and writes */
#define CHILD_ANSWERS  4
#define PIPE_BYTES     (1 << 20) /* asked for: answers of many frames pass with fewer switches */
#define POLL_MS        100
#define STOP_MS        2000 /* for env.close (); then SIGKILL */

void
gq_gym_python (const char *told, char *path, size_t size)
{
    static const char *const beside[] = {"venv/bin/python", "../venv/bin/python"};
    char directory[512];

    if (told != NULL) {
        snprintf (path, size, "%s", told);
        return;
    }
    ssize_t length = readlink ("/proc/self/exe", directory, sizeof directory - 1);
    for (size_t i = 0; length > 0 && i < sizeof beside / sizeof beside[0]; i++) {
        directory[length] = '\0';
        *strrchr (directory, '/') = '\0';
        snprintf (path, size, "%s/%s", directory, beside[i]);
        if (access (path, X_OK) == 0)
            return;
        length = (ssize_t)strlen (directory);
        directory[length++] = '/';
    }
    snprintf (path, size, "python3");
}

/* In the child, between fork and exec: async-signal-safe calls only.  Writes errno to `failed`,
 * which exec closes when all went well. */
static _Noreturn void
run_child (const int requests[2], const int answers[2], int failed, pid_t parent,
           char *const arguments[])
{
    /* Die with the actor, even when that was killed; it may have gone before the call. */
    int wrong = prctl (PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid () != parent;
    /* What Python or a package prints goes to stderr; the high copies survive the dup2 on 3, 4. */
    int from = fcntl (requests[0], F_DUPFD_CLOEXEC, 10),
        to = fcntl (answers[1], F_DUPFD_CLOEXEC, 10);
    int saved = fcntl (failed, F_DUPFD_CLOEXEC, 10);
    int null = open ("/dev/null", O_RDONLY | O_CLOEXEC);

    wrong = wrong || null < 0 || saved < 0 || dup2 (null, STDIN_FILENO) < 0 ||
            dup2 (STDERR_FILENO, STDOUT_FILENO) < 0 || dup2 (from, CHILD_REQUESTS) < 0 ||
            dup2 (to, CHILD_ANSWERS) < 0;
    if (!wrong)
        execvp (arguments[0], arguments);
    int reason = errno;
    ssize_t written = write (saved >= 0 ? saved : failed, &reason, sizeof reason);
    (void)written;
    _exit (127);
}

gq_status
gq_gym_child_start (gq_gym_child *child, const char *name, char *const arguments[], gq_error *error)
{
    int requests[2], answers[2], failed[2], reason = 0;
    pid_t parent = getpid ();

    if (pipe2 (requests, O_CLOEXEC) != 0)
        return gq_fail (error, GQ_IO, "gym:%s: pipe: %s", name, strerror (errno));
    child->requests = requests[1];
    if (pipe2 (answers, O_CLOEXEC) != 0) {
        close (requests[0]);
        return gq_fail (error, GQ_IO, "gym:%s: pipe: %s", name, strerror (errno));
    }
    child->answers = answers[0];
    (void)fcntl (answers[0], F_SETPIPE_SZ, PIPE_BYTES); /* the system may allow less */
    if (pipe2 (failed, O_CLOEXEC) != 0) {
        close (requests[0]), close (answers[1]);
        return gq_fail (error, GQ_IO, "gym:%s: pipe: %s", name, strerror (errno));
    }
    pid_t pid = fork ();
    if (pid == 0)
        run_child (requests, answers, failed[1], parent, arguments);
    reason = pid < 0 ? errno : 0;
    close (requests[0]), close (answers[1]), close (failed[1]);
    if (pid > 0) {
        child->pid = pid;
        ssize_t got; /* ends at exec, at the latest when the child ends */
        do
            got = read (failed[0], &reason, sizeof reason);
        while (got < 0 && errno == EINTR);
    }
    close (failed[0]);
    if (reason != 0)
        return gq_fail (error, pid > 0 ? GQ_INVALID : GQ_IO,
                        "gym:%s: cannot run '%s': %s; name a Python interpreter with --python or "
                        "GRADQ_PYTHON",
                        name, arguments[0], strerror (reason));
    return GQ_OK;
}

/* The closed pipe ends the child; SIGKILL if it does not let itself be ended. */
static void
reap (pid_t child)
{
    int descriptor = pidfd_open (child, 0);
    struct pollfd item = {.fd = descriptor, .events = POLLIN};
    uint64_t deadline_ns = gq_now_ns () + (uint64_t)STOP_MS * 1000000u;
    int ready = -1;

    while (descriptor >= 0 && ready <= 0 && gq_now_ns () < deadline_ns)
        ready = poll (&item, 1, POLL_MS);
    if (ready <= 0)
        kill (child, SIGKILL);
    while (waitpid (child, NULL, 0) < 0 && errno == EINTR)
        ;
    if (descriptor >= 0)
        close (descriptor);
}

void
gq_gym_child_end (gq_gym_child *child)
{
    if (child->requests >= 0)
        close (child->requests);
    if (child->answers >= 0)
        close (child->answers);
    if (child->pid > 0)
        reap (child->pid);
    *child = (gq_gym_child)GQ_GYM_CHILD;
}
