// Products with weights in blocks of 32 that share a scale, as GGUF files store them, every value kept exactly.
//
//   weight = d * (q - zero) + m     q: 4 or 8 bits without sign; d, m: per block and output column
//
// Activations are quantized to int8 per row and block of 32 (scale = largest magnitude / 127), products are summed
// in integers inside a block and in float32 over blocks:
//
//   out[r, c] = sum over blocks of  dx[r] * d[c] * sum of qx * (q - zero)  +  m[c] * dx[r] * sum of qx
//
// Types of the file and the layouts they are repacked to, in bits per weight:
//
//   Q4_0             4 bits, d float16, zero 8                   4.5
//   Q4_1             4 bits, d and m float16                     5
//   Q8_0             8 bits, d float16, zero 128                 8.5
//   Q4_K             4 bits, d and m float32                     6
//   Q5_0 Q5_1 Q5_K   8 bits, d and m float32                    10
//   Q6_K             8 bits, two d float32 (16 inputs each), zero 32     10
//
// A panel is a vector of columns; per block of 32 inputs it holds
//
//   4 bits   4 vectors: number i holds input groups 2i (low nibbles) and 2i + 1 (high); a group is 4 inputs of each column
//   8 bits   8 vectors: one per group
//   then     d [columns], and m or the second d where there is one
//
// Quantized rows lie per tile of R rows as blocks { int8 q[R][32]; float d[R]; float sum[R]; int32 start[2][R] }, so
// that every address inside a tile is one pointer plus a constant. start: what the integer sums begin with, -zero * sum.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

using namespace lanes;

constexpr int BLOCK = 32, COLUMNS = LANES, VECTOR = 4 * LANES;  // bytes of a vector
constexpr int MOST_ROWS = REGISTERS == 32 ? 16 : 4;
constexpr int AHEAD = 4096;  // bytes of weights asked for in advance: hardware follows a stream only within a page
constexpr size_t ROW_BYTES = BLOCK + 4 * 4;  // quantized: values, scale, scaled sum, two starts

enum Second { NOTHING, MINIMUM, SCALE };

struct Layout {
    int bits, scale_bytes;
    Second second;
    int zero, largest;
    constexpr int values() const { return BLOCK * COLUMNS * bits / 8; }
    constexpr int block_bytes() const { return values() + COLUMNS * scale_bytes * (second == NOTHING ? 1 : 2); }
};

constexpr Layout LAYOUTS[] = {{4, 2, NOTHING, 8, 15}, {4, 2, MINIMUM, 0, 15}, {8, 2, NOTHING, 128, 255},
                              {4, 4, MINIMUM, 0, 15}, {8, 4, MINIMUM, 0, 31}, {8, 4, SCALE, 32, 63}};

// A type of the file: layout, values and bytes of its blocks.
struct Type {
    int layout, values, bytes;
};

Type type_of(int64_t format) {
    switch (format) {
        case tiles::Q4_0: return {0, 32, 18};
        case tiles::Q4_1: return {1, 32, 20};
        case tiles::Q8_0: return {2, 32, 34};
        case tiles::Q4_K: return {3, 256, 144};
        case tiles::Q5_0: return {4, 32, 22};
        case tiles::Q5_1: return {4, 32, 24};
        case tiles::Q5_K: return {4, 256, 176};
        default: return {5, 256, 210};  // Q6_K
    }
}

// --- activations ----------------------------------------------------------------------------------

// One row `x[k]` into row `r` of a tile of `rows` rows.
void quantize_row(const float* x, long blocks, uint8_t* tile, int rows, int r, const Layout& layout) {
    constexpr int VECTORS = BLOCK / LANES;
    const size_t stride = ROW_BYTES * rows;
    uint8_t* q = tile + size_t(r) * BLOCK;
    float* scales = reinterpret_cast<float*>(tile + size_t(rows) * BLOCK) + r;
    for (long b = 0; b < blocks; ++b, x += BLOCK, q += stride, scales += stride / 4) {
        Floats v[VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) v[i] = load(x + i * LANES);
        Ints most = magnitude(v[0]);
#pragma GCC unroll 4
        for (int i = 1; i < VECTORS; ++i) most = max(most, magnitude(v[i]));
        const float largest = largest_float(most);
        const float d = largest / 127.0f;
        const Floats inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
        Ints half[2] = {splat(0), splat(0)};  // sums of the first 16 and of the last
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) {
            const Ints rounded = to_ints(mul(v[i], inverse));
            store_bytes(q + i * LANES, rounded);
            half[i / (VECTORS / 2)] = add(half[i / (VECTORS / 2)], rounded);
        }
        const int all = sum(add(half[0], half[1]));
        int starts[2] = {-layout.zero * all, 0};
        if (layout.second == SCALE) {
            starts[0] = -layout.zero * sum(half[0]);
            starts[1] = -layout.zero * all - starts[0];
        }
        scales[0] = d;
        scales[rows] = d * float(all);
        std::memcpy(&scales[2 * rows], &starts[0], 4);
        std::memcpy(&scales[3 * rows], &starts[1], 4);
    }
}

