#include "pool.h"

#include <algorithm>
#include <chrono>

#include "futex.h"
#include "recall.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pshard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSpin = 50'000;  // ns, then sleep: what others want to run may need this processor
constexpr int64_t kAhead = 1'000'000;  // ns that helpers await expected work; waking them costs less than longer waits
constexpr int64_t kPatience = 10'000;  // ns beside the time of two chunks, then a helper is taken to be put aside
constexpr int64_t kForever = -1;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t nanoseconds(Clock::duration d) { return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count(); }
int64_t since(Clock::time_point start) { return nanoseconds(Clock::now() - start); }
int64_t now() { return nanoseconds(Clock::now().time_since_epoch()); }

// Waits without sleeping until `value` is `wanted`, or is not `wanted` any more; false when that takes too long.
template <class Arrived>
bool spin_until(int64_t nanoseconds, Arrived&& arrived) {
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (arrived()) return true;
      relax();
    }
  } while (since(start) < nanoseconds);
  return false;
}

void bind_this_thread(const std::vector<int>& cpus) {
#if defined(__linux__)
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
#else
  (void)cpus;
#endif
}

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

std::atomic<uint32_t> stop_point{kNowhere}, stopped{0};  // for tests

// Chunks to be computed again, as a phase of their own.
struct Again {
  void (*run)(const void*, const Chunk&);
  const void* body;
  const std::vector<int64_t>& chunks;
};

}  // namespace

// What a thread needs to take part in a phase.
struct Phase {
  void (*run)(const void*, const Chunk&);
  const void* body;
  uint32_t number;
  int64_t chunks;
  uint8_t* room;
};

class Helper {
 public:
  Helper(Pool& pool, int index) : pool_(pool), index_(index) {
    thread_ = std::thread([this] {
      bind_this_thread(pool_.cpus_);
      self_.join_thread();
      work();
    });
  }
  ~Helper() { thread_.join(); }
  Recallable& self() { return self_; }

 private:
  void work() {
    for (;;) {
      const uint32_t number = pool_.number_.load(std::memory_order_acquire);
      if (pool_.stop_.load()) return;
      take_part();
      if (!wait_awake(number)) {
        pool_.sleepers_.fetch_add(1);
        if (pool_.number_.load() == number) sleep_on(pool_.number_, number, kForever);
        pool_.sleepers_.fetch_sub(1);
        if (static_cast<uint32_t>(pool_.left_.load()) || pool_.expects()) pool_.wake_some();
      }
    }
  }

  // Waits for another number than that, first for some microseconds, then, giving way to other programs, as long as work
  // is expected; false when none comes.
  bool wait_awake(uint32_t number) {
    const auto changed = [&] { return pool_.number_.load(std::memory_order_acquire) != number; };
    bool came = spin_until(kSpin, changed);
    while (!came && pool_.expects()) {
      std::this_thread::yield();
      came = spin_until(0, changed);
    }
    return came;
  }

  void take_part() {
    const uint64_t left = pool_.left_.load(std::memory_order_acquire);
    if (!static_cast<uint32_t>(left)) return;
    const Phase phase{pool_.run_, pool_.body_, static_cast<uint32_t>(left >> 32), pool_.chunks_,
                      pool_.room_at_ + index_ * pool_.room_each_};
    const auto enter = pool_.enter_.load(), leave = pool_.leave_.load();
    if (enter) enter();
    come_to(kWoken);
    self_.run([&] {
      bool spare = false;
      const int64_t first = pool_.take(phase, spare);
      pool_.work_through(phase, first, spare, [&](int64_t i) {
        come_to(kWorked);
        pool_.finished_[i].store(phase.number, std::memory_order_release);
        come_to(kFinished);
        pool_.done_.fetch_add(1);
        if (pool_.caller_sleeps_.load()) wake_sleepers(pool_.done_, 1);
      }, [&] { come_to(kTaken); });
    });
    if (leave) leave();
  }

  void come_to(Point point) {
    if (stop_point.load(std::memory_order_relaxed) != point) [[likely]] return;
    self_.hold_back(true);
    stopped.fetch_add(1);
    while (stop_point.load() == point) sleep_on(stop_point, point, kForever);
    stopped.fetch_sub(1);
    self_.hold_back(false);
  }

  Pool& pool_;
  const int index_;
  Recallable self_;
  std::thread thread_;
};

int Team::size() const { return Pool::instance().wanted_; }

void Team::share(int64_t n, const Around& around, Run run, const void* body) {
  if (n > 0) Pool::instance().run_phase(n, around, run, body);
}

Pool::Pool() : wanted_(usable_cpus()) {
#if defined(__linux__)
  pthread_atfork(nullptr, nullptr, [] { Pool::instance().helpers_ = nullptr; });
#endif
}

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: helpers may outlive the destructors of the process
  return *pool;
}

int Pool::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return wanted_;
}

void Pool::resize(int n, const std::vector<int>& cpus) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_helpers();
  wanted_ = n < 1 ? 1 : n;
  cpus_ = cpus;
}

void Pool::expect() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || !helpers_) return;  // with work under way nobody sleeps
  const bool kept = !promised_at_ && delay_ <= kAhead;
  promised_at_ = now();
  if (!kept) return;
  awake_until_.store(promised_at_ + kAhead);
  number_.store(next_number());
  wake_some();
}

bool Pool::expects() const {
  const int64_t end = awake_until_.load();
  return end && now() < end;
}

int Pool::stop_helpers_at(int point) {
  stop_point.store(point);
  wake_sleepers(stop_point, wanted_);
  return static_cast<int>(stopped.load());
}

