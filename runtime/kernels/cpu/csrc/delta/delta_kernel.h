// What a gated delta net computes with vectors: runtime/kernels/plain_delta.py has the formulas. Widths are multiples of
// 16. Included once per instruction set, after attention_kernel.h, inside an anonymous namespace.

// Columns of vectors that a product of small matrices keeps in registers, four rows of them.
#ifdef __AVX512F__
constexpr int kDeltaVectors = 4;
#else
constexpr int kDeltaVectors = 1;
#endif
constexpr int64_t kAheadBytes = 4096;

// silu of the convolution of n channels over the inputs x[0] (the oldest) to x[3]; conv [n][4].
void delta_mix(const float* const* x, const float* conv, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float* w = conv + 4 * i;
    out[i] = x[0][i] * w[0] + x[1][i] * w[1] + x[2][i] * w[2] + x[3][i] * w[3];
  }
  for (int64_t i = 0; i < n; i += 16) {
    const Floats v = load(out + i);
    store(out + i, div(v, add(splat(1.0f), exponential(sub(zero(), v)))));
  }
}

inline float sum_squares(const float* x, int64_t n) {
  Floats sum = zero();
  for (int64_t i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
  return sum_lanes(sum);
}

void delta_scale(float* x, int64_t n, float eps, float factor) {  // to length `factor`
  const Floats by = splat(factor / __builtin_sqrtf(sum_squares(x, n) + eps));
  for (int64_t i = 0; i < n; i += 16) store(x + i, mul(load(x + i), by));
}

// out = RMSNorm(o) * silu(z), or the sigmoid of z
void delta_gate(const float* o, const float* z, const float* norm, float eps, int64_t n, float* out, bool sigmoid) {
  const Floats factor = splat(1 / __builtin_sqrtf(sum_squares(o, n) / n + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const Floats g = load(z + i);
    const Floats gate = div(sigmoid ? splat(1.0f) : g, add(splat(1.0f), exponential(sub(zero(), g))));
    store(out + i, mul(mul(mul(load(o + i), factor), load(norm + i)), gate));
  }
}

template <int N>
inline void read_columns(const float* state, int64_t d, const float* k, const float* q, float* by_k, float* by_q) {
  Floats ks[N], qs[N];
  for (int j = 0; j < N; ++j) ks[j] = qs[j] = zero();
  for (int64_t i = 0; i < d; ++i, state += d) {
    const Floats a = splat(k[i]), b = splat(q[i]);
    for (int j = 0; j < N; ++j) {
      prefetch_far(reinterpret_cast<const uint8_t*>(state + 16 * j) + kAheadBytes);
      const Floats s = load(state + 16 * j);
      ks[j] = fma(a, s, ks[j]), qs[j] = fma(b, s, qs[j]);
    }
  }
  for (int j = 0; j < N; ++j) store(by_k + 16 * j, ks[j]), store(by_q + 16 * j, qs[j]);
}

// S^T k and S^T q of a state [d][d].
void delta_read(const float* state, int64_t d, const float* k, const float* q, float* by_k, float* by_q) {
  int64_t at = 0;
  for (; at + 128 <= d; at += 128) read_columns<8>(state + at, d, k, q, by_k + at, by_q + at);
  for (; at < d; at += 16) read_columns<1>(state + at, d, k, q, by_k + at, by_q + at);
}

// Rows of a state: to = left * from + k u^T; `next` is on its way into the cache meanwhile.
void delta_write(const float* from, float* to, int64_t rows, int64_t d, float left, const float* k, const float* u,
                 const float* next) {
  const Floats l = splat(left);
  for (int64_t i = 0; i < rows; ++i, from += d, to += d, next += d) {
    const Floats a = splat(k[i]);
    for (int64_t j = 0; j < d; j += 16) {
      prefetch_far(reinterpret_cast<const uint8_t*>(next + j));
      store(to + j, fma(a, load(u + j), mul(l, load(from + j))));
    }
  }
}

template <int R, int V>
inline void multiply_block(const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, int64_t inner,
                           float* out, int64_t out_row, float keep) {
  Floats sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = keep == 0 ? zero() : mul(splat(keep), load(out + r * out_row + 16 * v));
  for (int64_t k = 0; k < inner; ++k, a += a_col, b += b_row) {
    Floats row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + 16 * v);
    for (int r = 0; r < R; ++r) {
      const Floats x = splat(a[r * a_row]);
      for (int v = 0; v < V; ++v) sums[r][v] = fma(x, row[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * out_row + 16 * v, sums[r][v]);
}

// out[rows][cols] = keep * out + a[rows][inner] b[inner][cols]; a's numbers are a_row and a_col apart.
void delta_multiply(const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, int64_t rows,
                    int64_t inner, int64_t cols, float* out, int64_t out_row, float keep) {
  constexpr int V = kDeltaVectors;
  for (int64_t j = 0; j < cols;) {
    const bool wide = j + 16 * V <= cols;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
      if (wide) multiply_block<4, V>(a + i * a_row, a_row, a_col, b + j, b_row, inner, out + i * out_row + j, out_row, keep);
      else multiply_block<4, 1>(a + i * a_row, a_row, a_col, b + j, b_row, inner, out + i * out_row + j, out_row, keep);
    }
    for (; i < rows; ++i) {
      if (wide) multiply_block<1, V>(a + i * a_row, a_row, a_col, b + j, b_row, inner, out + i * out_row + j, out_row, keep);
      else multiply_block<1, 1>(a + i * a_row, a_row, a_col, b + j, b_row, inner, out + i * out_row + j, out_row, keep);
    }
    j += wide ? 16 * V : 16;
  }
}
