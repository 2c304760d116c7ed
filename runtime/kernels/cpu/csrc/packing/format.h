// Quant types and where their planes lie in a record (docs/packed-layout.md; sizes as in pshard/quant.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pshard {

enum Type : int {
  F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
  IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M, NVFP4, Q1_0, Q2_0, TQ1_0, TQ2_0, FP8, kTypes
};

struct Format {
  const char* name;
  int block;      // weights of a block in the file
  int nbytes;     // bytes of a block in the file
  int low, high;  // bits of a code in the first and in the second code plane
  int scales;     // bytes per row of the scales plane, for each block
  int mins;       // the same for the mins plane
  int halves;     // f16 numbers per row and block: d, and m or dmin
  int offset;     // what the kernels subtract from the unsigned code that they compute with
};

inline constexpr Format kFormats[kTypes] = {
    {"F32", 1, 4, 0, 0, 0, 0, 0, 0},      {"F16", 1, 2, 0, 0, 0, 0, 0, 0},        {"BF16", 1, 2, 0, 0, 0, 0, 0, 0},
    {"Q4_0", 32, 18, 4, 0, 0, 0, 1, 8},   {"Q4_1", 32, 20, 4, 0, 0, 0, 2, 0},     {"Q5_0", 32, 22, 4, 1, 0, 0, 1, 16},
    {"Q5_1", 32, 24, 4, 1, 0, 0, 2, 0},   {"Q8_0", 32, 34, 8, 0, 0, 0, 1, 128},   {"MXFP4", 32, 17, 4, 0, 1, 0, 0, 12},
    {"Q2_K", 256, 84, 2, 0, 16, 0, 2, 0}, {"Q3_K", 256, 110, 2, 1, 12, 0, 1, 4},  {"Q4_K", 256, 144, 4, 0, 8, 8, 2, 0},
    {"Q5_K", 256, 176, 4, 1, 8, 8, 2, 0}, {"Q6_K", 256, 210, 4, 2, 16, 0, 1, 32}, {"IQ4_NL", 32, 18, 4, 0, 0, 0, 1, 128},
    {"IQ4_XS", 256, 136, 4, 0, 8, 0, 1, 128},
    // with a codebook: the low plane is the indices' bytes, the high one signs, mins the indices' high bits
    {"IQ3_S", 256, 110, 2, 1, 4, 8, 1, 64},   {"IQ3_XXS", 256, 98, 2, 1, 0, 0, 1, 64},
    {"IQ2_S", 256, 82, 1, 1, 8, 8, 1, 64},    {"IQ2_XS", 256, 74, 1, 1, 8, 0, 1, 64},
    {"IQ2_XXS", 256, 66, 1, 1, 0, 0, 1, 64},  {"IQ1_S", 256, 50, 1, 0, 0, 16, 1, 64},
    {"IQ1_M", 256, 56, 1, 0, 6, 16, 1, 64},   {"NVFP4", 64, 36, 4, 0, 4, 0, 0, 12},
    {"Q1_0", 128, 18, 1, 0, 0, 0, 1, 1},      {"Q2_0", 64, 18, 2, 0, 0, 0, 1, 1},
    {"TQ1_0", 256, 54, 1, 0, 0, 0, 1, 1},     {"TQ2_0", 256, 66, 2, 0, 0, 0, 1, 1},
    {"FP8", 128, 132, 0, 0, 0, 0, 0, 0},  // plain rows of codes, each followed by its scales
};

inline constexpr int kTritBlock = 13 * 64;  // bytes of 256 columns in TQ1_0's code plane, of five digits each

constexpr bool is_book(int type) { return type >= IQ3_S && type <= IQ1_M; }

// Byte offsets of the planes in one record of 16 rows, and the record's size.
struct Planes {
  size_t low, high, scales, mins, d, dmin, record;
};

inline Planes planes_of(int type, int64_t cols) {
  const Format& f = kFormats[type];
  const size_t blocks = cols / f.block;
  Planes p{};
  size_t at = 0;
  auto place = [&at](size_t nbytes) {
    const size_t here = at;
    at += (nbytes + 63) / 64 * 64;
    return here;
  };
  p.low = place(type == TQ1_0 ? blocks * kTritBlock : cols * 2 * f.low);
  p.high = place(cols * 2 * f.high);
  p.scales = place(blocks * 16 * f.scales);
  p.mins = place(blocks * 16 * f.mins);
  p.d = place(type == NVFP4 ? 64 : f.halves > 0 ? blocks * 32 : 0);  // NVFP4: a float32 factor for each row
  p.dmin = place(f.halves > 1 ? blocks * 32 : 0);
  p.record = at;
  return p;
}

// Bytes of one chunk (32 columns of 16 rows) over all planes.
constexpr int chunk_nbytes(int type) {
  const Format& f = kFormats[type];
  if (type == TQ1_0) return kTritBlock / 8 + 4;
  return 64 * (f.low + f.high) + 16 * (f.scales + f.mins + 2 * f.halves) * 32 / f.block;
}

// Bytes of n consecutive weights of a row in the file, or of n numbers of a KV cell.
inline int64_t row_nbytes(int type, int64_t n) { return n / kFormats[type].block * kFormats[type].nbytes; }

inline bool is_plain(int type) { return kFormats[type].low == 0; }

}  // namespace pshard
