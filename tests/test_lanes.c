/*
 * The optimizer's table of lane files: grants, fencing, what outlives whom, and what is removed.
 */
#include "support.h"

#include <poll.h>

#include "bell.h"
#include "lane.h"
#include "optimizer/buffers.h"
#include "optimizer/lanes.h"

TestSuite (lanes, .timeout = 60);

enum { COUNT = 10 };

static char parent[64], directory[PATH_MAX];
static gq_ledger ledger;
static gq_lanes *lanes;

static gq_lanes_config
config (uint32_t term)
{
    return (gq_lanes_config){
        .directory = directory, .run = {6}, .term = term, .digest = 5, .count = COUNT};
}

static void
open_lanes (uint32_t term)
{
    const gq_lanes_config ours = config (term);
    gq_error error;
    cr_assert_eq (gq_lanes_open (&lanes, &ours, &ledger, &error), GQ_OK, "%s", error.text);
}

static void
setup (void)
{
    support_directory (parent);
    snprintf (directory, sizeof directory, "%s/lane", parent);
    ledger.actors[1].known = true;
    ledger.actor_count = 2;
    open_lanes (1);
}

static void
teardown (void)
{
    gq_lanes_close (&lanes);
    if (access (directory, F_OK) == 0)
        support_remove (directory);
    cr_assert_eq (rmdir (parent), 0);
}

typedef struct peer {
    gq_lane *lane;
    gq_lane_words *words;
} peer;

static peer
attach (const char *path, uint32_t epoch)
{
    peer result;
    gq_lane_identity identity = {.run = {6}, .actor = 1, .epoch = epoch, .count = COUNT};
    gq_error error;
    cr_assert_eq (gq_lane_shm_open (&result.lane, &result.words, path, &identity, &error), GQ_OK,
                  "%s", error.text);
    return result;
}

static peer
grant_and_attach (uint32_t epoch)
{
    gq_error error = {""};
    const char *path = gq_lanes_grant (lanes, 1, epoch, 2, &error);
    cr_assert_not_null (path, "%s", error.text);
    return attach (path, epoch);
}

static gq_frame
descriptor (uint32_t epoch, uint32_t slot, uint64_t sequence)
{
    gq_frame frame = support_frame (GQ_KIND_GRADIENT, 5, COUNT);
    frame.lane = GQ_LANE_SHM;
    frame.actor = 1;
    frame.epoch = epoch;
    frame.slot = slot;
    frame.sequence = sequence;
    return frame;
}

static bool
exists (uint32_t epoch)
{
    char path[PATH_MAX];
    cr_assert (gq_lane_file_path (path, directory, 1, epoch));
    return access (path, F_OK) == 0;
}

Test (lanes, the_same_grant_gets_the_same_file, .init = setup, .fini = teardown)
{
    gq_error error;
    char first[PATH_MAX];
    snprintf (first, sizeof first, "%s", gq_lanes_grant (lanes, 1, 3, 2, &error));
    cr_assert_str_eq (gq_lanes_grant (lanes, 1, 3, 2, &error), first);
}

Test (lanes, a_vector_is_found_only_under_its_own_number, .init = setup, .fini = teardown)
{
    peer actor = grant_and_attach (3);
    float *built = actor.lane->ops->reserve (actor.lane);
    built[COUNT - 1] = 4;
    atomic_store (&actor.words->holds[0], 7);
    gq_frame frame = descriptor (3, 0, 7);
    const float *found = gq_lanes_vector (lanes, &frame);
    cr_assert_not_null (found);
    cr_assert_eq (found[COUNT - 1], 4);
    const gq_frame wrong[] = {descriptor (3, 0, 8), descriptor (2, 0, 7),
                              descriptor (4, 0, 7), descriptor (3, 1, 7),
                              descriptor (3, 3, 7), descriptor (3, UINT32_MAX, 7)};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        cr_expect_null (gq_lanes_vector (lanes, &wrong[i]), "%zu", i);
    gq_frame stranger = frame;
    stranger.actor = 0;
    cr_expect_null (gq_lanes_vector (lanes, &stranger));
    actor.lane->ops->close (&actor.lane);
}

