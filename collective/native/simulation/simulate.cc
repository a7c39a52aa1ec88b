#include "simulation/simulate.h"

#include <optional>
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

// Of all hosts, by size.
std::vector<Schedule> Complete(const Layout& layout, const std::vector<int64_t>& bytes,
                               Algorithm algorithm) {
  std::vector<std::vector<Program>> programs(bytes.size());
  for (int host = 0; host < layout.hosts && !bytes.empty(); ++host) {
    const auto by_size = RecordHost(layout, host, bytes, algorithm);
    for (size_t i = 0; i < bytes.size(); ++i) {
      programs[i].insert(programs[i].end(), by_size[i].begin(), by_size[i].end());
    }
  }
  std::vector<Schedule> schedules;
  for (auto& one : programs) schedules.emplace_back(layout, std::move(one));
  return schedules;
}

// By size: of one host that stands for all, or of none if hosts differ.
std::vector<std::optional<Schedule>> Folded(const Layout& layout,
                                            const std::vector<int64_t>& bytes,
                                            Algorithm algorithm) {
  const std::set<int> sampled = {1, layout.hosts / 2, layout.hosts - 1};
  const std::vector<int> numbers(sampled.begin(), sampled.end());
  const auto first = RecordHost(layout, 0, bytes, algorithm);
  std::vector<std::vector<std::vector<Program>>> others;
  for (int host : numbers) {
    others.push_back(RecordHost(layout, host, bytes, algorithm));
  }
  std::vector<std::optional<Schedule>> found(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<std::vector<Program>> same_size;
    for (const auto& other : others) same_size.push_back(other[i]);
    Schedule schedule;
    if (Schedule::Folds(layout, first[i], same_size, numbers, &schedule)) {
      found[i] = std::move(schedule);
    }
  }
  return found;
}

}  // namespace

std::vector<std::vector<double>> SimulateAllReduce(const Layout& layout,
                                                   const std::vector<int64_t>& bytes,
                                                   Algorithm algorithm,
                                                   const std::vector<Wire>& wires,
                                                   bool fold) {
  Check(layout, bytes, wires);
  std::vector<std::optional<Schedule>> schedules(bytes.size());
  if (fold) schedules = Folded(layout, bytes, algorithm);
  std::vector<int64_t> rest;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!schedules[i]) rest.push_back(bytes[i]);
  }
  std::vector<Schedule> complete = Complete(layout, rest, algorithm);
  auto next = complete.begin();
  std::vector<std::vector<double>> seconds(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    const Schedule& schedule = schedules[i] ? *schedules[i] : *next++;
    for (const Wire& wire : wires) seconds[i].push_back(schedule.Replay(wire));
  }
  return seconds;
}

}  // namespace collective
