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

static int
value_of (char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    if (digit >= 'A' && digit <= 'F')
        return digit - 'A' + 10;
    return -1;
}

bool
gq_hex_decode (const char *text, uint8_t *bytes, size_t size)
{
    if (strlen (text) != 2 * size)
        return false;
    for (size_t i = 0; i < 2 * size; i++)
        if (value_of (text[i]) < 0)
            return false;
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value_of (text[2 * i]) << 4 | value_of (text[2 * i + 1]));
    return true;
}
