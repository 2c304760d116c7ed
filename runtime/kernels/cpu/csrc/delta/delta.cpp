// The gated delta net: who computes which heads, token by token or in chunks. runtime/kernels/plain_delta.py has the
// formulas.
//
// States and tails change in place, and a chunk of work may be computed again (threads/pool.h). Token by token a head
// keeps a journal: which rows of the state it has done, and those that it is about to change as they were, so that it
// goes on where it was left and no state is copied as a whole. Prompts write their last state beside it first.
#include <atomic>
#include <cmath>
#include <vector>

#include "driver.h"

namespace pshard {
namespace {

constexpr int64_t kTokens = 64;    // of a chunk
constexpr int64_t kSteps = 16;     // more tokens of a sequence go in chunks; drafts must not, see docs/speculation.md
constexpr int64_t kJournalRows = 16;
constexpr float kL2Eps = 1e-6f;

struct Net {
  const float *qkv, *z, *beta, *alpha;
  int64_t qkv_stride, z_stride, beta_stride, alpha_stride;
  const float *conv, *dt_bias, *decay, *norm;
  float eps;
  int key_heads, value_heads;
  int64_t d;
  bool tiled, sigmoid;  // sigmoid: gates are, of silu
  float *states, *tails;
  const int32_t *slots, *offsets;
  float* out;
  int64_t out_stride;
  float* opened;  // see runtime/kernels/api.py; slots of open rows are -1 - slot
  int64_t opened_stride;

