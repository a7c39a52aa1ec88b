// The ranks of a job: their shared memory on this host, which of them are alive,
// and the waits between them.
//
// A wait first spins (only if every rank has a core of its own), then yields,
// then sleeps, so that a rank that waits long leaves its core to TensorFlow. A
// sleeping rank polls ten times a second: a peer that died or left, a job that
// another rank has broken, a deadlock and a deadline all end the wait with a
// Failure. The ranks of another host report their dead by control messages.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <limits>
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
#include "network/network.h"
#include "rendezvous/launcher_files.h"
#include "rendezvous/rank_info.h"
#include "rendezvous/rendezvous.h"

namespace collective {

struct Settings {
  double start_seconds = 60;     // COLLECTIVE_START_TIMEOUT
  double stall_seconds = 60;     // COLLECTIVE_STALL_SECONDS: report the waits
  double timeout_seconds = 600;  // COLLECTIVE_TIMEOUT: break the job
  // COLLECTIVE_RANK_TIMEOUT: kills a rank that lets others wait so long.
  double rank_timeout_seconds = std::numeric_limits<double>::infinity();
  // Throws kInvalidArgument for a variable that has no valid value.
  static Settings FromEnvironment();
};

class Job {
  struct WaitRecord;

 public:
  // The first rendezvous. `generation` counts the jobs of this process. If the
  // launcher reports exited ranks, the job forms without them, renumbered.
  // `start`: connects the hosts if there are several.
  Job(const RankInfo& info, const Settings& settings, int generation,
      const StartNetwork& start = Network::Start);
  // Reconfigures: forms a job of the survivors of a broken one, renumbered in
  // their old order, followed by the processes that wait to join, if the first
  // survivor `admits` them. Every survivor must call this; one that dies during the
  // call is left out. Either all ranks of the new job get it, or none.
  Job(Job& former, bool admits);
  // Leaves a job of one rank and joins the running job of the same name.
  struct LateJoin {};
  Job(const Job& single, LateJoin);
  ~Job();

  // ---- membership ----------------------------------------------------------

  const RankInfo& rank_info() const { return info_; }
  const Settings& settings() const { return settings_; }
  int size() const { return info_.size; }
  int rank() const { return info_.rank; }
  int generation() const { return generation_; }
  // The lowest rank on a rank's host: equal for two ranks that share memory.
  int host_of(int rank) const { return hosts_[rank]; }
  // The ranks of this host.
  const Rendezvous& local() const { return local_; }
  // By rank: its number in the job before; kNewcomer: it had none.
  const std::vector<int>& previous_ranks() const { return previous_ranks_; }
  // Null on one host.
  Network* network() { return network_.get(); }
  // Whether a host has fewer cores than ranks; the same on all ranks of a host.
  bool shared_cores() const { return spins_ == 0; }

  // ---- shared memory -------------------------------------------------------

  static constexpr int kMaxAreas = 128;                   // two for each group (core.h)
  static constexpr size_t kAreaStride = size_t{1} << 36;  // virtual, a hole
  // From this offset on, the memory of local() is the flight recorder's.
  static constexpr size_t kRecorderAt = kAreaStride / 2;
  // The shared memory of one communicator on this host, zeroed at its first
  // mapping by any rank. Mapped until the job ends. `index` < kMaxAreas; `bytes`:
  // at most kAreaStride, of which kMaxRanks need a quarter.
  char* MapArea(int index, size_t bytes);

  // ---- waits ---------------------------------------------------------------

  // Returns when word >= target. `rank`, on this host, raises it; `request` is
  // the collective that needs it.
  void Await(FutexWord& word, uint32_t target, int rank, const Request& request) {
    if (!word.Reached(target)) AwaitSlowPath(word, target, rank, request);
  }

  // If ranks share cores: notes the core from which this rank is about to post.
  void RecordCore();
  // Whether a rank of this host last posted from another core. If so, it may be
  // running, and this rank does not have to yield for it.
  bool RunsOnOtherCore(int rank) const;
  // Spins until word >= target, for at most the time of yielding a core.
  static void SpinBriefly(const FutexWord& word, uint32_t target);