// --- one tile -------------------------------------------------------------------------------------

inline Floats load_scales(const uint8_t* at, int bytes) { return bytes == 4 ? load(at) : load_halves(at); }

// The weights of input group `i` of the block at `w`, a byte each.
template <int BITS>
inline Ints group_of(const uint8_t* w, int i) {
    if constexpr (BITS == 8) return load_ints(w + VECTOR * i);
    const Ints both = load_ints(w + VECTOR * (i / 2));
    return i % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
}

template <int L, int R>
void multiply(const uint8_t* x, const uint8_t* w, long blocks, const float* bias, float* out, long ldo, Mask mask) {
    constexpr Layout layout = LAYOUTS[L];
    constexpr int HALVES = layout.second == SCALE ? 2 : 1;  // integer sums per block
    constexpr int MOST = REGISTERS / (4 * HALVES);
    constexpr int GROUP = (R + (R + MOST - 1) / MOST - 1) / ((R + MOST - 1) / MOST);  // rows whose sums are in flight together
    constexpr bool HELD = REGISTERS == 32;  // a block's weights stay in registers while groups of rows take turns
    Floats acc[R];
    const Floats start = bias ? load(bias, mask) : zeros();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = start;
    for (long b = 0; b < blocks; ++b) {
        Ints v[8];
        if constexpr (HELD) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) v[i] = group_of<layout.bits>(w, i);
        }
        const Floats d = load_scales(w + layout.values(), layout.scale_bytes);
        Floats second = d;
        if constexpr (layout.second != NOTHING)
            second = load_scales(w + layout.values() + COLUMNS * layout.scale_bytes, layout.scale_bytes);
        for (int line = 0; line < layout.block_bytes(); line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + line, _MM_HINT_T0);
        const float* scales = reinterpret_cast<const float*>(x + R * BLOCK);
        const int* starts = reinterpret_cast<const int*>(scales + 2 * R);
#pragma GCC unroll 16
        for (int first = 0; first < R; first += GROUP) {
            Dot<layout.largest> dot[HALVES][GROUP];
#pragma GCC unroll 8
            for (int r = 0; r < GROUP; ++r)
                if (first + r < R) {
                    dot[0][r].start(layout.zero ? starts[first + r] : 0);
                    if constexpr (HALVES == 2) dot[1][r].start(starts[R + first + r]);
                }
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const Ints weights = HELD ? v[i] : group_of<layout.bits>(w, i);
#pragma GCC unroll 8
                for (int r = 0; r < GROUP; ++r)
                    if (first + r < R) dot[HALVES == 2 ? i / 4 : 0][r].add(i, weights, x + (first + r) * BLOCK + 4 * i);
            }
#pragma GCC unroll 8
            for (int r = 0; r < GROUP; ++r)
                if (first + r < R) {
                    const Floats row = splat(scales[first + r]);
                    acc[first + r] = fma(mul(to_floats(dot[0][r].sum), row), d, acc[first + r]);
                    if constexpr (HALVES == 2)
                        acc[first + r] = fma(mul(to_floats(dot[1][r].sum), row), second, acc[first + r]);
                    if constexpr (layout.second == MINIMUM)
                        acc[first + r] = fma(second, splat(scales[R + first + r]), acc[first + r]);
                }
        }
        x += R * ROW_BYTES;
        w += layout.block_bytes();
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out + r * ldo, mask, acc[r]);
}

using Multiply = void (*)(const uint8_t*, const uint8_t*, long, const float*, float*, long, Mask);
using Kernels = std::array<Multiply, MOST_ROWS>;

template <int L, size_t... I>
constexpr Kernels kernels_of(std::index_sequence<I...>) {
    return {multiply<L, int(I) + 1>...};
}

