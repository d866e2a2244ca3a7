// Products in int8 (W8A8): weights with a scale per output column, activations quantized here with a scale per row.
//
//   out[r, c] = dx[r] * d[c] * sum of qx * q        summed in int32 over all of k (VNNI), so k <= 66,000
//
// VNNI multiplies an unsigned by a signed byte: weights are stored as q + 128, and sums start at -128 * sum of qx.
// A panel is 32 columns; per group of 4 inputs it holds two vectors of 16 columns x 4 inputs. Inputs past k are 0.
// Quantized rows of a tile lie per group side by side, int8 [k / 4][R][4], then { float d[R]; int32 start[R] }.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

constexpr int COLUMNS = 32, MOST_ROWS = 12;
constexpr int AHEAD = 4096;

size_t row_bytes(long groups) { return size_t(groups) * 4 + 8; }

void quantize_row(const float* x, long k, long groups, uint8_t* tile, int rows, int r) {
    __m512i most = _mm512_setzero_si512();
    for (long i = 0; i < k; i += 16)
        most = _mm512_max_epi32(most, tiles::magnitude(_mm512_maskz_loadu_ps(tiles::columns_mask(k - i), x + i)));
    const float largest = tiles::largest(most);
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    uint8_t* q = tile + 4 * r;
    for (long i = 0; i < 4 * groups; i += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(tiles::columns_mask(k - i), x + i);
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
        sum = _mm512_add_epi32(sum, rounded);
        alignas(16) int8_t bytes[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtsepi32_epi8(rounded));
        for (long j = 0; j < std::min<long>(4, groups - i / 4); ++j) std::memcpy(q + (i / 4 + j) * 4 * rows, bytes + 4 * j, 4);
    }
    uint8_t* last = tile + size_t(groups) * 4 * rows;
    const float d = largest / 127.0f;
    const int start = -128 * _mm512_reduce_add_epi32(sum);
    std::memcpy(last + 4 * r, &d, 4);
    std::memcpy(last + 4 * rows + 4 * r, &start, 4);
}

template <int R>
void multiply(const uint8_t* x, const uint8_t* w, long groups, const float* scale, const float* bias, float* out, long ldo,
              __mmask16 low, __mmask16 high) {
    const float* dx = reinterpret_cast<const float*>(x + groups * 4 * R);
    const int* starts = reinterpret_cast<const int*>(dx + R);
    __m512i acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm512_set1_epi32(starts[r]);
    for (long i = 0; i < groups; ++i, w += 128, x += 4 * R) {
        const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            int four;
            std::memcpy(&four, x + 4 * r, 4);
            const __m512i values = _mm512_set1_epi32(four);
            tiles::dot4(acc[r][0], a, values);
            tiles::dot4(acc[r][1], b, values);
        }
    }
    const __m512 d[2] = {_mm512_maskz_loadu_ps(low, scale), _mm512_maskz_loadu_ps(high, scale + 16)};
    const __m512 add[2] = {bias ? _mm512_maskz_loadu_ps(low, bias) : _mm512_setzero_ps(),
                           bias ? _mm512_maskz_loadu_ps(high, bias + 16) : _mm512_setzero_ps()};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const __m512 row = _mm512_set1_ps(dx[r]);
        _mm512_mask_storeu_ps(out + r * ldo, low, _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][0]), row), d[0], add[0]));
        _mm512_mask_storeu_ps(out + r * ldo + 16, high, _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][1]), row), d[1], add[1]));
    }
}

using Multiply = void (*)(const uint8_t*, const uint8_t*, long, const float*, const float*, float*, long, __mmask16, __mmask16);

template <size_t... I>
constexpr std::array<Multiply, MOST_ROWS> table(std::index_sequence<I...>) {
    return {multiply<int(I) + 1>...};
}

}  // namespace

void tiles::multiply_int8(const Weight& w, const Product& p) {
    static constexpr auto kernels = table(std::make_index_sequence<MOST_ROWS>());
    const RowTiles rows(p.m, MOST_ROWS);
    const long groups = (w.k + 3) / 4, panels = (w.n + COLUMNS - 1) / COLUMNS;
    const size_t bytes = row_bytes(groups), panel_bytes = size_t(groups) * 128;
    uint8_t* quantized = workspace(bytes * p.m);
    const auto quantize = [&](long first, long last) {
        for (long tile = 0; tile < rows.count; ++tile) {
            const long start = rows.start(tile), height = rows.height(tile);
            for (long r = std::max(first, start); r < std::min(last, start + height); ++r)
                quantize_row(p.x + r * p.ldx, w.k, groups, quantized + bytes * start, int(height), int(r - start));
        }
    };
    const bool together = p.m > 1 && p.m * w.k > 8192;
    if (!together) quantize(0, p.m);
    on_threads(p.threads, [&](int thread, int threads) {
        if (together) {
            part(p.m, thread, threads, quantize);
            barrier(threads);
        }
        share(panels, panel_bytes, rows, thread, threads, [&](long panel, long tile) {
            const long column = panel * COLUMNS, start = rows.start(tile);
            kernels[rows.height(tile) - 1](quantized + bytes * start, w.data + panel * panel_bytes, groups, w.scale + column,
                                           w.bias ? w.bias + column : nullptr, p.out + start * p.ldo + column, p.ldo,
                                           columns_mask(w.n - column), columns_mask(w.n - column - 16));
        });
    });
}

extern "C" {

int64_t tw_int8_bytes(int64_t n, int64_t k) { return (n + COLUMNS - 1) / COLUMNS * ((k + 3) / 4) * 128; }

// `values` [n, k] int8 into `packed` (64-byte aligned).
void tw_int8_pack(const int8_t* values, int64_t n, int64_t k, uint8_t* packed, int threads) {
    const long panels = (n + COLUMNS - 1) / COLUMNS, groups = (k + 3) / 4;
    tiles::on_threads(threads, [&](int thread, int count) {
        tiles::part(panels, thread, count, [&](long first, long last) {
            std::memset(packed + first * groups * 128, 128, size_t(last - first) * groups * 128);
            for (long c = first * COLUMNS; c < std::min<long>(n, last * COLUMNS); ++c) {
                uint8_t* panel = packed + c / COLUMNS * groups * 128 + c % COLUMNS * 4;
                for (long i = 0; i < k; ++i) panel[i / 4 * 128 + i % 4] = uint8_t(values[c * k + i] + 128);
            }
        });
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_int8_rows(const uint8_t* packed, const float* scale, int64_t k, const int64_t* ids, int64_t count, float* out) {
    for (int64_t row = 0; row < count; ++row, out += k) {
        const int64_t c = ids[row];
        const uint8_t* panel = packed + c / COLUMNS * ((k + 3) / 4) * 128 + c % COLUMNS * 4;
        for (int64_t i = 0; i < k; ++i) out[i] = scale[c] * float(panel[i / 4 * 128 + i % 4] - 128);
    }
}

}  // extern "C"

TW_RECORDABLE(tw_int8_rows)

#endif
