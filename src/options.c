/*
 * Options of every process: command line over GRADQ_* environment over INI file over default, all
 * read through the one table.  Before a gradient's path begins.
 *
 * It must never know an option by name, except --config, --help and --version, and must never
 * let a word that nobody understands pass: it would be a setting that silently does nothing.
 */
#include "options.h"
#include "options_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gradq/gradq.h"

/* From the weakest to the strongest. */
typedef enum source {
    SOURCE_DEFAULT,
    SOURCE_INI_COMMON,
    SOURCE_INI_PROGRAM,
    SOURCE_ENVIRONMENT,
    SOURCE_COMMAND_LINE
} source;

#define ROWS_MAX 128 /* rows of the table, for tables of names on the stack */
/* Room for "FILE:LINE: name" and for a variable's name. */
#define WHERE_BYTES 512

struct gq_options {
    gq_program program;
    const char *config;      /* the INI file's path, borrowed; NULL: none */
    gq_option_value *values; /* [row count of the whole table] */
    source *sources;         /* [row count of the whole table] */
};

static const gq_program all_programs[] = {GQ_PROGRAM_BROKER, GQ_PROGRAM_OPTIMIZER, GQ_PROGRAM_ACTOR,
                                          GQ_PROGRAM_TOP,    GQ_PROGRAM_TRY,       GQ_PROGRAM_BENCH,
                                          GQ_PROGRAM_REPLAY, GQ_PROGRAM_EXPORTER};
#define PROGRAM_COUNT (sizeof all_programs / sizeof all_programs[0])

static size_t
row_count (void)
{
    size_t count = 0;
    while (gq_option_table[count].name != NULL)
        count++;
    assert (count > 0 && count <= ROWS_MAX);
    return count;
}

/* The row behind the last has no programs. */
static bool
takes (gq_program program, size_t row)
{
    return (gq_option_table[row].programs & (unsigned)program) != 0;
}

/* Index of the row called name[bytes]: the program's own, else the first; row_count () when there
 * is none. */
static size_t
find_row (gq_program program, const char *name, size_t bytes)
{
    size_t found = row_count ();
    for (size_t i = row_count (); i-- > 0;)
        if (strncmp (gq_option_table[i].name, name, bytes) == 0 &&
            gq_option_table[i].name[bytes] == '\0' && !takes (program, found))
            found = i;
    return found;
}

static const char *
first_taker (size_t row)
{
    size_t i = 0;
    while (!takes (all_programs[i], row))
        i++;
    return gq_program_name (all_programs[i]);
}

/* Keep `word` as the row's value unless a stronger source has spoken; check it in any case. */
static gq_status
set_value (gq_options *options, size_t row, source from, const char *word, const char *where,
           gq_error *error)
{
    const gq_option_row *definition = &gq_option_table[row];
    const bool append = definition->type == GQ_OPTION_LIST && from == options->sources[row] &&
                        from != SOURCE_DEFAULT;
    gq_option_value value = append ? options->values[row] : (gq_option_value){0};
    gq_status status =
        gq_option_value_parse (&value, definition, word, from != SOURCE_COMMAND_LINE, where, error);

    if (append) {
        options->values[row] = value;
    } else if (status == GQ_OK && from >= options->sources[row]) {
        gq_option_value_clear (&options->values[row]);
        options->values[row] = value;
        options->sources[row] = from;
    } else {
        gq_option_value_clear (&value);
    }
    return status;
}

/* ---- command line ----------------------------------------------------------------------- */

/* `word` is no option of the program: say whose it is, or which one was meant. */
static gq_status
unknown_option (gq_program program, const char *word, size_t bytes, gq_error *error)
{
    static const char *const own[] = {"config", "help", "version"};
    const char *names[ROWS_MAX + 3], *program_name = gq_program_name (program);
    char name[GQ_NEAREST_BYTES_MAX + 1] = "";
    size_t count = 0, row = find_row (program, word, bytes);

    if (gq_option_table[row].name != NULL)
        return gq_fail (error, GQ_INVALID,
                        "--%.*s: an option of %s, not of %s (%s --help lists all)", (int)bytes,
                        word, first_taker (row), program_name, program_name);
    for (size_t i = 0; gq_option_table[i].name != NULL; i++) {
        if (takes (program, i))
            names[count++] = gq_option_table[i].name;
    }
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        names[count++] = own[i];
    if (bytes < sizeof name)
        memcpy (name, word, bytes);
    const char *near = gq_nearest (name, names, count);
    return gq_fail (error, GQ_INVALID, "--%.*s: no such option of %s%s%s%s (%s --help lists all)",
                    (int)(bytes < 100 ? bytes : 100), word, program_name,
                    near != NULL ? "; did you mean --" : "", near != NULL ? near : "",
                    near != NULL ? "?" : "", program_name);
}

