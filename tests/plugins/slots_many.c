/* Test data: one slot more than GQ_SLOTS_MAX. */
#define BAD_SLOTS "a", "b", "c", "d", "e", "f", "g", "h", "i"
#include "template.h"