/* What an actor's client writes when it has sent a descriptor. */
static void
make_ready (const peer *actor, const gq_frame *frame)
{
    gq_frame_encode (frame, NULL, actor->words->headers[frame->slot]);
    atomic_store (&actor->words->holds[frame->slot], frame->sequence);
    atomic_store (&actor->words->ready[frame->slot], frame->sequence);
}

static bool
is_ready (uint64_t sequence)
{
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    gq_frame frame;
    if (!gq_lanes_ready (lanes, &ledger, header))
        return false;
    cr_assert_eq (gq_frame_decode (header, sizeof header, &frame), GQ_OK);
    cr_assert_eq (frame.sequence, sequence);
    return true;
}

Test (lanes, what_lies_ready_is_found_once_and_in_order, .init = setup, .fini = teardown)
{
    peer actor = grant_and_attach (3);
    gq_ledger_grant (&ledger, 1, 3, (const uint8_t[GQ_NONCE_BYTES]){1});
    cr_assert (!is_ready (0));
    const gq_frame first = descriptor (3, 2, 1);
    const gq_frame second = descriptor (3, 0, 2);
    make_ready (&actor, &second);
    make_ready (&actor, &first);
    cr_assert (is_ready (1));
    cr_assert (is_ready (2));
    cr_assert (!is_ready (0), "each once, though the ledger has not entered them");
    cr_assert_eq (gq_lanes_early (lanes), 2);
    cr_assert (gq_lanes_announced (lanes, &first), "its descriptor comes later");
    cr_assert_eq (gq_lanes_early (lanes), 1);
    cr_assert (!gq_lanes_announced (lanes, &first), "and if it comes again it is a duplicate");
    gq_ledger_enter (&ledger, 1, 1);
    gq_ledger_enter (&ledger, 1, 2);
    const gq_frame again = descriptor (3, 1, 2);
    make_ready (&actor, &again);
    cr_assert (!is_ready (0), "what the ledger has is not new");
    const gq_frame third = descriptor (3, 1, 3);
    cr_assert (!gq_lanes_announced (lanes, &third), "that was never ready");
    cr_assert_eq (gq_lanes_early (lanes), 0, "the second one's message is lost, or would be here");
    make_ready (&actor, &third);
    cr_assert (!is_ready (0), "its message is here");
    const gq_frame fourth = descriptor (3, 0, 4);
    make_ready (&actor, &fourth);
    cr_assert (is_ready (4));
    const gq_frame far = descriptor (3, 1, UINT64_MAX);
    cr_assert (!gq_lanes_announced (lanes, &far));
    cr_assert_eq (gq_lanes_early (lanes), 0);
    actor.lane->ops->close (&actor.lane);
}

Test (lanes, a_header_that_says_something_else_than_its_words_is_not_believed, .init = setup,
      .fini = teardown)
{
    peer actor = grant_and_attach (3);
    gq_ledger_grant (&ledger, 1, 3, (const uint8_t[GQ_NONCE_BYTES]){1});
    gq_frame stranger = descriptor (3, 0, 1);
    stranger.actor = 0;
    const gq_frame lies[] = {descriptor (2, 0, 1), descriptor (3, 0, 2), stranger};
    uint64_t sequence = 0;
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        make_ready (&actor, &lies[i]);
        atomic_store (&actor.words->ready[0], ++sequence);
        if (lies[i].sequence != sequence || i > 1)
            cr_expect (!is_ready (0), "%zu", i);
    }
    memset (actor.words->headers[1], 0xa5, GQ_FRAME_HEADER_BYTES);
    atomic_store (&actor.words->ready[1], 9);
    cr_expect (!is_ready (0));
    actor.lane->ops->close (&actor.lane);
}

