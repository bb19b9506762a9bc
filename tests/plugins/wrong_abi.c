/* Test data: a plug-in of a later ABI. */
#define BAD_ABI 4242
#include "template.h"
