// Attention with an online softmax, four queries at a time over tiles of cells; and the gates of FFNs.
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

void relu_mul(float* gate, const float* up, int64_t n) {  // n a multiple of 16
  for (int64_t i = 0; i < n; i += 16) store(gate + i, mul(max(zero(), load(gate + i)), load(up + i)));
}

// By the approximation with tanh: g / (1 + exp(-2 sqrt(2/pi) (g + 0.044715 g^3))).
inline Floats gelu(Floats g) {
  const Floats bent = mul(g, fma(mul(g, g), splat(-1.5957691216f * 0.044715f), splat(-1.5957691216f)));
  return div(g, add(splat(1.0f), exponential(bent)));
}

void gelu_mul(float* gate, const float* up, int64_t n) {  // n a multiple of 16
  for (int64_t i = 0; i < n; i += 16) store(gate + i, mul(gelu(load(gate + i)), load(up + i)));
}

// As llama.cpp's CPU has it: a table of f16 by f16, beyond 10 the gate itself and below -10 nothing.
void gelu16_mul(float* gate, const float* up, int64_t n) {  // n a multiple of 16
  alignas(64) float raw[16], made[16];
  for (int64_t i = 0; i < n; i += 16) {
    store(raw, load(gate + i));
    store(made, round_f16(gelu(round_f16(load(gate + i)))));
    for (int j = 0; j < 16; ++j) made[j] = raw[j] <= -10 ? 0 : raw[j] >= 10 ? raw[j] : made[j];
    store(gate + i, mul(load(made), load(up + i)));
  }
}

void sigmoid_mul(float* x, const float* gate, int64_t n) {  // n a multiple of 16
  for (int64_t i = 0; i < n; i += 16)
    store(x + i, div(load(x + i), add(splat(1.0f), exponential(sub(zero(), load(gate + i))))));
}

// gpt-oss' gate: with g at most 7 and u in [-7, 7], g * sigmoid(1.702 g) * (u + 1). A NaN stays one.
void clamped_mul(float* gate, const float* up, int64_t n) {  // n a multiple of 16
  const Floats least = splat(-7.0f), one = splat(1.0f);
  const auto at_most_7 = [&](Floats x) { return sub(zero(), max(least, sub(zero(), x))); };
  for (int64_t i = 0; i < n; i += 16) {
    const Floats g = at_most_7(load(gate + i)), u = max(least, at_most_7(load(up + i)));
    store(gate + i, mul(div(g, add(one, exponential(mul(splat(-1.702f), g)))), add(u, one)));
  }
}

// silu(gate), at most the limit, times up within it. A NaN stays one.
void limited_mul(float* gate, const float* up, int64_t n, float limit) {  // n a multiple of 16
  const Floats least = splat(-limit), one = splat(1.0f);
  const auto at_most = [&](Floats x) { return sub(zero(), max(least, sub(zero(), x))); };
  for (int64_t i = 0; i < n; i += 16) {
    const Floats g = load(gate + i), bent = div(g, add(one, exponential(sub(zero(), g))));
    store(gate + i, mul(at_most(bent), max(least, at_most(load(up + i)))));
  }
}

constexpr int kTile = kTileCells;

// Fetches the cells of the next tile, all kv heads of a cell in a row as they lie in memory, a few lines at a time while
// the loops below compute: bursts would stall them, and one head's cells alone lie a stride apart, which DRAM and the
// hardware prefetchers serve badly. A prefetch past the last cell reads nothing and cannot fault.
struct Ahead {
  const char *at, *row_end;
  int64_t row_bytes, stride;
  int lines;  // for each call

  Ahead(const char* cell, int64_t row_bytes, int64_t stride, int64_t calls)
      : at(cell),
        row_end(cell + row_bytes),
        row_bytes(row_bytes),
        stride(stride),
        lines(static_cast<int>((kTile * ((row_bytes + 63) / 64) + calls - 1) / calls)) {}
  inline void fetch() {
    for (int i = 0; i < lines; ++i, at += 64) {
      if (at >= row_end) at = row_end += stride, at -= row_bytes;
      prefetch_far(reinterpret_cast<const uint8_t*>(at));
    }
  }
};