Test (lanes, the_bell_is_heard_until_it_is_silenced, .init = setup, .fini = teardown)
{
    const gq_bell_name name = gq_bell_name_of (gq_board_fd (gq_lanes_board (lanes)));
    const gq_bell_name other = {.device = name.device, .inode = ~name.inode};
    struct pollfd bell = {.fd = gq_lanes_bell (lanes), .events = POLLIN};
    const int rope = gq_bell_rope ();
    cr_assert_geq (bell.fd, 0);
    cr_assert_eq (gq_bell_open (name), -1, "it is one optimizer's");
    gq_bell_ring (rope, other);
    cr_assert_eq (poll (&bell, 1, 0), 0);
    for (int i = 0; i < 1000; i++) /* more than are kept: none waits, none ends us */
        gq_bell_ring (rope, name);
    cr_assert_eq (poll (&bell, 1, 0), 1);
    gq_lanes_silence (lanes);
    cr_assert_eq (poll (&bell, 1, 0), 0);
    close (rope);
}

Test (lanes, acknowledgements_reach_who_reads_them, .init = setup, .fini = teardown)
{
    gq_error error;
    gq_lane_ack read;
    const gq_ack ack = {.cumulative = 12};
    const char *path = gq_lanes_grant (lanes, 1, 3, 2, &error);
    cr_assert (!gq_lanes_ack (lanes, 1, 3, &ack, 50), "nobody has attached");
    peer actor = attach (path, 3);
    unsigned bell = atomic_load (&actor.words->bell);
    unsigned beat = atomic_load (&actor.words->beat);
    cr_assert (gq_lanes_ack (lanes, 1, 3, &ack, 50));
    cr_assert (!gq_lanes_ack (lanes, 1, 2, &ack, 50), "of another epoch");
    cr_assert (!gq_lanes_ack (lanes, 0, 3, &ack, 50), "of another actor");
    cr_assert_neq (atomic_load (&actor.words->bell), bell);
    cr_assert_neq (atomic_load (&actor.words->beat), beat);
    cr_assert (gq_lane_ack_read (actor.words, &read));
    cr_assert_eq (read.ack.cumulative, 12);
    cr_assert_eq (read.version, 50);
    cr_assert_eq (read.term, 1);
    actor.lane->ops->close (&actor.lane);
}

Test (lanes, a_new_life_fences_the_one_before, .init = setup, .fini = teardown)
{
    peer old = grant_and_attach (3);
    atomic_store (&old.words->lease, 2);
    cr_assert_eq (atomic_load (&old.words->fenced), 0);
    unsigned bell = atomic_load (&old.words->bell);
    peer fresh = grant_and_attach (4);
    cr_assert_eq (atomic_load (&old.words->fenced), 1);
    cr_assert_neq (atomic_load (&old.words->bell), bell, "it is woken to hear of it");
    cr_assert_eq (atomic_load (&fresh.words->fenced), 0);
    gq_lanes_tend (lanes);
    cr_assert_eq (gq_lanes_leased (lanes), 2, "the old life still reads its block");
    old.lane->ops->close (&old.lane);
    gq_lanes_tend (lanes);
    cr_assert_eq (gq_lanes_leased (lanes), 0);
    cr_assert (!exists (3));
    cr_assert (exists (4));
    fresh.lane->ops->close (&fresh.lane);
}

Test (lanes, files_that_nobody_uses_go, .init = setup, .fini = teardown)
{
    gq_error error;
    cr_assert_not_null (gq_lanes_grant (lanes, 1, 3, 2, &error));
    gq_lanes_tend (lanes);
    cr_assert (exists (3), "its actor may still come");
    cr_assert_not_null (gq_lanes_grant (lanes, 1, 4, 2, &error));
    gq_lanes_tend (lanes);
    cr_assert (!exists (3), "of an earlier life");
    gq_lanes_goes_inline (lanes, 1, 3);
    cr_assert (exists (4));
    gq_lanes_goes_inline (lanes, 1, 4);
    cr_assert (!exists (4), "of an actor that goes inline");
    peer actor = grant_and_attach (5);
    gq_lanes_goes_inline (lanes, 1, 5);
    cr_assert (exists (5), "one that is used stays");
    actor.lane->ops->close (&actor.lane);
}

