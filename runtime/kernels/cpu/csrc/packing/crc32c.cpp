// With the processor's instruction where there is one, else eight bytes at a time by tables.
#include "packing/crc32c.h"

#include <array>
#include <cstring>

#include "driver.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace pshard {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Row i: of a byte that i others follow.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (int i = 1; i < 8; ++i)
    for (int byte = 0; byte < 256; ++byte)
      tables[i][byte] = tables[i - 1][byte] >> 8 ^ tables[0][tables[i - 1][byte] & 255];
  return tables;
}
constexpr Tables kTables = make_tables();

uint64_t read_word(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

uint32_t add_by_tables(const uint8_t* data, int64_t nbytes, uint32_t crc) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    const uint64_t word = read_word(data) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= kTables[7 - i][word >> 8 * i & 255];
  }
  for (; nbytes > 0; ++data, --nbytes) crc = crc >> 8 ^ kTables[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t add_by_instruction(const uint8_t* data, int64_t nbytes, uint32_t crc) {
  uint64_t wide = crc;
  for (; nbytes >= 8; data += 8, nbytes -= 8) wide = _mm_crc32_u64(wide, read_word(data));
  return add_by_tables(data, nbytes, static_cast<uint32_t>(wide));
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__ARM_FEATURE_CRC32)
uint32_t add_by_instruction(const uint8_t* data, int64_t nbytes, uint32_t crc) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = __crc32cd(crc, read_word(data));
  return add_by_tables(data, nbytes, crc);
}
bool has_instruction() { return true; }
#else
uint32_t add_by_instruction(const uint8_t* data, int64_t nbytes, uint32_t crc) { return add_by_tables(data, nbytes, crc); }
bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(const uint8_t* data, int64_t nbytes, uint32_t before) {
  static const bool fast = has_instruction();
  return ~(fast ? add_by_instruction : add_by_tables)(data, nbytes, ~before);
}

}  // namespace pshard

using namespace pshard;

// plain: by tables, whatever the processor has.
PSHARD_API uint32_t pshard_crc32c(const void* data, int64_t nbytes, int plain) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  return plain ? ~add_by_tables(bytes, nbytes, ~0u) : crc32c(bytes, nbytes);
}
