// A network that is only memory: no rank fails, and nothing is in flight.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network/network.h"

namespace collective {

class UndisturbedNetwork : public Network {
 public:
  std::string Error() override { return ""; }
  void Progress() override {}
  bool ReceiveControl(ControlMessage*) override { return false; }
  void SkipFinalize() override {}
  std::vector<int> FailedRanks() override { return {}; }
  bool Revoked() override { return false; }
  void Revoke() override {}
  bool Agree(bool, double) override { return false; }
  std::unique_ptr<Network> Reconfigure(bool, double) override { return nullptr; }
  void Depart(double) override {}
};

}  // namespace collective
