// The C interface of the library: work is shared out over the pool's threads by whole records (16 weight rows), so no
// result depends on the number of threads. native.py documents each function and checks its arguments.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "pool.h"

namespace pshard {
namespace {

const Kernels* best_kernels() {
  if (const Kernels* k = kernels_avx512()) return k;
  if (const Kernels* k = kernels_avx2()) return k;
  return kernels_portable();
}
std::atomic<const Kernels*> active{nullptr};
const Kernels& kernels() {
  if (!active.load()) active.store(best_kernels());
  return *active.load();
}

constexpr int kSlice = 64;             // tokens whose activations are held at once
constexpr int64_t kTaskBytes = 128 << 10;  // weights of one task: small enough to balance, large enough to stream
constexpr size_t kCopyPiece = 1 << 20;
constexpr size_t kStreamFrom = 8 << 20;  // copies of this size would only push other things out of the caches

template <class Number>
Number round_up(Number n, Number to) { return (n + to - 1) / to * to; }

uint8_t* align(uint8_t* p) { return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; }

struct Matrix {
  const uint8_t* data;
  int type;
  int64_t rows, cols;
  Planes planes;
  size_t record;  // bytes of 16 rows

  Matrix(const void* w, int type, int64_t rows, int64_t cols)
      : data(static_cast<const uint8_t*>(w)), type(type), rows(rows), cols(cols), planes(planes_of(type, cols)),
        record(is_plain(type) ? 16 * cols * kFormats[type].nbytes : planes.record) {}
  int64_t records() const { return (rows + 15) / 16; }
  int rows_of(int64_t r) const { return static_cast<int>(std::min<int64_t>(16, rows - r * 16)); }
  const uint8_t* at(int64_t r) const { return data + r * record; }
  int offset() const { return kFormats[type].offset; }
};

// Runs body(record, the record this thread does next) for all records, several to a task.
template <class Body>
void for_records(Team& team, int64_t records, size_t nbytes, Body&& body) {
  const int64_t each = std::max<int64_t>(1, kTaskBytes / std::max<size_t>(nbytes, 1));
  team.for_each_ahead((records + each - 1) / each, [&](int64_t task, int64_t next_task) {
    const int64_t end = std::min(records, (task + 1) * each);
    for (int64_t r = task * each; r < end; ++r) body(r, r + 1 < end ? r + 1 : next_task * each);
  });
}

// How M tokens are grouped: eights, then the smallest of 1, 2, 4, 8 that holds the rest.
int group_size(int left) { return left >= 5 ? 8 : left >= 3 ? 4 : left; }
int padded_tokens(int m) { return m / 8 * 8 + (m % 8 ? group_size(m % 8) : 0); }
size_t act_bytes(int m, int64_t cols) { return sizeof(ActChunk) * padded_tokens(m) * (cols / 32); }

// Activations of up to kSlice tokens as the kernels of one matrix want them.
struct Activations {
  const float* x;
  int64_t stride;
  int tokens;
  ActChunk* act;  // unused for plain types

