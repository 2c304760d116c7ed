// Tile products compiled for AMX with bf16, and the same blocking over loops. Compilers without AMX leave both out.
#include "products/tiles.h"

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "isa/hidden_sets.h"
#include "kernels.h"
#include "packing/books.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16," \
                                                   "avx2,fma,f16c,amx-tile,amx-bf16"))),                       \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
#endif
#include <immintrin.h>

namespace pshard {
namespace {
#include "simd_avx512.h"
#include "packing/decode.h"
#include "packing/decode_books.h"
#include "products/dense_kernels.h"
#include "products/tile_weights.h"
#include "products/tile_gemm.h"
#include "attention/attention_kernel.h"
#include "attention/attention_tiles.h"

// The intrinsics want tile numbers as literals.
struct AmxUnit {
  template <int Tile>
  inline void clear() {
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
  }
  template <int Tile>
  inline void load(const void* p) {
    if constexpr (Tile == 0) _tile_loadd(0, p, 64);
    if constexpr (Tile == 1) _tile_loadd(1, p, 64);
    if constexpr (Tile == 2) _tile_loadd(2, p, 64);
    if constexpr (Tile == 3) _tile_loadd(3, p, 64);
    if constexpr (Tile == 4) _tile_loadd(4, p, 64);
    if constexpr (Tile == 5) _tile_loadd(5, p, 64);
    if constexpr (Tile == 6) _tile_loadd(6, p, 64);
    if constexpr (Tile == 7) _tile_loadd(7, p, 64);
  }
  template <int Tile>
  inline void store(float* p) {
    if constexpr (Tile == 0) _tile_stored(0, p, 64);
    if constexpr (Tile == 1) _tile_stored(1, p, 64);
    if constexpr (Tile == 2) _tile_stored(2, p, 64);
    if constexpr (Tile == 3) _tile_stored(3, p, 64);
  }
  template <int Sum, int Act, int Weight>
  inline void multiply() {
    if constexpr (Sum == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (Sum == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Sum == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Sum == 3) _tile_dpbf16ps(3, 5, 7);
  }
};

// Eight tiles of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
void enter_amx() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}
void leave_amx() { _tile_release(); }
void nothing() {}

struct EmulatedUnit {
  alignas(64) uint32_t tiles[8][256];
  template <int Tile>
  inline void clear() {
    std::memset(tiles[Tile], 0, 1024);
  }
  template <int Tile>
  inline void load(const void* p) {
    std::memcpy(tiles[Tile], p, 1024);
  }
  template <int Tile>
  inline void store(float* p) {
    std::memcpy(p, tiles[Tile], 1024);
  }
  static inline float low(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
  static inline float high(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000u); }
  template <int Sum, int Act, int Weight>
  inline void multiply() {
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 16; ++k) {
        const uint32_t a = tiles[Act][m * 16 + k];
        for (int n = 0; n < 16; ++n) {
          const uint32_t w = tiles[Weight][k * 16 + n];
          float sum = __builtin_bit_cast(float, tiles[Sum][m * 16 + n]);
          sum += low(a) * low(w);
          sum += high(a) * high(w);
          tiles[Sum][m * 16 + n] = __builtin_bit_cast(uint32_t, sum);
        }
      }
  }
};

struct AmxAttention {
  static constexpr int kFetches = 1;
  // Compilers do not know that loading a tile reads memory: what was stored before is to be there.
  static inline void finish_stores() { asm volatile("" ::: "memory"); }
  static void rows(const uint16_t* keys, int64_t stride, const uint16_t* queries, int64_t chunks, Ahead& ahead,
                   float* sums) {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < chunks; ++i, keys += 32, queries += kTileWords) {
      _tile_loadd(6, queries, 64);
      _tile_loadd(4, keys, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      ahead.fetch();
      _tile_loadd(5, keys + 16 * stride, stride * 2);
      _tile_dpbf16ps(1, 5, 6);
      ahead.fetch();
      _tile_loadd(4, keys + 32 * stride, stride * 2);
      _tile_dpbf16ps(2, 4, 6);
      ahead.fetch();
      _tile_loadd(5, keys + 48 * stride, stride * 2);
      _tile_dpbf16ps(3, 5, 6);
      ahead.fetch();
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileSums, 64);
    _tile_stored(2, sums + 2 * kTileSums, 64);
    _tile_stored(3, sums + 3 * kTileSums, 64);
  }
  static void columns(const uint32_t* weights, const uint16_t* values, int tiles, Ahead& ahead, float* sums) {
    finish_stores();
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + 256, 64);
    for (int tile = 0; tile < tiles; tile += 2, values += 4 * kTileWords, sums += 2 * kTileSums) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(6, values, 64);
      _tile_dpbf16ps(0, 4, 6);
      ahead.fetch();
      _tile_loadd(7, values + 2 * kTileWords, 64);
      _tile_dpbf16ps(1, 4, 7);
      ahead.fetch();
      _tile_loadd(6, values + kTileWords, 64);
      _tile_dpbf16ps(0, 5, 6);
      ahead.fetch();
      _tile_loadd(7, values + 3 * kTileWords, 64);
      _tile_dpbf16ps(1, 5, 7);
      ahead.fetch();
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + kTileSums, 64);
    }
  }
};

