// Broadcast: every rank ends with the root's tensors.
//
// All tensors of a request travel as one array of bytes, whatever their types.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_

#include "communicator.h"

namespace collective {

// request.root: a member; otherwise throws kInvalidArgument. Sends the root's
// inputs, and writes the outputs on every rank (on the root, only if they are
// not the inputs).
void Broadcast(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_BROADCAST_H_
