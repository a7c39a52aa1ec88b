// Bytes between ranks of different hosts, by MPI's point-to-point messages.
//
// MPI itself is not linked: a small plug-in for each family of it
// (mpi_plugin.cc) is loaded when a job spans hosts, chosen by what launched the
// job.
#ifndef COLLECTIVE_NATIVE_NETWORK_H_
#define COLLECTIVE_NATIVE_NETWORK_H_

#include <cstddef>
#include <mutex>

#include "mpi_plugin.h"
#include "place.h"

namespace collective {

class Network {
 public:
  // Starts MPI. Throws kFailedPrecondition where there is no plug-in, or where
  // MPI sees another job.
  explicit Network(const Place& place);

  // Messages between two ranks with one tag arrive in the order of sending. A
  // transfer's memory must be left alone until it is done.
  void* Send(int rank, int tag, const void* data, size_t bytes);
  void* Receive(int rank, int tag, void* data, size_t bytes);
  // Whether a transfer has ended; frees it then.
  bool Done(void* transfer);
  // Ends every rank of the job, this one too.
  void Abort(int code);

 private:
  const collective_mpi* mpi_;
  std::mutex mutex_;  // MPI is asked for one thread at a time
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_NETWORK_H_
