// Decides which rank of a host writes a dump, and for which reason.
//
// Several ranks see the same incident at about the same time, and one dump of all
// ranks is enough. So a rank claims the dump in shared memory first; every other
// rank waits until it is written, or for a limited time.
#include <algorithm>

#include "recorder/recorder.h"

namespace collective {
namespace {

// A dump that takes longer is not awaited: its writer may have died.
constexpr int64_t kDumpTimeout = 5 * kSecond;
// A report so soon after a dump has the cause that the dump has shown.
constexpr int64_t kSameIncident = 5 * kSecond;
constexpr uint32_t kMaxDumps = 8;  // most dumps of a job on a host
// Number of latest entries in which an unfinished one is searched.
constexpr uint64_t kStallWindow = 8;
// A step is stalled if it takes so many times as long as the step before.
constexpr double kSlowStep = 10;

}  // namespace

void Recorder::AwaitDumps() const {
  const auto unreported = [&] {
    for (int i = 0; i < info_.local_size; ++i) {
      if (HasUnreportedDeath(i)) return header_->dumps < kMaxDumps;
    }
    return false;
  };
  const int64_t until = Now() + kDumpTimeout;
  while (watching_ && !closing_ && (DumpInProgress() || unreported()) &&
         Now() < until) {
    SleepFor(2 * kMillisecond);
  }
}

bool Recorder::HasUnreportedDeath(int local_rank) const {
  const Rank& rank = ranks_[local_rank];
  return !rank.left && !rank.death_reported && RankOf(local_rank) >= 0 &&
         local_.Dead(local_rank);
}

bool Recorder::DumpInProgress() const {
  const int64_t claimed = header_->claimed;
  return header_->done < claimed && Now() - claimed < kDumpTimeout;
}

bool Recorder::DumpedJustNow() const {
  const int64_t written = header_->written;
  return written && Now() - written < kSameIncident;
}

bool Recorder::ClaimDump() {
  int64_t last = header_->claimed;  // read before `done` is
  if (!watching_ || closing_ || DumpInProgress()) return false;
  if (!header_->claimed.compare_exchange_strong(last, Now())) return false;
  if (header_->dumps.fetch_add(1) < kMaxDumps) return true;
  header_->done = header_->claimed.load();
  return false;
}

void Recorder::ReleaseClaim() {
  --header_->dumps;
  header_->done = header_->claimed.load();
}

void Recorder::FinishDump() { header_->done = header_->written = Now(); }

bool Recorder::ClaimIncident(const std::string& reason) {
  if (DumpedJustNow() || !ClaimDump()) return false;
  // Another rank may have written a dump of this incident between the check
  // and the claim.
  if (DumpedJustNow()) {
    ReleaseClaim();
    return false;
  }
  SetReason(reason);
  return true;
}

void Recorder::SetReason(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  reason_ = reason;
}

std::string Recorder::Terminations() const {
  std::string text;
  for (int i = 0; i < info_.local_size; ++i) {
    const int left = ranks_[i].left, rank = RankOf(i);
    if (left >= 0 || rank < 0) continue;
    text +=
        "; rank " + std::to_string(rank) + " received signal " + std::to_string(-left);
  }
  return text;
}

void Recorder::RequestDump(const std::string& reason) {
  // The end of a job signals every rank: a rank may be seen to die of it before the
  // watching thread has seen this rank's own signal.
  if (ClaimIncident(reason + Terminations())) {
    // The core may see a death before the watching thread does. This dump shows
    // which ranks are dead, so that death does not need another dump.
    for (int i = 0; i < info_.local_size; ++i) {
      if (HasUnreportedDeath(i)) ranks_[i].death_reported = 1;
    }
    pending_ = true;
    Wake();
  }
  // This holds also for a death that the watching thread will report soon after
  // another dump: that thread must see this rank wait.
  AwaitDumps();
}

bool Recorder::ClaimDeath() {
  for (int i = 0; i < info_.local_size; ++i) {
    if (known_dead_[i] || !local_.Dead(i)) continue;
    if (!HasUnreportedDeath(i)) {
      known_dead_[i] = true;
    } else if (ClaimDump()) {
      if (ranks_[i].death_reported.exchange(1)) {  // another rank was first
        ReleaseClaim();
        known_dead_[i] = true;
        continue;
      }
      SetReason("rank " + std::to_string(RankOf(i)) + " (process " +
                std::to_string(local_.processes[i].pid) + ") died");
      return true;
    } else if (header_->dumps >= kMaxDumps) {
      known_dead_[i] = true;
    }
  }
  return false;
}

// The core ends its own collectives at a deadline; the collectives of other
// libraries have none.
__attribute__((no_sanitize_thread)) bool Recorder::ClaimStall() {
  const uint64_t last = mine_->last;
  for (uint64_t number = last; number && number + kStallWindow > last; --number) {
    const Entry* entry = EntryOf(number);
    if (!entry || entry->area != kNoArea || entry->kind >= kOtherKind) continue;
    if (!entry->started || entry->ended) continue;
    const int64_t took = Now() - entry->started;
    if (number <= last_stalled_ || took < stall_) continue;
    last_stalled_ = number;
    return ClaimIncident("no progress for " + std::to_string(took / kSecond) +
                         " s in " + entry->name + " of rank " +
                         std::to_string(mine_->rank));
  }
  return ClaimSlowStep();
}

__attribute__((no_sanitize_thread)) bool Recorder::ClaimSlowStep() {
  const volatile double& now_at = mine_->at;
  const volatile double& now_since = mine_->since;
  const double at = now_at, since = now_since;
  const auto step = static_cast<int64_t>(at) / 2 - 1;
  const bool within = at >= 2 && static_cast<int64_t>(at) % 2 == 0;
  if (!within || at != now_at) return false;
  if (at != seen_at_) {
    const double steps = (at - seen_at_) / 2;
    step_took_ = seen_at_ && steps > 0 ? (since - seen_since_) / steps : 0;
    seen_at_ = at;
    seen_since_ = since;
  }
  // The first step, which also compiles, has no step to compare with.
  if (step_took_ == 0 || at == slow_at_) return false;
  const double took = Now() / 1e9 - since;
  if (took < std::max(stall_ / 1e9, kSlowStep * step_took_)) return false;
  slow_at_ = at;
  return ClaimIncident("no progress for " + std::to_string(static_cast<int64_t>(took)) +
                       " s in step " + std::to_string(step) + " of rank " +
                       std::to_string(mine_->rank));
}

bool Recorder::ClaimTermination() {
  return WaitsLong() &&
         ClaimIncident("rank " + std::to_string(mine_->rank) + " received signal " +
                       std::to_string(terminated_) + " while it waited");
}

}  // namespace collective
