// Types with a codebook compiled for AVX-512 with VBMI, whose registers are tables of bytes.
#include "isa/hidden_sets.h"
#include "kernels.h"
#include "packing/books.h"

#if defined(__x86_64__)
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(                                                                              \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")
#endif
#include <immintrin.h>

namespace pshard {
namespace {
#include "simd_avx512.h"
#include "packing/decode.h"
#include "packing/decode_books.h"
#include "packing/decode_tables.h"
#include "products/quant_kernels.h"

template <class... Books>
void set_books(Kernels& k) {
  ((k.linear[Books::kType] = linear_quant<ByteTables<Books>>), ...);
  ((k.dequantize[Books::kType] = dequantize_quant<ByteTables<Books>>), ...);
}
}  // namespace
}  // namespace pshard

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pshard {
void use_byte_tables(Kernels& k) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vbmi") && !is_hidden("avx512_vbmi"))
    set_books<Book4<IQ3_S, 1>, Book4<IQ3_XXS, 4>, Book8<IQ2_S, 2>, Book8<IQ2_XS, 2>, Book8<IQ2_XXS, 1>>(k);
}
}  // namespace pshard
#else
namespace pshard {
void use_byte_tables(Kernels&) {}
}  // namespace pshard
#endif
