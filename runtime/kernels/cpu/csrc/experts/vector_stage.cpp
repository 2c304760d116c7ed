// A stage of experts on vectors, up to kSlice pairs of an expert at a time.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "experts/stage.h"
#include "products/activations.h"

namespace pshard {
namespace {

constexpr int64_t kWave = 512;  // pairs whose activations are held at once
constexpr int64_t kPiece = 32;  // chunks of a task
constexpr int64_t kTasks = 8;   // of a thread, at least

int64_t pieces_of_size(int64_t n, int64_t size) { return (n + size - 1) / size; }

// What the kernels of one matrix multiply: every token's chunks, and those of a wave's groups as the kernels want them.
struct Feed {
  ActChunk *tokens, *wave;

  // A group's chunks are at most twice as many as its pairs'.
  ActChunk* group(const Group& g, const Group& first, int64_t chunks) const {
    return wave + 2 * (g.before - first.before) * chunks;
  }
};

// The first stage's tokens have several experts each: they are quantised once.
size_t token_bytes(const Stage& s, int64_t tokens) { return s.matrices == 2 ? sizeof(ActChunk) * tokens * (s.w[0].cols / 32) : 0; }
size_t wave_bytes(const Stage& s, int64_t pairs) {
  return sizeof(ActChunk) * 2 * std::min(pairs, kWave) * (s.w[0].cols / 32);
}

void quantize_tokens(Team& team, const Stage& s, const Matrix& w, int64_t tokens, ActChunk* out) {
  const int64_t chunks = w.cols / 32, pieces = (chunks + kPiece - 1) / kPiece;
  team.for_each(tokens * pieces, tokens * w.cols * 16, [&](int64_t task) {
    const int64_t token = task / pieces, chunk = task % pieces * kPiece;
    kernels().quantize(s.from + token * s.from_stride + chunk * 32, std::min(kPiece, chunks - chunk), w.offset(),
                       out + token * chunks + chunk, 1);
  });
}

// Chunks [begin, begin + n) of a group's pairs: copied from their tokens', or quantised.
void fill_group(const Stage& s, const Matrix& w, const Feed& feed, const Group& g, ActChunk* to, int64_t begin, int64_t n) {
  const int64_t chunks = w.cols / 32;
  for (int first = 0; first < g.count; first += 8) {
    const int count = group_size(g.count - first);
    for (int i = 0; i < count; ++i) {
      ActChunk* out = to + first * chunks + begin * count + i;
      const int64_t place = g.first + first + i;
      if (first + i >= g.count)
        for (int64_t c = 0; c < n; ++c) std::memset(static_cast<void*>(out + c * count), 0, sizeof(ActChunk));
      else if (s.matrices == 2)
        for (int64_t c = 0; c < n; ++c) out[c * count] = feed.tokens[s.pairs[place] / s.used * chunks + begin + c];
      else kernels().quantize(s.row_from(place) + begin * 32, n, w.offset(), out, count);
    }
  }
}

// A single token's chunks are taken where they lie.
bool needs_filling(const Stage& s, const Group& g) { return g.count > 1 || s.matrices == 1; }

void fill_wave(Team& team, const Stage& s, const Matrix& w, const Feed& feed, const Group* groups, int64_t n) {
  const int64_t chunks = w.cols / 32, pieces = (chunks + kPiece - 1) / kPiece;
  int64_t pairs = 0;
  for (int64_t i = 0; i < n; ++i) pairs += needs_filling(s, groups[i]) ? groups[i].count : 0;
  if (!pairs) return;
  team.for_each(n * pieces, pairs * w.cols * 16, [&](int64_t task) {
    const Group& g = groups[task / pieces];
    const int64_t begin = task % pieces * kPiece;
    if (needs_filling(s, g))
      fill_group(s, w, feed, g, feed.group(g, groups[0], chunks), begin, std::min(kPiece, chunks - begin));
  });
}

// Tokens `first` and on of a group; what to fetch meanwhile is said later.
TokenGroup take_tokens(const Stage& s, const Matrix& w, const Feed& feed, const Group& g, const Group& start, int first) {
  const int64_t chunks = w.cols / 32;
  TokenGroup t;
  t.count = group_size(g.count - first);
  if (is_plain(w.type))
    for (int i = 0; i < t.count; ++i) t.x[i] = s.row_from(g.first + std::min(first + i, g.count - 1));
  else if (needs_filling(s, g)) t.act = feed.group(g, start, chunks) + first * chunks;
  else t.act = feed.tokens + s.pairs[g.first] / s.used * chunks;
  return t;
}

// Records [begin, end) of a group's expert; `next` is what this thread reads after them. A record takes as little as a
// few hundred nanoseconds, so all that can be is found out once.
void multiply_records(const Stage& s, const Feed* feeds, const Group& g, const Group& start, int64_t begin, int64_t end,
                      const uint8_t* next) {
  TokenGroup tokens[kSlice / 8][2];
  for (int first = 0; first < g.count; first += 8)
    for (int i = 0; i < s.matrices; ++i) tokens[first / 8][i] = take_tokens(s, s.w[i], feeds[i], g, start, first);
  alignas(64) float sums[2][8 * 16] = {};  // of plain types only rows that exist are written
  const auto multiply = [&](int i, int first, int64_t r, const uint8_t* ahead) {
    const Matrix& w = s.w[i];
    TokenGroup& t = tokens[first / 8][i];
    t.ahead = ahead;
    kernels().linear[w.type](s.record(i, g.expert, r), w.planes, w.cols, w.rows_of(r), t, sums[i]);
  };
  for (int64_t r = begin; r < end; ++r)
    for (int first = 0; first < g.count; first += 8) {
      const uint8_t* after = first ? s.record(0, g.expert, r) : r + 1 < end ? s.record(0, g.expert, r + 1) : next;
      multiply(0, first, r, s.matrices == 2 ? s.record(1, g.expert, r) : after);
      if (s.matrices == 2) multiply(1, first, r, after);
      s.finish(sums[0], sums[1], std::min(8, g.count - first), g.expert, g.first + first, r);
    }
}

void multiply_wave(Team& team, const Stage& s, const Feed* feeds, const Group* groups, int64_t n) {
  const int64_t records = s.w[0].records(), nbytes = s.w[0].record + (s.matrices == 2 ? s.w[1].record : 0);
  if (records == 0) return;
  const int64_t even = n * records / (team.size() * kTasks);  // few experts: the last tasks of some wait for nobody
  const int64_t most = std::clamp<int64_t>(even, 1, records_per_task(nbytes));
  const int64_t each = pieces_of_size(records, pieces_of_size(records, most)), tasks = pieces_of_size(records, each);
  team.for_each_ahead(n * tasks, count_pairs(groups, n) * records * nbytes, [&](int64_t task, int64_t next) {
    const int64_t begin = task % tasks * each, end = std::min(records, begin + each);
    multiply_records(s, feeds, groups[task / tasks], groups[0], begin, end,
                     s.record(0, groups[next / tasks].expert, next % tasks * each));
  });
}

}  // namespace

size_t vector_bytes(const Stage& s, int64_t tokens, int64_t pairs) {
  return s.matrices * (token_bytes(s, tokens) + wave_bytes(s, pairs));
}

void multiply_vectors(Team& team, const Stage& s, const Group* groups, int64_t n, int64_t tokens, uint8_t* scratch) {
  if (n == 0) return;
  const size_t wave = wave_bytes(s, tokens * s.used), each = token_bytes(s, tokens) + wave;
  Feed feeds[2];
  const int own = s.matrices == 2 && !alike(s.w[0], s.w[1]) ? 2 : 1;  // feeds that differ
  for (int i = 0; i < 2; ++i) {
    uint8_t* at = scratch + (i < own ? i : 0) * each;
    feeds[i] = {reinterpret_cast<ActChunk*>(at + wave), reinterpret_cast<ActChunk*>(at)};
  }
  for (int i = 0; i < own; ++i)
    if (s.matrices == 2 && !is_plain(s.w[i].type)) quantize_tokens(team, s, s.w[i], tokens, feeds[i].tokens);
  for_waves(groups, n, kWave, [&](const Group* some, int64_t count) {
    for (int i = 0; i < own; ++i)
      if (!is_plain(s.w[i].type)) fill_wave(team, s, s.w[i], feeds[i], some, count);
    multiply_wave(team, s, feeds, some, count);
  });
}

}  // namespace pshard
