// From the rows of a model file to records of the packed layout (docs/packed-layout.md).
#pragma once

#include <cstring>

#include "format.h"

namespace pshard {

// Packs one record: rows[r] points to the first block of row r, or is null for a padding row.
void pack_record(int type, const uint8_t* const rows[16], int64_t cols, uint8_t* record);

// Packs a row of FP8: its codes, then the scales that stand before each 128 of them in the file.
inline void pack_fp8_row(const uint8_t* blocks, int64_t cols, uint8_t* row) {
  for (int64_t b = 0; b < cols / 128; ++b, blocks += 132) {
    std::memcpy(row + cols + 4 * b, blocks, 4);
    std::memcpy(row + 128 * b, blocks + 4, 128);
  }
}

}  // namespace pshard
