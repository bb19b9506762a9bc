/*
 * Reading a recording back with giflib's decoder.  Never fails quietly.
 */
#ifndef GQ_GIF_TESTING_H
#define GQ_GIF_TESTING_H

#include <criterion/criterion.h>
#include <gif_lib.h>

/* Every picture of a file; to be closed with DGifCloseFile. */
static inline GifFileType *
read_gif (const char *path)
{
    int reason = 0;
    GifFileType *gif = DGifOpenFileName (path, &reason);
    cr_assert_not_null (gif, "%s: %s", path, GifErrorString (reason));
    cr_assert_eq (DGifSlurp (gif), GIF_OK, "%s: %s", path, GifErrorString (gif->Error));
    for (int i = 0; i < gif->ImageCount; i++) {
        const GifImageDesc *place = &gif->SavedImages[i].ImageDesc;
        cr_assert (place->Left == 0 && place->Top == 0);
        cr_assert (place->Width == gif->SWidth && place->Height == gif->SHeight);
    }
    return gif;
}

/* The colour of a pixel of picture `index`. */
static inline GifColorType
colour_of (const GifFileType *gif, int index, int x, int y)
{
    const SavedImage *image = &gif->SavedImages[index];
    const ColorMapObject *map = image->ImageDesc.ColorMap;
    cr_assert_not_null (map);
    cr_assert (index < gif->ImageCount && x < gif->SWidth && y < gif->SHeight);
    int at = image->RasterBits[y * gif->SWidth + x];
    cr_assert_lt (at, map->ColorCount);
    return map->Colors[at];
}

static inline bool
is_colour (GifColorType colour, int red, int green, int blue)
{
    return colour.Red == red && colour.Green == green && colour.Blue == blue;
}

#endif
