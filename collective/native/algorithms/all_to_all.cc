// All-to-all through shared memory.
//
// Each slot is divided among the ranks: a rank writes to each part the next
// piece of what it has for that rank, and copies the pieces that the other
// ranks wrote for it; a chunk is read while the next one is written. Steps: 1.
// Bytes: each rank writes (n-1)/n of its input once and reads (n-1)/n of its
// output once.
#include <algorithm>

#include "algorithms/collectives.h"

namespace collective {
namespace {

constexpr size_t kRoomAlign = 128;  // of a rank's part of a slot: two lines

// request.counts in bytes.
struct ByteMatrix {
  const int64_t* counts;
  const int n;
  const size_t element_bytes;
  size_t operator()(int from, int to) const {
    return static_cast<size_t>(counts[from * n + to]) * element_bytes;
  }
};

ByteMatrix MatrixOf(const Request& request, int n) {
  if (request.counts.size() != static_cast<size_t>(n) * n) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong matrix of counts",
                  "give what every rank sends to every rank");
  }
  return {request.counts.data(), n, SizeOf(request.tensors[0].dtype)};
}

// In bytes: where this rank's data for each rank, and from each rank, begins.
struct Layout {
  std::vector<size_t> sends, receives;
  size_t longest;  // of the whole matrix
};

Layout LayoutOf(const ByteMatrix& bytes, int me) {
  const int n = bytes.n;
  Layout layout = {std::vector<size_t>(n + 1), std::vector<size_t>(n + 1), 0};
  for (int i = 0; i < n; ++i) {
    layout.sends[i + 1] = layout.sends[i] + bytes(me, i);
    layout.receives[i + 1] = layout.receives[i] + bytes(i, me);
    for (int j = 0; j < n; ++j) {
      layout.longest = std::max(layout.longest, bytes(i, j));
    }
  }
  return layout;
}

}  // namespace

void AllToAll(Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  const int n = ranks.size(), me = ranks.me();
  const ByteMatrix matrix = MatrixOf(request, n);
  const Layout layout = LayoutOf(matrix, me);
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  ranks.Post(request);
  if (const size_t mine = matrix(me, me)) {
    CopyBytes(output + layout.receives[me], input + layout.sends[me], mine);
  }

  const size_t room = Communicator::kChunkBytes / n / kRoomAlign * kRoomAlign;
  const uint32_t chunks =
      static_cast<uint32_t>((layout.longest + room - 1) / room);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int from, int to, size_t begin) {
    const size_t all = matrix(from, to);
    return begin < all ? std::min(room, all - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int from, int to, size_t bytes) {
    return ranks.Slot(chunk, from) + to * room +
           Communicator::SlotOffset(chunk, bytes, room);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * room;
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, layout.longest * n,
                  std::min(room, layout.longest - begin) * n, me == 0);
      SlotStores::Timer timer(stores);
      for (int i = 1; i < n; ++i) {
        const int member = (me + i) % n;
        const size_t bytes = length(me, member, begin);
        ranks.kernels().copy(slot(chunk, me, member, bytes),
                             input + layout.sends[member] + begin, bytes,
                             stores.stream());
      }
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == std::min(1u, chunks)) ranks.VerifyMatch(request);
    if (turn == 0) continue;
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * room;
    for (int i = 1; i < n; ++i) {
      const int member = (me + i) % n;
      ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
      if (const size_t bytes = length(member, me, begin)) {
        SlotStores::Timer timer(stores);
        CopyBytes(output + layout.receives[member] + begin,
                  slot(chunk, member, me, bytes), bytes);
      }
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace collective
