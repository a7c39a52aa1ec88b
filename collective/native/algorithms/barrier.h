// Barrier: no rank leaves before every rank has entered.
//
// A post without data is a barrier already: a dissemination in one step, since
// every rank can read every post.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_

#include "communicator.h"

namespace collective {

inline void Barrier(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.VerifyMatch(request);
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_
