// Broadcast: every rank ends with the root's tensors.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_

#include "communicator.h"

namespace collective {

// request.root: a member. The root's inputs are sent; outputs are written on
// every rank (on the root only where they are not the inputs).
void Broadcast(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_
