/*
 * Fuzzer of the checkpoint reader behind its hashes: layout, life, ledger, the retired rule, the
 * step being aggregated, and the tensors that they speak of.
 *
 * For any contents: loading gives a status with a sentence, or a core whose parts fit one another;
 * such a core is written and read back to the same bytes, and can go on under another rule.
 *
 * Input: lines.  "KEY=VALUE" is an entry of __metadata__; "@NAME DIM DIM ..." a float32 tensor with
 * values that name and place determine, and "!NAME DIM ..." one that begins with a NaN.  The hashes
 * are added and right.
 */
#include "fuzz_testing.h"

#include <inttypes.h>
#include <limits.h>
#include <xxhash.h>

#include "log.h"
#include "optimizer/checkpoint.h"
#include "optimizer/checkpoint_internal.h"
#include "optimizer/life.h"

enum { LINES_MAX = 64, ELEMENTS_MAX = 64, INPUT_MAX = 16384 };

static char directories[3][64]; /* of the input; of what was made of it; of that once more */
static char plugins[PATH_MAX];
static gq_core cores[2];

/* What a line of the input becomes. */
typedef struct contents {
    char text[INPUT_MAX + 1];
    gq_tensor tensors[LINES_MAX];
    float values[LINES_MAX][ELEMENTS_MAX];
    size_t tensor_count;
    gq_meta meta[LINES_MAX + 2];
    size_t meta_count;
    char hash[20], meta_hash[20];
} contents;

static void
remove_directories (void)
{
    for (size_t i = 0; i < 3; i++) {
        uint64_t *versions;
        char path[PATH_MAX];
        size_t count = gq_checkpoint_list (directories[i], &versions);
        for (size_t k = 0; k < count; k++)
            if (gq_checkpoint_path (path, directories[i], versions[k]))
                unlink (path);
        free (versions);
        rmdir (directories[i]);
    }
}

static void
begin (void)
{
    if (*plugins != '\0')
        return;
    ssize_t length = readlink ("/proc/self/exe", plugins, sizeof plugins - 32);
    REQUIRE (length > 0);
    plugins[length] = '\0';
    for (int up = 0; up < 2; up++) /* build/fuzz/fuzz_checkpoint: they lie in build/plugins */
        *strrchr (plugins, '/') = '\0';
    strcat (plugins, "/plugins");
    REQUIRE (gq_log_open ("fuzz", "/dev/null", GQ_LOG_ERROR, NULL) == GQ_OK);
    for (size_t i = 0; i < 3; i++)
        fuzz_directory (directories[i]);
    atexit (remove_directories);
}

/* ---- the input ---- */

static void
add_tensor (contents *self, char *line, int nan)
{
    gq_tensor *tensor = &self->tensors[self->tensor_count];
    float *values = self->values[self->tensor_count];
    uint64_t count = 1;
    char *at = strchr (line, ' ');
    *tensor = (gq_tensor){.name = line, .dtype = GQ_DTYPE_F32, .data = values};
    if (at != NULL)
        *at++ = '\0';
    while (at != NULL && *at >= '0' && *at <= '9' && tensor->rank < GQ_RANK_MAX) {
        uint64_t dimension = strtoull (at, &at, 10);
        if (dimension > ELEMENTS_MAX || (count *= dimension) > ELEMENTS_MAX)
            return;
        tensor->shape[tensor->rank++] = dimension;
        at += *at == ' ' ? 1 : 0;
    }
    uint64_t seed = XXH64 (line, strlen (line), 0);
    for (uint64_t i = 0; i < count; i++)
        values[i] = (float)((seed >> i % 32) % 4096) / 64 - 16;
    if (nan && count > 0)
        memset (values, 0xff, sizeof *values);
    tensor->element_count = count;
    tensor->bytes = count * sizeof *values;
    self->tensor_count++;
}

