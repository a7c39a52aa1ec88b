// How the ranks of one host find each other, with no file and no server.
//
// Local rank 0 listens on an abstract Unix socket whose name is made from the
// user and the job; the others connect, and each receives a descriptor of the
// job's anonymous shared memory and one of every rank's process. Nothing of
// this has a name in a file system, so nothing can be left behind whatever
// kills the job, and no other user can open it (both ends check who the other
// is). An abstract name is seen within a network namespace only; containers
// that share one are told apart by their host names, as MPI does.
#ifndef COLLECTIVE_NATIVE_RENDEZVOUS_H_
#define COLLECTIVE_NATIVE_RENDEZVOUS_H_

#include <cstddef>
#include <vector>

#include "descriptor.h"
#include "place.h"

namespace collective {

struct Gathering {
  Descriptor memory;                  // `bytes` long, zeroed, shared by all
  std::vector<Descriptor> processes;  // by local rank; invalid where pidfds are
                                      // not to be had
  std::vector<int> pids;              // by local rank
  std::vector<int> ranks;             // by local rank

  bool Dead(int local_rank) const;
};

// Meets the other ranks of this host. `generation` counts the meetings of this
// process, so that a job can meet again after it parted. `bytes` is what local
// rank 0 says. Throws kUnavailable or kDeadlineExceeded, naming the rank.
Gathering Meet(const Place& place, int generation, size_t bytes,
               double seconds);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_RENDEZVOUS_H_