  // A wait that has become long: published to the other ranks, and ended if the
  // job cannot continue.
  class LongWait {
   public:
    LongWait(Job* job, int rank, const Request& request);
    ~LongWait();
    LongWait(const LongWait&) = delete;
    // Must be called about ten times a second. Throws if the job cannot continue.
    void Poll();

   private:
    void EndStuckRank(double waited);
    void CheckDeadline(double waited);
    void CheckUnmatched();
    void ReportStall(double waited);
    // Deadlock detection across hosts (deadlock_detection.cc).
    void ReportToOtherHosts(int64_t now);

    Job* job_;
    const int rank_;
    const Request& request_;
    const ReportedWait reported_wait_;
    const int64_t start_;
    int64_t polled_;
    int64_t stopped_ = 0;  // time of this wait in which this process did not run
    int64_t quiet_since_;
    uint32_t submitted_;
    bool left_ = false;  // at the last poll, the awaited rank had left
    WaitRecord* record_;
    bool reported_ = false, reported_to_hosts_ = false;
    std::set<std::pair<int, int64_t>> forwarded_;  // those of Job::remote_waits_
  };

  // One line for each rank: the awaited rank, since when, and the collective.
  std::string DescribeWaits() const;

  // ---- reports of the queues, for deadlock detection ----------------------

  // Notes that this thread calls a collective. If one thread of a process makes
  // all calls, the process cannot make another call while that thread waits.
  void NoteCaller();
  // Whether this is that thread, or the first of several.
  bool IsCaller() const { return std::this_thread::get_id() == caller_; }
  // Notes that this thread takes part in the next collective of this area, or
  // waits for the announcement of that collective.
  void NoteBegin(int area);
  void NoteAwaitNext(int area);
  // Counts one more submitted collective.
  void CountSubmission() { submitted_.fetch_add(1, std::memory_order_relaxed); }
  // Counts the queues with submitted collectives: one more (1) or fewer (-1).
  void CountBusyQueues(int change);
  // Notes whether the calling thread waits for its submissions.
  void SetCallerWaiting(bool waits);
  // The same for a thread that is blocked outside of the core and cannot poll.
  void SetCallerBlocked(bool blocked);
  // Notes that this rank, after join(), served a collective of other ranks.
  void CountServed();
  int64_t served() const { return served_; }

  // ---- the end of a job ----------------------------------------------------

  // Throws if a rank died or another rank has broken the job. Returns whether
  // `waited_for` has left. It may have done its work before it left, so a caller
  // looks once more before it calls BreakForLeft.
  bool Check(int waited_for);
  bool broken() const;
  // Whether it is broken because ranks died or left, so that the survivors can
  // reconfigure.
  bool lost() const;
  // Breaks the job on every rank: their waits throw this failure. The first
  // rank that calls it decides the message.
  [[noreturn]] void Break(Code code, const std::string& what, const std::string& hint);
  // The same for a rank that has left while this one waits for it.
  [[noreturn]] void BreakForLeft(int rank);
  // Notes that this rank will not make calls any more: its own waits end, and other
  // ranks that wait for it fail.
  void Leave();
  // The same, but other ranks must not notice: they reconfigure together with this
  // one.
  void Retire() { leaving_ = true; }
  // Retires, and takes part in the other ranks' reconfiguration only until they
  // can do without this one.
  void Depart();
  // On rank 0: the number of processes that wait to join. The first call opens the
  // listener for them.
  int PendingJoins();

  // One-way nanoseconds of a cache line between ranks 0 and 1, which must both
  // call it at about the same time; every other rank returns at once.
  void PingPong(double* nanoseconds);

 private:
  struct RankState;
  struct Header;
  static constexpr size_t kMemoryBytes = kAreaStride * (1 + kMaxAreas);
  RankState& my_state() const;
  [[noreturn]] void ThrowNoMemory() const;
  // The program may have closed the memory's descriptor, and another file may have
  // its number now; that file must not be written.
  void CheckMemory() const;
  void AwaitSlowPath(FutexWord& word, uint32_t target, int rank,
                     const Request& request);

