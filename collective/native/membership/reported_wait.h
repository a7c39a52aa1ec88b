// Reports to the launcher's process beside this rank since when it waits.
//
// Across hosts no rank can end another that hangs. So ranks report long waits
// to the process that supervises them, and the supervisors end the rank that
// waits for nobody (collective/elastic/wait_report.py).
#pragma once

namespace collective {

// While one exists, this rank waits. Does nothing without our launcher.
class ReportedWait {
 public:
  ReportedWait();
  ~ReportedWait();
  ReportedWait(const ReportedWait&) = delete;
};

}  // namespace collective
