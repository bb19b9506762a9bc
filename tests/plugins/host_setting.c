/* Test data: a setting that the host owns. */
#define BAD_ROWS {"clip_norm", 0, 0, 1, NULL, "mine"},
#include "template.h"
