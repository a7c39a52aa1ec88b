// The door of a job that runs: processes that come later knock there, and are
// taken in when its ranks meet the next time (rendezvous.h).
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_JOIN_LISTENER_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_JOIN_LISTENER_H_

#include <string>
#include <vector>

#include "membership/descriptor.h"
#include "membership/rank_info.h"

namespace collective {

constexpr int kNewcomer = -1;  // the number of one that has none yet

// Where it is, for the one that keeps it and for those that knock.
Place PlaceOfDoor(const std::string& job);
constexpr char kDoor[] = "door";

// Where processes wait that come later. Throws where another process has it:
// the one that kept it before may not be gone yet.
class Door {
 public:
  explicit Door(const Place& place);
  // How many wait now. Never blocks.
  int Waiting();
  // Those who wait: a connection to each.
  std::vector<Descriptor> Take();

 private:
  struct Caller {
    Descriptor connection;
    bool knocked = false;  // has said who it is
  };
  Descriptor listener_;
  std::vector<Caller> callers_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_JOIN_LISTENER_H_
