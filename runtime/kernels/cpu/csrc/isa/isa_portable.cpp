// The kernels in plain C++, for processors without AVX2.
#include "half.h"
#include "kernels.h"
#include "packing/books.h"

#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace pshard {
namespace {
#include "simd_portable.h"
#include "packing/decode.h"
#include "packing/decode_books.h"
#include "products/quant_kernels.h"
#include "products/dense_kernels.h"
#include "attention/attention_kernel.h"
#include "attention/index_kernel.h"
#include "delta/delta_kernel.h"
#include "isa_table.h"
}  // namespace

const Kernels* kernels_portable() {
  static const Kernels kernels = make_kernels("portable");
  return &kernels;
}
}  // namespace pshard
