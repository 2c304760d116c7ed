// Attention over bf16 cells on a unit that multiplies tiles of bf16. Included by isa_amx.cpp inside its anonymous
// namespace, after attention_kernel.h.
//
// Eight queries pass at a time. A query is the sum of two bf16 numbers for each of its floats, off by 2^-16 of it at most,
// and so is a weight p: a tile has 16 columns for the queries (of keys x queries) or 16 rows for the weights (of weights x
// values), of which the first eight hold the leading parts and the others what these leave. So the products cost what
// bf16 costs and the results are those of floats, and the cells are read where they lie, once.
//
// A unit has two products of tiles: `rows`, 64 cells' keys times queries, and `columns`, weights times 64 cells' values. Each
// calls for what comes next kFetches times for every pair of tiles that it multiplies.

constexpr int kPassQueries = 8;

inline Ints as_ints(Floats v) { return _mm512_castps_si512(v); }
inline Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }
inline Floats leading_part(Floats v) {  // a bf16 number; v less it is exact
  return as_floats(_mm512_and_si512(as_ints(v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// The low halves of v's two halves, or the high ones, of a then b: lanes in fours.
template <int Lanes>
inline Floats join_lanes(Floats a, Floats b) {
  return _mm512_shuffle_f32x4(a, b, Lanes);
}
constexpr int kLow = 0x44, kHigh = 0xEE;
inline Floats swap_halves(Floats v) { return join_lanes<0x4E>(v, v); }

// Words (even, odd) of two bf16 each: what truncation leaves of both.
inline Ints pair_words(Floats even, Floats odd) {
  const Ints mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(as_ints(even), 16), as_ints(odd), mask, 0xF8);  // a | b & c
}

// to[column] = row `column` of the 16 x 16 words in `from`, which follow each other.
inline void transpose_words(const uint32_t* from, uint32_t* to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  // a[4 g + c]: in 128-bit lane l column 4 l + c of rows 4 g to 4 g + 3
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), low_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
    const __m512i high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
    _mm512_storeu_si512(to + 16 * c, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(to + 16 * (4 + c), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    _mm512_storeu_si512(to + 16 * (8 + c), _mm512_shuffle_i32x4(low, high, 0xDD));
    _mm512_storeu_si512(to + 16 * (12 + c), _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD));
  }
}

// Up to eight queries of d numbers as [d / 32] tiles: 16 pairs of numbers x 8 leading and 8 other parts.
inline void tile_queries(const float* q, int queries, int64_t padded, int64_t d, uint16_t* to) {
  alignas(64) uint32_t words[16][16] = {};
  for (int64_t k = 0; k < d; k += 32, to += kTileWords) {
    for (int i = 0; i < queries; ++i) {
      const Floats a = load(q + i * padded + k), b = load(q + i * padded + k + 16);
      const Floats lead_a = leading_part(a), lead_b = leading_part(b);
      _mm512_store_si512(words[i], reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(lead_b, lead_a)));
      _mm512_store_si512(words[8 + i],
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(sub(b, lead_b), sub(a, lead_a))));
    }
    transpose_words(words[0], reinterpret_cast<uint32_t*>(to));
  }
}

