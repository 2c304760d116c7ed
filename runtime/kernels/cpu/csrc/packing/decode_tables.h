// Codes of types with a codebook where a register is a table of 64 bytes (AVX-512 VBMI): no index is gathered.
// Included after decode_books.h by isa_vbmi.cpp, over simd_avx512.h.

// The same entries of a byte table for 64 indices: their low 7 bits in bytes, above[i] their bit 7 + i.
template <int Entries>
inline Bytes look_up(const uint8_t* table, Bytes index, const __mmask64* above) {
  if constexpr (Entries == 128) {
    return _mm512_permutex2var_epi8(load_bytes(table), index, load_bytes(table + 64));
  } else {
    constexpr int kHalf = Entries / 2, kBit = kHalf == 128 ? 0 : kHalf == 256 ? 1 : 2;
    const Bytes low = look_up<kHalf>(table, index, above), high = look_up<kHalf>(table + kHalf, index, above);
    return _mm512_mask_mov_epi8(low, above[kBit], high);
  }
}

// Bytes in which bit i + Step * (j / 4 % 4) of byte j is set: what tests a bit for each of four groups.
template <int Bit, int Step>
inline Bytes group_bits() {
  const auto word = [](int g) { return static_cast<int>((1u << (Bit + Step * g)) * 0x01010101u); };
  return _mm512_broadcast_i32x4(_mm_setr_epi32(word(0), word(1), word(2), word(3)));
}

template <class Book>
struct ByteTables : Book {
  using Book::Book;
  static constexpr int kType = Book::kType, kWidth = kFormats[kType].low == 2 ? 4 : 8;
  static constexpr int kEntries = kType == IQ2_S ? 1024 : kType == IQ3_S || kType == IQ2_XS ? 512 : 256;

  // Indices of four groups with rows together: lane q holds rows 4q..4q+3 of group 0, then of 1, 2, 3.
  inline Bytes indices(int64_t chunk, int half) const {
    const Bytes order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, load_bytes(this->low + chunk * 64 * kFormats[kType].low + half * 64));
  }
  // Bits 7 and up of these indices.
  template <int Half>
  inline void bits_above(int64_t chunk, Bytes index, Bytes raw, __mmask64 above[3]) const {
    above[0] = _mm512_movepi8_mask(index);
    if constexpr (kType == IQ2_XS) {
      const Bytes third = _mm512_broadcast_i32x4(_mm_set1_epi32(0x0f0b0703));  // of rows 4q..4q+3
      above[1] = _mm512_test_epi8_mask(_mm512_shuffle_epi8(raw, third), group_bits<1, 2>());
    } else if constexpr (kEntries > 256) {
      const Bytes order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      const __m128i rows = _mm_loadu_si128(reinterpret_cast<const __m128i*>(this->min_plane + chunk * 16));
      const Bytes more = _mm512_permutexvar_epi32(order, _mm512_castsi128_si512(rows));
      if constexpr (kType == IQ3_S) above[1] = _mm512_test_epi8_mask(more, group_bits<4 * Half, 1>());
      if constexpr (kType == IQ2_S) {
        above[1] = _mm512_test_epi8_mask(more, group_bits<0, 2>());
        above[2] = _mm512_test_epi8_mask(more, group_bits<1, 2>());
      }
    }
  }
  // The book's words of four groups, whose high nibbles hold other columns.
  template <int Half>
  inline void words(int64_t chunk, Bytes raw, Bytes out[4]) const {
    const Bytes index = indices(chunk, Half);
    __mmask64 above[3];
    bits_above<Half>(chunk, index, raw, above);
    const Bytes even = look_up<kEntries>(this->levels.even, index, above);
    const Bytes odd = look_up<kEntries>(this->levels.odd, index, above);
    const Bytes low = _mm512_unpacklo_epi8(even, odd), high = _mm512_unpackhi_epi8(even, odd);
    const Bytes low4 = shift<-4>(low), high4 = shift<-4>(high);
    out[0] = _mm512_unpacklo_epi16(low, low4), out[1] = _mm512_unpackhi_epi16(low, low4);
    out[2] = _mm512_unpacklo_epi16(high, high4), out[3] = _mm512_unpackhi_epi16(high, high4);
  }
  // The table's entry for the low nibble of each byte; what stands in the others is ignored.
  static inline Bytes low_nibbles(Bytes v, const uint8_t* table16) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(table16));
    return _mm512_permutexvar_epi8(v, _mm512_broadcast_i32x4(table));
  }
  template <int Column>
  inline Bytes first(Bytes word, Bytes signs) const {
    return low_nibbles(with_bit<Column, 3>(word, signs), this->levels.first);
  }
  template <int Column>
  inline Bytes second(Bytes word, Bytes signs) const {
    return low_nibbles(with_bit<Column, 0>(word, signs), this->levels.second);
  }
  inline void codes(int64_t chunk, Bytes out[8]) const {
    const Bytes raw = load_bytes(this->high + chunk * 64), signs = Book::kParity ? complete_signs(raw) : raw;
    Bytes of[4];
    if constexpr (kWidth == 4) {
      words<0>(chunk, raw, of);
      out[0] = first<0>(of[0], signs), out[1] = first<1>(of[1], signs);
      out[2] = first<2>(of[2], signs), out[3] = first<3>(of[3], signs);
      words<1>(chunk, raw, of);
      out[4] = first<4>(of[0], signs), out[5] = first<5>(of[1], signs);
      out[6] = first<6>(of[2], signs), out[7] = first<7>(of[3], signs);
    } else {
      words<0>(chunk, raw, of);
      out[0] = first<0>(of[0], signs), out[1] = second<1>(of[0], signs);
      out[2] = first<2>(of[1], signs), out[3] = second<3>(of[1], signs);
      out[4] = first<4>(of[2], signs), out[5] = second<5>(of[2], signs);
      out[6] = first<6>(of[3], signs), out[7] = second<7>(of[3], signs);
    }
  }
};
