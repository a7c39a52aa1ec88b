// How a rank waits for another, and how it reacts to a long wait.
//
// A wait passes through three phases: spin, yield, sleep. Each costs other
// processes less, and costs this one more latency. The futex wakes a sleeper. The
// sleeper also polls, because a dead rank does not wake anyone.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

#include "membership/job.h"
#include "membership/job_memory.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

constexpr int kBriefSpins = 60;  // 1 to 2 us, the time of yielding a core
// The yielding phase ends after so many yields (about 100 us if no other process
// runs) or so much time. After that TensorFlow can use the core better.
constexpr int kYields = 1000;
constexpr int64_t kYieldNanoseconds = 300'000;
// Reading the clock takes as long as a yield, so it is not read each time.
constexpr int kYieldsPerClock = 16;
constexpr long kNapNanoseconds = 100'000'000;  // how often a sleeper polls
// While messages are under way, MPI must be called, or they do not progress.
constexpr long kShortNapNanoseconds = 200'000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Job::RecordCore() {
  const int core = sched_getcpu();
  RankState& mine = my_state();
  if (mine.core.load(std::memory_order_relaxed) != core) {
    mine.core.store(core, std::memory_order_relaxed);
  }
}

bool Job::RunsOnOtherCore(int rank) const {
  const RankState& theirs = header_->ranks[local_.Find(rank)];
  return theirs.core.load(std::memory_order_relaxed) != my_state().core;
}

void Job::SpinBriefly(const FutexWord& word, uint32_t target) {
  for (int i = 0; i < kBriefSpins && !word.Reached(target); ++i) Pause();
}

void Job::AwaitSlowPath(FutexWord& word, uint32_t target, int rank,
                        const Request& request) {
  for (int i = 0; i < spins_; ++i) {
    if (word.Reached(target)) return;
    Pause();
  }
  int64_t start = 0;
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (word.Reached(target)) return;
    if (network_ && network_->pending()) network_->Progress();
    if (i % kYieldsPerClock != kYieldsPerClock - 1) continue;
    if (start == 0) start = Now();
    if (Now() - start > kYieldNanoseconds) break;
  }

  // The sleeper is counted before the value is read again: either Raise sees the
  // sleeper, or the sleeper sees the raised value.
  struct Sleeper {
    FutexWord& word;
    explicit Sleeper(FutexWord& word) : word(word) { word.sleepers.fetch_add(1); }
    ~Sleeper() { word.sleepers.fetch_sub(1); }
  } sleeper(word);
  LongWait wait(this, rank, request);
  while (!word.Reached(target)) {
    const uint32_t seen = word.value.load();
    if (static_cast<int32_t>(seen - target) >= 0) return;
    if (network_ && network_->pending()) {
      word.Sleep(seen, kShortNapNanoseconds);
      network_->Progress();
    } else {
      word.Sleep(seen, kNapNanoseconds);
    }
    if (word.Reached(target)) return;
    wait.Poll();
  }
}

Job::LongWait::LongWait(Job* job, int rank, const Request& request)
    : job_(job),
      rank_(rank),
      request_(request),
      start_(Now()),
      polled_(start_),
      quiet_since_(start_),
      submitted_(job->submitted_),
      record_(job->PublishWait(rank, start_, request)) {}

Job::LongWait::~LongWait() {
  job_->my_state().last_waited = Now();
  if (record_) record_->rank = 0;
}

void Job::LongWait::Poll() {
  const int64_t now = Now();
  if (now - polled_ < kNapNanoseconds * 9 / 10) return;
  // A thread that was stopped since its last poll must poll once more before the
  // other ranks may rely on its wait.
  if (record_ && now - polled_ < kStopped) record_->polled = now;
  // A job that is suspended as a whole continues as if no time had passed.
  if (now - polled_ > kStopped) {
    stopped_ += now - polled_;
    quiet_since_ += now - polled_;
  }
  polled_ = now;
  job_->my_state().last_waited = now;
  if (job_->blocked_) job_->SetWaitingSince(true);
  const bool left = job_->Check(rank_);
  // The caller has checked again since the last poll.
  if (left && left_) job_->BreakForLeft(rank_);
  left_ = left;
  // A rank that has joined waits in one order while other ranks call in the other
  // order: a collective that it serves in that order counts as progress.
  const int64_t since = std::max(start_, job_->served_at_.load());
  const double waited = static_cast<double>(now - since - stopped_) * 1e-9;
  EndStuckRank(waited);
  CheckDeadline(waited);
  if (job_->InDeadlock()) job_->BreakForDeadlock(job_->DescribeWaits());
  if (const uint32_t submitted = job_->submitted_; submitted != submitted_) {
    submitted_ = submitted;
    quiet_since_ = now;
  }
  if (job_->network_ && now - start_ - stopped_ > job_->Patience()) {
    ReportToOtherHosts(now);
  }
  if (now - quiet_since_ > job_->Patience()) CheckUnmatched();
  if (!reported_ && waited > job_->settings().stall_seconds) {
    reported_ = true;
    ReportStall(waited);
  }
}

