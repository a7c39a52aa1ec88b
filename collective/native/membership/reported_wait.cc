#include "membership/reported_wait.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "clock.h"
#include "membership/descriptor.h"

namespace collective {
namespace {

// As in collective/elastic/wait_report.py; nanoseconds of the monotonic clock.
struct Report {
  std::atomic<int64_t> since;  // 0: it does not wait
  std::atomic<int64_t> last;   // when it last ceased to wait
};

std::mutex mutex;
int waits = 0;

// Null without our launcher. Mapped for the life of the process.
Report* MapReport() {
  const char* path = std::getenv("COLLECTIVE_WAITS");
  const Descriptor file(path ? open(path, O_RDWR | O_CLOEXEC) : -1);
  if (!file.valid()) return nullptr;
  void* memory = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE,
                      MAP_SHARED, file.get(), 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Report*>(memory);
}

Report* TheReport() {
  static Report* const report = MapReport();
  return report;
}

}  // namespace

ReportedWait::ReportedWait() {
  if (!TheReport()) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (waits++ == 0) TheReport()->since = Now();
}

ReportedWait::~ReportedWait() {
  if (!TheReport()) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (--waits > 0) return;
  TheReport()->last = Now();
  TheReport()->since = 0;
}

}  // namespace collective
