// Point-to-point transport of a communicator whose ranks are on several hosts.
//
// It replaces the shared memory that such a communicator does not have: comparison
// of calls, announcements and data all go through here, in messages that are short
// enough to overlap with the summing.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "membership/job.h"
#include "network/network.h"

namespace collective {

class P2pTransport {
 public:
  // `tag` must be unique to this communicator.
  P2pTransport(Job* job, const std::vector<int>& members, int me, int tag);

  // Throws on every member if the signatures differ: kFailedPrecondition, or
  // RanksHaveJoined.
  // Recursive doubling: ceil(log2 n) steps of 16 bytes.
  void VerifyMatch(uint64_t signature, const Request& request);

  // Gets each received piece: its data, its offset in bytes, its size.
  using Consume = std::function<void(const char* data, size_t offset, size_t bytes)>;
  // Sends to one member while receiving from another; either may be empty
  // (null, 0).
  void Exchange(int to, const char* data, size_t send_bytes, int from,
                size_t receive_bytes, const Request& request, const Consume& consume);
  // The same, but writes the received bytes to memory.
  void Exchange(int to, const char* data, size_t send_bytes, int from, char* target,
                size_t receive_bytes, const Request& request);

  // Messages in flight; they must be awaited in this order.
  struct Transfer {
    void* handle;
    int member;
  };
  using Transfers = std::deque<Transfer>;
  // The messages are in pieces: a receiver must ask for as many bytes, in the same
  // order, as its peer sends.
  void Send(int to, const char* data, size_t bytes, Transfers* in_flight);
  void Receive(int from, char* target, size_t bytes, Transfers* in_flight);
  void AwaitAll(Transfers* in_flight, const Request& request);

  // The first member announces the next collective to every other one (queue.h),
  // down a binomial tree: a member sends at most ceil(log2 n) messages.
  void Announce(const Announcement& announcement);
  Announcement Announced(const Request& request);

 private:
  void Await(void* transfer, int member, const Request& request);
  // Sends to the members below this one, which is `bit` above its parent.
  void PassOn(const Announcement& announcement, int bit);
  // Whether a transfer is done. Throws if it failed.
  bool Test(void* transfer, int member);
  // Like MPI_Sendrecv, with the same number of bytes each way.
  void SendReceive(int to, const void* data, int from, void* target, size_t bytes,
                   const Request& request);
  [[noreturn]] void ThrowMismatched(uint64_t signature, const Request& request);

  Job* job_;
  Network& network_;
  const std::vector<int>& members_;
  const int me_;
  const int tag_;  // tag of data; announcements have the next one
  std::vector<char> buffers_;
};

}  // namespace collective