static void
add_line (contents *self, char *line)
{
    char *value = strchr (line, '=');
    if ((*line == '@' || *line == '!') && self->tensor_count < LINES_MAX) {
        add_tensor (self, line + 1, *line == '!');
    } else if (value != NULL && self->meta_count < LINES_MAX) {
        *value++ = '\0';
        if (strcmp (line, "data_xxh64") != 0 && strcmp (line, GQ_CHECKPOINT_META_HASH) != 0)
            self->meta[self->meta_count++] = (gq_meta){.key = line, .value = value};
    }
}

/* A file of it, with right hashes; 0: such a file cannot be. */
static int
write_contents (contents *self)
{
    char path[PATH_MAX];
    const uint64_t data = gq_checkpoint_hash (self->tensors, self->tensor_count);
    snprintf (self->hash, sizeof self->hash, "%016" PRIx64, data);
    self->meta[self->meta_count++] = (gq_meta){.key = "data_xxh64", .value = self->hash};
    const uint64_t meta =
        gq_checkpoint_meta_hash (self->meta, self->meta_count, self->tensors, self->tensor_count);
    snprintf (self->meta_hash, sizeof self->meta_hash, "%016" PRIx64, meta);
    self->meta[self->meta_count++] =
        (gq_meta){.key = GQ_CHECKPOINT_META_HASH, .value = self->meta_hash};
    return gq_checkpoint_path (path, directories[0], 0) &&
           gq_safetensors_write (path, self->tensors, self->tensor_count, self->meta,
                                 self->meta_count, NULL) == GQ_OK;
}

/* ---- what is made of it ---- */

/* What the core borrows. */
typedef struct holder {
    gq_rule *rule;
    gq_life life;
    char *text;
} holder;

/* As recovery does, but a life cannot name any file of this machine. */
static gq_status
prepare (void *context, gq_core *core, const char *life, gq_error *error)
{
    holder *self = context;
    json_t *json = life == NULL ? NULL : json_loads (life, 0, NULL);
    gq_status status = gq_life_from_json (&self->life, json);
    json_decref (json);
    if (status != GQ_OK)
        return gq_fail (error, status, "the life is not readable");
    if (strcmp (self->life.plugin, "adam") != 0 && strcmp (self->life.plugin, "sgd") != 0)
        return gq_fail (error, GQ_NOTFOUND, "no such rule");
    status = gq_life_load (&self->life, &self->rule, plugins, "auto", NULL, error);
    if (status != GQ_OK)
        return status;
    self->text = strdup (life);
    REQUIRE (self->text != NULL);
    gq_core_init (core, &self->life.config, self->rule);
    core->term = self->life.term;
    core->life = self->text;
    return GQ_OK;
}

static void
let_go (gq_core *core, holder *self)
{
    gq_core_clear (core);
    gq_rule_free (&self->rule);
    gq_life_clear (&self->life);
    free (self->text);
}

static gq_status
load (gq_core *core, holder *self, const char *directory)
{
    static const gq_core_config config = {.aggregate = 1};
    gq_error error = {""};
    gq_checkpoint_place place = {0};
    *self = (holder){0};
    gq_core_init (core, &config, NULL);
    gq_status status =
        gq_checkpoint_load (core, directory, UINT64_MAX, prepare, self, &place, &error);
    REQUIRE (status == GQ_OK || status == GQ_MALFORMED || status == GQ_INVALID ||
             status == GQ_NOTFOUND || status == GQ_MEMORY);
    REQUIRE (status == GQ_OK || *error.text != '\0');
    return status;
}

static float
sum_of (const float *vector, uint64_t count)
{
    float sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += vector[i];
    return sum;
}

/* Keeps the compiler from dropping the reads. */
static volatile float read_sum;

static void
check_state (const gq_rule_state *state, uint64_t count)
{
    REQUIRE (state->n == count && state->slot_count <= GQ_SLOTS_MAX);
    REQUIRE (state->scalar_count <= GQ_SCALARS_MAX);
    for (size_t i = 0; i < state->slot_count; i++)
        read_sum += sum_of (state->slots[i], count);
}

