#include "job.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "recorder.h"

namespace collective {
namespace {

constexpr int kSpins = 2000;   // about 10 us
constexpr int kYields = 1000;  // about 100 us
constexpr int64_t kYieldNanoseconds = 300'000;
constexpr long kNapNanoseconds = 100'000'000;
constexpr long kShortNapNanoseconds = 200'000;  // while messages are under way
constexpr int kMostRanks = 128;
// After which ranks that wait for each other are looked at. Longer than needed:
// a thread of a rank that has not yet asked for anything could still come.
constexpr double kCircleSeconds = 5;
constexpr size_t kHugePage = size_t{2} << 20;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double SecondsFrom(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end || !(seconds > 0)) {
    throw Failure(Code::kInvalidArgument,
                  std::string(variable) + "=" + text + " is no time",
                  "give seconds, as in " + std::string(variable) + "=90");
  }
  return seconds;
}

}  // namespace

// What a thread of a rank waits for, as told to the others.
struct Job::Waiting {
  std::atomic<int32_t> rank;    // plus 1; 0: free, -1: being written
  std::atomic<int64_t> since;   // nanoseconds
  std::atomic<int64_t> looked;  // when it last saw that it must wait on
  std::atomic<bool> caller;     // whether it asked for the collective itself
  char doing[256];
};

struct alignas(128) Job::RankState {
  static constexpr int kThreads = 4;  // that wait at once; more are not told
  Word here;                          // 1: attached, 2: left
  cpu_set_t cores;
  std::atomic<bool> several;  // threads asked for collectives
  Waiting waiting[kThreads];

  bool Waits() const {
    for (const Waiting& one : waiting) {
      if (one.rank.load() > 0) return true;
    }
    return false;
  }
};

struct Job::Header {
  // Whether the job has come about: all decide it together, by the first word.
  std::atomic<uint32_t> formed;
  static constexpr uint32_t kFormed = 1, kNever = 2;
  std::atomic<bool> lost;        // someone died or left
  std::atomic<uint32_t> broken;  // 1: being written, 2: can be read
  std::atomic<int32_t> broken_code;
  char broken_message[2048];
  Flag ping, pong;
  RankState ranks[kMostRanks];
};

Settings Settings::FromEnvironment() {
  Settings settings;
  settings.start_seconds =
      SecondsFrom("COLLECTIVE_START_TIMEOUT", settings.start_seconds);
  settings.stall_seconds =
      SecondsFrom("COLLECTIVE_STALL_SECONDS", settings.stall_seconds);
  settings.give_up_seconds =
      SecondsFrom("COLLECTIVE_TIMEOUT", settings.give_up_seconds);
  return settings;
}

Job::Job(const Place& place, const Settings& settings, int generation)
    : place_(place),
      settings_(settings),
      generation_(generation),
      hosts_(place.size, 0),
      left_(place.size) {
  const bool one_host = place.size == place.local_size;
  if (one_host) place_.local_rank = place.rank;  // the same numbers for both
  here_ = Meet(place_, generation, kAreaStride * (1 + kMostAreas),
               settings.start_seconds);
  Open("init");
  if (one_host) return;
  network_ = std::make_unique<Network>(place_);
  hosts_ = network_->Gather(
      *std::min_element(here_.ranks.begin(), here_.ranks.end()));
}

Job::Job(Job& former)
    : place_(former.place_),
      settings_(former.settings_),
      generation_(former.generation_),
      meeting_(former.meeting_ + 1) {
  const auto gone = [&](int local_rank) {
    return former.Left(local_rank) || former.Dead(local_rank);
  };
  do {
    here_ = MeetAgain(former.place_, generation_, meeting_,
                      kAreaStride * (1 + kMostAreas), settings_.give_up_seconds,
                      gone, former.door_.get());
  } while (!OpenAnew());
  if (rank() == 0) door_ = std::move(former.door_);
}

Job::Job(const Job& alone, Later)
    : place_(alone.place_), settings_(alone.settings_) {
  do {
    here_ = Knock(place_.job);
    generation_ = here_.generation;
    meeting_ = here_.meeting;
  } while (!OpenAnew());
}

bool Job::OpenAnew() {
  place_.size = place_.local_size = static_cast<int>(here_.pids.size());
  place_.rank = place_.local_rank = here_.me;
  for (int i = 0; i < place_.size; ++i) here_.ranks[i] = i;
  try {
    Open("regroup");
  } catch (const Failure&) {
    munmap(header_, sizeof(Header));
    for (int i = 0; i < place_.size; ++i) {
      if (Dead(i)) return false;
    }
    throw;
  }
  hosts_.assign(place_.size, 0);
  left_ = std::vector<std::atomic<bool>>(place_.size);
  return true;
}

