// Sleeping until a number changes, at most for some time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <climits>
#endif

namespace pshard {

// Returns when `value` is not `seen`, or was woken, or after `nanoseconds` (negative: never), or for no reason.
inline void sleep_on(std::atomic<uint32_t>& value, uint32_t seen, int64_t nanoseconds) {
#if defined(__linux__)
  const timespec most{static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
  syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nanoseconds < 0 ? nullptr : &most, nullptr, 0);
#else
  if (nanoseconds < 0) value.wait(seen);
  else std::this_thread::yield();
#endif
}

inline void wake_sleepers(std::atomic<uint32_t>& value, int most) {
#if defined(__linux__)
  syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
#else
  value.notify_all();
#endif
}

}  // namespace pshard
