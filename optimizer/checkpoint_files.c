/*
 * Which checkpoints a directory holds, what is called how in one, and what its bytes hash to.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* XXH64_state_t on the stack */
#include <xxhash.h>

#include "checkpoint.h"
#include "checkpoint_internal.h"

#define PREFIX "checkpoint-"
#define SUFFIX ".safetensors"

/* Version in "checkpoint-VERSION.safetensors"; false for any other name. */
static bool
version_of (const char *name, uint64_t *version)
{
    size_t length = strlen (name);
    size_t prefix = strlen (PREFIX);
    size_t suffix = strlen (SUFFIX);
    if (length <= prefix + suffix || strncmp (name, PREFIX, prefix) != 0 ||
        strcmp (name + length - suffix, SUFFIX) != 0)
        return false;
    char *end = NULL;
    errno = 0;
    *version = strtoull (name + prefix, &end, 10);
    return errno == 0 && end == name + length - suffix;
}

static int
newest_first (const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return left < right ? 1 : left > right ? -1 : 0;
}

/* Versions of the checkpoints in `directory`, newest first; *versions is the caller's to free. */
size_t
gq_checkpoint_list (const char *directory, uint64_t **versions)
{
    *versions = NULL;
    DIR *entries = opendir (directory);
    if (entries == NULL)
        return 0;
    size_t count = 0;
    size_t room = 0;
    uint64_t version;
    for (struct dirent *entry = readdir (entries); entry != NULL; entry = readdir (entries)) {
        if (!version_of (entry->d_name, &version))
            continue;
        if (count == room) {
            room = room == 0 ? 16 : 2 * room;
            uint64_t *grown = realloc (*versions, room * sizeof *grown);
            if (grown == NULL)
                break;
            *versions = grown;
        }
        (*versions)[count++] = version;
    }
    closedir (entries);
    if (count > 0)
        qsort (*versions, count, sizeof **versions, newest_first);
    return count;
}

int
gq_checkpoint_path (char path[PATH_MAX], const char *directory, uint64_t version)
{
    int length = snprintf (path, PATH_MAX, "%s/" PREFIX "%012llu" SUFFIX, directory,
                           (unsigned long long)version);
    return length > 0 && length < PATH_MAX;
}

bool
gq_checkpoint_any (const char *directory)
{
    uint64_t *versions;
    size_t count = gq_checkpoint_list (directory, &versions);
    free (versions);
    return count > 0;
}

void
gq_checkpoint_retired_prefix (char prefix[GQ_CHECKPOINT_NAME_MAX - GQ_NAME_MAX],
                              const gq_rule_state *state, size_t slot)
{
    snprintf (prefix, GQ_CHECKPOINT_NAME_MAX - GQ_NAME_MAX, GQ_RETIRED_NAME ".%s.%s.", state->name,
              state->slot_names[slot]);
}

uint64_t
gq_checkpoint_hash (const gq_tensor *tensors, size_t count)
{
    XXH64_state_t state;
    XXH64_reset (&state, 0);
    for (size_t i = 0; i < count; i++)
        XXH64_update (&state, tensors[i].data, tensors[i].bytes);
    return XXH64_digest (&state);
}

/* Order does not matter: a reader may meet the entries in another one. */
uint64_t
gq_checkpoint_meta_hash (const gq_meta *meta, size_t meta_count, const gq_tensor *tensors,
                         size_t tensor_count)
{
    uint64_t sum = 0;
    XXH64_state_t state;
    for (size_t i = 0; i < meta_count; i++) {
        if (strcmp (meta[i].key, GQ_CHECKPOINT_META_HASH) == 0)
            continue;
        XXH64_reset (&state, 0);
        XXH64_update (&state, meta[i].key, strlen (meta[i].key) + 1);
        XXH64_update (&state, meta[i].value, strlen (meta[i].value) + 1);
        sum += XXH64_digest (&state);
    }
    XXH64_reset (&state, 0);
    for (size_t i = 0; i < tensor_count; i++)
        XXH64_update (&state, tensors[i].name, strlen (tensors[i].name) + 1);
    return sum + XXH64_digest (&state);
}
