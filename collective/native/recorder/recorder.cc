#include "recorder/recorder.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>

#include "failure.h"
#include "recorder/timeline.h"

namespace collective {
namespace {

std::atomic<Recorder*> current{nullptr};
constexpr size_t kRingsAt = 4096;  // after the header

template <class T>
void RaiseAtLeast(T least, std::atomic<T>* value) {
  T now = *value;
  while (now < least && !value->compare_exchange_weak(now, least)) {
  }
}

}  // namespace

Recorder* Recorder::Current() { return current.load(std::memory_order_acquire); }

void Recorder::Open(const RankInfo& info, int launch_rank, double start_seconds,
                    double stall_seconds) {
  RankInfo ours = info;
  ours.job += " recorder";
  const size_t bytes = kRingsAt + sizeof(Rank) * info.local_size;
  Rendezvous local = JoinRendezvous(ours, 0, bytes, start_seconds);
  auto* opened = new Recorder(ours, std::move(local), 0, stall_seconds);
  opened->mine_->launch_rank = launch_rank;
  Install(opened);
}

void Recorder::Reopen(const RankInfo& info, Rendezvous local, size_t offset,
                      int launch_rank, bool joined, double stall_seconds) {
  auto* opened = new Recorder(info, std::move(local), offset, stall_seconds);
  if (const Recorder* former = Current()) {
    opened->CopyFrom(*former);
  } else {
    opened->mine_->launch_rank = launch_rank;
    opened->mine_->joined = joined;
  }
  Install(opened);
}

void Recorder::Install(Recorder* opened) {
  static const int forks = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
  (void)forks;
  // A thread or a signal handler may still use the former recorder, so it is
  // deleted together with the next one. Its shared memory is released now: private
  // pages take late writes, which nobody reads.
  static Recorder* before = nullptr;
  delete before;
  before = current.exchange(opened);
  if (before) {
    mmap(before->header_, before->bytes_, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  opened->InstallSignalHandlers();
}

Recorder::Recorder(const RankInfo& info, Rendezvous local, size_t offset,
                   double stall_seconds)
    : info_(info),
      stall_(Nanoseconds(stall_seconds)),
      bytes_(kRingsAt + sizeof(Rank) * info.local_size),
      local_(std::move(local)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      known_dead_(info.local_size) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED,
                      local_.memory.get(), static_cast<off_t>(offset));
  if (memory == MAP_FAILED || !wake_.valid()) {
    throw Failure(Code::kInternal,
                  std::string("flight recorder: ") + std::strerror(errno),
                  "see ulimit -v and ulimit -n");
  }
  local_.memory = Descriptor();  // the memory of a job ends with the job
  header_ = static_cast<Header*>(memory);
  ranks_ = reinterpret_cast<Rank*>(static_cast<char*>(memory) + kRingsAt);
  mine_ = &ranks_[info_.local_rank];
  mine_->pid = getpid();
  mine_->rank = info_.rank;
}

Recorder::~Recorder() { munmap(header_, bytes_); }

void Recorder::CopyFrom(const Recorder& former) {
  std::memcpy(static_cast<void*>(mine_), former.mine_, sizeof(Rank));
  mine_->rank = info_.rank;
  mine_->left = mine_->death_reported = 0;
  mine_->answered = header_->asked.load();
  for (Entry& entry : mine_->entries) {
    if (entry.kind >= kOtherKind) continue;
    // Communicators of the new job count from 0 again.
    entry.area = kNoArea;
    entry.sequence = 0;
    if (entry.ended) continue;
    entry.ended = Now();
    entry.failed = 1;
  }
  for (int i = 0; i < info_.local_size; ++i) {
    for (int j = 0; j < former.info_.local_size; ++j) {
      if (former.local_.processes[j].pid == local_.processes[i].pid &&
          former.ranks_[j].death_reported) {
        ranks_[i].death_reported = 1;  // it died after the rendezvous
      }
    }
  }
  seen_at_ = former.seen_at_;
  seen_since_ = former.seen_since_;
  step_took_ = former.step_took_;
  slow_at_ = former.slow_at_;
  last_stalled_ = former.last_stalled_;
  terminated_ = former.terminated_.load();
  RaiseAtLeast(former.header_->dumps.load(), &header_->dumps);
  RaiseAtLeast(former.header_->done.load(), &header_->done);
  RaiseAtLeast(former.header_->written.load(), &header_->written);
}

void Recorder::Renumber(int rank) {
  mine_->rank = rank;
  for (int i = 0; i < info_.local_size; ++i) {
    if (ranks_[i].pid && (ranks_[i].left || local_.Dead(i))) ranks_[i].rank = -1;
  }
}

// ---- the ring ---------------------------------------------------------------

Recorder::Entry* Recorder::EntryOf(uint64_t number) {
  Entry* entry = &mine_->entries[number % kEntries];
  // A later entry may have overwritten this one.
  return entry->number.load(std::memory_order_acquire) == number ? entry : nullptr;
}

uint64_t Recorder::Begin(int kind, const char* name, int64_t bytes, int64_t now) {
  const uint64_t number = 1 + mine_->last.fetch_add(1);
  Entry& entry = mine_->entries[number % kEntries];
  entry.number.store(0, std::memory_order_relaxed);
  entry.announced = entry.started = now;
  entry.ended = 0;
  entry.bytes = bytes;
  entry.kind = kind;
  entry.op = entry.dtype = -1;
  entry.tensors = 0;
  entry.area = kNoArea;
  entry.sequence = 0;
  entry.failed = 0;
  entry.at = mine_->at;
  const size_t length = strnlen(name, sizeof(entry.name) - 1);
  std::memcpy(entry.name, name, length);
  entry.name[length] = 0;
  entry.number.store(number, std::memory_order_release);
  return number;
}

uint64_t Recorder::Announce(const Request& request, int64_t now) {
  const uint64_t number = Begin(static_cast<int>(request.kind), request.name.c_str(),
                                static_cast<int64_t>(request.bytes()), now);
  Entry& entry = mine_->entries[number % kEntries];
  entry.started = 0;
  entry.op = static_cast<int32_t>(request.op);
  entry.tensors = static_cast<int32_t>(request.tensors.size());
  if (entry.tensors) {
    entry.dtype = static_cast<int32_t>(request.tensors[0].dtype);
  }
  return number;
}

void Recorder::Start(uint64_t number, int area, uint32_t sequence, int64_t now) {
  Entry* entry = EntryOf(number);
  if (!entry) return;
  entry->area = area;
  entry->sequence = sequence;
  entry->started = now;
}

void Recorder::End(uint64_t number, bool failed, int64_t now) {
  Entry* entry = EntryOf(number);
  if (!entry) return;
  entry->failed = failed;
  entry->ended = now;
}

RecordedRun::RecordedRun(const Request& request, int area, uint32_t sequence)
    : request_(request), recorder_(Recorder::Current()), traced_(TimelineRecords()) {
  if (!recorder_ && !traced_) return;
  // Another rank may already have ended a posted entry.
  begin_ = request.posted_at ? request.posted_at : Now();
  failures_ = std::uncaught_exceptions();
  if (!recorder_) return;
  number_ = request.recorded ? request.recorded : recorder_->Announce(request, begin_);
  recorder_->Start(number_, area, sequence, begin_);
}

RecordedRun::~RecordedRun() {
  if (!begin_) return;
  const int64_t end = Now();
  if (recorder_) {
    recorder_->End(number_, std::uncaught_exceptions() > failures_, end);
  }
  if (traced_) AddToTimeline(request_, begin_, end);
}

void RequestDump(const std::string& reason) {
  if (Recorder* recorder = Recorder::Current()) recorder->RequestDump(reason);
}

int Recorder::RankOf(int local_rank) const {
  const Rank& rank = ranks_[local_rank];
  return rank.pid ? rank.rank.load() : local_.processes[local_rank].rank;
}

// The rank may be writing: a torn entry is shown wrongly, which is harmless.
__attribute__((no_sanitize_thread)) int Recorder::Read(int local_rank,
                                                       Rank* into) const {
  static_assert(sizeof(Rank) % sizeof(uint64_t) == 0, "copied in words");
  const auto* from = reinterpret_cast<const volatile uint64_t*>(&ranks_[local_rank]);
  auto* to = reinterpret_cast<uint64_t*>(into);
  for (size_t i = 0; i < sizeof(Rank) / sizeof(uint64_t); ++i) to[i] = from[i];
  if (into->pid == 0) {  // it died after the rendezvous, before it opened this
    into->rank = into->launch_rank = RankOf(local_rank);
    into->pid = local_.processes[local_rank].pid;
  }
  if (ranks_[local_rank].left) return 2;
  return local_.Dead(local_rank) ? 1 : 0;
}

std::string Recorder::reason() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void Recorder::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

void Recorder::Close() {
  mine_->left = 1;
  closing_ = true;
  Wake();
}

}  // namespace collective