  int64_t channels() const { return (2 * key_heads + value_heads) * d; }
  int key_head(int head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
  int64_t tokens(int64_t i) const { return offsets[i + 1] - offsets[i]; }
  bool is_open(int64_t i) const { return slots[i] < 0; }
  bool steps(int64_t i) const { return is_open(i) || tokens(i) <= kSteps; }
  int64_t slot(int64_t i) const { return is_open(i) ? -1 - slots[i] : slots[i]; }
  float* tail(int64_t i) const { return tails + slot(i) * 3 * channels(); }
  float* state(int64_t i, int head) const { return states + (slot(i) * value_heads + head) * d * d; }
  float share(int64_t row, int head) const { return 1 / (1 + std::exp(-beta[row * beta_stride + head])); }
  float log_left(int64_t row, int head) const {
    const float x = alpha[row * alpha_stride + head] + dt_bias[head];
    return decay[head] * (std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
  }
};

// Where a head stands that computes token by token; then u, o and the rows that change, [kJournalRows + 2][d]; then, of
// open rows, the state [d][d] that they go through.
struct alignas(64) Journal {
  std::atomic<int64_t> done;
  float* u() { return reinterpret_cast<float*>(this + 1); }
  float* state(int64_t d) { return u() + (kJournalRows + 2) * d; }
  static size_t nbytes(int64_t d, bool open) { return sizeof(Journal) + (kJournalRows + 2 + (open ? d : 0)) * d * sizeof(float); }
};

struct Room {  // of a thread that computes chunks
  float *keys, *pairs, *seen, *fresh, *left, *mixed, *state;  // [d][64], [64][64] twice, [64][d] thrice, [d][d]
  float sums[kTokens], share[kTokens];
  static int64_t floats(int64_t d) { return 4 * kTokens * d + 2 * kTokens * kTokens + d * d; }
  Room(float* at, int64_t d)
      : keys(at),
        pairs(keys + d * kTokens),
        seen(pairs + kTokens * kTokens),
        fresh(seen + kTokens * kTokens),
        left(fresh + kTokens * d),
        mixed(left + kTokens * d),
        state(mixed + kTokens * d) {}
};

// One head's q, k or v of a row: convolved and, of q and k, normed.
void mix_head(const Net& net, int64_t i, int64_t row, int64_t head, float* out) {
  const int64_t at = head * net.d;
  const float* x[4];
  for (int64_t t = 0; t < 4; ++t) {
    const int64_t source = row - 3 + t - net.offsets[i];
    x[t] = (source < 0 ? net.tail(i) + (source + 3) * net.channels() : net.qkv + (row - 3 + t) * net.qkv_stride) + at;
  }
  kernels().delta_mix(x, net.conv + 4 * at, net.d, out + at);
  if (head < 2 * net.key_heads)
    kernels().delta_scale(out + at, net.d, kL2Eps, head < net.key_heads ? 1 / std::sqrt(static_cast<float>(net.d)) : 1);
}

// The tail that follows, beside the one that is.
void next_tail(const Net& net, int64_t i, float* to) {
  const int64_t width = net.channels(), tokens = net.tokens(i);
  for (int64_t t = 0; t < 3; ++t) {
    const int64_t source = tokens - 3 + t;
    const float* from = source < 0 ? net.tail(i) + (source + 3) * width : net.qkv + (net.offsets[i] + source) * net.qkv_stride;
    std::memcpy(to + t * width, from, width * sizeof(float));
  }
}

// What an open row adds to the state of one head, and its channels.
void leave_open(const Net& net, int64_t row, int head, const float* k, const float* u, float left) {
  const int64_t d = net.d, key = net.key_head(head), keys = net.key_heads, size = d * sizeof(float);
  float *to = net.opened + row * net.opened_stride, *behind = to + net.channels();
  const float* raw = net.qkv + row * net.qkv_stride;
  std::memcpy(to + (2 * keys + head) * d, raw + (2 * keys + head) * d, size);
  std::memcpy(behind + (keys + head) * d, u, size);
  behind[(keys + net.value_heads) * d + head] = left;
  if (net.tiled ? head >= keys : head % (net.value_heads / keys)) return;  // one of those that use the key head
  for (const int64_t at : {key, keys + key}) std::memcpy(to + at * d, raw + at * d, size);
  std::memcpy(behind + key * d, k, size);
}

// `next`: the state that this thread turns to after this one.
void step_head(const Net& net, int64_t i, int head, const float* mixed, Journal& journal, const float* next) {
  const int64_t d = net.d, width = net.channels(), blocks = (d + kJournalRows - 1) / kJournalRows;
  float *state = net.state(i, head), *u = journal.u(), *o = u + d, *before = o + d;
  int64_t done = journal.done.load(std::memory_order_acquire), stage = 0;
  const auto finish = [&](int64_t to) { journal.done.store(done = to, std::memory_order_release); };
  if (net.is_open(i)) {
    if (done <= stage) {
      std::memcpy(journal.state(d), state, d * d * sizeof(float));
      finish(stage + 1);
    }
    ++stage;
    state = journal.state(d);
  }
  for (int64_t row = net.offsets[i]; row < net.offsets[i + 1]; ++row) {
    const float* q = mixed + row * width + net.key_head(head) * d;
    const float *k = q + net.key_heads * d, *v = mixed + row * width + (2 * net.key_heads + head) * d;
    const float left = std::exp(net.log_left(row, head)), share = net.share(row, head);
    if (done <= stage) {
      kernels().delta_read(state, d, k, q, u, o);
      float both = 0;
      for (int64_t j = 0; j < d; ++j) both += k[j] * q[j];
      for (int64_t j = 0; j < d; ++j) u[j] = share * (v[j] - left * u[j]), o[j] = left * o[j] + both * u[j];
      kernels().delta_gate(o, net.z + row * net.z_stride + head * d, net.norm, net.eps, d,
                           net.out + row * net.out_stride + head * d, net.sigmoid);
      if (net.is_open(i)) leave_open(net, row, head, k, u, left);
      finish(stage + 1);
    }
    ++stage;
    for (int64_t b = 0; b < blocks; ++b, stage += 2) {
      const int64_t first = b * kJournalRows, rows = std::min(kJournalRows, d - first);
      if (done <= stage) {
        std::memcpy(before, state + first * d, rows * d * sizeof(float));
        finish(stage + 1);
      }
      if (done <= stage + 1) {
        kernels().delta_write(before, state + first * d, rows, d, left, k + first, u, next + first * d);
        finish(stage + 2);
      }
    }
  }
}

// One chunk of `tokens` rows from `row` on, with the state in the room.
void advance(const Net& net, int64_t row, int64_t tokens, int head, const float* mixed, Room& room) {
  const int64_t d = net.d, width = net.channels();
  const float* q = mixed + row * width + net.key_head(head) * d;
  const float *k = q + net.key_heads * d, *v = mixed + row * width + (2 * net.key_heads + head) * d;
  float sum = 0;
  for (int64_t t = 0; t < tokens; ++t) room.sums[t] = sum += net.log_left(row + t, head), room.share[t] = net.share(row + t, head);
  for (int64_t j = 0; j < d; ++j)
    for (int64_t t = 0; t < kTokens; ++t) room.keys[j * kTokens + t] = t < tokens ? k[t * width + j] : 0;
  const auto multiply = kernels().delta_multiply;
  const int64_t padded = round_up<int64_t>(tokens, 16);
  multiply(k, width, 1, room.keys, kTokens, tokens, d, padded, room.pairs, kTokens, 0);
  multiply(q, width, 1, room.keys, kTokens, tokens, d, padded, room.seen, kTokens, 0);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t s = 0; s <= t; ++s) {
      const float between = std::exp(room.sums[t] - room.sums[s]);
      room.pairs[t * kTokens + s] *= -between * room.share[t];
      room.seen[t * kTokens + s] *= between;
    }
  multiply(k, width, 1, room.state, d, tokens, d, d, room.fresh, d, 0);
  for (int64_t t = 0; t < tokens; ++t) {  // beta (V - exp(c) K S), then what keys before take of it
    const float left = std::exp(room.sums[t]);
    float* fresh = room.fresh + t * d;
    for (int64_t j = 0; j < d; ++j) fresh[j] = room.share[t] * (v[t * width + j] - left * fresh[j]);
    multiply(room.pairs + t * kTokens, 0, 1, room.fresh, d, 1, t, d, fresh, d, 1);
  }
  multiply(q, width, 1, room.state, d, tokens, d, d, room.mixed, d, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    const float left = std::exp(room.sums[t]), after = std::exp(sum - room.sums[t]);
    for (int64_t j = 0; j < d; ++j) room.mixed[t * d + j] *= left, room.left[t * d + j] = after * room.fresh[t * d + j];
    multiply(room.seen + t * kTokens, 0, 1, room.fresh, d, 1, t + 1, d, room.mixed + t * d, d, 1);
    kernels().delta_gate(room.mixed + t * d, net.z + (row + t) * net.z_stride + head * d, net.norm, net.eps, d,
                         net.out + (row + t) * net.out_stride + head * d, net.sigmoid);
  }
  multiply(k, 1, width, room.left, d, d, tokens, d, room.state, d, std::exp(sum));
}

void chunk_head(const Net& net, int64_t i, int head, const float* mixed, uint8_t* memory, float* last) {
  Room room(reinterpret_cast<float*>(memory), net.d);
  std::memcpy(room.state, net.state(i, head), net.d * net.d * sizeof(float));
  for (int64_t row = net.offsets[i]; row < net.offsets[i + 1]; row += kTokens)
    advance(net, row, std::min<int64_t>(kTokens, net.offsets[i + 1] - row), head, mixed, room);
  std::memcpy(last, room.state, net.d * net.d * sizeof(float));
}

void run(const Net& net, int64_t sequences) {
  const int64_t d = net.d, width = net.channels(), rows = net.offsets[sequences], size = d * d * sizeof(float);
  const int64_t heads = sequences * net.value_heads, all = 2 * net.key_heads + net.value_heads;
  bool chunked = false, open = false;
  for (int64_t i = 0; i < sequences; ++i) chunked = chunked || !net.steps(i), open = open || net.is_open(i);
  const size_t mixed_bytes = round_up<size_t>(rows * width * sizeof(float), 64), tail_bytes = 3 * width * sizeof(float);
  const size_t tails_bytes = round_up<size_t>(sequences * tail_bytes, 64);
  // a task is either a journal's or leaves its last state here
  const size_t each = round_up<size_t>(std::max<size_t>(Journal::nbytes(d, open), chunked ? size : 0), 64);
  Pool::instance().with_scratch(mixed_bytes + tails_bytes + heads * each, [&](uint8_t* scratch) {
    auto* mixed = reinterpret_cast<float*>(scratch);
    auto* tails = reinterpret_cast<float*>(scratch + mixed_bytes);
    uint8_t* tasks = scratch + mixed_bytes + tails_bytes;
    for (int64_t t = 0; t < heads; ++t)
      if (net.steps(t / net.value_heads)) new (tasks + t * each) Journal{};
    std::vector<int32_t> owner(rows);
    for (int64_t i = 0; i < sequences; ++i)
      for (int64_t row = net.offsets[i]; row < net.offsets[i + 1]; ++row) owner[row] = static_cast<int32_t>(i);
    Pool::instance().run([&](Team& team) {
      const int64_t together = std::max<int64_t>(1, 4096 / width);  // rows of a task
      const int64_t blocks = (rows + together - 1) / together;
      team.for_each(blocks + sequences, rows * width * 16, [&](int64_t task) {
        if (task >= blocks) {
          const int64_t i = task - blocks;
          if (net.tokens(i)) next_tail(net, i, tails + i * 3 * width);
          return;
        }
        for (int64_t row = task * together; row < std::min(rows, (task + 1) * together); ++row)
          for (int64_t head = 0; head < all; ++head) mix_head(net, owner[row], row, head, mixed + row * width);
      });
      Around around{nullptr, nullptr, chunked ? Room::floats(d) * sizeof(float) : 0, heads * size + rows * net.value_heads * d * d};
      team.for_each_chunk(heads, around, [&](const Chunk& chunk) {
        const int64_t i = chunk.i / net.value_heads, next = chunk.next / net.value_heads;
        const int head = static_cast<int>(chunk.i % net.value_heads);
        uint8_t* own = tasks + chunk.i * each;
        if (!net.steps(i)) chunk_head(net, i, head, mixed, chunk.room, reinterpret_cast<float*>(own));
        else if (net.tokens(i))
          step_head(net, i, head, mixed, *reinterpret_cast<Journal*>(own), net.state(next, static_cast<int>(chunk.next % net.value_heads)));
      });
      const int64_t copied = chunked ? heads : 0;
      team.for_each(sequences + copied, sequences * tail_bytes + copied * size * 2, [&](int64_t task) {
        if (task < sequences) {
          if (net.tokens(task) && !net.is_open(task)) std::memcpy(net.tail(task), tails + task * 3 * width, tail_bytes);
          return;
        }
        const int64_t t = task - sequences, i = t / net.value_heads;
        if (!net.steps(i)) std::memcpy(net.state(i, static_cast<int>(t % net.value_heads)), tasks + t * each, size);
      });
    });
  });
}

// Open rows `first` to `last` of a sequence into its state, by the arithmetic of step_head. States are written
// beside what they were, as a chunk of work may be computed again.
void settle(const Net& net, int64_t first, int64_t last) {
  const int64_t d = net.d, keys = net.key_heads, width = net.channels(), size = d * d * sizeof(float);
  const auto row = [&](int64_t at) { return net.opened + at * net.opened_stride; };
  Pool::instance().with_scratch(2 * net.value_heads * size, [&](uint8_t* scratch) {
    auto* fresh = reinterpret_cast<float*>(scratch);  // of each head two, of which one is written from the other
    Pool::instance().run([&](Team& team) {
      team.for_each(net.value_heads, net.value_heads * size * 2 * (last - first), [&](int64_t task) {
        const int head = static_cast<int>(task);
        const float* from = net.state(0, head);
        for (int64_t at = first; at < last; ++at) {
          const float* behind = row(at) + width;
          float* to = fresh + (2 * head + (last - at - 1) % 2) * d * d;
          kernels().delta_write(from, to, d, d, behind[(keys + net.value_heads) * d + head], behind + net.key_head(head) * d,
                                behind + (keys + head) * d, from);
          from = to;
        }
      });
      team.for_each(net.value_heads, net.value_heads * size * 2, [&](int64_t head) {
        std::memcpy(net.state(0, static_cast<int>(head)), fresh + 2 * head * d * d, size);
      });
    });
  });
}

// The same into a tail [kept][width].
void settle_tail(float* tail, int64_t kept, int64_t width, const float* opened, int64_t stride, int64_t first, int64_t last) {
  for (int64_t t = 0; t < kept; ++t) {
    const int64_t source = last - first - kept + t;  // in the old tail where it is negative
    const float* from = source < 0 ? tail + (source + kept) * width : opened + (first + source) * stride;
    std::memcpy(tail + t * width, from, width * sizeof(float));
  }
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_delta_net(const float* qkv, int64_t qkv_stride, const float* z, int64_t z_stride,
                                 const float* beta, int64_t beta_stride, const float* alpha, int64_t alpha_stride,
                                 const float* conv, const float* dt_bias, const float* decay, const float* norm,
                                 float eps, int key_heads, int value_heads, int head, int tiled, int sigmoid,
                                 float* states, float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                 float* out, int64_t out_stride, float* opened, int64_t opened_stride) {
  const Net net{qkv, z, beta, alpha, qkv_stride, z_stride, beta_stride, alpha_stride, conv, dt_bias, decay, norm, eps,
                key_heads, value_heads, head, tiled != 0, sigmoid != 0, states, tails, slots, offsets, out, out_stride, opened,
                opened_stride};
  if (offsets[sequences] > 0) run(net, sequences);
}

// A gated short convolution. Tails are written when all rows are done, as a chunk of work may be computed again. Open
// rows leave their inputs instead.
PSHARD_API void pshard_short_conv(const float* x, int64_t x_stride, const float* taps, int64_t channels, int64_t each,
                                  float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                  float* out, int64_t out_stride, float* opened, int64_t opened_stride) {
  constexpr int64_t kTogether = 256;  // channels of a task
  const int64_t blocks = (channels + kTogether - 1) / kTogether, kept = each - 1, size = kept * channels;
  Pool::instance().with_scratch(sequences * size * sizeof(float), [&](uint8_t* scratch) {
    auto* fresh = reinterpret_cast<float*>(scratch);
    Pool::instance().run([&](Team& team) {
      team.for_each(blocks * sequences, offsets[sequences] * channels * 16, [&](int64_t task) {
        const int64_t i = task / blocks, first = task % blocks * kTogether, n = std::min(kTogether, channels - first);
        const int64_t begin = offsets[i], tokens = offsets[i + 1] - begin;
        const bool open = slots[i] < 0;
        const float* tail = tails + (open ? -1 - slots[i] : slots[i]) * size + first;
        const auto take = [&](int64_t at, float* to) {  // inputs of a token, or those in the tail where it is negative
          if (at < 0) {
            std::memcpy(to, tail + (at + kept) * channels, n * sizeof(float));
            return;
          }
          const float *a = x + (begin + at) * x_stride + first, *by = a + 2 * channels;
          for (int64_t c = 0; c < n; ++c) to[c] = a[c] * by[c];
        };
        float seen[kTogether], mixed[kTogether];
        for (int64_t at = 0; at < tokens; ++at) {
          std::fill_n(mixed, n, 0.0f);
          for (int64_t j = 0; j < each; ++j) {
            take(at - kept + j, seen);
            for (int64_t c = 0; c < n; ++c) mixed[c] += seen[c] * taps[(first + c) * each + j];
          }
          const float* gate = x + (begin + at) * x_stride + channels + first;
          float* to = out + (begin + at) * out_stride + first;
          for (int64_t c = 0; c < n; ++c) to[c] = gate[c] * mixed[c];
          if (open) std::memcpy(opened + (begin + at) * opened_stride + first, seen, n * sizeof(float));
        }
        if (tokens && !open)
          for (int64_t t = 0; t < kept; ++t) take(tokens - kept + t, fresh + i * size + t * channels + first);
      });
      team.for_each(sequences, sequences * size * 8, [&](int64_t i) {
        if (offsets[i + 1] > offsets[i] && slots[i] >= 0)
          std::memcpy(tails + slots[i] * size, fresh + i * size, size * sizeof(float));
      });
    });
  });
}

PSHARD_API void pshard_settle_states(int key_heads, int value_heads, int head, int tiled, float* states, float* tails,
                                     int64_t kept, int64_t channels, int slot, float* opened, int64_t opened_stride,
                                     int64_t first, int64_t last) {
  const int32_t number = slot;
  Net net{};
  net.key_heads = key_heads, net.value_heads = value_heads, net.d = head, net.tiled = tiled != 0;
  net.states = states, net.slots = &number;
  net.opened = opened, net.opened_stride = opened_stride;
  if (last <= first) return;
  if (value_heads) settle(net, first, last);
  settle_tail(tails + slot * kept * channels, kept, channels, opened, opened_stride, first, last);
}
