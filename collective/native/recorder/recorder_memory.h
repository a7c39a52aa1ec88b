// What the files of the recorder share: the clock, and the first page of the
// memory.
#pragma once

#include <time.h>

#include "membership/job_memory.h"
#include "recorder/recorder.h"

namespace collective {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1000 * kMillisecond;

inline void SleepFor(int64_t nanoseconds) {
  const timespec time = {0, static_cast<long>(nanoseconds)};
  nanosleep(&time, nullptr);
}

struct Recorder::Header {
  // When the last dump was claimed; when that claim ended, written or not; and
  // when a dump was last written.
  std::atomic<int64_t> claimed, done, written;
  std::atomic<uint32_t> dumps;
  std::atomic<uint32_t> asked;  // sample requests
};

}  // namespace collective
