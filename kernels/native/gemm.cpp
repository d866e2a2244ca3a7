// Matrix products with packed weights: the one entry for every format.
#include "gemm_tiles.h"
#include "program.h"

extern "C" {

// The instructions that the kernels use on this CPU: 2 AVX-512 with VNNI, 1 AVX2, 0 none (there are no kernels).
int tw_gemm_instructions() {
#ifdef TW_GEMM
    return TW_GEMM;
#else
    return 0;
#endif
}

#ifdef TW_GEMM
// out [m, n] = x [m, k] * w^T + bias; rows of x and out lie `ldx` and `ldo` floats apart.
void tw_gemm(const tiles::Weight* w, const float* x, int64_t ldx, int64_t m, float* out, int64_t ldo, int threads) {
    if (m <= 0 || w->n <= 0) return;
    const tiles::Product product{x, ldx, m, out, ldo, threads};
    if (w->format == tiles::BF16) tiles::multiply_bf16(*w, product);
    else if (w->format == tiles::INT8) tiles::multiply_int8(*w, product);
    else tiles::multiply_blocks(*w, product);
}
#endif

}  // extern "C"

#ifdef TW_GEMM
TW_RECORDABLE(tw_gemm)
#endif