/* The value of option `word` (without "--"): after '=', or the next argument. */
static gq_status
take_value (const char *word, size_t bytes, int argc, char **argv, int *next, const char **value,
            gq_error *error)
{
    if (word[bytes] == '=') {
        *value = word + bytes + 1;
        return GQ_OK;
    }
    if (*next >= argc)
        return gq_fail (error, GQ_INVALID, "--%s: needs a value", word);
    if (strncmp (argv[*next], "--", 2) == 0)
        return gq_fail (error, GQ_INVALID,
                        "--%s: needs a value; if it is '%.100s', write --%s=%.100s", word,
                        argv[*next], word, argv[*next]);
    *value = argv[(*next)++];
    return GQ_OK;
}

static gq_status
read_flag (gq_options *options, size_t row, const char *word, size_t bytes, bool set,
           gq_error *error)
{
    if (word[bytes] == '=')
        return gq_fail (error, GQ_INVALID, "--%.*s: takes no value; write --%s or --no-%s",
                        (int)bytes, word, gq_option_table[row].name, gq_option_table[row].name);
    return set_value (options, row, SOURCE_COMMAND_LINE, set ? "1" : "0", word, error);
}

/* One option, `word` without its "--", and perhaps the argument after it.  GQ_AGAIN: it asked for
 * help or the version, which is printed. */
static gq_status
read_option (gq_options *options, const char *word, int argc, char **argv, int *next,
             gq_error *error)
{
    const size_t bytes = strcspn (word, "=");
    size_t row = find_row (options->program, word, bytes);
    const char *value = NULL;
    char where[WHERE_BYTES];

    if (strcmp (word, "help") == 0) {
        gq_option_print_help (stdout, options->program);
        return GQ_AGAIN;
    }
    if (strcmp (word, "version") == 0) {
        printf ("%s %s\n", gq_program_name (options->program), GQ_VERSION_STRING);
        return GQ_AGAIN;
    }
    if (takes (options->program, row) && gq_option_table[row].type == GQ_OPTION_FLAG)
        return read_flag (options, row, word, bytes, true, error);
    if (strncmp (word, "no-", 3) == 0 && bytes > 3) {
        const size_t flag = find_row (options->program, word + 3, bytes - 3);
        if (takes (options->program, flag) && gq_option_table[flag].type == GQ_OPTION_FLAG)
            return read_flag (options, flag, word, bytes, false, error);
    }
    const bool config = bytes == strlen ("config") && strncmp (word, "config", bytes) == 0;
    if (!config && !takes (options->program, row))
        return unknown_option (options->program, word, bytes, error);

    gq_status status = take_value (word, bytes, argc, argv, next, &value, error);
    if (status != GQ_OK)
        return status;
    if (config) {
        options->config = value;
        return *value != '\0' ? GQ_OK : gq_fail (error, GQ_INVALID, "--config: the name is empty");
    }
    snprintf (where, sizeof where, "--%s", gq_option_table[row].name);
    return set_value (options, row, SOURCE_COMMAND_LINE, value, where, error);
}

static gq_status
read_command_line (gq_options *options, int argc, char **argv, gq_error *error)
{
    gq_status status = GQ_OK;
    for (int next = 1; next < argc && status == GQ_OK;) {
        const char *word = argv[next++];
        if (strncmp (word, "--", 2) == 0 && word[2] != '\0')
            status = read_option (options, word + 2, argc, argv, &next, error);
        else
            status = gq_fail (error, GQ_INVALID,
                              "'%.100s': %s takes options only, and they begin with -- (%s --help "
                              "lists all)",
                              word, gq_program_name (options->program),
                              gq_program_name (options->program));
    }
    return status;
}

/* ---- environment ------------------------------------------------------------------------ */

/* name[bytes] is a GRADQ_* variable that no row has. */
static gq_status
unknown_variable (const char *name, size_t bytes, gq_error *error)
{
    char env_names[ROWS_MAX][GQ_OPTION_NAME_MAX + 8];
    const char *names[ROWS_MAX + 1];
    char word[GQ_NEAREST_BYTES_MAX + 1] = "";
    size_t count = 0;

    for (size_t i = 0; gq_option_table[i].name != NULL; i++) {
        gq_option_env_name (gq_option_table[i].name, env_names[count]);
        names[count] = env_names[count];
        count++;
    }
    names[count++] = "GRADQ_CONFIG";
    if (bytes < sizeof word)
        memcpy (word, name, bytes);
    const char *near = gq_nearest (word, names, count);
    return gq_fail (error, GQ_MALFORMED, "%.*s (environment): no option has this name%s%s%s",
                    (int)(bytes < 100 ? bytes : 100), name,
                    near != NULL ? "; did you mean " : "; unset it", near != NULL ? near : "",
                    near != NULL ? "?" : "");
}

