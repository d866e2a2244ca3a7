// Products with weights in blocks of 32 that share a scale: GGUF's Q4_0, Q4_1 and Q8_0, exactly as stored.
//
//   weight = d * q + m     q: 4 or 8 bits without sign; d, m: float16 per block and output column
//
// Activations are quantized to int8 per row and block of 32 (scale = largest magnitude / 127), products are summed
// in int32 inside a block (VNNI) and in float32 over blocks:
//
//   out[r, c] = sum over blocks of  dx[r] * d[c] * (sum of qx * q - qx_sum * zero)  +  m[c] * dx[r] * qx_sum
//
// A panel is 16 columns; per block of 32 inputs it holds
//
//   4 bits   256 bytes: vector i holds input groups 2i (low nibbles) and 2i + 1 (high); a group is 4 inputs of 16 columns
//   8 bits   512 bytes: one vector of 64 bytes per group
//   then     d [16] float16, and m [16] float16 where the format has one (Q4_0: zero = 8, Q8_0: zero = 128 instead)
//
// Quantized rows lie per tile of R rows as blocks { int8 q[R][32]; float d[R]; float sum[R]; int32 qsum[R] }, so that
// every address inside a tile is one pointer plus a constant.
#include "gemm_tiles.h"
#include "program.h"

#ifdef TW_GEMM

#include <array>
#include <utility>

namespace {

using tiles::Q4_0, tiles::Q4_1, tiles::Q8_0;

constexpr int BLOCK = 32, COLUMNS = 16, MOST_ROWS = 16;
constexpr int AHEAD = 4096;  // bytes of weights asked for in advance: hardware follows a stream only within a page
constexpr size_t ROW_BYTES = BLOCK + 3 * 4;  // quantized: values, scale, scaled sum, sum

constexpr size_t panel_block_bytes(int64_t format) { return format == Q4_0 ? 288 : format == Q4_1 ? 320 : 544; }
constexpr size_t file_block_bytes(int64_t format) { return format == Q4_0 ? 18 : format == Q4_1 ? 20 : 34; }

// --- activations ----------------------------------------------------------------------------------

// One row `x[k]` into row `r` of a tile of `rows` rows.
void quantize_row(const float* x, long blocks, uint8_t* tile, int rows, int r) {
    const size_t stride = ROW_BYTES * rows;
    uint8_t* q = tile + size_t(r) * BLOCK;
    float* scales = reinterpret_cast<float*>(tile + size_t(rows) * BLOCK) + r;
    for (long b = 0; b < blocks; ++b, x += BLOCK, q += stride, scales += stride / 4) {
        const __m512 lo = _mm512_loadu_ps(x), hi = _mm512_loadu_ps(x + 16);
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(lo), _mm512_abs_ps(hi)));
        const float d = most / 127.0f;
        const __m512 inverse = _mm512_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(lo, inverse));
        const __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(hi, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtsepi32_epi8(a));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtsepi32_epi8(c));
        const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, c));
        scales[0] = d;
        scales[rows] = d * float(sum);
        std::memcpy(&scales[2 * rows], &sum, 4);
    }
}

// --- one tile -------------------------------------------------------------------------------------

template <int64_t FORMAT, int R>
void multiply(const uint8_t* x, const uint8_t* w, long blocks, const float* bias, float* out, long ldo, __mmask16 mask) {
    constexpr int ZERO = FORMAT == Q4_0 ? 8 : FORMAT == Q8_0 ? 128 : 0;
    constexpr int VALUES = FORMAT == Q8_0 ? 512 : 256;
    constexpr int GROUP = R <= 8 ? R : (R + 1) / 2;  // rows whose int32 chains are in flight together
    __m512 acc[R];
    const __m512 start = bias ? _mm512_maskz_loadu_ps(mask, bias) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = start;
    const __m512i nibble = _mm512_set1_epi8(15);
    for (long b = 0; b < blocks; ++b) {
        __m512i v[8];
        if constexpr (FORMAT == Q8_0) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) v[i] = _mm512_loadu_si512(w + 64 * i);
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i both = _mm512_loadu_si512(w + 64 * i);
                v[2 * i] = _mm512_and_si512(both, nibble);
                v[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            }
        }
        const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + VALUES)));
        __m512 m = _mm512_setzero_ps();
        if constexpr (FORMAT == Q4_1)
            m = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + VALUES + 32)));
        for (int line = 0; line < int(panel_block_bytes(FORMAT)); line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + line, _MM_HINT_T0);
        w += panel_block_bytes(FORMAT);
        const float* scales = reinterpret_cast<const float*>(x + R * BLOCK);
        const int* sums = reinterpret_cast<const int*>(scales + 2 * R);
