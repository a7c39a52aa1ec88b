// Finds waits that cannot end, because ranks do not make the same calls.
//
// On one host, the shared memory shows which rank waits for which. Between hosts,
// ranks send probes along the edges of the wait-for graph [Chandy, Misra, Haas,
// ACM TOCS 1(2), 1983]: a rank that has waited for some seconds sends one to the
// rank that it waits for; a rank that is itself blocked forwards the probes that
// it has received. A probe that returns to its origin has passed a cycle. A rank
// forwards only probes of collectives that it has not begun, so no rank of the
// cycle can have continued in the mean time. A thread that has not called
// anything yet is in no graph; therefore a rank counts as blocked only after the
// stall time.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "membership/job.h"
#include "membership/job_memory.h"

namespace collective {
namespace {

// How long a thread waits before it sends a probe, and before it checks whether
// another rank has traced its function differently.
constexpr double kPatienceSeconds = 5;

// The collective of this thread: its communicator, and its number in that.
thread_local int area_of_thread = 0;
thread_local uint32_t number_of_thread = 0;

}  // namespace

int64_t Job::Patience() const {
  return Nanoseconds(std::min(kPatienceSeconds, settings_.stall_seconds));
}

void Job::NoteBegin(int area) {
  if (!network_) return;
  area_of_thread = area;
  number_of_thread = ++begun_[area];
}

void Job::NoteAwaitNext(int area) {
  if (!network_) return;
  area_of_thread = area;
  number_of_thread = begun_[area] + 1;
}

bool Job::HasBegun(const ControlMessage& wait) const {
  return static_cast<int32_t>(begun_[wait.area] - wait.number) >= 0;
}

std::string Job::Line(int rank, int other, const std::string& doing) {
  return "rank " + std::to_string(rank) + " waits for rank " + std::to_string(other) +
         " in " + doing;
}

void Job::BreakForDeadlock(const std::string& who) {
  Break(Code::kFailedPrecondition,
        "ranks wait for each other in different collectives:\n" + who,
        "make the same calls, in the same order and with the same process set, "
        "on every rank");
}

void Job::LongWait::ReportToOtherHosts(int64_t now) {
  Job& job = *job_;
  const std::string line = Line(job.rank(), rank_, request_.Describe());
  const auto send = [&](ControlMessage probe, const std::string& message) {
    probe.area = area_of_thread;
    probe.number = number_of_thread;
    std::snprintf(probe.message, sizeof(probe.message), "%s", message.c_str());
    job.network_->SendControl({rank_}, probe);
  };
  if (!reported_to_hosts_) {
    reported_to_hosts_ = true;
    ControlMessage probe = {ControlMessage::kWaiting, job.rank()};
    probe.since = start_;
    probe.function = request_.plan.function;
    probe.name = std::hash<std::string>()(request_.name);
    probe.group = request_.plan.group;
    send(probe, line);
  }
  std::vector<int> waits_for;
  if (!job.IsBlocked(job.info_.local_rank, now, &waits_for) || waits_for.size() != 1) {
    return;
  }
  std::vector<ControlMessage> received;
  {
    std::lock_guard<std::mutex> lock(job.waiting_mutex_);
    for (const auto& [wait, probe] : job.remote_waits_) {
      if (!job.HasBegun(probe) && forwarded_.insert(wait).second) {
        received.push_back(probe);
      }
    }
  }
  for (const ControlMessage& probe : received) {
    if (probe.rank != job.rank()) {
      ControlMessage next = {ControlMessage::kWaiting, probe.rank};
      next.since = probe.since;
      next.forwards = probe.forwards + 1;
      send(next, std::string(probe.message) + "\n  " + line);
    } else if (probe.since == start_) {
      job.BreakForDeadlock("  " + std::string(probe.message) + "\n");
    }
  }
}

// A rank is blocked if each of its threads has found, after a stall time in which
// no thread of the rank did anything, that it must still wait. (The last poll of a
// stopped thread is too old to count.) If all ranks of a set are blocked and wait
// only for each other, the first one to continue would need another rank that had
// continued earlier. A thread that is not seen could break this argument:
// therefore queues with work are counted, and several calling threads give no
// result.
bool Job::IsBlocked(int rank, int64_t now, std::vector<int>* waits_for) const {
  const RankState& state = header_->ranks[rank];
  // A thread that has not called anything yet could still end every wait. Only
  // time makes that unlikely; the user chooses how much.
  const auto rest = Nanoseconds(settings_.stall_seconds);
  const auto rests = [&](const std::atomic<int64_t>& since,
                         const std::atomic<int64_t>& looked) {
    const int64_t last = looked.load();  // read first, because it is written last
    return last - since.load() >= rest && now - last <= std::min(rest / 2, kStopped);
  };
  int queues = state.queues.load();
  if (state.many_callers || now - state.queues_changed < rest) return false;
  int callers =
      state.waiting_since.load() && rests(state.waiting_since, state.waiting_polled);
  for (const WaitRecord& one : state.waiting) {
    const int32_t other = one.rank.load();
    if (other == 0) continue;
    one.caller ? ++callers : --queues;
    if (other < 0 || !rests(one.since, one.polled)) return false;
    waits_for->push_back(other - 1);
  }
  return callers == 1 && queues == 0 && !waits_for->empty();
}

bool Job::InDeadlock() const {
  if (network_) return false;  // the ranks of other hosts are not seen here
  const int64_t now = Now();
  std::vector<std::vector<int>> waits_for(size());
  std::vector<bool> stuck(size());
  for (int rank = 0; rank < size(); ++rank) {
    stuck[rank] = IsBlocked(rank, now, &waits_for[rank]);
  }
  // A rank that waits for one that is not stuck may still continue, and so on.
  for (bool fewer = true; fewer;) {
    fewer = false;
    for (int rank = 0; rank < size(); ++rank) {
      for (int other : waits_for[rank]) {
        if (!stuck[rank] || stuck[other]) continue;
        stuck[rank] = false;
        fewer = true;
      }
    }
  }
  return stuck[this->rank()];
}

// A function blocks the thread that calls it. So a collective that it does not
// contain never begins, unless another thread runs a function of the same name.
std::string Job::FindUnmatchedWait(const Plan& mine) const {
  if (mine.function == 0) return "";
  const auto unmatched = [&](uint64_t function, int group, uint64_t name) {
    return function == mine.function && group != mine.group &&
           !PlanHas(mine.number, group, name);
  };
  const int64_t now = Now();
  for (int i = 0; i < info_.local_size; ++i) {
    for (const WaitRecord& one : header_->ranks[i].waiting) {
      if (one.rank.load() == rank() + 1 && now - one.since >= Patience() &&
          now - one.polled <= kStopped &&
          unmatched(one.function, one.group, one.name)) {
        return Line(local_.processes[i].rank, rank(), DescriptionOf(one)) + "; ";
      }
    }
  }
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  for (const auto& [wait, probe] : remote_waits_) {
    if (!HasBegun(probe) && unmatched(probe.function, probe.group, probe.name)) {
      return std::string(probe.message) + "; ";
    }
  }
  return "";
}

}  // namespace collective