void Job::LongWait::EndStuckRank(double waited) {
  const int local_rank = job_->local_.Find(rank_);
  if (local_rank == job_->info_.local_size) return;  // on another host
  job_->EndIfStuck(local_rank, waited, stopped_);
}

void Job::LongWait::CheckDeadline(double waited) {
  if (waited <= job_->settings().timeout_seconds) return;
  job_->Break(Code::kDeadlineExceeded,
              "rank " + std::to_string(job_->rank()) + " waited " +
                  std::to_string(static_cast<int64_t>(waited)) + " s for rank " +
                  std::to_string(rank_) + " in " + request_.Describe() + "\n" +
                  job_->DescribeWaits(),
              "a rank that is only slow is given more time by "
              "COLLECTIVE_TIMEOUT=seconds");
}

void Job::LongWait::CheckUnmatched() {
  const std::string unmatched = job_->FindUnmatchedWait(request_.plan);
  if (unmatched.empty()) return;
  job_->Break(Code::kFailedPrecondition,
              "ranks do not agree on a collective: " + unmatched + "rank " +
                  std::to_string(job_->rank()) +
                  " has traced the same function, with no such collective in "
                  "that process set, and is in " +
                  request_.Describe() + "\n" + job_->DescribeWaits(),
              "make the same calls, with the same process set, on every "
              "rank, also within a tf.function");
}

void Job::LongWait::ReportStall(double waited) {
  // The lowest local rank that waits reports for all of this host.
  const int mine = job_->info_.local_rank;
  for (int i = 0; i < mine; ++i) {
    if (job_->header_->ranks[i].Waits()) return;
  }
  std::fprintf(stderr,
               "collective: no progress for %.0f s:\n%sHINT: every rank must "
               "make the same calls; COLLECTIVE_TIMEOUT=seconds ends the job "
               "sooner\n",
               waited, job_->DescribeWaits().c_str());
  RequestDump("no progress for " + std::to_string(static_cast<int64_t>(waited)) + " s");
}

void Job::CountServed() {
  served_.fetch_add(1);
  served_at_ = Now();
}

void Job::NoteCaller() {
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id first = caller_.load(std::memory_order_relaxed);
  if (first == me) return;
  if (first == std::thread::id() && caller_.compare_exchange_strong(first, me)) {
    return;
  }
  my_state().many_callers = true;
}

void Job::CountBusyQueues(int change) {
  RankState& state = my_state();
  state.queues_changed = Now();
  state.queues += change;
}

void Job::SetCallerWaiting(bool waits) {
  if (IsCaller()) SetWaitingSince(waits);
}

void Job::SetCallerBlocked(bool blocked) {
  blocked_ = blocked;
  SetWaitingSince(blocked);
}

void Job::SetWaitingSince(bool waits) {
  RankState& state = my_state();
  const int64_t now = Now();
  const bool begins = state.waiting_since == 0 || now - state.waiting_polled > kStopped;
  if (!waits || begins) state.waiting_since = waits ? now : 0;
  state.waiting_polled = now;
}

std::string Job::DescriptionOf(const WaitRecord& one) {
  return std::string(one.description,
                     strnlen(one.description, sizeof(one.description)));
}

std::string Job::DescribeWaits() const {
  // Other ranks may write at the same time: a line may be torn, nothing worse.
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  std::string table;
  const int64_t now = Now();
  for (int i = 0; i < info_.local_size; ++i) {
    const std::string who = "  rank " + std::to_string(local_.processes[i].rank);
    bool waits = false;
    for (const WaitRecord& one : header_->ranks[i].waiting) {
      const int other = one.rank.load();
      if (other <= 0) continue;
      waits = true;
      table += who + " waits for rank " + std::to_string(other - 1) + " since " +
               std::to_string((now - one.since) / kSecond) + " s in " +
               DescriptionOf(one) + "\n";
    }
    if (!waits) table += who + " is not in a collective\n";
  }
  for (const auto& [wait, control] : remote_waits_) {
    const bool here = host_of(control.rank) == host_of(rank());
    if (control.forwards == 0 && !here && !HasBegun(control)) {
      table += std::string("  ") + control.message + ", on another host\n";
    }
  }
  return table;
}

Job::WaitRecord* Job::PublishWait(int rank, int64_t since, const Request& request) {
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  for (WaitRecord& one : my_state().waiting) {
    if (one.rank.load() != 0) continue;
    one.rank = -1;
    one.since = since;
    one.polled = since;
    one.function = request.plan.function;
    one.name = std::hash<std::string>()(request.name);
    one.group = request.plan.group;
    one.caller = std::this_thread::get_id() == caller_.load();
    std::snprintf(one.description, sizeof(one.description), "%s",
                  request.Describe().c_str());
    one.rank = rank + 1;
    return &one;
  }
  return nullptr;
}

}  // namespace collective
