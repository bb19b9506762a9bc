/* Test data: two slots of one name would overwrite each other in a checkpoint. */
#define BAD_SLOTS "exp_avg", "exp_avg"
#include "template.h"