Test (lanes, leases_are_seen_and_nonsense_is_not, .init = setup, .fini = teardown)
{
    peer actor = grant_and_attach (3);
    atomic_store (&actor.words->lease, GQ_BOARD_BLOCKS);
    cr_assert_eq (gq_lanes_leased (lanes), 1u << (GQ_BOARD_BLOCKS - 1));
    atomic_store (&actor.words->lease, GQ_BOARD_BLOCKS + 1);
    cr_assert_eq (gq_lanes_leased (lanes), 0);
    atomic_store (&actor.words->lease, UINT32_MAX);
    cr_assert_eq (gq_lanes_leased (lanes), 0);
    actor.lane->ops->close (&actor.lane);
}

static float *
block (uint32_t index)
{
    return (float *)(void *)(gq_board_block (gq_lanes_board (lanes), index) +
                             GQ_FRAME_HEADER_BYTES);
}

static void
step (gq_buffers *buffers, float value)
{
    float *next = gq_buffers_next (buffers);
    for (size_t i = 0; i < COUNT; i++)
        next[i] = value;
    gq_buffers_turn (buffers);
}

static bool
show (gq_buffers *buffers, uint64_t version)
{
    gq_frame frame = support_frame (GQ_KIND_WEIGHTS, 5, COUNT);
    frame.version = version;
    return gq_buffers_show (buffers, &frame);
}

/* Leases are words that actors write: whatever they hold, steps go on, no block that is held is
 * written, and others are shown what there is room for. */
Test (lanes, while_all_blocks_are_leased_steps_go_on_and_nothing_newer_is_shown, .init = setup,
      .fini = teardown)
{
    peer actors[GQ_BOARD_BLOCKS];
    gq_buffers *buffers = gq_buffers_new (COUNT, lanes);
    step (buffers, 7);
    cr_assert (show (buffers, 7));
    const uint32_t shown = gq_board_shown (gq_lanes_board (lanes));
    cr_assert_eq (gq_buffers_current (buffers), block (shown), "it is shown where it lies");
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++) {
        block (i)[0] = (float)(100 + i);
        actors[i] = grant_and_attach (3 + i);
        atomic_store (&actors[i].words->lease, i + 1);
    }
    zmq_msg_t lent[2];
    size_t lent_count = 0;
    for (int version = 8; version < 30; version++) {
        zmq_msg_t message;
        const gq_frame frame = support_frame (GQ_KIND_WEIGHTS, 5, COUNT);
        step (buffers, (float)version);
        cr_assert_not (show (buffers, (uint64_t)version));
        if (gq_buffers_lend (buffers, &frame, &message) != GQ_OK)
            continue;
        cr_assert_lt (lent_count, 2, "more would leave none for a step");
        zmq_msg_init (&lent[lent_count]);
        zmq_msg_move (&lent[lent_count++], &message);
        zmq_msg_close (&message);
    }
    cr_assert_eq (lent_count, 2);
    for (size_t i = 0; i < lent_count; i++)
        zmq_msg_close (&lent[i]);
    cr_assert_eq (gq_board_shown (gq_lanes_board (lanes)), shown);
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++)
        cr_assert_eq (block (i)[0], (float)(100 + i), "block %u is leased and was written", i);
    const uint32_t other = (shown + 1) % GQ_BOARD_BLOCKS;
    atomic_store (&actors[other].words->lease, GQ_LEASE_NONE);
    cr_assert (show (buffers, 29));
    cr_assert_eq (gq_board_shown (gq_lanes_board (lanes)), other);
    cr_assert_eq (block (other)[COUNT - 1], 29);
    for (uint32_t i = 0; i < GQ_BOARD_BLOCKS; i++)
        actors[i].lane->ops->close (&actors[i].lane);
    gq_buffers_free (&buffers);
}

