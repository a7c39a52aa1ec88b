// All-reduce of a few bytes: every rank reads all data and sums it itself.
//
// Steps: 1. Bytes: each rank reads n-1 messages. The data follows the post,
// so that one cache line brings up to 48 bytes together with the counter that
// announces them. Sums are in rank order, the same on every rank.

#include "algorithms/all_reduce.h"
#include "algorithms/arguments.h"

namespace collective {
namespace {

constexpr size_t kAlign = 16;  // alignment of a tensor in the post: a vector register

size_t Aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

bool FitsOneShot(const Request& request) {
  size_t bytes = 0;
  for (const Tensor& tensor : request.tensors) {
    bytes += Aligned(tensor.bytes());
  }
  return bytes <= Communicator::kPostBytes;
}

void PostOneShot(Communicator& ranks, const Request& request) {
  char* to = ranks.PostData();
  for (const Tensor& tensor : request.tensors) {
    if (tensor.count > 0) CopyBytes(to, tensor.input, tensor.bytes());
    to += Aligned(tensor.bytes());
  }
  ranks.Post(request);
}

void AllReduceOneShot(Communicator& ranks, const Request& request) {
  if (!request.posted_at) PostOneShot(ranks, request);
  ranks.VerifyMatch(request);
  const void* sources[kMaxRanks];
  size_t offset = 0;
  for (const Tensor& tensor : request.tensors) {
    for (int member = 0; member < ranks.size(); ++member) {
      sources[member] = ranks.PostedBy(member) + offset;
    }
    KernelOf(ranks, request, tensor.dtype)(
        {sources, ranks.size(), ranks.me(), tensor.output,
         static_cast<size_t>(tensor.count), DivisorOf(ranks, request)});
    offset += Aligned(tensor.bytes());
  }
}

}  // namespace collective