  // `ahead`: what the kernel should fetch meanwhile; only the first group of a record does.
  TokenGroup group(const Matrix& w, int first, const uint8_t* ahead) const {
    TokenGroup g{};
    g.ahead = ahead;
    g.count = group_size(tokens - first);
    if (is_plain(w.type))
      for (int i = 0; i < g.count; ++i) g.x[i] = x + std::min(first + i, tokens - 1) * stride;
    else
      g.act = act + first * (w.cols / 32);
    return g;
  }
};

void quantize_tokens(Team& team, const Activations& a, const Matrix& w) {
  if (is_plain(w.type)) return;
  constexpr int64_t kPiece = 64;  // chunks
  const int64_t chunks = w.cols / 32, pieces = (chunks + kPiece - 1) / kPiece;
  team.for_each(padded_tokens(a.tokens) * pieces, [&](int64_t task) {
    const int token = static_cast<int>(task / pieces), first = token / 8 * 8;
    const int64_t chunk = task % pieces * kPiece, n = std::min(kPiece, chunks - chunk);
    const int count = group_size(a.tokens - first);
    ActChunk* out = a.act + first * chunks + chunk * count + (token - first);
    if (token < a.tokens) kernels().quantize(a.x + token * a.stride + chunk * 32, n, w.offset(), out, count);
    else
      for (int64_t i = 0; i < n; ++i) std::memset(static_cast<void*>(out + i * count), 0, sizeof(ActChunk));
  });
}

void store_tile(const float* tile, int count, int rows, float* out, int64_t stride) {
  for (int i = 0; i < count; ++i) std::memcpy(out + i * stride, tile + i * 16, rows * sizeof(float));
}

void multiply(Team& team, const Activations& a, const Matrix& w, float* out, int64_t out_stride) {
  const auto kernel = kernels().linear[w.type];
  for_records(team, w.records(), w.record, [&](int64_t r, int64_t next) {
    alignas(64) float tile[8 * 16];
    for (int first = 0; first < a.tokens; first += 8) {
      const TokenGroup g = a.group(w, first, w.at(first ? r : next));
      kernel(w.at(r), w.planes, w.cols, w.rows_of(r), g, tile);
      store_tile(tile, std::min(g.count, a.tokens - first), w.rows_of(r), out + first * out_stride + r * 16, out_stride);
    }
  });
}

// hidden = silu(x gate^T) * (x up^T); `b` are the activations for `up`, the same as `a` where the types allow it.
void gate_up(Team& team, const Activations& a, const Activations& b, const Matrix& gate, const Matrix& up, float* hidden,
             int64_t stride) {
  const Kernels& k = kernels();
  for_records(team, gate.records(), gate.record + up.record, [&](int64_t r, int64_t next) {
    alignas(64) float g[8 * 16] = {}, u[8 * 16] = {};
    for (int first = 0; first < a.tokens; first += 8) {
      const TokenGroup group = a.group(gate, first, up.at(r)), group_up = b.group(up, first, gate.at(first ? r : next));
      k.linear[gate.type](gate.at(r), gate.planes, gate.cols, gate.rows_of(r), group, g);
      k.linear[up.type](up.at(r), up.planes, up.cols, up.rows_of(r), group_up, u);
      k.silu_mul(g, u, group.count * 16);
      store_tile(g, std::min(group.count, a.tokens - first), gate.rows_of(r), hidden + first * stride + r * 16, stride);
    }
  });
}

// Attention, cut into tasks of kQueries queries of every kv head and of a range of cells; how, depends on the shape
// only. Partial results are joined in a fixed order.
constexpr int kQueries = 16;

struct Attention {
  const float* q;
  const char *k, *v;
  int64_t cell_stride;
  int kv_type;
  int64_t before;
  int tokens, heads, kv_heads, d;
  float scale;
  float* out;

