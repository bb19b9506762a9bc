/* Test data: checkpoints call the slots of a retired rule so. */
#define BAD_SLOTS "retired"
#include "template.h"