#pragma GCC unroll 16
        for (int first = 0; first < R; first += GROUP) {
            __m512i dot[GROUP];
#pragma GCC unroll 8
            for (int r = 0; r < GROUP; ++r)
                if (first + r < R)
                    dot[r] = ZERO ? _mm512_mullo_epi32(_mm512_set1_epi32(-ZERO), _mm512_set1_epi32(sums[first + r])) : _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
#pragma GCC unroll 8
                for (int r = 0; r < GROUP; ++r)
                    if (first + r < R) tiles::dot4(dot[r], v[i], x + (first + r) * BLOCK + 4 * i);
#pragma GCC unroll 8
            for (int r = 0; r < GROUP; ++r)
                if (first + r < R) {
                    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_set1_ps(scales[first + r]));
                    acc[first + r] = _mm512_fmadd_ps(scaled, d, acc[first + r]);
                    if constexpr (FORMAT == Q4_1)
                        acc[first + r] = _mm512_fmadd_ps(m, _mm512_set1_ps(scales[R + first + r]), acc[first + r]);
                }
        }
        x += R * ROW_BYTES;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(out + r * ldo, mask, acc[r]);
}

using Multiply = void (*)(const uint8_t*, const uint8_t*, long, const float*, float*, long, __mmask16);

template <int64_t FORMAT, size_t... I>
constexpr std::array<Multiply, MOST_ROWS> table(std::index_sequence<I...>) {
    return {multiply<FORMAT, int(I) + 1>...};
}

template <int64_t FORMAT>
void gemm(const tiles::Weight& w, const tiles::Product& p) {
    static constexpr auto kernels = table<FORMAT>(std::make_index_sequence<MOST_ROWS>());
    const tiles::RowTiles rows(p.m, MOST_ROWS);
    const long blocks = w.k / BLOCK, panels = (w.n + COLUMNS - 1) / COLUMNS;
    const size_t row_bytes = ROW_BYTES * blocks, panel_bytes = panel_block_bytes(FORMAT) * blocks;
    uint8_t* quantized = tiles::workspace(row_bytes * p.m);
    const auto quantize = [&](long first, long last) {
        for (long tile = 0; tile < rows.count; ++tile) {
            const long start = rows.start(tile), height = rows.height(tile);
            for (long r = std::max(first, start); r < std::min(last, start + height); ++r)
                quantize_row(p.x + r * p.ldx, blocks, quantized + row_bytes * start, int(height), int(r - start));
        }
    };
    const bool together = p.m > 1 && p.m * blocks > 256;  // below that a barrier costs more than it saves
    if (!together) quantize(0, p.m);
    tiles::on_threads(p.threads, [&](int thread, int threads) {
        if (together) {
            tiles::part(p.m, thread, threads, quantize);
            tiles::barrier(threads);
        }
        tiles::share(panels, panel_bytes, rows, thread, threads, [&](long panel, long tile) {
            const long column = panel * COLUMNS, start = rows.start(tile);
            kernels[rows.height(tile) - 1](quantized + row_bytes * start, w.data + panel * panel_bytes, blocks,
                                           w.bias ? w.bias + column : nullptr, p.out + start * p.ldo + column, p.ldo,
                                           tiles::columns_mask(w.n - column));
        });
    });
}

