#include "rendezvous/launcher_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "clock.h"
#include "rendezvous/descriptor.h"

namespace collective {
namespace {

constexpr char kExited = 'e';  // collective/elastic/membership_file.py

// The layout of collective/elastic/wait_report.py; times are from Now().
struct Report {
  std::atomic<int64_t> since;  // 0: it does not wait
  std::atomic<int64_t> last;   // when its last wait ended
};

std::mutex mutex;
int waits = 0;

// The header of each file (membership_file.py).
constexpr char kHeader[] = "collective file\n";
constexpr size_t kHeaderBytes = sizeof(kHeader) - 1;

// Maps the contents, after the header, of a file whose path and inode a variable
// names, as /proc/1234/fd/5:678. Null if there is no file of that size, or another
// file has the path: the variable may have outlived its job, as in a daemon that
// a rank started, and the path then leads to a file of another program.
std::shared_ptr<char> Map(const char* variable, size_t bytes, bool writes) {
  const char* const value = std::getenv(variable);
  const char* const colon = value ? std::strrchr(value, ':') : nullptr;
  if (!colon) return nullptr;
  const std::string path(value, colon);
  const auto is_it = [&](const struct stat& found) {
    return S_ISREG(found.st_mode) && std::to_string(found.st_ino) == colon + 1 &&
           found.st_size >= static_cast<off_t>(kHeaderBytes + bytes);
  };
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0 || !is_it(found)) return nullptr;
  const Descriptor file(open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  char header[kHeaderBytes];
  if (!file.valid() || fstat(file.get(), &found) != 0 || !is_it(found) ||
      pread(file.get(), header, kHeaderBytes, 0) != ssize_t{kHeaderBytes} ||
      std::memcmp(header, kHeader, kHeaderBytes) != 0) {
    return nullptr;
  }
  const size_t all = kHeaderBytes + bytes;
  void* memory = mmap(nullptr, all, PROT_READ | (writes ? PROT_WRITE : 0), MAP_SHARED,
                      file.get(), 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<char*>(memory) + kHeaderBytes,
          [memory, all](char*) { munmap(memory, all); }};
}

Report* TheReport() {
  static const std::shared_ptr<char> mapped =
      Map("COLLECTIVE_WAITS", sizeof(Report), true);
  return reinterpret_cast<Report*>(mapped.get());
}

}  // namespace

std::function<bool(int)> ExitedRanks(int size) {
  if (size == 1) return {};
  // A shorter file belongs to an outer job, one of whose ranks started this
  // one.
  const std::shared_ptr<const volatile char> states =
      Map("COLLECTIVE_BOARD", size, false);
  if (!states) return {};
  return [states](int rank) { return states.get()[rank] == kExited; };
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
