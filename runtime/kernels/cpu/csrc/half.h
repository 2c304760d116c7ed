// Single numbers to and from float16, on any processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace pshard {

// To nearest even, as torch rounds.
static inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // denormal: adding 0.5 leaves the code in the low bits, rounded
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    uint32_t code;
    std::memcpy(&code, &shifted, 4);
    return static_cast<uint16_t>(sign | (code - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

static inline float from_f16(uint16_t h) {  // finite
  const uint32_t bits = (h & 0x7fffu) << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  x *= 0x1p112f;
  return h & 0x8000 ? -x : x;
}

}  // namespace pshard