// Copies one head's part of n cells to [n rounded up to 4][padded], zeros around it.
template <class Word>
inline void copy_tile(const char* from, int64_t stride, int n, int64_t d, int64_t padded, Word* to) {
  for (int c = 0; c < (n + 3) / 4 * 4; ++c, from += stride, to += padded) {
    const int64_t filled = c < n ? d : 0;
    std::memcpy(to, from, filled * sizeof(Word));
    if (filled < padded) std::memset(to + filled, 0, (padded - filled) * sizeof(Word));
  }
}

// One head's part of n cells of type T as floats: [n rounded up to 4][padded], zeros around it.
template <int T>
void decode_tile(const AttentionTask& t, const char* cell, int64_t stride, int head, int n, float* to) {
  const int64_t d = t.d, padded = t.padded;
  for (int c = 0; c < n; ++c, cell += stride, to += padded) {
    if constexpr (T == Q8_0 || T == Q4_0) {
      constexpr int kEach = T == Q8_0 ? 1 : 2;  // codes of a byte
      const auto* codes = reinterpret_cast<const uint8_t*>(cell) + head * d / kEach;
      const char* scales = cell + t.kv_heads * d / kEach + head * d / 16;
      for (int64_t k = 0; k < d; k += 512) {  // a vector of scales at a time
        const int64_t blocks = (d - k < 512 ? d - k : 512) / 32;
        uint16_t halves[16] = {};
        float scale[16];
        std::memcpy(halves, scales + k / 16, blocks * 2);
        store(scale, load_f16(halves));
        for (int64_t b = 0; b < blocks; ++b)
          for (int64_t at = k + b * 32; at < k + b * 32 + 32; at += 16)
            if constexpr (T == Q8_0) store(to + at, mul(to_floats(widen_i8(codes + at)), splat(scale[b])));
            else store(to + at, mul(sub(to_floats(widen_nibbles(codes + at / 2)), splat(8.0f)), splat(scale[b])));
      }
    } else {
      const auto* words = reinterpret_cast<const typename Plain<T>::Word*>(cell) + head * d;
      for (int64_t k = 0; k < padded; k += 16)
        store(to + k, d - k < 16 ? Plain<T>::load_tail(words + k, d - k) : Plain<T>::load16(words + k));
    }
  }
  std::memset(to, 0, ((n + 3) / 4 * 4 - n) * padded * sizeof(float));
}

inline void decode_tile(int type, const AttentionTask& t, const char* cell, int64_t stride, int head, int n, float* to) {
  if (type == Q8_0) return decode_tile<Q8_0>(t, cell, stride, head, n, to);
  if (type == Q4_0) return decode_tile<Q4_0>(t, cell, stride, head, n, to);
  if (type == F32) return decode_tile<F32>(t, cell, stride, head, n, to);
  if (type == F16) return decode_tile<F16>(t, cell, stride, head, n, to);
  decode_tile<BF16>(t, cell, stride, head, n, to);
}

// scores[query][cell] of four queries and n cells (rounded up to 4); `stride` words from key to key.
template <int T>
inline void score_tile(const typename Plain<T>::Word* keys, int64_t stride, const float* q, int n, int64_t padded,
                       Ahead& ahead, float scores[4][kTile]) {
  for (int c = 0; c < n; c += 4) {
    ahead.fetch();
    Floats sums[16];  // query * 4 + cell
    for (auto& s : sums) s = zero();
    for (int64_t k = 0; k < padded; k += 16) {
      Floats key[4];
      for (int i = 0; i < 4; ++i) key[i] = Plain<T>::load16(keys + (c + i) * stride + k);
      for (int j = 0; j < 4; ++j) {
        const Floats query = load(q + j * padded + k);
        for (int i = 0; i < 4; ++i) sums[j * 4 + i] = fma(query, key[i], sums[j * 4 + i]);
      }
    }
    float dots[16];
    sum_each(sums, dots);
    for (int j = 0; j < 4; ++j) std::memcpy(scores[j] + c, dots + j * 4, 16);
  }
}

