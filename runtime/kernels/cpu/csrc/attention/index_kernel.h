// What a query's heads make of the key of a block of cells. Included once per instruction set, after attention_kernel.h,
// inside an anonymous namespace.

// The sum over the heads q [heads][n] of max(q . key, 0).
float score_key(const float* q, int64_t heads, int64_t n, const float* key) {
  float total = 0;
  for (; heads > 0; --heads, q += n) {
    Floats sum = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum = fma(load(q + i), load(key + i), sum);
    float dot = sum_lanes(sum);
    for (; i < n; ++i) dot += q[i] * key[i];
    total += dot > 0 || dot != dot ? dot : 0.0f;
  }
  return total;
}
