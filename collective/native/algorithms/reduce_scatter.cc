// Reduce-scatter.
//
// Through shared memory, each slot is divided among the ranks: a rank writes to
// each part the next piece of its data for that rank, and sums the pieces that
// all ranks have for it, in rank order; a chunk is summed while the next one is
// written. Steps: 1. Bytes: each rank writes (n-1)/n of the input once and
// reads as much. A few bytes travel within the posts. By messages: pairwise,
// n-1 steps.
#include "algorithms/arguments.h"
#include "algorithms/chunks.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// The one tensor of a request, and the beginning of each rank's part of it, in
// elements.
struct Parts {
  Parts(const Communicator& ranks, const Request& request)
      : n(ranks.size()),
        me(ranks.me()),
        starts(OffsetsOf(request.counts, 1)),
        size(SizeOf(request.tensors.at(0).dtype)),
        input(static_cast<const char*>(request.tensors[0].input)),
        output(static_cast<char*>(request.tensors[0].output)),
        kernel(KernelOf(ranks, request, request.tensors[0].dtype)),
        divisor(DivisorOf(ranks, request)) {
    if (request.counts.size() != static_cast<size_t>(n) ||
        starts.back() != static_cast<size_t>(request.tensors[0].count)) {
      throw Failure(Code::kInvalidArgument,
                    request.Describe() + ": wrong list of counts",
                    "give every rank's part; they add up to the tensor");
    }
  }
  size_t Count(int member) const { return starts[member + 1] - starts[member]; }
  const char* Input(int member) const { return input + starts[member] * size; }
  // Sums the data of all ranks for this one.
  void Sum(const void* const* sources, size_t begin, size_t count) const {
    kernel({sources, n, me, output + begin * size, count, divisor});
  }

  const int n, me;
  const std::vector<size_t> starts;
  const size_t size;  // bytes of an element
  const char* const input;
  char* const output;
  const ReduceKernel kernel;
  const int divisor;
};

void SumPosts(Communicator& ranks, const Request& request, const Parts& parts) {
  const void* sources[kMaxRanks];
  if (const size_t bytes = parts.starts.back() * parts.size) {
    CopyBytes(ranks.PostData(), parts.input, bytes);
  }
  ranks.Post(request);
  ranks.VerifyMatch(request);
  for (int member = 0; member < parts.n; ++member) {
    sources[member] = ranks.PostedBy(member) + parts.starts[parts.me] * parts.size;
  }
  parts.Sum(sources, 0, parts.Count(parts.me));
}

void SumSlots(Communicator& ranks, const Request& request, const Parts& parts) {
  const int n = parts.n, me = parts.me;
  const void* sources[kMaxRanks];
  const size_t step = Communicator::PartBytes(n) / parts.size;
  const auto longest = static_cast<size_t>(
      *std::max_element(request.counts.begin(), request.counts.end()));
  ranks.Post(request);
  ForChunks(
      ranks, request, longest, step, parts.size * n,
      [&](uint32_t chunk, size_t begin) {
        for (int i = 1; i < n; ++i) {
          const int member = (me + i) % n;
          const size_t bytes = PieceOf(parts.Count(member), begin, step) * parts.size;
          ranks.kernels().copy(ranks.Part(chunk, me, member, n, bytes),
                               parts.Input(member) + begin * parts.size, bytes,
                               ranks.stores().stream());
        }
      },
      [&](uint32_t chunk, size_t begin) {
        ranks.AwaitAll(Communicator::kFilled, chunk, request);
        const size_t count = PieceOf(parts.Count(me), begin, step);
        for (int member = 0; member < n; ++member) {
          sources[member] = ranks.Part(chunk, member, me, n, count * parts.size);
        }
        sources[me] = parts.Input(me) + begin * parts.size;
        SlotStores::Timer timer(ranks.stores());
        parts.Sum(sources, begin, count);
      });
}

void SumMessages(Communicator& ranks, const Request& request, const Parts& parts) {
  const int n = parts.n, me = parts.me;
  ranks.Post(request);
  ranks.VerifyMatch(request);
  const size_t mine = parts.Count(me) * parts.size;
  std::vector<char> received(mine * n);
  std::vector<const void*> sources(n);
  for (int i = 0; i < n; ++i) sources[i] = received.data() + mine * i;
  sources[me] = parts.Input(me);
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    ranks.p2p().Exchange(to, parts.Input(to), parts.Count(to) * parts.size, from,
                         received.data() + mine * from, mine, request);
  }
  parts.Sum(sources.data(), 0, parts.Count(me));
}

}  // namespace

void ReduceScatter(Communicator& ranks, const Request& request) {
  const Parts parts(ranks, request);
  if (ranks.spans_hosts()) return SumMessages(ranks, request, parts);
  const bool by_posts = request.bytes() <= Communicator::kPostBytes;
  (by_posts ? SumPosts : SumSlots)(ranks, request, parts);
}

}  // namespace collective
