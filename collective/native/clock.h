// The one clock: the monotonic one, which the ranks of a host share. It is also
// the clock of Python's time.perf_counter.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

namespace collective {

constexpr int64_t kMillisecond = 1'000'000;  // as nanoseconds
constexpr int64_t kSecond = 1000 * kMillisecond;

inline int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

// Converts seconds, which may be infinite, to nanoseconds.
inline int64_t Nanoseconds(double seconds) {
  constexpr double kMost = 2e6;  // in milliseconds, it still is an int
  return static_cast<int64_t>(std::min(seconds, kMost) * 1e9);
}

inline double SecondsSince(int64_t moment) {
  return static_cast<double>(Now() - moment) * 1e-9;
}

inline void SleepFor(int64_t nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
}

// A thread that has not polled for so long was stopped: the limit is several
// times the longest pause of a wait between two polls.
constexpr int64_t kStopped = kSecond;
constexpr int kLongestPauseMilliseconds = 200;

// The time since its construction, without the time in which this process did not
// run: a job that is suspended as a whole (SIGSTOP, a frozen cgroup) continues as
// if no time had passed.
class RunningTime {
 public:
  // Must be called at least every kLongestPauseMilliseconds.
  int64_t Elapsed() {
    const int64_t now = Now();
    if (now - polled_ > kStopped) stopped_ += now - polled_;
    polled_ = now;
    return now - start_ - stopped_;
  }
  double Seconds() { return static_cast<double>(Elapsed()) * 1e-9; }
  int64_t stopped() const { return stopped_; }

 private:
  int64_t start_ = Now();
  int64_t polled_ = start_;
  int64_t stopped_ = 0;
};

// A deadline in running time; it must be polled as often.
class Deadline {
 public:
  explicit Deadline(double seconds) : nanoseconds_(Nanoseconds(seconds)) {}
  int64_t Left() { return nanoseconds_ - time_.Elapsed(); }
  bool Passed() { return Left() <= 0; }

 private:
  int64_t nanoseconds_;
  RunningTime time_;
};

}  // namespace collective