// 64 cells' values of one head as [d / 16][2] tiles of 16 pairs of cells x 16 columns; those of 32 columns are shared out
// over two tiles by fours (`order_columns` puts the results right).
inline void tile_values(const uint16_t* values, int64_t stride, int64_t d, uint16_t* to) {
  for (int pair = 0; pair < kTile / 2; ++pair, values += 2 * stride) {
    uint16_t* row = to + pair / 16 * kTileWords + pair % 16 * 32;
    for (int64_t k = 0; k < d; k += 32, row += 4 * kTileWords) {
      const __m512i even = _mm512_loadu_si512(values + k), odd = _mm512_loadu_si512(values + stride + k);
      _mm512_store_si512(row, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(row + 2 * kTileWords, _mm512_unpackhi_epi16(even, odd));
    }
  }
}
inline void order_columns(float* out, int64_t d) {
  for (int64_t k = 0; k < d; k += 32) {
    const Floats a = load(out + k), b = load(out + k + 16);
    const Floats low = join_lanes<kLow>(a, b), high = join_lanes<kHigh>(a, b);  // a0 a1 b0 b1, a2 a3 b2 b3
    store(out + k, join_lanes<0xD8>(low, low)), store(out + k + 16, join_lanes<0xD8>(high, high));
  }
}

// What a pass of eight queries over the cells of a tile leaves: lanes are queries, twice.
struct Softmax {
  Floats peak, sum;
};

// Turns scores [64 cells][8 leading, 8 other parts] into weights, two tiles of [8 leading, 8 other parts][16 pairs of
// cells]. Each query sees the cells [hidden, visible). Returns by how much the results so far shrink.
inline Floats weigh_cells(const float* scores, Ints hidden, Ints visible, bool all, Softmax& state, uint32_t* weights) {
  const Floats low = splat(-__builtin_inff());
  const Ints ahead = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2), one = _mm512_set1_epi32(1);
  Floats even[kTile / 4], odd[kTile / 4], top = low;  // lanes: a cell's queries, and those of the cell after next
  for (int i = 0; i < kTile / 4; ++i) {
    Floats c[4];
    for (int j = 0; j < 4; ++j) c[j] = load(scores + (4 * i + j) * 16);
    even[i] = add(join_lanes<kLow>(c[0], c[2]), join_lanes<kHigh>(c[0], c[2]));
    odd[i] = add(join_lanes<kLow>(c[1], c[3]), join_lanes<kHigh>(c[1], c[3]));
    if (!all) {
      const Ints cell = _mm512_add_epi32(ahead, _mm512_set1_epi32(4 * i)), next = _mm512_add_epi32(cell, one);
      const auto seen = [&](Ints c) {
        return _mm512_mask_cmple_epi32_mask(_mm512_cmpgt_epi32_mask(visible, c), hidden, c);
      };
      even[i] = _mm512_mask_mov_ps(low, seen(cell), even[i]);
      odd[i] = _mm512_mask_mov_ps(low, seen(next), odd[i]);
    }
    top = max(top, max(even[i], odd[i]));
  }
  const Floats peak = max(state.peak, max(top, swap_halves(top)));
  // a query that has seen nothing yet: any number will do
  const Floats base = _mm512_mask_mov_ps(peak, _mm512_cmp_ps_mask(peak, low, _CMP_EQ_OQ), zero());
  const Floats shrink = exponential(sub(state.peak, base));
  Floats total = zero();
  alignas(64) Ints words[kTile / 2];
  for (int i = 0; i < kTile / 4; ++i) {
    Floats p[2] = {exponential(sub(even[i], base)), exponential(sub(odd[i], base))};
    if (!all) {
      p[0] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(even[i], low, _CMP_NEQ_UQ), p[0]);
      p[1] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(odd[i], low, _CMP_NEQ_UQ), p[1]);
    }
    total = add(total, add(p[0], p[1]));
    const Floats leading = as_floats(pair_words(p[0], p[1]));
    const Floats rest = as_floats(pair_words(sub(p[0], leading_part(p[0])), sub(p[1], leading_part(p[1]))));
    words[2 * i] = as_ints(join_lanes<kLow>(leading, rest));
    words[2 * i + 1] = as_ints(join_lanes<kHigh>(leading, rest));
  }
  for (int half = 0; half < 2; ++half)
    transpose_words(reinterpret_cast<const uint32_t*>(words + 16 * half), weights + 256 * half);
  state.peak = peak;
  state.sum = fma(state.sum, shrink, add(total, swap_halves(total)));
  return shrink;
}

// out[query] = out[query] * shrink[query] + both parts of the product [d / 16][16][16].
inline void add_product(const float* product, Floats shrink, int queries, int64_t padded, int64_t d, float* out) {
  float factor[16];
  store(factor, shrink);
  for (int i = 0; i < queries; ++i)
    for (int64_t k = 0; k < d; k += 16) {
      const float* part = product + k * 16 + i * 16;
      store(out + i * padded + k, fma(load(out + i * padded + k), splat(factor[i]), add(load(part), load(part + 128))));
    }
}

// The last cells of a task, fewer than a tile, and zeros after them: what lies there may not even be a number.
inline const uint16_t* copy_last(const char* from, int64_t stride, int cells, int64_t d, uint16_t* to) {
  std::memset(to + cells * d, 0, (kTile - cells) * d * sizeof(uint16_t));
  for (int c = 0; c < cells; ++c) std::memcpy(to + c * d, from + c * stride, d * sizeof(uint16_t));
  return to;
}

