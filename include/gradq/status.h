/*
 * What every fallible call of gradq answers.
 *
 * Peers, users and the system cause a status; only a bug of our own causes an assertion.
 * On any status but GQ_OK nothing has changed and ownership has not moved.
 */
#ifndef GRADQ_STATUS_H
#define GRADQ_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Name, word for JSON and logs, sentence for people.  The position is the number on the wire, so
 * append only. */
#define GQ_STATUS_LIST(X)                                                                      \
    X (OK, "ok", "done")                                                                       \
    X (AGAIN, "again", "not yet; try again later")                                             \
    X (TIMEOUT, "timeout",                                                                     \
       "no answer in time; is every process of the run alive? (tools/gradq status)")           \
    X (FULL, "full", "the queue is full; the optimizer is slower than the actors")             \
    X (MALFORMED, "malformed",                                                                 \
       "the bytes are not a gradq frame of this protocol; see docs/PROTOCOL.md")               \
    X (CHECKSUM, "checksum", "the checksum does not match; the bytes were damaged on the way") \
    X (LAYOUT, "layout", "the parameter layout differs from the one this run uses")            \
    X (COUNT, "count", "the element count differs from the layout's")                          \
    X (NONFINITE, "nonfinite",                                                                 \
       "the gradient holds NaN or infinity; check the loss and the learning rate")             \
    X (STALE, "stale", "the gradient is older than --max-staleness allows")                    \
    X (RUN, "run", "the frame belongs to another run")                                         \
    X (UNREACHABLE, "unreachable",                                                             \
       "the broker cannot be reached; start it or correct the address")                        \
    X (INVALID, "invalid", "an argument or setting is not valid")                              \
    X (NOTFOUND, "notfound", "there is no such file or entry")                                 \
    X (ABI, "abi",                                                                             \
       "the plug-in was built for another gradq; rebuild it against gradq/optimizer.h")        \
    X (IO, "io", "reading or writing failed; see the system's message")                        \
    X (MEMORY, "memory", "out of memory")                                                      \
    X (REFUSED, "refused", "the other side refused the request")                               \
    X (CLOSED, "closed", "the client is closed or was interrupted")                            \
    X (FENCED, "fenced", "another process runs under this actor's id; this one has to end")

typedef enum gq_status {
#define GQ_STATUS_ENUM(name, word, text) GQ_##name,
    GQ_STATUS_LIST (GQ_STATUS_ENUM)
#undef GQ_STATUS_ENUM
        GQ_STATUS_COUNT
} gq_status;

#define GQ_CHECK __attribute__ ((warn_unused_result))

/* A sentence that says what is wrong and what to do; filled by the call that fails. */
typedef struct gq_error {
    char text[1024];
} gq_error;

#pragma GCC visibility push(default)

/* The status' short name in lower case ("nonfinite"), and its sentence.  Never NULL. */
const char *gq_status_name (gq_status status);
const char *gq_status_text (gq_status status);

/* Write the sentence into *error (which may be NULL) and give `status` back. */
gq_status gq_fail (gq_error *error, gq_status status, const char *format, ...)
    __attribute__ ((format (printf, 3, 4)));

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
