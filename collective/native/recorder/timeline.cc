#include "recorder/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <mutex>
#include <string>

#include "clock.h"

namespace collective {
namespace {

constexpr char kEnd[] = "\n]\n";

std::atomic<bool> recording{false};
std::atomic<bool> keeping{false};
std::mutex mutex;  // guards all below
std::deque<TimelineEvent> kept;
constexpr size_t kMostKept = size_t{1} << 20;  // records, if nobody takes them
Descriptor file;
int64_t length = 0;  // length of the file, without kEnd
int64_t limit = 0;
int32_t process = 0;

// A row of the trace for each thread that runs collectives.
int Row() {
  static std::atomic<int> rows{0};
  thread_local const int row = ++rows;
  return row;
}

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return escaped;
}

// Writes an event over the closing bracket, and a new bracket after it.
void Append(const std::string& event) {
  const std::string text = (length ? ",\n" : "[\n") + event;
  const std::string whole = text + kEnd;
  if (pwrite(file.get(), whole.data(), whole.size(), length) !=
      static_cast<ssize_t>(whole.size())) {
    recording = false;  // a full disk ends the trace, not the job
    return;
  }
  length += static_cast<int64_t>(text.size());
}

std::string Note(const char* name) {
  return std::string("{\"name\":\"") + name + "\",\"ph\":\"i\",\"s\":\"g\",\"ts\":" +
         std::to_string(static_cast<double>(Now()) * 1e-3) +
         ",\"pid\":" + std::to_string(process) + ",\"tid\":0}";
}

}  // namespace

void StartTimeline(Descriptor empty, int64_t limit_bytes, int32_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  file = std::move(empty);
  length = 0;
  limit = limit_bytes;
  process = number;
  recording = true;
  Append(Note("recording begins"));
}

void StopTimeline() {
  std::lock_guard<std::mutex> lock(mutex);
  recording = false;
  file = Descriptor();
}

void KeepEvents(bool on) {
  std::lock_guard<std::mutex> lock(mutex);
  keeping = on;
  kept.clear();
}

int TakeEvents(TimelineEvent* events, int most) {
  std::lock_guard<std::mutex> lock(mutex);
  const int taken = std::min(most, static_cast<int>(kept.size()));
  std::copy_n(kept.begin(), taken, events);
  kept.erase(kept.begin(), kept.begin() + taken);
  return taken;
}

bool TimelineRecords() {
  return recording.load(std::memory_order_relaxed) ||
         keeping.load(std::memory_order_relaxed);
}

void AddToTimeline(const Request& request, int64_t begin, int64_t end) {
  const auto bytes = static_cast<int64_t>(request.bytes());
  if (keeping) {
    std::lock_guard<std::mutex> lock(mutex);
    if (kept.size() < kMostKept) kept.push_back({begin, end, bytes});
  }
  if (!recording) return;
  char numbers[160];
  std::snprintf(numbers, sizeof(numbers),
                "\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,"
                "\"args\":{\"bytes\":%lld,\"call\":\"",
                static_cast<double>(begin) * 1e-3,
                static_cast<double>(end - begin) * 1e-3, process, Row(),
                static_cast<long long>(bytes));
  const std::string event =
      "{\"name\":\"" +
      Escaped(request.name.empty() ? NameOf(request.kind) : request.name) + "\"," +
      numbers + Escaped(request.Describe()) + "\"}}";
  std::lock_guard<std::mutex> lock(mutex);
  if (!recording) return;
  constexpr int64_t kSpare = 200;  // room for the last note
  if (length + static_cast<int64_t>(event.size()) + kSpare > limit) {
    Append(Note("the trace is full"));
    recording = false;
    return;
  }
  Append(event);
}

}  // namespace collective
