// A Chrome trace of the collectives that this process runs.
//
// The file is a complete JSON array after every event: each write puts an event
// and the closing bracket over the old bracket, in one system call. So it opens
// whatever kills the job. It never grows over a limit.
#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace collective {

// Begins to record; throws kInvalidArgument where the file cannot be written.
void StartTimeline(const char* path, int64_t limit_bytes, int32_t process);
void StopTimeline();
// Microseconds, for Request::posted_at; 0 while nothing is recorded.
double TimelineNow();

// Records a collective from its construction to its end. Costs one load while
// nothing is recorded.
class TimelineEntry {
 public:
  explicit TimelineEntry(const Request& request);
  ~TimelineEntry();
  TimelineEntry(const TimelineEntry&) = delete;

 private:
  const Request* request_ = nullptr;
  double begin_ = 0;  // microseconds
};

}  // namespace collective
