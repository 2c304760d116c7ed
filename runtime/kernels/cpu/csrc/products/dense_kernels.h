// Plain rows of F32, F16, BF16 and FP8: dot products with float activations, and conversion.
// Included once per instruction set, after its simd_*.h, inside an anonymous namespace.

template <int T>
struct Plain {
  using Word = std::conditional_t<T == F32, float, std::conditional_t<T == FP8, uint8_t, uint16_t>>;
  // Words from a row of `cols` columns to the next.
  static constexpr int64_t stride(int64_t cols) { return T == FP8 ? cols / 128 * 132 : cols; }
  static inline Floats load16(const Word* p) {
    if constexpr (T == F32) return load(p);
    else if constexpr (T == F16) return load_f16(p);
    else if constexpr (T == FP8) return load_e4m3_256th(p);
    else return load_bf16(p);
  }
  // Columns k to k + 15 of a row; of FP8, whose scales follow its codes, k is a multiple of 16.
  static inline Floats at(const Word* row, int64_t k, int64_t cols) {
    if constexpr (T == FP8) {
      float scale;
      std::memcpy(&scale, row + cols + k / 128 * 4, 4);
      return mul(load16(row + k), splat(256.0f * scale));
    } else {
      return load16(row + k);
    }
  }
  // The last columns, fewer than 16; the other lanes are zero.
  static inline Floats load_tail(const Word* p, int64_t n) {
    Word words[16] = {};
    std::memcpy(words, p, n * sizeof(Word));
    return load16(words);
  }
};

// Two chains of sums for each row and token hide the latency of the additions.
template <int T, int Rows, int Count>
inline void dot_rows(const typename Plain<T>::Word* w, int64_t cols, const float* const* x,
                     const typename Plain<T>::Word* ahead, float* tile) {
  const int64_t stride = Plain<T>::stride(cols);
  Floats sums[2][Rows][Count];
  for (auto& chain : sums)
    for (auto& row : chain)
      for (auto& s : row) s = zero();
  auto accumulate = [&](Floats(&chain)[Rows][Count], int64_t k) {
    Floats weights[Rows];
    for (int r = 0; r < Rows; ++r) weights[r] = Plain<T>::at(w + r * stride, k, cols);
    for (int m = 0; m < Count; ++m) {
      const Floats value = load(x[m] + k);
      for (int r = 0; r < Rows; ++r) chain[r][m] = fma(weights[r], value, chain[r][m]);
    }
  };
  const int64_t whole = cols / 16 * 16;
  int64_t k = 0;
  for (; k + 32 <= whole; k += 32) {
    for (int r = 0; r < Rows; ++r)
      for (int at = 0; at < 32; at += 64 / sizeof(*w))
        prefetch(reinterpret_cast<const uint8_t*>(ahead + r * stride + k + at));
    accumulate(sums[0], k);
    accumulate(sums[1], k + 16);
  }
  if (k < whole) accumulate(sums[0], k);
  if (whole < cols)
    for (int m = 0; m < Count; ++m) {
      const Floats value = Plain<F32>::load_tail(x[m] + whole, cols - whole);
      for (int r = 0; r < Rows; ++r)
        sums[1][r][m] = fma(Plain<T>::load_tail(w + r * stride + whole, cols - whole), value, sums[1][r][m]);
    }
  for (int r = 0; r < Rows; ++r)
    for (int m = 0; m < Count; ++m) tile[m * 16 + r] = sum_lanes(add(sums[0][r][m], sums[1][r][m]));
}

template <int T, int Count>
inline void dense_tokens(const uint8_t* record, int64_t cols, int rows, const TokenGroup& group, float* tile) {
  using Word = typename Plain<T>::Word;
  // One token takes one row at a time, which reads memory in order; several share what they load over four rows.
  constexpr int kTokens = Count < 4 ? Count : 4, kRows = Count == 1 ? 1 : 4;
  const auto *w = reinterpret_cast<const Word*>(record), *next = reinterpret_cast<const Word*>(group.ahead);
  const int64_t stride = Plain<T>::stride(cols);
  int r = 0;
  for (; r + kRows <= rows; r += kRows)
    for (int m = 0; m < Count; m += kTokens)
      dot_rows<T, kRows, kTokens>(w + r * stride, cols, group.x + m, r + kRows < rows ? w + (r + kRows) * stride : next,
                                  tile + m * 16 + r);
  for (; r < rows; ++r)
    for (int m = 0; m < Count; m += kTokens)
      dot_rows<T, 1, kTokens>(w + r * stride, cols, group.x + m, next, tile + m * 16 + r);
}

template <int T>
void linear_plain(const uint8_t* record, const Planes&, int64_t cols, int rows, const TokenGroup& group, float* tile) {
  switch (group.count) {
    case 1: return dense_tokens<T, 1>(record, cols, rows, group, tile);
    case 2: return dense_tokens<T, 2>(record, cols, rows, group, tile);
    case 4: return dense_tokens<T, 4>(record, cols, rows, group, tile);
    default: return dense_tokens<T, 8>(record, cols, rows, group, tile);
  }
}

template <int T>
void dequantize_plain(const uint8_t* record, const Planes&, int64_t cols, int first, int last, void* out,
                      int64_t stride, bool bf16) {
  for (int r = first; r < last; ++r) {
    const auto* row = reinterpret_cast<const typename Plain<T>::Word*>(record) + r * Plain<T>::stride(cols);
    for (int64_t k = 0; k < cols; k += 16) {
      const int64_t n = cols - k < 16 ? cols - k : 16, at = (r - first) * stride + k;
      const Floats v = n == 16 ? Plain<T>::at(row, k, cols) : Plain<T>::load_tail(row + k, n);
      float floats[16];
      uint16_t words[16];
      if (n == 16 && bf16) store_bf16(static_cast<uint16_t*>(out) + at, v);
      else if (n == 16) store(static_cast<float*>(out) + at, v);
      else if (bf16) store_bf16(words, v), std::memcpy(static_cast<uint16_t*>(out) + at, words, n * 2);
      else store(floats, v), std::memcpy(static_cast<float*>(out) + at, floats, n * 4);
    }
  }
}
