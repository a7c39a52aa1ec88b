// The first page of a job's shared memory, which the ranks of a host publish.
//
// Each rank writes only its own RankState; other ranks read it in a long wait, to
// report all waits and to detect deadlocks. Every field is atomic except the
// texts, of which a reader may see a torn line, but nothing worse.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "clock.h"
#include "membership/job.h"

namespace collective {

// All times are nanoseconds of Now().

// One wait of one thread of a rank.
struct Job::WaitRecord {
  std::atomic<int32_t> rank;    // the awaited rank, plus 1; 0: free, -1: being written
  std::atomic<int64_t> since;   // when it began
  std::atomic<int64_t> polled;  // when the thread last found that it must still wait
  std::atomic<bool> caller;     // whether the thread called the collective
  // The collective's hashes, if a traced function has it (plan.h); else 0.
  std::atomic<uint64_t> function, name;
  std::atomic<int32_t> group;
  char description[256];
};

struct alignas(128) Job::RankState {
  static constexpr int kThreads = 4;  // waiting threads at a time; more are not shown
  static constexpr uint32_t kAttached = 1, kLeft = 2;  // values of `state`
  FutexWord state;
  // Random: the name under which this rank would coordinate the survivors. It is
  // not atomic, because it is written before `state`.
  uint64_t meeting[2];
  cpu_set_t cores;
  std::atomic<int> core;           // core of its last post; kept if ranks share cores
  std::atomic<bool> many_callers;  // more than one thread called a collective
  WaitRecord waiting[kThreads];
  std::atomic<int32_t> queues;  // queues that have or run submitted collectives
  std::atomic<int64_t> queues_changed;
  // Since when the one calling thread waits for its submissions (0: it does not),
  // and when it last found that it must still wait.
  std::atomic<int64_t> waiting_since, waiting_polled;
  // The last time of a long wait of any of its threads, or of forming the job.
  std::atomic<int64_t> last_waited;
  // SIGKILL was sent to it: it will run no more code of ours, even if it cannot
  // end (frozen, traced, in an uninterruptible sleep). So it counts as dead.
  std::atomic<bool> killed;

  bool Waits() const {
    for (const WaitRecord& one : waiting) {
      if (one.rank.load() > 0) return true;
    }
    return false;
  }
};

struct Job::Header {
  // Whether the job has formed. The first rank that knows it decides for all.
  std::atomic<uint32_t> formed;
  static constexpr uint32_t kFormed = 1, kFailed = 2;
  std::atomic<bool> lost;        // a rank died or left
  std::atomic<uint32_t> broken;  // 1: the message is being written, 2: readable
  std::atomic<int32_t> broken_code;
  char broken_message[2048];
  Flag ping, pong;
  RankState ranks[kMaxRanks];
};

}  // namespace collective
