// The ranks that are left of a job on several hosts meet again.
//
// MPI says who is left, and all of these hear the same. They take new
// places; those of a host meet as ever. One may die meanwhile, and then some
// have met and others have not: so all agree, by MPI, whether everyone has met.
// Where not, all begin again, from what was agreed last.
#include <algorithm>
#include <numeric>

#include "membership/job.h"

namespace collective {

void Job::MeetAcrossHosts(const Job& former) {
  if (std::find(former.left_.begin(), former.left_.end(), true) !=
      former.left_.end()) {
    throw Failure(Code::kUnavailable,
                  "ranks have died, and another has shut down before",
                  "see the first error above");
  }
  former_.resize(former.size());
  std::iota(former_.begin(), former_.end(), 0);
  const Network* before = former.network_.get();
  bool whole = !former.broken();
  for (bool met = false; !met; whole = false) {
    auto next =
        std::make_unique<Network>(*before, whole, settings_.give_up_seconds);
    const bool fewer = next->former().size() < former_.size();
    std::vector<int> left;
    for (int number : next->former()) left.push_back(former_[number]);
    former_ = std::move(left);
    network_ = std::move(next);
    before = network_.get();
    TakePlaces(former);
    std::string why;
    met = network_->Agree(MeetHere(former, &why), settings_.give_up_seconds);
    if (!met && header_) Close();
    if (!met && !fewer) {
      throw Failure(Code::kUnavailable,
                    "the ranks that are left could not meet again: " + why);
    }
    ++meeting_;
  }
  if (place_.size == place_.local_size) network_.reset();
}

void Job::TakePlaces(const Job& former) {
  const auto host = [&](int rank) { return former.host_of(former_[rank]); };
  place_.size = static_cast<int>(former_.size());
  place_.rank = network_->rank();
  place_.local_rank = place_.local_size = 0;
  left_ = std::vector<std::atomic<bool>>(place_.size);
  hosts_.resize(place_.size);
  for (int rank = 0; rank < place_.size; ++rank) {
    int first = 0;
    while (host(first) != host(rank)) ++first;
    hosts_[rank] = first;
    if (host(rank) != host(place_.rank)) continue;
    if (rank < place_.rank) ++place_.local_rank;
    ++place_.local_size;
  }
}

bool Job::MeetHere(const Job& former, std::string* why) {
  std::vector<int> was;  // by local rank: the local rank in the former job
  for (int rank = 0; rank < place_.size; ++rank) {
    if (hosts_[rank] != hosts_[place_.rank]) continue;
    const std::vector<int>& ranks = former.here_.ranks;
    was.push_back(static_cast<int>(
        std::find(ranks.begin(), ranks.end(), former_[rank]) - ranks.begin()));
  }
  try {
    here_ = MeetOnce(
        place_, std::to_string(generation_) + "." + std::to_string(meeting_),
        kAreaStride * (1 + kMostAreas), settings_.give_up_seconds,
        [&](int local_rank) {
          return former.Left(was[local_rank]) || former.Dead(was[local_rank]);
        });
    if (here_.pids.size() < was.size()) return false;
    Open("regroup");
    return true;
  } catch (const Failure& failure) {
    *why = failure.what();
    return false;
  }
}

}  // namespace collective
