/*
 * An episode as an animated GIF, by giflib.  Beside a gradient's path: for people to look at.
 *
 * Must never leave a file that is not whole.
 */
#include "gif.h"

#include <assert.h>
#include <errno.h>
#include <gif_lib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PICTURES_PER_S 15 /* an Atari game's own speed, whose steps are four frames of 1/60 s */
#define COLOURS        256
#define CUBE           6u  /* levels of red, green and blue in the fixed palette */
#define GREYS          40u /* in it beside the cube */

struct gq_gif {
    char *path, *temp;
    bool made; /* `temp` is there */
    FILE *file;
    GifFileType *out;
    int reason; /* errno of a write that failed */
    uint32_t width, height;
    uint64_t count;  /* pictures so far */
    uint8_t *pixels; /* [height, width] */
    GifColorType colours[COLOURS];
};

/* ---- colours ------------------------------------------------------------------------------ */

/* The index of a colour among the first *count, to which a new one is added; -1: no room. */
static int
find_colour (GifColorType colours[COLOURS], int *count, const uint8_t rgb[3])
{
    for (int i = 0; i < *count; i++)
        if (colours[i].Red == rgb[0] && colours[i].Green == rgb[1] && colours[i].Blue == rgb[2])
            return i;
    if (*count == COLOURS)
        return -1;
    colours[*count] = (GifColorType){rgb[0], rgb[1], rgb[2]};
    return (*count)++;
}

/* The picture's own colours; how many, or -1: more than there is room for. */
static int
take_own_colours (gq_gif *gif, const uint8_t *rgb)
{
    size_t pixels = (size_t)gif->width * gif->height;
    int count = 0, index = 0;

    for (size_t i = 0; i < pixels; i++, rgb += 3) {
        if (i == 0 || memcmp (rgb, rgb - 3, 3) != 0)
            index = find_colour (gif->colours, &count, rgb);
        if (index < 0)
            return -1;
        gif->pixels[i] = (uint8_t)index;
    }
    return count;
}

static unsigned
level (unsigned value, unsigned levels)
{
    return (value * (levels - 1) + 127) / 255;
}

/* The nearest colours of a fixed palette: a cube, and greys. */
static void
take_nearest_colours (gq_gif *gif, const uint8_t *rgb)
{
    size_t pixels = (size_t)gif->width * gif->height;

    for (unsigned i = 0; i < CUBE * CUBE * CUBE; i++)
        gif->colours[i] = (GifColorType){(uint8_t)(i / (CUBE * CUBE) * 255 / (CUBE - 1)),
                                         (uint8_t)(i / CUBE % CUBE * 255 / (CUBE - 1)),
                                         (uint8_t)(i % CUBE * 255 / (CUBE - 1))};
    for (unsigned i = 0; i < GREYS; i++) {
        uint8_t grey = (uint8_t)(i * 255 / (GREYS - 1));
        gif->colours[CUBE * CUBE * CUBE + i] = (GifColorType){grey, grey, grey};
    }
    for (size_t i = 0; i < pixels; i++, rgb += 3) {
        bool grey = rgb[0] == rgb[1] && rgb[1] == rgb[2];
        unsigned place = (level (rgb[0], CUBE) * CUBE + level (rgb[1], CUBE)) * CUBE;
        gif->pixels[i] = (uint8_t)(grey ? CUBE * CUBE * CUBE + level (rgb[0], GREYS)
                                        : place + level (rgb[2], CUBE));
    }
}

/* ---- the file ----------------------------------------------------------------------------- */

static int
write_bytes (GifFileType *out, const GifByteType *bytes, int size)
{
    gq_gif *gif = out->UserData;
    size_t written = fwrite (bytes, 1, (size_t)size, gif->file);

    if (written != (size_t)size)
        gif->reason = errno;
    return (int)written;
}

static gq_status
broken (const gq_gif *gif, gq_error *error)
{
    return gq_fail (error, GQ_IO, "%s: cannot record: %s", gif->path,
                    gif->reason != 0 ? strerror (gif->reason) : GifErrorString (gif->out->Error));
}

