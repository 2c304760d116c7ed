// From the rows of a model file to records of the packed layout (docs/packed-layout.md).
#pragma once

#include "format.h"

namespace pshard {

// Packs one record: rows[r] points to the first block of row r, or is null for a padding row.
void pack_record(int type, const uint8_t* const rows[16], int64_t cols, uint8_t* record);

}  // namespace pshard
