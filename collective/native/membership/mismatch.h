// The error if the ranks of a group have posted different collectives.
//
// Every rank sees the same signatures, so every rank throws the same error and
// none waits for another. Ranks that have called join() are not a mismatch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace collective {

// Thrown, though it is not a failure: some ranks have joined (join.h), and all
// others call the same collective.
struct RanksHaveJoined {
  int caller;         // the lowest member that has not joined
  std::string ranks;  // the ranks that have joined: "1,3"
};

// Throws RanksHaveJoined if the signatures differ for that reason. Both lists are
// by member.
void ThrowIfJoined(const std::vector<int>& ranks,
                   const std::vector<uint64_t>& signatures);

// Throws kFailedPrecondition with the call of each rank. Both lists are by
// member.
[[noreturn]] void ThrowMismatch(const std::vector<int>& ranks,
                                const std::vector<std::string>& texts);

}  // namespace collective
