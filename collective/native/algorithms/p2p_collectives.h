// The collectives by messages alone, for ranks on several hosts.
//
// They use Communicator::Exchange only and so need no shared memory. Contracts
// are those of each collective's own header. All-reduce has several algorithms
// (all_reduce.h), and barrier needs none.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_

#include "communicator.h"

namespace collective {

// Binomial tree: ceil(log2 n) steps, each with the whole message [Thakur,
// Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005].
void P2pBroadcast(Communicator& ranks, const Request& request);
// Ring: n-1 steps; each rank sends all but one rank's data, (n-1)/n of the
// output if all are equal [ibid.].
void P2pAllGather(Communicator& ranks, const Request& request);
// Pairwise exchange: n-1 steps; each rank sends (n-1)/n of the input [ibid.].
// Sums in rank order, once all parts are here.
void P2pReduceScatter(Communicator& ranks, const Request& request);
// Pairwise exchange: n-1 steps; each rank sends all but its own part [ibid.].
void P2pAllToAll(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_P2P_COLLECTIVES_H_