template <size_t... L>
constexpr std::array<Kernels, sizeof...(L)> all_kernels(std::index_sequence<L...>) {
    return {kernels_of<int(L)>(std::make_index_sequence<MOST_ROWS>())...};
}

// --- weights --------------------------------------------------------------------------------------

float half_at(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
}

// 32 weights of the file: q without sign, and what the layout holds beside them.
struct Values {
    uint8_t q[BLOCK];
    float first, second;
};

// Block `b` of 32 (inside a block of 256 for the K types) at `file`.
Values unpack(int64_t format, const uint8_t* file, int b) {
    Values v{};
    const auto nibbles = [&](const uint8_t* at, int i) { return i < 16 ? at[i] & 15 : at[i - 16] >> 4; };
    if (format == tiles::Q8_0) {
        for (int i = 0; i < BLOCK; ++i) v.q[i] = file[2 + i] ^ 128;  // int8 + 128
    } else if (format == tiles::Q4_0 || format == tiles::Q4_1) {
        for (int i = 0; i < BLOCK; ++i) v.q[i] = uint8_t(nibbles(file + (format == tiles::Q4_1 ? 4 : 2), i));
    } else if (format == tiles::Q5_0 || format == tiles::Q5_1) {
        const uint8_t* at = file + (format == tiles::Q5_1 ? 4 : 2);
        uint32_t high;
        std::memcpy(&high, at, 4);
        for (int i = 0; i < BLOCK; ++i) v.q[i] = uint8_t(nibbles(at + 4, i) | (high >> i & 1) << 4);
        v.first = half_at(file);
        v.second = format == tiles::Q5_1 ? half_at(file + 2) : -16.0f * v.first;
    } else if (format == tiles::Q4_K || format == tiles::Q5_K) {
        const uint8_t* s = file + 4;  // eight scales and eight minima of 6 bits in 12 bytes
        const int scale = b < 4 ? s[b] & 63 : (s[b + 4] & 15) | s[b - 4] >> 6 << 4;
        const int minimum = b < 4 ? s[b + 4] & 63 : s[b + 4] >> 4 | s[b] >> 6 << 4;
        const uint8_t* high = file + 16;
        const uint8_t* low = (format == tiles::Q5_K ? high + 32 : high) + b / 2 * 32;
        for (int i = 0; i < BLOCK; ++i) {
            v.q[i] = uint8_t(b % 2 ? low[i] >> 4 : low[i] & 15);
            if (format == tiles::Q5_K) v.q[i] |= uint8_t((high[i] >> b & 1) << 4);
        }
        v.first = half_at(file) * float(scale);
        v.second = -half_at(file + 2) * float(minimum);
    } else {  // Q6_K
        const uint8_t *low = file + b / 4 * 64 + b % 2 * 32, *high = file + 128 + b / 4 * 32;
        const int8_t* scales = reinterpret_cast<const int8_t*>(file + 192) + 2 * b;
        for (int i = 0; i < BLOCK; ++i)
            v.q[i] = uint8_t((b % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (b % 4 * 2) & 3) << 4);
        v.first = half_at(file + 208) * float(scales[0]);
        v.second = half_at(file + 208) * float(scales[1]);
    }
    return v;
}

void pack_block(int64_t format, const uint8_t* file, int b, uint8_t* panel, int column) {
    const Layout& layout = LAYOUTS[type_of(format).layout];
    const Values v = unpack(format, file, b);
    for (int i = 0; i < BLOCK; ++i) {
        const int group = i / 4;
        if (layout.bits == 8) panel[group * VECTOR + column * 4 + i % 4] = v.q[i];
        else panel[group / 2 * VECTOR + column * 4 + i % 4] |= uint8_t(v.q[i] << (group % 2 * 4));
    }
    uint8_t* scales = panel + layout.values() + column * layout.scale_bytes;
    if (layout.scale_bytes == 2) {  // as in the file
        std::memcpy(scales, file, 2);
        if (layout.second == MINIMUM) std::memcpy(scales + COLUMNS * 2, file + 2, 2);
    } else {
        std::memcpy(scales, &v.first, 4);
        std::memcpy(scales + COLUMNS * 4, &v.second, 4);
    }
}

}  // namespace

