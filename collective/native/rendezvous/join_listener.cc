#include "rendezvous/join_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <utility>

#include "rendezvous/local_socket.h"

namespace collective {

RankInfo JoinListenerInfo(const std::string& job) {
  RankInfo info;
  info.rank = info.local_rank = kNewcomer;
  info.size = info.local_size = 0;
  info.job = job;
  return info;
}

JoinListener::JoinListener(const RankInfo& info)
    : listener_(OpenListener(JoinListenerInfo(info.job), kJoinListenerName)) {
  const int flags = fcntl(listener_.get(), F_GETFL);
  fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK);
}

void JoinListener::AcceptConnections() {
  for (;;) {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) return;
    if (PeerCredentials(caller.get()).uid != getuid()) continue;
    pending_.emplace_back();
    pending_.back().connection = std::move(caller);
  }
}

int JoinListener::PendingCount() {
  AcceptConnections();
  int waiting = 0;
  for (size_t i = pending_.size(); i-- > 0;) {
    PendingJoin& join = pending_[i];
    pollfd one = {join.connection.get(), POLLIN, 0};
    if (poll(&one, 1, 0) > 0) {
      // A process sends one request and no more: if its socket is readable
      // after that, the process has hung up.
      JoinRequest request = {};
      if (join.requested ||
          !ReceiveRequest(join.connection.get(), &request, &join.process) ||
          request.version != kVersion) {
        pending_.erase(pending_.begin() + i);
        continue;
      }
      join.requested = true;
      join.pid = request.pid;
    }
    waiting += join.requested;
  }
  return waiting;
}

std::vector<PendingJoin> JoinListener::TakePending() {
  PendingCount();  // drops connections that have hung up
  std::vector<PendingJoin> taken;
  std::vector<PendingJoin> silent;
  for (PendingJoin& join : pending_) {
    if (join.requested) {
      taken.push_back(std::move(join));
    } else {
      silent.push_back(std::move(join));
    }
  }
  pending_ = std::move(silent);
  return taken;
}

}  // namespace collective
