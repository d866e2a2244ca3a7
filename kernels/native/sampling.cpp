// Greedy choice from rows of logits.

#include <limits>

#include "program.h"
#include "vec.h"

namespace {

using namespace tw;

// Index of the first largest value; NaN counts as larger than all, as in torch. `top` is that value.
int64_t first_largest(const float* x, int64_t width, float& top) {
    f32x16 best = splat(-std::numeric_limits<float>::infinity());
    i32x16 strange{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const f32x16 v = load(x + i);
        best = max(v, best);
        strange |= v != v;
    }
    top = largest(best);
    bool nan = false;
    for (int j = 0; j < LANES; ++j) nan |= strange[j] != 0;
    for (; i < width; ++i) {
        top = x[i] > top ? x[i] : top;
        nan |= x[i] != x[i];
    }
    if (nan) {
        for (i = 0; x[i] == x[i]; ++i) {
        }
        top = x[i];
        return i;
    }
    for (i = 0; i + LANES <= width; i += LANES) {
        const i32x16 same = load(x + i) == splat(top);
        int32_t any = 0;
        for (int j = 0; j < LANES; ++j) any |= same[j];
        if (any) break;
    }
    while (x[i] != top) ++i;
    return i;
}

}  // namespace

extern "C" {

// ids[r], tops[r]: index and value of the first largest of row r of logits [rows, width], `stride` floats apart.
void tw_largest(const float* logits, int64_t* ids, float* tops, int64_t rows, int64_t width, int64_t stride,
                int threads) {
    parallel(rows, 128 * 1024 / (width + 1) + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) ids[r] = first_largest(logits + r * stride, width, tops[r]);
    });
}

}  // extern "C"

TW_RECORDABLE(tw_largest)
