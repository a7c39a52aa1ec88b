// The tensors of a reduction as one array, for algorithms that send messages.
//
// A message is contiguous, so several tensors are packed into a fusion buffer
// first and unpacked at the end; a single tensor is reduced in its output. (The
// direct algorithm needs neither.)
#pragma once

#include <vector>

#include "algorithms/all_reduce.h"

namespace collective {

class FlatBuffer {
 public:
  FlatBuffer(Communicator& ranks, const Reduction& reduction);
  // Unpacks the result into the outputs.
  void Finish();

  size_t count() const { return count_; }
  size_t bytes(size_t elements) const { return elements * size_; }
  char* at(size_t element) { return data_ + element * size_; }

  // Sends [send_begin, send_end) to one member while receiving [begin, end) from
  // another. The received elements are combined with the elements here (Reduce),
  // or replace them.
  void Reduce(int to, size_t send_begin, size_t send_end, int from, size_t begin,
              size_t end);
  void Replace(int to, size_t send_begin, size_t send_end, int from, size_t begin,
               size_t end);
  // Divides [begin, end) by the number of ranks, for an average.
  void Scale(size_t begin, size_t end);

 private:
  Communicator& ranks_;
  const Reduction& reduction_;
  size_t size_;
  size_t count_;
  ReduceKernel combine_;
  std::vector<char> buffer_;
  char* data_ = nullptr;
  bool packed_ = true;
};

}  // namespace collective
