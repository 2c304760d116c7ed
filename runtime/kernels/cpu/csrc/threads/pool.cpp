#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pshard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(4);  // then let others run: the thread waited for may need this CPU
constexpr auto kYield = std::chrono::microseconds(1000);  // then sleep until the next job

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` differs from `seen`; gives up after kSpin + kYield unless `forever`.
bool wait_change(const std::atomic<uint32_t>& value, uint32_t seen, bool forever) {
  for (int i = 0; i < 64; ++i) {
    if (value.load(std::memory_order_acquire) != seen) return true;
    relax();
  }
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != seen) return true;
      relax();
    }
    const auto waited = Clock::now() - start;
    if (waited > kSpin) std::this_thread::yield();
    if (!forever && waited > kSpin + kYield) return false;
  }
}

void bind_this_thread(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
#else
  (void)cpu;
#endif
}

// Keeps the calling thread off the processors that workers are bound to while a job runs, and lets it go where it may
// after that: threads that it starts inherit where it may run.
class ElsewhereThan {
 public:
  explicit ElsewhereThan(const std::vector<int>& cpus) {
#if defined(__linux__)
    if (cpus.size() < 2 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    cpu_set_t free = before_;
    for (size_t i = 1; i < cpus.size(); ++i) CPU_CLR(cpus[i], &free);
    moved_ = CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof free, &free) == 0;
#else
    (void)cpus;
#endif
  }
  ElsewhereThan(const ElsewhereThan&) = delete;
  ElsewhereThan& operator=(const ElsewhereThan&) = delete;
#if defined(__linux__)
  ~ElsewhereThan() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  bool moved_ = false;
#endif
};

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

}  // namespace

void Team::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    wait_change(phase_, phase, true);
  }
}

Pool::Pool() : wanted_(usable_cpus()) {
#if defined(__linux__)
  pthread_atfork(nullptr, nullptr, [] { Pool::instance().workers_ = nullptr; });
#endif
}

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: workers may outlive the destructors of the process
  return *pool;
}

int Pool::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return wanted_;
}

void Pool::resize(int n, const std::vector<int>& cpus) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_workers();
  wanted_ = n < 1 ? 1 : n;
  cpus_ = cpus;
}

void Pool::start_workers() {
  stop_.store(false);
  team_.size_ = wanted_;
  team_.arrived_.store(0);
  team_.next_.store(0);
  workers_ = new std::vector<std::thread>;
  const uint32_t seen = job_.load();
  for (int i = 1; i < wanted_; ++i) {
    const int cpu = i < static_cast<int>(cpus_.size()) ? cpus_[i] : -1;
    workers_->emplace_back([this, cpu, seen] {
      if (cpu >= 0) bind_this_thread(cpu);
      work(seen);
    });
  }
}

void Pool::stop_workers() {
  if (!workers_) return;
  stop_.store(true);
  job_.fetch_add(1);
  job_.notify_all();
  for (auto& worker : *workers_) worker.join();
  delete workers_;
  workers_ = nullptr;
}

void Pool::work(uint32_t seen) {
  for (;;) {
    while (!wait_change(job_, seen, false)) job_.wait(seen);
    ++seen;  // the caller waits for all at the end of a job, so no job is ever missed
    if (stop_.load(std::memory_order_relaxed)) return;
    function_(context_, team_);
    team_.barrier();
  }
}

void Pool::run_locked(Function function, void* context) {
  if (!workers_) start_workers();
  const ElsewhereThan workers(cpus_);  // beside one of them it would keep all waiting for the rest of its time slice
  function_ = function;
  context_ = context;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  function(context, team_);
  team_.barrier();
}

unsigned char* Pool::reserve(size_t nbytes) {
  if (scratch_.size() < nbytes + 64) scratch_.resize(nbytes + 64);
  const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
  return scratch_.data() + ((64 - address % 64) % 64);
}

}  // namespace pshard
