// The memory that the ranks of a host share: maps it, waits for ranks, leaves it.
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "membership/job.h"
#include "membership/job_memory.h"

namespace collective {
namespace {

// About 10 us, in which another rank can run a small collective.
constexpr int kSpins = 2000;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

void Job::Open(const char* name) {
  void* memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED,
                      local_.memory.get(), 0);
  if (memory == MAP_FAILED || fstat(local_.memory.get(), &memory_) != 0) {
    ThrowNoMemory();
  }
  header_ = static_cast<Header*>(memory);
  RankState& mine = my_state();
  sched_getaffinity(0, sizeof(mine.cores), &mine.cores);
  mine.last_waited = Now();
  while (getrandom(mine.meeting, sizeof(mine.meeting), 0) != sizeof(mine.meeting)) {
  }
  mine.state.Raise(RankState::kAttached);
  AwaitAttached(name);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int i = 0; i < info_.local_size; ++i) {
    CPU_OR(&cores, &cores, &header_->ranks[i].cores);
  }
  spins_ = info_.local_size <= CPU_COUNT(&cores) ? kSpins : 0;
}

void Job::AwaitAttached(const char* name) {
  Request request;
  request.name = name;
  uint32_t formed = 0;
  try {
    for (int i = 0; i < info_.local_size; ++i) {
      Await(header_->ranks[i].state, RankState::kAttached, local_.processes[i].rank,
            request);
    }
  } catch (const Failure&) {
    // If another rank has seen all ranks, the job was formed before it broke.
    header_->formed.compare_exchange_strong(formed, Header::kFailed);
    if (formed != Header::kFormed) throw;
  }
  formed = 0;
  header_->formed.compare_exchange_strong(formed, Header::kFormed);
  if (formed == Header::kFailed) ThrowBroken();
}

Job::~Job() {
  for (int i = 0; i < kMaxAreas; ++i) {
    if (areas_[i]) munmap(areas_[i], area_bytes_[i]);
  }
  Leave();
  Close();
}

void Job::Close() {
  munmap(header_, sizeof(Header));
  header_ = nullptr;
}

char* Job::MapArea(int index, size_t bytes) {
  CheckMemory();
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  // More than needed, to put the mapping on a boundary of huge pages.
  void* space = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* memory = MAP_FAILED;
  if (space != MAP_FAILED) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(space);
    const uintptr_t aligned = (start + kHugePage - 1) & ~(kHugePage - 1);
    memory = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED, local_.memory.get(),
                  static_cast<off_t>(kAreaStride * (1 + index)));
    if (aligned > start) munmap(space, aligned - start);
    const uintptr_t tail = start + kHugePage - aligned;
    if (tail) munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  if (memory == MAP_FAILED) ThrowNoMemory();
  madvise(memory, bytes, MADV_HUGEPAGE);  // if the kernel allows it
  areas_[index] = static_cast<char*>(memory);
  area_bytes_[index] = bytes;
  return areas_[index];
}

void Job::ThrowNoMemory() const {
  throw Failure(
      Code::kInternal,
      "rank " + std::to_string(info_.rank) + ": mmap: " + std::strerror(errno),
      kOutOfMemoryHint);
}

void Job::CheckMemory() const {
  struct stat found;
  if (fstat(local_.memory.get(), &found) == 0 && found.st_dev == memory_.st_dev &&
      found.st_ino == memory_.st_ino) {
    return;
  }
  throw Failure(Code::kInternal,
                "rank " + std::to_string(info_.rank) + ": file descriptor " +
                    std::to_string(local_.memory.get()) +
                    ", of the memory that ranks share, was closed",
                "the program closes descriptors that it has not opened: let it close "
                "its own alone, not all by os.closerange");
}

}  // namespace collective
