// Copies within host memory by a few threads of their own, beside the pool, which computes meanwhile. A copy is cut
// into pieces that threads take as they come: one that the system runs late takes none, and nobody waits for it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "driver.h"

namespace pshard {
namespace {

constexpr size_t kPiece = 256 << 10;

class Copiers {
 public:
  explicit Copiers(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }
  ~Copiers() {
    stop_.store(true);
    left_.fetch_add(uint64_t{1} << 32);
    left_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }

  void copy(char* to, const char* from, size_t nbytes) {
    if (!nbytes) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t pieces = static_cast<uint32_t>((nbytes + kPiece - 1) / kPiece);
    to_ = to, from_ = from, nbytes_ = nbytes;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t number = (left_.load() >> 32) + 1;
    left_.store(number << 32 | pieces, std::memory_order_release);
    if (pieces > 1) left_.notify_all();
    while (take()) {
    }
    for (uint32_t seen; (seen = done_.load(std::memory_order_acquire)) != pieces;) done_.wait(seen);
  }

 private:
  // Copies one piece; false when none is left. Whoever has taken one keeps the caller, so what it reads here stands.
  bool take() {
    uint64_t left = left_.load(std::memory_order_acquire);
    do {
      if (!static_cast<uint32_t>(left)) return false;
    } while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
    const size_t at = (static_cast<uint32_t>(left) - 1) * kPiece;
    std::memcpy(to_ + at, from_ + at, std::min(kPiece, nbytes_ - at));
    const uint32_t all = static_cast<uint32_t>((nbytes_ + kPiece - 1) / kPiece);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) done_.notify_one();
    return true;
  }

  void help() {
    for (;;) {
      const uint64_t seen = left_.load(std::memory_order_acquire);  // first: the end changes it after `stop_`
      if (stop_.load()) return;
      if (static_cast<uint32_t>(seen)) take();
      else left_.wait(seen);
    }
  }

  std::mutex mutex_;
  char* to_ = nullptr;
  const char* from_ = nullptr;
  size_t nbytes_ = 0;
  alignas(64) std::atomic<uint64_t> left_{0};  // number of the copy, and its pieces that nobody has taken
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

struct Job {
  Copiers* copiers;
  char* to;
  const char* from;
  size_t nbytes;
};

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void* pshard_copiers_open(int threads) { return new Copiers(threads); }
PSHARD_API void pshard_copiers_close(void* copiers) { delete static_cast<Copiers*>(copiers); }

// A copy to be made later, by whoever calls pshard_copiers_run with it, once.
PSHARD_API void* pshard_copiers_job(void* copiers, void* to, const void* from, size_t nbytes) {
  return new Job{static_cast<Copiers*>(copiers), static_cast<char*>(to), static_cast<const char*>(from), nbytes};
}
PSHARD_API void pshard_copiers_run(void* job) {
  const Job* todo = static_cast<const Job*>(job);
  todo->copiers->copy(todo->to, todo->from, todo->nbytes);
  delete todo;
}