/* gif->file and gif->out. */
static gq_status
open_temp (gq_gif *gif, gq_error *error)
{
    struct stat info;

    /* rename () would put a plain file in the place of a device such as /dev/null. */
    if (stat (gif->path, &info) == 0 && !S_ISREG (info.st_mode))
        return gq_fail (error, GQ_IO, "--record %s: not a regular file", gif->path);
    gif->file = fopen (gif->temp, "wxe");
    if (gif->file == NULL)
        return gq_fail (error, GQ_IO, "--record %s: cannot write beside it: %s", gif->path,
                        strerror (errno));
    gif->made = true;
    gif->out = EGifOpen (gif, write_bytes, NULL);
    if (gif->out == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a recording");
    return GQ_OK;
}

gq_status
gq_gif_create (gq_gif **gif_p, const char *path, gq_error *error)
{
    gq_gif *gif = calloc (1, sizeof *gif);

    *gif_p = NULL;
    if (gif == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a recording");
    /* A symbolic link stays one: what it points to is replaced. */
    gif->path = realpath (path, NULL);
    if (gif->path == NULL)
        gif->path = strdup (path);
    if (gif->path == NULL || asprintf (&gif->temp, "%s.tmp-%ld", gif->path, (long)getpid ()) < 0) {
        gif->temp = NULL;
        gq_gif_drop (&gif);
        return gq_fail (error, GQ_MEMORY, "out of memory for a recording");
    }
    gq_status status = open_temp (gif, error);
    if (status != GQ_OK) {
        gq_gif_drop (&gif);
        return status;
    }
    *gif_p = gif;
    return GQ_OK;
}

/* Size of all pictures, and that they are shown again and again. */
static gq_status
begin (gq_gif *gif, const gq_picture *picture, gq_error *error)
{
    gif->width = picture->width;
    gif->height = picture->height;
    gif->pixels = malloc ((size_t)gif->width * gif->height);
    if (gif->pixels == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a recording");
    EGifSetGifVersion (gif->out, true);
    if (EGifPutScreenDesc (gif->out, (int)gif->width, (int)gif->height, 8, 0, NULL) != GIF_OK ||
        EGifPutExtensionLeader (gif->out, APPLICATION_EXT_FUNC_CODE) != GIF_OK ||
        EGifPutExtensionBlock (gif->out, 11, "NETSCAPE2.0") != GIF_OK ||
        EGifPutExtensionBlock (gif->out, 3, "\1\0") != GIF_OK || /* 1, then u16 rounds, 0: no end */
        EGifPutExtensionTrailer (gif->out) != GIF_OK)
        return broken (gif, error);
    return GQ_OK;
}

/* gif->pixels with the first `colours` of gif->colours. */
static gq_status
put_picture (gq_gif *gif, int colours, gq_error *error)
{
    /* Hundredths of a second, so that no rounding adds up. */
    uint64_t from = 100 * gif->count / PICTURES_PER_S, to = 100 * (gif->count + 1) / PICTURES_PER_S;
    GraphicsControlBlock control = {.DisposalMode = DISPOSE_DO_NOT,
                                    .DelayTime = (int)(to - from),
                                    .TransparentColor = NO_TRANSPARENT_COLOR};
    GifByteType extension[4];
    int size = 2;

    while (size < colours)
        size *= 2; /* as the format has it */
    ColorMapObject *map = GifMakeMapObject (size, gif->colours);
    if (map == NULL)
        return gq_fail (error, GQ_MEMORY, "out of memory for a recording");
    int length = (int)EGifGCBToExtension (&control, extension);
    bool well =
        EGifPutExtension (gif->out, GRAPHICS_EXT_FUNC_CODE, length, extension) == GIF_OK &&
        EGifPutImageDesc (gif->out, 0, 0, (int)gif->width, (int)gif->height, false, map) == GIF_OK;
    GifFreeMapObject (map);
    for (uint32_t row = 0; well && row < gif->height; row++)
        well = EGifPutLine (gif->out, gif->pixels + (size_t)row * gif->width, (int)gif->width) ==
               GIF_OK;
    return well ? GQ_OK : broken (gif, error);
}

gq_status
gq_gif_add (gq_gif *gif, const gq_picture *picture, gq_error *error)
{
    gq_status status = gif->pixels == NULL ? begin (gif, picture, error) : GQ_OK;

    if (status != GQ_OK)
        return status;
    if (picture->width != gif->width || picture->height != gif->height)
        return gq_fail (error, GQ_INVALID,
                        "%s: cannot record: a picture of %u x %u pixels follows ones of %u x %u",
                        gif->path, picture->width, picture->height, gif->width, gif->height);
    int colours = take_own_colours (gif, picture->rgb);
    if (colours < 0) {
        take_nearest_colours (gif, picture->rgb);
        colours = COLOURS;
    }
    status = put_picture (gif, colours, error);
    gif->count++;
    return status;
}

gq_status
gq_gif_finish (gq_gif **gif_p, gq_error *error)
{
    gq_gif *gif = *gif_p;
    gq_status status = GQ_OK;

    assert (gif->count > 0);
    int closed = EGifCloseFile (gif->out, NULL);
    gif->out = NULL;
    bool well = fclose (gif->file) == 0 && closed == GIF_OK;
    gif->file = NULL;
    if (!well || rename (gif->temp, gif->path) != 0)
        status = gq_fail (error, GQ_IO, "%s: cannot record: %s", gif->path, strerror (errno));
    gif->made = status != GQ_OK;
    gq_gif_drop (gif_p);
    return status;
}

void
gq_gif_drop (gq_gif **gif_p)
{
    gq_gif *gif = *gif_p;

    if (gif == NULL)
        return;
    if (gif->out != NULL)
        EGifCloseFile (gif->out, NULL);
    if (gif->file != NULL)
        fclose (gif->file);
    if (gif->made && gif->temp != NULL)
        unlink (gif->temp);
    free (gif->path), free (gif->temp), free (gif->pixels);
    free (gif);
    *gif_p = NULL;
}
