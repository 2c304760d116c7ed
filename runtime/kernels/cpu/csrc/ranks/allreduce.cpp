// Sums, gathers and hand-overs between the processes of one host through memory that they share. shared_memory.py
// documents the calls. Memory: one line of counters per rank, then two slots per rank, then an inbox per rank. A rank puts its part into slot `turn % 2`,
// raises its counter to `turn`, waits for the others' counters and reads their slots. Two slots are enough: who
// raised its counter to turn + 1 has read all of turn, so nobody writes over what is still being read.
// An inbox is a ring of messages from the one rank that hands to its owner: who puts counts `put`, who takes `taken`.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#define PSHARD_API __attribute__((visibility("default")))

namespace {

struct alignas(128) Counter {  // two lines: the prefetcher fetches lines in pairs
  std::atomic<uint64_t> turn;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr int kInbox = 4;  // messages that may wait in an inbox

struct Inbox {
  Counter put, taken;
};

constexpr int kSpins = 2000;       // some tens of microseconds, then the core is offered to others
constexpr int kYields = 20000;     // then it is left for a moment at a time

double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `arrived()`; false when that is not so by `end`.
template <class Arrived>
bool wait_until(double end, Arrived arrived) {
  for (int tries = 0; !arrived(); ++tries) {
    if (tries < kSpins) {
      relax();
    } else if (tries < kYields) {
      sched_yield();
    } else {
      const timespec moment{0, 50000};
      nanosleep(&moment, nullptr);
    }
    if (tries >= kSpins && tries % 64 == 0 && seconds_now() > end) return false;
  }
  return true;
}

struct Exchange {
  Counter* counters;
  char* slots;
  int64_t slot_bytes;
  char* inboxes;
  int64_t message_bytes;
  int rank, ranks;
  uint64_t turn = 0;
  // Where the call stands that is under way: it may return before it is done, and be called again to go on.
  int64_t done = 0;        // pieces that are finished
  bool published = false;  // the next piece lies in this rank's slot

  char* slot(int of) const { return slots + (2 * of + static_cast<int64_t>(turn % 2)) * slot_bytes; }

  Inbox& inbox(int of) const { return *reinterpret_cast<Inbox*>(inboxes + of * inbox_nbytes(message_bytes)); }

  // Where message number `number` of an inbox lies.
  char* message(int of, uint64_t number) const {
    return reinterpret_cast<char*>(&inbox(of) + 1) + static_cast<int64_t>(number % kInbox) * message_bytes;
  }

  static int64_t inbox_nbytes(int64_t message_bytes) {
    return static_cast<int64_t>(sizeof(Inbox)) + kInbox * message_bytes;
  }

  // The first rank whose part has not come by `end`, or -1 when all have.
  int wait(double end) const {
    for (int other = 0; other < ranks; ++other) {
      const std::atomic<uint64_t>& its = counters[other].turn;
      if (!wait_until(end, [&] { return its.load(std::memory_order_acquire) >= turn; })) return other;
    }
    return -1;
  }

