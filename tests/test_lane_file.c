/*
 * Shared files, the lane file's words, and the board as one process sees them; tests/main_board.c
 * has the threads.
 */
#include "support.h"

#include <pthread.h>
#include <sys/wait.h>

#include "board.h"
#include "lane_file.h"
#include "stats.h"

TestSuite (lane_file, .timeout = 60);

static char directory[64];

static void
make_directory (void)
{
    support_directory (directory);
}

static void
remove_directory (void)
{
    support_remove (directory);
}

static gq_lane_identity
identity (void)
{
    return (gq_lane_identity){
        .run = {1, 2}, .actor = 3, .epoch = 9, .count = 1025, .slot_count = 3};
}

static void
create (gq_shm *shm, char path[PATH_MAX])
{
    const gq_lane_identity ours = identity ();
    gq_error error;
    cr_assert (gq_lane_file_path (path, directory, ours.actor, ours.epoch));
    cr_assert_eq (gq_lane_file_create (shm, path, &ours, &error), GQ_OK, "%s", error.text);
}

Test (lane_file, both_sides_see_the_same_slots, .init = make_directory, .fini = remove_directory)
{
    gq_shm ours, theirs;
    char path[PATH_MAX];
    gq_lane_identity expected = identity ();
    expected.slot_count = 0;
    create (&ours, path);
    cr_assert_eq (gq_lane_file_open (&theirs, path, &expected, NULL), GQ_OK);
    cr_assert_eq (expected.slot_count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        float *slot = gq_lane_file_slot (&ours, 1025, i);
        cr_assert_eq ((uintptr_t)slot % GQ_SHM_PAGE, 0);
        slot[0] = (float)i + 1;
        slot[1024] = (float)i + 2;
    }
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq (gq_lane_file_slot (&theirs, 1025, i)[0], (float)i + 1);
        cr_assert_eq (gq_lane_file_slot (&theirs, 1025, i)[1024], (float)i + 2);
    }
    gq_shm_close (&ours);
    gq_shm_close (&theirs);
}

Test (lane_file, is_for_its_user_only, .init = make_directory, .fini = remove_directory)
{
    gq_shm ours;
    char path[PATH_MAX];
    struct stat info;
    create (&ours, path);
    cr_assert_eq (stat (path, &info), 0);
    cr_assert_eq (info.st_mode & 0777, 0600);
    gq_shm_close (&ours);
}

Test (lane_file, of_another_life_run_or_size_is_not_taken, .init = make_directory,
      .fini = remove_directory)
{
    gq_shm ours, theirs;
    char path[PATH_MAX];
    gq_error error;
    create (&ours, path);
    gq_lane_identity wrong[4] = {identity (), identity (), identity (), identity ()};
    wrong[0].run[0] = 7;
    wrong[1].actor = 4;
    wrong[2].epoch = 8;
    wrong[3].count = 1024;
    for (int i = 0; i < 4; i++)
        cr_expect_eq (gq_lane_file_open (&theirs, path, &wrong[i], &error), GQ_MALFORMED, "%d", i);
    cr_assert_eq (truncate (path, GQ_SHM_PAGE), 0);
    gq_lane_identity right = identity ();
    cr_expect_eq (gq_lane_file_open (&theirs, path, &right, &error), GQ_MALFORMED);
    cr_assert_eq (unlink (path), 0);
    cr_expect_eq (gq_lane_file_open (&theirs, path, &right, &error), GQ_NOTFOUND);
    gq_shm_close (&ours);
}

/* A slot count that the other side wrote over the file's must not lead past its end. */
Test (lane_file, that_claims_more_slots_than_it_holds_is_not_taken, .init = make_directory,
      .fini = remove_directory)
{
    gq_shm ours, theirs;
    char path[PATH_MAX];
    gq_error error;
    gq_lane_identity right = identity ();
    create (&ours, path);
    gq_lane_file_words (&ours)->identity.slot_count = 4;
    cr_expect_eq (gq_lane_file_open (&theirs, path, &right, &error), GQ_MALFORMED);
    gq_lane_file_words (&ours)->identity.slot_count = 0;
    cr_expect_eq (gq_lane_file_open (&theirs, path, &right, &error), GQ_MALFORMED);
    gq_shm_close (&ours);
}

Test (lane_file, without_room_is_refused_and_leaves_nothing, .init = make_directory,
      .fini = remove_directory)
{
    gq_shm shm;
    char path[PATH_MAX];
    gq_error error = {""};
    gq_lane_identity huge = identity ();
    huge.count = UINT64_C (1) << 50;
    cr_assert (gq_lane_file_path (path, directory, 1, 1));
    gq_status status = gq_lane_file_create (&shm, path, &huge, &error);
    cr_assert (status == GQ_FULL || status == GQ_IO, "%s", gq_status_name (status));
    cr_assert_neq (error.text[0], '\0');
    cr_assert_eq (rmdir (directory), 0, "something was left");
    cr_assert_eq (mkdir (directory, 0700), 0);
}

Test (lane_file, names_are_read_back)
{
    uint32_t actor, epoch;
    cr_assert (gq_lane_file_parse ("actor-12-345", &actor, &epoch));
    cr_assert_eq (actor, 12);
    cr_assert_eq (epoch, 345);
    const char *const wrong[] = {"actor-12-345.new", "actor-12", "board", "actor-4096-1", ""};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        cr_expect (!gq_lane_file_parse (wrong[i], &actor, &epoch), "%s", wrong[i]);
}

