// Which waits can have no end, because ranks do not make the same calls.
//
// On one host, ranks see in the shared memory who waits for whom. Between hosts
// they tell: who has waited for some seconds tells the rank that it waits for;
// and a rank that can do nothing itself before one comes that it waits for,
// tells that one in turn what it has been told. What comes back to where it
// began has been around a circle [Chandy, Misra, Haas, ACM TOCS 1(2), 1983].
// Each rank passes on only who waits for a collective that it has not begun, so
// no rank of the circle can have continued meanwhile. What it does not see is a
// thread that has not called anything yet: hence the stall time before that.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "membership/job.h"
#include "membership/job_memory.h"

namespace collective {
namespace {

// How long a thread of a traced function waits before its rank reports it to
// others, and before it looks for who has traced the function differently.
constexpr double kPatienceSeconds = 5;

// What this thread takes part in: of which communicator, and its number.
thread_local int area_of_thread = 0;
thread_local uint32_t number_of_thread = 0;

}  // namespace

int64_t Job::Patience() const {
  return static_cast<int64_t>(
      std::min(kPatienceSeconds, settings_.stall_seconds) * 1e9);
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
  return "rank " + std::to_string(rank) + " waits for rank " +
         std::to_string(other) + " in " + doing;
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
  const auto tell = [&](ControlMessage news, const std::string& message) {
    news.area = area_of_thread;
    news.number = number_of_thread;
    std::snprintf(news.message, sizeof(news.message), "%s", message.c_str());
    job.network_->SendControl({rank_}, news);
  };
  if (!reported_to_hosts_) {
    reported_to_hosts_ = true;
    ControlMessage news = {ControlMessage::kWaiting, job.rank()};
    news.since = start_;
    news.function = request_.plan.function;
    news.name = std::hash<std::string>()(request_.name);
    news.group = request_.plan.group;
    tell(news, line);
  }
  std::vector<int> waits_for;
  if (!job.IsBlocked(job.info_.local_rank, now, &waits_for) ||
      waits_for.size() != 1) {
    return;
  }
  std::vector<ControlMessage> heard;
  {
    std::lock_guard<std::mutex> lock(job.waiting_mutex_);
    for (const auto& [wait, news] : job.remote_waits_) {
      if (!job.HasBegun(news) && forwarded_.insert(wait).second) {
        heard.push_back(news);
      }
    }
  }
  for (const ControlMessage& news : heard) {
    if (news.rank != job.rank()) {
      ControlMessage further = {ControlMessage::kWaiting, news.rank};
      further.since = news.since;
      further.forwards = news.forwards + 1;
      tell(further, std::string(news.message) + "\n  " + line);
    } else if (news.since == start_) {
      job.BreakForDeadlock("  " + std::string(news.message) + "\n");
    }
  }
}

// Each of its threads has looked in vain after all the others had come to rest:
// what these did before would have been seen. (One that was stopped looks too
// long ago.) So the first of them that could go on, of all ranks, would need
// another to have gone on before. A thread that nobody sees would do: hence the
// queues are counted, and a second thread that calls ends it.
bool Job::IsBlocked(int rank, int64_t now, std::vector<int>* waits_for) const {
  const RankState& state = header_->ranks[rank];
  // A thread that has not yet called anything could still end the wait of all:
  // only time makes that unlikely, and how much is the user's choice.
  const auto rest = static_cast<int64_t>(settings_.stall_seconds * 1e9);
  const auto rests = [&](const std::atomic<int64_t>& since,
                         const std::atomic<int64_t>& looked) {
    const int64_t last = looked.load();  // first: it is written last
    return last - since.load() >= rest &&
           now - last <= std::min(rest / 2, kStopped);
  };
  int queues = state.queues.load();
  if (state.many_callers || now - state.queues_changed < rest) return false;
  int callers = state.waiting_since.load() &&
                rests(state.waiting_since, state.waiting_polled);
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
  // Who waits for one that is not stuck may yet go on, and so may who waits for
  // that one.
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

// A function blocks the thread that calls it. So what it has not brought for so
// long does not come, unless another thread runs a function of the same name.
std::string Job::FindUnmatchedWait(const Plan& mine) const {
  if (mine.function == 0) return "";
  const auto in_vain = [&](uint64_t function, int group, uint64_t name) {
    return function == mine.function && group != mine.group &&
           !PlanHas(mine.number, group, name);
  };
  const int64_t now = Now();
  for (int i = 0; i < info_.local_size; ++i) {
    for (const WaitRecord& one : header_->ranks[i].waiting) {
      if (one.rank.load() == rank() + 1 && now - one.since >= Patience() &&
          now - one.polled <= kStopped &&
          in_vain(one.function, one.group, one.name)) {
        return Line(local_.ranks[i], rank(), DescriptionOf(one)) + "; ";
      }
    }
  }
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  for (const auto& [wait, news] : remote_waits_) {
    if (!HasBegun(news) && in_vain(news.function, news.group, news.name)) {
      return std::string(news.message) + "; ";
    }
  }
  return "";
}

}  // namespace collective
