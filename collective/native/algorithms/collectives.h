// The collectives but for all-reduce (all_reduce.h).
//
// Each has a version through shared memory, for ranks on one host, and one that
// sends messages, for ranks on several hosts (P2p...). Both refuse the same
// calls with kInvalidArgument. A P2p collective uses Communicator::Exchange
// only; its cost in steps is that of [Thakur, Rabenseifner and Gropp, Int. J.
// High Perform. Comput. Appl. 19(1), 2005].
#pragma once

#include "communicator.h"

namespace collective {

// No rank leaves before every rank has entered. A post without data is a
// barrier already, in one step, since every rank reads every post.
inline void Barrier(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.VerifyMatch(request);
}

// Every rank ends with the inputs of request.root, a member. All tensors travel
// as one array of bytes, whatever their types. On the root, outputs are written
// only if they are not the inputs. Messages: binomial tree, ceil(log2 n) steps.
void Broadcast(Communicator& ranks, const Request& request);
void P2pBroadcast(Communicator& ranks, const Request& request);

// Every rank ends with the tensors of all ranks, in rank order. One tensor;
// request.counts: elements of each rank, the same list on every rank (the
// caller has exchanged it). Messages: ring, n-1 steps.
void AllGather(Communicator& ranks, const Request& request);
void P2pAllGather(Communicator& ranks, const Request& request);

// Rank r ends with part r of the sum over all ranks. One tensor;
// request.counts: elements of each part, which add up to the input. Each
// element is summed by one rank, in rank order. Messages: pairwise, n-1 steps.
void ReduceScatter(Communicator& ranks, const Request& request);
void P2pReduceScatter(Communicator& ranks, const Request& request);

// Rank r ends with the parts that all ranks have for it, in rank order. One
// tensor, whose output is not the input; request.counts[s * size + r]: elements
// that rank s has for rank r, the same matrix on every rank. Messages:
// pairwise, n-1 steps.
void AllToAll(Communicator& ranks, const Request& request);
void P2pAllToAll(Communicator& ranks, const Request& request);

}  // namespace collective
