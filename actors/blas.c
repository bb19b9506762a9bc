/*
 * Products of matrices, thin ones in pieces.  Step 0 of a gradient's path.
 *
 * OpenBLAS copies both factors into packed blocks before it multiplies.  With 32 filters or 8 games
 * that costs about as much as the product.  For AVX-512 it also has kernels that pack nothing, and
 * takes them for small products (0.3.21, kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); a
 * thin product is cut into such.  docs/PERFORMANCE.md has what that brings.
 */
#include "blas.h"

#include <strings.h>

/* OpenBLAS holds a product of up to so many multiplications to be small, ... */
#define SMALL_MAX 1000000
/* ... and where only the second factor is stored transposed, one of up to so many elements that are
 * sums of at least so many products. */
#define SMALL_RESULT_MAX 1200
#define SMALL_SUM_MIN    32
/* More calls than shorter pieces would make are not worth it. */
#define PIECE_MIN 8
/* With a shortest side longer than this, packing is worth it. */
#define THIN_MAX 48

typedef struct product {
    CBLAS_TRANSPOSE a_order, b_order;
    size_t m, n, k;
    size_t a_row, b_row, c_row; /* floats from one stored row to the next */
} product;

static bool cuts;

void
gq_blas_cut (bool thin)
{
    cuts = thin;
}

void
gq_blas_begin (void)
{
    static const char *const cores[] = {"SkylakeX", "Cooperlake", "SapphireRapids"};
    const char *core = openblas_get_corename ();
    bool has_small = false;
    openblas_set_num_threads (1);
    for (size_t i = 0; i < sizeof cores / sizeof cores[0]; i++)
        has_small = has_small || strcasecmp (core, cores[i]) == 0;
    gq_blas_cut (has_small);
}

static size_t
smaller (size_t a, size_t b)
{
    return a < b ? a : b;
}

static bool
is_dot (const product *p) /* rows of a with rows of b */
{
    return p->a_order == CblasNoTrans && p->b_order == CblasTrans;
}

/* The side to cut: the longest, but the sums of rows with rows stay whole. */
static size_t *
longest (product *p)
{
    size_t *side = p->m >= p->n ? &p->m : &p->n;
    return !is_dot (p) && p->k > *side ? &p->k : side;
}

/* How long the pieces of that side are: all of it, when the product is not thin. */
static size_t
piece_of (const product *p, size_t side)
{
    if (smaller (p->k, smaller (p->m, p->n)) > THIN_MAX || (is_dot (p) && p->k < SMALL_SUM_MIN))
        return side;
    size_t piece = SMALL_MAX / (p->m * p->n * p->k / side);
    if (is_dot (p))
        piece = smaller (piece, SMALL_RESULT_MAX / (p->m * p->n / side));
    if (piece < PIECE_MIN || piece >= side)
        return side;
    size_t pieces = (side + piece - 1) / piece;
    return (side + pieces - 1) / pieces;
}

static void
multiply (const product *p, const float *a, const float *b, float beta, float *c)
{
    cblas_sgemm (CblasRowMajor, p->a_order, p->b_order, gq_blas_dim (p->m), gq_blas_dim (p->n),
                 gq_blas_dim (p->k), 1.0f, a, gq_blas_dim (p->a_row), b, gq_blas_dim (p->b_row),
                 beta, c, gq_blas_dim (p->c_row));
}

void
gq_multiply (CBLAS_TRANSPOSE a_order, CBLAS_TRANSPOSE b_order, size_t m, size_t n, size_t k,
             const float *a, const float *b, float beta, float *c)
{
    const bool a_plain = a_order == CblasNoTrans, b_plain = b_order == CblasNoTrans;
    product p = {.a_order = a_order, .b_order = b_order, .m = m, .n = n, .k = k};
    p.a_row = a_plain ? k : m, p.b_row = b_plain ? n : k, p.c_row = n;
    size_t *side = longest (&p);
    const size_t whole = *side, piece = cuts ? piece_of (&p, whole) : whole;
    /* From one element of that side to the next, in each matrix. */
    const size_t a_step = side == &p.n ? 0 : a_plain == (side == &p.m) ? p.a_row : 1;
    const size_t b_step = side == &p.m ? 0 : b_plain == (side == &p.k) ? p.b_row : 1;
    const size_t c_step = side == &p.k ? 0 : side == &p.m ? p.c_row : 1;
    for (size_t done = 0; done < whole; done += piece) {
        *side = smaller (piece, whole - done);
        multiply (&p, a + done * a_step, b + done * b_step, side == &p.k && done > 0 ? 1.0f : beta,
                  c + done * c_step);
    }
}
