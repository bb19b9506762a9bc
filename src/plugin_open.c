/*
 * Finding, opening and checking a plug-in.  Before step 5 of a gradient's path.
 *
 * A plug-in is code that the user chose, so nothing guards against what it does; its table is
 * checked all the same, because the mistakes that people make there must not become a crash in the
 * middle of a run.
 *
 * Never leaves the process computing otherwise than before the plug-in was opened.
 */
#include "plugin_open.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "rule_settings.h"
#include "rule_state.h"

/* Names that a "no such rule" message lists; a plug-in directory holds a handful. */
#define LISTED_MAX 64

/* "plugins" beside the running program. */
static gq_status
default_directory (char path[PATH_MAX], gq_error *error)
{
    ssize_t length = readlink ("/proc/self/exe", path, PATH_MAX);
    if (length <= 0 || length >= PATH_MAX)
        return gq_fail (error, GQ_NOTFOUND,
                        "cannot tell where this program lies; name the plug-in directory");
    path[length] = '\0';
    char *slash = strrchr (path, '/');
    size_t room = slash == NULL ? 0 : (size_t)(PATH_MAX - (slash + 1 - path));
    if (room < sizeof "plugins")
        return gq_fail (error, GQ_NOTFOUND, "the program's path is too long: %s", path);
    memcpy (slash + 1, "plugins", sizeof "plugins");
    return GQ_OK;
}

static int
compare_names (const void *a, const void *b)
{
    return strcmp (a, b);
}

/* "There is no rule NAME; DIRECTORY holds adagrad, adam, ...". */
static gq_status
no_such_rule (const char *name, const char *directory, gq_error *error)
{
    char names[LISTED_MAX][GQ_NAME_MAX];
    size_t count = 0;
    DIR *listing = opendir (directory);
    if (listing == NULL)
        return gq_fail (error, GQ_NOTFOUND, "no update rule \"%s\": plug-in directory %s: %s", name,
                        directory, strerror (errno));
    for (struct dirent *entry; count < LISTED_MAX && (entry = readdir (listing)) != NULL;) {
        size_t length = strlen (entry->d_name);
        if (length <= 3 || length - 3 >= GQ_NAME_MAX ||
            strcmp (entry->d_name + length - 3, ".so") != 0)
            continue;
        memcpy (names[count], entry->d_name, length - 3);
        names[count++][length - 3] = '\0';
    }
    closedir (listing);
    qsort (names, count, sizeof *names, compare_names);
    gq_error list = {.text = ""};
    for (size_t i = 0, used = 0; i < count && used < sizeof list.text; i++)
        used += (size_t)snprintf (list.text + used, sizeof list.text - used, "%s%s",
                                  i == 0 ? "" : ", ", names[i]);
    return gq_fail (error, GQ_NOTFOUND,
                    "no update rule \"%s\" in %.400s, which holds: %s.  A plug-in of your own is "
                    "named by its path: ./%s.so",
                    name, directory, count == 0 ? "nothing" : list.text, name);
}

static gq_status
find (char path[PATH_MAX], const char *name, const char *directory, gq_error *error)
{
    size_t length = strlen (name);
    bool is_path =
        strchr (name, '/') != NULL || (length >= 3 && strcmp (name + length - 3, ".so") == 0);
    char beside[PATH_MAX];
    int written;
    if (length == 0)
        return gq_fail (error, GQ_NOTFOUND, "the name of the update rule is empty");
    if (is_path) {
        /* dlopen would look for a bare file name in the system's library path */
        written = snprintf (path, PATH_MAX, "%s%s", strchr (name, '/') == NULL ? "./" : "", name);
    } else {
        if (directory == NULL) {
            gq_status status = default_directory (beside, error);
            if (status != GQ_OK)
                return status;
            directory = beside;
        }
        written = snprintf (path, PATH_MAX, "%s/%s.so", directory, name);
    }
    if (written < 0 || written >= PATH_MAX)
        return gq_fail (error, GQ_NOTFOUND, "the plug-in's path is too long: %.200s ...", path);
    if (access (path, R_OK) == 0)
        return GQ_OK;
    if (!is_path && errno == ENOENT)
        return no_such_rule (name, directory, error);
    return gq_fail (error, GQ_NOTFOUND, "plug-in %.400s: %s", path, strerror (errno));
}

/* dlopen.  What the library's constructors do to the floating-point unit is undone and reported. */
static gq_status
open_library (void **library, const char *path, gq_error *warning, gq_error *error)
{
#if defined(__x86_64__)
    const unsigned control = ~0x3fu; /* the low six bits are flags of past exceptions */
    unsigned before = _mm_getcsr ();
    *library = dlopen (path, RTLD_NOW | RTLD_LOCAL);
    unsigned after = _mm_getcsr ();
    if ((before & control) != (after & control)) {
        _mm_setcsr (before);
        (void)gq_fail (warning, GQ_OK,
                       "plug-in %.400s changed how the whole process rounds (MXCSR %#x to %#x), as "
                       "-ffast-math does; changed back.  Rebuild it without -ffast-math: its "
                       "results may differ from one CPU to the next",
                       path, before, after);
    }
#else
    (void)warning;
    *library = dlopen (path, RTLD_NOW | RTLD_LOCAL);
#endif
    if (*library == NULL)
        return gq_fail (error, GQ_INVALID, "plug-in cannot be loaded: %.900s", dlerror ());
    return GQ_OK;
}

