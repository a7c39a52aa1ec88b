// What our launcher and its ranks report to each other, in files that they map
// and that environment variables name.
#pragma once

#include <functional>

namespace collective {

// Returns a function that says whether a launch rank of this job has exited. It
// is empty if the launcher shares no membership file (COLLECTIVE_BOARD), which
// has one byte for each launch rank. Before the rendezvous a rank has no
// descriptor of the other processes, so only the launcher can know.
std::function<bool(int)> ExitedRanks(int size);

// While one exists, this rank waits. It reports since when to the launcher's
// process beside it (COLLECTIVE_WAITS), if there is one: across hosts no rank
// can end another that hangs, so the supervisors end the rank that waits for
// nobody (collective/elastic/wait_report.py).
class ReportedWait {
 public:
  ReportedWait();
  ~ReportedWait();
  ReportedWait(const ReportedWait&) = delete;
};

}  // namespace collective
