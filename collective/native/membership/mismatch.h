// What follows where the ranks of a group have not all posted the same.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_MISMATCH_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_MISMATCH_H_

#include <cstdint>
#include <string>
#include <vector>

namespace collective {

// Thrown, though it is no failure: some ranks have joined (join.h), and the
// others agree.
struct SomeHaveJoined {
  int caller;         // the first member that has not joined
  std::string ranks;  // those that have: "1,3"
};

// All lists are by member: the ranks, and what each has posted.
void ThrowIfJoined(const std::vector<int>& ranks,
                   const std::vector<uint64_t>& signatures);

// A failure that tells what each rank called.
[[noreturn]] void ThrowDisagreement(const std::vector<int>& ranks,
                                    const std::vector<std::string>& texts);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_MISMATCH_H_
