// Decoders of the types with a codebook, and of NVFP4 and those of one or two bits. Included after decode.h.

// With the eighth sign of each eight: what makes their minus signs even in number. Byte t of a row has in bit j the
// sign of column 4j + t, so these are bits 1, 3, 5, 7 of byte 3, where the file's layout has something else.
inline Bytes complete_signs(Bytes signs) {
  const Ints s = and_int(as_ints(signs), 0x55ffffff);
  Ints p = xor_ints(s, shift_right<16>(s));
  p = xor_ints(p, shift_right<8>(p));
  p = xor_ints(p, shift_right<1>(p));
  return as_bytes(or_ints(s, shift_left<25>(and_int(p, 0x55))));
}

inline Floats odd_scale(Floats d, Ints n) {  // d (2n + 1), which is exact
  return fma(add(d, d), to_floats(n), d);
}

// Bit To of each byte becomes bit From of the byte in `bits`.
template <int From, int To>
inline Bytes with_bit(Bytes word, Bytes bits) {
  return blend_bits(word, shift<To - From>(bits), splat_byte(1 << To));
}

template <int T, int Eighths, int Halves>
struct BookCodes : Decoder {
  static constexpr int kType = T, kHalves = Halves, kCodeBits = 7;
  static constexpr bool kAddend = false;
  static constexpr bool kParity = T == IQ3_XXS || T == IQ2_XS || T == IQ2_XXS;
  const uint32_t* book = book_of(T);
  const LevelBook& levels = levels_of(T);
  Floats d;
  using Decoder::Decoder;
  inline void enter(int64_t block) { d = mul(load_f16(halves(d_plane) + block * 16), splat(1.0f / Eighths)); }
  inline Ints index_of(int64_t chunk, int i) const {
    return widen_u8(low + (chunk * 4 * kFormats[T].low + i) * 16);
  }
  // The four bits of n, in the places of the eighth signs.
  inline Ints hidden_scale(int64_t chunk) const {
    Ints n = and_int(shift_right<25>(as_ints(load_bytes(high + chunk * 64))), 0x55);
    n = and_int(or_ints(n, shift_right<1>(n)), 0x33);
    return and_int(or_ints(n, shift_right<2>(n)), 15);
  }
};

template <int T, int Eighths>
struct Book4 : BookCodes<T, Eighths, 1> {  // IQ3_S, IQ3_XXS
  using BookCodes<T, Eighths, 1>::BookCodes;
  template <int J>
  inline void word(int64_t chunk, Ints more, Bytes signs, Bytes* out) const {
    Ints index = this->index_of(chunk, J);
    if constexpr (T == IQ3_S) index = or_ints(index, shift_left<8 - J>(and_int(more, 1 << J)));
    out[J] = mirror<J>(gather(this->book, index), signs);
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    Bytes signs = load_bytes(this->high + chunk * 64);
    if constexpr (T == IQ3_XXS) signs = complete_signs(signs);
    Ints more = zero_ints();
    if constexpr (T == IQ3_S) more = widen_u8(this->min_plane + chunk * 16);
    word<0>(chunk, more, signs, out), word<1>(chunk, more, signs, out), word<2>(chunk, more, signs, out);
    word<3>(chunk, more, signs, out), word<4>(chunk, more, signs, out), word<5>(chunk, more, signs, out);
    word<6>(chunk, more, signs, out), word<7>(chunk, more, signs, out);
  }
  inline void scales(int64_t chunk, Floats scale[1], Floats*) const {
    if constexpr (T == IQ3_XXS) {
      scale[0] = odd_scale(this->d, this->hidden_scale(chunk));
    } else {
      const Ints both = widen_u8(this->scale_plane + chunk / 2 * 16);
      scale[0] = odd_scale(this->d, chunk % 2 ? shift_right<4>(both) : and_int(both, 15));
    }
  }
};

template <int T, int Halves>
struct Book8 : BookCodes<T, 8, Halves> {  // IQ2_S, IQ2_XS, IQ2_XXS
  using BookCodes<T, 8, Halves>::BookCodes;
  template <int G>
  inline void words(int64_t chunk, Ints more, Bytes raw, Bytes signs, Bytes* out) const {
    Ints index = this->index_of(chunk, G);
    if constexpr (T == IQ2_S) index = or_ints(index, shift_left<8 - 2 * G>(and_int(more, 3 << 2 * G)));
    if constexpr (T == IQ2_XS) index = or_ints(index, and_int(shift_right<17 + 2 * G>(as_ints(raw)), 256));
    if constexpr (kLooksUp) {
      const Bytes word = gather(this->levels.words, index);
      out[2 * G] = lookup(with_bit<2 * G, 3>(word, signs), this->levels.first);
      out[2 * G + 1] = lookup(with_bit<2 * G + 1, 0>(word, signs), this->levels.second);
    } else {
      gather_pairs(this->book, index, out[2 * G], out[2 * G + 1]);
      out[2 * G] = mirror<2 * G>(out[2 * G], signs), out[2 * G + 1] = mirror<2 * G + 1>(out[2 * G + 1], signs);
    }
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    const Bytes raw = load_bytes(this->high + chunk * 64);
    Bytes signs = raw;
    if constexpr (T != IQ2_S) signs = complete_signs(raw);
    Ints more = zero_ints();
    if constexpr (T == IQ2_S) more = widen_u8(this->min_plane + chunk * 16);
    words<0>(chunk, more, raw, signs, out), words<1>(chunk, more, raw, signs, out);
    words<2>(chunk, more, raw, signs, out), words<3>(chunk, more, raw, signs, out);
  }
  inline void scales(int64_t chunk, Floats scale[Halves], Floats*) const {
    if constexpr (T == IQ2_XXS) {
      scale[0] = odd_scale(this->d, this->hidden_scale(chunk));
    } else {
      const Ints both = widen_u8(this->scale_plane + chunk * 16);
      scale[0] = odd_scale(this->d, and_int(both, 15)), scale[1] = odd_scale(this->d, shift_right<4>(both));
    }
  }
};

