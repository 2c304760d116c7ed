// Attention with an online softmax, four queries at a time over tiles of cells; and the gate of SwiGLU.
// Included once per instruction set, after dense_kernels.h, inside an anonymous namespace.

// e^x for x in [-87, 88], clamped outside; relative error below 3e-7. x = n ln 2 + r, polynomial in r.
inline Floats exponential(Floats x) {
  x = max(splat(-87.0f), x);  // a NaN as second operand stays a NaN
  x = sub(zero(), max(splat(-88.0f), sub(zero(), x)));
  const Ints n = round_to_ints(mul(x, splat(1.44269504f)));
  const Floats whole = to_floats(n);
  const Floats r = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), x));
  Floats p = splat(1.0f / 720);
  for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return mul(p, pow2(n));
}

void silu_mul(float* gate, const float* up, int64_t n) {  // n a multiple of 16
  for (int64_t i = 0; i < n; i += 16) {
    const Floats g = load(gate + i);
    store(gate + i, mul(div(g, add(splat(1.0f), exponential(sub(zero(), g)))), load(up + i)));
  }
}

constexpr int kTile = 64;  // cells

template <int T>
inline Floats load_cell(const char* cell, int64_t k, int64_t d) {
  const auto* p = reinterpret_cast<const typename Plain<T>::Word*>(cell) + k;
  return d - k >= 16 ? Plain<T>::load16(p) : Plain<T>::load_tail(p, d - k);
}

// scores[query][cell] of four queries and cells [start, start + n).
template <int T>
inline void score_tile(const AttentionTask& t, const float* q, int64_t start, int n, float scores[4][kTile]) {
  const int64_t padded = (t.d + 15) / 16 * 16;
  for (int c = 0; c < n; c += 4) {
    const char* cells[4];
    for (int i = 0; i < 4; ++i) cells[i] = t.k + (start + (c + i < n ? c + i : n - 1)) * t.cell_stride;
    Floats sums[4][4];
    for (auto& row : sums)
      for (auto& s : row) s = zero();
    for (int64_t k = 0; k < t.d; k += 16) {
      Floats keys[4];
      for (int i = 0; i < 4; ++i) keys[i] = load_cell<T>(cells[i], k, t.d);
      for (int j = 0; j < 4; ++j) {
        const Floats query = load(q + j * padded + k);
        for (int i = 0; i < 4; ++i) sums[j][i] = fma(query, keys[i], sums[j][i]);
      }
    }
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 4; ++i) scores[j][c + i] = sum_lanes(sums[j][i]);
  }
}

// Turns one query's scores into p, rescales what it had, and adds the tile to its peak and sum.
inline void soften(float* scores, int64_t valid, float* out, int64_t padded, float& peak, float& sum) {
  const float low = -__builtin_inff();
  for (int64_t c = valid < 0 ? 0 : valid; c < kTile; ++c) scores[c] = low;
  if (valid <= 0) {
    for (int c = 0; c < kTile; ++c) scores[c] = 0;
    return;
  }
  Floats top = load(scores);
  for (int c = 16; c < kTile; c += 16) top = max(top, load(scores + c));
  const float tile_peak = max_lanes(top), new_peak = peak > tile_peak ? peak : tile_peak;
  Floats total = zero();
  for (int c = 0; c < kTile; c += 16) {
    store(scores + c, exponential(sub(load(scores + c), splat(new_peak))));
    for (int64_t i = valid > c ? valid : c; i < c + 16; ++i) scores[i] = 0;
    total = add(total, load(scores + c));
  }
  float shrink[16];
  store(shrink, exponential(splat(peak - new_peak)));
  if (peak != new_peak) {
    const Floats factor = splat(peak == low ? 0.0f : shrink[0]);
    for (int64_t k = 0; k < padded; k += 16) store(out + k, mul(load(out + k), factor));
    sum = peak == low ? 0.0f : sum * shrink[0];
  }
  peak = new_peak;
  sum += sum_lanes(total);
}

// out[query] += sum over cells of p * v, for four queries; Chunks * 16 columns from column k.
template <int T, int Chunks>
inline void add_values(const AttentionTask& t, int64_t start, int n, const float p[4][kTile], int64_t k, float* out) {
  const int64_t padded = (t.d + 15) / 16 * 16;
  Floats sums[4][Chunks];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < Chunks; ++i) sums[j][i] = load(out + j * padded + k + i * 16);
  for (int c = 0; c < n; ++c) {
    Floats values[Chunks];
    for (int i = 0; i < Chunks; ++i) values[i] = load_cell<T>(t.v + (start + c) * t.cell_stride, k + i * 16, t.d);
    for (int j = 0; j < 4; ++j) {
      const Floats weight = splat(p[j][c]);
      for (int i = 0; i < Chunks; ++i) sums[j][i] = fma(weight, values[i], sums[j][i]);
    }
  }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < Chunks; ++i) store(out + j * padded + k + i * 16, sums[j][i]);
}

template <int T>
void attend(const AttentionTask& t) {
  const int64_t padded = (t.d + 15) / 16 * 16;
  const int blocks = (t.queries + 3) / 4;
  for (int64_t i = 0; i < blocks * 4 * padded; ++i) t.out[i] = 0;
  for (int i = 0; i < blocks * 4; ++i) t.peak[i] = -__builtin_inff(), t.sum[i] = 0;
  alignas(64) float p[4][kTile];
  for (int64_t start = t.begin; start < t.end; start += kTile)
    for (int b = 0; b < blocks; ++b) {
      const int64_t* visible = t.visible + b * 4;
      int64_t last = 0;
      for (int j = 0; j < 4; ++j) last = visible[j] > last ? visible[j] : last;
      last = last < t.end ? last : t.end;
      const int n = static_cast<int>(last - start < kTile ? last - start : kTile);
      if (n <= 0) continue;
      float* out = t.out + b * 4 * padded;
      score_tile<T>(t, t.q + b * 4 * padded, start, n, p);
      for (int j = 0; j < 4; ++j) {
        const int64_t valid = visible[j] - start < n ? visible[j] - start : n;
        soften(p[j], valid, out + j * padded, padded, t.peak[b * 4 + j], t.sum[b * 4 + j]);
      }
      int64_t k = 0;
      for (; k + 64 <= padded; k += 64) add_values<T, 4>(t, start, n, p, k, out);
      for (; k < padded; k += 16) add_values<T, 1>(t, start, n, p, k, out);
    }
}

void attention(const AttentionTask& task) {
  if (task.kv_type == F32) return attend<F32>(task);
  if (task.kv_type == F16) return attend<F16>(task);
  attend<BF16>(task);
}
