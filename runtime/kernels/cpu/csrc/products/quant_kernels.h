// Linear layers and dequantisation from packed records, one template for all quantised types.
// Included once per instruction set, after decode.h, inside an anonymous namespace.

// Wraps where a NaN among the activations made the sum meaningless.
inline int32_t correction_of(int offset, int sum) {
  return static_cast<int32_t>(0u - static_cast<uint32_t>(offset) * static_cast<uint32_t>(sum));
}

// Symmetric int8 per 32 columns: scale = max|x| / 127. An infinity or NaN in x makes the scale NaN.
void quantize(const float* x, int64_t n_chunks, int offset, ActChunk* out, int64_t stride) {
  for (int64_t i = 0; i < n_chunks; ++i, x += 32, out += stride) {
    const Floats lo = load(x), hi = load(x + 16);
    const float top = max_lanes(max(abs(lo), abs(hi)));
    const float poison = sum_lanes(mul(add(lo, hi), splat(0.0f)));
    const Floats inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    const Ints a = round_to_ints(mul(lo, inverse)), b = round_to_ints(mul(hi, inverse));
    store_i8(out->q, a), store_i8(out->q + 16, b);
    const int sums[2] = {sum_ints(a), sum_ints(b)};
    out->scale = top / 127.0f + poison;
    for (int h = 0; h < 2; ++h) {
      out->sum[h] = out->scale * static_cast<float>(sums[h]);
      out->half_correction[h] = correction_of(offset, sums[h]);
    }
    out->correction = correction_of(offset, sums[0] + sums[1]);
    out->total = out->scale * static_cast<float>(sums[0] + sums[1]);
  }
}

// Fetches the record that comes next while one is computed, a chunk's worth per chunk. Large records would push each
// other out of L1: they come to L2, and their codes go on to L1 some chunks before they are decoded.
template <class D>
class Fetcher {
 public:
  Fetcher(const uint8_t* record, const Planes& planes, int64_t cols, const uint8_t* next)
      : record_(record), next_(next), at_(next), chunks_(cols / 32), small_(planes.record <= kSmall) {}

  inline void fetch(int64_t chunk) {
    if (small_) {
      for (int i = 0; i < kStep; i += 64) prefetch(at_ + i);
    } else {
      for (int i = 0; i < kStep; i += 64) prefetch_far(at_ + i);
      const int64_t near = chunk + kNear;
      const uint8_t* codes = near < chunks_ ? record_ + near * kCodes : next_ + (near - chunks_) * kCodes;
      for (int i = 0; i < kCodes; i += 64) prefetch(codes + i);
    }
    at_ += kStep;
  }

 private:
  static constexpr size_t kSmall = 12 << 10;
  static constexpr int64_t kNear = 12;  // chunks
  static constexpr int kStep = chunk_nbytes(D::kType), kCodes = 64 * kFormats[D::kType].low;  // the first plane
  const uint8_t *record_, *next_, *at_;
  int64_t chunks_;
  bool small_;
};

