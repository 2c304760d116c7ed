// The vector operations of the kernels for AVX-512 with VNNI: 16 lanes of 32 bits in one register.
// Included inside an anonymous namespace of isa_avx512.cpp, after <immintrin.h>.

constexpr bool kFewCounts = false;  // a group's tokens at once, so that its weights are decoded once
constexpr bool kLooksUp = true;     // bytes of a table of 16 sooner than words of a larger one
using Bytes = __m512i;  // 64 bytes: 4 consecutive columns of each of 16 rows
using Ints = __m512i;   // 16 x int32
using Floats = __m512;  // 16 x float

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes v) { _mm512_storeu_si512(p, v); }
inline Bytes splat_byte(int b) { return _mm512_set1_epi8(static_cast<char>(b)); }
inline Bytes and_bytes(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes or_masked(Bytes base, Bytes v, Bytes mask) { return _mm512_ternarylogic_epi32(base, v, mask, 0xF8); }
inline Bytes blend_bits(Bytes base, Bytes v, Bytes mask) { return _mm512_ternarylogic_epi32(mask, v, base, 0xCA); }
inline Bytes flip_sign(Bytes v) { return _mm512_xor_si512(v, splat_byte(0x80)); }
template <int Left>  // shifts 16-bit lanes: mask off what crosses from the neighbour byte
inline Bytes shift(Bytes v) {
  if constexpr (Left > 0) return _mm512_slli_epi16(v, Left);
  else if constexpr (Left < 0) return _mm512_srli_epi16(v, -Left);
  else return v;
}
inline Bytes lookup(Bytes index, const uint8_t* table16) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table16))), index);
}

inline Ints splat_int(const int32_t* p) { return _mm512_set1_epi32(*p); }
inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
// acc + the dot product of 4 unsigned codes with 4 signed activations, in each lane.
template <int CodeBits>
inline Ints dot4(Ints acc, Bytes codes, const int8_t* q) {
  return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(q)));
}

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline float sum_lanes(Floats v) { return _mm512_reduce_add_ps(v); }
// out[i] = the sum of v[i]'s lanes: a transposition that adds at every level.
inline void sum_each(const Floats v[16], float* out) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512* a = v + 4 * i;
    const __m512 ab = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 cd = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    quads[i] = add(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  const __m512 x = add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xEE));
  const __m512 y = add(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xEE));
  store(out, add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD)));
}
inline float max_lanes(Floats v) { return _mm512_reduce_max_ps(v); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints round_to_ints(Floats v) { return _mm512_cvtps_epi32(v); }
inline Floats pow2(Ints e) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(127)), 23));
}
inline int sum_ints(Ints v) { return _mm512_reduce_add_epi32(v); }

inline Ints widen_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m128i spread_nibbles(const uint8_t* p) {  // 8 bytes: of each the low half, then the high half
  const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(v, low), _mm_and_si128(_mm_srli_epi16(v, 4), low));
}
inline Ints widen_nibbles(const uint8_t* p) { return _mm512_cvtepu8_epi32(spread_nibbles(p)); }
inline Ints widen_i8(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_i8(int8_t* p, Ints v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
template <int Bits>
inline Ints shift_right(Ints v) {
  return _mm512_srli_epi32(v, Bits);
}
inline Ints shift_right_by(Ints v, int bits) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
inline Ints and_int(Ints v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }

template <int Bits>
inline Ints shift_left(Ints v) {
  return _mm512_slli_epi32(v, Bits);
}
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints or_ints(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints xor_ints(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints as_ints(Bytes v) { return v; }
inline Bytes as_bytes(Ints v) { return v; }
inline Ints widen_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Bytes gather(const uint32_t* words, Ints index) { return _mm512_i32gather_epi32(index, words, 4); }
template <int Bit>  // 128 - v where a byte of `signs` has the bit
inline Bytes mirror(Bytes v, Bytes signs) {
  const __mmask64 where = _mm512_test_epi8_mask(signs, splat_byte(1 << Bit));
  return _mm512_mask_sub_epi8(v, where, splat_byte(128), v);
}
inline Bytes triple(Bytes v) { return _mm512_add_epi8(v, _mm512_add_epi8(v, v)); }
inline Bytes top_trit(Bytes v) {  // 3 v / 256
  const Bytes one = _mm512_maskz_mov_epi8(_mm512_cmpge_epu8_mask(v, splat_byte(86)), splat_byte(1));
  return _mm512_mask_mov_epi8(one, _mm512_cmpge_epu8_mask(v, splat_byte(171)), splat_byte(2));
}

inline Floats load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats round_f16(Floats v) { return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
inline Floats load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Floats load_e4m3_256th(const uint8_t* p) {  // what a float16 of the same bits is
  const __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16(~0x4000)));
}
inline Floats load_e8m0_half(const uint8_t* p) {  // 2^(e - 127) / 2, exact also where the result is denormal
  const Ints e = widen_u8(p);
  const Ints normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const Ints tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), tiny));
}
inline void store_bf16(uint16_t* p, Floats v) {  // round to nearest even; a NaN stays a NaN
  const Ints bits = _mm512_castps_si512(v);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  Ints rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// Copies 64-byte lines past the caches; `to` is 64-byte aligned.
inline void stream_line(uint8_t* to, const uint8_t* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
inline void finish_streams() { _mm_sfence(); }

inline uint64_t sum_words(const uint8_t* data, size_t nbytes) {  // nbytes a multiple of 256
  __m512i a = zero_ints(), b = zero_ints(), c = zero_ints(), d = zero_ints();
  for (size_t i = 0; i < nbytes; i += 256) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(data + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(data + i + 64));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(data + i + 128));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(data + i + 192));
  }
  return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}
