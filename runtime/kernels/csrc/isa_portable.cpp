// The kernels in plain C++, for processors without AVX2.
#include "kernels.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")  // a third of the time to compile, and no slower
#endif

namespace pshard {
namespace {
#include "simd_portable.h"
#include "decode.h"
#include "quant_kernels.h"
#include "dense_kernels.h"
#include "attention_kernel.h"
#include "isa_table.h"
}  // namespace

const Kernels* kernels_portable() {
  static const Kernels kernels = make_kernels("portable");
  return &kernels;
}
}  // namespace pshard