  int shared() const { return heads / kv_heads; }
  int padded() const { return round_up(d, 16); }
  int queries() const { return tokens * shared(); }  // of one kv head: token by token
  int blocks() const { return (queries() + kQueries - 1) / kQueries; }
  int slots() const { return round_up(std::min(kQueries, queries()), 4); }
  int64_t cells() const { return before + tokens; }
  int64_t split() const {  // cells of one task
    const int64_t splits = std::clamp(64 / blocks(), 1, 32);
    return round_up<int64_t>((cells() + splits - 1) / splits, kTileCells);
  }
  int64_t splits() const { return (cells() + split() - 1) / split(); }
  int64_t partial_floats() const { return static_cast<int64_t>(kv_heads) * slots() * (padded() + 2); }
  // Query i of kv head h: where its row starts in q and out.
  int64_t row(int head, int i) const { return (static_cast<int64_t>(i / shared()) * heads + head * shared() + i % shared()) * d; }
};

// Partial result: out [kv_heads][slots][padded], then peaks and sums [kv_heads][slots].
void attend_task(const Attention& a, int64_t block, int64_t split, float* partial) {
  const int first = static_cast<int>(block) * kQueries, queries = std::min(kQueries, a.queries() - first);
  const int slots = a.slots(), padded = a.padded();
  std::vector<float> q(a.kv_heads * slots * padded, 0.0f);
  int64_t visible[kQueries] = {}, last = 0;
  for (int i = 0; i < queries; ++i) visible[i] = last = a.before + (first + i) / a.shared() + 1;
  for (int head = 0; head < a.kv_heads; ++head)
    for (int i = 0; i < queries; ++i)
      for (int j = 0; j < a.d; ++j) q[(head * slots + i) * padded + j] = a.q[a.row(head, first + i) + j] * a.scale;
  const std::unique_ptr<uint8_t[]> tile(new uint8_t[attention_tile_bytes(padded) + 64]);
  float* peak = partial + a.kv_heads * slots * padded;
  kernels().attention({q.data(), a.k, a.v, a.cell_stride, a.kv_type, a.kv_heads, queries, slots, a.d, padded, visible,
                       split * a.split(), std::min(last, (split + 1) * a.split()), align(tile.get()), partial, peak,
                       peak + a.kv_heads * slots});
}

// Joins the splits of one query: out = sum_s e^(peak_s - peak) o_s / sum_s e^(peak_s - peak) sum_s.
void join_splits(const Attention& a, int head, int query, const float* partials) {
  const int slots = a.slots(), padded = a.padded(), slot = head * slots + query % kQueries;
  const int64_t n = a.splits(), each = a.partial_floats(), peaks = static_cast<int64_t>(a.kv_heads) * slots * padded;
  const float* base = partials + query / kQueries * n * each;
  float* out = a.out + a.row(head, query);
  float peak = -INFINITY, sum = 0;
  for (int64_t s = 0; s < n; ++s) peak = std::max(peak, base[s * each + peaks + slot]);
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

}  // namespace
}  // namespace pshard

using namespace pshard;

#define PSHARD_API __attribute__((visibility("default")))

extern "C" {

PSHARD_API int pshard_type(const char* name) {
  for (int t = 0; t < kTypes; ++t)
    if (!std::strcmp(kFormats[t].name, name)) return t;
  return -1;
}

PSHARD_API int64_t pshard_record_nbytes(int type, int64_t cols) { return Matrix(nullptr, type, 16, cols).record; }

PSHARD_API const char* pshard_isa() { return kernels().isa; }

PSHARD_API int pshard_set_isa(const char* name) {
  for (const Kernels* k : {kernels_avx512(), kernels_avx2(), kernels_portable()})
    if (k && !std::strcmp(k->isa, name)) return active.store(k), 0;
  return -1;
}

PSHARD_API int pshard_threads() { return Pool::instance().size(); }

PSHARD_API void pshard_set_threads(int n, const int* cpus, int n_cpus) {
  Pool::instance().resize(n, std::vector<int>(cpus, cpus + n_cpus));
}

PSHARD_API void pshard_pack(const uint8_t* raw, int64_t row_bytes, int type, int64_t row_start, int64_t row_stop, int64_t col_start,
                 int64_t col_stop, uint8_t* out) {
  const Format& f = kFormats[type];
  const int64_t cols = col_stop - col_start, rows = row_stop - row_start;
  const uint8_t* from = raw + row_start * row_bytes + col_start / f.block * f.nbytes;
  const Matrix m(out, type, rows, cols);
  Pool::instance().run([&](Team& team) {
    for_records(team, m.records(), m.record, [&](int64_t r, int64_t) {
      const uint8_t* sources[16] = {};
      for (int i = 0; i < m.rows_of(r); ++i) sources[i] = from + (r * 16 + i) * row_bytes;
      uint8_t* record = out + r * m.record;
      if (!is_plain(type)) return pack_record(type, sources, cols, record);
      for (int i = 0; i < m.rows_of(r); ++i) std::memcpy(record + i * cols * f.nbytes, sources[i], cols * f.nbytes);
    });
  });
}

PSHARD_API void pshard_linear(const float* x, int64_t x_stride, const void* w, int type, int64_t rows, int64_t cols, float* out,
                   int64_t out_stride, int64_t tokens) {
  const Matrix m(w, type, rows, cols);
  const size_t need = act_bytes(static_cast<int>(std::min<int64_t>(tokens, kSlice)), cols);
  Pool::instance().with_scratch(need, [&](uint8_t* scratch) {
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += kSlice) {
        const int n = static_cast<int>(std::min<int64_t>(kSlice, tokens - first));
        const Activations a{x + first * x_stride, x_stride, n, reinterpret_cast<ActChunk*>(scratch)};
        quantize_tokens(team, a, m);
        multiply(team, a, m, out + first * out_stride, out_stride);
      }
    });
  });
}

// silu(x gate^T) * (x up^T), then times down^T unless down_type is -1; `out` is [tokens, hidden] or [tokens, inner].
PSHARD_API void pshard_ffn(const float* x, int64_t x_stride, const void* gate, int gate_type, const void* up, int up_type,
                           const void* down, int down_type, int64_t hidden, int64_t inner, float* out, int64_t out_stride,
                           int64_t tokens) {
  const bool whole = down_type >= 0;
  const Matrix g(gate, gate_type, inner, hidden), u(up, up_type, inner, hidden);
  const Matrix d(down, whole ? down_type : F32, hidden, inner);
  const int slice = static_cast<int>(std::min<int64_t>(tokens, kSlice));
  const bool alike = g.offset() == u.offset() && is_plain(g.type) == is_plain(u.type);
  const int64_t width = round_up<int64_t>(inner, 16);
  const size_t x_bytes = act_bytes(slice, hidden), h_bytes = whole ? act_bytes(slice, inner) : 0;
  const size_t inside_bytes = whole ? slice * width * sizeof(float) : 0;
  Pool::instance().with_scratch(2 * x_bytes + h_bytes + inside_bytes, [&](uint8_t* scratch) {
    auto* act = reinterpret_cast<ActChunk*>(scratch);
    auto* act_up = alike ? act : reinterpret_cast<ActChunk*>(scratch + x_bytes);
    auto* act_hidden = reinterpret_cast<ActChunk*>(scratch + 2 * x_bytes);
    auto* inside = reinterpret_cast<float*>(scratch + 2 * x_bytes + h_bytes);
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += kSlice) {
        const int n = static_cast<int>(std::min<int64_t>(kSlice, tokens - first));
        const Activations a{x + first * x_stride, x_stride, n, act}, b{a.x, x_stride, n, act_up};
        const Activations h{inside, width, n, act_hidden};
        float* rows = out + first * out_stride;
        quantize_tokens(team, a, g);
        if (!alike) quantize_tokens(team, b, u);
        gate_up(team, a, b, g, u, whole ? inside : rows, whole ? width : out_stride);
        if (!whole) continue;
        quantize_tokens(team, h, d);
        multiply(team, h, d, rows, out_stride);
      }
    });
  });
}

