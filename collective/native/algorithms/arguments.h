// Checks and offsets that several collectives need for their arguments.
#pragma once

#include <vector>

#include "communicator.h"
#include "kernels/kernels.h"
#include "kernels/types.h"

namespace collective {

// The beginning of each rank's part, followed by the end of the last one.
inline std::vector<size_t> OffsetsOf(const std::vector<int64_t>& counts,
                                     size_t element_bytes) {
  std::vector<size_t> offsets(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    offsets[i + 1] = offsets[i] + static_cast<size_t>(counts[i]) * element_bytes;
  }
  return offsets;
}

[[noreturn]] inline void ThrowNoBoolAverage(const Request& request) {
  throw Failure(Code::kInvalidArgument, request.Describe() + ": bool has no average",
                "reduce with Sum (or), Min (and), or cast to float32");
}

// Throws kInvalidArgument for an average of bool.
inline ReduceKernel KernelOf(const Communicator& ranks, const Request& request,
                             DType dtype) {
  const ReduceKernel kernel =
      ranks.kernels().reduce[static_cast<int>(dtype)][static_cast<int>(request.op)];
  if (!kernel) ThrowNoBoolAverage(request);
  return kernel;
}

// The number of ranks for an average, else 1.
inline int DivisorOf(const Communicator& ranks, const Request& request) {
  return request.op == Op::kAverage ? ranks.size() : 1;
}

}  // namespace collective
