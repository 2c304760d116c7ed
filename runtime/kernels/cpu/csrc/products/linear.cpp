// Linear layers on packed or plain weights, alone and as SwiGLU.
#include <algorithm>
#include <cstring>
#include <vector>

#include "driver.h"
#include "products/activations.h"

namespace pshard {
namespace {

size_t act_bytes(int m, int64_t cols) { return sizeof(ActChunk) * padded_tokens(m) * (cols / 32); }

constexpr int64_t kPiece = 64;  // chunks of a token that are quantised as one task
int64_t pieces_of(int64_t cols) { return (cols / 32 + kPiece - 1) / kPiece; }

void quantize_piece(const Activations& a, const Matrix& w, int64_t task) {
  const int64_t chunks = w.cols / 32, pieces = pieces_of(w.cols);
  const int token = static_cast<int>(task / pieces), first = token / 8 * 8;
  const int64_t chunk = task % pieces * kPiece, n = std::min(kPiece, chunks - chunk);
  const int count = group_size(a.tokens - first);
  ActChunk* out = a.act + first * chunks + chunk * count + (token - first);
  if (token < a.tokens) kernels().quantize(a.x + token * a.stride + chunk * 32, n, w.offset(), out, count);
  else
    for (int64_t i = 0; i < n; ++i) std::memset(static_cast<void*>(out + i * count), 0, sizeof(ActChunk));
}

void quantize_tokens(Team& team, const Activations& a, const Matrix& w) {
  if (is_plain(w.type)) return;
  team.for_each(padded_tokens(a.tokens) * pieces_of(w.cols), a.tokens * w.cols * 16,
                [&](int64_t task) { quantize_piece(a, w, task); });
}

// A matrix of several that multiply the same tokens, its columns of the output, and the first of its tasks.
struct Part {
  Matrix w;
  Activations a;
  float* out;
  int64_t first_task = 0;

  int64_t each() const { return records_per_task(w.record); }
  int64_t tasks() const { return (w.records() + each() - 1) / each(); }
};

// `base`: what the product is added to, rows of as many floats as the matrix has rows; nullptr: nothing.
void multiply(Team& team, std::vector<Part>& parts, int64_t out_stride, const float* base) {
  int64_t tasks = 0, bytes = 0;
  for (Part& p : parts) p.first_task = tasks, tasks += p.tasks(), bytes += p.w.nbytes() * p.a.tokens;
  const auto part_of = [&](int64_t task) -> const Part& {
    size_t i = parts.size() - 1;
    while (task < parts[i].first_task) --i;
    return parts[i];
  };
  team.for_each_ahead(tasks, bytes, [&](int64_t task, int64_t next_task) {
    const Part &p = part_of(task), &following = part_of(next_task);
    const Matrix& w = p.w;
    const auto kernel = kernels().linear[w.type];
    const int64_t begin = (task - p.first_task) * p.each(), end = std::min(w.records(), begin + p.each());
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* next =
          r + 1 < end ? w.at(r + 1) : following.w.at((next_task - following.first_task) * following.each());
      alignas(64) float tile[8 * 16];
      for (int first = 0; first < p.a.tokens; first += 8) {
        const TokenGroup g = p.a.group(w, first, first ? w.at(r) : next);
        kernel(w.at(r), w.planes, w.cols, w.rows_of(r), g, tile);
        const float* add = base ? base + first * w.rows + r * 16 : nullptr;
        store_tiles(tile, std::min(g.count, p.a.tokens - first), w.rows_of(r), p.out + first * out_stride + r * 16,
                    out_stride, add, w.rows);
      }
    }
  });
}

// out (+)= x w^T of each matrix; their outputs lie side by side.
void run_linear(const float* x, int64_t x_stride, const std::vector<Matrix>& matrices, float* out, int64_t out_stride,
                int64_t tokens, bool accumulate) {
  const int slice = static_cast<int>(std::min<int64_t>(tokens, kSlice));
  const size_t need = act_bytes(slice, matrices[0].cols), all = need * matrices.size();
  Pool::instance().with_scratch(all + base_bytes(slice, matrices[0].rows, accumulate), [&](uint8_t* scratch) {
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += kSlice) {
        const int n = static_cast<int>(std::min<int64_t>(kSlice, tokens - first));
        std::vector<Part> parts;
        parts.reserve(matrices.size());
        float* at = out + first * out_stride;
        for (const Matrix& m : matrices) {
          Activations a{x + first * x_stride, x_stride, n, reinterpret_cast<ActChunk*>(scratch + parts.size() * need)};
          const auto same = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return alike(p.w, m); });
          if (same == parts.end()) quantize_tokens(team, a, m);
          else a.act = same->a.act;
          parts.push_back({m, a, at});
          at += m.rows;
        }
        multiply(team, parts, out_stride,
                 accumulate ? copy_base(team, parts[0].out, out_stride, n, matrices[0].rows, scratch + all) : nullptr);
      }
    });
  });
}

