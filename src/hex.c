/*
 * Hexadecimal text.
 */
#include "hex.h"

#include <string.h>

void
gq_hex_encode (const uint8_t *bytes, size_t size, char *text)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < size; i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    text[2 * size] = '\0';
}

/* What no digit is worth.  Unsigned like the values, so that shifting one is always defined. */
#define NO_DIGIT 16u

static unsigned
value_of (char digit)
{
    if (digit >= '0' && digit <= '9')
        return (unsigned)(digit - '0');
    if (digit >= 'a' && digit <= 'f')
        return (unsigned)(digit - 'a' + 10);
    if (digit >= 'A' && digit <= 'F')
        return (unsigned)(digit - 'A' + 10);
    return NO_DIGIT;
}

bool
gq_hex_decode (const char *text, uint8_t *bytes, size_t size)
{
    if (strlen (text) != 2 * size)
        return false;
    for (size_t i = 0; i < 2 * size; i++)
        if (value_of (text[i]) == NO_DIGIT)
            return false;
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value_of (text[2 * i]) << 4 | value_of (text[2 * i + 1]));
    return true;
}
