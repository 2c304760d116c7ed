// How each quantised type turns one chunk (32 columns of 16 rows) of its planes into unsigned codes and scales.
// Included once per instruction set, after its simd_*.h, inside an anonymous namespace.
//
// A decoder has: kType, kCodeBits, kHalves (scales per chunk: 1, or 2 of 16 columns each), kAddend (has an addend);
// enter(block) loads what a block shares; codes(chunk, out) gives 8 vectors, vector c = columns 4c..4c+3;
// scales(chunk, scale, addend). A weight is scale * (code - kFormats[kType].offset) + addend.

inline const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// The low nibbles of 4 vectors are columns 0-15, the high nibbles 16-31.
inline void split_nibbles(const uint8_t* plane, int64_t chunk, Bytes out[8]) {
  const Bytes mask = splat_byte(15);
  for (int c = 0; c < 4; ++c) {
    const Bytes v = load_bytes(plane + chunk * 256 + c * 64);
    out[c] = and_bytes(v, mask);
    out[c + 4] = and_bytes(shift<-4>(v), mask);
  }
}

// ORs field `j` (Bits wide) of vector v of a field plane into bit `At` of the codes.
template <int Bits, int At, int J>
inline void merge_field(Bytes v, Bytes* out) {
  out[J] = or_masked(out[J], shift<At - Bits * J>(v), splat_byte(((1 << Bits) - 1) << At));
}
template <int At>
inline void merge_bits(const uint8_t* plane, int64_t chunk, Bytes out[8]) {  // codes1
  const Bytes v = load_bytes(plane + chunk * 64);
  merge_field<1, At, 0>(v, out), merge_field<1, At, 1>(v, out), merge_field<1, At, 2>(v, out);
  merge_field<1, At, 3>(v, out), merge_field<1, At, 4>(v, out), merge_field<1, At, 5>(v, out);
  merge_field<1, At, 6>(v, out), merge_field<1, At, 7>(v, out);
}
template <int At>
inline void merge_pairs(const uint8_t* plane, int64_t chunk, Bytes out[8]) {  // codes2 as high bits
  for (int h = 0; h < 2; ++h) {
    const Bytes v = load_bytes(plane + chunk * 128 + h * 64);
    Bytes* half = out + 4 * h;
    merge_field<2, At, 0>(v, half), merge_field<2, At, 1>(v, half);
    merge_field<2, At, 2>(v, half), merge_field<2, At, 3>(v, half);
  }
}
inline void split_pairs(const uint8_t* plane, int64_t chunk, Bytes out[8]) {  // codes2 as low bits
  const Bytes mask = splat_byte(3);
  for (int h = 0; h < 2; ++h) {
    const Bytes v = load_bytes(plane + chunk * 128 + h * 64);
    Bytes* half = out + 4 * h;
    half[0] = and_bytes(v, mask), half[1] = and_bytes(shift<-2>(v), mask);
    half[2] = and_bytes(shift<-4>(v), mask), half[3] = and_bytes(shift<-6>(v), mask);
  }
}

struct Decoder {
  const uint8_t *low, *high, *scale_plane, *min_plane, *d_plane, *dmin_plane;
  Decoder(const uint8_t* record, const Planes& p)
      : low(record + p.low),
        high(record + p.high),
        scale_plane(record + p.scales),
        min_plane(record + p.mins),
        d_plane(record + p.d),
        dmin_plane(record + p.dmin) {}
  inline void enter(int64_t) {}
};

template <int HighBits>
struct NibbleCodes : Decoder {
  using Decoder::Decoder;
  static constexpr int kCodeBits = 4 + HighBits;
  inline void codes(int64_t chunk, Bytes out[8]) const {
    split_nibbles(low, chunk, out);
    if constexpr (HighBits == 1) merge_bits<4>(high, chunk, out);
    if constexpr (HighBits == 2) merge_pairs<4>(high, chunk, out);
  }
};

// Q4_0, Q4_1, Q5_0, Q5_1
template <int T, int HighBits, bool Addend>
struct Legacy : NibbleCodes<HighBits> {
  using NibbleCodes<HighBits>::NibbleCodes;
  static constexpr int kType = T, kHalves = 1;
  static constexpr bool kAddend = Addend;
  inline void scales(int64_t chunk, Floats scale[1], Floats addend[1]) const {
    scale[0] = load_f16(halves(this->d_plane) + chunk * 16);
    if constexpr (Addend) addend[0] = load_f16(halves(this->dmin_plane) + chunk * 16);
  }
};

struct DecodeQ8_0 : Decoder {
  using Decoder::Decoder;
  static constexpr int kType = Q8_0, kHalves = 1, kCodeBits = 8;
  static constexpr bool kAddend = false;
  inline void codes(int64_t chunk, Bytes out[8]) const {
    for (int c = 0; c < 8; ++c) out[c] = flip_sign(load_bytes(low + chunk * 512 + c * 64));
  }
  inline void scales(int64_t chunk, Floats scale[1], Floats*) const {
    scale[0] = load_f16(halves(d_plane) + chunk * 16);
  }
};

// doubled E2M1 values plus 12: 0 1 2 3 4 6 8 12 0 -1 -2 -3 -4 -6 -8 -12
alignas(16) static const uint8_t kFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Fp4Codes : NibbleCodes<0> {
  using NibbleCodes<0>::NibbleCodes;
  static constexpr int kCodeBits = 5;
  static constexpr bool kAddend = false;
  inline void codes(int64_t chunk, Bytes out[8]) const {
    split_nibbles(low, chunk, out);
    for (int c = 0; c < 8; ++c) out[c] = lookup(out[c], kFp4);
  }
};

