#include "membership/job.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "membership/job_memory.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

// How long MPI may take to learn which rank has died: polls, and their interval.
constexpr int kDeathPolls = 10;
constexpr int64_t kDeathPollInterval = 10 * kMillisecond;
// How often a rank that finds the job broken yields while the message is being
// written: far longer than the writing takes.
constexpr int kMessageYields = 1000;

double SecondsFrom(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end || !(seconds > 0)) {
    throw Failure(Code::kInvalidArgument,
                  std::string(variable) + "=" + text + " is no time",
                  "give seconds, as in " + std::string(variable) + "=90");
  }
  return seconds;
}

void CheckChoice(const char* variable, std::initializer_list<const char*> known) {
  const char* value = std::getenv(variable);
  if (!value || !*value) return;
  std::string all;
  for (const char* one : known) {
    if (std::strcmp(value, one) == 0) return;
    all += (all.empty() ? "" : " or ") + std::string(one);
  }
  throw Failure(Code::kInvalidArgument,
                std::string(variable) + "=" + value + " is not known",
                all + "; or leave it out");
}

}  // namespace

Settings Settings::FromEnvironment() {
  CheckChoice("COLLECTIVE_SIMD", {"baseline", "avx2", "avx512"});
  CheckChoice("COLLECTIVE_STORES", {"ordinary", "streaming"});
  Settings settings;
  settings.start_seconds =
      SecondsFrom("COLLECTIVE_START_TIMEOUT", settings.start_seconds);
  settings.stall_seconds =
      SecondsFrom("COLLECTIVE_STALL_SECONDS", settings.stall_seconds);
  settings.timeout_seconds =
      SecondsFrom("COLLECTIVE_TIMEOUT", settings.timeout_seconds);
  settings.rank_timeout_seconds =
      SecondsFrom("COLLECTIVE_RANK_TIMEOUT", settings.rank_timeout_seconds);
  return settings;
}

Job::Job(const RankInfo& info, const Settings& settings, int generation,
         const StartNetwork& start)
    : info_(info),
      settings_(settings),
      generation_(generation),
      hosts_(info.size, 0),
      left_(info.size) {
  const bool one_host = info.size == info.local_size;
  // Membership changes renumber ranks; on one host, both numbers are the same.
  if (one_host) info_.local_rank = info.rank;
  const auto exited = one_host ? ExitedRanks(info.size) : nullptr;
  if (exited) {
    const auto meeting = [generation](int local_rank) {
      return std::to_string(generation) + "." + std::to_string(local_rank);
    };
    RendezvousSurvivors(RankInfo(info_), exited, meeting, settings.start_seconds,
                        nullptr);
    return;
  }
  local_ = JoinRendezvous(info_, generation, kMemoryBytes, settings.start_seconds);
  Open("init");
  if (one_host) return;
  network_ = start(info_, settings.start_seconds);
  int first = info_.rank;
  for (const Process& process : local_.processes) {
    first = std::min(first, process.rank);
  }
  hosts_ = network_->Gather(first);
}

Job::Job(Job& former, bool admits)
    : info_(former.info_),
      settings_(former.settings_),
      generation_(former.generation_),
      reconfigurations_(former.reconfigurations_ + 1) {
  if (former.network_) {
    ReconfigureAcrossHosts(former);
    return;
  }
  const auto meeting = [&](int local_rank) { return former.NextMeeting(local_rank); };
  RendezvousSurvivors(former.info_, former.GoneOrStuck(), meeting,
                      settings_.timeout_seconds,
                      admits ? former.join_listener_.get() : nullptr);
  if (rank() == 0) join_listener_ = std::move(former.join_listener_);
}

Job::Job(const Job& single, LateJoin)
    : info_(single.info_), settings_(single.settings_) {
  do {
    local_ = RequestJoin(info_.job);
    generation_ = local_.generation;
    reconfigurations_ = local_.reconfigurations;
  } while (!OpenReconfigured());
}

void Job::RendezvousSurvivors(const RankInfo& before, const GoneFunction& gone,
                              const MeetingFunction& meeting, double seconds,
                              JoinListener* listener) {
  do {
    local_ = Reconfigure(before, generation_, reconfigurations_, kMemoryBytes, seconds,
                         gone, meeting, listener);
  } while (!OpenReconfigured());
}

