// A counter in shared memory that one rank raises and other ranks wait for.
//
// Counters only grow (modulo 2^32) and are compared by signed difference, so
// they never need a reset, and a late reader is not confused. Raising one
// releases everything written before it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace collective {

struct FutexWord {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  // The acquire pairs with Raise: earlier writes of the other rank are visible.
  bool Reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }

  void Raise(uint32_t target) {
    // An exchange, not a store: a store may still be in the store buffer when
    // `sleepers` is read, and a rank that falls asleep in that moment would never
    // be woken.
    value.exchange(target, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Sleeps while the value is `seen`, for a limited time. The caller counts itself
  // in `sleepers` before it reads the value. FUTEX_PRIVATE_FLAG is absent, because
  // another process wakes the sleeper.
  void Sleep(uint32_t seen, long nanoseconds) {
    timespec most = {0, nanoseconds};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &most, nullptr, 0);
  }
};

// A word with cache lines of its own, so that ranks that write different words
// do not compete for a line. Two lines, because processors fetch lines in
// pairs.
struct alignas(128) Flag : FutexWord {};

}  // namespace collective
