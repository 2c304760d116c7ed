// The kernels compiled for AVX-512 with VNNI. Everything is in an anonymous namespace, so that no function built for this
// instruction set can be linked into code that runs without it.
#include "isa/hidden_sets.h"
#include "kernels.h"
#include "packing/books.h"

#if defined(__x86_64__)
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
#include <immintrin.h>

namespace pshard {
namespace {
#include "simd_avx512.h"
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
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && !is_hidden("avx512");
}
}  // namespace

const Kernels* kernels_avx512() {
  static const bool usable = has_vectors();
  if (!usable) return nullptr;  // before the table: it too is written with AVX-512
  static const Kernels kernels = [] {
    Kernels k = make_kernels("avx512_vnni");
    use_byte_tables(k);
    return k;
  }();
  return &kernels;
}
}  // namespace pshard
#else
namespace pshard {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace pshard
#endif
