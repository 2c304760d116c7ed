#include "recall.h"

#if defined(__linux__)
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>
#endif

namespace pshard {

#if defined(__linux__)
namespace {

// Of a model that needs no allocation at the first use, which may be in the handler.
__attribute__((tls_model("initial-exec"))) thread_local Recallable* mine = nullptr;
struct sigaction before;  // what the signal did

}  // namespace

void Recallable::handle(int number, siginfo_t* info, void* context) {
  if (Recallable* self = mine) {
    if (!self->recalled_.exchange(false) || !self->at_work_.exchange(false)) return;
    siglongjmp(self->back_, 1);
  }
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_IGN && before.sa_handler != SIG_DFL) before.sa_handler(number);
}

void Recallable::join_thread() {
  sigset_t others;
  sigfillset(&others);
  for (const int number : {SIGURG, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&others, number);
  pthread_sigmask(SIG_SETMASK, &others, nullptr);
  mine = this;
  id_ = static_cast<int>(syscall(SYS_gettid));
}

void Recallable::hold_back(bool on) {
  sigset_t signal;
  sigemptyset(&signal);
  sigaddset(&signal, SIGURG);
  pthread_sigmask(on ? SIG_BLOCK : SIG_UNBLOCK, &signal, nullptr);
}

void Recallable::recall() {
  recalled_.store(true);
  syscall(SYS_tgkill, getpid(), id_, SIGURG);
}

bool prepare_recalls() {
  struct sigaction now;
  sigaction(SIGURG, nullptr, &now);
  if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != &Recallable::handle) {  // others may have set it since
    before = now;
    now = {};
    now.sa_sigaction = &Recallable::handle;
    now.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;  // the jump back restores no mask
    sigaction(SIGURG, &now, nullptr);
  }
  static const bool registered = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return registered;
}

bool recalls_are_over() { return syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0; }

#else

void Recallable::join_thread() {}
void Recallable::hold_back(bool) {}
void Recallable::recall() {}
bool prepare_recalls() { return false; }
bool recalls_are_over() { return false; }

#endif

}  // namespace pshard