static gq_status
read_variable (gq_options *options, const char *entry, gq_error *error)
{
    const size_t bytes = strcspn (entry, "=");
    const char *value = entry[bytes] == '=' ? entry + bytes + 1 : "";
    char env_name[GQ_OPTION_NAME_MAX + 8], where[WHERE_BYTES];
    bool known = false;

    for (size_t i = 0; gq_option_table[i].name != NULL; i++) {
        gq_option_env_name (gq_option_table[i].name, env_name);
        if (strncmp (env_name, entry, bytes) != 0 || env_name[bytes] != '\0')
            continue;
        known = true;
        if (*value == '\0' || !takes (options->program, i))
            continue;
        snprintf (where, sizeof where, "%s (environment)", env_name);
        gq_status status = set_value (options, i, SOURCE_ENVIRONMENT, value, where, error);
        return status == GQ_INVALID ? GQ_MALFORMED : status;
    }
    if (bytes == strlen ("GRADQ_CONFIG") && strncmp (entry, "GRADQ_CONFIG", bytes) == 0) {
        if (*value != '\0' && options->config == NULL)
            options->config = value;
        return GQ_OK;
    }
    /* The tests' own switches; GRADQ_PYTHON is a row of the actor. */
    if (known || strncmp (entry, "GRADQ_TEST_", strlen ("GRADQ_TEST_")) == 0)
        return GQ_OK;
    return unknown_variable (entry, bytes, error);
}

static gq_status
read_environment (gq_options *options, gq_error *error)
{
    gq_status status = GQ_OK;
    for (char **entry = environ; entry != NULL && *entry != NULL && status == GQ_OK; entry++) {
        if (strncmp (*entry, "GRADQ_", strlen ("GRADQ_")) == 0)
            status = read_variable (options, *entry, error);
    }
    return status;
}

/* ---- INI file --------------------------------------------------------------------------- */

typedef struct ini_state {
    gq_options *options;
    bool seen[ROWS_MAX][2]; /* set in [gradq], set in the program's section */
} ini_state;

/* Who owns `section`: *program is 0 for [gradq]. */
static gq_status
find_section (const char *section, const char *where, unsigned *program, gq_error *error)
{
    const char *names[PROGRAM_COUNT + 1];
    *program = 0;
    names[PROGRAM_COUNT] = "gradq";
    if (strcmp (section, "gradq") == 0)
        return GQ_OK;
    for (size_t i = 0; i < PROGRAM_COUNT; i++) {
        names[i] = gq_program_section (all_programs[i]);
        if (strcmp (section, names[i]) == 0) {
            *program = (unsigned)all_programs[i];
            return GQ_OK;
        }
    }
    if (*section == '\0')
        return gq_fail (error, GQ_MALFORMED,
                        "%s: stands before any section; write [gradq] or a program's name above it",
                        where);
    const char *near = gq_nearest (section, names, PROGRAM_COUNT + 1);
    return gq_fail (error, GQ_MALFORMED,
                    "%s: no such section [%.50s]%s%s%s; there are gradq, broker, optimizer, actor, "
                    "top, try, bench",
                    where, section, near != NULL ? "; did you mean [" : "",
                    near != NULL ? near : "", near != NULL ? "]?" : "");
}

/* `key` is no row that section `section` may hold. */
static gq_status
unknown_key (const char *section, unsigned programs, const char *key, const char *where,
             gq_error *error)
{
    const char *names[ROWS_MAX];
    size_t count = 0, row = find_row (0, key, strlen (key));
    if (gq_option_table[row].name != NULL)
        return gq_fail (error, GQ_MALFORMED, "%s: an option of %s; it does not belong in [%s]",
                        where, first_taker (row), section);
    for (size_t i = 0; gq_option_table[i].name != NULL; i++) {
        if ((gq_option_table[i].programs & programs) != 0)
            names[count++] = gq_option_table[i].name;
    }
    const char *near = gq_nearest (key, names, count);
    return gq_fail (error, GQ_MALFORMED, "%s: no such option for [%s]%s%s%s", where, section,
                    near != NULL ? "; did you mean " : "", near != NULL ? near : "",
                    near != NULL ? "?" : "");
}

