// Threads that share out chunks of work: the caller and n - 1 helpers, started once, which spin for some microseconds
// after the last work and sleep after that. Waking many takes as long as a small piece of work, so a caller who waits
// for something else before he has work says so, and they wake meanwhile.
//
// Nobody waits for a helper that the system does not run. One that has taken nothing is not needed: the caller does all
// by itself then. One that was put aside within a chunk is recalled (recall.h): it leaves the chunk before its next
// instruction, whenever that is, and the chunk is computed again. So a call that has returned is over for all threads,
// and no memory of it is touched later.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pshard {

class Helper;
struct Phase;

// A piece of a phase. `next` is what this thread will do after it, or `i` again, so that it can start to fetch the data.
struct Chunk {
  int64_t i, next;
  uint8_t* room;  // of this thread alone, 64-byte aligned; what lies there means nothing
};

// What every thread does before its first chunk of a phase and after its last.
struct Around {
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
  size_t room = 0;  // bytes
  // About what the phase works on, as bytes that a matrix-vector product would read. With little of it the caller is
  // done sooner than others could bring it their results.
  int64_t bytes = INT64_MAX;
};
constexpr int64_t kAlone = 512 << 10;

// What a job shares out its phases with. Only the caller's thread runs the job, and calls these.
class Team {
 public:
  // Calls body(chunk) for every i in [0, n), shared out over the threads as they come free; returns when all are done.
  // A chunk may be left at any instruction and computed again, maybe by another thread. So a body must not read what it
  // writes outside its room, and must not allocate, lock or throw; what it holds needs no destructor.
  template <class Body>
  void for_each_chunk(int64_t n, const Around& around, Body&& body) {
    share(n, around, [](const void* b, const Chunk& c) { (*static_cast<std::remove_reference_t<Body>*>(const_cast<void*>(b)))(c); },
          &body);
  }
  // body(i, next); `bytes` as in Around
  template <class Body>
  void for_each_ahead(int64_t n, int64_t bytes, Body&& body) {
    for_each_chunk(n, {nullptr, nullptr, 0, bytes}, [&](const Chunk& c) { body(c.i, c.next); });
  }
  template <class Body>
  void for_each(int64_t n, int64_t bytes, Body&& body) {
    for_each_chunk(n, {nullptr, nullptr, 0, bytes}, [&](const Chunk& c) { body(c.i); });
  }
  int size() const;  // threads

 private:
  friend class Pool;
  using Run = void (*)(const void* body, const Chunk&);
  void share(int64_t n, const Around& around, Run run, const void* body);
};

class Pool {
 public:
  static Pool& instance();

  // n threads including the caller; helpers keep to `cpus` when some are given (the caller does not, because threads
  // that it starts later would inherit that). None is bound to one of them: another program may need just that one.
  void resize(int n, const std::vector<int>& cpus);
  int size();

  // Runs body(team); one job at a time.
  template <class Body>
  void run(Body&& body) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!helpers_) start_helpers();
    body(team_);
  }

  // Scratch memory of the running job, 64-byte aligned, kept for the next one. Call only inside with_scratch().
  template <class Body>
  void with_scratch(size_t nbytes, Body&& body) {
    std::lock_guard<std::mutex> lock(scratch_mutex_);
    body(scratch_.reserve(nbytes));
  }

  // The caller waits for something, and will have work then: helpers wake, and stay awake until it comes, for a
  // millisecond at most. Not where the last such work came later than that, or never.
  void expect();
  int sleeping() const { return static_cast<int>(sleepers_.load()); }  // helpers

  // How often helpers were recalled from a phase.
  int64_t recalls() const { return recalled_.load(std::memory_order_relaxed); }

  // For tests. Helpers stop when they come to that point (Point), as if the system had put them aside there; kNowhere:
  // they go on. Returns how many stand still.
  int stop_helpers_at(int point);

 private:
  friend class Team;
  friend class Helper;

  // Memory that grows, 64-byte aligned.
  class Store {
   public:
    uint8_t* reserve(size_t nbytes) {
      if (size_ < nbytes + 64) bytes_.reset(), bytes_.reset(new uint8_t[nbytes + 64]), size_ = nbytes + 64;
      return bytes_.get() + (64 - reinterpret_cast<uintptr_t>(bytes_.get()) % 64) % 64;
    }

   private:
    std::unique_ptr<uint8_t[]> bytes_;
    size_t size_ = 0;
  };

  Pool();
  void start_helpers();
  void stop_helpers();
  void run_phase(int64_t n, const Around& around, Team::Run run, const void* body);
  Phase open_phase(int64_t n, const Around& around, Team::Run run, const void* body, uint8_t* room, size_t each);
  int64_t take(const Phase& phase, bool& spare);
  template <class Done, class Taken>
  void work_through(const Phase& phase, int64_t first, bool spare, Done&& done, Taken&& taken);
  uint32_t next_number();
  void wake_some();
  bool expects() const;
  bool wait_for(uint32_t chunks, int64_t nanoseconds);
  std::vector<int64_t> recall_helpers(const Phase& phase);

  std::mutex mutex_, scratch_mutex_;
  int wanted_ = 1;
  std::vector<int> cpus_;
  std::vector<std::unique_ptr<Helper>>* helpers_ = nullptr;  // leaked in a forked child, where the threads do not exist
  Team team_;
  Store scratch_, room_;
  int64_t promised_at_ = 0, delay_ = 0;  // ns by the clock: when work was promised that has not come; how late the last came

  // The phase that is open. A helper reads these without a lock; what it read stands if it can take a chunk of the phase
  // whose number it saw before.
  std::atomic<Team::Run> run_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<void (*)()> enter_{nullptr}, leave_{nullptr};
  std::atomic<int64_t> chunks_{0};
  std::atomic<uint8_t*> room_at_{nullptr};
  std::atomic<size_t> room_each_{0};
  std::unique_ptr<std::atomic<uint32_t>[]> finished_;  // of each chunk the number of the last phase that finished it
  int64_t most_chunks_ = 0;
  alignas(64) std::atomic<uint64_t> left_{0};  // number of the phase, and its chunks that nobody has taken
  alignas(64) std::atomic<uint32_t> number_{0};  // of the phase or the promise; helpers sleep on it
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<int64_t> awake_until_{0};  // ns by the clock; 0: no work is expected
  alignas(64) std::atomic<uint32_t> done_{0};  // chunks that helpers have finished; the caller sleeps on it
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> recalled_{0};
  bool recalls_ = false;  // whether this system can recall threads
};

// Where a helper may be put aside, for tests.
enum Point { kNowhere, kWoken, kTaken, kWorked, kFinished };

}  // namespace pshard
