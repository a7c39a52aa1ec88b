// From a request to the collective that it asks for.
#ifndef COLLECTIVE_NATIVE_EXECUTE_H_
#define COLLECTIVE_NATIVE_EXECUTE_H_

#include "communicator.h"

namespace collective {

// Runs one collective to its end in this thread. Throws Failure, or
// RanksHaveJoined before anything has happened.
void Execute(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_EXECUTE_H_
