// The CPU's parts of a micro-batch, done by a thread of their own as the accelerator asks for them. Both tell each other
// by numbers in page-locked memory, so neither waits for the thread that gives the accelerator its work.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

#include "calls.h"
#include "futex.h"
#include "pool.h"

namespace pshard {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);       // between micro-batches, then sleep
constexpr auto kBusy = std::chrono::microseconds(200);      // for what is asked, then others may have the processor

// One part: `asked` becomes 1 when its inputs are there, `done` when its results are; `words` as pshard_replay takes them.
struct Part {
  std::atomic<int32_t>* asked;
  std::atomic<int32_t>* done;
  const int64_t* words;
  int64_t n;
};

class Relay {
 public:
  Relay() : thread_([this] { work(); }) {}
  ~Relay() {
    finish();
    stop_.store(true);
    number_.fetch_add(1);
    wake_sleepers(number_, 1);
    thread_.join();
  }

  void start(const Part* parts, int64_t n) {
    finish();
    parts_ = parts, n_ = n;
    given_up_.store(false);
    busy_.store(1);
    number_.fetch_add(1);
    wake_sleepers(number_, 1);
  }

  // Returns when all parts are done, or given up: true, or after so many seconds: false.
  bool finish(double seconds = std::numeric_limits<double>::infinity()) {
    const auto start = std::chrono::steady_clock::now();
    while (busy_.load(std::memory_order_acquire)) {
      const auto spent = std::chrono::steady_clock::now() - start;
      if (spent > kSpin) sleep_on(busy_, 1, 1'000'000);
      if (std::chrono::duration<double>(spent).count() > seconds) return false;
    }
    return true;
  }

  // Parts that have not begun are left.
  void give_up() {
    given_up_.store(true);
    finish();
  }

 private:
  void work() {
    uint32_t seen = 0;
    for (;;) {
      const auto start = std::chrono::steady_clock::now();
      while (number_.load(std::memory_order_acquire) == seen)
        if (std::chrono::steady_clock::now() - start > kSpin) sleep_on(number_, seen, 1'000'000'000);
      seen = number_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      for (int64_t i = 0; i < n_ && await(*parts_[i].asked); ++i) {
        pshard_replay(parts_[i].words, parts_[i].n);
        parts_[i].done->store(1, std::memory_order_release);
      }
      busy_.store(0, std::memory_order_release);
      wake_sleepers(busy_, 1);
    }
  }

  // Whether the part was asked for, and not given up; takes the number back.
  bool await(std::atomic<int32_t>& asked) {
    Pool::instance().expect();
    const auto start = std::chrono::steady_clock::now();
    for (int turn = 0; !asked.load(std::memory_order_acquire); ++turn) {
      if (given_up_.load(std::memory_order_relaxed)) return false;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (turn % 64 == 63 && std::chrono::steady_clock::now() - start > kBusy) std::this_thread::yield();
    }
    asked.store(0, std::memory_order_relaxed);
    return true;
  }

  const Part* parts_ = nullptr;
  int64_t n_ = 0;
  std::atomic<uint32_t> number_{0}, busy_{0};
  std::atomic<bool> given_up_{false}, stop_{false};
  std::thread thread_;  // the last: it uses the others
};

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void* pshard_relay_open() { return new Relay; }
PSHARD_API void pshard_relay_close(void* relay) { delete static_cast<Relay*>(relay); }
// parts: for each the addresses of `asked` and `done`, then of its list of calls, and how many words that has.
PSHARD_API void pshard_relay_start(void* relay, const int64_t* parts, int64_t n) {
  static_cast<Relay*>(relay)->start(reinterpret_cast<const Part*>(parts), n);
}
// 1 when all parts are done, 0 when they are not after so many seconds.
PSHARD_API int pshard_relay_finish(void* relay, double seconds) { return static_cast<Relay*>(relay)->finish(seconds); }
PSHARD_API void pshard_relay_give_up(void* relay) { static_cast<Relay*>(relay)->give_up(); }
