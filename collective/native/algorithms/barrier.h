// Barrier: nobody leaves before everyone came.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_

#include "communicator.h"

namespace collective {

inline void Barrier(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.Agree(request);
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_BARRIER_H_
