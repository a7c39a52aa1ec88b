// The collectives that this process has run: in a Chrome trace, or in memory
// until they are taken.
//
// The file is a complete JSON array after every event: each write puts an event
// and the closing bracket over the old bracket, in one system call. So the file is
// valid even if the job is killed. It never grows over a limit.
#pragma once

#include <cstdint>

#include "kernels/types.h"
#include "rendezvous/descriptor.h"

namespace collective {

// Begins to record into an empty file.
void StartTimeline(Descriptor empty, int64_t limit_bytes, int32_t process);
void StopTimeline();

// Begins or ends to keep a record of each collective in memory.
void KeepEvents(bool on);
// Times are from Now().
struct TimelineEvent {
  int64_t begin, end, bytes;
};
// Takes the oldest records, in order of their end; returns their number.
int TakeEvents(TimelineEvent* events, int most);

// Whether a collective that begins now must be added. Costs one load each.
bool TimelineRecords();
// Adds a collective that has ended; times are from Now().
void AddToTimeline(const Request& request, int64_t begin, int64_t end);

}  // namespace collective
