// All-gather: every rank ends with the tensors of all, one behind the other.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_

#include "communicator.h"

namespace collective {

// One tensor. request.counts: elements of each rank, the same list everywhere;
// the output has room for all of them.
void AllGather(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_