/* ---- checking the table ---- */

/* Names[] of slots or scalars: few enough, words, none twice in `names` or in `others`. */
static gq_status
check_names (size_t *count, const char *const *names, size_t max, const char *const *others,
             size_t other_count, const char *what, const char *path, gq_error *error)
{
    if (names == NULL)
        return gq_fail (error, GQ_INVALID, "%.400s: no list of %s; none is {NULL}", path, what);
    for (*count = 0; names[*count] != NULL; ++*count) {
        const char *name = names[*count];
        if (*count == max)
            return gq_fail (error, GQ_INVALID, "%.400s: more than %zu %s, or no NULL at their end",
                            path, max, what);
        if (!gq_rule_word (name))
            return gq_fail (error, GQ_INVALID, "%.400s: %s: \"%.64s\" is not of a-z, 0-9 and _",
                            path, what, name);
        for (size_t i = 0; i < *count; i++)
            if (strcmp (names[i], name) == 0)
                return gq_fail (error, GQ_INVALID, "%.400s: %s: %s twice", path, what, name);
        for (size_t i = 0; i < other_count; i++)
            if (strcmp (others[i], name) == 0)
                return gq_fail (error, GQ_INVALID, "%.400s: %s is both slot and scalar", path,
                                name);
    }
    return GQ_OK;
}

static gq_status
check_settings (const gq_optimizer *plugin, const char *path, gq_error *error)
{
    const gq_setting *rows = plugin->settings;
    if (rows == NULL)
        return gq_fail (error, GQ_INVALID,
                        "%.400s: no settings table; one without rows is {{.name = NULL}}", path);
    for (size_t count = 0; rows[count].name != NULL; count++) {
        const char *name = rows[count].name;
        if (count == GQ_SETTINGS_MAX)
            return gq_fail (error, GQ_INVALID,
                            "%.400s: more than %d settings, or no NULL name at their end", path,
                            GQ_SETTINGS_MAX);
        gq_status status = gq_setting_check (&rows[count], plugin->name, error);
        if (status != GQ_OK)
            return status;
        for (size_t i = 0; i < count; i++)
            if (strcmp (rows[i].name, name) == 0)
                return gq_fail (error, GQ_INVALID, "%.400s: setting %s twice", path, name);
        for (size_t i = 0; i < GQ_HOST_SETTING_COUNT; i++)
            if (strcmp (gq_host_settings[i].name, name) == 0)
                return gq_fail (error, GQ_INVALID,
                                "%.400s: setting %s belongs to the host; call it otherwise", path,
                                name);
    }
    return GQ_OK;
}

static gq_status
check_plugin (const gq_optimizer *plugin, const char *path, gq_error *error)
{
    /* The ABI number comes first in every version, so it may be read before the size is known. */
    if (plugin->abi != GQ_OPTIMIZER_ABI)
        return gq_fail (error, GQ_ABI,
                        "%.400s was built for plug-in ABI %u, this program has ABI %d; rebuild it "
                        "against this gradq's gradq/optimizer.h",
                        path, plugin->abi, GQ_OPTIMIZER_ABI);
    if (plugin->size != sizeof (gq_optimizer))
        return gq_fail (error, GQ_ABI,
                        "%.400s: its gq_optimizer has %u bytes, this program's %zu; set .size = "
                        "sizeof (gq_optimizer) and rebuild it",
                        path, plugin->size, sizeof (gq_optimizer));
    if (plugin->name == NULL || !gq_rule_word (plugin->name))
        return gq_fail (error, GQ_INVALID, "%.400s: its name is not of a-z, 0-9 and _", path);
    if (plugin->help == NULL)
        return gq_fail (error, GQ_INVALID, "%.400s: no help text", path);
    if (plugin->begin == NULL || plugin->apply[GQ_CPU_BASE] == NULL)
        return gq_fail (error, GQ_INVALID, "%.400s: no %s", path,
                        plugin->begin == NULL ? "begin" : "apply[GQ_CPU_BASE]");
    size_t slots = 0, scalars = 0;
    gq_status status =
        check_names (&slots, plugin->slots, GQ_SLOTS_MAX, NULL, 0, "slots", path, error);
    if (status == GQ_OK)
        status = check_names (&scalars, plugin->scalars, GQ_SCALARS_MAX, plugin->slots, slots,
                              "scalars", path, error);
    if (status == GQ_OK)
        status = check_settings (plugin, path, error);
    return status;
}

gq_status
gq_plugin_open (void **library_p, const gq_optimizer **plugin_p, const char *name,
                const char *directory, gq_error *warning, gq_error *error)
{
    char path[PATH_MAX];
    void *library = NULL;
    gq_status status = find (path, name, directory, error);
    if (status == GQ_OK)
        status = open_library (&library, path, warning, error);
    if (status != GQ_OK)
        return status;
    const gq_optimizer *plugin = dlsym (library, GQ_OPTIMIZER_SYMBOL);
    if (plugin == NULL)
        status = gq_fail (error, GQ_INVALID,
                          "%.400s is no plug-in: it exports no %s (see docs/PLUGINS.md; with "
                          "-fvisibility=hidden it needs visibility \"default\")",
                          path, GQ_OPTIMIZER_SYMBOL);
    else
        status = check_plugin (plugin, path, error);
    if (status != GQ_OK) {
        dlclose (library);
        return status;
    }
    *library_p = library;
    *plugin_p = plugin;
    return GQ_OK;
}
