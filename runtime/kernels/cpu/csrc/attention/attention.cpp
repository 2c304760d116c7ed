// Causal attention: who computes which queries and cells, and how the parts are joined.
#include <cmath>
#include <vector>

#include "driver.h"
#include "products/tiles.h"

namespace pshard {
namespace {

// Attention, cut into tasks of kQueries queries of every kv head and of a range of cells; where, depends on the model and
// on a token's place in its text only: it gets the same bits however the text was cut into steps, and whatever else is in
// them. Partial results are joined in a fixed order.
constexpr int kQueries = 16;
constexpr int kRunQueries = 8 * kQueries;  // of a kv head: tokens at places that share their ranges of cells
constexpr int64_t kMostSplits = 32;
constexpr int64_t kMostScratch = 32 << 20;  // bytes of partial results of one job of several sequences
// 16 sequences of 1057 cells on two cores: 2.6 ms; 3.1 with tasks of 128 cells, which prepare queries twice as often
constexpr int64_t kLeastCells = 256;

struct Attention {  // of tokens of one sequence, all within one run
  const float* q;
  float* out;
  int64_t q_stride, out_stride;  // from token to token, in floats
  const char *k, *v;
  int64_t k_stride, v_stride;
  int k_type, v_type;
  const int32_t* kv_blocks;
  int64_t block_cells;
  int64_t before;
  int tokens, heads, kv_heads, d;
  float scale;
  int64_t window;      // cells that a query sees, its own the last of them; 0: all
  const float* sinks;  // [heads] logits that take part in the softmax without a value; nullptr: none
  float cap;            // see AttentionTask
  const float* slopes;
  bool chunked;  // windows are chunks that follow each other: a query sees those cells of its own up to itself
  const int32_t* runs = nullptr;  // the first cells of those that one token sees, `each` in a row; nullptr: all
  int64_t each = 1;
  int64_t first_task = 0, first_join = 0, first_partial = 0;  // tasks, joins and partial floats of those before