struct DecodeMXFP4 : Fp4Codes {
  using Fp4Codes::Fp4Codes;
  static constexpr int kType = MXFP4, kHalves = 1;
  inline void scales(int64_t chunk, Floats scale[1], Floats*) const {
    scale[0] = load_e8m0_half(scale_plane + chunk * 16);
  }
};

// Codes of IQ4_NL and IQ4_XS: ggml's kvalues_iq4nl plus 128.
struct TableCodes : NibbleCodes<0> {
  using NibbleCodes<0>::NibbleCodes;
  static constexpr int kHalves = 1, kCodeBits = 8;
  static constexpr bool kAddend = false;
  inline void codes(int64_t chunk, Bytes out[8]) const {
    alignas(16) static const uint8_t values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                   129, 141, 153, 166, 181, 197, 217, 241};
    split_nibbles(low, chunk, out);
    for (int c = 0; c < 8; ++c) out[c] = lookup(out[c], values);
  }
};

struct DecodeIQ4_NL : TableCodes {
  using TableCodes::TableCodes;
  static constexpr int kType = IQ4_NL;
  inline void scales(int64_t chunk, Floats scale[1], Floats*) const {
    scale[0] = load_f16(halves(d_plane) + chunk * 16);
  }
};

struct DecodeIQ4_XS : TableCodes {
  using TableCodes::TableCodes;
  static constexpr int kType = IQ4_XS;
  Floats d;
  inline void enter(int64_t block) { d = load_f16(halves(d_plane) + block * 16); }
  inline void scales(int64_t chunk, Floats scale[1], Floats*) const {
    scale[0] = mul(d, sub(to_floats(widen_u8(scale_plane + chunk * 16)), splat(32.0f)));
  }
};

// Q4_K, Q5_K
template <int T, int HighBits>
struct DecodeK45 : NibbleCodes<HighBits> {
  using NibbleCodes<HighBits>::NibbleCodes;
  static constexpr int kType = T, kHalves = 1;
  static constexpr bool kAddend = true;
  Floats d, dmin;
  inline void enter(int64_t block) {
    d = load_f16(halves(this->d_plane) + block * 16);
    dmin = sub(splat(-0.0f), load_f16(halves(this->dmin_plane) + block * 16));
  }
  inline void scales(int64_t chunk, Floats scale[1], Floats addend[1]) const {
    scale[0] = mul(d, to_floats(widen_u8(this->scale_plane + chunk * 16)));
    addend[0] = mul(dmin, to_floats(widen_u8(this->min_plane + chunk * 16)));
  }
};

struct DecodeQ6_K : NibbleCodes<2> {
  using NibbleCodes<2>::NibbleCodes;
  static constexpr int kType = Q6_K, kHalves = 2;
  static constexpr bool kAddend = false;
  Floats d;
  inline void enter(int64_t block) { d = load_f16(halves(d_plane) + block * 16); }
  inline void scales(int64_t chunk, Floats scale[2], Floats*) const {
    for (int h = 0; h < 2; ++h) scale[h] = mul(d, to_floats(widen_i8(scale_plane + chunk * 32 + h * 16)));
  }
};

struct DecodeQ2_K : Decoder {
  using Decoder::Decoder;
  static constexpr int kType = Q2_K, kHalves = 2, kCodeBits = 2;
  static constexpr bool kAddend = true;
  Floats d, dmin;
  inline void enter(int64_t block) {
    d = load_f16(halves(d_plane) + block * 16);
    dmin = sub(splat(-0.0f), load_f16(halves(dmin_plane) + block * 16));
  }
  inline void codes(int64_t chunk, Bytes out[8]) const { split_pairs(low, chunk, out); }
  inline void scales(int64_t chunk, Floats scale[2], Floats addend[2]) const {
    for (int h = 0; h < 2; ++h) {
      const Ints both = widen_u8(scale_plane + chunk * 32 + h * 16);
      scale[h] = mul(d, to_floats(and_int(both, 15)));
      addend[h] = mul(dmin, to_floats(shift_right<4>(both)));
    }
  }
};

struct DecodeQ3_K : Decoder {
  using Decoder::Decoder;
  static constexpr int kType = Q3_K, kHalves = 2, kCodeBits = 3;
  static constexpr bool kAddend = false;
  Floats d;
  alignas(64) uint8_t six[256];  // the block's 16 six-bit scales of 16 rows
  inline void enter(int64_t block) {
    d = load_f16(halves(d_plane) + block * 16);
    const uint8_t* p = scale_plane + block * 192;
    const Bytes a = load_bytes(p), b = load_bytes(p + 64), top = load_bytes(p + 128);
    const Bytes nibble = splat_byte(15), pair = splat_byte(48);
    store_bytes(six, or_masked(and_bytes(a, nibble), shift<4>(top), pair));
    store_bytes(six + 64, or_masked(and_bytes(b, nibble), shift<2>(top), pair));
    store_bytes(six + 128, or_masked(and_bytes(shift<-4>(a), nibble), top, pair));
    store_bytes(six + 192, or_masked(and_bytes(shift<-4>(b), nibble), shift<-2>(top), pair));
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    split_pairs(low, chunk, out);
    merge_bits<2>(high, chunk, out);
  }
  inline void scales(int64_t chunk, Floats scale[2], Floats*) const {
    for (int h = 0; h < 2; ++h)
      scale[h] = mul(d, sub(to_floats(widen_u8(six + chunk % 8 * 32 + h * 16)), splat(32.0f)));
  }
};
