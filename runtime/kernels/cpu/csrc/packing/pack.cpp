#include "pack.h"

#include <cstring>

#include "packing/books.h"

namespace pshard {
namespace {

inline uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}
inline void put(uint8_t* p, uint32_t w) { std::memcpy(p, &w, 4); }

// The fields of one file block, by offset.
struct Source {
  int low, high, scales, d, dmin;
};
Source source_of(int type) {
  switch (type) {
    case Q4_0:
    case Q8_0: return {2, 0, 0, 0, 0};
    case Q4_1: return {4, 0, 0, 0, 2};
    case Q5_0: return {6, 2, 0, 0, 0};
    case Q5_1: return {8, 4, 0, 0, 2};
    case MXFP4: return {1, 0, 0, 0, 0};
    case IQ4_NL: return {2, 0, 0, 0, 0};
    case IQ4_XS: return {8, 0, 2, 0, 0};
    case Q2_K: return {16, 0, 0, 80, 82};
    case Q3_K: return {32, 0, 96, 108, 0};
    case Q4_K: return {16, 0, 4, 0, 2};
    case Q5_K: return {48, 16, 4, 0, 2};
    case NVFP4: return {4, 0, 0, 0, 0};
    case Q1_0:
    case Q2_0: return {2, 0, 0, 0, 0};
    case TQ1_0: return {0, 0, 0, 52, 0};
    case TQ2_0: return {0, 0, 0, 64, 0};
    default: return {0, 128, 192, 208, 0};  // Q6_K
  }
}

// Digits 0 to 2 of n bytes: the first of each byte, then the second of each...
void unpack_trits(const uint8_t* from, int n, int digits, uint8_t* codes) {
  for (int i = 0; i < n; ++i) {
    uint8_t left = from[i];
    for (int j = 0; j < digits; ++j, left *= 3) codes[j * n + i] = left * 3 >> 8;
  }
}

// Codes of one block in natural column order, one byte each.
void unpack_codes(int type, const uint8_t* block, const Source& at, uint8_t* codes) {
  const uint8_t *low = block + at.low, *high = block + at.high;
  switch (type) {
    case Q8_0: std::memcpy(codes, low, 32); return;
    case Q1_0:
      for (int i = 0; i < 128; ++i) codes[i] = (low[i / 8] >> i % 8) & 1;
      return;
    case Q2_0:
      for (int i = 0; i < 64; ++i) codes[i] = (low[i / 4] >> 2 * (i % 4)) & 3;
      return;
    case NVFP4:
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 8; ++i)
          codes[j * 16 + i] = low[j * 8 + i] & 15, codes[j * 16 + 8 + i] = low[j * 8 + i] >> 4;
      return;
    case TQ1_0:
      unpack_trits(low, 32, 5, codes), unpack_trits(low + 32, 16, 5, codes + 160);
      unpack_trits(low + 48, 4, 4, codes + 240);
      return;
    case Q2_K:
    case Q3_K:
    case TQ2_0:
      for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 32; ++i) {
            uint8_t code = (low[half * 32 + i] >> 2 * j) & 3;
            if (type == Q3_K) code |= ((high[i] >> (half * 4 + j)) & 1) << 2;
            codes[half * 128 + j * 32 + i] = code;
          }
      return;
    case Q4_K:
    case Q5_K:
      for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) {
          uint8_t code = (low[j / 2 * 32 + i] >> 4 * (j % 2)) & 15;
          if (type == Q5_K) code |= ((high[i] >> j) & 1) << 4;
          codes[j * 32 + i] = code;
        }
      return;
    case Q6_K:
      for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 32; ++i)
            codes[half * 128 + j * 32 + i] =
                ((low[half * 64 + j % 2 * 32 + i] >> 4 * (j / 2)) & 15) | (((high[half * 32 + i] >> 2 * j) & 3) << 4);
      return;
    case IQ4_XS:
      for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 16; ++i)
          codes[j * 32 + i] = low[j * 16 + i] & 15, codes[j * 32 + 16 + i] = low[j * 16 + i] >> 4;
      return;
    default:
      for (int i = 0; i < 16; ++i) codes[i] = low[i] & 15, codes[i + 16] = low[i] >> 4;
      if (type == Q5_0 || type == Q5_1) {
        const uint32_t bits = word(high);
        for (int i = 0; i < 32; ++i) codes[i] |= ((bits >> i) & 1) << 4;
      }
  }
}

// Writes `Bits` bits from bit `from` of 16 x 32 codes as fields of a plane: 8 / Bits groups of four columns per vector.
template <int Bits>
void put_fields(const uint8_t (*codes)[256], int column, int from, uint8_t* plane) {
  constexpr int kFields = 8 / Bits;
  constexpr uint32_t kMask = ((1u << Bits) - 1) * 0x01010101u;
  for (int v = 0; v < Bits; ++v)
    for (int r = 0; r < 16; ++r) {
      uint32_t w = 0;
      for (int j = 0; j < kFields; ++j)
        w |= ((word(codes[r] + column + (v * kFields + j) * 4) >> from) & kMask) << (j * Bits);
      put(plane + v * 64 + r * 4, w);
    }
}

