// CRC32C (Castagnoli, RFC 3720): the checksum of packed files.
#pragma once

#include <cstdint>

namespace pshard {

// Of bytes behind others whose checksum is `before`.
uint32_t crc32c(const uint8_t* data, int64_t nbytes, uint32_t before = 0);

}  // namespace pshard