int Job::AtDoor() {
  if (rank() != 0 || network_) return 0;
  if (!door_) {
    try {
      door_ = std::make_unique<Door>(place_);
    } catch (const Failure&) {
      return 0;  // of a rank 0 that is going just now: tried again
    }
  }
  return door_->Waiting();
}

void Job::Open(const char* doing) {
  void* memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE,
                      MAP_SHARED, here_.memory.get(), 0);
  if (memory == MAP_FAILED) {
    throw Failure(Code::kInternal,
                  "rank " + std::to_string(place_.rank) +
                      ": mmap: " + std::strerror(errno),
                  kOutOfMemoryHint);
  }
  header_ = static_cast<Header*>(memory);
  RankState& mine = header_->ranks[place_.local_rank];
  sched_getaffinity(0, sizeof(mine.cores), &mine.cores);
  mine.here.Raise(1);
  Request meeting;
  meeting.name = doing;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  uint32_t formed = 0;
  try {
    for (int i = 0; i < place_.local_size; ++i) {
      Await(header_->ranks[i].here, 1, here_.ranks[i], meeting);
      CPU_OR(&cores, &cores, &header_->ranks[i].cores);
    }
  } catch (const Failure&) {
    // Where another rank has seen them all, the job has come about before it
    // broke.
    header_->formed.compare_exchange_strong(formed, Header::kNever);
    if (formed != Header::kFormed) throw;
  }
  formed = 0;
  header_->formed.compare_exchange_strong(formed, Header::kFormed);
  if (formed == Header::kNever) ThrowBroken();
  spins_ = place_.local_size <= CPU_COUNT(&cores) ? kSpins : 0;
}

Job::~Job() {
  for (int i = 0; i < kMostAreas; ++i) {
    if (areas_[i]) munmap(areas_[i], area_bytes_[i]);
  }
  Leave();
  munmap(header_, sizeof(Header));
}

