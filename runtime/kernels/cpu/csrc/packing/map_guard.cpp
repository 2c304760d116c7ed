// Model files are mapped. One that is cut short while it is read would end the process by a bus error: here its missing
// pages become zeros instead, and whoever reads asks afterwards if the file is still what it was.
#include "calls.h"

#if defined(__linux__)
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace pshard {
namespace {

struct Range {
  std::atomic<uintptr_t> begin{0}, end{0};  // both 0: free for another
  Range* next = nullptr;
};
std::atomic<Range*> ranges{nullptr};  // only ever grows: the handler walks it without a lock
std::mutex changing;
struct sigaction before;  // what the signal did

void handle(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (Range* r = info->si_code == BUS_ADRERR ? ranges.load() : nullptr; r; r = r->next) {
    if (at < r->begin.load() || at >= r->end.load()) continue;
    const uintptr_t from = at / page * page, to = (r->end.load() + page - 1) / page * page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(reinterpret_cast<void*>(from), to - from, PROT_READ, flags, -1, 0) == MAP_FAILED) break;
    errno = error;
    return;
  }
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_IGN && before.sa_handler != SIG_DFL) before.sa_handler(number);
  else signal(SIGBUS, SIG_DFL);  // and the same access ends the process
}

void prepare() {
  struct sigaction now;
  sigaction(SIGBUS, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &handle) return;  // others may have set it since
  before = now;
  now = {};
  now.sa_sigaction = &handle;
  now.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGBUS, &now, nullptr);
}

}  // namespace
}  // namespace pshard

using namespace pshard;

PSHARD_API void pshard_guard_map(const void* begin, size_t nbytes) {
  const std::lock_guard lock(changing);
  prepare();
  Range* free = ranges.load();
  while (free && free->end.load()) free = free->next;
  Range* range = free ? free : new Range;
  range->begin.store(reinterpret_cast<uintptr_t>(begin));
  range->end.store(reinterpret_cast<uintptr_t>(begin) + nbytes);
  if (!free) range->next = ranges.load(), ranges.store(range);
}

PSHARD_API void pshard_unguard_map(const void* begin) {
  const std::lock_guard lock(changing);
  for (Range* r = ranges.load(); r; r = r->next)
    if (r->begin.load() == reinterpret_cast<uintptr_t>(begin)) r->end.store(0), r->begin.store(0);
}

#else

PSHARD_API void pshard_guard_map(const void*, size_t) {}
PSHARD_API void pshard_unguard_map(const void*) {}

#endif
