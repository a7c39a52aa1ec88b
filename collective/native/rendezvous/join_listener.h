// New processes ask a running job here to take them in.
//
// Local rank 0 of a job that may grow listens on a socket of its own; a new
// process sends a JoinRequest there and waits. The ranks take it in at their
// next reconfiguration (rendezvous.h), between two steps, so that no collective
// ever sees a changing membership.
#pragma once

#include <string>
#include <vector>

#include "rendezvous/descriptor.h"
#include "rendezvous/rank_info.h"

namespace collective {

constexpr int kNewcomer = -1;  // stands for a rank that is not assigned yet

// The address of a job's listener, in the form of local_socket.h: this RankInfo
// and this name. It does not depend on the number of ranks.
RankInfo JoinListenerInfo(const std::string& job);
constexpr char kJoinListenerName[] = "join";

// A process that waits to join.
struct PendingJoin {
  Descriptor connection;
  bool requested = false;  // it has sent its JoinRequest, with:
  Descriptor process;      // a pidfd, or invalid
  int pid = 0;
};

class JoinListener {
 public:
  // Throws kFailedPrecondition if another process holds the address: a former
  // rank 0 may not have exited yet.
  explicit JoinListener(const RankInfo& info);
  // The number of processes with a request that still wait. Never blocks.
  int PendingCount();
  // Hands these processes over.
  std::vector<PendingJoin> TakePending();

 private:
  void AcceptConnections();

  Descriptor listener_;
  std::vector<PendingJoin> pending_;
};

}  // namespace collective
