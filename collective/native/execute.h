// From a request to the collective that it asks for.
//
// One switch, so that queues, join() and tests run every collective in the same
// way: recorded, timed, and with running out of memory as an error on all
// ranks.
#pragma once

#include "communicator.h"

namespace collective {

// Runs one collective to its end in this thread. Throws Failure; or
// RanksHaveJoined, before any output is written.
void Execute(Communicator& ranks, const Request& request);

}  // namespace collective
