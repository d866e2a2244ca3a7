// Sixteen floats at a time, in the vector extension that gcc and clang share: one source for every CPU.
//
// * Loads and stores need no alignment.
// * NaN and infinity pass through every function here: a row that went wrong has to show it.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tw {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

static inline f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

static inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The first n (< 16) floats of p, zeros after them.
static inline f32x16 load_some(const float* p, int64_t n) {
    f32x16 v{};
    std::memcpy(&v, p, size_t(n) * sizeof(float));
    return v;
}

static inline void store_some(float* p, f32x16 v, int64_t n) { std::memcpy(p, &v, size_t(n) * sizeof(float)); }

static inline float sum(f32x16 v) {
    float part[8];
    for (int i = 0; i < 8; ++i) part[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; ++i) part[i] += part[i + 4];
    return (part[0] + part[2]) + (part[1] + part[3]);
}

static inline float largest(f32x16 v) {
    float best = v[0];
    for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

static inline f32x16 select(i32x16 condition, f32x16 yes, f32x16 no) {
    return (f32x16)((condition & (i32x16)yes) | (~condition & (i32x16)no));
}

static inline f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// e^x to about 1 ulp: x = n ln 2 + r, a polynomial in r, times 2^n (in two factors, so that the result may be
// subnormal or infinite).
static inline f32x16 exp(f32x16 x) {
    x = select(x < splat(-104.0f), splat(-104.0f), x);
    x = select(x > splat(89.0f), splat(89.0f), x);
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f32x16 n = (x * 1.44269504088896341f + magic) - magic;
    f32x16 r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i32x16 whole = __builtin_convertvector(n, i32x16);
    i32x16 half = whole >> 1;
    f32x16 first = (f32x16)((half + 127) << 23), second = (f32x16)((whole - half + 127) << 23);
    return p * first * second;
}

// tanh x = 1 - 2 / (e^2x + 1); near zero its odd series, where that difference would cancel.
static inline f32x16 tanh(f32x16 x) {
    f32x16 far = 1.0f - 2.0f / (exp(x + x) + 1.0f);
    f32x16 s = x * x;
    f32x16 near = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
    return select((s < splat(0.04f)), near, far);
}

// [begin, end) of part `index` of `parts` of `count` things.
static inline void share(int64_t count, int64_t parts, int64_t index, int64_t& begin, int64_t& end) {
    begin = count * index / parts;
    end = count * (index + 1) / parts;
}

// body(first, last) over [0, count) on up to `threads` threads; a part has at least `grain` things.
template <class Body>
static inline void parallel(int64_t count, int64_t grain, int threads, const Body& body) {
#ifdef _OPENMP
    int64_t parts = count / (grain > 0 ? grain : 1);
    if (parts > threads) parts = threads;
    if (parts > 1) {
#pragma omp parallel num_threads(int(parts))
        {
            int64_t begin, end;
            share(count, omp_get_num_threads(), omp_get_thread_num(), begin, end);
            if (begin < end) body(begin, end);
        }
        return;
    }
#endif
    (void)grain;
    (void)threads;
    if (count > 0) body(int64_t(0), count);
}

}  // namespace tw
