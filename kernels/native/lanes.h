// One vector of the packed products: LANES output columns as floats, as 32-bit sums, or as 4 bytes of weights each.
//
// The same operations for two instruction sets, so that a kernel is written once. The compiler says which of them this
// CPU has (-march=native); without either TW_GEMM is not defined and there are no kernels.
//
//   AVX-512 VNNI     16 lanes, 32 registers; four products of bytes and their sum are one instruction
//   AVX2, FMA, F16C   8 lanes, 16 registers; products of bytes are summed in 16 bits as far as these hold them
//
// Invariants
// * Integers are exact and a column's floats are added in the same order: both sets give the same numbers.
// * Loads and stores need no alignment; those of some lanes touch no memory of the others.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define TW_GEMM 2
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TW_GEMM 1
#endif

#ifdef TW_GEMM
#include <immintrin.h>

namespace lanes {

typedef int __attribute__((may_alias)) Word;  // four bytes of activations

#if TW_GEMM == 2

constexpr int LANES = 16, REGISTERS = 32;
using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

// The lanes that exist when `left` columns remain.
inline Mask some(long left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : Mask((1u << left) - 1); }

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const void* p) { return _mm512_loadu_ps(p); }
inline Floats load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Floats load(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }  // zeros elsewhere
inline void store(float* p, Mask mask, Floats a) { _mm512_mask_storeu_ps(p, mask, a); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints splat(int x) { return _mm512_set1_epi32(x); }
inline Ints low_nibbles(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int sum(Ints a) { return _mm512_reduce_add_epi32(a); }
inline int largest(Ints a) { return _mm512_reduce_max_epi32(a); }

inline Floats bits(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats low_bf16(Ints a) { return bits(_mm512_slli_epi32(a, 16)); }
inline Floats high_bf16(Ints a) { return bits(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000)))); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }  // rounded half to even
inline Ints magnitude(Floats a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }

// As signed bytes, the nearest where one does not hold it.
inline void store_bytes(void* p, Ints a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a)); }

// A sum of unsigned bytes of weights, none above LARGEST, times signed bytes of activations. `start` is the sum's first
// term; where LARGEST is 255 that is -128 * sum of activations. `i`: the number of the call, from 0. The product is
// written in assembly because compilers copy the sum of the intrinsic around, which costs more than the product.
template <int LARGEST>
struct Dot {
    Ints sum;
    void start(int first) { sum = splat(first); }
    void add(int, Ints weights, Ints four) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(four)); }
    void add(int, Ints weights, const uint8_t* four) {  // the same four activations in every lane
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const Word*>(four)));
    }
};

#else

constexpr int LANES = 8, REGISTERS = 16;
using Floats = __m256;
using Ints = __m256i;
using Mask = int;  // number of lanes

inline Mask some(long left) { return left >= 8 ? 8 : left <= 0 ? 0 : Mask(left); }
inline Ints chosen(Mask mask) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(mask), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
inline Floats load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Floats load(const float* p, Mask mask) { return mask == 8 ? load(p) : _mm256_maskload_ps(p, chosen(mask)); }
inline void store(float* p, Mask mask, Floats a) {  // masked stores are slow: not where every lane is stored
    if (mask == 8) _mm256_storeu_ps(p, a);
    else _mm256_maskstore_ps(p, chosen(mask), a);
}
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints splat(int x) { return _mm256_set1_epi32(x); }
inline Ints low_nibbles(Ints a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline int sum(Ints a) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int largest(Ints a) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline Floats bits(Ints a) { return _mm256_castsi256_ps(a); }
inline Floats low_bf16(Ints a) { return bits(_mm256_slli_epi32(a, 16)); }
inline Floats high_bf16(Ints a) { return bits(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000)))); }
inline Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints to_ints(Floats a) { return _mm256_cvtps_epi32(a); }
inline Ints magnitude(Floats a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }

inline void store_bytes(void* p, Ints a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// Activations are -127 to 127, so two products of weights up to 127 fit 16 bits, and FIT such pairs do. Products of larger
// ones do not, so the 128 in them is taken off first (`start`, which would do that, is not needed), and what is
// multiplied without sign is the magnitude.
template <int LARGEST>
struct Dot {
    static constexpr bool WIDE = LARGEST > 127;
    static constexpr int FIT = 32767 / (2 * 127 * (WIDE ? 128 : LARGEST));
    Ints sum, pairs;
    // Compilers put additions off, and run out of registers for the terms: no instruction, but the sum is needed by it.
    static void here(Ints& term) { asm("" : "+x"(term)); }
    void start(int first) { sum = splat(WIDE ? 0 : first); }
    void add(int i, Ints weights, Ints four) {
        const Ints q = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        const Ints two = WIDE ? _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(four, q)) : _mm256_maddubs_epi16(weights, four);
        pairs = i % FIT == 0 ? two : _mm256_add_epi16(pairs, two);
        here(pairs);
        if (i % FIT < FIT - 1) return;
        sum = lanes::add(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        here(sum);
    }
    void add(int i, Ints weights, const uint8_t* four) { add(i, weights, splat(*reinterpret_cast<const Word*>(four))); }
};

#endif

// The largest of some magnitudes. Compared as integers, so that what is not a number is the largest: it has to reach the
// result.
inline float largest_float(Ints magnitudes) {
    const int found = largest(magnitudes);
    float value;
    std::memcpy(&value, &found, 4);
    return value;
}

}  // namespace lanes

#endif
