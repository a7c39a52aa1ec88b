// Each slot is divided among the ranks: a rank writes to each its next piece,
// and copies what the others wrote for it.
#include "algorithms/all_to_all.h"

#include <algorithm>
#include <cstring>

namespace collective {

void AllToAll(Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  if (request.counts.size() != static_cast<size_t>(n) * n) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong matrix of counts",
                  "give what every rank sends to every rank");
  }
  const auto bytes = [&](int from, int to) {
    return static_cast<size_t>(request.counts[from * n + to]) * size;
  };
  std::vector<size_t> sends(n + 1, 0), receives(n + 1, 0);
  size_t most = 0;
  for (int member = 0; member < n; ++member) {
    sends[member + 1] = sends[member] + bytes(me, member);
    receives[member + 1] = receives[member] + bytes(member, me);
    for (int other = 0; other < n; ++other) {
      most = std::max(most, bytes(member, other));
    }
  }
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  ranks.Post(request);
  if (const size_t mine = bytes(me, me)) {
    std::memcpy(output + receives[me], input + sends[me], mine);
  }

  const size_t room = Communicator::kChunkBytes / n / 128 * 128;
  const uint32_t chunks = static_cast<uint32_t>((most + room - 1) / room);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int from, int to, size_t begin) {
    const size_t all = bytes(from, to);
    return begin < all ? std::min(room, all - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int from, int to, size_t bytes) {
    return ranks.Slot(chunk, from) + to * room +
           Communicator::PlaceOf(chunk, bytes, room);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * room;
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, most * n, std::min(room, most - begin) * n,
                  me == 0);
      SlotStores::Work work(stores);
      for (int i = 1; i < n; ++i) {
        const int member = (me + i) % n;
        const size_t more = length(me, member, begin);
        ranks.kernels().copy(slot(chunk, me, member, more),
                             input + sends[member] + begin, more,
                             stores.stream());
      }
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == std::min(1u, chunks)) ranks.Agree(request);
    if (turn == 0) continue;
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * room;
    for (int i = 1; i < n; ++i) {
      const int member = (me + i) % n;
      ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
      if (const size_t more = length(member, me, begin)) {
        SlotStores::Work work(stores);
        std::memcpy(output + receives[member] + begin,
                    slot(chunk, member, me, more), more);
      }
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace collective
