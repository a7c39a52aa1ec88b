// Each rank writes its data into its slots, chunk by chunk, and reads the slots
// of the others. A few bytes travel within the posts.
#include "algorithms/all_gather.h"

#include <algorithm>
#include <cstring>

namespace collective {

void AllGather(Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  if (request.counts.size() != static_cast<size_t>(n) ||
      request.counts[me] != tensor.count) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong list of counts",
                  "give the number of elements of every rank");
  }
  std::vector<size_t> bytes(n), starts(n);
  size_t total = 0, most = 0;
  for (int member = 0; member < n; ++member) {
    bytes[member] = static_cast<size_t>(request.counts[member]) * size;
    starts[member] = total;
    total += bytes[member];
    most = std::max(most, bytes[member]);
  }
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  const bool by_post = most <= Communicator::kPostBytes;
  if (by_post && bytes[me]) std::memcpy(ranks.PostData(), input, bytes[me]);
  ranks.Post(request);
  if (bytes[me] && output + starts[me] != input) {
    std::memcpy(output + starts[me], input, bytes[me]);
  }
  if (by_post) {
    ranks.Agree(request);
    for (int member = 0; member < n; ++member) {
      if (member == me || !bytes[member]) continue;
      std::memcpy(output + starts[member], ranks.PostedBy(member),
                  bytes[member]);
    }
    return;
  }

  constexpr size_t kChunk = Communicator::kChunkBytes;
  const uint32_t chunks = static_cast<uint32_t>((most + kChunk - 1) / kChunk);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int member, size_t begin) {
    return begin < bytes[member] ? std::min(kChunk, bytes[member] - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int member, size_t bytes) {
    return ranks.Slot(chunk, member) + Communicator::PlaceOf(chunk, bytes);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * kChunk;
      const size_t more = length(me, begin);
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, most, std::min(kChunk, most - begin), me == 0);
      SlotStores::Work work(stores);
      ranks.kernels().copy(slot(chunk, me, more), input + begin, more,
                           stores.stream());
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == 0) continue;
    if (turn == 1) ranks.Agree(request);
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * kChunk;
    for (int i = 1; i < n; ++i) {
      const int member = (me + i) % n;
      ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
      if (const size_t more = length(member, begin)) {
        SlotStores::Work work(stores);
        std::memcpy(output + starts[member] + begin, slot(chunk, member, more),
                    more);
      }
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace collective
