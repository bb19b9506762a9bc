/*
 * The client on lane shm: what it learns from its lane file and from the board instead of from
 * sockets, and how it goes back to lane inline.  Steps 1 and 7 of a gradient's path.
 *
 * Nothing that the caller may hold is unmapped under him: a vector that he builds stays where it is
 * until he reserves the next one.
 */
#include <stdlib.h>
#include <string.h>

#include "client_internal.h"
#include "control.h"
#include "frame.h"
#include "stats.h"

#define MS_NS UINT64_C (1000000)
/* Longer than a starting optimizer takes from its term to its board. */
#define BOARDLESS_MS 3000

/* What is sent from now on goes by *lane.  The caller may still be building a vector in the one
 * before. */
static void
change_lane (gq_client *client, gq_lane **lane)
{
    gq_lane *before = client->lane;
    if (before != NULL) {
        before->next = client->parked;
        client->parked = before;
    }
    client->lane = *lane;
    *lane = NULL;
}

gq_status
gq_client_bring_along (gq_client *client)
{
    gq_lane *from = client->building;
    if (from == NULL || from == client->lane)
        return GQ_OK;
    float *copy = client->lane->ops->reserve (client->lane);
    if (copy == NULL)
        return GQ_MEMORY;
    memcpy (copy, from->ops->reserve (from), (size_t)from->count * sizeof *copy);
    return GQ_OK;
}

void
gq_client_close_parked (gq_client *client)
{
    while (client->parked != NULL) {
        gq_lane *lane = client->parked;
        client->parked = lane->next;
        lane->ops->close (&lane);
    }
}

/* Open the board of the optimizer that serves us now.  GQ_OK; anything else: there is none, or it
 * cannot be opened. */
static gq_status
open_board (gq_client *client, gq_error *error)
{
    const uint32_t term = atomic_load (&client->words->term);
    gq_board_config config = {
        .term = term, .digest = client->layout.digest, .count = client->layout.element_count};
    memcpy (config.run, client->run, GQ_RUN_ID_BYTES);
    gq_board *board;
    gq_status status = gq_board_open (&board, client->board_path, &config, error);
    if (status != GQ_OK)
        return status;
    gq_client_keep_weights (client);
    gq_board_close (&client->board);
    client->board = board;
    client->board_term = term;
    client->boardless_ns = 0;
    client->bell_name = gq_bell_name_of (gq_board_fd (board));
    if (client->rope < 0)
        client->rope = gq_bell_rope ();
    return GQ_OK;
}

/* The lane file and board that an answer to hello names. */
static gq_status
open_shm (gq_client *client, const json_t *offer, gq_lane **lane, gq_error *error)
{
    const char *slots = json_string_value (json_object_get (offer, "slots"));
    const char *board = json_string_value (json_object_get (offer, "board"));
    if (slots == NULL || board == NULL || strlen (board) >= sizeof client->board_path)
        return gq_fail (error, GQ_NOTFOUND,
                        "the optimizer offers no shared memory: it runs on another host, or with "
                        "--lane inline, or has no room for it");
    gq_lane_identity identity = {
        .actor = client->actor, .epoch = client->epoch, .count = client->layout.element_count};
    memcpy (identity.run, client->run, GQ_RUN_ID_BYTES);
    gq_lane_words *words;
    gq_status status = gq_lane_shm_open (lane, &words, slots, &identity, error);
    if (status != GQ_OK)
        return status;
    if (identity.slot_count <= client->window.size) {
        (*lane)->ops->close (lane);
        return gq_fail (error, GQ_MALFORMED, "%.900s has too few slots", slots);
    }
    memcpy (client->board_path, board, strlen (board) + 1);
    client->words = words;
    client->bell = client->beat = 0;
    status = open_board (client, error);
    if (status != GQ_OK) {
        client->words = NULL;
        (*lane)->ops->close (lane);
    }
    return status;
}

gq_status
gq_client_open_lane (gq_client *client, const json_t *offer, gq_error *error)
{
    gq_lane *lane = NULL;
    const char *wanted = client->config.lane;
    gq_client_keep_weights (client);
    client->words = NULL;
    client->lane_reason = (gq_error){"lane inline was asked for"};
    if (wanted == NULL || strcmp (wanted, "inline") != 0) {
        gq_status status = open_shm (client, offer, &lane, &client->lane_reason);
        if (status != GQ_OK && wanted != NULL && strcmp (wanted, "shm") == 0)
            return gq_fail (error, GQ_REFUSED, "lane shm: %.900s", client->lane_reason.text);
    }
    gq_status status =
        lane != NULL ? GQ_OK
                     : gq_lane_inline_open (&lane, client->layout.element_count, client->encoding);
    if (status != GQ_OK)
        return gq_fail (error, status, "%s", gq_status_text (status));
    change_lane (client, &lane);
    return GQ_OK;
}

