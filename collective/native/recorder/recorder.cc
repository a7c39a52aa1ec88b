#include "recorder/recorder.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "failure.h"

namespace collective {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1000 * kMillisecond;
// An account that takes longer is not waited for: its writer may have died.
constexpr int64_t kPatience = 5 * kSecond;
// What is told so soon after an account is what that one was about.
constexpr int64_t kSameTrouble = 5 * kSecond;
// Told to end while it waits so long, a rank says for whom first.
constexpr int64_t kLongWait = kSecond;
constexpr uint32_t kMostAccounts = 8;  // of a job, on a host
constexpr int kLookMilliseconds = 100;
// A step is stalled that takes so many times as long as the one before it.
constexpr double kSlowStep = 10;

std::atomic<Recorder*> current{nullptr};
constexpr size_t kFirst = 4096;  // the ranks' rings follow

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void Nap(int64_t nanoseconds) {
  const timespec nap = {0, static_cast<long>(nanoseconds)};
  nanosleep(&nap, nullptr);
}

template <class T>
void RaiseTo(T least, std::atomic<T>* value) {
  T now = *value;
  while (now < least && !value->compare_exchange_weak(now, least)) {
  }
}

}  // namespace

struct Recorder::Header {
  // When an account was begun; when that was ended, written or not; and when
  // one was written last.
  std::atomic<int64_t> claimed, done, written;
  std::atomic<uint32_t> accounts, asked;
};

Recorder* Recorder::Current() {
  return current.load(std::memory_order_acquire);
}

void Recorder::Open(const RankInfo& place, int called, double start_seconds,
                    double stall_seconds) {
  RankInfo ours = place;
  ours.job += " recorder";
  const size_t bytes = kFirst + sizeof(Rank) * place.local_size;
  Rendezvous here = JoinRendezvous(ours, 0, bytes, start_seconds);
  auto* opened = new Recorder(ours, std::move(here), 0, stall_seconds);
  opened->mine_->called = called;
  Install(opened);
}

void Recorder::Follow(const RankInfo& place, Rendezvous here, size_t at,
                      int called, bool joined, double stall_seconds) {
  auto* opened = new Recorder(place, std::move(here), at, stall_seconds);
  if (const Recorder* former = Current()) {
    opened->TakeAlong(*former);
  } else {
    opened->mine_->called = called;
    opened->mine_->joined = joined;
  }
  Install(opened);
}

