/*
 * Any Gymnasium environment, in a Python child process behind two pipes; all games of one actor in
 * one child.  Step 0 of a gradient's path.
 *
 * Must never run after the process' first ZeroMQ call (it forks), never trust a byte of the child
 * (it runs arbitrary packages), and never wait without an end for it.  gym_child.c starts and ends
 * that child.
 *
 * The child's program is actors/python/gym_bridge.py, which documents the protocol.  Its text is
 * part of this object file and handed over with `python -c`: an installed gradq-actor then works
 * wherever it lies, and program and bridge cannot be of different versions.
 */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "env.h"
#include "gym_child.h"
#include "screen.h"
#include "stats.h"

__asm__(".pushsection .rodata\n"
        ".global gq_gym_bridge_text\n"
        ".hidden gq_gym_bridge_text\n"
        "gq_gym_bridge_text:\n"
        ".incbin \"actors/python/gym_bridge.py\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char gq_gym_bridge_text[] __attribute__ ((visibility ("hidden")));

#define TEXT_BYTES_MAX   1000       /* of an error answer; the bridge keeps below */
#define POLL_MS          100        /* between two looks at `interrupted` */
#define ANSWER_BYTES_MAX (1u << 30) /* of the observations of one answer */

enum { REQUEST_RESET = 1, REQUEST_STEP = 2, REQUEST_PICTURE = 3 };
enum { ANSWER_SPEC = 1, ANSWER_STATE = 2, ANSWER_WRONG = 3, ANSWER_FAILED = 4, ANSWER_PICTURE = 5 };

/* What an observation is on the wire. */
enum format { FORMAT_FLOAT, FORMAT_PLANES, FORMAT_PIXELS, FORMAT_ATARI, FORMATS };

typedef struct gym_request {
    uint32_t kind, index, seeded, unused;
    uint64_t seed;
} gym_request;

typedef struct gym_answer {
    uint32_t kind, bytes;
} gym_answer;

typedef struct outcome_body {
    double reward;
    uint32_t terminated, truncated;
} outcome_body;

typedef struct gym_env {
    gq_env env;
    gq_gym_child child;
    int step_timeout_ms;
    bool (*interrupted) (void);
    enum format format;
    uint32_t wire_bytes; /* of one observation on the wire */
    uint8_t *wire;       /* [wire_bytes] */
    uint8_t *picture;    /* the last one; NULL: none was asked for */
    char name[128];      /* for messages */
} gym_env;

/* Wait until the child has written or gone. */
static gq_status
wait_readable (const gym_env *gym, uint64_t deadline_ns, gq_error *error)
{
    struct pollfd item = {.fd = gym->child.answers, .events = POLLIN};

    for (;;) {
        if (gym->interrupted != NULL && gym->interrupted ())
            return gq_fail (error, GQ_CLOSED, "interrupted");
        int ready = poll (&item, 1, POLL_MS);
        if (ready > 0)
            return GQ_OK;
        if (ready < 0 && errno != EINTR)
            return gq_fail (error, GQ_IO, "gym:%s: poll: %s", gym->name, strerror (errno));
        if (gq_now_ns () >= deadline_ns)
            return gq_fail (error, GQ_TIMEOUT,
                            "gym:%s: the Python process does not answer; it is stuck in the "
                            "environment",
                            gym->name);
    }
}

static gq_status
read_all (const gym_env *gym, void *bytes, size_t size, uint64_t deadline_ns, gq_error *error)
{
    uint8_t *next = bytes;

    while (size > 0) {
        gq_status status = wait_readable (gym, deadline_ns, error);
        if (status != GQ_OK)
            return status;
        ssize_t got = read (gym->child.answers, next, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return gq_fail (error, GQ_IO, "gym:%s: read: %s", gym->name, strerror (errno));
        if (got == 0)
            return gq_fail (error, GQ_IO,
                            "gym:%s: the Python process has ended; its last words are on stderr",
                            gym->name);
        next += got;
        size -= (size_t)got;
    }
    return GQ_OK;
}

/* An error answer's text into *error. */
static gq_status
read_text (const gym_env *gym, const gym_answer *head, uint64_t deadline_ns, gq_error *error)
{
    char text[TEXT_BYTES_MAX + 1] = "";

    if (head->bytes > TEXT_BYTES_MAX)
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", gym->name);
    gq_status status = read_all (gym, text, head->bytes, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    return gq_fail (error, head->kind == ANSWER_WRONG ? GQ_INVALID : GQ_IO, "gym:%s: %s", gym->name,
                    text);
}

/* The head of an answer that must be of `kind`. */
static gq_status
read_head (const gym_env *gym, uint32_t kind, gym_answer *head, uint64_t deadline_ns,
           gq_error *error)
{
    gq_status status = read_all (gym, head, sizeof *head, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    if (head->kind == ANSWER_WRONG || head->kind == ANSWER_FAILED)
        return read_text (gym, head, deadline_ns, error);
    if (head->kind != kind)
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", gym->name);
    return GQ_OK;
}

static uint64_t
deadline_after (int timeout_ms)
{
    return gq_now_ns () + (uint64_t)timeout_ms * 1000000u;
}

/* All bytes of a request.  They are few, and the child reads each request before it answers. */
static gq_status
send_request (const gym_env *gym, const void *bytes, size_t size, gq_error *error)
{
    const uint8_t *next = bytes;

    while (size > 0) {
        ssize_t sent = write (gym->child.requests, next, size);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EPIPE) /* its last words may wait to be read */
            return GQ_OK;
        if (sent < 0)
            return gq_fail (error, GQ_IO, "gym:%s: write: %s", gym->name, strerror (errno));
        next += sent;
        size -= (size_t)sent;
    }
    return GQ_OK;
}

/* gym->wire to the floats that the net sees. */
static void
convert (const gym_env *gym, float *observation)
{
    const gq_env_spec *spec = &gym->env.spec;
    const uint8_t *wire = gym->wire;

    switch (gym->format) {
    case FORMAT_PLANES:
        for (size_t i = 0; i < spec->observation_count; i++)
            observation[i] = (float)wire[i] / 255.0f;
        break;
    case FORMAT_PIXELS: {
        size_t channels = spec->observation_shape[0], places = spec->observation_count / channels;
        for (size_t place = 0; place < places; place++)
            for (size_t c = 0; c < channels; c++)
                observation[c * places + place] = (float)*wire++ / 255.0f;
        break;
    }
    case FORMAT_ATARI:
        gq_screen_reduce (wire, observation);
        break;
    case FORMAT_FLOAT:
    case FORMATS:
        memcpy (observation, wire, spec->observation_count * sizeof *observation);
        break;
    }
}

/* The answer with the states of `count` games. */
static gq_status
read_states (gym_env *gym, uint32_t count, float *observations, outcome_body *outcomes,
             gq_error *error)
{
    uint64_t deadline_ns = deadline_after (gym->step_timeout_ms);
    uint32_t expected = count * ((uint32_t)sizeof *outcomes + gym->wire_bytes);
    gym_answer head;

    gq_status status = read_head (gym, ANSWER_STATE, &head, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    if (head.bytes != expected)
        return gq_fail (error, GQ_IO,
                        "gym:%s: states of %u bytes came, %u were expected: an observation is not "
                        "of its space's size",
                        gym->name, head.bytes, expected);
    for (uint32_t k = 0; status == GQ_OK && k < count; k++) {
        status = read_all (gym, &outcomes[k], sizeof outcomes[k], deadline_ns, error);
        if (status == GQ_OK)
            status = read_all (gym, gym->wire, gym->wire_bytes, deadline_ns, error);
        if (status == GQ_OK)
            convert (gym, observations + k * gym->env.spec.observation_count);
    }
    return status;
}

static gq_status
reset (gq_env *env, uint32_t index, const uint64_t *seed, float *observation, gq_error *error)
{
    gym_env *gym = (gym_env *)env;
    gym_request request = {.kind = REQUEST_RESET,
                           .index = index,
                           .seeded = seed != NULL,
                           .seed = seed != NULL ? *seed : 0};
    outcome_body outcome;

    assert (index < env->count);
    gq_status status = send_request (gym, &request, sizeof request, error);
    if (status == GQ_OK)
        status = read_states (gym, 1, observation, &outcome, error);
    return status;
}

static gq_status
step (gq_env *env, const uint32_t *actions, float *observations, gq_env_outcome *outcomes,
      gq_error *error)
{
    gym_env *gym = (gym_env *)env;
    struct {
        gym_request head;
        uint32_t actions[GQ_ENV_COUNT_MAX];
    } request = {.head = {.kind = REQUEST_STEP}};
    outcome_body bodies[GQ_ENV_COUNT_MAX] = {0};
    size_t action_bytes = env->count * sizeof *actions;

    for (uint32_t k = 0; k < env->count; k++)
        assert (actions[k] < env->spec.action_count);
    memcpy (request.actions, actions, action_bytes);
    gq_status status = send_request (gym, &request, sizeof request.head + action_bytes, error);
    if (status == GQ_OK)
        status = read_states (gym, env->count, observations, bodies, error);
    for (uint32_t k = 0; status == GQ_OK && k < env->count; k++) {
        if (!isfinite (bodies[k].reward))
            status =
                gq_fail (error, GQ_IO, "gym:%s: the environment's reward is not finite", gym->name);
        outcomes[k] = (gq_env_outcome){.reward = (float)bodies[k].reward,
                                       .terminated = bodies[k].terminated != 0,
                                       .truncated = bodies[k].truncated != 0};
    }
    return status;
}

/* The answer with a picture. */
static gq_status
read_picture (gym_env *gym, gq_picture *picture, gq_error *error)
{
    uint64_t deadline_ns = deadline_after (gym->step_timeout_ms);
    uint32_t size[2]; /* height, width */
    gym_answer head;

    gq_status status = read_head (gym, ANSWER_PICTURE, &head, deadline_ns, error);
    if (status == GQ_OK && head.bytes < sizeof size)
        status = gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", gym->name);
    if (status == GQ_OK)
        status = read_all (gym, size, sizeof size, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    if (size[0] < 1 || size[0] > GQ_PICTURE_SIDE_MAX || size[1] < 1 ||
        size[1] > GQ_PICTURE_SIDE_MAX)
        return gq_fail (error, GQ_IO, "gym:%s: a picture of %u x %u pixels; gradq takes 1 to %d",
                        gym->name, size[1], size[0], GQ_PICTURE_SIDE_MAX);
    uint32_t bytes = 3 * size[0] * size[1];
    if (head.bytes != sizeof size + bytes)
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", gym->name);
    uint8_t *rgb = realloc (gym->picture, bytes);
    if (rgb == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a picture of gym:%s", gym->name);
    gym->picture = rgb;
    *picture = (gq_picture){.width = size[1], .height = size[0], .rgb = rgb};
    return read_all (gym, rgb, bytes, deadline_ns, error);
}

static gq_status
picture (gq_env *env, uint32_t index, gq_picture *seen, gq_error *error)
{
    gym_env *gym = (gym_env *)env;
    gym_request request = {.kind = REQUEST_PICTURE, .index = index};

    assert (index < env->count);
    gq_status status = send_request (gym, &request, sizeof request, error);
    if (status == GQ_OK)
        status = read_picture (gym, seen, error);
    return status;
}

static void
destroy (gq_env **env_p)
{
    gym_env *self = (gym_env *)*env_p;

    gq_gym_child_end (&self->child);
    free (self->wire);
    free (self->picture);
    free (self);
    *env_p = NULL;
}

static const gq_env_ops ops = {
    .destroy = destroy, .reset = reset, .step = step, .picture = picture};

/* What an observation is on the wire, and memory for one. */
static gq_status
take_format (gym_env *self, uint32_t format, gq_error *error)
{
    const gq_env_spec *spec = &self->env.spec;
    bool image = spec->observation_rank == 3;
    bool reduced = image && spec->observation_shape[0] == 1 &&
                   spec->observation_shape[1] == GQ_SCREEN_REDUCED &&
                   spec->observation_shape[2] == GQ_SCREEN_REDUCED;

    self->format = (enum format)format;
    if ((format == FORMAT_PIXELS && !image) || (format == FORMAT_ATARI && !reduced))
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", self->name);
    self->wire_bytes = (uint32_t)spec->observation_count;
    if (format == FORMAT_FLOAT)
        self->wire_bytes *= (uint32_t)sizeof (float);
    if (format == FORMAT_ATARI)
        self->wire_bytes = GQ_SCREEN_SIDE * GQ_SCREEN_SIDE;
    if ((uint64_t)self->wire_bytes * self->env.count > ANSWER_BYTES_MAX)
        return gq_fail (error, GQ_INVALID,
                        "gym:%s: %u environments with observations of %u bytes are too many for "
                        "one actor; lower --envs-per-actor",
                        self->name, self->env.count, self->wire_bytes);
    self->wire = malloc (self->wire_bytes);
    if (self->wire == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for gym:%s", self->name);
    return GQ_OK;
}

static gq_status
read_spec (gym_env *self, int timeout_ms, gq_error *error)
{
    struct {
        uint32_t rank, action_count, format, unused;
        uint64_t shape[GQ_RANK_MAX];
    } body;
    size_t fixed = sizeof body - sizeof body.shape;
    gq_env_spec *spec = &self->env.spec;
    uint64_t deadline_ns = deadline_after (timeout_ms);
    gym_answer head;

    gq_status status = read_head (self, ANSWER_SPEC, &head, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    if (head.bytes < fixed || head.bytes > sizeof body)
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", self->name);
    status = read_all (self, &body, head.bytes, deadline_ns, error);
    if (status != GQ_OK)
        return status;
    if (body.rank > GQ_RANK_MAX || body.format >= FORMATS ||
        head.bytes != fixed + body.rank * sizeof body.shape[0])
        return gq_fail (error, GQ_IO, "gym:%s: the bridge broke its protocol", self->name);
    spec->observation_rank = body.rank;
    spec->observation_count = 1;
    spec->action_count = body.action_count;
    for (uint32_t i = 0; i < body.rank; i++) {
        spec->observation_shape[i] = body.shape[i];
        if (body.shape[i] == 0 || body.shape[i] > GQ_ENV_OBSERVATION_MAX ||
            (spec->observation_count *= body.shape[i]) > GQ_ENV_OBSERVATION_MAX)
            return gq_fail (error, GQ_INVALID, "gym:%s: observations may hold 1 to %llu numbers",
                            self->name, (unsigned long long)GQ_ENV_OBSERVATION_MAX);
    }
    if (body.action_count < 1 || body.action_count > GQ_ENV_ACTIONS_MAX)
        return gq_fail (error, GQ_INVALID, "gym:%s: %u actions; gradq takes 1 to %d", self->name,
                        body.action_count, GQ_ENV_ACTIONS_MAX);
    return take_format (self, body.format, error);
}

gq_status
gq_gym_create (gq_env **env_p, const char *id, const gq_env_config *config, gq_error *error)
{
    char python[1024];

    *env_p = NULL;
    size_t count = 0;
    char count_text[16];
    char **arguments = calloc (config->set_count + 8, sizeof *arguments);
    gym_env *self = calloc (1, sizeof *self);
    if (arguments == NULL || self == NULL) {
        free (arguments);
        free (self);
        return gq_fail (error, GQ_MEMORY, "out of memory for gym:%s", id);
    }
    self->env.ops = &ops;
    self->env.count = config->count;
    self->child = (gq_gym_child)GQ_GYM_CHILD;
    self->step_timeout_ms = config->step_timeout_ms;
    self->interrupted = config->interrupted;
    snprintf (self->name, sizeof self->name, "%s", id);

    gq_gym_python (config->python, python, sizeof python);
    /* -u: what an environment prints shows at once.  exec only reads, whatever its type says. */
    arguments[count++] = python;
    arguments[count++] = (char[]){"-u"};
    arguments[count++] = (char[]){"-c"};
    arguments[count++] = (char *)(uintptr_t)gq_gym_bridge_text;
    arguments[count++] = (char *)(uintptr_t)id;
    snprintf (count_text, sizeof count_text, "%u", config->count);
    arguments[count++] = count_text;
    char pictures[] = "pictures", none[] = "none";
    arguments[count++] = config->pictures ? pictures : none;
    for (size_t i = 0; i < config->set_count; i++)
        arguments[count++] = (char *)(uintptr_t)config->sets[i];
    /* calloc left the NULL that ends the list. */
    gq_env *env = &self->env;
    gq_status status = gq_gym_child_start (&self->child, self->name, arguments, error);
    free (arguments);
    if (status == GQ_OK)
        status = read_spec (self, config->start_timeout_ms, error);
    if (status != GQ_OK) {
        destroy (&env);
        return status;
    }
    *env_p = env;
    return GQ_OK;
}
