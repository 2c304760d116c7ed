// Tokens as the vector kernels take them: in groups of 1, 2, 4 or 8, of quantised chunks or of plain rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "driver.h"

namespace pshard {

constexpr int kSlice = 64;  // tokens whose activations are held at once

// How M tokens are grouped: eights, then the smallest of 1, 2, 4, 8 that holds the rest.
inline int group_size(int left) { return left >= 5 ? 8 : left >= 3 ? 4 : left; }
inline int padded_tokens(int m) { return m / 8 * 8 + (m % 8 ? group_size(m % 8) : 0); }

// Whether the kernels of both matrices take the same activations.
inline bool alike(const Matrix& a, const Matrix& b) {
  return a.offset() == b.offset() && is_plain(a.type) == is_plain(b.type);
}

// Activations of up to kSlice tokens as the kernels of one matrix want them.
struct Activations {
  const float* x;
  int64_t stride;
  int tokens;
  ActChunk* act;  // unused for plain types

  // `ahead`: what the kernel should fetch meanwhile; only the first group of a record does.
  TokenGroup group(const Matrix& w, int first, const uint8_t* ahead) const {
    TokenGroup g{};
    g.ahead = ahead;
    g.count = group_size(tokens - first);
    if (is_plain(w.type))
      for (int i = 0; i < g.count; ++i) g.x[i] = x + std::min(first + i, tokens - 1) * stride;
    else g.act = act + first * (w.cols / 32);
    return g;
  }
};

}  // namespace pshard