  int shared() const { return heads / kv_heads; }
  int padded() const { return round_up(d, 16); }
  int queries() const { return tokens * shared(); }  // of one kv head: token by token
  int blocks() const { return (queries() + kQueries - 1) / kQueries; }
  int slots() const { return round_up(std::min(kQueries, queries()), 4); }
  // The first cell that token i sees.
  int64_t sees_from(int i) const { return seen_from(before + i); }
  int64_t seen_from(int64_t place) const {
    return !window ? 0 : chunked ? place / window * window : std::max<int64_t>(0, place + 1 - window);
  }
  int run() const { return std::max(1, kRunQueries / shared()); }  // tokens
  int64_t run_begin() const { return before / run() * run(); }
  int64_t origin() const {  // of the run's first token
    return seen_from(run_begin()) / kTileCells * kTileCells;
  }
  int64_t cells() const { return before + tokens - origin(); }  // that any of them sees
  int64_t split() const {  // cells of one task
    const int64_t most = run_begin() + run() - origin();
    return round_up<int64_t>(std::max((most + kMostSplits - 1) / kMostSplits, kLeastCells), kTileCells);
  }
  int64_t splits() const { return (cells() + split() - 1) / split(); }
  int64_t tasks() const { return blocks() * splits(); }
  int64_t joins() const { return static_cast<int64_t>(blocks()) * kv_heads; }
  int64_t partial_floats() const { return static_cast<int64_t>(kv_heads) * slots() * (padded() + 2); }
  int64_t place(int64_t cell) const {  // where it lies, in cells
    if (runs) cell = runs[cell / each] + cell % each;
    return kv_blocks ? kv_blocks[cell / block_cells] * block_cells + cell % block_cells : cell;
  }
  int64_t first_place(int64_t task) const { return place(origin() + task % splits() * split()); }
  // Query i of kv head h: where its row starts in q or out, whose tokens are `stride` apart.
  int64_t row(int head, int i, int64_t stride) const {
    return i / shared() * stride + static_cast<int64_t>(head * shared() + i % shared()) * d;
  }
};

// What computes bf16 cells where AVX-512 is in use; nullptr: the kernel of the instruction set, which alone bends scores.
const TileAttention* tile_unit(const Attention& a) {
  const bool suits = a.k_type == BF16 && a.v_type == BF16 && a.d % 32 == 0 && a.k_stride % 4 == 0;
  return suits && !a.cap && !a.slopes && &kernels() == kernels_avx512() ? attention_tiles() : nullptr;
}

// A thread's room for queries, then for a tile, then for the cells of a task that lie here and there.
size_t query_bytes(const Attention& a) { return round_up<size_t>(sizeof(float) * a.kv_heads * a.slots() * a.padded(), 64); }
size_t tile_bytes(const Attention& a) {
  return round_up<size_t>(attention_tile_bytes(a.kv_heads, std::min(kQueries, a.queries()), a.padded()), 64);
}
size_t room_bytes(const Attention& a) {
  return query_bytes(a) + tile_bytes(a) + (a.runs ? a.split() * (a.k_stride + a.v_stride) : 0);
}

// Copies of the cells [begin, end) that a token sees, one after the other.
void gather(const Attention& a, int64_t begin, int64_t end, uint8_t* keys, uint8_t* values) {
  for (int64_t cell = begin; cell < end;) {
    const int64_t n = std::min(end - cell, a.each - cell % a.each), place = a.place(cell);
    std::memcpy(keys + (cell - begin) * a.k_stride, a.k + place * a.k_stride, n * a.k_stride);
    std::memcpy(values + (cell - begin) * a.v_stride, a.v + place * a.v_stride, n * a.v_stride);
    cell += n;
  }
}

// Partial result: out [kv_heads][slots][padded], then peaks and sums [kv_heads][slots]. next: where this thread goes on.
void attend_task(const Attention& a, const TileAttention* unit, int64_t block, int64_t split, int64_t next, uint8_t* room,
                 float* partial) {
  const int first = static_cast<int>(block) * kQueries, queries = std::min(kQueries, a.queries() - first);
  const int slots = a.slots(), padded = a.padded();
  auto* q = reinterpret_cast<float*>(room);
  std::fill(q, q + a.kv_heads * slots * padded, 0.0f);
  int64_t sees[kQueries] = {}, visible[kQueries] = {}, last = 0;
  for (int i = 0; i < queries; ++i) {
    sees[i] = a.sees_from((first + i) / a.shared());
    visible[i] = last = a.before + (first + i) / a.shared() + 1;
  }
  const int64_t begin = a.origin() + split * a.split(), from = sees[0] / kTileCells * kTileCells;
  for (int head = 0; head < a.kv_heads; ++head)
    for (int i = 0; i < queries; ++i)
      for (int j = 0; j < a.d; ++j) q[(head * slots + i) * padded + j] = a.q[a.row(head, first + i, a.q_stride) + j] * a.scale;
  float* peak = partial + a.kv_heads * slots * padded;
  const int64_t start = std::max(begin, from), end = std::min(last, begin + a.split());
  const char *k = a.k, *v = a.v;
  if (a.runs) {
    uint8_t *keys = room + query_bytes(a) + tile_bytes(a), *values = keys + a.split() * a.k_stride;
    gather(a, start, end, keys, values);
    k = reinterpret_cast<const char*>(keys) - start * a.k_stride, v = reinterpret_cast<const char*>(values) - start * a.v_stride;
    next = start;  // what comes after lies here and there
  }
  (unit ? unit->attend : kernels().attention)({q, k, v, a.k_stride, a.v_stride, a.k_type, a.v_type, a.runs ? nullptr : a.kv_blocks, a.block_cells, a.kv_heads,
                       queries, slots, a.d, padded, sees, visible, a.cap, a.slopes, first, a.shared(), start, end, next, room + query_bytes(a),
                       partial, peak, peak + a.kv_heads * slots});
}

// Joins the splits of one query: out = sum_s e^(peak_s - peak) o_s / sum_s e^(peak_s - peak) sum_s, where a sink adds
// its e^(sink - peak) to what is divided by.
void join_splits(const Attention& a, int head, int query, const float* partials) {
  const int slots = a.slots(), padded = a.padded(), slot = head * slots + query % kQueries;
  const int64_t n = a.splits(), each = a.partial_floats(), peaks = static_cast<int64_t>(a.kv_heads) * slots * padded;
  const float* base = partials + query / kQueries * n * each;
  float* out = a.out + a.row(head, query, a.out_stride);
  const float sink = a.sinks ? a.sinks[head * a.shared() + query % a.shared()] : -INFINITY;
  float peak = sink;
  for (int64_t s = 0; s < n; ++s) peak = std::max(peak, base[s * each + peaks + slot]);
  float sum = a.sinks ? std::exp(sink - peak) : 0;
  std::fill(out, out + a.d, 0.0f);
  for (int64_t s = 0; s < n; ++s) {
    const float* part = base + s * each;
    const float part_sum = part[peaks + a.kv_heads * slots + slot];
    if (part_sum == 0) continue;  // sees no cell of this split
    const float weight = std::exp(part[peaks + slot] - peak);
    sum += weight * part_sum;
    for (int j = 0; j < a.d; ++j) out[j] += weight * part[slot * padded + j];
  }
  for (int j = 0; j < a.d; ++j) out[j] /= sum;
}

// The sequence that a task belongs to, of those whose `first` are given.
const Attention& find(const std::vector<Attention>& all, int64_t Attention::* first, int64_t task) {
  return *(std::upper_bound(all.begin(), all.end(), task, [=](int64_t t, const Attention& a) { return t < a.*first; }) - 1);
}

void attend(const std::vector<Attention>& all) {
  const Attention& last = all.back();
  const int64_t tasks = last.first_task + last.tasks(), joins = last.first_join + last.joins();
  const int64_t floats = last.first_partial + last.tasks() * last.partial_floats();
  const TileAttention* unit = tile_unit(last);
  Pool::instance().with_scratch(floats * sizeof(float), [&](uint8_t* scratch) {
    auto* partials = reinterpret_cast<float*>(scratch);
    Pool::instance().run([&](Team& team) {
      Around around = unit ? Around{unit->enter, unit->leave} : Around{};
      around.bytes = 0;
      for (const Attention& a : all) {
        around.room = std::max(around.room, room_bytes(a));
        around.bytes += a.cells() * a.heads * a.d * a.tokens * 8;
      }
      team.for_each_chunk(tasks, around, [&](const Chunk& chunk) {
        const Attention& a = find(all, &Attention::first_task, chunk.i);
        const Attention& b = find(all, &Attention::first_task, chunk.next);
        const int64_t own = chunk.i - a.first_task;
        attend_task(a, unit, own / a.splits(), own % a.splits(), b.first_place(chunk.next - b.first_task), chunk.room,
                    partials + a.first_partial + own * a.partial_floats());
      });
      team.for_each(joins, floats * 8, [&](int64_t join) {
        const Attention& a = find(all, &Attention::first_join, join);
        const int64_t own = join - a.first_join, block = own / a.kv_heads;
        for (int64_t i = block * kQueries; i < std::min<int64_t>(a.queries(), (block + 1) * kQueries); ++i)
          join_splits(a, static_cast<int>(own % a.kv_heads), static_cast<int>(i), partials + a.first_partial);
      });
    });
  });
}

// The first cells of those that a token sees at its place in the text, as its words say: see Kernels.choose_cells.
std::vector<int32_t> list_runs(const int32_t* words, int64_t place, int64_t per, int64_t each) {
  std::vector<int32_t> runs;
  for (int64_t block = 0; block * each <= place; ++block)
    if (words[block / per] >> block % per & 1) runs.push_back(static_cast<int32_t>(block * each));
  return runs;
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_attention(const float* q, int64_t q_stride, const void* k, const void* v, int64_t k_stride,
                                 int64_t v_stride, int k_type, int v_type, const int32_t* kv_blocks,
                                 int64_t block_cells, const int64_t* segments, int64_t n_segments, int heads,
                                 int kv_heads, int d, float scale, float* out, int64_t out_stride, int64_t window,
                                 const float* sinks, float cap, const float* slopes, int chunked,
                                 const int32_t* words, int64_t words_stride, int64_t each, int64_t most) {
  std::vector<Attention> all;  // as many as the scratch of one job holds
  std::vector<std::vector<int32_t>> runs;  // of those who see some cells alone
  for (const int64_t* s = segments; s < segments + 4 * n_segments; s += 4) {  // first token, tokens, cells before, block
    for (int64_t done = 0; done < s[1];) {
      const int64_t at = s[0] + done;
      Attention a{q + at * q_stride, out + at * out_stride, q_stride, out_stride, static_cast<const char*>(k),
                  static_cast<const char*>(v), k_stride, v_stride, k_type, v_type, kv_blocks ? kv_blocks + s[3] : nullptr,
                  block_cells, s[2] + done, 0, heads, kv_heads, d, scale, window, sinks, cap, slopes, chunked != 0};
      a.tokens = static_cast<int>(std::min(s[1] - done, a.run_begin() + a.run() - a.before));
      if (words && (a.before + 1) / each > most) {  // whose cells are brought together, by itself
        runs.push_back(list_runs(words + at * words_stride, a.before, block_cells / each, each));
        a.runs = runs.back().data(), a.each = each, a.tokens = 1;
        a.before = (runs.back().size() - 1) * each + std::min(each, a.before + 1 - runs.back().back()) - 1;
      } else if (words) {
        a.tokens = static_cast<int>(std::min<int64_t>(a.tokens, (most + 1) * each - 1 - a.before));
      }
      done += a.tokens;
      if (!all.empty()) {
        const Attention& b = all.back();
        const int64_t floats = b.first_partial + b.tasks() * b.partial_floats();
        if ((floats + a.tasks() * a.partial_floats()) * static_cast<int64_t>(sizeof(float)) > kMostScratch) {
          attend(all);
          all.clear();
          runs.erase(runs.begin(), runs.end() - (a.runs ? 1 : 0));
        } else {
          a.first_task = b.first_task + b.tasks(), a.first_join = b.first_join + b.joins(), a.first_partial = floats;
        }
      }
      all.push_back(a);
    }
  }
  if (!all.empty()) attend(all);
}
