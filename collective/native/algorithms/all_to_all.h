// All-to-all: rank r ends with the parts that all ranks have for it, in order.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_

#include "communicator.h"

namespace collective {

// One tensor. request.counts[s * size + r]: elements that s has for r, the same
// matrix on every rank. The output must not be the input.
void AllToAll(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_ALL_TO_ALL_H_