Test (lane_file, acknowledgement_of_a_writer_that_died_is_not_read, .init = make_directory,
      .fini = remove_directory)
{
    gq_shm ours;
    char path[PATH_MAX];
    create (&ours, path);
    gq_lane_words *words = gq_lane_file_words (&ours);
    gq_lane_ack read, ack = {.ack = {5, 2, 1, 4, GQ_STALE, 3}, .version = 77, .term = 3};
    gq_lane_ack_write (words, &ack);
    cr_assert (gq_lane_ack_read (words, &read));
    cr_assert_eq (read.ack.cumulative, 5);
    cr_assert_eq (read.ack.beyond, 2);
    cr_assert_eq (read.ack.refused, 1);
    cr_assert_eq (read.ack.refused_sequence, 4);
    cr_assert_eq (read.ack.refused_reason, GQ_STALE);
    cr_assert_eq (read.ack.held, 3);
    cr_assert_eq (read.version, 77);
    cr_assert_eq (read.term, 3);
    atomic_fetch_add (&words->turn, 1); /* it begins to write, and dies */
    cr_assert (!gq_lane_ack_read (words, &read));
    ack.version = 78;
    gq_lane_ack_write (words, &ack); /* its successor */
    cr_assert (gq_lane_ack_read (words, &read));
    cr_assert_eq (read.version, 78);
    gq_shm_close (&ours);
}

static void *
ring (void *words)
{
    gq_lane_ring (words);
    return NULL;
}

/* The wait is long: only the bell can end it before the suite's time-out. */
Test (lane_file, bell_wakes_who_sleeps_and_is_not_missed_by_who_does_not_yet,
      .init = make_directory, .fini = remove_directory)
{
    gq_shm ours;
    char path[PATH_MAX];
    pthread_t thread;
    const uint64_t long_ns = UINT64_C (600000000000);
    create (&ours, path);
    gq_lane_words *words = gq_lane_file_words (&ours);
    for (int i = 0; i < 200; i++) {
        unsigned seen = atomic_load (&words->bell);
        cr_assert_eq (pthread_create (&thread, NULL, ring, words), 0);
        while (atomic_load (&words->bell) == seen)
            gq_lane_sleep (words, seen, long_ns);
        pthread_join (thread, NULL);
        cr_assert_eq (atomic_load (&words->bell), seen + 1);
    }
    gq_shm_close (&ours);
}

Test (lane_file, lock_ends_with_its_process, .init = make_directory, .fini = remove_directory)
{
    gq_shm ours, theirs;
    char path[PATH_MAX];
    gq_lane_identity right = identity ();
    int pipes[2];
    create (&ours, path);
    cr_assert_eq (pipe (pipes), 0);
    pid_t child = fork ();
    if (child == 0) {
        bool held =
            gq_lane_file_open (&theirs, path, &right, NULL) == GQ_OK && gq_shm_lock (&theirs);
        (void)!write (pipes[1], &held, sizeof held);
        pause ();
        _exit (0);
    }
    bool held = false;
    cr_assert_eq (read (pipes[0], &held, sizeof held), sizeof held);
    cr_assert (held);
    cr_assert (gq_shm_locked (&ours));
    kill (child, SIGKILL);
    waitpid (child, NULL, 0);
    cr_assert (!gq_shm_locked (&ours));
    cr_assert (gq_shm_lock (&ours));
    gq_shm_close (&ours);
}

/* ---- the board ---- */

static const gq_board_config board_config = {.run = {1, 2}, .term = 4, .digest = 5, .count = 100};

static void
board_path (char path[PATH_MAX])
{
    snprintf (path, PATH_MAX, "%s/board", directory);
}

Test (lane_file, board_shows_nothing_until_told, .init = make_directory, .fini = remove_directory)
{
    gq_board *ours, *theirs;
    char path[PATH_MAX];
    uint64_t version;
    atomic_uint lease = 3;
    board_path (path);
    cr_assert_eq (gq_board_create (&ours, path, &board_config, NULL), GQ_OK);
    cr_assert_eq (gq_board_open (&theirs, path, &board_config, NULL), GQ_OK);
    cr_assert (!gq_board_peek (theirs, &version));
    cr_assert_null (gq_board_lease (theirs, &lease, &version));
    cr_assert_eq (atomic_load (&lease), 3);
    float *vector = (float *)(void *)(gq_board_block (ours, 5) + GQ_FRAME_HEADER_BYTES);
    cr_assert_eq ((uintptr_t)vector % 64, 0);
    vector[99] = 8;
    gq_board_show (ours, 5, 1000);
    cr_assert (gq_board_peek (theirs, &version));
    cr_assert_eq (version, 1000);
    const float *seen = gq_board_lease (theirs, &lease, &version);
    cr_assert_eq (seen[99], 8);
    cr_assert_eq (version, 1000);
    cr_assert_eq (atomic_load (&lease), 6);
    gq_board_close (&ours);
    cr_assert_eq (seen[99], 8, "a reader keeps what it leased when the optimizer has gone");
    gq_board_close (&theirs);
}

Test (lane_file, board_of_another_term_run_or_model_is_not_taken, .init = make_directory,
      .fini = remove_directory)
{
    gq_board *ours, *theirs;
    char path[PATH_MAX];
    gq_error error;
    board_path (path);
    cr_assert_eq (gq_board_create (&ours, path, &board_config, NULL), GQ_OK);
    gq_board_config wrong[4] = {board_config, board_config, board_config, board_config};
    wrong[0].term = 5;
    wrong[1].run[3] = 1;
    wrong[2].digest = 6;
    wrong[3].count = 99;
    for (int i = 0; i < 4; i++) {
        cr_expect_eq (gq_board_open (&theirs, path, &wrong[i], &error), GQ_MALFORMED, "%d", i);
        cr_expect_null (theirs);
    }
    gq_board_close (&ours);
}
