// Types with a codebook: an index stands for four or eight weights. The books are given when the library is loaded.
#pragma once

#include "packing/format.h"

namespace pshard {

inline constexpr int kBooks = IQ1_M - IQ3_S + 1, kBookWords = 4096;

// 64 plus what an index stands for, four columns a word: one word an entry, or two.
inline uint32_t books[kBooks][kBookWords];

inline const uint32_t* book_of(int type) { return books[type - IQ3_S]; }

void pack_book_record(int type, const uint8_t* const rows[16], int64_t cols, const Planes& p, uint8_t* record);

}  // namespace pshard
