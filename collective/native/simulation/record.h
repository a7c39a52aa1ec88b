// What the ranks of a host send and await in an all-reduce: recorded, not derived.
//
// The algorithms never look at the data, nor at the time. So a host's ranks can run
// them as they are, as threads with their shared memory, over a network on which every
// message arrives at once, and no other host need run. What they ask of that network,
// in order, is their program.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/types.h"

namespace collective {

struct Operation {
  enum Kind : int32_t { kSend, kAwait };
  Kind kind;
  int32_t peer;  // kSend: the receiver
  int64_t what;  // kSend: bytes; kAwait: which of Program::receives
};

struct Program {
  struct Receive {
    int32_t peer;
    int64_t bytes;
  };
  std::vector<Operation> operations;
  std::vector<Receive> receives;  // in the order in which they are requested
};

struct Layout {
  int hosts, slots;
  int size() const { return hosts * slots; }
};

// The programs of the ranks of `host` in the all-reduces of so many bytes of float32:
// by size, then by rank of the host. Throws kInvalidArgument for more ranks than a job
// can have.
std::vector<std::vector<Program>> RecordHost(const Layout& layout, int host,
                                             const std::vector<int64_t>& bytes,
                                             Algorithm algorithm);

}  // namespace collective
