// The vector operations of the kernels for AVX2 with FMA and F16C: 16 lanes of 32 bits in two registers.
// Included inside an anonymous namespace of isa_avx2.cpp, after <immintrin.h>. Meanings as in simd_avx512.h.

constexpr bool kFewCounts = false, kLooksUp = true;
struct Bytes {
  __m256i a, b;
};
struct Ints {
  __m256i a, b;
};
struct Floats {
  __m256 a, b;
};

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

inline Bytes load_bytes(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
inline void store_bytes(uint8_t* p, Bytes v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.b);
}
inline Bytes splat_byte(int b) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(b));
  return {v, v};
}
inline Bytes and_bytes(Bytes x, Bytes y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Bytes or_masked(Bytes base, Bytes v, Bytes mask) {
  return {_mm256_or_si256(base.a, _mm256_and_si256(v.a, mask.a)),
          _mm256_or_si256(base.b, _mm256_and_si256(v.b, mask.b))};
}
inline Bytes blend_bits(Bytes base, Bytes v, Bytes mask) {
  return {_mm256_or_si256(_mm256_andnot_si256(mask.a, base.a), _mm256_and_si256(v.a, mask.a)),
          _mm256_or_si256(_mm256_andnot_si256(mask.b, base.b), _mm256_and_si256(v.b, mask.b))};
}
inline Bytes flip_sign(Bytes v) {
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(v.a, sign), _mm256_xor_si256(v.b, sign)};
}
template <int Left>
inline Bytes shift(Bytes v) {
  if constexpr (Left > 0) return {_mm256_slli_epi16(v.a, Left), _mm256_slli_epi16(v.b, Left)};
  else if constexpr (Left < 0) return {_mm256_srli_epi16(v.a, -Left), _mm256_srli_epi16(v.b, -Left)};
  else return v;
}
inline Bytes lookup(Bytes index, const uint8_t* table16) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(table16));
  return {_mm256_shuffle_epi8(table, index.a), _mm256_shuffle_epi8(table, index.b)};
}

inline Ints splat_int(const int32_t* p) {
  const __m256i v = _mm256_set1_epi32(*p);
  return {v, v};
}
inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints add_ints(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
template <int CodeBits>
inline __m256i dot4_half(__m256i codes, __m256i q) {
  if constexpr (CodeBits < 8) {  // at most 2 * 63 * 127 in 16 bits: no saturation
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, q), _mm256_set1_epi16(1));
  } else {  // full bytes would saturate: even and odd columns apart, in 16 bits each
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(codes, 8);
    const __m256i q_even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), q_odd = _mm256_srai_epi16(q, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(even, q_even), _mm256_madd_epi16(odd, q_odd));
  }
}
template <int CodeBits>
inline Ints dot4(Ints acc, Bytes codes, const int8_t* q) {
  const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(q));
  return {_mm256_add_epi32(acc.a, dot4_half<CodeBits>(codes.a, x)),
          _mm256_add_epi32(acc.b, dot4_half<CodeBits>(codes.b, x))};
}

inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// The same tree of additions as _mm512_reduce_add_ps, so that both instruction sets give the same bits.
inline float sum_lanes(Floats v) {
  const __m256 s = _mm256_add_ps(v.a, v.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 h = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline void sum_each(const Floats v[16], float* out) {
  for (int i = 0; i < 16; ++i) out[i] = sum_lanes(v[i]);
}
inline float max_lanes(Floats v) {
  const __m256 s = _mm256_max_ps(v.a, v.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 h = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline Ints round_to_ints(Floats v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
inline Floats pow2(Ints e) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.b, bias), 23))};
}
inline int sum_ints(Ints v) {
  const __m256i s = _mm256_add_epi32(v.a, v.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

inline Ints widen_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(load64(p)), _mm256_cvtepu8_epi32(load64(p + 8))};
}
inline Ints widen_nibbles(const uint8_t* p) {  // of each of 8 bytes the low half, then the high half
  const __m128i v = load64(p), low = _mm_set1_epi8(15);
  const __m128i all = _mm_unpacklo_epi8(_mm_and_si128(v, low), _mm_and_si128(_mm_srli_epi16(v, 4), low));
  return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
inline Ints widen_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(load64(p)), _mm256_cvtepi8_epi32(load64(p + 8))};
}
inline void store_i8(int8_t* p, Ints v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}
template <int Bits>
inline Ints shift_left(Ints v) {
  return {_mm256_slli_epi32(v.a, Bits), _mm256_slli_epi32(v.b, Bits)};
}
inline Ints sub_ints(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Ints or_ints(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Ints xor_ints(Ints x, Ints y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline Ints as_ints(Bytes v) { return {v.a, v.b}; }
inline Bytes as_bytes(Ints v) { return {v.a, v.b}; }
inline Ints widen_u16(const uint16_t* p) { return {_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 8))}; }
inline Bytes gather(const uint32_t* words, Ints index) {
  const int* from = reinterpret_cast<const int*>(words);
  return {_mm256_i32gather_epi32(from, index.a, 4), _mm256_i32gather_epi32(from, index.b, 4)};
}
inline __m256i mirror_half(__m256i v, __m256i signs, __m256i bit) {
  const __m256i where = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bit), bit);
  return _mm256_blendv_epi8(v, _mm256_sub_epi8(_mm256_set1_epi8(static_cast<char>(128)), v), where);
}
template <int Bit>
inline Bytes mirror(Bytes v, Bytes signs) {
  const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << Bit));
  return {mirror_half(v.a, signs.a, bit), mirror_half(v.b, signs.b, bit)};
}
inline __m256i triple_half(__m256i v) { return _mm256_add_epi8(v, _mm256_add_epi8(v, v)); }
inline Bytes triple(Bytes v) { return {triple_half(v.a), triple_half(v.b)}; }
inline __m256i top_trit_half(__m256i v) {
  const __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8(86)), v);
  const __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8(static_cast<char>(171))), v);
  return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
}
inline Bytes top_trit(Bytes v) { return {top_trit_half(v.a), top_trit_half(v.b)}; }
template <int Bits>
inline Ints shift_right(Ints v) {
  return {_mm256_srli_epi32(v.a, Bits), _mm256_srli_epi32(v.b, Bits)};
}
inline Ints shift_right_by(Ints v, int bits) {
  const __m128i count = _mm_cvtsi32_si128(bits);
  return {_mm256_srl_epi32(v.a, count), _mm256_srl_epi32(v.b, count)};
}
inline Ints and_int(Ints v, int mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m)};
}

inline Floats load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
inline Floats load_e4m3_256th(const uint8_t* p) {  // what a float16 of the same bits is
  const __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
  const __m256i bits = _mm256_and_si256(v, _mm256_set1_epi16(~0x4000));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}
inline __m256 f16_half(__m256 v) { return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
inline Floats round_f16(Floats v) { return {f16_half(v.a), f16_half(v.b)}; }
inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
inline Floats load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline __m256 e8m0_half(__m256i e) {
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
inline Floats load_e8m0_half(const uint8_t* p) {
  const Ints e = widen_u8(p);
  return {e8m0_half(e.a), e8m0_half(e.b)};
}
inline __m256i bf16_bits(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store_bf16(uint16_t* p, Floats v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16_bits(v.a), bf16_bits(v.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

inline void stream_line(uint8_t* to, const uint8_t* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), load256(from));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), load256(from + 32));
}
inline void finish_streams() { _mm_sfence(); }

inline uint64_t sum_words(const uint8_t* data, size_t nbytes) {
  __m256i s[4] = {};
  for (size_t i = 0; i < nbytes; i += 128)
    for (int j = 0; j < 4; ++j) s[j] = _mm256_add_epi64(s[j], load256(data + i + 32 * j));
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words),
                     _mm256_add_epi64(_mm256_add_epi64(s[0], s[1]), _mm256_add_epi64(s[2], s[3])));
  return words[0] + words[1] + words[2] + words[3];
}
