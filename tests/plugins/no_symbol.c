/* Test data: a shared object that exports something else. */
#define BAD_SYMBOL gq_something_else
#include "template.h"
