/* Test data: a sound plug-in that brings the base kernel only. */
#include "template.h"
