// The vector operations of the kernels for any processor, on the vector types of GCC and Clang: 16 lanes of 32 bits,
// which the compiler cuts into the registers it has. Included inside an anonymous namespace of isa_portable.cpp.
// Meanings as in simd_avx512.h.

constexpr bool kLooksUp = false;
constexpr bool kFewCounts = true;  // groups of four tokens and of one: more would compile for a minute
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));

template <class Vector, class T>
inline Vector load_as(const T* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// Lane by lane through memory: a register takes one lane at a time, which is slower to run and to compile.
template <class Vector, class Function>
inline Vector each(Function&& f) {
  std::remove_reference_t<decltype(Vector{}[0])> lanes[16];
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) lanes[i] = f(i);
  return load_as<Vector>(lanes);
}

inline Bytes load_bytes(const uint8_t* p) { return load_as<Bytes>(p); }
inline void store_bytes(uint8_t* p, Bytes v) { std::memcpy(p, &v, 64); }
inline Bytes splat_byte(int b) { return Bytes{} + static_cast<uint8_t>(b); }
inline Bytes and_bytes(Bytes x, Bytes y) { return x & y; }
inline Bytes or_masked(Bytes base, Bytes v, Bytes mask) { return base | (v & mask); }
inline Bytes blend_bits(Bytes base, Bytes v, Bytes mask) { return base ^ ((base ^ v) & mask); }
inline Bytes flip_sign(Bytes v) { return v ^ splat_byte(0x80); }
template <int Left>
inline Bytes shift(Bytes v) {
  if constexpr (Left >= 0) return reinterpret_cast<Bytes>(reinterpret_cast<Words>(v) << Left);
  else return reinterpret_cast<Bytes>(reinterpret_cast<Words>(v) >> -Left);
}
inline Bytes lookup(Bytes index, const uint8_t* table16) {
  uint8_t lanes[64];
  store_bytes(lanes, index);
#pragma GCC unroll 1
  for (int i = 0; i < 64; ++i) lanes[i] = table16[lanes[i]];
  return load_bytes(lanes);
}

inline Ints splat_int(const int32_t* p) { return Ints{} + *p; }
inline Ints zero_ints() { return Ints{}; }
inline Ints add_ints(Ints x, Ints y) { return x + y; }
// Even and odd columns apart: a code times an activation fits 16 bits (255 * 127).
template <int CodeBits>
inline Ints dot4(Ints acc, Bytes codes, const int8_t* q) {
  const Words words = reinterpret_cast<Words>(codes);
  auto pair = [](int low, int high) {
    return Ints{} + ((low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16));
  };
  const Shorts even = reinterpret_cast<Shorts>(words & 0x00ff00ffu) * reinterpret_cast<Shorts>(pair(q[0], q[2]));
  const Shorts odd = reinterpret_cast<Shorts>((words >> 8) & 0x00ff00ffu) * reinterpret_cast<Shorts>(pair(q[1], q[3]));
  const Ints a = reinterpret_cast<Ints>(even), b = reinterpret_cast<Ints>(odd);
  return acc + (a >> 16) + (b >> 16) + ((a << 16) >> 16) + ((b << 16) >> 16);
}

inline Floats zero() { return Floats{}; }
inline Floats splat(float x) { return x - Floats{}; }  // of -0 too
inline Floats load(const float* p) { return load_as<Floats>(p); }
inline void store(float* p, Floats v) { std::memcpy(p, &v, 64); }
inline Floats add(Floats x, Floats y) { return x + y; }
inline Floats sub(Floats x, Floats y) { return x - y; }
inline Floats mul(Floats x, Floats y) { return x * y; }
inline Floats div(Floats x, Floats y) { return x / y; }
inline Floats fma(Floats x, Floats y, Floats z) { return x * y + z; }
inline Floats select(Ints mask, Floats x, Floats y) {
  return reinterpret_cast<Floats>((reinterpret_cast<Ints>(x) & mask) | (reinterpret_cast<Ints>(y) & ~mask));
}
inline Floats max(Floats x, Floats y) { return select(x > y, x, y); }
inline Floats abs(Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7fffffff); }
inline float sum_lanes(Floats v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) v[i] += v[i + n];
  return v[0];
}
inline void sum_each(const Floats v[16], float* out) {
  for (int i = 0; i < 16; ++i) out[i] = sum_lanes(v[i]);
}
inline float max_lanes(Floats v) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
  return v[0];
}
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
// To nearest even, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low bits.
inline Ints round_to_ints(Floats x) {
  return reinterpret_cast<Ints>(x + splat(12582912.0f)) - reinterpret_cast<Ints>(splat(12582912.0f));
}
inline Floats pow2(Ints e) { return reinterpret_cast<Floats>((e + 127) << 23); }
inline int sum_ints(Ints v) {
  int sum = 0;
  for (int i = 0; i < 16; ++i) sum += v[i];
  return sum;
}

