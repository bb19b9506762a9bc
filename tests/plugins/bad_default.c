/* Test data: a default outside its own bounds. */
#define BAD_ROWS {"beta", 2, 0, 1, NULL, "decay"},
#include "template.h"
