/* Test data: a sound plug-in whose learning rate has another name. */
#define BAD_LR "rate"
#include "template.h"