/* One "key = value" of the file.  The keys of other programs are checked by name only. */
static gq_status
read_key (void *user, const char *section, const char *key, const char *word, const char *where,
          gq_error *error)
{
    ini_state *state = user;
    unsigned program = 0;
    gq_status status = find_section (section, where, &program, error);
    if (status != GQ_OK)
        return status;
    const unsigned programs = program != 0 ? program : ~0U;
    const size_t row =
        find_row (program != 0 ? (gq_program)program : state->options->program, key, strlen (key));
    if ((gq_option_table[row].programs & programs) == 0)
        return unknown_key (section, programs, key, where, error);
    if (!takes (state->options->program, row) ||
        (program != 0 && program != (unsigned)state->options->program))
        return GQ_OK;

    bool *seen = &state->seen[row][program != 0];
    if (*seen && gq_option_table[row].type != GQ_OPTION_LIST)
        return gq_fail (error, GQ_MALFORMED, "%s: set twice in [%s]; remove one", where, section);
    *seen = true;
    status = set_value (state->options, row, program != 0 ? SOURCE_INI_PROGRAM : SOURCE_INI_COMMON,
                        word, where, error);
    return status == GQ_INVALID ? GQ_MALFORMED : status;
}

/* ---- all of them ------------------------------------------------------------------------ */

static void
set_defaults (gq_options *options)
{
    for (size_t i = 0; gq_option_table[i].name != NULL; i++) {
        const gq_option_row *row = &gq_option_table[i];
        gq_error error;
        if (row->fallback == NULL || !takes (options->program, i) ||
            options->sources[i] != SOURCE_DEFAULT)
            continue;
        gq_status status = gq_option_value_parse (&options->values[i], row, row->fallback, true,
                                                  row->name, &error);
        assert (status == GQ_OK); /* or the table is wrong, or a few bytes are not to be had */
    }
}

gq_status
gq_options_read (gq_options **options_p, gq_program program, int argc, char **argv, gq_error *error)
{
    *options_p = NULL;
    gq_options *options = calloc (1, sizeof *options);
    ini_state state = {.options = options};
    if (options == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory");
    options->program = program;
    options->values = calloc (row_count (), sizeof *options->values);
    options->sources = calloc (row_count (), sizeof *options->sources);

    gq_status status = options->values == NULL || options->sources == NULL
                           ? gq_fail (error, GQ_MEMORY, "out of memory")
                           : read_command_line (options, argc, argv, error);
    if (status == GQ_OK)
        status = read_environment (options, error);
    if (status == GQ_OK && options->config != NULL)
        status = gq_ini_read (options->config, read_key, &state, error);
    if (status == GQ_OK) {
        set_defaults (options);
        *options_p = options;
    } else {
        gq_options_free (&options);
    }
    return status;
}

void
gq_options_free (gq_options **options_p)
{
    gq_options *options = *options_p;
    if (options == NULL)
        return;
    for (size_t i = 0; options->values != NULL && i < row_count (); i++)
        gq_option_value_clear (&options->values[i]);
    free (options->values);
    free (options->sources);
    free (options);
    *options_p = NULL;
}

int
gq_options_exit (gq_status status)
{
    switch (status) {
    case GQ_OK:
    case GQ_AGAIN:
        return GQ_EXIT_OK;
    case GQ_INVALID:
        return GQ_EXIT_USAGE;
    case GQ_MALFORMED:
    case GQ_NOTFOUND:
    case GQ_IO:
        return GQ_EXIT_CONFIG;
    default:
        return GQ_EXIT_FAILED;
    }
}

/* ---- what was read ---------------------------------------------------------------------- */

/* The value of row `name`, which must be the program's and of a type in the mask. */
static const gq_option_value *
get (const gq_options *options, const char *name, unsigned types)
{
    const size_t row = find_row (options->program, name, strlen (name));
    assert (takes (options->program, row));
    assert ((1U << gq_option_table[row].type & types) != 0);
    return &options->values[row];
}

const char *
gq_options_text (const gq_options *options, const char *name)
{
    return get (options, name, 1U << GQ_OPTION_TEXT | 1U << GQ_OPTION_CHOICE)->text;
}

uint64_t
gq_options_count (const gq_options *options, const char *name)
{
    return get (options, name, 1U << GQ_OPTION_COUNT | 1U << GQ_OPTION_BYTES)->count;
}

double
gq_options_number (const gq_options *options, const char *name)
{
    return get (options, name, 1U << GQ_OPTION_NUMBER)->number;
}

bool
gq_options_flag (const gq_options *options, const char *name)
{
    return get (options, name, 1U << GQ_OPTION_FLAG)->flag;
}

size_t
gq_options_list (const gq_options *options, const char *name, const char *const **items)
{
    const gq_option_value *value = get (options, name, 1U << GQ_OPTION_LIST);
    *items = (const char *const *)value->items;
    return value->item_count;
}

bool
gq_options_given (const gq_options *options, const char *name)
{
    const gq_option_value *value = get (options, name, ~0U);
    return options->sources[value - options->values] != SOURCE_DEFAULT;
}