// 256 columns: vector c < 8 has words 0..4 of chunk c, the others words 5..7 of all chunks in turn; a byte has five.
void put_trits(const uint8_t (*codes)[256], uint8_t* plane) {
  for (int v = 0; v < 13; ++v)
    for (int r = 0; r < 16; ++r)
      for (int t = 0; t < 4; ++t) {
        int number = 0;
        for (int i = 0; i < 5; ++i) {
          const int m = (v - 8) * 5 + i;  // of the words 5..7
          const int word = v < 8 ? v * 8 + i : m < 24 ? m / 3 * 8 + 5 + m % 3 : -1;
          number = number * 3 + (word < 0 ? 0 : codes[r][word * 4 + t]);
        }
        plane[v * 64 + r * 4 + t] = (number * 256 + 242) / 243;
      }
}

void put_codes(const Format& f, const uint8_t (*codes)[256], int column, uint8_t* low, uint8_t* high) {
  if (f.low == 8) {
    for (int c = 0; c < 8; ++c)
      for (int r = 0; r < 16; ++r) put(low + c * 64 + r * 4, word(codes[r] + column + c * 4));
  } else if (f.low == 4) {
    for (int c = 0; c < 4; ++c)
      for (int r = 0; r < 16; ++r) {
        const uint8_t* p = codes[r] + column + c * 4;
        put(low + c * 64 + r * 4, (word(p) & 0x0f0f0f0f) | ((word(p + 16) & 0x0f0f0f0f) << 4));
      }
  } else if (f.low == 1) {
    put_fields<1>(codes, column, 0, low);
  } else {
    put_fields<2>(codes, column, 0, low);
  }
  if (f.high == 1) put_fields<1>(codes, column, f.low, high);
  if (f.high == 2) put_fields<2>(codes, column, f.low, high);
}

// Scale bytes of one row and block: out[i * 16].
void put_scales(int type, const uint8_t* s, uint8_t* scales, uint8_t* mins) {
  if (type == Q4_K || type == Q5_K) {
    for (int i = 0; i < 4; ++i) {
      scales[i * 16] = s[i] & 63, mins[i * 16] = s[i + 4] & 63;
      scales[(i + 4) * 16] = (s[i + 8] & 15) | ((s[i] >> 2) & 48);
      mins[(i + 4) * 16] = (s[i + 8] >> 4) | ((s[i + 4] >> 2) & 48);
    }
  } else if (type == IQ4_XS) {  // pairs of high bits in two bytes, then nibbles
    for (int i = 0; i < 8; ++i)
      scales[i * 16] = ((s[2 + i / 2] >> 4 * (i % 2)) & 15) | (((s[i / 4] >> 2 * (i % 4)) & 3) << 4);
  } else {
    for (int i = 0; i < kFormats[type].scales; ++i) scales[i * 16] = s[i];
  }
}

// A row of FP8: its codes, then the scales that stand before each 128 of them in the file.
void pack_fp8_row(const uint8_t* blocks, int64_t cols, uint8_t* row) {
  for (int64_t b = 0; b < cols / 128; ++b, blocks += 132) {
    std::memcpy(row + cols + 4 * b, blocks, 4);
    std::memcpy(row + 128 * b, blocks + 4, 128);
  }
}

void pack_plain(int type, const uint8_t* from, int64_t row_bytes, int rows, int64_t cols, uint8_t* record) {
  const int64_t row = row_nbytes(type, cols);
  for (int i = 0; i < rows; ++i, from += row_bytes, record += row)
    if (type == FP8) pack_fp8_row(from, cols, record);
    else std::memcpy(record, from, row);
}

// Rows by their first blocks; null for a padding row.
void pack_planes(int type, const uint8_t* const rows[16], int64_t cols, uint8_t* record) {
  const Format& f = kFormats[type];
  const Planes p = planes_of(type, cols);
  const Source at = source_of(type);
  alignas(64) uint8_t codes[16][256];
  alignas(64) static const uint8_t zeros[256] = {};
  std::memset(record, 0, p.record);  // the padding between planes too: packing is reproducible byte for byte
  if (is_book(type)) return pack_book_record(type, rows, cols, p, record);
  if (type == NVFP4)
    for (int r = 0; r < 16; ++r) put(record + p.d + r * 4, 0x3f800000);  // 1: a factor that a file has comes later
  for (int64_t b = 0; b < cols / f.block; ++b) {
    for (int r = 0; r < 16; ++r) {
      const uint8_t* block = rows[r] ? rows[r] + b * f.nbytes : zeros;
      unpack_codes(type, block, at, codes[r]);
      if (f.scales)
        put_scales(type, block + at.scales, record + p.scales + b * 16 * f.scales + r,
                   record + p.mins + b * 16 * f.mins + r);
      if (f.halves > 0) std::memcpy(record + p.d + b * 32 + r * 2, block + at.d, 2);
      if (f.halves > 1) std::memcpy(record + p.dmin + b * 32 + r * 2, block + at.dmin, 2);
    }
    if (type == TQ1_0) {
      put_trits(codes, record + p.low + b * kTritBlock);
      continue;
    }
    for (int j = 0; j < f.block / 32; ++j) {
      const int64_t chunk = b * (f.block / 32) + j;
      put_codes(f, codes, j * 32, record + p.low + chunk * 64 * f.low, record + p.high + chunk * 64 * f.high);
    }
  }
}

}  // namespace

void pack_record(int type, const uint8_t* from, int64_t row_bytes, int rows, int64_t cols, uint8_t* record) {
  if (is_plain(type)) return pack_plain(type, from, row_bytes, rows, cols, record);
  const uint8_t* sources[16] = {};
  for (int i = 0; i < rows; ++i) sources[i] = from + i * row_bytes;
  pack_planes(type, sources, cols, record);
}

}  // namespace pshard
