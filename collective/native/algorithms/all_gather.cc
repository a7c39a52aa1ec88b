// All-gather through shared memory.
//
// Each rank writes its data into its slots, chunk by chunk, and reads the slots
// of the other ranks; a chunk is read while the next one is written. Steps: 1.
// Bytes: each rank writes its own data once and reads the other ranks' data
// once. A few bytes travel within the posts.
#include <algorithm>

#include "algorithms/arguments.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// All in bytes, by member.
struct Layout {
  std::vector<size_t> starts, lengths;
  size_t longest;
};

Layout LayoutOf(const Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  if (request.counts.size() != static_cast<size_t>(ranks.size()) ||
      request.counts[ranks.me()] != tensor.count) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong list of counts",
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

void GatherByPosts(Communicator& ranks, const Request& request,
                   const Layout& layout, char* output) {
  const int n = ranks.size();
  ranks.VerifyMatch(request);
  for (int member = 0; member < n; ++member) {
    if (member == ranks.me() || !layout.lengths[member]) continue;
    CopyBytes(output + layout.starts[member], ranks.PostedBy(member),
              layout.lengths[member]);
  }
}

void GatherBySlots(Communicator& ranks, const Request& request,
                   const Layout& layout, const char* input, char* output) {
  constexpr size_t kChunk = Communicator::kChunkBytes;
  const int n = ranks.size(), me = ranks.me();
  const uint32_t chunks =
      static_cast<uint32_t>((layout.longest + kChunk - 1) / kChunk);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int member, size_t begin) {
    const size_t all = layout.lengths[member];
    return begin < all ? std::min(kChunk, all - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int member, size_t bytes) {
    return ranks.Slot(chunk, member) + Communicator::SlotOffset(chunk, bytes);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * kChunk;
      const size_t bytes = length(me, begin);
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, layout.longest,
                  std::min(kChunk, layout.longest - begin), me == 0);
      SlotStores::Timer timer(stores);
      ranks.kernels().copy(slot(chunk, me, bytes), input + begin, bytes,
                           stores.stream());
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == 0) continue;
    if (turn == 1) ranks.VerifyMatch(request);
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * kChunk;
    for (int i = 1; i < n; ++i) {
      const int member = (me + i) % n;
      ranks.AwaitStage(Communicator::kFilled, chunk, member, request);
      if (const size_t bytes = length(member, begin)) {
        SlotStores::Timer timer(stores);
        CopyBytes(output + layout.starts[member] + begin,
                  slot(chunk, member, bytes), bytes);
      }
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace

void AllGather(Communicator& ranks, const Request& request) {
  const Layout layout = LayoutOf(ranks, request);
  const Tensor& tensor = request.tensors[0];
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  const size_t start = layout.starts[ranks.me()];
  const size_t bytes = layout.lengths[ranks.me()];
  const bool by_posts = layout.longest <= Communicator::kPostBytes;
  if (by_posts && bytes) CopyBytes(ranks.PostData(), input, bytes);
  ranks.Post(request);
  if (bytes && output + start != input) {
    CopyBytes(output + start, input, bytes);
  }
  if (by_posts) {
    GatherByPosts(ranks, request, layout, output);
  } else {
    GatherBySlots(ranks, request, layout, input, output);
  }
}

}  // namespace collective
