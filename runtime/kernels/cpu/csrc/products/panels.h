// Panels of weights for a matrix unit: how many records they have, and what is multiplied.
#pragma once

#include <cstdint>

#include "driver.h"
#include "products/tiles.h"

namespace pshard {

constexpr int64_t kBlockColumns = 32 * kBlockChunks;
constexpr int64_t kBlockWords = int64_t{kBlockChunks} * kTileWords;

// A thread's room for a panel: its weights, then its sums.
constexpr size_t kPanelWeights = sizeof(uint16_t) * kPanelRecords * kBlockChunks * kTileWords;
constexpr size_t kPanelRoom = kPanelWeights + sizeof(float) * kPanelRecords * kSliceTiles * kTileSums;

// Records of each matrix in a panel: what makes the last thread finish first. A panel costs as many records as it has,
// and about two more for its pass over the activations.
inline int64_t panel_records(const Team& team, int64_t records, int matrices) {
  int64_t best = 0, least = 0;
  for (int64_t each = kPanelRecords / matrices; each > 0; each = each > 2 ? each - 2 : each - 1) {
    const int64_t panels = (records + each - 1) / each, rounds = (panels + team.size() - 1) / team.size();
    const int64_t cost = rounds * (each * matrices + 2);
    if (!best || cost < least) best = each, least = cost;
  }
  return best;
}

// Records [first, first + n) of one matrix, or of gate and then of up, whose records begin at `data`.
inline TilePanel fill_panel(const Matrix* const* matrices, const uint8_t* const* data, int count, int64_t first, int n,
                            const uint16_t* act, int tiles, uint8_t* room) {
  TilePanel p{};
  for (int i = 0; i < n * count; ++i) {
    const Matrix& m = *matrices[i / n];
    const int64_t r = first + i % n;
    p.records[i] = {data[i / n] + r * m.record, &m.planes, m.type, m.rows_of(r)};
  }
  p.count = n * count, p.cols = matrices[0]->cols, p.act = act, p.token_tiles = tiles;
  p.weights = reinterpret_cast<uint16_t*>(room), p.sums = reinterpret_cast<float*>(room + kPanelWeights);
  return p;
}

}  // namespace pshard
