// All-to-all: rank r ends with the parts that all ranks have for it, in rank
// order.
//
// The parts may differ in length; every rank knows the whole matrix of lengths,
// so that all take the same number of steps.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_

#include "communicator.h"

namespace collective {

// One tensor. request.counts[s * size + r]: elements that rank s has for rank
// r, the same matrix on every rank. The output must not be the input. Throws
// kInvalidArgument for a matrix of another size.
void AllToAll(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_
