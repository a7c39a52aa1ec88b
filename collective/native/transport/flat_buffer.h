// For algorithms that send messages: the tensors of a reduction as one array.
//
// A single tensor is worked on in its output; several are gathered into one
// buffer first and written back at the end. (The direct algorithm needs
// neither.)
#ifndef COLLECTIVE_NATIVE_TRANSPORT_FLAT_BUFFER_H_
#define COLLECTIVE_NATIVE_TRANSPORT_FLAT_BUFFER_H_

#include <vector>

#include "algorithms/all_reduce.h"

namespace collective {

class Flat {
 public:
  Flat(Communicator& ranks, const Reduction& reduction);
  // Copies the result into the outputs, where it is not there already.
  void Finish();

  size_t count() const { return count_; }
  size_t bytes(size_t elements) const { return elements * size_; }
  char* at(size_t element) { return data_ + element * size_; }

  // Sends [send_begin, send_end) to a member while [begin, end) comes from one,
  // and adds what comes to what is there (Reduce) or puts it there (Replace).
  void Reduce(int to, size_t send_begin, size_t send_end, int from,
              size_t begin, size_t end);
  void Replace(int to, size_t send_begin, size_t send_end, int from,
               size_t begin, size_t end);
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
  bool gathered_ = true;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_FLAT_BUFFER_H_
