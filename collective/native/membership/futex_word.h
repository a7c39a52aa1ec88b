// A counter in shared memory that one rank raises and others wait for.
//
// Counters only grow (modulo 2^32) and are compared by signed difference.
// Raising one releases everything written before it.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_FUTEX_WORD_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_FUTEX_WORD_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace collective {

struct Word {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  bool Reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) -
                                target) >= 0;
  }

  void Raise(uint32_t target) {
    // An exchange, because a plain store could still be on its way when the
    // number of sleepers is read, and a sleeper would be missed.
    value.exchange(target, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Sleeps while the value is `seen`, at most so long.
  void Sleep(uint32_t seen, long nanoseconds) {
    timespec most = {0, nanoseconds};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &most, nullptr, 0);
  }
};

// A word with cache lines of its own. Two lines, because processors fetch lines
// in pairs.
struct alignas(128) Flag : Word {};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_FUTEX_WORD_H_
