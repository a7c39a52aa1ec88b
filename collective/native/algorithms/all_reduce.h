// All-reduce: every rank ends with the sum (or mean, ...) over all ranks.
//
// Outputs have the same bits on every rank, in every algorithm: each
// element is either summed by one rank, or by all ranks in the same order.
#pragma once

#include "communicator.h"
#include "kernels/types.h"
#include "transport/tensor_list.h"

namespace collective {

// Reduces each tensor of the request; they may be of different types.
void AllReduce(Communicator& ranks, const Request& request);

// The tensors of one type, and how to reduce them.
struct Reduction {
  const Request& request;
  const TensorList& tensors;
  DType dtype;
  DType transport;
  ReduceKernel kernel;
  int divisor;
  bool in_place;
};

// For at most Communicator::kPostBytes in all: the posts hold all data, and every
// rank sums all of it. Includes Post and VerifyMatch.
bool FitsOneShot(const Request& request);
void AllReduceOneShot(Communicator& ranks, const Request& request);
// Whether AllReduce uses that algorithm; and its first half, which does not wait
// for other ranks. AllReduce of a request that is marked as posted does the rest.
bool IsOneShot(const Communicator& ranks, const Request& request);
void PostOneShot(Communicator& ranks, const Request& request);

// These are called after Post. AllReduceDirect calls VerifyMatch itself if
// `verify`; the caller does so before the others.
void AllReduceDirect(Communicator& ranks, const Reduction& reduction, bool verify);
void AllReduceHalvingDoubling(Communicator& ranks, const Reduction& reduction);
// Only if the ranks are on several hosts.
void AllReduceExchange(Communicator& ranks, const Reduction& reduction);
void AllReduceHierarchical(Communicator& ranks, const Reduction& reduction);

}  // namespace collective
