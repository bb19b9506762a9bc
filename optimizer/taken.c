/*
 * Reports of what was taken: few, for each costs the broker a look.
 */
#include "taken.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "hex.h"
#include "socket.h"

/* Between two reports: a depth that people read may be as old as that. */
#define REPORT_NS 10000000u

bool
gq_taken_mark (gq_taken *taken, const void *bytes, size_t size, bool *another)
{
    if (size != GQ_MARK_BYTES)
        return false;
    *another = memcmp (taken->mark, bytes, sizeof (uint64_t)) != 0; /* its life */
    memcpy (taken->mark, bytes, GQ_MARK_BYTES);
    taken->marked = taken->owed = true;
    taken->count = 0;
    taken->due_ns = 0;
    return true;
}

void
gq_taken_add (gq_taken *taken)
{
    taken->count++;
    taken->owed = taken->marked;
}

void
gq_taken_early (gq_taken *taken, uint64_t early)
{
    taken->owed = taken->owed || (taken->marked && taken->early != early);
    taken->early = early;
}

void
gq_taken_report (gq_taken *taken, void *socket, uint64_t now_ns)
{
    if (now_ns < gq_taken_next_ns (taken))
        return;
    char mark[2 * GQ_MARK_BYTES + 1], text[128];
    gq_hex_encode (taken->mark, GQ_MARK_BYTES, mark);
    int size =
        snprintf (text, sizeof text,
                  "{\"op\":\"taken\",\"mark\":\"%s\",\"count\":%" PRIu64 ",\"early\":%" PRIu64 "}",
                  mark, taken->count, taken->early);
    /* One that finds no room is made up for by the next. */
    taken->owed = gq_socket_send (socket, text, (size_t)size) != GQ_OK;
    taken->due_ns = now_ns + REPORT_NS;
}

uint64_t
gq_taken_next_ns (const gq_taken *taken)
{
    return taken->owed ? taken->due_ns : UINT64_MAX;
}
