// Which ranks have ended, as their launcher tells: before they have met, they
// cannot see it themselves.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_EXITED_RANKS_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_EXITED_RANKS_H_

#include <functional>

namespace collective {

// Tells it of a rank of this job, by the number that the launcher gave it.
// Empty where no launcher tells. It reads memory that COLLECTIVE_BOARD names: a
// byte for each rank.
std::function<bool(int)> EndedRanks(int size);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_EXITED_RANKS_H_
