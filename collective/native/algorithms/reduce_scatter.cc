// Reduce-scatter through shared memory.
//
// Each slot is divided among the ranks: a rank writes to each part the next
// piece of its data for that rank, and sums the pieces that all ranks have for
// it, in rank order; a chunk is summed while the next one is written. Steps: 1.
// Bytes: each rank writes (n-1)/n of the input once and reads as much. A few
// bytes travel within the posts.
#include <algorithm>

#include "algorithms/arguments.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// Bytes of a rank's part of a slot: a multiple of two cache lines.
size_t RoomOf(int n) { return Communicator::kChunkBytes / n / 128 * 128; }

size_t LongestOf(const std::vector<int64_t>& counts) {
  return static_cast<size_t>(*std::max_element(counts.begin(), counts.end()));
}

// Where each rank's part begins, in elements.
std::vector<size_t> StartsOf(const Communicator& ranks,
                             const Request& request) {
  const std::vector<size_t> starts = OffsetsOf(request.counts, 1);
  if (request.counts.size() != static_cast<size_t>(ranks.size()) ||
      starts.back() != static_cast<size_t>(request.tensors.at(0).count)) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong list of counts",
                  "give every rank's part; they add up to the tensor");
  }
  return starts;
}

void ReduceScatterByPosts(Communicator& ranks, const Request& request,
                          const std::vector<size_t>& starts,
                          ReduceKernel kernel, ReduceJob* job) {
  const Tensor& tensor = request.tensors[0];
  const int me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  const void* sources[kMaxRanks];
  if (const size_t bytes = starts.back() * size) {
    CopyBytes(ranks.PostData(), tensor.input, bytes);
  }
  ranks.Post(request);
  ranks.VerifyMatch(request);
  for (int member = 0; member < ranks.size(); ++member) {
    sources[member] = ranks.PostedBy(member) + starts[me] * size;
  }
  job->sources = sources;
  job->out = tensor.output;
  job->count = starts[me + 1] - starts[me];
  kernel(*job);
}

void ReduceScatterBySlots(Communicator& ranks, const Request& request,
                          const std::vector<size_t>& starts,
                          ReduceKernel kernel, ReduceJob* job) {
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  const void* sources[kMaxRanks];
  job->sources = sources;
  ranks.Post(request);
  const size_t room = RoomOf(n);
  const size_t step = room / size;
  const size_t longest = LongestOf(request.counts);
  const uint32_t chunks = static_cast<uint32_t>((longest + step - 1) / step);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int member, size_t begin) {
    const size_t count = starts[member + 1] - starts[member];
    return begin < count ? std::min(step, count - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int from, int to, size_t count) {
    return ranks.Slot(chunk, from) + to * room +
           Communicator::SlotOffset(chunk, count * size, room);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * step;
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, longest * size * n,
                  std::min(step, longest - begin) * size * n, me == 0);
      SlotStores::Timer timer(stores);
      for (int i = 1; i < n; ++i) {
        const int member = (me + i) % n;
        const size_t count = length(member, begin);
        ranks.kernels().copy(slot(chunk, me, member, count),
                             input + (starts[member] + begin) * size,
                             count * size, stores.stream());
      }
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == 0) continue;
    if (turn == 1) ranks.VerifyMatch(request);
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * step;
    ranks.AwaitAll(Communicator::kFilled, chunk, request);
    job->count = length(me, begin);
    for (int member = 0; member < n; ++member) {
      sources[member] = slot(chunk, member, me, job->count);
    }
    sources[me] = input + (starts[me] + begin) * size;
    job->out = output + begin * size;
    {
      SlotStores::Timer timer(stores);
      kernel(*job);
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace

void ReduceScatter(Communicator& ranks, const Request& request) {
  const std::vector<size_t> starts = StartsOf(ranks, request);
  const DType dtype = request.tensors[0].dtype;
  const ReduceKernel kernel = KernelOf(ranks, request, dtype);
  ReduceJob job = {};
  job.nsources = ranks.size();
  job.own = ranks.me();
  job.divisor = request.op == Op::kAverage ? ranks.size() : 1;
  if (starts.back() * SizeOf(dtype) <= Communicator::kPostBytes) {
    ReduceScatterByPosts(ranks, request, starts, kernel, &job);
  } else {
    ReduceScatterBySlots(ranks, request, starts, kernel, &job);
  }
}

}  // namespace collective