/* Failing changes nothing: it is tried again. */
void
gq_client_leave_shm (gq_client *client, const char *reason)
{
    gq_lane *lane;
    if (gq_lane_inline_open (&lane, client->layout.element_count, client->encoding) != GQ_OK)
        return;
    for (uint32_t i = 0; i < client->window.size; i++)
        if (client->window.slots[i].sequence != 0 &&
            client->lane->ops->to_inline (client->lane, &client->sent[i]) != GQ_OK) {
            lane->ops->close (&lane);
            return;
        }
    gq_client_take_weights (client);
    gq_client_keep_weights (client);
    change_lane (client, &lane);
    client->words = NULL;
    gq_fail (&client->lane_reason, GQ_OK, "%s", reason);
    gq_client_subscribe (client);
}

/* The board is another one since the optimizer is.  One that cannot be opened, because it is gone
 * or there are no descriptors left, must not leave us without weights for ever. */
static void
follow_board (gq_client *client)
{
    if (client->board_term == atomic_load (&client->words->term) ||
        open_board (client, NULL) == GQ_OK)
        return;
    uint64_t now_ns = gq_now_ns ();
    if (client->boardless_ns == 0)
        client->boardless_ns = now_ns;
    else if (now_ns - client->boardless_ns > BOARDLESS_MS * MS_NS)
        gq_client_leave_shm (client, "the optimizer's board cannot be opened");
}

/* Which version could be had?  It is copied only when the caller asks for weights. */
static void
look_at_board (gq_client *client)
{
    uint64_t version;
    if (client->board == NULL || !gq_board_peek (client->board, &version) ||
        (client->has_weights &&
         !gq_client_newer (client->board_term, version, client->shown_term, client->shown_version)))
        return;
    client->shown_term = client->board_term;
    client->shown_version = version;
    client->has_weights = true;
}

void
gq_client_take_weights (gq_client *client)
{
    uint64_t version;
    if (client->board == NULL ||
        (client->data != NULL && !gq_client_newer (client->shown_term, client->shown_version,
                                                   client->term, client->version)))
        return;
    const float *block = gq_board_lease (client->board, &client->words->lease, &version);
    if (block == NULL)
        return;
    client->data = block;
    client->leased = true;
    client->term = client->board_term;
    client->version = version;
    /* Blocks are few, and a rollout is long: most actors lease them for the time of a copy. */
    if (atomic_load (&client->words->may_hold) == 0)
        gq_client_keep_weights (client);
}

void
gq_client_keep_weights (gq_client *client)
{
    if (!client->leased)
        return;
    client->data = memcpy (client->aligned, client->data,
                           (size_t)client->layout.element_count * sizeof *client->data);
    client->leased = false;
    atomic_store (&client->words->lease, GQ_LEASE_NONE);
}

void
gq_client_wake_optimizer (gq_client *client)
{
    if (client->words != NULL && client->board != NULL && client->rope >= 0 &&
        gq_board_idle (client->board))
        gq_bell_ring (client->rope, client->bell_name);
}

bool
gq_client_lane_news (gq_client *client)
{
    gq_lane_words *words = client->words;
    look_at_board (client);
    const unsigned bell = atomic_load (&words->bell);
    const unsigned beat = atomic_load (&words->beat);
    if (bell == client->bell && beat == client->beat && client->boardless_ns == 0)
        return false;
    client->bell = bell;
    if (beat != client->beat) {
        client->beat = beat;
        client->heard_ns = gq_now_ns ();
        client->weights_heard.heard_ns = client->acks_heard.heard_ns = client->heard_ns;
    }
    if (atomic_load (&words->fenced) != 0 && client->higher_epoch <= client->epoch)
        client->higher_epoch = client->epoch + 1;
    gq_lane_ack ack;
    if (gq_lane_ack_read (words, &ack) && ack.term != 0)
        gq_client_take_ack (client, ack.term, ack.version, &ack.ack);
    follow_board (client);
    look_at_board (client);
    return true;
}
