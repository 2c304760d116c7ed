// A team of threads that runs one function at a time: the caller and n - 1 workers, started once, kept spinning for a
// short while after a job and parked after that, so that a hand-off costs about a microsecond while work keeps coming.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pshard {

// What the function of a job sees of its team.
class Team {
 public:
  // Calls body(i, next) for every i in [0, n), shared out over the threads as they come free; returns when all are
  // done. Every thread of the team must call it, with the same n. A thread claims one i ahead: `next` is what it will do
  // after this one, or i again when nothing is left, so that it can start fetching the data.
  template <class Body>
  void for_each_ahead(int64_t n, Body&& body) {
    for (int64_t i = claim(), next; i < n; i = next) {
      next = claim();
      body(i, next < n ? next : i);
    }
    barrier();
  }
  template <class Body>
  void for_each(int64_t n, Body&& body) {
    for (int64_t i; (i = claim()) < n;) body(i);
    barrier();
  }
  int size() const { return size_; }

 private:
  friend class Pool;
  int64_t claim() { return next_.fetch_add(1, std::memory_order_relaxed); }
  void barrier();

  int size_ = 1;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Pool {
 public:
  static Pool& instance();

  // n threads including the caller; worker i is bound to cpus[i] when cpus are given (the caller never is, because
  // threads that it starts later would inherit the binding).
  void resize(int n, const std::vector<int>& cpus);
  int size();

  // Runs body(team) on every thread of the pool; returns when all have returned from it. One job at a time.
  template <class Body>
  void run(Body&& body) {
    std::lock_guard<std::mutex> lock(mutex_);
    run_locked([](void* context, Team& team) { (*static_cast<Body*>(context))(team); }, &body);
  }

  // Scratch memory of the running job, 64-byte aligned, kept for the next one. Call only inside with_scratch().
  template <class Body>
  void with_scratch(size_t nbytes, Body&& body) {
    std::lock_guard<std::mutex> lock(scratch_mutex_);
    body(reserve(nbytes));
  }

 private:
  using Function = void (*)(void*, Team&);

  Pool();
  void run_locked(Function function, void* context);
  void start_workers();
  void stop_workers();
  void work(uint32_t seen);
  unsigned char* reserve(size_t nbytes);

  std::mutex mutex_, scratch_mutex_;
  int wanted_ = 1;
  std::vector<int> cpus_;
  std::vector<std::thread>* workers_ = nullptr;  // leaked in a forked child, where the threads do not exist
  Team team_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<bool> stop_{false};
  std::vector<unsigned char> scratch_;
};

}  // namespace pshard
