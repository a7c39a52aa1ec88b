// The message side of a communicator whose ranks are on several hosts.
//
// Such a communicator has no shared memory: agreement, announcements and
// Communicator::Exchange go through here, and the collectives are those of
// by_messages.h and the all-reduces that send messages.
#ifndef COLLECTIVE_NATIVE_REMOTE_H_
#define COLLECTIVE_NATIVE_REMOTE_H_

#include <functional>
#include <vector>

#include "job.h"
#include "network.h"

namespace collective {

class Remote {
 public:
  // `tag` is not used by any other communicator.
  Remote(Job* job, const std::vector<int>& members, int me, int tag);

  // Throws on every member where the signatures differ.
  void Agree(uint64_t signature, const Request& request);

  using Receive = std::function<void(const char*, size_t offset, size_t bytes)>;
  void Exchange(int to, const char* data, size_t send_bytes, int from,
                size_t receive_bytes, const Request& request,
                const Receive& receive);

  void Announce(const Notice& notice);
  Notice Announced(const Request& request);

 private:
  void Await(void* transfer, int member, const Request& request);
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

#endif  // COLLECTIVE_NATIVE_REMOTE_H_
