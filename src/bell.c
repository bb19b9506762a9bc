/*
 * Bell.
 */
#include "bell.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Forgotten at once: anybody may ring, and who does not stop must not keep us. */
#define RINGS_MAX 64

gq_bell_name
gq_bell_name_of (int board_fd)
{
    struct stat info;
    if (fstat (board_fd, &info) != 0)
        return (gq_bell_name){0};
    return (gq_bell_name){.device = info.st_dev, .inode = info.st_ino};
}

/* A name in Linux' abstract namespace begins with a zero byte and has no end but its length. */
static socklen_t
address_of (struct sockaddr_un *address, gq_bell_name name)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int size = snprintf (address->sun_path + 1, sizeof address->sun_path - 1,
                         "gradq-bell-%" PRIx64 "-%" PRIx64, name.device, name.inode);
    return (socklen_t)(offsetof (struct sockaddr_un, sun_path) + 1 + (size_t)size);
}

int
gq_bell_open (gq_bell_name name)
{
    struct sockaddr_un address;
    const socklen_t size = address_of (&address, name);
    int bell = socket (AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bell >= 0 && bind (bell, (const struct sockaddr *)&address, size) != 0) {
        close (bell);
        bell = -1;
    }
    return bell;
}

void
gq_bell_silence (int bell)
{
    char byte;
    for (int i = 0; i < RINGS_MAX && recv (bell, &byte, sizeof byte, MSG_DONTWAIT) >= 0; i++)
        continue;
}

int
gq_bell_rope (void)
{
    return socket (AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

void
gq_bell_ring (int rope, gq_bell_name name)
{
    struct sockaddr_un address;
    const socklen_t size = address_of (&address, name);
    (void)!sendto (rope, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, (const struct sockaddr *)&address,
                   size);
}