void Recorder::Install(Recorder* opened) {
  static const int forks =
      pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
  (void)forks;
  // A thread, or a signal, may still be in the one before: it goes with the
  // next. Its memory goes now; what is written there yet, nobody reads.
  static Recorder* before = nullptr;
  delete before;
  before = current.exchange(opened);
  if (before) {
    mmap(before->header_, before->bytes_, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  opened->TakeOverTermination();
}

Recorder::Recorder(const RankInfo& place, Rendezvous here, size_t at,
                   double stall_seconds)
    : place_(place),
      stall_(static_cast<int64_t>(stall_seconds * 1e9)),
      bytes_(kFirst + sizeof(Rank) * place.local_size),
      here_(std::move(here)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      gone_(place.local_size) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED,
                      here_.memory.get(), static_cast<off_t>(at));
  if (memory == MAP_FAILED || !wake_.valid()) {
    throw Failure(Code::kInternal,
                  std::string("flight recorder: ") + std::strerror(errno),
                  "see ulimit -v and ulimit -n");
  }
  here_.memory = Descriptor();  // or that of a job would outlive it
  header_ = static_cast<Header*>(memory);
  ranks_ = reinterpret_cast<Rank*>(static_cast<char*>(memory) + kFirst);
  mine_ = &ranks_[place_.local_rank];
  mine_->pid = getpid();
  mine_->rank = place_.rank;
}

Recorder::~Recorder() { munmap(header_, bytes_); }

void Recorder::TakeAlong(const Recorder& former) {
  std::memcpy(static_cast<void*>(mine_), former.mine_, sizeof(Rank));
  mine_->rank = place_.rank;
  mine_->left = mine_->told = 0;
  mine_->answered = header_->asked.load();
  for (Entry& entry : mine_->entries) {
    if (entry.kind >= kOther) continue;
    // Of communicators that are no more; the new ones count from 0 again.
    entry.area = kNotOurs;
    entry.sequence = 0;
    if (entry.ended) continue;
    entry.ended = Now();
    entry.failed = 1;
  }
  for (int i = 0; i < place_.local_size; ++i) {
    for (int was = 0; was < former.place_.local_size; ++was) {
      if (former.here_.pids[was] == here_.pids[i] && former.ranks_[was].told) {
        ranks_[i].told = 1;  // it died when all had met
      }
    }
  }
  seen_at_ = former.seen_at_;
  seen_since_ = former.seen_since_;
  step_took_ = former.step_took_;
  slow_at_ = former.slow_at_;
  stalled_ = former.stalled_;
  terminated_ = former.terminated_.load();
  RaiseTo(former.header_->accounts.load(), &header_->accounts);
  RaiseTo(former.header_->done.load(), &header_->done);
  RaiseTo(former.header_->written.load(), &header_->written);
}

void Recorder::Settle() const {
  const int64_t until = Now() + kPatience;
  const auto unsettled = [&] {
    bool untold = false;
    for (int i = 0; i < place_.local_size; ++i) untold = untold || Untold(i);
    return UnderWay() || (untold && header_->accounts < kMostAccounts);
  };
  while (watching_ && !closing_ && unsettled() && Now() < until) {
    Nap(2 * kMillisecond);
  }
}

void Recorder::Renumber(int rank) {
  mine_->rank = rank;
  for (int i = 0; i < place_.local_size; ++i) {
    if (ranks_[i].pid && (ranks_[i].left || Dead(i))) ranks_[i].rank = -1;
  }
}

// ---- the ring ---------------------------------------------------------------

Recorder::Entry* Recorder::EntryOf(uint64_t number) {
  Entry* entry = &mine_->entries[number % kEntries];
  // Where so many more were begun since, its place is another's.
  return entry->number.load(std::memory_order_acquire) == number ? entry
                                                                 : nullptr;
}

uint64_t Recorder::Begin(int kind, const char* name, int64_t bytes) {
  const uint64_t number = 1 + mine_->last.fetch_add(1);
  Entry& entry = mine_->entries[number % kEntries];
  entry.number.store(0, std::memory_order_relaxed);
  entry.announced = entry.started = Now();
  entry.ended = 0;
  entry.bytes = bytes;
  entry.kind = kind;
  entry.op = entry.dtype = -1;
  entry.tensors = 0;
  entry.area = kNotOurs;
  entry.sequence = 0;
  entry.failed = 0;
  entry.at = mine_->at;
  const size_t length = strnlen(name, sizeof(entry.name) - 1);
  std::memcpy(entry.name, name, length);
  entry.name[length] = 0;
  entry.number.store(number, std::memory_order_release);
  return number;
}

uint64_t Recorder::Announce(const Request& request, bool starts) {
  int64_t bytes = 0;
  for (const Tensor& tensor : request.tensors) {
    bytes += tensor.count * static_cast<int64_t>(SizeOf(tensor.dtype));
  }
  const uint64_t number =
      Begin(static_cast<int>(request.kind), request.name.c_str(), bytes);
  Entry& entry = mine_->entries[number % kEntries];
  if (!starts) entry.started = 0;
  entry.op = static_cast<int32_t>(request.op);
  entry.tensors = static_cast<int32_t>(request.tensors.size());
  if (entry.tensors) {
    entry.dtype = static_cast<int32_t>(request.tensors[0].dtype);
  }
  return number;
}

void Recorder::Start(uint64_t number, int area, uint32_t sequence) {
  Entry* entry = EntryOf(number);
  if (!entry) return;
  entry->area = area;
  entry->sequence = sequence;
  if (!entry->started) entry->started = Now();
}

void Recorder::End(uint64_t number, bool failed) {
  Entry* entry = EntryOf(number);
  if (!entry) return;
  entry->failed = failed;
  entry->ended = Now();
}

RecordedRun::RecordedRun(const Request& request, int area, uint32_t sequence)
    : recorder_(Recorder::Current()) {
  if (!recorder_) return;
  number_ =
      request.recorded ? request.recorded : recorder_->Announce(request, true);
  recorder_->Start(number_, area, sequence);
  failures_ = std::uncaught_exceptions();
}

RecordedRun::~RecordedRun() {
  if (recorder_) {
    recorder_->End(number_, std::uncaught_exceptions() > failures_);
  }
}

void TellRecorder(const std::string& what) {
  if (Recorder* recorder = Recorder::Current()) recorder->Incident(what);
}

// ---- incidents --------------------------------------------------------------

int Recorder::NumberOf(int local_rank) const {
  const Rank& rank = ranks_[local_rank];
  return rank.pid ? rank.rank.load() : here_.ranks[local_rank];
}

bool Recorder::Dead(int local_rank) const {
  return local_rank != place_.local_rank && here_.Dead(local_rank);
}

bool Recorder::Untold(int local_rank) const {
  const Rank& rank = ranks_[local_rank];
  return !rank.left && !rank.told && NumberOf(local_rank) >= 0 &&
         Dead(local_rank);
}

bool Recorder::UnderWay() const {
  const int64_t claimed = header_->claimed;
  return header_->done < claimed && Now() - claimed < kPatience;
}

bool Recorder::Claim() {
  int64_t last = header_->claimed;  // before the look whether it has ended
  if (!watching_ || closing_ || UnderWay()) return false;
  if (!header_->claimed.compare_exchange_strong(last, Now())) return false;
  if (header_->accounts.fetch_add(1) < kMostAccounts) return true;
  header_->done = header_->claimed.load();
  return false;
}

void Recorder::Release() {
  --header_->accounts;
  header_->done = header_->claimed.load();
}

bool Recorder::WrittenJustNow() const {
  const int64_t written = header_->written;
  return written && Now() - written < kSameTrouble;
}

// Between the look and the claim, another rank can have begun and ended an
// account of the same trouble. So look again under the claim.
bool Recorder::ClaimTrouble() {
  if (WrittenJustNow() || !Claim()) return false;
  if (!WrittenJustNow()) return true;
  Release();
  return false;
}

void Recorder::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

void Recorder::Incident(const std::string& what) {
  if (ClaimTrouble()) {
    // The core may see a death before the thread that watches does, and this
    // account shows who is dead: none other is written of that.
    for (int i = 0; i < place_.local_size; ++i) {
      if (Untold(i)) ranks_[i].told = 1;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    reason_ = what;
    pending_ = true;
    Wake();
  }
  while (UnderWay() && watching_ && !closing_) Nap(2 * kMillisecond);
}

bool Recorder::ClaimDeath() {
  for (int i = 0; i < place_.local_size; ++i) {
    if (gone_[i] || !Dead(i)) continue;
    if (!Untold(i)) {
      gone_[i] = true;
    } else if (Claim()) {
      if (ranks_[i].told.exchange(1)) {  // by another rank, since the look
        Release();
        gone_[i] = true;
        continue;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      reason_ = "rank " + std::to_string(NumberOf(i)) + " (process " +
                std::to_string(here_.pids[i]) + ") died";
      return true;
    } else if (header_->accounts >= kMostAccounts) {
      gone_[i] = true;
    }
  }
  return false;
}

// What the core does not run has no deadline of its own.
__attribute__((no_sanitize_thread)) bool Recorder::ClaimStall() {
  const uint64_t last = mine_->last;
  for (uint64_t number = last; number && number + 8 > last; --number) {
    const Entry* entry = EntryOf(number);
    if (!entry || entry->area != kNotOurs || entry->kind >= kOther) continue;
    if (!entry->started || entry->ended) continue;
    if (number <= stalled_ || Now() - entry->started < stall_) continue;
    stalled_ = number;
    if (!ClaimTrouble()) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    reason_ = "no progress for " +
              std::to_string((Now() - entry->started) / kSecond) + " s in " +
              entry->name + " of rank " + std::to_string(mine_->rank);
    return true;
  }
  return ClaimSlowStep();
}

__attribute__((no_sanitize_thread)) bool Recorder::ClaimSlowStep() {
  const volatile double& now_at = mine_->at;
  const volatile double& now_since = mine_->since;
  const double at = now_at, since = now_since;
  const auto step = static_cast<int64_t>(at) / 2 - 1;
  const bool within = at >= 2 && static_cast<int64_t>(at) % 2 == 0;
  if (!within || at != now_at) return false;
  if (at != seen_at_) {
    const double steps = (at - seen_at_) / 2;
    step_took_ = seen_at_ && steps > 0 ? (since - seen_since_) / steps : 0;
    seen_at_ = at;
    seen_since_ = since;
  }
  // The first one compiles.
  if (step_took_ == 0 || at == slow_at_) return false;
  const double took = Now() / 1e9 - since;
  if (took < std::max(stall_ / 1e9, kSlowStep * step_took_)) return false;
  slow_at_ = at;
  if (!ClaimTrouble()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  reason_ = "no progress for " + std::to_string(static_cast<int64_t>(took)) +
            " s in step " + std::to_string(step) + " of rank " +
            std::to_string(mine_->rank);
  return true;
}

__attribute__((no_sanitize_thread)) bool Recorder::WaitsLong() const {
  const Entry& last = mine_->entries[mine_->last % kEntries];
  return last.number && last.kind < kOther && last.started && !last.ended &&
         Now() - last.started > kLongWait;
}

bool Recorder::ClaimEnd() {
  if (!WaitsLong() || !ClaimTrouble()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  reason_ = "rank " + std::to_string(mine_->rank) +
            " was told to end (signal " + std::to_string(terminated_) +
            ") while it waited";
  return true;
}

Recorder::Event Recorder::Watch(int milliseconds) {
  watching_ = true;
  const int64_t until = Now() + milliseconds * kMillisecond;
  do {
    std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}};
    for (int i = 0; i < place_.local_size; ++i) {
      const int process = here_.pidfds[i].get();
      // Of a death that another rank is writing about, the look is told.
      const bool known = gone_[i] || i == place_.local_rank || UnderWay();
      if (!known && process >= 0) watched.push_back({process, POLLIN, 0});
    }
    poll(watched.data(), watched.size(), kLookMilliseconds);
    uint64_t wakes;
    (void)!read(wake_.get(), &wakes, sizeof(wakes));
    if (closing_) return kClosed;
    if (pending_.exchange(false)) return kIncident;
    if (ClaimDeath() || ClaimStall()) return kIncident;
    if (header_->asked != mine_->answered) return kSample;
    if (terminated_ && !UnderWay()) {
      if (!ClaimEnd()) EndBy(terminated_);
      return kIncident;
    }
  } while (Now() < until);
  return kSample;
}

void Recorder::Sample(const char* stack) {
  const size_t length = strnlen(stack, sizeof(mine_->stack) - 1);
  std::memcpy(mine_->stack, stack, length);
  mine_->stack[length] = 0;
  mine_->sampled = Now();
  mine_->answered = header_->asked.load();
}

void Recorder::Gather(int milliseconds) {
  const uint32_t asked = ++header_->asked;
  mine_->answered = asked;
  const int64_t until = Now() + milliseconds * kMillisecond;
  for (int i = 0; i < place_.local_size; ++i) {
    while (ranks_[i].pid && !ranks_[i].left && !Dead(i) &&
           ranks_[i].answered != asked && Now() < until) {
      Nap(2 * kMillisecond);
    }
  }
}

// While others write: what is torn is told wrong, and no more comes of it.
__attribute__((no_sanitize_thread)) int Recorder::Read(int local_rank,
                                                       Rank* into) const {
  static_assert(sizeof(Rank) % sizeof(uint64_t) == 0, "copied in words");
  const auto* from =
      reinterpret_cast<const volatile uint64_t*>(&ranks_[local_rank]);
  auto* to = reinterpret_cast<uint64_t*>(into);
  for (size_t i = 0; i < sizeof(Rank) / sizeof(uint64_t); ++i) to[i] = from[i];
  if (into->pid == 0) {  // it met the others, and came no further
    into->rank = into->called = NumberOf(local_rank);
    into->pid = here_.pids[local_rank];
  }
  if (ranks_[local_rank].left) return 2;
  return Dead(local_rank) ? 1 : 0;
}

std::string Recorder::reason() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void Recorder::Done() { header_->done = header_->written = Now(); }

void Recorder::Close() {
  mine_->left = 1;
  closing_ = true;
  Wake();
}

// ---- a launcher that ends the rest ------------------------------------------

// Whoever started the ranks tells the others to end as soon as one has died:
// before they could say what they have seen. So a rank that knows of a death,
// or waits, lives on until that is written. A program's own handler is left
// alone.

void Recorder::TakeOverTermination() {
  for (int number : {SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    sigaction(number, nullptr, &now);
    if (now.sa_handler != SIG_DFL) continue;
    now = {};
    now.sa_handler = &Recorder::OnTermination;
    now.sa_flags = SA_RESTART;
    sigaction(number, &now, nullptr);
  }
}

void Recorder::OnTermination(int number) {
  const int error = errno;
  Recorder* recorder = current.load();
  if (recorder) {
    bool busy = recorder->UnderWay() || recorder->WaitsLong();
    for (int i = 0; i < recorder->place_.local_size && !busy; ++i) {
      busy = recorder->here_.pidfds[i].valid() && recorder->Untold(i);
    }
    if (busy && recorder->watching_ && !recorder->closing_ &&
        !recorder->terminated_.exchange(number)) {
      recorder->Wake();
      errno = error;
      return;
    }
    recorder->mine_->left = 1;
  }
  signal(number, SIG_DFL);
  raise(number);  // delivered when this returns
  errno = error;
}

void Recorder::EndBy(int number) {
  mine_->left = 1;
  signal(number, SIG_DFL);
  kill(getpid(), number);
  for (;;) pause();
}

}  // namespace collective
