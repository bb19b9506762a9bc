/* Test data: bounds that do not match the choices. */
#define BAD_ROWS {"kind", 0, 0, 5, "red|green", "colour"},
#include "template.h"