  // Runs pieces 0..n-1: put(piece, own slot), wait for all, take(piece). Returns the rank that is late, or -1.
  template <class Put, class Take>
  int run(int64_t n, double timeout, Put put, Take take) {
    const double end = seconds_now() + timeout;
    for (; done < n; ++done) {
      if (!published) {
        ++turn;
        put(done, slot(rank));
        counters[rank].turn.store(turn, std::memory_order_release);
        published = true;
      }
      if (int late = wait(end); late >= 0) return late;
      take(done);
      published = false;
    }
    done = 0;
    return -1;
  }
};

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

extern "C" {

PSHARD_API int64_t pshard_exchange_nbytes(int ranks, int64_t slot_bytes, int64_t message_bytes) {
  return ranks * (static_cast<int64_t>(sizeof(Counter)) + 2 * slot_bytes + Exchange::inbox_nbytes(message_bytes));
}

PSHARD_API void* pshard_exchange_open(void* memory, int rank, int ranks, int64_t slot_bytes, int64_t message_bytes) {
  auto* counters = static_cast<Counter*>(memory);
  char* slots = reinterpret_cast<char*>(counters + ranks);
  return new (std::nothrow)
      Exchange{counters, slots, slot_bytes, slots + 2 * ranks * slot_bytes, message_bytes, rank, ranks};
}

PSHARD_API void pshard_exchange_close(void* exchange) { delete static_cast<Exchange*>(exchange); }

PSHARD_API int pshard_exchange_sum(void* exchange, float* data, int64_t n, double timeout) {
  Exchange& e = *static_cast<Exchange*>(exchange);
  const int64_t each = e.slot_bytes / static_cast<int64_t>(sizeof(float));
  return e.run(
      (n + each - 1) / each, timeout,
      [&](int64_t piece, char* slot) {
        std::memcpy(slot, data + piece * each, sizeof(float) * smaller(each, n - piece * each));
      },
      [&](int64_t piece) {
        float* __restrict out = data + piece * each;
        const int64_t count = smaller(each, n - piece * each);
        // rank 0 + rank 1 + ..., on every rank alike
        const float* __restrict first = reinterpret_cast<const float*>(e.slot(0));
        const float* __restrict second = reinterpret_cast<const float*>(e.slot(1));
        for (int64_t i = 0; i < count; ++i) out[i] = first[i] + second[i];
        for (int other = 2; other < e.ranks; ++other) {
          const float* __restrict part = reinterpret_cast<const float*>(e.slot(other));
          for (int64_t i = 0; i < count; ++i) out[i] += part[i];
        }
      });
}

PSHARD_API int pshard_exchange_gather(void* exchange, const char* data, int64_t nbytes, char* out, const int64_t* sizes,
                                      double timeout) {
  Exchange& e = *static_cast<Exchange*>(exchange);
  int64_t largest = 0;
  for (int r = 0; r < e.ranks; ++r) largest = sizes[r] > largest ? sizes[r] : largest;
  return e.run(
      (largest + e.slot_bytes - 1) / e.slot_bytes, timeout,
      [&](int64_t piece, char* slot) {
        const int64_t at = piece * e.slot_bytes;
        if (at < nbytes) std::memcpy(slot, data + at, smaller(e.slot_bytes, nbytes - at));
      },
      [&](int64_t piece) {
        const int64_t at = piece * e.slot_bytes;
        char* to = out;
        for (int r = 0; r < e.ranks; to += sizes[r++])
          if (at < sizes[r]) std::memcpy(to + at, e.slot(r), smaller(e.slot_bytes, sizes[r] - at));
      });
}

// Puts a message into the inbox of rank `target`; returns -1, or `target` when there is no place for it in time.
PSHARD_API int pshard_exchange_put(void* exchange, const char* data, int64_t nbytes, int target, double timeout) {
  const Exchange& e = *static_cast<Exchange*>(exchange);
  Inbox& box = e.inbox(target);
  const uint64_t number = box.put.turn.load(std::memory_order_relaxed);
  const auto has_room = [&] { return number - box.taken.turn.load(std::memory_order_acquire) < kInbox; };
  if (!wait_until(seconds_now() + timeout, has_room)) return target;
  std::memcpy(e.message(target, number), data, nbytes);
  box.put.turn.store(number + 1, std::memory_order_release);
  return -1;
}

// Takes the next message, of `nbytes`, from this rank's inbox; returns -1, or `source` when none has come in time.
PSHARD_API int pshard_exchange_take(void* exchange, char* out, int64_t nbytes, int source, double timeout) {
  const Exchange& e = *static_cast<Exchange*>(exchange);
  Inbox& box = e.inbox(e.rank);
  const uint64_t number = box.taken.turn.load(std::memory_order_relaxed);
  const auto has_come = [&] { return box.put.turn.load(std::memory_order_acquire) > number; };
  if (!wait_until(seconds_now() + timeout, has_come)) return source;
  std::memcpy(out, e.message(e.rank, number), nbytes);
  box.taken.turn.store(number + 1, std::memory_order_release);
  return -1;
}

}  // extern "C"
