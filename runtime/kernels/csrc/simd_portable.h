// The vector operations of the kernels in plain C++: 16 lanes as arrays, for any processor and any compiler.
// Included inside an anonymous namespace of isa_portable.cpp. Meanings as in simd_avx512.h.

struct Bytes { uint8_t v[64]; };
struct Ints { int32_t v[16]; };
struct Floats { float v[16]; };

template <class Vector, class Function>
inline Vector each(Function&& f) {
  Vector out;
  for (int i = 0; i < static_cast<int>(sizeof out.v / sizeof out.v[0]); ++i) out.v[i] = f(i);
  return out;
}

inline Bytes load_bytes(const uint8_t* p) { Bytes b; std::memcpy(b.v, p, 64); return b; }
inline void store_bytes(uint8_t* p, Bytes v) { std::memcpy(p, v.v, 64); }
inline Bytes splat_byte(int b) { return each<Bytes>([&](int) { return static_cast<uint8_t>(b); }); }
inline Bytes and_bytes(Bytes x, Bytes y) { return each<Bytes>([&](int i) { return static_cast<uint8_t>(x.v[i] & y.v[i]); }); }
inline Bytes or_masked(Bytes base, Bytes v, Bytes mask) {
  return each<Bytes>([&](int i) { return static_cast<uint8_t>(base.v[i] | (v.v[i] & mask.v[i])); });
}
inline Bytes flip_sign(Bytes v) { return each<Bytes>([&](int i) { return static_cast<uint8_t>(v.v[i] ^ 0x80); }); }
template <int Left>
inline Bytes shift(Bytes v) {
  if constexpr (Left >= 0) return each<Bytes>([&](int i) { return static_cast<uint8_t>(v.v[i] << Left); });
  else return each<Bytes>([&](int i) { return static_cast<uint8_t>(v.v[i] >> -Left); });
}
inline Bytes lookup(Bytes index, const uint8_t* table16) { return each<Bytes>([&](int i) { return table16[index.v[i]]; }); }

inline Ints splat_int(const int32_t* p) { return each<Ints>([&](int) { return *p; }); }
inline Ints zero_ints() { return each<Ints>([](int) { return 0; }); }
inline Ints add_ints(Ints x, Ints y) { return each<Ints>([&](int i) { return x.v[i] + y.v[i]; }); }
template <int CodeBits>
inline Ints dot4(Ints acc, Bytes codes, const int8_t* q) {
  return each<Ints>([&](int i) {
    int32_t sum = acc.v[i];
    for (int t = 0; t < 4; ++t) sum += static_cast<int32_t>(codes.v[4 * i + t]) * q[t];
    return sum;
  });
}

inline Floats zero() { return each<Floats>([](int) { return 0.0f; }); }
inline Floats splat(float x) { return each<Floats>([&](int) { return x; }); }
inline Floats load(const float* p) { Floats f; std::memcpy(f.v, p, 64); return f; }
inline void store(float* p, Floats v) { std::memcpy(p, v.v, 64); }
inline Floats add(Floats x, Floats y) { return each<Floats>([&](int i) { return x.v[i] + y.v[i]; }); }
inline Floats sub(Floats x, Floats y) { return each<Floats>([&](int i) { return x.v[i] - y.v[i]; }); }
inline Floats mul(Floats x, Floats y) { return each<Floats>([&](int i) { return x.v[i] * y.v[i]; }); }
inline Floats div(Floats x, Floats y) { return each<Floats>([&](int i) { return x.v[i] / y.v[i]; }); }
inline Floats fma(Floats x, Floats y, Floats z) { return each<Floats>([&](int i) { return x.v[i] * y.v[i] + z.v[i]; }); }
inline Floats max(Floats x, Floats y) { return each<Floats>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
inline Floats abs(Floats x) { return each<Floats>([&](int i) { return std::fabs(x.v[i]); }); }
inline float sum_lanes(Floats v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) v.v[i] += v.v[i + n];
  return v.v[0];
}
inline void sum_each(const Floats v[16], float* out) {
  for (int i = 0; i < 16; ++i) out[i] = sum_lanes(v[i]);
}
inline float max_lanes(Floats v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) v.v[i] = v.v[i] > v.v[i + n] ? v.v[i] : v.v[i + n];
  return v.v[0];
}
inline Floats to_floats(Ints x) { return each<Floats>([&](int i) { return static_cast<float>(x.v[i]); }); }
inline Ints round_to_ints(Floats x) { return each<Ints>([&](int i) { return static_cast<int32_t>(std::nearbyintf(x.v[i])); }); }
inline float float_of_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t bits_of_float(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline Floats pow2(Ints e) { return each<Floats>([&](int i) { return float_of_bits(static_cast<uint32_t>(e.v[i] + 127) << 23); }); }
inline int sum_ints(Ints v) {
  int sum = 0;
  for (int x : v.v) sum += x;
  return sum;
}

inline Ints widen_u8(const uint8_t* p) { return each<Ints>([&](int i) { return static_cast<int32_t>(p[i]); }); }
inline Ints widen_i8(const uint8_t* p) { return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(p[i])); }); }
inline void store_i8(int8_t* p, Ints v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}
template <int Bits>
inline Ints shift_right(Ints x) { return each<Ints>([&](int i) { return x.v[i] >> Bits; }); }
inline Ints and_int(Ints x, int mask) { return each<Ints>([&](int i) { return x.v[i] & mask; }); }

inline float float_of_half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent) return float_of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}
inline Floats load_f16(const uint16_t* p) { return each<Floats>([&](int i) { return float_of_half(p[i]); }); }
inline Floats load_bf16(const uint16_t* p) { return each<Floats>([&](int i) { return float_of_bits(static_cast<uint32_t>(p[i]) << 16); }); }
inline Floats load_e8m0_half(const uint8_t* p) {
  return each<Floats>([&](int i) { return float_of_bits(p[i] < 2 ? 0x00200000u << p[i] : (p[i] - 1u) << 23); });
}
inline void store_bf16(uint16_t* p, Floats v) {
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = bits_of_float(v.v[i]);
    p[i] = v.v[i] != v.v[i] ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

inline void prefetch(const uint8_t*) {}
inline void prefetch_far(const uint8_t*) {}

inline uint64_t sum_words(const uint8_t* data, size_t nbytes) {
  uint64_t sum = 0, word;
  for (size_t i = 0; i < nbytes; i += 8) {
    std::memcpy(&word, data + i, 8);
    sum += word;
  }
  return sum;
}
