// Norms, gated activations, gathered rows and rotary angles in float32; see `ops.py` for the shapes.
//
// A row is computed by one thread in one order: its result depends on nothing but the row.

#include <cmath>

#include "program.h"
#include "vec.h"

namespace {

using namespace tw;

constexpr int64_t GRAIN = 16 * 1024;  // elements below which another thread costs more than it saves

float root(const float* x, int64_t width, float eps) {
    f32x16 a{}, b{};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        f32x16 u = load(x + i), v = load(x + i + LANES);
        a += u * u;
        b += v * v;
    }
    for (; i + LANES <= width; i += LANES) {
        f32x16 u = load(x + i);
        a += u * u;
    }
    if (i < width) {
        f32x16 u = load_some(x + i, width - i);
        b += u * u;
    }
    return 1.0f / std::sqrt(sum(a + b) / float(width) + eps);
}

void norm(const float* x, const float* weight, float* out, int64_t width, float eps, float offset) {
    const float scale = root(x, width, eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * scale * (load(weight + i) + offset));
    for (; i < width; ++i) out[i] = x[i] * scale * (weight[i] + offset);
}

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

f32x16 erf_of(f32x16 x) {
    f32x16 y;
    for (int i = 0; i < LANES; ++i) y[i] = std::erf(x[i]);
    return y;
}

template <int ACT>
f32x16 activate(f32x16 x) {
    if constexpr (ACT == SILU) return x / (1.0f + exp(-x));
    if constexpr (ACT == GELU) return 0.5f * x * (1.0f + erf_of(x * 0.70710678118654752f));
    return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

template <int ACT>
void gate_rows(const float* gate_up, float* out, int64_t rows, int64_t width, int64_t stride, int threads) {
    // by pieces of rows, so that one long row also uses all threads
    const int64_t piece = 512, pieces = (width + piece - 1) / piece;
    parallel(rows * pieces, GRAIN / 4 / piece, threads, [=](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t row = unit / pieces, from = unit % pieces * piece;
            const int64_t n = from + piece < width ? piece : width - from;
            const float *gate = gate_up + row * stride + from, *up = gate + width;
            float* to = out + row * width + from;
            int64_t i = 0;
            for (; i + LANES <= n; i += LANES) store(to + i, activate<ACT>(load(gate + i)) * load(up + i));
            if (i < n) store_some(to + i, activate<ACT>(load_some(gate + i, n - i)) * load_some(up + i, n - i), n - i);
        }
    });
}

}  // namespace

extern "C" {

// x [rows, width] with `stride` floats between rows; out [rows, width]. offset is added to the weight (1: Gemma).
void tw_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, int64_t stride,
                 float eps, float offset, int threads) {
    parallel(rows, GRAIN / width + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm(x + r * stride, weight, out + r * width, width, eps, offset);
    });
}

// residual [rows, width] += delta; out = norm of the sum.
void tw_add_rms_norm(float* residual, const float* delta, const float* weight, float* out, int64_t rows,
                     int64_t width, float eps, float offset, int threads) {
    parallel(rows, GRAIN / width + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* sums = residual + r * width;
            const float* add = delta + r * width;
            int64_t i = 0;
            for (; i + LANES <= width; i += LANES) store(sums + i, load(sums + i) + load(add + i));
            for (; i < width; ++i) sums[i] += add[i];
            norm(sums, weight, out + r * width, width, eps, offset);
        }
    });
}

// gate_up [rows, 2 * width] with `stride` floats between rows; out [rows, width] = act(gate) * up.
void tw_gated(const float* gate_up, float* out, int64_t rows, int64_t width, int64_t stride, int act, int threads) {
    if (act == SILU) gate_rows<SILU>(gate_up, out, rows, width, stride, threads);
    if (act == GELU) gate_rows<GELU>(gate_up, out, rows, width, stride, threads);
    if (act == GELU_TANH) gate_rows<GELU_TANH>(gate_up, out, rows, width, stride, threads);
}

// x [count] *= factor.
void tw_scale(float* x, int64_t count, float factor, int threads) {
    parallel(count, GRAIN, threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) x[i] *= factor;
    });
}

// x [count] = cap * tanh(x / cap).
void tw_softcap(float* x, int64_t count, float cap, int threads) {
    parallel(count, GRAIN / 4, threads, [=](int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) store(x + i, tanh(load(x + i) / cap) * cap);
        if (i < end) store_some(x + i, tanh(load_some(x + i, end - i) / cap) * cap, end - i);
    });
}

// out [count, width] = rows `ids` of a table whose rows and columns lie `row` and `column` floats apart.
void tw_take_rows(const float* table, const int64_t* ids, float* out, int64_t count, int64_t width, int64_t row,
                  int64_t column, int threads) {
    parallel(count, GRAIN / width + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float* from = table + ids[i] * row;
            if (column == 1)
                std::memcpy(out + i * width, from, size_t(width) * sizeof(float));
            else
                for (int64_t j = 0; j < width; ++j) out[i * width + j] = from[j * column];
        }
    });
}

// cos, sin [count, 2 * pairs] of positions times frequencies, times scale; the first half of sin is negated.
void tw_rotations(const int64_t* positions, const float* frequencies, float* cos, float* sin, int64_t count,
                  int64_t pairs, float scale, int threads) {
    parallel(count, 1024 / pairs + 1, threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            float *c = cos + i * 2 * pairs, *s = sin + i * 2 * pairs;
            for (int64_t j = 0; j < pairs; ++j) {
                const float angle = float(positions[i]) * frequencies[j];
                c[j] = c[pairs + j] = std::cos(angle) * scale;
                s[pairs + j] = std::sin(angle) * scale;
                s[j] = -s[pairs + j];
            }
        }
    });
}

}  // extern "C"

TW_RECORDABLE(tw_rms_norm)
TW_RECORDABLE(tw_add_rms_norm)
TW_RECORDABLE(tw_gated)
TW_RECORDABLE(tw_scale)
TW_RECORDABLE(tw_softcap)
TW_RECORDABLE(tw_take_rows)
TW_RECORDABLE(tw_rotations)
