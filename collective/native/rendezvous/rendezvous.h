// How the ranks of one host find each other, without a file or a server.
//
// Local rank 0 coordinates: it listens on an abstract Unix socket whose address is
// made from the user and the job. The other ranks connect, and each receives a
// descriptor of the job's anonymous shared memory and one (pidfd) of every rank's
// process. None of this has a name in a file system, so nothing stays if the job is
// killed, and no other user can open it.
//
// After ranks have died, the survivors hold a rendezvous of the same kind, and
// the lowest of them coordinates. They may briefly differ on which is the
// lowest, but the dead stay dead, so all soon see the same one. New processes
// wait at the JoinListener of local rank 0 and are taken in at the next
// reconfiguration.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "rendezvous/descriptor.h"
#include "rendezvous/join_listener.h"
#include "rendezvous/rank_info.h"

namespace collective {

// Tests whether a local rank has died or left.
using GoneFunction = std::function<bool(int local_rank)>;
// The name of the rendezvous that a local rank coordinates.
using MeetingFunction = std::function<std::string(int local_rank)>;

struct Process {
  Descriptor pidfd;  // invalid if the kernel has none
  int pid = 0;
  int rank = 0;      // of the job
  int previous = 0;  // local rank in the former job; or kNewcomer
};

// The outcome: the ranks of this host.
struct Rendezvous {
  Descriptor memory;               // zeroed, shared by all
  std::vector<Process> processes;  // by local rank
  int local_rank = 0;              // of this process
  // For a reconfiguration: the number of init(), and of earlier reconfigurations.
  int generation = 0, reconfigurations = 0;

  // The local rank of a rank, or their number if it is on another host.
  int Find(int rank) const;
  // "rank 3 (process 1234)".
  std::string NameOf(int local_rank) const;
  // False for this process.
  bool Dead(int local_rank) const;
  // Sends SIGKILL. False without a pidfd: the number may be another process' now.
  bool Kill(int local_rank) const;
  // Returns a copy with descriptors of its own.
  Rendezvous Copy() const;
};

// Finds the other ranks of this host, all of which must join. `generation`
// counts the calls of init() in this process, so that a job can start again
// after shutdown(). `bytes` is the size of the memory; local rank 0 decides.
// Throws kUnavailable or kDeadlineExceeded, naming the rank.
Rendezvous JoinRendezvous(const RankInfo& info, int generation, size_t bytes,
                          double seconds);

// One attempt under a name that all survivors use. Ranks that are gone are left
// out. It finds no ranks if local rank 0 is one of these.
Rendezvous JoinSurvivors(const RankInfo& info, const std::string& name, size_t bytes,
                         double seconds, const GoneFunction& gone);

// Finds the survivors of a job in which this rank was `info`. A rank that dies
// during the call may be among them. If this rank coordinates, processes that wait
// at its listener (which may be null) come last.
Rendezvous Reconfigure(const RankInfo& info, int generation, int reconfigurations,
                       size_t bytes, double seconds, const GoneFunction& gone,
                       const MeetingFunction& meeting, JoinListener* listener);

// Sends a join request to a running job, and waits until it is taken in.
Rendezvous RequestJoin(const std::string& job);

}  // namespace collective
