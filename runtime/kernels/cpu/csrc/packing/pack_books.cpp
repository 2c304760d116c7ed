#include <cstring>

#include "packing/books.h"

namespace pshard {
namespace {

inline uint32_t word16(const uint8_t* p) { return p[0] | p[1] << 8; }
inline uint32_t word32(const uint8_t* p) { return word16(p) | word16(p + 2) << 16; }

// Four bits -> the lowest bit of four bytes.
inline uint32_t spread(uint32_t bits) { return (bits * 0x00204081u) & 0x01010101u; }

// One row's share of a chunk: indices (8 of four columns or 4 of eight), signs of eight columns each, high bits.
struct Chunk {
  uint32_t index[8] = {};
  uint32_t signs[4] = {};
  uint32_t more = 0;
};

// `extra` takes the place of the eighth sign, which the others say.
inline uint32_t with_extra(uint32_t seven, uint32_t extra) { return (seven & 127) | (extra & 1) << 7; }

void read_chunk(int type, const uint8_t* b, int n, Chunk& c) {
  switch (type) {
    case IQ3_S:
      for (int j = 0; j < 8; ++j) c.index[j] = b[2 + n * 8 + j];
      for (int g = 0; g < 4; ++g) c.signs[g] = b[74 + n * 4 + g];
      c.more = b[66 + n];
      return;
    case IQ2_S:
      for (int g = 0; g < 4; ++g) c.index[g] = b[2 + n * 4 + g], c.signs[g] = b[34 + n * 4 + g];
      c.more = b[66 + n];
      return;
    case IQ2_XS:
      for (int g = 0; g < 4; ++g) {
        const uint32_t w = word16(b + 2 + n * 8 + g * 2);
        c.index[g] = w & 255, c.signs[g] = with_extra(w >> 9, w >> 8);
      }
      return;
    case IQ3_XXS:
    case IQ2_XXS: {
      const bool three = type == IQ3_XXS;
      const uint32_t w = word32(three ? b + 66 + n * 4 : b + 2 + n * 8 + 4);
      for (int j = 0; j < (three ? 8 : 4); ++j) c.index[j] = b[2 + n * 8 + j];
      for (int g = 0; g < 4; ++g) c.signs[g] = with_extra(w >> 7 * g, w >> (28 + g));
      return;
    }
    default: {  // IQ1_S, IQ1_M
      const int at = type == IQ1_S ? 2 : 0;
      for (int g = 0; g < 4; ++g) c.index[g] = b[at + n * 4 + g];
      c.more = word16(b + at + 32 + n * 2);
    }
  }
}

// Scale bytes of a row and block, scales[i * 16], and d.
uint16_t put_book_scales(int type, const uint8_t* b, uint8_t* scales) {
  if (type != IQ1_M) {
    const int from = type == IQ3_S ? 106 : type == IQ2_S ? 74 : 66;
    for (int i = 0; i < kFormats[type].scales; ++i) scales[i * 16] = b[from + i];
    return word16(b);
  }
  uint32_t six[8], d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t w = word16(b + 48 + 2 * i);
    six[2 * i] = w & 63, six[2 * i + 1] = (w >> 6) & 63, d |= (w >> 12) << 4 * i;
  }
  for (int i = 0; i < 4; ++i) scales[i * 16] = (six[2 * i] & 15) | (six[2 * i + 1] & 15) << 4;
  for (int i = 0; i < 2; ++i)
    scales[(4 + i) * 16] =
        six[4 * i] >> 4 | six[4 * i + 1] >> 4 << 2 | six[4 * i + 2] >> 4 << 4 | six[4 * i + 3] >> 4 << 6;
  return d;
}

}  // namespace

void set_book(int type, const int8_t* values, int64_t count) {
  const bool four = type == IQ3_S || type == IQ3_XXS, delta = type == IQ1_S || type == IQ1_M;
  const int width = four ? 4 : 8;
  auto* codes = reinterpret_cast<uint8_t*>(books[type - IQ3_S]);
  int8_t levels[8] = {};
  int known = 0;
  const auto level_of = [&](int8_t value) {
    int i = 0;
    while (i < known && levels[i] != value) ++i;
    if (i == known && known < 8) levels[known++] = value;
    return static_cast<uint32_t>(i);
  };
  LevelBook& book = level_books[type - IQ3_S];
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(64 + values[i]);
  for (int64_t e = 0; e < count / width; ++e) {
    const int8_t* of = values + e * width;
    uint32_t nibbles[4];
    for (int t = 0; t < 4; ++t) nibbles[t] = level_of(of[t]) | (four ? 0 : level_of(of[4 + t]) << 2);
    book.words[e] = nibbles[0] | nibbles[1] << 8 | nibbles[2] << 16 | nibbles[3] << 24;
    book.even[e] = nibbles[0] | nibbles[2] << 4, book.odd[e] = nibbles[1] | nibbles[3] << 4;
  }
  const auto code = [&](int level, int bit) {
    const int value = levels[level];
    return 64 + (delta ? value + 1 - 2 * bit : bit ? -value : value);
  };
  for (int i = 0; i < 16; ++i)
    book.first[i] = code(i & (four ? 7 : 3), i >> 3), book.second[i] = code(i >> 2, i & 1);
}

void pack_book_record(int type, const uint8_t* const rows[16], int64_t cols, const Planes& p, uint8_t* record) {
  const Format& f = kFormats[type];
  const int indices = 4 * f.low, more_bytes = f.mins / 8;
  for (int64_t b = 0; b < cols / 256; ++b)
    for (int r = 0; r < 16; ++r) {
      if (!rows[r]) continue;
      const uint8_t* block = rows[r] + b * f.nbytes;
      const uint16_t d = put_book_scales(type, block, record + p.scales + b * 16 * f.scales + r);
      std::memcpy(record + p.d + b * 32 + r * 2, &d, 2);
      for (int n = 0; n < 8; ++n) {
        Chunk c;
        read_chunk(type, block, n, c);
        const int64_t chunk = b * 8 + n;
        for (int j = 0; j < indices; ++j) record[p.low + (chunk * indices + j) * 16 + r] = c.index[j];
        if (f.high) {
          uint32_t signs = 0;
          for (int g = 0; g < 4; ++g) signs |= spread(c.signs[g] & 15) << 2 * g | spread(c.signs[g] >> 4) << (2 * g + 1);
          std::memcpy(record + p.high + chunk * 64 + r * 4, &signs, 4);
        }
        if (more_bytes) std::memcpy(record + p.mins + (chunk * 16 + r) * more_bytes, &c.more, more_bytes);
      }
    }
}

}  // namespace pshard