void tiles::multiply_blocks(const Weight& w, const Product& p) {
    static constexpr auto all = all_kernels(std::make_index_sequence<std::size(LAYOUTS)>());
    const int number = type_of(w.format).layout;
    const Layout& layout = LAYOUTS[number];
    const Kernels& kernels = all[number];
    const RowTiles rows(p.m, MOST_ROWS);
    const long blocks = w.k / BLOCK, panels = (w.n + COLUMNS - 1) / COLUMNS;
    const size_t row_bytes = ROW_BYTES * blocks, panel_bytes = size_t(layout.block_bytes()) * blocks;
    uint8_t* quantized = workspace(row_bytes * p.m);
    const auto quantize = [&](long first, long last) {
        for (long tile = 0; tile < rows.count; ++tile) {
            const long start = rows.start(tile), height = rows.height(tile);
            for (long r = std::max(first, start); r < std::min(last, start + height); ++r)
                quantize_row(p.x + r * p.ldx, blocks, quantized + row_bytes * start, int(height), int(r - start), layout);
        }
    };
    const bool together = p.m > 1 && p.m * blocks > 256;  // below that a barrier costs more than it saves
    if (!together) quantize(0, p.m);
    on_threads(p.threads, [&](int thread, int threads) {
        if (together) {
            part(p.m, thread, threads, quantize);
            barrier(threads);
        }
        share(panels, panel_bytes, rows, thread, threads, [&](long panel, long tile) {
            const long column = panel * COLUMNS, start = rows.start(tile);
            kernels[rows.height(tile) - 1](quantized + row_bytes * start, w.data + panel * panel_bytes, blocks,
                                           w.bias ? w.bias + column : nullptr, p.out + start * p.ldo + column, p.ldo,
                                           some(w.n - column));
        });
    });
}

extern "C" {

int64_t tw_blocks_bytes(int64_t format, int64_t n, int64_t k) {
    return (n + COLUMNS - 1) / COLUMNS * (k / BLOCK) * LAYOUTS[type_of(format).layout].block_bytes();
}

// `file` [n, blocks of k inputs] as a GGUF file holds it, into `packed` (64-byte aligned, zeroed).
void tw_blocks_pack(int64_t format, const uint8_t* file, int64_t n, int64_t k, uint8_t* packed, int threads) {
    const Type type = type_of(format);
    const long blocks = k / BLOCK, panels = (n + COLUMNS - 1) / COLUMNS, inside = type.values / BLOCK;
    const size_t block_bytes = LAYOUTS[type.layout].block_bytes();
    tiles::on_threads(threads, [&](int thread, int count) {
        tiles::part(panels, thread, count, [&](long first, long last) {
            for (long c = first * COLUMNS; c < std::min<long>(n, last * COLUMNS); ++c)
                for (long b = 0; b < blocks; ++b)
                    pack_block(format, file + (c * blocks + b) / inside * type.bytes, int(b % inside),
                               packed + (c / COLUMNS * blocks + b) * block_bytes, int(c % COLUMNS));
        });
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_blocks_rows(int64_t format, const uint8_t* packed, int64_t k, const int64_t* ids, int64_t count, float* out) {
    const Layout& layout = LAYOUTS[type_of(format).layout];
    const long blocks = k / BLOCK;
    for (int64_t row = 0; row < count; ++row) {
        const int column = int(ids[row] % COLUMNS);
        const uint8_t* panel = packed + ids[row] / COLUMNS * blocks * layout.block_bytes();
        for (long b = 0; b < blocks; ++b, panel += layout.block_bytes()) {
            float scales[2] = {0, 0};
            const uint8_t* at = panel + layout.values() + column * layout.scale_bytes;
            for (int s = 0; s < (layout.second == NOTHING ? 1 : 2); ++s, at += COLUMNS * layout.scale_bytes) {
                if (layout.scale_bytes == 2) scales[s] = half_at(at);
                else std::memcpy(&scales[s], at, 4);
            }
            const float m = layout.second == MINIMUM ? scales[1] : 0.0f;
            for (int i = 0; i < BLOCK; ++i) {
                const int group = i / 4;
                const int q = layout.bits == 8 ? panel[group * VECTOR + column * 4 + i % 4]
                                               : panel[group / 2 * VECTOR + column * 4 + i % 4] >> (group % 2 * 4) & 15;
                *out++ = scales[layout.second == SCALE ? i / 16 : 0] * float(q - layout.zero) + m;
            }
        }
    }
}

}  // extern "C"

TW_RECORDABLE(tw_blocks_rows)

#endif
