/* Test data: the base kernel is missing. */
#define BAD_APPLY NULL
#include "template.h"
