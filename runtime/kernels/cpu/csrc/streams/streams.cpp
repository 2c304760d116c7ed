// Several residual streams side by side, and n-grams that are added to them: runtime/kernels/plain_streams.py has the
// formulas.
#include <vector>

#include "rows.h"

namespace pshard {
namespace {

constexpr int64_t kColumns = 256;  // that are worked on at once
constexpr float kLeastScore = 1e-6f;

// x = silu(x)
void bend(float* x, int64_t n) {
  alignas(64) float ones[16];
  std::fill_n(ones, 16, 1.0f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) kernels().silu_mul(x + i, ones, 16);
  for (; i < n; ++i) x[i] *= sigmoid(x[i]);
}

// x *= sigmoid(gate)
void gate_columns(float* x, const float* gate, int64_t n) {
  const int64_t whole = n / 16 * 16;
  kernels().sigmoid_mul(x, gate, whole);
  for (int64_t i = whole; i < n; ++i) x[i] *= sigmoid(gate[i]);
}

// Each of `count` parts of x, `width` numbers, over its root mean square, times weights of its own and `by`.
void norm_parts(const float* x, const float* weight, int64_t count, int64_t width, float eps, float by, float* out) {
  for (int64_t at = 0; at < count * width; at += width) {
    const float factor = by * rms_factor(x + at, width, eps);
    for (int64_t i = at; i < at + width; ++i) out[i] = x[i] * factor * weight[i];
  }
}

// What `Kernels.add_grams` takes of a convolution over time.
struct Grams {
  const float* taps;  // [width][each], the newest last
  int64_t width, each, apart;
  float* tails;  // [slots][reach][width]
  const int32_t *slots, *offsets;

  int64_t reach() const { return (each - 1) * apart; }
  int64_t size() const { return reach() * width; }
  int64_t tokens(int64_t i) const { return offsets[i + 1] - offsets[i]; }
  bool is_open(int64_t i) const { return slots[i] < 0; }
  float* tail(int64_t i) const { return tails + (is_open(i) ? -1 - slots[i] : slots[i]) * size(); }
  // The input of a sequence's token; in its tail where it is negative.
  const float* input(const float* inputs, int64_t i, int64_t token) const {
    return token < 0 ? tail(i) + (token + reach()) * width : inputs + (offsets[i] + token) * width;
  }
};

// row = before + x + silu(what the convolution makes of a token's inputs)
void add_token(const Grams& g, const float* inputs, int64_t i, int64_t token, const float* before, const float* x, float* row) {
  float mixed[kColumns];
  for (int64_t first = 0; first < g.width; first += kColumns) {
    const int64_t n = std::min(kColumns, g.width - first);
    std::fill_n(mixed, n, 0.0f);
    for (int64_t tap = 0; tap < g.each; ++tap) {
      const float* from = g.input(inputs, i, token - (g.each - 1 - tap) * g.apart) + first;
      for (int64_t c = 0; c < n; ++c) mixed[c] += from[c] * g.taps[(first + c) * g.each + tap];
    }
    bend(mixed, n);
    for (int64_t c = first; c < first + n; ++c) row[c] = before[c] + x[c] + mixed[c - first];
  }
}

}  // namespace
}  // namespace pshard

using namespace pshard;

// What blocks have given becomes each stream (spreads), or is added to each by twice the sigmoid of its share behind the
// streams; without `given` they stay. Then out = each stream normalised, over their number; without `weight` nothing.
PSHARD_API void pshard_enter_streams(const float* given, int64_t given_stride, int spreads, float* streams,
                                     int64_t stride, int64_t tokens, int64_t count, int64_t width,
                                     const float* weight, float eps, float* out, int64_t out_stride) {
  const int64_t wide = count * width;
  const auto enter = [&](int64_t t) {
    float* row = streams + t * stride;
    for (int64_t s = 0; given && s < count; ++s) {
      const float *x = given + t * given_stride, share = spreads ? 0 : 2 * sigmoid(row[wide + s]);
      float* own = row + s * width;
      if (spreads) std::copy_n(x, width, own);
      else
        for (int64_t i = 0; i < width; ++i) own[i] += share * x[i];
    }
    if (weight) norm_parts(row, weight, count, width, eps, 1.0f / count, out + t * out_stride);
  };
  if (given && !spreads) for_rows_in_place(streams, stride, tokens, wide, enter);
  else for_rows(tokens, wide, enter);
}

