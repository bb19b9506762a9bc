/* Test data: one name for a slot and a scalar. */
#define BAD_SLOTS   "power"
#define BAD_SCALARS "power"
#include "template.h"
