#include "simulation/replay.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <queue>
#include <unordered_map>
#include <utility>

#include "failure.h"

namespace collective {
namespace {

// Parts of a chunk differ by a cache line of a slot.
constexpr int64_t kRounding = 256;
// From a rank to another one of its host, through shared memory.
constexpr double kLocalLatency = 0.5e-6;

// By rank and peer: the receives that no message has been found for, in order.
using Open = std::vector<std::unordered_map<int, std::deque<int32_t>>>;

Open AllReceives(const std::vector<Program>& programs) {
  Open open(programs.size());
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    const auto& receives = programs[rank].receives;
    for (size_t i = 0; i < receives.size(); ++i) {
      open[rank][receives[i].peer].push_back(static_cast<int32_t>(i));
    }
  }
  return open;
}

// The next receive from `peer`, if it is of about so many bytes; or -1.
int32_t Take(const Program& program,
             std::unordered_map<int, std::deque<int32_t>>* receives, int peer,
             int64_t bytes) {
  const auto found = receives->find(peer);
  if (found == receives->end() || found->second.empty()) return -1;
  const int32_t number = found->second.front();
  if (std::abs(program.receives[number].bytes - bytes) > kRounding) return -1;
  found->second.pop_front();
  return number;
}

// A rank as host `by` further on sees it: its host `by` added, or by exclusive or.
int Shifted(const Layout& layout, int rank, int by) {
  const int n = layout.size();
  return ((rank + by * layout.slots) % n + n) % n;
}
int Flipped(const Layout& layout, int rank, int by) {
  const int host = (rank / layout.slots) ^ by;
  return host < layout.hosts ? host * layout.slots + rank % layout.slots : -1;
}

bool IsImage(const Layout& layout, const Program& first, const Program& other, int by) {
  const auto same_peer = [&](int mine, int theirs) {
    return Shifted(layout, mine, by) == theirs || Flipped(layout, mine, by) == theirs;
  };
  if (first.operations.size() != other.operations.size() ||
      first.receives.size() != other.receives.size()) {
    return false;
  }
  for (size_t i = 0; i < first.operations.size(); ++i) {
    const Operation &a = first.operations[i], &b = other.operations[i];
    if (a.kind != b.kind) return false;
    if (a.kind == Operation::kAwait && a.what != b.what) return false;
    if (a.kind == Operation::kSend &&
        (!same_peer(a.peer, b.peer) || std::abs(a.what - b.what) > kRounding)) {
      return false;
    }
  }
  for (size_t i = 0; i < first.receives.size(); ++i) {
    if (!same_peer(first.receives[i].peer, other.receives[i].peer)) return false;
  }
  return true;
}

struct Event {
  double time;
  int64_t order;  // of events of the same time
  int32_t rank;   // that goes on, or receives
  int32_t receive;
  double bytes;  // negative: the rank goes on
  bool operator<(const Event& other) const {
    return time != other.time ? time > other.time : order > other.order;
  }
};

}  // namespace

Schedule::Schedule(const Layout& layout, std::vector<Program> programs)
    : layout_(layout), programs_(std::move(programs)), targets_(programs_.size()) {
  Open open = AllReceives(programs_);
  for (size_t rank = 0; rank < programs_.size(); ++rank) {
    for (const Operation& one : programs_[rank].operations) {
      if (one.kind != Operation::kSend) continue;
      const int32_t receive =
          Take(programs_[one.peer], &open[one.peer], static_cast<int>(rank), one.what);
      if (receive < 0) {
        throw Failure(Code::kInternal, "a simulated message has no receiver",
                      "report this as a defect");
      }
      targets_[rank].push_back({one.peer, receive});
      ++messages_;
    }
  }
}

