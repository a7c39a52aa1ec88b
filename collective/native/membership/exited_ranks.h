// Which ranks have exited, as the launcher reports it.
//
// The launcher and its ranks share a membership file with one byte for each
// launch rank (COLLECTIVE_BOARD names it). Before the rendezvous a rank has no
// descriptor of the other processes, so only the launcher can know.
#pragma once

#include <functional>

namespace collective {

// Returns a function that says whether a launch rank of this job has exited. It
// is empty if the launcher shares no membership file.
std::function<bool(int)> ExitedRanks(int size);

}  // namespace collective
