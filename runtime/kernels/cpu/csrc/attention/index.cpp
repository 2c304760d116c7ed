// An index by which tokens choose the cells that they attend to: runtime/kernels/plain_index.py says what it is.
#include <algorithm>
#include <cstring>

#include "rows.h"

namespace pshard {
namespace {

constexpr int64_t kScoredAtOnce = 256;         // blocks of a task
constexpr int64_t kMostScores = 4 << 20;       // of the rows that are scored at once
constexpr int kDigits = 11, kBins = 1 << kDigits;  // of a score's 32 bits at once

// Where a sequence's cells are in an index of blocks of n cells.
struct Index {
  float* data;
  int64_t n, head, each;
  float* cell(const int32_t* held, int64_t i) const { return data + (held[i / n] * n + i % n) * head; }
};

// Scores are no less than 0, and so ordered as their bits are.
uint32_t bits_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits;
}

struct Least {
  uint32_t bits;  // of the score of the last that is chosen
  int64_t ties;   // how many with just these are chosen
};

// The `most` best of n scores, of which there are more.
Least find_least(const float* scores, int64_t n, int64_t most) {
  uint32_t found = 0, known = 0;  // bits of the last one, as far as they are known
  for (int shift = 32 - kDigits; ; shift = std::max(0, shift - kDigits)) {
    const int digits = shift ? kDigits : 32 - 2 * kDigits;
    const uint32_t mask = (1u << digits) - 1;
    int32_t counts[kBins] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(scores[i]);
      if ((bits & known) == found) ++counts[bits >> shift & mask];
    }
    uint32_t digit = mask;
    for (; counts[digit] < most; --digit) most -= counts[digit];
    found |= digit << shift, known |= mask << shift;
    if (shift == 0) return {found, most};
  }
}

// Sets the bits of those chosen of `complete` blocks, and of the one that follows; `per` of them are a word's.
void spell(const float* scores, int64_t complete, int64_t most, int64_t per, int64_t words, int32_t* seen) {
  std::fill_n(seen, words, 0);
  const auto set = [&](int64_t i) { if (i / per < words) seen[i / per] |= static_cast<int32_t>(1u << i % per); };
  Least least = complete > most ? find_least(scores, complete, most) : Least{0, complete};
  for (int64_t i = 0; i < complete; ++i) {
    const uint32_t bits = complete > most ? bits_of(scores[i]) : 0;
    if (bits > least.bits || (bits == least.bits && least.ties-- > 0)) set(i);
  }
  set(complete);
}

}  // namespace
}  // namespace pshard

using namespace pshard;

// Queries as normalised and turned, in place; of each row's raw key the sum of those of its block, or what the last of a
// block makes of it, into its cell. Rows of a sequence stand in the order of their tokens.
PSHARD_API void pshard_store_index(float* q, int64_t q_stride, const float* key, int64_t key_stride, int64_t tokens,
                                   int64_t heads, int64_t head, const float* q_norm, const float* k_norm, int64_t each,
                                   float eps, const float* cos, const float* sin, int64_t half, int halves,
                                   const int32_t* begin, const int32_t* position, const int32_t* blocks, int64_t cells,
                                   float* data) {
  const Index index{data, cells, head, each};
  for_rows_in_place(q, q_stride, tokens, heads * head, [&](int64_t t) {
    for (float* x = q + t * q_stride; x < q + t * q_stride + heads * head; x += head) {
      normalise(x, q_norm, head, eps, x);
      rotate(x, cos + position[t] * half, sin + position[t] * half, half, halves);
    }
  });
  for (int64_t t = 0; t < tokens; ++t) {
    if (begin[t] < 0) continue;  // a row that only fills the micro-batch
    const int64_t at = position[t], inside = at % each;
    const int32_t* held = blocks + begin[t];
    float* to = index.cell(held, at);
    const float *before = inside ? index.cell(held, at - 1) : nullptr, *raw = key + t * key_stride;
    for (int64_t i = 0; i < head; ++i) to[i] = before ? before[i] + raw[i] : raw[i];
    if (inside < each - 1) continue;
    for (int64_t i = 0; i < head; ++i) to[i] /= each;
    normalise(to, k_norm, head, eps, to);
    rotate(to, cos + (at - inside) * half, sin + (at - inside) * half, half, halves);
  }
}

// Which blocks each row sees, as bits of its words: `most` of the complete ones, by their keys in the index, and the one
// behind them. segments: as of pshard_attention.
PSHARD_API void pshard_choose_cells(const float* q, int64_t q_stride, float* data, int64_t cells, int64_t heads,
                                    int64_t head, int64_t each, int64_t most, const int64_t* segments,
                                    int64_t n_segments, const int32_t* blocks, int32_t* seen, int64_t seen_stride,
                                    int64_t words) {
  const Index index{data, cells, head, each};
  for (const int64_t* s = segments; s < segments + 4 * n_segments; s += 4) {  // first token, tokens, cells before, block
    const int32_t* held = blocks + s[3];
    const int64_t all = (s[2] + s[1]) / each, together = std::max<int64_t>(1, kMostScores / std::max<int64_t>(1, all));
    for (int64_t done = 0; done < s[1]; done += together) {
      const int64_t rows = std::min(together, s[1] - done), first = s[0] + done, parts = (all + kScoredAtOnce - 1) / kScoredAtOnce;
      const auto complete = [&](int64_t row) { return (s[2] + done + row + 1) / each; };
      Pool::instance().with_scratch(rows * all * sizeof(float), [&](uint8_t* scratch) {
        auto* scores = reinterpret_cast<float*>(scratch);
        Pool::instance().run([&](Team& team) {
          team.for_each(rows * parts, all > most ? rows * all * heads * head * 4 : 0, [&](int64_t task) {
            const int64_t row = task / parts, begins = task % parts * kScoredAtOnce;
            if (complete(row) <= most) return;
            for (int64_t i = begins; i < std::min(complete(row), begins + kScoredAtOnce); ++i)
              scores[row * all + i] = kernels().score_key(q + (first + row) * q_stride, heads, head, index.cell(held, i * each + each - 1));
          });
          team.for_each(rows, rows * all * 32, [&](int64_t row) {
            spell(scores + row * all, complete(row), most, cells / each, words, seen + (first + row) * seen_stride);
          });
        });
      });
    }
  }
}
