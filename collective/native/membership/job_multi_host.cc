// Reconfiguration of a job on several hosts.
//
// MPI (ULFM) decides who the survivors are, equally on each of them. They take new
// ranks, and the ranks of a host hold a rendezvous. If a rank dies during this, some
// hosts succeed and others do not: so all survivors agree, by MPI, whether every
// host has succeeded. If not, all repeat from the last agreement.
#include <algorithm>
#include <numeric>

#include "membership/job.h"

namespace collective {

void Job::ReconfigureAcrossHosts(const Job& former) {
  if (std::find(former.left_.begin(), former.left_.end(), true) != former.left_.end()) {
    throw Failure(Code::kUnavailable,
                  "ranks have died, and another has shut down before",
                  "see the first error above");
  }
  previous_ranks_.resize(former.size());
  std::iota(previous_ranks_.begin(), previous_ranks_.end(), 0);
  Network* before = former.network_.get();
  bool nobody_died = !former.broken();
  for (bool formed = false; !formed; nobody_died = false) {
    auto next = before->Reconfigure(nobody_died, settings_.timeout_seconds);
    const bool fewer = next->previous_ranks().size() < previous_ranks_.size();
    std::vector<int> survivors;
    for (int rank : next->previous_ranks()) {
      survivors.push_back(previous_ranks_[rank]);
    }
    previous_ranks_ = std::move(survivors);
    network_ = std::move(next);
    before = network_.get();
    AssignRanks(former);
    std::string error;
    formed = network_->Agree(RendezvousOfThisHost(former, &error),
                             settings_.timeout_seconds);
    if (!formed && header_) Close();
    if (!formed && !fewer) {
      throw Failure(Code::kUnavailable,
                    "the surviving ranks could not form a job: " + error);
    }
    ++reconfigurations_;
  }
  if (info_.size == info_.local_size) network_.reset();
}

void Job::AssignRanks(const Job& former) {
  const auto host = [&](int rank) { return former.host_of(previous_ranks_[rank]); };
  info_.size = static_cast<int>(previous_ranks_.size());
  info_.rank = network_->rank();
  info_.local_rank = info_.local_size = 0;
  left_ = std::vector<std::atomic<bool>>(info_.size);
  hosts_.resize(info_.size);
  for (int rank = 0; rank < info_.size; ++rank) {
    int first = 0;
    while (host(first) != host(rank)) ++first;
    hosts_[rank] = first;
    if (host(rank) != host(info_.rank)) continue;
    if (rank < info_.rank) ++info_.local_rank;
    ++info_.local_size;
  }
}

bool Job::RendezvousOfThisHost(const Job& former, std::string* error) {
  std::vector<int> previous;  // local rank in the former job, by local rank
  for (int rank = 0; rank < info_.size; ++rank) {
    if (hosts_[rank] != hosts_[info_.rank]) continue;
    previous.push_back(former.local_.Find(previous_ranks_[rank]));
  }
  const GoneFunction former_gone = former.GoneOrStuck();
  try {
    local_ = JoinSurvivors(
        info_,
        former.NextMeeting(previous[0]) + "." + std::to_string(reconfigurations_),
        kMemoryBytes, settings_.timeout_seconds,
        [&](int local_rank) { return former_gone(previous[local_rank]); });
    if (local_.processes.size() < previous.size()) return false;
    Open("regroup");
    return true;
  } catch (const Failure& failure) {
    *error = failure.what();
    return false;
  }
}

}  // namespace collective
