// What happens to rows of activations between the products: RMS norm, rotating q and k and storing k and v, biases,
// gates, and temperatures.
#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"
#include "rows.h"

namespace pshard {
namespace {

// To nearest even, as torch rounds.
uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// One head's numbers into a cell of `heads` heads (runtime/kernels/kv_codec.py).
void store_head(const float* x, int type, int head, int heads, int d, char* cell) {
  const int64_t at = static_cast<int64_t>(head) * d;
  if (type == F32) {
    std::memcpy(cell + 4 * at, x, 4 * d);
  } else if (type == BF16 || type == F16) {
    auto* to = reinterpret_cast<uint16_t*>(cell) + at;
    for (int i = 0; i < d; ++i) to[i] = type == BF16 ? to_bf16(x[i]) : to_f16(x[i]);
  } else if (type == Q4_0) {  // codes of all heads, two a byte, then an f16 scale for every 32 of them
    auto* codes = reinterpret_cast<uint8_t*>(cell) + at / 2;
    auto* scales = reinterpret_cast<uint16_t*>(cell + static_cast<int64_t>(heads) * d / 2) + at / 32;
    for (int block = 0; block < d / 32; ++block, x += 32, codes += 16) {
      const float high = *std::max_element(x, x + 32), low = *std::min_element(x, x + 32);
      scales[block] = to_f16((high >= -low ? high : low) / -8);
      const float scale = from_f16(scales[block]);
      for (int i = 0; i < 32; i += 2) {
        const auto code_of = [&](float v) {
          const float code = scale != 0 ? std::nearbyint(v / scale) : 0.0f;
          return static_cast<int>(std::min(7.0f, std::max(-8.0f, code))) + 8;
        };
        codes[i / 2] = static_cast<uint8_t>(code_of(x[i]) | code_of(x[i + 1]) << 4);
      }
    }
  } else {  // Q8_0: codes of all heads, then an f16 scale for every 32 of them
    auto* codes = reinterpret_cast<int8_t*>(cell) + at;
    auto* scales = reinterpret_cast<uint16_t*>(cell + static_cast<int64_t>(heads) * d) + at / 32;
    for (int block = 0; block < d / 32; ++block, x += 32, codes += 32) {
      float most = 0;
      for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(x[i]));
      scales[block] = to_f16(most / 127);
      const float scale = from_f16(scales[block]);
      for (int i = 0; i < 32; ++i) {
        const float code = scale > 0 ? std::nearbyint(x[i] / scale) : 0.0f;
        codes[i] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, code)));
      }
    }
  }
}

enum Bend : int { kTimes, kPlus, kClamp, kRelu2, kBentGelu, kBentGelu16, kXielu, kOrder };  // as BENDS of operations.py

// A row through a gate that multiplies nothing.
void bend_by(void (*gate)(float*, const float*, int64_t), float* row, int64_t width) {
  alignas(64) float ones[16], rest[16] = {};
  std::fill(ones, ones + 16, 1.0f);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) gate(row + i, ones, 16);
  std::memcpy(rest, row + i, (width - i) * sizeof(float));
  gate(rest, ones, 16);
  std::memcpy(row + i, rest, (width - i) * sizeof(float));
}

// A gate's row and an up's, of any width, into what the product with down takes: see bend_gate.
void gate_row(int kind, float* row, const float* up, int64_t width) {
  const int64_t whole = width / 16 * 16, left = (width - whole) * sizeof(float);
  alignas(64) float rest[16] = {}, others[16] = {};
  bend_gate(kernels(), kind, row, up, whole);
  if (!left) return;
  std::memcpy(rest, row + whole, left);
  std::memcpy(others, up + whole, left);
  bend_gate(kernels(), kind, rest, others, 16);
  std::memcpy(row + whole, rest, left);
}

