#include "membership/join_listener.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <utility>

#include "membership/local_socket.h"

namespace collective {

// Of the job, however many ranks it has.
Place PlaceOfDoor(const std::string& job) {
  Place place;
  place.rank = place.local_rank = kNewcomer;
  place.size = place.local_size = 0;
  place.job = job;
  return place;
}

Door::Door(const Place& place)
    : listener_(OpenListener(PlaceOfDoor(place.job), kDoor)) {
  const int flags = fcntl(listener_.get(), F_GETFL);
  fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK);
}

int Door::Waiting() {
  for (;;) {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) break;
    if (Peer(caller.get()).uid != getuid()) continue;
    callers_.push_back({std::move(caller)});
  }
  int waiting = 0;
  for (size_t i = callers_.size(); i-- > 0;) {
    Caller& caller = callers_[i];
    pollfd one = {caller.connection.get(), POLLIN, 0};
    if (poll(&one, 1, 0) > 0) {
      // From one that has knocked nothing is due: it hung up.
      Hello hello = {};
      const ssize_t got =
          recv(caller.connection.get(), &hello, sizeof(hello), MSG_DONTWAIT);
      if (caller.knocked || got != sizeof(hello) || hello.magic != kMagic ||
          hello.version != kVersion) {
        callers_.erase(callers_.begin() + i);
        continue;
      }
      caller.knocked = true;
    }
    waiting += caller.knocked;
  }
  return waiting;
}

std::vector<Descriptor> Door::Take() {
  Waiting();
  std::vector<Descriptor> taken;
  std::vector<Caller> others;
  for (Caller& caller : callers_) {
    if (caller.knocked) {
      taken.push_back(std::move(caller.connection));
    } else {
      others.push_back(std::move(caller));
    }
  }
  callers_ = std::move(others);
  return taken;
}

}  // namespace collective
