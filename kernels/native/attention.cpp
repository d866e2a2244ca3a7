// Rotary embedding with the KV write, and causal attention over a paged cache, computed in float32.
//
// The cache holds float32 or bfloat16; bfloat16 is widened a run of keys at a time.
//
// A step's rows are int64 quadruples { first token, tokens, first position, address of int64 slots }; position p of a row
// lives in slot slots[p]. A query at position p sees keys max(0, p - window + 1) .. p. The query heads of one KV head
// are answered together, so keys are read once for all of them.
//
// * Rows of up to SHORT queries are cut into runs of RUN keys at fixed positions (flash decoding, arXiv:2311.01282),
//   longer ones into blocks of queries that keep a running maximum (arXiv:2205.14135). The cuts depend on the row
//   alone, so its result depends neither on its neighbours nor on the number of threads.
// * Only visible keys are read. NaN and infinity of a row reach that row's result.

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "program.h"
#include "vec.h"

namespace {

using namespace tw;

constexpr int64_t RUN = 128;          // keys whose scores are held at once
constexpr int64_t SHORT = 8;          // queries of a row up to which its keys are cut, not its queries
constexpr int64_t BLOCK = 96;         // query vectors of one unit of a long row
constexpr int64_t TILE = 6;           // query vectors held in registers
constexpr int64_t DOTS = 4;           // query vectors up to which transposing the keys does not pay
constexpr int64_t ALONE = 48 * 1024;  // multiply-adds below which a second thread costs more than it saves
constexpr float NEVER = -std::numeric_limits<float>::infinity();

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x16){__VA_ARGS__})
#endif

struct Row {
    int64_t token, queries, position;
    const int64_t* slots;
};

extern "C" struct tw_attention {
    const Row* rows;
    int64_t num_rows, heads, kv_heads, dim, value_dim;
    int64_t q_stride, key_stride, key_head, value_stride, value_head;  // floats: tokens of q, slots and heads of the cache
    int64_t window;                                                    // 0: none
    float scale, softcap;                                              // softcap 0: none
    int64_t threads, bf16;
};
using Step = tw_attention;

// e^x for x <= 0, zero below -87.
f32x16 weight_of(f32x16 x) {
    f32x16 inside = select(x < splat(-87.0f), splat(-87.0f), x);
    const f32x16 magic = splat(12582912.0f);
    f32x16 n = (inside * 1.44269504088896341f + magic) - magic;
    f32x16 r = inside - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    f32x16 p = splat(1.3981999507e-3f) + r * 1.9875691500e-4f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = p * (f32x16)((__builtin_convertvector(n, i32x16) + 127) << 23);
    return select(x < splat(-87.0f), splat(0.0f), p);
}

