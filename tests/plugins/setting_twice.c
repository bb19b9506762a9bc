/* Test data: two rows of one name. */
#define BAD_ROWS {"lr", 0, 0, 1, NULL, "again"},
#include "template.h"
