// Bytes between ranks of different hosts, by MPI's point-to-point messages.
//
// MPI itself is not linked: Python loads the library of the MPI that launched a
// job where the job spans hosts (collective/mpi_library.py), and mpi.h finds
// its functions. So one built core works with every MPI, and without any on one
// host.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "membership/rank_info.h"
#include "transport/mpi.h"

namespace collective {

// What a rank sends to ranks of other hosts outside of any collective.
struct ControlMessage {
  enum Type : int32_t {
    kLeft,     // it has left the job
    kBroken,   // why the job cannot continue
    kWaiting,  // it waits long (deadlock_detection.cc)
  };
  Type type;
  int32_t rank;      // which rank left, broke the job or waits
  int32_t code = 0;  // kBroken
  int32_t lost = 0;  // kBroken: whether because a rank has died
  // kWaiting: since when, by that rank's clock: identifies the wait.
  int64_t since = 0;
  int32_t forwards = 0;  // by how many ranks it was forwarded
  // The awaited collective: its communicator, and its number there.
  int32_t area = 0;
  uint32_t number = 0;
  uint64_t function = 0, name = 0;  // of plan.h, unless forwarded
  int32_t group = 0;
  char message[2048] = {};  // the reason, or the chain of waits
};

class Network {
 public:
  // Starts MPI. Throws kFailedPrecondition if none is loaded, if MPI sees
  // another job, or if a program has started MPI without the threads it takes.
  // Ends the process if a rank does not come within `seconds`.
  Network(const RankInfo& info, double seconds);

  // Of the survivors of a job, renumbered in their old order. Each of them must
  // call this, or Depart, or die. `nobody_died`: as far as this rank knows.
  // Throws kDeadlineExceeded if a live rank does not come.
  Network(const Network& former, bool nobody_died, double seconds);
  // By rank: its number in `former`.
  const std::vector<int>& previous_ranks() const { return previous_ranks_; }
  int rank() const { return rank_; }

  // All-gather of one number, by rank.
  std::vector<int> Gather(int mine);

  // Messages between two ranks with one tag arrive in the order of sending. The
  // memory of a transfer must not be touched until the transfer is done.
  void* Send(int rank, int tag, const void* data, size_t bytes);
  void* Receive(int rank, int tag, void* data, size_t bytes);
  // 0: in flight; 1: done; -1: failed, for the reason that Error() gives.
  int Test(void* transfer);
  std::string Error();

  // MPI moves bytes only while it is called. A rank that waits for something
  // else while transfers are in flight must call Progress, or it stalls its
  // peers.
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  void Progress();

  // Best effort, and brief: the receivers may have died.
  void SendControl(const std::vector<int>& ranks,
                   const ControlMessage& control);
  // False if there is none.
  bool ReceiveControl(ControlMessage* control);
  // Lets the other ranks continue without this one: at once if no rank dies
  // meanwhile, otherwise when its process has ended.
  void Depart(double seconds);
  // This process is to end without MPI_Finalize, which would wait for ranks
  // that may have died.
  void SkipFinalize();

  // Whether MPI survives the death of processes (ULFM). The rest is for MPIs
  // that do.
  bool fault_tolerant() const { return fault_tolerant_; }
  // The ranks that are known to have died.
  std::vector<int> FailedRanks();
  // Whether any rank has called Revoke.
  bool Revoked();
  // Ends all transfers, on every rank.
  void Revoke();
  // Whether all ranks say yes and none has died: the same answer on all. Throws
  // kDeadlineExceeded.
  bool Agree(bool yes, double seconds) const;

 private:
  Mpi* mpi_;
  MpiWorld* world_ = nullptr;
  int rank_ = -1, size_ = 0;
  bool fault_tolerant_ = false;
  std::vector<int> previous_ranks_;
  std::deque<ControlMessage> received_;
  std::atomic<int> pending_{0};
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_