// By Lambert's fraction of a quarter of x, doubled twice; relative error below 3e-7.
inline Floats hyperbolic_tangent(Floats x) {
  x = max(splat(-9.2f), x);  // a NaN as second operand stays a NaN
  x = mul(splat(0.25f), sub(zero(), max(splat(-9.2f), sub(zero(), x))));
  const Floats s = mul(x, x);
  const Floats above = fma(fma(add(s, splat(378.0f)), s, splat(17325.0f)), s, splat(135135.0f));
  const Floats below = fma(fma(fma(s, splat(28.0f), splat(3150.0f)), s, splat(62370.0f)), s, splat(135135.0f));
  Floats t = div(mul(x, above), below);
  for (int i = 0; i < 2; ++i) t = div(add(t, t), fma(t, t, splat(1.0f)));
  return t;
}

// Caps one query's scores of n cells, then takes from each what it loses for lying back; the first lies `back` cells back.
inline void bend_scores(float* scores, int n, float cap, float slope, int64_t back) {
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int c = 0; c < n; c += 16) {
    Floats s = load(scores + c);
    if (cap) s = mul(splat(cap), hyperbolic_tangent(mul(s, splat(1 / cap))));
    if (slope) s = fma(splat(slope), add(load(kLanes), splat(static_cast<float>(c - back))), s);
    store(scores + c, s);
  }
}

// Turns one query's scores of the cells [hidden, valid) into p, rescales what it had, and adds the tile to its peak and
// sum.
inline void soften(float* scores, int64_t hidden, int64_t valid, float* out, int64_t padded, float& peak, float& sum) {
  const float low = -__builtin_inff();
  for (int64_t c = valid < 0 ? 0 : valid; c < kTile; ++c) scores[c] = low;
  for (int64_t c = 0; c < hidden && c < kTile; ++c) scores[c] = low;
  if (valid <= 0 || valid <= hidden) {
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
    for (int64_t i = c; i < hidden && i < c + 16; ++i) scores[i] = 0;
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

// out[query] += sum over cells of p * v, for four queries and Chunks * 16 columns.
template <int T, int Chunks>
inline void add_values(const typename Plain<T>::Word* values, int64_t stride, const float p[4][kTile], int n,
                       int64_t padded, Ahead& ahead, float* out) {
  Floats sums[4][Chunks];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < Chunks; ++i) sums[j][i] = load(out + j * padded + i * 16);
  for (int c = 0; c < n; ++c) {
    if (c % 4 == 0) ahead.fetch();
    Floats value[Chunks];
    for (int i = 0; i < Chunks; ++i) value[i] = Plain<T>::load16(values + c * stride + i * 16);
    for (int j = 0; j < 4; ++j) {
      const Floats weight = splat(p[j][c]);
      for (int i = 0; i < Chunks; ++i) sums[j][i] = fma(weight, value[i], sums[j][i]);
    }
  }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < Chunks; ++i) store(out + j * padded + i * 16, sums[j][i]);
}

