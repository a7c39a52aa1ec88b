#include "membership/job.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "membership/exited_ranks.h"
#include "membership/job_memory.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

constexpr int kSpins = 2000;  // about 10 us
// For MPI to know who has died.
constexpr int kListens = 10;
constexpr std::chrono::milliseconds kListen(10);
constexpr size_t kHugePage = size_t{2} << 20;

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

void CheckWish(const char* variable, std::initializer_list<const char*> known) {
  const char* wish = std::getenv(variable);
  if (!wish || !*wish) return;
  std::string all;
  for (const char* one : known) {
    if (std::strcmp(wish, one) == 0) return;
    all += (all.empty() ? "" : " or ") + std::string(one);
  }
  throw Failure(Code::kInvalidArgument,
                std::string(variable) + "=" + wish + " is not known",
                all + "; or leave it out");
}

}  // namespace

Settings Settings::FromEnvironment() {
  CheckWish("COLLECTIVE_SIMD", {"baseline", "avx2", "avx512"});
  CheckWish("COLLECTIVE_STORES", {"ordinary", "streaming"});
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
  const auto ended = one_host ? EndedRanks(place.size) : nullptr;
  if (ended) {
    MeetThoseLeft(Place(place_), ended, settings.start_seconds, nullptr);
    return;
  }
  here_ = Meet(place_, generation, kAreaStride * (1 + kMostAreas),
               settings.start_seconds);
  Open("init");
  if (one_host) return;
  network_ = std::make_unique<Network>(place_, settings.start_seconds);
  hosts_ = network_->Gather(
      *std::min_element(here_.ranks.begin(), here_.ranks.end()));
}

Job::Job(Job& former)
    : place_(former.place_),
      settings_(former.settings_),
      generation_(former.generation_),
      meeting_(former.meeting_ + 1) {
  if (former.network_) {
    MeetAcrossHosts(former);
    return;
  }
  const auto gone = [&](int local_rank) {
    return former.Left(local_rank) || former.Dead(local_rank);
  };
  MeetThoseLeft(former.place_, gone, settings_.give_up_seconds,
                former.door_.get());
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

void Job::MeetThoseLeft(const Place& before,
                        const std::function<bool(int)>& gone, double seconds,
                        Door* door) {
  do {
    here_ = MeetAgain(before, generation_, meeting_,
                      kAreaStride * (1 + kMostAreas), seconds, gone, door);
  } while (!OpenAnew());
}

bool Job::OpenAnew() {
  place_.size = place_.local_size = static_cast<int>(here_.pids.size());
  place_.rank = place_.local_rank = here_.me;
  for (int i = 0; i < place_.size; ++i) here_.ranks[i] = i;
  try {
    Open(meeting_ ? "regroup" : "init");
  } catch (const Failure&) {
    Close();
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
  Close();
}

void Job::Close() {
  munmap(header_, sizeof(Header));
  header_ = nullptr;
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
  return header_->broken.load(std::memory_order_acquire) != 0;  // then `lost`
}

bool Job::Dead(int local_rank) const {
  return local_rank != place_.local_rank && here_.Dead(local_rank);
}

bool Job::Left(int local_rank) const {
  return header_->ranks[local_rank].here.Reached(2);
}

bool Job::lost() const {
  return broken() && header_->lost && (!network_ || network_->survives());
}

void Job::Leave() {
  if (leaving_.exchange(true)) return;
  header_->ranks[place_.local_rank].here.Raise(2);
  if (!broken()) TellOtherHosts({News::kLeft, rank()}, "");
}

void Job::Part() {
  Retire();
  if (network_) network_->Leave(settings_.give_up_seconds);
}

void Job::TellOtherHosts(News news, const char* message) {
  if (!network_) return;
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
  if (network_) {
    network_->GiveUp();
    if (lost()) network_->Revoke();
  }
  for (int i = 0; i < 1000 && header_->broken.load() != 2; ++i) sched_yield();
  const Code code = static_cast<Code>(header_->broken_code.load());
  throw Failure(code == Code::kOk ? Code::kUnavailable : code,
                header_->broken_message);
}

void Job::Break(Code code, const std::string& what, const std::string& hint) {
  TellRecorder(what);  // while every rank still is where it waits
  const Failure failure(code, what, hint);
  // Where someone was first, every rank tells that one's story.
  if (SetBroken(code, failure.what())) {
    TellOtherHosts(
        {News::kBroken, rank(), static_cast<int32_t>(code), header_->lost},
        failure.what());
  }
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
      BreakForDead("rank " + std::to_string(rank) + " (process " +
                   std::to_string(here_.pids[i]) + ")");
    }
  }
  if (network_) CheckOtherHosts(waited_for);
}

void Job::CheckOtherHosts(int waited_for) {
  // Before listening: what a rank sent before it left is taken first.
  if (left_[waited_for]) BreakForLeft(waited_for);
  News news = {};
  while (network_->Hear(&news)) Heard(news);
  if (!network_->survives()) return;
  const bool revoked = network_->Revoked();
  // Where it is, MPI may not know yet by whose death.
  for (int i = 0; i == 0 || (revoked && i < kListens); ++i) {
    for (int rank : network_->Dead()) {
      // Of this host, more is known than by MPI; who has left may end.
      if (host_of(rank) == host_of(this->rank()) || left_[rank]) continue;
      BreakForDead("rank " + std::to_string(rank));
    }
    if (revoked) std::this_thread::sleep_for(kListen);
  }
  if (revoked) BreakForDead("a rank");
}

void Job::Heard(const News& news) {
  if (news.what == News::kLeft) {
    left_[news.rank] = true;
  } else if (news.what == News::kBroken) {
    TellRecorder(news.message);
    if (news.lost) header_->lost = true;
    SetBroken(static_cast<Code>(news.code), news.message);
    ThrowBroken();
  } else {
    std::lock_guard<std::mutex> lock(waiting_mutex_);
    for (auto one = waits_elsewhere_.begin(); one != waits_elsewhere_.end();) {
      one = Begun(one->second) ? waits_elsewhere_.erase(one) : std::next(one);
    }
    waits_elsewhere_.emplace(std::pair(news.rank, news.since), news);
  }
}

void Job::BreakForDead(const std::string& who) {
  header_->lost = true;
  Break(Code::kUnavailable, who + " died",
        "look for its own error message; \"Killed\" without one is most often "
        "lack of memory (dmesg | tail)");
}

void Job::BreakForLeft(int rank) {
  if (!network_) header_->lost = true;  // across hosts, nobody goes on without
  Break(Code::kUnavailable,
        "rank " + std::to_string(rank) +
            " has shut down while others still wait for it",
        "let every rank make the same calls before shutdown()");
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

}  // namespace collective
