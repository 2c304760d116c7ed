// A stage of experts on a matrix unit, up to 512 pairs of an expert at a time.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "experts/stage.h"
#include "products/panels.h"

namespace pshard {
namespace {

constexpr int64_t kWave = 4 * 16 * kSliceTiles;  // pairs whose activations are held at once
constexpr size_t kRows = sizeof(float) * 16 * kBlockColumns;  // a thread's room for rows that it gathers

// Where a group's tiles begin among those of its wave: every group before it may have a tile that is not full.
int64_t first_tile(const Group* groups, int64_t number) { return (groups[number].before - groups[0].before) / 16 + number; }
int tiles_of(const Group& g) { return (g.count + 15) / 16; }

// Rows of 16 pairs at a time, some columns of them, to tiles of bf16.
void convert_wave(Team& team, const Stage& s, const TileKernels& k, const Group* groups, int64_t n, uint16_t* act) {
  const int64_t cols = s.w[0].cols, blocks = blocks_of(cols);
  team.for_each_chunk(n * blocks, {nullptr, nullptr, kRows, count_pairs(groups, n) * cols * 8}, [&](const Chunk& c) {
    const Group& g = groups[c.i / blocks];
    const int64_t block = c.i % blocks, column = block * kBlockColumns, width = std::min(cols - column, kBlockColumns);
    uint16_t* to = act + (first_tile(groups, c.i / blocks) * blocks + block * tiles_of(g)) * kBlockWords;
    auto* rows = reinterpret_cast<float*>(c.room);
    for (int tile = 0; tile < tiles_of(g); ++tile, to += kBlockWords) {
      const int tokens = std::min(16, g.count - tile * 16);
      for (int i = 0; i < tokens; ++i)
        std::memcpy(rows + i * kBlockColumns, s.row_from(g.first + tile * 16 + i) + column, width * sizeof(float));
      k.convert(rows, kBlockColumns, tokens, width, to);
    }
  });
}

void multiply_wave(Team& team, const Stage& s, const TileKernels& k, const Group* groups, int64_t n, const uint16_t* act) {
  const int64_t records = s.w[0].records(), blocks = blocks_of(s.w[0].cols);
  const int64_t each = panel_records(team, records * n, s.matrices), panels = (records + each - 1) / each;
  const int64_t nbytes = s.w[0].nbytes() + (s.matrices == 2 ? s.w[1].nbytes() : 0);
  team.for_each_chunk(n * panels, {k.enter, k.leave, kPanelRoom, nbytes * count_pairs(groups, n)}, [&](const Chunk& chunk) {
    const Group& g = groups[chunk.i / panels];
    const int64_t first = chunk.i % panels * each;
    const int count = static_cast<int>(std::min(each, records - first)), tiles = tiles_of(g);
    const Matrix* matrices[2] = {&s.w[0], &s.w[1]};
    const uint8_t* data[2] = {s.record(0, g.expert, 0), s.matrices == 2 ? s.record(1, g.expert, 0) : nullptr};
    const uint16_t* own = act + first_tile(groups, chunk.i / panels) * blocks * kBlockWords;
    const TilePanel p = fill_panel(matrices, data, s.matrices, first, count, own, tiles, chunk.room);
    k.multiply(p);
    for (int t = 0; t < tiles; ++t)
      for (int i = 0; i < count; ++i) {
        float* sums = p.sums + (t * p.count + i) * kTileSums;
        s.finish(sums, sums + count * kTileSums, std::min(16, g.count - t * 16), g.expert, g.first + t * 16, first + i);
      }
  });
}

}  // namespace

// A group has more than 8 pairs, or is what an expert has beyond 512.
size_t tile_bytes(const Stage& s, int64_t pairs) {
  const int64_t tiles = 3 * std::min(pairs, kWave) / 16 + 2;
  return sizeof(uint16_t) * blocks_of(s.w[0].cols) * kBlockWords * tiles;
}

void multiply_tiles(Team& team, const Stage& s, const Group* groups, int64_t n, uint8_t* scratch) {
  auto* act = reinterpret_cast<uint16_t*>(scratch);
  for_waves(groups, n, kWave, [&](const Group* some, int64_t count) {
    const TileKernels& k = *tile_unit();
    convert_wave(team, s, k, some, count, act);
    multiply_wave(team, s, k, some, count, act);
  });
}

}  // namespace pshard
