/*
 * One address in, six endpoints out.  Fixed places rather than ports chosen by the system: when a
 * broker comes back after a crash, every peer's socket finds it again without another hello.
 */
#include "endpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* sockaddr_un.sun_path holds 108 bytes with its NUL. */
#define IPC_PATH_MAX 107

static const char *const endings[] = {
    "", ".gradients-in", ".gradients-out", ".weights-in", ".weights-out", ".acks-out"};
enum { ENDPOINT_COUNT = sizeof endings / sizeof endings[0] };

static gq_status
derive_ipc (char *const texts[], const char *address, gq_error *error)
{
    const char *path = address + strlen ("ipc://");
    size_t ending_max = strlen (".gradients-out");
    if (*path == '\0')
        return gq_fail (error, GQ_INVALID, "address %s: a path must follow ipc://", address);
    if (strlen (path) + ending_max > IPC_PATH_MAX)
        return gq_fail (error, GQ_INVALID,
                        "address %s: the path has %zu bytes, at most %zu are allowed; choose a "
                        "shorter directory",
                        address, strlen (path), IPC_PATH_MAX - ending_max);
    for (size_t i = 0; i < ENDPOINT_COUNT; i++)
        snprintf (texts[i], GQ_ENDPOINT_MAX, "%s%s", address, endings[i]);
    return GQ_OK;
}

static gq_status
derive_tcp (char *const texts[], const char *address, gq_error *error)
{
    const char *colon = strrchr (address + strlen ("tcp://"), ':');
    char *end = NULL;
    long port = colon == NULL ? 0 : strtol (colon + 1, &end, 10);
    long port_max = 65535 - (ENDPOINT_COUNT - 1);
    if (colon == NULL || colon[1] < '0' || colon[1] > '9' || *end != '\0' || port < 1 ||
        port > port_max)
        return gq_fail (error, GQ_INVALID,
                        "address %s: tcp://HOST:PORT with PORT from 1 to %ld is needed; the five "
                        "ports above it are used too",
                        address, port_max);
    size_t stem = (size_t)(colon - address);
    if (stem == strlen ("tcp://") || stem > GQ_ENDPOINT_MAX - 8)
        return gq_fail (error, GQ_INVALID, "address %s: the host is missing or too long", address);
    for (size_t i = 0; i < ENDPOINT_COUNT; i++)
        snprintf (texts[i], GQ_ENDPOINT_MAX, "%.*s:%ld", (int)stem, address, port + (long)i);
    return GQ_OK;
}

gq_status
gq_endpoints_derive (gq_endpoints *endpoints, const char *address, gq_error *error)
{
    char *const texts[ENDPOINT_COUNT] = {endpoints->control,       endpoints->gradients_in,
                                         endpoints->gradients_out, endpoints->weights_in,
                                         endpoints->weights_out,   endpoints->acks_out};
    if (strncmp (address, "ipc://", 6) == 0)
        return derive_ipc (texts, address, error);
    if (strncmp (address, "tcp://", 6) == 0)
        return derive_tcp (texts, address, error);
    return gq_fail (error, GQ_INVALID, "address %s: tcp://HOST:PORT or ipc://PATH is needed",
                    address);
}