/* Blocks are fewer than actors. */
Test (lanes, some_actors_may_hold_a_block_for_long_and_others_follow_them, .init = setup,
      .fini = teardown)
{
    peer actors[GQ_BOARD_HOLDERS + 2];
    for (uint32_t i = 0; i < GQ_BOARD_HOLDERS + 2; i++) {
        char path[PATH_MAX];
        gq_error error;
        gq_lane_identity identity = {.run = {6}, .actor = i, .epoch = 3, .count = COUNT};
        snprintf (path, sizeof path, "%s", gq_lanes_grant (lanes, i, 3, 2, &error));
        cr_assert_eq (gq_lane_shm_open (&actors[i].lane, &actors[i].words, path, &identity, &error),
                      GQ_OK);
        cr_assert_eq (atomic_load (&actors[i].words->may_hold), i < GQ_BOARD_HOLDERS, "actor %u",
                      i);
    }
    actors[1].lane->ops->close (&actors[1].lane);
    gq_lanes_tend (lanes); /* sees that it is gone; */
    gq_lanes_tend (lanes);
    unsigned holders = 0;
    for (uint32_t i = 0; i < GQ_BOARD_HOLDERS + 2; i++)
        if (i != 1) {
            holders += atomic_load (&actors[i].words->may_hold);
            actors[i].lane->ops->close (&actors[i].lane);
        }
    cr_assert_eq (holders, GQ_BOARD_HOLDERS);
}

Test (lanes, files_that_nobody_attaches_go_after_a_while_and_unfinished_ones_at_the_next_start,
      .init = setup, .fini = teardown)
{
    gq_error error;
    char path[PATH_MAX + 16];
    cr_assert_not_null (gq_lanes_grant (lanes, 1, 3, 2, &error));
    for (int i = 0; i < 100; i++)
        gq_lanes_tend (lanes);
    cr_assert (!exists (3));
    /* One that is being attached stays: what its actor leases has to be seen. */
    gq_shm file;
    cr_assert_eq (gq_shm_open (&file, gq_lanes_grant (lanes, 1, 4, 2, &error), 1, NULL), GQ_OK);
    cr_assert (gq_shm_lock (&file));
    for (int i = 0; i < 100; i++)
        gq_lanes_tend (lanes);
    cr_assert (exists (4));
    gq_shm_close (&file);
    gq_lanes_tend (lanes);
    cr_assert (!exists (4));
    snprintf (path, sizeof path, "%s/actor-1-9.new", directory);
    support_write (path, "half", 4);
    gq_lanes *dead = lanes;
    open_lanes (2);
    cr_assert_neq (access (path, F_OK), 0);
    gq_lanes_close (&dead);
    cr_assert_eq (access (gq_lanes_board_path (lanes), F_OK), 0, "the living one's board stays");
}

Test (lanes, a_start_without_lanes_removes_what_nobody_uses, .init = setup, .fini = teardown)
{
    gq_error error;
    peer actor = grant_and_attach (3);
    cr_assert_not_null (gq_lanes_grant (lanes, 1, 4, 2, &error));
    gq_lanes_sweep (directory);
    cr_assert (exists (3), "its actor lives");
    cr_assert (!exists (4));
    actor.lane->ops->close (&actor.lane);
    gq_lanes_sweep (directory);
    cr_assert_neq (access (directory, F_OK), 0);
}

Test (lanes, the_next_optimizer_takes_up_who_lives_and_removes_who_does_not, .init = setup,
      .fini = teardown)
{
    peer actor = grant_and_attach (3);
    peer gone = grant_and_attach (4);
    gone.lane->ops->close (&gone.lane);
    float *built = actor.lane->ops->reserve (actor.lane);
    built[0] = 9;
    /* Killed: nothing is tidied up, the next one opens over it. */
    gq_lanes *dead = lanes;
    cr_assert (exists (4));
    open_lanes (2);
    cr_assert (!exists (4));
    cr_assert (exists (3));
    cr_assert_eq (atomic_load (&actor.words->term), 2);
    atomic_store (&actor.words->holds[0], 5);
    gq_frame frame = descriptor (3, 0, 5);
    const float *found = gq_lanes_vector (lanes, &frame);
    cr_assert_not_null (found);
    cr_assert_eq (found[0], 9);
    actor.lane->ops->close (&actor.lane);
    gq_lanes_close (&dead);
    cr_assert (!exists (3));
}