// out[t] = the sum over the streams in x[t], times the sigmoids of their gates; cleared[t] = 0.
PSHARD_API void pshard_mix_streams(const float* x, int64_t x_stride, const float* gates, int64_t gates_stride,
                                   int64_t tokens, int64_t count, int64_t width, float* out, int64_t out_stride,
                                   float* cleared, int64_t cleared_stride) {
  for_rows(tokens, count * width, [&](int64_t t) {
    alignas(64) float sum[kColumns], part[kColumns];
    for (int64_t first = 0; first < width; first += kColumns) {
      const int64_t n = std::min(kColumns, width - first);
      std::fill_n(sum, n, 0.0f);
      for (int64_t s = 0; s < count; ++s) {
        std::copy_n(x + t * x_stride + s * width + first, n, part);
        gate_columns(part, gates + t * gates_stride + s * width + first, n);
        for (int64_t i = 0; i < n; ++i) sum[i] += part[i];
      }
      std::copy_n(sum, n, out + t * out_stride + first);
    }
    if (cleared) std::fill_n(cleared + t * cleared_stride, width, 0.0f);
  });
}

// Of each stream: out = value times a gate, from the product of its part of key and of the stream, both normalised.
PSHARD_API void pshard_gate_grams(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                  const float* streams, int64_t stride, const float* key_norm,
                                  const float* stream_norm, int64_t tokens, int64_t count, int64_t width, float eps,
                                  float* out, int64_t out_stride) {
  for_rows(tokens, count * width, [&](int64_t t) {
    for (int64_t s = 0; s < count; ++s) {
      const float *k = key + t * key_stride + s * width, *x = streams + t * stride + s * width;
      const float *of_k = key_norm + s * width, *of_x = stream_norm + s * width, *v = value + t * value_stride;
      double total = 0;
      for (int64_t first = 0; first < width; first += kColumns) {
        float sum = 0;
        for (int64_t i = first; i < std::min(width, first + kColumns); ++i) sum += k[i] * of_k[i] * (x[i] * of_x[i]);
        total += sum;
      }
      const double factor = double(rms_factor(k, width, eps)) * rms_factor(x, width, eps) / std::sqrt(double(width));
      const float score = static_cast<float>(total * factor);
      const float root = std::sqrt(std::max(std::fabs(score), kLeastScore));
      const float gate = sigmoid(score == 0 ? 0.0f : std::copysign(root, score));
      float* to = out + t * out_stride + s * width;
      for (int64_t i = 0; i < width; ++i) to[i] = gate * v[i];
    }
  });
}

// streams[t] += x[t] and silu of a convolution over time of x as its parts are normalised. Streams and tails are written
// from copies, as a chunk of work may be computed again.
PSHARD_API void pshard_add_grams(const float* x, int64_t x_stride, const float* norm, const float* taps, int64_t count,
                                 int64_t width, int64_t each, int64_t apart, float eps, float* streams, int64_t stride,
                                 float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                 float* opened, int64_t opened_stride) {
  const Grams g{taps, count * width, each, apart, tails, slots, offsets};
  const int64_t rows = offsets[sequences], wide = g.width;
  if (rows == 0) return;
  std::vector<int32_t> owner(rows);
  for (int64_t i = 0; i < sequences; ++i) std::fill(owner.begin() + offsets[i], owner.begin() + offsets[i + 1], static_cast<int32_t>(i));
  Pool::instance().with_scratch((2 * rows * wide + sequences * g.size()) * sizeof(float), [&](uint8_t* scratch) {
    auto* inputs = reinterpret_cast<float*>(scratch);
    float *before = inputs + rows * wide, *fresh = before + rows * wide;
    for_rows(rows, wide, [&](int64_t t) {
      norm_parts(x + t * x_stride, norm, count, width, eps, 1.0f, inputs + t * wide);
      std::copy_n(streams + t * stride, wide, before + t * wide);
    });
    for_rows(rows, wide, [&](int64_t t) {
      const int64_t i = owner[t];
      add_token(g, inputs, i, t - offsets[i], before + t * wide, x + t * x_stride, streams + t * stride);
      if (opened && g.is_open(i)) std::copy_n(inputs + t * wide, wide, opened + t * opened_stride);
    });
    for_rows(sequences, g.size(), [&](int64_t i) {
      for (int64_t back = 0; g.tokens(i) && back < g.reach(); ++back)
        std::copy_n(g.input(inputs, i, g.tokens(i) - g.reach() + back), wide, fresh + i * g.size() + back * wide);
    });
    for_rows(sequences, g.size(), [&](int64_t i) {
      if (g.tokens(i) && !g.is_open(i)) std::copy_n(fresh + i * g.size(), g.size(), g.tail(i));
    });
  });
}
