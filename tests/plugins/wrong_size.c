/* Test data: a plug-in whose struct is shorter than ours. */
#define BAD_SIZE 24
#include "template.h"
