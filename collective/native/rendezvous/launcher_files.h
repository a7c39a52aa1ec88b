// The reports between our launcher and its ranks, in files that both map. The
// names of the files are in environment variables.
#pragma once

#include <functional>

namespace collective {

// Returns a function that tests whether a launch rank of this job has exited. It
// is empty if the launcher shares no membership file (COLLECTIVE_BOARD), which has
// one byte for each launch rank. Before the rendezvous a rank has no descriptor
// of the other processes, so only the launcher can know it.
std::function<bool(int)> ExitedRanks(int size);

// While one exists, this rank waits. It reports since when to the launcher's
// process on this host (COLLECTIVE_WAITS), if there is one. Across hosts a rank
// cannot end another rank that hangs, so the supervisors end the rank that waits
// for no other (collective/elastic/wait_report.py).
class ReportedWait {
 public:
  ReportedWait();
  ~ReportedWait();
  ReportedWait(const ReportedWait&) = delete;
};

}  // namespace collective
