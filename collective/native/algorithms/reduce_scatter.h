// Reduce-scatter: rank r ends with part r of the sum over all ranks.
//
// Parts may differ in length. Each element is summed by one rank, in rank
// order.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_REDUCE_SCATTER_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_REDUCE_SCATTER_H_

#include "communicator.h"

namespace collective {

// One tensor. request.counts: elements of each rank's part, in rank order; they
// add up to the input. The output has room for this rank's part. Throws
// kInvalidArgument for other counts, and for an average of bool.
void ReduceScatter(Communicator& ranks, const Request& request);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_REDUCE_SCATTER_H_
