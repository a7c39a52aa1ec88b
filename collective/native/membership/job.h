// The ranks of a job: the shared memory of those on this host, who is alive,
// and waiting for them.
//
// A wait first spins (only where every rank has a core of its own), then
// yields, then sleeps, so that a rank that waits long leaves its core to
// TensorFlow. A sleeping rank looks up ten times a second: a peer that died or
// left, a job that another rank gave up, and a deadline all end the wait with a
// Failure. Of a death on another host, the ranks there tell.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_JOB_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_JOB_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "failure.h"
#include "kernels/types.h"
#include "membership/futex_word.h"
#include "membership/rank_info.h"
#include "membership/rendezvous.h"
#include "transport/messages.h"

namespace collective {

struct Settings {
  double start_seconds = 60;     // COLLECTIVE_START_TIMEOUT
  double stall_seconds = 60;     // COLLECTIVE_STALL_SECONDS: tell who waits
  double give_up_seconds = 600;  // COLLECTIVE_TIMEOUT: end the job
  static Settings FromEnvironment();
};

class Job {
  struct Waiting;

 public:
  // Meets the other ranks. `generation` counts the jobs of this process. Where
  // the launcher tells who has ended, the job is of the others, numbered anew.
  Job(const Place& place, const Settings& settings, int generation);
  // Meets those that are left of a broken job, numbered anew in their old
  // order. All of them come here, or die: whoever dies meanwhile is left out.
  // Either each of them is in the new job, or none is. Those who wait at the
  // door come in, behind the others.
  explicit Job(Job& former);
  // Comes later: leaves a job of its own for the one of that name.
  struct Later {};
  Job(const Job& alone, Later);
  ~Job();

  // Null on one host.
  Network* network() { return network_.get(); }

  const Place& place() const { return place_; }
  const Settings& settings() const { return settings_; }
  int size() const { return place_.size; }
  int rank() const { return place_.rank; }
  // The first rank on a rank's host: the same for two ranks where they share
  // memory.
  int host_of(int rank) const { return hosts_[rank]; }

  // The shared memory of one communicator on this host, zeroed when first
  // mapped by any. Mapped until the job ends. `index` < kMostAreas.
  char* MapArea(int index, size_t bytes);
  static constexpr int kMostAreas = 128;
  static constexpr size_t kAreaStride = size_t{1} << 36;  // virtual: a hole
  // The ranks of this host; from kRecorderAt on, their memory is the flight
  // recorder's.
  const Gathering& here() const { return here_; }
  static constexpr size_t kRecorderAt = kAreaStride / 2;

  // Returns when word >= target. `rank`, on this host, is who is to raise it,
  // `doing` what for.
  void Await(Word& word, uint32_t target, int rank, const Request& doing) {
    if (!word.Reached(target)) AwaitLong(word, target, rank, doing);
  }

  // Where ranks share cores: this one is about to post, from this core.
  void OnThisCore();
  // Whether a rank of this host last posted from another core: then it may be
  // at it now, without this one handing its core over.
  bool Elsewhere(int rank) const;
  // Waits until word >= target, no longer than it takes to hand a core over.
  static void Look(const Word& word, uint32_t target);

  // What a wait for a rank does once it has become long: tells the others of
  // this host about it, and sees that it ends.
  class LongWait {
   public:
    LongWait(Job* job, int rank, const Request& doing);
    ~LongWait();
    LongWait(const LongWait&) = delete;
    // About ten times a second. Throws where the job cannot go on.
    void Look();

   private:
    // Of whom the ranks of other hosts wait for.
    void LookElsewhere(int64_t now);

    Job* job_;
    const int rank_;
    const Request& doing_;
    const int64_t start_;
    int64_t looked_;
    int64_t quiet_since_;
    uint32_t submitted_;
    Waiting* waiting_;
    bool told_ = false, told_elsewhere_ = false;
    std::set<std::pair<int, int64_t>> passed_on_;  // of Job::waits_elsewhere_
  };

  // This thread asks for a collective. While only one thread of a process ever
  // does, nothing more comes from it while that one waits.
  void Called();
  // It takes part in the next collective of this area of the shared memory; or
  // waits for that to be announced.
  void Begins(int area);
  void AwaitsNext(int area);
  // One more was submitted.
  void Submitted() { submitted_.fetch_add(1, std::memory_order_relaxed); }
  // A queue has (1) or has no more (-1) collectives that were submitted.
  void Working(int more);
  // This thread still waits for what was submitted, or no more.
  void Held(bool waits);
  // Whether this is the one thread that has asked so far, or the first of them.
  bool CalledHere() const { return std::this_thread::get_id() == caller_; }
  // That thread is blocked where it cannot look itself, or no more.
  void Blocked(bool blocked);

