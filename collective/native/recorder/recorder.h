// The flight recorder: what the ranks of this host did last, kept where the
// others can read it after one of them was killed.
//
// Each rank writes into a ring of its own, in anonymous memory that the ranks
// of a host share as they share the job's (rendezvous.h): no file, nothing left
// behind. At the start it is a memory of its own, for it serves backends that
// have no job of the core. When the ranks of such a job meet anew, some gone
// and others new, each goes on in a part of the new job's memory, which all of
// them have, and takes its ring along.
//
// What is a matter of text is Python's (collective/recorder): a thread of it
// waits in Watch, tells where the main thread is, and writes the account of an
// incident. One rank of a host writes it; the others wait for that, a little,
// so that they are still there to be read.
#ifndef COLLECTIVE_NATIVE_RECORDER_RECORDER_H_
#define COLLECTIVE_NATIVE_RECORDER_RECORDER_H_

#include <signal.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/types.h"
#include "membership/rendezvous.h"

namespace collective {

class Recorder {
 public:
  static constexpr int kEntries = 512;
  static constexpr int kOther = 7;     // no collective; Kind ends before
  static constexpr int kNotOurs = -1;  // area of what the core does not run

  // Both mirrored by collective/recorder/memory.py. Times are nanoseconds of
  // the monotonic clock, 0 for "not yet".
  struct Entry {
    std::atomic<uint64_t> number;  // from 1; 0: none
    int64_t announced, started, ended;
    int64_t bytes;
    int32_t kind, op, dtype, tensors;
    int32_t area;       // of the communicator's memory, which names it
    uint32_t sequence;  // of the collectives of that communicator
    int32_t failed;
    char name[116];
    double at;  // as in Rank
  };
  struct Rank {
    std::atomic<int32_t> rank;  // -1: gone before the others were renumbered
    int32_t pid;
    int32_t called;             // the number that it was started with
    int32_t joined;             // whether the job was there before
    std::atomic<int32_t> left;  // said goodbye, or was told to end
    std::atomic<int32_t> told;  // of its death there is an account
    std::atomic<uint32_t> answered;
    char stack[4084];
    std::atomic<int64_t> sampled;  // when `stack` was
    // Where a training loop is: 1 + 2 * step when it waits for the input, one
    // more within the step, else 0; and since when, in seconds. Python stores
    // it, for a call would cost as much as all the rest
    // (docs/how-to/flight-recorder.md).
    double at, since;
    std::atomic<uint64_t> last;  // number
    Entry entries[kEntries];
  };

  enum Event : int32_t { kClosed = 0, kSample = 1, kIncident = 2 };

  // Of this process; null before Open, and in a fork of it.
  static Recorder* Current();
  ~Recorder();
  // Meets the ranks of this host. Throws as Meet does. `called` is what the
  // launcher calls this process.
  static void Open(const RankInfo& place, int called, double start_seconds,
                   double stall_seconds);
  // Goes on among those that have met already, from `at` in what they share, or
  // begins there. Closed before, so that nobody watches meanwhile.
  static void Follow(const RankInfo& place, Rendezvous here, size_t at,
                     int called, bool joined, double stall_seconds);
  // Before numbers change: waits for the account of those that have died.
  void Settle() const;
  // Where the others are as before, but for those that are gone: this rank's
  // number from now on. Of the others nothing more is told.
  void Renumber(int rank);

  // `starts`: at once; else Start tells when.
  uint64_t Announce(const Request& request, bool starts);
  void Start(uint64_t number, int area, uint32_t sequence);
  void End(uint64_t number, bool failed);
  // Something else than a collective of the core, begun now.
  uint64_t Begin(int kind, const char* name, int64_t bytes);
  // Rank::at and Rank::since, to be stored there; `since` first.
  double* position() { return &mine_->at; }

  // Has an account written, and waits for it. Does nothing where there was one
  // just now: that one told of the cause.
  void Incident(const std::string& what);

  // ---- for the thread that watches -----------------------------------------

  // Returns when there is something to do, or after so long to sample.
  Event Watch(int milliseconds);
  void Sample(const char* stack);
  // Asks the other ranks for a sample, and waits for those that can answer.
  void Gather(int milliseconds);
  // How many ranks of this host may be read.
  int places() const { return place_.local_size; }
  // Copies what a rank has written. 0: it runs; 1: it is dead; 2: it has left.
  int Read(int local_rank, Rank* into) const;
  std::string reason();
  void Done();
  void Close();

 private:
  struct Header;
  Recorder(const RankInfo& place, Rendezvous here, size_t at,
           double stall_seconds);
  static void Install(Recorder* opened);
  void TakeAlong(const Recorder& former);
  int NumberOf(int local_rank) const;
  Entry* EntryOf(uint64_t number);
  bool Dead(int local_rank) const;
  // Whether it has died, and there is no account of that.
  bool Untold(int local_rank) const;
  bool UnderWay() const;
  // Makes this rank the one that writes, until Done or Release. False where
  // another is at it, or there are enough.
  bool Claim();
  // Ends a claim of which nothing is to be written.
  void Release();
  // Claims what follows no other account too soon: that one told of the cause.
  bool ClaimTrouble();
  bool WrittenJustNow() const;
  bool ClaimDeath();
  bool ClaimStall();
  bool ClaimSlowStep();
  bool ClaimEnd();
  bool WaitsLong() const;
  void Wake();
  void TakeOverTermination();
  static void OnTermination(int number);
  [[noreturn]] void EndBy(int number);

  const RankInfo place_;
  const int64_t stall_;
  const size_t bytes_;
  Rendezvous here_;
  Descriptor wake_;
  Header* header_ = nullptr;
  Rank* ranks_ = nullptr;
  Rank* mine_ = nullptr;
  std::mutex mutex_;
  std::string reason_;
  std::atomic<bool> watching_{false}, closing_{false}, pending_{false};
  std::atomic<int> terminated_{0};  // the signal
  // Of the thread that watches: a step and its beginning, as seen last; how
  // long one took before that; the one that an account has told of.
  double seen_at_ = 0, seen_since_ = 0, step_took_ = 0, slow_at_ = 0;
  uint64_t stalled_ = 0;    // the last entry told of
  std::vector<bool> gone_;  // by local rank
};

// Records one collective of the core while it runs.
class RecordedRun {
 public:
  RecordedRun(const Request& request, int area, uint32_t sequence);
  ~RecordedRun();
  RecordedRun(const RecordedRun&) = delete;

 private:
  Recorder* recorder_;
  uint64_t number_ = 0;
  int failures_ = 0;
};

// For the core: Recorder::Incident where there is a recorder.
void TellRecorder(const std::string& what);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_RECORDER_RECORDER_H_