  // Maps the memory, and returns when all ranks of this host have done so.
  void Open(const char* name);
  void AwaitAttached(const char* name);
  void Close();
  // On one host: repeats the rendezvous until no rank has died during it.
  void RendezvousSurvivors(const RankInfo& before, const GoneFunction& gone,
                           const MeetingFunction& meeting, double seconds,
                           JoinListener* listener);
  // The name under which a rank of this host coordinates the survivors. Only ranks
  // of this job know it: another user could occupy a known name first.
  std::string NextMeeting(int local_rank) const;
  // Opens the result of the rendezvous. False if one of its ranks has died.
  bool OpenReconfigured();
  // On several hosts (job_multi_host.cc).
  void ReconfigureAcrossHosts(const Job& former);
  void AssignRanks(const Job& former);
  bool RendezvousOfThisHost(const Job& former, std::string* error);

  // Kills a rank of this host if it has not been in a wait for the rank time-out,
  // because others wait for it, and it waits for no other. `stopped`: nanoseconds
  // of this wait in which this process did not run. True if it killed the rank.
  bool EndIfStuck(int local_rank, double waited, int64_t stopped) const;
  // Returns a function that tests whether a rank has died or left. It first kills a
  // rank for which this rank waits too long, counted from now.
  GoneFunction GoneOrStuck() const;
  bool HasLeft(int local_rank) const;
  // Whether a rank of this host is dead, or was killed by one of its peers.
  bool IsDead(int local_rank) const;
  void CheckOtherHosts();
  [[noreturn]] void BreakForDead(const std::string& who);
  // `who` has a line for each wait.
  [[noreturn]] void BreakForDeadlock(const std::string& who);
  // False if another rank was first.
  bool SetBroken(Code code, const char* message);
  [[noreturn]] void ThrowBroken();
  void SendToOtherHosts(ControlMessage control, const char* message);
  void HandleControlMessage(const ControlMessage& control);

  static std::string DescriptionOf(const WaitRecord& one);
  static std::string Line(int rank, int other, const std::string& doing);
  // Null if all records of this rank are in use.
  WaitRecord* PublishWait(int rank, int64_t since, const Request& request);
  void SetWaitingSince(bool waits);
  // Nanoseconds after which a wait may be taken for a deadlock.
  int64_t Patience() const;
  // Whether the awaited collective has begun on this rank.
  bool HasBegun(const ControlMessage& wait) const;
  // Whether this rank is in a cycle of ranks that wait for each other.
  bool InDeadlock() const;
  // A rank that waits for this one in a process set, if the function that this
  // rank runs, traced as `mine`, does not have that collective; or "".
  std::string FindUnmatchedWait(const Plan& mine) const;
  // Whether a rank cannot continue until a rank that it waits for has acted.
  bool IsBlocked(int rank, int64_t now, std::vector<int>* waits_for) const;

  RankInfo info_;
  Settings settings_;
  int generation_;
  int reconfigurations_ = 0;  // number of them in this generation before this job
  std::unique_ptr<JoinListener> join_listener_;
  std::unique_ptr<Network> network_;
  std::vector<int> previous_ranks_;
  Rendezvous local_;
  struct stat memory_ = {};              // identifies the file of the memory
  std::vector<int> hosts_;               // by rank
  std::vector<std::atomic<bool>> left_;  // by rank, of other hosts
  // On several hosts, by rank with its time of begin: long waits for this rank, or
  // for a rank that waits for it.
  std::map<std::pair<int, int64_t>, ControlMessage> remote_waits_;
  std::atomic<uint32_t> begun_[kMaxAreas] = {};  // number of collectives, by area
  Header* header_ = nullptr;
  char* areas_[kMaxAreas] = {};
  size_t area_bytes_[kMaxAreas] = {};
  int spins_ = 0;
  std::atomic<bool> leaving_{false};
  std::atomic<uint32_t> submitted_{0};
  std::atomic<bool> blocked_{false};
  std::atomic<int64_t> served_{0}, served_at_{0};  // their number, and the last time
  std::atomic<std::thread::id> caller_{};          // the first caller
  mutable std::mutex waiting_mutex_;
};

}  // namespace collective