Test (lanes, a_clean_end_leaves_nothing, .init = setup, .fini = teardown)
{
    gq_error error;
    cr_assert_not_null (gq_lanes_grant (lanes, 1, 3, 2, &error)); /* never attached */
    peer actor = grant_and_attach (4);
    actor.lane->ops->close (&actor.lane);
    gq_lanes_close (&lanes);
    cr_assert_neq (access (directory, F_OK), 0);
}

Test (lanes, a_slot_is_free_again_when_its_gradient_is_settled, .init = setup, .fini = teardown)
{
    peer actor = grant_and_attach (3); /* window 2: three slots */
    void *context = zmq_ctx_new ();
    void *out = zmq_socket (context, ZMQ_PUSH);
    void *in = zmq_socket (context, ZMQ_PULL);
    zmq_msg_t sent[3];
    cr_assert_eq (zmq_bind (in, "inproc://queue"), 0);
    cr_assert_eq (zmq_connect (out, "inproc://queue"), 0);
    for (uint32_t i = 0; i < 3; i++) {
        gq_frame frame = descriptor (3, 0, i + 1);
        cr_assert_eq (actor.lane->ops->send (actor.lane, out, &frame, &sent[i]), GQ_INVALID);
        float *slot = actor.lane->ops->reserve (actor.lane);
        cr_assert_not_null (slot);
        cr_assert_eq (actor.lane->ops->reserve (actor.lane), slot);
        slot[0] = (float)i;
        cr_assert_eq (actor.lane->ops->send (actor.lane, out, &frame, &sent[i]), GQ_OK);
        cr_assert_eq (zmq_msg_size (&sent[i]), GQ_FRAME_HEADER_BYTES);
        cr_assert_eq (gq_lanes_vector (lanes, &frame)[0], (float)i);
    }
    cr_assert_null (actor.lane->ops->reserve (actor.lane));
    actor.lane->ops->settled (actor.lane, &sent[1]);
    /* To an optimizer that has forgotten all of them, too. */
    uint8_t header[GQ_FRAME_HEADER_BYTES];
    gq_ledger empty = {.actor_count = 2};
    empty.actors[1] = (gq_ledger_entry){.known = true, .epoch = 3};
    for (uint64_t expected = 1; expected <= 3; expected += 2) {
        gq_frame found;
        cr_assert (gq_lanes_ready (lanes, &empty, header));
        cr_assert_eq (gq_frame_decode (header, sizeof header, &found), GQ_OK);
        cr_assert_eq (found.sequence, expected);
    }
    cr_assert (!gq_lanes_ready (lanes, &empty, header));
    float *again = actor.lane->ops->reserve (actor.lane);
    cr_assert_not_null (again);
    gq_frame late = descriptor (3, 1, 2); /* sent again, and on its way still */
    cr_assert_null (gq_lanes_vector (lanes, &late), "the slot is being built anew");
    /* Lane inline from here: the same number, the bytes of the slot. */
    gq_frame frame;
    cr_assert_eq (actor.lane->ops->to_inline (actor.lane, &sent[2]), GQ_OK);
    cr_assert_eq (gq_frame_decode (zmq_msg_data (&sent[2]), zmq_msg_size (&sent[2]), &frame),
                  GQ_OK);
    cr_assert_eq (frame.lane, GQ_LANE_INLINE);
    cr_assert_eq (frame.sequence, 3);
    cr_assert_eq (gq_frame_check_payload (zmq_msg_data (&sent[2]), zmq_msg_size (&sent[2])), GQ_OK);
    float first;
    memcpy (&first, (uint8_t *)zmq_msg_data (&sent[2]) + GQ_FRAME_HEADER_BYTES, sizeof first);
    cr_assert_eq (first, 2);
    for (int i = 0; i < 3; i++)
        zmq_msg_close (&sent[i]);
    zmq_close (out);
    zmq_close (in);
    zmq_ctx_term (context);
    actor.lane->ops->close (&actor.lane);
}