inline Ints widen_u8(const uint8_t* p) {
  return each<Ints>([&](int i) { return static_cast<int32_t>(p[i]); });
}
inline Ints widen_nibbles(const uint8_t* p) {  // of each of 8 bytes the low half, then the high half
  return each<Ints>([&](int i) { return p[i / 2] >> 4 * (i % 2) & 15; });
}
inline Ints widen_i8(const uint8_t* p) {
  return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(p[i])); });
}
inline Ints widen_u16(const uint16_t* p) {
  return each<Ints>([&](int i) { return static_cast<int32_t>(p[i]); });
}
inline void store_i8(int8_t* p, Ints v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v[i]);
}
template <int Bits>
inline Ints shift_right(Ints x) {
  return x >> Bits;
}
inline Ints shift_right_by(Ints x, int bits) { return x >> bits; }
inline Ints and_int(Ints x, int mask) { return x & mask; }

template <int Bits>
inline Ints shift_left(Ints x) {
  return reinterpret_cast<Ints>(reinterpret_cast<Words>(x) << Bits);
}
inline Ints sub_ints(Ints x, Ints y) { return x - y; }
inline Ints or_ints(Ints x, Ints y) { return x | y; }
inline Ints xor_ints(Ints x, Ints y) { return x ^ y; }
inline Ints as_ints(Bytes v) { return reinterpret_cast<Ints>(v); }
inline Bytes as_bytes(Ints v) { return reinterpret_cast<Bytes>(v); }
inline Bytes gather(const uint32_t* words, Ints index) {
  return as_bytes(each<Ints>([&](int i) { return static_cast<int32_t>(words[index[i]]); }));
}
inline void gather_pairs(const uint32_t* pairs, Ints index, Bytes& first, Bytes& second) {
  first = gather(pairs, index + index), second = gather(pairs + 1, index + index);
}
template <int Bit>
inline Bytes mirror(Bytes v, Bytes signs) {
  const Bytes where = Bytes{} - ((signs >> Bit) & splat_byte(1));  // compilers compare bytes one by one
  return (v & ~where) | ((splat_byte(128) - v) & where);
}
inline Bytes triple(Bytes v) { return v + v + v; }
inline Bytes top_trit(Bytes v) {
  return Bytes{} - reinterpret_cast<Bytes>((v >= splat_byte(86)) + (v >= splat_byte(171)));
}

// Exponent and fraction move 13 bits up; the factor 2^112 corrects the exponent's bias, also for denormal halves.
inline Floats load_f16(const uint16_t* p) {
  const Ints h = widen_u16(p), magnitude = (h & 0x7fff) << 13;
  const Floats finite = reinterpret_cast<Floats>(magnitude) * splat(0x1p112f);
  const Floats special = reinterpret_cast<Floats>(magnitude | 0x7f800000);  // infinity or NaN
  const Floats v = select((h & 0x7c00) == 0x7c00, special, finite);
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(v) | ((h & 0x8000) << 16));
}
inline Floats load_e4m3_256th(const uint8_t* p) {  // what a float16 of the same bits is
  uint16_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
  return load_f16(bits);
}
inline Floats round_f16(Floats v) {
  float lanes[16];
  uint16_t codes[16];
  store(lanes, v);
  for (int i = 0; i < 16; ++i) codes[i] = to_f16(lanes[i]);
  return load_f16(codes);
}
inline Floats load_bf16(const uint16_t* p) { return reinterpret_cast<Floats>(widen_u16(p) << 16); }
inline Floats load_e8m0_half(const uint8_t* p) {
  return reinterpret_cast<Floats>(each<Ints>([&](int i) { return p[i] < 2 ? 0x00200000 << p[i] : (p[i] - 1) << 23; }));
}
inline void store_bf16(uint16_t* p, Floats v) {
  const Words bits = reinterpret_cast<Words>(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  for (int i = 0; i < 16; ++i) p[i] = v[i] != v[i] ? 0x7fc0 : static_cast<uint16_t>(rounded[i]);
}

inline void prefetch(const uint8_t*) {}
inline void prefetch_far(const uint8_t*) {}

inline void stream_line(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 64); }
inline void finish_streams() {}

inline uint64_t sum_words(const uint8_t* data, size_t nbytes) {
  typedef uint64_t Longs __attribute__((vector_size(64)));
  Longs sum{};
  for (size_t i = 0; i < nbytes; i += 64) sum += load_as<Longs>(data + i);
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += sum[i];
  return total;
}
