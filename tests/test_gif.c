/*
 * Recordings: what giflib's decoder reads back of the pictures that went in, and what is left of
 * one that fails.
 */
#include "actors/gif.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gif_testing.h"
#include "pong_testing.h"

static char folder[64], path[128];

static void
make_folder (void)
{
    snprintf (folder, sizeof folder, "/tmp/gradq-test-XXXXXX");
    cr_assert_not_null (mkdtemp (folder));
    snprintf (path, sizeof path, "%s/episode.gif", folder);
}

static void
drop_folder (void)
{
    unlink (path); /* not there in every test */
    cr_assert_eq (rmdir (folder), 0, "something was left in %s", folder);
}

TestSuite (gif, .init = make_folder, .fini = drop_folder);

static gq_gif *
create (void)
{
    gq_error error = {""};
    gq_gif *gif = NULL;
    cr_assert_eq (gq_gif_create (&gif, path, &error), GQ_OK, "%s", error.text);
    return gif;
}

static void
add (gq_gif *gif, uint32_t width, uint32_t height, const uint8_t *rgb)
{
    gq_error error = {""};
    gq_picture picture = {.width = width, .height = height, .rgb = rgb};
    cr_assert_eq (gq_gif_add (gif, &picture, &error), GQ_OK, "%s", error.text);
}

static void
finish (gq_gif *gif)
{
    gq_error error = {""};
    cr_assert_eq (gq_gif_finish (&gif, &error), GQ_OK, "%s", error.text);
    cr_assert_null (gif);
}

/* The field as Pong's state has it, at every pixel. */
static void
check_field (const GifFileType *gif, int index, const gq_pong_state *state)
{
    for (int y = 0; y < (int)FIELD; y++)
        for (int x = 0; x < (int)FIELD; x++) {
            int down = y - (int)state->ball_y, across = x - (int)state->ball_x;
            int left = y - (int)state->left_y, right = y - (int)state->right_y;
            GifColorType colour = colour_of (gif, index, x, y);
            if (state->in_play && across >= 0 && across < BALL && down >= 0 && down < BALL)
                cr_assert (is_colour (colour, 236, 236, 236), "no ball at %d %d", x, y);
            else if (x >= 16 && x < 20 && left >= 0 && left < PADDLE)
                cr_assert (is_colour (colour, 213, 130, 74), "no left paddle at %d %d", x, y);
            else if (x >= 140 && x < 144 && right >= 0 && right < PADDLE)
                cr_assert (is_colour (colour, 92, 186, 92), "no right paddle at %d %d", x, y);
            else
                cr_assert (is_colour (colour, 144, 72, 17), "no background at %d %d", x, y);
        }
}

Test (gif, game_of_pong_comes_back_picture_for_picture)
{
    enum { STEPS = 60 };
    static float observation[PIXELS];
    static gq_pong_state states[STEPS];
    gq_env *env = make_one (NULL);
    gq_error error = {""};
    gq_picture picture;
    gq_random random;
    uint64_t seed = 3;
    int in_play = 0, moved = 0;
    gq_gif *gif = create ();

    gq_random_seed (&random, seed);
    reset (env, 0, &seed, observation);
    for (int t = 0; t < STEPS; t++) {
        step (env, play_randomly (NULL, &random), observation, &states[t]);
        cr_assert_eq (env->ops->picture (env, 0, &picture, &error), GQ_OK);
        add (gif, picture.width, picture.height, picture.rgb);
    }
    finish (gif);
    gq_env_destroy (&env);

    GifFileType *read = read_gif (path);
    cr_assert_eq (read->ImageCount, STEPS);
    cr_assert (read->SWidth == 160 && read->SHeight == 160);
    for (int t = 0; t < STEPS; t++) {
        check_field (read, t, &states[t]);
        in_play += states[t].in_play;
        moved += t > 0 && memcmp (read->SavedImages[t].RasterBits,
                                  read->SavedImages[t - 1].RasterBits, 160 * 160) != 0;
    }
    cr_assert (in_play > 30 && moved > 30, "%d %d", in_play, moved);
    DGifCloseFile (read, NULL);
}

/* A second of pictures lasts a second, and the animation starts again by itself. */
Test (gif, fifteen_pictures_last_a_second)
{
    static const uint8_t rgb[3] = {1, 2, 3};
    gq_gif *gif = create ();
    int hundredths = 0;

    for (int i = 0; i < 15; i++)
        add (gif, 1, 1, rgb);
    finish (gif);
    GifFileType *read = read_gif (path);
    cr_assert_eq (read->ImageCount, 15);
    for (int i = 0; i < 15; i++) {
        GraphicsControlBlock control;
        cr_assert_eq (DGifSavedExtensionToGCB (read, i, &control), GIF_OK);
        cr_assert (control.DelayTime == 6 || control.DelayTime == 7);
        hundredths += control.DelayTime;
    }
    cr_assert_eq (hundredths, 100);
    const SavedImage *first = &read->SavedImages[0];
    cr_assert_geq (first->ExtensionBlockCount, 1);
    cr_assert_arr_eq (first->ExtensionBlocks[0].Bytes, "NETSCAPE2.0", 11);
    DGifCloseFile (read, NULL);
}

