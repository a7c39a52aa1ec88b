// The message side of a communicator whose ranks are on several hosts.
//
// Agreement, announcements and Communicator::Exchange go through here, and the
// collectives are those of p2p_collectives.h and the all-reduces that send
// messages.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_P2P_TRANSPORT_H_
#define COLLECTIVE_NATIVE_TRANSPORT_P2P_TRANSPORT_H_

#include <deque>
#include <functional>
#include <vector>

#include "membership/job.h"
#include "transport/messages.h"

namespace collective {

class Remote {
 public:
  // `tag` is not used by any other communicator.
  Remote(Job* job, const std::vector<int>& members, int me, int tag);

  // Throws on every member where the signatures differ.
  void Agree(uint64_t signature, const Request& request);

  using Take = std::function<void(const char*, size_t offset, size_t bytes)>;
  void Exchange(int to, const char* data, size_t send_bytes, int from,
                size_t receive_bytes, const Request& request, const Take& take);

  // Messages under way, to be waited for in this order.
  struct Transfer {
    void* handle;
    int member;
  };
  using Transfers = std::deque<Transfer>;
  // In pieces; what was sent must be asked for by as many bytes, in one order.
  void Send(int to, const char* data, size_t bytes, Transfers* under_way);
  void Receive(int from, char* target, size_t bytes, Transfers* under_way);
  void AwaitAll(Transfers* under_way, const Request& request);

  void Announce(const Notice& notice);
  Notice Announced(const Request& request);

 private:
  void Await(void* transfer, int member, const Request& request);
  bool Done(void* transfer, int member);
  // A fixed number of bytes each way.
  void Swap(int to, const void* data, int from, void* target, size_t bytes,
            const Request& request);

  Job* job_;
  Network& network_;
  const std::vector<int>& members_;
  const int me_;
  const int tag_;
  std::vector<char> buffers_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_P2P_TRANSPORT_H_
