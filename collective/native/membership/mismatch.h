// What follows when the ranks of a group have posted different collectives.
//
// Every rank sees the same signatures, so every rank throws the same error and
// none waits for another. Ranks that have called join() are no mismatch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace collective {

// Thrown, though it is no failure: some ranks have joined (join.h), and all
// that have not call the same collective.
struct RanksHaveJoined {
  int caller;         // the lowest member that has not joined
  std::string ranks;  // the ranks that have: "1,3"
};

// Throws RanksHaveJoined if that is why the signatures differ. Both lists are
// by member.
void ThrowIfJoined(const std::vector<int>& ranks,
                   const std::vector<uint64_t>& signatures);

// Throws kFailedPrecondition with what each rank called. Both lists are by
// member.
[[noreturn]] void ThrowMismatch(const std::vector<int>& ranks,
                                const std::vector<std::string>& texts);

}  // namespace collective