static void
check_core (const gq_core *core)
{
    const uint64_t count = core->layout.element_count;
    REQUIRE (core->has_weights && core->layout.tensor_count > 0 && count > 0);
    REQUIRE (gq_all_finite (gq_buffers_current (core->buffers), count));
    check_state (gq_rule_state_of (core->rule), count);
    if (core->retired.name[0] != '\0')
        check_state (&core->retired, count);
    REQUIRE (core->held == 0 || core->held < core->config.aggregate);
    if (core->held > 0)
        read_sum += sum_of (core->sum, count);
    REQUIRE (core->ledger.actor_count <= GQ_ACTORS_MAX);
}

static size_t
read_file (const char *path, char bytes[1 << 20])
{
    FILE *file = fopen (path, "rb");
    REQUIRE (file != NULL);
    size_t size = fread (bytes, 1, 1 << 20, file);
    REQUIRE (size < 1 << 20);
    fclose (file);
    return size;
}

/* Written, read and written again: the same bytes. */
static void
round_trip (gq_core *core)
{
    static char bytes[2][1 << 20];
    char paths[2][PATH_MAX];
    gq_error error = {""};
    holder again;
    gq_status status = gq_checkpoint_write (core, directories[1], 1, paths[0], &error);
    if (status != GQ_OK)
        fprintf (stderr, "%s\n", error.text);
    REQUIRE (status == GQ_OK);
    REQUIRE (load (&cores[1], &again, directories[1]) == GQ_OK);
    memcpy (cores[1].run, core->run, sizeof core->run);
    REQUIRE (gq_checkpoint_write (&cores[1], directories[2], 1, paths[1], &error) == GQ_OK);
    let_go (&cores[1], &again);
    size_t size = read_file (paths[0], bytes[0]);
    REQUIRE (read_file (paths[1], bytes[1]) == size);
    REQUIRE (memcmp (bytes[0], bytes[1], size) == 0);
    unlink (paths[0]);
    unlink (paths[1]);
}

/* Each actor's next gradient, and then the other rule. */
static void
go_on (gq_core *core)
{
    static const gq_core_config config = {.aggregate = 1};
    const char *name = strcmp (gq_rule_plugin (core->rule)->name, "sgd") == 0 ? "adam" : "sgd";
    gq_rule *old = core->rule, *rule = NULL;
    for (uint32_t i = 0; i < core->ledger.actor_count; i++) {
        const gq_ledger_entry *entry = &core->ledger.actors[i];
        const uint64_t next = entry->received.cumulative + 1;
        (void)gq_ledger_ack (&core->ledger, i);
        if (gq_ledger_judge (&core->ledger, i, entry->epoch, next) != GQ_OK)
            continue;
        gq_ledger_enter (&core->ledger, i, next);
        gq_ledger_settle (&core->ledger, i);
    }
    REQUIRE (gq_rule_load (&rule, name, plugins, NULL, 0, "auto", NULL, NULL) == GQ_OK);
    if (gq_core_check_layout (rule, &core->layout, NULL) == GQ_OK) {
        REQUIRE (gq_core_switch (core, &config, rule) == GQ_OK);
        REQUIRE (core->held == 0);
        REQUIRE (strcmp (core->retired.name, gq_rule_plugin (old)->name) == 0);
        check_state (gq_rule_state_of (rule), core->layout.element_count);
        check_state (&core->retired, core->layout.element_count);
    }
    gq_core_clear (core);
    gq_rule_free (&rule);
}

int
LLVMFuzzerTestOneInput (const uint8_t *data, size_t size)
{
    static contents input;
    holder held;
    char *rest = input.text, *line;
    if (size > INPUT_MAX || memchr (data, '\0', size) != NULL)
        return 0;
    begin ();
    memcpy (input.text, data, size);
    input.text[size] = '\0';
    input.tensor_count = input.meta_count = 0;
    while ((line = strsep (&rest, "\n")) != NULL)
        add_line (&input, line);
    if (!write_contents (&input))
        return 0;
    if (load (&cores[0], &held, directories[0]) == GQ_OK) {
        check_core (&cores[0]);
        round_trip (&cores[0]);
        go_on (&cores[0]);
    }
    let_go (&cores[0], &held);
    return 0;
}
