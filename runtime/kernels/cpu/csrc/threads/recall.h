// Makes other threads leave what they are at, at once for everyone else, also those that the system does not run.
//
// A signal is sent to each of them. One that does not run takes it before its next instruction, whenever that is. One
// that runs might get some instructions further; a memory barrier on all processors that run this process
// (membarrier(2), private expedited) interrupts it, and on its way back from that it takes the signal. So after both
// calls none of them executes another instruction of what it was at, and all that they wrote is visible. The handler
// jumps back to where the thread prepared for it. The signal is SIGURG, as in Go's runtime: ignored by default, and
// debuggers let it pass.
#pragma once

#include <atomic>
#include <csetjmp>
#include <csignal>

namespace pshard {

class Recallable {
 public:
  void join_thread();  // on the thread itself, first: other signals go to other threads from now on

  // On the thread itself: runs work(), or as much of it as it gets to before it is recalled.
  template <class Work>
  void run(Work&& work) {
    if (sigsetjmp(back_, 0) == 0) {
      at_work_.store(true);
      work();
      at_work_.store(false);
    }
  }
  void hold_back(bool on);  // on the thread itself: while on, it takes no recall, as if the system did not run it

  bool is_at_work() const { return at_work_.load(); }
  void recall();  // it is over for everyone after recall_is_over()

 private:
  static void handle(int, siginfo_t*, void*);
  friend bool prepare_recalls();
  sigjmp_buf back_;
  std::atomic<bool> at_work_{false}, recalled_{false};
  int id_ = 0;
};

bool prepare_recalls();   // before the first; false where the system has no such means
bool recalls_are_over();  // waits for it; false when that failed: then it is so when none is at work any more

}  // namespace pshard