// --- weights --------------------------------------------------------------------------------------

int nibble_or_byte(const uint8_t* values, int64_t format, int i) {
    if (format == Q8_0) return values[i] ^ 128;  // int8 + 128
    return i < 16 ? values[i] & 15 : values[i - 16] >> 4;
}

void pack_block(const uint8_t* file, int64_t format, uint8_t* panel, int column) {
    const size_t scales = format == Q4_1 ? 4 : 2;
    for (int i = 0; i < BLOCK; ++i) {
        const int group = i / 4, q = nibble_or_byte(file + scales, format, i);
        if (format == Q8_0) panel[group * 64 + column * 4 + i % 4] = uint8_t(q);
        else panel[group / 2 * 64 + column * 4 + i % 4] |= uint8_t(q << (group % 2 * 4));
    }
    const size_t values = format == Q8_0 ? 512 : 256;
    std::memcpy(panel + values + 2 * column, file, 2);
    if (format == Q4_1) std::memcpy(panel + values + 32 + 2 * column, file + 2, 2);
}

}  // namespace

void tiles::multiply_blocks(const Weight& w, const Product& p) {
    (w.format == Q4_0 ? gemm<Q4_0> : w.format == Q4_1 ? gemm<Q4_1> : gemm<Q8_0>)(w, p);
}

extern "C" {

int64_t tw_blocks_bytes(int64_t format, int64_t n, int64_t k) {
    return (n + COLUMNS - 1) / COLUMNS * (k / BLOCK) * int64_t(panel_block_bytes(format));
}

// `file` [n, k / 32 blocks] as a GGUF file holds it, into `packed` (64-byte aligned, zeroed).
void tw_blocks_pack(int64_t format, const uint8_t* file, int64_t n, int64_t k, uint8_t* packed, int threads) {
    const long blocks = k / BLOCK, panels = (n + COLUMNS - 1) / COLUMNS;
    tiles::on_threads(threads, [&](int thread, int count) {
        for (long panel = panels * thread / count; panel < panels * (thread + 1) / count; ++panel)
            for (long c = panel * COLUMNS; c < std::min<long>(n, (panel + 1) * COLUMNS); ++c)
                for (long b = 0; b < blocks; ++b)
                    pack_block(file + (c * blocks + b) * file_block_bytes(format), format,
                               packed + (panel * blocks + b) * panel_block_bytes(format), int(c % COLUMNS));
    });
}

// Rows `ids` of the packed weight as float32, `out` [count, k].
void tw_blocks_rows(int64_t format, const uint8_t* packed, int64_t k, const int64_t* ids, int64_t count, float* out) {
    const long blocks = k / BLOCK;
    const size_t values = format == Q8_0 ? 512 : 256;
    for (long i = 0; i < count; ++i, out += k) {
        const int column = int(ids[i] % COLUMNS);
        const uint8_t* panel = packed + ids[i] / COLUMNS * blocks * panel_block_bytes(format);
        for (long b = 0; b < blocks; ++b, panel += panel_block_bytes(format)) {
            uint16_t half[2] = {0, 0};
            std::memcpy(&half[0], panel + values + 2 * column, 2);
            if (format == Q4_1) std::memcpy(&half[1], panel + values + 32 + 2 * column, 2);
            const float d = _cvtsh_ss(half[0]), m = format == Q4_1 ? _cvtsh_ss(half[1]) : 0.0f;
            const int zero = format == Q4_0 ? 8 : format == Q8_0 ? 128 : 0;
            for (int j = 0; j < BLOCK; ++j) {
                const int group = j / 4;
                const int q = format == Q8_0 ? panel[group * 64 + column * 4 + j % 4]
                                             : (panel[group / 2 * 64 + column * 4 + j % 4] >> (group % 2 * 4)) & 15;
                out[b * BLOCK + j] = d * float(q - zero) + m;
            }
        }
    }
}

}  // extern "C"

TW_RECORDABLE(tw_blocks_rows)

#endif