// The same products with vectors, 32 numbers at a time: for processors with bf16 and without tiles.
struct VectorAttention {
  static constexpr int kFetches = 16;
  // sums[m][16] += the pairs in row m of a, `stride` words apart, times 16 rows of b.
  static inline void add_chunk(const uint32_t* a, int64_t stride, const uint16_t* b, Ahead& ahead, Floats sums[16]) {
    const int64_t three = 3 * stride;
    for (int k = 0; k < 16; ++k, ++a, b += 32) {
      ahead.fetch();
      const auto row = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
      const uint32_t* from = a;
#pragma GCC unroll 4
      for (int m = 0; m < 16; m += 4, from += stride * 4) {
        add_pair(sums[m], from[0], row), add_pair(sums[m + 1], from[stride], row);
        add_pair(sums[m + 2], from[2 * stride], row), add_pair(sums[m + 3], from[three], row);
      }
    }
  }
  static inline void add_pair(Floats& sum, uint32_t pair, __m512bh row) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair))), row);
  }
  static void rows(const uint16_t* keys, int64_t stride, const uint16_t* queries, int64_t chunks, Ahead& ahead,
                   float* sums) {
    for (int tile = 0; tile < 4; ++tile, keys += 16 * stride, sums += kTileSums) {
      Floats rows[16];
      for (auto& row : rows) row = zero();
      for (int64_t i = 0; i < chunks; ++i)
        add_chunk(reinterpret_cast<const uint32_t*>(keys + i * 32), stride / 2, queries + i * kTileWords, ahead, rows);
      for (int m = 0; m < 16; ++m) store(sums + m * 16, rows[m]);
    }
  }
  static void columns(const uint32_t* weights, const uint16_t* values, int tiles, Ahead& ahead, float* sums) {
    for (int tile = 0; tile < tiles; ++tile, sums += kTileSums) {
      Floats rows[16];
      for (auto& row : rows) row = zero();
      for (int i = 0; i < 2; ++i, values += kTileWords) add_chunk(weights + 256 * i, 16, values, ahead, rows);
      for (int m = 0; m < 16; ++m) store(sums + m * 16, rows[m]);
    }
  }
};

bool has_bf16_vectors() {
  unsigned a, b, c, d;
  if (is_hidden("avx512_bf16")) return false;
  return __builtin_cpu_supports("avx512vnni") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// The processor has the tiles, and the kernel lets this process (all threads) use them.
bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (is_hidden("amx")) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
}  // namespace
}  // namespace pshard

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pshard {
const TileKernels* tiles_amx() {
  static const bool usable = kernels_avx512() && has_bf16_vectors() && may_use_amx();
  static const TileKernels kernels{"amx", enter_amx, leave_amx, convert_tokens, multiply_panel<AmxUnit>};
  return usable ? &kernels : nullptr;
}
const TileAttention* attention_tiles() {
  static const TileAttention amx{enter_amx, leave_amx, attend_tiles<AmxAttention>};
  static const TileAttention vectors{nothing, nothing, attend_tiles<VectorAttention>};
  static const bool usable = kernels_avx512() && has_bf16_vectors();
  return tiles_amx() ? &amx : usable ? &vectors : nullptr;
}
const TileKernels* tiles_emulated() {
  static const bool usable = kernels_avx512() && has_bf16_vectors();
  static const TileKernels kernels{"emulated", nothing, nothing, convert_tokens, multiply_panel<EmulatedUnit>};
  return usable ? &kernels : nullptr;
}
}  // namespace pshard
#else
namespace pshard {
const TileKernels* tiles_amx() { return nullptr; }
const TileKernels* tiles_emulated() { return nullptr; }
const TileAttention* attention_tiles() { return nullptr; }
}  // namespace pshard
#endif
