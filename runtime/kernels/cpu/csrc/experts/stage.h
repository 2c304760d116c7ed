// The routed experts of a micro-batch are two stages: gate and up with the activation, then down. Each is one product of
// many matrices of a shape with some rows each.
//
// A pair is a token and one of its experts: number token * used + place. Pairs are put in order of their experts; what
// gate and up give lies in that order, so that an expert's rows lie together.
#pragma once

#include <cstdint>
#include <cstring>

#include "driver.h"

namespace pshard {

// Pairs `first` to first + count of the order have one expert. `before`: pairs of the groups that are listed before it.
struct Group {
  int32_t expert, first, count, before;
};

struct Stage {
  Matrix w[2];  // shapes; each expert's data is elsewhere
  int matrices;
  const int64_t* at[2];  // where each expert's records begin; 0: not here
  const float* bias[2];  // [experts][rows], or nullptr
  int gate_kind;
  const float* from;  // rows of tokens for gate and up, of pairs in their order for down
  int64_t from_stride;
  float* to;  // rows of pairs, in their order for gate and up, by their number for down
  const int32_t* pairs;  // in the order of their experts
  int used;

  const uint8_t* record(int i, int expert, int64_t r) const {
    return reinterpret_cast<const uint8_t*>(at[i][expert]) + r * w[i].record;
  }
  const float* row_from(int64_t place) const { return from + (matrices == 2 ? pairs[place] / used : place) * from_stride; }
  float* row_to(int64_t place) const { return to + (matrices == 2 ? place : pairs[place]) * w[0].rows; }

  // Products of a record with `tokens` rows of a group, 16 floats each, become what the stage gives.
  void finish(float* sums, float* up, int tokens, int expert, int64_t place, int64_t r) const {
    const int rows = w[0].rows_of(r);
    add_bias(0, sums, tokens, expert, r);
    if (matrices == 2) {
      add_bias(1, up, tokens, expert, r);
      bend_gate(kernels(), gate_kind, sums, up, tokens * 16);
    }
    for (int i = 0; i < tokens; ++i) std::memcpy(row_to(place + i) + r * 16, sums + i * 16, rows * sizeof(float));
  }

 private:
  void add_bias(int i, float* sums, int tokens, int expert, int64_t r) const {
    if (!bias[i]) return;
    const float* own = bias[i] + expert * w[i].rows + r * 16;
    const int rows = w[i].rows_of(r);
    for (int t = 0; t < tokens; ++t)
      for (int row = 0; row < rows; ++row) sums[t * 16 + row] += own[row];
  }
};

// Both multiply all of n groups, with scratch memory of so many bytes.
size_t vector_bytes(const Stage& stage, int64_t tokens, int64_t pairs);
void multiply_vectors(Team& team, const Stage& stage, const Group* groups, int64_t n, int64_t tokens, uint8_t* scratch);
size_t tile_bytes(const Stage& stage, int64_t pairs);
void multiply_tiles(Team& team, const Stage& stage, const Group* groups, int64_t n, uint8_t* scratch);

inline int64_t count_pairs(const Group* groups, int64_t n) { return groups[n - 1].before + groups[n - 1].count - groups[0].before; }

// Calls work(groups, how many) for as many groups at a time as have at most `most` pairs.
template <class Work>
void for_waves(const Group* groups, int64_t n, int64_t most, Work&& work) {
  for (int64_t begin = 0, end; begin < n; begin = end) {
    for (end = begin + 1; end < n && groups[end].before + groups[end].count - groups[begin].before <= most;) ++end;
    work(groups + begin, end - begin);
  }
}

}  // namespace pshard
