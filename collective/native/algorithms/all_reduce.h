// All-reduce: every rank ends with the sum (or mean, ...) over all ranks.
//
// Outputs are the same bits on every rank, whatever the algorithm.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_ALL_REDUCE_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_ALL_REDUCE_H_

#include "communicator.h"
#include "kernels/types.h"
#include "transport/tensor_list.h"

namespace collective {

// Reduces each tensor of the request; they may be of different types.
void AllReduce(Communicator& ranks, const Request& request);

// All that the algorithms need to know about the tensors of one type.
struct Reduction {
  const Request& request;
  const Span& span;
  DType dtype;
  DType transport;
  ReduceKernel kernel;
  int divisor;
  bool in_place;
};

// Everyone's data within the posts; everyone sums all of it. At most
// Communicator::kPostBytes in all. Includes Post and Agree.
bool FitsOneShot(const Request& request);
void AllReduceOneShot(Communicator& ranks, const Request& request);
// Whether AllReduce does it so, and its beginning, which waits for nobody: the
// rest is AllReduce of what is marked as posted.
bool IsOneShot(const Communicator& ranks, const Request& request);
void PostOneShot(Communicator& ranks, const Request& request);

// The rest are called between Post and the end; they call Agree themselves.
void AllReduceDirect(Communicator& ranks, const Reduction& reduction,
                     bool agree);
void AllReduceExchange(Communicator& ranks, const Reduction& reduction);
void AllReduceRing(Communicator& ranks, const Reduction& reduction);
void AllReduceHalvingDoubling(Communicator& ranks, const Reduction& reduction);
void AllReduceTree(Communicator& ranks, const Reduction& reduction);
// Of ranks on several hosts.
void AllReduceHierarchical(Communicator& ranks, const Reduction& reduction);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_ALL_REDUCE_H_
