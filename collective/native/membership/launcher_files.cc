#include "membership/launcher_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "clock.h"
#include "membership/descriptor.h"

namespace collective {
namespace {

constexpr char kExited = 'e';  // collective/elastic/membership_file.py

// As in collective/elastic/wait_report.py; times are those of Now().
struct Report {
  std::atomic<int64_t> since;  // 0: it does not wait
  std::atomic<int64_t> last;   // when it last ceased to wait
};

std::mutex mutex;
int waits = 0;

// Maps a file for the life of the process. Null if there is none that large.
void* Map(const char* variable, size_t bytes, bool writes) {
  const char* path = std::getenv(variable);
  if (!path) return nullptr;
  const Descriptor file(open(path, (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  struct stat found = {};
  if (!file.valid() || fstat(file.get(), &found) != 0 ||
      found.st_size < static_cast<off_t>(bytes)) {
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | (writes ? PROT_WRITE : 0), MAP_SHARED,
                      file.get(), 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

Report* TheReport() {
  static auto* const report =
      static_cast<Report*>(Map("COLLECTIVE_WAITS", sizeof(Report), true));
  return report;
}

}  // namespace

std::function<bool(int)> ExitedRanks(int size) {
  if (size == 1) return {};
  // A shorter file belongs to an outer job, one of whose ranks started this
  // one.
  const auto* states =
      static_cast<const volatile char*>(Map("COLLECTIVE_BOARD", size, false));
  if (!states) return {};
  return [states](int rank) { return states[rank] == kExited; };
}

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
