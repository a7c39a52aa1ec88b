// What the ranks of a host tell each other of a job: the first page of its
// shared memory.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_JOB_MEMORY_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_JOB_MEMORY_H_

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "membership/job.h"

namespace collective {

// What a thread of a rank waits for, as told to the others.
struct Job::Waiting {
  std::atomic<int32_t> rank;    // plus 1; 0: free, -1: being written
  std::atomic<int64_t> since;   // nanoseconds
  std::atomic<int64_t> looked;  // when it last saw that it must wait on
  std::atomic<bool> caller;     // whether it asked for the collective itself
  // Of the collective, if a traced function has it (plan.h); else 0.
  std::atomic<uint64_t> function, name;
  std::atomic<int32_t> group;
  char doing[256];
};

struct alignas(128) Job::RankState {
  static constexpr int kThreads = 4;  // that wait at once; more are not told
  Word here;                          // 1: attached, 2: left
  cpu_set_t cores;
  std::atomic<int> core;      // on which it last posted; where they are shared
  std::atomic<bool> several;  // threads asked for collectives
  Waiting waiting[kThreads];
  std::atomic<int32_t> queues;   // that have what was submitted, or run it
  std::atomic<int64_t> changed;  // when they became more or fewer
  // Since when the one thread that asks waits for what it has submitted (0: it
  // does not), and when it last saw that it must wait on.
  std::atomic<int64_t> held, held_looked;

  bool Waits() const {
    for (const Waiting& one : waiting) {
      if (one.rank.load() > 0) return true;
    }
    return false;
  }
};

struct Job::Header {
  static constexpr int kMostRanks = 128;
  // Whether the job has come about: all decide it together, by the first word.
  std::atomic<uint32_t> formed;
  static constexpr uint32_t kFormed = 1, kNever = 2;
  std::atomic<bool> lost;        // someone died or left
  std::atomic<uint32_t> broken;  // 1: being written, 2: can be read
  std::atomic<int32_t> broken_code;
  char broken_message[2048];
  Flag ping, pong;
  RankState ranks[kMostRanks];
};

// Who has not looked for so long, in nanoseconds, has been stopped: ten times
// as long as it naps.
constexpr int64_t kStopped = 1'000'000'000;

// By the monotonic clock, which the ranks of a host share.
inline int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_JOB_MEMORY_H_
