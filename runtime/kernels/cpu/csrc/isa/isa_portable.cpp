// The kernels in plain C++, for processors without AVX2.
#include "kernels.h"

#include <cstring>
#include <initializer_list>
#include <type_traits>

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