// Number i of a row becomes what number order[i] was.
void order_rows(float* x, int64_t stride, int64_t tokens, int64_t width, const float* order) {
  Pool::instance().with_scratch(tokens * width * sizeof(float), [&](uint8_t* scratch) {
    auto* before = reinterpret_cast<float*>(scratch);
    for_rows(tokens, width, [&](int64_t t) { std::memcpy(before + t * width, x + t * stride, width * sizeof(float)); });
    for_rows(tokens, width, [&](int64_t t) {
      for (int64_t i = 0; i < width; ++i) x[t * stride + i] = before[t * width + static_cast<int64_t>(order[i])];
    });
  });
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t tokens,
                                int64_t width, float* out, int64_t out_stride, int accumulate,
                                const float* scale) {
  if (!accumulate) {
    for_rows(tokens, width, [&](int64_t t) { normalise(x + t * x_stride, weight, width, eps, out + t * out_stride); });
    return;
  }
  for_rows_in_place(out, out_stride, tokens, width, [&](int64_t t) {
    const float *from = x + t * x_stride, factor = rms_factor(from, width, eps);
    float* to = out + t * out_stride;
    for (int64_t i = 0; i < width; ++i) to[i] += from[i] * factor * weight[i];
    if (scale)
      for (int64_t i = 0; i < width; ++i) to[i] *= *scale;
  });
}

// x[t] += bias
PSHARD_API void pshard_add_bias(float* x, int64_t stride, int64_t tokens, int64_t width, const float* bias) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    for (int64_t i = 0; i < width; ++i) row[i] += bias[i];
  });
}

// x[t] *= table[position[t]]
PSHARD_API void pshard_warm_rows(float* x, int64_t stride, int64_t tokens, int64_t width, const float* table,
                                 const int32_t* position) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float *row = x + t * stride, factor = table[position[t]];
    for (int64_t i = 0; i < width; ++i) row[i] *= factor;
  });
}

// x[t] -= mean(x[t])
PSHARD_API void pshard_centre_rows(float* x, int64_t stride, int64_t tokens, int64_t width) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    float sums[16] = {};
    for (int64_t i = 0; i < width; ++i) sums[i % 16] += row[i];
    double total = 0;
    for (const float s : sums) total += s;
    const float mean = static_cast<float>(total / width);
    for (int64_t i = 0; i < width; ++i) row[i] -= mean;
  });
}

// x[t] = bent x[t], `how`: a Bend. numbers: of column i number i % count.
PSHARD_API void pshard_bend_rows(float* x, int64_t stride, int64_t tokens, int64_t width, int how,
                                 const float* numbers, int64_t count, float limit) {
  if (how == kOrder) return order_rows(x, stride, tokens, width, numbers);
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    switch (how) {
      case kTimes:
        for (int64_t i = 0; i < width; i += count)
          for (int64_t j = 0; j < std::min(count, width - i); ++j) row[i + j] *= numbers[j];
        break;
      case kPlus:
        for (int64_t i = 0; i < width; i += count)
          for (int64_t j = 0; j < std::min(count, width - i); ++j) row[i + j] += numbers[j];
        break;
      case kClamp:
        for (int64_t i = 0; i < width; ++i) row[i] = std::min(std::max(row[i], -limit), limit);
        break;
      case kRelu2:
        for (int64_t i = 0; i < width; ++i) row[i] = row[i] > 0 ? row[i] * row[i] : 0.0f;
        break;
      case kBentGelu:
        bend_by(kernels().gelu_mul, row, width);
        break;
      case kBentGelu16:
        bend_by(kernels().gelu16_mul, row, width);
        break;
      default:  // kXielu
        for (int64_t i = 0; i < width; ++i) {
          const float g = row[i], above = numbers[0] * g * g, below = std::expm1(std::min(g, numbers[3])) - g;
          row[i] = (g > 0 ? above : numbers[1] * below) + numbers[2] * g;
        }
    }
  });
}

// Each head of x[t], `head` numbers, over its root mean square, or its standard deviation and less its mean, * weight.
PSHARD_API void pshard_norm_heads(float* x, int64_t stride, int64_t tokens, int64_t width, const float* weight,
                                  int64_t head, float eps, int centred) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    for (int64_t at = 0; at < width; at += head) {
      float* row = x + t * stride + at;
      double total = 0;
      for (int64_t i = 0; centred && i < head; ++i) total += row[i];
      const float mean = static_cast<float>(total / head);
      for (int64_t i = 0; i < head; ++i) row[i] -= mean;
      const float factor = rms_factor(row, head, eps);
      for (int64_t i = 0; i < head; ++i) row[i] *= factor * weight[at + i];
    }
  });
}