// Each decoded chunk meets `Count` tokens, `stride` a chunk. A token's result does not depend on Count: its sums run in
// the same order.
template <class D, int Count>
inline void linear_tokens(const uint8_t* record, const Planes& planes, int64_t cols, const ActChunk* act, int stride,
                          const uint8_t* ahead, float* tile) {
  constexpr int kHalves = D::kHalves, kBlock = kFormats[D::kType].block;
  D decoder(record, planes);
  Fetcher<D> fetcher(record, planes, cols, ahead);
  Floats sums[Count];
  for (auto& s : sums) s = zero();
  int64_t chunk = 0;
  for (int64_t block = 0; block < cols / kBlock; ++block) {
    decoder.enter(block);
    for (int j = 0; j < kBlock / 32; ++j, ++chunk, act += stride) {
      Bytes codes[8];
      Floats scale[kHalves], addend[kHalves];
      decoder.codes(chunk, codes);
      decoder.scales(chunk, scale, addend);
      fetcher.fetch(chunk);
#pragma GCC unroll 8
      for (int m = 0; m < Count; ++m) {
        const ActChunk& x = act[m];
        Ints dot[2] = {zero_ints(), zero_ints()};
        if constexpr (kFormats[D::kType].offset && kHalves == 1) dot[0] = splat_int(&x.correction);
        if constexpr (kFormats[D::kType].offset && kHalves == 2)
          for (int h = 0; h < 2; ++h) dot[h] = splat_int(&x.half_correction[h]);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          dot[0] = dot4<D::kCodeBits>(dot[0], codes[c], x.q + 4 * c);
          dot[1] = dot4<D::kCodeBits>(dot[1], codes[c + 4], x.q + 16 + 4 * c);
        }
        if constexpr (kHalves == 1) {
          sums[m] = fma(mul(to_floats(add_ints(dot[0], dot[1])), splat(x.scale)), scale[0], sums[m]);
          if constexpr (D::kAddend) sums[m] = fma(splat(x.total), addend[0], sums[m]);
        } else {
          for (int h = 0; h < 2; ++h) {
            sums[m] = fma(mul(to_floats(dot[h]), splat(x.scale)), scale[h], sums[m]);
            if constexpr (D::kAddend) sums[m] = fma(splat(x.sum[h]), addend[h], sums[m]);
          }
        }
      }
    }
  }
  for (int m = 0; m < Count; ++m) store(tile + m * 16, sums[m]);
}

template <class D>
void linear_quant(const uint8_t* record, const Planes& planes, int64_t cols, int, const TokenGroup& group,
                  float* tile) {
  const auto count = [&](auto tokens, int from) {
    linear_tokens<D, tokens()>(record, planes, cols, group.act + from, group.count, group.ahead, tile + from * 16);
  };
  if constexpr (kFewCounts) {
    int m = 0;
    for (; m + 4 <= group.count; m += 4) count(std::integral_constant<int, 4>{}, m);
    for (; m < group.count; ++m) count(std::integral_constant<int, 1>{}, m);
  } else {
    switch (group.count) {
      case 1: return count(std::integral_constant<int, 1>{}, 0);
      case 2: return count(std::integral_constant<int, 2>{}, 0);
      case 4: return count(std::integral_constant<int, 4>{}, 0);
      default: return count(std::integral_constant<int, 8>{}, 0);
    }
  }
}

// Multiplies, then adds, as the file format's reference does: no fused operation here.
template <class D>
void dequantize_quant(const uint8_t* record, const Planes& planes, int64_t cols, int first, int last, void* out,
                      int64_t stride, bool bf16) {
  constexpr int kBlock = kFormats[D::kType].block;
  D decoder(record, planes);
  alignas(64) uint8_t lanes[8][64];
  alignas(64) uint8_t rows[16][32];
  alignas(64) float scales[2][16], addends[2][16];
  const Floats offset = splat(static_cast<float>(kFormats[D::kType].offset));
  int64_t chunk = 0;
  for (int64_t block = 0; block < cols / kBlock; ++block) {
    decoder.enter(block);
    for (int j = 0; j < kBlock / 32; ++j, ++chunk) {
      Bytes codes[8];
      Floats scale[2], addend[2] = {splat(-0.0f), splat(-0.0f)};  // x + -0.0 is x, sign of zero included
      decoder.codes(chunk, codes);
      decoder.scales(chunk, scale, addend);
      for (int c = 0; c < 8; ++c) store_bytes(lanes[c], codes[c]);
      for (int h = 0; h < 2; ++h) {
        const int from = h < D::kHalves ? h : 0;
        store(scales[h], scale[from]), store(addends[h], addend[D::kAddend ? from : 0]);
      }
      for (int r = first; r < last; ++r)
        for (int c = 0; c < 8; ++c) std::memcpy(rows[r] + 4 * c, lanes[c] + 4 * r, 4);
      for (int r = first; r < last; ++r)
        for (int h = 0; h < 2; ++h) {
          const Floats value = sub(to_floats(widen_u8(rows[r] + 16 * h)), offset);
          const Floats weight = add(mul(value, splat(scales[h][r])), splat(addends[h][r]));
          const int64_t at = (r - first) * stride + chunk * 32 + h * 16;
          if (bf16) store_bf16(static_cast<uint16_t*>(out) + at, weight);
          else store(static_cast<float*>(out) + at, weight);
        }
    }
  }
}