char* Job::MapArea(int index, size_t bytes) {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (index >= kMostAreas || bytes > kAreaStride) {
    throw Failure(Code::kInvalidArgument, "too many process sets",
                  "at most " + std::to_string(kMostAreas / 2 - 1) +
                      " can be made in one job: keep them, do not make one a "
                      "step");
  }
  // Twice the place, to put the mapping on a boundary of huge pages.
  void* place = mmap(nullptr, bytes + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* memory = MAP_FAILED;
  if (place != MAP_FAILED) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(place);
    const uintptr_t aligned = (start + kHugePage - 1) & ~(kHugePage - 1);
    memory =
        mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, here_.memory.get(),
             static_cast<off_t>(kAreaStride * (1 + index)));
    if (aligned > start) munmap(place, aligned - start);
    const uintptr_t tail = start + kHugePage - aligned;
    if (tail) munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  if (memory == MAP_FAILED) {
    throw Failure(Code::kInternal,
                  "rank " + std::to_string(place_.rank) +
                      ": mmap: " + std::strerror(errno),
                  kOutOfMemoryHint);
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // where the kernel allows it
  areas_[index] = static_cast<char*>(memory);
  area_bytes_[index] = bytes;
  return areas_[index];
}

bool Job::broken() const {
  return header_->broken.load(std::memory_order_relaxed) != 0;
}

bool Job::Dead(int local_rank) const {
  return local_rank != place_.local_rank && here_.Dead(local_rank);
}

bool Job::Left(int local_rank) const {
  return header_->ranks[local_rank].here.Reached(2);
}

bool Job::lost() const { return broken() && header_->lost && !network_; }

void Job::Leave() {
  if (leaving_.exchange(true)) return;
  header_->ranks[place_.local_rank].here.Raise(2);
  if (!broken()) TellOtherHosts(Code::kOk, "");
}

void Job::TellOtherHosts(Code code, const char* message) {
  if (!network_) return;
  News news;
  news.rank = rank();
  news.code = static_cast<int32_t>(code);
  std::snprintf(news.message, sizeof(news.message), "%s", message);
  std::vector<int> others;
  for (int other = 0; other < size(); ++other) {
    if (host_of(other) != host_of(rank())) others.push_back(other);
  }
  network_->Tell(others, news);
}

bool Job::SetBroken(Code code, const char* message) {
  uint32_t whole = 0;
  if (!header_->broken.compare_exchange_strong(whole, 1)) return false;
  std::snprintf(header_->broken_message, sizeof(header_->broken_message), "%s",
                message);
  header_->broken_code = static_cast<int32_t>(code);
  header_->broken = 2;
  return true;
}

void Job::ThrowBroken() {
  if (network_) network_->GiveUp();
  for (int i = 0; i < 1000 && header_->broken.load() != 2; ++i) sched_yield();
  const Code code = static_cast<Code>(header_->broken_code.load());
  throw Failure(code == Code::kOk ? Code::kUnavailable : code,
                header_->broken_message);
}

void Job::Break(Code code, const std::string& what, const std::string& hint) {
  TellRecorder(what);  // while every rank still is where it waits
  const Failure failure(code, what, hint);
  // Where someone was first, every rank tells that one's story.
  if (SetBroken(code, failure.what())) TellOtherHosts(code, failure.what());
  ThrowBroken();
}

void Job::Check(int waited_for) {
  if (broken()) ThrowBroken();
  if (leaving_) {
    throw Failure(Code::kUnavailable, "shut down while a collective ran",
                  "wait for every handle before shutdown()");
  }
  for (int i = 0; i < place_.local_size; ++i) {
    // A rank that said goodbye may end; that matters to who waits for it only.
    const int rank = here_.ranks[i];
    const bool left = Left(i);
    if (left && rank == waited_for) BreakForLeft(rank);
    if (!left && Dead(i) && !Left(i)) {
      header_->lost = true;
      Break(Code::kUnavailable,
            "rank " + std::to_string(rank) + " (process " +
                std::to_string(here_.pids[i]) + ") died",
            "look for its own error message; \"Killed\" without one is most "
            "often lack of memory (dmesg | tail)");
    }
  }
  if (network_) CheckOtherHosts(waited_for);
}

void Job::CheckOtherHosts(int waited_for) {
  // Before listening: what a rank sent before it left is taken first.
  if (left_[waited_for]) BreakForLeft(waited_for);
  News news;
  while (network_->Hear(&news)) {
    if (news.code == 0) {
      left_[news.rank] = true;
    } else {
      TellRecorder(news.message);
      SetBroken(static_cast<Code>(news.code), news.message);
      ThrowBroken();
    }
  }
}

void Job::BreakForLeft(int rank) {
  header_->lost = true;
  Break(Code::kUnavailable,
        "rank " + std::to_string(rank) +
            " has shut down while others still wait for it",
        "let every rank make the same calls before shutdown()");
}

void Job::Served() {
  served_.fetch_add(1);
  served_at_ = Now();
}

void Job::Called() {
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id first = caller_.load(std::memory_order_relaxed);
  if (first == me) return;
  if (first == std::thread::id() &&
      caller_.compare_exchange_strong(first, me)) {
    return;
  }
  header_->ranks[place_.local_rank].several = true;
}

bool Job::InCircle() const {
  if (network_) return false;  // the ranks of other hosts are not seen here
  const int64_t now = Now();
  int rank = place_.rank;
  for (int i = 0; i < size(); ++i) {
    const RankState& state = header_->ranks[rank];
    int32_t waited_for = 0;
    for (const Waiting& one : state.waiting) {
      const int32_t other = one.rank.load();
      if (other == 0) continue;
      if (other < 0 || waited_for || !one.caller) return false;
      waited_for = other;
      // Looked in vain after the other one had come to rest: what it did before
      // would have been seen. (A rank that was stopped looks too long ago.)
      const int64_t looked = one.looked.load();
      const int64_t rest = static_cast<int64_t>(
          std::min(kCircleSeconds, settings_.stall_seconds) * 1e9);
      if (looked - one.since < rest || now - looked > rest / 2) return false;
    }
    if (!waited_for || state.several) return false;
    rank = waited_for - 1;
    if (rank == place_.rank) return true;
  }
  return false;
}

std::string Job::WhoWaits() const {
  // Other ranks write theirs meanwhile: a line may be torn, no more.
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  std::string table;
  const int64_t now = Now();
  for (int i = 0; i < place_.local_size; ++i) {
    const std::string who = "  rank " + std::to_string(here_.ranks[i]);
    bool waits = false;
    for (const Waiting& one : header_->ranks[i].waiting) {
      const int other = one.rank.load();
      if (other <= 0) continue;
      waits = true;
      table +=
          who + " waits for rank " + std::to_string(other - 1) + " since " +
          std::to_string((now - one.since) / 1'000'000'000) + " s in " +
          std::string(one.doing, strnlen(one.doing, sizeof(one.doing))) + "\n";
    }
    if (!waits) table += who + " is not in a collective\n";
  }
  return table;
}

Job::Waiting* Job::Tell(int rank, int64_t since, const Request& doing) {
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  for (Waiting& one : header_->ranks[place_.local_rank].waiting) {
    if (one.rank.load() != 0) continue;
    one.rank = -1;
    one.since = since;
    one.looked = since;
    one.caller = std::this_thread::get_id() == caller_.load();
    std::snprintf(one.doing, sizeof(one.doing), "%s", doing.Describe().c_str());
    one.rank = rank + 1;
    return &one;
  }
  return nullptr;
}

void Job::PingPong(double* nanoseconds) {
  constexpr int kBatches = 12, kRounds = 100;
  if (rank() > 1 || host_of(0) != host_of(1)) return;
  Request request;
  request.name = "probe";
  Word& mine = rank() == 0 ? header_->ping : header_->pong;
  Word& theirs = rank() == 0 ? header_->pong : header_->ping;
  uint32_t count = mine.value.load();
  double best = 1e9;
  for (int batch = 0; batch < kBatches; ++batch) {
    const int64_t start = Now();
    for (int round = 0; round < kRounds; ++round) {
      ++count;
      if (rank() == 0) mine.value.store(count, std::memory_order_release);
      for (int i = 0; !theirs.Reached(count); ++i) {
        if (i > 20000) {
          sched_yield();
          if (i % 1000 == 0) Check(1 - rank());
        }
      }
      if (rank() == 1) mine.value.store(count, std::memory_order_release);
    }
    best = std::min(best, static_cast<double>(Now() - start) / (2 * kRounds));
  }
  *nanoseconds = best;
}

void Job::AwaitLong(Word& word, uint32_t target, int rank,
                    const Request& doing) {
  for (int i = 0; i < spins_; ++i) {
    if (word.Reached(target)) return;
    Pause();
  }
  int64_t start = 0;
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (word.Reached(target)) return;
    if (network_ && network_->pending()) network_->Progress();
    if (i % 16 != 15) continue;  // reading the clock takes as long as yielding
    if (start == 0) start = Now();
    if (Now() - start > kYieldNanoseconds) break;
  }

  struct Sleeper {
    Word& word;
    explicit Sleeper(Word& word) : word(word) { word.sleepers.fetch_add(1); }
    ~Sleeper() { word.sleepers.fetch_sub(1); }
  } sleeper(word);
  LongWait wait(this, rank, doing);
  while (!word.Reached(target)) {
    const uint32_t seen = word.value.load();
    if (static_cast<int32_t>(seen - target) >= 0) return;
    if (network_ && network_->pending()) {
      word.Sleep(seen, kShortNapNanoseconds);
      network_->Progress();
    } else {
      word.Sleep(seen, kNapNanoseconds);
    }
    if (word.Reached(target)) return;
    wait.Look();
  }
}

Job::LongWait::LongWait(Job* job, int rank, const Request& doing)
    : job_(job),
      rank_(rank),
      doing_(doing),
      start_(Now()),
      looked_(start_),
      waiting_(job->Tell(rank, start_, doing)) {}

Job::LongWait::~LongWait() {
  if (waiting_) waiting_->rank = 0;
}

void Job::LongWait::Look() {
  const int64_t now = Now();
  if (now - looked_ < kNapNanoseconds * 9 / 10) return;
  looked_ = now;
  if (waiting_) waiting_->looked = now;
  job_->Check(rank_);
  // Who has joined waits in one order while the others call in the other.
  const int64_t since = std::max(start_, job_->served_at_.load());
  const double waited = static_cast<double>(now - since) * 1e-9;
  const Settings& settings = job_->settings();
  const int me = job_->rank();
  if (waited > settings.give_up_seconds) {
    job_->Break(Code::kDeadlineExceeded,
                "rank " + std::to_string(me) + " waited " +
                    std::to_string(static_cast<int64_t>(waited)) +
                    " s for rank " + std::to_string(rank_) + " in " +
                    doing_.Describe() + "\n" + job_->WhoWaits(),
                "a rank that is only slow is given more time by "
                "COLLECTIVE_TIMEOUT=seconds");
  }
  if (job_->InCircle()) {
    job_->Break(Code::kFailedPrecondition,
                "ranks wait for each other in different collectives:\n" +
                    job_->WhoWaits(),
                "make the same calls, in the same order and with the same "
                "process set, on every rank");
  }
  if (!told_ && waited > settings.stall_seconds) {
    told_ = true;
    int first = 0;  // of those of this host that wait, one speaks
    const int mine = job_->place_.local_rank;
    while (first < mine && !job_->header_->ranks[first].Waits()) ++first;
    if (first == mine) {
      std::fprintf(stderr,
                   "collective: no progress for %.0f s:\n%sHINT: every rank "
                   "must make the same calls; COLLECTIVE_TIMEOUT=seconds "
                   "ends the job sooner\n",
                   waited, job_->WhoWaits().c_str());
      TellRecorder("no progress for " +
                   std::to_string(static_cast<int64_t>(waited)) + " s");
    }
  }
}

}  // namespace collective
