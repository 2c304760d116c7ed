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

inline Floats odd_scale(Floats d, Ints n) {  // d (2n + 1)
  return mul(d, add(to_floats(add_ints(n, n)), splat(1.0f)));
}

template <int T, int Eighths, int Halves>
struct BookCodes : Decoder {
  static constexpr int kType = T, kHalves = Halves, kCodeBits = 7;
  static constexpr bool kAddend = false;
  static constexpr bool kParity = T == IQ3_XXS || T == IQ2_XS || T == IQ2_XXS;
  const uint32_t* book = book_of(T);
  Floats d;
  using Decoder::Decoder;
  inline void enter(int64_t block) { d = mul(load_f16(halves(d_plane) + block * 16), splat(1.0f / Eighths)); }
  inline Ints index_of(int64_t chunk, int i) const {
    return widen_u8(low + (chunk * 4 * kFormats[T].low + i) * 16);
  }
  // The four bits of n, in the places of the eighth signs.
  inline Ints hidden_scale(int64_t chunk) const {
    const Ints s = as_ints(load_bytes(high + chunk * 64));
    return or_ints(or_ints(and_int(shift_right<25>(s), 1), and_int(shift_right<26>(s), 2)),
                   or_ints(and_int(shift_right<27>(s), 4), and_int(shift_right<28>(s), 8)));
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
    gather_pairs(this->book, index, out[2 * G], out[2 * G + 1]);
    out[2 * G] = mirror<2 * G>(out[2 * G], signs), out[2 * G + 1] = mirror<2 * G + 1>(out[2 * G + 1], signs);
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
    Ints less = shift_left<1>(and_int(shift_right<kMinus>(more), 1));
    less = or_ints(less, shift_left<8>(less));
    less = or_ints(less, shift_left<16>(less));
    const Ints delta = sub_ints(as_ints(splat_byte(1)), less);  // in each byte, but for borrows, which codes undo
    gather_pairs(this->book, index, out[2 * G], out[2 * G + 1]);
    out[2 * G] = as_bytes(add_ints(as_ints(out[2 * G]), delta));
    out[2 * G + 1] = as_bytes(add_ints(as_ints(out[2 * G + 1]), delta));
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
      alignas(64) uint8_t n[2][16];
      for (int r = 0; r < 16; ++r) {
        const int six = ((at[c / 2 * 16 + r] >> 4 * (c % 2)) & 15) | ((at[(4 + c / 4) * 16 + r] >> 2 * (c % 4)) & 3) << 4;
        n[0][r] = six & 7, n[1][r] = six >> 3;
      }
      for (int h = 0; h < 2; ++h) scale[h] = odd_scale(this->d, widen_u8(n[h]));
    }
  }
};

struct DecodeNVFP4 : Fp4Codes {
  using Fp4Codes::Fp4Codes;
  static constexpr int kType = NVFP4, kHalves = 2;
  // Half of an E4M3 number without sign.
  inline void scales(int64_t chunk, Floats scale[2], Floats*) const {
    const Floats factor = mul(load(reinterpret_cast<const float*>(d_plane)), splat(128.0f));
    for (int h = 0; h < 2; ++h) {
      const uint8_t* p = scale_plane + chunk * 32 + h * 16;
      alignas(16) uint8_t codes[16];
      for (int r = 0; r < 16; ++r) codes[r] = p[r] == 0x7f ? 0 : p[r] & 0x7f;
      scale[h] = mul(load_e4m3_256th(codes), factor);
    }
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
  inline void codes(int64_t chunk, Bytes out[8]) const {
    const uint8_t* block = low + chunk / 8 * kTritBlock;
    const int c = chunk % 8;
    Bytes v = load_bytes(block + c * 64);
    for (int i = 0; i < 5; ++i, v = triple(v)) out[i] = top_trit(v);
    for (int i = 0; i < 3; ++i) {
      const int m = 3 * c + i;
      Bytes w = load_bytes(block + (8 + m / 5) * 64);
      for (int k = 0; k < m % 5; ++k) w = triple(w);
      out[5 + i] = top_trit(w);
    }
  }
};
