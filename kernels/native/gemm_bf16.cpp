// Products with bfloat16 weights and float32 activations, computed in float32: a bfloat16 is the upper half of a
// float32, so a shift or a mask makes one.
//
// A panel is two vectors of columns; per input it holds a word per lane: column c in the lower half of word c, column
// c + LANES in the upper.
// Rows of a tile lie per input side by side, [k][R], so that every address inside a tile is one pointer plus a constant.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

using namespace lanes;

constexpr int COLUMNS = 2 * LANES, STEP = 4 * LANES;  // of a panel; its bytes per input
constexpr int MOST_ROWS = REGISTERS * 3 / 8;          // two sums each
constexpr int AHEAD = 4096;

template <int R>
void multiply(const float* x, const uint8_t* w, long k, const float* bias, float* out, long ldo, Mask low, Mask high) {
    Floats acc[R][2];
    const Floats start[2] = {bias ? load(bias, low) : zeros(), bias ? load(bias + LANES, high) : zeros()};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = start[0], acc[r][1] = start[1];
    for (long i = 0; i < k; ++i, w += STEP, x += R) {
        const Ints both = load_ints(w);
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
        const Floats a = low_bf16(both), b = high_bf16(both);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const Floats value = splat(x[r]);
            acc[r][0] = fma(a, value, acc[r][0]);
            acc[r][1] = fma(b, value, acc[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(out + r * ldo, low, acc[r][0]);
        store(out + r * ldo + LANES, high, acc[r][1]);
    }
}

using Multiply = void (*)(const float*, const uint8_t*, long, const float*, float*, long, Mask, Mask);

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
    const size_t panel_bytes = size_t(w.k) * STEP;
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
                                           some(w.n - column), some(w.n - column - LANES));
        });
    });
}

extern "C" {

int64_t tw_bf16_bytes(int64_t n, int64_t k) { return (n + COLUMNS - 1) / COLUMNS * k * STEP; }

// `values` [n, k] bfloat16 into `packed` (64-byte aligned, zeroed).
void tw_bf16_pack(const uint16_t* values, int64_t n, int64_t k, uint16_t* packed, int threads) {
    const long panels = (n + COLUMNS - 1) / COLUMNS;
    tiles::on_threads(threads, [&](int thread, int count) {
        tiles::part(panels, thread, count, [&](long first, long last) {
            for (long c = first * COLUMNS; c < std::min<long>(n, last * COLUMNS); ++c) {
                uint16_t* panel = packed + c / COLUMNS * k * COLUMNS + c % LANES * 2 + c % COLUMNS / LANES;
                for (long i = 0; i < k; ++i) panel[i * COLUMNS] = values[c * k + i];
            }
        });
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_bf16_rows(const uint16_t* packed, int64_t k, const int64_t* ids, int64_t count, uint32_t* out) {
    for (int64_t row = 0; row < count; ++row, out += k) {
        const int64_t c = ids[row];
        const uint16_t* panel = packed + c / COLUMNS * k * COLUMNS + c % LANES * 2 + c % COLUMNS / LANES;
        for (int64_t i = 0; i < k; ++i) out[i] = uint32_t(panel[i * COLUMNS]) << 16;
    }
}

}  // extern "C"

TW_RECORDABLE(tw_bf16_rows)

#endif
