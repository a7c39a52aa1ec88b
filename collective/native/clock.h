// The one clock: the monotonic one, which the ranks of a host share and which
// Python's time.perf_counter reads.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

namespace collective {

constexpr int64_t kMillisecond = 1'000'000;  // in nanoseconds
constexpr int64_t kSecond = 1000 * kMillisecond;

inline int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

// Seconds, which may be infinite, in nanoseconds.
inline int64_t Nanoseconds(double seconds) {
  constexpr double kMost = 2e6;  // in milliseconds, it still is an int
  return static_cast<int64_t>(std::min(seconds, kMost) * 1e9);
}

inline int64_t DeadlineIn(double seconds) { return Now() + Nanoseconds(seconds); }

inline double SecondsSince(int64_t moment) {
  return static_cast<double>(Now() - moment) * 1e-9;
}

inline void SleepFor(int64_t nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
}

}  // namespace collective
