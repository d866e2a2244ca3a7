// How a matrix product out[m, n] = x[m, k] * w[n, k]^T is cut into tiles, shared by every weight format.
//
//   rows of x     tiles of some most number of rows, as equal as they can be; a tile's rows stay in registers and L1
//   columns       panels of a fixed number of output columns, stored one after another, each with all of k
//
// Invariants
// * Every element of `out` is summed by one thread in one order: any thread count gives the same numbers.
// * No allocation per call: rows in their packed form live in a buffer of the calling thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "lanes.h"

namespace tiles {

// A weight w [n, k] in one of the formats, packed; the same structure in kernels/gemm.py.
struct Weight {
    int64_t format, n, k;
    const uint8_t* data;
    const float* scale;  // [n], int8 only
    const float* bias;   // [n] or null
};

enum Format : int64_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, BF16 = 3, INT8 = 4, Q4_K = 5, Q5_0 = 6, Q5_1 = 7, Q5_K = 8, Q6_K = 9 };

// out [m, n] = x [m, k] * w^T + bias; rows of x and out lie `ldx` and `ldo` floats apart.
struct Product {
    const float* x;
    long ldx, m;
    float* out;
    long ldo;
    int threads;
};

void multiply_blocks(const Weight& w, const Product& p);
void multiply_bf16(const Weight& w, const Product& p);
void multiply_int8(const Weight& w, const Product& p);

constexpr size_t CACHE_BYTES = 1 << 19;  // weights of a group of panels: a quarter of a usual second-level cache

struct RowTiles {
    long rows, count;
    RowTiles(long rows, long most) : rows(rows), count((rows + most - 1) / most) {}
    long start(long tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
    long height(long tile) const { return rows / count + (tile < rows % count ? 1 : 0); }
};

// Memory of the calling thread that grows and is kept: no allocation per call.
inline uint8_t* workspace(size_t bytes) {
    struct Buffer {
        uint8_t* data = nullptr;
        size_t size = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffer;
    if (bytes > buffer.size) {
        std::free(buffer.data);
        buffer.size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
        buffer.data = static_cast<uint8_t*>(std::aligned_alloc(4096, buffer.size));
    }
    return buffer.data;
}

// `work(thread, threads)` on every thread. One thread runs it in place.
template <class Work>
inline void on_threads(int threads, Work&& work) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        work(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    work(0, 1);
}

inline void barrier(int threads) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp barrier
    }
#endif
}

// Calls `tile(panel, row tile)` for the pairs that belong to this thread. Threads split the panels, so that each
// streams its own weights once; few panels and many rows are split by rows instead. Panels are taken in groups that
// fit the cache next to the core, and a row tile meets all panels of a group while it is in the first-level cache.
template <class Tile>
inline void share(long panels, size_t panel_bytes, const RowTiles& rows, int thread, int threads, Tile&& tile) {
    const bool by_rows = panels < 8 * threads && panels % threads != 0 && rows.count >= threads;
    const long parts = by_rows ? rows.count : panels;
    const long begin = parts * thread / threads, end = parts * (thread + 1) / threads;
    const long first_row = by_rows ? begin : 0, last_row = by_rows ? end : rows.count;
    const long first = by_rows ? 0 : begin, last = by_rows ? panels : end;
    const long group = std::max<long>(1, long(CACHE_BYTES / panel_bytes));
    for (long p = first; p < last; p += group)
        for (long r = first_row; r < last_row; ++r)
            for (long i = p; i < std::min(last, p + group); ++i) tile(i, r);
}

// `work(first, last)` on this thread's share of `count` items.
template <class Work>
inline void part(long count, int thread, int threads, Work&& work) {
    work(count * thread / threads, count * (thread + 1) / threads);
}

}  // namespace tiles
