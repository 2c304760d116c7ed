// Linear layers of many tokens on a matrix unit, alone and as gate and up of SwiGLU.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "products/panels.h"

namespace pshard {
namespace {

std::atomic<const TileKernels*> active{nullptr};
std::atomic<bool> chosen{false};

struct Slice {  // tokens of one pass
  const float* x;
  int64_t stride;
  int tokens;
  int tiles() const { return (tokens + 15) / 16; }
};

void convert(Team& team, const TileKernels& k, const Slice& s, int64_t cols, uint16_t* act) {
  team.for_each(blocks_of(cols) * s.tiles(), s.tokens * cols * 8, [&](int64_t i) {
    const int64_t column = i / s.tiles() * kBlockChunks * 32, token = i % s.tiles() * 16;
    const int n = static_cast<int>(std::min<int64_t>(16, s.tokens - token));
    k.convert(s.x + token * s.stride + column, s.stride, n, cols - column, act + i * kBlockWords);
  });
}

// out (+)= x w^T of one matrix, or act(x w^T) * (x up^T) of two, see bend_gate.
void multiply(Team& team, const TileKernels& k, const Slice& s, const Matrix& w, const Matrix* up, const uint16_t* act,
              float* out, int64_t out_stride, const float* base, int gate_kind) {
  const int matrices = up ? 2 : 1;
  const int64_t each = panel_records(team, w.records(), matrices);
  const Around around{k.enter, k.leave, kPanelRoom, w.nbytes() * matrices * s.tokens};
  team.for_each_chunk((w.records() + each - 1) / each, around, [&](const Chunk& chunk) {
    const int64_t first = chunk.i * each;
    const int n = static_cast<int>(std::min(each, w.records() - first));
    const Matrix* all[2] = {&w, up};
    const uint8_t* data[2] = {w.data, up ? up->data : nullptr};
    const TilePanel p = fill_panel(all, data, matrices, first, n, act, s.tiles(), chunk.room);
    k.multiply(p);
    for (int t = 0; t < s.tiles(); ++t)
      for (int i = 0; i < n; ++i) {
        float* tile = p.sums + (t * p.count + i) * kTileSums;
        if (up) bend_gate(kernels(), gate_kind, tile, tile + n * kTileSums, kTileSums);
        store_tiles(tile, std::min(16, s.tokens - t * 16), w.rows_of(first + i),
                    out + t * 16 * out_stride + (first + i) * 16, out_stride,
                    base ? base + t * 16 * w.rows + (first + i) * 16 : nullptr, w.rows);
      }
  });
}

void run(const float* x, int64_t x_stride, const Matrix& w, const Matrix* up, float* out, int64_t out_stride,
         int64_t tokens, bool accumulate, int gate_kind = kSilu) {
  const TileKernels& k = *tile_unit();
  const int64_t slice = std::min<int64_t>(tokens, 16 * kSliceTiles), tiles = (slice + 15) / 16;
  const size_t act_bytes = sizeof(uint16_t) * blocks_of(w.cols) * tiles * kBlockWords;
  Pool::instance().with_scratch(act_bytes + base_bytes(slice, w.rows, accumulate), [&](uint8_t* scratch) {
    auto* act = reinterpret_cast<uint16_t*>(scratch);
    Pool::instance().run([&](Team& team) {
      for (int64_t first = 0; first < tokens; first += slice) {
        const Slice s{x + first * x_stride, x_stride, static_cast<int>(std::min(slice, tokens - first))};
        convert(team, k, s, w.cols, act);
        float* rows = out + first * out_stride;
        multiply(team, k, s, w, up, act, rows, out_stride,
                 accumulate ? copy_base(team, rows, out_stride, s.tokens, w.rows, scratch + act_bytes) : nullptr,
                 gate_kind);
      }
    });
  });
}

}  // namespace

const TileKernels* tile_unit() {
  if (!chosen.load()) active.store(tiles_amx()), chosen.store(true);
  return active.load();
}

}  // namespace pshard

using namespace pshard;

PSHARD_API const char* pshard_tiles() { return tile_unit() ? tile_unit()->name : ""; }

PSHARD_API int pshard_set_tiles(const char* name) {
  if (!*name) return chosen.store(true), active.store(nullptr), 0;
  for (const TileKernels* k : {tiles_amx(), tiles_emulated()})
    if (k && !std::strcmp(k->name, name)) return chosen.store(true), active.store(k), 0;
  return -1;
}

// The caller has seen that pshard_tiles() names a unit.
PSHARD_API void pshard_linear_tiled(const float* x, int64_t x_stride, const void* w, int type, int64_t rows,
                                    int64_t cols, float* out, int64_t out_stride, int64_t tokens, int accumulate) {
  run(x, x_stride, Matrix(w, type, rows, cols), nullptr, out, out_stride, tokens, accumulate);
}

PSHARD_API void pshard_gate_up_tiled(const float* x, int64_t x_stride, const void* gate, int gate_type, const void* up,
                                     int up_type, int64_t rows, int64_t cols, float* out, int64_t out_stride,
                                     int64_t tokens, int gate_kind) {
  const Matrix u(up, up_type, rows, cols);
  run(x, x_stride, Matrix(gate, gate_type, rows, cols), &u, out, out_stride, tokens, false, gate_kind);
}
