// All-to-all.
//
// Through shared memory, each slot is divided among the ranks: a rank writes to
// each part the next piece of its data for that rank, and copies the pieces
// that the other ranks wrote for it; a chunk is read while the next one is
// written. Steps: 1. Bytes: each rank writes (n-1)/n of its input once and
// reads (n-1)/n of its output once. By messages: pairwise, n-1 steps.
#include "algorithms/chunks.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// In bytes: the beginning of this rank's data for each rank, and from each rank.
struct Layout {
  std::vector<size_t> sends, receives;
  size_t longest;  // the most bytes from one rank to another

  size_t SendBytes(int to) const { return sends[to + 1] - sends[to]; }
  size_t ReceiveBytes(int from) const { return receives[from + 1] - receives[from]; }
};

Layout LayoutOf(const Request& request, int n, int me) {
  if (request.counts.size() != static_cast<size_t>(n) * n) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong matrix of counts",
                  "give what every rank sends to every rank");
  }
  const size_t size = SizeOf(request.tensors[0].dtype);
  const auto bytes = [&](int from, int to) {
    return static_cast<size_t>(request.counts[from * n + to]) * size;
  };
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

void MoveBySlots(Communicator& ranks, const Request& request, const Layout& layout,
                 const char* input, char* output) {
  const int n = ranks.size(), me = ranks.me();
  const size_t room = Communicator::PartBytes(n);
  ForChunks(
      ranks, request, layout.longest, room, n,
      [&](uint32_t chunk, size_t begin) {
        for (int i = 1; i < n; ++i) {
          const int member = (me + i) % n;
          const size_t bytes = PieceOf(layout.SendBytes(member), begin, room);
          ranks.kernels().copy(ranks.Part(chunk, me, member, n, bytes),
                               input + layout.sends[member] + begin, bytes,
                               ranks.stores().stream());
        }
      },
      [&](uint32_t chunk, size_t begin) {
        for (int i = 1; i < n; ++i) {
          const int member = (me + i) % n;
          const size_t bytes = PieceOf(layout.ReceiveBytes(member), begin, room);
          ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
          if (bytes == 0) continue;
          SlotStores::Timer timer(ranks.stores());
          CopyBytes(output + layout.receives[member] + begin,
                    ranks.Part(chunk, member, me, n, bytes), bytes);
        }
      });
}

void MoveByMessages(Communicator& ranks, const Request& request, const Layout& layout,
                    const char* input, char* output) {
  const int n = ranks.size(), me = ranks.me();
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    ranks.p2p().Exchange(to, input + layout.sends[to], layout.SendBytes(to), from,
                         output + layout.receives[from], layout.ReceiveBytes(from),
                         request);
  }
}

}  // namespace

void AllToAll(Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  const int me = ranks.me();
  const Layout layout = LayoutOf(request, ranks.size(), me);
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  ranks.Post(request);
  if (ranks.spans_hosts()) ranks.VerifyMatch(request);
  if (const size_t mine = layout.SendBytes(me)) {
    CopyBytes(output + layout.receives[me], input + layout.sends[me], mine);
  }
  (ranks.spans_hosts() ? MoveByMessages : MoveBySlots)(ranks, request, layout, input,
                                                       output);
}

}  // namespace collective
