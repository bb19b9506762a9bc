/*
 * Words to values for the options engine, and the nearest right word for a wrong one.  Before a
 * gradient's path begins.
 *
 * It must never guess: a word that is not wholly a value of the row's type and within its bounds
 * is refused with a sentence that says what is allowed.
 */
#include "options_internal.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* 2^64 as a double: what UINT64_MAX becomes in the table's bounds, and so "no bound". */
#define UNBOUNDED 18446744073709551616.0

static bool
is_unbounded (const gq_option_row *row)
{
    return row->max >= UNBOUNDED;
}

void
gq_option_bounds (const gq_option_row *row, char *text, size_t size)
{
    const char *space = row->unit != NULL ? " " : "", *unit = row->unit != NULL ? row->unit : "";
    switch (row->type) {
    case GQ_OPTION_COUNT:
        if (is_unbounded (row))
            snprintf (text, size, "%.0f or more%s%s, or inf", row->min, space, unit);
        else
            snprintf (text, size, "%.0f to %.0f%s%s", row->min, row->max, space, unit);
        break;
    case GQ_OPTION_BYTES:
        snprintf (text, size, "%.0f to %.0f bytes, K, M, G for powers of 1024", row->min, row->max);
        break;
    case GQ_OPTION_NUMBER:
        snprintf (text, size, "%g to %g%s%s", row->min, row->max, space, unit);
        break;
    case GQ_OPTION_CHOICE:
    case GQ_OPTION_TEXT:
    case GQ_OPTION_FLAG:
    case GQ_OPTION_LIST:
        text[0] = '\0';
        break;
    }
}

/* Digits at the start of word; *end is behind them.  false: none, or over 64 bits. */
static bool
parse_digits (const char *word, uint64_t *number, const char **end)
{
    uint64_t value = 0;
    const char *next = word;
    for (; *next >= '0' && *next <= '9'; next++) {
        if (__builtin_mul_overflow (value, UINT64_C (10), &value) ||
            __builtin_add_overflow (value, (uint64_t)(*next - '0'), &value))
            return false;
    }
    *number = value;
    *end = next;
    return next > word;
}

/* Exact: bounds of the table are integers below 2^53, which doubles hold, or UNBOUNDED. */
static bool
count_in_bounds (const gq_option_row *row, uint64_t count)
{
    return count >= (uint64_t)row->min && (is_unbounded (row) || count <= (uint64_t)row->max);
}

static bool
parse_count (const gq_option_row *row, const char *word, uint64_t *count)
{
    const char *end;
    if (is_unbounded (row) && strcmp (word, "inf") == 0) {
        *count = UINT64_MAX;
        return true;
    }
    return parse_digits (word, count, &end) && *end == '\0' && count_in_bounds (row, *count);
}

static bool
parse_bytes (const gq_option_row *row, const char *word, uint64_t *count)
{
    static const char units[] = "KMG";
    const char *end, *unit;
    if (!parse_digits (word, count, &end))
        return false;
    if (*end != '\0') {
        unit = strchr (units, toupper ((unsigned char)*end));
        if (unit == NULL || (end[1] != '\0' && strcmp (end + 1, "iB") != 0))
            return false;
        for (const char *each = units; each <= unit; each++) {
            if (__builtin_mul_overflow (*count, UINT64_C (1024), count))
                return false;
        }
    }
    return count_in_bounds (row, *count);
}

static bool
parse_number (const gq_option_row *row, const char *word, double *number)
{
    char *end;
    /* strtod would skip spaces and take hexadecimal. */
    if (word[strspn (word, "+-.eE0123456789")] != '\0' || *word == '\0')
        return false;
    *number = strtod (word, &end);
    return *end == '\0' && *number >= row->min && *number <= row->max;
}

static bool
parse_flag (const char *word, bool *flag)
{
    static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp (word, words[i]) == 0) {
            *flag = i % 2 == 1;
            return true;
        }
    }
    return false;
}

/* ---- choices ---------------------------------------------------------------------------- */

#define CHOICES_MAX 16

/* Cut a copy of "a|b|c" into words[CHOICES_MAX]; how many. */
static size_t
split_choices (char *copy, const char **words)
{
    size_t count = 0;
    char *state = NULL;
    for (char *word = strtok_r (copy, "|", &state); word != NULL;
         word = strtok_r (NULL, "|", &state)) {
        assert (count < CHOICES_MAX);
        words[count++] = word;
    }
    return count;
}

static gq_status
parse_choice (char **text, const gq_option_row *row, const char *word, const char *where,
              gq_error *error)
{
    const char *words[CHOICES_MAX];
    char *copy = strdup (row->choices);
    if (copy == NULL)
        return gq_fail (error, GQ_MEMORY, "%s: out of memory", where);
    const size_t count = split_choices (copy, words);
    size_t i = 0;
    while (i < count && strcmp (words[i], word) != 0)
        i++;

    gq_status status = GQ_OK;
    if (i < count) {
        *text = strdup (word);
        if (*text == NULL)
            status = gq_fail (error, GQ_MEMORY, "%s: out of memory", where);
    } else {
        const char *near = gq_nearest (word, words, count);
        status = gq_fail (error, GQ_INVALID, "%s: '%.100s' is none of %s%s%s%s", where, word,
                          row->choices, near != NULL ? "; did you mean " : "",
                          near != NULL ? near : "", near != NULL ? "?" : "");
    }
    free (copy);
    return status;
}

