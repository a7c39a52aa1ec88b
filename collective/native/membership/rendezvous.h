// How the ranks of one host find each other, with no file and no server.
//
// Local rank 0 listens on an abstract Unix socket whose name is made from the
// user and the job; the others connect, and each receives a descriptor of the
// job's anonymous shared memory and one of every rank's process. Nothing of
// this has a name in a file system, so nothing can be left behind whatever
// kills the job, and no other user can open it (both ends check who the other
// is). An abstract name is seen within a network namespace only; containers
// that share one are told apart by their host names, as MPI does.
//
// When ranks have died, those that are left meet again in the same way, and the
// lowest of them listens. Who is lowest they see alike, sooner or later: the
// dead stay dead. Processes that come later knock at the door that local rank 0
// keeps, and are taken in when it meets the others the next time.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_RENDEZVOUS_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_RENDEZVOUS_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "membership/descriptor.h"
#include "membership/join_listener.h"
#include "membership/rank_info.h"

namespace collective {

struct Gathering {
  Descriptor memory;                  // `bytes` long, zeroed, shared by all
  std::vector<Descriptor> processes;  // by local rank; invalid where pidfds are
                                      // not to be had
  std::vector<int> pids;              // by local rank
  std::vector<int> ranks;             // by local rank

  bool Dead(int local_rank) const;
  // With descriptors of its own.
  Gathering Copy() const;
  std::vector<int>
      former;  // by local rank: the local rank it was, -1: it is new
  int me = 0;  // which of them this process is
  int generation = 0, meeting = 0;  // of a meeting again: which
};

// Meets the other ranks of this host. `generation` counts the meetings of this
// process, so that a job can meet again after it parted. `bytes` is what local
// rank 0 says. Throws kUnavailable or kDeadlineExceeded, naming the rank.
Gathering Meet(const Place& place, int generation, size_t bytes,
               double seconds);

// Once, under a name that all give: leaves out those that are gone, by local
// rank. Of nobody, where local rank 0 is.
Gathering MeetOnce(const Place& place, const std::string& name, size_t bytes,
                   double seconds, const std::function<bool(int)>& gone);

// Meets again those that are left of a job in which this rank had this place,
// and `gone` tells, by local rank, who is not. `meeting` is the number of jobs
// that there were before. Who dies meanwhile may be among those met. Where this
// rank listens, those at its door, if it keeps one, come behind the others.
Gathering MeetAgain(const Place& place, int generation, int meeting,
                    size_t bytes, double seconds,
                    const std::function<bool(int)>& gone, Door* door);

// Knocks at the door of a job, and waits until it is taken in.
Gathering Knock(const std::string& job);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_RENDEZVOUS_H_
