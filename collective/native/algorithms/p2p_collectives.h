// The collectives by messages alone, for ranks on several hosts.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_

#include "communicator.h"

namespace collective {

// All but all-reduce and barrier; contracts as in each collective's own header.
void BroadcastByMessages(Communicator& ranks, const Request& request);
void AllGatherByMessages(Communicator& ranks, const Request& request);
void ReduceScatterByMessages(Communicator& ranks, const Request& request);
void AllToAllByMessages(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_
