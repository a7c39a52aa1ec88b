#include "simulation/simulate.h"

#include <set>
#include <utility>

#include "failure.h"
#include "rendezvous/rank_info.h"

namespace collective {
namespace {

void Check(const Layout& layout, const std::vector<int64_t>& bytes,
           const std::vector<Wire>& wires) {
  bool valid = layout.hosts > 1 && layout.slots > 0 && layout.slots <= kMaxRanks &&
               layout.hosts <= (1 << 16) && !bytes.empty() && !wires.empty();
  for (int64_t one : bytes) valid = valid && one >= static_cast<int64_t>(sizeof(float));
  for (const Wire& wire : wires) {
    valid = valid && wire.bytes_per_second > 0 && wire.latency >= 0 &&
            wire.per_message >= 0 && wire.per_byte >= 0;
  }
  if (valid) return;
  throw Failure(Code::kInvalidArgument, "this network cannot be simulated",
                "two hosts or more, 4 bytes or more, times that are not negative");
}

// One size on all hosts.
Schedule Complete(const Layout& layout, int64_t bytes, Algorithm algorithm) {
  std::vector<Program> programs;
  for (int host = 0; host < layout.hosts; ++host) {
    const auto by_size = RecordHost(layout, host, {bytes}, algorithm);
    programs.insert(programs.end(), by_size[0].begin(), by_size[0].end());
  }
  return Schedule(layout, std::move(programs));
}

}  // namespace

std::vector<std::vector<double>> SimulateAllReduce(const Layout& layout,
                                                   const std::vector<int64_t>& bytes,
                                                   Algorithm algorithm,
                                                   const std::vector<Wire>& wires,
                                                   bool fold) {
  Check(layout, bytes, wires);
  // Some hosts stand for all if they do the same.
  const std::set<int> sampled = {1, layout.hosts / 2, layout.hosts - 1};
  const std::vector<int> numbers(sampled.begin(), sampled.end());
  std::vector<std::vector<Program>> first;
  std::vector<std::vector<std::vector<Program>>> others;
  if (fold) {
    first = RecordHost(layout, 0, bytes, algorithm);
    for (int host : numbers) {
      others.push_back(RecordHost(layout, host, bytes, algorithm));
    }
  }
  std::vector<std::vector<double>> seconds(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<std::vector<Program>> same_size;
    for (const auto& other : others) same_size.push_back(other[i]);
    Schedule schedule;
    if (!fold || !Schedule::Folds(layout, first[i], same_size, numbers, &schedule)) {
      schedule = Complete(layout, bytes[i], algorithm);
    }
    for (const Wire& wire : wires) seconds[i].push_back(schedule.Replay(wire));
  }
  return seconds;
}

}  // namespace collective
