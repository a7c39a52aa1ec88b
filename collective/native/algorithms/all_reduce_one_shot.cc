// All-reduce of a few bytes: one message each way.
//
// Each rank writes its data behind its post and, once it has seen all posts,
// sums all of it itself, in the order of the ranks. One cache line brings up to
// 48 bytes together with the news that they are there.
#include <cstring>

#include "algorithms/all_reduce.h"

namespace collective {
namespace {

constexpr size_t kAlign = 16;

size_t Aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

size_t BytesOf(const Tensor& tensor) {
  return static_cast<size_t>(tensor.count) * SizeOf(tensor.dtype);
}

}  // namespace

bool FitsOneShot(const Request& request) {
  size_t bytes = 0;
  for (const Tensor& tensor : request.tensors) {
    bytes += Aligned(BytesOf(tensor));
  }
  return bytes <= Communicator::kPostBytes;
}

void PostOneShot(Communicator& ranks, const Request& request) {
  char* to = ranks.PostData();
  for (const Tensor& tensor : request.tensors) {
    if (tensor.count > 0) std::memcpy(to, tensor.input, BytesOf(tensor));
    to += Aligned(BytesOf(tensor));
  }
  ranks.Post(request);
}

void AllReduceOneShot(Communicator& ranks, const Request& request) {
  constexpr int kMostRanks = 128;
  if (!request.posted) PostOneShot(ranks, request);
  ranks.Agree(request);
  const void* sources[kMostRanks];
  ReduceJob job = {};
  job.sources = sources;
  job.nsources = ranks.size();
  job.own = ranks.me();
  job.divisor = request.op == Op::kAverage ? ranks.size() : 1;
  size_t offset = 0;
  for (const Tensor& tensor : request.tensors) {
    for (int member = 0; member < ranks.size(); ++member) {
      sources[member] = ranks.PostedBy(member) + offset;
    }
    job.out = tensor.output;
    job.count = static_cast<size_t>(tensor.count);
    ranks.kernels().reduce[static_cast<int>(tensor.dtype)]
                          [static_cast<int>(request.op)](job);
    offset += Aligned(BytesOf(tensor));
  }
}

}  // namespace collective