void Pool::start_helpers() {
  stop_.store(false);
  sleepers_.store(0);
  awake_until_.store(0);
  promised_at_ = delay_ = 0;
  left_.store(uint64_t{number_.load()} << 32);
  recalls_ = prepare_recalls();
  helpers_ = new std::vector<std::unique_ptr<Helper>>;
  for (int i = 1; i < wanted_; ++i) helpers_->push_back(std::make_unique<Helper>(*this, i));
}

void Pool::stop_helpers() {
  if (!helpers_) return;
  stop_.store(true);
  number_.fetch_add(1);
  wake_sleepers(number_, wanted_);
  delete helpers_;
  helpers_ = nullptr;
}

// Takes one chunk of a phase; -1 when none is left, or the phase is over. `spare`: more are left than there are threads.
inline int64_t Pool::take(const Phase& phase, bool& spare) {
  uint64_t left = left_.load(std::memory_order_relaxed);
  do {
    if (left >> 32 != phase.number || !static_cast<uint32_t>(left)) return -1;
  } while (!left_.compare_exchange_weak(left, left - 1));
  const int64_t these = static_cast<uint32_t>(left);
  spare = these > wanted_;
  return phase.chunks - these;
}

// Computes chunks as long as there are some, first the one given.
template <class Done, class Taken>
inline void Pool::work_through(const Phase& phase, int64_t first, bool spare, Done&& done, Taken&& taken) {
  for (int64_t i = first, next; i >= 0; i = next) {
    taken();
    next = spare ? take(phase, spare) : -1;
    phase.run(phase.body, {i, next < 0 ? i : next, phase.room});
    done(i);
    if (next < 0) next = take(phase, spare);
  }
}

void Pool::run_phase(int64_t n, const Around& around, Team::Run run, const void* body) {
  const size_t each = (around.room + 63) / 64 * 64;
  uint8_t* room = each ? room_.reserve(each * wanted_) : nullptr;
  if (n == 1 || wanted_ == 1 || around.bytes < kAlone) {
    if (around.enter) around.enter();
    for (int64_t i = 0; i < n; ++i) run(body, {i, std::min(i + 1, n - 1), room});
    if (around.leave) around.leave();
    return;
  }
  const auto start = Clock::now();
  const Phase phase = open_phase(n, around, run, body, room, each);
  if (around.enter) around.enter();
  uint32_t own = 0;
  work_through(phase, 0, n > wanted_, [&](int64_t i) {
    finished_[i].store(phase.number, std::memory_order_relaxed);
    ++own;
  }, [] {});
  if (around.leave) around.leave();
  const uint32_t others = static_cast<uint32_t>(n) - own;
  if (done_.load(std::memory_order_acquire) == others) return;
  if (wait_for(others, recalls_ ? kPatience + 2 * since(start) / own : INT64_MAX)) return;
  const std::vector<int64_t> chunks = recall_helpers(phase);
  if (chunks.empty()) return;
  const Again again{run, body, chunks};
  run_phase(static_cast<int64_t>(chunks.size()), around, [](const void* b, const Chunk& c) {
    const Again& a = *static_cast<const Again*>(b);
    a.run(a.body, {a.chunks[c.i], a.chunks[c.next], c.room});
  }, &again);
}

Phase Pool::open_phase(int64_t n, const Around& around, Team::Run run, const void* body, uint8_t* room, size_t each) {
  if (promised_at_) {
    delay_ = now() - promised_at_, promised_at_ = 0;
    awake_until_.store(0);
  }
  const uint32_t number = next_number();
  if (n > most_chunks_) {
    most_chunks_ = n;
    finished_.reset(new std::atomic<uint32_t>[n]());
  }
  run_ = run, body_ = body, enter_ = around.enter, leave_ = around.leave, chunks_ = n;
  room_at_ = room, room_each_ = each;
  done_.store(0, std::memory_order_relaxed);
  left_.store(uint64_t{number} << 32 | static_cast<uint32_t>(n - 1));  // the first is the caller's
  number_.store(number);
  wake_some();
  return {run, body, number, n, room};
}

uint32_t Pool::next_number() {
  const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
  if (number) return number;
  for (int64_t i = 0; i < most_chunks_; ++i) finished_[i].store(0);  // numbers begin again
  return 1;
}

// Waking takes longer than a small chunk, so those that are woken wake others.
void Pool::wake_some() {
  if (sleepers_.load()) wake_sleepers(number_, 2);
}

// Waits until helpers have finished so many chunks; false when that takes longer.
bool Pool::wait_for(uint32_t chunks, int64_t nanoseconds) {
  const auto start = Clock::now();
  const auto finished = [&] { return done_.load(std::memory_order_acquire) == chunks; };
  if (spin_until(std::min(nanoseconds, kSpin), finished)) return true;
  caller_sleeps_.store(true);
  for (;;) {
    const uint32_t seen = done_.load();
    const int64_t left = nanoseconds - since(start);
    if (seen == chunks || left <= 0) {
      caller_sleeps_.store(false);
      return seen == chunks;
    }
    sleep_on(done_, seen, left);
  }
}

// Makes all helpers leave the phase; returns the chunks that nobody has finished.
std::vector<int64_t> Pool::recall_helpers(const Phase& phase) {
  prepare_recalls();
  recalled_.fetch_add(1, std::memory_order_relaxed);
  for (auto& helper : *helpers_)
    if (helper->self().is_at_work()) helper->self().recall();
  if (!recalls_are_over())
    for (auto& helper : *helpers_)
      while (helper->self().is_at_work()) std::this_thread::yield();
  std::vector<int64_t> chunks;
  for (int64_t i = 0; i < phase.chunks; ++i)
    if (finished_[i].load(std::memory_order_acquire) != phase.number) chunks.push_back(i);
  return chunks;
}

}  // namespace pshard
