// All-gather: every rank ends with the tensors of all ranks, in rank order.
//
// The ranks' tensors may differ in length; the caller has exchanged the
// lengths, so that no rank needs to know more than one list.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_

#include "communicator.h"

namespace collective {

// One tensor. request.counts: elements of each rank, the same list on every
// rank; the output has room for all of them. Throws kInvalidArgument if the
// list does not fit the tensor.
void AllGather(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_ALL_GATHER_H_
