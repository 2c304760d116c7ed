// Experts that live on disk, of a layer whose slots are filled as tokens choose: what is missed is asked for at once, what
// slots have is computed first, then each of the others as it lands. Who leaves is decided as
// pshard/routing/follow_use.py does (DemandFollower). All in one call, so that nothing of Python is between two reads.
#include <algorithm>
#include <vector>

#include "calls.h"
#include "threads/reader.h"

namespace pshard {
namespace {

constexpr int kMatrices = 3;  // gate, up and down

// Of one expert of a layer the pieces that bring it to a slot.
struct Layer {
  uint8_t* pieces = nullptr;
  const int64_t* starts = nullptr;  // by expert, and the end of the last
};

struct Pool {
  void* reader;
  int64_t layers, experts, slots;
  int32_t* slot_of;         // [layers, experts]; -1: none
  const uint8_t* eligible;  // [layers, experts]
  uint8_t* memory;
  int64_t slot_bytes;
  int64_t at[kMatrices];  // where each matrix lies in a slot
  int64_t* counts;        // choices, those that found their expert, experts brought in
  std::vector<int64_t> owner;  // by slot: layer * experts + expert; -1: nobody
  std::vector<int32_t> older, newer;  // by slot, in the order of use; the last place stands for both ends
  std::vector<Layer> of;
  std::vector<int64_t*> tables;  // each [layers, 3, experts]: where matrices lie; 0: not here
  std::vector<int64_t> alone;    // [3, experts]: the one that has just landed

  int32_t end() const { return static_cast<int32_t>(slots); }
  void touch(int32_t slot) {  // it is used now
    newer[older[slot]] = newer[slot], older[newer[slot]] = older[slot];
    append(slot);
  }
  void append(int32_t slot) {
    const int32_t last = older[end()];
    older[slot] = last, newer[slot] = end(), newer[last] = slot, older[end()] = slot;
  }
  int64_t address(int32_t slot, int matrix) const {
    return reinterpret_cast<int64_t>(memory + slot * slot_bytes + at[matrix]);
  }
  // Where an expert lies from now on, in all tables; slot -1: not here.
  void place(int64_t owned, int32_t slot) {
    const int64_t row = owned / experts, expert = owned % experts;
    slot_of[owned] = slot;
    for (int64_t* table : tables)
      for (int m = 0; m < kMatrices; ++m)
        table[(row * kMatrices + m) * experts + expert] = slot < 0 ? 0 : address(slot, m);
  }
};

// An expert on its way to a slot.
struct Move {
  int32_t expert, slot;
  int64_t number;  // of what the reader was asked for
};

// What a layer's choices miss, in the order of experts, with the slots that others leave for it.
std::vector<Move> look_up(Pool& pool, int64_t row, const int32_t* ids, int64_t count) {
  const int32_t* slot_of = pool.slot_of + row * pool.experts;
  const uint8_t* eligible = pool.eligible + row * pool.experts;
  std::vector<int32_t> wanted, used;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0) continue;
    ++pool.counts[0];
    pool.counts[1] += slot_of[ids[i]] >= 0;
    if (eligible[ids[i]]) wanted.push_back(ids[i]);
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::vector<Move> moves;
  for (const int32_t expert : wanted) {
    if (slot_of[expert] >= 0) used.push_back(slot_of[expert]);
    else moves.push_back({expert, -1, 0});
  }
  std::sort(used.begin(), used.end());
  for (const int32_t slot : used) pool.touch(slot);
  int32_t oldest = pool.newer[pool.end()];
  for (Move& move : moves) {
    move.slot = oldest, used.push_back(oldest);
    oldest = pool.newer[oldest];
  }
  if (static_cast<int64_t>(wanted.size()) * pool.layers <= pool.slots) {  // else the next layer's take the same slots
    std::sort(used.begin(), used.end());  // of those that are used at once the lower number leaves first
    for (const int32_t slot : used) pool.touch(slot);
  }
  pool.counts[2] += moves.size();
  return moves;
}

}  // namespace
}  // namespace pshard

using namespace pshard;

