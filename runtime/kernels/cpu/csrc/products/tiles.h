// Products of many tokens on a matrix unit: what tiled_linear.cpp asks of the processor's tile instructions.
//
// A weight tile is one chunk of a record, 32 columns of 16 rows, as 16 pairs of columns x 16 rows x 2 bf16: the packed
// layout holds lanes of 16 rows already, so no transposition is needed. An activation tile is 16 tokens x 32 columns of
// bf16. Each is 1 KB without gaps. Their product adds to 16 tokens x 16 rows of f32.
#pragma once

#include "packing/format.h"
#include "kernels.h"

namespace pshard {

constexpr int kBlockChunks = 16;   // columns / 32 of a block: two records' tiles (32 KB) stay in L1
constexpr int kPanelRecords = 8;   // their tiles of one block (128 KB) and sums (256 KB) stay in L2
constexpr int kSliceTiles = 32;    // 512 tokens: a block of their activations (512 KB) stays in L2
constexpr int kTileWords = 512;    // bf16 numbers of a tile
constexpr int kTileSums = 256;     // f32 numbers of a product

inline int64_t blocks_of(int64_t cols) { return (cols + 32 * kBlockChunks - 1) / (32 * kBlockChunks); }

struct TileRecord {
  const uint8_t* data;
  const Planes* planes;
  int type, rows;  // plain types: only this many rows exist
};

struct TilePanel {
  TileRecord records[kPanelRecords];
  int count;
  int64_t cols;
  const uint16_t* act;  // [blocks][token_tiles][kBlockChunks] tiles
  int token_tiles;
  uint16_t* weights;  // room for [count][kBlockChunks] tiles
  float* sums;        // [token_tiles][count][16 tokens][16 rows], written
};

struct TileKernels {
  const char* name;
  void (*enter)();  // on each thread, before its first panel and after its last
  void (*leave)();
  // Up to 16 tokens' columns of one block to [kBlockChunks] tiles; what lies beyond the tokens and columns is zero.
  void (*convert)(const float* x, int64_t stride, int tokens, int64_t cols, uint16_t* out);
  void (*multiply)(const TilePanel& panel);
};

// Attention over bf16 cells whose heads are a multiple of 32 numbers.
struct TileAttention {
  void (*enter)();  // on each thread, before its first task and after its last
  void (*leave)();
  void (*attend)(const AttentionTask& task);
};

const TileKernels* tiles_amx();       // nullptr when this build, processor or system cannot run it
const TileKernels* tiles_emulated();  // the same blocking with loops for the tile instructions, for tests
const TileKernels* tile_unit();       // the one in use, or nullptr
const TileAttention* attention_tiles();  // on AMX, or else on vectors of bf16; nullptr without either

}  // namespace pshard