// out[t] = the squares of the first `first` numbers of x[t] added up, and those of the rest
PSHARD_API void pshard_sum_squares(const float* x, int64_t stride, int64_t tokens, int64_t width, int64_t first,
                                   float* out) {
  for_rows(tokens, width, [&](int64_t t) {
    const float* row = x + t * stride;
    out[2 * t] = static_cast<float>(sum_squares(row, first));
    out[2 * t + 1] = static_cast<float>(sum_squares(row + first, width - first));
  });
}

// Either part of x[t] over the root mean square that sums[t] has, of so many numbers, of which it may be some; * weight.
PSHARD_API void pshard_norm_wide(float* x, int64_t stride, int64_t tokens, int64_t first, int64_t rest,
                                 const float* first_norm, const float* rest_norm, const float* sums, int64_t first_of,
                                 int64_t rest_of, float eps) {
  for_rows_in_place(x, stride, tokens, first + rest, [&](int64_t t) {
    float* row = x + t * stride;
    const float q = rms_factor(sums[2 * t], first_of, eps), k = rms_factor(sums[2 * t + 1], rest_of, eps);
    for (int64_t i = 0; i < first; ++i) row[i] *= q * first_norm[i];
    for (int64_t i = 0; i < rest; ++i) row[first + i] *= k * rest_norm[i];
  });
}

// x[t] *= curve(gate[t]), a sigmoid or a softplus; `each` columns of x in a row share a number of the gate.
PSHARD_API void pshard_gate_rows(float* x, int64_t stride, const float* gate, int64_t gate_stride, int64_t tokens,
                                 int64_t width, int64_t each, int softplus) {
  const int64_t whole = width / 16 * 16;
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    const float* own = gate + t * gate_stride;
    if (softplus || each > 1) {
      for (int64_t at = 0; at < width; at += each) {
        const float g = own[at / each];
        const float by = softplus ? std::max(g, 0.f) + std::log1p(std::exp(-std::fabs(g))) : sigmoid(g);
        for (int64_t i = at; i < at + each; ++i) row[i] *= by;
      }
      return;
    }
    kernels().sigmoid_mul(row, own, whole);
    for (int64_t i = whole; i < width; ++i) row[i] *= sigmoid(own[i]);
  });
}

// out[t] = act(x[t]) * up[t], see bend_gate; out may be x
PSHARD_API void pshard_gate_mul(const float* x, int64_t stride, const float* up, int64_t up_stride, int64_t tokens,
                                int64_t width, int gate_kind, float* out, int64_t out_stride) {
  if (out != x)
    for_rows(tokens, width, [&](int64_t t) { std::copy_n(x + t * stride, width, out + t * out_stride); });
  for_rows_in_place(out, out_stride, tokens, width,
                    [&](int64_t t) { gate_row(gate_kind, out + t * out_stride, up + t * up_stride, width); });
}

// out[t] = x[t]
PSHARD_API void pshard_copy_rows(const float* x, int64_t stride, float* out, int64_t out_stride, int64_t tokens,
                                 int64_t width) {
  for_rows(tokens, width, [&](int64_t t) { std::copy_n(x + t * stride, width, out + t * out_stride); });
}

// Heads of `to` numbers side by side, made of those of `from` side by side in x[t]: their first numbers times `by`, and
// zeros behind them where there are none.
PSHARD_API void pshard_resize_heads(const float* x, int64_t stride, int64_t tokens, int64_t heads, int64_t from,
                                    int64_t to, float by, float* out, int64_t out_stride) {
  for_rows(tokens, heads * to, [&](int64_t t) {
    const float* own = x + t * stride;
    float* row = out + t * out_stride;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < to; ++i) row[h * to + i] = i < from ? by * own[h * from + i] : 0.f;
  });
}

// x[t] *= weights[t], one number for the row, which becomes 1
PSHARD_API void pshard_weigh_rows(float* x, int64_t stride, float* weights, int64_t weights_stride, int64_t tokens,
                                  int64_t width) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float *row = x + t * stride, factor = weights[t * weights_stride];
    for (int64_t i = 0; i < width; ++i) row[i] *= factor;
  });
  for (int64_t t = 0; t < tokens; ++t) weights[t * weights_stride] = 1.0f;
}

