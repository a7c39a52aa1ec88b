// How long recorded programs take on a given network: a discrete-event simulation.
//
// The model is LogGP's [Alexandrov et al., SPAA 1995] with the links of the hosts as
// queues. A message takes its sender's and its receiver's core `per_message` and
// `per_byte`; it waits for its turn on the sending host's link and on the receiving
// one's, each of which carries both directions at once; between them lies `latency`.
// The switches between are taken to be a fat tree without contention. A receiver that
// has not asked yet does not hold a message up.
#pragma once

#include <vector>

#include "simulation/record.h"

namespace collective {

struct Wire {
  double bytes_per_second;  // of a host's link, each way
  double latency;           // seconds one way, from host to host
  double per_message;       // seconds of a core, at each end
  double per_byte;          // the same for each byte: copied, and summed
};

// What each receive of a message waits for: programs with their messages paired.
class Schedule {
 public:
  // Of all ranks. Throws kInternal if a message has no receiver.
  Schedule(const Layout& layout, std::vector<Program> programs);
  // Of one host, whose peers do the same as it does, renumbered: the host `h` further
  // on (h added, or by exclusive or). What host 0 sends is then what it receives.
  // False if the programs of `others` contradict that.
  static bool Folds(const Layout& layout, const std::vector<Program>& first,
                    const std::vector<std::vector<Program>>& others,
                    const std::vector<int>& numbers, Schedule* folded);
  Schedule() = default;

  // Seconds until the last rank is done, if all begin at once.
  double Replay(const Wire& wire) const;
  size_t messages() const { return messages_; }

 private:
  struct Target {
    int32_t rank, receive;
  };
  Layout layout_ = {0, 0};
  bool folded_ = false;
  size_t messages_ = 0;
  std::vector<Program> programs_;             // by rank
  std::vector<std::vector<Target>> targets_;  // by rank: of each send
};

}  // namespace collective
