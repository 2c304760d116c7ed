// What the translation units of the C interface share: matrices as rows of records, shared out over the pool by whole
// records (16 weight rows), so that no result depends on the number of threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "threads/pool.h"

#define PSHARD_API extern "C" __attribute__((visibility("default")))

namespace pshard {

const Kernels& kernels();  // those of the instruction set in use

constexpr int64_t kTaskBytes = 128 << 10;  // of one task: small enough to balance, large enough to stream

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
        record(is_plain(type) ? 16 * cols * kFormats[type].nbytes : planes.record) {}
  int64_t records() const { return (rows + 15) / 16; }
  int rows_of(int64_t r) const { return static_cast<int>(std::min<int64_t>(16, rows - r * 16)); }
  const uint8_t* at(int64_t r) const { return data + r * record; }
  int offset() const { return kFormats[type].offset; }
};

// The 16-row tiles of `tokens` tokens, one after the other, into their rows of out.
inline void store_tiles(const float* tiles, int tokens, int rows, float* out, int64_t stride, bool accumulate = false) {
  for (int i = 0; i < tokens; ++i, tiles += 16, out += stride) {
    if (accumulate)
      for (int r = 0; r < rows; ++r) out[r] += tiles[r];
    else std::memcpy(out, tiles, rows * sizeof(float));
  }
}

inline int64_t records_per_task(size_t nbytes) {
  return std::max<int64_t>(1, kTaskBytes / std::max<size_t>(nbytes, 1));
}

// Runs body(record, the record this thread does next) for all records, several to a task.
template <class Body>
void for_records(Team& team, int64_t records, size_t nbytes, Body&& body) {
  const int64_t each = records_per_task(nbytes);
  team.for_each_ahead((records + each - 1) / each, [&](int64_t task, int64_t next_task) {
    const int64_t end = std::min(records, (task + 1) * each);
    for (int64_t r = task * each; r < end; ++r) body(r, r + 1 < end ? r + 1 : next_task * each);
  });
}

}  // namespace pshard
