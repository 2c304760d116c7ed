// Types with a codebook: an index stands for four or eight weights. The books are given when the library is loaded.
#pragma once

#include "packing/format.h"

namespace pshard {

inline constexpr int kBooks = IQ1_M - IQ3_S + 1, kBookWords = 4096, kBookEntries = 2048;

// 64 plus what an index stands for, four columns a word: one word an entry, or two.
inline uint32_t books[kBooks][kBookWords];

inline const uint32_t* book_of(int type) { return books[type - IQ3_S]; }

// The same in a word an entry: a nibble names which of the book's few numbers a column has, or two columns have.
struct LevelBook {
  uint32_t words[kBookEntries];  // byte t: column t's in bits 0 and up; of eight columns column 4 + t's in bits 2 and 3
  alignas(64) uint8_t even[kBookEntries];  // byte 0 of a word, and byte 2 in the high nibble
  alignas(64) uint8_t odd[kBookEntries];   // bytes 1 and 3
  // Codes of a nibble whose bit 3 is column t's sign, or of IQ1 whether 1 is subtracted; and, of eight columns, whose
  // bit 0 is column 4 + t's.
  alignas(16) uint8_t first[16], second[16];
};
inline LevelBook level_books[kBooks];

inline const LevelBook& levels_of(int type) { return level_books[type - IQ3_S]; }

void set_book(int type, const int8_t* values, int64_t count);  // `count` numbers, four columns a word

void pack_book_record(int type, const uint8_t* const rows[16], int64_t cols, const Planes& p, uint8_t* record);

}  // namespace pshard