// Each of `heads` matrices, which lie one behind the other, with its own part of x.
void run_heads(const float* x, int64_t x_stride, int64_t x_head, const Matrix& first_matrix, int64_t heads, float* out,
               int64_t out_stride, int64_t out_head, int64_t tokens) {
  const Matrix& m = first_matrix;
  const int64_t each = is_plain(m.type) ? m.rows * row_nbytes(m.type, m.cols) : m.nbytes();
  const size_t need = act_bytes(static_cast<int>(std::min<int64_t>(tokens, kSlice)), m.cols);
  Pool::instance().with_scratch(need * heads, [&](uint8_t* scratch) {
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += kSlice) {
        const int n = static_cast<int>(std::min<int64_t>(kSlice, tokens - first));
        std::vector<Part> parts;
        parts.reserve(heads);
        for (int64_t h = 0; h < heads; ++h)
          parts.push_back({Matrix(m.data + h * each, m.type, m.rows, m.cols),
                           {x + first * x_stride + h * x_head, x_stride, n, reinterpret_cast<ActChunk*>(scratch + h * need)},
                           out + first * out_stride + h * out_head});
        const int64_t pieces = is_plain(m.type) ? 0 : padded_tokens(n) * pieces_of(m.cols);
        if (pieces)
          team.for_each(heads * pieces, heads * n * m.cols * 16, [&](int64_t task) {
            quantize_piece(parts[task / pieces].a, parts[task / pieces].w, task % pieces);
          });
        multiply(team, parts, out_stride, nullptr);
      }
    });
  });
}

// hidden = act(x gate^T) * (x up^T), see bend_gate; `b` are the activations for `up`, the same as `a` where the types allow it.
void gate_up(Team& team, const Activations& a, const Activations& b, const Matrix& gate, const Matrix& up,
             float* hidden, int64_t stride, int gate_kind) {
  const Kernels& k = kernels();
  for_records(team, gate.records(), gate.record + up.record, a.tokens, [&](int64_t r, int64_t next) {
    alignas(64) float g[8 * 16] = {}, u[8 * 16] = {};
    for (int first = 0; first < a.tokens; first += 8) {
      const TokenGroup group = a.group(gate, first, up.at(r)), group_up = b.group(up, first, gate.at(first ? r : next));
      k.linear[gate.type](gate.at(r), gate.planes, gate.cols, gate.rows_of(r), group, g);
      k.linear[up.type](up.at(r), up.planes, up.cols, up.rows_of(r), group_up, u);
      bend_gate(k, gate_kind, g, u, group.count * 16);
      store_tiles(g, std::min(group.count, a.tokens - first), gate.rows_of(r), hidden + first * stride + r * 16, stride);
    }
  });
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_linear(const float* x, int64_t x_stride, const void* w, int type, int64_t rows, int64_t cols,
                              float* out, int64_t out_stride, int64_t tokens, int accumulate) {
  run_linear(x, x_stride, {Matrix(w, type, rows, cols)}, out, out_stride, tokens, accumulate);
}

PSHARD_API void pshard_linear_group(const float* x, int64_t x_stride, const void* const* weights, const int* types,
                                    const int64_t* rows, int count, int64_t cols, float* out, int64_t out_stride,
                                    int64_t tokens) {
  std::vector<Matrix> matrices;
  for (int i = 0; i < count; ++i) matrices.emplace_back(weights[i], types[i], rows[i], cols);
  run_linear(x, x_stride, matrices, out, out_stride, tokens, false);
}

PSHARD_API void pshard_head_products(const float* x, int64_t x_stride, int64_t x_head, const void* w, int type,
                                     int64_t heads, int64_t rows, int64_t cols, float* out, int64_t out_stride,
                                     int64_t out_head, int64_t tokens) {
  run_heads(x, x_stride, x_head, Matrix(w, type, rows, cols), heads, out, out_stride, out_head, tokens);
}

// act(x gate^T) * (x up^T), see bend_gate, then times down^T unless down_type is -1; `out` is [tokens, hidden], maybe added to, or
// [tokens, inner].
PSHARD_API void pshard_ffn(const float* x, int64_t x_stride, const void* gate, int gate_type, const void* up,
                           int up_type, const void* down, int down_type, int64_t hidden, int64_t inner, float* out,
                           int64_t out_stride, int64_t tokens, int accumulate, int gate_kind) {
  const bool whole = down_type >= 0;
  const Matrix g(gate, gate_type, inner, hidden), u(up, up_type, inner, hidden);
  const Matrix d(down, whole ? down_type : F32, hidden, inner);
  const int slice = static_cast<int>(std::min<int64_t>(tokens, kSlice));
  const int64_t width = round_up<int64_t>(inner, 16);
  const size_t x_bytes = act_bytes(slice, hidden), h_bytes = whole ? act_bytes(slice, inner) : 0;
  const size_t inside_bytes = whole ? slice * width * sizeof(float) : 0, all = 2 * x_bytes + h_bytes + inside_bytes;
  Pool::instance().with_scratch(all + base_bytes(slice, hidden, accumulate), [&](uint8_t* scratch) {
    auto* act = reinterpret_cast<ActChunk*>(scratch);
    auto* act_up = alike(g, u) ? act : reinterpret_cast<ActChunk*>(scratch + x_bytes);
    auto* act_hidden = reinterpret_cast<ActChunk*>(scratch + 2 * x_bytes);
    auto* inside = reinterpret_cast<float*>(scratch + 2 * x_bytes + h_bytes);
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += kSlice) {
        const int n = static_cast<int>(std::min<int64_t>(kSlice, tokens - first));
        const Activations a{x + first * x_stride, x_stride, n, act}, b{a.x, x_stride, n, act_up};
        const Activations h{inside, width, n, act_hidden};
        float* rows = out + first * out_stride;
        quantize_tokens(team, a, g);
        if (act_up != act) quantize_tokens(team, b, u);
        gate_up(team, a, b, g, u, whole ? inside : rows, whole ? width : out_stride, gate_kind);
        if (!whole) continue;
        quantize_tokens(team, h, d);
        std::vector<Part> parts{{d, h, rows}};
        multiply(team, parts, out_stride,
                 accumulate ? copy_base(team, rows, out_stride, n, hidden, scratch + all) : nullptr);
      }
    });
  });
}
