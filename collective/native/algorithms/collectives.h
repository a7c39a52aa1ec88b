// The collectives; all-reduce is in all_reduce.h.
//
// Each goes through shared memory if the ranks are on one host, and otherwise by
// Communicator::Exchange; then it takes as many steps as in [Thakur, Rabenseifner
// and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005].
#pragma once

#include "communicator.h"

namespace collective {

// Runs the collective of a request to its end in this thread: it is recorded and
// timed, and running out of memory is an error on all ranks. Throws Failure; or
// RanksHaveJoined, before any output is written.
void Execute(Communicator& ranks, const Request& request);

// No rank leaves before every rank has entered. A post without data is already a
// barrier, in one step, since every rank reads every post.
inline void Barrier(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.VerifyMatch(request);
}

// Every rank ends with the inputs of request.root, a member. All tensors travel
// as one array of bytes, of any types. On the root, outputs are written only if
// they are not the inputs.
void Broadcast(Communicator& ranks, const Request& request);

// Every rank ends with the tensors of all ranks, in rank order. One tensor;
// request.counts: elements of each rank, the same list on every rank (the
// caller has exchanged it).
void AllGather(Communicator& ranks, const Request& request);

// Rank r ends with part r of the sum over all ranks. One tensor;
// request.counts: elements of each part, which add up to the input. Each
// element is summed by one rank, in rank order.
void ReduceScatter(Communicator& ranks, const Request& request);

// Rank r ends with the parts that all ranks have for it, in rank order. One
// tensor, whose output is not the input; request.counts[s * size + r]: elements
// that rank s has for rank r, the same matrix on every rank.
void AllToAll(Communicator& ranks, const Request& request);

}  // namespace collective
