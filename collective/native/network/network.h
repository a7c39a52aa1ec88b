// Sends bytes between ranks of different hosts, by MPI's point-to-point messages.
//
// MPI itself is not linked: if a job spans hosts, Python loads the library of the
// MPI that launched it (collective/mpi_library.py), mpi_abi.h has the three
// binary interfaces that exist, and mpi.cc finds the functions when a job starts.
// So one built core works with every MPI, and on one host without any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rendezvous/rank_info.h"

namespace collective {

// Control messages have this tag, above the tags of all communicators.
constexpr int kControlTag = 1 << 14;

// A message of a rank to ranks of other hosts, outside of any collective.
struct ControlMessage {
  enum Type : int32_t {
    kLeft,     // it has left the job
    kBroken,   // the reason why the job cannot continue
    kWaiting,  // it has waited for long (deadlock_detection.cc)
  };
  Type type;
  int32_t rank;      // the rank that left, broke the job or waits
  int32_t code = 0;  // kBroken: the code
  int32_t lost = 0;  // kBroken: whether a rank's death is the reason
  // kWaiting: since when, by that rank's clock: identifies the wait.
  int64_t since = 0;
  int32_t forwards = 0;  // number of ranks that have forwarded it
  // The awaited collective: its communicator, and its number in that.
  int32_t area = 0;
  uint32_t number = 0;
  uint64_t function = 0, name = 0;  // as in plan.h, unless forwarded
  int32_t group = 0;
  char message[2048] = {};  // the reason, or the chain of waits
};

// A job's ranks, as MPI connects them. Its communicator is a duplicate of
// MPI_COMM_WORLD, so that messages never mix with messages of another job or of
// the program's own MPI calls.
class Network {
 public:
  // Starts MPI unless it runs already. Throws kFailedPrecondition if no MPI is
  // loaded or it lacks a function, if MPI sees another job, or if a program has
  // started MPI without the threads that the core needs. Ends the process if a
  // rank does not arrive within `seconds`.
  static std::unique_ptr<Network> Start(const RankInfo& info, double seconds);
  virtual ~Network() = default;

  int rank() const { return rank_; }
  // All-gather of one number, by rank.
  virtual std::vector<int> Gather(int mine) = 0;

  // Messages between two ranks with one tag arrive in the order of sending. The
  // memory of a transfer must not be touched until the transfer is done.
  virtual void* Send(int rank, int tag, const void* data, size_t bytes) = 0;
  virtual void* Receive(int rank, int tag, void* data, size_t bytes) = 0;
  // 0: in flight; 1: done; -1: failed, and Error() has the reason.
  virtual int Test(void* transfer) = 0;
  virtual std::string Error() = 0;

  // MPI moves bytes only during calls. A rank that waits for something else while
  // transfers are in flight must call Progress, or it delays its peers.
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  virtual void Progress() = 0;

  // Best effort with a short limit, because the receivers may have died.
  void SendControl(const std::vector<int>& ranks, const ControlMessage& control);
  // False if there is no message.
  virtual bool ReceiveControl(ControlMessage* control) = 0;
  // Makes this process end without MPI_Finalize, which would wait for ranks that
  // may have died.
  virtual void SkipFinalize() = 0;

  // ---- surviving the death of ranks: MPI's ULFM ----------------------------

  // Whether MPI survives the death of processes. The rest needs such an MPI.
  bool fault_tolerant() const { return fault_tolerant_; }
  // The ranks that are known to have died.
  virtual std::vector<int> FailedRanks() = 0;
  // Whether any rank has called Revoke.
  virtual bool Revoked() = 0;
  // Ends all transfers, on every rank, so that none writes to memory any more.
  virtual void Revoke() = 0;
  // Whether all ranks vote yes and none has died; all get the same answer. Throws
  // kDeadlineExceeded.
  virtual bool Agree(bool yes, double seconds) = 0;
  // Makes the network of the survivors, renumbered in their old order. Each of
  // them must call this, or Depart, or die. `nobody_died`: as far as this rank
  // knows. Throws kDeadlineExceeded if a live rank does not call it.
  virtual std::unique_ptr<Network> Reconfigure(bool nobody_died, double seconds) = 0;
  // After Reconfigure, by rank: its former number.
  const std::vector<int>& previous_ranks() const { return previous_ranks_; }
  // Lets the other ranks continue without this one: at once if no rank dies during
  // the call, otherwise when its process has ended.
  virtual void Depart(double seconds) = 0;

 protected:
  int rank_ = -1, size_ = 0;
  bool fault_tolerant_ = false;
  std::vector<int> previous_ranks_;
  std::atomic<int> pending_{0};
};

using StartNetwork =
    std::function<std::unique_ptr<Network>(const RankInfo& info, double seconds)>;

}  // namespace collective