// x[t] *= by[t]
PSHARD_API void pshard_times_rows(float* x, int64_t stride, const float* by, int64_t by_stride, int64_t tokens,
                                  int64_t width) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    const float* own = by + t * by_stride;
    for (int64_t i = 0; i < width; ++i) row[i] *= own[i];
  });
}

// x[t] += rows[t]
PSHARD_API void pshard_add_rows(float* x, int64_t stride, const float* rows, int64_t rows_stride, int64_t tokens,
                                int64_t width) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float* row = x + t * stride;
    const float* own = rows + t * rows_stride;
    for (int64_t i = 0; i < width; ++i) row[i] += own[i];
  });
}

// x[t] *= sigmoid(hidden[t] . weight), one number for the row
PSHARD_API void pshard_scale_rows(float* x, int64_t stride, int64_t tokens, int64_t width, const float* hidden,
                                  int64_t hidden_stride, const float* weight, int64_t depth) {
  for_rows_in_place(x, stride, tokens, width, [&](int64_t t) {
    float *row = x + t * stride, factor = sigmoid(dot(hidden + t * hidden_stride, weight, depth));
    for (int64_t i = 0; i < width; ++i) row[i] *= factor;
  });
}

PSHARD_API void pshard_rope_store(float* qkv, int64_t stride, int64_t tokens, int heads, int kv_heads, int d,
                                  const float* q_norm, const float* k_norm, float eps, const float* cos,
                                  const float* sin, int64_t half, int halves, const int32_t* begin,
                                  const int32_t* position, const int32_t* blocks, int64_t block_cells, char* k,
                                  char* v, int64_t k_stride, int64_t v_stride, int k_type, int v_type,
                                  int norm_values) {
  const int all = heads + 2 * kv_heads;
  const int64_t width = static_cast<int64_t>(all) * d;
  for_rows_in_place(qkv, stride, tokens, width, [&](int64_t t) {
    const int64_t at = position[t], cell = blocks[begin[t] + at / block_cells] * block_cells + at % block_cells;
    for (int head = 0; head < all; ++head) {
      float* x = qkv + t * stride + static_cast<int64_t>(head) * d;
      const bool is_k = head >= heads && head < heads + kv_heads;
      if (head < heads + kv_heads) {
        if (const float* weight = is_k ? k_norm : q_norm) normalise(x, weight, d, eps, x);
        rotate(x, cos + at * half, sin + at * half, half, halves);
      } else if (norm_values) {
        const float factor = rms_factor(x, d, eps);
        for (int i = 0; i < d; ++i) x[i] *= factor;
      }
      if (is_k) store_head(x, k_type, head - heads, kv_heads, d, k + cell * k_stride);
      else if (head >= heads) store_head(x, v_type, head - heads - kv_heads, kv_heads, d, v + cell * v_stride);
    }
  });
}

// Of latent attention: the latent, normed, and the key behind it, turned, as one cell; queries, turned, into out.
PSHARD_API void pshard_store_latent(const float* kv, int64_t kv_stride, const float* q, int64_t q_stride,
                                    int64_t q_head, float* out, int64_t out_stride, int64_t out_head, int64_t tokens,
                                    int heads, int rank, const float* norm, float eps, const float* cos,
                                    const float* sin, int64_t half, int halves, const int32_t* begin,
                                    const int32_t* position, const int32_t* blocks, int64_t block_cells, char* cells,
                                    int64_t cell_stride, int type) {
  const int64_t rope = 2 * half, width = rank + rope;
  for_rows(tokens, width + heads * rope, [&](int64_t t) {
    const int64_t at = position[t], cell = blocks[begin[t] + at / block_cells] * block_cells + at % block_cells;
    for (int head = 0; head < heads; ++head) {
      float* to = out + t * out_stride + head * out_head;
      std::memcpy(to, q + t * q_stride + head * q_head, rope * sizeof(float));
      rotate(to, cos + at * half, sin + at * half, half, halves);
    }
    thread_local std::vector<float> row;
    row.resize(width);
    normalise(kv + t * kv_stride, norm, rank, eps, row.data());
    std::memcpy(row.data() + rank, kv + t * kv_stride + rank, rope * sizeof(float));
    rotate(row.data() + rank, cos + at * half, sin + at * half, half, halves);
    store_head(row.data(), type, 0, 1, static_cast<int>(width), cells + cell * cell_stride);
  });
}