bool Job::OpenReconfigured() {
  info_.size = info_.local_size = static_cast<int>(local_.processes.size());
  info_.rank = info_.local_rank = local_.local_rank;
  previous_ranks_.clear();
  for (int i = 0; i < info_.size; ++i) {
    local_.processes[i].rank = i;
    previous_ranks_.push_back(local_.processes[i].previous);
  }
  try {
    Open(reconfigurations_ ? "regroup" : "init");
  } catch (const Failure&) {
    bool died = false;
    for (int i = 0; i < info_.size; ++i) died = died || IsDead(i);
    Close();
    if (died) return false;
    throw;
  }
  hosts_.assign(info_.size, 0);
  left_ = std::vector<std::atomic<bool>>(info_.size);
  return true;
}

int Job::PendingJoins() {
  if (rank() != 0 || network_) return 0;
  if (!join_listener_) {
    try {
      join_listener_ = std::make_unique<JoinListener>(info_);
    } catch (const Failure&) {
      return 0;  // a former rank 0 is about to exit: the next call tries again
    }
  }
  return join_listener_->PendingCount();
}

Job::RankState& Job::my_state() const { return header_->ranks[info_.local_rank]; }

bool Job::broken() const {
  // Acquire: `lost` was written earlier.
  return header_->broken.load(std::memory_order_acquire) != 0;
}

bool Job::HasLeft(int local_rank) const {
  return header_->ranks[local_rank].state.Reached(RankState::kLeft);
}

bool Job::IsDead(int local_rank) const {
  return local_.Dead(local_rank) || header_->ranks[local_rank].killed;
}

bool Job::EndIfStuck(int local_rank, double waited, int64_t stopped) const {
  const double most = settings_.rank_timeout_seconds;
  if (waited <= most || local_rank == info_.local_rank || IsDead(local_rank)) {
    return false;
  }
  const int64_t last = header_->ranks[local_rank].last_waited;
  if (SecondsSince(last + stopped) <= most) return false;
  const std::string who = local_.NameOf(local_rank);
  RequestDump(who + " makes no progress");
  if (!local_.Kill(local_rank)) return false;
  header_->ranks[local_rank].killed = true;
  std::fprintf(stderr,
               "collective: rank %d has waited %.0f s for %s, which waits for "
               "nobody: killed it\nHINT: --rank-timeout SECONDS gives a rank "
               "that is only slow more time\n",
               rank(), waited, who.c_str());
  return true;
}

std::string Job::NextMeeting(int local_rank) const {
  const uint64_t* bits = header_->ranks[local_rank].meeting;
  return std::to_string(bits[0]) + "." + std::to_string(bits[1]);
}

GoneFunction Job::GoneOrStuck() const {
  return [this, time = RunningTime()](int local_rank) mutable {
    const double waited = time.Seconds();
    if (HasLeft(local_rank) || IsDead(local_rank)) return true;
    EndIfStuck(local_rank, waited, time.stopped());
    return false;
  };
}

bool Job::lost() const {
  return broken() && header_->lost && (!network_ || network_->fault_tolerant());
}

void Job::Leave() {
  if (leaving_.exchange(true)) return;
  my_state().state.Raise(RankState::kLeft);
  if (!broken()) SendToOtherHosts({ControlMessage::kLeft, rank()}, "");
}

void Job::Depart() {
  Retire();
  if (network_) network_->Depart(settings_.timeout_seconds);
}

void Job::SendToOtherHosts(ControlMessage control, const char* message) {
  if (!network_) return;
  std::snprintf(control.message, sizeof(control.message), "%s", message);
  std::vector<int> others;
  for (int other = 0; other < size(); ++other) {
    if (host_of(other) != host_of(rank())) others.push_back(other);
  }
  network_->SendControl(others, control);
}

bool Job::SetBroken(Code code, const char* message) {
  uint32_t whole = 0;
  if (!header_->broken.compare_exchange_strong(whole, 1)) return false;
  std::snprintf(header_->broken_message, sizeof(header_->broken_message), "%s",
                message);
  header_->broken_code = static_cast<int32_t>(code);
  header_->broken = 2;
  return true;
}

void Job::ThrowBroken() {
  if (network_) {
    network_->SkipFinalize();
    if (lost()) network_->Revoke();
  }
  for (int i = 0; i < kMessageYields && header_->broken.load() != 2; ++i) sched_yield();
  const Code code = static_cast<Code>(header_->broken_code.load());
  throw Failure(code == Code::kOk ? Code::kUnavailable : code, header_->broken_message);
}