template <class Unit>
void attend_tiles(const AttentionTask& t) {
  const int64_t d = t.d, padded = t.padded, slots = t.kv_heads * t.slots, head_bytes = d * 2;
  const int passes = (t.queries + kPassQueries - 1) / kPassQueries;
  auto* key_copy = reinterpret_cast<uint16_t*>(t.tile);
  uint16_t *value_copy = key_copy + kTile * d, *value_tiles = value_copy + kTile * d;
  auto* product = reinterpret_cast<float*>(value_tiles + kTile * d);
  auto* queries = reinterpret_cast<uint16_t*>(product + 16 * d);  // [kv_heads][passes][d / 32] tiles
  for (int64_t i = 0; i < slots * padded; ++i) t.out[i] = 0;
  for (int64_t i = 0; i < slots; ++i) t.peak[i] = -__builtin_inff(), t.sum[i] = 0;
  for (int i = 0; i < t.kv_heads * passes; ++i) {
    const int first = i % passes * kPassQueries, n = std::min(t.queries - first, kPassQueries);
    tile_queries(t.q + (i / passes * t.slots + first) * padded, n, padded, d, queries + i * 16 * d);
  }
  alignas(64) float scores[kTile * 16];
  alignas(64) uint32_t weights[2 * 256];
  const int64_t calls = t.kv_heads * passes * d / 8 * Unit::kFetches;
  for (int64_t start = t.begin; start < t.end; start += kTile) {
    const int cells = static_cast<int>(t.end - start < kTile ? t.end - start : kTile);
    const int64_t place = t.place(start), next = start + kTile < t.end ? t.place(start + kTile) : t.next;
    const char *key_cells = t.k + place * t.k_stride, *value_cells = t.v + place * t.v_stride;
    Ahead next_keys(t.k + next * t.k_stride, t.kv_heads * head_bytes, t.k_stride, calls);
    Ahead next_values(t.v + next * t.v_stride, t.kv_heads * head_bytes, t.v_stride, calls);
    for (int head = 0; head < t.kv_heads; ++head) {
      const auto* keys = reinterpret_cast<const uint16_t*>(key_cells + head * head_bytes);
      const auto* values = reinterpret_cast<const uint16_t*>(value_cells + head * head_bytes);
      int64_t key_stride = t.k_stride / 2, value_stride = t.v_stride / 2;
      if (cells < kTile) {
        keys = copy_last(key_cells + head * head_bytes, t.k_stride, cells, d, key_copy);
        values = copy_last(value_cells + head * head_bytes, t.v_stride, cells, d, value_copy);
        key_stride = value_stride = d;
      }
      tile_values(values, value_stride, d, value_tiles);
      for (int pass = 0; pass < passes; ++pass) {
        const int first = pass * kPassQueries, n = std::min(t.queries - first, kPassQueries);
        const int64_t slot = int64_t{head} * t.slots + first;
        int32_t seen[16] = {}, hidden[16] = {};
        float peaks[16] = {}, sums[16] = {};
        bool all = true;
        for (int i = 0; i < n; ++i) {
          const int64_t sees = t.visible[first + i] - start;
          seen[i] = seen[8 + i] = static_cast<int32_t>(sees < 0 ? 0 : sees < cells ? sees : cells);
          const int64_t before = t.first[first + i] - start;
          hidden[i] = hidden[8 + i] = static_cast<int32_t>(before < 0 ? 0 : before < cells ? before : cells);
          all = all && seen[i] == kTile && hidden[i] == 0;
          peaks[i] = peaks[8 + i] = t.peak[slot + i], sums[i] = sums[8 + i] = t.sum[slot + i];
        }
        Unit::rows(keys, key_stride, queries + (head * passes + pass) * 16 * d, d / 32, next_keys, scores);
        Softmax state{load(peaks), load(sums)};
        const Floats shrink = weigh_cells(scores, _mm512_loadu_si512(hidden), _mm512_loadu_si512(seen), all, state, weights);
        for (int64_t k = 0; k < d; k += 64) {
          const int tiles = static_cast<int>(d - k < 64 ? (d - k) / 16 : 4);
          Unit::columns(weights, value_tiles + k * kTile, tiles, next_values, product + k * 16);
        }
        add_product(product, shrink, n, padded, d, t.out + slot * padded);
        store(peaks, state.peak), store(sums, state.sum);
        for (int i = 0; i < n; ++i) t.peak[slot + i] = peaks[i], t.sum[slot + i] = sums[i];
      }
    }
  }
  for (int64_t i = 0; i < slots; ++i) order_columns(t.out + i * padded, d);
}
