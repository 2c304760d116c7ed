// Which experts every token takes, and with which weights: scores from a product with the router, then the best of them
// by the rule (Experts in pshard/model_config.py).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "driver.h"
#include "products/activations.h"

namespace pshard {
namespace {

enum Scores : int { kSoftmax, kSigmoid, kChosen };

struct Rule {
  int count, used, scores;
  bool normed;
  int groups, groups_used;
  float scale;
};

// logits[tokens][count] = x w^T + bias
void score(Team& team, const float* x, int64_t x_stride, int64_t tokens, const Matrix& w, const float* bias,
           float* logits) {
  const int64_t records = w.records(), pieces = (tokens + kSlice - 1) / kSlice;
  team.for_each_ahead(records * pieces, w.nbytes() * tokens, [&](int64_t task, int64_t next) {
    const int64_t r = task % records, from = task / records * kSlice;
    const Activations a{x + from * x_stride, x_stride, static_cast<int>(std::min<int64_t>(kSlice, tokens - from)), nullptr};
    alignas(64) float tile[8 * 16];
    for (int first = 0; first < a.tokens; first += 8) {
      const TokenGroup g = a.group(w, first, w.at(first ? r : next % records));
      kernels().linear[w.type](w.at(r), w.planes, w.cols, w.rows_of(r), g, tile);
      const int n = std::min(g.count, a.tokens - first), rows = w.rows_of(r);
      if (bias)
        for (int i = 0; i < n; ++i)
          for (int row = 0; row < rows; ++row) tile[i * 16 + row] += bias[r * 16 + row];
      store_tiles(tile, n, rows, logits + (from + first) * w.rows + r * 16, w.rows);
    }
  });
}

// Numbers of the `most` largest of n values, the largest first, of equal ones the lower first. There are no NaNs.
void find_best(const float* values, int n, int most, int32_t* best) {
  for (int i = 0, have = 0; i < n; ++i) {
    int at = have;
    while (at > 0 && values[i] > values[best[at - 1]]) --at;
    if (at == most) continue;
    have = std::min(have + 1, most);
    for (int j = have - 1; j > at; --j) best[j] = best[j - 1];
    best[at] = i;
  }
}

// In place: exponentials over their sum.
void softmax(float* values, int n) {
  float top = values[0];
  for (int i = 1; i < n; ++i) top = std::max(top, values[i]);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::exp(static_cast<double>(values[i]) - top);
  for (int i = 0; i < n; ++i) values[i] = static_cast<float>(std::exp(static_cast<double>(values[i]) - top) / sum);
}

// What one token's choice works in.
struct Room {
  float *scores, *choice, *groups, *weights;
  int32_t* best;

  Room(uint8_t* at, const Rule& r)
      : scores(reinterpret_cast<float*>(at)),
        choice(scores + r.count),
        groups(choice + r.count),
        weights(groups + r.groups),
        best(reinterpret_cast<int32_t*>(weights + r.used)) {}
  static size_t nbytes(const Rule& r) { return 4 * (2 * r.count + r.groups + r.used + std::max(r.used, r.groups_used)); }
};

// Only experts of the best groups keep their chance: a group is as good as its best two together.
void leave_best_groups(const Rule& rule, const Room& room) {
  const int each = rule.count / rule.groups;
  for (int g = 0; g < rule.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (const float *v = room.choice + g * each, *end = v + each; v < end; ++v)
      if (*v > first) second = first, first = *v;
      else second = std::max(second, *v);
    room.groups[g] = each > 1 ? first + second : first;
  }
  find_best(room.groups, rule.groups, rule.groups_used, room.best);
  for (int g = 0; g < rule.groups; ++g)
    if (std::find(room.best, room.best + rule.groups_used, g) == room.best + rule.groups_used)
      std::fill_n(room.choice + g * each, each, -std::numeric_limits<float>::infinity());
}

void choose(const Rule& rule, const float* logits, const float* choice_bias, const float* factors, const Room& room,
            int32_t* ids, float* weights) {
  std::memcpy(room.scores, logits, rule.count * sizeof(float));
  if (rule.scores == kSoftmax) softmax(room.scores, rule.count);
  if (rule.scores == kSigmoid)
    for (int i = 0; i < rule.count; ++i)
      room.scores[i] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits[i]))));
  bool numbers = true;
  for (int i = 0; i < rule.count; ++i) {
    room.choice[i] = room.scores[i] + (choice_bias ? choice_bias[i] : 0.0f);
    numbers = numbers && room.choice[i] == room.choice[i];
  }
  if (!numbers) {  // experts that exist, and weights by which the token's results are no numbers either
    for (int j = 0; j < rule.used; ++j) ids[j] = j, weights[j] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (rule.groups_used < rule.groups) leave_best_groups(rule, room);
  find_best(room.choice, rule.count, rule.used, room.best);
  float sum = 0;
  for (int j = 0; j < rule.used; ++j) sum += room.weights[j] = room.scores[room.best[j]];
  if (rule.scores == kChosen) softmax(room.weights, rule.used);
  else if (rule.normed)
    for (int j = 0; j < rule.used; ++j) room.weights[j] /= sum;
  for (int j = 0; j < rule.used; ++j) ids[j] = room.best[j], weights[j] = room.weights[j] * rule.scale;
  if (factors)
    for (int j = 0; j < rule.used; ++j) weights[j] *= factors[ids[j]];
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_route(const float* x, int64_t x_stride, const void* router, int type, int count, int64_t cols,
                             const float* bias, const float* choice_bias, const float* factors, int64_t tokens,
                             int64_t rows, int used, int scores, int normed, int groups, int groups_used, float scale,
                             int32_t* ids, float* weights) {
  const Matrix w(router, type, count, cols);
  std::fill(ids + tokens * used, ids + rows * used, -1);
  const Rule rule{count, used, scores, normed != 0, groups, groups_used, scale};
  Pool::instance().with_scratch(tokens * count * sizeof(float), [&](uint8_t* scratch) {
    auto* logits = reinterpret_cast<float*>(scratch);
    Pool::instance().run([&](Team& team) {
      score(team, x, x_stride, tokens, w, bias, logits);
      const Around around{nullptr, nullptr, Room::nbytes(rule), tokens * count * 256};
      team.for_each_chunk(tokens, around, [&](const Chunk& c) {
        choose(rule, logits + c.i * count, choice_bias, factors, Room(c.room, rule), ids + c.i * used,
               weights + c.i * used);
      });
    });
  });
}

// The chunks of each token's best experts, `each` experts to a chunk, weighted by the scores of the experts of the
// chunks' numbers over their sum, which counts as `least` at least. scored, scores: all `count` experts by falling score.
PSHARD_API void pshard_choose_chunks(const int32_t* scored, const float* scores, int64_t tokens, int64_t count,
                                     int used, int each, float scale, float least, int32_t* ids, float* weights) {
  for (int64_t t = 0; t < tokens; ++t, scored += count, scores += count, ids += used, weights += used) {
    float sum = 0;
    for (int j = 0; j < used; ++j) {
      const int32_t chunk = scored[j] < 0 ? -1 : scored[j] / each;  // -1: of a row that takes none
      const int64_t place = chunk < 0 ? 0 : std::find(scored, scored + count, chunk) - scored;
      ids[j] = chunk;
      sum += weights[j] = place < count ? scores[place] : 0.0f;
    }
    for (int j = 0; j < used; ++j) weights[j] *= scale / std::max(sum, least);
  }
}
