/*
 * Test data: built with -ffast-math, whose start-up code sets flush-to-zero and denormals-are-zero
 * in MXCSR as soon as the library is loaded.  From GCC 13 on, the linker adds that code to programs
 * only; there the constructor below does the same.
 */
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 13)
#include <xmmintrin.h>
static void __attribute__ ((constructor)) flush_to_zero (void)
{
    _mm_setcsr (_mm_getcsr () | 0x8040);
}
#endif
#define BAD_NAME "fast_math"
#include "template.h"
