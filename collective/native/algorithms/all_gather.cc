// All-gather.
//
// Through shared memory, each rank writes its data into its slots, chunk by
// chunk, and reads the slots of the other ranks; a chunk is read while the next
// one is written. Steps: 1. Bytes: each rank writes its own data once and reads
// the other ranks' data once. A few bytes travel within the posts. By messages:
// a ring, n-1 steps.
#include "algorithms/arguments.h"
#include "algorithms/chunks.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// Numbers of bytes, by member.
struct Layout {
  std::vector<size_t> starts, lengths;
  size_t longest;
};

Layout LayoutOf(const Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  if (request.counts.size() != static_cast<size_t>(ranks.size()) ||
      request.counts[ranks.me()] != tensor.count) {
    throw Failure(Code::kInvalidArgument, request.Describe() + ": wrong list of counts",
                  "give the number of elements of every rank");
  }
  Layout layout = {OffsetsOf(request.counts, SizeOf(tensor.dtype)),
                   std::vector<size_t>(request.counts.size()), 0};
  for (size_t i = 0; i < request.counts.size(); ++i) {
    layout.lengths[i] = layout.starts[i + 1] - layout.starts[i];
    layout.longest = std::max(layout.longest, layout.lengths[i]);
  }
  return layout;
}

void GatherByPosts(Communicator& ranks, const Request& request, const Layout& layout,
                   char* output) {
  const int n = ranks.size();
  ranks.VerifyMatch(request);
  for (int member = 0; member < n; ++member) {
    if (member == ranks.me() || !layout.lengths[member]) continue;
    CopyBytes(output + layout.starts[member], ranks.PostedBy(member),
              layout.lengths[member]);
  }
}

void GatherBySlots(Communicator& ranks, const Request& request, const Layout& layout,
                   const char* input, char* output) {
  constexpr size_t kChunk = Communicator::kChunkBytes;
  const int n = ranks.size(), me = ranks.me();
  const auto slot = [&](uint32_t chunk, int member, size_t bytes) {
    return ranks.Slot(chunk, member) + Communicator::SlotOffset(chunk, bytes);
  };
  ForChunks(
      ranks, request, layout.longest, kChunk, 1,
      [&](uint32_t chunk, size_t begin) {
        const size_t bytes = PieceOf(layout.lengths[me], begin, kChunk);
        ranks.kernels().copy(slot(chunk, me, bytes), input + begin, bytes,
                             ranks.stores().stream());
      },
      [&](uint32_t chunk, size_t begin) {
        for (int i = 1; i < n; ++i) {
          const int member = (me + i) % n;
          const size_t bytes = PieceOf(layout.lengths[member], begin, kChunk);
          ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
          if (bytes == 0) continue;
          SlotStores::Timer timer(ranks.stores());
          CopyBytes(output + layout.starts[member] + begin, slot(chunk, member, bytes),
                    bytes);
        }
      });
}

void GatherByMessages(Communicator& ranks, const Request& request, const Layout& layout,
                      char* output) {
  const int n = ranks.size(), me = ranks.me();
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + n) % n;
    ranks.p2p().Exchange((me + 1) % n, output + layout.starts[out], layout.lengths[out],
                         (me + n - 1) % n, output + layout.starts[in],
                         layout.lengths[in], request);
  }
}

}  // namespace

void AllGather(Communicator& ranks, const Request& request) {
  const Layout layout = LayoutOf(ranks, request);
  const Tensor& tensor = request.tensors[0];
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  const size_t start = layout.starts[ranks.me()];
  const size_t bytes = layout.lengths[ranks.me()];
  const bool by_posts =
      !ranks.spans_hosts() && layout.longest <= Communicator::kPostBytes;
  if (by_posts && bytes) CopyBytes(ranks.PostData(), input, bytes);
  ranks.Post(request);
  if (ranks.spans_hosts()) ranks.VerifyMatch(request);
  if (bytes && output + start != input) {
    CopyBytes(output + start, input, bytes);
  }
  if (by_posts) {
    GatherByPosts(ranks, request, layout, output);
  } else if (ranks.spans_hosts()) {
    GatherByMessages(ranks, request, layout, output);
  } else {
    GatherBySlots(ranks, request, layout, input, output);
  }
}

}  // namespace collective
