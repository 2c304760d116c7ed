// From records of any type to tiles of bf16, and from activations to theirs. Included by isa_amx.cpp inside its
// anonymous namespace, after simd_avx512.h, decode.h and dense_kernels.h.

// Words of lo and hi in turn, each rounded to nearest even.
inline void store_pairs(uint16_t* out, Floats lo, Floats hi) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

template <int Byte>
inline Floats column(Bytes codes) {
  if constexpr (Byte == 3) return to_floats(shift_right<24>(codes));
  else return to_floats(and_int(shift_right<8 * Byte>(codes), 255));
}

// Chunks [first, last) of a record, `first` at the start of a quant block. Multiplies, then adds, as dequantize does.
template <class D>
void tile_quant(const uint8_t* record, const Planes& planes, int64_t, int, int64_t first, int64_t last, uint16_t* out) {
  constexpr int kBlockOf = kFormats[D::kType].block / 32, kCodeBytes = 64 * kFormats[D::kType].low;
  D decoder(record, planes);
  const Floats offset = splat(static_cast<float>(kFormats[D::kType].offset));
  for (int64_t chunk = first; chunk < last; ++chunk, out += kTileWords) {
    if (chunk % kBlockOf == 0) decoder.enter(chunk / kBlockOf);
    Bytes codes[8];
    Floats scale[D::kHalves], addend[D::kHalves];
    decoder.codes(chunk, codes);
    decoder.scales(chunk, scale, addend);
    // the next block's codes are on their way while this one's tiles are multiplied
    for (int i = 0; i < kCodeBytes; i += 64) prefetch_far(record + planes.low + (chunk + kBlockChunks) * kCodeBytes + i);
    const auto weight = [&](Floats code, int half) {
      const Floats scaled = mul(sub(code, offset), scale[half]);
      if constexpr (D::kAddend) return add(scaled, addend[half]);
      else return scaled;
    };
    for (int c = 0; c < 8; ++c) {
      const int half = D::kHalves == 2 ? c / 4 : 0;
      store_pairs(out + c * 64, weight(column<0>(codes[c]), half), weight(column<1>(codes[c]), half));
      store_pairs(out + c * 64 + 32, weight(column<2>(codes[c]), half), weight(column<3>(codes[c]), half));
    }
  }
}

// Row r of 16 words of 32 bits becomes column r.
inline void transpose(const Ints rows[16], uint16_t* out) {
  Ints t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const Ints a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xDD);
    const Ints c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xDD);
    _mm512_store_si512(out + j * 32, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(out + (4 + j) * 32, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(out + (8 + j) * 32, _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_store_si512(out + (12 + j) * 32, _mm512_shuffle_i32x4(b, d, 0xDD));
  }
}

// 32 columns of a row of `cols` as bf16, zeros beyond the end.
template <int T>
inline Ints words_of(const typename Plain<T>::Word* row, int64_t k, int64_t cols) {
  if (k + 32 <= cols) {
    if constexpr (T == BF16) return _mm512_loadu_si512(row + k);
    else return (__m512i)_mm512_cvtne2ps_pbh(Plain<T>::at(row, k + 16, cols), Plain<T>::at(row, k, cols));
  }
  if constexpr (T == FP8) return zero_ints();  // its rows are whole blocks
  typename Plain<T>::Word words[32] = {};
  if (k < cols) std::memcpy(words, row + k, (cols - k) * sizeof(*row));
  return words_of<T>(words, 0, 32);
}

template <int T>
void tile_plain(const uint8_t* record, const Planes&, int64_t cols, int n, int64_t first, int64_t last, uint16_t* out) {
  const auto* w = reinterpret_cast<const typename Plain<T>::Word*>(record);
  for (int64_t chunk = first; chunk < last; ++chunk, out += kTileWords) {
    Ints rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = r < n ? words_of<T>(w + r * Plain<T>::stride(cols), chunk * 32, cols) : zero_ints();
    transpose(rows, out);
  }
}

void tile_weights(const TileRecord& r, int64_t cols, int64_t first, int64_t last, uint16_t* out) {
  using Decode = void (*)(const uint8_t*, const Planes&, int64_t, int, int64_t, int64_t, uint16_t*);
  static constexpr Decode kDecode[kTypes] = {
      tile_plain<F32>, tile_plain<F16>, tile_plain<BF16>,
      tile_quant<Legacy<Q4_0, 0, false>>, tile_quant<Legacy<Q4_1, 0, true>>,
      tile_quant<Legacy<Q5_0, 1, false>>, tile_quant<Legacy<Q5_1, 1, true>>,
      tile_quant<DecodeQ8_0>, tile_quant<DecodeMXFP4>, tile_quant<DecodeQ2_K>, tile_quant<DecodeQ3_K>,
      tile_quant<DecodeK45<Q4_K, 0>>, tile_quant<DecodeK45<Q5_K, 1>>, tile_quant<DecodeQ6_K>,
      tile_quant<DecodeIQ4_NL>, tile_quant<DecodeIQ4_XS>,
      tile_quant<Book4<IQ3_S, 1>>, tile_quant<Book4<IQ3_XXS, 4>>,
      tile_quant<Book8<IQ2_S, 2>>, tile_quant<Book8<IQ2_XS, 2>>, tile_quant<Book8<IQ2_XXS, 1>>,
      tile_quant<Book1<IQ1_S, 1>>, tile_quant<Book1<IQ1_M, 2>>,
      tile_quant<DecodeNVFP4>, tile_quant<FewBits<Q1_0>>, tile_quant<FewBits<Q2_0>>,
      tile_quant<DecodeTQ1_0>, tile_quant<FewBits<TQ2_0>>, tile_plain<FP8>,
  };
  kDecode[r.type](r.data, *r.planes, cols, r.rows, first, last, out);
}

void convert_tokens(const float* x, int64_t stride, int tokens, int64_t cols, uint16_t* out) {
  for (int chunk = 0; chunk < kBlockChunks; ++chunk, out += kTileWords)
    for (int i = 0; i < 16; ++i)
      _mm512_store_si512(out + i * 32, i < tokens ? words_of<F32>(x + i * stride, chunk * 32, cols) : zero_ints());
}
