// What several collectives compute and check about their arguments.
//
// The versions for shared memory and for messages refuse the same calls in the
// same words this way.
#pragma once

#include <string>
#include <vector>

#include "communicator.h"
#include "kernels/kernels.h"
#include "kernels/types.h"

namespace collective {

inline size_t BytesOf(const Tensor& tensor) {
  return static_cast<size_t>(tensor.count) * SizeOf(tensor.dtype);
}

// Where the part of each rank begins, followed by where the last one ends.
inline std::vector<size_t> OffsetsOf(const std::vector<int64_t>& counts,
                                     size_t element_bytes) {
  std::vector<size_t> offsets(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    offsets[i + 1] =
        offsets[i] + static_cast<size_t>(counts[i]) * element_bytes;
  }
  return offsets;
}

[[noreturn]] inline void ThrowNoBoolAverage(const Request& request) {
  throw Failure(Code::kInvalidArgument,
                request.Describe() + ": bool has no average",
                "reduce with Sum (or), Min (and), or cast to float32");
}

// Throws kInvalidArgument for an average of bool.
inline ReduceKernel KernelOf(const Communicator& ranks, const Request& request,
                             DType dtype) {
  const ReduceKernel kernel =
      ranks.kernels()
          .reduce[static_cast<int>(dtype)][static_cast<int>(request.op)];
  if (!kernel) ThrowNoBoolAverage(request);
  return kernel;
}

inline void CheckRoot(const Communicator& ranks, const Request& request) {
  if (request.root >= 0 && request.root < ranks.size()) return;
  throw Failure(Code::kInvalidArgument,
                request.Describe() + ": there is no such root",
                "choose one from 0 to " + std::to_string(ranks.size() - 1));
}

}  // namespace collective
