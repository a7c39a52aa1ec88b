// The flight recorder: the last collectives of each rank, readable by the other
// ranks of its host after it was killed.
//
// Each rank writes into a ring buffer of its own, in anonymous memory that the
// ranks of a host share, so no file stays. The first recorder has memory of its
// own, because it also serves backends that do not run a job of the core. After a
// reconfiguration the ring moves into the memory of the new job.
//
// Python (collective/recorder) formats and writes the dumps: a thread of it
// waits in Watch, samples the stack of the main thread, and writes a dump when
// Watch returns kDump. One rank of a host writes; the others wait for it a few
// seconds, so that they still run while the writer reads their stacks.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "kernels/types.h"
#include "rendezvous/rendezvous.h"

namespace collective {

class Recorder {
 public:
  static constexpr int kEntries = 512;
  static constexpr int kOtherKind = 7;  // not a collective; Kind ends before
  static constexpr int kNoArea = -1;    // for entries that the core does not run

  // Times are from Now(), 0 for "not yet".
  struct Entry {
    std::atomic<uint64_t> number;  // from 1; 0: empty, or being written
    int64_t announced, started, ended;
    int64_t bytes;
    int32_t kind, op, dtype, tensors;
    int32_t area;       // identifies the communicator
    uint32_t sequence;  // number of the collective in that
    int32_t failed;
    char name[116];
    double at;  // as Rank::at
  };
  struct Rank {
    std::atomic<int32_t> rank;  // -1: it left before the others were renumbered
    int32_t pid;
    int32_t launch_rank;
    int32_t joined;                       // it joined a running job
    std::atomic<int32_t> left;            // 1: closed its recorder; -N: signal N
    std::atomic<int32_t> death_reported;  // a dump has reported its death
    std::atomic<uint32_t> answered;       // the last sample request
    char stack[4084];
    std::atomic<int64_t> sampled;  // time of `stack`
    // The place of the training loop: 1 + 2 * step while it waits for the input,
    // 2 + 2 * step within the step, else 0; and since when, in seconds. Python
    // stores both directly: a call would cost more than the rest of the recorder
    // (docs/how-to/flight-recorder.md).
    double at, since;
    std::atomic<uint64_t> last;  // number of the last entry
    Entry entries[kEntries];
  };

  enum Event : int32_t { kClosed = 0, kSample = 1, kDump = 2 };

  // The recorder of this process; null before Open, and in a fork.
  static Recorder* Current();
  ~Recorder();
  // Holds a rendezvous of the ranks of this host. Throws as JoinRendezvous does.
  static void Open(const RankInfo& info, int launch_rank, double start_seconds,
                   double stall_seconds);
  // After Close: opens a recorder in `local.memory` at `offset`, with the ring of
  // the former recorder, if there was one.
  static void Reopen(const RankInfo& info, Rendezvous local, size_t offset,
                     int launch_rank, bool joined, double stall_seconds);
  // Waits until each death has been reported. Required before ranks are
  // renumbered.
  void AwaitDumps() const;
  // Keeps the ranks without those that have left or died: sets this rank's number,
  // and omits the others from later dumps.
  void Renumber(int rank);

  // Start records when it starts.
  uint64_t Announce(const Request& request, int64_t now);
  void Start(uint64_t number, int area, uint32_t sequence, int64_t now);
  void End(uint64_t number, bool failed, int64_t now = Now());
  // Starts an entry that is not a collective of the core.
  uint64_t Begin(int kind, const char* name, int64_t bytes, int64_t now = Now());
  // Rank::at, followed by Rank::since; store `since` first.
  double* position() { return &mine_->at; }

  // Requests a dump and waits for it. Does nothing within 5 s of the last dump,
  // which has shown the same cause.
  void RequestDump(const std::string& reason);

  // ---- for the watching thread ---------------------------------------------

  // Returns the next action, kSample after so many milliseconds at the latest.
  Event Watch(int milliseconds);
  void Sample(const char* stack);
  // Requests a sample of every other rank, and waits for those that can answer.
  void RequestSamples(int milliseconds);
  int local_size() const { return info_.local_size; }
  // Copies the entries of a rank. 0: it runs; 1: it is dead; 2: it has left.
  int Read(int local_rank, Rank* into) const;
  std::string reason();
  void FinishDump();
  void Close();

 private:
  struct Header {
    // The time of the last claim of a dump; the end of that claim, written or not;
    // and the time of the last written dump.
    std::atomic<int64_t> claimed, done, written;
    std::atomic<uint32_t> dumps;
    std::atomic<uint32_t> asked;  // number of sample requests
  };
  Recorder(const RankInfo& info, Rendezvous local, size_t offset, double stall_seconds);
  static void Install(Recorder* opened);
  void CopyFrom(const Recorder& former);
  int RankOf(int local_rank) const;
  Entry* EntryOf(uint64_t number);
  void Wake();

  // ---- choice of the rank that writes a dump (dump_claims.cc) ---------------
  // ----------------------------

  bool HasUnreportedDeath(int local_rank) const;
  bool DumpInProgress() const;
  bool DumpedJustNow() const;
  // Makes this rank the writer, until FinishDump or ReleaseClaim.
  // False if another rank writes, or the job has had enough dumps.
  bool ClaimDump();
  void ReleaseClaim();
  // The same, unless the last dump has just shown the same cause; sets the reason.
  bool ClaimIncident(const std::string& reason);
  void SetReason(const std::string& reason);
  // "; rank 1 received signal 15", for each rank that a signal has ended.
  std::string Terminations() const;
  bool ClaimDeath();
  bool ClaimStall();
  bool ClaimSlowStep();
  bool ClaimTermination();

  // ---- signals (watch.cc) ---------------------------------------------------

  bool WaitsLong() const;
  void InstallSignalHandlers();
  static void OnTermination(int number);
  [[noreturn]] void TerminateBy(int number);

  const RankInfo info_;
  const int64_t stall_;
  const size_t bytes_;
  Rendezvous local_;
  Descriptor wake_;
  Header* header_ = nullptr;
  Rank* ranks_ = nullptr;
  Rank* mine_ = nullptr;
  std::mutex mutex_;
  std::string reason_;
  std::atomic<bool> watching_{false}, closing_{false}, pending_{false};
  std::atomic<int> terminated_{0};  // the received signal
  // For the watching thread: the last position, and since when; the duration of
  // the step before; the position and the entry last dumped as stalled; the deaths
  // that are already in a dump, by local rank.
  double seen_at_ = 0, seen_since_ = 0, step_took_ = 0, slow_at_ = 0;
  uint64_t last_stalled_ = 0;
  std::vector<bool> known_dead_;
};

// Records one collective of the core while it runs: in the flight recorder and,
// when it has ended, in the timeline.
class RecordedRun {
 public:
  RecordedRun(const Request& request, int area, uint32_t sequence);
  ~RecordedRun();
  RecordedRun(const RecordedRun&) = delete;

 private:
  const Request& request_;
  Recorder* const recorder_;
  const bool traced_;
  int64_t begin_ = 0;
  uint64_t number_ = 0;
  int failures_ = 0;
};

// Calls Recorder::RequestDump, if there is a recorder.
void RequestDump(const std::string& reason);

}  // namespace collective
