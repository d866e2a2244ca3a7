// Products with bfloat16 weights and float32 activations, computed in float32: a bfloat16 is the upper half of a
// float32, so a shift or a mask makes one.
//
// A panel is 32 columns; per input it holds 16 words: column c in the lower half of word c, column c + 16 in the upper.
// Rows of a tile lie per input side by side, [k][R], so that every address inside a tile is one pointer plus a constant.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

constexpr int COLUMNS = 32, MOST_ROWS = 12;
constexpr int AHEAD = 4096;

template <int R>
void multiply(const float* x, const uint8_t* w, long k, const float* bias, float* out, long ldo, __mmask16 low, __mmask16 high) {
    __m512 acc[R][2];
    const __m512 start[2] = {bias ? _mm512_maskz_loadu_ps(low, bias) : _mm512_setzero_ps(),
                             bias ? _mm512_maskz_loadu_ps(high, bias + 16) : _mm512_setzero_ps()};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = start[0], acc[r][1] = start[1];
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (long i = 0; i < k; ++i, w += 64, x += R) {
        const __m512i both = _mm512_loadu_si512(w);
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
        const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const __m512 value = _mm512_set1_ps(x[r]);
            acc[r][0] = _mm512_fmadd_ps(a, value, acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(b, value, acc[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        _mm512_mask_storeu_ps(out + r * ldo, low, acc[r][0]);
        _mm512_mask_storeu_ps(out + r * ldo + 16, high, acc[r][1]);
    }
}

using Multiply = void (*)(const float*, const uint8_t*, long, const float*, float*, long, __mmask16, __mmask16);

template <size_t... I>
constexpr std::array<Multiply, MOST_ROWS> table(std::index_sequence<I...>) {
    return {multiply<int(I) + 1>...};
}

// Row `x[k]` into column `r` of a tile [k][rows].
void spread(const float* x, long k, float* tile, int rows) {
    for (long i = 0; i < k; ++i) tile[i * rows] = x[i];
}

}  // namespace

void tiles::multiply_bf16(const Weight& w, const Product& p) {
    static constexpr auto kernels = table(std::make_index_sequence<MOST_ROWS>());
    const RowTiles rows(p.m, MOST_ROWS);
    const long panels = (w.n + COLUMNS - 1) / COLUMNS;
    const size_t panel_bytes = size_t(w.k) * 64;
    const bool direct = p.m == 1;
    float* spreaded = direct ? nullptr : reinterpret_cast<float*>(workspace(size_t(p.m) * w.k * 4));
    const auto arrange = [&](long first, long last) {
        for (long tile = 0; tile < rows.count; ++tile) {
            const long start = rows.start(tile), height = rows.height(tile);
            for (long r = std::max(first, start); r < std::min(last, start + height); ++r)
                spread(p.x + r * p.ldx, w.k, spreaded + start * w.k + (r - start), int(height));
        }
    };
    const bool together = p.m * w.k > 8192;
    if (!direct && !together) arrange(0, p.m);
    on_threads(p.threads, [&](int thread, int threads) {
        if (!direct && together) {
            part(p.m, thread, threads, arrange);
            barrier(threads);
        }
        share(panels, panel_bytes, rows, thread, threads, [&](long panel, long tile) {
            const long column = panel * COLUMNS, start = rows.start(tile);
            kernels[rows.height(tile) - 1](direct ? p.x : spreaded + start * w.k, w.data + panel * panel_bytes, w.k,
                                           w.bias ? w.bias + column : nullptr, p.out + start * p.ldo + column, p.ldo,
                                           columns_mask(w.n - column), columns_mask(w.n - column - 16));
        });
    });
}

extern "C" {

int64_t tw_bf16_bytes(int64_t n, int64_t k) { return (n + COLUMNS - 1) / COLUMNS * k * 64; }

// `values` [n, k] bfloat16 into `packed` (64-byte aligned, zeroed).
void tw_bf16_pack(const uint16_t* values, int64_t n, int64_t k, uint16_t* packed, int threads) {
    const long panels = (n + COLUMNS - 1) / COLUMNS;
    tiles::on_threads(threads, [&](int thread, int count) {
        tiles::part(panels, thread, count, [&](long first, long last) {
            for (long c = first * COLUMNS; c < std::min<long>(n, last * COLUMNS); ++c) {
                uint16_t* panel = packed + c / COLUMNS * k * 32 + c % 16 * 2 + c % COLUMNS / 16;
                for (long i = 0; i < k; ++i) panel[i * 32] = values[c * k + i];
            }
        });
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_bf16_rows(const uint16_t* packed, int64_t k, const int64_t* ids, int64_t count, uint32_t* out) {
    for (int64_t row = 0; row < count; ++row, out += k) {
        const int64_t c = ids[row];
        const uint16_t* panel = packed + c / COLUMNS * k * 32 + c % 16 * 2 + c % COLUMNS / 16;
        for (int64_t i = 0; i < k; ++i) out[i] = uint32_t(panel[i * 32]) << 16;
    }
}

}  // extern "C"

TW_RECORDABLE(tw_bf16_rows)

#endif
