// What the translation units of the C interface share: matrices as rows of records, shared out over the pool by whole
// records (16 weight rows), so that no result depends on the number of threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "calls.h"
#include "kernels.h"
#include "threads/pool.h"

namespace pshard {

const Kernels& kernels();  // those of the instruction set in use

constexpr int64_t kTaskBytes = 128 << 10;  // of one task: small enough to balance, large enough to stream
constexpr int64_t kCopied = 16 << 10;      // floats that are copied as one task

template <class Number>
Number round_up(Number n, Number to) {
  return (n + to - 1) / to * to;
}

struct Matrix {
  const uint8_t* data;
  int type;
  int64_t rows, cols;
  Planes planes;
  size_t record;  // bytes of 16 rows

  Matrix(const void* w, int type, int64_t rows, int64_t cols)
      : data(static_cast<const uint8_t*>(w)),
        type(type),
        rows(rows),
        cols(cols),
        planes(planes_of(type, cols)),
        record(is_plain(type) ? 16 * row_nbytes(type, cols) : planes.record) {}
  int64_t nbytes() const { return records() * static_cast<int64_t>(record); }
  int64_t records() const { return (rows + 15) / 16; }
  int rows_of(int64_t r) const { return static_cast<int>(std::min<int64_t>(16, rows - r * 16)); }
  const uint8_t* at(int64_t r) const { return data + r * record; }
  int offset() const { return kFormats[type].offset; }
};

// The 16-row tiles of `tokens` tokens, one after the other, into their rows of out.
// With `base`, whose rows are base_stride apart, as sums.
inline void store_tiles(const float* tiles, int tokens, int rows, float* out, int64_t stride,
                        const float* base = nullptr, int64_t base_stride = 0) {
  for (int i = 0; i < tokens; ++i, tiles += 16, out += stride) {
    if (base)
      for (int r = 0; r < rows; ++r) out[r] = base[i * base_stride + r] + tiles[r];
    else std::memcpy(out, tiles, rows * sizeof(float));
  }
}

// Products that are added to `out` read it from a copy, as no chunk may read what it writes.
inline size_t base_bytes(int64_t tokens, int64_t rows, bool accumulate) {
  return accumulate ? tokens * rows * sizeof(float) : 0;
}
inline const float* copy_base(Team& team, const float* out, int64_t stride, int64_t tokens, int64_t rows, uint8_t* room) {
  auto* base = reinterpret_cast<float*>(room);
  const int64_t each = std::max<int64_t>(1, kCopied / rows);
  team.for_each((tokens + each - 1) / each, tokens * rows * 8, [&](int64_t task) {
    for (int64_t t = task * each; t < std::min(tokens, (task + 1) * each); ++t)
      std::memcpy(base + t * rows, out + t * stride, rows * sizeof(float));
  });
  return base;
}

inline int64_t records_per_task(size_t nbytes) {
  return std::max<int64_t>(1, kTaskBytes / std::max<size_t>(nbytes, 1));
}

// Runs body(record, the record this thread does next) for all records, several to a task. times: how often each of its
// bytes is worked on.
template <class Body>
void for_records(Team& team, int64_t records, size_t nbytes, int64_t times, Body&& body) {
  const int64_t each = records_per_task(nbytes);
  team.for_each_ahead((records + each - 1) / each, records * static_cast<int64_t>(nbytes) * times, [&](int64_t task, int64_t next_task) {
    const int64_t end = std::min(records, (task + 1) * each);
    for (int64_t r = task * each; r < end; ++r) body(r, r + 1 < end ? r + 1 : next_task * each);
  });
}

}  // namespace pshard