/* Picture `count` colours wide, each another; then how far the worst came back from itself. */
static int
worst_colour (int count)
{
    uint8_t *rgb = calloc ((size_t)count, 3);
    int worst = 0;
    cr_assert_not_null (rgb);
    for (int i = 0; i < count; i++) {
        rgb[3 * i] = (uint8_t)(i % 256);
        rgb[3 * i + 1] = (uint8_t)(i % 256 * 7);
        rgb[3 * i + 2] = (uint8_t)(i / 256 * 50);
    }
    gq_gif *gif = create ();
    add (gif, (uint32_t)count, 1, rgb);
    finish (gif);
    GifFileType *read = read_gif (path);
    cr_assert_eq (read->ImageCount, 1);
    for (int i = 0; i < count; i++) {
        GifColorType colour = colour_of (read, 0, i, 0);
        int is[3] = {colour.Red, colour.Green, colour.Blue};
        for (int c = 0; c < 3; c++)
            worst = abs (is[c] - rgb[3 * i + c]) > worst ? abs (is[c] - rgb[3 * i + c]) : worst;
    }
    DGifCloseFile (read, NULL);
    free (rgb);
    return worst;
}

Test (gif, up_to_256_colours_are_kept_and_more_become_near_ones)
{
    cr_assert_eq (worst_colour (1), 0);
    cr_assert_eq (worst_colour (5), 0);
    cr_assert_eq (worst_colour (256), 0);
    /* The cube's levels are 51 apart. */
    cr_assert_leq (worst_colour (257), 26);
    cr_assert_leq (worst_colour (1000), 26);
}

Test (gif, many_greys_keep_a_finer_scale_than_the_cubes)
{
    static uint8_t rgb[3 * 300];
    gq_gif *gif = create ();

    for (int i = 0; i < 300; i++)
        memset (rgb + 3 * i, i, 3); /* the first 44 again at the end, and one that is no grey */
    for (int i = 256; i < 300; i++)
        rgb[3 * i] = (uint8_t)(i + 100);
    add (gif, 300, 1, rgb);
    finish (gif);
    GifFileType *read = read_gif (path);
    for (int i = 0; i < 256; i++) {
        GifColorType colour = colour_of (read, 0, i, 0);
        cr_assert (colour.Red == colour.Green && colour.Green == colour.Blue);
        cr_assert_leq (abs (colour.Red - i), 4, "%d became %d", i, colour.Red);
    }
    DGifCloseFile (read, NULL);
}

static void
expect_only (const char *text)
{
    char command[256], is[64] = "";
    snprintf (command, sizeof command, "cat %s/*", folder); /* the only file there */
    FILE *pipe = popen (command, "r");
    cr_assert (pipe != NULL && fgets (is, sizeof is, pipe) != NULL && pclose (pipe) == 0);
    cr_assert_str_eq (is, text);
}

Test (gif, recording_that_fails_leaves_the_file_as_it_was)
{
    static const uint8_t rgb[3 * 4];
    gq_error error = {""};
    gq_picture other = {.width = 2, .height = 2, .rgb = rgb};
    FILE *file = fopen (path, "w");
    cr_assert (file != NULL && fputs ("precious", file) >= 0 && fclose (file) == 0);

    gq_gif *gif = create ();
    add (gif, 4, 1, rgb);
    cr_assert_eq (gq_gif_add (gif, &other, &error), GQ_INVALID);
    cr_assert_not_null (strstr (error.text, "2 x 2 pixels follows ones of 4 x 1"), "%s",
                        error.text);
    gq_gif_drop (&gif);
    cr_assert_null (gif);
    expect_only ("precious");
}

/* From here on this process may write so many bytes of a file. */
static void
limit_files (rlim_t bytes)
{
    struct rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
    signal (SIGXFSZ, SIG_IGN);
    cr_assert_eq (setrlimit (RLIMIT_FSIZE, &limit), 0);
}

Test (gif, disk_that_is_full_is_told_and_nothing_is_left)
{
    static uint8_t rgb[3 * 100 * 100];
    gq_error error = {""};
    gq_picture picture = {.width = 100, .height = 100, .rgb = rgb};
    gq_status status = GQ_OK;
    gq_gif *gif = create ();

    for (size_t i = 0; i < sizeof rgb; i++)
        rgb[i] = (uint8_t)(i * i >> 7);
    limit_files (8192);
    for (int i = 0; status == GQ_OK && i < 100; i++)
        status = gq_gif_add (gif, &picture, &error);
    cr_assert_eq (status, GQ_IO);
    cr_assert_not_null (strstr (error.text, "File too large"), "%s", error.text);
    gq_gif_drop (&gif);
}

Test (gif, disk_that_is_full_at_the_very_end_is_told_too)
{
    static const uint8_t rgb[3];
    gq_error error = {""};
    gq_gif *gif = create ();

    add (gif, 1, 1, rgb); /* still in the buffer */
    limit_files (10);
    cr_assert_eq (gq_gif_finish (&gif, &error), GQ_IO);
    cr_assert_null (gif);
    cr_assert_not_null (strstr (error.text, "File too large"), "%s", error.text);
}

Test (gif, places_that_cannot_be_written_are_refused_by_name)
{
    gq_error error = {""};
    gq_gif *gif = NULL;

    cr_assert_eq (gq_gif_create (&gif, "/nonexistent/a.gif", &error), GQ_IO);
    cr_assert_null (gif);
    cr_assert_not_null (strstr (error.text, "/nonexistent/a.gif"), "%s", error.text);
    cr_assert_not_null (strstr (error.text, "No such file"), "%s", error.text);
    cr_assert_eq (gq_gif_create (&gif, "/dev/null", &error), GQ_IO);
    cr_assert_not_null (strstr (error.text, "not a regular file"), "%s", error.text);
}