// order: slots, the one that was used longest ago first; owner: by slot, see Pool; at: of gate, up and down.
PSHARD_API void* pshard_demand_open(void* reader, int64_t layers, int64_t experts, int64_t slots, int32_t* slot_of,
                                    const uint8_t* eligible, uint8_t* memory, int64_t slot_bytes, const int64_t* at,
                                    const int64_t* owner, const int32_t* order, int64_t* counts) {
  auto* pool = new Pool{reader, layers, experts, slots, slot_of, eligible, memory, slot_bytes, {}, counts, {}, {}, {}, {}, {}, {}};
  std::copy(at, at + kMatrices, pool->at);
  pool->owner.assign(owner, owner + slots);
  pool->older.assign(slots + 1, pool->end()), pool->newer.assign(slots + 1, pool->end());
  for (int64_t i = 0; i < slots; ++i) pool->append(order[i]);
  pool->of.resize(layers), pool->alone.assign(kMatrices * experts, 0);
  return pool;
}
// Pieces of a layer's experts, as the reader has them, and where those of each begin.
PSHARD_API void pshard_demand_layer(void* demand, int64_t row, void* pieces, const int64_t* starts) {
  static_cast<Pool*>(demand)->of[row] = {static_cast<uint8_t*>(pieces), starts};
}
// A table that says where matrices lie; it stays so from now on.
PSHARD_API void pshard_demand_table(void* demand, int64_t* table) {
  static_cast<Pool*>(demand)->tables.push_back(table);
}
PSHARD_API void pshard_demand_close(void* demand) { delete static_cast<Pool*>(demand); }

// As pshard_experts, of a layer of a pool whose `addresses` are in one of its tables.
PSHARD_API void pshard_experts_on_demand(const float* x, int64_t x_stride, const int32_t* ids, const float* weights,
                                         int64_t tokens, int used, const int64_t* addresses, int experts,
                                         int gate_type, int up_type, int down_type, int64_t hidden, int64_t inner,
                                         const float* gate_bias, const float* up_bias, const float* down_bias,
                                         int gate_kind, int tiles_from, int down_tiles_from, float* gated,
                                         float* picked, int32_t* order, float* out, int64_t out_stride,
                                         int accumulate, void* demand, int64_t row) {
  Pool& pool = *static_cast<Pool*>(demand);
  const int64_t count = tokens * used;
  std::vector<Move> moves = look_up(pool, row, ids, count);
  const Layer& layer = pool.of[row];
  for (Move& move : moves) {
    const int64_t first = layer.starts[move.expert], pieces = layer.starts[move.expert + 1] - first;
    uint8_t* to = pool.memory + move.slot * pool.slot_bytes;
    move.number = pshard_reader_ask(pool.reader, layer.pieces + first * kPieceBytes, pieces, to);
  }
  for (const Move& move : moves) {  // the disk reads while tables change
    if (pool.owner[move.slot] >= 0) pool.place(pool.owner[move.slot], -1);
    pool.owner[move.slot] = -1;
  }
  const auto compute = [&](const int64_t* here, bool is_last) {
    pshard_experts(x, x_stride, ids, weights, tokens, used, here, experts, gate_type, up_type, down_type, hidden, inner,
                   gate_bias, up_bias, down_bias, gate_kind, tiles_from, down_tiles_from, gated, picked, order, out,
                   out_stride, accumulate, is_last ? addresses : nullptr);
  };
  const auto is_here = [&](int32_t id) {
    return std::none_of(moves.begin(), moves.end(), [&](const Move& move) { return move.expert == id; });
  };
  if (moves.empty() || std::any_of(ids, ids + count, is_here)) compute(addresses, moves.empty());
  for (const Move& move : moves) {
    pshard_reader_wait(pool.reader, move.number);
    pool.owner[move.slot] = row * pool.experts + move.expert;
    pool.place(pool.owner[move.slot], move.slot);
    for (int m = 0; m < kMatrices; ++m) pool.alone[m * pool.experts + move.expert] = pool.address(move.slot, m);
    compute(pool.alone.data(), &move == &moves.back());
    for (int m = 0; m < kMatrices; ++m) pool.alone[m * pool.experts + move.expert] = 0;
  }
}
