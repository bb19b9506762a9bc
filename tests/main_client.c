/*
 * A client of the public API that pushes vectors of one value, for tests/process/.  Steps 1 and 7
 * of a gradient's path, without a model.
 *
 *     main_client ADDRESS [key=value]...      keys: see `keys` below
 *     main_client                             checks what gradq.h says about opening in vain
 *
 * Gradient s of seed S is `value (S, s)` in every element, so that whoever reads the optimizer's
 * log can compute the weights of every version.  Prints JSON lines: "open", then "done" with what
 * was counted.  Must never look below gradq.h: it stands for a user's program.
 */
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradq/gradq.h"

enum {
    ACTOR,
    ELEMENTS,
    COUNT,
    SEED,
    WINDOW,
    TIMEOUT_MS,
    RESEND_MS,
    PATIENCE,
    PAUSE,
    LANE,
    BF16,
    KEY_COUNT
};

/* Defaults.  patience: how often in a row a call may time out before that counts as a failure.
 * pause: 1 waits for SIGUSR1 between opening and the first push.  lane: see `lanes`.  bf16: 1 is
 * that encoding. */
static const struct {
    const char *name;
    uint64_t value;
} keys[KEY_COUNT] = {[ACTOR] = {"actor", GQ_ACTOR_ANY},
                     [ELEMENTS] = {"elements", 1000},
                     [COUNT] = {"count", 100},
                     [SEED] = {"seed", 1},
                     [WINDOW] = {"window", GQ_WINDOW_DEFAULT},
                     [TIMEOUT_MS] = {"timeout_ms", 30000},
                     [RESEND_MS] = {"resend_ms", 1000},
                     [PATIENCE] = {"patience", 0},
                     [PAUSE] = {"pause", 0},
                     [LANE] = {"lane", 0},
                     [BF16] = {"bf16", 0}};

static const char *const lanes[] = {"auto", "inline", "shm"};

typedef struct witness {
    uint64_t looks;    /* times that weights were taken */
    uint64_t versions; /* different ones among them */
    uint64_t torn;     /* of those, with unequal elements */
    uint64_t fallen;   /* of those, below the one before */
    uint32_t term;
    uint64_t version;
} witness;

static volatile sig_atomic_t stop;

static void
on_signal (int number)
{
    (void)number;
    stop = 1;
}

static bool
stopped (void)
{
    return stop != 0;
}

/*
 * 24 bits of splitmix64 (Steele, Lea, Flood 2014), as a float32 in [-1, 1).  Sums of a few of them
 * need more than 24 bits: another order gives another sum.  peer.py has the same.
 */
