// Products in int8 (W8A8): weights with a scale per output column, activations quantized here with a scale per row.
//
//   out[r, c] = dx[r] * d[c] * sum of qx * q        summed in int32 over all of k, so k <= 66,000
//
// Weights are stored without sign, as q + 128, and sums start at -128 * sum of qx.
// A panel is two vectors of columns, side by side; per group of 4 inputs it holds 4 bytes per column. Inputs past k are 0.
// Quantized rows of a tile lie per group side by side, int8 [k / 4][R][4], then { float d[R]; int32 start[R] }.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

using namespace lanes;

constexpr int COLUMNS = 2 * LANES, STEP = 4 * COLUMNS;  // of a panel; its bytes per group
constexpr int MOST_ROWS = REGISTERS == 32 ? 12 : 4;     // two sums each
constexpr int AHEAD = 4096;

size_t row_bytes(long groups) { return size_t(groups) * 4 + 8; }

void quantize_row(const float* x, long k, long groups, uint8_t* tile, int rows, int r) {
    Ints found = splat(0);
    for (long i = 0; i < k; i += LANES) found = max(found, magnitude(load(x + i, some(k - i))));
    const float most = largest_float(found);
    const Floats inverse = splat(most > 0.0f ? 127.0f / most : 0.0f);
    Ints total = splat(0);
    uint8_t* q = tile + 4 * r;
    for (long i = 0; i < 4 * groups; i += LANES) {
        const Ints rounded = to_ints(mul(load(x + i, some(k - i)), inverse));
        total = add(total, rounded);
        alignas(LANES) int8_t bytes[LANES];
        store_bytes(bytes, rounded);
        for (long j = 0; j < std::min<long>(LANES / 4, groups - i / 4); ++j) std::memcpy(q + (i / 4 + j) * 4 * rows, bytes + 4 * j, 4);
    }
    uint8_t* last = tile + size_t(groups) * 4 * rows;
    const float d = most / 127.0f;
    const int start = -128 * sum(total);
    std::memcpy(last + 4 * r, &d, 4);
    std::memcpy(last + 4 * rows + 4 * r, &start, 4);
}

template <int R>
void multiply(const uint8_t* x, const uint8_t* w, long groups, const float* scale, const float* bias, float* out, long ldo,
              Mask low, Mask high) {
    const float* dx = reinterpret_cast<const float*>(x + groups * 4 * R);
    const int* starts = reinterpret_cast<const int*>(dx + R);
    Dot<255> acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0].start(starts[r]), acc[r][1].start(starts[r]);
    for (long i = 0; i < groups; ++i, w += STEP, x += 4 * R) {
        const Ints a = load_ints(w), b = load_ints(w + STEP / 2);
#pragma GCC unroll 2
        for (int line = 0; line < STEP; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + line, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            int four;
            std::memcpy(&four, x + 4 * r, 4);
            const Ints values = splat(four);
            acc[r][0].add(0, a, values);
            acc[r][1].add(0, b, values);
        }
    }
    const Floats d[2] = {load(scale, low), load(scale + LANES, high)};
    const Floats bias_of[2] = {bias ? load(bias, low) : zeros(), bias ? load(bias + LANES, high) : zeros()};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const Floats row = splat(dx[r]);
        store(out + r * ldo, low, fma(mul(to_floats(acc[r][0].sum), row), d[0], bias_of[0]));
        store(out + r * ldo + LANES, high, fma(mul(to_floats(acc[r][1].sum), row), d[1], bias_of[1]));
    }
}

using Multiply = void (*)(const uint8_t*, const uint8_t*, long, const float*, const float*, float*, long, Mask, Mask);

template <size_t... I>
constexpr std::array<Multiply, MOST_ROWS> table(std::index_sequence<I...>) {
    return {multiply<int(I) + 1>...};
}

}  // namespace

void tiles::multiply_int8(const Weight& w, const Product& p) {
    static constexpr auto kernels = table(std::make_index_sequence<MOST_ROWS>());
    const RowTiles rows(p.m, MOST_ROWS);
    const long groups = (w.k + 3) / 4, panels = (w.n + COLUMNS - 1) / COLUMNS;
    const size_t bytes = row_bytes(groups), panel_bytes = size_t(groups) * STEP;
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
                                           some(w.n - column), some(w.n - column - LANES));
        });
    });
}

extern "C" {

int64_t tw_int8_bytes(int64_t n, int64_t k) { return (n + COLUMNS - 1) / COLUMNS * ((k + 3) / 4) * STEP; }

// `values` [n, k] int8 into `packed` (64-byte aligned).
void tw_int8_pack(const int8_t* values, int64_t n, int64_t k, uint8_t* packed, int threads) {
    const long panels = (n + COLUMNS - 1) / COLUMNS, groups = (k + 3) / 4;
    tiles::on_threads(threads, [&](int thread, int count) {
        tiles::part(panels, thread, count, [&](long first, long last) {
            std::memset(packed + first * groups * STEP, 128, size_t(last - first) * groups * STEP);
            for (long c = first * COLUMNS; c < std::min<long>(n, last * COLUMNS); ++c) {
                uint8_t* panel = packed + c / COLUMNS * groups * STEP + c % COLUMNS * 4;
                for (long i = 0; i < k; ++i) panel[i / 4 * STEP + i % 4] = uint8_t(values[c * k + i] + 128);
            }
        });
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_int8_rows(const uint8_t* packed, const float* scale, int64_t k, const int64_t* ids, int64_t count, float* out) {
    for (int64_t row = 0; row < count; ++row, out += k) {
        const int64_t c = ids[row];
        const uint8_t* panel = packed + c / COLUMNS * ((k + 3) / 4) * STEP + c % COLUMNS * 4;
        for (int64_t i = 0; i < k; ++i) out[i] = scale[c] * float(panel[i / 4 * STEP + i % 4] - 128);
    }
}

}  // extern "C"

TW_RECORDABLE(tw_int8_rows)

#endif