/* ---- lists ------------------------------------------------------------------------------ */

/* Append the copy of item[bytes]. */
static gq_status
append (gq_option_value *value, const char *item, size_t bytes, const char *where, gq_error *error)
{
    if (value->item_count == GQ_LIST_ITEMS_MAX)
        return gq_fail (error, GQ_INVALID, "%s: more than %d items", where, GQ_LIST_ITEMS_MAX);
    char *copy = strndup (item, bytes);
    char **items = copy == NULL
                       ? NULL
                       : reallocarray (value->items, value->item_count + 1, sizeof *value->items);
    if (items == NULL) {
        free (copy);
        return gq_fail (error, GQ_MEMORY, "%s: out of memory", where);
    }
    value->items = items;
    value->items[value->item_count++] = copy;
    return GQ_OK;
}

/* Items between ';', without the spaces around them; empty ones do not count. */
static gq_status
append_split (gq_option_value *value, const char *word, const char *where, gq_error *error)
{
    gq_status status = GQ_OK;
    while (status == GQ_OK) {
        word += strspn (word, " \t;");
        size_t bytes = strcspn (word, ";");
        const char *next = word + bytes;
        if (bytes == 0)
            break;
        while (word[bytes - 1] == ' ' || word[bytes - 1] == '\t')
            bytes--;
        status = append (value, word, bytes, where, error);
        word = next;
    }
    return status;
}

/* ---- any -------------------------------------------------------------------------------- */

gq_status
gq_option_value_parse (gq_option_value *value, const gq_option_row *row, const char *word,
                       bool split, const char *where, gq_error *error)
{
    bool good = false;
    char allowed[160] = "";

    if (*word == '\0')
        return gq_fail (error, GQ_INVALID, "%s: the value is empty", where);
    switch (row->type) {
    case GQ_OPTION_TEXT:
        value->text = strdup (word);
        return value->text != NULL ? GQ_OK : gq_fail (error, GQ_MEMORY, "%s: out of memory", where);
    case GQ_OPTION_CHOICE:
        return parse_choice (&value->text, row, word, where, error);
    case GQ_OPTION_LIST:
        return split ? append_split (value, word, where, error)
                     : append (value, word, strlen (word), where, error);
    case GQ_OPTION_FLAG:
        if (parse_flag (word, &value->flag))
            return GQ_OK;
        return gq_fail (error, GQ_INVALID,
                        "%s: '%.100s' is none of 1, 0, true, false, yes, no, on, off", where, word);
    case GQ_OPTION_COUNT:
        good = parse_count (row, word, &value->count);
        break;
    case GQ_OPTION_BYTES:
        good = parse_bytes (row, word, &value->count);
        break;
    case GQ_OPTION_NUMBER:
        good = parse_number (row, word, &value->number);
        break;
    }
    if (good)
        return GQ_OK;
    gq_option_bounds (row, allowed, sizeof allowed);
    return gq_fail (error, GQ_INVALID, "%s: '%.100s' is not allowed; give a %s, %s", where, word,
                    row->type == GQ_OPTION_NUMBER ? "number" : "whole number", allowed);
}

void
gq_option_value_clear (gq_option_value *value)
{
    free (value->text);
    for (size_t i = 0; i < value->item_count; i++)
        free (value->items[i]);
    free (value->items);
    *value = (gq_option_value){0};
}

/* ---- nearest ---------------------------------------------------------------------------- */

static size_t
min2 (size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Edits that turn a into b: insert, delete, replace one byte, swap two neighbours (the "optimal
 * string alignment" distance).  Both at most GQ_NEAREST_BYTES_MAX long. */
static size_t
edit_distance (const char *a, const char *b)
{
    size_t rows[3][GQ_NEAREST_BYTES_MAX + 1];
    const size_t a_bytes = strlen (a), b_bytes = strlen (b);

    for (size_t j = 0; j <= b_bytes; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t *row = rows[i % 3], *above = rows[(i + 2) % 3], *twice_above = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            row[j] = min2 (min2 (row[j - 1], above[j]) + 1, above[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = min2 (row[j], twice_above[j - 2] + 1);
        }
    }
    return rows[a_bytes % 3][b_bytes];
}

const char *
gq_nearest (const char *word, const char *const *words, size_t count)
{
    const char *nearest = NULL;
    const size_t bytes = strlen (word);
    if (bytes == 0 || bytes > GQ_NEAREST_BYTES_MAX)
        return NULL;
    /* One edit in a short word, one for every three letters of a long one: more is another word. */
    size_t least = (bytes < 6 ? 1 : bytes / 3) + 1;
    for (size_t i = 0; i < count; i++) {
        if (strlen (words[i]) > GQ_NEAREST_BYTES_MAX)
            continue;
        const size_t distance = edit_distance (word, words[i]);
        if (distance < least) {
            least = distance;
            nearest = words[i];
        }
    }
    return nearest;
}