static float
value (uint64_t seed, uint64_t sequence)
{
    uint64_t z = (seed << 32) + sequence * UINT64_C (0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C (0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C (0x94d049bb133111eb);
    z ^= z >> 31;
    return (float)((int64_t)(z >> 40) - (1 << 23)) / (float)(1 << 23);
}

/* Every element has the bits of the first: the vector equals itself moved by one. */
static bool
all_equal (const float *vector, uint64_t count)
{
    return count < 2 || memcmp (vector, vector + 1, (count - 1) * sizeof *vector) == 0;
}

static void
look (gq_client *client, witness *seen)
{
    gq_weights weights;
    gq_status status = gq_client_weights (client, &weights);
    assert (status == GQ_OK);
    bool fallen = weights.term < seen->term ||
                  (weights.term == seen->term && weights.version < seen->version);
    bool same = weights.term == seen->term && weights.version == seen->version;
    seen->looks++;
    if (same && seen->versions > 0)
        return;
    seen->versions++;
    seen->fallen += fallen ? 1 : 0;
    seen->torn += all_equal (weights.data, weights.count) ? 0 : 1;
    seen->term = weights.term;
    seen->version = weights.version;
}

static void
wait_for_signal (void)
{
    int number = 0;
    sigset_t go;
    sigemptyset (&go);
    sigaddset (&go, SIGUSR1); /* blocked since main: one that came before is not lost */
    sigwait (&go, &number);
}

/* Push gradient `number`; time-outs are borne `patience` times. */
static gq_status
push_one (gq_client *client, const uint64_t *set, uint64_t number, uint64_t *sequence)
{
    float *gradient = gq_client_reserve (client);
    if (gradient == NULL)
        return GQ_MEMORY;
    float filling = value (set[SEED], number);
    for (uint64_t i = 0; i < set[ELEMENTS]; i++)
        gradient[i] = filling;
    gq_status status = gq_client_commit (client, 1, sequence);
    for (uint64_t i = 0; status == GQ_TIMEOUT && i < set[PATIENCE]; i++)
        status = gq_client_commit (client, 1, sequence);
    return status;
}

static gq_status
push_all (gq_client *client, const uint64_t *set, witness *seen)
{
    uint64_t sequence = 0;
    gq_status status = GQ_OK;
    for (uint64_t number = 1; number <= set[COUNT] && status == GQ_OK; number++) {
        look (client, seen);
        status = push_one (client, set, number, &sequence);
    }
    for (uint64_t i = 0; status == GQ_OK || (status == GQ_TIMEOUT && i <= set[PATIENCE]); i++) {
        status = gq_client_wait (client, sequence);
        if (status == GQ_OK)
            break;
    }
    look (client, seen);
    return status;
}

static int
run (const char *address, const uint64_t *set)
{
    gq_error error = {""};
    gq_client *client = NULL;
    gq_tensor_shape tensor = {.name = "w", .rank = 1, .shape = {set[ELEMENTS]}};
    float *zeros = calloc (set[ELEMENTS], sizeof *zeros);
    gq_client_config config = GQ_CLIENT_CONFIG;
    config.address = address;
    config.actor = (uint32_t)set[ACTOR];
    config.window = (uint32_t)set[WINDOW];
    config.timeout_ms = (int)set[TIMEOUT_MS];
    config.resend_ms = (int)set[RESEND_MS];
    config.tensors = &tensor;
    config.tensor_count = 1;
    config.initial = zeros;
    config.interrupted = stopped;
    config.lane = lanes[set[LANE] % 3];
    config.encoding = set[BF16] != 0 ? "bf16" : "f32";
    gq_status status = zeros == NULL ? GQ_MEMORY : gq_client_open (&client, &config, &error);
    free (zeros);
    if (status != GQ_OK) {
        fprintf (stderr, "main_client: %s: %s\n", gq_status_name (status), error.text);
        return 1;
    }
    const char *reason;
    const char *lane = gq_client_lane (client, &reason);
    printf ("{\"event\": \"open\", \"actor\": %" PRIu32 ", \"max_staleness\": %" PRId64
            ", \"lane\": \"%s\", \"reason\": \"%s\"}\n",
            gq_client_actor (client), (int64_t)gq_client_max_staleness (client), lane, reason);
    fflush (stdout);
    if (set[PAUSE] != 0)
        wait_for_signal ();
    witness seen = {0};
    status = push_all (client, set, &seen);
    gq_client_counts counts = gq_client_count (client);
    printf ("{\"event\": \"done\", \"status\": \"%s\", \"pushed\": %" PRIu64
            ", \"acknowledged\": %" PRIu64 ", \"refused\": %" PRIu64 ", \"resent\": %" PRIu64
            ", \"rolled_back\": %" PRIu64 ", \"dropped\": %" PRIu64
            ", \"refused_reason\": \"%s\", \"looks\": %" PRIu64 ", \"versions\": %" PRIu64
            ", \"torn\": %" PRIu64 ", \"fallen\": %" PRIu64 ", \"term\": %" PRIu32
            ", \"version\": %" PRIu64 ", \"lane\": \"%s\"}\n",
            gq_status_name (status), counts.pushed, counts.acknowledged, counts.refused,
            counts.resent, counts.rolled_back, counts.dropped,
            gq_status_name (counts.refused_reason), seen.looks, seen.versions, seen.torn,
            seen.fallen, seen.term, seen.version, gq_client_lane (client, NULL));
    fflush (stdout);
    gq_client_close (&client);
    return status == GQ_OK || status == GQ_CLOSED ? 0 : 1;
}

/* One key=value of the command line; false: unknown or no number. */
static bool
take_word (const char *word, uint64_t *set)
{
    for (size_t i = 0; i < KEY_COUNT; i++) {
        size_t length = strlen (keys[i].name);
        if (strncmp (word, keys[i].name, length) == 0 && word[length] == '=') {
            char *end = NULL;
            set[i] = strtoull (word + length + 1, &end, 10);
            return end != word + length + 1 && *end == '\0';
        }
    }
    return false;
}

/* Opening with `config` gives `expected`, no client, and a sentence that holds `word`. */
static bool
refuses (const char *claim, const gq_client_config *config, gq_status expected, const char *word)
{
    gq_error error = {""};
    gq_client *client = (gq_client *)(uintptr_t)1;
    gq_status status = gq_client_open (&client, config, &error);
    bool good = status == expected && client == NULL && strstr (error.text, word) != NULL;
    printf ("%s %s: %s: %s\n", good ? "ok  " : "FAIL", claim, gq_status_name (status), error.text);
    return good;
}

static int
check_alone (void)
{
    gq_client_config good = GQ_CLIENT_CONFIG;
    good.address = "ipc:///nonexistent/gradq"; /* no broker can ever be there */
    good.timeout_ms = 50;
    int failures = 0;
    gq_client_config config = good;
    failures += !refuses ("nobody answers", &config, GQ_UNREACHABLE, "/nonexistent/gradq");
    config.address = NULL;
    failures += !refuses ("no address", &config, GQ_INVALID, "address");
    config.address = "http://localhost";
    failures += !refuses ("a foreign transport", &config, GQ_INVALID, "tcp://HOST:PORT");
    config = good, config.window = 0;
    failures += !refuses ("a window of 0", &config, GQ_INVALID, "window");
    config = good, config.window = GQ_WINDOW_MAX + 1;
    failures += !refuses ("a window above the map", &config, GQ_INVALID, "window");
    config = good, config.actor = GQ_ACTORS_MAX;
    failures += !refuses ("an actor id that is too high", &config, GQ_INVALID, "actor");
    config = good, config.resend_ms = 0;
    failures += !refuses ("no time for an answer", &config, GQ_INVALID, "resend_ms");
    config = good, config.lane = "carrier pigeon";
    failures += !refuses ("an unknown lane", &config, GQ_INVALID, "lane");
    config = good, config.encoding = "f16";
    failures += !refuses ("an unknown encoding", &config, GQ_INVALID, "encoding");
    gq_tensor_shape empty = {.name = "w", .rank = 1, .shape = {0}};
    config = good, config.tensors = &empty, config.tensor_count = 1;
    failures += !refuses ("a tensor without elements", &config, GQ_INVALID, "no elements");
    gq_tensor_shape one = {.name = "w", .rank = 1, .shape = {1}};
    config = good, config.tensors = &one, config.tensor_count = 1, config.initial = &(float){NAN};
    failures += !refuses ("first weights that are not finite", &config, GQ_NONFINITE, "NaN");
    config = good, config.interrupted = stopped;
    stop = 1;
    failures += !refuses ("an interrupted wait", &config, GQ_CLOSED, "interrupted");
    gq_client *client = NULL;
    failures += gq_client_close (&client) != GQ_OK; /* as free: nothing to do */
    printf ("%d of 12 checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}

int
main (int argc, char **argv)
{
    if (argc == 1)
        return check_alone ();
    uint64_t set[KEY_COUNT];
    for (size_t i = 0; i < KEY_COUNT; i++)
        set[i] = keys[i].value;
    for (int i = 2; i < argc; i++)
        if (!take_word (argv[i], set)) {
            fprintf (stderr, "main_client: %s: key=NUMBER is needed\n", argv[i]);
            return 2;
        }
    sigset_t go;
    sigemptyset (&go);
    sigaddset (&go, SIGUSR1);
    sigprocmask (SIG_BLOCK, &go, NULL); /* before ZeroMQ's threads, which inherit it */
    signal (SIGTERM, on_signal);
    signal (SIGINT, on_signal);
    return run (argv[1], set);
}
