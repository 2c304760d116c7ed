// The table of kernels that each instruction set fills in.
#pragma once

#include <cstring>

#include "packing/format.h"

namespace pshard {

// 32 activations of one token, quantised: x[k] ~ scale * q[k].
struct alignas(64) ActChunk {
  int8_t q[32];
  float scale;
  float sum[2];                // scale * sum of q over columns 0-15 and 16-31: the factor of a format's addend
  float total;                 // scale * sum of all q
  int32_t correction;          // -offset * sum of q, where the integer dot products start
  int32_t half_correction[2];  // the same over columns 0-15 and 16-31
};

// Queries of all kv heads against cells [begin, end) of the cache. Per kv head there are `queries` of them, in groups of
// 4 with padding: `slots` = queries rounded up to 4. Columns are padded with zeros to `padded`, a multiple of 16.
struct AttentionTask {
  const float* q;       // [kv_heads][slots][padded], times the softmax scale
  const char *k, *v;    // cell 0
  int64_t k_stride, v_stride;  // bytes from cell to cell
  int k_type, v_type;   // F32, F16, BF16, Q8_0 or Q4_0 (runtime/kernels/kv_codec.py)
  const int32_t* blocks;  // the blocks that the cells lie in, of block_cells each, whole tiles; nullptr: in a row
  int64_t block_cells;
  int kv_heads, queries, slots, d, padded;
  const int64_t* first;    // [slots]: a query sees cells first..visible-1
  const int64_t* visible;
  float cap;               // scores become cap tanh(score / cap); 0: they stay
  const float* slopes;     // [heads] what a score loses for each cell that it lies back; nullptr: nothing
  int first_query;         // number of the first query among those of its kv head, `shared` of each token
  int shared;
  int64_t begin, end;      // begin is a multiple of kTileCells
  int64_t next;   // where the cells lie that this thread turns to after these
  uint8_t* tile;  // attention_tile_bytes(...), 64-byte aligned: copies of what is at work
  float* out;     // [kv_heads][slots][padded]: sum of p * v, not divided by the sum of p
  float* peak;    // [kv_heads][slots]: largest score
  float* sum;     // [kv_heads][slots]: sum of p = exp(score - peak)

  // Where a tile's first cell lies, in cells.
  int64_t place(int64_t cell) const {
    return blocks ? blocks[cell / block_cells] * block_cells + cell % block_cells : cell;
  }
};
constexpr int kTileCells = 64;
inline size_t attention_tile_bytes(int kv_heads, int queries, int padded) {  // keys and values; queries on a tile unit
  return 2 * sizeof(float) * kTileCells * padded + size_t(kv_heads) * ((queries + 7) / 8) * 32 * padded;
}

// One token group of a linear layer: `count` is 1, 2, 4 or 8 and says how many tokens share each decoded weight.
struct TokenGroup {
  const ActChunk* act;  // [chunks][count], quantised types
  const float* x[8];    // rows of f32, plain types
  int count;
  const uint8_t* ahead;  // the record that comes next, to be on its way into the cache
};

struct Kernels {
  const char* isa;
  // Quantises n_chunks * 32 floats; chunk i goes to out[i * stride].
  void (*quantize)(const float* x, int64_t n_chunks, int offset, ActChunk* out, int64_t stride);
  // tile[token][16] = 16 weight rows times `group.count` tokens. For plain types `record` is the first row and
  // `rows` of them exist; quantised records always hold 16.
  void (*linear[kTypes])(const uint8_t* record, const Planes& planes, int64_t cols, int rows, const TokenGroup& group,
                         float* tile);
  // Rows [first, last) of a record to f32 or bf16 rows, `stride` elements apart.
  void (*dequantize[kTypes])(const uint8_t* record, const Planes& planes, int64_t cols, int first, int last, void* out,
                             int64_t stride, bool bf16);
  void (*silu_mul)(float* gate, const float* up, int64_t n);  // gate = gate * sigmoid(gate) * up
  void (*relu_mul)(float* gate, const float* up, int64_t n);  // gate = max(gate, 0) * up
  void (*gelu_mul)(float* gate, const float* up, int64_t n);  // gate = gelu(gate) * up, by tanh
  void (*gelu16_mul)(float* gate, const float* up, int64_t n);  // the same as a table of f16 has it
  void (*sigmoid_mul)(float* x, const float* gate, int64_t n);  // x = x * sigmoid(gate)
  void (*clamped_mul)(float* gate, const float* up, int64_t n);  // the same for gpt-oss' clamped form
  void (*limited_mul)(float* gate, const float* up, int64_t n, float limit);  // silu's, within limits: see below
  void (*attention)(const AttentionTask& task);
  float (*score_key)(const float* q, int64_t heads, int64_t n, const float* key);  // see attention/index_kernel.h
  // of gated delta nets, see delta/delta_kernel.h
  void (*delta_mix)(const float* const* x, const float* conv, int64_t n, float* out);
  void (*delta_scale)(float* x, int64_t n, float eps, float factor);
  void (*delta_gate)(const float* o, const float* z, const float* norm, float eps, int64_t n, float* out, bool sigmoid);
  void (*delta_read)(const float* state, int64_t d, const float* k, const float* q, float* by_k, float* by_q);
  void (*delta_write)(const float* from, float* to, int64_t rows, int64_t d, float left, const float* k,
                      const float* u, const float* next);
  void (*delta_multiply)(const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, int64_t rows,
                         int64_t inner, int64_t cols, float* out, int64_t out_row, float keep);
  void (*stream)(uint8_t* to, const uint8_t* from, size_t nbytes);  // copies past the caches
  uint64_t (*sum)(const uint8_t* data, size_t nbytes);              // reads every byte once
};

enum GateKind : int { kSilu, kGelu, kGelu16, kClamped, kRelu };  // as native.py numbers them

// Makes of a gate's and an up's n numbers what the product with down takes. A kind that is none of the above is the
// bits of a float, a limit: silu(gate) at most that, times up within it.
inline void bend_gate(const Kernels& k, int kind, float* gate, const float* up, int64_t n) {
  const decltype(k.silu_mul) gates[] = {k.silu_mul, k.gelu_mul, k.gelu16_mul, k.clamped_mul, k.relu_mul};
  if (kind <= kRelu) return gates[kind](gate, up, n);
  float limit;
  std::memcpy(&limit, &kind, sizeof limit);
  k.limited_mul(gate, up, n, limit);
}

const Kernels* kernels_portable();
const Kernels* kernels_avx2();  // nullptr when this build or CPU cannot run it
const Kernels* kernels_avx512();

void use_byte_tables(Kernels& k);  // codebooks looked up in registers, where the processor has AVX-512 VBMI

}  // namespace pshard
