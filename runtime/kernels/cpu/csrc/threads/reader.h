// What other parts of the library ask of the reader (reader.cpp).
#pragma once

#include "calls.h"

namespace pshard {
constexpr int64_t kPieceBytes = 12 * sizeof(int64_t);  // of a piece as runtime/memory/disk/reader.py writes it
}

PSHARD_API int64_t pshard_reader_ask(void* reader, void* pieces, int64_t count, void* to);
PSHARD_API void pshard_reader_wait(void* reader, int64_t number);
