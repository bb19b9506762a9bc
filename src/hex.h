/*
 * Bytes as lower-case hexadecimal text and back: run ids, nonces, digests, peer identities.
 */
#ifndef GQ_HEX_H
#define GQ_HEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* text[2 * size + 1], NUL-terminated. */
void gq_hex_encode (const uint8_t *bytes, size_t size, char *text);

/* false, and bytes[size] untouched, unless text is exactly 2 * size hexadecimal digits. */
bool gq_hex_decode (const char *text, uint8_t *bytes, size_t size);

#endif
