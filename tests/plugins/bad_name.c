/* Test data: a name with a slash would escape into paths. */
#define BAD_NAME "../good"
#include "template.h"
