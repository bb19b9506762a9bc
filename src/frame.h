/*
 * Frame codec: header bytes <-> gq_frame.  Steps 1 to 7 of the path all pass through here.
 * Never reads past the size it is given; never trusts a field it has not checked.
 */
#ifndef GQ_FRAME_H
#define GQ_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "gradq/protocol.h"

/* CRC32C (Castagnoli, reflected, as iSCSI and RFC 3720 appendix B.4 give it) of bytes[size]. */
uint32_t gq_crc32c (const void *bytes, size_t size);

/* The CRC of what `crc` covers followed by bytes[size]. */
uint32_t gq_crc32c_more (uint32_t crc, const void *bytes, size_t size);

/* to[size] = from[size], and its CRC, in one pass. */
uint32_t gq_crc32c_copy (void *restrict to, const void *restrict from, size_t size);

/* The CRC of what `crc` covers followed by `size` bytes whose own CRC is `behind`.  O(log size). */
uint32_t gq_crc32c_join (uint32_t crc, uint32_t behind, uint64_t size);

/*
 * Write the header for *frame and payload[frame->payload_bytes] into header[GQ_FRAME_HEADER_BYTES].
 * The payload is only read, for its CRC: one pass.  On lane shm it is not read and may be NULL:
 * memory needs no checksum, and a pass over it would cost as much as a third of Adam's step.
 */
void gq_frame_encode (const gq_frame *frame, const void *payload, uint8_t *header);

/* The same for a payload whose CRC is known; on lane shm it is 0. */
void gq_frame_encode_summed (const gq_frame *frame, uint32_t payload_crc, uint8_t *header);

/*
 * Read and check the header at bytes[size], where size is the whole message: magic, protocol
 * version, kind, encoding, lane, reserved bytes, counts against sizes, header CRC.  Does not read
 * the payload.  O(1).
 *
 * GQ_OK: *frame is filled.  GQ_MALFORMED, GQ_CHECKSUM: *frame is untouched.
 */
GQ_CHECK gq_status gq_frame_decode (const void *bytes, size_t size, gq_frame *frame);

/* The header alone, GQ_FRAME_HEADER_BYTES bytes whose payload was not kept: all the same checks but
 * that of the message's size. */
GQ_CHECK gq_status gq_frame_decode_header (const void *header, gq_frame *frame);

/* The payload's CRC as the header says it. */
uint32_t gq_frame_payload_crc (const void *header);

/* Compare the payload's CRC with the header's.  `bytes` passed gq_frame_decode.  One pass. */
GQ_CHECK gq_status gq_frame_check_payload (const void *bytes, size_t size);

/* gq_ack <-> its GQ_ACK_BYTES bytes. */
void gq_ack_encode (const gq_ack *ack, uint8_t *bytes);
void gq_ack_decode (const uint8_t *bytes, gq_ack *ack);

/* Subscription prefix for a kind (8 bytes), and for the acks of one actor (12 bytes). */
#define GQ_TOPIC_KIND_BYTES  8
#define GQ_TOPIC_ACTOR_BYTES 12
void gq_topic (gq_frame_kind kind, uint32_t actor, uint8_t topic[GQ_TOPIC_ACTOR_BYTES]);

#endif
