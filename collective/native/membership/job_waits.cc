// How a rank waits for another, and what it does when that takes long.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

#include "membership/job.h"
#include "membership/job_memory.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

constexpr int kLooks = 60;     // 1 to 2 us
constexpr int kYields = 1000;  // about 100 us
constexpr int64_t kYieldNanoseconds = 300'000;
constexpr long kNapNanoseconds = 100'000'000;
constexpr long kShortNapNanoseconds = 200'000;  // while messages are under way

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Job::OnThisCore() {
  const int core = sched_getcpu();
  RankState& mine = header_->ranks[place_.local_rank];
  if (mine.core.load(std::memory_order_relaxed) != core) {
    mine.core.store(core, std::memory_order_relaxed);
  }
}

bool Job::Elsewhere(int rank) const {
  const auto local = std::find(here_.ranks.begin(), here_.ranks.end(), rank) -
                     here_.ranks.begin();
  const int mine = header_->ranks[place_.local_rank].core;
  return header_->ranks[local].core.load(std::memory_order_relaxed) != mine;
}

void Job::Look(const Word& word, uint32_t target) {
  for (int i = 0; i < kLooks && !word.Reached(target); ++i) Pause();
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
      quiet_since_(start_),
      submitted_(job->submitted_),
      waiting_(job->Tell(rank, start_, doing)) {}

Job::LongWait::~LongWait() {
  if (waiting_) waiting_->rank = 0;
}

void Job::LongWait::Look() {
  const int64_t now = Now();
  if (now - looked_ < kNapNanoseconds * 9 / 10) return;
  // Stopped since it looked, it has to look again first.
  if (waiting_ && now - looked_ < kStopped) waiting_->looked = now;
  looked_ = now;
  if (job_->blocked_) job_->Hold(true);
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
  if (job_->InCircle()) job_->BreakForCircle(job_->WhoWaits());
  if (const uint32_t submitted = job_->submitted_; submitted != submitted_) {
    submitted_ = submitted;
    quiet_since_ = now;
  }
  if (job_->network_ && now - start_ > job_->Patience()) LookElsewhere(now);
  if (now - quiet_since_ > job_->Patience()) {
    const std::string who = job_->WaitsInVain(doing_.plan);
    if (!who.empty()) {
      job_->Break(Code::kFailedPrecondition,
                  "ranks do not agree on a collective: " + who + "rank " +
                      std::to_string(me) + " has traced the same function, " +
                      "with no such collective in that process set, and is " +
                      "in " + doing_.Describe() + "\n" + job_->WhoWaits(),
                  "make the same calls, with the same process set, on every "
                  "rank, also within a tf.function");
    }
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

void Job::Working(int more) {
  RankState& state = header_->ranks[place_.local_rank];
  state.changed = Now();
  state.queues += more;
}

void Job::Held(bool waits) {
  if (CalledHere()) Hold(waits);
}

void Job::Blocked(bool blocked) {
  blocked_ = blocked;
  Hold(blocked);
}

void Job::Hold(bool waits) {
  RankState& state = header_->ranks[place_.local_rank];
  const int64_t now = Now();
  const bool begins = state.held == 0 || now - state.held_looked > kStopped;
  if (!waits || begins) state.held = waits ? now : 0;
  state.held_looked = now;
}

std::string Job::DoingOf(const Waiting& one) {
  return std::string(one.doing, strnlen(one.doing, sizeof(one.doing)));
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
      table += who + " waits for rank " + std::to_string(other - 1) +
               " since " + std::to_string((now - one.since) / 1'000'000'000) +
               " s in " + DoingOf(one) + "\n";
    }
    if (!waits) table += who + " is not in a collective\n";
  }
  for (const auto& [wait, news] : waits_elsewhere_) {
    const bool here = host_of(news.rank) == host_of(rank());
    if (news.passed_on == 0 && !here && !Begun(news)) {
      table += std::string("  ") + news.message + ", on another host\n";
    }
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
    one.function = doing.plan.function;
    one.name = std::hash<std::string>()(doing.name);
    one.group = doing.plan.group;
    one.caller = std::this_thread::get_id() == caller_.load();
    std::snprintf(one.doing, sizeof(one.doing), "%s", doing.Describe().c_str());
    one.rank = rank + 1;
    return &one;
  }
  return nullptr;
}

}  // namespace collective