// Lane i is the sum over the lanes of v[i].
f32x16 sums(const f32x16* v) {
    f32x16 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        a[i] = SHUFFLE(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    f32x16 d = SHUFFLE(c[0], c[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               SHUFFLE(c[0], c[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    return SHUFFLE(d, d, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// out[j * stride + i] = rows[i][j] for 16 rows of 16 floats.
void transpose(const float* const* rows, int64_t column, float* out, int64_t stride) {
    f32x16 v[16], w[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = load(rows[i] + column);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        w[2 * i] = SHUFFLE(v[i], v[i + 8], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        w[2 * i + 1] = SHUFFLE(v[i], v[i + 8], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    // w[2i + h]: lane quarter q holds rows i, i + 8 of columns 4q + 2h, 4q + 2h + 1
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            f32x16 x = w[2 * i + h], y = w[2 * (i + 4) + h];  // rows i, i + 8 and i + 4, i + 12
            v[4 * i + 2 * h] = SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
            v[4 * i + 2 * h + 1] = SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        }
    // v[4i + c]: quarter q holds rows i, i + 4, i + 8, i + 12 of column 4q + c
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        f32x16 a = v[c], b = v[4 + c], d = v[8 + c], e = v[12 + c];  // rows 0.., 1.., 2.., 3..
        f32x16 ab0 = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        f32x16 ab1 = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        f32x16 de0 = SHUFFLE(d, e, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        f32x16 de1 = SHUFFLE(d, e, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        // pairs (row r, r + 1), (r + 4, r + 5), ...; join with (r + 2, r + 3)
        store(out + (0 + c) * stride, SHUFFLE(ab0, de0, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23));
        store(out + (4 + c) * stride, SHUFFLE(ab0, de0, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31));
        store(out + (8 + c) * stride, SHUFFLE(ab1, de1, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23));
        store(out + (12 + c) * stride, SHUFFLE(ab1, de1, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31));
    }
}

// c[R, 16 * C] (+)= a[R, depth] b, where row(k) is row k of b.
template <int R, int C, class Rows>
void tile(const float* a, int64_t lda, int64_t depth, Rows row, float* c, int64_t ldc, bool add) {
    f32x16 acc[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) acc[r][j] = add ? load(c + r * ldc + j * LANES) : f32x16{};
    for (int64_t k = 0; k < depth; ++k) {
        const float* b = row(k);
        f32x16 v[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) v[j] = load(b + j * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const f32x16 x = splat(a[r * lda + k]);
#pragma GCC unroll 4
            for (int j = 0; j < C; ++j) acc[r][j] += x * v[j];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) store(c + r * ldc + j * LANES, acc[r][j]);
}

// The same for any number of rows up to TILE and any multiple of 16 columns.
template <int C, class Rows>
void tile_rows(int64_t r, const float* a, int64_t lda, int64_t depth, Rows row, float* c, int64_t ldc, bool add) {
    switch (r) {
        case 1: return tile<1, C>(a, lda, depth, row, c, ldc, add);
        case 2: return tile<2, C>(a, lda, depth, row, c, ldc, add);
        case 3: return tile<3, C>(a, lda, depth, row, c, ldc, add);
        case 4: return tile<4, C>(a, lda, depth, row, c, ldc, add);
        case 5: return tile<5, C>(a, lda, depth, row, c, ldc, add);
        case 6: return tile<6, C>(a, lda, depth, row, c, ldc, add);
    }
}

template <class Rows>
void product(int64_t r, const float* a, int64_t lda, int64_t depth, Rows row, int64_t columns, float* c, int64_t ldc,
             bool add) {
    int64_t j = 0;
    const auto at = [&row, &j](int64_t k) { return row(k) + j; };
    for (; j + 64 <= columns; j += 64) tile_rows<4>(r, a, lda, depth, at, c + j, ldc, add);
    for (; j + 32 <= columns; j += 32) tile_rows<2>(r, a, lda, depth, at, c + j, ldc, add);
    for (; j < columns; j += 16) tile_rows<1>(r, a, lda, depth, at, c + j, ldc, add);
}

typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

// bfloat16 to float32; gives `out`.
const float* widen(const uint16_t* x, int64_t width, float* out) {
    for (int64_t d = 0; d < width; d += LANES) {
        u16x16 half;
        std::memcpy(&half, x + d, sizeof half);
        store(out + d, (f32x16)(__builtin_convertvector(half, u32x16) << 16));
    }
    return out;
}

// float32 to bfloat16, to nearest even; NaN stays NaN.
void narrow(const float* x, int64_t count, uint16_t* out) {
    int64_t i = 0;
    for (; i < count; i += LANES) {
        const int64_t n = count - i < LANES ? count - i : LANES;
        const f32x16 v = load_some(x + i, n);
        const u32x16 bits = (u32x16)v;
        const u32x16 even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
        const u32x16 nan = (u32x16)(v != v);
        const u16x16 half = __builtin_convertvector((nan & quiet) | (~nan & even), u16x16);
        std::memcpy(out + i, &half, size_t(n) * sizeof(uint16_t));
    }
}

// Memory of one thread, kept between calls.
struct Scratch {
    std::vector<float> floats;

    float* get(int64_t count) {
        if (int64_t(floats.size()) < count + 16) floats.resize(size_t(count) + 16);
        const uintptr_t at = (reinterpret_cast<uintptr_t>(floats.data()) + 63) & ~uintptr_t(63);
        return reinterpret_cast<float*>(at);
    }
};

// The keys and values of one KV head at positions [first, first + count) of a row, at most RUN.
struct Keys {
    const float* keys[RUN];
    const float* values[RUN];
    int64_t first, count;

    // `wide` [RUN, dim + value_dim] is where bfloat16 is widened to.
    Keys(const Step& s, const Row& row, int64_t kv_head, const void* k, const void* v, int64_t from, int64_t to,
         float* wide)
        : first(from), count(to - from) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t key = row.slots[from + i] * s.key_stride + kv_head * s.key_head;
            const int64_t value = row.slots[from + i] * s.value_stride + kv_head * s.value_head;
            if (s.bf16) {
                keys[i] = widen(static_cast<const uint16_t*>(k) + key, s.dim, wide + i * s.dim);
                values[i] = widen(static_cast<const uint16_t*>(v) + value, s.value_dim,
                                  wide + RUN * s.dim + i * s.value_dim);
            } else {
                keys[i] = static_cast<const float*>(k) + key;
                values[i] = static_cast<const float*>(v) + value;
            }
        }
        for (int64_t i = count; i < padded(); ++i) keys[i] = keys[count - 1];
    }

    int64_t padded() const { return (count + LANES - 1) / LANES * LANES; }
};

// scores[RUN] of one scaled query, before the softcap.
void dots(const float* q, int64_t dim, const Keys& in, float* scores) {
    for (int64_t i = 0; i < in.count; i += LANES) {
        f32x16 acc[LANES] = {};
#pragma GCC unroll 2
        for (int half = 0; half < LANES; half += LANES / 2)  // as many addresses as there are registers for
            for (int64_t d = 0; d < dim; d += LANES) {
                const f32x16 x = load(q + d);
#pragma GCC unroll 8
                for (int j = half; j < half + LANES / 2; ++j) acc[j] += x * load(in.keys[i + j] + d);
            }
        store(scores + i, sums(acc));
    }
}

// What one query sees of a run of keys: [from, to), relative to its first key.
struct Sight {
    int64_t from, to;

    Sight(int64_t position, int64_t window, const Keys& in) {
        const int64_t lowest = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
        from = lowest > in.first ? lowest - in.first : 0;
        to = position + 1 - in.first < in.count ? position + 1 - in.first : in.count;
    }
    bool nothing() const { return from >= to; }
    i32x16 shows(int64_t i) const {
        const i32x16 at = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + int32_t(i);
        return (at >= int32_t(from)) & (at < int32_t(to));
    }
};

// Softcap and mask; the largest visible score.
float cap(float* scores, const Sight& sight, const Keys& in, float softcap) {
    f32x16 best = splat(NEVER);
    for (int64_t i = 0; i < in.padded(); i += LANES) {
        f32x16 x = load(scores + i);
        if (softcap > 0) x = tanh(x / softcap) * softcap;
        x = select(sight.shows(i), x, splat(NEVER));
        store(scores + i, x);
        best = max(x, best);
    }
    return largest(best);
}

// Scores become softmax weights relative to `top`; their sum.
float weigh(float* scores, const Sight& sight, const Keys& in, float top) {
    f32x16 total{};
    for (int64_t i = 0; i < in.padded(); i += LANES) {
        const f32x16 w = select(sight.shows(i), weight_of(load(scores + i) - top), splat(0.0f));
        store(scores + i, w);
        total += w;
    }
    return sum(total);
}

// Keys transposed to [dim, RUN].
void turn(const Keys& in, int64_t dim, float* turned) {
    for (int64_t i = 0; i < in.count; i += LANES)
        for (int64_t d = 0; d < dim; d += LANES) transpose(in.keys + i, d, turned + d * RUN + i, RUN);
}

// Query vectors [first, first + count) of a row and KV head, query by query, scaled, to [count, dim].
void take_queries(const Step& s, const Row& row, int64_t kv_head, const float* q, int64_t first, int64_t count,
                  float* out) {
    const int64_t group = s.heads / s.kv_heads;
    for (int64_t r = 0; r < count; ++r) {
        const int64_t query = (first + r) / group, head = kv_head * group + (first + r) % group;
        const float* from = q + (row.token + query) * s.q_stride + head * s.dim;
        for (int64_t d = 0; d < s.dim; d += LANES) store(out + r * s.dim + d, load(from + d) * s.scale);
    }
}

float* place(const Step& s, const Row& row, int64_t kv_head, int64_t vector, float* out) {
    const int64_t group = s.heads / s.kv_heads;
    return out + ((row.token + vector / group) * s.heads + kv_head * group + vector % group) * s.value_dim;
}

// --- rows of few queries: one run of keys ----------------------------------------------------------

struct Run {
    int32_t row, kv_head;
    int64_t first, last;  // positions
    int64_t partial;      // floats into the partial results: [vectors, value_dim], maxima [vectors], sums [vectors]
};

void answer_run(const Step& s, const Run& run, const float* q, const void* k, const void* v, float* partials,
                Scratch& scratch) {
    const Row& row = s.rows[run.row];
    const int64_t group = s.heads / s.kv_heads, vectors = row.queries * group;
    float* queries = scratch.get(vectors * (s.dim + RUN) + (2 * s.dim + s.value_dim) * RUN);
    float *scores = queries + vectors * s.dim, *turned = scores + vectors * RUN, *wide = turned + s.dim * RUN;
    float *out = partials + run.partial, *tops = out + vectors * s.value_dim, *totals = tops + vectors;
    const Keys in(s, row, run.kv_head, k, v, run.first, run.last, wide);
    take_queries(s, row, run.kv_head, q, 0, vectors, queries);
    if (vectors <= DOTS)
        for (int64_t r = 0; r < vectors; ++r) dots(queries + r * s.dim, s.dim, in, scores + r * RUN);
    else
        turn(in, s.dim, turned);
    for (int64_t r = 0; r < vectors; r += TILE) {
        const int64_t n = vectors - r < TILE ? vectors - r : TILE;
        float* rows = scores + r * RUN;
        if (vectors > DOTS) {
            const auto at = [turned](int64_t d) { return turned + d * RUN; };
            product(n, queries + r * s.dim, s.dim, s.dim, at, in.padded(), rows, RUN, false);
        }
        for (int64_t i = 0; i < n; ++i) {
            const Sight sight(row.position + (r + i) / group, s.window, in);
            const float top = cap(rows + i * RUN, sight, in, s.softcap);
            tops[r + i] = top;
            totals[r + i] = weigh(rows + i * RUN, sight, in, sight.nothing() ? 0.0f : top);
        }
        const auto at = [&in](int64_t j) { return in.values[j]; };
        product(n, rows, RUN, in.count, at, s.value_dim, out + r * s.value_dim, s.value_dim, false);
    }
}

// Joins the runs of one row and KV head, `count` of them every `stride` runs.
void join(const Step& s, const Run* runs, int64_t count, int64_t stride, const float* partials, float* out) {
    const Row& row = s.rows[runs->row];
    const int64_t vectors = row.queries * (s.heads / s.kv_heads), width = s.value_dim;
    for (int64_t r = 0; r < vectors; ++r) {
        float top = NEVER, total = 0.0f;
        for (int64_t c = 0; c < count; ++c) {
            const float t = (partials + runs[c * stride].partial + vectors * width)[r];
            top = t > top ? t : top;
        }
        float* to = place(s, row, runs->kv_head, r, out);
        for (int64_t d = 0; d < width; d += LANES) store(to + d, f32x16{});
        for (int64_t c = 0; c < count; ++c) {
            const float* part = partials + runs[c * stride].partial;
            const float t = part[vectors * width + r], sum = part[vectors * width + vectors + r];
            if (t == NEVER && sum == 0.0f) continue;  // nothing of that run is visible
            const float share = std::exp(t - top);
            total += share * sum;
            for (int64_t d = 0; d < width; d += LANES) store(to + d, load(to + d) + load(part + r * width + d) * share);
        }
        const float inverse = 1.0f / total;
        for (int64_t d = 0; d < width; d += LANES) store(to + d, load(to + d) * inverse);
    }
}

// --- rows of many queries: one block of query vectors ----------------------------------------------

struct Block {
    int32_t row, kv_head;
    int64_t first, count;  // query vectors
};

void answer_block(const Step& s, const Block& block, const float* q, const void* k, const void* v, float* out,
                  Scratch& scratch) {
    const Row& row = s.rows[block.row];
    const int64_t group = s.heads / s.kv_heads, width = s.value_dim;
    float* queries = scratch.get(block.count * (s.dim + width + 2) + TILE * RUN + (2 * s.dim + width) * RUN);
    float *sums = queries + block.count * s.dim, *tops = sums + block.count * width, *totals = tops + block.count;
    float *scores = totals + block.count, *turned = scores + TILE * RUN, *wide = turned + s.dim * RUN;
    take_queries(s, row, block.kv_head, q, block.first, block.count, queries);
    std::memset(sums, 0, size_t(block.count * width) * sizeof(float));
    for (int64_t r = 0; r < block.count; ++r) tops[r] = NEVER, totals[r] = 0.0f;
    const int64_t lowest = row.position + block.first / group;
    const int64_t end = row.position + (block.first + block.count - 1) / group + 1;
    const int64_t begin = s.window > 0 && lowest - s.window + 1 > 0 ? lowest - s.window + 1 : 0;
    for (int64_t from = begin; from < end; from += RUN) {
        const Keys in(s, row, block.kv_head, k, v, from, from + RUN < end ? from + RUN : end, wide);
        turn(in, s.dim, turned);
        for (int64_t r = 0; r < block.count; r += TILE) {
            const int64_t n = block.count - r < TILE ? block.count - r : TILE;
            const int64_t last = row.position + (block.first + r + n - 1) / group;
            if (last < from) continue;  // these queries come before the keys
            const int64_t seen = last + 1 - from < in.count ? last + 1 - from : in.count;
            const auto key = [turned](int64_t d) { return turned + d * RUN; };
            product(n, queries + r * s.dim, s.dim, s.dim, key, in.padded(), scores, RUN, false);
            for (int64_t i = 0; i < n; ++i) {
                float* mine = scores + i * RUN;
                const Sight sight(row.position + (block.first + r + i) / group, s.window, in);
                float top = cap(mine, sight, in, s.softcap);
                const float before = tops[r + i];
                top = before > top ? before : top;
                totals[r + i] *= top == NEVER ? 1.0f : std::exp(before - top);
                const float total = weigh(mine, sight, in, top == NEVER ? 0.0f : top);
                totals[r + i] += total;
                if (top != before && before != NEVER) {
                    const float share = std::exp(before - top);
                    float* sum = sums + (r + i) * width;
                    for (int64_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * share);
                }
                tops[r + i] = top;
            }
            const auto value = [&in](int64_t j) { return in.values[j]; };
            product(n, scores, RUN, seen, value, width, sums + r * width, width, true);
        }
    }
    for (int64_t r = 0; r < block.count; ++r) {
        float* to = place(s, row, block.kv_head, block.first + r, out);
        const float inverse = 1.0f / totals[r];
        for (int64_t d = 0; d < width; d += LANES) store(to + d, load(sums + r * width + d) * inverse);
    }
}

template <class Body>
void each(int64_t count, std::atomic<int64_t>& next, const Body& body) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
}

// --- rotary embedding and KV write -----------------------------------------------------------------

void norm_head(float* x, const float* weight, int64_t dim, float eps, float offset) {
    float square = 0.0f;
    int64_t i = 0;
    f32x16 acc{};
    for (; i + LANES <= dim; i += LANES) {
        const f32x16 u = load(x + i);
        acc += u * u;
    }
    for (; i < dim; ++i) square += x[i] * x[i];
    const float scale = 1.0f / std::sqrt((sum(acc) + square) / float(dim) + eps);
    for (i = 0; i < dim; ++i) x[i] = x[i] * scale * (weight[i] + offset);
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const f32x16 a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cos + i) + b * load(sin + i));
        store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] + b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

}  // namespace

extern "C" {

// qkv [tokens, heads + 2 * kv_heads, dim]: q and k are normed (where there is a weight) and turned in place, then k and v
// are copied to slots[token] of the cache. cos, sin [tokens, rotary]: as `rope.py` makes them, sin signed.
void tw_rope_kv_write(float* qkv, const float* cos, const float* sin, const int64_t* slots, void* keys, void* values,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t key_stride,
                      int64_t value_stride, const float* q_norm, const float* k_norm, float eps, float offset,
                      int bf16, int threads) {
    const int64_t width = (heads + 2 * kv_heads) * dim, written = kv_heads * dim;
    const auto write = [=](const float* x, void* cache, int64_t at) {
        if (bf16)
            narrow(x, written, static_cast<uint16_t*>(cache) + at);
        else
            std::memcpy(static_cast<float*>(cache) + at, x, size_t(written) * sizeof(float));
    };
    parallel(tokens, 8 * 1024 / width + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* x = qkv + t * width;
            for (int64_t h = 0; h < heads + kv_heads; ++h) {
                const float* weight = h < heads ? q_norm : k_norm;
                if (weight) norm_head(x + h * dim, weight, dim, eps, offset);
                rotate(x + h * dim, cos + t * rotary, sin + t * rotary, rotary / 2);
            }
            write(x + heads * dim, keys, slots[t] * key_stride);
            write(x + heads * dim + written, values, slots[t] * value_stride);
        }
    });
}

// q [tokens, heads, dim] over the cache: out [tokens, heads, value_dim]. dim and value_dim are multiples of 16.
void tw_attend(const tw_attention* step, const float* q, const void* keys, const void* values, float* out) {
    const Step& s = *step;
    const int64_t group = s.heads / s.kv_heads;
    thread_local std::vector<Run> runs;
    thread_local std::vector<Block> blocks;
    thread_local std::vector<int64_t> joins;  // index of the first run of a row
    thread_local Scratch partial_memory;
    runs.clear(), blocks.clear(), joins.clear();
    int64_t partial = 0, work = 0;
    for (int64_t i = 0; i < s.num_rows; ++i) {
        const Row& row = s.rows[i];
        const int64_t vectors = row.queries * group, end = row.position + row.queries;
        const int64_t begin = s.window > 0 && row.position - s.window + 1 > 0 ? row.position - s.window + 1 : 0;
        work += (end - begin) * row.queries * s.heads * s.dim;
        if (row.queries > SHORT) {
            const int64_t most = BLOCK > group ? BLOCK / group * group : group;
            for (int64_t last = vectors; last > 0; last -= most) {  // the longest first
                const int64_t first = last > most ? last - most : 0;
                for (int64_t h = 0; h < s.kv_heads; ++h) blocks.push_back({int32_t(i), int32_t(h), first, last - first});
            }
            continue;
        }
        joins.push_back(int64_t(runs.size()));
        for (int64_t from = begin; from < end; from = (from / RUN + 1) * RUN) {
            const int64_t to = (from / RUN + 1) * RUN < end ? (from / RUN + 1) * RUN : end;
            for (int64_t h = 0; h < s.kv_heads; ++h) {
                runs.push_back({int32_t(i), int32_t(h), from, to, partial});
                partial += (vectors * (s.value_dim + 2) + LANES - 1) / LANES * LANES;
            }
        }
    }
    joins.push_back(int64_t(runs.size()));
    float* partials = partial_memory.get(partial);
    std::atomic<int64_t> next_block{0}, next_run{0}, next_join{0};
    const int64_t num_runs = int64_t(runs.size()), num_blocks = int64_t(blocks.size());
    const int64_t num_joins = (int64_t(joins.size()) - 1) * s.kv_heads;
    const Run* run = runs.data();
    const Block* block = blocks.data();
    const int64_t* first = joins.data();
    const auto answer = [&] {
        thread_local Scratch scratch;
        each(num_blocks, next_block, [&](int64_t i) { answer_block(s, block[i], q, keys, values, out, scratch); });
        each(num_runs, next_run, [&](int64_t i) { answer_run(s, run[i], q, keys, values, partials, scratch); });
    };
    const auto finish = [&] {
        each(num_joins, next_join, [&](int64_t i) {
            const int64_t row = i / s.kv_heads, h = i % s.kv_heads, count = (first[row + 1] - first[row]) / s.kv_heads;
            join(s, run + first[row] + h, count, s.kv_heads, partials, out);
        });
    };
#ifdef _OPENMP
    if (s.threads > 1 && work > ALONE && num_runs + num_blocks > 1) {
#pragma omp parallel num_threads(int(s.threads))
        {
            answer();
#pragma omp barrier
            finish();
        }
        return;
    }
#endif
    (void)work;
    answer();
    finish();
}

}  // extern "C"

TW_RECORDABLE(tw_rope_kv_write)
TW_RECORDABLE(tw_attend)
