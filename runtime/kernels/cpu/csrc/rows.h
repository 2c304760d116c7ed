// Loops over rows of activations, and what is done to one.
#pragma once

#include <cmath>

#include "driver.h"

namespace pshard {

constexpr int64_t kFewFloats = 64 << 10;  // floats: for fewer, waking the pool takes longer than the work

// Runs body(i) for every i of n, each over `floats` numbers.
template <class Body>
void for_rows(int64_t n, int64_t floats, Body&& body) {
  if (n * floats < kFewFloats) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  const int64_t each = std::max<int64_t>(1, 4096 / floats);
  Pool::instance().run([&](Team& team) {
    team.for_each((n + each - 1) / each, n * floats * 16, [&](int64_t task) {
      for (int64_t i = task * each; i < std::min(n, (task + 1) * each); ++i) body(i);
    });
  });
}

// As for_rows, with a body that changes its row of x. Where it is shared out, every chunk begins with a copy of its
// rows as they were, as it may be computed again.
template <class Body>
void for_rows_in_place(float* x, int64_t stride, int64_t n, int64_t width, Body&& body) {
  if (n * width < kFewFloats) return for_rows(n, width, body);
  Pool::instance().with_scratch(n * width * sizeof(float), [&](uint8_t* scratch) {
    auto* before = reinterpret_cast<float*>(scratch);
    for_rows(n, width, [&](int64_t t) { std::memcpy(before + t * width, x + t * stride, width * sizeof(float)); });
    for_rows(n, width, [&](int64_t t) {
      std::memcpy(x + t * stride, before + t * width, width * sizeof(float));
      body(t);
    });
  });
}

// The squares added up; sixteen sums side by side, so that compilers use vectors.
inline double sum_squares(const float* x, int64_t n) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) sums[j] += x[i + j] * x[i + j];
  for (; i < n; ++i) sums[i % 16] += x[i] * x[i];
  double total = 0;
  for (const float s : sums) total += s;
  return total;
}

// 1 / sqrt(mean of squares + eps)
inline float rms_factor(double squares, int64_t n, float eps) { return static_cast<float>(1 / std::sqrt(squares / n + eps)); }

inline float rms_factor(const float* x, int64_t n, float eps) { return rms_factor(sum_squares(x, n), n, eps); }

inline void normalise(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float factor = rms_factor(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

inline float dot(const float* x, const float* y, int64_t n) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) sums[j] += x[i + j] * y[i + j];
  for (; i < n; ++i) sums[i % 16] += x[i] * y[i];
  double total = 0;
  for (const float s : sums) total += s;
  return static_cast<float>(total);
}

// Rotates the first 2 * half numbers of a head; pairs are i and i + half, or neighbours.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half, bool halves) {
  for (int64_t i = 0; i < half; ++i) {
    float &a = x[halves ? i : 2 * i], &b = x[halves ? i + half : 2 * i + 1];
    const float turned = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = turned;
  }
}

}  // namespace pshard
