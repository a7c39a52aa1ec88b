// Bytes between ranks of different hosts, by MPI's point-to-point messages.
//
// MPI itself is not linked: a small plug-in for each family of it
// (mpi_plugin.cc) is loaded when a job spans hosts, chosen by what launched the
// job.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "membership/rank_info.h"
#include "transport/mpi_plugin.h"

namespace collective {

// What a rank tells ranks of other hosts unasked.
struct News {
  enum What : int32_t {
    kLeft,    // it has left the job
    kBroken,  // why the job cannot go on
    kWaits,   // it waits long (deadlock_detection.cc)
  };
  What what;
  int32_t rank;      // whose news it is
  int32_t code = 0;  // kBroken
  int32_t lost = 0;  // whether because a rank has died
  // kWaits: since when, by that rank's clock, which tells its waits apart.
  int64_t since = 0;
  int32_t passed_on = 0;  // by how many ranks
  // Which collective is waited for: of which communicator, and its number.
  int32_t area = 0;
  uint32_t number = 0;
  uint64_t function = 0, name = 0;  // and, unless passed on, plan.h's
  int32_t group = 0;
  char message[2048] = {};  // why, or who waits for whom in what
};

// Where the plug-in for the MPI that launched this process is, or would be.
std::string Plugin();

class Network {
 public:
  // Starts MPI. Throws kFailedPrecondition where there is no plug-in, or where
  // MPI sees another job. Ends the process where a rank has not come in time.
  Network(const Place& place, double seconds);

  // Of those that are left of a job, numbered anew in their old order. All of
  // them come here, or to Leave, or die. `whole`: nobody has died, as far as
  // this rank knows. Throws kDeadlineExceeded where one that lives does not.
  Network(const Network& former, bool whole, double seconds);
  // Then, by rank: what number it had.
  const std::vector<int>& former() const { return former_; }
  int rank() const { return rank_; }

  // Every rank's number, by rank.
  std::vector<int> Gather(int mine);

  // Messages between two ranks with one tag arrive in the order of sending. A
  // transfer's memory must be left alone until it is done.
  void* Send(int rank, int tag, const void* data, size_t bytes);
  void* Receive(int rank, int tag, void* data, size_t bytes);
  // 0: under way; 1: ended; -1: failed, for the reason Error() tells.
  int Done(void* transfer);
  std::string Error();

  // MPI moves bytes only while it is asked to: whoever waits for something else
  // while transfers are pending must call Progress, or others wait for him.
  bool pending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  void Progress();

  // Tries, for a moment: the others may be gone.
  void Tell(const std::vector<int>& ranks, const News& news);
  // Whether there was news.
  bool Hear(News* news);
  // The others go on without this rank, at once where nobody dies meanwhile,
  // else when its process has ended.
  void Leave(double seconds);
  // This process ends without waiting for the others.
  void GiveUp();

  // Whether MPI lives on when processes die (ULFM); the rest is for where it
  // does.
  bool survives() const { return survives_; }
  // The ranks that are known to have died.
  std::vector<int> Dead();
  // Whether a rank has called Revoke.
  bool Revoked();
  // Ends all transfers, on every rank.
  void Revoke();
  // Whether all ranks say yes, and none has died: the same for all of them,
  // who all ask. Throws kDeadlineExceeded.
  bool Agree(bool yes, double seconds) const;

 private:
  const collective_mpi* mpi_;
  collective_world* world_ = nullptr;
  int rank_ = -1, size_ = 0;
  bool survives_ = false;
  std::vector<int> former_;
  std::deque<News> heard_;
  std::atomic<int> pending_{0};
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_MESSAGES_H_