// The loops read numbers of type T: those in the cells, or with Decoded the floats that these are decoded to.
template <int T, bool Decoded>
void attend(const AttentionTask& t) {
  using Word = typename Plain<T>::Word;
  const int64_t padded = t.padded, head_bytes = t.d * sizeof(Word), slots = t.kv_heads * t.slots;
  const int64_t key_bytes = row_nbytes(t.k_type, t.kv_heads * t.d), value_bytes = row_nbytes(t.v_type, t.kv_heads * t.d);
  for (int64_t i = 0; i < slots * padded; ++i) t.out[i] = 0;
  for (int64_t i = 0; i < slots; ++i) t.peak[i] = -__builtin_inff(), t.sum[i] = 0;
  alignas(64) float p[4][kTile];
  const int64_t steps = slots / 4 * (kTile / 4), value_steps = steps * (padded / 64 + padded % 64 / 16);
  for (int64_t start = t.begin; start < t.end; start += kTile) {
    const int cells = static_cast<int>(t.end - start < kTile ? t.end - start : kTile);
    const int64_t place = t.place(start), next = start + kTile < t.end ? t.place(start + kTile) : t.next;
    const char *key_cells = t.k + place * t.k_stride, *value_cells = t.v + place * t.v_stride;
    Ahead next_keys(t.k + next * t.k_stride, key_bytes, t.k_stride, steps);
    Ahead next_values(t.v + next * t.v_stride, value_bytes, t.v_stride, value_steps);
    for (int head = 0; head < t.kv_heads; ++head) {
      const auto* keys = reinterpret_cast<const Word*>(key_cells + head * head_bytes);
      const auto* values = reinterpret_cast<const Word*>(value_cells + head * head_bytes);
      int64_t key_stride = t.k_stride / sizeof(Word), value_stride = t.v_stride / sizeof(Word);
      // A few queries read the cells where they are; otherwise a copy without gaps or ragged ends pays.
      if (Decoded || t.slots > 8 || t.d != padded || cells % 4) {
        auto *key_copy = reinterpret_cast<Word*>(t.tile), *value_copy = key_copy + kTile * padded;
        if constexpr (Decoded) {
          decode_tile(t.k_type, t, key_cells, t.k_stride, head, cells, key_copy);
          decode_tile(t.v_type, t, value_cells, t.v_stride, head, cells, value_copy);
        } else {
          copy_tile(key_cells + head * head_bytes, t.k_stride, cells, t.d, padded, key_copy);
          copy_tile(value_cells + head * head_bytes, t.v_stride, cells, t.d, padded, value_copy);
        }
        keys = key_copy, values = value_copy, key_stride = value_stride = padded;
      }
      for (int b = 0; b < t.slots / 4; ++b) {
        const int64_t slot = head * t.slots + b * 4, *visible = t.visible + b * 4;
        int64_t last = 0;
        for (int j = 0; j < 4; ++j) last = visible[j] > last ? visible[j] : last;
        const int n = static_cast<int>(last - start < cells ? last - start : cells);
        if (n <= 0) continue;
        float* out = t.out + slot * padded;
        score_tile<T>(keys, key_stride, t.q + slot * padded, n, padded, next_keys, p);
        for (int j = 0; j < 4 && (t.cap || t.slopes); ++j) {
          const int query = head * t.shared + (t.first_query + b * 4 + j) % t.shared;
          bend_scores(p[j], n, t.cap, t.slopes ? t.slopes[query] : 0, visible[j] - 1 - start);
        }
        for (int j = 0; j < 4; ++j) {
          const int64_t valid = visible[j] - start < n ? visible[j] - start : n;
          soften(p[j], t.first[b * 4 + j] - start, valid, out + j * padded, padded, t.peak[slot + j], t.sum[slot + j]);
        }
        int64_t k = 0;
        for (; k + 64 <= padded; k += 64) add_values<T, 4>(values + k, value_stride, p, n, padded, next_values, out + k);
        for (; k < padded; k += 16) add_values<T, 1>(values + k, value_stride, p, n, padded, next_values, out + k);
      }
    }
  }
}

void attention(const AttentionTask& task) {
  if (task.k_type != task.v_type || task.k_type == Q8_0 || task.k_type == Q4_0) return attend<F32, true>(task);
  if (task.k_type == F32) return attend<F32, false>(task);
  if (task.k_type == F16) return attend<F16, false>(task);
  attend<BF16, false>(task);
}
