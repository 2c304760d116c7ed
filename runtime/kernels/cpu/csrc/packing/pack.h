// From the rows of a model file to records of the packed layout (docs/packed-layout.md).
#pragma once

#include "format.h"

namespace pshard {

// Packs one record of `rows` rows, 16 at most, the first blocks of which are at `from` and each row_bytes later.
void pack_record(int type, const uint8_t* from, int64_t row_bytes, int rows, int64_t cols, uint8_t* record);

}  // namespace pshard