PSHARD_API void pshard_dequantize(const void* w, int type, int64_t rows, int64_t cols, int64_t row_start, int64_t row_stop, void* out,
                       int64_t out_stride, int bf16) {
  const Matrix m(w, type, rows, cols);
  const int64_t first = row_start / 16, records = (row_stop + 15) / 16 - first;
  Pool::instance().run([&](Team& team) {
    for_records(team, records, m.record, [&](int64_t i, int64_t) {
      const int64_t r = first + i, from = std::max(row_start, r * 16), to = std::min(row_stop, r * 16 + 16);
      void* at = static_cast<char*>(out) + (from - row_start) * out_stride * (bf16 ? 2 : 4);
      kernels().dequantize[type](m.at(r), m.planes, cols, static_cast<int>(from - r * 16), static_cast<int>(to - r * 16), at,
                                 out_stride, bf16);
    });
  });
}

PSHARD_API void pshard_get_rows(const void* w, int type, int64_t rows, int64_t cols, const int64_t* ids, int64_t n, float* out) {
  const Matrix m(w, type, rows, cols);
  const auto look_up = [&](int64_t i) {
    const int row = static_cast<int>(ids[i] % 16);
    kernels().dequantize[type](m.at(ids[i] / 16), m.planes, cols, row, row + 1, out + i * cols, cols, false);
  };
  if (n * cols < 65536) {  // waking the pool takes longer
    for (int64_t i = 0; i < n; ++i) look_up(i);
    return;
  }
  Pool::instance().run([&](Team& team) { team.for_each(n, look_up); });
}

PSHARD_API void pshard_attention(const float* q, const void* k, const void* v, int64_t cell_stride, int kv_type, int64_t before,
                      int64_t tokens, int heads, int kv_heads, int d, float scale, float* out) {
  const Attention a{q, static_cast<const char*>(k), static_cast<const char*>(v), cell_stride, kv_type, before,
                    static_cast<int>(tokens), heads, kv_heads, d, scale, out};
  const int64_t splits = a.splits();
  Pool::instance().with_scratch(a.blocks() * splits * a.partial_floats() * sizeof(float), [&](uint8_t* scratch) {
    auto* partials = reinterpret_cast<float*>(scratch);
    Pool::instance().run([&](Team& team) {
      team.for_each(a.blocks() * splits, [&](int64_t task) {
        attend_task(a, task / splits, task % splits, partials + task * a.partial_floats());
      });
      team.for_each(a.kv_heads * a.queries(), [&](int64_t i) {
        join_splits(a, static_cast<int>(i % a.kv_heads), static_cast<int>(i / a.kv_heads), partials);
      });
    });
  });
}

PSHARD_API void pshard_memcpy(void* to, const void* from, size_t nbytes) {
  Pool::instance().run([&](Team& team) {
    team.for_each((nbytes + kCopyPiece - 1) / kCopyPiece, [&](int64_t i) {
      const size_t at = i * kCopyPiece;
      auto *piece = static_cast<uint8_t*>(to) + at;
      const auto *source = static_cast<const uint8_t*>(from) + at;
      const size_t n = std::min(kCopyPiece, nbytes - at);
      if (nbytes >= kStreamFrom) kernels().stream(piece, source, n);
      else std::memcpy(piece, source, n);
    });
  });
}

// Reads nbytes once with all threads; returns the seconds, and a sum so that no read can be left out.
PSHARD_API double pshard_read(const uint8_t* data, size_t nbytes, uint64_t* sum) {
  std::atomic<uint64_t> total{0};
  const auto start = std::chrono::steady_clock::now();
  Pool::instance().run([&](Team& team) {
    team.for_each((nbytes + kTaskBytes - 1) / kTaskBytes, [&](int64_t i) {
      const size_t at = i * kTaskBytes;
      total += kernels().sum(data + at, std::min<size_t>(kTaskBytes, nbytes - at));
    });
  });
  *sum = total;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // extern "C"
