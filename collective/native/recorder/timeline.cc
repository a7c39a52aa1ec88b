#include "recorder/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "failure.h"
#include "membership/descriptor.h"

namespace collective {
namespace {

constexpr char kEnd[] = "\n]\n";

std::atomic<bool> recording{false};
std::mutex mutex;  // of all below
Descriptor file;
int64_t length = 0;  // of the file, without kEnd
int64_t limit = 0;
int32_t process = 0;

double Microseconds() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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

// Adds an event over the closing bracket, and the bracket behind it.
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
  return std::string("{\"name\":\"") + name +
         "\",\"ph\":\"i\",\"s\":\"g\",\"ts\":" +
         std::to_string(Microseconds()) +
         ",\"pid\":" + std::to_string(process) + ",\"tid\":0}";
}

}  // namespace

void StartTimeline(const char* path, int64_t limit_bytes, int32_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  Descriptor opened(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!opened.valid()) {
    throw Failure(Code::kInvalidArgument,
                  std::string("cannot write the timeline ") + path + ": " +
                      std::strerror(errno),
                  "give a file in a folder that exists");
  }
  file = std::move(opened);
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

double TimelineNow() {
  return recording.load(std::memory_order_relaxed) ? Microseconds() : 0;
}

TimelineEntry::TimelineEntry(const Request& request) {
  if (!recording.load(std::memory_order_relaxed)) return;
  request_ = &request;
  // Another rank may have ended a posted one already.
  begin_ = request.posted_at > 0 ? request.posted_at : Microseconds();
}

TimelineEntry::~TimelineEntry() {
  if (!request_) return;
  const double end = Microseconds();
  int64_t bytes = 0;
  for (const Tensor& tensor : request_->tensors) {
    bytes += tensor.count * static_cast<int64_t>(SizeOf(tensor.dtype));
  }
  char numbers[160];
  std::snprintf(numbers, sizeof(numbers),
                "\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,"
                "\"args\":{\"bytes\":%lld,\"call\":\"",
                begin_, end - begin_, process, Row(),
                static_cast<long long>(bytes));
  const std::string event =
      "{\"name\":\"" +
      Escaped(request_->name.empty() ? NameOf(request_->kind)
                                     : request_->name) +
      "\"," + numbers + Escaped(request_->Describe()) + "\"}}";
  std::lock_guard<std::mutex> lock(mutex);
  if (!recording) return;
  constexpr int64_t kSpare = 200;  // for the last note
  if (length + static_cast<int64_t>(event.size()) + kSpare > limit) {
    Append(Note("the trace is full"));
    recording = false;
    return;
  }
  Append(event);
}

}  // namespace collective
