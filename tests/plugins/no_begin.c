/* Test data: begin is missing. */
#define BAD_BEGIN NULL
#include "template.h"