  // Throws where the job cannot go on: someone died, left or gave up.
  void Check(int waited_for);
  bool broken() const;
  // Whether it is broken because ranks died or left, and a new one can be made
  // of the others.
  bool lost() const;
  // On rank 0: how many processes wait to come in. Opens the door to them.
  int AtDoor();
  int generation() const { return generation_; }
  // By rank: what number it had in the job before; -1: it was not there.
  const std::vector<int>& former() const {
    return former_.empty() ? here_.former : former_;
  }
  // This rank waits no more in this job, but does not leave the others.
  void Retire() { leaving_ = true; }
  // Nor shall the others wait for it, who meet anew meanwhile: on several
  // hosts.
  void Part();

  // Says that this rank makes no more calls; its own waits end.
  void Leave();

  // One line a rank: whom it waits for, since when and in what.
  std::string WhoWaits() const;

  // This rank, which has joined, took part in a collective of the others.
  void Served();
  int64_t served() const { return served_; }

  // Ends the job for every rank: their waits throw this failure.
  [[noreturn]] void Break(Code code, const std::string& what,
                          const std::string& hint);

  // One-way nanoseconds of a cache line between ranks 0 and 1, which must both
  // call it at about the same time; the others return at once.
  void PingPong(double* nanoseconds);

  // Whether there are fewer cores than ranks; the same on all of a host.
  bool shared_cores() const { return spins_ == 0; }

 private:
  struct RankState;
  struct Header;
  void AwaitLong(Word& word, uint32_t target, int rank, const Request& doing);
  // Maps the memory, and returns when all ranks of this host have.
  void Open(const char* doing);
  void Close();
  // Those of one host that are not gone, which is told by number, and those at
  // the door of the one that listens.
  void MeetThoseLeft(const Place& before, const std::function<bool(int)>& gone,
                     double seconds, Door* door);
  // Opens for those met anew. False where one of them has died meanwhile.
  bool OpenAnew();
  // Those that are left of a job on several hosts (job_multi_host.cc).
  void MeetAcrossHosts(const Job& former);
  void TakePlaces(const Job& former);
  bool MeetHere(const Job& former, std::string* why);
  bool Dead(int local_rank) const;
  bool Left(int local_rank) const;
  void CheckOtherHosts(int waited_for);
  [[noreturn]] void BreakForDead(const std::string& who);
  [[noreturn]] void BreakForLeft(int rank);
  // `who` waits for whom, a line each.
  [[noreturn]] void BreakForCircle(const std::string& who);
  void TellOtherHosts(News news, const char* message);
  void Heard(const News& news);
  // False where another rank was first.
  bool SetBroken(Code code, const char* message);
  static std::string DoingOf(const Waiting& one);
  static std::string Line(int rank, int other, const std::string& doing);
  Waiting* Tell(int rank, int64_t since, const Request& doing);
  void Hold(bool waits);
  // Nanoseconds after which a wait may be thought to have no end.
  int64_t Patience() const;
  // Whether the collective that is waited for has begun here.
  bool Begun(const News& wait) const;
  // Whether ranks wait for each other in a circle that nothing can open.
  bool InCircle() const;
  // Who waits for this rank in a process set in which the function that this
  // one runs, traced as `mine`, does not have that collective; or nothing.
  std::string WaitsInVain(const Plan& mine) const;
  // Whether a rank can do nothing before one comes that it waits for.
  bool AtRest(int rank, int64_t now, std::vector<int>* waits_for) const;
  [[noreturn]] void ThrowBroken();

  Place place_;
  Settings settings_;
  int generation_;
  int meeting_ = 0;  // how many jobs there were before
  std::unique_ptr<Door> door_;
  std::unique_ptr<Network> network_;
  std::vector<int> former_;              // by rank, across hosts
  Gathering here_;                       // the ranks of this host
  std::vector<int> hosts_;               // by rank
  std::vector<std::atomic<bool>> left_;  // by rank: those of other hosts
  // In a job on several hosts, by rank and since when: who waits long for this
  // rank, or for one that does.
  std::map<std::pair<int, int64_t>, News> waits_elsewhere_;
  std::atomic<uint32_t> begun_[kMostAreas] = {};  // collectives, by area
  Header* header_ = nullptr;
  char* areas_[kMostAreas] = {};
  size_t area_bytes_[kMostAreas] = {};
  int spins_ = 0;
  std::atomic<bool> leaving_{false};
  std::atomic<uint32_t> submitted_{0};
  std::atomic<bool> blocked_{false};
  std::atomic<int64_t> served_{0}, served_at_{0};  // a number, and when
  std::atomic<std::thread::id> caller_{};          // the first
  mutable std::mutex waiting_mutex_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_JOB_H_