bool Schedule::Folds(const Layout& layout, const std::vector<Program>& first,
                     const std::vector<std::vector<Program>>& others,
                     const std::vector<int>& numbers, Schedule* folded) {
  for (size_t i = 0; i < others.size(); ++i) {
    for (int slot = 0; slot < layout.slots; ++slot) {
      if (!IsImage(layout, first[slot], others[i][slot], numbers[i])) return false;
    }
  }
  Schedule made;
  made.layout_ = layout;
  made.folded_ = true;
  made.programs_ = first;
  made.targets_.resize(first.size());
  Open open = AllReceives(first);
  size_t receives = 0;
  for (const Program& program : first) receives += program.receives.size();
  for (int slot = 0; slot < layout.slots; ++slot) {
    for (const Operation& one : first[slot].operations) {
      if (one.kind != Operation::kSend) continue;
      const int host = one.peer / layout.slots, to = one.peer % layout.slots;
      const int shifted = Shifted(layout, slot, -host);
      int32_t receive = Take(first[to], &open[to], shifted, one.what);
      const int flipped = Flipped(layout, slot, host);
      if (receive < 0) receive = Take(first[to], &open[to], flipped, one.what);
      if (receive < 0) return false;
      // The sign says whether it leaves the host.
      made.targets_[slot].push_back({host == 0 ? to : ~to, receive});
      ++made.messages_;
    }
  }
  if (made.messages_ != receives) return false;
  *folded = std::move(made);
  return true;
}

double Schedule::Replay(const Wire& wire) const {
  const int hosts = folded_ ? 1 : layout_.hosts;
  const double per_byte = 1 / wire.bytes_per_second;
  std::vector<double> out(hosts, 0), in(hosts, 0), clock(programs_.size(), 0);
  std::vector<size_t> next(programs_.size(), 0), sends(programs_.size(), 0);
  std::vector<int32_t> awaits(programs_.size(), -1);
  std::vector<std::vector<double>> arrived(programs_.size());
  std::priority_queue<Event> events;
  int64_t order = 0;
  for (size_t rank = 0; rank < programs_.size(); ++rank) {
    arrived[rank].assign(programs_[rank].receives.size(), -1);
    events.push({0, order++, static_cast<int32_t>(rank), 0, -1});
  }
  const auto core = [&](int32_t rank, int64_t bytes) {
    clock[rank] += wire.per_message + wire.per_byte * static_cast<double>(bytes);
  };
  const auto send = [&](int32_t rank, const Operation& one) {
    core(rank, one.what);
    const Target target = targets_[rank][sends[rank]++];
    const auto bytes = static_cast<double>(one.what);
    const int host = rank / layout_.slots;
    if (folded_ ? target.rank >= 0 : target.rank / layout_.slots == host) {
      events.push(
          {clock[rank] + kLocalLatency, order++, target.rank, target.receive, 0});
      return;
    }
    const double begin = std::max(out[host], clock[rank]);
    out[host] = begin + bytes * per_byte;
    events.push({begin + wire.latency, order++, folded_ ? ~target.rank : target.rank,
                 target.receive, bytes});
  };
  // Until it must wait, or until another event is earlier.
  const auto go_on = [&](int32_t rank) {
    const auto& operations = programs_[rank].operations;
    while (next[rank] < operations.size()) {
      if (!events.empty() && events.top().time < clock[rank]) {
        events.push({clock[rank], order++, rank, 0, -1});
        return;
      }
      const Operation& one = operations[next[rank]];
      if (one.kind == Operation::kSend) {
        send(rank, one);
      } else {
        const double when = arrived[rank][one.what];
        if (when < 0) {
          awaits[rank] = static_cast<int32_t>(one.what);
          return;
        }
        clock[rank] = std::max(clock[rank], when);
        core(rank, programs_[rank].receives[one.what].bytes);
      }
      ++next[rank];
    }
  };
  while (!events.empty()) {
    const Event event = events.top();
    events.pop();
    if (event.bytes < 0) {
      go_on(event.rank);
      continue;
    }
    double done = event.time;
    if (event.bytes > 0) {
      double& link = in[event.rank / layout_.slots];
      done = link = std::max(link, event.time) + event.bytes * per_byte;
    }
    arrived[event.rank][event.receive] = done;
    if (awaits[event.rank] == event.receive) {
      awaits[event.rank] = -1;
      clock[event.rank] = std::max(clock[event.rank], done);
      events.push({clock[event.rank], order++, event.rank, 0, -1});
    }
  }
  for (size_t rank = 0; rank < programs_.size(); ++rank) {
    if (next[rank] < programs_[rank].operations.size()) {
      throw Failure(Code::kInternal, "a simulated rank waits for ever",
                    "report this as a defect");
    }
  }
  return *std::max_element(clock.begin(), clock.end());
}

}  // namespace collective