template <int T, int Halves>
struct Book1 : BookCodes<T, 8, Halves> {  // IQ1_S, IQ1_M: eight times a weight, plus or minus 1
  using BookCodes<T, 8, Halves>::BookCodes;
  template <int G>
  inline void words(int64_t chunk, Ints more, Bytes* out) const {
    constexpr int kBits = T == IQ1_S ? 3 : 4, kMinus = T == IQ1_S ? 15 : 4 * G + 3;
    const Ints index = or_ints(this->index_of(chunk, G), shift_left<8>(and_int(shift_right<kBits * G>(more), 7)));
    const Ints minus = sub_ints(zero_ints(), and_int(shift_right<kMinus>(more), 1));  // all bits
    if constexpr (kLooksUp) {
      const Bytes word = gather(this->levels.words, index);
      out[2 * G] = lookup(with_bit<3, 3>(word, as_bytes(minus)), this->levels.first);
      out[2 * G + 1] = lookup(with_bit<0, 0>(word, as_bytes(minus)), this->levels.second);
    } else {
      const Ints delta = sub_ints(as_ints(splat_byte(1)), and_int(minus, 0x02020202));  // 1 or -1 in each byte
      gather_pairs(this->book, index, out[2 * G], out[2 * G + 1]);
      for (int i = 2 * G; i < 2 * G + 2; ++i) out[i] = as_bytes(add_ints(as_ints(out[i]), delta));
    }
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    const Ints more = widen_u16(halves(this->min_plane) + chunk * 16);
    words<0>(chunk, more, out), words<1>(chunk, more, out), words<2>(chunk, more, out), words<3>(chunk, more, out);
  }
  inline void scales(int64_t chunk, Floats scale[Halves], Floats*) const {
    if constexpr (T == IQ1_S) {
      const Ints more = widen_u16(halves(this->min_plane) + chunk * 16);
      scale[0] = odd_scale(this->d, and_int(shift_right<12>(more), 7));
    } else {
      const int c = chunk % 8;
      const uint8_t* at = this->scale_plane + chunk / 8 * 96;
      const Ints four = shift_right_by(widen_u8(at + c / 2 * 16), 4 * (c % 2));
      const Ints two = shift_right_by(widen_u8(at + (4 + c / 4) * 16), 2 * (c % 4));
      scale[0] = odd_scale(this->d, and_int(four, 7));
      scale[1] = odd_scale(this->d, or_ints(and_int(shift_right<3>(four), 1), shift_left<1>(and_int(two, 3))));
    }
  }
};

struct DecodeNVFP4 : Fp4Codes {
  using Fp4Codes::Fp4Codes;
  static constexpr int kType = NVFP4, kHalves = 2;
  alignas(64) uint8_t codes_of[64];  // the block's scales without sign, and 0 for 0x7f
  Floats factor;
  DecodeNVFP4(const uint8_t* record, const Planes& p)
      : Fp4Codes(record, p), factor(mul(load(reinterpret_cast<const float*>(d_plane)), splat(128.0f))) {}
  inline void enter(int64_t block) {
    const Ints code = as_ints(and_bytes(load_bytes(scale_plane + block * 64), splat_byte(127)));
    const Ints last = as_ints(and_bytes(shift<-7>(as_bytes(add_ints(code, as_ints(splat_byte(1))))), splat_byte(1)));
    store_bytes(codes_of, as_bytes(sub_ints(code, sub_ints(shift_left<7>(last), last))));
  }
  // Half of an E4M3 number.
  inline void scales(int64_t chunk, Floats scale[2], Floats*) const {
    for (int h = 0; h < 2; ++h) scale[h] = mul(load_e4m3_256th(codes_of + chunk % 2 * 32 + h * 16), factor);
  }
};

// Q1_0, Q2_0, TQ2_0: codes of one or two bits under a d
template <int T>
struct FewBits : Decoder {
  using Decoder::Decoder;
  static constexpr int kType = T, kHalves = 1, kCodeBits = 2;
  static constexpr bool kAddend = false;
  Floats d;
  inline void enter(int64_t block) { d = load_f16(halves(d_plane) + block * 16); }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    if constexpr (T == Q1_0) {
      for (int c = 0; c < 8; ++c) out[c] = splat_byte(0);
      merge_bits<1>(low, chunk, out);  // 0 or 2
    } else {
      split_pairs(low, chunk, out);
    }
  }
  inline void scales(int64_t, Floats scale[1], Floats*) const { scale[0] = d; }
};

struct DecodeTQ1_0 : FewBits<TQ1_0> {
  using FewBits<TQ1_0>::FewBits;
  alignas(64) uint8_t tails[25][64];  // the words 5, 6, 7 of the block's chunks
  inline void enter(int64_t block) {
    FewBits<TQ1_0>::enter(block);
    const uint8_t* from = low + block * kTritBlock + 8 * 64;
    for (int j = 0; j < 5; ++j) split(from + j * 64, [&](int i, Bytes v) { store_bytes(tails[5 * j + i], v); });
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    const int c = chunk % 8;
    split(low + chunk / 8 * kTritBlock + c * 64, [&](int i, Bytes v) { out[i] = v; });
    for (int i = 0; i < 3; ++i) out[5 + i] = load_bytes(tails[3 * c + i]);
  }
  template <class Put>
  static inline void split(const uint8_t* from, Put put) {
    Bytes v = load_bytes(from);
    for (int i = 0; i < 5; ++i, v = triple(v)) put(i, top_trit(v));
  }
};