void Job::Break(Code code, const std::string& what, const std::string& hint) {
  RequestDump(what);  // first, while every rank still is in its wait
  const Failure failure(code, what, hint);
  // If another rank was first, every rank throws that rank's message.
  if (SetBroken(code, failure.what())) {
    SendToOtherHosts(
        {ControlMessage::kBroken, rank(), static_cast<int32_t>(code), header_->lost},
        failure.what());
  }
  ThrowBroken();
}

bool Job::Check(int waited_for) {
  if (broken()) ThrowBroken();
  if (leaving_) {
    throw Failure(Code::kUnavailable, "shut down while a collective ran",
                  "wait for every handle before shutdown()");
  }
  bool left = false;
  for (int i = 0; i < info_.local_size; ++i) {
    // A rank that has left may exit. Only a rank that waits for it fails.
    if (HasLeft(i)) {
      left = left || local_.processes[i].rank == waited_for;
    } else if (IsDead(i) && !HasLeft(i)) {
      BreakForDead(local_.NameOf(i));
    }
  }
  if (!network_) return left;
  CheckOtherHosts();
  return left || left_[waited_for];
}

void Job::CheckOtherHosts() {
  ControlMessage control = {};
  while (network_->ReceiveControl(&control)) HandleControlMessage(control);
  if (!network_->fault_tolerant()) return;
  const bool revoked = network_->Revoked();
  // MPI may not know yet whose death made a rank revoke.
  for (int i = 0; i == 0 || (revoked && i < kDeathPolls); ++i) {
    for (int rank : network_->FailedRanks()) {
      // Check has examined this host's ranks; a rank that has left may exit.
      if (host_of(rank) == host_of(this->rank()) || left_[rank]) continue;
      BreakForDead("rank " + std::to_string(rank));
    }
    if (revoked) SleepFor(kDeathPollInterval);
  }
  if (revoked) BreakForDead("a rank");
}

void Job::HandleControlMessage(const ControlMessage& control) {
  if (control.type == ControlMessage::kLeft) {
    left_[control.rank] = true;
  } else if (control.type == ControlMessage::kBroken) {
    RequestDump(control.message);
    if (control.lost) header_->lost = true;
    SetBroken(static_cast<Code>(control.code), control.message);
    ThrowBroken();
  } else {
    std::lock_guard<std::mutex> lock(waiting_mutex_);
    for (auto one = remote_waits_.begin(); one != remote_waits_.end();) {
      one = HasBegun(one->second) ? remote_waits_.erase(one) : std::next(one);
    }
    remote_waits_.emplace(std::pair(control.rank, control.since), control);
  }
}

void Job::BreakForDead(const std::string& who) {
  header_->lost = true;
  Break(Code::kUnavailable, who + " died",
        "look for its own error message; \"Killed\" without one is most often "
        "lack of memory (dmesg | tail)");
}

void Job::BreakForLeft(int rank) {
  // Across hosts, ranks cannot continue without one that has left.
  if (!network_) header_->lost = true;
  Break(
      Code::kUnavailable,
      "rank " + std::to_string(rank) + " has shut down while others still wait for it",
      "let every rank make the same calls before shutdown()");
}

void Job::PingPong(double* nanoseconds) {
  constexpr int kBatches = 12, kRounds = 100;
  constexpr int kProbeSpins = 20000;  // about 100 us, then yield
  if (rank() > 1 || host_of(0) != host_of(1)) return;
  Request request;
  request.name = "probe";
  FutexWord& mine = rank() == 0 ? header_->ping : header_->pong;
  FutexWord& theirs = rank() == 0 ? header_->pong : header_->ping;
  uint32_t count = mine.value.load();
  double best = 1e9;
  for (int batch = 0; batch < kBatches; ++batch) {
    const int64_t start = Now();
    for (int round = 0; round < kRounds; ++round) {
      ++count;
      if (rank() == 0) mine.value.store(count, std::memory_order_release);
      for (int i = 0; !theirs.Reached(count); ++i) {
        if (i > kProbeSpins) {
          sched_yield();
          if (i % 1000 == 0 && Check(1 - rank()) && !theirs.Reached(count)) {
            BreakForLeft(1 - rank());
          }
        }
      }
      if (rank() == 1) mine.value.store(count, std::memory_order_release);
    }
    best = std::min(best, static_cast<double>(Now() - start) / (2 * kRounds));
  }
  *nanoseconds = best;
}

}  // namespace collective
