/*
 * Row-major products of dense matrices on OpenBLAS.  Step 0 of a gradient's path.
 */
#ifndef GQ_BLAS_H
#define GQ_BLAS_H

#include <assert.h>
#include <cblas.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

/* Before any product, and again without harm: one thread of this process, for cores belong to
 * actors, one each; and how products are best made on this processor. */
void gq_blas_begin (void);

/* What begin has found out, otherwise: are thin products made in pieces?  For tests. */
void gq_blas_cut (bool thin);

/* c (m, n) = a (m, k) b (k, n) + beta c; with CblasTrans a or b is stored transposed. */
void gq_multiply (CBLAS_TRANSPOSE a_order, CBLAS_TRANSPOSE b_order, size_t m, size_t n, size_t k,
                  const float *a, const float *b, float beta, float *c);

static inline int
gq_blas_dim (size_t n)
{
    assert (n <= INT_MAX);
    return (int)n;
}

/* y (m) += a (m, n) x (n); with CblasTrans y (n) += x (m) a. */
static inline void
gq_multiply_vector (CBLAS_TRANSPOSE order, size_t m, size_t n, const float *a, const float *x,
                    float *y)
{
    cblas_sgemv (CblasRowMajor, order, gq_blas_dim (m), gq_blas_dim (n), 1.0f, a, gq_blas_dim (n),
                 x, 1, 1.0f, y, 1);
}

/* y (rows, m) += x (rows, n) a (m, n)^T. */
static inline void
gq_multiply_rows (size_t rows, size_t m, size_t n, const float *x, const float *a, float *y)
{
    if (rows == 1) /* twice as fast as a product of matrices, where none is small */
        gq_multiply_vector (CblasNoTrans, m, n, a, x, y);
    else
        gq_multiply (CblasNoTrans, CblasTrans, rows, m, n, x, a, 1.0f, y);
}

#endif
