// The routed experts of a micro-batch. Which ones, and how many tokens each has, is known only here: routes and addresses
// are read from memory when the call is made.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "experts/stage.h"
#include "products/activations.h"
#include "products/tiles.h"

namespace pshard {
namespace {

struct Routed {
  const int32_t* ids;  // [tokens][used]
  const float* weights;
  int64_t tokens;
  int used, experts;
  const int64_t* here;  // of each expert: 0 when others compute it

  int64_t pairs() const { return tokens * used; }
};

// Numbers of pairs in the order of their experts, and where each expert's end. Pairs of no expert here are left out.
void sort_pairs(const Routed& r, int32_t* pairs, int32_t* ends) {
  std::fill_n(ends, r.experts, 0);
  for (int64_t p = 0; p < r.pairs(); ++p) ends[r.ids[p]] += r.here[r.ids[p]] != 0;
  for (int32_t e = 0, sum = 0; e < r.experts; ++e) sum += ends[e], ends[e] = sum - ends[e];
  for (int64_t p = 0; p < r.pairs(); ++p)
    if (r.here[r.ids[p]]) pairs[ends[r.ids[p]]++] = static_cast<int32_t>(p);
}

// Groups of up to `most` pairs of the experts that have `least` pairs or more, and fewer than `beyond`.
int64_t list_groups(const int32_t* ends, int experts, int64_t least, int64_t beyond, int32_t most, Group* groups) {
  int64_t n = 0;
  for (int32_t e = 0, begin = 0, before = 0; e < experts; begin = ends[e++]) {
    const int32_t own = ends[e] - begin;
    if (own < least || own >= beyond) continue;
    for (int32_t first = begin; first < ends[e]; first += most) {
      const int32_t count = std::min(most, ends[e] - first);
      groups[n++] = {e, first, count, before};
      before += count;
    }
  }
  return n;
}

// Experts with `tiles_from` pairs or more are computed on the matrix unit.
void run_stage(Team& team, const Stage& s, const Routed& r, const int32_t* ends, Group* groups, int64_t tiles_from,
               uint8_t* scratch) {
  multiply_vectors(team, s, groups, list_groups(ends, r.experts, 1, tiles_from, kSlice, groups), r.tokens, scratch);
  multiply_tiles(team, s, groups, list_groups(ends, r.experts, tiles_from, INT64_MAX, 16 * kSliceTiles, groups), scratch);
}

// out = base + the sum over a token's experts that `added` has, in their order, of weight times row.
void add_experts(const Routed& r, const int64_t* added, int64_t token, const float* picked, int64_t width, const float* base, float* out) {
  constexpr int64_t kBlock = 64;  // sums that stay in registers
  const int64_t first = token * r.used;
  for (int64_t at = 0; at < width; at += kBlock) {
    const int64_t n = std::min(kBlock, width - at);
    float sums[kBlock] = {};
    for (int j = 0; j < r.used; ++j) {
      if (!added[r.ids[first + j]]) continue;
      const float weight = r.weights[first + j], *row = picked + (first + j) * width + at;
      for (int64_t i = 0; i < n; ++i) sums[i] += weight * row[i];
    }
    for (int64_t i = 0; i < n; ++i) out[at + i] = base ? base[at + i] + sums[i] : sums[i];
  }
}

struct Output {
  float* rows;
  int64_t stride, width;
  bool accumulate;
};

bool is_quickly_added(const Routed& r, int64_t width) { return r.pairs() * width * 4 < kAlone; }
size_t output_bytes(const Routed& r, const Output& out) {
  return base_bytes(r.tokens, out.width, out.accumulate && !is_quickly_added(r, out.width));
}

void add_all(Team& team, const Routed& r, const int64_t* added, const float* picked, const Output& out, uint8_t* scratch) {
  if (is_quickly_added(r, out.width)) {
    for (int64_t t = 0; t < r.tokens; ++t) {
      float* row = out.rows + t * out.stride;
      add_experts(r, added, t, picked, out.width, out.accumulate ? row : nullptr, row);
    }
    return;
  }
  const float* base = out.accumulate ? copy_base(team, out.rows, out.stride, r.tokens, out.width, scratch) : nullptr;
  team.for_each(r.tokens, r.pairs() * out.width * 4, [&](int64_t t) {
    add_experts(r, added, t, picked, out.width, base ? base + t * out.width : nullptr, out.rows + t * out.stride);
  });
}

}  // namespace
}  // namespace pshard

using namespace pshard;

// added: where the experts are whose rows are summed, those of earlier calls too; nullptr: nothing is summed yet.
PSHARD_API void pshard_experts(const float* x, int64_t x_stride, const int32_t* ids, const float* weights,
                               int64_t tokens, int used, const int64_t* addresses, int experts, int gate_type,
                               int up_type, int down_type, int64_t hidden, int64_t inner, const float* gate_bias,
                               const float* up_bias, const float* down_bias, int gate_kind, int tiles_from,
                               int down_tiles_from, float* gated, float* picked, int32_t* order, float* out,
                               int64_t out_stride, int accumulate, const int64_t* added) {
  const Routed r{ids, weights, tokens, used, experts, addresses};
  const Matrix gate(nullptr, gate_type, inner, hidden), up(nullptr, up_type, inner, hidden);
  const Matrix down(nullptr, down_type, hidden, inner);
  int32_t* ends = order + r.pairs();
  auto* groups = reinterpret_cast<Group*>(ends + experts);
  const Stage first{{gate, up}, 2, {addresses, addresses + experts}, {gate_bias, up_bias}, gate_kind, x, x_stride,
                    gated, order, used};
  const Stage second{{down, down}, 1, {addresses + 2 * experts, nullptr}, {down_bias, nullptr}, kSilu, gated, inner,
                     picked, order, used};
  const Output output{out, out_stride, hidden, accumulate != 0};
  size_t nbytes = output_bytes(r, output);
  for (const Stage& s : {first, second})
    nbytes = std::max({nbytes, vector_bytes(s, tokens, r.pairs()), tile_bytes(s, r.pairs())});
  Pool::instance().with_scratch(nbytes, [&](uint8_t* scratch) {
    Pool::instance().run([&](Team& team) {
      sort_pairs(r, order, ends);
      run_stage(team, first, r, ends, groups, tiles_from, scratch);
      run_stage(team, second, r, ends, groups, down_tiles_from, scratch);
      if (added) add_all(team, r, added, picked, output, scratch);
    });
  });
}
