/*
 * Broker and optimizer of a measurement: real processes, in a directory that goes with them.
 *
 * Must never leave one behind: they are ended and waited for, and the system ends them when this
 * program dies in any other way.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "gradq/protocol.h"
#include "stats.h"

#define MS_NS 1000000u
/* From SIGTERM to SIGKILL: the optimizer writes a last checkpoint. */
#define STOP_MS 10000
#define POLL_MS 2
/* Words of a command line beside those of --set. */
#define WORDS_MAX 24
/* What a process said last, for a message. */
#define TAIL_BYTES 600
/* The broker's default bound in bytes. */
#define QUEUE_BYTES_MIN ((uint64_t)256 << 20)
/* A broker's control socket and the five behind it take consecutive ports. */
#define PORTS        6
#define PORT_MIN     15000u
#define PORT_CHOICES 2800u
#define PORT_TRIES   200

extern char **environ;

/* "DIR/NAME" where DIR holds the running program. */
static bool
beside (char path[PATH_MAX], const char *name)
{
    char self[PATH_MAX];
    ssize_t length = readlink ("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0)
        return false;
    self[length] = '\0';
    char *slash = strrchr (self, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return snprintf (path, PATH_MAX, "%s/%s", self, name) < PATH_MAX;
}

gq_status
gq_bench_service_find (gq_error *error)
{
    static const char *const names[] = {"gradq-broker", "gradq-optimizer"};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!beside (path, names[i]) || access (path, X_OK) != 0)
            return gq_fail (error, GQ_NOTFOUND, "%s is not beside gradq-bench; type make",
                            names[i]);
    return GQ_OK;
}

/* The environment without GRADQ_*: what is measured is what the command line says.  NULL: memory;
 * free the array only. */
static char **
plain_environment (void)
{
    size_t count = 0;
    while (environ[count] != NULL)
        count++;
    char **plain = calloc (count + 1, sizeof *plain);
    size_t kept = 0;
    for (size_t i = 0; plain != NULL && i < count; i++)
        if (strncmp (environ[i], "GRADQ_", strlen ("GRADQ_")) != 0)
            plain[kept++] = environ[i];
    return plain;
}

/* In the child: only calls that are safe after a fork, and never a return. */
static _Noreturn void
become (const char *path, char **words, char **environment, int log_fd, pid_t parent)
{
    static const char cannot[] = "gradq-bench: the program cannot be executed\n";
    /* A Ctrl-C is for the parent, which ends us in order; its sudden death is for us, too. */
    setpgid (0, 0);
    prctl (PR_SET_PDEATHSIG, SIGTERM);
    if (getppid () == parent && dup2 (log_fd, STDOUT_FILENO) >= 0 &&
        dup2 (log_fd, STDERR_FILENO) >= 0) {
        execve (path, words, environment);
        ssize_t written = write (STDERR_FILENO, cannot, sizeof cannot - 1);
        (void)written;
    }
    _exit (127);
}

/* words[0]: the program's name.  Its output goes to DIR/NAME.log. */
static gq_status
launch (pid_t *pid, const gq_bench_service *service, const char **words, gq_error *error)
{
    char path[PATH_MAX], log[128];
    snprintf (log, sizeof log, "%s/%s.log", service->directory, words[0]);
    int log_fd = open (log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char **environment = plain_environment ();
    gq_status status = GQ_OK;
    if (log_fd < 0 || environment == NULL || !beside (path, words[0])) {
        status = gq_fail (error, GQ_IO, "cannot start %s: %s", words[0], strerror (errno));
    } else {
        pid_t parent = getpid ();
        pid_t child = fork ();
        if (child == 0)
            become (path, (char **)(void *)words, environment, log_fd, parent);
        if (child < 0)
            status = gq_fail (error, GQ_IO, "cannot start %s: %s", words[0], strerror (errno));
        else
            *pid = child;
    }
    free (environment);
    if (log_fd >= 0)
        close (log_fd);
    return status;
}

static gq_status
launch_broker (gq_bench_service *service, const gq_bench_point *point, gq_error *error)
{
    char queue_bytes[32];
    uint64_t wanted = 4 * (GQ_FRAME_HEADER_BYTES + point->params * sizeof (float));
    snprintf (queue_bytes, sizeof queue_bytes, "%llu",
              (unsigned long long)(wanted > QUEUE_BYTES_MIN ? wanted : QUEUE_BYTES_MIN));
    const char *words[] = {"gradq-broker", "--address",   service->address, "--queue-bytes",
                           queue_bytes,    "--log-level", point->log_level, NULL};
    return launch (&service->broker, service, words, error);
}

static gq_status
launch_optimizer (gq_bench_service *service, const gq_bench_point *point, gq_error *error)
{
    char run[128];
    char threads[16];
    snprintf (run, sizeof run, "%s/run", service->directory);
    snprintf (threads, sizeof threads, "%u", point->threads);
    /* No checkpoints at intervals: they are a cost of safety, not of the loop. */
    const char *fixed[] = {"gradq-optimizer",
                           "--lane",
                           "auto",
                           "--address",
                           service->address,
                           "--run",
                           run,
                           "--optimizer",
                           point->optimizer,
                           "--cpu",
                           point->cpu,
                           "--log-level",
                           point->log_level,
                           "--checkpoint-interval-s",
                           "0",
                           "--threads",
                           threads,
                           "--journal",
                           point->journal};
    const char **words = calloc (WORDS_MAX + 2 * point->set_count, sizeof *words);
    if (words == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    size_t count = sizeof fixed / sizeof fixed[0];
    memcpy (words, fixed, sizeof fixed);
    if (point->plugins != NULL) {
        words[count++] = "--plugins";
        words[count++] = point->plugins;
    }
    for (size_t i = 0; i < point->set_count; i++) {
        words[count++] = "--set";
        words[count++] = point->sets[i];
    }
    gq_status status = launch (&service->optimizer, service, words, error);
    free (words);
    return status;
}

/* A port of 127.0.0.1 that is free, as are the five behind it; 0: none found.  Below the range that
 * the system hands out by itself, so that no client's port comes in between. */
static unsigned
free_port (void)
{
    for (unsigned try = 0; try < PORT_TRIES; try++) {
        unsigned random = 0;
        if (getrandom (&random, sizeof random, 0) != sizeof random)
            return 0;
        unsigned first = PORT_MIN + random % PORT_CHOICES * PORTS, free_count = 0;
        for (; free_count < PORTS; free_count++) {
            struct sockaddr_in at = {.sin_family = AF_INET,
                                     .sin_port = htons ((uint16_t)(first + free_count)),
                                     .sin_addr.s_addr = htonl (INADDR_LOOPBACK)};
            int fd = socket (AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
            bool bound = fd >= 0 &&
                         setsockopt (fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
                         bind (fd, (const struct sockaddr *)&at, sizeof at) == 0;
            if (fd >= 0)
                close (fd);
            if (!bound)
                break;
        }
        if (free_count == PORTS)
            return first;
    }
    return 0;
}

static gq_status
choose_address (gq_bench_service *service, bool tcp, gq_error *error)
{
    unsigned port = tcp ? free_port () : 0;
    if (tcp && port == 0)
        return gq_fail (error, GQ_IO, "no %d consecutive free ports on 127.0.0.1", PORTS);
    if (tcp)
        snprintf (service->address, sizeof service->address, "tcp://127.0.0.1:%u", port);
    else
        snprintf (service->address, sizeof service->address, "ipc://%s/control",
                  service->directory);
    return GQ_OK;
}

gq_status
gq_bench_service_start (gq_bench_service *service, const gq_bench_point *point, gq_error *error)
{
    *service = (gq_bench_service){.broker = 0};
    /* Short: an ipc path must fit 107 bytes. */
    snprintf (service->directory, sizeof service->directory, "/tmp/gq-bench-XXXXXX");
    if (mkdtemp (service->directory) == NULL)
        return gq_fail (error, GQ_IO, "no directory in /tmp for a run: %s", strerror (errno));
    gq_status status = choose_address (service, point->tcp, error);
    if (status == GQ_OK)
        status = launch_broker (service, point, error);
    if (status == GQ_OK)
        status = launch_optimizer (service, point, error);
    if (status != GQ_OK)
        gq_bench_service_stop (service);
    return status;
}

/* The last line of a process' log that is for people, else its last bytes. */
static void
last_words (const gq_bench_service *service, const char *name, char text[TAIL_BYTES + 1])
{
    char path[128];
    snprintf (path, sizeof path, "%s/%s.log", service->directory, name);
    text[0] = '\0';
    FILE *file = fopen (path, "re");
    if (file == NULL)
        return;
    char line[TAIL_BYTES + 1];
    bool spoken = false;
    while (fgets (line, sizeof line, file) != NULL) {
        bool speaks = strncmp (line, name, strlen (name)) == 0;
        if (speaks || !spoken)
            snprintf (text, TAIL_BYTES + 1, "%s", line);
        spoken = spoken || speaks;
    }
    fclose (file);
    text[strcspn (text, "\n")] = '\0';
}

static gq_status
check_child (gq_bench_service *service, pid_t *pid, const char *name, gq_error *error)
{
    int how = 0;
    if (*pid == 0 || waitpid (*pid, &how, WNOHANG) != *pid)
        return GQ_OK;
    *pid = 0;
    char text[TAIL_BYTES + 1];
    last_words (service, name, text);
    bool killed = WIFSIGNALED (how);
    return gq_fail (error, GQ_CLOSED, "%s ended by itself (%s %d): %s", name,
                    killed ? "signal" : "exit", killed ? WTERMSIG (how) : WEXITSTATUS (how),
                    text[0] != '\0' ? text : "it said nothing");
}

gq_status
gq_bench_service_alive (gq_bench_service *service, gq_error *error)
{
    gq_status status = check_child (service, &service->optimizer, "gradq-optimizer", error);
    return status == GQ_OK ? check_child (service, &service->broker, "gradq-broker", error)
                           : status;
}

uint64_t
gq_bench_resident (pid_t pid)
{
    char path[64], line[128];
    uint64_t pages = 0;
    snprintf (path, sizeof path, "/proc/%ld/statm", (long)pid);
    FILE *file = fopen (path, "re");
    if (file == NULL)
        return 0;
    /* The second number, after the size. */
    if (fgets (line, sizeof line, file) != NULL)
        pages = strtoull (line + strcspn (line, " "), NULL, 10);
    fclose (file);
    return pages * (uint64_t)sysconf (_SC_PAGESIZE);
}

static void
end_child (pid_t *pid)
{
    if (*pid == 0)
        return;
    kill (*pid, SIGTERM);
    uint64_t until_ns = gq_now_ns () + (uint64_t)STOP_MS * MS_NS;
    const struct timespec pause = {.tv_nsec = POLL_MS * MS_NS};
    pid_t ended;
    do {
        ended = waitpid (*pid, NULL, WNOHANG);
        if (ended == 0)
            nanosleep (&pause, NULL);
    } while ((ended == 0 || (ended < 0 && errno == EINTR)) && gq_now_ns () < until_ns);
    if (ended == 0) {
        kill (*pid, SIGKILL);
        while (waitpid (*pid, NULL, 0) < 0 && errno == EINTR)
            continue;
    }
    *pid = 0;
}

static int
remove_entry (const char *path, const struct stat *about, int type, struct FTW *where)
{
    (void)about;
    (void)type;
    (void)where;
    remove (path);
    return 0;
}

void
gq_bench_service_stop (gq_bench_service *service)
{
    end_child (&service->optimizer);
    end_child (&service->broker);
    if (service->directory[0] != '\0')
        nftw (service->directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    service->directory[0] = '\0';
}
