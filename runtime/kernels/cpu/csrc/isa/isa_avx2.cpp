// The kernels compiled for AVX2 with FMA and F16C. Everything is in an anonymous namespace, so that no function built for this
// instruction set can be linked into code that runs without it.
#include "isa/hidden_sets.h"
#include "kernels.h"
#include "packing/books.h"

#if defined(__x86_64__)
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

namespace pshard {
namespace {
#include "simd_avx2.h"
#include "packing/decode.h"
#include "packing/decode_books.h"
#include "products/quant_kernels.h"
#include "products/dense_kernels.h"
#include "attention/attention_kernel.h"
#include "attention/index_kernel.h"
#include "delta/delta_kernel.h"
#include "isa_table.h"
}  // namespace
}  // namespace pshard

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pshard {
namespace {
bool has_vectors() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         !is_hidden("avx2");
}
}  // namespace

const Kernels* kernels_avx2() {
  static const bool usable = has_vectors();
  if (!usable) return nullptr;  // before the table: it too is written with AVX2
  static const Kernels kernels = make_kernels("avx2");
  return &kernels;
}
}  // namespace pshard
#else
namespace pshard {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace pshard
#endif
